"""How outliers are stored: at which place in a chunk, what has to be added there.

Tensors are `[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D).

Storage is the same for keys and values: the outliers of a chunk lie sorted by tiles of 64 tokens and by head, so that
attention reads those of a tile in one piece wherever it begins, and a cut at the end of the sequence cuts off the end
of the list.
"""

from dataclasses import dataclass

import torch


# Tokens; a place within a tile of up to 512 channels then fits 16 bits
OUTLIER_TILE = 64


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
