"""A context in which Transformers' continuous batching keeps its paged cache as coded rows."""

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.formats.parts import PagedRowPart, Part
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.ops import decode_tiles
from kvcache_plugins.layers.lazy_kv import make_lazy_kv
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument, find_cache
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.registry import create_cache
from kvcache_plugins.user_warnings import warn_user

from .pages import (
    FULL,
    CodedAllocator,
    ContinuousMixin,
    FullAttentionCacheAllocator,
    Recipe,
    Requests,
    find_head_dim,
    paged_cache,
)


# What `PagedAttentionCache` calls: with other arguments it would not be ours that it fills
_ALLOCATOR_ARGUMENTS = set(inspect.signature(CodedAllocator.__init__).parameters) - {"self", "recipe"}
_UPDATE_ARGUMENTS = {"key_states", "value_states", "layer_idx", "kwargs"}
_RELEASES = "Transformers 5.23 and 5.24"
_DENSE_UPDATE = paged_cache.PagedAttentionCache.update
_LOCK = threading.RLock()
_DENSE_SIZING = paged_cache.PagedAttentionMemoryHandler
_GENERATE_BATCH = ContinuousMixin.generate_batch
# The contexts that are open, of a model the innermost last, by the identity of its config
_OPEN: dict[int, list["CompressedBatching"]] = {}


