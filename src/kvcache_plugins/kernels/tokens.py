"""Kernels of a decode step that attends to some of its tokens: scores of all of them, the best of them, attention over
their rows, and copies of them.

On a CPU that is C: codes never become floats in memory, what is too small to be chosen is not sorted, and rows are
read where they stand. What is said of stored tokens is checked once and kept beside them: in a model's step all that
is touched comes from memory. Scores have a kernel for GPUs too; rows are in host memory and have to be brought there
first, which is the cache's own business.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, T tokens, N
tokens with codes, P bytes of a token's codes, R bytes of a row, K slots, W tokens of the window.
"""

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.formats.bits import packed_size
from kvcache_plugins.formats.parts import SelectableRows

from .c_structs import BLOCK_QUERIES, KINDS, MAX_CHANNELS, TILE, Structure, as_words, make, word_offsets
from .compiled import LayerParts, TokenWriter, kind_of_tokens
from .engine import choose_token_kernel, load_triton
from .library import find_threads, function, num_threads, run
from .ops import TILE_TOKENS, decode_rows


_MOST_LANES = 16
# Tokens of a task that scores
_TOKENS_PER_TASK = 2048
# Words of structures that change from step to step
_QUERIES, _WINDOW, _SELECTED = (word_offsets(name) for name in ("TokenQueries", "Window", "SelectedSlots"))
_SELECTION, _ATTENTION = (word_offsets(name) for name in ("SelectionArgs", "SelectedAttentionArgs"))
# Structures of tokens that live
_TOKENS: "WeakKeyDictionary[SelectableRows, Structure]" = WeakKeyDictionary()


@torch.compiler.disable
def score_codes(
    query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, length: int, nbits: int
) -> torch.Tensor:
    """
    Multiplies queries with the keys that codes stand for: `scale * (code - (2**(nbits - 1) - 0.5))` in a channel.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): queries, float32.
        codes (`torch.Tensor` of shape `[B, H, capacity, P]`, uint8): channel `i * P + j` stands in bit field `i`,
            lowest first, of byte `j`; `P = ceil(D * nbits / 8)`.
        scale (`torch.Tensor` of shape `[B, H, capacity]`, float16): the scale of every token.
        length (`int`): N, the first tokens, which count.
        nbits (`int`): 2, 4 or 8.

    Returns:
        `torch.Tensor` of shape `[B, H, G, N]`, float32.
    """
    kernel, _ = choose_token_kernel(query)
    if kernel == "compiled" and query.shape[3] <= MAX_CHANNELS:
        scores = torch.empty((*query.shape[:3], length), dtype=torch.float32, device="cpu")
        call = _code_score_args(_queries(query, 1.0), codes, scale, length, nbits, scores=scores)
        run("score_codes", call, _num_blocks(query) * call.splits)
        return scores
    codes, scale = codes[:, :, :length], scale[:, :, :length]
    if kernel == "triton":
        found: torch.Tensor = load_triton().score_codes(query, codes, scale, nbits)
        return found
    return _score_codes(query, codes, scale, nbits)


