"""Outliers: the largest and the smallest values of every channel (keys) or of every token (values), and their storage.

Selection is along the axis that the values of one group share, and the counts are taken from the length of that same
axis: per channel over the real tokens of the chunk, per token over the channels of all heads. Tensors are
`[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D).

Storage is the same for both: the outliers of a chunk lie sorted by tiles of 64 tokens and by head, so that attention
reads those of a tile in one piece wherever it begins, and a cut at the end of the sequence cuts off the end of the
list.
"""

from dataclasses import dataclass

import torch


# Tokens; a place within a tile of up to 512 channels then fits 16 bits
OUTLIER_TILE = 64


def num_outliers_per_side(length: int, sparsity: float) -> int:
    """
    How many of `length` values are kept on each side: half of `sparsity`, to the nearest whole number, at most half of
    all.
    """
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


@dataclass(frozen=True, slots=True)
class OutlierPlaces:
    """
    Where outliers are, one entry each in any order.

    Attributes:
        heads, tokens, channels (`torch.Tensor` of shape `[B, M, N]`, int64): the place of each.
        in_use (`torch.Tensor` of shape `[B, M, N]`, bool, *optional*): which entries mean anything; all by default.
    """

    heads: torch.Tensor
    tokens: torch.Tensor
    channels: torch.Tensor
    in_use: torch.Tensor | None


def sort_into_tiles(
    places: OutlierPlaces, values: torch.Tensor, num_heads: int, length: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Outliers as they are stored.

    Args:
        places (`OutlierPlaces`): where they are.
        values (`torch.Tensor` of shape `[B, M, N]`): their values.
        num_heads, length, head_dim (`int`): H, L and D.

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
    Adds stored outliers to some tokens of chunks, in place.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, tokens, D]`, contiguous): the tokens `tokens` of every chunk.
        indices, values, offsets (`torch.Tensor`): what `sort_into_tiles` returned, for the same chunks.
        tokens (`slice`): which tokens of a chunk.
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


def num_key_outliers(length: int, valid: torch.Tensor | None, sparsity: float) -> tuple[torch.Tensor, int]:
    """
    How many outliers each chunk of `length` tokens keeps on each side of a channel, `[B or 1, M or 1]` on the CPU, and
    the most of these. An item with fewer real tokens (`valid` `[B, M, L]`) keeps fewer, as it would alone.
    """
    lengths = [[length]] if valid is None else valid.sum(dim=2).tolist()
    counts = torch.tensor([[num_outliers_per_side(number, sparsity) for number in row] for row in lengths])
    return counts, int(counts.max())


def select_key_outliers(
    states: torch.Tensor, valid: torch.Tensor | None, sparsity: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    The outliers of every channel of keys.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`):
            Keys.
        valid (`torch.Tensor` of shape `[B, M, L]`, bool, *optional*):
            Tokens that are real. An item with fewer of them keeps fewer outliers, as it would alone.
        sparsity (`float`):
            Share of the values to keep, half of it on each side.

    Returns:
        Token indices `[B, H, M, K, D]` (int64) and whether each is in use, `[B or 1, 1, M or 1, K, 1]`, or `None` if
        there is nothing to keep.
    """
    counts, num_per_side = num_key_outliers(states.shape[3], valid, sparsity)
    if num_per_side == 0:
        return None
    valid_rows = None if valid is None else valid[:, None, :, None, :]
    counts = counts.to(states.device)[:, None, :, None, None]
    indices, in_use = _extremes(states.transpose(3, 4), valid_rows, counts, num_per_side)
    return indices.transpose(3, 4), in_use.transpose(3, 4)


def select_value_outliers(states: torch.Tensor, sparsity: float) -> torch.Tensor | None:
    """
    The outliers of every token of values, over the channels of all heads.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`):
            Values.
        sparsity (`float`):
            Share of the values to keep, half of it on each side.

    Returns:
        Indices into the `H * D` channels, `[B, M, L, K]` (int64), or `None` if there is nothing to keep.
    """
    rows = states.permute(0, 2, 3, 1, 4).flatten(3)
    num_per_side = num_outliers_per_side(rows.shape[-1], sparsity)
    if num_per_side == 0:
        return None
    return _extremes(rows, None, torch.tensor(num_per_side, device=rows.device), num_per_side)[0]
