"""What a prefill leaves on each rank."""

from dataclasses import dataclass, field

import torch
from transformers import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class RunaheadOutput:
    """
    What a prefill left on a rank.

    Attributes:
        past_key_values (`Cache`, *optional*):
            The complete cache, on the last rank.
        logits (`torch.Tensor` of shape `[batch_size, 1, vocab_size]`, *optional*):
            Logits of the prompt's last token, on the last rank.
        partition (`tuple[int, ...]`):
            Tokens of each slice; the last slice is the last rank's. Fewer slices than ranks leave the first ones idle.
        rank (`int`):
            This rank, in the group.
        stats (`dict[str, int | float]`):
            `seconds` of this rank's part; `seconds_waited` of them for the rank before; `bytes_sent` and
            `bytes_received`; `dot_products` (pairs of queries and keys, for one head) and `entries_sent` (keys and
            values, counted apart, of one head), both summed over layers; `hop_error`, the mean relative error of this
            rank's states as others see them, if they are quantized on the way.
    """

    past_key_values: Cache | None = None
    logits: torch.Tensor | None = None
    partition: tuple[int, ...]
    rank: int
    stats: dict[str, int | float] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the cache."""
        return self.past_key_values is not None
