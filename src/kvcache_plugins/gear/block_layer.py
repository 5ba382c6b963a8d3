"""What the layers of a `GEARCache` have in common, whatever they make of their tokens.

    [ prefix: exact, first tokens of each item ] [ blocks: compressed ] [ buffer: exact, newest ]

Tokens wait in the buffer until they are compressed at the *beginning* of an update, so that a rollback of the newest
one finds its tokens exact. A layer says how they are compressed, and what attention makes of a block of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.masking import combine_masks, mask_columns, slice_mask
from kvcache_plugins.ops.parts import DensePart

from .config import GEARConfig
from .dense_tiles import TiledBlock, dense_tiles
from .layer_state import LayerState
from .storage import ExactPrefix


# An update of this many times `residual_length` tokens is a prompt of its own
_PROMPT_FACTOR = 4

if TYPE_CHECKING:
    from .transform.config import TransformConfig

    # Mixed in: no class between a layer and `PromptLayer`
    _Base = PromptLayer
else:
    _Base = object


class StoredBlock(Protocol):
    """Consecutive tokens, compressed."""

    start: int
    length: int

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""


BlockT = TypeVar("BlockT", bound=StoredBlock)


class BlockLayerMixin(Generic[BlockT], _Base):
    """
    Mixed into a `PromptLayer` that stores a prefix, blocks and a buffer, before it.

    A subclass says how attention is computed over a block (`_block_part`, `_attend_parts`), how a block becomes dense
    (`_tiled_blocks`), and what goes on when the newest block has been cut (`_after_cut`).
    """

    config: "GEARConfig | TransformConfig"

    def _clear(self) -> None:
        super()._clear()
        self.prefix: ExactPrefix | None = None
        self.blocks: list[BlockT] = []
        self.buffer: ResidualBuffer | None = None

    @abstractmethod
    def _attend_parts(
        self, query: torch.Tensor, parts: Iterator[Any], scale: float | None
    ) -> tuple[torch.Tensor, str, bool]:
        """Attention over parts; the kernel that computed it, and whether another one was wanted."""

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
    def _after_cut(self, newest: BlockT | None) -> None:
        """Called when the newest tokens have been dropped of blocks, of which `newest` was the last."""

    def _is_prompt(self, count: int) -> bool:
        return count >= _PROMPT_FACTOR * self.config.residual_length

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        """See `LazyLayer.attend`."""
        if is_causal:
            shape = (query.shape[2], self._length)
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
        output, kernel, is_fallback = self._attend_parts(query, self._parts(attn_mask), scale)
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += kernel != "torch"
        self._counters["kernel_fallbacks"] += is_fallback
        self._after_attention(query, attn_mask, is_causal=is_causal)
        return output

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        """See `LazyLayer.on_exact_attention`."""
        self._after_attention(query, attn_mask, is_causal=is_causal)

    def _after_attention(self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool) -> None:
        self._learn_padding(None if is_causal else attn_mask)
        self._note_queries(query)
        self.settle_prompt()

    def _note_queries(self, query: torch.Tensor) -> None:
        """What the layer makes of queries; nothing by default."""

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[Any]:
        """Everything held, each token once, with its columns of the mask."""
        prefix = self.prefix
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions, self.batch_size, self._length)
            mask = mask if prefix.is_uniform else combine_masks(mask, prefix.in_use)
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for number, block in enumerate(self.blocks):
            stop = block.start + block.length
            mask = slice_mask(attn_mask, block.start, stop)
            if prefix is not None and self._may_overlap(number, block, prefix):
                columns = torch.arange(block.start, stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield self._block_part(block, mask)
        position = self._exact_start
        for keys, values, length in self._exact_tail():
            yield DensePart(keys, values, length, slice_mask(attn_mask, position, position + length))
            position += length

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

    def materialize(self, side: str) -> torch.Tensor:
        """See `LazyLayer.materialize`."""
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """See `LazyLayer.dense_tiles`."""
        held = self.prefix, self._tiled_blocks(), self._exact_tail(), self._exact_start
        return dense_tiles(sides, self.states_shape, *held, self.dtype, self.device)

    def _drop_newest(self, count: int) -> None:
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
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)

    def _exact_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of prefix and buffer."""
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
            "tokens_exact": self._num_exact(),
            **self._counters,
            "dense_reads": self.dense_reads,
        }

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
            "blocks": self.blocks,
            "buffer": self.buffer,
            "padding": self.padding,
        }

    def _restore_exact(self, state: LayerState) -> None:
        """Takes those fields over."""
        self._length, self._counters = state.length, dict.fromkeys(self.counter_names, 0) | state.counters
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.dtype, self.batch_size = state.dtype, state.batch_size
        self.prefix, self.buffer, self.padding = state.prefix, state.buffer, state.padding
        self.is_initialized = True

    def _place_on(self, device: torch.device) -> None:
        """Moves everything that has been restored to a device."""
        self.device = device
        if any(tensor.device != device for _, tensor in self.named_tensors()):
            self.map_tensors(lambda tensor: tensor.to(device))
