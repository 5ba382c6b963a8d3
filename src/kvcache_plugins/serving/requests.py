"""Requests to a server: a cache for each or pages for all, an end to those whose client has gone, counters and lines.

A request comes in on the server's event loop; a manager, which stands in the place of Transformers' own, answers it on
another thread. Both know its `Request`: `Departures` notes on the event loop that its client has gone, and the
model's layers see it on the other thread, also in the middle of a prompt.
"""

import asyncio
import json
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager
from transformers.modeling_layers import GradientCheckpointingLayer

from kvcache_plugins.custom_generate import attached
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import create_cache


Say = Callable[[str], None]


@dataclass(eq=False)
class Request:
    """
    Holds what is known of a request on all threads: whether its client has gone, the seed that it asks for, and how
    many tokens of its prompt were known, once that is.
    """

    gone: threading.Event = field(default_factory=threading.Event)
    seed: int | None = None
    num_known: int | None = None


# The request that the event loop is at
CURRENT: ContextVar[Request] = ContextVar("CURRENT")


class ClientGone(Exception):
    """Ends a forward pass whose result nobody waits for."""


class Departures:
    """Cancels what a client has asked for once its connection is closed: middleware of ASGI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, or as much of it as its client waits for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, is_answered = Request(), False
        gone = request.gone
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def send_on(message: Any) -> None:
            nonlocal is_answered
            is_answered = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def listen() -> None:
            while not gone.is_set():
                messages.put_nowait(message := await receive())
                if message["type"] == "http.disconnect":
                    if not is_answered:
                        gone.set()
                        answer.cancel()
                    return

        CURRENT.set(request)
        answer = asyncio.ensure_future(self._app(scope, messages.get, send_on))
        listener = asyncio.ensure_future(listen())
        try:
            await answer
        except asyncio.CancelledError:
            # Otherwise it is the server that stops
            if not gone.is_set():
                gone.set()
                raise
        finally:
            listener.cancel()


class CachingManager(GenerateManager):  # type: ignore[misc]
    """
    Answers one request after the other, each with a cache of its own; a `ValueError` if there is none of this model.
    """

    def __init__(self, model: PreTrainedModel, cache: str, store: PromptStore | None, say: Say) -> None:
        super().__init__()
        self._model, self._cache, self._store, self._say = model, cache, store, say
        self._limit = find_limit(model)
        self.counters = Counter[str]()
        # A cache that cannot be had is known before the first request
        with attached(self._read(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), Request())):
            pass

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, *args: Any, **options: Any
    ) -> Any:
        """Starts to answer, token by token."""
        own: Any = self
        fit_answer(inputs["input_ids"].shape[1], self._limit, gen_config)
        inputs = {**inputs, "request": CURRENT.get()}
        return super().generate_streaming(own, processor, inputs, gen_config, *args, **options)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, *args: Any, **options: Any
    ) -> Any:
        """Answers at once. A client that goes ends the wait; the thread ends by itself."""
        own: Any = self
        fit_answer(inputs["input_ids"].shape[1], self._limit, gen_config)
        inputs = {**inputs, "request": CURRENT.get()}
        answer = super().generate_non_streaming(own, processor, inputs, gen_config, *args, **options)
        return await asyncio.shield(answer)

    def generate(self, input_ids: torch.Tensor, request: Request, streamer: Any = None, **options: Any) -> Any:
        """Generates in the model's place, `[1, prompt and answer]`, as Transformers calls `model.generate`."""
        gone = request.gone
        try:
            with _ending(self._model, gone):
                return self._generate(input_ids, request, streamer, **options)
        except Exception as error:
            # Transformers' streamer ends by an error what nobody waits for
            self.counters.update(
                requests=1, cancelled=gone.is_set(), failed=streamer is not None and not gone.is_set()
            )
            if gone.is_set():
                self._say(f"{input_ids.shape[1]} tokens; the client has gone")
                return input_ids
            # Transformers puts what a streamer is told between quotes
            raise (error if streamer is None else RuntimeError(json.dumps(str(error))[1:-1])) from None

    def stop(self) -> None:
        """Waits until the thread has nothing to do."""
        self.submit(lambda: None).result()

    def _generate(self, input_ids: torch.Tensor, request: Request, streamer: Any, **options: Any) -> torch.Tensor:
        num_tokens, started = input_ids.shape[1], time.perf_counter()
        cache = self._read(input_ids, request)
        options |= {"streamer": streamer, **as_argument(cache)}
        ready = time.perf_counter()
        if request.seed is not None:
            torch.manual_seed(request.seed)
        with attached(cache):
            output: torch.Tensor = self._model.generate(input_ids, **options)  # type: ignore[operator]
            num_bytes = cache.memory().total_bytes if hasattr(cache, "memory") else 0
        num_new, num_known = output.shape[1] - num_tokens, request.num_known or 0
        self.counters.update(requests=1, prompt_tokens=num_tokens)
        self.counters.update(known_tokens=num_known, generated_tokens=num_new)
        self.counters["cache_bytes"] = num_bytes
        self._say(
            f"{num_tokens} tokens, {num_known} of them known, ready in {ready - started:.2f} s; "
            f"{num_new} generated in {time.perf_counter() - ready:.2f} s; cache {num_bytes / 1e6:.1f} MB"
        )
        if self._store is not None:
            # For a next turn, before any other request: the answer is read as a prompt is, in whole blocks
            self.submit(self._read, output, Request())
        return output

    def _read(self, input_ids: torch.Tensor, request: Request) -> Cache:
        """Makes a cache, with all blocks of a prompt that a store keeps, and notes how many tokens were known."""
        if self._store is None:
            request.num_known = 0
            return create_cache(self._cache, self._model)
        cache = self._store.cache_for(self._model, input_ids, self._cache)
        request.num_known = cache.get_seq_length()
        self._store.prefill(self._model, cache, input_ids)
        return cache


