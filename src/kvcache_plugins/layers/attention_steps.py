"""Steps of attention over lazy tensors: results of functions of PyTorch that are not computed yet.

Models repeat heads before they attend, and `eager` attention is a product of queries and keys, a factor, a mask, a
softmax and a product with values, each a function of PyTorch. A step here takes the arguments of such a function, and
returns its result as a lazy tensor, or `None` if the function is no step: then it gets dense tensors. The steps may be
in any function of Transformers or of a user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F

from kvcache_plugins.kernels.attention_call import AttentionCall


Function = Callable[..., Any]
Arguments = Sequence[Any]
KeywordArguments = Mapping[str, Any]


class LazyTensor(Protocol):
    """Keys, values or scores of a layer whose numbers are not computed yet: what steps use of `lazy_kv.LazyKV`."""

    source: Any
    meaning: Any
    recipe: Any
    numbers: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype

    def derive(self, meaning: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Any:
        """Return a lazy tensor of the same layer with another meaning, and perhaps another shape and dtype."""


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """
    Keys or values as a layer stores them, `[B, H, T, D]`, or on the way to heads that are repeated.

    Attributes:
        is_kept (`bool`): True for meanings whose tensor, once dense, stays dense: somebody may write into it.
        side (`str`): `"keys"` or `"values"`.
        num_repeats (`int`): query heads that each head has been repeated for.
    """

    is_kept: ClassVar[bool] = False
    side: Literal["keys", "values"]
    num_repeats: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Transposed:
    """Keys `[B, H, D, T]` for a product with queries; `keys` are those `[B, H, T, D]`."""

    is_kept: ClassVar[bool] = False
    keys: LazyTensor


@dataclass(frozen=True, eq=False, slots=True)
class Scores:
    """
    Scores `[B, H, Q, T]` of queries over keys, or the weights made of them.

    Attributes:
        keys (`LazyTensor`): the keys `[B, H, T, D]`.
        call (`AttentionCall`): the attention that the steps so far belong to.
        kind (`str`): `"scores"`, `"weights"` after the softmax, or a row's `"maximum"` or its `"index"`.
        has_sinks (`bool`): True if the scores of sinks follow those of the tokens.
    """

    is_kept: ClassVar[bool] = True
    keys: LazyTensor
    call: AttentionCall
    kind: Literal["scores", "weights", "maximum", "index"] = "scores"
    has_sinks: bool = False

    @property
    def is_product(self) -> bool:
        """True if neither a mask nor sinks have been added."""
        return self.kind == "scores" and self.call.mask is None and not self.has_sinks

    @property
    def is_attention(self) -> bool:
        """True if only the product with values is missing."""
        return self.kind == "weights" and not self.has_sinks


def functions(*names: str) -> set[Function]:
    """List PyTorch's functions of some names, methods of tensors among them."""
    return {getattr(place, name) for name in names for place in (torch.Tensor, torch, F) if hasattr(place, name)}


def is_dense(value: object) -> bool:
    """Return True for a tensor that is not lazy."""
    return isinstance(value, torch.Tensor) and not hasattr(value, "meaning")


# Steps on keys and values. Transformers repeats heads by an index with `None`, `expand` and `reshape`


def _insert_dim(states: LazyTensor, index: object) -> LazyTensor | None:
    if index != _REPEAT_INDEX or len(states.shape) != 4 or states.meaning.num_repeats != 1:
        return None
    return states.derive(states.meaning, (*states.shape[:2], 1, *states.shape[2:]))


def _expand(states: LazyTensor, *sizes: int) -> LazyTensor | None:
    """Repeat heads, inserted as a dimension, or the only one."""
    shape = tuple(states.shape)
    if len(sizes) != len(shape) or states.meaning.num_repeats != 1:
        return None
    sizes = tuple(old if new == -1 else new for old, new in zip(shape, sizes, strict=True))
    place = len(shape) - 3
    if shape[place] != 1 or sizes[:place] != shape[:place] or sizes[place + 1 :] != shape[place + 1 :]:
        return None
    return states.derive(replace(states.meaning, num_repeats=sizes[place]), sizes)


def _merge_heads(states: LazyTensor, *sizes: int) -> LazyTensor | None:
    shape = states.shape
    if len(shape) != 5 or sizes != (shape[0], shape[1] * shape[2], *shape[3:]):
        return None
    return states.derive(states.meaning, sizes)


def transpose_keys(keys: LazyTensor, first: int, second: int) -> LazyTensor | None:
    shape = keys.shape
    if len(shape) != 4 or {first % 4, second % 4} != {2, 3}:
        return None
    return keys.derive(Transposed(keys), (*shape[:2], shape[3], shape[2]))


def _cast(states: LazyTensor, dtype: object) -> LazyTensor | None:
    return states.derive(states.meaning, dtype=dtype) if isinstance(dtype, torch.dtype) else None


def _cast_to_float(states: LazyTensor) -> LazyTensor:
    return states.derive(states.meaning, dtype=torch.float32)


# Steps on scores


def multiply_with_queries(query: object, transposed: LazyTensor) -> LazyTensor | None:
    """Make scores by a product of queries and keys."""
    if not isinstance(query, torch.Tensor) or not is_dense(query) or query.dim() != 4:
        return None
    keys = transposed.meaning.keys
    if query.shape[:2] != keys.shape[:2] or query.shape[3] != keys.shape[3] or query.dtype != keys.dtype:
        return None
    shape = *query.shape[:3], keys.shape[2]
    return transposed.derive(Scores(keys, AttentionCall(query, scale=1.0)), shape)


