"""Tokens coded and decoded, scored, chosen, gathered and attended to by the C kernels: what these are told.

What is said of stored tokens of which some are chosen is checked once and kept beside them: in a model's step all that
is touched comes from memory.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, T tokens, N tokens with
codes, P bytes of a token's codes, R bytes of a row, K slots, W tokens of the window.
"""

import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.parts import RowTokens, SinkStates
from kvcache_plugins.codecs.quantization import packed_size
from kvcache_plugins.codecs.quantizers import BLOCK, MAX_WIDTH, NUM_STATES, QUANTIZERS, state_points, thresholds
from kvcache_plugins.codecs.rope import Positions, RotaryLayout, channels_of
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.codecs.rows import RowTable, scale_of
from kvcache_plugins.files.mapped_files import address_of_advise

from .compiled import AttentionCall, angles_by_tile
from .library import num_threads, run
from .structs import KINDS, MOST_CHANNELS, ROWS, TILE, Structure, make


# As in `coding.h` and `coding.c`
_NUM_WIDTHS = MAX_WIDTH + 1
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
_TASK_TOKENS = 128
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = NUM_STATES // 2
# Tokens of a task that scores
_TOKENS_PER_TASK = 2048
# Of tables, keys and tokens that live
_CODINGS: "WeakKeyDictionary[RowTable, Structure]" = WeakKeyDictionary()
_TOKENS: "WeakKeyDictionary[RowTokens, Structure]" = WeakKeyDictionary()


