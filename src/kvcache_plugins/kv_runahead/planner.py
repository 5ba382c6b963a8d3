"""Slices of a prompt, one a rank: their cost, the partition whose slices cost the same, and tables of partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

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
# Share of the pairs of queries and keys within a slice that kernels compute: all, or only those below the diagonal
RECTANGLE = 1.0
TRIANGLE = 0.5
# Share of a layer's linear work before its keys and values are known; Llama 7B has 0.249
_PROJECTION_SHARE = 0.25
# Steps of a bisection of float64
_BISECTIONS = 60
# Difference of a sum of ratios from 1: three thirds, rounded to three digits each
_RATIO_TOLERANCE = 2e-3
FORMAT = Format("kvcache_plugins.kv_runahead", 2, "plan and save anew")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """
    Measured time of a slice through all layers.

    Attributes:
        length (`int`): tokens of the slice.
        prefix (`int`): tokens before it, whose keys and values are there.
        seconds (`float`): the time.
    """

    length: int
    prefix: int = 0
    seconds: float

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        check_integer("prefix", self.prefix, 0)
        check_number("seconds", self.seconds, above=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """
    Link between ranks.

    Attributes:
        latency (`float`): seconds of a message beside those of its bytes.
        bytes_per_second (`float`): bandwidth.
        shared (`bool`): True if all ranks share the link, as a bus.
    """

    latency: float = 0.0
    bytes_per_second: float
    shared: bool = False

    def __post_init__(self) -> None:
        check_number("latency", self.latency, least=0.0)
        check_number("bytes_per_second", self.bytes_per_second, above=0.0)
        check_bool("shared", self.shared)

    def seconds(self, num_bytes: Number) -> Number:
        """Return the seconds that a message of `num_bytes` keeps the link busy."""
        return num_bytes / self.bytes_per_second + self.latency


@dataclass(frozen=True, slots=True)
class CostModel:
    """
    Model of the seconds of a slice of `c` tokens behind a prefix of `b`, through all layers:

        fixed + per_token * c + per_pair * (b * c + triangle * c * c)

    Attributes:
        per_token (`float`): seconds of linear layers for a token.
        per_pair (`float`): seconds of attention for a query and a key.
        fixed (`float`): seconds of a forward of any length.
        triangle (`float`): share of the `c * c` pairs within the slice that is computed: `RECTANGLE` as in the paper,
            which masks scores after computing all of them, `TRIANGLE` for kernels that skip masked ones.
        projection_share (`float`): share of `fixed` and `per_token` before a layer's keys and values can be sent.
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
        """Return the seconds of a slice, or of an array of slices."""
        return self.fixed + length * (self.per_token + self.per_pair * (prefix + self.triangle * length))

    def length_within(self, seconds: float, prefix: float) -> float:
        """Return the length, a real number, of the longest slice behind `prefix` within `seconds`."""
        remaining = seconds - self.fixed
        if remaining <= 0:
            return 0.0
        slope = self.per_token + self.per_pair * prefix
        # Root of a quadratic, in the form that is stable where it is nearly linear
        return 2 * remaining / (slope + math.sqrt(slope * slope + 4 * self.per_pair * self.triangle * remaining))

    @classmethod
    def fit(
        cls, timings: Sequence[Timing], *, triangle: float | None = None, projection_share: float = _PROJECTION_SHARE
    ) -> CostModel:
        """
        Fit the cost model to measured timings by the least relative error, with no negative part.

        Args:
            timings (`Sequence[Timing]`): at least two lengths.
            triangle (`float`, *optional*): fitted as well if it is not given and there are four different slices.
            projection_share (`float`, *optional*, defaults to 0.25): taken over.

        Raises:
            ValueError: if there are too few lengths, or times do not grow with them.
        """
        rows = [(each.length, each.prefix, each.seconds) for each in timings]
        lengths, prefixes, seconds = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        if len(set(lengths)) < 2:
            raise ValueError(f"`timings` has to hold slices of two lengths at least, but got {sorted(set(lengths))}")
        if triangle is None and len({row[:2] for row in rows}) < 4:
            triangle = TRIANGLE
        crossed, own = prefixes * lengths, lengths * lengths
        pairs = [crossed, own] if triangle is None else [crossed + triangle * own]
        # The fixed part is the first column: if two slices determine only two parts, it stays zero
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
        Count the operations of a model or a config: its "seconds" are for ratios alone. Counted are attention (in a
        sliding window, a whole one for each token) and the decoder's linear layers (of experts, those that a token is
        routed to).
        """
        if isinstance(model, PreTrainedConfig):
            with torch.device("meta"):
                model = AutoModel.from_config(model, dtype=torch.float32)
        decoder = model.get_decoder()
        config = decoder.config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        heads = [heads_of(config_of_layer(config, index)) for index in range(len(layers))]
        # Each channel of a key and of a value is a multiplication and an addition
        attention = [4 * each.num_query * each.dim for each in heads]
        # Experts are `[experts, ., .]`; packed weights of linear layers have other shapes than their sizes
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
    """Return the bytes of a token's keys and values in one layer, on average over the layers."""
    config = (model if isinstance(model, PreTrainedConfig) else model.config).get_text_config(decoder=True)
    heads = [heads_of(each) for each in configs_of_layers(config)]
    return 2 * dtype.itemsize * sum(each.num_key_value * each.dim for each in heads) // len(heads)


