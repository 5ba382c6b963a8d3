"""Both products of attention that is written out, over tokens that stand in slots: scores in the order of the tokens
that a model knows, -inf where there is no slot, and sums of what it makes of them.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, T tokens, D head dim.
"""

import torch


def scatter_scores(scores: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """
    Scores of slots as those of all tokens.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, Q, S]`): products with the keys in slots.
        positions (`torch.Tensor` of shape `[B, H, S]`): tokens in the slots, negative where there is none.
        num_tokens (`int`): T.

    Returns:
        `torch.Tensor` of shape `[B, H, G, Q, T]`.
    """
    # A slot without a token has a column of its own, behind all others
    index = positions.long().masked_fill(positions < 0, num_tokens)[:, :, None, None].expand_as(scores)
    all_scores = scores.new_full((*scores.shape[:4], num_tokens + 1), -torch.inf)
    return all_scores.scatter_(4, index, scores)[..., :num_tokens]


def gather_weights(weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The weights of slots, `[B, H, G, Q, S]`, from those of all tokens `[B, H, G, Q, T]`; 0 without a token."""
    index = positions.long().clamp(min=0)[:, :, None, None].expand(*weights.shape[:4], -1)
    return weights.gather(4, index).masked_fill((positions < 0)[:, :, None, None], 0)


def multiply_heads(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """
    Matrix products that the heads of a group have in common.

    Args:
        left (`torch.Tensor` of shape `[B, H, G, Q, n]`): of every query head.
        right (`torch.Tensor` of shape `[B, H, n, m]`): of every key/value head.

    Returns:
        `torch.Tensor` of shape `[B, H, G, Q, m]`, float32.
    """
    product = left.flatten(2, 3).float() @ right.float()
    return product.view(*left.shape[:4], right.shape[3])
