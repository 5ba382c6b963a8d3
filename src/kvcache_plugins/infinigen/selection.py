"""Which tokens of the pool a step attends to, told from speculated scores.

Query heads of a group share what is fetched: a token's weight is its probability, averaged over them. All of it is
computed where the scores are, and the host asks for none of it: on a GPU it would have to wait.

Legend: B batch, H key/value heads, G query heads a key/value head, N slots of the pool in use.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.kernels.engine import choose_token_kernel
from kvcache_plugins.kernels.tokens import ChoiceBounds, choose_heaviest, largest

from .config import InfiniGenConfig


# Added to the weight, a probability, of a token that is fetched whatever it is; and of one that never is
_FORCED, _NEVER = 2.0, -1.0


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """
    Tokens of the pool for one step: slots `[B, H, tokens]`, int64, those that matter most first, and how many of them
    each head takes, `[B, H]`, int64; the others are filling.
    """

    slots: torch.Tensor
    count: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Marks slots that are no filling, `[B, H, tokens]`."""
        return torch.arange(self.slots.shape[2], dtype=torch.int64, device=self.slots.device) < self.count[..., None]


def attended_columns(attn_mask: torch.Tensor, length: int, batch_size: int) -> torch.Tensor:
    """Marks which of `length` tokens the last query of a mask attends to, `[B, length]`, bool."""
    row = attn_mask.expand(batch_size, *attn_mask.shape[1:3], length)[:, 0, -1]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def always_attended(columns: torch.Tensor, config: InfiniGenConfig) -> torch.Tensor:
    """Marks the first and the newest of the tokens attended to `[B, length]`, which are always fetched."""
    from_start = columns.cumsum(dim=1)
    from_end = from_start[:, -1:] - from_start
    return columns & ((from_start <= config.sink) | (from_end < config.recent))


def select_tokens(
    scores: torch.Tensor,
    resident_scores: torch.Tensor,
    allowed: torch.Tensor | None,
    forced: torch.Tensor | None,
    num_tokens: torch.Tensor | int,
    most_tokens: int,
    config: InfiniGenConfig,
) -> Selection:
    """
    Chooses tokens for every sequence and key/value head.

    Args:
        scores (`[B, H, G, N]`, float32): speculated scores of the pool's tokens, scaled as attention scales them.
        resident_scores (`[B, H, G, R]`): the same of tokens that are attended to anyway; R may be 0, padding -inf.
        allowed (bool, broadcasts to `[B, H, N]`, *optional*): slots that may be chosen: no padding, nothing masked.
        forced (bool, broadcasts to `[B, H, N]`, *optional*): slots of those that are chosen whatever their score:
            `config.sink + config.recent` at most. By default the first and the newest, in the order of their tokens.
        num_tokens (`[B]`, or `int` if all sequences have the same): real tokens cached.
        most_tokens (`int`): no sequence has more of them, as far as the host knows.
        config (`InfiniGenConfig`): the rule.
    """
    num_slots = scores.shape[3]
    limit = most_chosen(config, most_tokens, num_slots)
    if forced is None:
        is_plain = allowed is None and isinstance(num_tokens, int) and config.min_weight is not None and num_slots > 0
        if is_plain and choose_token_kernel(scores)[0] == "compiled":
            assert isinstance(num_tokens, int)
            return Selection(*choose_heaviest(scores, resident_scores, bounds_of(config, num_tokens, num_slots)))
        slots = torch.arange(num_slots, dtype=torch.int64, device=scores.device)
        forced = (slots < config.sink) | (slots >= most_tokens - config.recent)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.unsqueeze(-2), -torch.inf)
        forced = forced & allowed
    probabilities = torch.cat([scores, resident_scores], dim=3).softmax(dim=3).mean(dim=2)
    keys = probabilities[..., :num_slots]
    keys = torch.where(forced, keys + _FORCED, keys)
    if allowed is not None:
        keys = keys.masked_fill(~allowed, _NEVER)
    held = scores.new_full((1,), num_tokens, dtype=torch.int64) if isinstance(num_tokens, int) else num_tokens
    # What is beyond a sequence's own cap, below, is filling
    top, slots = largest(keys, limit, None if config.min_weight is None else _least_key(config.min_weight, held))
    is_forced = top >= _FORCED
    num_forced = is_forced.sum(dim=2)
    # Rounded down in float64, as Python does
    cap = (held.double() * config.max_fetch_ratio).long()[:, None].clamp(min=1)
    wanted = _num_wanted(config, scores, top, held)
    count = torch.minimum(torch.maximum(wanted, num_forced), torch.maximum(cap, num_forced))
    return Selection(slots, torch.minimum(count, (top >= 0).sum(dim=2)))


def bounds_of(config: InfiniGenConfig, num_tokens: int, num_slots: int) -> ChoiceBounds:
    """Tells what the rule of a least weight chooses of a pool in order when there are so many tokens."""
    assert config.min_weight is not None
    least, cap = min(config.min_weight / num_tokens, _FORCED), max(int(num_tokens * config.max_fetch_ratio), 1)
    limit = most_chosen(config, num_tokens, num_slots)
    return ChoiceBounds(config.sink, num_tokens - config.recent, least, cap, limit)


def most_chosen(config: InfiniGenConfig, most_tokens: int, num_slots: int) -> int:
    """Tells the most tokens that a head is given, filling among them: see `select_tokens`."""
    return min(max(int(config.max_fetch_ratio * most_tokens), config.sink + config.recent, 1), num_slots)


def _num_wanted(
    config: InfiniGenConfig, scores: torch.Tensor, keys: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """
    Counts the tokens that the rule wants, `[B, H]` or broadcast to it, of candidates in the order of their `keys`
    `[B, H, tokens]`; scores are -inf where not allowed.
    """
    if config.alpha is not None:
        # Counted for every query head below its own maximum, averaged over heads
        limit = scores.amax(dim=3, keepdim=True) - config.alpha
        return ((scores >= limit) & (scores > -torch.inf)).sum(dim=3).double().mean(dim=(1, 2)).ceil().long()[:, None]
    assert config.min_weight is not None
    return (keys >= _least_key(config.min_weight, num_tokens)).sum(dim=2)


def _least_key(min_weight: float, num_tokens: torch.Tensor) -> torch.Tensor:
    """Tells the least that a token of the rule's weight, or a forced one, is sorted by, `[B or 1, 1, 1]`."""
    return (min_weight * num_tokens.float().reciprocal()[:, None, None]).clamp(max=_FORCED)
