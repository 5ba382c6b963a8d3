"""The file of a calibration of transform coding, checked when it is read."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from kvcache_plugins.codecs.allocation import num_blocks
from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.files.tensor_file import read_tensor_file, write_tensor_file


FORMAT = "kvcache_plugins.gear_calibration"
VERSION = 2
_ADVICE = "run `kvcache-plugins calibrate --cache gear` anew"
_LAYOUTS = ("half-split", "interleaved", "none")
_MAX_CHANNELS = _MAX_LAYERS = 2**16


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

    mean: torch.Tensor
    factors: torch.Tensor
    basis: torch.Tensor
    steps: torch.Tensor
    energies: torch.Tensor

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them by name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """
    Keys and values of a layer.

    Attributes:
        layout (`tuple[str, int]`): name and first channel of the keys' rotary embedding.
        window (`int`, *optional*): tokens that its attention sees; all by default.
    """

    layout: tuple[str, int]
    keys: SideCalibration
    values: SideCalibration
    window: int | None = None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them by side and name."""
        for side in ("keys", "values"):
            own: SideCalibration = getattr(self, side)
            yield from ((f"{side}.{name}", tensor) for name, tensor in own.named_tensors())


def calibration_digest(config: str, weights: torch.Tensor, layers: Mapping[int, LayerCalibration]) -> str:
    """By which a calibration is known again, wherever its file is."""
    digest = hashlib.sha256(config.encode())
    digest.update(weights.numpy().tobytes())
    for index, layer in layers.items():
        known = layer.layout if layer.window is None else (*layer.layout, layer.window)
        digest.update(f"{index} {known}".encode())
        for name, tensor in layer.named_tensors():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def write_calibration(
    path: str | Path, config: str, weights: torch.Tensor, layers: Mapping[int, LayerCalibration]
) -> None:
    """Writes what a model is known by, and layers of its calibration; see `TransformCalibration`."""
    rows, tensors = [], {"weights": weights}
    for index, layer in layers.items():
        name, first = layer.layout
        row: dict[str, object] = {"layer_idx": index, "layout": name, "first_channel": first}
        rows.append(row if layer.window is None else {**row, "window": layer.window})
        tensors |= {f"layers.{index}.{part}": tensor for part, tensor in layer.named_tensors()}
    write_tensor_file(path, FORMAT, VERSION, {"config": config, "layers": rows}, tensors)


def read_calibration(path: str | Path) -> tuple[str, torch.Tensor, dict[int, LayerCalibration]]:
    """
    What `write_calibration` wrote, to be called within `refusals`.

    Raises:
        ValueError: if the file is damaged, or of another version.
    """
    document, tensors = read_tensor_file(path, FORMAT, VERSION, _ADVICE)
    config, stored = document.text("config"), StoredTensors(tensors)
    weights, layers = stored.take("weights", (None,), torch.float32), {}
    for row in document.rows("layers"):
        index = row.integer("layer_idx", 0, _MAX_LAYERS)
        if index in layers:
            raise ValueError("`layers` tells of a layer twice")
        layers[index] = _read_layer(row, stored.below(f"layers.{index}."))
    if not layers:
        raise ValueError("`layers` is empty")
    document.finish()
    stored.finish()
    return config, weights, layers


def _read_layer(row: Document, stored: StoredTensors) -> LayerCalibration:
    layout = row.choice("layout", _LAYOUTS), row.integer("first_channel", 0, _MAX_CHANNELS)
    window = row.integer("window", 1) if row.has("window") else None
    row.finish()
    keys, values = (_read_side(stored.below(f"{side}.")) for side in ("keys", "values"))
    if keys.mean.shape[0] != values.mean.shape[0]:
        raise ValueError("keys and values have to have as many heads")
    return LayerCalibration(layout, keys, values, window)


def _read_side(stored: StoredTensors) -> SideCalibration:
    mean = stored.take("mean", (None, None), torch.float16)
    num_heads, head_dim = mean.shape
    if not num_heads or not head_dim:
        raise ValueError("a layer has to have heads, and these channels")
    factors, steps = (stored.take(name, (num_heads, head_dim), torch.float32) for name in ("factors", "steps"))
    basis = stored.take("basis", (num_heads, head_dim, head_dim), torch.int8)
    energies = stored.take("energies", (num_heads, num_blocks(head_dim)), torch.float32)
    for tensor in (mean, factors, steps, energies):
        if not bool(tensor.isfinite().all()):
            raise ValueError("calibrations have to be finite")
    if any(bool((tensor <= 0).any()) for tensor in (factors, steps, energies)):
        raise ValueError("factors, steps and energies have to be above 0")
    if bool((torch.linalg.matrix_rank(basis.double()) < head_dim).any()):
        raise ValueError("bases have to be regular")
    return SideCalibration(mean, factors, basis, steps, energies)
