"""Slices of a prompt, one a rank: what they cost, which are fastest, and a table of those that were found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModel, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_json_record, write_json_record
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.models.layer_config import config_of_layer, configs_of_layers, heads_of
from kvcache_plugins.option_checks import check_bool, check_integer, check_number


Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)
# Lengths of slices, which sum to the prompt's; none is 0
Partition = tuple[int, ...]
# The share of a slice's own square of queries and keys that kernels compute, of which half is wanted
RECTANGLE, TRIANGLE = 1.0, 0.5
# Of a layer's linear work, the share until keys and values are known; Llama 7B has 0.249
_PROJECTION_SHARE = 0.25


# Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Measured `seconds` of a slice of `length` tokens through all layers, those of a `prefix` before it cached."""

    length: int
    prefix: int = 0
    seconds: float

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        check_integer("prefix", self.prefix, 0)
        check_number("seconds", self.seconds, above=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Seconds of a message from a rank to the next beside its bytes; `shared` if all ranks have one link, as a bus."""

    latency: float = 0.0
    bytes_per_second: float
    shared: bool = False

    def __post_init__(self) -> None:
        check_number("latency", self.latency, least=0.0)
        check_number("bytes_per_second", self.bytes_per_second, above=0.0)
        check_bool("shared", self.shared)

    def seconds(self, num_bytes: Number) -> Number:
        """Returns the seconds that a message of `num_bytes` keeps the link busy."""
        return num_bytes / self.bytes_per_second + self.latency


@dataclass(frozen=True, slots=True)
class CostModel:
    """
    Seconds of a slice of `c` tokens behind a prefix of `b`, through all layers of a model:

        fixed + per_token * c + per_pair * (b * c + triangle * c * c)

    Attributes:
        triangle (`float`): share of the `c * c` pairs within the slice that is computed: `RECTANGLE` as in the paper,
            where everything is computed and then masked, `TRIANGLE` for kernels that skip what is masked.
        projection_share (`float`): part of `fixed` and `per_token` before a layer's keys and values can be sent.
    """

    per_token: float
    per_pair: float
    fixed: float = 0.0
    triangle: float = TRIANGLE
    projection_share: float = _PROJECTION_SHARE

    def __post_init__(self) -> None:
        for name in ("per_token", "per_pair", "fixed"):
            check_number(name, getattr(self, name), least=0.0)
        check_number("triangle", self.triangle, above=0.0)
        check_number("projection_share", self.projection_share, least=0.0, most=1.0)
        if not self.per_token + self.per_pair > 0:
            raise ValueError("one of `per_token` and `per_pair` has to be above 0, but both are 0")

    def seconds(self, length: Number, prefix: Number) -> Number:
        """Returns the seconds of a slice, or of an array of slices."""
        return self.fixed + length * (self.per_token + self.per_pair * (prefix + self.triangle * length))

    def length_within(self, seconds: float, prefix: float) -> float:
        """Returns the longest slice behind `prefix` within `seconds`, a real number."""
        left = seconds - self.fixed
        if left <= 0:
            return 0.0
        slope = self.per_token + self.per_pair * prefix
        # The root of a quadratic in the form that also serves where it is nearly linear
        return 2 * left / (slope + math.sqrt(slope * slope + 4 * self.per_pair * self.triangle * left))

    @classmethod
    def fit(
        cls, timings: Sequence[Timing], *, triangle: float | None = None, projection_share: float = _PROJECTION_SHARE
    ) -> CostModel:
        """
        Fits the cost model to measured timings of two lengths at least, by the least relative error, no part negative;
        `triangle` too where it is not given and four slices, with and without a prefix, tell it. What tells too little
        is a `ValueError`.
        """
        rows = [(each.length, each.prefix, each.seconds) for each in timings]
        lengths, prefixes, seconds = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        if len(set(lengths)) < 2:
            raise ValueError(f"`timings` has to hold slices of two lengths at least, but got {sorted(set(lengths))}")
        if triangle is None and len({row[:2] for row in rows}) < 4:
            triangle = TRIANGLE
        crossed, own = prefixes * lengths, lengths * lengths
        pairs = [crossed, own] if triangle is None else [crossed + triangle * own]
        # What is fixed comes first: where two slices tell no more than two numbers, it is none of them
        columns = np.stack([np.ones_like(lengths), lengths, *pairs], axis=1)
        fixed, per_token, per_pair, *per_own_pair = _least_squares(columns / seconds[:, None])
        if triangle is None:
            if not (per_pair > 0 and per_own_pair[0] > 0):
                return cls.fit(timings, triangle=TRIANGLE, projection_share=projection_share)
            triangle = per_own_pair[0] / per_pair
        if not per_token + per_pair > 0:
            raise ValueError("`timings` do not grow with the length: measure longer slices")
        return cls(per_token, per_pair, fixed, triangle, projection_share)

    @classmethod
    def of_shapes(cls, model: PreTrainedModel | PreTrainedConfig) -> CostModel:
        """
        Counts operations of a model or a config, so that its "seconds" are fit for ratios alone: of attention, in
        sliding windows a whole one a token, and of the decoder's linear layers (of experts, those that a token goes
        through).
        """
        if isinstance(model, PreTrainedConfig):
            with torch.device("meta"):
                model = AutoModel.from_config(model, dtype=torch.float32)
        decoder = model.get_decoder()
        config = decoder.config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        heads = [heads_of(config_of_layer(config, index)) for index in range(len(layers))]
        # A multiplication and an addition for every channel of a key, and of a value
        attention = [4 * each.num_query * each.dim for each in heads]
        # Experts are `[experts, ., .]`; the weight of a linear layer that is packed in a few bits has another shape
        count = sum(each[0].numel() for each in decoder.parameters() if each.ndim == 3) * _num_active_experts(config)
        linear = (each for each in decoder.modules() if isinstance(each, nn.Linear))
        count += sum(each.in_features * each.out_features for each in linear)
        count += sum(each.weight.numel() for each in decoder.modules() if isinstance(each, Conv1D))
        per_token = 2 * count
        windows = [getattr(layer, "sliding_window", 0) for layer in layers]
        per_token += sum(each * window for each, window in zip(attention, windows, strict=True))
        per_pair = sum(each for each, layer in zip(attention, layers, strict=True) if type(layer) is DynamicLayer)
        channels = sum((each.num_query + 2 * each.num_key_value) * each.dim for each in heads)
        projections = 2 * config.hidden_size * channels
        return cls(float(per_token), float(per_pair), projection_share=min(projections / per_token, 1.0))


def bytes_of_token(model: PreTrainedModel | PreTrainedConfig, dtype: torch.dtype) -> int:
    """Counts the bytes of a token's keys and values in one layer, on average over the layers."""
    config = (model if isinstance(model, PreTrainedConfig) else model.config).get_text_config(decoder=True)
    heads = [heads_of(each) for each in configs_of_layers(config)]
    return 2 * dtype.itemsize * sum(each.num_key_value * each.dim for each in heads) // len(heads)


