"""Scores of keys in codes that are grouped along tokens, told without making them dense.

On a CPU that is C. Elsewhere a group is to `ops.gather.code_scores` what a head is: its steps go into queries
of its own.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, T tokens of a group, N slots.
"""

from collections.abc import Sequence

import torch

from kvcache_plugins.kernels.engine import choose_token_kernel

from .coded_tokens import KeyGroups
from .gather import code_scores


def grouped_scores(query: torch.Tensor, keys: KeyGroups) -> torch.Tensor:
    """
    Products of queries and keys in all slots.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): queries, float32.
        keys (`KeyGroups`): the keys.

    Returns:
        `torch.Tensor` of shape `[B, H, G, N]`, float32.
    """
    if choose_token_kernel(query)[0] == "compiled":
        # Imported late, as the kernels import this floor
        from kvcache_plugins.kernels.chosen import grouped_scores as compiled_scores
        from kvcache_plugins.kernels.layer import MOST_CHANNELS

        if query.shape[3] <= MOST_CHANNELS:
            return compiled_scores(query, keys)
    batch_size, num_heads, num_groups = keys.scale.shape[:3]
    scaled = query[:, :, None] * keys.scale[:, :, :, None].float()  # [B, H, groups, G, D]
    ones = keys.scale.new_ones(batch_size, num_heads * num_groups, keys.group_size)
    products = code_scores(
        scaled.flatten(1, 2), keys.codes.flatten(1, 2), ones, keys.group_size, keys.nbits
    )  # [B, H * groups, G, T]
    # What the kernel takes off every code, and what a channel's codes begin at
    offset = scaled.sum(dim=4) * (2 ** (keys.nbits - 1) - 0.5)
    offset += (query @ keys.zero.float().transpose(2, 3)).transpose(2, 3)
    scores = products.unflatten(1, (num_heads, num_groups)) + offset[..., None]
    return _in_slots(scores.transpose(2, 3).flatten(3), keys.runs)


def _in_slots(places: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """What stands at the places `[..., places]` of the tokens in all slots, `[..., N]`."""
    parts = [places[..., first + shift : stop + shift] for first, stop, shift in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
