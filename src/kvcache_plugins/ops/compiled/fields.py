"""Codes of one width unpacked in registers: what `vectors` lacks for blocks of eight codes.

A block of width w is w bytes, up to eight. Its first four codes lie within the four bytes that begin it, its last four
within the four from byte `w // 2` on: two loads, one shift of its own for every lane, and a mask.
"""

from typing import Any

from llvmlite import ir
from numba import int32

from .vectors import _BYTE, _INT, _INTS, LANES, _make_load, _of, _pointer, _splat, untyped_intrinsic


# Int32 values from `array[row, column]` on
load_ints = _make_load(_INTS)


@untyped_intrinsic
def load_halves_of_block(typing_context: Any, array: Any, row: Any, low: Any, high: Any) -> Any:
    """Four bytes of a row as one word in the first four lanes, four others in the last four."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.Constant(_of(_INT), ir.Undefined)
        words = []
        for place in (2, 3):
            kinds = (signature.args[0], signature.args[1], signature.args[place])
            pointer = _pointer(context, builder, kinds, (args[0], args[1], args[place]), _BYTE, 4)
            word = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=1)
            words.append(builder.insert_element(vector, word, ir.Constant(_INT, 0)))
        places = ir.Constant(_of(_INT), [0] * (LANES // 2) + [LANES] * (LANES // 2))
        return builder.shuffle_vector(*words, places)

    return _INTS(array, row, low, high), generate


@untyped_intrinsic
def shift_right(typing_context: Any, words: Any, shifts: Any) -> Any:
    """Every lane shifted by its own number of bits, zeros coming in."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], args[1])

    return _INTS(_INTS, _INTS), generate


@untyped_intrinsic
def multiply_ints(typing_context: Any, words: Any, factor: Any) -> Any:
    """Every lane times one number, modulo 2^32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.mul(args[0], _splat(builder, _INT, args[1]))

    return _INTS(_INTS, int32), generate
