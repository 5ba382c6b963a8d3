"""Check of tokens before they are packed."""

import torch


def check_finite(
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    layer_idx: int,
    largest: float = float("inf"),
    overflow: torch.Tensor | None = None,
) -> None:
    """
    Raise a `ValueError` with the layer's index if real tokens `[B, H, T, D]`, `valid` `[B, T]`, hold NaN, infinity or
    numbers of `largest` and more, or if `overflow` says that the scales of the format end below a token.
    """
    if keys.is_meta:
        # There is no data to read
        return
    # The host waits for one answer, not for one a side. Padding may be anything, and seldom is
    fits = True if overflow is None else ~overflow
    for states in (keys, values):
        if states.numel():
            # One reading, and nothing as large is written: NaN is both minimum and maximum of a tensor that has one
            least, most = states.aminmax()
            fits = (least > -largest) & (most < largest) & fits
    if bool(fits):
        return
    limit = "" if largest == float("inf") else f", or numbers of {largest:.0e} and more"
    reasons = []
    for name, states in (("keys", keys), ("values", values)):
        is_unfit = ~(states.abs() < largest).all(dim=3).all(dim=1)
        if bool((is_unfit if valid is None or not states.numel() else is_unfit & valid).any()):
            reasons.append(f"the {name} to be compressed hold NaN or infinity{limit}")
    if overflow is not None and bool(overflow):
        reasons.append("tokens are too large beside those that the tables were made of")
    if reasons:
        raise ValueError(
            f"layer {layer_idx}: {reasons[0]}. Earlier tokens are unharmed, but layers before this one already "
            "hold the update: `crop` the last tokens or `reset` the cache."
        )
