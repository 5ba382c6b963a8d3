"""Arithmetic of all kernels: products on tensor cores, powers of two, pairs of halves, the online softmax.

Left to itself the assembler finds pairs of its own, and moves halves about for one eighth of all instructions. In
Triton's interpreter, for float32 and on GPUs of other makers, the same is done by Triton's operations.
"""

import torch
import triton
import triton.language as tl


# The smallest side of an operand of `tl.dot`
_MIN_DOT_SIZE = 16
# Factor from scores to the base of e to those to the base of 2
LOG2_E = tl.constexpr(1.4426950408889634)
# Added to a float32 of at most `2 ** 22` and subtracted again, `1.5 * 2 ** 23` rounds to an integer, ties to even
ROUNDING = tl.constexpr(12582912.0)


def block_size(size: int) -> int:
    """The block that covers `size` and that `tl.dot` takes."""
    return max(_MIN_DOT_SIZE, triton.next_power_of_2(size))


def dot_precision(dtype: torch.dtype) -> str:
    """Choose the precision of products with queries: TF32 is exact for float16 and bfloat16, not for float32."""
    # GPUs of AMD up to gfx90a have no TF32
    return "ieee" if dtype == torch.float32 or torch.version.hip is not None else "tf32"


def has_pairs(device_type: str) -> bool:
    """Return true if kernels are compiled for a device that takes two halves by an instruction, as NVIDIA's do."""
    # In Triton's interpreter functions are of another type
    return device_type == "cuda" and torch.version.hip is None and isinstance(dot_exact, triton.JITFunction)


@triton.jit
def dot_exact(left, right, PARTS: tl.constexpr):
    """
    Multiply float32 `[rows, K]` with numbers that float16 holds exactly `[K, N]`: codes, factors, signs.

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
    Add the product of `left` `[M, K]`, float16, and `right` `[K, N]`, at most 65504 and float32 for two parts.

    One part (11 bits) is as precise as TF32, two are near float32. Numbers of `right` below `2 ** -25` count as 0.
    """
    part = right.to(tl.float16)
    product = tl.dot(left, part, product)
    for _ in tl.static_range(1, PARTS):
        right = right - part.to(tl.float32)
        part = right.to(tl.float16)
        product = tl.dot(left, part, product)
    return product


@triton.jit
def power_below(numbers):
    """The largest power of two that is at most a positive float32; 0 of 0 and of subnormal numbers."""
    return (numbers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(powers):
    """The inverse of what `power_below` gives; of 0 it is finite."""
    bits = powers.to(tl.int32, bitcast=True)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def same_number(number, PACKED: tl.constexpr):
    """
    Return an int32 by an instruction that the compiler may not move out of a loop: it then computes anew in each turn
    what depends on the number, and keeps none of that in registers from turn to turn.
    """
    if PACKED:
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    return number


@triton.jit
def same_halves(numbers):
    """Return float16 numbers by an instruction that the compiler may not move out of a loop; see `same_number`."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.float16, is_pure=False, pack=2)


@triton.jit
def update_softmax(scores, maximum, total, AXIS: tl.constexpr):
    """One step of the online softmax in base 2: probabilities, decay of what was summed so far, maximum, total."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=AXIS))
    # A row that may attend to nothing so far has no maximum to subtract
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probabilities = tl.exp2(scores - tl.expand_dims(reference, AXIS))
    decay = tl.exp2(maximum - reference)
    return probabilities, decay, new_maximum, total * decay + tl.sum(probabilities, axis=AXIS)


@triton.jit
def multiply(left, right, PAIRS: tl.constexpr):
    """Return `left * right`."""
    if PAIRS:
        product = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        product = left * right
    return product


@triton.jit
def multiply_add(left, right, term, PAIRS: tl.constexpr):
    """Return `left * right + term`, rounded once."""
    if PAIRS:
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [left, right, term], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.fma(left, right, term)
    return result


@triton.jit
def rotate_pairs(first, second, cosines, sines, PAIRS: tl.constexpr):
    """`first * cosines + second * sines` and `second * cosines - first * sines`."""
    if PAIRS:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 part;
            mul.rn.f16x2 part, $2, $4;
            fma.rn.f16x2 $0, $3, $5, part;
            mul.rn.f16x2 part, $2, $5;
            neg.f16x2 part, part;
            fma.rn.f16x2 $1, $3, $4, part;
            }""",
            "=&r,=&r,r,r,r,r",
            [first, second, cosines, sines],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first, second = first * cosines + second * sines, second * cosines - first * sines
    return first, second


@triton.jit
def permute_bytes(low, high, places):
    """Choose each byte of a word among the eight of `low` and `high`, by the four lowest nibbles of `places`."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], dtype=tl.uint32, is_pure=True, pack=1
    )


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
