"""Push of a new token behind the newest ones, keys and values by one launch.

Legend: B batch, H key/value heads, D and E head dims of keys and values.
"""

import torch
import triton
import triton.language as tl

from ..launch import Launch


@triton.jit(
    do_not_specialize=["capacity", "place"],
    do_not_specialize_on_alignment=["new_keys_ptr", "new_values_ptr"],
)
def push_exact_kernel(
    new_keys_ptr, new_values_ptr, keys_ptr, values_ptr, capacity, place, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the token of one head."""
    matrix = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    row = matrix * capacity + place
    keys = tl.load(new_keys_ptr + matrix * KEY_DIM + channels, mask=channels < KEY_DIM)
    tl.store(keys_ptr + row * KEY_DIM + channels, keys, mask=channels < KEY_DIM)
    values = tl.load(new_values_ptr + matrix * VALUE_DIM + channels, mask=channels < VALUE_DIM)
    tl.store(values_ptr + row * VALUE_DIM + channels, values, mask=channels < VALUE_DIM)


def prepare_exact_push(new: tuple[torch.Tensor, torch.Tensor], tail: tuple[torch.Tensor, torch.Tensor]) -> Launch:
    """
    Prepare the launch that writes a token, keys and values `[B, H, 1, D or E]`, contiguous, to place 0 of storage
    `[B, H, capacity, D or E]`.
    """
    key_dim, value_dim = (states.shape[3] for states in tail)
    arguments = {
        "new_keys_ptr": new[0],
        "new_values_ptr": new[1],
        "keys_ptr": tail[0],
        "values_ptr": tail[1],
        "capacity": tail[0].shape[2],
        "place": 0,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK": triton.next_power_of_2(max(key_dim, value_dim)),
    }
    return Launch(push_exact_kernel, (tail[0].shape[0] * tail[0].shape[1],), arguments, {"num_warps": 1}, None)
