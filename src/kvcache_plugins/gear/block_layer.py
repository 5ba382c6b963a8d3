"""What the layers of a `GEARCache` have in common, whatever they make of their tokens.

    [ prefix: exact, first tokens of each item ] [ blocks: compressed ] [ buffer: exact, newest ]

Tokens wait in the buffer until they are compressed at the *beginning* of an update, so that a rollback of the newest
one finds its tokens exact. A layer says how they are compressed, and what attention makes of a block of them.

Where the model's layer attends to a window (`sliding_window.py`), the oldest tokens are let go of, some at a time,
once no query to come can see them.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import combine_masks, hide_first, mask_columns, slice_mask
from kvcache_plugins.layers.contexts import in_own_context
from kvcache_plugins.layers.lazy_states import stored_states
from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .sliding_window import SlidingWindowMixin
from .storage import BlockT, BufferConfig, ExactPrefix, LayerState, TiledBlock, dense_tiles


if TYPE_CHECKING:
    from kvcache_plugins.kernels.compiled import PreparedCall

# An update of this many times `residual_length` tokens is a prompt of its own
_PROMPT_FACTOR = 4
# Columns that a mask which is kept is a multiple of: one column alone would stand for all
_MASK_STEP = 8


class PreparedParts:
    """
    The parts before the buffer, where no mask is given: they stay, until the buffer is compressed.

    Attributes:
        parts (`list`): those.
        limit (`int`): tokens that the buffer may hold before anything changes.
        call (`PreparedCall`, *optional*): attention over them and the buffer.
        is_tried (`bool`): whether there is a call, if there can be one.
    """

    __slots__ = ("call", "is_tried", "limit", "parts")

    def __init__(self, parts: list[Any], limit: int):
        self.parts, self.limit = parts, limit
        self.call: PreparedCall | None = None
        self.is_tried = False

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the layer finds its own: addresses in a call are of what was copied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class BlockLayerMixin(SlidingWindowMixin, Generic[BlockT]):
    """
    Mixed into a `PromptLayer` that stores a prefix, blocks and a buffer, before it.

    While nothing is compressed and tokens come one by one, it is what a dense layer is: two tensors of all tokens
    (`_plain`), of which the buffer is made when it is asked for.

    A subclass says how attention is computed over a block (`_block_part`, `_attend_parts`), how a block becomes dense
    (`_tiled_blocks`), how much of its beginning can be dropped (`_num_droppable`), and what goes on when the newest
    block has been cut (`_after_cut`).
    """

    config: BufferConfig
    # Whether the kernels that it runs have been compiled, or it is what compiles them
    is_warm = False
    # Tokens before the first compression whose queries a layer that needs them is shown
    num_heard = 0
    # Of plain tokens: with how many there is something to be compressed, and after how many queries are shown
    _plain_limit = _first_heard = 0

    def _clear(self) -> None:
        super()._clear()
        self.prefix: ExactPrefix | None = None
        self.blocks: list[BlockT] = []
        self.buffer = None
        self._prepared: PreparedParts | None = None

    @property
    def buffer(self) -> ResidualBuffer | None:
        """The newest tokens, exact."""
        if self._plain is not None:
            self._end_plain(*self._plain)
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: ResidualBuffer | None) -> None:
        self._buffer: ResidualBuffer | None = buffer
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = None

    @in_own_context
    def _end_plain(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes the buffer of all tokens that are not the prefix's."""
        first = 0 if self.prefix is None else self.prefix.num_slots
        keys, values = keys[:, :, first:], values[:, :, first:]
        self.buffer = ResidualBuffer(keys, values, self._buffer_limit)
        self.buffer.append(keys, values)

    @abstractmethod
    def _attend_parts(self, call: AttentionCall, parts: Iterator[Any]) -> tuple[torch.Tensor, str, bool]:
        """Attention over parts; the kernel that computed it, and whether another one was wanted."""

    @abstractmethod
    def _token_call(self, query: torch.Tensor, parts: list[Any], scale: float | None) -> "PreparedCall | None":
        """Prepares a call for tokens to come, by the C kernels, over parts of which the last one is the buffer."""

    @abstractmethod
    def _block_part(self, block: BlockT, mask: torch.Tensor | None) -> Any:
        """A block as a part that attention goes over, with its columns of the mask."""

    @abstractmethod
    def _may_overlap(self, number: int, block: BlockT, prefix: ExactPrefix) -> bool:
        """Whether a block may span tokens that the prefix holds, or padding of shorter items."""

    @abstractmethod
    def _tiled_blocks(self) -> Sequence[TiledBlock]:
        """The blocks, as they become dense."""

    @abstractmethod
    def _num_droppable(self, block: BlockT, count: int) -> int:
        """How many of the first `count` tokens of a block can be dropped."""

    @abstractmethod
    def _compress_buffer(self) -> None:
        """Compresses what is in the buffer, which is full."""

    @abstractmethod
    def _after_cut(self, newest: BlockT | None) -> None:
        """Called when tokens have been dropped of blocks, of which `newest` was the last."""

    def _let_go(self) -> None:
        """Drops what no query to come sees, as far as whole chunks and rows allow it."""
        first = self._first_seen(self._length)
        if first <= self._held_start:
            return
        blocks, newest = self.blocks, self.blocks[-1] if self.blocks else None
        self.blocks = [block for block in blocks if block.start + block.length > first]
        num_dropped = 0
        if self.blocks and self.blocks[0].start < first:
            num_dropped = self._num_droppable(self.blocks[0], first - self.blocks[0].start)
        if num_dropped:
            self.blocks[0].drop_first(num_dropped)
        if num_dropped or len(self.blocks) < len(blocks):
            self._after_cut(newest)
            self._forget_before(self.blocks[0].start if self.blocks else self._exact_start)

    def _forget_before(self, position: int) -> None:
        """Takes down that no tokens are left before a position, and lets go of a prefix that ends there."""
        self._held_start = max(position, self._held_start)
        if self.prefix is not None and not self._needs_prefix() and self.prefix.stop() <= position:
            self.prefix = None

    def _needs_prefix(self) -> bool:
        """Whether more may come to stand in the prefix."""
        return False

    def _is_prompt(self, count: int) -> bool:
        return count >= _PROMPT_FACTOR * self.config.residual_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PromptLayer.update`: a token like the last one is stored here, if nothing more is to be done."""
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled():
            return super().update(key_states, value_states)
        kind = key_states.shape, value_states.shape, key_states.dtype, value_states.dtype, key_states.device
        if kind != self._token_kind:
            return super().update(key_states, value_states)
        plain, prepared, buffer = self._plain, self._prepared, self._buffer
        if plain is not None and self._length < self._plain_limit:
            # As a dense layer does
            states = torch.cat((plain[0], key_states), dim=-2), torch.cat((plain[1], value_states), dim=-2)
            self._plain, self._length = states, self._length + 1
            return states if self._length <= self._first_heard else self._lazy(*states)
        if prepared is None or buffer is None or buffer.length >= prepared.limit:
            return super().update(key_states, value_states)
        newest = None
        if prepared.call is not None and buffer.left is None and buffer.length < buffer.capacity:
            newest = prepared.call.accept(key_states, value_states)
        if newest is not None:
            # The call writes it
            buffer.left, buffer.length = newest, buffer.length + 1
        elif torch.is_inference_mode_enabled():
            return super().update(key_states, value_states)
        else:
            buffer.append(key_states, value_states)
        self._length += 1
        return stored_states(self, kind[0], kind[1], self._length, self.dtype, self.device)

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """See `LazyLayer.attend_again`."""
        prepared, buffer = self._prepared, self._buffer
        if prepared is None or prepared.call is None or buffer is None or num_tokens != self._length:
            return None
        if query.requires_grad:
            return None
        output = prepared.call.attend(query, scale, buffer.storage, buffer.length, buffer.left)
        if output is not None:
            # It has been written
            buffer.left = None
            self._counters["attend_calls"] += 1
            self._counters["fused_calls"] += 1
        return output

    def _prepare_call(self, query: torch.Tensor, scale: float | None) -> None:
        """Prepares a call for the tokens to come, if all that they change is the buffer."""
        prepared, buffer = self._prepared, self.buffer
        if prepared is None or prepared.is_tried or prepared.limit == 0 or buffer is None or self._needs_queries:
            return
        prepared.is_tried = True
        if buffer.length and not torch.compiler.is_dynamo_compiling():
            newest = DensePart(*buffer.tensors(), buffer.length, None)
            prepared.call = self._token_call(query, [*prepared.parts, newest], scale)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`."""
        mask = call.full_mask(self.lazy_length())
        output, kernel, is_fallback = self._attend_parts(call, self._parts(mask))
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += kernel != "torch"
        self._counters["kernel_fallbacks"] += is_fallback
        self.on_exact_attention(call)
        if mask is None and kernel == "compiled":
            self._prepare_call(call.query, call.scale)
        return output

    def on_exact_attention(self, call: AttentionCall) -> None:
        """See `LazyLayer.on_exact_attention`."""
        self._learn_padding(call.mask)
        # Queries of what is projected are of other heads
        if call.project is None and (self._pending is not None or self._needs_queries):
            self._note_queries(call.query)
        if self._pending is not None:
            self.settle_prompt()

    def _note_queries(self, query: torch.Tensor) -> None:
        """What the layer makes of queries; nothing by default."""

    def settle_prompt(self) -> None:
        """See `PromptLayer.settle_prompt`."""
        if self._pending is not None:
            self._prepared = None
        super().settle_prompt()

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[Any]:
        """Everything held, each token once, with its columns of the mask."""
        if attn_mask is None and self._pending is None and self.sliding_window is None:
            if self._prepared is None:
                limit = self._buffer_limit if self.blocks and self.buffer is not None else 0
                self._prepared = PreparedParts(list(self._compressed_parts(None)), limit)
            yield from self._prepared.parts
        else:
            yield from self._compressed_parts(attn_mask)
        position, first = self._exact_start, self._first_visible
        for keys, values, length in self._exact_tail():
            if position + length > first:
                yield DensePart(keys, values, length, self._columns(attn_mask, position, position + length))
            position += length

    def _compressed_parts(self, attn_mask: torch.Tensor | None) -> Iterator[Any]:
        """Prefix and blocks of the same."""
        prefix, first = self.prefix, self._first_visible
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions - first, self.batch_size, self._length - first)
            if not prefix.is_uniform or first:
                mask = combine_masks(mask, prefix.in_use & (prefix.positions >= first))
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for number, block in enumerate(self.blocks):
            stop = block.start + block.length
            if stop <= first or not block.length:
                continue
            mask = self._columns(attn_mask, block.start, stop)
            if prefix is not None and self._may_overlap(number, block, prefix):
                if mask is None and self.device.type == "cpu":
                    # No longer than needed, as it is kept
                    stop = min(stop, -(-int(prefix.end.max()) // _MASK_STEP) * _MASK_STEP + block.start)
                columns = torch.arange(block.start, stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield self._block_part(block, mask)

    def _columns(self, attn_mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
        """The mask's columns of the tokens from position `start` to `stop`, of which some may be out of sight."""
        first = self._first_visible
        if start >= first:
            return slice_mask(attn_mask, start - first, stop - first)
        return hide_first(slice_mask(attn_mask, 0, stop - first), first - start, stop - start, self.device)

    def _exact_tail(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Keys, values and their tokens in use, of what stands behind the compressed ones."""
        if self.buffer is not None and self.buffer.length:
            yield *self.buffer.tensors(), self.buffer.length
        if self._pending is not None:
            yield *self._pending, self._pending[0].shape[2]

    @property
    def _exact_start(self) -> int:
        """Position of the first token behind the compressed ones."""
        return self._length - sum(length for *_, length in self._exact_tail())

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.buffer is None:
            self.buffer = ResidualBuffer(keys, values, self.config.residual_length)
        self.buffer.append(keys, values)

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `PromptLayer._exact_states`: until something is compressed."""
        prefix, buffer = self.prefix, self.buffer
        if self.blocks or buffer is None:
            return None
        if self._first_visible:
            # The buffer may begin before the window does; a prefix is of a sequence that has no room in one
            skipped = self._first_visible - self._exact_start
            return None if skipped < 0 else (buffer.keys[:, :, skipped:], buffer.values[:, :, skipped:])
        states, num_in_front = (buffer.keys, buffer.values), 0
        if prefix is not None and prefix.num_slots:
            if not prefix.is_uniform:
                return None
            num_in_front = prefix.num_slots
            states = torch.cat((prefix.keys, states[0]), dim=2), torch.cat((prefix.values, states[1]), dim=2)
        self._plain_limit = num_in_front + self._buffer_limit
        if self.sliding_window is not None:
            self._plain_limit = min(self._plain_limit, self.sliding_window)
        self._first_heard = self._plain_limit - self.num_heard * self._needs_queries
        if self._length < self._plain_limit:
            self._buffer, self._plain = None, states
        return states

    @property
    def _buffer_limit(self) -> int:
        """Tokens in the buffer with which the next update compresses it."""
        return self.config.residual_length

    def _release_buffer(self) -> None:
        """Lets go of the buffer's tokens, which are stored in another form."""
        self.buffer = None if self.buffer is None else self.buffer.released()

    def _is_buffer_full(self) -> bool:
        """Whether the next update compresses what is in the buffer."""
        return self.buffer is not None and self.buffer.length >= self._buffer_limit

    def _before_update(self) -> None:
        """See `PromptLayer._before_update`: compresses what has waited for long enough."""
        if self._num_new > 1 or self._is_buffer_full():
            self._prepared = None
        if self._is_buffer_full():
            self._compress_buffer()
        if not self.record_past:
            self._let_go()

    def materialize(self, side: str) -> torch.Tensor:
        """See `LazyLayer.materialize`."""
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """See `LazyLayer.dense_tiles`."""
        held = self.prefix, self._tiled_blocks(), self._exact_tail(), self._exact_start
        return dense_tiles(sides, self.states_shape, *held, self.dtype, self.device, self._first_visible)

    def _drop_newest(self, count: int) -> None:
        self._prepared = None
        exact_start, length = self._exact_start, self._length - count
        if self.buffer is not None:
            self.buffer.drop_last(min(count, self.buffer.length))
        if length >= exact_start:
            return
        newest = self.blocks[-1] if self.blocks else None
        self.blocks = [block for block in self.blocks if block.start < length]
        if self.blocks and self.blocks[-1].start + self.blocks[-1].length > length:
            self.blocks[-1].truncate(length - self.blocks[-1].start)
        self._after_cut(newest)
        if self.prefix is not None:
            self.prefix.truncate(length)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._prepared = None
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)

    def _exact_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of prefix and buffer."""
        # Which keeps some beside
        self._prepared = None
        if self.buffer is not None:
            yield from (("residual", tensor) for tensor in self.buffer.tensors())
        if self.prefix is not None:
            yield from (("residual", self.prefix.keys), ("residual", self.prefix.values))
            yield from (("index", self.prefix.start), ("index", self.prefix.count))

    def _prefix_tensors(self) -> Iterator[torch.Tensor]:
        """What of the prefix copies may share."""
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.values, self.prefix.start, self.prefix.count)

    @abstractmethod
    def _num_exact(self) -> int:
        """Tokens that are exact, of the item that has most of them compressed."""

    def stats(self) -> dict[str, int]:
        """See `LazyLayer.stats`."""
        return {
            "tokens_cached": self._length,
            "tokens_exact": self._num_exact() if self.sliding_window is None else self._num_exact_held(),
            **self._counters,
            "dense_reads": self.dense_reads,
        }

    def _num_exact_held(self) -> int:
        """Tokens that are exact and have not been let go of."""
        if not self.is_initialized:
            return 0
        in_front = 0 if self.prefix is None else min(self.prefix.num_slots, self._length)
        return self._length - self._exact_start + in_front

    def _exact_state(self) -> dict[str, Any]:
        """The fields of its `LayerState` that every layer has; nothing is copied."""
        self.settle_prompt()
        batch_size, num_heads, _, key_head_dim = self.states_shape("keys")
        return {
            "dtype": self.dtype,
            "batch_size": batch_size,
            "num_heads": num_heads,
            "key_head_dim": key_head_dim,
            "value_head_dim": self._shapes["values"][3],
            "length": self._length,
            "counters": dict(self._counters),
            "prefix": self.prefix,
            "blocks": [block for block in self.blocks if block.length],
            "buffer": self.buffer,
            "padding": self.padding,
            "held_start": self._held_start,
        }

    def _restore_exact(self, state: LayerState) -> None:
        """Takes those fields over."""
        self._prepared = None
        self._length, self._counters = state.length, dict.fromkeys(self.counter_names, 0) | state.counters
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.dtype, self.batch_size = state.dtype, state.batch_size
        self.prefix, self.buffer, self.padding = state.prefix, state.buffer, state.padding
        self._held_start = state.held_start
        self.is_initialized = True

    def _place_on(self, device: torch.device) -> None:
        """Moves everything that has been restored to a device."""
        self.device = device
        if any(tensor.device != device for _, tensor in self.named_tensors()):
            self.map_tensors(lambda tensor: tensor.to(device))
