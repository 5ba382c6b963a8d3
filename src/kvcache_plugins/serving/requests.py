"""Requests to a server: a cache for each, an end to those whose client has gone, counters and lines of what was done.

A request comes in on the server's event loop, and is answered on Transformers' thread for inference. What both know is
an event, `gone`, which the first sets and the second looks at.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import OptionValue, create_cache


try:
    from transformers.cli.serve import Serve
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager
except ImportError as error:
    raise ImportError("`kvcache-plugins serve` needs the server of Transformers 5.23 or newer") from error

__all__ = [
    "COUNTERS",
    "CBGenerateManager",
    "CachedModel",
    "CachingManager",
    "Departures",
    "Say",
    "Serve",
]

Say = Callable[[str], None]
COUNTERS = "requests", "cancelled", "failed", "prompt_tokens", "known_tokens", "generated_tokens", "cache_bytes"
# Of the request that the event loop is at
_GONE: ContextVar[threading.Event] = ContextVar("_GONE")


class Departures:
    """
    Cancels what a client has asked for once its connection is closed: middleware of ASGI.

    Args:
        app: what answers.
    """

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
            while True:
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


class CachedModel:
    """
    Generates with a cache of its own for each request, in the model's place.

    Args:
        model (`PreTrainedModel`): the model.
        cache (`str`), options (`Mapping`): a name of `list_caches()` and options of that cache.
        store (`PromptStore`, *optional*): where beginnings of prompts come from, and prompts and answers are kept.
        say (`Callable`): takes a line for each request.

    Raises:
        ValueError: if there is no such cache of this model, or none that can be stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: str,
        options: Mapping[str, OptionValue],
        store: PromptStore | None,
        say: Say,
    ) -> None:
        self._model, self._cache, self._options, self._store, self._say = model, cache, options, store, say
        self.counters = Counter[str]()
        # Has the thread for inference call something after this request
        self.later: Callable[..., object]
        with _listening(self._read(torch.zeros(1, 1, dtype=torch.int64), threading.Event())[0]):
            # A cache that cannot be had is known before the first request
            pass

    def generate(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        gone: threading.Event,
        streamer: Any = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """
        Generates as `model.generate` does.

        Args:
            input_ids (`torch.Tensor` of shape `[1, tokens]`): the prompt.
            generation_config (`GenerationConfig`): of the request, without a cache.
            gone (`threading.Event`): set once nobody waits for the answer: it ends then.
            streamer (*optional*): Transformers' own.
            arguments: others of `model.generate`.

        Raises:
            ValueError: if the request has no tokens, or asks for a cache.
        """
        num_tokens, started = input_ids.shape[1], time.perf_counter()
        if generation_config.cache_implementation is not None or generation_config.use_cache is False:
            raise ValueError("`generation_config` must not choose a cache: the server has chosen one")
        if not num_tokens:
            raise ValueError("the prompt is empty: give at least one token")
        cache, num_known = self._read(input_ids, gone)
        ready = time.perf_counter() - started
        output = input_ids
        with _listening(cache):
            if not gone.is_set():
                arguments |= as_argument(cache)
                output = self._generate(input_ids, generation_config, gone, streamer, arguments)
            num_bytes = cache.memory().total_bytes if hasattr(cache, "memory") else 0
        num_new = output.shape[1] - num_tokens
        self.counters.update(requests=1, prompt_tokens=num_tokens, known_tokens=num_known, generated_tokens=num_new)
        self.counters.update(cancelled=gone.is_set())
        self.counters["cache_bytes"] = num_bytes
        self._say(
            f"{num_tokens} tokens, {num_known} of them known, ready in {ready:.2f} s; "
            f"{num_new} generated in {time.perf_counter() - started - ready:.2f} s; cache {num_bytes / 1e6:.1f} MB"
            f"{'; the client has gone' if gone.is_set() else ''}"
        )
        if self._store is not None and num_new and not gone.is_set():
            self.later(self._keep, output)
        return output

    def _generate(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        gone: threading.Event,
        streamer: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Has the model generate, until nobody waits for it."""
        ending: Any = StoppingCriteriaList([lambda *_, **__: gone.is_set()])
        try:
            return self._model.generate(  # type: ignore[no-any-return, operator]
                input_ids,
                generation_config=generation_config,
                stopping_criteria=ending,
                streamer=streamer,
                **arguments,
            )
        except Exception as error:
            # Transformers' streamer ends a request so
            if gone.is_set():
                return input_ids
            if streamer is None:
                raise
            # Transformers puts it between quotes
            self.counters["failed"] += 1
            raise RuntimeError(json.dumps(str(error))[1:-1]) from error

    def _read(self, input_ids: torch.Tensor, gone: threading.Event) -> tuple[Cache, int]:
        """Makes a cache, with all blocks of a prompt that a store keeps, and tells how many tokens were known."""
        if self._store is None:
            return create_cache(self._cache, self._model, **self._options), 0
        cache = self._store.cache_for(self._model, input_ids, self._cache, **self._options)
        num_known, length = cache.get_seq_length(), cache.record.length
        for stop in range(num_known + length, input_ids.shape[1], length):
            if not gone.is_set():
                self._store.prefill(self._model, cache, input_ids[:, : stop + 1])
        return cache, num_known

    def _keep(self, output: torch.Tensor) -> None:
        """Keeps a prompt and its answer, for a next turn: the answer is read as a prompt is, in whole blocks."""
        self._read(output[:1], threading.Event())


class CachingManager(GenerateManager):  # type: ignore[misc]
    """
    Hands requests to a `CachedModel`, on Transformers' thread for inference.

    Args:
        cached (`CachedModel`): stands in the place of the model.
    """

    def __init__(self, cached: CachedModel) -> None:
        super().__init__()
        self._cached, self.counters = cached, cached.counters
        cached.later = self.submit

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Starts to answer, token by token."""
        return super().generate_streaming(self._cached, processor, _with_event(inputs), *args, **options)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Answers at once."""
        work = super().generate_non_streaming(self._cached, processor, _with_event(inputs), *args, **options)
        # A client that goes ends the wait; the thread ends by itself
        return await asyncio.shield(work)

    def stop(self) -> None:
        """Waits until the thread has nothing to do."""
        self.submit(lambda: None).result()


def _listening(cache: Cache) -> AbstractContextManager[object]:
    """Has a cache that listens to its model do so until a request ends."""
    return cache if isinstance(cache, AbstractContextManager) else nullcontext()


def _with_event(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inputs, "gone": _GONE.get()}