def _num_active_experts(config: PreTrainedConfig) -> int:
    """Counts the experts that a token goes through in one layer, on average over the layers."""
    counts = [getattr(each, "num_experts_per_tok", None) or 1 for each in configs_of_layers(config)]
    return sum(counts) // len(counts)


def _least_squares(columns: Array) -> list[float]:
    """
    Fits weights of `columns` `[rows, columns]`, none negative, to a sum of 1 in every row: every choice of columns is
    tried, smaller ones first, so that a column that only fits rounding stays zero.
    """
    # Squares of lengths beside lengths and ones: unscaled, `lstsq` would take the small ones for nothing
    scales = np.linalg.norm(columns, axis=0)
    scaled, target = columns / np.where(scales > 0, scales, 1), np.ones(len(columns))
    best, least = np.zeros(len(scales)), float(len(columns))
    worth = 1e-12 * least
    for chosen in map(list, sorted(itertools.product((False, True), repeat=len(scales)), key=sum)[1:]):
        weights, _, rank, _ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
        error = float(np.square(scaled[:, chosen] @ weights - target).sum())
        if rank == sum(chosen) and (weights >= 0).all() and error < least - worth:
            best, least = np.zeros(len(scales)), error
            best[chosen] = weights / scales[chosen]
    return best.tolist()  # type: ignore[no-any-return]


# Table

