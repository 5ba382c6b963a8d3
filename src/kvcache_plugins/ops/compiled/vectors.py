"""Vectors of eight floats, of four, and of sixteen words, for functions that Numba compiles.

LLVM vectorizes loops by itself, but not well across the short rows that packed codes come in, nor does it keep a block
of sums in registers. These intrinsics say it outright in LLVM's own vector types, which it makes whatever the machine
has: one instruction of AVX2, two of NEON. Nothing is checked: places have to lie within the array, and the last
dimension of an array has to be contiguous.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, int16, int32, int64, types, uint16
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


LANES = 8
WORDS = 16
_BYTE, _HALF, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
# Sums may be reordered and fused; infinities stay what they are
_FLAGS = ("reassoc", "contract", "arcp", "nsz", "afn")
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453


class _Vector(types.Type):  # type: ignore[misc]
    """Some numbers of one type."""

    def __init__(self, element: Any, lanes: int):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element} x {lanes})")


_FLOATS, _INTS, _FOUR = _Vector(float32, LANES), _Vector(int32, LANES), _Vector(float32, 4)
_WORDS = _Vector(int16, WORDS)
_LANE = {float32: _FLOAT, int32: _INT, int16: _HALF}


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: _Vector):
        super().__init__(manager, vector, _of(_LANE[vector.element], vector.lanes))


def untyped_intrinsic(function: Callable[..., Any]) -> Any:
    """`intrinsic`, whose result is called without the typing context that checkers see as its first argument."""
    return intrinsic(function)


def _of(lane: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(lane, lanes)


def _constant(lane: Any, value: float) -> Any:
    return ir.Constant(_of(lane), [value] * LANES)


def _shuffle(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(_of(_INT, len(places)), places))


def _splat(builder: Any, lane: Any, value: Any, lanes: int = LANES) -> Any:
    first = builder.insert_element(ir.Constant(_of(lane, lanes), ir.Undefined), value, ir.Constant(_INT, 0))
    return _shuffle(builder, first, first, [0] * lanes)


def _pointer(context: Any, builder: Any, kinds: Any, args: Any, lane: Any, lanes: int = LANES) -> Any:
    """To `lanes` values of type `lane`; `args` begin with an array of two dimensions, row and column."""
    row, column = (context.cast(builder, args[i], kinds[i], types.intp) for i in (1, 2))
    array = context.make_array(kinds[0])(context, builder, args[0])
    stride = cgutils.unpack_tuple(builder, array.strides)[0]
    start = builder.gep(builder.bitcast(array.data, _BYTE.as_pointer()), [builder.mul(row, stride)])
    place = builder.gep(builder.bitcast(start, lane.as_pointer()), [column])
    return builder.bitcast(place, _of(lane, lanes).as_pointer())


def _make_load(vector: _Vector) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = _LANE[vector.element]
        pointer = _pointer(context, builder, signature.args, args, lane, vector.lanes)
        return builder.load(pointer, align=vector.element.bitwidth // 8)

    def load(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
        return vector(array, row, column), generate

    return untyped_intrinsic(load)


def _make_store(vector: _Vector) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args, args, _LANE[vector.element], vector.lanes)
        builder.store(args[3], pointer, align=vector.element.bitwidth // 8)
        return context.get_dummy_value()

    def store(typing_context: Any, array: Any, row: Any, column: Any, values: Any) -> Any:
        return types.void(array, row, column, vector), generate

    return untyped_intrinsic(store)


def _make_broadcast(vector: _Vector) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, _LANE[vector.element], args[0], vector.lanes)

    def broadcast(typing_context: Any, value: Any) -> Any:
        return vector(vector.element), generate

    return untyped_intrinsic(broadcast)


# Float32, or int16, values from `array[row, column]` on
load_floats, load_four, load_words = _make_load(_FLOATS), _make_load(_FOUR), _make_load(_WORDS)
# Writes them
store_floats, store_four, store_words = _make_store(_FLOATS), _make_store(_FOUR), _make_store(_WORDS)
# One float, int32 or int16 in every lane
broadcast, broadcast_four = _make_broadcast(_FLOATS), _make_broadcast(_FOUR)
broadcast_int, broadcast_words = _make_broadcast(_INTS), _make_broadcast(_WORDS)


@untyped_intrinsic
def load_bytes(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Uint8 values as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = builder.load(_pointer(context, builder, signature.args, args, _BYTE), align=1)
        return builder.zext(packed, _of(_INT))

    return _INTS(array, row, column), generate


@untyped_intrinsic
def load_byte_words(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Sixteen uint8 values as words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = builder.load(_pointer(context, builder, signature.args, args, _BYTE, WORDS), align=1)
        return builder.zext(packed, _of(_HALF, WORDS))

    return _WORDS(array, row, column), generate


@untyped_intrinsic
def load_bfloats(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Bfloat16 values, given as uint16, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = builder.load(_pointer(context, builder, signature.args, args, _HALF), align=2)
        # They are the upper halves of floats
        bits = builder.shl(builder.zext(packed, _of(_INT)), _constant(_INT, 16))
        return builder.bitcast(bits, _of(_FLOAT))

    return _FLOATS(array, row, column), generate


@untyped_intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Has the machine bring the line of memory at an address near; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        # To read, to stay near, of data
        numbers = [ir.Constant(_INT, number) for number in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], pointer), *numbers])
        return context.get_dummy_value()

    return types.void(int64), generate


def _floats_of_halves(builder: Any, halves: Any) -> Any:
    """Vectors of finite float16, given as integers, as float32."""
    bits = builder.zext(halves, _of(_INT))
    # A half's exponent is biased by 15, a float's by 127
    magnitude = builder.shl(builder.and_(bits, _constant(_INT, 0x7FFF)), _constant(_INT, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, _of(_FLOAT)), _constant(_FLOAT, 2.0**112))
    sign = builder.shl(builder.and_(bits, _constant(_INT, 0x8000)), _constant(_INT, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, _of(_INT)), sign), _of(_FLOAT))


@untyped_intrinsic
def load_halves(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Finite float16 values, given as uint16, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = builder.load(_pointer(context, builder, signature.args, args, _HALF), align=2)
        return _floats_of_halves(builder, packed)

    return _FLOATS(array, row, column), generate


@untyped_intrinsic
def float_of_half(typing_context: Any, bits: Any) -> Any:
    """The value of one finite float16, given as uint16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_of(_HALF), None), args[0], ir.Constant(_INT, 0))
        return builder.extract_element(_floats_of_halves(builder, first), ir.Constant(_INT, 0))

    return float32(uint16), generate


