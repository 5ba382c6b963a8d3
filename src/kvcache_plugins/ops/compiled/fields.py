"""Codes of one width unpacked in registers: what `vectors` lacks for blocks of eight codes.

A block of width w is w bytes, up to eight. Up to four lie within one word, which every lane shifts by its own number
of bits; what a code stands for then is looked up in registers, where the machine does that in one instruction. Of
wider blocks the first four codes lie within the four bytes that begin it, the last four within the four from byte
`w // 2` on: two loads, a shift, and a mask.
"""

from typing import Any

from llvmlite import ir
from numba import int32, int64

from .vectors import (
    _BYTE,
    _FLOAT,
    _FLOATS,
    _INT,
    _INTS,
    LANES,
    _constant,
    _make_load,
    _of,
    _pointer,
    _splat,
    untyped_intrinsic,
)


# Entries of a table that is looked up
TABLE_SIZE = 2 * LANES
# Int32 values from `array[row, column]` on
load_ints = _make_load(_INTS)


@untyped_intrinsic
def lookup_bits(typing_context: Any) -> Any:
    """Bits of the widest codes that `look_up` takes in one instruction: 4, 3, or 0 where there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), _lookup_bits(context))

    return int64(), generate


def _lookup_bits(context: Any) -> int:
    features = context.codegen().magic_tuple()[2].split(",")
    if "+avx512vl" in features:
        return 4
    return 3 if "+avx2" in features else 0


@untyped_intrinsic
def look_up(typing_context: Any, low: Any, high: Any, places: Any) -> Any:
    """
    Of a table that is the same again behind `2^lookup_bits()` entries, and whose first and last eight are given, the
    entries at the lowest bits of `places`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high, places = args
        floats, ints, bits = _of(_FLOAT), _of(_INT), _lookup_bits(context)
        if bits == 4:
            kind = ir.FunctionType(floats, [floats, ints, floats])
            name = "llvm.x86.avx512.vpermi2var.ps.256"
            return builder.call(_declared(builder, name, kind), [low, places, high])
        if bits == 3:
            kind = ir.FunctionType(floats, [floats, ints])
            return builder.call(_declared(builder, "llvm.x86.avx2.permps", kind), [low, places])
        table = builder.shuffle_vector(low, high, ir.Constant(_of(_INT, TABLE_SIZE), list(range(TABLE_SIZE))))
        places = builder.and_(places, _constant(_INT, TABLE_SIZE - 1))
        entries = ir.Constant(floats, ir.Undefined)
        for lane in (ir.Constant(_INT, number) for number in range(LANES)):
            entry = builder.extract_element(table, builder.extract_element(places, lane))
            entries = builder.insert_element(entries, entry, lane)
        return entries

    return _FLOATS(_FLOATS, _FLOATS, _INTS), generate


def _declared(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


@untyped_intrinsic
def load_word(typing_context: Any, array: Any, row: Any, place: Any) -> Any:
    """Four bytes of a row as one word in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args, args, _BYTE, 4)
        word = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=1)
        return _splat(builder, _INT, word)

    return _INTS(array, row, place), generate


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
