"""Attention of one new token that a model writes out: two products, over what was chosen for the first of them.

The model gets a score for every token, -inf for those that were not fetched, and does with it what it likes.

By which factor it multiplies scores is its own business, but rules that weigh tokens have to know: it is told from the
prompt, by how much the logarithms of weights differ where scores do.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, K slots chosen at most, W tokens of the
window, D and E head dimensions of keys and values.
"""

import torch

from kvcache_plugins.kernels.attention import gather_weights, multiply_heads, scatter_scores

from .counters import TransferTimes
from .fetching import Fetch
from .offloaded_tokens import OffloadedTokens
from .prefetch import start_fetch


class WrittenOutStep:
    """
    What was fetched for one token, kept from the first product to the second.

    Args:
        fetch (`Fetch`): what was chosen.
        tokens (`OffloadedTokens`): what it was chosen of, the new token among them.
        times (`TransferTimes`, *optional*): where a transfer that has to be made is noted.

    Attributes:
        fetch (`Fetch`): the same.
    """

    def __init__(self, fetch: Fetch, tokens: OffloadedTokens, times: TransferTimes | None):
        store, window, selection = tokens.store, tokens.window, fetch.selection
        assert store.pool is not None and window is not None
        self.fetch, self._num_tokens = fetch, tokens.length
        staged = fetch.staged or start_fetch(store.pool, selection, times)
        if staged is None:
            rows = store.dense_rows(store.pool.gather(selection.slots), selection.slots)
        else:
            with staged as on_device:
                # The buffer is another layer's when the second product comes
                rows = store.dense_rows(on_device, selection.slots).clone()
        key_dim = window.keys.shape[3]
        # Zero times what stands in no row may be NaN
        rows = rows.masked_fill(~selection.valid[..., None], 0)
        self._keys = torch.cat([rows[..., :key_dim], window.keys], dim=2)  # [B, H, K + W, D]
        self._values = torch.cat([rows[..., key_dim:], window.values], dim=2)
        chosen = store.pool.positions_of(selection.slots, slice(None)).masked_fill(~selection.valid, -1)
        newest = torch.arange(tokens.num_pooled, tokens.length, device=chosen.device)
        self._positions = torch.cat([chosen, newest.expand(*chosen.shape[:2], -1)], dim=2)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Products `[B, H, G, 1, tokens]` of queries `[B, H, G, 1, D]`."""
        return scatter_scores(multiply_heads(query, self._keys.transpose(2, 3)), self._positions, self._num_tokens)

    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums `[B, H, G, 1, E]` by weights `[B, H, G, 1, tokens]`."""
        return multiply_heads(gather_weights(weights, self._positions), self._values)


def score_factor(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    By what a model multiplies scores before its softmax, told from those of one query: the slope of the logarithm of
    its weights, over the tokens that have any.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, T]`): products of the query with the keys.
        weights (`torch.Tensor` of shape `[B, H, G, T]`): what came of them.
    """
    has_weight = weights > 0
    count = has_weight.sum(dim=-1, keepdim=True).clamp(min=1)
    logarithms = weights.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    scores, logarithms = (
        (each.float() - (each.float() * has_weight).sum(dim=-1, keepdim=True) / count) * has_weight
        for each in (scores, logarithms)
    )
    return (scores * logarithms).sum() / scores.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
