"""What tests of the C kernels share: their levels, sizes of parts of coded rows, and attention by both kernels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from kvcache_plugins.codecs.parts import CodedPart, DensePart
from kvcache_plugins.kernels import library
from kvcache_plugins.kernels.attention import attend


class Sizes(NamedTuple):
    """Of a part and of queries; `key_total`, `value_total`: sums of the widths."""

    batch_size: int
    num_heads: int
    length: int
    key_dim: int
    value_dim: int
    key_total: int
    value_total: int
    num_queries: int


SIZES = {
    "smollm2": Sizes(1, 3, 1000, 64, 64, 19, 16, 1),
    "one-token": Sizes(1, 1, 1, 64, 64, 19, 16, 1),
    "wide": Sizes(2, 2, 129, 64, 64, 60, 40, 4),
    "no-bits-for-most": Sizes(1, 1, 70, 128, 128, 5, 3, 1),
    "least": Sizes(1, 2, 63, 8, 8, 3, 3, 3),
    "unlike-dims": Sizes(2, 2, 131, 80, 48, 30, 6, 5),
    "odd-dims": Sizes(1, 2, 65, 20, 33, 24, 40, 16),
    "large": Sizes(1, 1, 200, 300, 256, 64, 64, 2),
    # Beyond the tiles after which queries are turned back anew
    "long": Sizes(1, 1, 5000, 32, 32, 12, 8, 1),
}
Parts = Sequence[DensePart | CodedPart]


@pytest.fixture(params=["plain", "neon", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All levels of instructions in turn that there are here."""
    if request.param not in library.levels_here():
        pytest.skip(library.why_missing() or f"the processor has no {request.param}")
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", request.param)
    return str(request.param)


@pytest.fixture(params=SIZES)
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """All of them in turn."""
    return SIZES[request.param]


@pytest.fixture
def wide() -> Sizes:
    """Several items, heads and queries."""
    return SIZES["wide"]


@pytest.fixture
def long() -> Sizes:
    """Several tasks."""
    return SIZES["long"]


@pytest.fixture
def attend_both(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> Callable[[Sizes, Parts], tuple[torch.Tensor, torch.Tensor]]:
    """Attention of some queries over parts, by plain PyTorch and by the C kernels of a level."""

    def attend_both(sizes: Sizes, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        query = torch.randn(sizes.batch_size, 3 * sizes.num_heads, sizes.num_queries, sizes.key_dim)
        outputs = {}
        for kernel in ("torch", "compiled"):
            monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
            outputs[kernel] = attend(query, iter(parts), sizes.num_heads, None, kernel)
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
        return outputs["torch"], outputs["compiled"]

    return attend_both
