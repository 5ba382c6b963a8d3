"""Request managers: a cache per request or shared pages, counters and log lines.

A manager replaces Transformers' own and computes answers on another thread than the server's event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, CBStreamer, DirectStreamer, GenerateManager

from kvcache_plugins.custom_generate import attached
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.packed.cache import PackedCache
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import create_cache

from .conversations import Conversations
from .disconnects import CURRENT, Request, stop_if_disconnected
from .sampling import make_samplers, sampling_of


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import GenerationOutput
    from transformers.utils.chat_parsing import ResponseParser


LogLine = Callable[[str], None]
# Text or an error, as Transformers' handlers read them; `None` ends an answer
_Answers = asyncio.Queue[object]
_Inputs = dict[str, object]


class CachingManager(GenerateManager):
    """
    Manager that answers one request after the other, each with a cache of its own or that of its conversation.

    Raises a `ValueError` if the model cannot have the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: str,
        store: PromptStore | None,
        conversations: Conversations | None,
        log: LogLine,
    ) -> None:
        super().__init__()
        self._model = model
        self._cache = cache
        self._store = store
        self._conversations = conversations
        self._log = log
        self._limit = find_limit(model)
        self.counters = Counter[str]()
        # A cache that cannot be made is an error before the first request
        with attached(self._read(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), Request())):
            pass

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerFast,
        inputs: _Inputs,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: ResponseParser | None = None,
    ) -> tuple[_Answers, DirectStreamer]:
        """Start to answer, token by token."""
        inputs = self._admit(inputs, gen_config)
        return super().generate_streaming(self, processor, inputs, gen_config, request_id, response_parser)  # type: ignore[arg-type]

    async def generate_non_streaming(  # type: ignore[override]
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerFast,
        inputs: _Inputs,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, torch.Tensor]:
        """Answer at once. A disconnect ends the wait; the other thread sees it at its next layer."""
        inputs = self._admit(inputs, gen_config)
        return await asyncio.shield(super().generate_non_streaming(self, processor, inputs, gen_config, request_id))  # type: ignore[arg-type]

    def _admit(self, inputs: _Inputs, gen_config: GenerationConfig) -> _Inputs:
        """Bound the answer, and return the inputs of `generate`, among them the request."""
        input_ids = inputs["input_ids"]
        assert isinstance(input_ids, torch.Tensor)
        bound_answer(input_ids.shape[1], self._limit, gen_config)
        return {**inputs, "request": CURRENT.get()}

    def generate(
        self, input_ids: torch.Tensor, request: Request, streamer: DirectStreamer | None = None, **options: object
    ) -> torch.Tensor:
        """Generate `[1, prompt and answer]`: Transformers calls this as `model.generate`."""
        disconnected = request.disconnected
        try:
            with stop_if_disconnected(self._model, disconnected):
                return self._generate(input_ids, request, streamer, **options)
        except Exception as error:
            # Transformers' streamer raises as well if it is cancelled
            if disconnected.is_set():
                self.counters.update(requests=1, cancelled=1)
                self._log(f"{input_ids.shape[1]} tokens; the client has disconnected")
                return input_ids
            self.counters.update(requests=1, failed=streamer is not None)
            # Transformers puts the message into a stream between quotes
            raise (error if streamer is None else RuntimeError(json.dumps(str(error))[1:-1])) from None

    def stop(self) -> None:
        """Wait until the thread is idle."""
        self.submit(lambda: None).result()

    def _generate(
        self, input_ids: torch.Tensor, request: Request, streamer: DirectStreamer | None, **options: object
    ) -> torch.Tensor:
        num_tokens, started = input_ids.shape[1], time.perf_counter()
        cache = self._read(input_ids, request)
        ready = time.perf_counter()
        # Another request's seed must not decide on this answer
        if request.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.seed)
        held = None if streamer is None else _HeldStreamer(streamer)
        with attached(cache):
            try:
                output: torch.Tensor = self._model.generate(  # type: ignore[operator]
                    input_ids, streamer=held, **options, **as_argument(cache)
                )
            except Exception:
                if request.disconnected.is_set() and self._conversations is not None:
                    assert isinstance(cache, PackedCache)
                    self._conversations.keep_interrupted(input_ids, cache)
                raise
            num_bytes = cache.memory().total_bytes if hasattr(cache, "memory") else 0
        if self._conversations is not None:
            assert isinstance(cache, PackedCache)
            self._conversations.keep(output, cache)
        num_new, num_known = output.shape[1] - num_tokens, request.num_known or 0
        self.counters.update(requests=1, prompt_tokens=num_tokens)
        self.counters.update(known_tokens=num_known, generated_tokens=num_new)
        self.counters["cache_bytes"] = num_bytes
        self._log(
            f"{num_tokens} tokens, {num_known} of them known, ready in {ready - started:.2f} s; "
            f"{num_new} generated in {time.perf_counter() - ready:.2f} s; cache {num_bytes / 1e6:.1f} MB"
        )
        if self._store is not None:
            # A next turn begins with the answer, which is read in whole blocks as a prompt is, before other requests
            self.submit(self._read, output, Request())
        if streamer is not None:
            streamer.end()
        return output

    def _read(self, input_ids: torch.Tensor, request: Request) -> Cache:
        """
        Take the cache of the prompt's conversation, or make one and fill it with whole blocks of the prompt if there
        is a store, and count known tokens.
        """
        if self._store is None:
            found = None if self._conversations is None else self._conversations.take(input_ids)
            request.num_known = 0 if found is None else found.get_seq_length()
            return create_cache(self._cache, self._model) if found is None else found
        cache = self._store.cache_for(self._model, input_ids, self._cache)
        request.num_known = cache.get_seq_length()
        self._store.prefill(self._model, cache, input_ids)
        return cache


