"""What is fetched from the pool for one step.

On a CPU nothing has to be fetched: rows are read where they stand. On a GPU the rows go into a staging buffer on a
stream of their own while the layer before computes.
"""

from dataclasses import dataclass

import torch

from .prefetch import StagedRows
from .selection import Selection


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """
    Tokens that were chosen for one step.

    Attributes:
        selection (`Selection`): which.
        length (`int`): tokens of the sequence at that step, the new one included.
        staged (`StagedRows`, *optional*): their rows on the way to a GPU.
    """

    selection: Selection
    length: int
    staged: StagedRows | None = None


def attended_columns(attn_mask: torch.Tensor, length: int, batch_size: int) -> torch.Tensor:
    """Which of `length` tokens the last query of a mask attends to, `[B, length]`, bool."""
    row = attn_mask.expand(batch_size, *attn_mask.shape[1:3], length)[:, 0, -1]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
