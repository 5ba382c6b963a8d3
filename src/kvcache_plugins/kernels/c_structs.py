"""Structures that the C kernels take, as `cpu/abi.h` declares them, and the check of every tensor in them.

A kernel reads and writes at the addresses that it is passed. So `make` compares each tensor with the dtype and the
shape that its field is declared with before its address goes into a structure. The declarations are read from the
header itself, line by line: a field exists once, and C and Python cannot disagree about it.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .build import SOURCES


# An entry of an `enum`, and a field: its type, whether it is a pointer, its name, count, shape and dtypes
_ENTRY = re.compile(r"(\w+) = (\d+)")
_FIELD = re.compile(
    r"(?:const )?(\w+) (\*const \*|\*)?(\w+)(?:\[(\d+)\])?(?: SHAPES?\(([^)]*)\))?(?: DTYPES\(([^)]*)\))?"
)
_NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
_DTYPES = {
    "float": (torch.float32,),
    "half": (torch.float16,),
    "uint8_t": (torch.uint8,),
    "int8_t": (torch.int8,),
    "int32_t": (torch.int32,),
    "int64_t": (torch.int64,),
}
# Types whose values need no check
_PLAIN = frozenset((int, float, bool))


class TensorField(NamedTuple):
    """Dtypes of a field's tensor, any if there are none, and its shape: sizes or names of sizes, any if `None`."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | str | None, ...]


class Structure(ctypes.Structure):
    """
    A structure of `abi.h`.

    Attributes:
        pointers (`frozenset[str]`): fields that are addresses.
        tensors (`Mapping[str, TensorField]`): declarations of the fields that are addresses of tensors.
        address (`int`): the structure's own, for kernels and for fields of other structures.
        inputs (`Mapping[str, Any]`): fields and sizes that `make` was called with, which the structure points to.
        keepalive (`object`): further objects that it points to.
    """

    pointers: frozenset[str] = frozenset()
    tensors: Mapping[str, TensorField] = {}
    address: int = 0
    inputs: Mapping[str, Any] = {}
    keepalive: object = None


def _statements(body: str) -> Iterator[str]:
    without_comments = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    for statement in without_comments.split(";"):
        if words := statement.split():
            yield " ".join(words)


