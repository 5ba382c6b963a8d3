"""Base of the layers that return lazy states: lengths, padding, counters, and the uncommitted prompt.

`update` gets states without a mask, and `attend` gets the mask. So `update` returns a prompt exact, attention over it
is computed as in a dense cache, and the prompt is committed right after it, when the padding is known.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import leading_padding
from kvcache_plugins.kernels.online_attention import OnlineAttention

from .lazy_kv import HandedOut, LazyKV, make_lazy_kv
from .phase import Phase
from .torch_contexts import in_caller_context, without_caller_contexts


if TYPE_CHECKING:
    from typing_extensions import Self


# Keys and values `[B, H, tokens, D]`, and their columns of a mask
MaskedTiles = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
# End of the error for a prompt that does not continue the tokens held
ANOTHER_PROMPT = "a new cache for each prompt, or call `reset()`"


class LeftPadding:
    """
    Number of padding tokens at the start of each sequence. A layer shares one object with everything it holds, so that
    a later change reaches all.

    Args:
        given_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): the prompt's padding mask, for
            attention implementations that do not show it to the cache.

    Attributes:
        counts (`torch.Tensor` of shape `[batch_size]`, *optional*): the numbers; `None` until a mask has shown them.
        is_shown (`bool`): True if attention has shown if there is padding.
    """

    def __init__(self, given_mask: torch.Tensor | None = None) -> None:
        self._given_mask = given_mask
        self.clear()

    def clear(self) -> None:
        """Forget everything but the given mask."""
        self.is_shown = False
        self.set(None)

    def set(self, counts: torch.Tensor | None) -> None:
        """Replace the counts; `None` if they are unknown."""
        self.counts = counts
        self._ends: tuple[int, int] | None = None
        self._total = 0

    def given_counts(self, batch_size: int, device: torch.device) -> torch.Tensor | None:
        """
        Return the counts of the given mask, if there is one and neither attention nor a caller has shown them. Raise a
        `ValueError` if the mask is of another number of sequences than the prompt, `batch_size`.
        """
        if self._given_mask is None or self.is_shown or self.counts is not None:
            return None
        if len(self._given_mask) != batch_size:
            own = len(self._given_mask)
            raise ValueError(f"`attention_mask` of the cache is of {own} sequences, but the prompt of {batch_size}")
        return (self._given_mask.to(device).cumsum(dim=1) == 0).sum(dim=1)

    def ends(self) -> tuple[int, int]:
        """Smallest and largest count. The first call after a change waits for the device."""
        if self._ends is None:
            counts = self.counts
            self._ends = (0, 0) if counts is None else (int(counts.min()), int(counts.max()))
            self._total = 0 if counts is None else int(counts.sum())
        return self._ends

    def total(self) -> int:
        """Sum of all counts; see `ends`."""
        self.ends()
        return self._total

    def on_host(self, batch_size: int) -> torch.Tensor:
        """Counts `[batch_size]` on the CPU, 0 where they are unknown."""
        return torch.zeros(batch_size, dtype=torch.int64, device="cpu") if self.counts is None else self.counts.cpu()

    def first_tokens(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Position of every sequence's first real token, `[batch_size, 1]`."""
        if self.counts is None:
            return torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        return self.counts.to(device)[:, None]

    def valid_tokens(self, start: int, count: int, device: torch.device) -> torch.Tensor | None:
        """Mark tokens that are no padding, `[batch_size, count]` from position `start` on; `None` if all are none."""
        if self.counts is None or self.ends()[1] <= start:
            return None
        tokens = torch.arange(start, start + count, dtype=torch.int64, device=device)
        return tokens >= self.counts.to(device)[:, None]


class UncommittedPrompt(NamedTuple):
    """Keys and values `[B, H, T, D]` of an update that waits for its attention, and sides that were made dense."""

    keys: torch.Tensor
    values: torch.Tensor
    sides_read: set[str]