class CompressedBatching:
    """Counts what continuous batching of a model holds and has done in `compressed_batching`; a recipe codes pages."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        names = "tokens_coded", "attend_calls", "fused_calls", "kernel_fallbacks", "dense_reads"
        self.counters = dict.fromkeys(names, 0)
        self._allocators: list[CodedAllocator] = []
        # Requests of the pass that is under way, by the tensor that Transformers makes for it
        self._pass: tuple[torch.Tensor, list[Requests]] | None = None
        self._num_checked = 0

    def stats(self) -> dict[str, int]:
        """Returns counters since the context was opened, added up over layers."""
        return dict(self.counters)

    def page_bytes(self) -> tuple[int, int]:
        """Returns bytes of a block of the newest cache, and of a dense one; a `ValueError` without a cache."""
        if not self._allocators:
            raise ValueError("no cache has been made in this context yet: it is when a batch begins")
        newest = self._allocators[-1]
        dense = newest.get_bytes_per_page(
            newest.num_key_value_heads, newest.head_dim, newest.cache_dtype, newest.tokens_per_page
        )
        return newest.bytes_per_block, dense * newest.pages_per_block

    def allocator(self, **options: Any) -> CodedAllocator:
        """Makes an allocator out of what Transformers gives one."""
        made = CodedAllocator(self.recipe, **options)
        made.batching = self
        self._allocators.append(made)
        return made

    def update(
        self,
        allocator: CodedAllocator,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens and returns all as `PagedAttentionCache.update` does, lazily where there is a past."""
        lengths, starts = kwargs["cu_seq_lens_k"][allocator.layer_type], kwargs["cu_seq_lens_q"]
        read, write = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
        if self._pass is None or self._pass[0] is not starts:
            self._pass = starts, allocator.requests(starts.tolist(), lengths.tolist(), write)
        requests = self._pass[1]
        kwargs["cu_seq_lens_k"] = lengths.to(torch.int32)
        kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
        exact = [allocator.exact(layer_idx, each) for each in requests]
        for each in requests:
            allocator.write(layer_idx, each, *own_states(each, key_states, value_states))
            self.counters["tokens_coded"] += each.tokens.numel()
        if not read.numel():
            return key_states, value_states
        states = PagedStates(self, allocator, layer_idx, requests, exact, (key_states, value_states))
        sizes = states.states_shape("keys"), states.states_shape("values")
        return make_lazy_kv(states, *sizes, states.lazy_length(), key_states.dtype, key_states.device)  # type: ignore[arg-type]

    def check_pass(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Raises a `RuntimeError` after a pass of a batch, by the model's forward hook, if no tokens were coded."""
        cache = find_cache(kwargs)
        if not isinstance(cache, paged_cache.PagedAttentionCache):
            return
        coded = [each for each in cache.cache_allocators.values() if isinstance(each, CodedAllocator)]
        before, self._num_checked = self._num_checked, self.counters["tokens_coded"]
        if not coded or (coded[0].batching is self and self._num_checked == before):
            raise RuntimeError(
                "a batch ran from a dense cache in `compressed_batching`: its manager was made before, or "
                f"Transformers {transformers.__version__} has another paged cache than {_RELEASES}"
            )


def own_states(requests: Requests, *states: torch.Tensor) -> list[torch.Tensor]:
    """Takes the new tokens `[B, H, Q, D]` of requests out of those `[1, H, tokens, D]` of a pass."""
    return [each[0].transpose(0, 1)[requests.tokens].transpose(1, 2) for each in states]


@dataclass(eq=False)
class PagedStates:
    """
    Holds one layer's states in one pass as `LazyKV` ask for them: new ones `[1, H, Q, D]`, and what stands in
    pages, `exact` being what `CodedAllocator.exact` returned.
    """

    has_gradients = False
    handed_out = None

    batching: CompressedBatching
    allocator: CodedAllocator
    layer_idx: int
    requests: list[Requests]
    exact: list[torch.Tensor]
    new: tuple[torch.Tensor, torch.Tensor]

    def __post_init__(self) -> None:
        self.device, self.dtype = self.new[0].device, self.new[0].dtype

    def lazy_length(self) -> int:
        """Tells the tokens of all requests."""
        return sum(int(each.past.sum()) + each.tokens.numel() for each in self.requests)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """Tells the shape that all states of a side have together."""
        states = self.new[side == "values"]
        return 1, states.shape[1], self.lazy_length(), states.shape[3]

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> None:
        """Answers that nothing is prepared."""

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Learns nothing of attention that is over."""

    def expect_reading(self, scores: object) -> None:
        """Expects none: nobody gets the scores of a pass."""

    def on_dense_read(self, side: str) -> None:
        """Counts what something other than attention has made dense."""
        if not self.batching.counters["dense_reads"]:
            warn_user(f"`compressed_batching`: something other than attention makes {side} dense, which is slow")
        self.batching.counters["dense_reads"] += 1

    def _parts(self, number: int) -> Iterator[Part]:
        requests, exact = self.requests[number], self.exact[number]
        return self.allocator.parts(self.layer_idx, requests, exact, *own_states(requests, *self.new))

    def materialize(self, side: str) -> torch.Tensor:
        """Makes keys or values of all requests dense, `[1, H, T, D]`, one request behind the other."""
        index, recipe, found = int(side == "values"), self.allocator.recipe, {}
        num_sinks, num_exact = recipe.num_sink_tokens, recipe.num_sink_tokens + recipe.num_recent_tokens
        for number, requests in enumerate(self.requests):
            parts = (part.gathered() if isinstance(part, PagedRowPart) else part for part in self._parts(number))
            *coded, exact = ([tile[:2][index] for tile in decode_tiles(part)] for part in parts)
            states = exact[0]
            rows = torch.cat(coded[0], dim=2) if coded else states[:, :, :0]
            for own, past in enumerate(requests.past.tolist()):
                first, newest = min(num_sinks, past), min(num_exact - num_sinks, max(past - num_sinks, 0))
                own_rows = rows[own, :, num_sinks : past - newest].to(states.dtype)
                pieces = states[own, :, :first], own_rows, states[own, :, num_exact - newest :]
                found[int(requests.tokens[own, 0])] = torch.cat(pieces, dim=1)
        return torch.cat([found[first] for first in sorted(found)], dim=1)[None]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attends request by request, `[1, H * G, Q, D]`: no query sees another request, whatever the mask says."""
        heads, head_dim = self.new[0].shape[1], self.new[1].shape[3]
        # A single query may come with its heads in the place of tokens
        query = call.query.reshape(1, -1, self.new[0].shape[2], call.query.shape[3])
        output, counters = query.new_empty(*query.shape[:3], head_dim), self.batching.counters
        codec = self.allocator.recipe.codecs[self.layer_idx]
        for number, requests in enumerate(self.requests):
            own = own_states(requests, query)[0]
            kernel, is_fallback = "torch", False
            if call.is_plain:
                kernel, is_fallback = choose_kernel(own, shared_formats=codec.shared_formats)
            result = attend(own, self._parts(number), heads, call.scale, kernel, call.softcap, call.sinks)
            output[0].transpose(0, 1)[requests.tokens] = result.transpose(1, 2)
            counters["attend_calls"] += len(own)
            counters["fused_calls"] += len(own) * (kernel != "torch")
            counters["kernel_fallbacks"] += len(own) * is_fallback
        return output.reshape(*call.query.shape[:3], head_dim)


def _check_release() -> None:
    allocator = set(inspect.signature(FullAttentionCacheAllocator.__init__).parameters) - {"self"}
    update = set(inspect.signature(_DENSE_UPDATE).parameters) - {"self"}
    if allocator != _ALLOCATOR_ARGUMENTS or update != _UPDATE_ARGUMENTS:
        raise RuntimeError(
            f"`compressed_batching` knows the paged cache of {_RELEASES}, but that of {transformers.__version__} is "
            "another"
        )


def _recipe(model: PreTrainedModel, name: str, text: torch.Tensor | None, num_recent_tokens: int) -> Recipe:
    """Finds the tables of a preset: of the model's calibration, or of a text that is read once."""
    cache = create_cache(name, model)
    layers = dict(enumerate(cache.layers))
    if text is not None:
        with torch.no_grad():
            model(text.to(model.device), **as_argument(cache), logits_to_keep=1)
    codecs = {}
    for layer_idx, layer in layers.items():
        policy = getattr(layer, "policy", None)
        codec = (
            policy.shared_codec if isinstance(policy, RowPolicy) and text is None else getattr(layer, "codec", None)
        )
        if isinstance(codec, RowCodec):
            codecs[layer_idx] = codec if codec.is_shared else RowCodec(SharedFormats(*codec.formats()))
    if not codecs:
        raise ValueError(
            f"`name` is `{name}`, which has no tables of the model's, and requests share blocks: accepted are "
            "calibrated caches, such as `calibrated-16` of a model that `kvcache-plugins calibrate` was run for, and "
            "`transform-16` to `transform-30` with a `text` (`--text-file`) to make tables of (these alone "
            "under tensor parallelism)"
        )
    policy = next(layer.policy for layer in layers.values() if hasattr(layer, "policy"))
    return Recipe(codecs, policy.num_sink_tokens, num_recent_tokens)


@contextmanager
def compressed_batching(
    model: PreTrainedModel, name: str, *, num_recent_tokens: int = 8, text: torch.Tensor | None = None
) -> Iterator[CompressedBatching]:
    """
    Has continuous batching of a model keep its cache as a preset codes it, in all managers that are made and run in
    this context: `generate_batch`, `init_continuous_batching`, `continuous_batching_context_manager`. Of contexts of
    one model the innermost codes what is made in it.

    Args:
        model (`PreTrainedModel`): the model.
        name (`str`): a registered cache that codes rows: a calibrated one (`calibrated-16`), or with `text` any
            `transform*`.
        num_recent_tokens (`int`, *optional*, defaults to 8): newest tokens of a request that are attended to exactly.
        text (`torch.Tensor` of shape `[1, tokens]`, *optional*): token ids that tables are made of, for all requests,
            where there is no calibration.

    Yields:
        `CompressedBatching`: counters, and bytes of a page.

    Raises:
        ValueError: if the cache has no tables that requests can share, the model is split over devices (other than
            by tensor parallelism), or an option is none of the accepted values.
        RuntimeError: if this release of Transformers has another paged cache, or a batch ran from a dense one.

    Example:

    >>> with compressed_batching(model, "calibrated-16") as batching:
    ...     outputs = model.generate_batch(prompts, generation_config=config)
    >>> batching.stats()["tokens_coded"]
    """
    check_integer("num_recent_tokens", num_recent_tokens, 0)
    devices = sorted({str(each.device) for each in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"`model` is split over {' and '.join(devices)}, and all pages stand on one device")
    key = id(model.config.get_text_config())
    _check_release()
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise ValueError("`model` has a persistent manager of another cache: destroy it first")
    batching = CompressedBatching(_recipe(model, name, text, num_recent_tokens))
    with _LOCK:
        _OPEN.setdefault(key, []).append(batching)
        _set_seams(True)
    hook = model.register_forward_hook(batching.check_pass, with_kwargs=True)
    try:
        yield batching
    finally:
        hook.remove()
        with _LOCK:
            _OPEN[key].remove(batching)
            if not _OPEN[key]:
                del _OPEN[key]
            _set_seams(bool(_OPEN))


def _set_seams(is_open: bool) -> None:
    """Puts what is ours into the place of Transformers' own, or takes it out again."""
    paged_cache.ATTN_TYPE_TO_ALLOCATOR[FULL] = _Allocator if is_open else FullAttentionCacheAllocator  # type: ignore[assignment]
    paged_cache.PagedAttentionCache.update = _update if is_open else _DENSE_UPDATE  # type: ignore[method-assign]
    paged_cache.PagedAttentionMemoryHandler = _Sizing if is_open else _DENSE_SIZING  # type: ignore[misc]
    ContinuousMixin.generate_batch = _generate_batch if is_open else _GENERATE_BATCH  # type: ignore[method-assign, assignment]


class _Allocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Stands for the class of Transformers' allocator while any context is open."""

    # What Transformers asks of the class; of a model without a context a slower way is taken
    supports_block_table = False

    def __new__(cls, *, config: Any, **options: Any) -> Any:
        """Makes the allocator of a model, coded where a context is open for it."""
        batchings = _OPEN.get(id(config))
        make = batchings[-1].allocator if batchings else FullAttentionCacheAllocator
        return make(config=config, **options)


class _Sizing(_DENSE_SIZING):  # type: ignore[misc,valid-type]
    """Stands for Transformers' sizing while any context is open: of coded tokens no dense copy is read."""

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes that a token in the cache takes beside it, when it is read."""
        whole = int(super().bytes_per_cache_token)
        if id(self.config) not in _OPEN or self.num_groups > 1:
            return whole
        return whole - self.kv_heads_at_peak * find_head_dim(self.config) * self.activation_dtype.itemsize


@functools.wraps(_GENERATE_BATCH)
def _generate_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `generate_batch`, which drops what it does not know without a word, while any context is open."""
    given = [
        name for name in (*CACHE_NAMES, "cache_implementation", "custom_generate") if kwargs.get(name) is not None
    ]
    if given and id(model.config.get_text_config()) in _OPEN:
        warn_user(f"`{given[0]}` is dropped by `generate_batch`: pages are coded as `compressed_batching` was told")
    return _GENERATE_BATCH(model, *args, **kwargs)


@torch.compiler.disable
def _update(
    cache: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `PagedAttentionCache.update` while any context is open."""
    allocator = cache.layer_to_allocator[layer_idx]
    if not isinstance(allocator, CodedAllocator):
        return _DENSE_UPDATE(cache, key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
    return allocator.batching.update(allocator, key_states, value_states, layer_idx, kwargs)