def _num_active_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts that a token is routed to in one layer, on average over the layers."""
    counts = [getattr(each, "num_experts_per_tok", None) or 1 for each in configs_of_layers(config)]
    return sum(counts) // len(counts)


def _least_squares(columns: Array) -> list[float]:
    """
    Fit weights of `columns` `[rows, columns]`, none negative, to a sum of 1 in every row. Every choice of columns is
    tried, smaller ones first, so that a column that only fits rounding stays zero.
    """
    # Columns differ by orders of magnitude: unscaled, `lstsq` would drop the small ones
    scales = np.linalg.norm(columns, axis=0)
    scaled, target = columns / np.where(scales > 0, scales, 1), np.ones(len(columns))
    best = np.zeros(len(scales))
    least = float(len(columns))
    least_gain = 1e-12 * least
    for chosen in map(list, sorted(itertools.product((False, True), repeat=len(scales)), key=sum)[1:]):
        weights, _, rank, _ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
        error = float(np.square(scaled[:, chosen] @ weights - target).sum())
        if rank == sum(chosen) and (weights >= 0).all() and error < least - least_gain:
            least = error
            best = np.zeros(len(scales))
            best[chosen] = weights / scales[chosen]
    return best.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """
    Partition of one length.

    Attributes:
        length (`int`): tokens of the prompt.
        ratios (`tuple[float, ...]`): share of each slice; they sum to 1.
        seconds (`float`): time to the first token.
        measured (`bool`): True if the time was measured, False if predicted.
    """

    length: int
    ratios: tuple[float, ...]
    seconds: float
    measured: bool

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        object.__setattr__(self, "ratios", _check_ratios("ratios", self.ratios))
        if len(self.ratios) > self.length:
            raise ValueError(f"`ratios` are {len(self.ratios)}, more than the {self.length} tokens of `length`")
        check_number("seconds", self.seconds, above=0.0)
        check_bool("measured", self.measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable:
    """
    The paper's look-up table: partitions of some lengths, for one model on one number of ranks.

    Attributes:
        model (`str`): fingerprint of the model, see `fingerprint`.
        world_size (`int`): number of ranks.
        entries (`tuple[TableEntry, ...]`): one at least, sorted by length.
        timings (`tuple[Timing, ...]`): timings that `cost` was fitted to.
        cost (`CostModel`, *optional*): model by which predicted entries were planned.
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

    def document(self) -> dict[str, object]:
        """Return the document that `save` writes, without its checksum."""
        return FORMAT.stamp(asdict(self))

    def save(self, path: str | Path) -> None:
        """Write the table to a JSON file, whole or not at all."""
        write_json_record(path, FORMAT, self)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, world_size: int) -> PartitionTable:
        """
        Read a table of `save`; raise a `ValueError` if it is missing, damaged, or of another model or number of ranks.
        """
        with refusals("partition", path):
            table = read_json_record(path, FORMAT, cls)
            if table.model != fingerprint(model):
                raise RefusedFile("was made for another model, or for the same one in another dtype")
            if table.world_size != world_size:
                raise RefusedFile(f"was made for {table.world_size} ranks, but there are {world_size}")
        return table


