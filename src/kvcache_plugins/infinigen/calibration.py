"""Calibration of InfiniGen: how well the queries of each layer are predicted, and a correction of the prediction.

A text goes through the model. The attention input of every layer that is expected at the layer before is compared with
the true one, and a low-rank linear map is fitted to the difference (ridge regression, cut to the directions in which
its predictions vary most). Other text shows the attention mass of the tenth of the tokens that the expected
queries choose, with and without the correction, as a share of the mass that the true queries choose. Layers that are
predicted badly stay whole on the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_record, write_record
from kvcache_plugins.files.schema import FLOATS, Range, Stored
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.fingerprint import fingerprint

from .config import NUM_FIRST_LAYERS
from .hooks import AttentionInputs, AttentionObserver, ModelHooks, attach
from .queries import PositionEmbeddings


FORMAT = Format("kvcache_plugins.infinigen", 3, "run `calibrate` and `save` anew")
# Newest queries of a window that measure, and the share of tokens that they choose
NUM_QUERIES = 64
_SHARE = 0.1
_RIDGE = 1e-2
# Least gain in mass that makes up for the products of a correction
_MIN_GAIN = 0.002
Choice = Literal["stream", "corrected", "full"]
# Sum of rounded probabilities: may exceed 1 a little
Mass = Annotated[float, Range(0, 1.01)]
# Factors of a correction, `[hidden size, rank]` and `[rank, hidden size]`
Factors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """
    Mean attention mass of the tenth of a layer's tokens that queries choose.

    Attributes:
        oracle (`float`): mass for the true queries.
        by_input (`float`): mass for the paper's prediction, from the attention input of the layer before.
        by_stream (`float`): mass for the prediction from the residual stream there, normed as this layer norms it.
        corrected (`float`): mass for the stream with the correction.
        choice (`str`): `"stream"`, `"corrected"`, or `"full"` for a layer that stays whole.
    """

    layer_idx: int
    oracle: Annotated[float, Range(1e-9, 1.01)]
    by_input: Mass
    by_stream: Mass
    corrected: Mass
    choice: Choice

    @property
    def recall(self) -> float:
        """Mass for the prediction that is used, as a share of the oracle's."""
        return (self.corrected if self.choice == "corrected" else self.by_stream) / self.oracle


@dataclass(frozen=True, eq=False, slots=True)
class _Correction:
    """Factors of a correction, as a file holds them."""

    layer_idx: int
    down: Annotated[torch.Tensor, Stored(("hidden_size", "rank"), *FLOATS.values())]
    up: Annotated[torch.Tensor, Stored(("rank", "hidden_size"), *FLOATS.values())]

    def check(self) -> None:
        if self.down.dtype != self.up.dtype:
            raise ValueError("`down` and `up` have to be of one dtype")


