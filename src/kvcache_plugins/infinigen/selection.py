"""Selection of the pool's tokens that a step attends to, by speculated scores.

Query heads of a group share the tokens that are fetched: a token's weight is its attention probability, averaged over
them. Everything is computed on the scores' device, and the host asks for no result: on a GPU it would have to wait.

Legend: B batch, H key/value heads, G query heads a key/value head, N slots of the pool in use.
"""

import math

import torch

from kvcache_plugins.kernels.engine import choose_token_kernel
from kvcache_plugins.kernels.kept_selection import SelectionRule
from kvcache_plugins.kernels.selective_attention import Selection, SelectionLimits, select_by_weight, topk

from .config import InfiniGenConfig


# Added to the weight of a token that is selected in any case; a weight is a probability, so at most 1
_FORCED = 2.0
# Weight of a token that is never selected
_NEVER = -1.0


def attended_columns(attn_mask: torch.Tensor, length: int, batch_size: int) -> torch.Tensor:
    """Return a mask `[B, length]` of the tokens to which the last query of an attention mask attends."""
    row = attn_mask.expand(batch_size, *attn_mask.shape[1:3], length)[:, 0, -1]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def always_attended(columns: torch.Tensor, config: InfiniGenConfig) -> torch.Tensor:
    """Return a mask `[B, length]` of the first and newest of the attended tokens, which are always selected."""
    from_start = columns.cumsum(dim=1)
    from_end = from_start[:, -1:] - from_start
    return columns & ((from_start <= config.sink) | (from_end < config.recent))


def select_tokens(
    scores: torch.Tensor,
    tail_scores: torch.Tensor,
    allowed: torch.Tensor | None,
    forced: torch.Tensor | None,
    num_tokens: torch.Tensor | int,
    most_tokens: int,
    config: InfiniGenConfig,
) -> Selection:
    """
    Select tokens for every sequence and key/value head.

    Args:
        scores (`[B, H, G, N]`, float32): speculated scores of the pool's tokens, scaled as attention scales them.
        tail_scores (`[B, H, G, W]`): scores of tokens that are attended to in any case; W may be 0, padding is -inf.
        allowed (bool, broadcasts to `[B, H, N]`, *optional*): slots that may be selected: no padding, nothing masked.
        forced (bool, broadcasts to `[B, H, N]`, *optional*): slots that are selected whatever their score, if allowed:
            at most `config.sink + config.recent`. Defaults to the first and the newest, for slots in order.
        num_tokens (`[B]`, or `int` for all sequences): real tokens cached.
        most_tokens (`int`): upper bound of `num_tokens` that the host knows.
        config (`InfiniGenConfig`): the rule.
    """
    num_slots = scores.shape[3]
    if forced is None:
        is_plain = allowed is None and isinstance(num_tokens, int) and config.min_weight is not None and num_slots > 0
        if is_plain and choose_token_kernel(scores)[0] == "compiled":
            assert isinstance(num_tokens, int)
            return select_by_weight(scores, tail_scores, limits_of(config, num_tokens, num_slots))
        slots = torch.arange(num_slots, dtype=torch.int64, device=scores.device)
        forced = (slots < config.sink) | (slots >= most_tokens - config.recent)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.unsqueeze(-2), -torch.inf)
    weights = torch.cat([scores, tail_scores], dim=3).softmax(dim=3).mean(dim=2)[..., :num_slots]
    weights = torch.where(forced, weights + _FORCED, weights)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, _NEVER)
    held = scores.new_full((1,), num_tokens, dtype=torch.int64) if isinstance(num_tokens, int) else num_tokens
    least = None if config.min_weight is None else _least_weight(config.min_weight, held)
    top, slots = topk(weights, max_selected(config, most_tokens, num_slots), least)
    num_forced = (top >= _FORCED).sum(dim=2)
    wanted = _num_within_alpha(config, scores) if least is None else (top >= least).sum(dim=2)
    # Rounded down in float64, as Python does
    cap = (held.double() * config.max_fetch_ratio).long()[:, None].clamp(min=1)
    count = torch.minimum(torch.maximum(wanted, num_forced), torch.maximum(cap, num_forced))
    return Selection(slots, torch.minimum(count, (top >= 0).sum(dim=2)))


def limits_of(config: InfiniGenConfig, num_tokens: int, num_slots: int) -> SelectionLimits:
    """Return the limits of the rule `min_weight` for a pool in order, when the sequence has `num_tokens` tokens."""
    assert config.min_weight is not None
    return SelectionLimits(
        first=config.sink,
        newest=num_tokens - config.recent,
        least=min(config.min_weight / num_tokens, _FORCED),
        cap=max(int(num_tokens * config.max_fetch_ratio), 1),
        limit=max_selected(config, num_tokens, num_slots),
    )


def rule_of(config: InfiniGenConfig) -> SelectionRule:
    """Return the rule of a config as kernels of a GPU take it."""
    min_weight = -math.inf if config.min_weight is None else config.min_weight
    # A distance that no token exceeds need not be counted
    distance = None if config.alpha == math.inf else config.alpha
    return SelectionRule(config.sink, config.recent, config.max_fetch_ratio, min_weight, distance)


def max_selected(config: InfiniGenConfig, most_tokens: int, num_slots: int) -> int:
    """Return the number of slots of a selection, filling included; see `select_tokens`."""
    return min(max(int(config.max_fetch_ratio * most_tokens), config.sink + config.recent, 1), num_slots)


def _num_within_alpha(config: InfiniGenConfig, scores: torch.Tensor) -> torch.Tensor:
    """
    Count tokens by the paper's rule, `[B, 1]`: those at most `alpha` below the largest of their query head's `scores`,
    averaged over heads.
    """
    assert config.alpha is not None
    limit = scores.amax(dim=3, keepdim=True) - config.alpha
    counts = ((scores >= limit) & (scores > -torch.inf)).sum(dim=3)
    return counts.double().mean(dim=(1, 2)).ceil().long()[:, None]


def _least_weight(min_weight: float, num_tokens: torch.Tensor) -> torch.Tensor:
    """Return the least weight of a token that the rule `min_weight` selects, `[B or 1, 1, 1]`; a forced one has it."""
    return (min_weight * num_tokens.float().reciprocal()[:, None, None]).clamp(max=_FORCED)
