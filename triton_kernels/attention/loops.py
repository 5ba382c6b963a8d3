"""Barriers in loops: the compiler takes values out that are the same in every turn, and keeps them in registers."""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def same_number(number, PACKED: tl.constexpr):
    """
    An int32 as it is, but for the compiler of this turn of a loop: what is made of it is then not kept in registers
    through the loops inside.
    """
    if PACKED:
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    return number


@triton.jit
def same_halves(numbers):
    """Keeps float16 numbers in the loop: for tensor cores they become others, which is little work."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.float16, is_pure=False, pack=2)
