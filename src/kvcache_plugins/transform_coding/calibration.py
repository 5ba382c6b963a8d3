"""Calibration of transform coding: a model's bases of keys and values, and the cost of their errors, found once.

Of each layer and head the Karhunen-Loeve basis of keys before the rotary embedding, their mean taken off, and of
values with theirs, both in a metric in which an error counts by what it does to the model's output. Energies of the
components then are comparable over the whole model, so that bytes can be given to where they are worth most, at any
rate: that is left to when a cache is made.

Legend: H key/value heads, D head dim, N blocks of eight components.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.codecs.basis import basis_for_widths, format_in_basis, karhunen_loeve, round_basis
from kvcache_plugins.codecs.bit_allocation import allocate_widths, share_bytes
from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_content, read_record, write_record
from kvcache_plugins.files.schema import Range, Stored
from kvcache_plugins.formats.quantizer import BLOCK, DISTORTIONS, num_blocks
from kvcache_plugins.formats.rotary import candidate_layouts
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint, weight_samples
from kvcache_plugins.models.reference_model import find_user_folder, user_folder
from kvcache_plugins.registry import unwrap_model
from kvcache_plugins.user_warnings import warn_user

from .config import LEAST_BYTES, TransformCodingConfig
from .observation import LayerSums, observe_window


FORMAT = Format("kvcache_plugins.transform_calibration", 1, "run `kvcache-plugins calibrate --cache transform` anew")
_LAYOUTS = ("half-split", "interleaved", "none")
_HEADS = "num_heads", "head_dim"
# How near a weight is to itself in bfloat16, and in float16 where it is small
_TOLERANCE, _LEAST_WEIGHT = 2**-7, 2**-24
# First tokens that stay exact
_NUM_SINKS = TransformCodingConfig(key_nbits=1, value_nbits=1).num_sink_tokens
# Of the costs of keys and of values, what is taken off beside the diagonal: they were estimated from few gradients
_KEY_SHRINKAGE, _VALUE_SHRINKAGE = 0.5, 0.1
# Share of the queries' moments in what errors of keys cost, and of the unit matrix in what those of values do
_QUERY_SHARE, _UNIT_SHARE = 0.3, 0.1
# Heads and sides differ by this power of what they were seen to differ by
_TEMPER = 0.7
# Of a head's largest factor
_LEAST_FACTOR = 1e-3
# Takes the model's own, if it was calibrated, and none otherwise
AUTO = "auto"
_DIGITS = 16
# Of the user's calibrations, in the folder of this package's files
_FOLDER = "calibrations"
# Those of the models that `load_model` has short names for
_PACKAGED = Path(__file__).resolve().parent / "reference_calibrations"


@dataclass(frozen=True, eq=False)
class SideCalibration:
    """
    Keys or values of a layer.

    Attributes:
        mean, factors, basis, steps: what is taken off; see `Basis` for the others. Rows of the basis are as long as a
            standard deviation of their component.
        energies (`torch.Tensor` of shape `[H, N]`, float32): of blocks of eight components.
    """

    mean: Annotated[torch.Tensor, Stored(_HEADS, torch.float16)]
    factors: Annotated[torch.Tensor, Stored(_HEADS, torch.float32, above=0)]
    basis: Annotated[torch.Tensor, Stored((*_HEADS, "head_dim"), torch.int8)]
    steps: Annotated[torch.Tensor, Stored(_HEADS, torch.float32, above=0)]
    energies: Annotated[torch.Tensor, Stored(("num_heads", None), torch.float32, above=0)]

    def check(self) -> None:
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
    Keys and values of a layer whose attention sees `window` tokens, or all; `layout` and `first_channel` are name and
    first channel of the keys' rotary embedding.
    """

    layer_idx: Annotated[int, Range(0, 2**16)]
    layout: str
    first_channel: Annotated[int, Range(0, 2**16)]
    window: Annotated[int, Range(1)] | None
    keys: SideCalibration
    values: SideCalibration

    def check(self) -> None:
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
    What a file holds: fingerprint of the model's config, some of its weights, see `weight_samples`, and its layers of
    full attention and of windows.
    """

    config: str
    weights: Annotated[torch.Tensor, Stored((None,), torch.float32, is_finite=False)]
    layers: list[LayerCalibration]

    def check(self) -> None:
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


class TransformCalibration(nn.Module):
    """
    What `calibrate_transform` found out about a model. Caches of the model share it, and what is made of it: as a part
    of the model it is a module, and no cache counts it as what it holds.
    """

    def __init__(self, content: CalibrationContent):
        super().__init__()
        self.content, self.config, self.weights = content, content.config, content.weights
        self.layers = {layer.layer_idx: layer for layer in content.layers}
        self.digest = content.digest()
        self._codecs: dict[tuple[float, int], RowCodec] = {}
        self._shares: dict[tuple[float, int | None], list[int]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> TransformCalibration:
        return self

    def codec(self, layer_idx: int, nbits: float, frequencies: tuple[float, ...] | None) -> RowCodec:
        """
        Makes the codec of a layer, with `nbits` bits a number, on average over all heads and both sides of layers that
        see as much; a `ValueError` if it knows nothing of that layer, or of its rotary embedding.
        """
        key = nbits, layer_idx
        if key in self._codecs:
            return self._codecs[key]
        if layer_idx not in self.layers:
            raise ValueError(f"`calibration` knows layers {list(self.layers)}, but not {layer_idx}: make it anew")
        layer = self.layers[layer_idx]
        layouts = candidate_layouts(frequencies, layer.keys.mean.shape[1])
        rope = next((each for each in layouts if (each.name, each.first) == (layer.layout, layer.first_channel)), None)
        if rope is None:
            raise ValueError(f"`calibration` has another rotary embedding in layer {layer_idx} than `config`")
        sizes = self._bytes_of_heads(nbits, layer.window)
        place = 2 * [index for index, _ in self._layers_of(layer.window)].index(layer_idx)
        tables = []
        for number, side in enumerate((layer.keys, layer.values)):
            widths = allocate_widths(side.energies.double()[None], sizes[place + number], DISTORTIONS)[0]
            own = basis_for_widths(side.factors, side.basis, side.steps, widths)
            tables.append(format_in_basis(side.mean, *own, None if number else rope))
        self._codecs[key] = RowCodec(SharedFormats(*tables))
        return self._codecs[key]

    def _layers_of(self, window: int | None) -> list[tuple[int, LayerCalibration]]:
        return [(index, layer) for index, layer in self.layers.items() if layer.window == window]

    def _bytes_of_heads(self, nbits: float, window: int | None) -> list[int]:
        """Bytes of a head's codes, of keys and values of every layer of a window, which share nothing with others."""
        if (nbits, window) not in self._shares:
            sides = [side for _, layer in self._layers_of(window) for side in (layer.keys, layer.values)]
            energies = [side.energies.double() for side in sides]
            mean = torch.cat([each.sum(dim=1).log() for each in energies]).mean()
            tempered = [
                each * torch.exp((_TEMPER - 1) * (each.sum(dim=1, keepdim=True).log() - mean)) for each in energies
            ]
            total = sum(each.numel() for each in energies) * nbits
            self._shares[nbits, window] = share_bytes(tempered, round(total), LEAST_BYTES, DISTORTIONS)
        return self._shares[nbits, window]

    def save(self, path: str | Path) -> None:
        """Writes the calibration to a safetensors file, which takes its place when it is complete."""
        write_record(path, FORMAT, self.content)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> TransformCalibration:
        """
        Reads a calibration that `save` wrote for a model, or one of a config, which cannot tell weights from others; a
        `ValueError` naming the file if it is damaged, of another version, or of another model.
        """
        calibration = cls.read(path)
        with refusals("calibration", path):
            problem = calibration.mismatch(model)
            if problem:
                raise RefusedFile(problem)
        return calibration

    @classmethod
    def read(cls, path: str | Path) -> TransformCalibration:
        """Reads a calibration of any model from `path`."""
        with refusals("calibration", path):
            return _read_once(Path(path).resolve(), Path(path).stat().st_mtime_ns)

    def mismatch(self, model: PreTrainedModel | PreTrainedConfig) -> str | None:
        """Says why `model`, or that of a config, is not the calibrated one, whatever its dtype; `None` if it is."""
        config = model if isinstance(model, PreTrainedConfig) else model.config
        if self.config != config_fingerprint(config):
            return "was made for a model of another config"
        if isinstance(model, PreTrainedConfig):
            return None
        weights = weight_samples(model)
        if weights.shape != self.weights.shape:
            return "was made for another model, of other parameters"
        known = ~(weights.isnan() | self.weights.isnan())
        is_near = torch.isclose(weights[known], self.weights[known], rtol=_TOLERANCE, atol=_LEAST_WEIGHT)
        return None if bool(is_near.all()) else "was made for another model, of other weights"


