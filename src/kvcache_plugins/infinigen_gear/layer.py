"""One layer of an InfiniGen cache in codes: keys where they are scored, values in the pool, sink tokens exact.

Legend: B batch, H key/value heads, D and E head dimensions of keys and values, K slots chosen, S sink tokens.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.gear.compression import check_finite
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.ops.compression_choice import choose_steps
from kvcache_plugins.ops.dispatch import choose_token_kernel

from .config import CodingConfig
from .grouped_keys import GroupedKeys
from .value_rows import ValueRows


class CodedLayer(InfiniGenLayer):
    """
    Keys and values of one layer, in codes.

    Args:
        config (`InfiniGenConfig`):
            The options of InfiniGen.
        coding (`CodingConfig`):
            What keys and values are compressed to.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
    """

    scoring: GroupedKeys | None

    def __init__(
        self,
        config: InfiniGenConfig,
        coding: CodingConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
    ):
        self.coding = coding
        # Decoded tokens move on in whole groups
        super().__init__(dataclasses.replace(config, flush_length=coding.token_group), layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        # Keys and values `[B, H, S, D or E]` of the first tokens
        self.sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        # What is about to be stored: groups of keys, rows of values
        self._encoded: tuple[dict[str, torch.Tensor], torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        head_dim = value_states.shape[3]
        self._value_rows = ValueRows(self.coding.value, head_dim, self.coding.channel_group(head_dim))
        super().lazy_initialization(key_states, value_states)

    def _to_rows(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._encoded is not None
        _, rows = self._encoded
        # Of keys the pool holds nothing
        return rows[..., :0], rows

    def _move_to_pool(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        # Before anything is stored: what does not fit float16 raises
        self._encoded = self._encode(keys, values, position)
        try:
            super()._move_to_pool(keys, values, position)
        finally:
            self._encoded = None
        if position < self._longest_padding() + self.config.sink:
            self._keep_sinks(keys, values, position)

    def _encode(
        self, keys: torch.Tensor, values: torch.Tensor, position: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Groups of keys and rows of values, of tokens `[B, H, tokens, D or E]` from `position` on; stores nothing."""
        steps = choose_steps(keys)
        real = self._valid_tokens(position, keys.shape[2])
        # Kernels notice by themselves what is not finite; then the states are looked at, to say what it was
        if not steps.is_fused:
            check_finite(keys, values, real, self.layer_idx)
        compressible = real
        if position < self._longest_padding() + self.config.sink:
            # Sink tokens are exact, and would widen the ranges of the others. With its data even where keys have none
            on = torch.device("cpu") if keys.is_meta else keys.device
            number = torch.arange(position, position + keys.shape[2], device=on) - self._first_slots(on)
            compressible = number >= self.config.sink
        try:
            groups = self._grouped_keys().encode(keys, compressible, steps)
            rows = self._value_rows.encode(values, real, steps)
            steps.check_range()
        except ValueError as error:
            check_finite(keys, values, real, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        return groups, rows

    def _grouped_keys(self) -> GroupedKeys:
        return self.scoring or GroupedKeys(self.coding.key, self.coding.token_group)

    def _score_later(self, keys: torch.Tensor, position: int, room: int, taken: list[torch.Tensor]) -> None:
        assert self._encoded is not None
        self.scoring = self._grouped_keys()
        self.scoring.add(self._encoded[0], keys.shape[2])

    def _first_slots(self, device: torch.device) -> torch.Tensor:
        """Slot of each item's first real token, `[B, 1]`. Its sink tokens are in that one and those behind it."""
        if self.padding is None:
            return torch.zeros(self.batch_size, 1, dtype=torch.int64, device=device)
        return self.padding.to(device)[:, None]

    def _keep_sinks(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Notes those of the tokens from `position` on that are sink tokens of their item."""
        place = self._first_slots(self.device) + torch.arange(self.config.sink, device=self.device) - position
        is_here = ((place >= 0) & (place < keys.shape[2]))[:, None, :, None]
        place = place.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        found = [states.gather(2, place.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)]
        before = self.sinks or [torch.zeros_like(states) for states in found]
        new_keys, new_values = (torch.where(is_here, new, old) for new, old in zip(found, before, strict=True))
        self.sinks = new_keys, new_values

    def _dense(self, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, H, K, D or E]` of slots `[B, H, K]`, in which are the rows `[B, H, K, bytes]`."""
        assert self.scoring is not None
        dense = self.scoring.decode(slots).to(self.dtype), self._value_rows.decode(rows).to(self.dtype)
        if self.sinks is None:
            return dense
        number = slots - self._first_slots(self.device)[..., None]
        is_sink = ((number >= 0) & (number < self.config.sink))[..., None]
        index = number.clamp(0, self.config.sink - 1)[..., None]
        keys, values = (
            torch.where(is_sink, sinks.gather(2, index.expand(-1, -1, -1, sinks.shape[3])), states)
            for sinks, states in zip(self.sinks, dense, strict=True)
        )
        return keys, values

    def _pool_stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        assert self.pool is not None
        for _, rows, start, stop in self.pool.stretches():
            slots = torch.arange(start, stop, device=self.device).expand(*rows.shape[:2], -1)
            yield *self._dense(rows, slots), start, stop

    def _rows_on_host(self, selection: Selection) -> tuple[list[torch.Tensor], torch.Tensor]:
        assert self.pool is not None
        most = max(int(selection.count.max()), 1)
        slots = selection.slots[:, :, :most]
        numbers = torch.arange(most).expand_as(slots)
        if choose_token_kernel(slots)[0] == "compiled":
            return [self._widen(slots, selection.count)], numbers
        return [self._dense_rows(self.pool.gather(slots), slots)], numbers

    def _widen(self, slots: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Keys and values side by side, `[B, H, K, D + E]`, of the first `count` `[B, H]` of slots `[B, H, K]`."""
        # Numba is not everywhere
        from kvcache_plugins.ops.compiled.coded_rows import KeyCodes, widen_rows

        assert self.pool is not None and self.scoring is not None
        values, sinks = self._value_rows, self.sinks or self._no_sinks()
        rows = widen_rows(
            KeyCodes(**self.scoring.stored(), nbits=self.coding.key_nbits),
            self.scoring.places_of(slots),
            self.pool.pages,
            slots,
            count,
            values.head_dim,
            values.config.nbits,
            values.group_size,
            (self._first_slots(self.device)[:, 0], *sinks),
        )
        return rows.to(self.dtype)

    def _no_sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (self.states_shape(side) for side in ("keys", "values"))
        keys, values = (torch.empty(*shape[:2], 0, shape[3]) for shape in shapes)
        return keys, values

    def _dense_rows(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._dense(rows, slots), dim=3)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_stored(function)
        if self.sinks is not None:
            self.sinks = function(self.sinks[0]), function(self.sinks[1])

    def _move_to(self, device: torch.device) -> None:
        super()._move_to(device)
        if self.sinks is not None:
            self.sinks = self.sinks[0].to(device), self.sinks[1].to(device)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._stored_tensors()
        for tensor in self.sinks or ():
            yield "residual", tensor
