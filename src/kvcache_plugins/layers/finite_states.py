"""Keys and values that can be stored with less precision: NaN and infinity cannot."""

from typing import NoReturn

import torch


def check_finite(
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    layer_idx: int,
    largest: float = float("inf"),
    is_beyond: torch.Tensor | None = None,
) -> None:
    """
    Raises a `ValueError` with the layer's index if real tokens `[batch_size, num_heads, tokens, head_dim]` hold NaN,
    infinity or what is not below `largest`, or if `is_beyond` says that scales ended before a token did.
    """
    if keys.is_meta:
        # Nothing is known of what has no data
        return
    # One answer is waited for, not one a side; what stands for padding may be anything, and seldom is
    fits = True if is_beyond is None else ~is_beyond
    for states in (keys, values):
        if states.numel():
            # Read once, and nothing as large is written: NaN is the least and the largest of what it is among
            least, most = states.aminmax()
            fits = (least > -largest) & (most < largest) & fits
    if bool(fits):
        return
    for name, states in (("keys", keys), ("values", values)):
        if not bool(_are_finite(states, valid, largest)):
            limit = "" if largest == float("inf") else f", or numbers of {largest:.0e} and more"
            _raise_unstorable(f"the {name} to be compressed hold NaN or infinity{limit}", layer_idx)
    if is_beyond is not None and bool(is_beyond):
        _raise_unstorable("tokens are too large beside those that the tables were made of", layer_idx)


def _raise_unstorable(reason: str, layer_idx: int) -> NoReturn:
    raise ValueError(
        f"layer {layer_idx}: {reason}. What was compressed before is unharmed, but layers before this one already "
        "took the update in: `crop` the last tokens or `reset` the cache."
    )


def _are_finite(states: torch.Tensor, valid: torch.Tensor | None, largest: float) -> torch.Tensor:
    finite = (states.abs() < largest).all(dim=3).all(dim=1)
    return (finite if valid is None or not states.numel() else finite | ~valid).all()
