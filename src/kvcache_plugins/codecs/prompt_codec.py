"""`PromptCodec`: rows coded by tables that a prompt's own tokens say are best for them, and for those that follow.

Its tables are a cache's own, so they are in its files. Compiled code reads rows by the widths of a table and channels
by its order, and does not look whether they lead out of what is there: every number that is read is checked.

Legend: B batch, H heads, T tokens, D head dim, N blocks of eight channels, R bytes of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors

from .allocation import num_blocks
from .codec import Positions, QueryMoments
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
        codec._tables = keys, values
        return codec

    def to_document(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors = {"frequencies": torch.tensor(self.rope.frequencies, dtype=torch.float32)}
        for side, table in zip(("keys", "values"), self.tables(), strict=True):
            tensors |= {f"{side}.{name}": tensor for name, tensor in table.named_tensors()}
        return {"rotary": self.rope.name, "first_rotated": self.rope.first}, tensors

    def read(self, document: Document, stored: StoredTensors, heads: tuple[int, int]) -> PromptCodec:
        layout = _read_layout(document, stored, self.layouts)
        keys, values = (
            _read_table(stored.below(f"{side}."), heads, dim, size, self.quantizer, layout if side == "keys" else None)
            for side, dim, size in zip(("keys", "values"), self.head_dims, self.sizes, strict=True)
        )
        return self._with(keys, values)


def read_moments(stored: StoredTensors, heads: tuple[int, int], head_dim: int, num_layouts: int) -> QueryMoments:
    """Reads sums over queries of a layer that may have so many layouts."""
    squares = _finite("squares", stored.take("squares", (*heads, head_dim), torch.float32))
    products = _finite("products", stored.take("products", (*heads, num_layouts, head_dim), torch.float32))
    if bool((squares < 0).any()):
        raise ValueError("`squares` have to be at least 0")
    return QueryMoments(squares, products)


def _read_layout(document: Document, stored: StoredTensors, layouts: Sequence[RotaryLayout]) -> RotaryLayout:
    name, first = document.choice("rotary", sorted({each.name for each in layouts})), document.integer("first_rotated")
    document.finish()
    frequencies = stored.take("frequencies", (None,), torch.float32)
    for layout in layouts:
        own = torch.tensor(layout.frequencies, dtype=torch.float32)
        if (layout.name, layout.first, own.shape) == (name, first, frequencies.shape) and torch.allclose(
            frequencies, own, rtol=_TOLERANCE, atol=0.0
        ):
            return layout
    raise ValueError("its keys were coded with another rotary embedding than the model's config describes")


def _read_table(
    stored: StoredTensors,
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    quantizer: str,
    layout: RotaryLayout | None,
) -> RowTable:
    """Reads the table of keys of a layout, or of values."""
    shape, is_of_keys, order = (*heads, head_dim), layout is not None, None
    if is_of_keys:
        order = stored.take("order", shape, order_dtype(head_dim))
        if not bool((order.sort(dim=-1).values == torch.arange(head_dim)).all()):
            raise ValueError("`order` has to name every channel once")
    has_mean = is_of_keys or stored.has("mean")
    deviation = _finite("deviation", stored.take("deviation", shape if is_of_keys else (*heads, 1), torch.float16))
    if bool((deviation < 0).any()):
        raise ValueError("`deviation` has to be at least 0")
    widths = stored.take("widths", (*heads, num_blocks(head_dim)), torch.uint8)
    most = len(QUANTIZERS[quantizer].distortions) - 1
    if bool((widths > most).any()) or bool((widths.sum(dim=-1) != size).any()):
        raise ValueError(f"`widths` have to be at most {most}, and {size} together in every head")
    return RowTable(
        order=order,
        mean=_finite("mean", stored.take("mean", shape, torch.float16)) if has_mean else None,
        deviation=deviation,
        widths=widths,
        row_size=1 + size,
        head_dim=head_dim,
        is_weighted=is_of_keys,
        rope=layout,
        is_rotated=not is_of_keys,
        quantizer=quantizer,
    )


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"`{name}` has to be finite")
    return tensor
