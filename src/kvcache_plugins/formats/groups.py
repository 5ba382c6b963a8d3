"""`QuantizedChunks`: chunks of keys or values whose groups of values share a scale.

    chunk = zero + scale * codes + low_rank_a low_rank_b^T + outliers

A group of values shares one step (`scale`) and one minimum (`zero`), both in float16. Groups lie along one of two
axes:

- `"channel"`: `group_size` consecutive tokens of one channel of one head (`None`: all tokens of the chunk);
- `"token"`: `group_size` consecutive channels of one token of one head (`None`: all channels of all heads of the
  token).

The outliers of a chunk are sorted by tiles of 64 tokens and by head, so that attention reads those of a tile in one
piece wherever it begins, and a cut at the end of the sequence cuts off the end of the list.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, P bytes of a token's codes, R rank, N
outliers of a chunk.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .bits import unpack
from .hadamard import rotate


# Tokens whose outliers are stored together: an index within a tile of up to 512 channels then fits 16 bits
OUTLIER_TILE = 64
# Dtype of everything that is stored but codes and indices
STORAGE_DTYPE = torch.float16
CHUNK_DIM = 2


@dataclass(frozen=True, slots=True)
class Grouping:
    """The values that share a scale and a zero: see the module's docstring."""

    axis: str
    group_size: int | None


