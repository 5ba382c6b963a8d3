"""Comparison of kernels with plain PyTorch, before anything is timed."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.compressed_layer import CompressedLayer


# Relative RMS error of attention's output
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-3}
_VARIABLE = "KVCACHE_PLUGINS_KERNELS"


class MismatchError(RuntimeError):
    """Error of a kernel whose output differs from plain PyTorch."""


def require_close(name: str, output: torch.Tensor, expected: torch.Tensor) -> float:
    """
    Return the relative RMS error of `output` against `expected`, which has the same shape, best in float32. Raise a
    `MismatchError` if it is not below the tolerance of the dtype.
    """
    error = ((output.float() - expected.float()).square().mean() / expected.float().square().mean()).sqrt().item()
    # Not `>=`: NaN has to fail
    if not error < TOLERANCE[output.dtype]:
        raise MismatchError(f"{name} is wrong by {error:.1e}: not timed")
    return error


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Compute attention of caches in plain PyTorch inside the `with` block."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "torch"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE)
        os.environ.update({} if before is None else {_VARIABLE: before})


def require_close_layers(name: str, cache: Cache, num_query_heads: int) -> float | None:
    """
    Return the largest error of decode attention over a cache's compressed layers in their current state, for a random
    query each; `None` without such layers. Raise a `MismatchError` if one is above the tolerance.
    """
    errors = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer):
            continue
        # Attention would see a prompt exact that is not committed
        layer.commit_prompt()
        # A copy shares storage, and drops statistics of these random queries
        probed = copy.copy(layer)
        batch_size, _, _, head_dim = layer.states_shape("keys")
        query = torch.randn(batch_size, num_query_heads, 1, head_dim, device=layer.device, dtype=layer.dtype)
        output = probed.attend(AttentionCall(query))
        with plain_pytorch():
            expected = probed.attend(AttentionCall(query.float()))
        errors.append(require_close(f"{name}, layer {index}", output, expected))
    return max(errors, default=None)