def _score_codes(query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, nbits: int) -> torch.Tensor:
    # What is taken off a code is the same in all channels
    offset = query.sum(dim=3, keepdim=True) * (2 ** (nbits - 1) - 0.5)
    width = codes.shape[3]
    products = query.new_zeros(*query.shape[:3], codes.shape[2])
    for field in range(8 // nbits):
        part = (codes >> (nbits * field) & (2**nbits - 1)).to(query.dtype)
        channels = query[..., field * width : (field + 1) * width]
        products += channels @ part[..., : channels.shape[3]].transpose(2, 3)
    return (products - offset) * scale[:, :, None].to(query.dtype)


def _code_score_args(
    queries: Structure, codes: torch.Tensor, code_scales: torch.Tensor, length: int, nbits: int, **others: Any
) -> Structure:
    """Describes scores of codes of D channels in P bytes, which have to be codes that integer products take."""
    capacity, width = codes.shape[2:]
    head_dim = queries.key_dim
    if nbits not in (2, 4, 8) or head_dim > MAX_CHANNELS or width != packed_size(head_dim, nbits):
        raise ValueError(
            f"{width} bytes of codes of {head_dim} channels in `nbits` {nbits}, which has to be 2, 4 or 8"
        )
    least = 0 if "scores" in others else 1
    if not least <= length <= capacity:
        raise ValueError(f"`length` has to be from {least} to {capacity}, but got {length}")
    return make(
        "CodeScoreArgs",
        queries.inputs,
        queries=queries,
        length=length,
        splits=_num_splits(length),
        fields=8 // nbits,
        width=width,
        capacity=capacity,
        codes=codes.contiguous(),
        code_scales=code_scales.contiguous(),
        **others,
    )


def _row_score_args(queries: Structure, stored: Structure, **others: Any) -> Structure:
    """Describes scores of tokens that are rows."""
    return make(
        "RowScoreArgs",
        queries.inputs,
        queries=queries,
        length=stored.length,
        splits=_num_splits(stored.length),
        rows=stored.inputs["rows"],
        **others,
    )


def _num_splits(length: int) -> int:
    return max(-(-length // _TOKENS_PER_TASK), 1)


@torch.compiler.disable
def score_rows(query: torch.Tensor, tokens: SelectableRows) -> torch.Tensor:
    """
    Multiplies queries `[B, H, G, D]`, float32, with keys that are rows of tables, where they stand; values and exact
    states are not read. Returns the products that attention over such rows computes, `[B, H, G, N]`, float32; on a GPU
    of halves, which is more than choosing tells apart.
    """
    kernel, _ = choose_token_kernel(query)
    if kernel == "compiled" and query.shape[3] <= MAX_CHANNELS:
        scores = torch.empty((*query.shape[:3], tokens.length), dtype=torch.float32, device="cpu")
        call = _row_score_args(_queries(query, 1.0), _stored(query, tokens), scores=scores)
        run("score_rows", call, _num_blocks(query) * call.splits)
        return scores
    if kernel == "triton" and tokens.length:
        triton = load_triton()
        # Products are of halves
        if triton.has_room(tokens.formats, query.device, torch.float16):
            found: torch.Tensor = triton.score_rows(query, tokens)
            return found
    tiles = [
        query @ decode_rows(tile, tokens.formats[0], tokens.positions.after(first * TILE_TOKENS)).transpose(2, 3)
        for first, tile in enumerate(tokens.keys[:, :, : tokens.length].split(TILE_TOKENS, dim=2))
    ]
    return torch.cat(tiles, dim=3)


@torch.compiler.disable
def topk(numbers: torch.Tensor, limit: int, least: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Finds the `limit` largest numbers of every row `[..., N]`, float32, the largest first. What is below `least`, which
    broadcasts to `[..., 1]`, may be left out, which takes less time.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`, both of shape `[..., limit]`: the numbers and where they stand, int64. In
        place of what was left out there is -inf, standing at 0.
    """
    kernel, _ = choose_token_kernel(numbers)
    if kernel != "compiled":
        values, indices = numbers.topk(limit, dim=-1)
        return values, indices
    length, threads = numbers.shape[-1], num_threads()
    least = numbers.new_full((), -torch.inf) if least is None else least[..., 0]
    shape = torch.Size((*numbers.shape[:-1], limit))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    indices = torch.empty(shape, dtype=torch.int64, device="cpu")
    rows = shape[:-1].numel()
    call = make(
        "TopKArgs",
        {"entries": length + 1},
        max_threads=threads,
        rows=rows,
        length=length,
        limit=limit,
        numbers=numbers.contiguous().view(rows, length),
        least=least.expand(shape[:-1]).contiguous().flatten(),
        values=values.view(rows, limit),
        indices=indices.view(rows, limit),
        scratch=torch.empty((threads, 2, length + 1), dtype=torch.int64, device="cpu"),
    )
    run("topk", call, rows, threads)
    return values, indices


def _selection_scratch(length: int, num_resident: int = 0, groups: int = 0) -> int:
    """Counts bytes of two rows of floats in whole vectors, two of pairs, and scores of a window; in whole words."""
    return 8 * (length + _MOST_LANES) + 16 * (length + 1) + 8 * (-(-num_resident * groups // 2))


class SelectionLimits(NamedTuple):
    """
    What is chosen in a step by weight; see `select_by_weight`.

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
def select_by_weight(
    scores: torch.Tensor, resident_scores: torch.Tensor, bounds: SelectionLimits
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Chooses tokens whose weight, their probability averaged over the query heads of a key/value head, is large enough,
    by their scores `[B, H, G, N]`, float32, and those of tokens that are attended to anyway, `[B, H, G, any]`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: tokens `[B, H, limit]`, int64, forced ones first and then those that weigh
        most, with zeros behind them; and how many they are, `[B, H]`, int64.
    """
    sizes = dict(zip(("batch", "heads", "query_groups", "length"), scores.shape, strict=True))
    heads, threads = scores.shape[:2], num_threads()
    slots = torch.empty((*heads, bounds.limit), dtype=torch.int64, device="cpu")
    counts = torch.empty(heads, dtype=torch.int64, device="cpu")
    scratch_size = _selection_scratch(scores.shape[3])
    call = make(
        "SelectionArgs",
        max_threads=threads,
        **sizes,
        first=max(bounds.first, 0),
        newest=max(bounds.newest, 0),
        cap=bounds.cap,
        least=bounds.least,
        scores=scores.contiguous(),
        num_resident=resident_scores.shape[3],
        resident=resident_scores.contiguous(),
        selected=make("SelectedSlots", sizes, limit=bounds.limit, slots=slots, counts=counts),
        scratch_size=scratch_size,
        scratch=torch.empty((threads, scratch_size), dtype=torch.uint8, device="cpu"),
    )
    run("select_by_weight", call, heads.numel(), threads)
    return slots, counts


class Scoring(NamedTuple):
    """
    Scores of stored tokens.

    Attributes:
        kernel (`str`): the kernel that computes them.
        queries (`Structure`): queries like those to come, and the scale.
        args (`Structure`): arguments of the kernel.
    """

    kernel: str
    queries: Structure
    args: Structure


class SelectionPlan(TokenWriter):
    """
    A step over `length` tokens that stay what they are, described once for queries of one shape: scores of all tokens,
    the selection, and attention over selected tokens and a window `[B, H, any, D or E]` that grows. Whatever does not
    change is checked here; a step writes addresses of queries, results and the window only.

    Args:
        scoring (`Scoring`): scores of the tokens.
        tokens (`Structure`): the tokens to attend to.
        window (two `torch.Tensor`): the storage of the newest tokens.
        dtype (`torch.dtype`): of exact tokens.
        owner (`object`, *optional*): the object that keeps `tokens` and the memory that it points to alive, if this
            call is not to hold them.
    """

    def __init__(
        self,
        scoring: Scoring,
        tokens: Structure,
        window: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        owner: object = None,
    ):
        queries, args = scoring.queries, scoring.args
        self._shape = torch.Size((queries.batch, queries.heads, queries.query_groups, queries.key_dim))
        self._value_dim = tokens.inputs["value_dim"]
        sizes = {name: getattr(queries, name) for name in ("batch", "heads", "key_dim")}
        super().__init__({**sizes, "value_dim": self._value_dim}, dtype, queries.scale)
        if tuple(map(kind_of_tokens, window)) != self._kind:
            raise ValueError(f"tokens of {dtype} and a window of {[kind_of_tokens(each) for each in window]}")
        self._length, self._owner = args.length, owner
        self._heads = queries.batch * queries.heads
        selected = make("SelectedSlots")
        shared = {
            "max_threads": self._threads,
            "queries": queries,
            "value_dim": self._value_dim,
            "selected": selected,
        }
        selection = make(
            "SelectionArgs",
            batch=queries.batch,
            heads=queries.heads,
            query_groups=queries.query_groups,
            length=args.length,
            **shared,
        )
        attention = make("SelectedAttentionArgs", tokens=tokens if owner is None else tokens.address, **shared)
        self._structures = queries, args, selected, selection, attention
        self._queries, self._scoring, self._selected, self._selection, self._attention = map(
            as_words, self._structures
        )
        self._scores_at = word_offsets(type(args).__name__).scores
        self._floats = memoryview(selection).cast("B").cast("d")
        blocks = self._heads * -(-queries.query_groups // BLOCK_QUERIES)
        self._kernels = [
            self._prepare(scoring.kernel, args, blocks * args.splits),
            self._prepare("select_by_weight", selection, self._heads),
            self._prepare("attend_selected", attention, blocks),
        ]
        # Bytes for slots that are sorted, of all threads, for each that can be selected and for all
        tiles = -(-args.length // TILE)
        self._sorted_size = (16 * self._threads, 8 * self._threads * tiles) if tokens.rows else (0, 0)
        # Tokens that the last step selected, over all heads
        self.num_chosen = 0

    def __deepcopy__(self, memo: object) -> None:
        """Returns `None`: addresses in a call are those of the original layer, so its copy makes a call of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def _prepare(
        self, kernel: str, args: Structure, num_tasks: int
    ) -> tuple[Callable[[int], None], "memoryview[int]", int, int]:
        """Returns a kernel, the words and the address of its arguments, and the threads that it runs on."""
        args.tasks.count = num_tasks
        return function(kernel), as_words(args), args.address, min(self._threads, num_tasks)

    def attend(
        self,
        query: torch.Tensor,
        scale: float | None,
        window: tuple[torch.Tensor, torch.Tensor],
        length: int,
        newest: tuple[torch.Tensor, torch.Tensor] | None,
        bounds: SelectionLimits,
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
            that the call was made for. `num_chosen` is then the number of selected tokens, over all heads.

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
            or (torch.get_num_threads(), os.getpid()) != self._origin
        ):
            return None
        if window is not self._storage:
            self._take_window(window)
        if not 0 <= length <= self._capacity or (newest is not None and (not length or self.accept(*newest) is None)):
            raise ValueError(f"{length} tokens in use of {self._capacity}, or a newest one of another kind")
        own = query if query.dtype is torch.float32 and query.is_contiguous() else query.float().contiguous()
        result = own.new_empty((*shape[:3], self._value_dim))
        # Kernels write to it while they run
        scratch = self._write_scratch(bounds.limit, length)
        selection = self._selection
        self._queries[_QUERIES.data] = own.data_ptr()
        self._attention[_ATTENTION.result] = result.data_ptr()
        self._window[_WINDOW.length] = selection[_SELECTION.num_resident] = length
        self._floats[_SELECTION.least] = bounds.least
        selection[_SELECTION.first], selection[_SELECTION.newest] = max(bounds.first, 0), max(bounds.newest, 0)
        selection[_SELECTION.cap], selection[_SELECTION.num_selected] = bounds.cap, 0
        selection[_SELECTION.newest_key] = 0 if newest is None else newest[0].data_ptr()
        selection[_SELECTION.newest_value] = 0 if newest is None else newest[1].data_ptr()
        selection[_SELECTION.threads_entered] = self._attention[_ATTENTION.threads_entered] = 0
        for kernel, words, address, threads in self._kernels:
            words[_SELECTION.tasks] = 0
            if threads == 1:
                kernel(address)
            else:
                find_threads()(kernel, address, threads)
        del scratch
        # The newest token is written now
        self._accepted, self.num_chosen = None, selection[_SELECTION.num_selected]
        return result if query.dtype is torch.float32 else result.to(query.dtype)

    def _write_scratch(self, limit: int, num_resident: int) -> torch.Tensor:
        """Allocates memory for scores, slots and scratch at once, and writes where they are."""
        groups, heads = self._shape[2], self._heads
        scratch_size = _selection_scratch(self._length, num_resident, groups)
        sizes = (
            8 * heads * limit,
            8 * heads,
            self._threads * scratch_size,
            self._sorted_size[0] * limit,
            self._sorted_size[1],
        )
        memory = torch.empty(sum(sizes) + 4 * heads * groups * self._length, dtype=torch.uint8, device="cpu")
        slots, counts, scratch, coded, ends, scores = accumulate(sizes, initial=memory.data_ptr())
        self._selected[_SELECTED.limit] = limit
        self._selected[_SELECTED.slots], self._selected[_SELECTED.counts] = slots, counts
        self._scoring[self._scores_at] = self._selection[_SELECTION.scores] = scores
        self._selection[_SELECTION.scratch], self._selection[_SELECTION.scratch_size] = scratch, scratch_size
        self._attention[_ATTENTION.coded], self._attention[_ATTENTION.tile_ends] = coded, ends
        return memory

    def _take_window(self, window: tuple[torch.Tensor, torch.Tensor]) -> None:
        (keys, values), found = window, tuple(map(kind_of_tokens, window))
        if found != self._kind or keys.shape[2] != values.shape[2] or not (keys.is_cpu and values.is_cpu):
            raise ValueError(f"the window has to be {self._kind} on the CPU, as when the call was made, not {found}")
        self._described = _window(self._shape, keys, values, self._value_dim, keys.dtype, 0)
        self._window = as_words(self._described)
        self._selection[_SELECTION.window] = self._attention[_ATTENTION.window] = self._described.address
        self._storage, self._capacity = window, keys.shape[2]


class KeyCodes(NamedTuple):
    """
    Codes of the keys of stored tokens, see `score_codes`.

    Attributes:
        codes, scale, length, nbits: as `score_codes` takes them.
        spread (`torch.Tensor` of shape `[B, H, 1, D]`): factors of the queries.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    length: int
    nbits: int
    spread: torch.Tensor


def plan_by_codes(
    query: torch.Tensor,
    scale: float,
    keys: KeyCodes,
    pages: Sequence[torch.Tensor],
    window: tuple[torch.Tensor, torch.Tensor],
) -> SelectionPlan:
    """
    Plans steps over tokens that are scored by codes of their keys and attended to in `pages`, see `attend_selected`.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    queries = make("TokenQueries", **_sizes_of(query), scale=scale)
    spread = keys.spread[:, :, 0].contiguous()
    args = _code_score_args(queries, keys.codes, keys.scale, keys.length, keys.nbits, spread=spread)
    tokens = _exact_tokens(query, pages, window[1].shape[3], keys.length)
    return SelectionPlan(Scoring("score_codes", queries, args), tokens, window, pages[0].dtype)


def plan_by_rows(
    query: torch.Tensor, scale: float, tokens: SelectableRows, window: tuple[torch.Tensor, torch.Tensor]
) -> SelectionPlan:
    """
    Plans steps over tokens that are scored, see `score_rows`, and attended to, see `attend_selected`, as rows.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    stored = _stored(query, tokens)
    queries = make("TokenQueries", **_sizes_of(query), scale=scale)
    args = _row_score_args(queries, stored)
    # The structure of the tokens lives as long as they do; its tables of angles belong to no cache
    args.inputs = {}
    return SelectionPlan(Scoring("score_rows", queries, args), stored, window, tokens.sinks.keys.dtype, owner=tokens)


def _sizes_of(query: torch.Tensor) -> dict[str, int]:
    return dict(zip(("batch", "heads", "query_groups", "key_dim"), query.shape, strict=True))


def _queries(query: torch.Tensor, scale: float) -> Structure:
    """Describes queries `[B, H, G, D]`."""
    return make("TokenQueries", **_sizes_of(query), scale=scale, data=query.float().contiguous())


def _num_blocks(query: torch.Tensor) -> int:
    """Counts the query blocks of queries `[B, H, G, D]`, see `layer.h`."""
    batch_size, num_heads, groups, _ = query.shape
    return batch_size * num_heads * -(-groups // BLOCK_QUERIES)


def _pages(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes pages readable, which have to be of one dtype."""
    if any(page.dtype != pages[0].dtype for page in pages):
        raise ValueError(f"`pages` have to be of one dtype, but are of {[page.dtype for page in pages]}")
    return [page.contiguous() for page in pages]


def _window(
    shape: torch.Size, keys: torch.Tensor, values: torch.Tensor, value_dim: int, dtype: torch.dtype, start: int
) -> Structure:
    """
    Describes the newest tokens `[B, H, W, D or E]`, which follow each other in every head; heads may be strides apart,
    within the tensor's own memory. `start` is the first one's column of the mask.

    Raises:
        ValueError: if they are of another shape, or not on the CPU.
    """
    strides: dict[str, Any] = {}
    alive = []
    for name, states, dim in (("key", keys, shape[3]), ("value", values, value_dim)):
        own = *shape[:2], keys.shape[2], dim
        if states.shape != own or not states.is_cpu:
            wanted = f"`window_{name}s` has to be {own} on the CPU"
            raise ValueError(f"{wanted}, but got {tuple(states.shape)} on {states.device}")
        states = states if states.dtype is dtype else states.to(dtype)
        states = states if states.stride()[2:] == (dim, 1) else states.contiguous()
        strides[f"{name}_strides"] = tuple(stride * states.element_size() for stride in states.stride()[:2])
        strides[f"{name}s"] = states.data_ptr()
        alive.append(states)
    window = make("Window", length=keys.shape[2], dtype=KINDS[dtype], start=start, **strides)
    window.keepalive = alive
    return window


def _mask(mask: torch.Tensor | None, batch_size: int, stop: int) -> Structure | None:
    """Describes a mask `[B, tokens]`, boolean or added to scores, which has to have columns up to `stop`."""
    if mask is None:
        return None
    mask = (mask if mask.dtype == torch.bool else mask.float()).contiguous()
    if mask.shape[1] < max(stop, 1):
        raise ValueError(f"`mask` has to have at least {max(stop, 1)} columns, but got {mask.shape[1]}")
    is_boolean = mask.dtype == torch.bool
    return make("Mask", {"batch": batch_size}, columns=mask.shape[1], is_boolean=is_boolean, data=mask)


@torch.compiler.disable
def attend_selected(
    query: torch.Tensor,
    tokens: SelectableRows | Sequence[torch.Tensor],
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    window_start: int,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attends over chosen tokens where they stand, and the window; arguments that are not listed are those of
    `tokens.attend_fetched`.

    Args:
        tokens (`SelectableRows` or `Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, D + E]`): rows of
            tables, of which exact ones are in the window's dtype; or pages of keys and their values side by side.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): which tokens, in the order of all pages one behind the
            other; of those beyond all, the last one counts.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask.
        positions (`torch.Tensor` of shape `[B, H, K or more]`, int64, *optional*): columns of the mask that the slots'
            tokens have; by default the slots.
    """
    limit, threads = slots.shape[2], num_threads()
    scratch: dict[str, torch.Tensor] = {}
    if isinstance(tokens, SelectableRows):
        stored, dtype = _stored(query, tokens), tokens.sinks.keys.dtype
        tiles = -(-tokens.length // TILE)
        scratch["coded"] = torch.empty((threads, 2, limit), dtype=torch.int64, device="cpu")
        scratch["tile_ends"] = torch.empty((threads, tiles), dtype=torch.int64, device="cpu")
    else:
        length = len(tokens) * tokens[0].shape[2]
        stored, dtype = _exact_tokens(query, tokens, window_values.shape[3], length), tokens[0].dtype
        tiles = 0
    value_dim = stored.inputs["value_dim"]
    sizes = {**_sizes_of(query), "limit": limit, "tiles": tiles}
    result = torch.empty((*query.shape[:3], value_dim), dtype=torch.float32, device="cpu")
    call = make(
        "SelectedAttentionArgs",
        sizes,
        max_threads=threads,
        queries=_queries(query, scale),
        value_dim=value_dim,
        tokens=stored,
        selected=make("SelectedSlots", sizes, limit=limit, slots=slots.contiguous(), counts=count.contiguous()),
        columns=None if mask is None or positions is None else positions[:, :, :limit].contiguous(),
        window=_window(query.shape, window_keys, window_values, value_dim, dtype, window_start),
        mask=_mask(mask, len(query), window_start + window_keys.shape[2]),
        result=result,
        **scratch,
    )
    run("attend_selected", call, _num_blocks(query), threads)
    return result if query.dtype is torch.float32 else result.to(query.dtype)


def _exact_tokens(query: torch.Tensor, pages: Sequence[torch.Tensor], value_dim: int, length: int) -> Structure:
    """Describes pages `[B, H, tokens of a page, D + E]` of keys and values, of which `length` tokens are in use."""
    return make(
        "SelectableTokens",
        {**_sizes_of(query), "value_dim": value_dim},
        length=length,
        num_pages=len(pages),
        page_tokens=pages[0].shape[2],
        row_dim=query.shape[3] + value_dim,
        pages=_pages(pages),
    )


def _stored(query: torch.Tensor, tokens: SelectableRows) -> Structure:
    """Describes tokens, which queries `[B, H, G, D]` have to fit, and keeps that while they live."""
    stored = _TOKENS.get(tokens)
    if stored is None:
        stored = _TOKENS[tokens] = _row_tokens(tokens)
    sizes = tuple(stored.inputs[name] for name in ("batch", "heads", "key_dim"))
    if (query.shape[0], query.shape[1], query.shape[3]) != sizes:
        raise ValueError(f"queries {tuple(query.shape)} for tokens of {sizes[1]} heads of {sizes[2]}")
    return stored


def _row_tokens(tokens: SelectableRows) -> Structure:
    """Describes tokens that are rows, but for the first, which are exact."""
    sinks = tokens.sinks
    if sinks.keys.dtype not in KINDS or sinks.values.dtype is not sinks.keys.dtype:
        raise ValueError(f"exact keys and values of {sinks.keys.dtype} and {sinks.values.dtype}")
    unpadded = torch.zeros(len(sinks.keys), dtype=torch.int64, device="cpu")
    first = unpadded if sinks.first is None else sinks.first.cpu().long()
    batch_size, num_heads, *_ = tokens.keys.shape
    keys, values = tokens.formats
    parts = LayerParts(torch.Size((batch_size, num_heads, 1, keys.head_dim)), num_heads, values.head_dim)
    return make(
        "SelectableTokens",
        parts.sizes,
        length=tokens.length,
        num_pages=len(tokens.pages),
        page_tokens=tokens.pages[0].shape[2],
        row_dim=values.row_size,
        pages=_pages(tokens.pages),
        rows=parts.rows_of(tokens.keys, None, tokens.formats, tokens.positions, tokens.length),
        num_sinks=sinks.keys.shape[2],
        first_sinks=first.contiguous(),
        sink_keys=sinks.keys.contiguous(),
        sink_values=sinks.values.contiguous(),
    )


def choose_rows_kernel(query: torch.Tensor, value_dim: int, dtype: torch.dtype) -> tuple[str, bool]:
    """
    Chooses the kernel for chosen rows of a dtype, `"compiled"` or `"torch"`, and queries `[B, H, G, D]`; tells whether
    that is less than was wanted.
    """
    kernel, is_fallback = choose_token_kernel(query)
    if kernel != "compiled":
        return "torch", is_fallback
    can_attend = max(query.shape[3], value_dim) <= MAX_CHANNELS and dtype in KINDS
    return ("compiled", False) if can_attend else ("torch", True)


def attend_fetched(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window_start: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attends over chosen tokens and the window, with the queries of one new token, in PyTorch.

    The host need not know how many were chosen: shapes are those of the most that may be, and what is no token counts
    neither as key nor as value, whatever stands there. So how many tokens other sequences chose does not change a bit
    of a result.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        keys, values (`torch.Tensor` of shape `[B, H, K, D]`, `[B, H, K, E]`): the tokens that were chosen.
        count (`torch.Tensor` of shape `[B, H]`, int64): how many of those every head attends to, the first ones.
        window_keys, window_values (`torch.Tensor` of shape `[B, H, W, D]`, `[B, H, W, E]`): the newest tokens.
        scale (`float`): factor of the scores.
        mask (`torch.Tensor` of shape `[B, H or 1, G or 1, tokens]`, *optional*): the token's rows of the mask, boolean
            or added to the scores.
        positions (`torch.Tensor` of shape `[B, H, K]`, int64, *optional*): columns of the mask that chosen tokens
            have, negative where there is no token; needed with a mask.
        window_start (`int`, *optional*, defaults to 0): column of the window's first token.
        softcap (`float`, *optional*), sinks (`torch.Tensor` of shape `[B or 1, H, G, 1]`, *optional*): as in
            `AttentionCall`.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero where there is nothing to attend to.
    """
    most, num_heads = keys.shape[2], query.shape[1]
    is_filling = torch.arange(most, dtype=torch.int64, device=query.device) >= count[..., None]  # [B, H, K]
    # Zero times NaN is NaN: a weight of zero alone would not do
    values = values.float().masked_fill(is_filling[..., None], 0.0)
    scaled = query.float() * scale
    chosen, newest = (scaled @ each.float().transpose(2, 3) for each in (keys, window_keys))
    if softcap is not None:
        chosen, newest = ((each / softcap).tanh() * softcap for each in (chosen, newest))
    scores = torch.cat([chosen.masked_fill(is_filling[:, :, None], -torch.inf), newest], dim=3)  # [B, H, G, K + W]
    if mask is not None:
        assert positions is not None
        columns = mask.expand(-1, num_heads, -1, -1)
        own = columns[..., window_start : window_start + window_keys.shape[2]]
        places = positions.clamp(min=0)[:, :, None].expand(-1, -1, columns.shape[2], -1)
        seen = torch.cat([columns.gather(3, places), own], dim=3)
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()
    num_tokens = scores.shape[3]
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], dim=3)
    # Of nothing but -inf softmax would make NaN
    is_empty = (scores == -torch.inf).all(dim=3, keepdim=True)
    weights = scores.softmax(dim=3).masked_fill(is_empty, 0.0)[..., :num_tokens]
    return (weights[..., :most] @ values + weights[..., most:] @ window_values.float()).to(query.dtype)


@torch.compiler.disable
def gather_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """
    Copies the rows at `slots` `[B, H, K]`, int64, of pages `[B, H, tokens of a page, row]` of the same device, as
    `[B, H, K, row]`.
    """
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    rows = pages[0].new_empty(*slots.shape, row_dim)
    if choose_token_kernel(slots)[0] == "compiled":
        if slots.numel() and not page_tokens * len(pages):
            raise ValueError(f"pages without rows for {slots.shape[2]} slots")
        call = make(
            "GatherArgs",
            batch=batch_size,
            heads=num_heads,
            num_slots=slots.shape[2],
            num_pages=len(pages),
            page_tokens=page_tokens,
            row_dim=row_dim,
            row_size=row_dim * rows.element_size(),
            pages=_pages(pages),
            slots=slots.contiguous(),
            result=rows,
        )
        run("gather_rows", call, batch_size * num_heads)
        return rows
    numbers = slots // page_tokens
    for number, page in enumerate(pages):
        places = (numbers == number).nonzero(as_tuple=True)
        if places[0].numel():
            rows[places] = page[places[0], places[1], slots[places] - number * page_tokens]
    return rows