# Equal if the same object: kernels keep what they have prepared for one in dictionaries
@dataclass(frozen=True, eq=False)
class QuantizedChunks:
    """
    Chunks of keys or values in codes that share scales. The batch is the first dimension of tensors, the chunk the
    third.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, M, L, P]`, uint8): packed codes.
        scale, zero (`torch.Tensor` of shape `[B, H, M, groups, D]` or `[B, H or 1, M, L, groups]`, float16): a group's
            step and minimum.
        low_rank_a, low_rank_b (`torch.Tensor` of shape `[B, H, M, L, R]` and `[B, H, M, D, R]`, float16, *optional*):
            factors of the low-rank correction.
        outlier_indices, outlier_values (`torch.Tensor` of shape `[B, 1, M, N]`, int16 or int32 and float16,
            *optional*): token within a tile of `OUTLIER_TILE` times the next power of two from D on, plus the channel;
            and the correction there. Tiles follow each other, and within a tile the heads.
        outlier_offsets (`torch.Tensor` of shape `[B, 1, M, tiles * H + 1]`, int32, *optional*): first and last outlier
            of each tile and head.
        nbits (`int`): bits a code.
        axis (`str`): `"channel"` where tokens of a channel share a scale, `"token"` where channels of a token do.
        group_size (`int`, *optional*): values of a group, where it is not all.
        head_dim (`int`): D.
        is_rotated (`bool`, *optional*, defaults to `False`): True if `hadamard.rotate` was applied before the states
            were quantized; a reader has to undo it.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    low_rank_a: torch.Tensor | None
    low_rank_b: torch.Tensor | None
    outlier_indices: torch.Tensor | None
    outlier_values: torch.Tensor | None
    outlier_offsets: torch.Tensor | None
    nbits: int
    axis: str
    group_size: int | None
    head_dim: int
    is_rotated: bool = False

    # Tensors with an entry for every token, or for every few of them
    token_tensors: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero")

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.axis, self.group_size)

    @property
    def num_chunks(self) -> int:
        return self.codes.shape[CHUNK_DIM]

    @property
    def chunk_length(self) -> int:
        return self.codes.shape[3]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of everything stored."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedChunks":
        """Return the same states with `function` applied to every tensor."""
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self.named_tensors()}
        return dataclasses.replace(self, **changes)

    def of_tokens(self, chunks: slice, tokens: slice) -> dict[str, torch.Tensor]:
        """Slice the codes and scales of some chunks' tokens, which begin and end where groups do, by name."""
        found = {}
        for name in self.token_tensors:
            tensor: torch.Tensor = getattr(self, name)
            # Each entry is of equally many tokens
            count, length = tensor.shape[3], self.chunk_length
            found[name] = tensor[:, :, chunks, tokens.start * count // length : -(-tokens.stop * count // length)]
        return found

    def dequantize_codes(self, tile: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the states `[B, H, chunks, tokens, D]`, float32, of codes and scales of a tile."""
        codes = unpack(tile["codes"], self.nbits, self.head_dim)
        return dequantize(codes, tile["scale"], tile["zero"], self.grouping)

    def dequantize_tile(self, chunks: slice, tokens: slice) -> torch.Tensor:
        """
        Decode some chunks' tokens, `[B, H, chunks * tokens, D]`, float32; `tokens` begin and end where groups do.
        """
        states = self.dequantize_codes(self.of_tokens(chunks, tokens))
        if self.low_rank_a is not None and self.low_rank_b is not None:
            states += self.low_rank_a[:, :, chunks, tokens].float() @ self.low_rank_b[:, :, chunks].float().mT
        if self.outlier_indices is not None:
            stored = self.outlier_indices, self.outlier_values, self.outlier_offsets
            indices, values, offsets = (each[:, :, chunks] for each in stored if each is not None)
            add_outliers(states, indices, values, offsets, tokens)
        return (rotate(states) if self.is_rotated else states).flatten(2, 3)


def channel_bits(head_dim: int) -> int:
    """Return the bits of the channel in the index of an outlier, which are the lowest; the token's are above."""
    return (head_dim - 1).bit_length()


def index_dtype(head_dim: int) -> torch.dtype:
    """Return the dtype of the stored indices: int16 for up to 512 channels."""
    return torch.int16 if OUTLIER_TILE << channel_bits(head_dim) <= 2**15 else torch.int32


def num_offsets(length: int, num_heads: int) -> int:
    """Count a chunk's offsets: one for the first outlier of every tile and head, and one for the end of the last."""
    return -(-length // OUTLIER_TILE) * num_heads + 1


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """Decode the results of `codecs.quantization.quantize` to float32 states, contiguous."""
    states = codes.to(torch.float32, memory_format=torch.contiguous_format)
    states *= expand_groups(scale, grouping, states.shape)
    states += expand_groups(zero, grouping, states.shape)
    return states


def expand_groups(grouped: torch.Tensor, grouping: Grouping, states_shape: torch.Size) -> torch.Tensor:
    """Repeat scales or zeros of groups to the shape of the states, as a view where possible."""
    if grouping.axis == "channel":
        size = states_shape[3] // grouped.shape[3]
        return grouped.unsqueeze(4).expand(-1, -1, -1, -1, size, -1).flatten(3, 4)
    if grouped.shape[4] == 1:
        return grouped.expand(-1, states_shape[1], -1, -1, states_shape[4])
    size = states_shape[4] // grouped.shape[4]
    return grouped.unsqueeze(5).expand(-1, -1, -1, -1, -1, size).flatten(4, 5)


def add_outliers(
    states: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, tokens: slice
) -> None:
    """
    Add outliers in place to the tokens `tokens` of their chunks, `[B, H, M, tokens, D]`, contiguous.
    """
    batch_size, num_heads, num_chunks, length, head_dim = states.shape
    first, last = tokens.start // OUTLIER_TILE, -(-tokens.stop // OUTLIER_TILE)
    slots = offsets[:, 0, :, first * num_heads : last * num_heads + 1].long()
    starts, ends = slots[..., :-1, None], slots[..., 1:, None]
    width = int((ends - starts).max())
    if width == 0:
        return
    # Entries [B, M, tiles * heads, width], as many as the fullest tile has
    entries = starts + torch.arange(width, dtype=torch.int64, device=states.device)
    in_use = entries < ends
    flat = entries.clamp_(max=indices.shape[3] - 1).flatten(2)
    index = indices[:, 0].gather(2, flat).view(in_use.shape).long()
    value = values[:, 0].gather(2, flat).view(in_use.shape).float()
    tiles = torch.arange(first, last, dtype=torch.int64, device=states.device).repeat_interleave(num_heads)[:, None]
    token = tiles * OUTLIER_TILE + (index >> channel_bits(head_dim)) - tokens.start
    in_use &= (token >= 0) & (token < length)
    place = torch.where(in_use, token * head_dim + (index & ((1 << channel_bits(head_dim)) - 1)), 0)

    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(2, (last - first, num_heads)).permute(0, 3, 1, 2, 4).flatten(3)

    states.view(*states.shape[:3], -1).scatter_add_(3, by_head(place), by_head(torch.where(in_use, value, 0)))


def keep_tokens(states: QuantizedChunks, length: int) -> QuantizedChunks:
    """Copy the first `length` tokens of a single chunk; factors and outliers of the others are freed too."""
    if length == states.chunk_length:
        return states
    tensors = states.of_tokens(slice(None), slice(0, length))
    if states.low_rank_a is not None:
        tensors["low_rank_a"] = states.low_rank_a[:, :, :, :length]
    if states.outlier_offsets is not None:
        num_slots = -(-length // OUTLIER_TILE) * states.codes.shape[1]
        offsets = states.outlier_offsets[..., : num_slots + 1]
        kept = int(offsets[..., -1].max())
        tensors["outlier_offsets"] = offsets
        tensors |= {name: getattr(states, name)[..., :kept] for name in ("outlier_indices", "outlier_values")}
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors.items()}
    return dataclasses.replace(states, **copies)
