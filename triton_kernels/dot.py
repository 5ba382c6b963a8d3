"""Products on tensor cores: the blocks that `tl.dot` takes, and products that are more precise than its own."""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl


# The smallest side of an operand of `tl.dot`
_MIN_DOT_SIZE = 16


def block_size(size: int) -> int:
    """The block that covers `size` and that `tl.dot` takes."""
    return max(_MIN_DOT_SIZE, triton.next_power_of_2(size))


def dot_precision(dtype: torch.dtype) -> str:
    """A product of float16 or bfloat16 queries is exact in TF32; one of float32 is not."""
    # GPUs of AMD up to gfx90a have no TF32
    return "ieee" if dtype == torch.float32 or torch.version.hip is not None else "tf32"


def has_pairs(device_type: str) -> bool:
    """Tells whether a device takes two halves by an instruction, as NVIDIA's GPUs do, and kernels are compiled."""
    return device_type == "cuda" and torch.version.hip is None and isinstance(dot_exact, triton.JITFunction)


@triton.jit
def dot_exact(left, right, PARTS: tl.constexpr):
    """
    The product of float32 `[rows, K]` and what float16 holds exactly `[K, N]`: codes, factors, one-hot matrices.

    Rows are first scaled to at most 1, so that nothing overflows and what underflows is far below the row's largest.
    A row below 1e-30 throughout counts as zero: the factor that scales it might be infinite.
    One part (11 bits) is as precise as TF32 and takes half its registers and tensor core steps; two are near float32.
    """
    largest = tl.max(tl.abs(left), axis=1)
    left *= tl.where(largest > 1e-30, 1.0 / largest, 0.0)[:, None]
    part = left.to(tl.float16)
    product = tl.dot(part, right)
    for _ in tl.static_range(1, PARTS):
        left -= part.to(tl.float32)
        part = left.to(tl.float16)
        product = tl.dot(part, right, product)
    return product * largest[:, None]


@triton.jit
def dot_parts(left, right, product, PARTS: tl.constexpr):
    """
    `product` with that of float16 `[M, K]` and `[K, N]` added, which is float32, at most 65504, if it has two parts.

    One part (11 bits) is as precise as TF32, two are near float32. What is below `2 ** -25` is lost.
    """
    part = right.to(tl.float16)
    product = tl.dot(left, part, product)
    for _ in tl.static_range(1, PARTS):
        right = right - part.to(tl.float32)
        part = right.to(tl.float16)
        product = tl.dot(left, part, product)
    return product
