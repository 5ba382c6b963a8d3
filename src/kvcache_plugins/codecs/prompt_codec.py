"""`PromptCodec`: rows coded by tables that a prompt's own tokens say are best for them, and for those that follow.

Its tables are a cache's own, so they are in its files. Compiled code reads rows by the widths of a table and channels
by its order, and does not look whether they lead out of what is there: every number that is read is checked.

Legend: B batch, H heads, T tokens, D head dim, N blocks of eight channels, R bytes of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence

import torch

from kvcache_plugins.files.schema import Stored, check_layout

from .allocation import num_blocks
from .codec import CodecState, Positions, QueryMoments
from .quantizers import QUANTIZERS
from .rope import RotaryLayout
from .rows import RowCodec, RowTable, order_dtype
from .statistics import key_table_of_layout, make_key_table, make_value_table, shared_errors


# Relative, of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6


class PromptCodec(RowCodec):
    """
    Codes keys and values by two tables that `fit` makes.

    Args:
        head_dims (two `int`): channels of a key and of a value.
        sizes (two `int`): bytes of the codes of a key and of a value.
        layouts (`Sequence[RotaryLayout]`): those that the model's keys may have.
        quantizer (`str`): one of `QUANTIZERS`.
    """

    def __init__(
        self, head_dims: tuple[int, int], sizes: tuple[int, int], layouts: Sequence[RotaryLayout], quantizer: str
    ):
        super().__init__(None)
        self.head_dims, self.sizes, self.layouts, self.quantizer = head_dims, sizes, layouts, quantizer

    @property
    def row_sizes(self) -> tuple[int, int]:
        return 1 + self.sizes[0], 1 + self.sizes[1]

    @property
    def kernel_kind(self) -> Hashable:
        return self.head_dims, self.sizes, tuple(self.layouts), self.quantizer

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        return None

    def fit(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor,
        moments: QueryMoments | None,
        positions: Positions,
    ) -> PromptCodec:
        valid = valid.to(keys.device)
        size, value_size = self.sizes
        key_table = make_key_table(keys, valid, moments, self.layouts, positions, size, self.quantizer)
        return self._with(key_table, make_value_table(values, valid, value_size, self.quantizer))

    def refit(
        self,
        number: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor,
        moments: QueryMoments | None,
    ) -> PromptCodec:
        of_keys, of_values = self.tables()
        valid = valid.to(keys.device)
        own = None if moments is None else moments.map(lambda sums: sums[number, None])
        place, (size, value_size) = self.layouts.index(self.rope), self.sizes
        table, _ = key_table_of_layout(keys.float(), valid, own, place, self.rope, Positions(), size, self.quantizer)
        value_table = make_value_table(values, valid, value_size, self.quantizer)
        return self._with(of_keys.with_sequence(number, table), of_values.with_sequence(number, value_table))

    def without_shared_errors(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        positions: Positions,
    ) -> PromptCodec:
        return (
            self if keys.is_meta else self._with(*shared_errors(self.tables(), rows, keys, values, valid, positions))
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PromptCodec:
        return self if self._tables is None else self._with(*(table.map(function) for table in self.tables()))

    def _with(self, keys: RowTable, values: RowTable) -> PromptCodec:
        codec = copy.copy(self)
        codec._tables, codec._finer = (keys, values), None
        return codec

    def state(self) -> CodecState | None:
        if self._tables is None:
            return None
        keys, values = self.tables()
        return CodecState(
            rotary=self.rope.name,
            first_rotated=self.rope.first,
            frequencies=torch.tensor(self.rope.frequencies, dtype=torch.float32),
            keys=dict(keys.named_tensors()),
            values=dict(values.named_tensors()),
        )

    def restore(self, state: CodecState, heads: tuple[int, int], path: str) -> PromptCodec:
        known = state.rotary, state.first_rotated, state.frequencies.shape
        for layout in self.layouts:
            own = torch.tensor(layout.frequencies, dtype=torch.float32)
            if (layout.name, layout.first, own.shape) == known and torch.allclose(
                state.frequencies, own, rtol=_TOLERANCE, atol=0.0
            ):
                break
        else:
            raise ValueError(
                f"`{path}`: keys were coded with another rotary embedding than the model's config describes"
            )
        (key_dim, value_dim), (size, value_size) = self.head_dims, self.sizes
        keys = _table(f"{path}.keys", state.keys, heads, key_dim, size, self.quantizer, layout)
        return self._with(keys, _table(f"{path}.values", state.values, heads, value_dim, value_size, self.quantizer))


def _table(
    path: str,
    tensors: dict[str, torch.Tensor],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    quantizer: str,
    rope: RotaryLayout | None = None,
) -> RowTable:
    """Makes the table of keys of a rotary embedding, or of values, whose codes take `size` bytes."""
    shape, is_of_keys, most = (*heads, head_dim), rope is not None, len(QUANTIZERS[quantizer].distortions) - 1
    layout = {
        "deviation": Stored(shape if is_of_keys else (*heads, 1), torch.float16, least=0),
        "widths": Stored((*heads, num_blocks(head_dim)), torch.uint8, most=most),
    }
    if is_of_keys:
        layout["order"] = Stored(shape, order_dtype(head_dim))
    if is_of_keys or "mean" in tensors:
        layout["mean"] = Stored(shape, torch.float16)
    check_layout(path, tensors, layout)
    order, widths = tensors.get("order"), tensors["widths"]
    if order is not None and not bool((order.sort(dim=-1).values == torch.arange(head_dim)).all()):
        raise ValueError(f"`{path}.order` has to name every channel once")
    if bool((widths.sum(dim=-1) != size).any()):
        raise ValueError(f"`{path}.widths` have to be {size} together in every head")
    return RowTable(
        order=order,
        mean=tensors.get("mean"),
        deviation=tensors["deviation"],
        widths=widths,
        row_size=1 + size,
        head_dim=head_dim,
        is_weighted=is_of_keys,
        rope=rope,
        is_rotated=not is_of_keys,
        quantizer=quantizer,
    )
