"""Which tokens a step attends to, by the C kernels: scores from codes, the largest of them, and what weighs most.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N tokens, P bytes of a token's codes, R
tokens that are attended to anyway.
"""

import ctypes

import torch

from kvcache_plugins.codecs.quantization import packed_size

from .layer import MOST_CHANNELS
from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run


# Tokens of a task
_TOKENS_PER_TASK = 2048
# The most that a level has, in numbers
_LANES = 16


class _CodeScores(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("groups", "dim", "fields", "width", "capacity", "length", "runs", "run_tokens")),
        *((name, ADDRESS) for name in ("query", "codes", "scale", "scores")),
    )


class _Largest(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("threads", "length", "limit")),
        *((name, ADDRESS) for name in ("numbers", "least", "values", "places", "pairs")),
    )


class _Choice(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("threads", "groups", "length", "num_resident")),
        *((name, LONG) for name in ("first", "newest", "cap", "limit")),
        ("least", ctypes.c_double),
        *((name, ADDRESS) for name in ("scores", "resident", "slots", "counts", "scratch")),
        ("scratch_size", LONG),
    )


def check_codes(nbits: int, head_dim: int, width: int) -> None:
    """
    Checks that codes of D channels in P bytes are what integer products take.

    Raises:
        ValueError: if they are not.
    """
    if nbits not in (2, 4, 8) or head_dim > MOST_CHANNELS or width != packed_size(head_dim, nbits):
        raise ValueError(
            f"{width} bytes of codes of {head_dim} channels in `nbits` {nbits}, which has to be 2, 4 or 8"
        )


@torch.compiler.disable
def code_scores(
    query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, length: int, nbits: int
) -> torch.Tensor:
    """Computes `ops.gather.code_scores` of up to `MOST_CHANNELS` channels."""
    batch_size, num_heads, groups, head_dim = query.shape
    capacity, width, runs = codes.shape[2], codes.shape[3], -(-length // _TOKENS_PER_TASK)
    check_codes(nbits, head_dim, width)
    if not 0 <= length <= capacity:
        raise ValueError(f"`length` has to be from 0 to {capacity}, but got {length}")
    # Names keep alive what is handed over by address
    query, codes, scale = query.float().contiguous(), codes.contiguous(), scale.contiguous()
    scores = torch.empty((batch_size, num_heads, groups, length))
    call = _CodeScores(
        Tasks(0, batch_size * num_heads * runs, 0),
        *(groups, head_dim, 8 // nbits, width, capacity, length, runs, _TOKENS_PER_TASK),
        query.data_ptr(),
        address_of("codes", codes, torch.uint8, (batch_size, num_heads, capacity, width)),
        address_of("scale", scale, torch.float16, (batch_size, num_heads, capacity)),
        scores.data_ptr(),
    )
    run(function("code_scores"), call, min(num_threads(), call.tasks.count))
    return scores


@torch.compiler.disable
def largest(numbers: torch.Tensor, limit: int, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `ops.gather.largest`; `least` has as many numbers as there are rows."""
    length, num_rows = numbers.shape[-1], least.numel()
    shape = (*numbers.shape[:-1], limit)
    numbers, least = numbers.contiguous().view(num_rows, length), least.contiguous().view(num_rows)
    values, places = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    threads = max(min(num_threads(), num_rows), 1)
    pairs = torch.empty(threads * 2 * (length + 1), dtype=torch.int64)
    call = _Largest(
        Tasks(0, num_rows, 0),
        *(0, length, limit),
        address_of("numbers", numbers, torch.float32, (num_rows, length)),
        address_of("least", least, torch.float32, (num_rows,)),
        *(values.data_ptr(), places.data_ptr(), pairs.data_ptr()),
    )
    run(function("largest"), call, threads)
    return values, places


@torch.compiler.disable
def choose_heaviest(
    scores: torch.Tensor,
    resident_scores: torch.Tensor,
    forced: tuple[int, int],
    least: float,
    cap: int,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tokens whose weight, their probability averaged over the query heads of a key/value head, is large enough.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, N]`):
            Scores of the tokens, float32.
        resident_scores (`torch.Tensor` of shape `[B, H, G, R]`):
            The same of the tokens that are attended to anyway; R may be 0.
        forced (`tuple[int, int]`):
            The tokens before the first number, and from the second on, are chosen whatever they weigh.
        least (`float`):
            The least weight of others.
        cap (`int`):
            The most that are chosen, unless more are forced.
        limit (`int`):
            The most that there is room for.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: tokens `[B, H, limit]`, int64, forced ones first and then those that weigh
        most, with zeros behind them; and how many they are, `[B, H]`, int64.
    """
    batch_size, num_heads, groups, length = scores.shape
    heads, num_resident = (batch_size, num_heads), resident_scores.shape[3]
    # Names keep alive what is handed over by address
    scores, resident_scores = scores.contiguous(), resident_scores.contiguous()
    slots = torch.empty((*heads, limit), dtype=torch.int64)
    count = torch.empty(heads, dtype=torch.int64)
    threads = max(min(num_threads(), batch_size * num_heads), 1)
    # Two rows of floats in whole vectors, two of pairs
    scratch_size = 8 * (length + _LANES) + 16 * (length + 1)
    scratch = torch.empty(threads * scratch_size, dtype=torch.uint8)
    call = _Choice(
        Tasks(0, batch_size * num_heads, 0),
        *(0, groups, length, num_resident, *(max(bound, 0) for bound in forced), cap, limit, least),
        address_of("scores", scores, torch.float32, (*heads, groups, length)),
        address_of("resident_scores", resident_scores, torch.float32, (*heads, groups, num_resident)),
        *(slots.data_ptr(), count.data_ptr(), scratch.data_ptr(), scratch_size),
    )
    run(function("choose_heaviest"), call, threads)
    return slots, count
