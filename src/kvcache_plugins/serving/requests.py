"""Requests to a server: a cache for each or pages for all, an end to those whose client has gone, counters and lines.

A request comes in on the server's event loop, and is answered on another thread. `Departures` tells the one that a
client has gone, and managers, which stand in the place of Transformers' own, the other.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

from kvcache_plugins.custom_generate import listening
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import create_cache


Say = Callable[[str], None]
# What a batch has one of, made when it begins; the last five are of no account where nothing is sampled
_SHARED = "do_sample", "repetition_penalty", "sequence_bias", "stop_strings", "num_return_sequences"
_SAMPLING = "temperature", "top_k", "top_p", "min_p", "typical_p"
# Of the request that the event loop is at: set once nobody waits for its answer
_GONE: ContextVar[threading.Event] = ContextVar("_GONE")


class Departures:
    """Cancels what a client has asked for once its connection is closed: middleware of ASGI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, or as much of it as its client waits for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone, is_answered = threading.Event(), False
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

        _GONE.set(gone)
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
        self.counters = Counter[str]()
        # A cache that cannot be had is known before the first request
        with listening(self._read(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), threading.Event())[0]):
            pass

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Starts to answer, token by token."""
        own: Any = self
        return super().generate_streaming(own, processor, {**inputs, "gone": _GONE.get()}, *args, **options)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Answers at once. A client that goes ends the wait; the thread ends by itself."""
        own: Any = self
        inputs = {**inputs, "gone": _GONE.get()}
        return await asyncio.shield(super().generate_non_streaming(own, processor, inputs, *args, **options))

    def generate(self, input_ids: torch.Tensor, gone: threading.Event, streamer: Any = None, **options: Any) -> Any:
        """Generates in the model's place, `[1, prompt and answer]`, as Transformers calls `model.generate`."""
        try:
            return self._generate(input_ids, gone, streamer, **options)
        except Exception as error:
            # Transformers' streamer ends by an error what nobody waits for
            self.counters.update(
                requests=1, cancelled=gone.is_set(), failed=streamer is not None and not gone.is_set()
            )
            if gone.is_set():
                return input_ids
            # Transformers puts what a streamer is told between quotes
            raise (error if streamer is None else RuntimeError(json.dumps(str(error))[1:-1])) from None

    def stop(self) -> None:
        """Waits until the thread has nothing to do."""
        self.submit(lambda: None).result()

    def _generate(
        self,
        input_ids: torch.Tensor,
        gone: threading.Event,
        streamer: Any,
        generation_config: GenerationConfig,
        **options: Any,
    ) -> torch.Tensor:
        num_tokens, started = input_ids.shape[1], time.perf_counter()
        if generation_config.cache_implementation is not None or generation_config.use_cache is False:
            raise ValueError("`generation_config` must not choose a cache: the server has chosen one")
        if not num_tokens:
            raise ValueError("the prompt is empty: give at least one token")
        cache, num_known = self._read(input_ids, gone)
        options |= {"generation_config": generation_config, "streamer": streamer, **as_argument(cache)}
        options["stopping_criteria"] = StoppingCriteriaList([lambda *_, **__: gone.is_set()])  # type: ignore[list-item]
        ready, output = time.perf_counter(), input_ids
        with listening(cache):
            if not gone.is_set():
                output = self._model.generate(input_ids, **options)  # type: ignore[operator]
            num_bytes = cache.memory().total_bytes if hasattr(cache, "memory") else 0
        num_new, is_cancelled = output.shape[1] - num_tokens, gone.is_set()
        self.counters.update(requests=1, cancelled=int(is_cancelled), prompt_tokens=num_tokens)
        self.counters.update(known_tokens=num_known, generated_tokens=num_new)
        self.counters["cache_bytes"] = num_bytes
        self._say(
            f"{num_tokens} tokens, {num_known} of them known, ready in {ready - started:.2f} s; "
            f"{num_new} generated in {time.perf_counter() - ready:.2f} s; cache {num_bytes / 1e6:.1f} MB"
            f"{'; the client has gone' if is_cancelled else ''}"
        )
        if self._store is not None and not is_cancelled:
            # For a next turn, before any other request: the answer is read as a prompt is, in whole blocks
            self.submit(self._read, output, threading.Event())
        return output

    def _read(self, input_ids: torch.Tensor, gone: threading.Event) -> tuple[Cache, int]:
        """Makes a cache, with all blocks of a prompt that a store keeps, and tells how many tokens were known."""
        if self._store is None:
            return create_cache(self._cache, self._model), 0
        cache = self._store.cache_for(self._model, input_ids, self._cache)
        num_known, length = cache.get_seq_length(), cache.record.length
        for stop in range(num_known + length, input_ids.shape[1], length):
            if not gone.is_set():
                self._store.prefill(self._model, cache, input_ids[:, : stop + 1])
        return cache, num_known


class BatchingManager(CBGenerateManager):  # type: ignore[misc]
    """Answers requests together, by Transformers' continuous batching; `sampling` is that of all of them."""

    def __init__(
        self, model: PreTrainedModel, config: ContinuousBatchingConfig, sampling: GenerationConfig, say: Say
    ) -> None:
        super().__init__(cb_config=config)
        self._sampling, self._say, self.counters = sampling, say, Counter[str]()
        made: Any = model.init_continuous_batching(  # type: ignore[operator]
            generation_config=sampling, continuous_batching_config=config
        )
        # Makes the pages: on the thread that is started, what is wrong with them would be the first request's matter
        made.warmup()
        self._register, self._cancel = made.register_result_handler, made.cancel_request
        made.register_result_handler, made.cancel_request = self._register_counted, self._cancel_counted
        self._cb = self._running = made
        made.start()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Refuses a request whose tokens are to be chosen in another way than the batch's."""
        for name in _SHARED if not (self._sampling.do_sample or gen_config.do_sample) else (*_SHARED, *_SAMPLING):
            own, wanted = getattr(self._sampling, name), getattr(gen_config, name)
            if (own or None) != (wanted or None):
                raise ValueError(
                    f"`{name}` is {wanted}, but requests of a batch are sampled alike, here with {own}: leave it out, "
                    "start the server with `--temperature`, or without `--continuous-batching`"
                )

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Answers at once, unless the client goes."""
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