def _multiply(scores: LazyTensor, factor: object) -> LazyTensor | None:
    if not scores.meaning.is_product or not isinstance(factor, int | float) or factor <= 0:
        return None
    call = scores.meaning.call
    softcap = None if call.softcap is None else call.softcap * factor
    return _with_call(scores, scale=call.scale * factor, softcap=softcap)


def _divide(scores: LazyTensor, divisor: object) -> LazyTensor | None:
    return _multiply(scores, 1 / divisor) if isinstance(divisor, int | float) and divisor > 0 else None


def _cap(scores: LazyTensor) -> LazyTensor | None:
    """Apply a hyperbolic tangent: a softcap of 1, until a factor follows."""
    if not scores.meaning.is_product or scores.meaning.call.softcap is not None:
        return None
    return _with_call(scores, softcap=1.0)


def _add(scores: LazyTensor, mask: object) -> LazyTensor | None:
    """Add a mask, or a bias of positions."""
    if scores.meaning.kind != "scores" or scores.meaning.has_sinks or not isinstance(mask, torch.Tensor):
        return None
    if not is_dense(mask) or mask.dim() != 4 or mask.shape[3] != scores.shape[3] or not mask.is_floating_point():
        return None
    before, dtype = scores.meaning.call.mask, torch.promote_types(scores.dtype, mask.dtype)
    return _with_call(scores, dtype, mask=mask if before is None else before + mask)


def _append(scores: LazyTensor, sinks: object, dim: object = 0) -> LazyTensor | None:
    """Put the scores of sinks behind those of tokens."""
    if scores.meaning.kind != "scores" or scores.meaning.has_sinks or not _is_last(dim):
        return None
    if not isinstance(sinks, torch.Tensor) or not is_dense(sinks) or sinks.shape != (*scores.shape[:3], 1):
        return None
    call = replace(scores.meaning.call, sinks=sinks.detach())
    shape = *scores.shape[:3], scores.shape[3] + 1
    dtype = torch.promote_types(scores.dtype, sinks.dtype)
    return scores.derive(replace(scores.meaning, call=call, has_sinks=True), shape, dtype)


def _find_maximum(
    scores: LazyTensor, dim: object = None, keepdim: bool = False
) -> tuple[LazyTensor, LazyTensor] | None:
    if scores.meaning.kind != "scores" or not _is_last(dim) or not keepdim:
        return None
    shape = *scores.shape[:3], 1
    maximum = scores.derive(replace(scores.meaning, kind="maximum"), shape)
    return maximum, scores.derive(replace(scores.meaning, kind="index"), shape, torch.int64)


def _subtract(scores: LazyTensor, maximum: object) -> LazyTensor | None:
    """Subtract each row's maximum, which changes no weight."""
    own, other = scores.meaning, getattr(maximum, "meaning", None)
    is_own = isinstance(other, Scores) and other.kind == "maximum" and other.call is own.call
    return scores.derive(own) if is_own and own.kind == "scores" else None


def _normalize(
    scores: LazyTensor, dim: object = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> LazyTensor | None:
    if scores.meaning.kind != "scores" or not _is_last(dim):
        return None
    return scores.derive(replace(scores.meaning, kind="weights"), dtype=dtype)


def _remove_sinks(weights: LazyTensor, index: object) -> LazyTensor | None:
    """Take the weights of sinks off."""
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not ... or not isinstance(index[1], slice):
        return None
    if index[1] != slice(None, -1) or weights.meaning.kind != "weights" or not weights.meaning.has_sinks:
        return None
    return weights.derive(replace(weights.meaning, has_sinks=False), (*weights.shape[:3], weights.shape[3] - 1))


def _drop_out(scores: LazyTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> LazyTensor | None:
    return None if training and p else scores.derive(scores.meaning)


def _with_call(scores: LazyTensor, dtype: torch.dtype | None = None, **changes: Any) -> LazyTensor:
    call = replace(scores.meaning.call, **changes)
    return scores.derive(replace(scores.meaning, call=call), dtype=dtype)


def _is_last(dim: object) -> bool:
    return isinstance(dim, int) and dim in (-1, 3)


_REPEAT_INDEX = (slice(None), slice(None), None, slice(None), slice(None))
JOINING = functions("cat")
SYMMETRIC = functions("mul", "add")
MATMUL = functions("matmul")
# Steps by function, and by the meaning of the first lazy argument
STEPS: dict[tuple[Function, type], Function] = {
    (function, meaning): step
    for meaning, step, found in (
        (Stored, _insert_dim, functions("__getitem__")),
        (Stored, _expand, functions("expand")),
        (Stored, _merge_heads, functions("reshape")),
        (Stored, transpose_keys, functions("transpose")),
        (Stored, _cast, functions("to", "type")),
        (Stored, _cast_to_float, functions("float")),
        (Transposed, multiply_with_queries, MATMUL),
        (Scores, _multiply, functions("mul")),
        (Scores, _divide, functions("div")),
        (Scores, _cap, functions("tanh")),
        (Scores, _add, functions("add")),
        (Scores, _append, JOINING),
        (Scores, _find_maximum, functions("max")),
        (Scores, _subtract, functions("sub")),
        (Scores, _normalize, functions("softmax")),
        (Scores, _remove_sinks, functions("__getitem__")),
        (Scores, _cast, functions("to", "type")),
        (Scores, _cast_to_float, functions("float")),
        (Scores, _drop_out, {F.dropout}),
    )
    for function in found
}
