"""Rows of tokens in calibrated bases: a head's keys or values as components that no prompt has to be asked for.

Keys lose their rotary embedding first, and get it back when they are decoded; the bases are `basis_table`'s.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .basis_table import BasisTable, DeviceTables
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

    tables: DeviceTables
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

    @property
    def table_sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a row and components of keys and of values, which kernels are compiled for."""
        return tuple((table.row_size, table.num_components) for table in self.tables.first)

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
