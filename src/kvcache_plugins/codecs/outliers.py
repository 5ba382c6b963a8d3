"""Outliers: which values of a chunk are kept exact, and how what is missing there is stored.

The largest and the smallest values of every channel (keys) or of every token (values) are kept: along the axis that
the values of one group share, and as many as the length of that same axis says, per channel over the real tokens of
the chunk, per token over the channels of all heads.

Storage is the same for keys and values: the outliers of a chunk lie sorted by tiles of 64 tokens and by head, so that
attention reads those of a tile in one piece wherever it begins, and a cut at the end of the sequence cuts off the end
of the list.

Tensors are `[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D, K outliers a channel or
token, N outliers of a chunk).
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.triton_kernels.stored_format import OUTLIER_TILE


@dataclass(frozen=True, slots=True)
class Outliers:
    """
    Outliers of chunks, one entry each in any order.

    Attributes:
        heads, tokens, channels (`torch.Tensor` of shape `[B, M, N]`, int64): the place of each.
        in_use (`torch.Tensor` of shape `[B, M, N]`, bool, *optional*): which entries mean anything; all by default.
        keep (`torch.Tensor` of shape `[B, H, M, L, D]`, bool, *optional*): what is left: neither an outlier nor
            padding.
    """

    heads: torch.Tensor
    tokens: torch.Tensor
    channels: torch.Tensor
    in_use: torch.Tensor | None
    keep: torch.Tensor | None = None


def num_outliers_per_side(length: int, sparsity: float) -> int:
    """Counts values kept on each side: half of `sparsity` of `length`, rounded, at most half of all."""
    return min(round(sparsity / 2 * length), length // 2)


def channel_bits(head_dim: int) -> int:
    """How far the token is shifted in the index of an outlier; the channel stands in the bits below."""
    return (head_dim - 1).bit_length()


def index_dtype(head_dim: int) -> torch.dtype:
    """Of the stored indices: 16 bits for up to 512 channels."""
    return torch.int16 if OUTLIER_TILE << channel_bits(head_dim) <= 2**15 else torch.int32


def num_offsets(length: int, num_heads: int) -> int:
    """Of the outliers of a chunk: where those of every tile and head begin, and where the last ones end."""
    return -(-length // OUTLIER_TILE) * num_heads + 1


def select_key_outliers(states: torch.Tensor, valid: torch.Tensor | None, sparsity: float) -> Outliers | None:
    """
    Selects a share `sparsity` of keys `[B, H, M, L, D]`, half of it on each side of every channel; `None` if that is
    nothing. A sequence with fewer real tokens `valid` `[B, M, L]` keeps fewer outliers, as it would alone.
    """
    lengths = [[states.shape[3]]] if valid is None else valid.sum(dim=2).tolist()
    numbers = [[num_outliers_per_side(length, sparsity) for length in row] for row in lengths]
    num_per_side = max(map(max, numbers))
    if num_per_side == 0:
        return None
    valid_rows = None if valid is None else valid[:, None, :, None, :]
    counts = torch.tensor(numbers, device=states.device)[:, None, :, None, None]
    indices, in_use = (
        each.transpose(3, 4) for each in _extremes(states.transpose(3, 4), valid_rows, counts, num_per_side)
    )
    # An index that is not in use may stand at the place of one that is: it must not erase it, hence the sum
    marks = torch.zeros_like(states).scatter_add_(3, indices, in_use.to(states.dtype).expand(indices.shape))
    heads = torch.arange(states.shape[1], device=states.device)[:, None, None, None]
    channels = torch.arange(states.shape[4], device=states.device)
    all_heads, tokens, all_channels, used = (
        each.expand(indices.shape).transpose(1, 2).flatten(2) for each in (heads, indices, channels, in_use)
    )
    return Outliers(all_heads, tokens, all_channels, None if valid is None else used, _and_real(marks == 0, valid))


def select_value_outliers(states: torch.Tensor, valid: torch.Tensor | None, sparsity: float) -> Outliers | None:
    """Selects outliers of every token of values, over the channels of all heads, as `select_key_outliers` does."""
    rows = states.permute(0, 2, 3, 1, 4)
    num_per_side = num_outliers_per_side(rows.shape[3] * rows.shape[4], sparsity)
    if num_per_side == 0:
        return None
    counts = torch.tensor(num_per_side, device=rows.device)
    indices = _extremes(rows.flatten(3), None, counts, num_per_side)[0]
    left = rows.new_ones(rows.shape, dtype=torch.bool).flatten(3).scatter_(3, indices, False)
    left = left.view(rows.shape).permute(0, 3, 1, 2, 4)
    tokens = torch.arange(rows.shape[2], device=rows.device)[:, None].expand(indices.shape).flatten(2)
    used = None if valid is None else valid[..., None].expand(indices.shape).flatten(2)
    heads, channels = indices.flatten(2) // states.shape[4], indices.flatten(2) % states.shape[4]
    return Outliers(heads, tokens, channels, used, _and_real(left, valid))


def _extremes(
    rows: torch.Tensor, valid: torch.Tensor | None, counts: torch.Tensor, num_per_side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Indices of the `num_per_side` largest and smallest values of the last dimension, and which of them count.

    `counts`, broadcastable to `[..., 1]`, is each row's own number a side. No index that counts appears twice, not
    even among equal values: corrections are added, and one added twice would be wrong.
    """
    in_use = torch.arange(num_per_side, device=rows.device) < counts
    highest = rows if valid is None else torch.where(valid, rows, -torch.inf)
    lowest = rows if valid is None else torch.where(valid, rows, torch.inf)
    top = highest.topk(num_per_side, dim=-1).indices
    lowest = lowest.scatter(-1, top, torch.where(in_use, torch.inf, lowest.gather(-1, top)))
    bottom = lowest.topk(num_per_side, dim=-1, largest=False).indices
    return torch.cat([top, bottom], dim=-1), torch.cat([in_use, in_use], dim=-1)