@dataclass(frozen=True, eq=False, slots=True)
class _Content:
    """Content of a `Calibration`'s file."""

    model: str
    reports: tuple[LayerReport, ...]
    corrections: list[_Correction]

    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise a `ValueError` if the content is of another model, or corrects other layers than its reports say."""
        if self.model != fingerprint(model):
            raise RefusedFile("was made for another model, or for the same one in another dtype")
        config = model.config.get_text_config(decoder=True)
        layers = [report.layer_idx for report in self.reports]
        if len(set(layers)) < len(layers):
            raise ValueError("`reports` has a layer twice")
        if max(layers, default=0) >= config.num_hidden_layers:
            raise ValueError(f"`reports` has layer {max(layers)}, but there are {config.num_hidden_layers}")
        corrected = [report.layer_idx for report in self.reports if report.choice == "corrected"]
        if sorted(each.layer_idx for each in self.corrections) != sorted(corrected):
            raise ValueError(f"`corrections` have to be of layers {corrected}")
        if any(each.down.shape[0] != config.hidden_size for each in self.corrections):
            raise ValueError(f"`corrections` have to be of {config.hidden_size} channels")


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """
    Findings of `calibrate` about a model.

    Attributes:
        model (`str`): fingerprint of the model.
        reports (`tuple[LayerReport, ...]`): a report of each layer.
        corrections (`dict[int, Factors]`): by layer, factors `[hidden size, rank]` and `[rank, hidden size]` of the
            linear map that corrects the expected attention input.
    """

    model: str
    reports: tuple[LayerReport, ...]
    corrections: dict[int, Factors]

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that stay whole on the accelerator."""
        return tuple(report.layer_idx for report in self.reports if report.choice == "full")

    def corrected(self, layer_idx: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Correct the expected attention input of a layer, if there is a correction for it."""
        return _corrected(hidden_states, self.corrections.get(layer_idx))

    def to(self, device: torch.device, dtype: torch.dtype) -> Calibration:
        """Copy the calibration, with corrections on `device` and in `dtype`."""
        moved = {key: (down.to(device, dtype), up.to(device, dtype)) for key, (down, up) in self.corrections.items()}
        return Calibration(self.model, self.reports, moved)

    def save(self, path: str | Path) -> None:
        """Write the calibration to a safetensors file, which replaces an older one when it is complete."""
        corrections = [_Correction(index, *factors) for index, factors in self.corrections.items()]
        write_record(path, FORMAT, _Content(self.model, self.reports, corrections))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> Calibration:
        """Read a file of `save`; a `ValueError` names one that is damaged, or of another version or model."""
        with refusals("calibration", path):
            content = read_record(path, FORMAT, _Content)
            content.check_fits(model)
        corrections = {each.layer_idx: (each.down, each.up) for each in content.corrections}
        return cls(content.model, content.reports, corrections)


def _corrected(hidden_states: torch.Tensor, factors: Factors | None) -> torch.Tensor:
    if factors is None:
        return hidden_states
    down, up = (factor.to(hidden_states) for factor in factors)
    return hidden_states + (hidden_states @ down) @ up


class Recorder(AttentionObserver, DynamicCache):
    """A dense cache that calls `on_layer` with every layer's expected and true attention input."""

    def __init__(self, model: PreTrainedModel, on_layer: Callable[[Observation], None]):
        super().__init__(config=model.config)
        self._on_layer = on_layer
        # Expected input of the next layer, and true input of this one
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def on_attention_input(self, hooks: ModelHooks, layer_idx: int, inputs: AttentionInputs) -> None:
        true = inputs.hidden_states
        target = layer_idx + 1
        if self._last is not None and type(self.layers[layer_idx]) is DynamicLayer:
            self._on_layer(Observation(layer_idx, *self._last, true, inputs.position_embeddings))
        self._last = None
        if target < len(self.layers):
            self._last = hooks.expected_hidden_states(target, layer_idx, inputs, true.device), true


class Observation(NamedTuple):
    """Attention inputs `[1, tokens, hidden size]` of a layer: expected, of the layer before, and true."""

    layer_idx: int
    expected: torch.Tensor
    before: torch.Tensor
    true: torch.Tensor
    embeddings: PositionEmbeddings | None

    def newest(self) -> Observation:
        """Return a copy of the newest tokens alone, which needs little memory."""
        return tree_map_only(torch.Tensor, lambda states: states[:, -NUM_QUERIES:].clone(), self)


def observe(
    model: PreTrainedModel, window: torch.Tensor, on_layer: Callable[[Observation], None]
) -> tuple[Recorder, ModelHooks]:
    """Run the model's decoder on a window of tokens, and call `on_layer` with every layer's inputs."""
    recorder = Recorder(model, on_layer)
    hooks = attach(model, recorder)
    reason = hooks.why_unknown()
    if reason is not None:
        hooks.detach(recorder)
        raise ValueError(reason)
    with hooks.record.of_all_tokens():
        model.get_decoder()(window[None].to(model.device), **as_argument(recorder), use_cache=True)
    return recorder, hooks


def low_rank_map(own: torch.Tensor, cross: torch.Tensor, rank: int) -> Factors:
    """
    Solve a ridge regression, cut to the `rank` directions in which its predictions vary most, from moments
    `[hidden size, hidden size]` of the regressors with themselves (`own`) and with the targets (`cross`).
    """
    own, cross = own.double(), cross.double()
    ridge = _RIDGE * own.diagonal().mean() * torch.eye(own.shape[0], dtype=own.dtype, device=own.device)
    solution = torch.linalg.solve(own + ridge, cross)
    directions = torch.linalg.eigh(solution.T @ own @ solution).eigenvectors[:, -rank:]
    return (solution @ directions).float(), directions.T.float()


def captured_masses(
    hooks: ModelHooks, keys: torch.Tensor, observation: Observation, corrections: dict[int, Factors]
) -> dict[str, float]:
    """Measure the attention mass of the tenth of the tokens that each prediction chooses; see `LayerReport`."""
    projection = hooks.projections[observation.layer_idx]
    expected = observation.expected
    predictions = {"oracle": observation.true, "by_input": observation.before, "by_stream": expected}
    predictions["corrected"] = _corrected(expected, corrections.get(observation.layer_idx))
    positions = torch.arange(keys.shape[2], dtype=torch.int64, device=keys.device)
    later = positions > positions[-expected.shape[1] :, None]
    weights = {}
    for name, inputs in predictions.items():
        query = projection(inputs, observation.embeddings).float().unflatten(1, (keys.shape[1], -1))
        scores = query @ keys.float()[:, :, None].transpose(3, 4) * projection.scaling
        # Mean over each group of query heads, `[1, H, queries, tokens]`
        weights[name] = scores.masked_fill(later, -torch.inf).softmax(dim=4).mean(dim=2)
    count = max(int(_SHARE * keys.shape[2]), 1)
    true = weights["oracle"]
    return {
        name: float(true.gather(3, own.topk(count, dim=3).indices).sum(dim=3).mean()) for name, own in weights.items()
    }


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    *,
    rank: int = 128,
    min_recall: float = 0.9,
    on_progress: Callable[[str], None] | None = None,
) -> Calibration:
    """
    Measure how well the queries of a model's layers are predicted, and fit corrections.

    Args:
        model (`PreTrainedModel`): the model, in eval mode.
        windows (`Sequence[torch.Tensor]`): at least two, token ids `[tokens]` each; every second one is only measured.
        rank (`int`, *optional*, defaults to 128): rank of a correction; 0 for no corrections.
        min_recall (`float`, *optional*, defaults to 0.9): least recall; a layer below stays whole.
        on_progress (`Callable[[str], None]`, *optional*): called before each window.

    Raises:
        ValueError: if there are fewer than two windows, or a window is too short to choose a tenth of.
    """
    if len(windows) < 2 or min(window.numel() for window in windows) < 2 * NUM_QUERIES:
        raise ValueError(f"`windows` has to hold two windows at least, of {2 * NUM_QUERIES} tokens at least")
    moments: dict[int, Factors] = {}

    def fit(observation: Observation) -> None:
        expected = observation.expected[0].float()
        missed = observation.true[0].float() - expected
        own, cross = moments.get(observation.layer_idx, (0, 0))
        moments[observation.layer_idx] = own + expected.T @ expected, cross + expected.T @ missed

    for number, window in enumerate(windows[::2] if rank else (), start=1):
        if on_progress is not None:
            on_progress(f"fitting, window {number}")
        observe(model, window, fit)
    corrections = {index: low_rank_map(*moments.pop(index), rank) for index in list(moments)}

    masses: dict[int, list[dict[str, float]]] = {}
    for number, window in enumerate(windows[1::2], start=1):
        if on_progress is not None:
            on_progress(f"measuring, window {number}")
        observations: list[Observation] = []

        def keep(each: Observation, kept: list[Observation] = observations) -> None:
            kept.append(each.newest())

        cache, hooks = observe(model, window, keep)
        for observation in observations:
            layer = cache.layers[observation.layer_idx]
            assert isinstance(layer, DynamicLayer) and layer.keys is not None
            found = captured_masses(hooks, layer.keys, observation, corrections)
            masses.setdefault(observation.layer_idx, []).append(found)
    reports = [_report(index, values, min_recall) for index, values in masses.items()]
    used = {report.layer_idx: corrections[report.layer_idx] for report in reports if report.choice == "corrected"}
    return Calibration(fingerprint(model), tuple(reports), used)


