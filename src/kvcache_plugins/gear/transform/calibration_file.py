"""The file of a calibration of transform coding, checked when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.files.tensor_file import read_tensor_file, write_tensor_file


FORMAT = "kvcache_plugins.gear_calibration"
VERSION = 1
_ADVICE = "run `kvcache-plugins calibrate --cache gear` anew"
_LAYOUTS = ("half-split", "interleaved", "none")
_MAX_CHANNELS = _MAX_LAYERS = 2**16


@dataclass(frozen=True, eq=False)
class SideCalibration:
    """
    Keys or values of a layer: `mean` `[H, D]`, float32; `basis` `[H, D, D]`, rows as long as a standard deviation of
    their component; `energies` `[H, D]` of the components, falling. All in float32.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    energies: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """Keys and values of a layer; `layout`: name and first channel of the keys' rotary embedding."""

    layout: tuple[str, int]
    keys: SideCalibration
    values: SideCalibration


def write_calibration(
    path: str | Path, config: str, weights: torch.Tensor, layers: Mapping[int, LayerCalibration]
) -> None:
    """Writes what a model is known by, and layers of its calibration; see `TransformCalibration`."""
    rows, tensors = [], {"weights": weights}
    for index, layer in layers.items():
        name, first = layer.layout
        rows.append({"layer_idx": index, "layout": name, "first_channel": first})
        for side in ("keys", "values"):
            for part in ("mean", "basis", "energies"):
                tensors[f"layers.{index}.{side}.{part}"] = getattr(getattr(layer, side), part)
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
    row.finish()
    keys, values = (_read_side(stored.below(f"{side}.")) for side in ("keys", "values"))
    if keys.mean.shape[0] != values.mean.shape[0]:
        raise ValueError("keys and values have to have as many heads")
    return LayerCalibration(layout, keys, values)


def _read_side(stored: StoredTensors) -> SideCalibration:
    mean = stored.take("mean", (None, None), torch.float32)
    num_heads, head_dim = mean.shape
    basis = stored.take("basis", (num_heads, head_dim, head_dim), torch.float32)
    energies = stored.take("energies", (num_heads, head_dim), torch.float32)
    if not num_heads or not head_dim:
        raise ValueError("a layer has to have heads, and these channels")
    for tensor in (mean, basis, energies):
        if not bool(tensor.isfinite().all()):
            raise ValueError("calibrations have to be finite")
    if bool((energies <= 0).any()) or bool((torch.linalg.matrix_rank(basis.double()) < head_dim).any()):
        raise ValueError("energies have to be above 0 and bases regular")
    return SideCalibration(mean, basis, energies)