def _and_real(keep: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return keep if valid is None else keep & valid[:, None, :, :, None]


def store_outliers(
    missing: torch.Tensor, outliers: Outliers, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Stores what is missing at the outliers of `missing` `[B, H, M, L, D]`: indices, values in `dtype` and offsets, as
    `sort_into_tiles` returns them.
    """
    _, num_heads, _, length, head_dim = missing.shape
    flat = (outliers.heads * length + outliers.tokens) * head_dim + outliers.channels
    values = missing.transpose(1, 2).flatten(2).gather(2, flat).to(dtype)
    return sort_into_tiles(outliers, values, num_heads, length, head_dim)


def sort_into_tiles(
    places: Outliers, values: torch.Tensor, num_heads: int, length: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Sorts values `[B, M, N]` of outliers of chunks of so many heads, tokens and channels as they are stored.

    Returns:
        Indices `[B, 1, M, N]` (int16, or int32 for a `head_dim` above 512: the token within its tile, shifted left by
        `channel_bits(head_dim)`, and the channel), values `[B, 1, M, N]`, and offsets `[B, 1, M, tiles * H + 1]`
        (int32): the outliers of tile `t` and head `h` are those from `offsets[t * H + h]` on, up to the next offset.
        Entries that are not in use stand behind the last offset, with value 0.
    """
    num_slots = num_offsets(length, num_heads) - 1
    slots = places.tokens // OUTLIER_TILE * num_heads + places.heads
    indices = (places.tokens % OUTLIER_TILE << channel_bits(head_dim)) + places.channels
    if places.in_use is not None:
        slots = torch.where(places.in_use, slots, num_slots)
        indices, values = torch.where(places.in_use, indices, 0), torch.where(places.in_use, values, 0)
    order = slots.to(torch.int32).sort(dim=-1, stable=True).indices
    counts = slots.new_zeros(*slots.shape[:2], num_slots + 2)
    counts.scatter_add_(2, slots + 1, torch.ones_like(slots))
    offsets = counts.cumsum(dim=2)[..., : num_slots + 1].to(torch.int32)
    return (
        indices.to(index_dtype(head_dim)).gather(2, order).unsqueeze(1),
        values.gather(2, order).unsqueeze(1),
        offsets.unsqueeze(1),
    )


def add_outliers(
    states: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, tokens: slice
) -> None:
    """
    Adds what `sort_into_tiles` returned to the tokens `tokens` of the same chunks, `[B, H, M, tokens, D]`, contiguous,
    in place.
    """
    batch_size, num_heads, num_chunks, length, head_dim = states.shape
    first, last = tokens.start // OUTLIER_TILE, -(-tokens.stop // OUTLIER_TILE)
    slots = offsets[:, 0, :, first * num_heads : last * num_heads + 1].long()
    starts, ends = slots[..., :-1, None], slots[..., 1:, None]
    width = int((ends - starts).max())
    if width == 0:
        return
    # Entries [B, M, tiles * heads, width], as many as the fullest tile has
    entries = starts + torch.arange(width, device=states.device)
    in_use = entries < ends
    flat = entries.clamp_(max=indices.shape[3] - 1).flatten(2)
    index = indices[:, 0].gather(2, flat).view(in_use.shape).long()
    value = values[:, 0].gather(2, flat).view(in_use.shape).float()
    tiles = torch.arange(first, last, device=states.device).repeat_interleave(num_heads)[:, None]
    token = tiles * OUTLIER_TILE + (index >> channel_bits(head_dim)) - tokens.start
    in_use &= (token >= 0) & (token < length)
    place = torch.where(in_use, token * head_dim + (index & ((1 << channel_bits(head_dim)) - 1)), 0)

    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(2, (last - first, num_heads)).permute(0, 3, 1, 2, 4).flatten(3)

    states.view(*states.shape[:3], -1).scatter_add_(3, by_head(place), by_head(torch.where(in_use, value, 0)))
