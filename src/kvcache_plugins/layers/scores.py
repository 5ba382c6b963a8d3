"""Attention that a model writes out, step by step: the `AttentionCall` that its steps add up to.

`eager` attention is a product of queries and keys, a factor, a mask, a softmax and a product with values, each a
function of PyTorch. `Scores` say what has been computed of it so far; `follow` applies one more step to them. Which
function of Transformers or of a user the steps stand in does not matter: a step that means something else is not
followed, and gets numbers.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from kvcache_plugins.kernels.attention_call import AttentionCall


@dataclass(frozen=True, eq=False, slots=True)
class Scores:
    """
    Attributes:
        call (`AttentionCall`): the attention that the steps so far belong to.
        num_tokens (`int`): stored tokens that there is a score for.
        dtype (`torch.dtype`): the dtype that the model computes in.
        kind (`str`): `"scores"`, `"weights"` after the softmax, or a row's `"maximum"` or its `"index"`.
        has_sinks (`bool`): whether the scores of sinks stand behind those of the tokens.
    """

    call: AttentionCall
    num_tokens: int
    dtype: torch.dtype
    kind: Literal["scores", "weights", "maximum", "index"] = "scores"
    has_sinks: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch_size, num_heads, num_queries, _ = self.call.query.shape
        is_row = self.kind in ("scores", "weights")
        return batch_size, num_heads, num_queries, self.num_tokens + self.has_sinks if is_row else 1

    @property
    def is_product(self) -> bool:
        """Tell whether neither a mask nor sinks have been added."""
        return self.kind == "scores" and self.call.mask is None and not self.has_sinks

    @property
    def is_attention(self) -> bool:
        """Tell whether only the product with values is missing."""
        return self.kind == "weights" and not self.has_sinks


def follow(function: Callable[..., Any], args: Any, kwargs: Any) -> Scores | None:
    """Apply a function of PyTorch to `Scores` among its arguments; `None` if it is no step of attention."""
    if not args:
        return None
    if function in _CAT:
        args = *args[0], *args[1:]
    if function in _SYMMETRIC and isinstance(args[-1], Scores):
        args = args[::-1]
    step, signature = _STEPS.get(function, (None, None))
    if step is None or signature is None or not isinstance(args[0], Scores):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        # With options that no attention needs
        return None
    return step(*args, **kwargs)


def functions(*names: str) -> set[Callable[..., Any]]:
    """List PyTorch's functions of some names, methods of tensors among them."""
    return {getattr(place, name) for name in names for place in (torch.Tensor, torch, F) if hasattr(place, name)}


def _multiply(scores: Scores, factor: object) -> Scores | None:
    if not scores.is_product or not isinstance(factor, int | float) or factor <= 0:
        return None
    call = scores.call
    assert call.scale is not None
    softcap = None if call.softcap is None else call.softcap * factor
    return replace(scores, call=replace(call, scale=call.scale * factor, softcap=softcap))


def _divide(scores: Scores, divisor: object) -> Scores | None:
    return _multiply(scores, 1 / divisor) if isinstance(divisor, int | float) and divisor > 0 else None


def _cap(scores: Scores) -> Scores | None:
    """Apply a hyperbolic tangent: a softcap of 1, until a factor follows."""
    if not scores.is_product or scores.call.softcap is not None:
        return None
    return replace(scores, call=replace(scores.call, softcap=1.0))


def _add(scores: Scores, mask: object) -> Scores | None:
    """Add a mask, or a bias of positions."""
    if scores.kind != "scores" or scores.has_sinks or not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() != 4 or mask.shape[3] != scores.num_tokens or not mask.is_floating_point():
        return None
    call, dtype = scores.call, torch.promote_types(scores.dtype, mask.dtype)
    return replace(scores, call=replace(call, mask=mask if call.mask is None else call.mask + mask), dtype=dtype)


def _append(scores: Scores, sinks: object, dim: object = 0) -> Scores | None:
    """Put the scores of sinks behind those of tokens."""
    if scores.kind != "scores" or scores.has_sinks or not _is_last(dim):
        return None
    if not isinstance(sinks, torch.Tensor) or sinks.shape != (*scores.shape[:3], 1):
        return None
    dtype = torch.promote_types(scores.dtype, sinks.dtype)
    return replace(scores, call=replace(scores.call, sinks=sinks.detach()), has_sinks=True, dtype=dtype)


def _find_maximum(scores: Scores, dim: object = None, keepdim: bool = False) -> Scores | None:
    return replace(scores, kind="maximum") if scores.kind == "scores" and _is_last(dim) and keepdim else None


def _subtract(scores: Scores, maximum: object) -> Scores | None:
    """Subtract each row's maximum, which changes no weight."""
    is_own = isinstance(maximum, Scores) and maximum.kind == "maximum" and maximum.call is scores.call
    return scores if is_own and scores.kind == "scores" else None


def _normalize(
    scores: Scores, dim: object = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Scores | None:
    if scores.kind != "scores" or not _is_last(dim):
        return None
    return replace(scores, kind="weights", dtype=dtype or scores.dtype)


def _take_part(scores: Scores, index: object) -> Scores | None:
    """Take the weights of sinks off."""
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not ... or not isinstance(index[1], slice):
        return None
    if index[1] != slice(None, -1) or scores.kind != "weights" or not scores.has_sinks:
        return None
    return replace(scores, has_sinks=False)


def _cast(scores: Scores, dtype: object = torch.float32) -> Scores | None:
    return replace(scores, dtype=dtype) if isinstance(dtype, torch.dtype) else None


def _drop_out(scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores | None:
    return None if training and p else scores


def _is_last(dim: object) -> bool:
    return isinstance(dim, int) and dim in (-1, 3)


_CAT = functions("cat")
_SYMMETRIC = functions("mul", "add")
_STEPS = {
    function: (step, inspect.signature(step))
    for step, found in (
        (_multiply, functions("mul")),
        (_divide, functions("div")),
        (_cap, functions("tanh")),
        (_add, functions("add")),
        (_append, _CAT),
        (_find_maximum, functions("max")),
        (_subtract, functions("sub")),
        (_normalize, functions("softmax")),
        (_take_part, functions("__getitem__")),
        (_cast, functions("to", "type", "float")),
        (_drop_out, {F.dropout}),
    )
    for function in found
}
