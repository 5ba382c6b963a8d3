"""OSCAR, a baseline: 2-bit codes by token, in rotations that a calibration fits to how attention uses each head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.user_warnings import warn_user

from .affine_coder import AffineCoder, block_hadamard
from .coded_cache import CodedTokensCache
from .oscar_rotations import Rotations, load_rotations


_NBITS = 2
_KEY_CLIP, _VALUE_CLIP = 0.96, 0.92
_NUM_SINKS, _NUM_RECENT = 64, 256


class OscarCodec(TokenCodec):
    """Codec of a layer with calibrated rotations, which all caches of a model share."""

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        yield from self._rotations()

    def _rotations(self) -> list[torch.Tensor]:
        coders: list[Any] = [self.keys, self.values]
        return [coder.rotation for coder in coders]

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for name, states, rotation in zip(("keys", "values"), (keys, values), self._rotations(), strict=True):
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
        super().__init__(RowPolicy(_make_plain_codec), config)

    def _layer(self, layer_idx: int) -> RowLayer:
        rotations = self._rotations.get(layer_idx)
        codec = None if rotations is None else OscarCodec(*_make_coders(*rotations))
        policy = RowPolicy(
            _make_plain_codec,
            residual_length=_NUM_RECENT,
            num_sink_tokens=_NUM_SINKS,
            shared_codec=codec,
            keeps_whole_tail=True,
        )
        return RowLayer(policy, layer_idx)


def _make_plain_codec(key_dim: int, value_dim: int) -> TokenCodec:
    """Make a codec without a calibration, which a Hadamard matrix alone rotates."""
    return TokenCodec(*_make_coders(block_hadamard(key_dim), block_hadamard(value_dim)))


def _make_coders(keys: torch.Tensor, values: torch.Tensor) -> tuple[AffineCoder, AffineCoder]:
    """Make the coders of keys and values for rotations `[..., D, D]`."""
    return (
        AffineCoder(keys.shape[-1], _NBITS, keys, _KEY_CLIP),
        AffineCoder(values.shape[-1], _NBITS, values, _VALUE_CLIP),
    )
