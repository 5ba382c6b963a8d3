"""Tokens in codes of which some are chosen, by the C kernels: scores of all keys, and attention over the chosen.

What is said of stored tokens is checked once and kept beside them: in a model's step all that is touched comes from
memory.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, K slots, W tokens of the
window.
"""

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.codecs.quantization import packed_planes, packed_size
from kvcache_plugins.codecs.rotation import rotation_size

from .gather import Mask, Window, mask_of, num_units, page_addresses, readable_mask, whole_rows, window_of
from .layer import KINDS, MOST_CHANNELS
from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run
from .selection import check_codes


if TYPE_CHECKING:
    from kvcache_plugins.ops.coded_tokens import CodedTokens, KeyGroups

# Tokens of a task, about
_TOKENS_PER_TASK = 2048


class _Keys(ctypes.Structure):
    _fields_ = (
        *((name, LONG) for name in ("dim", "nbits", "width", "num_groups", "group_size", "num_runs", "num_slots")),
        *((name, ADDRESS) for name in ("codes", "scale", "zero", "runs")),
    )


class _GroupedScores(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        ("keys", _Keys),
        *((name, LONG) for name in ("groups", "parts", "at_once")),
        *((name, ADDRESS) for name in ("query", "scores")),
    )


class _Plane(ctypes.Structure):
    _fields_ = (("bits", LONG), ("shift", LONG), ("size", LONG))


class _Chosen(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        ("threads", LONG),
        ("keys", _Keys),
        *((name, LONG) for name in ("heads", "groups", "value_dim", "num_planes")),
        ("planes", _Plane * 2),
        *((name, LONG) for name in ("code_bytes", "row_bytes", "num_value_groups", "rotation")),
        *((name, LONG) for name in ("num_pages", "page_tokens", "num_sinks", "num_chosen")),
        ("scale", ctypes.c_double),
        *((name, ADDRESS) for name in ("pages", "first_sinks", "sink_keys", "sink_values")),
        *((name, ADDRESS) for name in ("query", "result", "slots", "counts", "coded", "ends")),
        ("window", Window),
        ("mask", Mask),
    )


