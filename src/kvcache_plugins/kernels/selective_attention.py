"""Attention of one new token to some of the stored tokens: their selection by scores, attention, and copies of rows.

On a CPU that is C: scores that are too small are not sorted, and rows are read where they are stored. On a GPU rows
first have to be fetched from host memory, which is the cache's part; attention over them is PyTorch's.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, N tokens in
use, K slots of a selection, W tokens of the tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .attention_call import AttentionCall
from .c_structs import KINDS, MAX_CHANNELS, TILE, Structure, make
from .engine import choose_token_kernel
from .library import num_threads, run
from .token_scores import PreparedRows, describe_queries, num_query_blocks, readable_pages, sizes_of


# Keys and values
States = tuple[torch.Tensor, torch.Tensor]
_MAX_LANES = 16


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """
    Stored tokens for one step.

    Attributes:
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): slots, those with the largest weights first.
        count (`torch.Tensor` of shape `[B, H]`, int64): slots that a head attends to; the others are filling.
    """

    slots: torch.Tensor
    count: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Mask `[B, H, K]` of slots that are not filling."""
        return torch.arange(self.slots.shape[2], dtype=torch.int64, device=self.slots.device) < self.count[..., None]


class SelectionLimits(NamedTuple):
    """
    Limits of `select_by_weight`.

    Attributes:
        first, newest (`int`): tokens before slot `first` and from slot `newest` on are selected in any case.
        least (`float`): least weight of the others.
        cap (`int`): number of tokens that are selected at most, unless more are forced.
        limit (`int`): slots of the selection, K.
    """

    first: int
    newest: int
    least: float
    cap: int
    limit: int


