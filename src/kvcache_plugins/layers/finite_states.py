"""Keys and values that can be stored with less precision: NaN and infinity cannot."""

import torch


def check_finite(keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, layer_idx: int) -> None:
    """
    Raises a `ValueError` with the layer's index if real tokens `[batch_size, num_heads, tokens, head_dim]` hold NaN or
    infinity.
    """
    if keys.is_meta:
        # Nothing is known of what has no data
        return
    # One answer is waited for, not one a side; what stands for padding may be anything, and seldom is
    if bool(_are_all_finite(keys) & _are_all_finite(values)):
        return
    if valid is not None and bool(_are_finite(keys, valid) & _are_finite(values, valid)):
        return
    name = "values" if bool(_are_finite(keys, valid)) else "keys"
    raise ValueError(
        f"layer {layer_idx}: the {name} to be compressed hold NaN or infinity. What was compressed before is "
        "unharmed, but layers before this one already took the update in: `crop` the last tokens or `reset` the cache."
    )


def _are_all_finite(states: torch.Tensor) -> torch.Tensor:
    """Read once, and nothing as large is written: NaN is the least and the largest of what it is among."""
    if not states.numel():
        return torch.ones((), dtype=torch.bool, device=states.device)
    least, largest = states.aminmax()
    return least.isfinite() & largest.isfinite()


def _are_finite(states: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    finite = states.isfinite().all(dim=3).all(dim=1)
    return (finite if valid is None else finite | ~valid).all()
