"""Operations of a model on stored states before attention, recorded to be done to a tile of tokens at a time.

Latent attention projects what it caches to keys and values of all heads. Recorded, that is done to a tile of the
states, so that nothing has to be whole. An operation can be recorded if it leaves every token by itself, which shapes
tell: done to states without data, of a number of tokens that is no other size, it gives a tensor with as many in one
dimension.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F


# In the place of a number of tokens among recorded arguments
TOKENS = object()
# Tokens of states without data: primes, of which neither is another size of a model
_COUNTS = 10_007, 10_009


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """
    A function and its arguments, of which some are results of others, and `effects`: operations that write into its
    result afterwards. The two without a function are what is stored.
    """

    function: Callable[..., Any] | None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    effects: list["Operation"] = field(default_factory=list)

    def compute(self, done: dict["Operation", Any], num_tokens: int) -> Any:
        """
        Do the operation, and all that it is made of, to a tile of so many tokens, and keep results in `done`, which
        has what `STORED_KEYS` and `STORED_VALUES` are, `[B, H, tokens, D]`.
        """
        if self not in done:

            def fill(value: Any) -> Any:
                if isinstance(value, Operation):
                    return value.compute(done, num_tokens)
                return num_tokens if value is TOKENS else value

            assert self.function is not None
            args, kwargs = map_nested(fill, self.args), map_nested(fill, self.kwargs)
            done[self] = self.function(*args, **kwargs)
            for effect in self.effects:
                effect.compute(done, num_tokens)
        return done[self]

    def sides(self) -> set[str]:
        """Name what it is made of: `"keys"`, `"values"` or both."""
        found, waiting = set[Operation](), [self]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                map_nested(lambda value: waiting.append(value) if isinstance(value, Operation) else None, each.args)
                waiting.extend(each.effects)
        return {side for side, stored in STORED.items() if stored in found}


STORED_KEYS, STORED_VALUES = Operation(None), Operation(None)
STORED = {"keys": STORED_KEYS, "values": STORED_VALUES}


def count_for(num_tokens: int) -> int:
    """Tell how many tokens samples have in the place of so many."""
    return _COUNTS[num_tokens == _COUNTS[0]]


def find_tokens(function: Callable[..., Any], states: Any, made: torch.Tensor) -> int | None:
    """
    Find the dimension of a result, computed without data, that tokens are in, in order; `None` if there is none, or
    more than one. `states` are the first lazy ones among the arguments.
    """
    count = count_for(states.num_tokens)
    dims = [dim for dim, size in enumerate(made.shape) if size and size % count == 0]
    if len(dims) != 1 or made.shape[dims[0]] != count:
        return None
    if function in _RESHAPING and math.prod(made.shape[: dims[0]]) != math.prod(states.shape[: states.token_dim]):
        return None
    return dims[0]


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what tuples, lists and dictionaries hold."""
    if isinstance(value, tuple | list):
        made = [map_nested(function, each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {name: map_nested(function, each) for name, each in value.items()}
    return function(value)


def mark_tokens(function: Callable[..., Any], states: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Put `TOKENS` in the place of the tokens' number among sizes, where it stands for those of lazy `states`."""
    if function not in _SIZED or args[0] is not states:
        return args
    sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    before = math.prod(states.shape[: states.token_dim])
    if function in _RESHAPING and -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(states.shape) // max(-math.prod(sizes), 1)
    for place, size in enumerate(sizes):
        if size != states.num_tokens:
            continue
        if function in _RESHAPING:
            is_tokens = math.prod(sizes[:place]) == before
        else:
            is_tokens = place == states.token_dim + (len(sizes) - len(states.shape)) * (function not in _EMPTY)
        if is_tokens:
            sizes[place] = TOKENS
            break
    return args[0], tuple(sizes)


def write(base: Operation, operation: Operation) -> bool:
    """Record a copy into a part of an empty tensor; tell whether it is one, as what is stored cannot be written to."""
    while base.function is not None and base.function not in _EMPTY:
        base = base.args[0]
    if base.function is None:
        return False
    base.effects.append(operation)
    return True


def functions_named(*names: str) -> set[Callable[..., Any]]:
    """List functions of PyTorch, those of tensors among them."""
    return {getattr(place, name) for name in names for place in (torch.Tensor, torch, F) if hasattr(place, name)}


_RESHAPING = functions_named("view", "reshape", "flatten", "unflatten")
_EMPTY = functions_named("new_empty")
_SIZED = functions_named("view", "reshape", "expand", "new_empty")
RECORDABLE = (
    _RESHAPING
    | _SIZED
    | functions_named("transpose", "permute", "unsqueeze", "squeeze", "repeat", "repeat_interleave", "__getitem__")
    | functions_named("split", "chunk", "cat", "contiguous", "detach", "to", "float", "copy_")
    | functions_named("linear", "mul", "__mul__", "__rmul__", "div", "__truediv__")
)