@torch.compiler.disable
def topk(numbers: torch.Tensor, limit: int, least: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Find the `limit` largest numbers of every row `[..., N]`, float32, the largest first. Numbers below `least`, which
    broadcasts to `[..., 1]`, may be left out, which takes less time.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`, both of shape `[..., limit]`: the numbers and their indices, int64; -inf
        and index 0 in place of numbers that are left out.
    """
    kernel, _ = choose_token_kernel(numbers)
    if kernel != "compiled":
        values, indices = numbers.topk(limit, dim=-1)
        return values, indices
    length = numbers.shape[-1]
    threads = num_threads()
    least = numbers.new_full((), -torch.inf) if least is None else least[..., 0]
    shape = torch.Size((*numbers.shape[:-1], limit))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    indices = torch.empty(shape, dtype=torch.int64, device="cpu")
    rows = shape[:-1].numel()
    args = make(
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
    run("topk", args, rows, threads)
    return values, indices


def selection_scratch(length: int) -> int:
    """Return bytes of two rows of floats in whole vectors, and two rows of pairs."""
    return 8 * (length + _MAX_LANES) + 16 * (length + 1)


@torch.compiler.disable
def select_by_weight(scores: torch.Tensor, tail_scores: torch.Tensor, limits: SelectionLimits) -> Selection:
    """
    Select tokens whose weight is large enough: their attention probability, averaged over the query heads of a
    key/value head, by their `scores` `[B, H, G, N]`, float32, and `tail_scores` `[B, H, G, any]` of tokens that are
    attended to in any case. Forced tokens come first, then those of the largest weights; filling is 0.
    """
    sizes = dict(zip(("batch", "heads", "query_groups", "length"), scores.shape, strict=True))
    heads = scores.shape[:2]
    threads = num_threads()
    slots = torch.empty((*heads, limits.limit), dtype=torch.int64, device="cpu")
    counts = torch.empty(heads, dtype=torch.int64, device="cpu")
    scratch_size = selection_scratch(scores.shape[3])
    args = make(
        "SelectionArgs",
        max_threads=threads,
        **sizes,
        first=max(limits.first, 0),
        newest=max(limits.newest, 0),
        cap=limits.cap,
        least=limits.least,
        scores=scores.contiguous(),
        num_resident=tail_scores.shape[3],
        resident=tail_scores.contiguous(),
        selected=make("SelectedSlots", sizes, limit=limits.limit, slots=slots, counts=counts),
        scratch_size=scratch_size,
        scratch=torch.empty((threads, scratch_size), dtype=torch.uint8, device="cpu"),
    )
    run("select_by_weight", args, heads.numel(), threads)
    return Selection(slots, counts)


def choose_rows_kernel(query: torch.Tensor, value_dim: int, dtype: torch.dtype) -> tuple[str, bool]:
    """
    Choose the kernel that attends to selected rows of a dtype with queries `[B, H, G, D]`.

    Returns:
        `"compiled"` or `"torch"`, and whether it is a fallback.
    """
    kernel, is_fallback = choose_token_kernel(query)
    if kernel != "compiled":
        return "torch", is_fallback
    can_attend = max(query.shape[3], value_dim) <= MAX_CHANNELS and dtype in KINDS
    return ("compiled", False) if can_attend else ("torch", True)


@torch.compiler.disable
def attend_selected(
    call: AttentionCall,
    tokens: PreparedRows | Sequence[torch.Tensor],
    selection: Selection,
    tail: States,
    tail_start: int,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend to selected tokens where they are stored, and to the tail, in C.

    Args:
        call (`AttentionCall`): queries `[B, H, G, D]` of one token, their scale, and a mask `[B, 1, 1, tokens]`.
        tokens (`PreparedRows` or `Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, D + E]`): rows,
            whose exact tokens have the tail's dtype; or pages of keys and values side by side.
        selection (`Selection`): tokens by slot, in the order of all pages; a slot beyond all is the last one.
        tail (two `torch.Tensor` of shape `[B, H, W, D or E]`): the newest tokens.
        tail_start (`int`): column of the mask of the tail's first token.
        positions (`torch.Tensor` of shape `[B, H, K or more]`, int64, *optional*): columns of the mask of the slots'
            tokens; by default the slots.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero if there is nothing to attend to.
    """
    assert call.scale is not None
    query = call.query
    mask = None if call.mask is None else call.mask[:, 0, 0]
    limit = selection.slots.shape[2]
    threads = num_threads()
    coded: torch.Tensor | None = None
    tile_ends: torch.Tensor | None = None
    tiles = 0
    if isinstance(tokens, PreparedRows):
        described = tokens.describe(query)
        dtype = tokens.tokens.sinks.keys.dtype
        tiles = -(-described.length // TILE)
        coded = torch.empty((threads, 2, limit), dtype=torch.int64, device="cpu")
        tile_ends = torch.empty((threads, tiles), dtype=torch.int64, device="cpu")
    else:
        described = describe_pages(query, tokens, tail[1].shape[3], len(tokens) * tokens[0].shape[2])
        dtype = tokens[0].dtype
    value_dim = described.inputs["value_dim"]
    sizes = {**sizes_of(query), "limit": limit, "tiles": tiles}
    slots, counts = selection.slots.contiguous(), selection.count.contiguous()
    result = torch.empty((*query.shape[:3], value_dim), dtype=torch.float32, device="cpu")
    args = make(
        "SelectedAttentionArgs",
        sizes,
        max_threads=threads,
        queries=describe_queries(query, call.scale),
        value_dim=value_dim,
        tokens=described,
        selected=make("SelectedSlots", sizes, limit=limit, slots=slots, counts=counts),
        columns=None if mask is None or positions is None else positions[:, :, :limit].contiguous(),
        window=describe_tail(query.shape, tail, value_dim, dtype, tail_start),
        mask=_describe_mask(mask, len(query), tail_start + tail[0].shape[2]),
        result=result,
        coded=coded,
        tile_ends=tile_ends,
    )
    run("attend_selected", args, num_query_blocks(query), threads)
    return result if query.dtype is torch.float32 else result.to(query.dtype)


def describe_pages(query: torch.Tensor, pages: Sequence[torch.Tensor], value_dim: int, length: int) -> Structure:
    """Describe pages `[B, H, tokens of a page, D + E]` of keys and values, whose first `length` tokens are in use."""
    return make(
        "SelectableTokens",
        {**sizes_of(query), "value_dim": value_dim},
        length=length,
        num_pages=len(pages),
        page_tokens=pages[0].shape[2],
        row_dim=query.shape[3] + value_dim,
        pages=readable_pages(pages),
    )


def describe_tail(shape: torch.Size, tail: States, value_dim: int, dtype: torch.dtype, start: int) -> Structure:
    """
    Describe the newest tokens `[B, H, W, D or E]` for queries of a `shape`. Tokens of a head are contiguous; heads may
    be strides apart, within the tensor's own memory. `start` is the mask's column of the first token.

    Raises:
        ValueError: if they have another shape, or are not on the CPU.
    """
    length = tail[0].shape[2]
    strides: list[tuple[int, ...]] = []
    addresses: list[int] = []
    keepalive: list[torch.Tensor] = []
    for name, states, dim in zip(("keys", "values"), tail, (shape[3], value_dim), strict=True):
        expected = *shape[:2], length, dim
        if states.shape != expected or not states.is_cpu:
            wanted = f"{name} of the tail have to be {expected} on the CPU"
            raise ValueError(f"{wanted}, but got {tuple(states.shape)} on {states.device}")
        states = states if states.dtype is dtype else states.to(dtype)
        states = states if states.stride()[2:] == (dim, 1) else states.contiguous()
        strides.append(tuple(stride * states.element_size() for stride in states.stride()[:2]))
        addresses.append(states.data_ptr())
        keepalive.append(states)
    described = make(
        "Window",
        length=length,
        dtype=KINDS[dtype],
        start=start,
        keys=addresses[0],
        values=addresses[1],
        key_strides=strides[0],
        value_strides=strides[1],
    )
    described.keepalive = keepalive
    return described


def _describe_mask(mask: torch.Tensor | None, batch_size: int, stop: int) -> Structure | None:
    """Describe a mask `[B, tokens]`, boolean or added to scores, which has to have columns up to `stop`."""
    if mask is None:
        return None
    mask = (mask if mask.dtype == torch.bool else mask.float()).contiguous()
    if mask.shape[1] < max(stop, 1):
        raise ValueError(f"`mask` has to have at least {max(stop, 1)} columns, but got {mask.shape[1]}")
    is_boolean = mask.dtype == torch.bool
    return make("Mask", {"batch": batch_size}, columns=mask.shape[1], is_boolean=is_boolean, data=mask)


def attend_fetched(
    call: AttentionCall,
    fetched: States,
    count: torch.Tensor,
    tail: States,
    tail_start: int = 0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend to fetched tokens and the tail, in PyTorch.

    The host does not need to know how many tokens were selected: shapes are those of the largest selection, and
    filling counts neither as key nor as value, whatever it holds. So the number of tokens of other sequences does not
    change a bit of a result.

    Args:
        call (`AttentionCall`): queries `[B, H, G, D]` of one token, their scale, a mask
            `[B, H or 1, G or 1, tokens]`, softcap, and sinks `[B or 1, H, G, 1]`.
        fetched (two `torch.Tensor` of shape `[B, H, K, D or E]`): keys and values of the selected tokens.
        count (`torch.Tensor` of shape `[B, H]`, int64): tokens that every head attends to, the first ones.
        tail (two `torch.Tensor` of shape `[B, H, W, D or E]`): the newest tokens.
        tail_start (`int`, *optional*, defaults to 0): column of the mask of the tail's first token.
        positions (`torch.Tensor` of shape `[B, H, K]`, int64, *optional*): columns of the mask of the selected tokens,
            negative for no token; needed with a mask.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero if there is nothing to attend to.
    """
    assert call.scale is not None
    query = call.query
    num_slots = fetched[0].shape[2]
    is_filling = torch.arange(num_slots, dtype=torch.int64, device=query.device) >= count[..., None]  # [B, H, K]
    # Zero times NaN is NaN, so that a weight of zero is not enough
    values = fetched[1].float().masked_fill(is_filling[..., None], 0.0)
    scaled = query.float() * call.scale
    scores, tail_scores = (scaled @ keys.float().transpose(2, 3) for keys in (fetched[0], tail[0]))
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
        tail_scores = (tail_scores / call.softcap).tanh() * call.softcap
    scores = scores.masked_fill(is_filling[:, :, None], -torch.inf)
    scores = torch.cat([scores, tail_scores], dim=3)  # [B, H, G, K + W]
    if call.mask is not None:
        assert positions is not None
        mask = call.mask.expand(-1, query.shape[1], -1, -1)
        columns = positions.clamp(min=0)[:, :, None].expand(-1, -1, mask.shape[2], -1)
        tail_mask = mask[..., tail_start : tail_start + tail[0].shape[2]]
        seen = torch.cat([mask.gather(3, columns), tail_mask], dim=3)
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()
    num_tokens = scores.shape[3]
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.float().expand(*scores.shape[:3], 1)], dim=3)
    # Softmax of -inf alone would be NaN
    is_empty = (scores == -torch.inf).all(dim=3, keepdim=True)
    weights = scores.softmax(dim=3).masked_fill(is_empty, 0.0)[..., :num_tokens]
    return (weights[..., :num_slots] @ values + weights[..., num_slots:] @ tail[1].float()).to(query.dtype)


@torch.compiler.disable
def gather_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """
    Copy the rows at `slots` `[B, H, K]`, int64, of pages `[B, H, tokens of a page, row]` on the same device, as
    `[B, H, K, row]`.
    """
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    rows = pages[0].new_empty(*slots.shape, row_dim)
    if choose_token_kernel(slots)[0] == "compiled":
        if slots.numel() and not page_tokens * len(pages):
            raise ValueError(f"pages without rows for {slots.shape[2]} slots")
        args = make(
            "GatherArgs",
            batch=batch_size,
            heads=num_heads,
            num_slots=slots.shape[2],
            num_pages=len(pages),
            page_tokens=page_tokens,
            row_dim=row_dim,
            row_size=row_dim * rows.element_size(),
            pages=readable_pages(pages),
            slots=slots.contiguous(),
            result=rows,
        )
        run("gather_rows", args, batch_size * num_heads)
        return rows
    page_numbers = slots // page_tokens
    for number, page in enumerate(pages):
        indices = (page_numbers == number).nonzero(as_tuple=True)
        if indices[0].numel():
            rows[indices] = page[indices[0], indices[1], slots[indices] - number * page_tokens]
    return rows
