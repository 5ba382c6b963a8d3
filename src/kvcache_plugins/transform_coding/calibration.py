"""Calibration of transform coding: bases of a model's keys and values, and the cost of their errors.

Every layer and head has the Karhunen-Loeve bases of its centered keys, before their rotary embedding, and of its
values. The metric of a basis is the effect of an error on the model's output. So energies of components are comparable
over the whole model, and bytes can be divided by their worth. A cache does so, at its own rate, when it is made.

Legend: H key/value heads, D head dim, N blocks of eight components.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated

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
# Relative distance of a weight from itself in bfloat16, and absolute distance of a small one in float16
_TOLERANCE = 2**-7
_SMALL_WEIGHT = 2**-24
# First tokens that stay exact
_NUM_SINKS = TransformCodingConfig(key_nbits=1, value_nbits=1).num_sink_tokens
# Shrinkage of costs towards their diagonal, as they are estimated from few gradients
_KEY_SHRINKAGE = 0.5
_VALUE_SHRINKAGE = 0.1
# Share of the queries' moments in the cost of keys, and of the unit matrix in the cost of values
_QUERY_SHARE = 0.3
_UNIT_SHARE = 0.1
# Power of the measured ratios between heads and sides
_TEMPER = 0.7
# Smallest factor, as a share of the head's largest
_MIN_FACTOR = 1e-3
# The model's own calibration, or none if it has none
AUTO = "auto"
_DIGITS = 16
# Folder of the user's calibrations, within the package's folder
_FOLDER = "calibrations"
# Calibrations of the models with short names
_PACKAGED = Path(__file__).resolve().parent / "reference_calibrations"


@dataclass(frozen=True, eq=False)
class SideCalibration:
    """
    Keys or values of a layer.

    Attributes:
        mean (`torch.Tensor` of shape `[H, D]`, float16): subtracted before the basis is applied.
        factors, basis, steps (`torch.Tensor`): see `Basis`. The length of a row of the basis is the standard deviation
            of its component.
        energies (`torch.Tensor` of shape `[H, N]`, float32): energies of blocks of eight components.
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
    Keys and values of a layer.

    Attributes:
        layout, first_channel: name and first channel of the keys' rotary embedding.
        window (`int`, *optional*): window of the layer's attention.
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
        """Yield all tensors with their side and name."""
        for name, side in (("keys", self.keys), ("values", self.values)):
            yield from ((f"{name}.{field.name}", getattr(side, field.name)) for field in fields(side))