class BatchingManager(CBGenerateManager):  # type: ignore[misc]
    """Answers requests together, by Transformers' continuous batching; `sampling` is that of all of them."""

    def __init__(
        self, model: PreTrainedModel, config: ContinuousBatchingConfig, sampling: GenerationConfig, say: Say
    ) -> None:
        super().__init__(cb_config=config)
        self._say, self.counters = say, Counter[str]()
        made: Any = model.init_continuous_batching(  # type: ignore[operator]
            generation_config=sampling, continuous_batching_config=config
        )
        # Makes the pages: on the thread that is started, what is wrong with them would be the first request's matter
        try:
            made.warmup()
        except MemoryError as error:
            raise ValueError(
                f"`--num-blocks` or `--max-batch-tokens` is too large for this machine: {error}"
            ) from error
        self._register, self._cancel = made.register_result_handler, made.cancel_request
        made.register_result_handler, made.cancel_request = self._register_counted, self._cancel_counted
        self._cb = self._running = made
        # A request that all pages together have no room for would end the batch, and all other requests with it
        cache = made.batch_processor.cache
        room = _find_room(cache)
        self._limit = min(find_limit(model) or room, room)
        say(
            f"pages take {cache.cache_tensor.nbytes / 1e6:.0f} MB, for about {cache.max_tokens_read} tokens of all "
            "requests together (`--num-blocks` bounds them)"
        )
        made.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, *args: Any, **options: Any
    ) -> Any:
        """Starts to answer, token by token."""
        fit_answer(len(inputs["input_ids"]), self._limit, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **options)

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Answers at once, unless the client goes."""
        fit_answer(len(inputs["input_ids"]), self._limit, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            self._cancel_counted(request_id)
            raise

    def free_share(self) -> float:
        """Tells how much of the pages neither requests hold nor beginnings that are kept for others."""
        return float(self._running.batch_processor.cache.compute_free_capacity())

    def _register_counted(self, request_id: str, callback: Callable[[Any], None]) -> None:
        def count(output: Any) -> None:
            if output.is_finished() or output.error is not None:
                num_tokens, num_new = len(output.prompt_ids), len(output.generated_tokens)
                self.counters.update(requests=1, prompt_tokens=num_tokens, generated_tokens=num_new)
                self._say(f"{num_tokens} tokens, {num_new} generated{f': {output.error}' if output.error else ''}")
            callback(output)

        self._register(request_id, count)

    def _cancel_counted(self, request_id: str) -> None:
        self.counters.update(requests=1, cancelled=1)
        self._say("the client has gone")
        self._cancel(request_id)
        with self._running.output_router._lock:
            self._running.output_router.result_handlers.pop(request_id, None)


def find_limit(model: PreTrainedModel) -> int | None:
    """Finds how many tokens a model takes, prompt and answer together; `None` if its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _find_room(cache: Any) -> int:
    """Finds how many tokens of one request the pages have room for, while nothing is in them."""
    allocators = cache.cache_allocators.values()

    def num_sectors(num_tokens: int) -> int:
        return sum(each.needs_new_sectors("", 0, num_tokens) for each in allocators)

    return bisect_right(range(cache.max_tokens_read + 1), cache.pool.num_free_sectors, key=num_sectors) - 1


def fit_answer(num_tokens: int, limit: int | None, generation: GenerationConfig) -> None:
    """Bounds an answer by the tokens that a prompt leaves of a limit; a `ValueError` if those are none."""
    if not num_tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if limit is None:
        return
    if num_tokens >= limit:
        raise ValueError(f"the prompt has {num_tokens} tokens, but this server takes at most {limit - 1}")
    generation.max_new_tokens = min(generation.max_new_tokens, limit - num_tokens)


@contextmanager
def _ending(model: PreTrainedModel, gone: threading.Event) -> Iterator[None]:
    """Ends passes of a model at their next layer by a `ClientGone`, once a client has gone."""

    def check(*args: Any) -> None:
        if gone.is_set():
            raise ClientGone

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [module.register_forward_pre_hook(check) for module in (model, *layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