class _HeldStreamer:
    """Streamer that leaves the end of the stream to its owner, who counts the request first."""

    def __init__(self, streamer: DirectStreamer) -> None:
        self.put = streamer.put

    def end(self) -> None:
        """Do nothing."""


class BatchingManager(CBGenerateManager):
    """Manager that answers requests together by continuous batching; `sampling` has the model's other processors."""

    def __init__(
        self, model: PreTrainedModel, config: ContinuousBatchingConfig, sampling: GenerationConfig, log: LogLine
    ) -> None:
        super().__init__(cb_config=config)
        self._log = log
        self.counters = Counter[str]()
        # Samplers add noise to scores, and the batch takes the highest score
        highest = GenerationConfig(do_sample=False, max_new_tokens=sampling.max_new_tokens)
        highest.eos_token_id = sampling.eos_token_id
        batching: ContinuousBatchingManager = model.init_continuous_batching(  # type: ignore[operator]
            generation_config=highest, continuous_batching_config=config
        )
        batching.logit_processor = make_samplers(model, sampling)
        # Make the pages now: on the batching thread an error would end the first request
        try:
            batching.warmup()
        except MemoryError as error:
            raise ValueError(
                f"`--num-blocks` or `--max-batch-tokens` is too large for this machine: {error}"
            ) from error
        assert batching.batch_processor is not None
        self._pages: PagedAttentionCache = batching.batch_processor.cache
        self._router = batching.output_router
        self._register = batching.register_result_handler
        self._cancel = batching.cancel_request
        self._add = batching.add_request
        batching.add_request = self._add_sampled  # type: ignore[method-assign, assignment]
        batching.register_result_handler = self._register_counted  # type: ignore[method-assign]
        batching.cancel_request = self._cancel_counted  # type: ignore[method-assign]
        self._cb = batching
        # A request without room in all pages together would end the batch, and all other requests with it
        room = _find_room(self._pages)
        self._limit = min(find_limit(model) or room, room)
        log(
            f"pages take {self._pages.cache_tensor.nbytes / 1e6:.0f} MB, for about {self._pages.max_tokens_read} "
            "tokens of all requests together (`--num-blocks` bounds them)"
        )
        batching.start()

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerFast,
        inputs: _Inputs,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: ResponseParser | None = None,
    ) -> tuple[_Answers, CBStreamer]:
        """Start to answer, token by token."""
        self._admit(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerFast,
        inputs: _Inputs,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, list[int]]:
        """Answer at once, unless the client disconnects."""
        self._admit(inputs, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            self._cancel_counted(request_id)
            raise

    def free_share(self) -> float:
        """Return the share of the pages that holds neither tokens of requests nor prefixes kept for later ones."""
        return float(self._pages.compute_free_capacity())

    def _admit(self, inputs: _Inputs, gen_config: GenerationConfig) -> None:
        """Bound the answer by the room that its prompt leaves, and note how it is sampled."""
        input_ids = inputs["input_ids"]
        assert isinstance(input_ids, list)
        bound_answer(len(input_ids), self._limit, gen_config)
        request = CURRENT.get()
        request.sampling = sampling_of(gen_config, request.seed)

    def _add_sampled(self, input_ids: list[int], **options: Any) -> str | None:
        """Add a request of the event loop with its own sampling."""
        return self._add(input_ids, **{**options, **CURRENT.get().sampling})

    def _register_counted(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        def count(output: GenerationOutput) -> None:
            if output.is_finished() or output.error is not None:
                num_tokens, num_new = len(output.prompt_ids), len(output.generated_tokens)
                self.counters.update(requests=1, prompt_tokens=num_tokens, generated_tokens=num_new)
                self._log(f"{num_tokens} tokens, {num_new} generated{f': {output.error}' if output.error else ''}")
            callback(output)

        self._register(request_id, count)

    def _cancel_counted(self, request_id: str) -> None:
        self.counters.update(requests=1, cancelled=1)
        self._log("the client has disconnected")
        self._cancel(request_id)
        with self._router._lock:
            self._router.result_handlers.pop(request_id, None)


def find_limit(model: PreTrainedModel) -> int | None:
    """Find how many tokens a model takes, prompt and answer together; `None` if its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _find_room(pages: PagedAttentionCache) -> int:
    """Find how many tokens of one request fit into all pages, which have to be empty."""
    allocators = pages.cache_allocators.values()

    def num_sectors(num_tokens: int) -> int:
        return sum(allocator.needs_new_sectors("", 0, num_tokens) for allocator in allocators)

    return bisect_right(range(pages.max_tokens_read + 1), pages.pool.num_free_sectors, key=num_sectors) - 1


def bound_answer(num_tokens: int, limit: int | None, generation: GenerationConfig) -> None:
    """Bound an answer by the tokens that a prompt leaves of a limit; raise a `ValueError` if there are none."""
    if not num_tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if limit is None:
        return
    if num_tokens >= limit:
        raise ValueError(f"the prompt has {num_tokens} tokens, but this server takes at most {limit - 1}")
    generation.max_new_tokens = min(generation.max_new_tokens, limit - num_tokens)