@dataclass(frozen=True, eq=False)
class CalibrationContent:
    """
    Content of a file.

    Attributes:
        config (`str`): fingerprint of the model's config.
        weights (`torch.Tensor`): some of the model's weights, see `weight_samples`.
        layers (`list[LayerCalibration]`): layers of full attention and of windows.
    """

    config: str
    weights: Annotated[torch.Tensor, Stored((None,), torch.float32, is_finite=False)]
    layers: list[LayerCalibration]

    def check(self) -> None:
        if not self.layers:
            raise ValueError("`layers` is empty")
        if len({layer.layer_idx for layer in self.layers}) < len(self.layers):
            raise ValueError("`layers` has a layer twice")

    def digest(self) -> str:
        """Return the digest that identifies a calibration in any file."""
        digest = hashlib.sha256(self.config.encode())
        digest.update(self.weights.numpy().tobytes())
        for layer in self.layers:
            layout = layer.layout, layer.first_channel
            form = layout if layer.window is None else (*layout, layer.window)
            digest.update(f"{layer.layer_idx} {form}".encode())
            for name, tensor in layer.named_tensors():
                digest.update(f"{name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


class TransformCalibration(nn.Module):
    """
    Result of `calibrate_transform` for a model. Caches of the model share it and its codecs. It is a module, as a part
    of the model, so that no cache counts it as its own memory.
    """

    def __init__(self, content: CalibrationContent):
        super().__init__()
        self.content = content
        self.config = content.config
        self.weights = content.weights
        self.layers = {layer.layer_idx: layer for layer in content.layers}
        self.digest = content.digest()
        self._codecs: dict[tuple[float, int], RowCodec] = {}
        self._shares: dict[tuple[float, int | None], list[int]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> TransformCalibration:
        return self

    def codec(self, layer_idx: int, nbits: float, frequencies: tuple[float, ...]) -> RowCodec:
        """
        Return the codec of a layer with `nbits` bits an element, on average over keys and values of all heads in
        layers with the same window. Raise a `ValueError` if the calibration lacks the layer, or has another rotary
        embedding.
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
        first = 2 * [index for index, _ in self._layers_of(layer.window)].index(layer_idx)
        formats = []
        for offset, side in enumerate((layer.keys, layer.values)):
            widths = allocate_widths(side.energies.double()[None], sizes[first + offset], DISTORTIONS)[0]
            basis = basis_for_widths(side.factors, side.basis, side.steps, widths)
            formats.append(format_in_basis(side.mean, *basis, rope if side is layer.keys else None))
        self._codecs[key] = RowCodec(SharedFormats(*formats))
        return self._codecs[key]

    def _layers_of(self, window: int | None) -> list[tuple[int, LayerCalibration]]:
        return [(index, layer) for index, layer in self.layers.items() if layer.window == window]

    def _bytes_of_heads(self, nbits: float, window: int | None) -> list[int]:
        """Return the bytes of a head's codes, for keys and values of every layer with a window in turn."""
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
        """Write the calibration to a safetensors file, which replaces an older one when it is complete."""
        write_record(path, FORMAT, self.content)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> TransformCalibration:
        """
        Read a file of `save` for a model. Raise a `ValueError` that names the file if it is damaged, of another
        version, or of another model; with a config the weights are not compared.
        """
        calibration = cls.read(path)
        with refusals("calibration", path):
            problem = calibration.mismatch(model)
            if problem:
                raise RefusedFile(problem)
        return calibration

    @classmethod
    def read(cls, path: str | Path) -> TransformCalibration:
        """Read a calibration of any model."""
        with refusals("calibration", path):
            return _read_once(Path(path).resolve(), Path(path).stat().st_mtime_ns)

    def mismatch(self, model: PreTrainedModel | PreTrainedConfig) -> str | None:
        """Return the reason why `model`, in any dtype, or a config's model is another one; `None` if it is not."""
        config = model if isinstance(model, PreTrainedConfig) else model.config
        if self.config != config_fingerprint(config):
            return "was made for a model of another config"
        if isinstance(model, PreTrainedConfig):
            return None
        weights = weight_samples(model)
        if weights.shape != self.weights.shape:
            return "was made for another model, of other parameters"
        known = ~(weights.isnan() | self.weights.isnan())
        is_near = torch.isclose(weights[known], self.weights[known], rtol=_TOLERANCE, atol=_SMALL_WEIGHT)
        return None if bool(is_near.all()) else "was made for another model, of other weights"


# Caches of a model share one calibration and its codecs
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
    Find the bases of a model's keys and values, and the cost of their errors.

    Args:
        model (`PreTrainedModel`): the model, in eval mode.
        windows (`Sequence[torch.Tensor]`): token ids `[tokens]`; the first half of each window fills a cache.
        num_draws (`int`, *optional*, defaults to 2): backward passes for every 16 tokens of the second half.
        seed (`int`, *optional*, defaults to 0): random seed of the tokens that the model draws.
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
        # The caller may have disabled gradients
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
    # Without a mean: in a sum of values its rounding error would add up
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
    # Rounding errors of all channels should cost the same
    tiny = torch.finfo(torch.float32).tiny
    factors = cost.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    factors = factors.maximum(_MIN_FACTOR * factors.amax(dim=-1, keepdim=True)).clamp(min=tiny)
    by_block = F.pad(energies, (0, -energies.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    rounded = round_basis(basis, factors)
    return SideCalibration(mean.half(), factors.float(), *rounded, by_block.float().clamp(min=tiny))


def _shrunk(matrices: torch.Tensor, share: float) -> torch.Tensor:
    diagonal = torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
    return torch.lerp(matrices, diagonal, share)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def calibration_path(model: PreTrainedModel) -> Path:
    """Return the path for a model's calibration in the user's cache folder."""
    name = f"{_prefix(model.config)}{fingerprint(model)[:_DIGITS]}.safetensors"
    return user_folder() / _FOLDER / name


def find_calibration(model: PreTrainedModel) -> TransformCalibration | None:
    """Return the calibration of a model in any dtype: the user's newest, or else the package's."""
    return next((each for each in _known(model.config) if each.mismatch(model) is None), None)


def _known(config: PreTrainedConfig) -> Iterator[TransformCalibration]:
    """Yield calibrations for models of `config`: the user's, the newest first, and then the package's."""
    folder = find_user_folder()
    own = [] if folder is None else (folder / _FOLDER).glob(f"{_prefix(config)}*.safetensors")
    for path in sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        yield TransformCalibration.read(path)
    for path in sorted(_PACKAGED.glob("*.safetensors")):
        # Reading the document alone, as a check of the whole file takes seconds
        if read_content(path, FORMAT)["config"] == config_fingerprint(config):
            yield TransformCalibration.read(path)


def find_saved_calibration(
    digest: str | None, given: TransformCalibration | None, model: PreTrainedModel | PreTrainedConfig
) -> TransformCalibration | None:
    """
    Return the calibration of a saved cache, or `None` if it has none. Call it in `refusals`.

    Args:
        digest (`str`, *optional*): digest of the cache's calibration.
        given (`TransformCalibration`, *optional*): the caller's calibration. The default is searched among the kept
            ones.
        model (`PreTrainedModel` or `PreTrainedConfig`): the model that continues from the cache.

    Raises:
        RefusedFile: if the calibration is another one, or not found.
    """
    if digest is None:
        if given is not None:
            raise RefusedFile("was made without a calibration, so `calibration` has no meaning")
        return None
    if given is not None and given.digest != digest:
        raise RefusedFile(f"was made with another calibration than the one given ({digest[:_DIGITS]})")
    own = model if isinstance(model, PreTrainedConfig) else model.config
    found = given or next((each for each in _known(own) if each.digest == digest), None)
    if found is None:
        raise RefusedFile(
            f"was made with a calibration ({digest[:_DIGITS]}) that is not among those kept for this user: give it as "
            "`calibration`"
        )
    return found


def _prefix(config: PreTrainedConfig) -> str:
    return f"transform-{config_fingerprint(config)[:_DIGITS]}-"


def check_calibration(calibration: object, key_nbits: object, value_nbits: object) -> None:
    """Raise a `ValueError` if `calibration` is none, or an option has no effect beside it."""
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
    Return the calibration for a model, given as itself, its file, `"auto"` or `None`. Raise a `ValueError` if it is
    another model's, or cannot be read.
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
    # A config has no weights to compare
    found = None if isinstance(own, PreTrainedConfig) else find_calibration(own)
    if found is None:
        warn_user(
            "this model has no calibration: tables are fitted to its prompts alone, and more is lost at the same "
            "bytes; `kvcache-plugins calibrate --cache transform` makes one"
        )
    return found
