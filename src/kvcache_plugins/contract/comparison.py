"""How the checks compare: exactly, to rounding, or within the cache's own error."""

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
    """Raises an `AssertionError` naming the distance if it is above `limit`."""
    measured = distance(logits, expected)
    require(measured <= limit, f"{what}: the logits are {measured:.2g} apart, at most {limit:.2g} is right")


def require_same_tokens(tokens: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises an `AssertionError` naming the first token that differs."""
    shapes = f"got tokens of shape {tuple(tokens.shape)}, not {tuple(expected.shape)}"
    require(tokens.shape == expected.shape, f"{what}: {shapes}")
    differing = (tokens != expected).nonzero().tolist()
    if differing:
        row, step = differing[0]
        count = f"{len(differing)} of {tokens.numel()} tokens differ"
        raise AssertionError(f"{what}: {count}, first in row {row} at step {step}")


def require_length(cache: Cache, expected: int, what: str) -> None:
    """Raises an `AssertionError` if the cache does not say that it holds `expected` tokens."""
    length = cache.get_seq_length()
    require(length == expected, f"{what}: `get_seq_length` says {length}, it should be {expected}")
