"""A store in codes: keys where they are scored, values in the pool, sink tokens exact.

Legend: B batch, H key/value heads, D and E head dimensions of keys and values, K slots chosen, S sink tokens.
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.parts import CodedTokens, ValuePages
from kvcache_plugins.codecs.quantization import STORAGE_DTYPE, check_range, packed_size
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.pool import TokenPool
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.infinigen.token_store import TokenStore
from kvcache_plugins.kernels.compiled_tokens import attend_chosen
from kvcache_plugins.kernels.tokens import choose_rows_kernel
from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.layers.left_padding import LeftPadding

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


class CodedStore(TokenStore):
    """
    Tokens of one layer, in codes.

    Args:
        config (`InfiniGenConfig`):
            The options of InfiniGen.
        coding (`CodingConfig`):
            What keys and values are compressed to.
        layer_idx (`int`):
            Index of the layer, named in errors.
    """

    scoring: GroupedKeys | None

    def __init__(self, config: InfiniGenConfig, coding: CodingConfig, layer_idx: int):
        self.coding, self.layer_idx = coding, layer_idx
        super().__init__(config)
        # Decoded tokens move on in whole groups
        self.flush_length = coding.token_group

    def clear(self) -> None:
        super().clear()
        self.sinks = SinkTokens(self.config.sink)
        self._tokens: CodedTokens | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._value_rows = ValueRows(self.coding.value_codec(value_states.shape[3]))
        super().lazy_initialization(key_states, value_states)

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
        padding: LeftPadding,
        queries: torch.Tensor | None = None,
    ) -> None:
        grouped = self.scoring or GroupedKeys(self.coding.key_codec(keys.shape[3]))
        # Before anything is stored: what does not fit float16 raises
        groups, rows = self._encode(grouped, keys, values, position, padding)
        # Of keys the pool holds nothing
        states = rows[..., :0], rows
        pool = self.pool
        if pool is None:
            pool = TokenPool(*states, num_protected=self.config.sink, folder=self.config.folder)
        pool.append(*states, position, padding.counts)
        self.pool, self.scoring = pool, grouped
        grouped.add(groups, keys.shape[2])
        self.sinks.keep(keys, values, position, padding)

    def _encode(
        self, grouped: GroupedKeys, keys: torch.Tensor, values: torch.Tensor, position: int, padding: LeftPadding
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Groups of keys and rows of values, of tokens `[B, H, tokens, D or E]` from `position` on; stores nothing."""
        real = padding.valid_tokens(position, keys.shape[2], self.device)
        compressible = real
        if self.sinks.are_from(position, padding):
            # The codecs do not see keys that stay exact
            check_finite(keys, values, real, self.layer_idx)
            compressible = self.sinks.others(keys, position, padding)
        groups, keys_fit = grouped.encode(keys, compressible)
        rows, values_fit = self._value_rows.encode(values, real)
        try:
            check_range(keys_fit, values_fit)
        except ValueError as error:
            # The codecs notice, and here it is said, what is not finite
            check_finite(keys, values, real, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        return groups, rows

    def _dense(self, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, H, K, D or E]` of slots `[B, H, K]`, in which are the rows `[B, H, K, bytes]`."""
        assert self.scoring is not None
        dense = self.scoring.decode(slots).to(self.dtype), self._value_rows.decode(rows).to(self.dtype)
        return self.sinks.restore(*dense, slots)

    def stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        assert self.pool is not None
        for _, rows, start, stop in self.pool.stretches():
            slots = torch.arange(start, stop, device=self.device).expand(*rows.shape[:2], -1)
            yield *self._dense(rows, slots), start, stop

    def dense_rows(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._dense(rows, slots), dim=3)

    def attend(
        self,
        query: torch.Tensor,
        selection: Selection,
        window: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        mask: torch.Tensor | None,
        window_start: int,
    ) -> tuple[torch.Tensor, str, bool]:
        kernel, is_fallback = choose_rows_kernel(query, window[1].shape[3], window[0].dtype)
        if kernel != "compiled":
            return super().attend(query, selection, window, scale, mask, window_start)
        assert self.pool is not None
        slots, count = selection.slots, selection.count
        with self.pool.reading():
            output = attend_chosen(query, self._stored(), slots, count, *window, scale, mask, window_start)
        return output, kernel, is_fallback

    def _stored(self) -> CodedTokens:
        """Everything held, the same object until it is somewhere else."""
        assert self.pool is not None and self.scoring is not None
        keys, pages, sinks, tokens = self.scoring.stored(), self.pool.pages, self.sinks.stored(), self._tokens
        is_same = tokens is not None and tokens.keys is keys and tokens.values.pages is pages
        if tokens is None or not is_same or not tokens.sinks.is_same(sinks):
            rows = self._value_rows
            values = ValuePages(pages, rows.codec.head_dim, rows.codec.nbits, rows.group_size)
            tokens = self._tokens = CodedTokens(keys, values, sinks)
        return tokens

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._tokens = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().map(function)
        self._tokens = None
        self.sinks.map(function)

    def serve(self, device: torch.device) -> None:
        super().serve(device)
        self._tokens = None
        self.sinks.map(lambda tensor: tensor.to(device))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_tensors()
        if self._tokens is not None:
            # Padding may have been told anew since, and what it was before is held no longer
            self._stored()
        for tensor in self.sinks.tensors():
            yield "residual", tensor

    def __getstate__(self) -> dict[str, object]:
        # A copy's pages may be elsewhere
        return {**self.__dict__, "_tokens": None}
