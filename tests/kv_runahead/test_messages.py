"""Rows of tokens on their way between ranks."""

import pytest
import torch

from kvcache_plugins.kv_runahead.messages import MessageLayout


CPU = torch.device("cpu")


def states(batch_size, num_heads, num_tokens, head_dim, dtype=torch.float32):
    return torch.randn(batch_size, num_heads, num_tokens, head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sent_rows_decode_to_the_states(dtype):
    layout = MessageLayout(3, 20, 12, dtype, CPU)
    keys, values = states(2, 3, 7, 20, dtype), states(2, 3, 7, 12, dtype)
    rows = layout.make_rows(10, 2)
    layout.write(rows[3:], keys, values)
    read_keys, read_values = layout.read(rows[3:])
    assert torch.equal(read_keys, keys) and torch.equal(read_values, values)
    # First tokens are one piece of memory, and reading copies nothing
    assert rows[:5].is_contiguous()
    assert read_keys.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