@torch.compiler.disable
def code(
    name: str,
    states: torch.Tensor,
    rows: torch.Tensor | None,
    positions: Positions | None,
    layout: RotaryLayout | None,
    table: RowTable | None = None,
    **others: Any,
) -> None:
    """
    Runs one of the kernels of `coding.c`.

    Args:
        name (`str`): `"encode_rows"`, `"decode_rows"`, `"turn_states"` or `"measure_channels"`.
        states (`torch.Tensor` of shape `[B, H, T, K]`): states of any floating dtype, of which `"decode_rows"` writes
            float32: components where the table has a basis, without their mean where they are rotated.
        rows (`torch.Tensor` of shape `[B, H, T, R]`, *optional*): rows, written by `"encode_rows"`.
        positions (`Positions`, *optional*): of the tokens; without them keys are left as they are before RoPE.
        layout (`RotaryLayout`, *optional*): the rotary embedding of keys.
        table (`RowTable`, *optional*): how rows are coded.
        **others: what the kernel writes and reads besides, by field.

    Raises:
        ValueError: if tensors do not fit each other or the table.
    """
    shape, threads = states.shape, None
    fields: dict[str, Any] = {"is_back": name != "decode_rows", **others}
    if name == "decode_rows":
        assert rows is not None
        fields |= {"rows": rows.contiguous(), "result": states}
    else:
        states = states if states.dtype in KINDS else states.float()
        states = states if states.stride(3) == 1 and states.is_cpu else states.cpu().contiguous()
        fields |= {"states": states.data_ptr(), "strides": states.stride()[:3], "kind": KINDS[states.dtype]}
        fields["rows"] = rows
    # In a basis keys are turned by themselves
    if positions is not None and layout is not None and layout.frequencies and (table is None or table.basis is None):
        head_dim = shape[3] if table is None else table.head_dim
        if layout.head_dim != head_dim:
            raise ValueError(f"keys of {head_dim} channels, a rotary embedding of {layout.head_dim}")
        # Tiles of positions up to the last token's, and as many below 0, where padding is
        tiles = 2 ** ((positions.first + shape[2]) // TILE).bit_length()
        padding = None if positions.padding is None else positions.padding.long().contiguous()
        fields |= {"rotary": _rotary(layout, tiles), "start": positions.first, "padding": padding}
    if table is None:
        base, fields["rotation"] = None, 1
        fields |= {"batch": shape[0], "heads": shape[1], "dim": shape[3]}
    else:
        base = _CODINGS.get(table)
        if base is None or base.batch != shape[0]:
            base = _describe(table, shape[0])
        if (base.heads, base.dim) != (shape[1], shape[3]):
            raise ValueError(f"`states` of {shape[1]} heads of {shape[3]}, a table of {base.heads} of {base.dim}")
    if base is not None and base.is_trellis and name == "encode_rows":
        threads = num_threads()
        size = (base.blocks * BLOCK * _MOST_MINIMA + 1) * _MOST_LANES
        fields |= {"scratch": torch.empty(threads, size), "threads": threads, "scratch_size": size}
    if shape[3] > MOST_CHANNELS:
        raise ValueError(f"at most {MOST_CHANNELS} channels are coded, but got {shape[3]}")
    call = make("Coding", fields, base=base, tokens=shape[2])
    # Of so many tokens, which are counted from the start of a tile; channels are measured of all
    call.tasks.count = shape[0] * shape[1]
    if name != "measure_channels":
        call.tasks.count *= -(-(shape[2] + TILE - 1) // _TASK_TOKENS)
    run(name, call, threads)


def _describe(table: RowTable, batch_size: int) -> Structure:
    """Describes a table for tokens of so many sequences, and keeps that while the table lives."""
    num_heads, deviation, num_coded = table.widths.shape[1], table.deviation, table.num_coded
    fields: dict[str, Any] = {"batch": batch_size, "heads": num_heads, "dim": num_coded, "row_size": table.row_size}
    fields |= {"is_trellis": table.quantizer == "trellis", "is_weighted": table.is_weighted}
    fields |= {"by_energy": table.by_energy, "refits": table.num_refits, "blocks": -(-num_coded // BLOCK)}
    fields["rotation"] = rotation_size(table.head_dim) if table.is_rotated else 1
    if table.basis is None:
        if table.order is not None:
            fields |= {"order": table.order.contiguous(), "order_size": table.order.element_size()}
        if table.mean is not None and not table.is_rotated:
            fields["mean"] = table.mean.contiguous()
    if deviation is None:
        deviation = torch.ones(batch_size, num_heads, 1, dtype=torch.float16)
    # Of a model's tables there is one for all sequences
    widths = table.widths.expand(batch_size, -1, -1) if table.basis is not None else table.widths
    fields |= {"deviation": deviation.contiguous(), "deviations": num_coded if deviation.shape[2] > 1 else 1}
    fields |= {"widths": widths.contiguous(), "codebook": _codebook(table.quantizer, table.is_weighted)}
    found = make("Coding", fields)
    # A copy would not see what is written into a table for another sequence
    for own in () if table.basis is not None else (table.order, table.mean, table.deviation, table.widths):
        if own is not None and not own.is_contiguous():
            return found
    _CODINGS[table] = found
    return found


@cache
def _codebook(quantizer: str, is_weighted: bool) -> torch.Tensor:
    """Makes `Codebook` of `coding.h`."""
    with torch.inference_mode(False):
        own, count = QUANTIZERS[quantizer], len(QUANTIZERS[quantizer].distortions)
        coefficients, multipliers = torch.zeros(_NUM_WIDTHS, 4), torch.zeros(_NUM_WIDTHS, dtype=torch.int32)
        coefficients[:count, :3] = torch.tensor(own.coefficients)
        coefficients[:count, 3] = 1 if is_weighted else own.gains()
        multipliers[:count] = torch.tensor(own.multipliers)
        bounds = torch.zeros(_NUM_WIDTHS, _ALL_LEVELS)
        for width in range(1, _NUM_WIDTHS):
            half = 2 ** (width - 1)
            bounds[width] = _by_levels(thresholds(bounds.device)[width, half : 2 * half - 1])
        halfway = torch.exp2((torch.arange(16, dtype=torch.float64) + 0.5) / 16).float()
        scale_bounds = _by_levels(halfway[:15])
        scale_bounds[15] = halfway[15]
        points = state_points(bounds.device)
        parts = (
            bounds,
            scale_bounds,
            scale_of(torch.arange(256)),
            coefficients,
            points,
            multipliers.view(torch.float32),
        )
        return torch.cat([part.flatten() for part in parts])


def _by_levels(bounds: torch.Tensor) -> torch.Tensor:
    """Orders bounds, one less than a power of two in number, as a search by halves meets them."""
    levels, placed = len(bounds).bit_length(), torch.zeros(_ALL_LEVELS)
    for level in range(levels):
        first = 2 ** (levels - 1 - level)
        placed[_LEVELS[level] : _LEVELS[level] + 2**level] = bounds[first - 1 :: 2 * first]
    return placed


@cache
def _rotary(layout: RotaryLayout, tiles: int) -> Structure:
    """Describes a rotary embedding for as many tiles of positions from 0 on as below."""
    with torch.inference_mode(False):
        partners = channels_of(layout, torch.device("cpu"))[0]
        offsets = torch.stack(layout.angles(torch.arange(TILE))).permute(2, 0, 1)
        # Lanes may read over the end of a tile
        offsets = F.pad(offsets, (0, _MOST_LANES)).contiguous()
        origins = torch.stack(layout.angles(torch.arange(-tiles, tiles) * TILE), dim=2)
    fields = {"partners": partners, "offsets": offsets, "origins": origins}
    return make("Rotary", fields, dim=layout.head_dim, tiles=tiles)


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
    call.tasks.count = batch_size * num_heads * runs
    run("code_scores", call)
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
        {"runs": runs, "length": length, "is_basis": stored.is_basis, "scale": 1.0, "scores": scores},
        query=query.float().contiguous(),
        rows=stored.given["rows"],
    )
    call.tasks.count = _num_units(query) * runs
    run("score_rows", call)
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
    call.tasks.count = num_rows
    run("largest", call, threads)
    return values.view(*numbers.shape[:-1], limit), places.view(*numbers.shape[:-1], limit)


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
    Chooses tokens whose weight, their probability averaged over the query heads of a key/value head, is large enough.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, N]`): scores of the tokens, float32.
        resident_scores (`torch.Tensor` of shape `[B, H, G, any]`): of tokens that are attended to anyway, if any.
        forced (`tuple[int, int]`): tokens before the first number, and from the second on, are chosen in any case.
        least (`float`): the least weight of others.
        cap (`int`): the most that are chosen, unless more are forced.
        limit (`int`): the most that there is room for.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: tokens `[B, H, limit]`, int64, forced ones first and then those that weigh
        most, with zeros behind them; and how many they are, `[B, H]`, int64.
    """
    batch_size, num_heads, groups, length = scores.shape
    slots = torch.empty((batch_size, num_heads, limit), dtype=torch.int64)
    count, threads = torch.empty((batch_size, num_heads), dtype=torch.int64), num_threads()
    # Two rows of floats in whole vectors, two of pairs
    scratch_size = 8 * (length + _MOST_LANES) + 16 * (length + 1)
    call = make(
        "Choice",
        {"batch": batch_size, "heads": num_heads, "groups": groups, "length": length, "most_threads": threads},
        {"num_resident": resident_scores.shape[3], "first": max(forced[0], 0), "newest": max(forced[1], 0)},
        {"cap": cap, "limit": limit, "least": least, "slots": slots, "counts": count, "scratch_size": scratch_size},
        {"scores": scores.contiguous(), "resident": resident_scores.contiguous()},
        scratch=torch.empty((threads, scratch_size), dtype=torch.uint8),
    )
    call.tasks.count = batch_size * num_heads
    run("choose_heaviest", call, threads)
    return slots, count


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
    Attends over chosen rows where they stand, and the window: see `tokens.attend_staged`.

    Args:
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, D + E]`): a key and its value side by
            side.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): which rows: slot `i` is row `i` of all pages one behind the
            other; of those beyond all, the last one counts.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask.
        positions (`torch.Tensor` of shape `[B, H, K or more]`, int64, *optional*): columns of the mask that the slots'
            tokens have; by default the slots.
        query, count, window_keys, window_values, scale, window_start: as there.
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
    call.tasks.count = _num_units(query)
    run("attend_gathered", call)
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
    call.tasks.count = batch_size * num_heads
    run("copy_rows", call)


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
    Attends over chosen tokens and the window, with the queries of one new token.

    Args:
        tokens (`RowTokens`): the tokens in all slots; exact ones are in the window's dtype, of a kind that
            `tokens.choose_rows_kernel` says is compiled.
        query, slots, count, window_keys, window_values, scale, mask, window_start: as of `attend_rows`; slots are
            columns of the mask.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero where there is nothing to attend to.
    """
    stored, sizes, threads, num_chosen = _stored(query, tokens), _sizes_of(query), num_threads(), slots.shape[2]
    window = _window(query, window_keys, window_values, tokens.sinks.keys.dtype, window_start)
    result = torch.empty((*query.shape[:3], stored.value_dim))
    # A copy, as another thread may attend to the same tokens
    coded, ends = _numbers(threads, 2, num_chosen), _numbers(threads, stored.num_tiles)
    call = make(
        "Chosen",
        {**sizes, "num_chosen": num_chosen, "scale": scale, "most_threads": threads, "window": window},
        {"query": query.float().contiguous(), "slots": slots.contiguous(), "counts": count.contiguous()},
        {"result": result, "coded": coded, "ends": ends},
        mask=_mask(mask, sizes["batch"], window_start + window_keys.shape[2]),
        base=stored,
    )
    call.tasks.count = _num_units(query)
    run("attend_chosen", call, threads)
    return result if query.dtype is torch.float32 else result.to(query.dtype)


def _stored(query: torch.Tensor, tokens: RowTokens) -> Structure:
    """Describes tokens, which queries `[B, H, G, D]` have to fit, and keeps that while they live."""
    stored = _TOKENS.get(tokens)
    if stored is None:
        stored = _TOKENS[tokens] = make("Chosen", _row_fields(tokens), _sink_fields(tokens.sinks))
    if (query.shape[0], query.shape[1], query.shape[3]) != (stored.batch, stored.heads, stored.key_dim):
        raise ValueError(f"queries {tuple(query.shape)} for tokens of {stored.heads} heads of {stored.key_dim}")
    return stored


def _numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


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
        **{"rows": rows, "is_basis": keys.basis is not None, "all_pairs": rows.all_pairs, "near": near, "far": far},
        **{"num_slots": tokens.length, "num_tiles": -(-tokens.length // TILE), "num_far": num_far},
        **{"first_position": positions.first, "padding": padding, "value_size": values.row_size},
        **{"num_pages": len(tokens.pages), "page_tokens": tokens.pages[0].shape[2], "pages": _pages(tokens.pages)},
    }
