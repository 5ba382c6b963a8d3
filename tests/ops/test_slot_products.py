"""Products over tokens in slots: what dense tokens give, and nothing of tokens that are in no slot."""

import torch

from kvcache_plugins.kernels.attention import gather_weights, multiply_heads, scatter_scores


# [B, H, S] of 6 tokens: out of order, with free slots, and with other tokens in every head
POSITIONS = torch.tensor([[[4, 0, -1, 5], [1, -1, -1, 3]]])
KEYS, VALUES = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
IN_SLOTS = [each.gather(2, POSITIONS.clamp(min=0)[..., None].expand(-1, -1, -1, 8)) for each in (KEYS, VALUES)]


def test_scores_stand_at_their_tokens() -> None:
    query = torch.randn(1, 2, 3, 2, 8)
    scores = scatter_scores(multiply_heads(query, IN_SLOTS[0].transpose(2, 3)), POSITIONS, 6)
    is_held = torch.zeros(1, 2, 6, dtype=torch.bool)
    is_held[0, 0, [4, 0, 5]] = is_held[0, 1, [1, 3]] = True
    expected = (query @ KEYS[:, :, None].transpose(3, 4)).masked_fill(~is_held[:, :, None, None], -torch.inf)
    torch.testing.assert_close(scores, expected)


def test_only_weights_of_held_tokens_count() -> None:
    weights = torch.rand(1, 2, 3, 2, 6)
    taken = gather_weights(weights, POSITIONS)
    assert taken[0, 0, ..., 2].abs().max() == 0
    total = multiply_heads(taken, IN_SLOTS[1])
    for head, held in enumerate(([4, 0, 5], [1, 3])):
        torch.testing.assert_close(total[0, head], weights[0, head][..., held] @ VALUES[0, head, held])
