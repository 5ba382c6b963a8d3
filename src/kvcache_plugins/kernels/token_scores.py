"""Scores of stored tokens: products of a new token's queries with all keys, which are codes or rows of a format.

On a CPU that is C: codes and rows never become floats in memory. There are kernels for GPUs too.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N tokens in use, P bytes of a token's
codes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcache_plugins.formats.bits import packed_size
from kvcache_plugins.formats.parts import SelectableRows

from .c_structs import BLOCK_QUERIES, KINDS, MAX_CHANNELS, Structure, make
from .compiled import LayerParts
from .engine import choose_token_kernel, load_triton
from .library import run
from .ops import TILE_TOKENS, decode_rows


# Tokens that a task scores
_TOKENS_PER_TASK = 2048


class KeyCodes(NamedTuple):
    """
    Keys in few bits: a code means `scale * (code - (2**(nbits - 1) - 0.5))`, times the channel's spread.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, capacity, P]`, uint8): channel `i * P + j` is in bit field `i`, lowest
            first, of byte `j`; `P = ceil(D * nbits / 8)`.
        scales (`torch.Tensor` of shape `[B, H, capacity]`, float16): scale of every token.
        spread (`torch.Tensor` of shape `[B, H, 1, D]`, float32): spread of every channel.
        length (`int`): tokens in use, N.
        nbits (`int`): 2, 4 or 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    spread: torch.Tensor
    length: int
    nbits: int


@torch.compiler.disable
def score_codes(query: torch.Tensor, keys: KeyCodes) -> torch.Tensor:
    """Multiply queries `[B, H, G, D]`, float32, with keys in few bits: `[B, H, G, N]`, float32."""
    kernel, _ = choose_token_kernel(query)
    query = query * keys.spread
    if kernel == "compiled" and query.shape[3] <= MAX_CHANNELS:
        scores = torch.empty((*query.shape[:3], keys.length), dtype=torch.float32, device="cpu")
        args = code_score_args(describe_queries(query, 1.0), keys, scores=scores)
        run("score_codes", args, num_query_blocks(query) * args.splits)
        return scores
    codes, scales = keys.codes[:, :, : keys.length], keys.scales[:, :, : keys.length]
    if kernel == "triton":
        found: torch.Tensor = load_triton().score_codes(query, codes, scales, keys.nbits)
        return found
    return _score_codes(query, codes, scales, keys.nbits)


