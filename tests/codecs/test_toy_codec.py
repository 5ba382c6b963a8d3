"""A codec of one's own: a cache with it has the contract, saving, forks, windows and padding from the layer."""

from typing import Any

import pytest
import torch

from kvcache_plugins import TransformCodingCache
from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.contract import CONTRACT, run_check
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.layers.row_layer import RowLayer


# Head dimension of the contract's models
HEAD_DIM = 64


class AbsmaxCodec(Codec):
    """Codes of eight bits, in units of a 127th of the token's largest channel."""

    def __init__(self, head_dim: int):
        self.head_dim = head_dim

    @property
    def row_sizes(self) -> tuple[int, int]:
        return self.head_dim + 2, self.head_dim + 2

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._encode(keys.float()), self._encode(values.float())

    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        return self.decode_values(rows)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        scales = rows[..., :2].contiguous().view(torch.float16).float()
        return rows[..., 2:].contiguous().view(torch.int8).float() * scales

    def _encode(self, states: torch.Tensor) -> torch.Tensor:
        scales = (states.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-7).half()
        codes = (states / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=-1)


class ToyCache(TransformCodingCache):
    """Every layer's tokens by `AbsmaxCodec`."""

    def __init__(self, config: Any = None, **options: Any):
        super().__init__(config, **{"calibration": None, **options})

    def _layer(self, index: int, config: Any = None, window: int | None = None) -> RowLayer:
        return RowLayer(self.cache_config.policy(fixed=AbsmaxCodec(HEAD_DIM)), index, self._given_mask, window)


# Checks that depend on the codec; others test the layer and the model, and `tests/contract` runs them on `transform`
CODECS_OWN = ("greedy", "crop-prompt", "deepcopy", "left-padding", "memory", "save-load", "bfloat16", "hybrid")
CHECKS = [pytest.param(each, marks=() if each.name in CODECS_OWN else pytest.mark.long) for each in CONTRACT]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_toy_codec_keeps_the_contract(contract_models, check):
    model = contract_models["hybrid" if check.on_hybrid else "llama"]
    result = run_check(check, model, lambda: ToyCache(model, sliding="compressed"))
    assert result.status == "pass", result.detail


@torch.no_grad()
def test_toy_rows_are_attended_forked_and_saved(contract_models, tmp_path):
    """Rows decode to the tokens that were encoded, beside padding, in windows and without."""
    for model in contract_models.values():
        cache, ids = ToyCache(model, sliding="compressed"), torch.randint(3, 60, (2, 140))
        mask = torch.ones_like(ids)
        mask[1, :30] = 0
        for first, last in ((0, 120), *((at, at + 1) for at in range(120, 140))):
            model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        assert all(block.keys.shape[3] == HEAD_DIM + 2 for layer in cache.layers for block in layer.storage.segments)
        assert cache.stats()["tokens_compressed"] > 0 and cache.stats()["attend_calls"] > 0
        cache.save(tmp_path / "toy.safetensors", model)
        twins = [cache.fork(1)[0], ToyCache.load(tmp_path / "toy.safetensors", model)]
        step = torch.randint(3, 60, (2, 1))
        expected, *others = (
            model(step, attention_mask=torch.cat([mask, mask[:, :1] | 1], 1), past_key_values=each).logits
            for each in (cache, *twins)
        )
        assert all(torch.equal(each, expected) for each in others)
        assert {each.get_seq_length() for each in (cache, *twins)} == {141}
