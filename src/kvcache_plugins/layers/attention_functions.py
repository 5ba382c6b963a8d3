"""Attention functions of Transformers' table that read states themselves, over lazy states.

Under `sdpa`, `eager` attention and others that a model writes out in PyTorch, lazy states notice attention themselves.
But `flex_attention` compiles functions of its arguments, and a kernel of flash attention reads their memory. Importing
this module wraps these entries of the table. Dense states are passed on to the original function with all arguments.
The layer of lazy states computes attention under the same mask, and learns padding and queries from it.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.online_attention import OnlineAttention

from .lazy_kv import LazyKV, attend_lazily


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# Mask as in `sdpa`, and true if a causal mask applies instead
_Mask = tuple[torch.Tensor | None, bool]
_MaskReader = Callable[..., _Mask | None]

# All layers of a forward share one mask
_DENSE_MASKS: WeakKeyDictionary[BlockMask, _Mask] = WeakKeyDictionary()
# Rows of a mask that are made at a time, so that a causal mask is never held whole
_NUM_ROWS = 256


def _wrap(attend: Attention, read_mask: _MaskReader) -> Attention:
    """Wrap `attend` so that layers attend to lazy states, under the mask that `read_mask` finds in its arguments."""

    @wraps(attend)
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_lazy = isinstance(key, LazyKV) or isinstance(value, LazyKV)
        return (attend_to_lazy if is_lazy else attend)(module, query, key, value, *args, **options)

    @torch.compiler.disable
    def attend_to_lazy(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = read_mask(module, query, key, attention_mask, **options)
        if found is None:
            # These arguments hide tokens in ways that only this implementation supports
            return attend(module, query, _read(key), _read(value), attention_mask, **options)
        mask, options["is_causal"] = found
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        if softcap is None and sinks is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        # Options that `scaled_dot_product_attention` does not have
        if sinks is not None:
            sinks = sinks.detach().reshape(1, -1, 1, 1)
        call = AttentionCall(query, mask, options["is_causal"], options.get("scaling"), softcap, sinks)
        output = None
        if isinstance(key, LazyKV) and isinstance(value, LazyKV):
            output = attend_lazily(call, key, value, partial(_attend_densely, call))
        if output is None:
            output = _attend_densely(call, _read(key), _read(value))
        return output.transpose(1, 2).contiguous(), None

    return forward


def _read(states: torch.Tensor) -> torch.Tensor:
    """Return states as a dense tensor."""
    return states.read() if isinstance(states, LazyKV) else states


def _attend_densely(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    attention = OnlineAttention(call.query, key.shape[1], call.scale, call.softcap, call.sinks)
    attention.add_tile(key, value, call.full_mask(key.shape[2]))
    return attention.result()


def _read_block_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: BlockMask | torch.Tensor | None, **_: object
) -> _Mask:
    """Return the mask of `flex_attention`; no token is hidden if there is none."""
    if mask is None:
        return None, False
    if not isinstance(mask, BlockMask):
        return mask[..., : key.shape[2]], False
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

    starts, columns = range(0, num_queries, _NUM_ROWS), torch.arange(num_tokens, dtype=torch.int64, device=device)
    is_square = num_queries == num_tokens > 1
    # Stop at the first rows that differ from a causal mask
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
        # Transformers too looks at positions of one sequence only
        positions = None if query.shape[0] > 1 else position_ids
        if cu_seq_lens_q is not None or (positions is not None and bool((positions.diff() != 1).any())):
            return None
    is_causal = bool(module.is_causal if is_causal is None else is_causal)
    window = num_tokens if sliding_window is None else sliding_window
    is_windowed = num_tokens > window
    if mask is None and not is_windowed and (num_queries in (1, num_tokens) or not is_causal):
        return None, is_causal and num_queries > 1
    columns = torch.arange(num_tokens, dtype=torch.int64, device=query.device)
    distances = columns[num_tokens - num_queries :, None] - columns
    seen = distances >= 0 if is_causal else torch.ones_like(distances, dtype=torch.bool)
    if is_windowed:
        seen = seen & (distances.abs() < window)
    return seen[None, None] if mask is None else seen & mask[:, None, None, :].bool(), False


def _refuse(name: str, *_: object, **__: object) -> _Mask:
    raise ValueError(
        f"`attn_implementation` is `{name}`, which is for continuous batching and a paged cache of its own: set it to "
        "`sdpa`, `eager` or `flex_attention`"
    )


for _name, _attend in list(ALL_ATTENTION_FUNCTIONS.items()):
    if _name == "flex_attention":
        AttentionInterface.register(_name, _wrap(_attend, _read_block_mask))
    elif _name.startswith("flash_attention"):
        AttentionInterface.register(_name, _wrap(_attend, _read_padding_mask))
    elif _name.startswith("paged|"):
        AttentionInterface.register(_name, _wrap(_attend, partial(_refuse, _name)))