def _read_constants(source: str) -> dict[str, int]:
    constants: dict[str, int] = {}
    for body in re.findall(r"^enum \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL):
        constants |= {name: int(number) for name, number in _ENTRY.findall(body)}
    return constants


def _read_shape(text: str, constants: Mapping[str, int]) -> tuple[int | str | None, ...]:
    shape: list[int | str | None] = []
    for name in text.split(", "):
        shape.append(None if name == "any" else int(name) if name.isdecimal() else constants.get(name, name))
    return tuple(shape)


def _read_dtypes(base: str, names: str | None) -> tuple[torch.dtype, ...]:
    if names is None:
        return _DTYPES[base]
    return () if names == "any" else tuple(getattr(torch, name) for name in names.split(", "))


def _read_structure(
    name: str, body: str, constants: Mapping[str, int], known: Mapping[str, type[Structure]]
) -> type[Structure]:
    fields: list[tuple[str, Any]] = []
    tensors: dict[str, TensorField] = {}
    for statement in _statements(body):
        match = _FIELD.fullmatch(statement)
        if match is None:
            raise ValueError(f"`{statement}` of `{name}` in abi.h is no field that can be read")
        base, pointer, field, count, shape, dtypes = match.groups()
        kind: Any = ctypes.c_void_p if pointer else _NUMBERS.get(base) or known[base]
        fields.append((field, kind * int(count) if count else kind))
        if shape:
            tensors[field] = TensorField(_read_dtypes(base, dtypes), _read_shape(shape, constants))
    pointers = frozenset(field for field, kind in fields if kind is ctypes.c_void_p)
    return type(name, (Structure,), {"_fields_": fields, "tensors": tensors, "pointers": pointers})


def _read_structures(source: str, constants: Mapping[str, int]) -> dict[str, type[Structure]]:
    structures: dict[str, type[Structure]] = {}
    for body, name in re.findall(r"^typedef struct \{\n(.*?)^\} (\w+);", source, re.MULTILINE | re.DOTALL):
        structures[name] = _read_structure(name, body, constants, structures)
    return structures


_SOURCE = (SOURCES / "abi.h").read_text(encoding="utf-8")
CONSTANTS = _read_constants(_SOURCE)
STRUCTURES = _read_structures(_SOURCE, CONSTANTS)
BLOCK_QUERIES, TILE, MAX_CHANNELS = (CONSTANTS[name] for name in ("BLOCK_QUERIES", "TILE", "MAX_CHANNELS"))
# Dtypes of states, and their numbers in C
KINDS = {torch.float32: CONSTANTS["F32"], torch.bfloat16: CONSTANTS["BF16"], torch.float16: CONSTANTS["F16"]}


def make(name: str, sizes: Mapping[str, int] | None = None, /, **values: object) -> Structure:
    """
    Make a structure of `abi.h`. Fields that are not given are 0.

    Args:
        name (`str`): the structure's.
        sizes (`Mapping[str, int]`, *optional*): sizes that shapes name, besides the structure's own numbers.
        **values: numbers, structures, tensors or lists of tensors, by field. Pointers get addresses of structures.

    Raises:
        ValueError: if a tensor is not what the field is declared for.
    """
    kind = STRUCTURES[name]
    known = {**sizes, **values} if sizes else values
    stored = dict(values)
    keepalive: list[ctypes.Array[ctypes.c_void_p]] = []
    for field, value in values.items():
        # Tensors come last: asking whether an object is one takes longer than all else here
        if type(value) in _PLAIN:
            continue
        if value is None:
            del stored[field]
        elif isinstance(value, Structure):
            if field in kind.pointers:
                stored[field] = value.address
        elif isinstance(value, (list, tuple)):
            if field in kind.tensors:
                keepalive.append(_addresses(field, value, kind.tensors[field], known))
                stored[field] = ctypes.addressof(keepalive[-1])
        elif isinstance(value, torch.Tensor):
            stored[field] = check(field, value, kind.tensors[field], known)
    structure = kind(**stored)
    structure.address = ctypes.addressof(structure)
    structure.inputs = known
    structure.keepalive = keepalive
    return structure


def _addresses(
    name: str, tensors: Sequence[torch.Tensor], field: TensorField, sizes: Mapping[str, Any]
) -> "ctypes.Array[ctypes.c_void_p]":
    """Make an array of the addresses of tensors that a field is declared for."""
    addresses = (ctypes.c_void_p * len(tensors))()
    for index, tensor in enumerate(tensors):
        addresses[index] = check(name, tensor, field, sizes)
    return addresses


def check(name: str, tensor: torch.Tensor, field: TensorField, sizes: Mapping[str, Any]) -> int:
    """Return the address of a tensor that is what a field is declared to be, or raise a `ValueError`."""
    shape: list[int | None] = []
    for size in field.shape:
        shape.append(sizes[size] if isinstance(size, str) else size)
    fits = len(shape) == len(tensor.shape)
    for wanted, own in zip(shape, tensor.shape, strict=False):
        fits = fits and (wanted is None or wanted == own)
    if fits and (not field.dtypes or tensor.dtype in field.dtypes) and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()
    sizes_wanted = " x ".join("any" if size is None else str(size) for size in shape)
    dtypes = " or ".join(map(str, field.dtypes)) or "any dtype"
    raise ValueError(
        f"`{name}` has to be {sizes_wanted} of {dtypes}, contiguous, on the CPU, but got "
        f"{' x '.join(map(str, tensor.shape))} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}"
    )


def as_words(structure: ctypes.Structure) -> "memoryview[int]":
    """View a structure as words of 64 bits, which are written in a third of the time that its fields take."""
    return memoryview(structure).cast("B").cast("q")


def word_offsets(name: str) -> SimpleNamespace:
    """Map the fields of a structure to their words, and the count of its tasks to `count`."""
    kind = STRUCTURES[name]
    offsets = {field: getattr(kind, field).offset // 8 for field, *_ in kind._fields_}
    if "tasks" in offsets:
        offsets["count"] = offsets["tasks"] + STRUCTURES["Tasks"].count.offset // 8
    return SimpleNamespace(**offsets)
