"""Look-up table of the paper: partitions that were found for some lengths, and what they were found with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_json_record, write_json_record
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.option_checks import check_bool, check_integer, check_number

from .cost import CostModel, Link, Timing


FORMAT = Format("kvcache_plugins.kv_runahead", 2, "plan and save anew")
# What the sum of ratios may differ from 1 by: a third rounded to three digits, three times
RATIO_TOLERANCE = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """
    The partition of one length.

    Attributes:
        length (`int`): tokens of the context.
        ratios (`tuple[float, ...]`): share of each rank, summing to 1; fewer than ranks where fewer are faster.
        seconds (`float`): time to first token.
        measured (`bool`): whether `seconds` was measured; else it was predicted.
    """

    length: int
    ratios: tuple[float, ...]
    seconds: float
    measured: bool

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        object.__setattr__(self, "ratios", check_ratios("ratios", tuple(self.ratios)))
        if len(self.ratios) > self.length:
            raise ValueError(f"`ratios` are {len(self.ratios)}, more than the {self.length} tokens of `length`")
        check_number("seconds", self.seconds, above=0.0)
        check_bool("measured", self.measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable:
    """
    Partitions for some lengths, of one model on one number of ranks.

    Attributes:
        model (`str`): fingerprint of the model, see `fingerprint`.
        world_size (`int`): ranks that the partitions are for.
        entries (`tuple[TableEntry, ...]`): one at least, sorted by length.
        timings (`tuple[Timing, ...]`): what `cost` was fitted to.
        cost (`CostModel`, *optional*): what predicted entries were planned with.
        link (`Link`, *optional*): the link between ranks, as measured.
        machine (`str`): the machine in words.
        date (`str`): when it was made.
        versions (`dict[str, str]`): of the packages behind it.
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
        object.__setattr__(self, "timings", tuple(self.timings))

    def document(self) -> dict[str, Any]:
        """Returns what `save` writes, less its checksum."""
        return FORMAT.stamp(asdict(self))

    def save(self, path: str | Path) -> None:
        """Writes the table to a JSON file, which takes its place when it is complete."""
        write_json_record(path, FORMAT, self)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, world_size: int) -> PartitionTable:
        """
        Reads a table that `save` wrote.

        Args:
            path (`str` or `Path`): the JSON file.
            model (`PreTrainedModel`): the model that is to be prefilled.
            world_size (`int`): the ranks that are to do it.

        Raises:
            ValueError: naming the file, if it is missing, damaged, or of another version, model or number of ranks.
        """
        with refusals("partition", path):
            table = read_json_record(path, FORMAT, cls)
            if table.model != fingerprint(model):
                raise RefusedFile("was made for another model, or for the same one in another dtype")
            if table.world_size != world_size:
                raise RefusedFile(f"was made for {table.world_size} ranks, but there are {world_size}")
        return table


def check_ratios(name: str, ratios: tuple[float, ...]) -> tuple[float, ...]:
    """Scales ratios to a sum of 1. Any not above 0, or a sum beyond rounding, is a `ValueError` naming `name`."""
    for ratio in ratios:
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ValueError(f"`{name}` has to hold ratios in (0, 1] but got {ratio!r}")
    total = math.fsum(ratios)
    if abs(total - 1) > RATIO_TOLERANCE:
        raise ValueError(f"`{name}` has to hold ratios that sum to 1 but got {list(ratios)}, which sum to {total:g}")
    return tuple(ratio / total for ratio in ratios)
