"""Outliers: selection of the values of a chunk that are kept exact, and storage of their remaining errors.

The largest and the smallest values of every channel (keys) or of every token (values) are kept: along the axis that
the values of one group share, and as many as the length of that same axis says, per channel over the real tokens of
the chunk, per token over the channels of all heads.

Storage is the same for keys and values, sorted by tiles of tokens and by head: see `formats.groups`.

Tensors are `[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D, K outliers a channel or
token, N outliers of a chunk).
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.formats.groups import OUTLIER_TILE, channel_bits, index_dtype, num_offsets


@dataclass(frozen=True, slots=True)
class Outliers:
    """
    Outliers of chunks, one entry each in any order.

    Attributes:
        heads, tokens, channels (`torch.Tensor` of shape `[B, M, N]`, int64): the index of each.
        in_use (`torch.Tensor` of shape `[B, M, N]`, bool, *optional*): entries in use; all by default.
    """

    heads: torch.Tensor
    tokens: torch.Tensor
    channels: torch.Tensor
    in_use: torch.Tensor | None

    def flat_indices(self, length: int, head_dim: int) -> torch.Tensor:
        """Return indices `[B, M, N]` into all values of a chunk, `[H, L, D]`."""
        return (self.heads * length + self.tokens) * head_dim + self.channels


def num_outliers_per_side(length: int, sparsity: float) -> int:
    """Count values kept on each side: half of `sparsity` of `length`, rounded, at most half of all."""
    return min(round(sparsity / 2 * length), length // 2)


def select_outliers(
    states: torch.Tensor, valid: torch.Tensor | None, sparsity: float, side: str
) -> tuple[Outliers, torch.Tensor] | None:
    """
    Select a share `sparsity` of `[B, H, M, L, D]`, half of it on each side: from every channel if the `side` is
    `"key"`, from every token over the channels of all heads if it is `"value"`. A sequence with fewer real tokens
    `valid` `[B, M, L]` keeps fewer of a channel, as it would alone. Return the outliers, and a mask of the values
    `[B, H, M, L, D]` that are neither outliers nor padding; `None` if there are no outliers.
    """
    _, num_heads, num_chunks, length, head_dim = states.shape
    is_key, rows = side == "key", states.transpose(1, 2)
    # Outliers are those of the last dimension
    rows = rows.mT.flatten(2, 3) if is_key else rows.transpose(2, 3).flatten(3)
    lengths = [[rows.shape[3]]] if valid is None or not is_key else valid.sum(dim=2).tolist()
    numbers = [[num_outliers_per_side(number, sparsity) for number in row] for row in lengths]
    num_per_side = max(map(max, numbers))
    if num_per_side == 0:
        return None
    numbered = torch.arange(num_per_side, dtype=torch.int64, device=states.device)
    used = numbered < torch.tensor(numbers, dtype=torch.int64, device=states.device)[..., None]
    used = used[:, :, None]
    highest = lowest = rows
    if is_key and valid is not None:
        highest, lowest = (torch.where(valid[:, :, None], rows, end) for end in (-torch.inf, torch.inf))
    top = highest.topk(num_per_side, dim=-1).indices
    # No index that counts appears twice, not even among equal values: corrections are added
    lowest = lowest.scatter(-1, top, torch.where(used, torch.inf, lowest.gather(-1, top)))
    found = torch.cat([top, lowest.topk(num_per_side, dim=-1, largest=False).indices], dim=-1)
    used = torch.cat([used, used], dim=-1).expand(found.shape)
    others = torch.arange(rows.shape[2], dtype=torch.int64, device=rows.device)[:, None].expand(found.shape)
    tokens, columns = (found, others) if is_key else (others, found)
    if is_key:
        tokens, columns, used = (each.unflatten(2, (num_heads, head_dim)).mT for each in (tokens, columns, used))
    elif valid is not None:
        used = used & valid[..., None]
    used = used.flatten(2)
    tokens = tokens.flatten(2)
    columns = columns.flatten(2)
    outliers = Outliers(columns // head_dim, tokens, columns % head_dim, None if valid is None else used)
    # An entry that is not in use may have the index of one that is, and must not erase it: hence the sum
    marks = states.new_zeros(len(states), num_chunks, states[0, :, 0].numel())
    marks.scatter_add_(2, outliers.flat_indices(length, head_dim), used.to(marks.dtype))
    keep = (marks == 0).unflatten(2, (num_heads, length, head_dim)).transpose(1, 2)
    return outliers, keep if valid is None else keep & valid[:, None, :, :, None]


def sort_into_tiles(
    outliers: Outliers, values: torch.Tensor, num_heads: int, length: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Sort values `[B, M, N]` of outliers of chunks with these sizes in the order in which they are stored.

    Returns:
        Indices `[B, 1, M, N]` (int16, or int32 for a `head_dim` above 512: the token within its tile, shifted left by
        `channel_bits(head_dim)`, and the channel), values `[B, 1, M, N]`, and offsets `[B, 1, M, tiles * H + 1]`
        (int32): the outliers of tile `t` and head `h` are those from `offsets[t * H + h]` on, up to the next offset.
        Entries that are not in use follow the last offset, with value 0.
    """
    num_slots = num_offsets(length, num_heads) - 1
    slots = outliers.tokens // OUTLIER_TILE * num_heads + outliers.heads
    indices = (outliers.tokens % OUTLIER_TILE << channel_bits(head_dim)) + outliers.channels
    if outliers.in_use is not None:
        slots = torch.where(outliers.in_use, slots, num_slots)
        indices, values = torch.where(outliers.in_use, indices, 0), torch.where(outliers.in_use, values, 0)
    order = slots.to(torch.int32).sort(dim=-1, stable=True).indices
    counts = slots.new_zeros(*slots.shape[:2], num_slots + 2)
    counts.scatter_add_(2, slots + 1, torch.ones_like(slots))
    offsets = counts.cumsum(dim=2)[..., : num_slots + 1].to(torch.int32)
    return (
        indices.to(index_dtype(head_dim)).gather(2, order).unsqueeze(1),
        values.gather(2, order).unsqueeze(1),
        offsets.unsqueeze(1),
    )
