"""OSCAR, a baseline: 2-bit codes by token, in rotations that a calibration fits to how attention uses each head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.packing import RowPacking
from kvcache_plugins.user_warnings import warn_user

from .affine_coder import AffineCoder, block_hadamard
from .coded_cache import CodedTokensCache
from .oscar_rotations import Rotations, load_rotations


_NBITS = 2
_KEY_CLIP, _VALUE_CLIP = 0.96, 0.92
_NUM_SINKS, _NUM_RECENT = 64, 256


class ExactTailLayer(CompressedLayer):
    """A layer whose newest tokens, as many as its `residual_length`, are exact at any time."""

    _stands_still = True


class OscarCodec(TokenCodec):
    """Codec of a layer, whose rotations all caches of a model share."""

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        yield from (coder.rotation for coder in (self.keys, self.values))  # type: ignore[attr-defined]


class OscarCache(CodedTokensCache):
    """
    A cache that stores rotated and clipped keys and values in 2 bits a channel, with a float16 scale and minimum for
    every 128 channels of a token; the first 64 and the newest 256 tokens are exact.

    Implements [OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache
    Quantization](https://huggingface.co/papers/2605.17757), a baseline: keys are rotated by the eigenvectors of their
    queries' covariance, values by those of values weighted with attention, both by a Hadamard matrix then. See `Cache`
    for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.
        calibration (`str` or `Path`, *optional*): file of `kvcache-plugins calibrate --cache oscar`. Without it the
            Hadamard matrix alone rotates, with a warning.

    Raises:
        ValueError: if the calibration is not of the model's shapes, or `config` has layers that hold full-length
            states of a kind that cannot be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        calibration: str | Path | None = None,
    ):
        self._rotations: Rotations = {}
        if calibration is None:
            warn_user("`oscar-2bit` goes without a calibration: `kvcache-plugins calibrate --cache oscar` makes one")
        else:
            self._rotations = load_rotations(calibration)
        super().__init__(RowPacking(partial(_make_codec, None)), config)

    def _layer(self, layer_idx: int) -> CompressedLayer:
        make_codec = partial(_make_codec, self._rotations.get(layer_idx))
        packing = RowPacking(make_codec, residual_length=_NUM_RECENT, num_sink_tokens=_NUM_SINKS)
        return ExactTailLayer(packing, layer_idx)


def _make_codec(rotations: tuple[torch.Tensor, torch.Tensor] | None, key_dim: int, value_dim: int) -> OscarCodec:
    keys, values = (block_hadamard(dim) for dim in (key_dim, value_dim)) if rotations is None else rotations
    if (keys.shape[-1], values.shape[-1]) != (key_dim, value_dim):
        raise ValueError(
            f"`calibration` is of heads of {keys.shape[-1]} and {values.shape[-1]} channels, but the model's have "
            f"{key_dim} and {value_dim}"
        )
    return OscarCodec(
        AffineCoder(key_dim, _NBITS, keys, _KEY_CLIP), AffineCoder(value_dim, _NBITS, values, _VALUE_CLIP)
    )