def resolve_calibration(calibration: Calibration | str | Path | None, model: PreTrainedModel) -> Calibration | None:
    """Return a calibration, or that of a file, on the model's device; a `ValueError` if it does not fit the model."""
    if isinstance(calibration, str | Path):
        calibration = Calibration.load(calibration, model)
    if isinstance(calibration, Calibration | None):
        return calibration and calibration.to(model.device, model.dtype)
    raise ValueError(f"`calibration` has to be a `Calibration`, a file or None but got {calibration!r}")


def choose_full_layers(asked_for: Sequence[int] | None, calibration: Calibration | None, num_layers: int) -> set[int]:
    """Choose the layers that stay whole; a `ValueError` if the model has no layer of an index that is asked for."""
    if asked_for is not None:
        wrong = [index for index in asked_for if not isinstance(index, int) or not 0 <= index < num_layers]
        if wrong:
            raise ValueError(f"`full_layers` has to hold indices of the model's {num_layers} layers, not {wrong}")
        return set(asked_for)
    if calibration is not None:
        # The first layer has no layer before it that could predict its queries
        return {0, *calibration.full_layers}
    return set(range(min(NUM_FIRST_LAYERS, num_layers - 1)))


def _report(layer_idx: int, values: list[dict[str, float]], min_recall: float) -> LayerReport:
    mean = {name: sum(value[name] for value in values) / len(values) for name in values[0]}
    choice: Choice = "corrected" if mean["corrected"] > mean["by_stream"] + _MIN_GAIN else "stream"
    # The first layer has no layer before it
    if layer_idx == 0 or max(mean["corrected"], mean["by_stream"]) < min_recall * mean["oracle"]:
        choice = "full"
    return LayerReport(layer_idx=layer_idx, choice=choice, **mean)
