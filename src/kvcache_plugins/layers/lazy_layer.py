"""The base of the layers that hand out lazy states: bookkeeping of lengths, padding and counters, and the prompt.

`update` sees states and no mask, `attend` sees the mask: so a prompt is handed out exact, attention over it is
computed as in a dense cache, and only then is it stored, the padding of every item being known.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any, ClassVar
from weakref import ref

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import leading_padding
from kvcache_plugins.kernels.online_attention import OnlineAttention

from .lazy_kv import SIDES, HandedOut, LazyKV, make_lazy_kv
from .phase import Phase
from .torch_contexts import in_caller_context, without_caller_contexts


# Keys and values `[B, H, tokens, D]`, and their columns of a mask
MaskedTiles = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
# The end of an error of a prompt that does not go on from what is held
ANOTHER_PROMPT = "a new cache for each prompt, or call `reset()`"


class LeftPadding:
    """
    How many tokens at the start of each sequence are padding: `counts` `[batch_size]`, once any are known. A layer has
    one and shares it with what it holds: what becomes known later, or changes with the batch, is known to all.
    """

    def __init__(self) -> None:
        self.set(None)

    def set(self, counts: torch.Tensor | None) -> None:
        """Has other counts known; `None` if none are."""
        self.counts = counts
        self._ends: tuple[int, int] | None = None

    def ends(self) -> tuple[int, int]:
        """Padding of the items that have least and most; the host waits for a device the first time that it asks."""
        if self._ends is None:
            counts = self.counts
            self._ends = (0, 0) if counts is None else (int(counts.min()), int(counts.max()))
        return self._ends

    def first_tokens(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Position of every item's first real token, `[batch_size, 1]`."""
        if self.counts is None:
            return torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        return self.counts.to(device)[:, None]


