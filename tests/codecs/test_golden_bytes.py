"""Bytes of every codec, which are those of files that exist: no rewriting may change one."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_plugins.baselines.llamacpp import BlockCoder
from kvcache_plugins.baselines.turboquant import TurboQuantCoder
from kvcache_plugins.codecs.codec import Codec, QueryMoments, Sample, TokenCodec
from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.formats.groups import Grouping
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryLayout


# Small, so that no number lies as near to a bound as sums in another order are apart
HEADS, TOKENS, DIM = 2, 24, 16
LAYOUT = RotaryLayout(tuple(100.0 ** (-number / 8) for number in range(8)), "half-split", 0, DIM)


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and queries of no generator, which another release of PyTorch might change."""
    at = torch.arange(HEADS * TOKENS * DIM, dtype=torch.float64)
    keys, values, queries = (
        ((torch.sin(at * rate) * 43758.5453).frac() * 4).float().view(1, HEADS, TOKENS, DIM)
        for rate in (12.9898, 78.233, 39.346)
    )
    return keys * torch.linspace(0.2, 3, DIM) + 1, values, queries


def rows_of(codec: Codec) -> list[torch.Tensor]:
    keys, values, queries = states()
    valid, positions = torch.ones(1, TOKENS, dtype=torch.bool), Positions(3)
    moments = QueryMoments.of(queries, HEADS, codec.layouts, None) if codec.layouts else None
    return list(codec.fit(Sample(keys, values, valid, moments, positions)).encode(keys, values, positions))


def groups_of(**options: Any) -> list[torch.Tensor]:
    grouping = Grouping("channel", 8), Grouping("token", 16)
    keys, values, _ = states()
    codec = GroupCodec(
        keys=SideCodec(side="key", head_dim=DIM, grouping=grouping[0], **options),
        values=SideCodec(side="value", head_dim=DIM, grouping=grouping[1], **options),
    )
    stored = codec.encode(keys, values, None, is_prompt=True)
    # Without float16 of sums, whose last bit another order may change
    named = [each for side in stored for each in side.named_tensors()]
    return [tensor for name, tensor in named if "rank" not in name and "values" not in name]


# A function that makes the bytes, and the beginning of their SHA-256
CASES: dict[str, tuple[Callable[[], list[torch.Tensor]], str]] = {
    "t25": (lambda: rows_of(PromptCodec((DIM, DIM), (7, 6), [LAYOUT])), "4bda5db8c0577319"),
    "t16": (lambda: rows_of(PromptCodec((DIM, DIM), (4, 4), [LAYOUT])), "1c885683fbc22ff2"),
    "k4v4": (lambda: groups_of(nbits=4), "2e5e5a2f06355dcb"),
    "k2-outliers": (lambda: groups_of(nbits=2, sparsity=0.1, rank=2, num_iterations=2), "557ff97ca11c65ae"),
    "k3": (lambda: groups_of(nbits=3), "c6f7d72240daaf2d"),
    "turboquant": (
        lambda: rows_of(TokenCodec(TurboQuantCoder(DIM, 4, True), TurboQuantCoder(DIM, 2))),
        "27cbcebefcbbca2f",
    ),
}
for kind, expected in {
    **{"q8_0": "8847975ace1bed4e", "q5_1": "77ac2cad1204468c", "q5_0": "2f0951ca3ceb679a"},
    **{"q4_1": "01941fc7f2c013ed", "q4_0": "9acc007c5009d65e"},
}.items():
    coder = BlockCoder(kind, DIM, DIM)
    CASES[kind] = (lambda coder=coder: rows_of(TokenCodec(coder, coder))), expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_encoded_bytes_do_not_change(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernels)
    make, expected = CASES[name]
    digest = hashlib.sha256()
    for tensor in make():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == expected
