"""Where the tokens of an offloaded layer are: the newest at hand, all older ones in host memory.

The life of a token: a prompt is attended to exactly and then moves into the pool, but for its newest tokens; a decoded
token waits in the window, and the window's oldest move into the pool in runs, at the *beginning* of an update, so that
a rollback of the newest update finds its tokens there. Beside the pool the layer keeps a copy of the keys for scoring.

On a GPU the host runs ahead: it says what is to be moved, and waits neither for states nor for pages.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.masking import mask_columns, slice_mask
from kvcache_plugins.ops.parts import DensePart

from .config import InfiniGenConfig
from .pool import TokenPool
from .scoring import NUM_FITTED, ScoringCodes, ScoringColumns, ScoringStates


class OffloadedLayer(PromptLayer):
    """
    Keys and values of one layer, in a pool and a window, and everything that is exact about them. What a decode step
    attends to is for a subclass to say.

    Args:
        config (`InfiniGenConfig`):
            The options.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
    """

    counter_names: ClassVar[tuple[str, ...]] = ("attend_calls", "prompts_without_mask", "tokens_evicted")

    def __init__(self, config: InfiniGenConfig, layer_idx: int, attention_mask: torch.Tensor | None = None):
        self.config = config
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.pool: TokenPool | None = None
        self.scoring: ScoringStates | None = None
        self.window: ResidualBuffer | None = None
        # Queries of the prompt, `[B, H * G, tokens, D]`, while columns are chosen by them
        self._prompt_queries: torch.Tensor | None = None

    @property
    def needs_prompt_attention(self) -> bool:  # type: ignore[override]
        """Columns of the scoring copy are chosen by the prompt's queries."""
        return self.config.partial_ratio is not None

    @property
    def _pooled(self) -> int:
        """Position of the first token that is not in the pool."""
        return self._length - (0 if self.window is None else self.window.length)

    def _to_rows(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the pool holds of keys and values `[B, H, tokens, D or E]`, `[B, H, tokens, any]` both."""
        return keys, values

    def _pool_stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Keys and values of everything in the pool, page by page, with the slots that they span."""
        assert self.pool is not None
        return self.pool.stretches()

    def _pooled_keys(self) -> torch.Tensor:
        """Keys of all slots, `[B, H, slots, D]`, where they are attended to."""
        return torch.cat([keys for keys, *_ in self._pool_stretches()], dim=2)

    def _before_update(self) -> None:
        window, config = self.window, self.config
        if window is None or window.length < config.recent + config.flush_length:
            return
        count = (window.length - config.recent) // config.flush_length * config.flush_length
        self._move_to_pool(window.keys[:, :, :count], window.values[:, :, :count], self._pooled)
        window.drop_first(count)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.window is None:
            self.window = ResidualBuffer(keys, values, self.config.recent + self.config.flush_length)
        self.window.append(keys, values)

    def on_dense_read(self, side: str) -> None:
        if self.pool is not None:
            warnings.warn(
                "the whole cache is fetched for every token, as attention is not by `sdpa`: exact, and slow. "
                "`model.set_attn_implementation('sdpa')` fetches what matters",
                stacklevel=2,
            )
        super().on_dense_read(side)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        count = max(keys.shape[2] - self.config.recent, 0)
        if count:
            self._move_to_pool(keys[:, :, :count], values[:, :, :count], 0)
        self._append(keys[:, :, count:], values[:, :, count:])
        self._prompt_queries = None

    def _move_to_pool(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Tokens from `position` on, the first behind those in the pool."""
        config, pool = self.config, self.pool
        rows = self._to_rows(keys, values)
        if pool is None:
            pool = TokenPool(
                *rows,
                max_tokens=config.pool_tokens,
                eviction=config.eviction,
                num_protected=config.sink,
            )
        room = keys.shape[2]
        if config.pool_tokens is not None:
            room = min(room, config.pool_tokens - pool.num_slots)
        taken = pool.append(*rows, position, self.padding)
        self.pool = pool
        if pool.usage is not None:
            self._counters["tokens_evicted"] = pool.usage.num_evicted
        self._score_later(keys, position, room, taken)

    def _score_later(self, keys: torch.Tensor, position: int, room: int, taken: list[torch.Tensor]) -> None:
        """Notes in the scoring copy what has gone into the pool: `room` tokens at its end, the others into slots."""
        if self.scoring is None:
            self.scoring = self._make_scoring(keys[:, :, :room], position)
        self.scoring.append(keys[:, :, :room])
        start = room
        for slots in taken:
            self.scoring.write(slots, keys[:, :, start : start + slots.shape[2]])
            start += slots.shape[2]
        if not taken and isinstance(self.scoring, ScoringCodes):
            self._refit()

    def _make_scoring(self, keys: torch.Tensor, position: int) -> ScoringStates:
        queries = self._prompt_queries
        valid = self._valid_tokens(position, keys.shape[2] if queries is None else queries.shape[2])
        if self.config.partial_ratio is not None:
            assert self.config.skewing is not None
            return ScoringColumns(keys, queries, valid, self.config.partial_ratio, self.config.skewing)
        assert self.config.scoring_nbits is not None
        scoring = ScoringCodes(self.config.scoring_nbits)
        scoring.fit(keys, valid)
        scoring.num_fitted = max(keys.shape[2] - self._longest_padding(), 0)
        return scoring

    def _refit(self) -> None:
        """Tells channels' statistics anew as long as they are those of few tokens."""
        scoring, pool = self.scoring, self.pool
        assert isinstance(scoring, ScoringCodes) and pool is not None
        if scoring.num_fitted >= NUM_FITTED:
            return
        longest = self._longest_padding()
        if scoring.length > scoring.num_fitted + longest:
            keys = self._pooled_keys()
            scoring.fit(keys, self._valid_tokens(0, keys.shape[2]))
            scoring.rewrite(keys)
        scoring.num_fitted = max(scoring.length - longest, 0)

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Everything held, page by page, with its columns of the mask."""
        if self.pool is not None:
            for keys, values, start, stop in self._pool_stretches():
                mask = slice_mask(attn_mask, start, stop)
                if self.pool.usage is not None:
                    mask = self._mask_of_slots(attn_mask, self.pool.usage.positions[:, :, start:stop], groups)
                yield DensePart(keys, values, stop - start, mask)
        position = self._pooled
        if self.window is not None and self.window.length:
            tail = self.window.length
            yield DensePart(*self.window.tensors(), tail, slice_mask(attn_mask, position, position + tail))
        if self._pending is not None:
            keys, values = self._pending
            yield DensePart(keys, values, keys.shape[2], attn_mask)

    def _mask_of_slots(self, attn_mask: torch.Tensor | None, positions: torch.Tensor, groups: int) -> torch.Tensor:
        """The columns of the mask for slots whose tokens differ from head to head, `[B, H * G, Q or 1, slots]`."""
        positions = positions.to(self.device).long()
        held = (positions >= 0)[:, :, None]
        if attn_mask is not None:
            by_head = (
                mask_columns(attn_mask, head.clamp(min=0), self.batch_size, self._length)
                for head in positions.unbind(dim=1)
            )
            mask = torch.cat([each[:, :1] for each in by_head if each is not None], dim=1)
            held = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
        return held.repeat_interleave(groups, dim=1)

    def materialize(self, side: str) -> torch.Tensor:
        if self._counters["tokens_evicted"]:
            raise ValueError(
                "a cache that has evicted tokens cannot be made dense: use `sdpa` attention, or no `pool_tokens`"
            )
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for part, start, stop in self._stored(side):
            dense[:, :, start:stop] = part
        return dense

    def _stored(self, side: str) -> Iterator[tuple[torch.Tensor, int, int]]:
        """States of one side in order, with the positions that they span."""
        number = 0 if side == "keys" else 1
        if self.pool is not None:
            for *states, start, stop in self._pool_stretches():
                yield states[number], start, stop
        if self.window is not None:
            yield (self.window.keys, self.window.values)[number], self._pooled, self._length
        if self._pending is not None:
            yield self._pending[number], 0, self._length

    def _drop_newest(self, count: int) -> None:
        left = self._length - count
        if self.window is not None:
            self.window.drop_last(min(count, self.window.length))
        if self.pool is None or left >= self._pooled:
            return
        self.pool.truncate(left)
        if self.scoring is not None:
            self.scoring.truncate(self.pool.num_slots)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for stored in (self.pool, self.scoring, self.window):
            if stored is not None:
                stored.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.window is not None:
            for tensor in self.window.tensors():
                yield "residual", tensor
        if self.pool is not None:
            yield from self.pool.named_tensors()
        if self.scoring is not None:
            yield from self.scoring.named_tensors()

    def host_tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self.pool is None else self.pool.host_tensors()

    def offload(self) -> None:
        """Nothing: what can stand in host memory does so already."""

    def prefetch(self) -> None:
        """Nothing: tokens are fetched when they have been chosen."""

    def _move_to(self, device: torch.device) -> None:
        self.device = device
        if self.pool is not None:
            self.pool.serve(device)
        for stored in (self.scoring, self.window):
            if stored is not None:
                stored.map(lambda tensor: tensor.to(device))
        if self.padding is not None:
            self.padding = self.padding.to(device)