@untyped_intrinsic
def masked_to_floats(typing_context: Any, packed: Any, mask: Any) -> Any:
    """`packed & mask` as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.and_(args[0], _splat(builder, _INT, args[1])), _of(_FLOAT))

    return _FLOATS(_INTS, int32), generate


@untyped_intrinsic
def field_of_words(typing_context: Any, packed: Any, shift: Any, mask: Any) -> Any:
    """`packed >> shift & mask`, of words that are not negative."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shift, mask = (_splat(builder, _HALF, arg, WORDS) for arg in args[1:])
        return builder.and_(builder.lshr(args[0], shift), mask)

    return _WORDS(_WORDS, int16, int16), generate


@untyped_intrinsic
def multiply_add_words(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a b + c` in int32, where neighbouring products are added: one instruction and an addition on most machines."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = _of(_INT, WORDS)
        products = builder.mul(builder.sext(args[0], wide), builder.sext(args[1], wide), flags=("nsw",))
        even, odd = (_shuffle(builder, products, products, list(range(i, WORDS, 2))) for i in (0, 1))
        return builder.add(builder.add(even, odd), args[2])

    return _INTS(_WORDS, _WORDS, _INTS), generate


@untyped_intrinsic
def floats_of_ints(typing_context: Any, a: Any) -> Any:
    """Int32 values as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _of(_FLOAT))

    return _FLOATS(_INTS), generate


@untyped_intrinsic
def words_of_floats(typing_context: Any, a: Any, b: Any) -> Any:
    """The numbers of two vectors, below 2^15 and above -2^15, rounded to words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Machines cut off what is behind the point: of numbers above 0 that is rounding, with a half added
        above = [builder.fadd(arg, _constant(_FLOAT, 2.0**15 + 0.5)) for arg in args]
        rounded = [builder.sub(builder.fptosi(each, _of(_INT)), _constant(_INT, 2**15)) for each in above]
        return builder.trunc(_shuffle(builder, rounded[0], rounded[1], list(range(WORDS))), _of(_HALF, WORDS))

    return _WORDS(_FLOATS, _FLOATS), generate


@untyped_intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a b + c`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(builder.fmul(args[0], args[1], flags=_FLAGS), args[2], flags=_FLAGS)

    return a(a, a, a), generate


@untyped_intrinsic
def add(typing_context: Any, a: Any, b: Any) -> Any:
    """`a + b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=_FLAGS)

    return a(a, a), generate


@untyped_intrinsic
def multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """`a b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], args[1], flags=_FLAGS)

    return a(a, a), generate


@untyped_intrinsic
def larger(typing_context: Any, a: Any, b: Any) -> Any:
    """The larger of two lanes; `b` where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), generate


@untyped_intrinsic
def smaller(typing_context: Any, a: Any, b: Any) -> Any:
    """The smaller of two lanes; `b` where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return a(a, a), generate


@untyped_intrinsic
def fold(typing_context: Any, a: Any) -> Any:
    """The first four lanes plus the last four."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = (_shuffle(builder, args[0], args[0], places) for places in ([0, 1, 2, 3], [4, 5, 6, 7]))
        return builder.fadd(*halves, flags=_FLAGS)

    return _FOUR(_FLOATS), generate


@untyped_intrinsic
def hadamard_of_eight(typing_context: Any, a: Any) -> Any:
    """A vector times the Hadamard matrix of eight, not normalized."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0]
        for half in (1, 2, 4):
            signs = ir.Constant(_of(_FLOAT), [-1.0 if lane & half else 1.0 for lane in range(LANES)])
            partners = _shuffle(builder, vector, vector, [lane ^ half for lane in range(LANES)])
            vector = builder.fadd(builder.fmul(vector, signs, flags=_FLAGS), partners, flags=_FLAGS)
        return vector

    return _FLOATS(_FLOATS), generate


@untyped_intrinsic
def exp_of_difference(typing_context: Any, a: Any, b: Any) -> Any:
    """`exp(a - b)` for `a <= b`, to a relative 5e-7; 0 below `exp(-87)`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = builder.fsub(*args)
        is_tiny = builder.fcmp_ordered("<", x, _constant(_FLOAT, -87.0))
        clamped = builder.select(is_tiny, _constant(_FLOAT, -87.0), x)
        # x = n ln 2 + r
        near = builder.fsub(builder.fmul(clamped, _constant(_FLOAT, _LOG2_E)), _constant(_FLOAT, 0.5))
        n = builder.fptosi(near, _of(_INT))
        product = builder.fmul(builder.sitofp(n, _of(_FLOAT)), _constant(_FLOAT, -_LN_2), flags=_FLAGS)
        r = builder.fadd(product, clamped, flags=_FLAGS)
        polynomial = _constant(_FLOAT, 1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            product = builder.fmul(polynomial, r, flags=_FLAGS)
            polynomial = builder.fadd(product, _constant(_FLOAT, coefficient), flags=_FLAGS)
        power = builder.shl(builder.add(n, _constant(_INT, 127)), _constant(_INT, 23))
        result = builder.fmul(polynomial, builder.bitcast(power, _of(_FLOAT)))
        return builder.select(is_tiny, _constant(_FLOAT, 0.0), result)

    return _FLOATS(_FLOATS, _FLOATS), generate


def add_pairs(builder: Any, vectors: list[Any], plus: Callable[[Any, Any], Any]) -> Any:
    """The sum of every one of eight vectors, as code."""

    def halve(vectors: list[Any], left: list[int], right: list[int]) -> list[Any]:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        return [plus(*(_shuffle(builder, *pair, places) for places in (left, right))) for pair in pairs]

    # Neighbours first, within halves of a vector: what machines with such vectors do in one step
    even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    fours = halve(halve(vectors, even, odd), even, odd)
    return halve(fours, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])[0]


@untyped_intrinsic
def sums_of_eight(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """The sum of every one of eight vectors, of floats or of ints, as one vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return add_pairs(builder, args, builder.add if a == _INTS else lambda x, y: builder.fadd(x, y, flags=_FLAGS))

    return a(*[a] * LANES), generate


def _make_column(number: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [number, number + 4, number + LANES, number + LANES + 4]
        first, second = (_shuffle(builder, args[i], args[i + 1], places) for i in (0, 2))
        return _shuffle(builder, first, second, list(range(LANES)))

    def column(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return _FLOATS(*[_FLOATS] * 4), generate

    return untyped_intrinsic(column)


# A column of the matrix of eight rows and four columns that four vectors hold
columns_of_four = [_make_column(number) for number in range(4)]
