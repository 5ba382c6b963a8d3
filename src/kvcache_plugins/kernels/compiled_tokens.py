"""Tokens scored, chosen, gathered and attended to by the C kernels: what these are told.

What is said of stored tokens of which some are chosen is checked once and kept beside them: in a model's step all that
is touched comes from memory.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, T tokens, N tokens with
codes, P bytes of a token's codes, R bytes of a row, K slots, W tokens of the window.
"""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.codecs.parts import RowTokens, SinkStates
from kvcache_plugins.codecs.quantization import packed_size
from kvcache_plugins.files.mapped_files import address_of_advise

from .compiled import AttentionCall, TokenWriter, angles_by_tile, as_numbers, kind_of_tokens, places
from .library import find_threads, function, num_threads, run
from .structs import KINDS, MOST_CHANNELS, ROWS, TILE, Structure, make


_MOST_LANES = 16
# Tokens of a task that scores
_TOKENS_PER_TASK = 2048
# Of keys and tokens that live
_TOKENS: "WeakKeyDictionary[RowTokens, Structure]" = WeakKeyDictionary()


@torch.compiler.disable
def code_scores(
    query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, length: int, nbits: int
) -> torch.Tensor:
    """Computes `tokens.code_scores` of up to `MOST_CHANNELS` channels."""
    batch_size, num_heads, groups, head_dim = query.shape
    capacity, width, runs = codes.shape[2], codes.shape[3], -(-length // _TOKENS_PER_TASK)
    _check_codes(nbits, head_dim, width)
    if not 0 <= length <= capacity:
        raise ValueError(f"`length` has to be from 0 to {capacity}, but got {length}")
    scores = torch.empty((batch_size, num_heads, groups, length))
    call = make(
        "CodeScores",
        {"batch": batch_size, "heads": num_heads, "groups": groups, "dim": head_dim, "fields": 8 // nbits},
        {"width": width, "capacity": capacity, "length": length, "runs": runs, "run_tokens": _TOKENS_PER_TASK},
        {"query": query.float().contiguous(), "codes": codes.contiguous(), "scale": scale.contiguous()},
        scores=scores,
    )
    run("code_scores", call, batch_size * num_heads * runs)
    return scores


def _check_codes(nbits: int, head_dim: int, width: int) -> None:
    """Checks that codes of D channels in P bytes are what integer products take."""
    if nbits not in (2, 4, 8) or head_dim > MOST_CHANNELS or width != packed_size(head_dim, nbits):
        raise ValueError(
            f"{width} bytes of codes of {head_dim} channels in `nbits` {nbits}, which has to be 2, 4 or 8"
        )


@torch.compiler.disable
def score_rows(query: torch.Tensor, tokens: RowTokens) -> torch.Tensor:
    """Computes `tokens.score_rows` of up to `MOST_CHANNELS` channels."""
    stored, length = _stored(query, tokens), tokens.length
    scores, runs = torch.empty((*query.shape[:3], length)), -(-length // _TOKENS_PER_TASK)
    call = make(
        "RowScores",
        _sizes_of(query),
        {"runs": runs, "length": length, "scale": 1.0, "scores": scores},
        query=query.float().contiguous(),
        rows=stored.given["rows"],
    )
    run("score_rows", call, _num_units(query) * runs)
    return scores


@torch.compiler.disable
def largest(numbers: torch.Tensor, limit: int, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `tokens.largest`; `least` has as many numbers as there are rows."""
    length, num_rows, threads = numbers.shape[-1], least.numel(), num_threads()
    shape = (num_rows, limit)
    values, places = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    call = make(
        "Largest",
        {"rows": num_rows, "length": length, "limit": limit, "most_threads": threads},
        {"numbers": numbers.contiguous().view(num_rows, length), "least": least.contiguous().view(num_rows)},
        {"values": values, "places": places, "pairs": torch.empty((threads, 2, length + 1), dtype=torch.int64)},
    )
    run("largest", call, num_rows, threads)
    return values.view(*numbers.shape[:-1], limit), places.view(*numbers.shape[:-1], limit)


def _choice_scratch(length: int, num_resident: int = 0, groups: int = 0) -> int:
    """Counts bytes of two rows of floats in whole vectors, two of pairs, and scores of a window; in whole words."""
    return 8 * (length + _MOST_LANES) + 16 * (length + 1) + 8 * (-(-num_resident * groups // 2))


class ChoiceBounds(NamedTuple):
    """
    What is chosen in a step by weight; see `choose_heaviest`.

    Attributes:
        first, newest (`int`): tokens before the first number, and from the second on, are chosen in any case.
        least (`float`): the least weight of others.
        cap, limit (`int`): the most that are chosen unless more are forced, and that there is room for.
    """

    first: int
    newest: int
    least: float
    cap: int
    limit: int


@torch.compiler.disable
def choose_heaviest(
    scores: torch.Tensor, resident_scores: torch.Tensor, bounds: ChoiceBounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Chooses tokens whose weight, their probability averaged over the query heads of a key/value head, is large enough,
    by their scores `[B, H, G, N]`, float32, and those of tokens that are attended to anyway, `[B, H, G, any]`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: tokens `[B, H, limit]`, int64, forced ones first and then those that weigh
        most, with zeros behind them; and how many they are, `[B, H]`, int64.
    """
    (batch_size, num_heads, groups, length), limit = scores.shape, bounds.limit
    slots = torch.empty((batch_size, num_heads, limit), dtype=torch.int64)
    count, threads = torch.empty((batch_size, num_heads), dtype=torch.int64), num_threads()
    scratch_size = _choice_scratch(length)
    call = make(
        "Choice",
        {"batch": batch_size, "heads": num_heads, "groups": groups, "length": length, "most_threads": threads},
        {"num_resident": resident_scores.shape[3], "first": max(bounds.first, 0), "newest": max(bounds.newest, 0)},
        {
            "cap": bounds.cap,
            "limit": limit,
            "least": bounds.least,
            "slots": slots,
            "counts": count,
            "scratch_size": scratch_size,
        },
        {"scores": scores.contiguous(), "resident": resident_scores.contiguous()},
        scratch=torch.empty((threads, scratch_size), dtype=torch.uint8),
    )
    run("choose_heaviest", call, batch_size * num_heads, threads)
    return slots, count


class ChoosingCall(TokenWriter):
    """
    A step over `length` tokens that stay what they are, described once for queries like `query`: scores of all, the
    choice, and attention over what was chosen and a window `[B, H, any, D or E]` that grows. What does not change is
    checked here, and only addresses of queries, results and the window are written for each step.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`), scale (`float`, *optional*): of queries like those to come.
        length (`int`): N, tokens to choose from.
        scores (`tuple[str, str, Structure]`): the kernel that scores them, its structure's name, and that.
        rows (`tuple[str, str, Structure]`): the same of the kernel that attends to some of them.
        window (two `torch.Tensor`): the storage of the newest tokens.
        dtype (`torch.dtype`): of exact tokens.
        alive (`object`, *optional*): what keeps memory that the structures point to, if they do not.
    """

    def __init__(
        self,
        query: torch.Tensor,
        scale: float,
        length: int,
        scores: tuple[str, str, Structure],
        rows: tuple[str, str, Structure],
        window: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        alive: object = None,
    ):
        self._kept = alive
        sizes, value_dim = _sizes_of(query), window[1].shape[3]
        units = sizes["batch"] * sizes["heads"]
        own = (*query.shape[:2], query.shape[3], dtype, True), (*query.shape[:2], value_dim, dtype, True)
        if tuple(map(kind_of_tokens, window)) != own:
            raise ValueError(f"tokens of {dtype} and a window of {[kind_of_tokens(each) for each in window]}")
        self._shape, self._value_dim, self._length, self._units = query.shape, value_dim, length, units
        self._exact_dtype, self._kind = dtype, own
        one = *query.shape[:2], 1
        self._newest_shapes = torch.Size((*one, query.shape[3])), torch.Size((*one, value_dim))
        self._storage: tuple[torch.Tensor, torch.Tensor] | None = None
        self._capacity, self._scale, self._origin = 0, scale, _threads_now()
        self._threads = num_threads()
        choice = make(
            "Choice",
            {**sizes, "value_dim": value_dim, "length": length, "most_threads": self._threads, "scale": scale},
        )
        choice.tasks.count, rows[2].tasks.count = units, _num_units(query)
        calls = scores, ("choose_heaviest", "Choice", choice), rows
        self._calls = [
            (function(kernel), call.address, min(self._threads, call.tasks.count)) for kernel, _, call in calls
        ]
        self._alive = [call for *_, call in calls]
        self._scores, self._choice, self._rows = map(as_numbers, self._alive)
        self._at_scores, self._at_rows = places(scores[1]), places(rows[1])
        self._choice_floats = memoryview(choice).cast("B").cast("d")
        # Bytes for slots that are sorted, of all threads, for each that can be chosen and for all
        is_sorted = rows[1] == "Chosen"
        self._sorted_size = (16 * self._threads, 8 * self._threads * rows[2].num_tiles) if is_sorted else (0, 0)
        # Of a step before
        self.num_chosen = 0

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a layer makes its own: addresses in a call are of what was copied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def attend(
        self,
        query: torch.Tensor,
        scale: float | None,
        window: tuple[torch.Tensor, torch.Tensor],
        length: int,
        newest: tuple[torch.Tensor, torch.Tensor] | None,
        bounds: ChoiceBounds,
    ) -> torch.Tensor | None:
        """
        Attends with the queries of one new token, `[B, H * G, 1, D]` or another shape of so many numbers.

        Args:
            window (two `torch.Tensor` of shape `[B, H, at least W, D or E]`): the window's storage now.
            length (`int`): W, its tokens in use, with the newest.
            newest (two `torch.Tensor` of shape `[B, H, 1, D or E]`, *optional*): the last of them, if it is to be
                written there, as `accept` returned it.

        Returns:
            `torch.Tensor` like the queries, of E channels; `None` if queries, scale or threads are others than those
            that the call was made for. `num_chosen` is then how many tokens were chosen, of all heads.

        Raises:
            ValueError: if the window is not of the dtype and sizes that the call was made for.
        """
        shape, channels = query.shape, self._shape[3]
        if (
            shape[0] != self._shape[0]
            or shape[3] != channels
            or shape[1] * shape[2] != self._shape[1] * self._shape[2]
            or not query.is_cpu
            or (channels**-0.5 if scale is None else scale) != self._scale
            or _threads_now() != self._origin
        ):
            return None
        if window is not self._storage:
            self._take_window(window)
        if not 0 <= length <= self._capacity or (newest is not None and (not length or self.accept(*newest) is None)):
            raise ValueError(f"{length} tokens in use of {self._capacity}, or a newest one of another kind")
        own = query if query.dtype is torch.float32 and query.is_contiguous() else query.float().contiguous()
        result = own.new_empty((*shape[:3], self._value_dim))
        limit, groups, units = bounds.limit, self._shape[2], self._units
        scratch_size, coded_size = _choice_scratch(self._length, length, groups), self._sorted_size[0] * limit
        sizes = 8 * units * limit, 8 * units, self._threads * scratch_size, coded_size, self._sorted_size[1]
        memory = torch.empty(sum(sizes) + 4 * units * groups * self._length, dtype=torch.uint8)
        slots, counts, scratch, coded, ends, scores = accumulate(sizes, initial=memory.data_ptr())
        address, at = own.data_ptr(), self._at_scores
        numbers = self._scores
        numbers[at.next], numbers[at.query], numbers[at.scores] = 0, address, scores
        numbers = self._choice
        numbers[_AT_CHOICE.next] = numbers[_AT_CHOICE.threads] = numbers[_AT_CHOICE.chosen] = 0
        numbers[_AT_CHOICE.first], numbers[_AT_CHOICE.newest] = max(bounds.first, 0), max(bounds.newest, 0)
        numbers[_AT_CHOICE.cap], numbers[_AT_CHOICE.limit] = bounds.cap, limit
        self._choice_floats[_AT_CHOICE.least] = bounds.least
        numbers[_AT_CHOICE.scores], numbers[_AT_CHOICE.query], numbers[_AT_CHOICE.slots] = scores, address, slots
        numbers[_AT_CHOICE.counts], numbers[_AT_CHOICE.scratch] = counts, scratch
        numbers[_AT_CHOICE.scratch_size], numbers[_AT_CHOICE.num_resident] = scratch_size, length
        key, value = (0, 0) if newest is None else (newest[0].data_ptr(), newest[1].data_ptr())
        numbers[_AT_CHOICE.newest_key], numbers[_AT_CHOICE.newest_value] = key, value
        numbers[_AT_CHOICE.window_length] = length
        numbers, at = self._rows, self._at_rows
        numbers[at.next], numbers[at.window_length], numbers[at.query] = 0, length, address
        numbers[at.result], numbers[at.slots], numbers[at.counts] = result.data_ptr(), slots, counts
        if coded_size:
            numbers[at.threads], numbers[at.num_chosen], numbers[at.coded], numbers[at.ends] = 0, limit, coded, ends
        else:
            numbers[at.num_slots], numbers[at.columns] = limit, slots
        for kernel, structure, threads in self._calls:
            if threads == 1:
                kernel(structure)
            else:
                find_threads()(kernel, structure, threads)
        # Once it is written the newest token is nobody's
        self._accepted = None
        self.num_chosen = self._choice[_AT_CHOICE.chosen]
        return result if query.dtype is torch.float32 else result.to(query.dtype)

    def _take_window(self, window: tuple[torch.Tensor, torch.Tensor]) -> None:
        (keys, values), found = window, tuple(map(kind_of_tokens, window))
        if found != self._kind or keys.shape[2] != values.shape[2] or not (keys.is_cpu and values.is_cpu):
            raise ValueError(f"the window has to be {self._kind} on the CPU, as when the call was made, not {found}")
        for structure in self._alive[1:]:
            own = structure.window
            own.kind, own.keys, own.values = KINDS[self._exact_dtype], keys.data_ptr(), values.data_ptr()
            for strides, states in ((own.key_strides, keys), (own.value_strides, values)):
                strides[0], strides[1] = (stride * states.element_size() for stride in states.stride()[:2])
        self._storage, self._capacity = window, keys.shape[2]


def _threads_now() -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


_AT_CHOICE = places("Choice")


def choose_by_codes(
    query: torch.Tensor,
    scale: float,
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    spread: torch.Tensor,
    length: int,
    nbits: int,
    pages: Sequence[torch.Tensor],
    window: tuple[torch.Tensor, torch.Tensor],
) -> ChoosingCall:
    """
    Prepares steps over tokens that are scored by their codes, see `code_scores`, with queries times `spread`
    `[B, H, 1, D]`, and attended to in `pages`, see `attend_rows`.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    sizes, runs, dtype = _sizes_of(query), -(-length // _TOKENS_PER_TASK), pages[0].dtype
    key_dim = sizes.pop("key_dim")
    _check_codes(nbits, key_dim, codes.shape[3])
    if not 0 < length <= codes.shape[2]:
        raise ValueError(f"`length` has to be from 1 to {codes.shape[2]}, but got {length}")
    scores = make(
        "CodeScores",
        {**sizes, "dim": key_dim, "fields": 8 // nbits, "width": codes.shape[3], "capacity": codes.shape[2]},
        {"length": length, "runs": runs, "run_tokens": _TOKENS_PER_TASK, "codes": codes.contiguous(), "by": scale},
        {"scale": code_scales.contiguous(), "spread": spread[:, :, 0].contiguous()},
    )
    scores.tasks.count = sizes["batch"] * sizes["heads"] * runs
    rows = make(
        "Gathered",
        {**sizes, "key_dim": key_dim, "value_dim": window[1].shape[3], "kind": KINDS[dtype], "scale": scale},
        {"num_pages": len(pages), "page_tokens": pages[0].shape[2], "pages": _pages(pages)},
    )
    calls = ("code_scores", "CodeScores", scores), ("attend_gathered", "Gathered", rows)
    return ChoosingCall(query, scale, length, *calls, window, dtype)


def choose_by_rows(
    query: torch.Tensor, scale: float, tokens: RowTokens, window: tuple[torch.Tensor, torch.Tensor]
) -> ChoosingCall:
    """
    Prepares steps over tokens that are scored, see `score_rows`, and attended to, see `attend_chosen`, as rows.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    stored, length, sizes = _stored(query, tokens), tokens.length, _sizes_of(query)
    runs = -(-length // _TOKENS_PER_TASK)
    scores = make("RowScores", sizes, {"runs": runs, "length": length, "scale": scale, "rows": stored.given["rows"]})
    scores.tasks.count = _num_units(query) * runs
    rows = make("Chosen", {**sizes, "scale": scale, "most_threads": num_threads()}, base=stored)
    # Of `stored`, which lives as long as the tokens do; tables of angles in it are of no cache
    for call in (scores, rows):
        call.given, call.alive = {}, None
    calls = ("score_rows", "RowScores", scores), ("attend_chosen", "Chosen", rows)
    return ChoosingCall(query, scale, length, *calls, window, tokens.sinks.keys.dtype, alive=tokens)


@torch.compiler.disable
def attend_rows(
    query: torch.Tensor,
    pages: Sequence[torch.Tensor],
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """
    Attends over chosen rows where they stand, and the window; arguments that are not listed are those of
    `tokens.attend_staged`.

    Args:
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, D + E]`): a key and its value side by
            side.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): which rows of all pages one behind the other; of those
            beyond all, the last one counts.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask.
        positions (`torch.Tensor` of shape `[B, H, K or more]`, int64, *optional*): columns of the mask that the slots'
            tokens have; by default the slots.
    """
    sizes, value_dim, num_slots = _sizes_of(query), window_values.shape[3], slots.shape[2]
    slots, dtype = slots.contiguous(), pages[0].dtype
    result = torch.empty((*query.shape[:3], value_dim))
    columns = slots if mask is None or positions is None else positions[:, :, :num_slots].contiguous()
    call = make(
        "Gathered",
        {**sizes, "value_dim": value_dim, "kind": KINDS[dtype], "num_slots": num_slots, "scale": scale},
        {"num_pages": len(pages), "page_tokens": pages[0].shape[2], "pages": _pages(pages)},
        {"query": query.float().contiguous(), "result": result, "slots": slots, "columns": columns},
        {"counts": count.contiguous(), "window": _window(query, window_keys, window_values, dtype, window_start)},
        mask=_mask(mask, sizes["batch"], window_start + window_keys.shape[2]),
    )
    run("attend_gathered", call, _num_units(query))
    return result if query.dtype is torch.float32 else result.to(query.dtype)


@torch.compiler.disable
def copy_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor, *, are_mapped: bool) -> None:
    """Copies the rows that `tokens.gather_rows` returns into a tensor; the last one for slots beyond all."""
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    if slots.numel() and not page_tokens * len(pages):
        raise ValueError(f"pages without rows for {slots.shape[2]} slots")
    call = make(
        "Copies",
        {"batch": batch_size, "heads": num_heads, "num_slots": slots.shape[2], "num_pages": len(pages)},
        {"page_tokens": page_tokens, "row_dim": row_dim, "row_size": row_dim * out.element_size()},
        {"pages": _pages(pages), "slots": slots.contiguous(), "result": out, "block": mmap.PAGESIZE},
        advise=address_of_advise() if are_mapped else 0,
        let_go=int(mmap.MADV_DONTNEED) if are_mapped else 0,
    )
    if out.dtype != pages[0].dtype:
        raise ValueError(f"rows of {pages[0].dtype} cannot be copied into {out.dtype}")
    run("copy_rows", call, batch_size * num_heads)


def _sizes_of(query: torch.Tensor) -> dict[str, int]:
    return dict(zip(("batch", "heads", "groups", "key_dim"), query.shape, strict=True))


def _num_units(query: torch.Tensor) -> int:
    """Counts units of queries `[B, H, G, D]`, see `layer.h`."""
    batch_size, num_heads, groups, _ = query.shape
    return batch_size * num_heads * -(-groups // ROWS)


def _pages(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes pages readable, which have to be of one dtype."""
    if any(page.dtype != pages[0].dtype for page in pages):
        raise ValueError(f"`pages` have to be of one dtype, but are of {[page.dtype for page in pages]}")
    return [page.contiguous() for page in pages]


def _window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, start: int
) -> Structure:
    """
    Describes the newest tokens `[B, H, W, D or E]`, which follow each other in every head; heads may be strides apart,
    within the tensor's own memory. `start` is the first one's column of the mask.

    Raises:
        ValueError: if they are of another shape, or not on the CPU.
    """
    shape = *query.shape[:2], keys.shape[2]
    strides: dict[str, Any] = {}
    alive = []
    for name, states, dim in (("key", keys, query.shape[3]), ("value", values, values.shape[3])):
        if states.shape != (*shape, dim) or not states.is_cpu:
            wanted = f"`window_{name}s` has to be {(*shape, dim)} on the CPU"
            raise ValueError(f"{wanted}, but got {tuple(states.shape)} on {states.device}")
        states = states if states.dtype is dtype else states.to(dtype)
        states = states if states.stride()[2:] == (dim, 1) else states.contiguous()
        strides[f"{name}_strides"] = tuple(stride * states.element_size() for stride in states.stride()[:2])
        strides[f"{name}s"] = states.data_ptr()
        alive.append(states)
    window = make("Window", strides, length=keys.shape[2], kind=KINDS[dtype], start=start)
    window.alive = alive
    return window


def _mask(mask: torch.Tensor | None, batch_size: int, stop: int) -> Structure:
    """Describes a mask `[B, tokens]`, boolean or added to scores, which has to have columns up to `stop`."""
    if mask is None:
        return make("Mask")
    mask = (mask if mask.dtype == torch.bool else mask.float()).contiguous()
    if mask.shape[1] < max(stop, 1):
        raise ValueError(f"`mask` has to have at least {max(stop, 1)} columns, but got {mask.shape[1]}")
    is_boolean = mask.dtype == torch.bool
    return make("Mask", sizes={"batch": batch_size}, columns=mask.shape[1], is_boolean=is_boolean, numbers=mask)


@torch.compiler.disable
def attend_chosen(
    query: torch.Tensor,
    tokens: RowTokens,
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """
    Attends over chosen tokens, of which exact ones are in the window's dtype, and the window, as `attend_rows` does;
    slots are columns of the mask.
    """
    stored, sizes, threads, num_chosen = _stored(query, tokens), _sizes_of(query), num_threads(), slots.shape[2]
    window = _window(query, window_keys, window_values, tokens.sinks.keys.dtype, window_start)
    result = torch.empty((*query.shape[:3], stored.value_dim))
    coded = torch.empty((threads, 2, num_chosen), dtype=torch.int64)
    ends = torch.empty((threads, stored.num_tiles), dtype=torch.int64)
    # A copy, as another thread may attend to the same tokens
    call = make(
        "Chosen",
        {**sizes, "num_chosen": num_chosen, "scale": scale, "most_threads": threads, "window": window},
        {"query": query.float().contiguous(), "slots": slots.contiguous(), "counts": count.contiguous()},
        {"result": result, "coded": coded, "ends": ends},
        mask=_mask(mask, sizes["batch"], window_start + window_keys.shape[2]),
        base=stored,
    )
    run("attend_chosen", call, _num_units(query), threads)
    return result if query.dtype is torch.float32 else result.to(query.dtype)


def _stored(query: torch.Tensor, tokens: RowTokens) -> Structure:
    """Describes tokens, which queries `[B, H, G, D]` have to fit, and keeps that while they live."""
    stored = _TOKENS.get(tokens)
    if stored is None:
        stored = _TOKENS[tokens] = make("Chosen", _row_fields(tokens), _sink_fields(tokens.sinks))
    if (query.shape[0], query.shape[1], query.shape[3]) != (stored.batch, stored.heads, stored.key_dim):
        raise ValueError(f"queries {tuple(query.shape)} for tokens of {stored.heads} heads of {stored.key_dim}")
    return stored


def _sink_fields(sinks: SinkStates) -> dict[str, Any]:
    if sinks.keys.dtype not in KINDS or sinks.values.dtype is not sinks.keys.dtype:
        raise ValueError(f"exact keys and values of {sinks.keys.dtype} and {sinks.values.dtype}")
    first = torch.zeros(len(sinks.keys), dtype=torch.int64) if sinks.first is None else sinks.first.cpu().long()
    states = {"sink_keys": sinks.keys.contiguous(), "sink_values": sinks.values.contiguous()}
    return {"num_sinks": sinks.keys.shape[2], "first_sinks": first.contiguous(), **states}


def _row_fields(tokens: RowTokens) -> dict[str, Any]:
    (batch_size, num_heads, *_), positions = tokens.keys.shape, tokens.positions
    keys, values = tokens.codec.tables(tokens.keys.device)
    whole = AttentionCall(torch.empty(batch_size, num_heads, 1, keys.head_dim), num_heads, values.head_dim, 1.0)
    rows = whole.rows_of(tokens.keys, None, tokens.codec, positions, tokens.length)
    num_far = 2 ** ((positions.first + tokens.length) // TILE).bit_length()
    near, far = angles_by_tile(tokens.codec.rope, num_far)
    padding = None if positions.padding is None else positions.padding.cpu().long().contiguous()
    return {
        **{"batch": batch_size, "heads": num_heads, "key_dim": keys.head_dim, "value_dim": values.head_dim},
        **{"rows": rows, "all_pairs": rows.all_pairs, "near": near, "far": far},
        **{"num_slots": tokens.length, "num_tiles": -(-tokens.length // TILE), "num_far": num_far},
        **{"first_position": positions.first, "padding": padding, "value_size": values.row_size},
        **{"num_pages": len(tokens.pages), "page_tokens": tokens.pages[0].shape[2], "pages": _pages(tokens.pages)},
    }
