"""Kernels of a decode step that attends to some of its tokens: scores of all of them from codes, the best of them,
attention over their rows, and copies of them.

On a CPU that is C: codes never become floats in memory, what is too small to be chosen is not sorted, and rows are
read where they stand. Scores have a kernel for GPUs too; rows are in host memory and have to be brought there first,
which is the cache's own business.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, N tokens with
codes, P bytes of a token's codes, K slots, W tokens of the window.
"""

from collections.abc import Sequence

import torch

from kvcache_plugins.codecs.parts import TILE_TOKENS, RowTokens
from kvcache_plugins.files.mapped_files import release

from .engine import choose_token_kernel
from .structs import KINDS, MOST_CHANNELS


def code_scores(
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
    # Kernels are imported late, as they need what may not be there
    if kernel == "compiled" and query.shape[3] <= MOST_CHANNELS:
        from .compiled_tokens import code_scores as compiled_scores

        return compiled_scores(query, codes, scale, length, nbits)
    codes, scale = codes[:, :, :length], scale[:, :, :length]
    if kernel == "triton":
        from kvcache_plugins.triton_kernels.scores import score_codes

        # Triton launches on the current device, which need not be that of a model's layer
        with torch.cuda.device_of(query):
            return score_codes(codes, scale, query, nbits)
    return _code_scores(query, codes, scale, nbits)


def _code_scores(query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, nbits: int) -> torch.Tensor:
    # What is taken off a code is the same in all channels
    offset = query.sum(dim=3, keepdim=True) * (2 ** (nbits - 1) - 0.5)
    width = codes.shape[3]
    products = query.new_zeros(*query.shape[:3], codes.shape[2])
    for field in range(8 // nbits):
        part = (codes >> (nbits * field) & (2**nbits - 1)).to(query.dtype)
        channels = query[..., field * width : (field + 1) * width]
        products += channels @ part[..., : channels.shape[3]].transpose(2, 3)
    return (products - offset) * scale[:, :, None].to(query.dtype)


def score_rows(query: torch.Tensor, tokens: RowTokens) -> torch.Tensor:
    """
    Multiplies queries `[B, H, G, D]`, float32, with keys that are rows of tables, where they stand; values and exact
    states are not read. Returns the products that attention over such rows computes, `[B, H, G, N]`, float32; on a GPU
    of halves, which is more than choosing tells apart.
    """
    kernel, _ = choose_token_kernel(query)
    if kernel == "compiled" and query.shape[3] <= MOST_CHANNELS:
        from .compiled_tokens import score_rows as compiled_scores

        return compiled_scores(query, tokens)
    if kernel == "triton" and tokens.length:
        from .triton import has_room
        from .triton import score_rows as triton_scores

        # Products are of halves
        if has_room(tokens.codec, query.device, torch.float16):
            return triton_scores(query, tokens)
    scores = [
        query @ tokens.codec.decode_keys(tile, tokens.positions.after(first * TILE_TOKENS)).transpose(2, 3)
        for first, tile in enumerate(tokens.keys[:, :, : tokens.length].split(TILE_TOKENS, dim=2))
    ]
    return torch.cat(scores, dim=3)


def largest(numbers: torch.Tensor, limit: int, least: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
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
    from .compiled_tokens import largest as compiled_largest

    rows = numbers[..., 0]
    least = torch.full_like(rows, -torch.inf) if least is None else least[..., 0].expand_as(rows)
    return compiled_largest(numbers, limit, least)


def choose_rows_kernel(query: torch.Tensor, value_dim: int, dtype: torch.dtype) -> tuple[str, bool]:
    """
    Chooses the kernel for chosen rows of a dtype, `"compiled"` or `"torch"`, and queries `[B, H, G, D]`; tells whether
    that is less than was wanted.
    """
    kernel, is_fallback = choose_token_kernel(query)
    if kernel != "compiled":
        return "torch", is_fallback
    can_attend = max(query.shape[3], value_dim) <= MOST_CHANNELS and dtype in KINDS
    return ("compiled", False) if can_attend else ("torch", True)


def attend_staged(
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
    is_filling = torch.arange(most, device=query.device) >= count[..., None]  # [B, H, K]
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


def gather_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor, *, are_mapped: bool = False) -> torch.Tensor:
    """
    Copies the rows at `slots` `[B, H, K]`, int64, of pages `[B, H, tokens of a page, row]` of the same device, as
    `[B, H, K, row]`; of pages that `are_mapped` files at most a tenth is mapped at once, and in the end none.
    """
    rows = pages[0].new_empty(*slots.shape, pages[0].shape[3])
    if choose_token_kernel(slots)[0] == "compiled":
        from .compiled_tokens import copy_rows

        copy_rows(pages, slots, rows, are_mapped=are_mapped)
        return rows
    page_tokens = pages[0].shape[2]
    numbers = slots // page_tokens
    for number, page in enumerate(pages):
        places = (numbers == number).nonzero(as_tuple=True)
        if places[0].numel():
            rows[places] = page[places[0], places[1], slots[places] - number * page_tokens]
        if are_mapped:
            release(page)
    return rows