class LazyLayer(CacheLayerMixin):
    """
    A layer that returns `LazyKV`, and commits a prompt after its attention. A subclass implements `attend` and
    `to_dense`, and the methods that `update`, `crop` and batch operations call: `_append`, `_store_prompt`,
    `_drop_newest`, `_map_stored` and `_stored_tensors`; or it overrides the public methods instead.

    Args:
        layer_idx (`int`): index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): the prompt's padding mask,
            for attention implementations that do not show it to the cache.
    """

    counter_names: ClassVar[tuple[str, ...]] = ("attend_calls", "prompts_without_mask")
    is_sliding = False
    # Number of tokens that a query sees, itself among them; all by default
    sliding_window: int | None = None
    is_croppable = True
    is_compileable = False
    # True if attention over one new token changes what is stored
    stores_attention = False
    # True if committing a prompt needs its attention, so that `load_prompt` is impossible
    needs_prompt_attention = False
    # Set from the first states, in `lazy_initialization`
    dtype: torch.dtype
    device: torch.device

    def __init__(self, layer_idx: int, attention_mask: torch.Tensor | None = None):
        # The mixin's `__init__` would assign `keys` and `values`, which are views of the storage here
        self.is_initialized = False
        self.layer_idx = layer_idx
        # Shapes of the first states, with the batch size of now
        self._shapes: dict[str, tuple[int, int, int, int]] = {}
        self._left_padding = LeftPadding(attention_mask)
        self._clear()

    def _clear(self) -> None:
        self._uncommitted_prompt: UncommittedPrompt | None = None
        # Keys of the indexer of sparse attention, and positions if the model keeps them; tokens are the last but one
        # dimension. All stay exact, as they are few values a token, and select the tokens that are attended to
        self._index: dict[str, torch.Tensor] = {}
        self._left_padding.clear()
        self._length = 0
        # Number of tokens of the newest update, without cropped ones
        self._num_new = 0
        self._counters = dict.fromkeys((*self.counter_names, "dense_reads"), 0)
        self.handed_out = HandedOut()

    def __getattr__(self, name: str) -> Any:
        # Called for unknown names only: a model whose layers keep more than keys and values expects its own layers
        raise AttributeError(
            f"`{type(self).__name__}` has no `{name}`. If the model asked for it, its layers keep states in a form of "
            "their own: make the cache for the model's config, which says whether it can be used"
        )

    @without_caller_contexts
    def __deepcopy__(self, memo: dict[int, object]) -> "Self":
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self._shapes["keys"][0]

    @property
    def dense_reads(self) -> int:
        """Sides that were made dense for something other than attention."""
        return self._counters["dense_reads"]

    @property
    def keys(self) -> LazyKV | None:  # type: ignore[override]
        return self._lazy()[0] if self.is_initialized else None

    @property
    def values(self) -> LazyKV | None:  # type: ignore[override]
        return self._lazy()[1] if self.is_initialized else None

    @property
    def padding(self) -> torch.Tensor | None:
        """Left padding of every sequence, `[batch_size]`; `None` until a mask has shown it."""
        return self._left_padding.counts

    def set_padding(self, padding: torch.Tensor | None) -> None:
        """Replace the left padding `[batch_size]`; `None` if it is unknown."""
        self.invalidate_plan()
        self._left_padding.set(padding)

    def invalidate_plan(self) -> None:
        """Invalidate the plan, as stored tokens or their padding will change; a layer without a plan does nothing."""
        return None

    @property
    def phase(self) -> Phase:
        """State of the layer between two calls."""
        if self._uncommitted_prompt is not None:
            return Phase.PROMPT
        return Phase.STORED if self._length else Phase.EMPTY

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._set_shapes(key_states.shape, value_states.shape)
        self.is_initialized = True

    def _set_shapes(self, keys: Sequence[int], values: Sequence[int]) -> None:
        self._shapes = {}
        for side, (batch_size, num_heads, length, head_dim) in (("keys", keys), ("values", values)):
            self._shapes[side] = batch_size, num_heads, length, head_dim

    def _set_batch_size(self, batch_size: int) -> None:
        self._shapes = {side: (batch_size, *shape[1:]) for side, shape in self._shapes.items()}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Append new states `[batch_size, num_heads, new tokens, head_dim]`, after the rotary embedding, and return all
        keys and values lazily. Raise a `ValueError` if states cannot be stored, or have another number of sequences;
        stored tokens then stay as they were.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._update_outside_of_graphs(key_states, value_states)
        if in_caller_context() or key_states.dtype is not value_states.dtype:
            return without_caller_contexts(self._update)(*self._as_stored(key_states, value_states))
        return self._update(key_states, value_states)

    @without_caller_contexts
    def _as_stored(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Under `torch.autocast` keys are float32, from the rotary embedding, and values have half precision
        dtype = self.dtype if self.is_initialized else torch.promote_types(key_states.dtype, value_states.dtype)
        states = key_states.to(dtype), value_states.to(dtype)
        if states[0].is_inference() or states[1].is_inference():
            return states[0].clone(), states[1].clone()
        return states

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key_shape, value_shape = key_states.shape, value_states.shape
        if len(key_shape) != 4 or len(value_shape) != 4 or key_shape[::2] != value_shape[::2]:
            raise ValueError(
                f"layer {self.layer_idx}: keys and values of the same tokens have to be of shape [batch_size, heads, "
                f"tokens, head_dim], but got {list(key_shape)} and {list(value_shape)}"
            )
        if self._length:
            if key_states.dtype is not self.dtype:
                key_states, value_states = self._as_stored(key_states, value_states)
            self._check_continues(key_states, value_states)
        else:
            # Again after a crop of all tokens, as the next prompt may be of another model
            self.lazy_initialization(key_states, value_states)
        self.handed_out.read_scores()
        if key_states.device != self.device:
            self._move_to(key_states.device)
        self.commit_prompt()
        if self.sliding_window is not None:
            # The window moves: later states begin with another token
            self.handed_out.keep(self)
        self._before_update()
        is_first, count = self._length == 0, key_states.shape[2]
        self._num_new = count
        exact = (key_states, value_states) if is_first else None
        # Stored tensors would otherwise keep the graph of every update alive
        self.handed_out.has_gradients = key_states.requires_grad or value_states.requires_grad
        if self.handed_out.has_gradients:
            key_states, value_states = key_states.detach(), value_states.detach()
        if is_first or self._is_prompt(count):
            self._uncommitted_prompt = UncommittedPrompt(key_states, value_states, set())
        else:
            self._append(key_states, value_states)
        self._length += count
        if count == 1 and not is_first and not torch.is_grad_enabled():
            states = self._exact_states()
            if states is not None:
                # Plain tensors are enough, unless the layer has to see the queries
                return self._lazy(states) if self._records_queries else states
        return self._lazy(exact)

    # `torch.compile` cannot trace it
    _update_outside_of_graphs = torch.compiler.disable(_update)

    def _lazy(self, exact: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[LazyKV, LazyKV]:
        shapes = self.states_shape("keys"), self.states_shape("values")
        return make_lazy_kv(self, *shapes, self.lazy_length(), self.dtype, self.device, exact)

    def _check_continues(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise a `ValueError` unless new states fit those stored, which kernels read by address."""
        if key_states.shape[0] != self.batch_size:
            raise ValueError(
                f"`past_key_values` holds {self.batch_size} sequences of {self._length} tokens, but got states of "
                f"{key_states.shape[0]}: make {ANOTHER_PROMPT}"
            )
        for side, states in (("keys", key_states), ("values", value_states)):
            held, got = self._shapes[side][1::2], tuple(states.shape[1::2])
            if held != got:
                raise ValueError(
                    f"`past_key_values` holds {side} of {held[0]} heads of {held[1]} in layer {self.layer_idx}, but "
                    f"got {got[0]} of {got[1]}: it was filled by another model; make {ANOTHER_PROMPT}"
                )

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """
        Append keys of an indexer `[batch_size, ..., new tokens, index head dim]`, before the keys and values of the
        same tokens, and return all.
        """
        held = self._index.get("keys")
        if held is not None:
            # Without keys of an update that was refused
            indexer_key_states = torch.cat([held[..., : self._length, :], indexer_key_states], dim=-2)
        # Without the graph of its update, which the returned ones have
        self._index["keys"] = indexer_key_states.detach()
        return indexer_key_states

    # Name of the method in one model family
    update_index = update_indexer

    @property
    def has_index(self) -> bool:
        """True if the layer holds keys of an indexer."""
        return "keys" in self._index

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions `[position dims, batch_size, tokens]` that some models keep with the keys of an indexer."""
        positions = self._index.get("positions")
        return None if positions is None else positions.movedim(2, 0)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor | None) -> None:
        self._index.pop("positions", None)
        if position_ids is not None:
            self._index["positions"] = position_ids.movedim(0, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length == 0 and self._length:
            raise ValueError(
                f"`past_key_values` holds {self._length} tokens, and `generate` takes them for the beginning of the "
                f"prompt, which has fewer: make {ANOTHER_PROMPT}"
            )
        length = self.get_seq_length()
        first = self._first_seen(length)
        return length + query_length - first, first

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def lazy_length(self) -> int:
        """Return the number of tokens that the newest lazy states report; those of before a `crop` differ."""
        return self.get_seq_length() if self.sliding_window is None else self._length - self._first_visible

    def load_prompt(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Commit a first prompt whose attention was computed elsewhere, with its padding `[batch_size]`."""
        assert self._length == 0 and not self.needs_prompt_attention
        self.update(keys, values)
        self._left_padding.is_shown = True
        if padding is not None and bool(padding.any()):
            self.set_padding(padding)
        self.commit_prompt()

    @property
    def _records_queries(self) -> bool:
        """True if the layer needs the queries of attention over exact states."""
        return False

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return all keys and values if they are stored as exact tensors, over which plain attention is fastest."""
        return None

    def _before_update(self) -> None:
        """Pack tokens of earlier updates; until now, a `crop` found them exact."""

    def _is_prompt(self, count: int) -> bool:
        """Return true if an update of `count` tokens, not the first, is committed as a prompt of its own."""
        return False

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store decoded tokens; `get_seq_length()` does not count them yet."""
        raise NotImplementedError

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        """Store a prompt after its attention; `get_seq_length()` counts it."""
        raise NotImplementedError

    def _drop_newest(self, count: int) -> None:
        """Drop the newest `count` tokens, not all; `get_seq_length()` still counts them."""
        raise NotImplementedError

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every stored tensor except the padding by `function` of it."""
        raise NotImplementedError

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield category and tensor of everything stored except the padding. The batch is the first dimension of the
        first tensor.
        """
        raise NotImplementedError

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """
        Compute attention over everything the layer holds, in its stored form, for a call without `project`; return
        `[batch_size, num_heads, num_queries, value_head_dim]`.
        """

    def attend_projected(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention for a call with `project`, which is applied to a tile of tokens at a time."""
        assert call.project is not None
        attention: OnlineAttention | None = None
        for own_keys, own_values, mask in self.iter_dense(call.full_mask(self.lazy_length())):
            keys, values = call.project({"keys": own_keys, "values": own_values})
            if attention is None:
                attention = OnlineAttention(call.query, keys.shape[1], call.scale, call.softcap, call.sinks)
            attention.add_tile(keys, values, mask)
        assert attention is not None, "nothing is stored"
        self._learn_padding(call.mask)
        self.commit_prompt()
        return attention.result()

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """
        Run the plan of the last step: attention over all tokens, `num_tokens` of them, without a mask. Return `None`
        if no plan fits.
        """
        return None

    @abstractmethod
    def to_dense(self, side: str) -> torch.Tensor:
        """Make all `"keys"` or `"values"` dense, `[batch_size, num_heads, seq_len, head_dim]` in the layer's dtype."""

    def iter_dense(self, mask: torch.Tensor | None) -> MaskedTiles:
        """
        Yield keys and values in the layer's dtype, and their columns of a mask, some tokens at a time, for attention
        with `project`. This implementation makes both sides dense, and counts it; layers with tiles override it.
        """
        keys, values = self.to_dense("keys"), self.to_dense("values")
        for side in ("keys", "values"):
            self.note_dense_read(side)
        yield keys, values, mask

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Commit the prompt, after attention over the exact states that `update` returned."""
        self._learn_padding(call.mask)
        self.commit_prompt()

    def _learn_padding(self, attn_mask: torch.Tensor | None) -> None:
        self._left_padding.is_shown = True
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            first_new, first = self._length - attn_mask.shape[-2], self._first_visible
            if first_new >= 0:
                self.set_padding(leading_padding(attn_mask, first_new, self.padding, self.batch_size, first))

    def note_dense_read(self, side: str) -> None:
        """Count that something other than attention has made one side dense."""
        self._counters["dense_reads"] += 1
        prompt = self._uncommitted_prompt
        if prompt is not None:
            prompt.sides_read.add(side)
            if len(prompt.sides_read) == 2:
                # Attention that reads both sides dense has references of its own by now
                self.commit_prompt()

    @without_caller_contexts
    def commit_prompt(self) -> None:
        """Commit the uncommitted prompt, if there is one."""
        if self._uncommitted_prompt is None:
            return
        keys, values, _ = self._uncommitted_prompt
        is_first = self._length == keys.shape[2]
        try:
            given = self._left_padding.given_counts(self.batch_size, self.device)
            if given is not None:
                self.set_padding(given)
            elif not self._left_padding.is_shown:
                self._counters["prompts_without_mask"] += 1
            with self._all_or_nothing():
                self._store_prompt(keys, values, is_first=is_first)
        except Exception:
            self._drop_uncommitted()
            raise
        self._uncommitted_prompt = None

    def _drop_uncommitted(self) -> None:
        """Take back the update of an uncommitted prompt."""
        assert self._uncommitted_prompt is not None
        length = self._length - self._uncommitted_prompt.keys.shape[2]
        if not length:
            self._empty()
            return
        self._uncommitted_prompt = None
        self._num_new = 0
        self._shorten(length)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave the layer as it was if the block raises anything."""
        before, padding = self._copied(), copy.copy(self._left_padding)
        try:
            yield
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            vars(self._left_padding).update(vars(padding))
            self.invalidate_plan()
            raise

    def _copied(self) -> dict[str, object]:
        """Return all attributes by name, with a copy of each object that holds tensors and may get others."""
        return dict(vars(self))

    def _empty(self) -> None:
        """Forget everything but the counters."""
        counters = self._counters
        self._clear()
        self._counters = counters

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens; 0 changes nothing."""
        tokens_to_remove = index(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` has to be a negative number of tokens, or 0, but got {tokens_to_remove}"
            )
        count = min(-tokens_to_remove, self.get_seq_length())
        if count > 0:
            self.crop_tokens(count)

    @without_caller_contexts
    def crop_tokens(self, count: int) -> None:
        """Remove the newest `count` tokens, at least 1 and at most all of them."""
        self.handed_out.read_scores()
        is_uncommitted = self._is_uncommitted(count)
        if not is_uncommitted:
            self.commit_prompt()
        self.handed_out.keep(self)
        if count == self._length:
            self._empty()
            return
        with self._all_or_nothing():
            if is_uncommitted:
                self._uncommitted_prompt = None
            else:
                self._drop_newest(count)
            self._num_new = max(self._num_new - count, 0)
            self._index = {
                name: states[..., : max(states.shape[-2] - count, 0), :] for name, states in self._index.items()
            }
            self._shorten(self._length - count)

    def _is_uncommitted(self, count: int) -> bool:
        """Return true if the newest `count` tokens are an uncommitted prompt."""
        return self._uncommitted_prompt is not None and self._uncommitted_prompt.keys.shape[2] == count

    def _shorten(self, length: int) -> None:
        """Set the number of tokens. A sequence without a real token among them is all padding."""
        self._length = length
        if self.padding is not None and self._left_padding.ends()[1] > length:
            self.set_padding(self.padding.clamp(max=length))

    @without_caller_contexts
    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """
        Replace every stored tensor by `function` of it; the batch is the first dimension of each. If anything is
        raised, everything is as it was.
        """
        self.handed_out.read_scores()
        self.commit_prompt()
        with self._all_or_nothing():
            self._map_stored(function)
            self._index = {name: function(states) for name, states in self._index.items()}
            if self.padding is not None:
                self.set_padding(function(self.padding))
            for _, tensor in self.named_tensors():
                self._set_batch_size(tensor.shape[0])
                break

    def _select(self, sequences: torch.Tensor) -> None:
        """Replace the batch by some of its sequences, by number."""
        self.handed_out.keep(self)
        self.map_tensors(lambda tensor: tensor.index_select(0, sequences.to(tensor.device)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int | torch.Tensor) -> None:
        if self.get_seq_length():
            self._select(self._sequence_numbers().repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keep the sequences that `indices` select, in any form that indexes a tensor: numbers, a slice or a mask."""
        if self.get_seq_length():
            self._select(self._sequence_numbers()[indices, ...])

    def _sequence_numbers(self) -> torch.Tensor:
        # A subclass that keeps states in a form of its own need not have `batch_size`
        return torch.arange(self.states_shape("keys")[0], dtype=torch.int64, device=self.device)

    def offload(self) -> None:
        self.map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield category (`codes`, `scales`, `residual`, ...) and tensor of everything held."""
        yield from self._stored_tensors()
        if self._uncommitted_prompt is not None:
            yield "residual", self._uncommitted_prompt.keys
            yield "residual", self._uncommitted_prompt.values
        yield from (("indexer", tensor) for tensor in self._index.values())
        if self.padding is not None:
            yield "index", self.padding

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yield stored tensors that stay in host memory on any device of the model; none by default."""
        return iter(())

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of everything that all caches of the model share; `named_tensors` has none of it."""
        return iter(())

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Return counters that show whether the layer was used."""

    def num_values(self) -> int:
        """Return the number of key and value elements that a dense cache of the same tokens would hold."""
        if not self.is_initialized:
            return 0
        indexed = self._index["keys"].numel() if self.has_index else 0
        length = self._length - self._first_seen(self._length)
        shapes = map(self.states_shape, ("keys", "values"))
        return indexed + sum(shape[0] * shape[1] * length * shape[3] for shape in shapes)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """Return the shape of the dense states of one side."""
        _, num_heads, _, head_dim = self._shapes[side]
        return self.batch_size, num_heads, self._length - self._first_visible, head_dim

    def _first_seen(self, length: int) -> int:
        """Return the position of the first token that a query at position `length` sees."""
        return 0 if self.sliding_window is None else max(length - self.sliding_window + 1, 0)

    @property
    def _first_visible(self) -> int:
        """Position of the first token of the newest states."""
        return 0 if self.sliding_window is None else self._first_seen(self._length - self._num_new)

    def can_crop(self, count: int) -> bool:
        return True

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        self.handed_out.read_scores()
        self.handed_out.keep(self)
        self._clear()
        self.is_initialized = False

    def _move_to(self, device: torch.device) -> None:
        self.map_tensors(lambda tensor: tensor.to(device))
        # At the end, so that the next update goes on where memory ended
        self.device = device
