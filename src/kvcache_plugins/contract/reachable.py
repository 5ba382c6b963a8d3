"""Bytes of every tensor that can be reached from an object: the count that `memory()` is held against."""

import torch


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
