"""The arguments that both kernels of `quantization.py` take."""

import torch
import triton


_MAX_BYTES_IN_TILE = 64


def quantization_arguments(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    missing: torch.Tensor | None,
    exceeded: torch.Tensor | None,
    nbits: int,
) -> dict[str, object]:
    """Tensors, strides and constants; `keep` has the shape of the states, all others are contiguous."""
    head_dim = states.shape[4]
    slab = -(-head_dim // (8 // (2 if nbits == 3 else nbits)))
    keep_strides = (0,) * 5 if keep is None else keep.stride()
    return {
        "states_ptr": states,
        "keep_ptr": keep,
        "codes_ptr": codes,
        "scale_ptr": scale,
        "zero_ptr": zero,
        "missing_ptr": missing,
        "exceeded_ptr": exceeded,
        **{f"states_stride_{name}": stride for name, stride in zip("bhmld", states.stride(), strict=True)},
        **{f"keep_stride_{name}": stride for name, stride in zip("bhmld", keep_strides, strict=True)},
        "NBITS": nbits,
        "HEAD_DIM": head_dim,
        "NUM_BYTES": codes.shape[4],
        "HAS_KEEP": keep is not None,
        "WRITES_MISSING": missing is not None,
        "REPORTS": exceeded is not None,
        "BLOCK_W": min(triton.next_power_of_2(slab), _MAX_BYTES_IN_TILE),
    }
