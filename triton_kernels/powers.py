"""Powers of two near numbers: what is scaled by them loses nothing."""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def power_below(numbers):
    """The largest power of two that is at most a positive float32; 0 of 0 and of subnormal numbers."""
    return (numbers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(powers):
    """The inverse of what `power_below` gives; of 0 it is finite."""
    bits = powers.to(tl.int32, bitcast=True)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)
