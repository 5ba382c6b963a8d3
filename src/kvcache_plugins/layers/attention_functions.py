"""Attention functions of Transformers' table, over lazy states.

`sdpa` asks lazy states by itself. `eager` is written out, `flex_attention` compiles what it is given, and a kernel of
flash attention reads it: importing this module puts functions of ours into their places of the table. States of other
caches go on to what was there, for `eager` to the module's own function; to lazy states the layer that stores them
attends, with the same tokens hidden, and so learns padding and queries. A table's entry is looked up at each call: a
model may change its implementation between two steps of one cache.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcache_plugins.kernels.attention import OnlineAttention
from kvcache_plugins.kernels.attention_call import AttentionCall

from .lazy_states import LazyStates, attend_lazily


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# A mask as `sdpa` takes it, and whether a causal one applies in its place
_Mask = tuple[torch.Tensor | None, bool]
_MaskReader = Callable[..., _Mask | None]

# All layers of a forward pass are given one
_DENSE_MASKS: WeakKeyDictionary[BlockMask, _Mask] = WeakKeyDictionary()
# Rows of a mask that are made at once: a causal mask need never be there whole
_NUM_ROWS = 256
# What Transformers' functions of `eager` attention are made of: softmax, softcap, bias, mask, sinks, dropout. One that
# asks for anything else is something else
_EAGER_NAMES = (
    "F cat contiguous device device_type dropout dtype enabled expand finfo float float32 functional getattr hasattr "
    "head_dim logsumexp matmul max maybe_autocast min nn num_key_value_groups num_key_value_heads repeat_kv reshape "
    "shape sigmoid sinks size softmax tanh to torch training transpose type unsqueeze values view"
)
# By class of attention modules: where its function is, and how it is called
_EAGER_FUNCTIONS: dict[type[torch.nn.Module], tuple[str, str] | None] = {}
_EAGER_OPTIONS = "scaling dropout softcap position_bias sinks s_aux sliding_window kwargs"


def attend_eagerly(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Attend as the module's own function for `eager`, which computes where states are dense or exact, or weights are
    asked for. To those that a layer stores the layer attends, and there are no weights.
    """
    place, name = _find_eager_function(type(module))
    attend: Attention = getattr(sys.modules[place], name)
    if isinstance(key, LazyStates) and isinstance(value, LazyStates) and _asks_as_ever(attend):
        output = _attend_stored(attend, module, query, key, value, attention_mask, options)
        if output is not None:
            return output
    return attend(module, query, key, value, attention_mask, **options)


# Nothing that `torch.compile` could trace
@torch.compiler.assume_constant_result
def _find_eager_function(kind: type[torch.nn.Module]) -> tuple[str, str]:
    """Name the module and the function that a class of attention modules uses for `eager`, or raise a `ValueError`."""
    if kind not in _EAGER_FUNCTIONS:
        methods = (inspect.unwrap(each) for base in kind.__mro__ for each in vars(base).values() if callable(each))
        used = (
            (method.__module__, name)
            for method in filter(inspect.isfunction, methods)
            for name in method.__code__.co_names
            if name.endswith("eager_attention_forward") and name in method.__globals__
        )
        usual = (
            (base.__module__, "eager_attention_forward")
            for base in kind.__mro__
            if hasattr(sys.modules.get(base.__module__), "eager_attention_forward")
        )
        _EAGER_FUNCTIONS[kind] = next(chain(used, usual), None)
    found = _EAGER_FUNCTIONS[kind]
    if found is None:
        raise ValueError(
            f"`attn_implementation` is `eager`, but `{kind.__module__}` has no `eager_attention_forward` that "
            f"`{kind.__name__}` uses: set it to `sdpa`"
        )
    return found


@cache
def _asks_as_ever(attend: Attention) -> bool:
    """Tell whether a function for `eager` computes nothing but what an `AttentionCall` can say."""
    function = inspect.unwrap(attend)
    code = getattr(function, "__code__", None)
    options = list(inspect.signature(function).parameters)[5:]
    return code is not None and {*code.co_names} <= {*_EAGER_NAMES.split()} and {*options} <= {*_EAGER_OPTIONS.split()}


@torch.compiler.disable
def _attend_stored(
    attend: Attention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LazyStates,
    value: LazyStates,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Have the layer attend; `None` if weights are asked for, or it cannot."""
    wants_weights = options.get("output_attentions", getattr(module.config, "output_attentions", False))
    if options.get("dropout") or (wants_weights and key.exact is None):
        return None
    bias = options.get("position_bias")
    if bias is not None:
        mask = bias if mask is None else bias + mask
    # A new token that nothing is hidden from needs no mask, which kernels are faster without
    if mask is not None and query.shape[2] == 1 and mask.device.type == "cpu" and not bool(mask.any()):
        mask = None
    call = _make_call(module, query, mask, {**options, "is_causal": False})
    output = attend_lazily(call, key, value, lambda *dense: attend(module, query, *dense, mask, **options))
    return (output.transpose(1, 2).contiguous(), None) if isinstance(output, torch.Tensor) else output


def _make_call(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> AttentionCall:
    """Say what options of an attention function ask for, with scores of sinks, one a head or one a query."""
    named = options.get("sinks"), options.get("s_aux"), getattr(module, "sinks", None)
    sinks = next((each.detach() for each in named if isinstance(each, torch.Tensor)), None)
    if sinks is not None and sinks.dim() != 4:
        sinks = sinks.reshape(1, -1, 1, 1)
    return AttentionCall(query, mask, options["is_causal"], options.get("scaling"), options.get("softcap"), sinks)


def _wrap(attend: Attention, read_mask: _MaskReader) -> Attention:
    """Wrap `attend` so that layers attend to lazy states, under the mask that is read of its arguments."""

    @wraps(attend)
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_lazy = isinstance(key, LazyStates) or isinstance(value, LazyStates)
        return (attend_to_lazy if is_lazy else attend)(module, query, key, value, *args, **options)

    @torch.compiler.disable
    def attend_to_lazy(
        module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = read_mask(module, query, key, attention_mask, **options)
        if found is None:
            # Not hidden by a mask, but by what only this implementation understands
            return attend(module, query, key + 0, value + 0, attention_mask, **options)
        mask, options["is_causal"] = found
        if options.get("softcap") is None and options.get("s_aux") is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        # Which `scaled_dot_product_attention` does not have
        call = _make_call(module, query, mask, options)
        output = None
        if isinstance(key, LazyStates) and isinstance(value, LazyStates):
            output = attend_lazily(call, key, value, partial(_attend_densely, call))
        if output is None:
            output = _attend_densely(call, key + 0, value + 0)
        return output.transpose(1, 2).contiguous(), None

    return forward


def _attend_densely(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    attention = OnlineAttention(call.query, key.shape[1], call.scale, call.softcap, call.sinks)
    attention.add_tile(key, value, call.full_mask(key.shape[2]))
    return attention.result()


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

    starts, columns = range(0, num_queries, _NUM_ROWS), torch.arange(num_tokens, dtype=torch.int64, device=device)
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
AttentionInterface.register("eager", attend_eagerly)
