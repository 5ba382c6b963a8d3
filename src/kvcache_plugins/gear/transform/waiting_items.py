"""Items of a batch that have too few tokens for a table when others get theirs.

Their tokens join the exact ones in front, until there are enough; then only the first few stay exact.

Legend: B batch, H heads, T tokens, D head dim.
"""

import torch
import torch.nn.functional as F

from kvcache_plugins.gear.storage import ExactPrefix


def join_prefix(
    prefix: ExactPrefix,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    padding: torch.Tensor,
    waiting: torch.Tensor,
) -> ExactPrefix:
    """
    The prefix with all further tokens of the items that wait.

    Args:
        prefix (`ExactPrefix`): what is exact in front.
        keys, values (`torch.Tensor` of shape `[B, H, T, D]`): tokens from index `first` on.
        first (`int`): index behind the last token of the prefix, of an item that waits and has begun.
        padding (`torch.Tensor` of shape `[B]`): tokens at the start of every item that are none; of an item that has
            not begun more of them may have come.
        waiting (`torch.Tensor` of shape `[B]`, bool): which items wait.
    """
    start, count = prefix.start.cpu(), prefix.count.cpu()
    start = torch.where(waiting & (count == 0), torch.maximum(start, padding), start)
    num_new = keys.shape[2]
    skipped = (start + count - first).clamp(min=0, max=num_new)
    total = count + waiting * (num_new - skipped)
    num_slots = max(prefix.num_slots, int(total.max()))
    all_keys, all_values = (
        F.pad(states, (0, 0, 0, num_slots - prefix.num_slots)) for states in (prefix.keys, prefix.values)
    )
    for item in waiting.nonzero().flatten().tolist():
        slots, new = slice(int(count[item]), int(total[item])), slice(int(skipped[item]), num_new)
        all_keys[item, :, slots], all_values[item, :, slots] = keys[item, :, new], values[item, :, new]
    device = prefix.count.device
    return ExactPrefix(all_keys, all_values, start=start.to(device), count=total.to(device), is_uniform=False)


def shorten_prefix(prefix: ExactPrefix, limits: torch.Tensor) -> ExactPrefix:
    """The prefix with no more tokens of an item than `limits` `[B]` says, and no more room than that takes."""
    count = torch.minimum(prefix.count, limits.to(prefix.count.device))
    num_slots = int(count.max())
    keys, values = prefix.keys, prefix.values
    if num_slots < prefix.num_slots:
        keys, values = keys[:, :, :num_slots].clone(), values[:, :, :num_slots].clone()
    return ExactPrefix(keys, values, start=prefix.start, count=count, is_uniform=False)
