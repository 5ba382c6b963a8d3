"""Where a layer's older tokens are: in a pool in host memory, with what is kept of their keys where they are scored.

A layer holds one store and does not know in which form tokens stand there. `exact_store` keeps them as they are;
another form is another `TokenStore`, handed to the layer.

Legend: B batch, H key/value heads, G query heads a key/value head, K slots chosen, D and E head dimensions of keys and
values, W tokens of the window.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.kernels.tokens import attend_rows, choose_rows_kernel
from kvcache_plugins.layers.left_padding import LeftPadding

from .config import InfiniGenConfig
from .pool import TokenPool
from .scoring import ScoringStates
from .selection import Selection


class TokenStore(ABC):
    """
    Tokens of one layer that only those steps attend to that choose them.

    Args:
        config (`InfiniGenConfig`): the options.

    Attributes:
        pool (`TokenPool`, *optional*): their rows in host memory, once there are any.
        scoring (`ScoringStates`, *optional*): what is kept of their keys to choose by.
        flush_length (`int`): tokens are added in multiples of it, but for a prompt.
    """

    pool: TokenPool | None
    scoring: ScoringStates | None

    def __init__(self, config: InfiniGenConfig):
        self.config = config
        self.flush_length = config.flush_length
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.pool, self.scoring = None, None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """
        Takes dtype and device over from a layer's first states.

        Raises:
            ValueError: if such states cannot be stored.
        """
        self.dtype, self.device = key_states.dtype, key_states.device

    @abstractmethod
    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
        padding: LeftPadding,
        queries: torch.Tensor | None = None,
    ) -> None:
        """
        Stores tokens that follow those held, as a whole or not at all.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, tokens, D]`, `[B, H, tokens, E]`): their states.
            position (`int`): position of the first of them.
            padding (`LeftPadding`): what is padding of the sequence.
            queries (`torch.Tensor` of shape `[B, H * G, prompt length, D]`, *optional*): of their prompt.

        Raises:
            MemoryError: if the host has no memory for them.
            ValueError: if they cannot be stored in this form.
        """

    @abstractmethod
    def stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Keys and values `[B, H, slots, D or E]` of everything held, page by page, with the slots they span."""

    def rows_on_host(self, selection: Selection) -> tuple[list[torch.Tensor], torch.Tensor]:
        """
        Pages of rows as `tokens.attend_rows` takes them, and the slots in them of what was chosen: one page of
        copies, where a store has nothing better.
        """
        assert self.pool is not None
        slots = selection.slots[:, :, : max(int(selection.count.max()), 1)]
        rows = self.dense_rows(self.pool.gather(slots), slots)
        return [rows], torch.arange(slots.shape[2]).expand_as(slots)

    def attend(
        self,
        query: torch.Tensor,
        selection: Selection,
        window: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        mask: torch.Tensor | None,
        window_start: int,
    ) -> tuple[torch.Tensor, str, bool]:
        """
        Attention of one new token over tokens that stand in host memory and the window.

        Args:
            query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
            selection (`Selection`): which tokens were chosen for it.
            window (`tuple[torch.Tensor, torch.Tensor]`): keys and values of the newest tokens, `[B, H, W, D or E]`.
            scale (`float`): factor of the scores.
            mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the mask's row, boolean or added to the scores.
            window_start (`int`): position of the window's first token.

        Returns:
            The output `[B, H, G, E]` in the query's dtype, the kernel that made it, and whether that is not the one
            that was wanted.
        """
        assert self.pool is not None
        kernel, is_fallback = choose_rows_kernel(query, window[1].shape[3], window[0].dtype)
        pages, slots = self.rows_on_host(selection)
        positions = None if mask is None else self.pool.positions_of(selection.slots, slice(None))
        output = attend_rows(
            query,
            pages,
            slots,
            selection.count,
            *window,
            scale,
            mask=mask,
            positions=positions,
            window_start=window_start,
            kernel=kernel,
        )
        return output, kernel, is_fallback

    @abstractmethod
    def dense_rows(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Keys and values side by side, `[B, H, K, D + E]`, of rows of the pool and their slots `[B, H, K]`."""

    def keys(self) -> torch.Tensor:
        """Keys of all slots, `[B, H, slots, D]`, where they are attended to."""
        return torch.cat([keys for keys, *_ in self.stretches()], dim=2)

    @property
    def num_evicted(self) -> int:
        """Tokens that have given way to others, over items and heads."""
        return 0 if self.pool is None or self.pool.usage is None else self.pool.usage.num_evicted

    def truncate(self, length: int) -> None:
        """Forgets the tokens at position `length` and beyond."""
        if self.pool is not None:
            self.pool.truncate(length)
            if self.scoring is not None:
                self.scoring.truncate(self.pool.num_slots)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it; the pool stays in host memory."""
        for stored in (self.pool, self.scoring):
            if stored is not None:
                stored.map(function)

    def serve(self, device: torch.device) -> None:
        """From now on states come from another device."""
        self.device = device
        if self.pool is not None:
            self.pool.serve(device)
        if self.scoring is not None:
            self.scoring.map(lambda tensor: tensor.to(device))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored."""
        for stored in (self.pool, self.scoring):
            if stored is not None:
                yield from stored.named_tensors()
