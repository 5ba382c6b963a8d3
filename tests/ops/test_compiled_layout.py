"""Vectors of packed codes: each channel's bits are where the layout says, once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugins.ops.compiled.layout import code_layout
from kvcache_plugins.ops.quantization import SUPPORTED_NBITS, pack


@settings(max_examples=60, deadline=None)
@given(nbits=st.sampled_from(SUPPORTED_NBITS), head_dim=st.integers(1, 160), num_groups=st.integers(1, 4))
def test_codes_are_the_sums_of_their_vectors(nbits, head_dim, num_groups):
    head_dim *= num_groups
    layout = code_layout(nbits, head_dim, num_groups)
    codes = torch.randint(0, 2**nbits, (head_dim,), dtype=torch.uint8)
    row = torch.nn.functional.pad(pack(codes, nbits), (0, 8)).numpy()
    found = torch.zeros(head_dim)
    for group in range(num_groups):
        first, last = layout.group_ends[group : group + 2]
        assert (last - first) % 2 == 0
        for v in range(first, last):
            assert layout.places[v] + 8 <= layout.row_size
            for lane, channel in enumerate(layout.channels[v]):
                if channel >= 0:
                    assert channel * num_groups // head_dim == group
                    byte = int(row[layout.places[v] + lane])
                    found[channel] += float(byte & int(layout.masks[v])) * float(layout.weights[v])
    assert torch.equal(found, codes.float())


@pytest.mark.parametrize(("nbits", "head_dim"), [(2, 64), (3, 64), (4, 128), (8, 80), (2, 256)])
def test_usual_head_dims_are_in_order(nbits, head_dim):
    layout = code_layout(nbits, head_dim, 1)
    used = layout.weights != 0
    assert layout.in_order[used].all()