def _score_codes(query: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, nbits: int) -> torch.Tensor:
    # The middle of the codes is the same in all channels
    offset = query.sum(dim=3, keepdim=True) * (2 ** (nbits - 1) - 0.5)
    width = codes.shape[3]
    products = query.new_zeros(*query.shape[:3], codes.shape[2])
    for field in range(8 // nbits):
        part = (codes >> (nbits * field) & (2**nbits - 1)).to(query.dtype)
        channels = query[..., field * width : (field + 1) * width]
        products += channels @ part[..., : channels.shape[3]].transpose(2, 3)
    return (products - offset) * scales[:, :, None].to(query.dtype)


def code_score_args(
    queries: Structure, keys: KeyCodes, *, scores: torch.Tensor | None = None, spread: torch.Tensor | None = None
) -> Structure:
    """
    Describe scores of keys in few bits; queries are multiplied with `spread` `[B, H, D]`, if it is given.

    Raises:
        ValueError: if codes do not fit the queries, or there are none though no `scores` are given.
    """
    capacity, width = keys.codes.shape[2:]
    head_dim = queries.key_dim
    if keys.nbits not in (2, 4, 8) or head_dim > MAX_CHANNELS or width != packed_size(head_dim, keys.nbits):
        raise ValueError(
            f"{width} bytes of codes of {head_dim} channels in `nbits` {keys.nbits}, which has to be 2, 4 or 8"
        )
    least = 1 if scores is None else 0
    if not least <= keys.length <= capacity:
        raise ValueError(f"`length` has to be from {least} to {capacity}, but got {keys.length}")
    return make(
        "CodeScoreArgs",
        queries.inputs,
        queries=queries,
        length=keys.length,
        splits=_num_splits(keys.length),
        fields=8 // keys.nbits,
        width=width,
        capacity=capacity,
        codes=keys.codes.contiguous(),
        code_scales=keys.scales.contiguous(),
        spread=spread,
        scores=scores,
    )


class PreparedRows:
    """
    Tokens that are rows, as kernels read them. Their description for C is made once, when a kernel first needs it: in
    a step of a model everything that is touched comes from memory.

    Attributes:
        tokens (`SelectableRows`): the tokens.
    """

    def __init__(self, tokens: SelectableRows):
        self.tokens = tokens
        self._described: Structure | None = None

    def describe(self, query: torch.Tensor) -> Structure:
        """Describe the tokens; a `ValueError` if queries `[B, H, G, D]` do not fit them."""
        if self._described is None:
            self._described = _describe_rows(self.tokens)
        described = self._described
        sizes = tuple(described.inputs[name] for name in ("batch", "heads", "key_dim"))
        if (query.shape[0], query.shape[1], query.shape[3]) != sizes:
            raise ValueError(f"queries {tuple(query.shape)} for tokens of {sizes[1]} heads of {sizes[2]}")
        return described


@torch.compiler.disable
def score_rows(query: torch.Tensor, rows: PreparedRows) -> torch.Tensor:
    """
    Multiply queries `[B, H, G, D]`, float32, with keys that are rows; values and exact tokens are not read.

    Returns:
        `torch.Tensor` of shape `[B, H, G, N]`, float32: the products of attention over such rows. On a GPU they are
        products of halves, which is enough for a selection.
    """
    tokens = rows.tokens
    kernel, _ = choose_token_kernel(query)
    if kernel == "compiled" and query.shape[3] <= MAX_CHANNELS:
        scores = torch.empty((*query.shape[:3], tokens.length), dtype=torch.float32, device="cpu")
        args = row_score_args(describe_queries(query, 1.0), rows.describe(query), scores=scores)
        run("score_rows", args, num_query_blocks(query) * args.splits)
        return scores
    if kernel == "triton" and tokens.length:
        triton = load_triton()
        if triton.has_room(tokens.formats, query.device, torch.float16):
            found: torch.Tensor = triton.score_rows(query, tokens)
            return found
    tiles = [
        query @ decode_rows(tile, tokens.formats[0], tokens.positions.after(first * TILE_TOKENS)).transpose(2, 3)
        for first, tile in enumerate(tokens.keys[:, :, : tokens.length].split(TILE_TOKENS, dim=2))
    ]
    return torch.cat(tiles, dim=3)


def row_score_args(queries: Structure, tokens: Structure, *, scores: torch.Tensor | None = None) -> Structure:
    """Describe scores of tokens of `PreparedRows`."""
    return make(
        "RowScoreArgs",
        queries.inputs,
        queries=queries,
        length=tokens.length,
        splits=_num_splits(tokens.length),
        rows=tokens.inputs["rows"],
        scores=scores,
    )


def _num_splits(length: int) -> int:
    return max(-(-length // _TOKENS_PER_TASK), 1)


def sizes_of(query: torch.Tensor) -> dict[str, int]:
    """Return the sizes of queries `[B, H, G, D]` by their names in C."""
    return dict(zip(("batch", "heads", "query_groups", "key_dim"), query.shape, strict=True))


def describe_queries(query: torch.Tensor, scale: float) -> Structure:
    """Describe queries `[B, H, G, D]`."""
    return make("TokenQueries", **sizes_of(query), scale=scale, data=query.float().contiguous())


def num_query_blocks(query: torch.Tensor) -> int:
    """Count the query blocks of queries `[B, H, G, D]`; see `layer.h`."""
    batch_size, num_heads, groups, _ = query.shape
    return batch_size * num_heads * -(-groups // BLOCK_QUERIES)


def readable_pages(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return pages as kernels read them; a `ValueError` if they have several dtypes."""
    if any(page.dtype != pages[0].dtype for page in pages):
        raise ValueError(f"`pages` have to be of one dtype, but are of {[page.dtype for page in pages]}")
    return [page.contiguous() for page in pages]


def _describe_rows(tokens: SelectableRows) -> Structure:
    """Describe rows, and exact tokens among them."""
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
        pages=readable_pages(tokens.pages),
        rows=parts.rows_of(tokens.keys, None, tokens.formats, tokens.positions, tokens.length),
        num_sinks=sinks.keys.shape[2],
        first_sinks=first.contiguous(),
        sink_keys=sinks.keys.contiguous(),
        sink_values=sinks.values.contiguous(),
    )
