"""Keys and values that can be stored with less precision: NaN and infinity cannot."""

from typing import NoReturn

import torch


def check_finite(
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    layer_idx: int,
    largest: float = float("inf"),
) -> None:
    """
    Raises a `ValueError` with the layer's index if real tokens `[batch_size, num_heads, tokens, head_dim]` hold NaN,
    infinity or what is not below `largest`.
    """
    if keys.is_meta:
        # Nothing is known of what has no data
        return
    # One answer is waited for, not one a side; what stands for padding may be anything, and seldom is
    if bool(_are_all_finite(keys, largest) & _are_all_finite(values, largest)):
        return
    if valid is not None and bool(_are_finite(keys, valid, largest) & _are_finite(values, valid, largest)):
        return
    name = "values" if bool(_are_finite(keys, valid, largest)) else "keys"
    what = "NaN or infinity" if largest == float("inf") else f"NaN, infinity or numbers of {largest:.0e} and more"
    raise_unstorable(f"the {name} to be compressed hold {what}", layer_idx)


def raise_unstorable(reason: str, layer_idx: int) -> NoReturn:
    """Raises a `ValueError` that gives the reason why a layer cannot store tokens, and the way out."""
    raise ValueError(
        f"layer {layer_idx}: {reason}. What was compressed before is unharmed, but layers before this one already "
        "took the update in: `crop` the last tokens or `reset` the cache."
    )


def _are_all_finite(states: torch.Tensor, largest: float) -> torch.Tensor:
    """Read once, and nothing as large is written: NaN is the least and the largest of what it is among."""
    if not states.numel():
        return torch.ones((), dtype=torch.bool, device=states.device)
    least, most = states.aminmax()
    return (least > -largest) & (most < largest)


def _are_finite(states: torch.Tensor, valid: torch.Tensor | None, largest: float) -> torch.Tensor:
    finite = (states.abs() < largest).all(dim=3).all(dim=1)
    return (finite if valid is None else finite | ~valid).all()
