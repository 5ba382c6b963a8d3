"""Content of a calibration's file: bases, energies and scales of a model's keys and values."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated

import torch

from kvcache_plugins.codecs.quantizers import num_blocks
from kvcache_plugins.files.records import Format
from kvcache_plugins.files.schema import Range, Stored


FORMAT = Format("kvcache_plugins.gear_calibration", 2, "run `kvcache-plugins calibrate --cache gear` anew")
_LAYOUTS = ("half-split", "interleaved", "none")
_HEADS = "num_heads", "head_dim"


@dataclass(frozen=True, eq=False)
class SideCalibration:
    """
    Keys or values of a layer.

    Attributes:
        mean (`torch.Tensor` of shape `[H, D]`, float16): what is taken off.
        factors (`torch.Tensor` of shape `[H, D]`, float32): what channels are multiplied by: errors of the products
            cost alike.
        basis (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, those of most energy
            first.
        steps (`torch.Tensor` of shape `[H, D]`, float32): what its rows are in units of; they are then as long as a
            standard deviation of their component.
        energies (`torch.Tensor` of shape `[H, N]`, float32): of blocks of eight components.
    """

    mean: Annotated[torch.Tensor, Stored(_HEADS, torch.float16)]
    factors: Annotated[torch.Tensor, Stored(_HEADS, torch.float32, above=0)]
    basis: Annotated[torch.Tensor, Stored((*_HEADS, "head_dim"), torch.int8)]
    steps: Annotated[torch.Tensor, Stored(_HEADS, torch.float32, above=0)]
    energies: Annotated[torch.Tensor, Stored(("num_heads", None), torch.float32, above=0)]

    def check(self) -> None:
        """Raises a `ValueError` if it is nothing that a file can hold."""
        num_heads, head_dim = self.mean.shape
        if not num_heads or not head_dim:
            raise ValueError("a layer has to have heads, and these channels")
        if self.energies.shape[1] != num_blocks(head_dim):
            raise ValueError(f"`energies` have to be of {num_blocks(head_dim)} blocks")
        if bool((torch.linalg.matrix_rank(self.basis.double()) < head_dim).any()):
            raise ValueError("bases have to be regular")


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerCalibration:
    """
    Keys and values of a layer.

    Attributes:
        layer_idx (`int`): the layer.
        layout (`str`), first_channel (`int`): name and first channel of the keys' rotary embedding.
        window (`int`, *optional*): tokens that its attention sees; all by default.
    """

    layer_idx: Annotated[int, Range(0, 2**16)]
    layout: str
    first_channel: Annotated[int, Range(0, 2**16)]
    window: Annotated[int, Range(1)] | None
    keys: SideCalibration
    values: SideCalibration

    def check(self) -> None:
        """Raises a `ValueError` if it is nothing that a file can hold."""
        if self.layout not in _LAYOUTS:
            raise ValueError(f"`layout` has to be one of {list(_LAYOUTS)} but got {self.layout!r}")
        if self.keys.mean.shape[0] != self.values.mean.shape[0]:
            raise ValueError("keys and values have to have as many heads")

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists all tensors by side and name."""
        for name, side in (("keys", self.keys), ("values", self.values)):
            yield from ((f"{name}.{field.name}", getattr(side, field.name)) for field in fields(side))


@dataclass(frozen=True, eq=False)
class CalibrationContent:
    """
    What a file holds.

    Attributes:
        config (`str`): fingerprint of the model's config.
        weights (`torch.Tensor`): some of its weights, see `weight_samples`.
        layers (`list[LayerCalibration]`): those of full attention and of windows.
    """

    config: str
    weights: Annotated[torch.Tensor, Stored((None,), torch.float32, is_finite=False)]
    layers: list[LayerCalibration]

    def check(self) -> None:
        """Raises a `ValueError` if it is nothing that a file can hold."""
        if not self.layers:
            raise ValueError("`layers` is empty")
        if len({layer.layer_idx for layer in self.layers}) < len(self.layers):
            raise ValueError("`layers` tells of a layer twice")

    def digest(self) -> str:
        """By which a calibration is known again, wherever its file is."""
        digest = hashlib.sha256(self.config.encode())
        digest.update(self.weights.numpy().tobytes())
        for layer in self.layers:
            layout = layer.layout, layer.first_channel
            known = layout if layer.window is None else (*layout, layer.window)
            digest.update(f"{layer.layer_idx} {known}".encode())
            for name, tensor in layer.named_tensors():
                digest.update(f"{name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()
