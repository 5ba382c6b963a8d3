"""One vector for each of the rows that share what is unpacked, as a tuple, whose length Numba knows when it compiles.

What is done for all rows is one intrinsic. Written out row for row in Python it would be typed and lowered row for
row, which takes longer than all that LLVM does with it. LLVM keeps sums that come and go as tuples in registers.

Legend: R rows, up to `ROWS`.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vectors import (
    _FLAGS,
    _FLOAT,
    _FLOATS,
    LANES,
    _constant,
    _pointer,
    _splat,
    add_pairs,
    untyped_intrinsic,
)


# Rows that share what is unpacked, at most
ROWS = 4


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FLAGS), c, flags=_FLAGS)


class _Array:
    """An argument that is an array of float32 of two dimensions."""

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any):
        self._context, self._builder, self._kind, self._array = context, builder, kind, array

    def pointer(self, row: Any, column: Any, lanes: int = LANES) -> Any:
        place = (self._array, row, column)
        return _pointer(self._context, self._builder, (self._kind, types.intp, types.intp), place, _FLOAT, lanes)

    def load(self, row: Any, column: Any) -> Any:
        return self._builder.load(self.pointer(row, column), align=4)

    def broadcast(self, row: Any, column: Any) -> Any:
        pointer = self._builder.bitcast(self.pointer(row, column), _FLOAT.as_pointer())
        return _splat(self._builder, _FLOAT, self._builder.load(pointer, align=4))


def _number(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _place(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return context.cast(builder, args[index], signature.args[index], types.intp)


def _numbered(builder: Any, sums: Any) -> Iterator[tuple[Any, Any]]:
    """The rows' numbers and vectors."""
    return ((_number(row), vector) for row, vector in enumerate(cgutils.unpack_tuple(builder, sums)))


@untyped_intrinsic
def no_sums(typing_context: Any, rows: Any) -> Any:
    """Zeros, for a tuple as long as there are rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, [_constant(_FLOAT, 0.0)] * len(rows))

    return types.UniTuple(_FLOATS, len(rows))(rows), generate


@untyped_intrinsic
def add_row_products(typing_context: Any, sums: Any, a: Any, rows: Any, place: Any) -> Any:
    """Adds `a rows[r, place]` to every row's sum; `rows` `[R, any]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, place = _Array(context, builder, rows, args[2]), _place(context, builder, signature, args, 3)
        products = [_multiply_add(builder, args[1], array.load(r, place), c) for r, c in _numbered(builder, args[0])]
        return context.make_tuple(builder, sums, products)

    return sums(sums, _FLOATS, rows, place), generate


@untyped_intrinsic
def add_weighted(typing_context: Any, sums: Any, a: Any, weights: Any, place: Any) -> Any:
    """Adds `a` times one number a row, `weights[0, place + r]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, place = _Array(context, builder, weights, args[2]), _place(context, builder, signature, args, 3)
        factors = [(array.broadcast(_number(0), builder.add(place, r)), c) for r, c in _numbered(builder, args[0])]
        return context.make_tuple(builder, sums, [_multiply_add(builder, args[1], w, c) for w, c in factors])

    return sums(sums, _FLOATS, weights, place), generate


@untyped_intrinsic
def add_turned(
    typing_context: Any, sums: Any, a: Any, own: Any, partners: Any, cosines: Any, sines: Any, token: Any, place: Any
) -> Any:
    """
    Adds what eight channels of a token's key add to scores: `a` times the token's cosines times every row's own
    channels, and times its sines times the partners'; `own`, `partners` `[R, any]`, `cosines`, `sines` `[T, any]`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        own, partners, cosines, sines = (_Array(context, builder, signature.args[i], args[i]) for i in (2, 3, 4, 5))
        token, place = (_place(context, builder, signature, args, i) for i in (6, 7))
        sine = builder.fmul(args[1], sines.load(token, place), flags=_FLAGS)
        cosine = builder.fmul(args[1], cosines.load(token, place), flags=_FLAGS)
        results = []
        for r, total in _numbered(builder, args[0]):
            total = _multiply_add(builder, cosine, own.load(r, place), total)
            results.append(_multiply_add(builder, sine, partners.load(r, place), total))
        return context.make_tuple(builder, sums, results)

    return sums(sums, _FLOATS, own, partners, cosines, sines, token, place), generate


@untyped_intrinsic
def add_to_rows(typing_context: Any, rows: Any, place: Any, sums: Any) -> Any:
    """Adds every row's sum to `rows[r, place]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, place = _Array(context, builder, rows, args[0]), _place(context, builder, signature, args, 1)
        for r, vector in _numbered(builder, args[2]):
            total = builder.fadd(array.load(r, place), vector, flags=_FLAGS)
            builder.store(total, array.pointer(r, place), align=4)
        return context.get_dummy_value()

    return types.void(rows, place, sums), generate


@untyped_intrinsic
def sums_of_two(typing_context: Any, first: Any, second: Any) -> Any:
    """The sum of every vector: those of the rows of one token, as four numbers, and those of another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = []
        for sums in args:
            own = cgutils.unpack_tuple(builder, sums)
            vectors += [*own, *[_constant(_FLOAT, 0.0)] * (ROWS - len(own))]
        return add_pairs(builder, vectors, lambda a, b: builder.fadd(a, b, flags=_FLAGS))

    return _FLOATS(first, second), generate
