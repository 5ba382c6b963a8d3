"""How a layer's keys and values become rows in calibrated bases, and come back: the tables of both sides, by device.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .basis_table import BasisTable
from .rotary import RotaryLayout
from .rows import is_coded_by_triton
from .turning import turn


@dataclass(frozen=True, eq=False)
class BasisCoder:
    """
    How a layer's keys and values become rows in calibrated bases, and come back; see `parts.RowCoder`.

    Attributes:
        tables (`DeviceTables`): of keys and of values.
        layout (`RotaryLayout`): of the keys' rotary embedding.
    """

    tables: "DeviceTables"
    layout: RotaryLayout

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Raises a `ValueError` if states `[B, H, T, D]` are not those of the model that was calibrated."""
        for states, (num_heads, head_dim) in zip((keys, values), self.head_shapes, strict=True):
            if states.shape[1::2] != (num_heads, head_dim):
                raise ValueError(
                    f"`calibration` is of {num_heads} heads of {head_dim} in layer {layer_idx}, but got "
                    f"{states.shape[1]} of {states.shape[3]}: it was made for another model"
                )

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """Heads and head dim of keys and of values."""
        return [(table.mean.shape[0], table.head_dim) for table in self.tables.first]

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Bytes of a key and of a value."""
        keys, values = self.tables.first
        return keys.row_size, values.row_size

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, H, T, R]` of keys and of values `[B, H, T, D]` from index `start` on."""
        key_table, value_table = self.tables.on(keys.device)
        return self._encode_keys(key_table, keys, start, padding), self._encode_values(value_table, values)

    def _encode_keys(
        self, table: BasisTable, keys: torch.Tensor, start: int, padding: torch.Tensor | None
    ) -> torch.Tensor:
        if is_coded_by_triton(keys, table.quantizer):
            # Imported late, as it needs a package that may not be there
            from .triton_coding import encode_keys

            return encode_keys(keys, table, self.layout, start, padding)
        return table.encode(keys if keys.is_meta else turn(keys, self.layout, start, padding, is_back=True))

    def _encode_values(self, table: BasisTable, values: torch.Tensor) -> torch.Tensor:
        if is_coded_by_triton(values, table.quantizer):
            from .triton_coding import encode_values

            return encode_values(values, table)
        return table.encode(values)

    def decode_keys(self, rows: torch.Tensor, start: int, padding: torch.Tensor | None) -> torch.Tensor:
        """Keys `[B, H, T, D]`, float32, of rows from index `start` on."""
        keys = self.tables.on(rows.device)[0].decode(rows)
        return turn(keys, self.layout, start, padding, is_back=False)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Values `[B, H, T, D]`, float32, of rows."""
        return self.tables.on(rows.device)[1].decode(rows)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Nothing: all is the model's."""
        return iter(())

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        """What all caches of the model share, on every device."""
        return self.tables.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "BasisCoder":
        """The same, as nothing of it is an item's or a cache's."""
        return self


class DeviceTables(nn.Module):
    """
    The tables of a layer's keys and values, brought once to every device that asks for them.

    Args:
        keys, values (`BasisTable`): on any device.
    """

    def __init__(self, keys: BasisTable, values: BasisTable):
        super().__init__()
        self._by_device = {keys.mean.device: (keys, values)}

    def on(self, device: torch.device) -> tuple[BasisTable, BasisTable]:
        """Those on a device."""
        if device not in self._by_device:
            self._by_device[device] = tuple(_copy(table, device) for table in self.first)  # type: ignore[assignment]
        return self._by_device[device]

    @property
    def first(self) -> tuple[BasisTable, BasisTable]:
        """Those that it was made of."""
        return next(iter(self._by_device.values()))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those of all devices that hold data."""
        for device, tables in self._by_device.items():
            if device.type != "meta":
                for table in tables:
                    yield from table.buffers()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTables":
        return self


def _copy(table: BasisTable, device: torch.device) -> BasisTable:
    copy = BasisTable.__new__(BasisTable)
    nn.Module.__init__(copy)
    copy.head_dim, copy.num_components, copy.row_size = table.head_dim, table.num_components, table.row_size
    copy.is_weighted, copy.quantizer = table.is_weighted, table.quantizer
    for name, tensor in table.named_buffers():
        copy.register_buffer(name, tensor.to(device), persistent=False)
    return copy