# So that the caches of a model share one, and what is made of it
@lru_cache(maxsize=4)
def _read_once(path: Path, changed: int) -> TransformCalibration:
    return TransformCalibration(read_record(path, FORMAT, CalibrationContent))


def calibrate_transform(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    *,
    num_draws: int = 2,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> TransformCalibration:
    """
    Finds the bases of a model's keys and values, and what their errors cost.

    Args:
        model (`PreTrainedModel`): the model, in eval mode.
        windows (`Sequence[torch.Tensor]`): token ids `[tokens]`, of which the first half fills a cache.
        num_draws (`int`, *optional*, defaults to 2): backward passes for every 16 tokens of the other half.
        seed (`int`, *optional*, defaults to 0): of the tokens that the model draws.
        on_progress (`Callable[[str], None]`, *optional*): called before each window.

    Raises:
        ValueError: if there is no window, or one is too short, or the model has layers that cannot be coded.
    """
    least = 3 * BLOCK + _NUM_SINKS
    if not windows or min(window.numel() for window in windows) < least:
        raise ValueError(f"`windows` has to hold one window at least, of {least} tokens at least")
    sums: dict[int, LayerSums] = {}
    generator = torch.Generator().manual_seed(seed)
    for number, window in enumerate(windows, start=1):
        if on_progress is not None:
            on_progress(f"window {number}")
        # Gradients are taken, wherever this is called
        with torch.inference_mode(False), torch.enable_grad():
            observe_window(model, window, window.numel() // 2, _NUM_SINKS, num_draws, sums, generator)
    layers = [_calibrate_layer(index, own) for index, own in sorted(sums.items())]
    return TransformCalibration(CalibrationContent(config_fingerprint(model.config), weight_samples(model), layers))


def _calibrate_layer(layer_idx: int, sums: LayerSums) -> LayerCalibration:
    cost = _shrunk(sums.keys.gradients / sums.keys.num_scored, _KEY_SHRINKAGE)
    if sums.num_queries:
        queries = sums.queries / sums.num_queries
        share = _trace(cost) / _trace(queries).clamp(min=torch.finfo(cost.dtype).tiny)
        cost = cost + _QUERY_SHARE * queries * share[:, None, None]
    mean = sums.keys.states / sums.keys.count
    moments = sums.keys.products / sums.keys.count - mean[:, :, None] * mean[:, None]
    keys = _calibrate_side(cost, moments, mean)
    cost = _shrunk(sums.values.gradients / sums.values.num_scored, _VALUE_SHRINKAGE)
    unit = torch.eye(cost.shape[1], dtype=cost.dtype, device="cpu")
    cost = cost + _UNIT_SHARE * unit * (_trace(cost) / cost.shape[1])[:, None, None]
    # A sum of values would lose what their mean has lost as often as there are tokens in it
    values = _calibrate_side(cost, sums.values.products / sums.values.count, torch.zeros_like(sums.values.states))
    return LayerCalibration(
        layer_idx=layer_idx,
        layout=sums.layout.name,
        first_channel=sums.layout.first,
        window=sums.window,
        keys=keys,
        values=values,
    )


def _calibrate_side(cost: torch.Tensor, moments: torch.Tensor, mean: torch.Tensor) -> SideCalibration:
    basis, energies = karhunen_loeve(cost, moments)
    # Rounding is to cost the same in all channels
    tiny = torch.finfo(torch.float32).tiny
    factors = cost.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    factors = factors.maximum(_LEAST_FACTOR * factors.amax(dim=-1, keepdim=True)).clamp(min=tiny)
    by_block = F.pad(energies, (0, -energies.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    rounded = round_basis(basis, factors)
    return SideCalibration(mean.half(), factors.float(), *rounded, by_block.float().clamp(min=tiny))


def _shrunk(matrices: torch.Tensor, share: float) -> torch.Tensor:
    diagonal = torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
    return torch.lerp(matrices, diagonal, share)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def calibration_path(model: PreTrainedModel) -> Path:
    """Where in the user's cache folder a model's calibration is written to."""
    name = f"{_prefix(model.config)}{fingerprint(model)[:_DIGITS]}.safetensors"
    return user_folder() / _FOLDER / name


def find_calibration(model: PreTrainedModel) -> TransformCalibration | None:
    """Return the calibration of a model in whatever dtype: the user's newest, or that of this package."""
    return next((each for each in _known(model.config) if each.mismatch(model) is None), None)


def _known(config: PreTrainedConfig) -> Iterator[TransformCalibration]:
    """Yield calibrations for models of `config`: the user's folder's, the newest first, then this package's."""
    folder = find_user_folder()
    own = [] if folder is None else (folder / _FOLDER).glob(f"{_prefix(config)}*.safetensors")
    for path in sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        yield TransformCalibration.read(path)
    for path in sorted(_PACKAGED.glob("*.safetensors")):
        # Checking all of a file takes seconds
        if read_content(path, FORMAT)["config"] == config_fingerprint(config):
            yield TransformCalibration.read(path)


def calibration_of_file(
    config: TransformCodingConfig,
    digest: str | None,
    given: TransformCalibration | None,
    model: PreTrainedModel | PreTrainedConfig,
) -> dict[str, Any]:
    """
    Return the options of the cache that a file holds, with its calibration. To be called within `refusals`.

    Args:
        config (`TransformCodingConfig`): the file's options.
        digest (`str`, *optional*): of the calibration that the cache was made with.
        given (`TransformCalibration`, *optional*): the caller's; by default it is looked for among the kept ones.
        model (`PreTrainedModel` or `PreTrainedConfig`): the model that continues from the cache.

    Raises:
        ValueError: if the calibration is another one, or not found.
    """
    if digest is None:
        if given is not None:
            raise RefusedFile("was made without a calibration, so `calibration` has no meaning")
        return config.to_options()
    if config.key_nbits != config.value_nbits:
        raise ValueError("it names a calibration, but its options have none")
    if given is not None and given.digest != digest:
        raise RefusedFile(f"was made with another calibration than the one given ({digest[:_DIGITS]})")
    own = model if isinstance(model, PreTrainedConfig) else model.config
    found = given or next((each for each in _known(own) if each.digest == digest), None)
    if found is None:
        raise RefusedFile(
            f"was made with a calibration ({digest[:_DIGITS]}) that is not among those kept for this user: give it as "
            "`calibration`"
        )
    return {**config.to_calibrated_options(), "calibration": found}


def _prefix(config: PreTrainedConfig) -> str:
    return f"transform-{config_fingerprint(config)[:_DIGITS]}-"


def check_calibration(calibration: object, key_nbits: float | None, value_nbits: float | None) -> None:
    """Raise a `ValueError` for what is no calibration, and for options that have no effect beside one."""
    if calibration is None:
        return
    if not isinstance(calibration, (TransformCalibration, str, Path)):
        raise ValueError(
            f'`calibration` has to be a `TransformCalibration`, a file, "{AUTO}" or None but got {calibration!r}'
        )
    for name, value in (("key_nbits", key_nbits), ("value_nbits", value_nbits)):
        if value is not None:
            raise ValueError(f"`{name}` has no effect beside `calibration`, which shares `nbits` between both sides")


def resolve_calibration(
    calibration: TransformCalibration | str | Path | None, model: PreTrainedConfig | torch.nn.Module | None
) -> TransformCalibration | None:
    """
    Return the calibration of a cache for `model`, given the calibration itself, its file, `"auto"` or `None`; a
    `ValueError` if it is another model's, or cannot be read.
    """
    if calibration is None or (calibration == AUTO and model is None):
        return None
    if model is None:
        raise ValueError("`calibration` needs `config`: the model that it was made for, or its config")
    own = model if isinstance(model, PreTrainedConfig) else unwrap_model(model)
    if isinstance(calibration, TransformCalibration):
        problem = calibration.mismatch(own)
        if problem:
            raise ValueError(f"`calibration` {problem}")
        return calibration
    if calibration != AUTO:
        return TransformCalibration.load(calibration, own)
    # A config cannot tell whose weights they are
    found = None if isinstance(own, PreTrainedConfig) else find_calibration(own)
    if found is None:
        warn_user(
            "this model has no calibration: tables are fitted to its prompts alone, and more is lost at the same "
            "bytes; `kvcache-plugins calibrate --cache transform` makes one"
        )
    return found
