"""Transformers' handlers of OpenAI's APIs, with a check of options before them, and completed answers after them.

Transformers drops options that it does not know, samples only where the model's generation config says so, leaves a
stop string in its answer, and counts no tokens that were known.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serve import Serve
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, get_response_template

from .disconnects import CURRENT
from .options import check_options, options_of


Json: TypeAlias = dict[str, Any]
# Length of an answer if the request does not say, as in Transformers
_NUM_NEW_TOKENS = 1024


class _CheckingHandler(BaseHandler):
    """
    Handler of an `api` for the one model of a server.

    Args:
        serve (`Serve`): Transformers' server.
        name (`str`): name of the model.
        model, tokenizer: the model.
        is_batched (`bool`): True if requests are answered together.
    """

    api: str

    def __init__(
        self,
        serve: Serve,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        is_batched: bool,
    ) -> None:
        super().__init__(serve._model_manager, serve._generation_state)
        self._name = name
        template = get_response_template(tokenizer, model)
        self._takes_tools = template is not None and "tools" in str(tokenizer.chat_template)
        self._options = options_of(self.api, name, takes_tools=self._takes_tools, is_batched=is_batched)

    async def answer(self, request: Request, body: Json) -> JSONResponse | StreamingResponse:
        """Answer a request of the route."""
        return await self.handle_request(body, request.state.request_id)

    async def handle_request(self, body: Json, request_id: str) -> JSONResponse | StreamingResponse:
        """Answer a request; raise a `ValueError` for one that the server cannot answer as it asks."""
        body = {name: value for name, value in body.items() if value not in (None, [], {})}
        check_options(self.api, self._options, body, takes_tools=self._takes_tools)
        CURRENT.get().seed = body.pop("seed", None)
        try:
            answer = await super().handle_request({"stream": False, **body}, request_id)  # type: ignore[misc]
        except TypeError as error:
            if "generation_config" not in body:
                raise
            raise ValueError(f"`generation_config` has a value of a wrong type: {error}") from error
        stops = body.get("stop", [])
        completion = _Completion([stops] if isinstance(stops, str) else stops, body.get("stream_options", {}))
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = completion.of_stream(answer.body_iterator)  # type: ignore[arg-type]
            return answer
        return JSONResponse(completion.of_answer(json.loads(answer.body)))

    def _resolve_model(self, body: Json) -> tuple[str, PreTrainedModel, Any]:
        """Return the model with the name that requests give it, which answers carry, without a revision."""
        _, model, processor = super()._resolve_model(body)
        return self._name, model, processor

    def _validate_request(self, body: Json) -> None:
        """Do nothing: `check_options` has checked more than Transformers would."""

    def _build_generation_config(
        self, body: Json, model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        """Build the config of one answer, which is sampled if its request asks for it."""
        generation: GenerationConfig = super()._build_generation_config(body, model_generation_config, use_cb)
        if body.get("temperature", 0) > 0 or ("temperature" not in body and body.get("top_p", 1) < 1):
            generation.do_sample = True
        # The cache is the server's choice
        generation.cache_implementation = None
        generation.max_new_tokens = generation.max_new_tokens or _NUM_NEW_TOKENS
        if "logit_bias" in body:
            generation.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        return generation


class ChatHandler(_CheckingHandler, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""

    api = "chat/completions"


class TextHandler(_CheckingHandler, CompletionHandler):
    """Answers `/v1/completions`."""

    api = "completions"


class ResponsesHandler(_CheckingHandler, ResponseHandler):
    """Answers `/v1/responses`."""

    api = "responses"


Handler: TypeAlias = ChatHandler | TextHandler | ResponsesHandler
HANDLERS = ChatHandler, TextHandler, ResponsesHandler


class _Completion:
    """Completion of one answer: ends its text before a stop string, and adds the number of known tokens."""

    def __init__(self, stops: list[str], stream_options: dict[str, bool]) -> None:
        self._stops = stops
        self._include_usage = stream_options.get("include_usage")
        self._request = CURRENT.get()
        # End of the streamed text that may begin a stop string
        self._held = ""
        self._is_cut = False

    def of_answer(self, answer: Json) -> Json:
        """Complete a whole answer."""
        for choice in answer.get("choices", []):
            self._cut(choice, choice.get("message"), is_last=True)
        self._add_known(answer.get("usage"))
        return answer

    async def of_stream(self, stream: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        """Complete a stream; its chunks may hold several events each."""
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                # Transformers writes errors by hand, and not always as JSON
                if chunk.startswith('data: {"error"'):
                    yield chunk
                    continue
                for event in filter(None, chunk.split("\n\n")):
                    for completed in self._of_event(json.loads(event.removeprefix("data: "))):
                        yield f"data: {json.dumps(completed)}\n\n"

    def _of_event(self, event: Json) -> Iterator[Json]:
        for choice in event.get("choices", []):
            self._cut(choice, choice.get("delta"), is_last="finish_reason" in choice)
        self._add_known(event.get("response", {}).get("usage"))
        usage = event.get("usage")
        self._add_known(usage)
        if usage is not None and self._include_usage is not None:
            # OpenAI sends usage as an event of its own, if it is asked for
            del event["usage"]
        yield event
        if usage is not None and self._include_usage:
            yield {**event, "choices": [], "usage": usage}

    def _cut(self, choice: Json, message: Json | None, *, is_last: bool) -> None:
        """End the text of a choice before a stop string; unless it `is_last`, hold back the beginning of one."""
        holder, key = (choice, "text") if message is None else (message, "content")
        text = self._held + (holder.get(key) or "")
        self._held = ""
        ends = [text.find(stop) for stop in self._stops if stop in text]
        if self._is_cut:
            text = ""
        elif ends:
            text = text[: min(ends)]
            self._is_cut = True
        elif not is_last:
            sizes = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
            end = len(text) - max(sizes, default=0)
            text, self._held = text[:end], text[end:]
        if text or holder.get(key):
            holder[key] = text
        if is_last and self._is_cut:
            choice["finish_reason"] = "stop"

    def _add_known(self, usage: Json | None) -> None:
        num_known = self._request.num_known
        if usage is not None and num_known is not None:
            name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
            usage[name] = {**usage.get(name, {}), "cached_tokens": num_known}
