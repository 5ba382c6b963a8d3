"""Live caches of the newest conversations: a request that continues one, or an edited one, reads the rest alone."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.layers.token_reuse import can_go_back
from kvcache_plugins.packed.cache import PackedCache


class Conversations:
    """
    The newest conversations, at most `most`, each with the tokens that its cache has read.

    A request takes the cache that shares most tokens with it, if these are half of the tokens held or more: a cache
    whose system prompt alone is shared stays another conversation's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # The least recently used first
        self._held: list[tuple[torch.Tensor, PackedCache]] = []

    def take(self, input_ids: torch.Tensor) -> PackedCache | None:
        """Remove the conversation that a prompt `[1, tokens]` continues, and return its cache, cropped."""
        counts = [_count_equal(input_ids, held_ids) for held_ids, _ in self._held]
        best = max(range(len(counts)), key=counts.__getitem__, default=0)
        if not counts or 2 * counts[best] < self._held[best][0].shape[1]:
            return None
        held_ids, cache = self._held.pop(best)
        cache.reuse(input_ids, held_ids)
        return cache

    def keep(self, token_ids: torch.Tensor, cache: PackedCache) -> None:
        """Keep the cache of a conversation `[1, tokens]` as the newest."""
        self._held = [*self._held, (token_ids, cache)][-self._most :]

    def keep_interrupted(self, input_ids: torch.Tensor, cache: PackedCache) -> None:
        """
        Keep the cache of an answer that broke off, with the tokens of its prompt that all layers have read; drop a
        cache that cannot go back to them. Layers before the one where it broke off hold a token or a prompt more.
        """
        lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
        num_read = min([*lengths, input_ids.shape[1]])
        # A recurrence may have read a token more than `num_read`
        can_go = all(
            can_go_back(layer, max(layer.get_seq_length() - num_read, 0) if isinstance(layer, CacheLayerMixin) else 1)
            for layer in cache.layers
        )
        if num_read and can_go:
            cache.crop(num_read - cache.get_seq_length())
            self.keep(input_ids[:, :num_read], cache)


def _count_equal(input_ids: torch.Tensor, held_ids: torch.Tensor) -> int:
    """Count equal tokens at the beginnings of two sequences `[1, tokens]`."""
    most = min(input_ids.shape[1], held_ids.shape[1])
    return int((input_ids[0, :most] == held_ids[0, :most]).long().cumprod(dim=0).sum())
