"""Transformers' handlers of OpenAI's APIs, with options checked before and answers completed behind them.

Transformers drops options that it does not know, samples only where the model's generation config says so, leaves a
stop string in its answer, and counts no tokens that were known.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, get_response_template

from .options import check_options, options_of
from .requests import CURRENT


Json = dict[str, Any]
# Of an answer to a request that does not say: Transformers' own
_NUM_NEW_TOKENS = 1024


class _Checking(BaseHandler):  # type: ignore[misc]
    """Handles requests of an `api` to the one model of a server; `sampling` is that of all, if it batches them."""

    api: str

    def __init__(self, parts: Any, name: str, model: Any, tokenizer: Any, sampling: GenerationConfig | None) -> None:
        super().__init__(parts._model_manager, parts._generation_state)
        template = get_response_template(tokenizer, model)
        self._takes_tools = template is not None and "tools" in str(tokenizer.chat_template)
        self._options = options_of(self.api, name, takes_tools=self._takes_tools, sampling=sampling)

    async def answer(self, request: Request, body: Json) -> Any:
        """Answers what comes in at the route."""
        return await self.handle_request(body, request.state.request_id)

    async def handle_request(self, body: Json, request_id: str) -> JSONResponse | StreamingResponse:
        """Answers, or raises a `ValueError` for what the server cannot do."""
        body = {name: value for name, value in body.items() if value not in (None, [], {})}
        check_options(self.api, self._options, body, takes_tools=self._takes_tools)
        CURRENT.get().seed = body.pop("seed", None)
        answer = await super().handle_request({"stream": False, **body}, request_id)  # type: ignore[misc]
        stops = body.get("stop", [])
        completion = _Completion([stops] if isinstance(stops, str) else stops, body.get("stream_options", {}))
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = completion.of_stream(answer.body_iterator)
            return answer
        return JSONResponse(completion.of_answer(json.loads(answer.body)))

    def _validate_request(self, body: Json) -> None:
        """Leaves to `check_options` what Transformers would check."""

    def _build_generation_config(self, body: Json, *args: Any, **options: Any) -> GenerationConfig:
        """Samples where a request asks for it."""
        generation: GenerationConfig = super()._build_generation_config(body, *args, **options)
        if body.get("temperature", 0) > 0 or ("temperature" not in body and body.get("top_p", 1) < 1):
            generation.do_sample = True
        # The server has chosen a cache, whatever the model's generation config says
        generation.cache_implementation = None
        generation.max_new_tokens = generation.max_new_tokens or _NUM_NEW_TOKENS
        if "logit_bias" in body:
            generation.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        return generation


class ChatHandler(_Checking, ChatCompletionHandler):  # type: ignore[misc]
    """Answers `/v1/chat/completions`."""

    api = "chat/completions"


class TextHandler(_Checking, CompletionHandler):  # type: ignore[misc]
    """Answers `/v1/completions`."""

    api = "completions"


class ResponsesHandler(_Checking, ResponseHandler):  # type: ignore[misc]
    """Answers `/v1/responses`."""

    api = "responses"


HANDLERS = ChatHandler, TextHandler, ResponsesHandler


class _Completion:
    """Completes an answer, streamed or not: cuts it off before a stop string, and notes tokens that were known."""

    def __init__(self, stops: list[str], stream_options: Json) -> None:
        self._stops, self._usage = stops, stream_options.get("include_usage")
        self._request = CURRENT.get()
        # The end of a streamed text that may begin a stop string
        self._held, self._is_cut = "", False

    def of_answer(self, answer: Json) -> Json:
        """Completes a whole answer."""
        for choice in answer.get("choices", []):
            self._cut(choice, choice.get("message"), is_last=True)
        self._note_known(answer.get("usage"))
        return answer

    async def of_stream(self, stream: Any) -> AsyncIterator[str]:
        """Completes events, of which several may come at once."""
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
        self._note_known(event.get("response", {}).get("usage"))
        usage = event.get("usage")
        self._note_known(usage)
        if usage is not None and self._usage is not None:
            # OpenAI has it in an event of its own, if it is asked for
            del event["usage"]
        yield event
        if usage is not None and self._usage:
            yield {**event, "choices": [], "usage": usage}

    def _cut(self, choice: Json, message: Json | None, *, is_last: bool) -> None:
        """Takes a stop string, and all behind it, out of a text, of which more may come."""
        place, key = (choice, "text") if message is None else (message, "content")
        text = self._held + (place.get(key) or "")
        ends = [text.find(stop) for stop in self._stops if stop in text]
        if self._is_cut or ends:
            text, self._held = "" if self._is_cut else text[: min(ends)], ""
            self._is_cut = True
        elif not is_last:
            sizes = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
            kept = len(text) - max(sizes, default=0)
            text, self._held = text[:kept], text[kept:]
        if text or place.get(key):
            place[key] = text
        if is_last and self._is_cut:
            choice["finish_reason"] = "stop"

    def _note_known(self, usage: Json | None) -> None:
        num_known = self._request.num_known
        if usage is not None and num_known is not None:
            name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
            usage[name] = {**usage.get(name, {}), "cached_tokens": num_known}