FORMAT = Format("kvcache_plugins.kv_runahead", 2, "plan and save anew")
# By which the sum of ratios may differ from 1: a third rounded to three digits, three times
_RATIO_TOLERANCE = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """A share of one length for each rank, 1 in all, and the seconds to the first token, measured or predicted."""

    length: int
    ratios: tuple[float, ...]
    seconds: float
    measured: bool

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        object.__setattr__(self, "ratios", _checked_ratios("ratios", self.ratios))
        if len(self.ratios) > self.length:
            raise ValueError(f"`ratios` are {len(self.ratios)}, more than the {self.length} tokens of `length`")
        check_number("seconds", self.seconds, above=0.0)
        check_bool("measured", self.measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable:
    """
    The paper's look-up table: partitions that were found for some lengths, of one model on one number of ranks.

    Attributes:
        model (`str`): fingerprint of the model, see `fingerprint`.
        world_size (`int`): ranks that the partitions are for.
        entries (`tuple[TableEntry, ...]`): one at least, sorted by length.
        timings (`tuple[Timing, ...]`): what `cost` was fitted to.
        cost (`CostModel`, *optional*): what predicted entries were planned with.
        link (`Link`, *optional*): the link between ranks, as measured.
        machine (`str`), date (`str`), versions (`dict[str, str]`): where, when and with which packages it was made.
    """

    model: str
    world_size: int
    entries: tuple[TableEntry, ...]
    timings: tuple[Timing, ...] = ()
    cost: CostModel | None = None
    link: Link | None = None
    machine: str = ""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("world_size", self.world_size, 1)
        lengths = [entry.length for entry in self.entries]
        if not lengths or len(set(lengths)) < len(lengths):
            raise ValueError(f"`entries` has to hold one length at least and none twice, but got lengths {lengths}")
        longest = max(len(entry.ratios) for entry in self.entries)
        if longest > self.world_size:
            raise ValueError(f"`entries` cut a context into {longest} slices, but `world_size` is {self.world_size}")
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=lambda entry: entry.length)))

    def document(self) -> dict[str, Any]:
        """Returns what `save` writes, less its checksum."""
        return FORMAT.stamp(asdict(self))

    def save(self, path: str | Path) -> None:
        """Writes the table to a JSON file, which takes its place when it is complete."""
        write_json_record(path, FORMAT, self)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, world_size: int) -> PartitionTable:
        """
        Reads a table of `save`; one that is missing, damaged, or of another model or number of ranks is a
        `ValueError`.
        """
        with refusals("partition", path):
            table = read_json_record(path, FORMAT, cls)
            if table.model != fingerprint(model):
                raise RefusedFile("was made for another model, or for the same one in another dtype")
            if table.world_size != world_size:
                raise RefusedFile(f"was made for {table.world_size} ranks, but there are {world_size}")
        return table


# Partitions

_BISECTIONS = 60
# The paper's grid: values tried of every boundary, and what the step is divided by from level to level
_OFFSETS, _STEP_DIVISOR = (-2, -1, 0, 1, 2), 4


def resolve_partition(
    partition: str | Sequence[int] | Sequence[float] | PartitionTable | None,
    length: int,
    num_ranks: int,
    *,
    model: PreTrainedModel | PreTrainedConfig | None = None,
) -> Partition:
    """
    Returns slice lengths, of some ranks none, from what a user gave: `"even"`, lengths, ratios, a table, or nothing
    for `planned` by the shapes of `model`. What is none of these or does not fit is a `ValueError`.
    """
    _check_length(length, num_ranks)
    if partition is None or partition == "planned":
        if model is None:
            raise ValueError("`partition` is to be planned, for which `model` is needed")
        return planned(length, num_ranks, CostModel.of_shapes(model))
    if partition == "even":
        return even(length, num_ranks)
    if isinstance(partition, PartitionTable):
        if partition.world_size != num_ranks:
            raise ValueError(f"`partition` is a table for {partition.world_size} ranks, but there are {num_ranks}")
        return predicted(length, partition)
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ValueError(
            f"`partition` has to be one of ['even', 'planned'], slice lengths, ratios or a `PartitionTable`, but got "
            f"{partition!r}"
        )
    if len(partition) > num_ranks:
        raise ValueError(f"`partition` has {len(partition)} slices, but there are {num_ranks} ranks")
    ratios = tuple(each for each in partition if isinstance(each, float))
    if partition and len(ratios) == len(partition):
        return _by_ratios(length, _checked_ratios("partition", ratios))
    return _checked_lengths("partition", tuple(partition), length)


def even(length: int, num_ranks: int) -> Partition:
    """Cuts slices of one length, the first ones longer by a token where it does not divide."""
    _check_length(length, num_ranks)
    share, left = divmod(length, num_ranks)
    return tuple(share + (rank < left) for rank in range(num_ranks))


def predicted(length: int, table: PartitionTable) -> Partition:
    """
    Interpolates a table's ratios linearly between the two nearest lengths, of equally many slices; else takes the
    nearest.
    """
    place = float(np.interp(length, [entry.length for entry in table.entries], range(len(table.entries))))
    lower, upper = (table.entries[index].ratios for index in (math.floor(place), math.ceil(place)))
    weight = place % 1
    if len(lower) != len(upper):
        return _by_ratios(length, upper if weight > 0.5 else lower)
    return _by_ratios(length, np.add(lower, weight * np.subtract(upper, lower)))


def planned(length: int, num_ranks: int, cost: CostModel) -> Partition:
    """Cuts the slices of equal compute by a cost model."""
    _check_length(length, num_ranks)

    def cut(seconds: float) -> Array:
        ends = itertools.accumulate(
            range(num_ranks), lambda end, _: end + cost.length_within(seconds, end), initial=0.0
        )
        return np.array([*ends][1:])

    least, enough = 0.0, cost.seconds(float(length), 0.0)
    for _ in range(_BISECTIONS):
        middle = (least + enough) / 2
        least, enough = (middle, enough) if cut(middle)[-1] < length else (least, middle)
    ends = cut(enough)
    # All within rounding of `length` but where one rank alone already is enough
    return _rounded(ends * length / ends[-1])


