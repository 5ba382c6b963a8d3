"""Halves of words, and products of two of them at a time.

Left to itself the assembler finds pairs of its own, and moves halves about for one eighth of all instructions. In
Triton's interpreter, for float32 and on GPUs of other makers, the same is done by Triton's operations.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def multiply(left, right, PAIRS: tl.constexpr):
    """`left * right`."""
    if PAIRS:
        product = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        product = left * right
    return product


@triton.jit
def multiply_add(left, right, term, PAIRS: tl.constexpr):
    """`left * right + term`, rounded once."""
    if PAIRS:
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [left, right, term], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.fma(left, right, term)
    return result


@triton.jit
def join_halves(low, high, PAIRS: tl.constexpr):
    """Words whose halves are the lower ones of two others."""
    if PAIRS:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        word = (low & 0xFFFF) | (high << 16)
    return word
