"""Encoding of keys and values in chunks whose groups of values share a scale.

Codecs of [GEAR](https://huggingface.co/papers/2403.05527), KIVI and their kin: quantized codes, a low-rank correction
`A B^T` of their error, and sparse outliers. The counts of outliers are taken from the axis that is filtered (the
released code takes both from the channels), and every head and sequence is compressed on its own. Outliers are left
out of the range of their group and clamped into it; after the low rank is known, the error that remains there is
stored, so that outliers are exact to float16 in the sum of all three parts.

A `SideCodec` is of keys or of values, a `GroupCodec` of both. `SideCodec.layout` describes the stored tensors:
encoding tensors without data (`meta`) allocates them, and tensors of a file have to match.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, R rank, N outliers of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from kvcache_plugins.files.schema import Stored, check_layout
from kvcache_plugins.formats.bits import pack, packed_size
from kvcache_plugins.formats.groups import (
    CHUNK_DIM,
    OUTLIER_TILE,
    STORAGE_DTYPE,
    Grouping,
    QuantizedChunks,
    channel_bits,
    dequantize,
    index_dtype,
    num_offsets,
)
from kvcache_plugins.formats.hadamard import rotate

from .codec import PackingCodec
from .low_rank import power_iteration
from .outliers import num_outliers_per_side, select_outliers, sort_into_tiles
from .quantization import are_in_range, check_range, quantize


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ChunkSizes(NamedTuple):
    """
    Sizes of a chunk's corrections.

    Attributes:
        rank (`int`): R, 0 without low rank.
        num_outliers (`int`, *optional*): N, `None` without outliers.
    """

    rank: int
    num_outliers: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCodec:
    """
    Codec of keys or of values.

    Attributes:
        side (`str`): `"key"` or `"value"`: outliers are those of a channel of keys, of a token of values.
        head_dim (`int`): D.
        nbits (`int`): bits a code.
        grouping (`Grouping`): the values that share a scale.
        sparsity (`float`, *optional*, defaults to 0): share of the values kept as outliers.
        rank, decode_rank (`int`, *optional*, defaults to 0): rank of a prompt's correction, and of decoded tokens'.
        num_iterations (`int`, *optional*, defaults to 1): power iterations.
        is_rotated (`bool`, *optional*, defaults to `False`): True if states are rotated before they are quantized.
        spreads_errors (`bool`, *optional*, defaults to `False`): True if tokens of a chunk that would all be rounded
            to the same side are not, see `quantize`; a token's codes then depend on the others.
    """

    side: str
    head_dim: int
    nbits: int
    grouping: Grouping
    sparsity: float = 0.0
    rank: int = 0
    decode_rank: int = 0
    num_iterations: int = 1
    is_rotated: bool = False
    spreads_errors: bool = False

    # Class of the stored chunks
    states_class: ClassVar[type[QuantizedChunks]] = QuantizedChunks

    def layout(self, batch_size: int, num_heads: int, num_chunks: int, length: int, sizes: ChunkSizes) -> Layout:
        """Return name, shape and dtype of the stored tensors of chunks of `length` tokens."""
        dims = batch_size, num_heads, num_chunks
        grouping, head_dim = self.grouping, self.head_dim
        if grouping.axis == "channel":
            scale: tuple[int, ...] = (*dims, length // (grouping.group_size or length), head_dim)
        elif grouping.group_size is None:
            scale = (batch_size, 1, num_chunks, length, 1)
        else:
            scale = (*dims, length, head_dim // grouping.group_size)
        found: Layout = {"codes": ((*dims, length, packed_size(head_dim, self.nbits)), torch.uint8)}
        found |= dict.fromkeys(("scale", "zero"), (scale, STORAGE_DTYPE))
        if sizes.rank:
            found["low_rank_a"] = (*dims, length, sizes.rank), STORAGE_DTYPE
            found["low_rank_b"] = (*dims, head_dim, sizes.rank), STORAGE_DTYPE
        if sizes.num_outliers is not None:
            shape = batch_size, 1, num_chunks
            found["outlier_indices"] = (*shape, sizes.num_outliers), index_dtype(head_dim)
            found["outlier_values"] = (*shape, sizes.num_outliers), STORAGE_DTYPE
            found["outlier_offsets"] = (*shape, num_offsets(length, num_heads)), torch.int32
        return found

    def sizes(
        self, num_heads: int, length: int, num_real: int | None = None, *, is_prompt: bool = False
    ) -> ChunkSizes:
        """
        Compute the sizes of corrections of a chunk of `length` tokens; the sequence with the least padding has
        `num_real` real ones (all by default).
        """
        num_real = length if num_real is None else num_real
        num_channels = num_heads * self.head_dim
        if self.side == "key":
            num_outliers = num_channels * 2 * num_outliers_per_side(num_real, self.sparsity)
        else:
            num_outliers = length * 2 * num_outliers_per_side(num_channels, self.sparsity)
        return ChunkSizes(self.rank if is_prompt else self.decode_rank, num_outliers or None)

    def encode(
        self, states: torch.Tensor, valid: torch.Tensor | None = None, *, is_prompt: bool = False
    ) -> tuple[QuantizedChunks, torch.Tensor]:
        """
        Compress chunks.

        Args:
            states (`torch.Tensor` of shape `[B, H, M, L, D]`, any floating dtype): M chunks of L tokens.
            valid (`torch.Tensor` of shape `[B, M, L]`, bool, *optional*): tokens that are real; it has data even if
                states have none. Padding enters no range, no count of outliers and no factor, and its stored values
                mean nothing.
            is_prompt (`bool`, *optional*, defaults to `False`): True if the rank of a prompt applies, not that of
                decoded tokens.

        Returns:
            The stored chunks, and whether all numbers fit float16 (`torch.Tensor` of shape `[]`, bool), which NaN and
            infinity do not: to be passed to `check_range` before the chunks are used.
        """
        batch_size, num_heads, num_chunks, length, _ = states.shape
        if states.is_meta:
            num_real = None if valid is None else int(valid.sum(dim=2).max())
            sizes = self.sizes(num_heads, length, num_real, is_prompt=is_prompt)
            layout = self.layout(batch_size, num_heads, num_chunks, length, sizes)
            blank = {name: states.new_empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
            return self.wrap(blank), torch.ones((), dtype=torch.bool, device="cpu")
        tensors = self._encode(rotate(states) if self.is_rotated else states.float(), valid, is_prompt)
        # Kernels read them in this order
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return self.wrap(tensors), are_in_range(*(each for each in tensors.values() if each.is_floating_point()))

    def _encode(self, states: torch.Tensor, valid: torch.Tensor | None, is_prompt: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of `layout` for states in float32, rotated already."""
        num_heads, length = states.shape[1], states.shape[3]
        rank = self.rank if is_prompt else self.decode_rank
        keep = None
        if valid is not None:
            keep = valid[:, None, :, :, None]
            states = torch.where(keep, states, 0)
        selected = select_outliers(states, valid, self.sparsity, self.side)
        if selected is not None:
            keep = selected[1]
        # A low rank holds the errors that tokens share
        spread_errors = self.spreads_errors and not rank
        codes, scale, zero = quantize(states, keep, self.nbits, self.grouping, spread_errors=spread_errors)
        tensors = {"codes": pack(codes, self.nbits), "scale": scale, "zero": zero}
        if rank or selected is not None:
            missing = states - dequantize(codes, scale, zero, self.grouping)
            if rank:
                residual = missing if keep is None else torch.where(keep, missing, 0)
                a, b = (each.to(STORAGE_DTYPE) for each in power_iteration(residual, rank, self.num_iterations))
                tensors |= {"low_rank_a": a, "low_rank_b": b}
                if selected is not None:
                    missing -= a.float() @ b.float().transpose(-1, -2)
            if selected is not None:
                flat = selected[0].flat_indices(length, self.head_dim)
                values = missing.transpose(1, 2).flatten(2).gather(2, flat).to(STORAGE_DTYPE)
                stored = sort_into_tiles(selected[0], values, num_heads, length, self.head_dim)
                tensors |= dict(zip(("outlier_indices", "outlier_values", "outlier_offsets"), stored, strict=True))
        return tensors

    def wrap(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedChunks:
        """Make stored chunks of the tensors of a `layout`."""
        missing = dict.fromkeys(("low_rank_a", "low_rank_b", "outlier_indices", "outlier_values", "outlier_offsets"))
        return self.states_class(
            **{**missing, **tensors},  # type: ignore[arg-type]
            nbits=self.nbits,
            axis=self.grouping.axis,
            group_size=self.grouping.group_size,
            head_dim=self.head_dim,
            is_rotated=self.is_rotated,
        )

    def is_of_decoded(self, states: QuantizedChunks) -> bool:
        """Return true if chunks of decoded tokens, none of them padding, can be stored after those of `states`."""
        batch_size, num_heads, num_chunks, length, _ = states.codes.shape
        layout = self.layout(batch_size, num_heads, num_chunks, length, self.sizes(num_heads, length))
        return {name: tensor.shape for name, tensor in states.named_tensors()} == {
            name: shape for name, (shape, _) in layout.items()
        }

    def read(
        self, path: str, tensors: Mapping[str, torch.Tensor], batch_size: int, num_heads: int, decoded_length: int
    ) -> QuantizedChunks:
        """
        Make chunks of the tensors of a file. Kernels read them by address without a check of bounds, so every index
        is checked here.

        Args:
            path (`str`): their path within the file, for errors.
            decoded_length (`int`): L, if there are several chunks.

        Raises:
            ValueError: if a tensor is missing, has another shape or dtype, or an impossible value.
        """
        num_chunks, length = (_size(tensors, "codes", dim) for dim in (CHUNK_DIM, 3))
        group_size = self.grouping.group_size or max(length, 1)
        if not num_chunks or not length or self.grouping.axis == "channel" and length % group_size:
            raise ValueError(f"`{path}`: {num_chunks} chunks of {length} tokens cannot be in groups of {group_size}")
        # A single chunk may be a prompt's or of decoded tokens
        ranks = {self.decode_rank} if num_chunks > 1 else {self.rank, self.decode_rank}
        rank = _size(tensors, "low_rank_b", 4)
        if rank not in ranks or num_chunks > 1 and length != decoded_length:
            raise ValueError(
                f"`{path}`: chunks have a rank of {sorted(ranks)}, and if they are several {decoded_length} tokens, "
                f"but got {num_chunks} of {length} of rank {rank}"
            )
        has_outliers = self.sparsity > 0 and "outlier_offsets" in tensors
        sizes = ChunkSizes(rank, _size(tensors, "outlier_values", 3) if has_outliers else None)
        layout = self.layout(batch_size, num_heads, num_chunks, length, sizes)
        check_layout(path, tensors, {name: Stored(*stored) for name, stored in layout.items()})
        states = self.wrap(tensors)
        if has_outliers:
            self._check_outliers(path, states)
        return states

    def _check_outliers(self, path: str, states: QuantizedChunks) -> None:
        """Raise a `ValueError` if an offset or an index of outliers is out of bounds."""
        indices, offsets = states.outlier_indices, states.outlier_offsets
        assert indices is not None and offsets is not None
        counts = offsets.diff(dim=3)
        # No index of a tile and head occurs twice
        most = OUTLIER_TILE * self.head_dim
        if bool((offsets[..., 0] != 0).any() | (counts < 0).any() | (counts > most).any()):
            raise ValueError(f"`{path}.outlier_offsets` have to rise from 0 on, by no more than a tile has places")
        if int(offsets[..., -1].max()) > indices.shape[3]:
            raise ValueError(f"`{path}.outlier_offsets` have to be at most {indices.shape[3]}, the number of outliers")
        bits = channel_bits(self.head_dim)
        tokens, channels = indices >> bits, indices & ((1 << bits) - 1)
        if bool(((tokens < 0) | (tokens >= OUTLIER_TILE) | (channels >= self.head_dim)).any()):
            raise ValueError(f"`{path}.outlier_indices` have to be places of a tile")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCodec(PackingCodec):
    """Codec of keys and values that are compressed in the same chunks."""

    keys: SideCodec
    values: SideCodec

    has_kernels = True

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        *,
        num_chunks: int = 1,
        is_prompt: bool = False,
    ) -> tuple[QuantizedChunks, QuantizedChunks]:
        """
        Compress consecutive tokens `[B, H, tokens, D]` in chunks of equal length; `valid` `[B, tokens]` marks those
        that are no padding, and `is_prompt` is as in `SideCodec.encode`. The host waits for a device once, in the end.

        Raises:
            ValueError: if a number does not fit float16, the dtype of everything but the codes.
        """
        valid = None if valid is None else valid.unflatten(1, (num_chunks, -1))
        (stored_keys, keys_fit), (stored_values, values_fit) = (
            codec.encode(states.unflatten(2, (num_chunks, -1)), valid, is_prompt=is_prompt)
            for codec, states in ((self.keys, keys), (self.values, values))
        )
        check_range(keys_fit, values_fit)
        return stored_keys, stored_values


def _size(tensors: Mapping[str, torch.Tensor], name: str, dim: int) -> int:
    """Return the size of a dimension of a tensor, 0 if it is missing or has no such dimension."""
    tensor = tensors.get(name)
    return 0 if tensor is None or tensor.dim() <= dim else tensor.shape[dim]
