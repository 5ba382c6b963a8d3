"""How the checks compare, exactly, to rounding, or within the cache's own error; and bytes, with all that is held."""

import torch
from transformers import Cache


def require(condition: bool, message: str) -> None:
    """Raises an `AssertionError` unless `condition`."""
    if not condition:
        raise AssertionError(message)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """
    How far logits are apart: 0 if equal, about 1.4 if unrelated. It is the error relative to the centred expected
    logits, over all positions of a row; the worst row counts.
    """
    require(logits.shape == expected.shape, f"got logits of shape {tuple(logits.shape)}, not {tuple(expected.shape)}")
    logits, expected = (each - each.mean(dim=-1, keepdim=True) for each in (logits, expected))
    errors = (logits - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return errors.max().item()


def require_close(logits: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """Requires a distance of at most `limit`."""
    measured = distance(logits, expected)
    require(measured <= limit, f"{what}: the logits are {measured:.2g} apart, at most {limit:.2g} is right")


def require_same_tokens(tokens: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Requires equal tokens `[rows, steps]`; the message has the first that differs."""
    shapes = f"got tokens of shape {tuple(tokens.shape)}, not {tuple(expected.shape)}"
    require(tokens.shape == expected.shape, f"{what}: {shapes}")
    differing = (tokens != expected).nonzero().tolist()
    row, step = differing[0] if differing else (0, 0)
    count = f"{len(differing)} of {tokens.numel()} tokens differ"
    require(not differing, f"{what}: {count}, first in row {row} at step {step}")


def require_length(cache: Cache, expected: int, what: str) -> None:
    """Requires that a cache says that it holds `expected` tokens."""
    length = cache.get_seq_length()
    require(length == expected, f"{what}: `get_seq_length` says {length}, it should be {expected}")


# What a cache may refer to without holding it: the model, and what is no data
_NOT_HELD = (torch.nn.Module, type, str, bytes, int, float, complex, bool, torch.dtype, torch.device)


def reachable_bytes(value: object) -> int:
    """
    Sums the bytes of all tensors reachable through attributes, slots, items and closures, whatever their class. A
    region that several tensors view is counted once; modules are not entered.
    """
    regions: dict[tuple[object, ...], int] = {}
    seen: dict[int, object] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or id(item) in seen or isinstance(item, _NOT_HELD):
            continue
        # Kept alive, so that no other object can get the same id
        seen[id(item)] = item
        # A subclass holds its data in tensors that it refers to
        if isinstance(item, torch.Tensor) and type(item) in (torch.Tensor, torch.nn.Parameter):
            regions[(item.device, item.data_ptr(), item.nbytes)] = item.nbytes
        stack.extend(_referents(item))
    return sum(regions.values())


def _referents(item: object) -> list[object]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    closure = getattr(item, "__closure__", None) or ()
    referents = [cell.cell_contents for cell in closure]
    referents.append(getattr(item, "__self__", None))
    referents.append(getattr(item, "__dict__", None))
    for cls in type(item).__mro__:
        slots = vars(cls).get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else slots
        referents.extend(getattr(item, name, None) for name in slots if name not in ("__dict__", "__weakref__"))
    return referents
