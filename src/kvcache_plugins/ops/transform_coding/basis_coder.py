"""Rows of tokens in calibrated bases: a head's keys or values as components that no prompt has to be asked for.

    token, its mean taken off -> components in the basis of its head, in standard deviations -> a row, see `rows`

Components without bits vanish, in the order of the basis the last ones. Bases, means and widths are a model's, like
its weights: all caches of the model share them, so they are modules, and no cache counts them as what it holds.

Legend: B batch, H heads, T tokens, D head dim, K components that any head has bits for, R bytes of a row.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .allocation import BLOCK
from .rotary import RotaryLayout
from .rows import RowTable
from .turning import turn


# Times that a key's scale and codes are fitted to each other, at most
_NUM_REFITS = 5


class BasisTable(nn.Module):
    """
    How one side of a layer becomes rows.

    Args:
        mean (`torch.Tensor` of shape `[H, D]`): taken off before the transform.
        basis (`torch.Tensor` of shape `[H, D, D]`): rows as long as a standard deviation of their component, those
            of most energy first.
        widths (`torch.Tensor` of shape `[H, N]`): bits of the blocks of eight components, as many in every head.
        is_weighted (`bool`): whether a token's scale is the one of least error, or shrinks nothing.

    Attributes:
        row_size (`int`): R.
        head_dim (`int`): D.
        mean (`torch.Tensor` of shape `[H, D]`), widths (`[H, K / 8]`): what was given.
        basis (`torch.Tensor` of shape `[H, K, D]`, float32), forward_basis (`[H, D, K]`): from components and to them.
    """

    def __init__(self, mean: torch.Tensor, basis: torch.Tensor, widths: torch.Tensor, *, is_weighted: bool):
        super().__init__()
        num_heads, head_dim = mean.shape
        count = max(int((widths > 0).sum(dim=1).max()), 1)
        num_components = min(count * BLOCK, head_dim)
        spare = count * BLOCK - num_components
        forward = torch.linalg.inv(basis.double())[:, :, :num_components]
        self.head_dim, self.is_weighted, self.row_size = head_dim, is_weighted, 1 + int(widths[0].sum())
        self.mean: torch.Tensor
        self.basis: torch.Tensor
        self.forward_basis: torch.Tensor
        self.widths: torch.Tensor
        # Not part of a state dict: what they are made of is a calibration's
        for name, tensor in {
            "mean": mean.float(),
            "basis": nn.functional.pad(basis[:, :num_components].float(), (0, 0, 0, spare)),
            "forward_basis": nn.functional.pad(forward.float(), (0, spare)),
            "widths": widths[:, :count].to(torch.uint8),
        }.items():
            self.register_buffer(name, tensor.contiguous(), persistent=False)
        self.requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BasisTable":
        # Nothing ever changes it, and copies of a cache are to share it
        return self

    @property
    def row_table(self) -> RowTable:
        """How components become rows, all items of a batch one behind the other."""
        return RowTable(
            order=None,
            mean=None,
            deviation=self.mean.new_ones(1, self.mean.shape[0], 1, dtype=torch.float16),
            widths=self.widths[None],
            row_size=self.row_size,
            head_dim=self.basis.shape[1],
            is_weighted=self.is_weighted,
            by_energy=not self.is_weighted,
            num_refits=_NUM_REFITS if self.is_weighted else 0,
        )

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, T, R]` of states `[B, H, T, D]` in any floating dtype."""
        if states.is_meta:
            return states.new_empty(*states.shape[:3], self.row_size, dtype=torch.uint8)
        components = _product(states.float() - self.mean[:, None], self.forward_basis)
        rows = self.row_table.encode(_as_one_item(components))
        return _as_items(rows, states.shape[0])

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """States `[B, H, T, D]`, float32, of rows `[B, H, T, R]`."""
        if rows.is_meta:
            return rows.new_empty(*rows.shape[:3], self.head_dim, dtype=torch.float32)
        components = self.row_table.decode(_as_one_item(rows))
        return _product(_as_items(components, rows.shape[0]), self.basis) + self.mean[:, None]


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
        for states, table in zip((keys, values), self.tables.on(torch.device("cpu")), strict=True):
            if states.shape[1::2] != table.mean.shape:
                raise ValueError(
                    f"`calibration` is of {table.mean.shape[0]} heads of {table.mean.shape[1]} in layer {layer_idx}, "
                    f"but got {states.shape[1]} of {states.shape[3]}: it was made for another model"
                )

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, H, T, R]` of keys and of values `[B, H, T, D]` from index `start` on."""
        key_table, value_table = self.tables.on(keys.device)
        keys = turn(keys, self.layout, start, padding, is_back=True)
        return key_table.encode(keys), value_table.encode(values)

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
            first = next(iter(self._by_device.values()))
            self._by_device[device] = tuple(_copy(table, device) for table in first)  # type: ignore[assignment]
        return self._by_device[device]

    @property
    def num_bytes(self) -> int:
        """Of one device."""
        tables = next(iter(self._by_device.values()))
        return sum(tensor.nbytes for table in tables for tensor in table.buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTables":
        return self


def _copy(table: BasisTable, device: torch.device) -> BasisTable:
    copy = BasisTable.__new__(BasisTable)
    nn.Module.__init__(copy)
    copy.head_dim, copy.is_weighted, copy.row_size = table.head_dim, table.is_weighted, table.row_size
    for name, tensor in table.named_buffers():
        copy.register_buffer(name, tensor.to(device), persistent=False)
    return copy


def _product(states: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    # Autocast would round what is transformed to its dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return states @ matrices


def _as_one_item(tokens: torch.Tensor) -> torch.Tensor:
    """Those of all items `[B, H, T, ...]` one behind the other, `[1, H, B * T, ...]`."""
    return tokens.transpose(0, 1).flatten(1, 2)[None]


def _as_items(tokens: torch.Tensor, batch_size: int) -> torch.Tensor:
    return tokens[0].unflatten(1, (batch_size, -1)).transpose(0, 1)
