"""What instructions allow at best on an H200, and a result's row of them."""

from collections import Counter
from typing import Any

from .compilation import resources


# Of an H200: 132 multiprocessors at 1.8 GHz copy 4.3 TB/s, and issue four warp instructions a clock each
_CLOCKS_A_DENSE_NUMBER = 2 * 132 * 1.8e9 / 4.3e12
_SLOTS, _DENSE_BITS = 4, 16


def counted_row(
    names: dict[str, Any],
    compiled: Any,
    kinds: Counter[str],
    num_numbers: float,
    bits: float,
    *,
    num_dense_bits: int = 0,
) -> dict[str, Any]:
    """
    A row of `bench machine-code`: instructions a number by kind, what the kernel takes, and the bounds.

    Args:
        names (`dict[str, Any]`): what was counted; first in the row.
        compiled (`Any`): the kernel, see `compile_for`.
        kinds (`Counter[str]`): warp instructions by kind.
        num_numbers (`float`): numbers that these are for.
        bits (`float`): of a number in codes.
        num_dense_bits (`int`, *optional*, defaults to 0): bits a number that are moved besides. Then it is no cache
            that is read, and there is no bound beside a dense one.
    """
    instructions = sum(kinds.values()) / num_numbers
    moved = _CLOCKS_A_DENSE_NUMBER * (num_dense_bits + bits) / _DENSE_BITS
    issue = instructions / _SLOTS
    return {
        **names,
        **resources(compiled),
        "instructions_a_number": instructions,
        "kinds": {kind: number / num_numbers for kind, number in kinds.most_common()},
        "bits_a_number": bits,
        "share_of_copy_bandwidth": min(1.0, moved / issue),
        "times_dense": None if num_dense_bits else _CLOCKS_A_DENSE_NUMBER / max(moved, issue),
    }