class _KeyTable:
    """
    What kernels are told of keys, and what that has addresses of.

    Raises:
        ValueError: if any place of a run is beyond the groups, or a slot in no run.
    """

    def __init__(self, keys: "KeyGroups"):
        batch_size, num_heads, num_groups, group_size, width = keys.codes.shape
        head_dim, places = keys.scale.shape[3], num_groups * group_size
        check_codes(keys.nbits, head_dim, width)
        runs = [tuple(map(int, each)) for each in keys.runs]
        follow = all(before[1] == after[0] for before, after in pairwise(runs))
        if not follow or runs[0][0] or any(not 0 <= a + shift <= b + shift <= places for a, b, shift in runs):
            raise ValueError(f"`runs` {runs} of slots do not follow each other within {places} places")
        self.sizes = batch_size, num_heads, head_dim
        self.num_parts = -(-num_groups // -(-_TOKENS_PER_TASK // group_size))
        self.at_once = -(-_TOKENS_PER_TASK // group_size)
        self._tensors = [keys.codes.contiguous(), keys.scale.contiguous(), keys.zero.contiguous(), torch.tensor(runs)]
        codes, scale, zero, table = self._tensors
        of_groups = batch_size, num_heads, num_groups
        self.struct = _Keys(
            *(head_dim, keys.nbits, width, num_groups, group_size, len(runs), runs[-1][1]),
            address_of("codes", codes, torch.uint8, (*of_groups, group_size, width)),
            address_of("scale", scale, torch.float16, (*of_groups, head_dim)),
            address_of("zero", zero, torch.float16, (*of_groups, head_dim)),
            table.data_ptr(),
        )


class _TokenTable:
    """A call of `attend_chosen` of stored tokens, without what is of a step, and what it has addresses of."""

    def __init__(self, tokens: "CodedTokens"):
        values, sinks, keys = tokens.values, tokens.sinks, _key_table(tokens.keys)
        batch_size, num_heads, _ = keys.sizes
        self.sizes, self.dtype = (*keys.sizes, values.head_dim), sinks.keys.dtype
        first = torch.zeros(batch_size, dtype=torch.int64) if sinks.first is None else sinks.first.cpu()
        num_groups, num_sinks = values.head_dim // values.group_size, sinks.keys.shape[2]
        code_bytes, page_tokens = packed_size(values.head_dim, values.nbits), values.pages[0].shape[2]
        row_bytes, planes = code_bytes + 4 * num_groups, packed_planes(values.head_dim, values.nbits)
        if values.head_dim > MOST_CHANNELS or num_groups * values.group_size != values.head_dim:
            raise ValueError(f"values of {values.head_dim} channels in groups of {values.group_size}")
        pages = [page.contiguous() for page in values.pages]
        table = page_addresses(pages, (batch_size, num_heads, page_tokens, row_bytes))
        states = [first.contiguous(), sinks.keys.contiguous(), sinks.values.contiguous()]
        self._alive = keys, pages, table, states
        self.struct = _Chosen(
            *(Tasks(0, 0, 0), 0),
            keys.struct,
            *(
                num_heads,
                0,
                values.head_dim,
                len(planes),
                (_Plane * 2)(*[_Plane(*plane) for plane in planes]),
                code_bytes,
                row_bytes,
            ),
            *(num_groups, rotation_size(values.head_dim), len(pages), page_tokens, num_sinks, 0, 0.0),
            ctypes.addressof(table),
            address_of("first", states[0], torch.int64, (batch_size,)),
            address_of("sink_keys", states[1], tuple(KINDS), (batch_size, num_heads, num_sinks, self.sizes[2])),
            address_of("sink_values", states[2], self.dtype, (batch_size, num_heads, num_sinks, self.sizes[3])),
        )


# Of keys and tokens that live
_KEY_TABLES: "WeakKeyDictionary[KeyGroups, _KeyTable]" = WeakKeyDictionary()
_TOKEN_TABLES: "WeakKeyDictionary[CodedTokens, _TokenTable]" = WeakKeyDictionary()


def _key_table(keys: "KeyGroups") -> _KeyTable:
    table = _KEY_TABLES.get(keys)
    if table is None:
        table = _KEY_TABLES[keys] = _KeyTable(keys)
    return table


@torch.compiler.disable
def grouped_scores(query: torch.Tensor, keys: "KeyGroups") -> torch.Tensor:
    """Computes `ops.grouped_scores` of up to `MOST_CHANNELS` channels."""
    table, groups = _key_table(keys), query.shape[2]
    batch_size, num_heads, head_dim = table.sizes
    # A name keeps alive what is handed over by address
    query = query.float().contiguous()
    scores = torch.empty((batch_size, num_heads, groups, table.struct.num_slots))
    call = _GroupedScores(
        Tasks(0, batch_size * num_heads * table.num_parts, 0),
        table.struct,
        *(groups, table.num_parts, table.at_once),
        address_of("query", query, torch.float32, (batch_size, num_heads, groups, head_dim)),
        scores.data_ptr(),
    )
    run(function("grouped_scores"), call, min(num_threads(), call.tasks.count))
    return scores


@torch.compiler.disable
def attend_chosen(
    query: torch.Tensor,
    tokens: "CodedTokens",
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """
    Attention of one new token over chosen tokens and the window.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        tokens (`CodedTokens`): the tokens in all slots; exact ones are in the window's dtype.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): slots of the tokens that were chosen; of those beyond all,
            the last one counts.
        count (`torch.Tensor` of shape `[B, H]`, int64): how many of those every head attends to, the first ones.
        window_keys, window_values (`torch.Tensor` of shape `[B, H, W, D]`, `[B, H, W, E]`): the newest tokens, of a
            kind that `gather.can_attend_rows`.
        scale (`float`): factor of the scores.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask, boolean or added to the
            scores; slots are columns of it.
        window_start (`int`): column of the window's first token.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero where there is nothing to attend to.
    """
    table = _TOKEN_TABLES.get(tokens)
    if table is None:
        table = _TOKEN_TABLES[tokens] = _TokenTable(tokens)
    *heads, key_dim, value_dim = table.sizes
    groups, num_chosen, window_length = query.shape[2], slots.shape[2], window_keys.shape[2]
    # Names keep alive what is handed over by address
    queries, slots, count = query.float().contiguous(), slots.contiguous(), count.contiguous()
    window_keys = whole_rows("window_keys", window_keys, table.dtype, (*heads, window_length, key_dim))
    window_values = whole_rows("window_values", window_values, table.dtype, (*heads, window_length, value_dim))
    mask = None if mask is None else readable_mask(mask)
    result = torch.empty((*heads, groups, value_dim))
    # A copy, as another thread may attend to the same tokens
    call = _Chosen.from_buffer_copy(table.struct)
    call.tasks.count, call.groups, call.num_chosen, call.scale = num_units(query), groups, num_chosen, scale
    call.query = address_of("query", queries, torch.float32, (*heads, groups, key_dim))
    call.result = result.data_ptr()
    call.slots = address_of("slots", slots, torch.int64, (*heads, num_chosen))
    call.counts = address_of("count", count, torch.int64, tuple(heads))
    call.window = window_of(window_keys, window_values, window_start)
    call.mask = mask_of(mask, heads[0], window_start + window_length)
    threads = min(num_threads(), call.tasks.count)
    # Slots, places and groups of tokens, twice, and ends of groups
    coded = torch.empty((threads, 2, num_chosen, 3), dtype=torch.int64)
    ends = torch.empty((threads, call.keys.num_groups), dtype=torch.int64)
    call.coded, call.ends = coded.data_ptr(), ends.data_ptr()
    run(function("attend_chosen"), call, threads)
    return result if query.dtype is torch.float32 else result.to(query.dtype)
