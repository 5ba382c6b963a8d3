"""Which slice of the context each rank prefills: what a user gave, or what a table or a cost model says.

Fewer slices than ranks leave ranks without work, which over a slow link can be faster.
"""

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from .cost import CostModel
from .grid_search import searched
from .measurements import Link
from .planning import planned
from .slices import Partition, by_ratios, check_length, checked_lengths, even
from .table import PartitionTable, check_ratios


__all__ = ["NAMES", "even", "planned", "predicted", "resolve_partition", "searched"]

NAMES = ("even", "planned")


def predicted(length: int, table: PartitionTable) -> Partition:
    """
    Slices by a look-up table: ratios interpolated linearly between the two nearest lengths.

    A length outside of the table takes the ratios of its nearest; so does one between entries of different numbers of
    slices.

    Raises:
        ValueError: if there are fewer tokens than ratios.
    """
    entries = table.entries
    above = next((index for index, entry in enumerate(entries) if entry.length >= length), len(entries) - 1)
    upper, lower = entries[above], entries[max(above - 1, 0)]
    if length >= upper.length:
        return by_ratios(length, upper.ratios)
    if length <= lower.length:
        return by_ratios(length, lower.ratios)
    weight = (length - lower.length) / (upper.length - lower.length)
    if len(lower.ratios) != len(upper.ratios):
        return by_ratios(length, (upper if weight > 0.5 else lower).ratios)
    pairs = zip(lower.ratios, upper.ratios, strict=True)
    return by_ratios(length, [first + weight * (second - first) for first, second in pairs])


def resolve_partition(
    partition: str | Sequence[int] | Sequence[float] | PartitionTable | None,
    length: int,
    num_ranks: int,
    *,
    model: PreTrainedModel | PreTrainedConfig | None = None,
    cost: CostModel | None = None,
    link: Link | None = None,
    bytes_per_token: float | None = None,
    num_layers: int | None = None,
) -> Partition:
    """
    Slice lengths from what a user gave.

    Args:
        partition (`str`, `tuple[int, ...]`, `tuple[float, ...]` or `PartitionTable`, *optional*):
            `"even"`; lengths that sum to `length`; ratios that sum to 1; a look-up table; `"planned"` or nothing for
            `planned` by `cost`, or by the shapes of `model` where there is none.
        length (`int`): tokens of the context.
        num_ranks (`int`): ranks there are; lengths and ratios may be fewer.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*): for planning without `cost`.
        cost, link, bytes_per_token, num_layers (*optional*): as for `planned`; a link needs `cost`.

    Raises:
        ValueError: if `partition` is none of these, does not fit `length` or has more slices than there are ranks.
    """
    check_length(length, num_ranks)
    if partition is None or partition == "planned":
        if cost is None:
            if model is None or link is not None:
                raise ValueError("`partition` is to be planned, for which `cost` is needed, or `model` and no `link`")
            cost = CostModel.of_shapes(model)
        return planned(length, num_ranks, cost, link=link, bytes_per_token=bytes_per_token, num_layers=num_layers)
    if partition == "even":
        return even(length, num_ranks)
    if isinstance(partition, PartitionTable):
        if partition.world_size != num_ranks:
            raise ValueError(f"`partition` is a table for {partition.world_size} ranks, but there are {num_ranks}")
        return predicted(length, partition)
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ValueError(
            f"`partition` has to be one of {list(NAMES)}, slice lengths, ratios or a `PartitionTable`, but got "
            f"{partition!r}"
        )
    if len(partition) > num_ranks:
        raise ValueError(f"`partition` has {len(partition)} slices, but there are {num_ranks} ranks")
    ratios = tuple(each for each in partition if isinstance(each, float))
    if partition and len(ratios) == len(partition):
        return by_ratios(length, check_ratios("partition", ratios))
    return checked_lengths("partition", tuple(partition), length)