def searched(
    start: Sequence[int],
    measure: Callable[[Sequence[Partition]], Iterable[float]],
    *,
    first_step: int | None = None,
    last_step: int | None = None,
) -> tuple[Partition, float]:
    """
    Searches the paper's hierarchical grid for the fastest slices, and returns them with their seconds: never more, by
    what was measured, than those of the `start`.

    In a level five values of every boundary are tried, a step of tokens apart; the next level has a quarter of the
    step and the best so far in its middle. A level is repeated while it finds better. Of more than two boundaries two
    neighbouring ones are moved at a time, the others in proportion. `measure` takes partitions, none twice.
    """
    best = _checked_lengths("start", tuple(start), sum(start))
    step = max(1, sum(start) // (_STEP_DIVISOR * len(best))) if first_step is None else first_step
    last_step = max(1, sum(start) // 256) if last_step is None else last_step
    check_integer("first_step", step, 1)
    check_integer("last_step", last_step, 1)
    seconds: dict[Partition, float] = {}
    boundaries = tuple(range(len(best) - 1))
    moved: list[tuple[int, ...]] = [*itertools.pairwise(boundaries)] or [boundaries]
    while True:
        before = best
        for some in moved:
            # The middle first: of equally fast ones it stays
            tried = list(dict.fromkeys((best, *_grid(step, some, best))))
            new = [each for each in tried if each not in seconds]
            for lengths, time in zip(new, measure(new) if new else (), strict=True):
                if math.isnan(time):
                    raise ValueError(f"`measure` has to return seconds but returned NaN for {list(lengths)}")
                seconds[lengths] = time
            best = min(tried, key=seconds.__getitem__)
        if best == before:
            if step <= last_step:
                return best, seconds[best]
            step = max(step // _STEP_DIVISOR, last_step)


def _grid(step: int, boundaries: tuple[int, ...], middle: Partition) -> Iterator[Partition]:
    """Moves some boundaries by whole steps, and stretches the slices between these in proportion."""
    ends = [0, *itertools.accumulate(middle)]
    fixed = [0, *(ends[each + 1] for each in boundaries), ends[-1]]
    for offsets in itertools.product(_OFFSETS, repeat=len(boundaries)):
        moved = [end + offset * step for end, offset in zip(fixed, (0, *offsets, 0), strict=True)]
        if all(begin < end for begin, end in itertools.pairwise(moved)):
            yield _rounded(np.interp(ends[1:], fixed, moved))


def _by_ratios(length: int, ratios: Sequence[float] | Array) -> Partition:
    _check_length(length, len(ratios))
    return _rounded(np.cumsum(np.multiply(ratios, length)))


def _rounded(ends: Array) -> Partition:
    """Rounds ends of slices to the nearest token, and makes each slice 1 at least."""
    length, found = round(float(ends[-1])), [0]
    for left, end in zip(range(len(ends) - 1, -1, -1), ends.tolist(), strict=True):
        found.append(max(min(round(end), length - left), found[-1] + 1))
    return tuple(end - begin for begin, end in itertools.pairwise(found))


def _checked_ratios(name: str, ratios: tuple[float, ...]) -> tuple[float, ...]:
    """Scales ratios to a sum of 1. Any not above 0, or a sum beyond rounding, is a `ValueError` naming `name`."""
    for ratio in ratios:
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ValueError(f"`{name}` has to hold ratios in (0, 1] but got {ratio!r}")
    total = math.fsum(ratios)
    if abs(total - 1) > _RATIO_TOLERANCE:
        raise ValueError(f"`{name}` has to hold ratios that sum to 1 but got {list(ratios)}, which sum to {total:g}")
    return tuple(ratio / total for ratio in ratios)


def _checked_lengths(name: str, lengths: tuple[object, ...], length: int) -> Partition:
    """Returns the lengths if they are integers above 0 that sum to `length`; else a `ValueError` names `name`."""
    whole = tuple(each for each in lengths if isinstance(each, int) and not isinstance(each, bool) and each >= 1)
    if not lengths or len(whole) < len(lengths):
        raise ValueError(f"`{name}` has to hold integers of at least 1, or ratios as floats, but got {list(lengths)}")
    if sum(whole) != length:
        raise ValueError(f"`{name}` has to sum to the context's {length} tokens but got {list(whole)}, {sum(whole)}")
    return whole


def _check_length(length: int, num_ranks: int) -> None:
    check_integer("num_ranks", num_ranks, 1)
    if length < num_ranks:
        raise ValueError(
            f"the context has {length} tokens, but each of {num_ranks} ranks needs one at least: use fewer ranks"
        )
