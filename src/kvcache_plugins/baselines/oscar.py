"""OSCAR, a baseline: 2-bit codes by token, in rotations that a calibration fits to the attention of each head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.user_warnings import warn_user

from .affine_coder import AffineCoder
from .coded_cache import CodedTokensCache
from .oscar_rotations import Rotations, load_rotations


_NBITS = 2
# Quantiles of a group's magnitudes that clip it
_KEY_CLIP = 0.96
_VALUE_CLIP = 0.92
_NUM_SINKS = 64
_NUM_RECENT = 256


class OscarCodec(TokenCodec):
    """Codec of a layer with calibrated rotations, which all caches of a model share."""

    keys: AffineCoder
    values: AffineCoder

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        for coder in (self.keys, self.values):
            if coder.rotation is not None:
                yield coder.rotation

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rotations = self.shared_tensors()
        for name, states, rotation in zip(("keys", "values"), (keys, values), rotations, strict=True):
            found = states.shape[1], states.shape[3]
            if found != rotation.shape[:2]:
                raise ValueError(
                    f"`calibration` is for {name} of {rotation.shape[0]} heads of {rotation.shape[1]} channels, but "
                    f"these have {found[0]} of {found[1]}"
                )


class OscarCache(CodedTokensCache):
    """
    A cache that stores rotated and clipped keys and values in 2 bits a channel, with a float16 scale and minimum for
    every 128 channels of a token; the first 64 and the newest 256 tokens are exact.

    Implements [OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache
    Quantization](https://huggingface.co/papers/2605.17757), a baseline: keys are rotated by the eigenvectors of their
    queries' covariance, values by those of the attention-weighted values, and both then by a Hadamard matrix. See
    `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.
        calibration (`str` or `Path`, *optional*): file of `kvcache-plugins calibrate --cache oscar`. Without it
            a Hadamard matrix is the rotation, with a warning.

    Raises:
        ValueError: if the calibration is not of the model's layers and shapes, or `config` has layers that hold
            full-length states of a kind that cannot be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        calibration: str | Path | None = None,
    ):
        rotations: Rotations | None = None
        if calibration is None:
            warn_user("`oscar-2bit` goes without a calibration: `kvcache-plugins calibrate --cache oscar` makes one")
        else:
            rotations = load_rotations(calibration)
        super().__init__(partial(_make_layer, rotations), config)


def _make_layer(rotations: Rotations | None, layer_idx: int) -> RowLayer:
    """Make a layer with its calibrated rotations, or without a calibration."""
    own = None if rotations is None else rotations.get(layer_idx)
    if rotations is not None and own is None:
        raise ValueError(
            f"`calibration` is of the layers {sorted(rotations)}, but the cache codes layer {layer_idx} too"
        )
    policy = RowPolicy(
        _make_plain_codec,
        residual_length=_NUM_RECENT,
        num_sink_tokens=_NUM_SINKS,
        least_tokens=_NUM_SINKS + 1,
        shared_codec=None if own is None else _make_calibrated_codec(*own),
        keeps_whole_tail=True,
    )
    return RowLayer(policy, layer_idx)


def _make_plain_codec(key_dim: int, value_dim: int) -> TokenCodec:
    """Make a codec without a calibration, with a Hadamard matrix as rotation."""
    return TokenCodec(
        AffineCoder(key_dim, _NBITS, is_rotated=True, clip=_KEY_CLIP),
        AffineCoder(value_dim, _NBITS, is_rotated=True, clip=_VALUE_CLIP),
    )


def _make_calibrated_codec(keys: torch.Tensor, values: torch.Tensor) -> OscarCodec:
    """Make the codec for rotations `[H, D, D]` of keys and of values."""
    return OscarCodec(
        AffineCoder(keys.shape[-1], _NBITS, rotation=keys, clip=_KEY_CLIP),
        AffineCoder(values.shape[-1], _NBITS, rotation=values, clip=_VALUE_CLIP),
    )
