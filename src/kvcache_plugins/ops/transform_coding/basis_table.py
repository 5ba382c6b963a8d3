"""Bases, means and widths that a calibration gives one side of a layer, and what codes and decodes by them.

    token, its mean taken off -> channels times their factors -> components in the basis of its head,
    in standard deviations -> a row, see `rows`

Components without bits vanish, in the order of the basis the last ones. Bases, means and widths are a model's, like
its weights: all caches of the model share them, so they are modules, and no cache counts them as what it holds.

The basis and its inverse stand in eight bits a number. The inverse is that of the rounded basis, and what it lost
when it was rounded itself is made good by a second look, at what the first components leave. So all that rounding does
is that the basis is a little beside the best one.

Legend: B batch, H heads, T tokens, D head dim, K components that any head has bits for, R bytes of a row.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .allocation import BLOCK
from .rows import RowTable


# Of keys
_NUM_REFITS = 5
# Of a number in eight bits
_MOST = 127


class BasisTable(nn.Module):
    """
    How one side of a layer becomes rows.

    Args:
        mean (`torch.Tensor` of shape `[H, D]`, float16): taken off before the transform.
        factors (`torch.Tensor` of shape `[H, D]`, float32): what channels are multiplied by.
        basis (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, those of most energy
            first.
        steps (`torch.Tensor` of shape `[H, D]`, float32): what its rows are in units of.
        widths (`torch.Tensor` of shape `[H, N]`): bits of the blocks of eight components, as many in every head.
        is_weighted (`bool`): whether a token's scale is the one of least error, or shrinks nothing.
        quantizer (`str`, *optional*, defaults to `"lloyd-max"`): one of `QUANTIZERS`.

    Attributes:
        row_size (`int`): R.
        head_dim (`int`): D.
        num_components (`int`): K.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8): columns of the inverse, in units such that products with
            rows of the basis are 1.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        factors: torch.Tensor,
        basis: torch.Tensor,
        steps: torch.Tensor,
        widths: torch.Tensor,
        *,
        is_weighted: bool,
        quantizer: str = "lloyd-max",
    ):
        super().__init__()
        count = max(int((widths > 0).sum(dim=1).max()), 1)
        self.head_dim, self.num_components = mean.shape[1], min(count * BLOCK, mean.shape[1])
        self.is_weighted, self.row_size, self.quantizer = is_weighted, 1 + int(widths[0].sum()), quantizer
        self.mean: torch.Tensor
        self.factors: torch.Tensor
        self.basis: torch.Tensor
        self.steps: torch.Tensor
        self.inverse: torch.Tensor
        self.widths: torch.Tensor
        # Not part of a state dict: what they are made of is a calibration's, and stands in memory once for all rates
        for name, tensor in {
            "mean": mean,
            "factors": factors,
            "basis": basis,
            "steps": steps,
            "inverse": _rounded_inverse(basis)[:, : self.num_components].contiguous(),
            "widths": widths[:, :count].to(torch.uint8).contiguous(),
        }.items():
            self.register_buffer(name, tensor.contiguous(), persistent=False)
        self.requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BasisTable":
        # Nothing ever changes it, and copies of a cache are to share it
        return self

    @property
    def num_refits(self) -> int:
        """Times that a token's scale and codes are fitted to each other, at most."""
        return _NUM_REFITS if self.is_weighted else 0

    @property
    def row_table(self) -> RowTable:
        """How components become rows, all items of a batch one behind the other."""
        return RowTable(
            order=None,
            mean=None,
            deviation=self.factors.new_ones(1, self.mean.shape[0], 1, dtype=torch.float16),
            widths=self.widths[None],
            row_size=self.row_size,
            head_dim=self.num_components,
            is_weighted=self.is_weighted,
            by_energy=not self.is_weighted,
            num_refits=self.num_refits,
            quantizer=self.quantizer,
        )

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, T, R]` of states `[B, H, T, D]` in any floating dtype."""
        if states.is_meta:
            return states.new_empty(*states.shape[:3], self.row_size, dtype=torch.uint8)
        basis, inverse = self._matrices()
        scaled = (states.float() - self.mean[:, None].float()) * self.factors[:, None]
        components = _product(scaled, inverse)
        components = components + _product(scaled - _product(components, basis), inverse)
        return _as_items(self.row_table.encode(_as_one_item(components)), states.shape[0])

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """States `[B, H, T, D]`, float32, of rows `[B, H, T, R]`."""
        if rows.is_meta:
            return rows.new_empty(*rows.shape[:3], self.head_dim, dtype=torch.float32)
        components = self.row_table.decode(_as_one_item(rows))
        scaled = _product(_as_items(components, rows.shape[0]), self._matrices()[0])
        return scaled / self.factors[:, None] + self.mean[:, None].float()

    def combine(self, components: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """
        Sums of states `[B, H, ..., D]`, given those of components `[B, H, ..., K]`, each times its token's weight, and
        the sums of weights `[B, H, ...]`.
        """
        scaled = _product(components.flatten(2, -2), self._matrices()[0])
        states = scaled / self.factors[:, None] + weights.flatten(2)[..., None] * self.mean[:, None].float()
        return states.reshape(*components.shape[:-1], self.head_dim)

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From components to channels times their factors `[H, K, D]`, and back `[H, D, K]`, float32."""
        basis, inverse = self.basis[:, : self.num_components].float(), self.inverse.float()
        steps = self.steps[:, : self.num_components, None]
        own = (basis * inverse).sum(dim=-1, keepdim=True)
        return basis * steps, (inverse / (own * steps)).mT


def round_basis(basis: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A basis as `BasisTable` takes it.

    Args:
        basis (`torch.Tensor` of shape `[H, D, D]`): rows as long as a standard deviation of their component.
        factors (`torch.Tensor` of shape `[H, D]`): what channels are multiplied by; what rounding loses is then the
            same in all of them.

    Returns:
        `torch.Tensor` of shape `[H, D, D]`, int8, and of shape `[H, D]`, float32: the basis and its steps.
    """
    scaled = basis.double() * factors.double()[:, None]
    steps = scaled.abs().amax(dim=-1) / _MOST
    rounded = (scaled / steps[:, :, None]).round().to(torch.int8).contiguous()
    return rounded, steps.float().clamp(min=torch.finfo(torch.float32).tiny)


def _rounded_inverse(basis: torch.Tensor) -> torch.Tensor:
    """Columns of the inverses of matrices `[H, D, D]`, each in units of its own, `[H, D, D]`, int8."""
    columns = torch.linalg.inv(basis.double()).mT
    return (columns * (_MOST / columns.abs().amax(dim=-1, keepdim=True))).round().to(torch.int8)


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


def _product(states: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    # Autocast would round what is transformed to its dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return states @ matrices


def _as_one_item(tokens: torch.Tensor) -> torch.Tensor:
    """Those of all items `[B, H, T, ...]` one behind the other, `[1, H, B * T, ...]`."""
    return tokens.transpose(0, 1).flatten(1, 2)[None]


def _as_items(tokens: torch.Tensor, batch_size: int) -> torch.Tensor:
    return tokens[0].unflatten(1, (batch_size, -1)).transpose(0, 1)
