"""Where the tokens of a layer are: the newest at hand, all older ones in a store.

The life of a token: a prompt is attended to exactly and then moves into the store, but for its newest tokens; a
decoded token waits in the window, and the window's oldest move on in runs, at the *beginning* of an update, so that a
rollback of the newest update finds its tokens there.

On a GPU the host runs ahead: it says what is to be moved, and waits neither for states nor for pages.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, D head dim.
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.masks import mask_columns, slice_mask
from kvcache_plugins.layers.left_padding import LeftPadding
from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .token_store import TokenStore


class OffloadedTokens:
    """
    All tokens that a layer has stored.

    Args:
        store (`TokenStore`): where older tokens go.
        num_recent (`int`): newest tokens that stay in the window.

    Attributes:
        window (`ResidualBuffer`, *optional*): the newest tokens, once there are any.
        num_pooled (`int`): tokens that have gone to the store: the position of the window's first.
    """

    def __init__(self, store: TokenStore, num_recent: int):
        self.store, self.num_recent = store, num_recent
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.store.clear()
        self.window: ResidualBuffer | None = None
        self.num_pooled = 0

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self.num_pooled + (0 if self.window is None else self.window.length)

    @property
    def is_window_full(self) -> bool:
        """Whether some of it is to move on."""
        return self.window is not None and self.window.length >= self.num_recent + self.store.flush_length

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores tokens `[B, H, tokens, D or E]` that follow, in the window."""
        if self.window is None:
            self.window = ResidualBuffer(keys, values, self.num_recent + self.store.flush_length)
        self.window.append(keys, values)

    def add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, padding: LeftPadding, queries: torch.Tensor | None
    ) -> None:
        """Stores the first tokens; see `TokenStore.add`."""
        count = max(keys.shape[2] - self.num_recent, 0)
        if count:
            self.store.add(keys[:, :, :count], values[:, :, :count], 0, padding, queries)
            self.num_pooled = count
        self.append(keys[:, :, count:], values[:, :, count:])

    def flush(self, padding: LeftPadding) -> None:
        """Moves on what has waited in the window for long enough."""
        window, flush_length = self.window, self.store.flush_length
        if window is None or not self.is_window_full:
            return
        count = (window.length - self.num_recent) // flush_length * flush_length
        self.store.add(window.keys[:, :, :count], window.values[:, :, :count], self.num_pooled, padding)
        self.num_pooled += count
        window.drop_first(count)

    def drop_newest(self, count: int) -> None:
        """Forgets the newest `count` tokens."""
        left = self.length - count
        if self.window is not None:
            self.window.drop_last(min(count, self.window.length))
        if left < self.num_pooled:
            self.num_pooled = left
            self.store.truncate(left)

    def stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Keys and values `[B, H, tokens, D or E]` in order, with the positions that they span; nothing is evicted."""
        if self.store.pool is not None:
            yield from self.store.stretches()
        if self.window is not None:
            yield self.window.keys, self.window.values, self.num_pooled, self.length

    def parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """
        Everything held, page by page, with its columns of a mask.

        Args:
            attn_mask (`torch.Tensor`, *optional*): mask over all tokens.
            groups (`int`): G.
        """
        pool = self.store.pool
        if pool is not None:
            for keys, values, start, stop in self.store.stretches():
                mask = slice_mask(attn_mask, start, stop)
                if pool.usage is not None:
                    positions = pool.usage.positions[:, :, start:stop].to(keys.device).long()
                    mask = _mask_of_slots(attn_mask, positions, self.length, groups)
                yield DensePart(keys, values, stop - start, mask)
        if self.window is not None and self.window.length:
            mask = slice_mask(attn_mask, self.num_pooled, self.length)
            yield DensePart(*self.window.tensors(), self.window.length, mask)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self.store.map(function)
        if self.window is not None:
            self.window.map(function)

    def serve(self, device: torch.device) -> None:
        """From now on states come from another device."""
        self.store.serve(device)
        if self.window is not None:
            self.window.map(lambda tensor: tensor.to(device))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored."""
        if self.window is not None:
            for tensor in self.window.tensors():
                yield "residual", tensor
        yield from self.store.named_tensors()


def _mask_of_slots(attn_mask: torch.Tensor | None, positions: torch.Tensor, length: int, groups: int) -> torch.Tensor:
    """The columns of a mask for slots whose tokens differ from head to head, `[B, H * G, Q or 1, slots]`."""
    held = (positions >= 0)[:, :, None]
    if attn_mask is not None:
        by_head = (
            mask_columns(attn_mask, head.clamp(min=0), positions.shape[0], length) for head in positions.unbind(dim=1)
        )
        mask = torch.cat([each[:, :1] for each in by_head if each is not None], dim=1)
        held = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
    return held.repeat_interleave(groups, dim=1)
