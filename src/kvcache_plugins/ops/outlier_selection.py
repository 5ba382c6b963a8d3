"""Which values are outliers: the largest and the smallest of every channel (keys) or of every token (values).

Selection is along the axis that the values of one group share, and the counts are taken from the length of that same
axis: per channel over the real tokens of the chunk, per token over the channels of all heads. Tensors are
`[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Outliers:
    """
    Chosen outliers of one side.

    Attributes:
        indices (`torch.Tensor`, int64): tokens `[B, H, M, K, D]` of keys, channels of all heads `[B, M, L, K]` of
            values.
        in_use (`torch.Tensor`, bool, *optional*): which of them count, `[B or 1, 1, M or 1, K, 1]` of keys,
            `[B, M, L, 1]` of values; all by default.
        keep (`torch.Tensor` of shape `[B, H, M, L, D]`, bool): what is left: neither an outlier nor padding.
    """

    indices: torch.Tensor
    in_use: torch.Tensor | None
    keep: torch.Tensor

    @property
    def by_channel(self) -> bool:
        return self.indices.dim() == 5


def num_outliers_per_side(length: int, sparsity: float) -> int:
    """
    How many of `length` values are kept on each side: half of `sparsity`, to the nearest whole number, at most half of
    all.
    """
    return min(round(sparsity / 2 * length), length // 2)


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
