"""Rows of tokens on their way between ranks."""

import pytest
import torch

from kvcache_plugins.kv_runahead.messages import MessageLayout


CPU = torch.device("cpu")


def states(batch_size, num_heads, num_tokens, head_dim, dtype=torch.float32):
    return torch.randn(batch_size, num_heads, num_tokens, head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_the_states(dtype):
    layout = MessageLayout(3, 20, 12, dtype, CPU)
    keys, values = states(2, 3, 7, 20, dtype), states(2, 3, 7, 12, dtype)
    rows = layout.make_rows(10, 2)
    layout.write(rows[3:], keys, values)
    read_keys, read_values = layout.read(rows[3:])
    assert torch.equal(read_keys, keys) and torch.equal(read_values, values)
    # What belongs to the first tokens is one piece, and what is read are no copies
    assert rows[:5].is_contiguous()
    assert read_keys.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


@pytest.mark.parametrize("nbits", [4, 8])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_quantized_rows(nbits, head_dim):
    layout = MessageLayout(2, head_dim, head_dim, torch.float32, CPU, nbits)
    keys, values = states(3, 2, 9, head_dim), states(3, 2, 9, head_dim) + 5
    rows = layout.make_rows(9, 3)
    layout.write(rows, keys, values)
    for exact, rounded in zip((keys, values), layout.read(rows), strict=True):
        group_size = 64 if head_dim % 64 == 0 else head_dim
        groups = exact.unflatten(3, (-1, group_size))
        # Half a step of each group, and what float16 takes from scale and zero
        step = (groups.amax(dim=4) - groups.amin(dim=4)) / (2**nbits - 1)
        error = (rounded - exact).unflatten(3, (-1, group_size)).abs().amax(dim=4)
        assert bool((error <= 0.5 * step + 0.01).all())
    bytes_of_side = head_dim * nbits // 8 + 4 * max(head_dim // 64, 1)
    assert rows.nbytes == 9 * 3 * 2 * 2 * bytes_of_side


def test_out_of_range():
    layout = MessageLayout(1, 16, 16, torch.float32, CPU, 8)
    with pytest.raises(ValueError, match="float16"):
        layout.write(layout.make_rows(2, 1), states(1, 1, 2, 16) * 1e6, states(1, 1, 2, 16))
