"""Attention functions of Transformers' table, over lazy states.

`flex_attention` compiles what it is given, and a kernel of flash attention reads it: neither asks lazy states.
Importing this module wraps their entries of the table. States of other caches go on to what was there; to lazy states
the layer that stores them attends, as under `sdpa` and with the same tokens hidden, and so learns padding and queries.
A table's entry is looked up at each call: a model may change its implementation between two steps of one cache.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .lazy_states import LazyStates


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# A mask as `sdpa` takes it, and whether a causal one applies in its place
_Mask = tuple[torch.Tensor | None, bool]
_MaskReader = Callable[..., _Mask | None]

# All layers of a forward pass are given one
_DENSE_MASKS: WeakKeyDictionary[BlockMask, _Mask] = WeakKeyDictionary()
# Rows of a mask that are made at once: a causal mask need never be there whole
_NUM_ROWS = 256


def _wrap(attend: Attention, read_mask: _MaskReader) -> Attention:
    """Wrap `attend` so that layers attend to lazy states, under the mask that is read of its arguments."""

    @wraps(attend)
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(key, LazyStates) or isinstance(value, LazyStates):
            return attend_lazily(module, query, key, value, attention_mask, *args, **options)
        return attend(module, query, key, value, attention_mask, *args, **options)

    @torch.compiler.disable
    def attend_lazily(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = read_mask(module, query, key, attention_mask, **options)
        if found is None:
            # Not hidden by a mask, but by what only this implementation understands
            return attend(module, query, key + 0, value + 0, attention_mask, **options)
        mask, options["is_causal"] = found
        if options.get("softcap") is None and options.get("s_aux") is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        return _attend_eagerly(query, key, value, mask, **options), None

    return forward


def _attend_eagerly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Attend with a softcap or sinks, which `scaled_dot_product_attention` does not have, `[B, Q, H, D]`."""
    num_groups = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, repeat_kv(key, num_groups).transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        is_hiding = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if is_hiding else scores + mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return torch.matmul(weights, repeat_kv(value, num_groups)).transpose(1, 2).contiguous()


def _read_block_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: BlockMask | torch.Tensor | None, **_: object
) -> _Mask:
    """Read the mask of `flex_attention`, which hides nothing where there is none."""
    if not isinstance(mask, BlockMask):
        return None if mask is None else mask[..., : key.shape[2]], False
    if mask not in _DENSE_MASKS:
        _DENSE_MASKS[mask] = _make_dense(mask, query.shape[2], key.shape[2], query.device)
    return _DENSE_MASKS[mask]


def _make_dense(mask: BlockMask, num_queries: int, num_tokens: int, device: torch.device) -> _Mask:
    batch_size, num_heads = mask.kv_num_blocks.shape[:2]

    def rows(start: int) -> torch.Tensor:
        count = min(_NUM_ROWS, num_queries - start)
        return create_mask(
            lambda item, head, row, column: mask.mask_mod(item, head, row + start, column),
            batch_size,
            num_heads,
            count,
            num_tokens,
            device=device,
        )

    starts, columns = range(0, num_queries, _NUM_ROWS), torch.arange(num_tokens, device=device)
    is_square = num_queries == num_tokens > 1
    # Left at the first rows that show something else
    if is_square and all(
        bool((rows(start) == (columns <= columns[start : start + _NUM_ROWS, None])).all()) for start in starts
    ):
        return None, True
    dense = torch.cat([rows(start) for start in starts], dim=2)
    return None if bool(dense.all()) else dense, False


def _read_padding_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: object,
) -> _Mask | None:
    """Read the mask of flash attention, `[batch_size, num_tokens]`; `None` if sequences are packed into one."""
    num_queries, num_tokens = query.shape[2], key.shape[2]
    if mask is None and num_queries > 1:
        # As Transformers does, which looks at positions of one item alone
        positions = None if query.shape[0] > 1 else position_ids
        if cu_seq_lens_q is not None or (positions is not None and bool((positions.diff() != 1).any())):
            return None
    is_causal = bool(module.is_causal if is_causal is None else is_causal)
    window = num_tokens if sliding_window is None else sliding_window
    is_windowed = num_tokens > window
    if mask is None and not is_windowed and (num_queries in (1, num_tokens) or not is_causal):
        return None, is_causal and num_queries > 1
    columns = torch.arange(num_tokens, device=query.device)
    distances = columns[num_tokens - num_queries :, None] - columns
    seen = distances >= 0 if is_causal else torch.ones_like(distances, dtype=torch.bool)
    if is_windowed:
        seen = seen & (distances.abs() < window)
    return seen[None, None] if mask is None else seen & mask[:, None, None, :].bool(), False


def _refuse(name: str) -> _MaskReader:
    def refuse(*_: object, **__: object) -> _Mask:
        raise ValueError(
            f"`attn_implementation` is `{name}`, which is for continuous batching and a paged cache of its own: set "
            "it to `sdpa`, `eager` or `flex_attention`"
        )

    return refuse


def _register() -> None:
    for name, attend in list(ALL_ATTENTION_FUNCTIONS.items()):
        if name == "flex_attention":
            AttentionInterface.register(name, _wrap(attend, _read_block_mask))
        elif name.startswith("flash_attention"):
            AttentionInterface.register(name, _wrap(attend, _read_padding_mask))
        elif name.startswith("paged|"):
            AttentionInterface.register(name, _wrap(attend, _refuse(name)))


_register()