class LazyLayer(CacheLayerMixin):
    """
    A layer that hands out `LazyKV`, and whose prompt waits until attention has seen it. A subclass stores what it
    likes, says how to attend to it (`attend`) and how to make it dense (`to_dense`), and implements what `update`,
    `crop` and batch operations call (`_append`, `_store_prompt`, `_drop_newest`, `_map_stored`, `_stored_tensors`), or
    these themselves.

    Args:
        layer_idx (`int`): Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): The prompt's padding mask,
            for attention implementations that do not show it to the cache.
    """

    counter_names: ClassVar[tuple[str, ...]] = ("attend_calls", "prompts_without_mask")
    is_sliding = False
    # Tokens that a query sees, itself among them; all by default
    sliding_window: int | None = None
    is_croppable = True
    is_compileable = False
    # Whether attention over one new token adds to what is stored, beside what `update` stores
    stores_attention = False
    # Whether storing a prompt needs its attention, so that one computed elsewhere cannot be taken in
    needs_prompt_attention = False
    # The lazy states that somebody may still hold
    handed_out: HandedOut | None = None
    # Set from the first states, in `lazy_initialization`
    dtype: torch.dtype
    device: torch.device

    def __init__(self, layer_idx: int, attention_mask: torch.Tensor | None = None):
        # Not the mixin's, which assigns `keys` and `values`: here they are views of the storage
        self.is_initialized = False
        # Whether autograd records the newest states
        self.has_gradients = False
        self.layer_idx = layer_idx
        self._given_mask = attention_mask
        self._left_padding = LeftPadding()
        self._clear()

    def _clear(self) -> None:
        # An update that is stored as soon as attention has seen it
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sides_read: set[str] = set()
        # Of indexed sparse attention, tokens next to last: keys of the indexer, and positions where the model keeps
        # them. They are few numbers a token, and decide which tokens are attended to at all: they stay exact
        self._index: dict[str, torch.Tensor] = {}
        self._left_padding.set(None)
        self._mask_seen = False
        self._length = 0
        # Tokens of the newest update
        self._num_new = 0
        # What it was of, if it was one token
        self._last_signature: tuple[object, ...] | None = None
        self._counters = dict.fromkeys(self.counter_names, 0)
        self.dense_reads = 0
        # Attention weights over what is stored, as long as somebody holds them
        self._unread: list[ref[LazyKV]] = []

    def __getattr__(self, name: str) -> Any:
        # Only what is nowhere else: a model whose layers keep more than keys and values asks its own kind of layer
        raise AttributeError(
            f"`{type(self).__name__}` has no `{name}`. If the model asked for it, its layers keep states in a form of "
            "their own: make the cache for the model's config, which says whether it can be used"
        )

    @without_caller_contexts
    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyLayer":
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._unread = []
        return made

    @property
    def keys(self) -> LazyKV | None:  # type: ignore[override]
        return self._lazy()[0] if self.is_initialized else None

    @property
    def values(self) -> LazyKV | None:  # type: ignore[override]
        return self._lazy()[1] if self.is_initialized else None

    @property
    def padding(self) -> torch.Tensor | None:
        """Left padding of every item, once a mask has shown it, `[batch_size]`."""
        return self._left_padding.counts

    @padding.setter
    def padding(self, padding: torch.Tensor | None) -> None:
        self.invalidate_plan()
        self._left_padding.set(padding)

    def invalidate_plan(self) -> None:
        """Invalidate what a layer has prepared for stored tokens, as these or their padding will change."""
        return None

    @property
    def phase(self) -> Phase:
        """State of the layer between two calls."""
        if self._pending is not None:
            return Phase.PROMPT
        return Phase.STORED if self._length else Phase.EMPTY

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._shapes = {"keys": tuple(key_states.shape), "values": tuple(value_states.shape)}
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Takes in new states `[batch_size, num_heads, new tokens, head_dim]`, after the rotary embedding, and returns
        all, lazily. A `ValueError`, if states to be stored cannot be, or are of another number of sequences, leaves
        what is stored as it was.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._update_outside_of_graphs(key_states, value_states)
        if in_caller_context() or key_states.dtype is not value_states.dtype:
            return without_caller_contexts(self._update)(*self._as_stored(key_states, value_states))
        return self._update(key_states, value_states)

    @without_caller_contexts
    def _as_stored(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # `torch.autocast` leaves keys float32 by the rotary embedding and makes values of half precision
        dtype = self.dtype if self.is_initialized else torch.promote_types(key_states.dtype, value_states.dtype)
        states = key_states.to(dtype), value_states.to(dtype)
        if states[0].is_inference() or states[1].is_inference():
            return states[0].clone(), states[1].clone()
        return states

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_initialized and key_states.dtype is not self.dtype:
            key_states, value_states = self._as_stored(key_states, value_states)
        self._last_signature = None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._length:
            self._check_continues(key_states, value_states)
        self.read_weights()
        if key_states.device != self.device:
            self._move_to(key_states.device)
        self.commit_prompt()
        if self.sliding_window is not None:
            # Later states begin with another token
            self._keep_handed_out()
        self._sides_read.clear()
        self._before_update()
        is_first, count = self._length == 0, key_states.shape[2]
        self._num_new = count
        if is_first:
            self.batch_size = key_states.shape[0]
        exact = (key_states, value_states) if is_first else None
        # What is stored would otherwise keep the graph of every update alive
        self.has_gradients = key_states.requires_grad or value_states.requires_grad
        if self.has_gradients:
            key_states, value_states = key_states.detach(), value_states.detach()
        if is_first or self._is_prompt(count):
            self._pending = (key_states, value_states)
        else:
            self._append(key_states, value_states)
        self._length += count
        if count == 1 and not is_first and not torch.is_grad_enabled():
            states, self._last_signature = self._exact_states(), tensor_signature(key_states, value_states)
            if states is not None:
                # As attention is given them: as they are, unless the layer has to hear of the queries
                return self._lazy(states) if self._records_queries else states
        return self._lazy(exact)

    # Nothing that `torch.compile` could trace
    _update_outside_of_graphs = torch.compiler.disable(_update)

    def _lazy(self, exact: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[LazyKV, LazyKV]:
        shapes = self.states_shape("keys"), self.states_shape("values")
        return make_lazy_kv(self, *shapes, self.lazy_length(), self.dtype, self.device, exact)

    def _check_continues(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raises a `ValueError` unless new states fit those stored, which kernels read by address."""
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
        Takes in keys of an indexer `[batch_size, ..., new tokens, index head dim]`, which come before the keys and
        values of the same tokens, and returns all.
        """
        held = self._index.get("keys")
        self._index["keys"] = indexer_key_states if held is None else torch.cat([held, indexer_key_states], dim=-2)
        return self._index["keys"]

    # The name that one family has for it
    update_index = update_indexer

    @property
    def has_index(self) -> bool:
        """Tells whether the layer holds keys of an indexer."""
        return "keys" in self._index

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions `[position dims, batch_size, tokens]`, which some models keep with the keys of an indexer."""
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
        """Tokens that the newest lazy states report; older ones, of before a `crop`, report others."""
        return self.get_seq_length() if self.sliding_window is None else self._length - self._first_visible

    def load_prompt(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Stores a first prompt that was attended to elsewhere, and its padding `[batch_size]`."""
        assert self._length == 0 and not self.needs_prompt_attention
        self.update(keys, values)
        self._mask_seen = True
        if padding is not None and bool(padding.any()):
            self.padding = padding
        self.commit_prompt()

    @property
    def _records_queries(self) -> bool:
        """Whether attention of a token over exact states tells the layer anything."""
        return False

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values, where they are exact and at hand: plain attention over them costs least."""
        return None

    def _before_update(self) -> None:
        """Does the work that the last update left, so that a `crop` right after it found its tokens exact."""

    def _is_prompt(self, count: int) -> bool:
        """Whether an update of `count` tokens, not the first, is stored as a prompt of its own."""
        return False

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores tokens that follow a prompt; `get_seq_length()` does not count them yet."""
        raise NotImplementedError

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        """Stores a prompt that attention has seen; `get_seq_length()` counts it."""
        raise NotImplementedError

    def _drop_newest(self, count: int) -> None:
        """Drops the newest `count` tokens, not all; `get_seq_length()` still counts them."""
        raise NotImplementedError

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor stored, the padding aside, by `function` of it."""
        raise NotImplementedError

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored, the padding aside; the batch is the first dimension of the first."""
        raise NotImplementedError

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """
        Answer a call without `project` over everything the layer holds, as it is stored, by attention
        `[batch_size, num_heads, num_queries, value_head_dim]`.
        """

    def attend_projected(self, call: AttentionCall) -> torch.Tensor:
        """Answer a call with `project` likewise, over what it makes of a tile of tokens at a time."""
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
        Attend over everything as for the token before, with nothing hidden, in any context of PyTorch; `None` if
        nothing is prepared for that. Lazy states that are attended to report `num_tokens` tokens.
        """
        return None

    @abstractmethod
    def to_dense(self, side: str) -> torch.Tensor:
        """Make all `"keys"` or `"values"` dense, `[batch_size, num_heads, seq_len, head_dim]` in the layer's dtype."""

    def iter_dense(self, mask: torch.Tensor | None) -> MaskedTiles:
        """
        Yield keys and values in the layer's dtype, and their columns of a mask: all tokens, some at a time, for
        attention over what is projected. A layer that need not make them whole overrides this; that is counted here.
        """
        keys, values = self.to_dense("keys"), self.to_dense("values")
        for side in ("keys", "values"):
            self.note_dense_read(side)
        yield keys, values, mask

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Take note of attention over exact states that `update` handed out: they may now be stored."""
        self._learn_padding(call.mask)
        self.commit_prompt()

    def _learn_padding(self, attn_mask: torch.Tensor | None) -> None:
        self._mask_seen = True
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            first_new, first = self._length - attn_mask.shape[-2], self._first_visible
            if first_new >= 0:
                self.padding = leading_padding(attn_mask, first_new, self.padding, self.batch_size, first)

    def expect_reading(self, scores: LazyKV) -> None:
        """Take note of scores over what is stored, which somebody may keep beyond the next update."""
        self._unread.append(ref(scores, self._unread.remove))
        # The next update is a whole one
        self._last_signature = None

    @without_caller_contexts
    def read_weights(self) -> None:
        """Make scores dense that somebody still holds, before what they are of changes."""
        for scores in [each() for each in self._unread]:
            if scores is not None:
                scores.read()
        self._unread = []

    def note_dense_read(self, side: str) -> None:
        """Take note that something other than attention has made one side dense."""
        self.dense_reads += 1
        # An attention that reads both sides dense has its own references by now
        self._sides_read.add(side)
        if self._pending is not None and len(self._sides_read) == 2:
            self.commit_prompt()

    @without_caller_contexts
    def commit_prompt(self) -> None:
        """Stores a prompt that still waits, so that what is stored is complete."""
        if self._pending is None:
            return
        (keys, values), is_first = self._pending, self._length == self._pending[0].shape[2]
        if self._given_mask is not None and not self._mask_seen and self.padding is None:
            self.padding = (self._given_mask.to(self.device).cumsum(dim=1) == 0).sum(dim=1)
        elif not self._mask_seen:
            self._counters["prompts_without_mask"] += 1
        try:
            self._store_prompt(keys, values, is_first=is_first)
        except (ValueError, MemoryError):
            # As if the update had not been
            self._length -= keys.shape[2]
            self._pending = None
            raise
        self._pending = None

    def _valid_tokens(self, start: int, count: int) -> torch.Tensor | None:
        """Which of `count` tokens from position `start` on are not padding, `[batch_size, count]`; `None` if all."""
        padding = self._left_padding
        if padding.counts is None or padding.ends()[1] <= start:
            return None
        tokens = torch.arange(start, start + count, dtype=torch.int64, device=self.device)
        return tokens >= padding.first_tokens(1, self.device)

    @without_caller_contexts
    def _keep_handed_out(self) -> None:
        """Make dense what lazy states that somebody still holds are of, as it is about to change."""
        dense = None if self.handed_out is None else self.handed_out()
        self.handed_out = None
        if dense is not None:
            # A layer that has dropped tokens has no dense states, and says so to whoever reads them
            with suppress(ValueError):
                dense.update({side: self.to_dense(side) for side in SIDES})

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens; 0 changes nothing."""
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
        """Removes the newest `count` tokens, at least 1 and at most all of them."""
        self.read_weights()
        self.commit_prompt()
        self._keep_handed_out()
        if count == self._length:
            counters, reads = self._counters, self.dense_reads
            self._clear()
            self._counters, self.dense_reads = counters, reads
            return
        self._drop_newest(count)
        self._index = {
            name: states[..., : max(states.shape[-2] - count, 0), :] for name, states in self._index.items()
        }
        self._shorten(self._length - count)

    def _shorten(self, length: int) -> None:
        """Count so many tokens; of a sequence that has no real one among them any may come next."""
        self._length = length
        if self.padding is not None and self._left_padding.ends()[1] > length:
            self.padding = self.padding.clamp(max=length)

    @without_caller_contexts
    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it; the batch is the first dimension of each."""
        self.read_weights()
        self.commit_prompt()
        self._map_stored(function)
        self._index = {name: function(states) for name, states in self._index.items()}
        if self.padding is not None:
            self.padding = function(self.padding)
        for _, tensor in self.named_tensors():
            self.batch_size = tensor.shape[0]
            break

    def _select(self, items: torch.Tensor) -> None:
        """Have the batch consist of some of its items, by number."""
        self._keep_handed_out()
        self.map_tensors(lambda tensor: tensor.index_select(0, items.to(tensor.device)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int | torch.Tensor) -> None:
        if self.get_seq_length():
            self._select(self._item_numbers().repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keep the items that `indices` name in any way in which they index a tensor: numbers, or a mask."""
        if self.get_seq_length():
            self._select(self._item_numbers()[indices, ...])

    def _item_numbers(self) -> torch.Tensor:
        # Not `batch_size`, which a subclass that keeps states in a form of its own need not have
        return torch.arange(self.states_shape("keys")[0], dtype=torch.int64, device=self.device)

    def offload(self) -> None:
        self.map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield category (`codes`, `scales`, `residual`, ...) and tensor of everything held."""
        yield from self._stored_tensors()
        yield from (("residual", states) for states in self._pending or ())
        yield from (("indexer", tensor) for tensor in self._index.values())
        if self.padding is not None:
            yield "index", self.padding

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yields the stored tensors that stand in host memory wherever the model computes; none by default."""
        return iter(())

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor of what all caches of the model share, which is none of the above."""
        return iter(())

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Counters that prove the layer was exercised."""

    def num_values(self) -> int:
        """Counts the key and value numbers that a dense cache of the same tokens would hold."""
        if not self.is_initialized:
            return 0
        indexed = self._index["keys"].numel() if self.has_index else 0
        length = self._length - self._first_seen(self._length)
        shapes = map(self.states_shape, ("keys", "values"))
        return indexed + sum(shape[0] * shape[1] * length * shape[3] for shape in shapes)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """Tells the shape that the dense states of one side have."""
        _, num_heads, _, head_dim = self._shapes[side]
        return self.batch_size, num_heads, self._length - self._first_visible, head_dim

    def _first_seen(self, length: int) -> int:
        """Position of the first token that a query at position `length` sees."""
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
        self.read_weights()
        self._keep_handed_out()
        self._clear()
        self.is_initialized = False

    def _move_to(self, device: torch.device) -> None:
        self.device, self._last_signature = device, None
        self.map_tensors(lambda tensor: tensor.to(device))


def tensor_signature(key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[object, ...]:
    """List all that states have to have in common with others to be stored as they were."""
    return key_states.shape, value_states.shape, key_states.dtype, value_states.dtype, key_states.device
