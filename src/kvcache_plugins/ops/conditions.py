"""Questions that the host asks about tensors, with an answer for those that have no data."""

import torch


def is_true(condition: torch.Tensor) -> bool:
    """
    Whether a condition holds, a tensor with one element; the host waits for its device.

    Tensors on the device `meta`, on which caches are sized, have shapes and no data: they meet every condition.
    """
    return condition.is_meta or bool(condition)
