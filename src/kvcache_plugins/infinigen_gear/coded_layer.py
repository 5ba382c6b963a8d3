"""A layer in codes: keys where they are scored, values in the pool, sink tokens exact.

Legend: B batch, H key/value heads, D and E head dimensions of keys and values, K slots chosen, S sink tokens.
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.parts import CodedTokens, ValuePages
from kvcache_plugins.codecs.quantization import STORAGE_DTYPE, check_range, packed_size
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import Encoded, InfiniGenLayer
from kvcache_plugins.infinigen.scoring import ScoringStates
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.kernels.compiled_tokens import attend_chosen
from kvcache_plugins.layers.finite_states import check_finite

from .config import CodingConfig
from .grouped_keys import GroupedKeys
from .sink_tokens import SinkTokens


class ValueRows:
    """
    Values as rows of bytes: each token's codes with the step and minimum of its groups, in need of nothing else.

    Args:
        codec (`SideCodec`): what values are compressed to: codes alone, in groups of channels.
    """

    def __init__(self, codec: SideCodec):
        self.codec = codec
        self.group_size = codec.grouping.group_size or codec.head_dim
        scale_bytes = codec.head_dim // self.group_size * STORAGE_DTYPE.itemsize
        self._sizes = [packed_size(codec.head_dim, codec.nbits), scale_bytes, scale_bytes]

    def encode(self, values: torch.Tensor, valid: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Compresses values.

        Args:
            values (`torch.Tensor` of shape `[B, H, tokens, E]`): the values, any floating dtype.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which are no padding.

        Returns:
            Rows, `[B, H, tokens, bytes]` in uint8, and whether they fit float16: see `SideCodec.encode`.
        """
        states, fits = self.codec.encode(values.unsqueeze(2), None if valid is None else valid.unsqueeze(1))
        parts = [part.view(torch.uint8) for part in (states.codes, states.scale, states.zero)]
        return torch.cat(parts, dim=4)[:, :, 0], fits

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Values `[B, H, tokens, E]`, float32, of rows `[B, H, tokens, bytes]`."""
        codes, *scales = rows.unsqueeze(2).split(self._sizes, dim=4)
        scale, zero = (part.contiguous().view(STORAGE_DTYPE) for part in scales)
        states = self.codec.wrap({"codes": codes, "scale": scale, "zero": zero})
        return states.dequantize_tile(slice(None), slice(None))


class CodedLayer(InfiniGenLayer):
    """
    An InfiniGen layer in codes.

    Args:
        config, layer_idx, attention_mask: as for `InfiniGenLayer`.
        coding (`CodingConfig`): what keys and values are compressed to.
    """

    scoring: GroupedKeys | None

    def __init__(
        self,
        config: InfiniGenConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        *,
        coding: CodingConfig,
    ):
        self.coding = coding
        # Decoded tokens move on in whole groups
        self.flush_length = coding.token_group
        super().__init__(config, layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.sinks = SinkTokens(self.config.sink)
        self._table: CodedTokens | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._value_rows = ValueRows(self.coding.value_codec(value_states.shape[3]))
        super().lazy_initialization(key_states, value_states)

    def _make_scoring(self, keys: torch.Tensor, queries: torch.Tensor | None) -> GroupedKeys:
        return GroupedKeys(self.coding.key_codec(keys.shape[3]))

    def _move(self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None = None) -> None:
        position = self.num_pooled
        super()._move(keys, values, queries)
        self.sinks.keep(keys, values, position, self._left_padding)

    def _encode(self, scoring: ScoringStates, keys: torch.Tensor, values: torch.Tensor) -> Encoded:
        assert isinstance(scoring, GroupedKeys)
        position, padding = self.num_pooled, self._left_padding
        compressible = real = self._valid_tokens(position, keys.shape[2])
        if self.sinks.are_from(position, padding):
            # The codecs do not see keys that stay exact
            check_finite(keys, values, real, self.layer_idx)
            compressible = self.sinks.others(keys, position, padding)
        groups, keys_fit = scoring.encode_groups(keys, compressible)
        rows, values_fit = self._value_rows.encode(values, real)
        try:
            check_range(keys_fit, values_fit)
        except ValueError as error:
            # The codecs notice, and here it is said, what is not finite
            check_finite(keys, values, real, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        # Of keys the pool holds nothing
        return groups, (rows,)

    def _dense(self, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.scoring is not None
        dense = self.scoring.decode(slots).to(self.dtype), self._value_rows.decode(rows).to(self.dtype)
        return self.sinks.restore(*dense, slots)

    def _attend_compiled(
        self, query: torch.Tensor, selection: Selection, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        assert self.pool is not None and self.window is not None
        window = self.window.keys, self.window.values
        with self.pool.reading():
            return attend_chosen(
                query, self._stored_codes(), selection.slots, selection.count, *window, scale, mask, self.num_pooled
            )

    def _stored_codes(self) -> CodedTokens:
        """Everything held, the same object until it is somewhere else."""
        assert self.pool is not None and self.scoring is not None
        keys, pages, sinks, table = self.scoring.stored(), self.pool.pages, self.sinks.stored(), self._table
        is_same = table is not None and table.keys is keys and table.values.pages is pages
        if table is None or not is_same or not table.sinks.is_same(sinks):
            rows = self._value_rows
            values = ValuePages(pages, rows.codec.head_dim, rows.codec.nbits, rows.group_size)
            table = self._table = CodedTokens(keys, values, sinks)
        return table

    def _drop_newest(self, count: int) -> None:
        super()._drop_newest(count)
        self._table = None

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_stored(function)
        self._table = None
        self.sinks.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._stored_tensors()
        if self._table is not None:
            # Padding may have been told anew since, and what it was before is held no longer
            self._stored_codes()
        for tensor in self.sinks.tensors():
            yield "residual", tensor

    def __getstate__(self) -> dict[str, object]:
        # A copy's pages may be elsewhere
        return {**self.__dict__, "_table": None}
