"""The boundary between Python and C: structures as `cpu/calls.h` declares them, made of numbers and checked tensors.

A kernel reads and writes wherever it is told to, so nothing is believed: `make` compares every tensor with the dtype
and the shape that the declaration of its field states, before its address goes into the structure.
"""

import ctypes
import re
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch

from .build import SOURCES


_SOURCE = (SOURCES / "calls.h").read_text(encoding="utf-8")
CONSTANTS: dict[str, int] = {}
for _names in re.findall(r"enum \{([^}]*)\}", _SOURCE):
    for _number, _name in enumerate(_names.split(",")):
        _key, _, _value = _name.partition("=")
        CONSTANTS[_key.strip()] = int(_value) if _value else _number
ROWS, TILE, MOST_CHANNELS = (CONSTANTS[name] for name in ("ROWS", "TILE", "MOST_CHANNELS"))
_PLAIN = frozenset((int, float, bool))
# What shapes may name beside fields and sizes
_NAMES: dict[str, Any] = {"__builtins__": {}, "any": None, **CONSTANTS}
# Dtypes of states, as C numbers them
KINDS = {torch.float32: CONSTANTS["FLOATS"], torch.bfloat16: CONSTANTS["BFLOATS"], torch.float16: CONSTANTS["HALVES"]}
_DTYPES = {
    "float": torch.float32,
    "uint8_t": torch.uint8,
    "int8_t": torch.int8,
    "uint16_t": torch.float16,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
}


# Type, names and comment of a line that declares fields
_FIELD = re.compile(r"^\s*(?:const )?(\w+) (.+?);[ ]*(?:/\*(.*)\*/)?", re.MULTILINE)


class Array(NamedTuple):
    """Dtypes and shape that a field's tensor has to have: any dtype if there is none, sizes still to be worked out."""

    dtypes: tuple[torch.dtype, ...]
    shape: CodeType


class Structure(ctypes.Structure):
    """
    A structure of `calls.h`.

    Attributes:
        addresses (`frozenset[str]`): fields that are addresses.
        arrays (`Mapping[str, Array]`): what is known of those of tensors.
        address (`int`): where the structure is, for fields of other structures and for kernels.
        given (`Mapping[str, Any]`): fields and sizes that it was made of, which it has addresses of.
        alive (`object`): what else it has addresses of.
    """

    addresses: frozenset[str] = frozenset()
    arrays: Mapping[str, Array] = {}
    address: int = 0
    given: Mapping[str, Any] = {}
    alive: object = None


STRUCTURES: dict[str, type[Structure]] = {}


def _declare(name: str, body: str) -> None:
    fields: list[tuple[str, Any]] = []
    arrays: dict[str, Array] = {}
    for base, declared, comment in _FIELD.findall(body):
        stated = re.match(r"\s*(each )?([\w ]*)\[(.*?)\]", comment)
        for one in [declared] if "(" in declared else declared.split(","):
            field, is_address = re.search(r"\w+", one.replace("const", ""))[0], "*" in one  # type: ignore[index]
            count = None if is_address else re.search(r"\[(\w+)\]", one)
            kind: Any = ctypes.c_void_p if is_address else ctypes.c_int64
            if not is_address and base != "int64_t":
                kind = ctypes.c_double if base == "double" else STRUCTURES[base]
            if count:
                kind *= CONSTANTS.get(count[1]) or int(count[1])
            fields.append((field, kind))
            if is_address and stated:
                names = [each for each in re.split(r" or | ", stated[2]) if each]
                dtypes = tuple(getattr(torch, each) for each in names) or (_DTYPES.get(base),)
                shape = compile(f"({stated[3]},)", f"calls.h, {name}.{field}", "eval")
                arrays[field] = Array(tuple(each for each in dtypes if each is not None), shape)
    addresses = frozenset(field for field, kind in fields if kind is ctypes.c_void_p)
    own = {"_fields_": fields, "arrays": arrays, "addresses": addresses}
    STRUCTURES[name] = type(name, (Structure,), own)


for _match in re.finditer(r"typedef struct \{(.*?)\n?\} (\w+);", _SOURCE, re.DOTALL):
    _declare(_match[2], _match[1])


def make(
    name: str,
    *fields: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
    base: Structure | None = None,
    **values: Any,
) -> Structure:
    """
    Makes a structure of `calls.h`; fields that are not given are 0, or what they are in `base`.

    Args:
        name (`str`): the structure's.
        *fields, **values: numbers, structures, tensors or lists of them, by field. Of a structure it is the address
            that goes into a field for addresses.
        sizes (`Mapping[str, int]`, *optional*): sizes that shapes are stated in beside the structure's own numbers.
        base (`Structure`, *optional*): one of the same name, of which a copy is made: what it holds is not checked
            again.

    Raises:
        ValueError: if a tensor is not what the field is declared for.
    """
    kind, arrays = STRUCTURES[name], STRUCTURES[name].arrays
    for own in fields:
        values |= own
    alive: list[Any] = [base]
    known = values if base is None else {**base.given, **values}
    if sizes:
        known = {**sizes, **known}
    stored = dict(values)
    for field, value in values.items():
        # Of tensors classes are asked, which takes longer than all else here
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            stored[field] = check(field, value, arrays[field], known)
        elif isinstance(value, Structure):
            if field in kind.addresses:
                stored[field] = value.address
        elif value is None:
            del stored[field]
        elif isinstance(value, list):
            addresses = [check(field, one, arrays[field], known) for one in value]
            alive.append((ctypes.c_void_p * len(value))(*addresses))
            stored[field] = ctypes.addressof(alive[-1])
    if base is None:
        structure = kind(**stored)
    else:
        structure = kind.from_buffer_copy(base)
        for field, value in stored.items():
            setattr(structure, field, value)
    structure.address, structure.given, structure.alive = ctypes.addressof(structure), known, alive
    return structure


def check(name: str, tensor: torch.Tensor, array: Array, known: Mapping[str, Any]) -> int:
    """Returns the address of a tensor that is what an array is declared to be; a `ValueError` if it is not."""
    dtypes, shape = array.dtypes, eval(array.shape, _NAMES, known)
    fits = tensor.shape == shape or shape == (None,) and tensor.dim() == 1
    if not fits and tensor.dim() == len(shape):
        fits = all(size is None or size == own for size, own in zip(shape, tensor.shape, strict=True))
    if not fits or (dtypes and tensor.dtype not in dtypes) or not tensor.is_cpu or not tensor.is_contiguous():
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"`{name}` has to be {wanted} of {' or '.join(map(str, dtypes)) or 'any dtype'}, contiguous, on the CPU, "
            f"but got {' x '.join(map(str, tensor.shape))} of {tensor.dtype}, strides {tensor.stride()}, on "
            f"{tensor.device}"
        )
    return tensor.data_ptr()
