"""The published sizes, from the published formula, over the three data sets of the paper's table 1."""

import pytest

from kvcache_plugins.gear.paper_size import paper_kv_percent


PREFILL_LENGTHS = (900, 1304, 1021)


@pytest.mark.parametrize(
    ("published", "nbits", "backbone", "rank", "sparsity", "residual_length"),
    [
        (27.1, 4, "kcvt", 0, 0, 20),
        (34.2, 4, "kivi", 0, 0, 64),
        (34.2, 4, "per-token", 0, 0, 64),
        (29.0, 4, "kcvt", 4, 0, 20),
        (31.0, 4, "kcvt", 4, 0.02, 20),
        (21.7, 2, "kivi", 0, 0, 64),
        (23.6, 2, "kivi", 4, 0, 64),
        (27.6, 2, "kivi", 4, 0.02, 64),
    ],
)
def test_published_sizes(published, nbits, backbone, rank, sparsity, residual_length):
    sizes = [
        paper_kv_percent(
            nbits=nbits,
            backbone=backbone,
            rank=rank,
            sparsity=sparsity,
            residual_length=residual_length,
            num_tokens=length,
        )
        for length in PREFILL_LENGTHS
    ]
    assert sum(sizes) / len(sizes) == pytest.approx(published, abs=0.3)
