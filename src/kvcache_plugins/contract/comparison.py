"""Requirements of the checks (equal tokens, logits within a distance, lengths) and bytes reachable from a cache."""

import torch
from transformers import Cache

from kvcache_plugins.reports.memory import reachable_tensors


def require(condition: bool, message: str) -> None:
    """Raise an `AssertionError` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """
    Return the largest distance of a sequence's logits from the expected ones, relative to the norm of these, both
    centred: 0 for equal logits, 1.4 for unrelated ones.
    """
    require(logits.shape == expected.shape, f"got logits of shape {tuple(logits.shape)}, not {tuple(expected.shape)}")
    logits, expected = (each - each.mean(dim=-1, keepdim=True) for each in (logits, expected))
    errors = (logits - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return errors.max().item()


def require_close(logits: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """Require a distance of at most `limit`."""
    measured = distance(logits, expected)
    require(measured <= limit, f"{what}: the logits are {measured:.2g} apart, at most {limit:.2g} is right")


def require_same_tokens(tokens: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Require equal tokens `[batch, steps]`; the message has the first that differs."""
    shapes = f"got tokens of shape {tuple(tokens.shape)}, not {tuple(expected.shape)}"
    require(tokens.shape == expected.shape, f"{what}: {shapes}")
    differing = (tokens != expected).nonzero().tolist()
    sequence, step = differing[0] if differing else (0, 0)
    count = f"{len(differing)} of {tokens.numel()} tokens differ"
    require(not differing, f"{what}: {count}, first in sequence {sequence} at step {step}")


def require_length(cache: Cache, expected: int, what: str) -> None:
    """Require that a cache reports `expected` tokens."""
    length = cache.get_seq_length()
    require(length == expected, f"{what}: `get_seq_length` says {length}, it should be {expected}")


def reachable_bytes(value: object) -> int:
    """Sum the bytes of all tensors reachable from `value`; memory that several tensors view counts once."""
    regions = {(each.device, each.data_ptr(), each.nbytes) for each in reachable_tensors(value)}
    return sum(size for _, _, size in regions)
