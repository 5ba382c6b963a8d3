"""Bytes of a long prompt, told from those of three shorter ones.

What a cache stores of a prompt goes by groups, pages and tiles of tokens, and by shares of their number. Prompts whose
lengths differ by a multiple of all of these differ by the same bytes in each part. Whether a cache is of that kind is
seen from the three: if the second step is not like the first, in every part, nothing is told.
"""

from collections.abc import Mapping, Sequence

from kvcache_plugins.reports.memory import MemoryReport


# Tokens: a multiple of every size of group, page and tile that there is, and of hundredths of which there are a
# whole number
PERIOD = 1024 * 25


def continue_line(reports: Sequence[MemoryReport], num_periods: int) -> MemoryReport | None:
    """
    The report of a prompt of `num_periods` periods and a rest.

    Args:
        reports (`Sequence[MemoryReport]`): of one, two and three periods and the same rest.
        num_periods (`int`): how many.

    Returns:
        `MemoryReport`, *optional*: `None` if the three are not on a straight line.
    """
    parts = _continue([report.parts for report in reports], num_periods)
    devices = _continue([report.devices for report in reports], num_periods)
    sizes = _continue(
        [{"dense_bytes": report.dense_bytes, "num_values": report.num_values} for report in reports], num_periods
    )
    if parts is None or devices is None or sizes is None:
        return None
    return MemoryReport(parts=parts, devices=devices, shared=reports[-1].shared, **sizes)


def _continue(sizes: Sequence[Mapping[str, int]], num_periods: int) -> dict[str, int] | None:
    first, second, third = sizes
    if not first.keys() == second.keys() == third.keys():
        return None
    steps = {name: second[name] - first[name] for name in first}
    if any(third[name] - second[name] != step for name, step in steps.items()):
        return None
    return {name: first[name] + (num_periods - 1) * step for name, step in steps.items()}
