"""One layer of a cache that codes every token by itself, as soon as it comes.

Attention over a first prompt is exact, as in Transformers' quantized caches, and right after it the prompt becomes
rows of bytes. Later tokens become rows before attention sees them. Attention widens a tile of rows at a time, in plain
PyTorch.
"""

from collections.abc import Callable, Collection, Iterator

import torch

from kvcache_plugins.codecs.codec import Codec, Positions
from kvcache_plugins.kernels.attention import OnlineAttention
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.token_rows import TokenRows


# Dense float32 values of one tile stay within the processor's caches
_TILE_TOKENS = 1024
_SIDES = ("keys", "values")
# Called with the head dims of keys and values
MakeCodec = Callable[[int, int], Codec]


class CodedTokensLayer(PromptLayer):
    """
    Keys and values of one layer as rows of bytes.

    Args:
        make_codec (`Callable`):
            Called with the head dims of keys and values; returns what codes them.
        layer_idx (`int`):
            Index of the layer, named in errors.
    """

    counter_names = ("tokens_compressed", "attend_calls", "prompts_without_mask")

    def __init__(self, make_codec: MakeCodec, layer_idx: int):
        self._make_codec = make_codec
        super().__init__(layer_idx)

    def _clear(self) -> None:
        super()._clear()
        self.rows: TokenRows | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.codec = self._make_codec(key_states.shape[3], value_states.shape[3])

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        self._add_rows(keys, values, self._length - keys.shape[2])

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._add_rows(keys, values, self._length)

    def _add_rows(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        valid = self._valid_tokens(start, keys.shape[2])
        check_finite(keys, values, valid, self.layer_idx)
        if valid is not None:
            # Nothing is known of padding, not even that it can be stored
            keys, values = (states.masked_fill(~valid[:, None, :, None], 0) for states in (keys, values))
        rows = self.codec.encode(keys, values, Positions(start, self.padding))
        if self.rows is None:
            self.rows = TokenRows(rows[0], rows[1], keys.shape[2])
        else:
            self.rows.append(rows[0], rows[1])
        self._counters["tokens_compressed"] += keys.shape[2]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._learn_padding(call.mask)
        self.settle_prompt()
        attention = OnlineAttention(call.query, self._shapes["keys"][1], call.scale, call.softcap, call.sinks)
        full_mask = call.full_mask(self._length)
        for tokens, *rows in self._tiles():
            mask = slice_mask(full_mask, tokens.start, tokens.stop)
            keys, values = (self._decode(side, each, tokens) for side, each in zip(_SIDES, rows, strict=True))
            attention.add_tile(keys, values, mask)
        self._counters["attend_calls"] += 1
        return attention.result()

    def _tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Which tokens, and the rows of their keys and values."""
        if self.rows is None:
            return
        for first in range(0, self.rows.length, _TILE_TOKENS):
            tokens = slice(first, min(first + _TILE_TOKENS, self.rows.length))
            yield tokens, self.rows.keys[:, :, tokens], self.rows.values[:, :, tokens]

    def materialize(self, side: str) -> torch.Tensor:
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        for tokens, *rows in self._tiles():
            by_side = dict(zip(_SIDES, rows, strict=True))
            yield tokens, {side: self._decode(side, by_side[side], tokens).to(self.dtype) for side in sides}
        if self._pending is not None:
            exact = dict(zip(_SIDES, self._pending, strict=True))
            count = self._pending[0].shape[2]
            yield slice(self._length - count, self._length), {side: exact[side] for side in sides}

    def _decode(self, side: str, rows: torch.Tensor, tokens: slice) -> torch.Tensor:
        if side == "values":
            return self.codec.decode_values(rows)
        return self.codec.decode_keys(rows, Positions(tokens.start, self.padding))

    def _drop_newest(self, count: int) -> None:
        assert self.rows is not None, "a prompt is stored before it is cropped"
        self.rows.length -= count

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rows is not None:
            self.rows.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.rows is None:
            return
        for rows in (self.rows.keys, self.rows.values):
            yield "codes", rows[:, :, : self.rows.length]
            yield "spare", rows[:, :, self.rows.length :]

    def stats(self) -> dict[str, int]:
        held = 0 if self.rows is None else self.rows.length
        return {
            "tokens_cached": self._length,
            "tokens_exact": self._length - held,
            **self._counters,
            "dense_reads": self.dense_reads,
        }
