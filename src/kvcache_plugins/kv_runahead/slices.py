"""Lengths of the slices that a context is cut into, first rank first: they sum to its length, and none is 0."""

import itertools
from collections.abc import Iterable, Sequence


Partition = tuple[int, ...]


def even(length: int, num_ranks: int) -> Partition:
    """Slices of one length, the first ones longer by a token where it does not divide."""
    check_length(length, num_ranks)
    share, left = divmod(length, num_ranks)
    return tuple(share + (rank < left) for rank in range(num_ranks))


def by_ratios(length: int, ratios: Sequence[float]) -> Partition:
    """
    Slices by their shares of the length.

    Raises:
        ValueError: if there are fewer tokens than ratios.
    """
    check_length(length, len(ratios))
    return rounded(ratio * length for ratio in ratios)


def rounded(lengths: Iterable[float]) -> Partition:
    """Whole slice lengths with the boundaries of real ones to the nearest token, each slice 1 at least."""
    ends = list(itertools.accumulate(lengths))
    length, boundaries = round(ends[-1]), [0]
    for left, end in zip(range(len(ends) - 1, -1, -1), ends, strict=True):
        boundaries.append(max(min(round(end), length - left), boundaries[-1] + 1))
    return tuple(end - begin for begin, end in itertools.pairwise(boundaries))


def checked_lengths(name: str, lengths: tuple[object, ...], length: int) -> Partition:
    """The lengths, if they are integers above 0 that sum to `length`; else a `ValueError` naming `name`."""
    whole = tuple(each for each in lengths if isinstance(each, int) and not isinstance(each, bool) and each >= 1)
    if not lengths or len(whole) < len(lengths):
        raise ValueError(f"`{name}` has to hold integers of at least 1, or ratios as floats, but got {list(lengths)}")
    if sum(whole) != length:
        raise ValueError(f"`{name}` has to sum to the context's {length} tokens but got {list(whole)}, {sum(whole)}")
    return whole


def check_length(length: int, num_ranks: int) -> None:
    """Raises a `ValueError` if there are fewer tokens than ranks."""
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` has to be at least 1 but got {num_ranks}")
    if length < num_ranks:
        raise ValueError(
            f"the context has {length} tokens, but each of {num_ranks} ranks needs one at least: use fewer ranks"
        )