def resolve_partition(
    partition: str | Sequence[int] | Sequence[float] | PartitionTable | None,
    length: int,
    num_ranks: int,
    *,
    model: PreTrainedModel | PreTrainedConfig | None = None,
) -> Partition:
    """
    Return the lengths of slices, at most one a rank, that a user's `partition` stands for: `"even"`, lengths, ratios,
    a table, or `"planned"` or `None` for `planned` by the shapes of `model`. Raise a `ValueError` for anything else.
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
        return _by_ratios(length, _check_ratios("partition", ratios))
    return check_lengths("partition", tuple(partition), length)


def even(length: int, num_ranks: int) -> Partition:
    """Cut slices of one length, the first ones longer by a token if the prompt is no multiple of it."""
    _check_length(length, num_ranks)
    share, remainder = divmod(length, num_ranks)
    return tuple(share + (rank < remainder) for rank in range(num_ranks))


def predicted(length: int, table: PartitionTable) -> Partition:
    """
    Interpolate a table's ratios linearly between the two nearest lengths; take those of the nearest if their numbers
    of slices differ.
    """
    position = float(np.interp(length, [entry.length for entry in table.entries], range(len(table.entries))))
    lower, upper = (table.entries[index].ratios for index in (math.floor(position), math.ceil(position)))
    weight = position % 1
    if len(lower) != len(upper):
        return _by_ratios(length, upper if weight > 0.5 else lower)
    return _by_ratios(length, np.add(lower, weight * np.subtract(upper, lower)))


def planned(length: int, num_ranks: int, cost: CostModel) -> Partition:
    """Cut the slices of equal cost, by bisection of that cost."""
    _check_length(length, num_ranks)

    def cut(seconds: float) -> list[float]:
        """Return the ends of slices that take `seconds` each."""
        ends = []
        end = 0.0
        for _ in range(num_ranks):
            end += cost.length_within(seconds, end)
            ends.append(end)
        return ends

    too_few, enough = 0.0, cost.seconds(float(length), 0.0)
    for _ in range(_BISECTIONS):
        middle = (too_few + enough) / 2
        if cut(middle)[-1] < length:
            too_few = middle
        else:
            enough = middle
    ends = np.array(cut(enough))
    # The last end is `length` up to rounding, unless one rank is enough for more
    return round_ends(ends * length / ends[-1])


def _by_ratios(length: int, ratios: Sequence[float] | Array) -> Partition:
    _check_length(length, len(ratios))
    return round_ends(np.cumsum(np.multiply(ratios, length)))


def round_ends(ends: Array) -> Partition:
    """Round ends of slices to whole tokens, so that each slice has one at least, and return their lengths."""
    length = round(float(ends[-1]))
    rounded = [0]
    for number, end in enumerate(ends.tolist(), start=1):
        num_behind = len(ends) - number
        rounded.append(max(min(round(end), length - num_behind), rounded[-1] + 1))
    return tuple(end - begin for begin, end in itertools.pairwise(rounded))


def _check_ratios(name: str, ratios: tuple[float, ...]) -> tuple[float, ...]:
    """Scale ratios to a sum of 1; raise a `ValueError` if one is not above 0, or their sum is not 1 up to rounding."""
    for ratio in ratios:
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ValueError(f"`{name}` has to hold ratios in (0, 1] but got {ratio!r}")
    total = math.fsum(ratios)
    if abs(total - 1) > _RATIO_TOLERANCE:
        raise ValueError(f"`{name}` has to hold ratios that sum to 1 but got {list(ratios)}, which sum to {total:g}")
    return tuple(ratio / total for ratio in ratios)


def check_lengths(name: str, lengths: tuple[object, ...], length: int) -> Partition:
    """Return the lengths of slices; raise a `ValueError` if they are not integers above 0 that sum to `length`."""
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
