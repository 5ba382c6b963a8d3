"""Calibration of OSCAR: rotations of keys and values, fitted to a model's attention, and their file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins.formats.hadamard import rotate
from kvcache_plugins.layers.query_recorder import QueryRecordingLayer, record_queries
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import unwrap_model


# Rotations of keys and of values by layer, `[H, D, D]`, float32
Rotations = dict[int, tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def calibrate_rotations(
    model: PreTrainedModel, windows: Sequence[torch.Tensor], *, on_progress: Callable[[str], None] | None = None
) -> Rotations:
    """
    Fit the rotations of every layer of full attention to the newest 256 queries of each window.

    Args:
        model (`PreTrainedModel`): the model, in eval mode, with `sdpa` attention.
        windows (`Sequence[torch.Tensor]`): token ids `[tokens]`.
        on_progress (`Callable[[str], None]`, *optional*): called before each window.

    Raises:
        ValueError: if no layer shows its queries, as with latent attention or attention in the model's own code.
    """
    sums: dict[int, list[torch.Tensor]] = {}
    inner = unwrap_model(model)
    for number, window in enumerate(windows, start=1):
        if on_progress is not None:
            on_progress(f"window {number}")
        cache = DynamicCache(config=inner.config)
        record_queries(cache)
        inner(window[None].to(inner.device), **as_argument(cache), logits_to_keep=1)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, QueryRecordingLayer) and layer.queries is not None:
                own = _covariances(layer.queries, layer.keys, layer.values, layer.scale)  # type: ignore[arg-type]
                sums[index] = [a + b for a, b in zip(sums[index], own, strict=True)] if index in sums else list(own)
    if not sums:
        raise ValueError(f"`model`: a `{type(inner).__name__}` shows a cache no queries to fit rotations to")
    return {index: (_rotation_of(own[0]), _rotation_of(own[1])) for index, own in sums.items()}


def _covariances(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return covariances `[H, D, D]` of queries `[1, H * G, Q, D]`, and of values weighted with their attention."""
    grouped = queries[0].float().unflatten(0, (keys.shape[1], -1))
    num_queries, num_tokens = queries.shape[2], keys.shape[2]
    scores = grouped @ keys[0].float().mT[:, None] * (queries.shape[3] ** -0.5 if scale is None else scale)
    is_future = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=keys.device)
    weights = scores.masked_fill(is_future.triu(num_tokens - num_queries + 1), -torch.inf).softmax(dim=-1)
    received = weights.sum(dim=(1, 2))[..., None]
    flat = grouped.flatten(1, 2).double()
    own = values[0].double()
    return (flat.mT @ flat).cpu(), (own.mT @ (own * received)).cpu()


def _rotation_of(covariance: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors `[H, D, D]`, largest first, times a Hadamard matrix, ordered to balance groups."""
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1).float()
    rotation = rotate(vectors)
    return rotation[..., _bit_reversed(rotation.shape[-1])].contiguous()


def _bit_reversed(size: int) -> list[int]:
    """Return the numbers from 0 to `size` - 1, sorted by their reversed bits."""
    num_bits = max(size - 1, 1).bit_length()
    return sorted(range(size), key=lambda index: int(f"{index:0{num_bits}b}"[::-1], 2))


def save_rotations(rotations: Rotations, path: str | Path) -> None:
    """Write rotations to a safetensors file."""
    stored: dict[str, torch.Tensor] = {}
    for index, (keys, values) in rotations.items():
        stored |= {f"{index}.keys": keys, f"{index}.values": values}
    save_file(stored, path)


def load_rotations(path: str | Path) -> Rotations:
    """Read a file of `save_rotations`; raise a `ValueError` that names `calibration` if it is none."""
    if not isinstance(path, (str, Path)) or not Path(path).is_file():
        raise ValueError(f"`calibration` is `{path}`, but there is no such file")
    try:
        stored = load_file(path)
        indices = {int(name.partition(".")[0]) for name in stored}
        rotations = {index: (stored[f"{index}.keys"], stored[f"{index}.values"]) for index in sorted(indices)}
    except (SafetensorError, KeyError, ValueError) as error:
        made_by = "`kvcache-plugins calibrate --cache oscar`"
        raise ValueError(f"`calibration` is `{path}`, but that is no file of {made_by}") from error
    return rotations
