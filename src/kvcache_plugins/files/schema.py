"""Dataclasses as a JSON document and named tensors, and back: the one place that believes what a file says.

A record is a dataclass whose annotations say all that its fields may be, and the paths of its fields are the names of
its tensors: `layers.0.prefix.keys`.

    int, float, bool, str       of JSON: an integer from 0 on, a finite number; `Annotated[..., Range(...)]` says more
    Literal["a", "b"]           one of these words
    torch.dtype                 by its name, one of `FLOATS`
    list, tuple, dict           of one type each; keys are strings
    records                     objects; a union of several has the class's name as `kind`
    X | None                    left out where it is None
    torch.Tensor                `Annotated[torch.Tensor, Stored(...)]`, with shape, dtype and range
    dict[str, torch.Tensor]     whatever is below the path: for a codec, which checks it by `check_layout`
    Any                         as it is

A size may have a name: an integer field of the record or of one around it, or what the first tensor that names it has.
A record says in `check` what holds between its fields; everything that is wrong is a `ValueError` naming the field.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import torch


# Positions, lengths and counts of anything are below; what is above would overflow somewhere
MAX_INTEGER = 2**40
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MAX_NUMBER = 1e300
_MAX_SHOWN = 80
_KIND = "kind"

RecordT = TypeVar("RecordT")
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest number that a field may be, both included."""

    least: float = 0
    most: float = MAX_INTEGER


class Stored:
    """Describes a tensor: shape (sizes, names of sizes, `None` for any), dtypes, bounds (`least`, `most` included)."""

    def __init__(
        self,
        shape: Sequence[int | str | None],
        *dtypes: torch.dtype,
        least: float | None = None,
        most: float | None = None,
        above: float | None = None,
        is_finite: bool = True,
    ):
        self.shape, self.dtypes, self.is_finite = tuple(shape), dtypes, is_finite
        self.least, self.most, self.above = least, most, above

    def check(self, name: str, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
        """Raises a `ValueError` unless `tensor` is like that; sizes that have no number yet are added to `sizes`."""
        wanted = [sizes.get(size) if isinstance(size, str) else size for size in self.shape]
        fits = tensor.dim() == len(wanted) and all(
            size in (None, found) for size, found in zip(wanted, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype not in self.dtypes:
            shape = ", ".join("any" if size is None else str(size) for size in wanted)
            raise ValueError(
                f"the tensor `{name}` has to be of shape [{shape}] in {' or '.join(map(str, self.dtypes))} but is of "
                f"shape {list(tensor.shape)} in {tensor.dtype}"
            )
        named = zip(self.shape, tensor.shape, strict=True)
        sizes.update({size: found for size, found in named if isinstance(size, str)})
        if self.is_finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"`{name}` has to be finite")
        bounds = (self.least, "at least", torch.lt), (self.most, "at most", torch.gt), (self.above, "above", torch.le)
        for bound, words, is_beyond in bounds:
            if bound is not None and bool(is_beyond(tensor, bound).any()):
                raise ValueError(f"`{name}` has to be {words} {bound}")


def check_layout(path: str, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, Stored]) -> None:
    """Raises a `ValueError` unless `tensors` are those of `layout`; errors name them below `path`."""
    for name, stored in layout.items():
        if name not in tensors:
            raise ValueError(f"the tensor `{path}.{name}` is missing")
        stored.check(f"{path}.{name}", tensors[name], {})
    unknown = sorted(tensors.keys() - layout.keys())
    if unknown:
        raise ValueError(f"the tensor `{path}.{unknown[0]}` is unknown")


def pack(record: object) -> tuple[dict[str, Any], Tensors]:
    """Returns the document and the tensors of a record; tensors are its own."""
    tensors: Tensors = {}
    return _pack(type(record), record, "", tensors), tensors


def unpack(kind: type[RecordT], content: object, tensors: Tensors | None = None) -> RecordT:
    """Makes a record of a document and tensors from anywhere; a `ValueError` names the field that cannot be."""
    left = dict(tensors or {})
    record: RecordT = _read_record(kind, content, "", left, {})
    if left:
        raise ValueError(f"the tensor `{min(left)}` is unknown")
    return record


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object; anything else, a key named twice, `NaN` and nesting too deep are a `ValueError`."""
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError(f"the JSON has to be an object but is a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(content := dict(pairs)) < len(pairs):
        raise ValueError("the JSON names a key twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the JSON holds {name}")


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _parts(hint: Any) -> tuple[tuple[Any, ...], bool, Any]:
    """The types that an annotation allows, whether it allows None, and its `Range` or `Stored`."""
    note = None
    if get_origin(hint) is Annotated:
        hint, note = get_args(hint)[:2]
    if get_origin(hint) not in (Union, types.UnionType):
        return (hint,), False, note
    kinds = tuple(each for each in get_args(hint) if each is not type(None))
    if len(kinds) == 1:
        inner, _, own = _parts(kinds[0])
        return inner, True, own or note
    return kinds, len(kinds) < len(get_args(hint)), note


def _pack(hint: Any, value: Any, path: str, tensors: Tensors) -> Any:
    kinds, _, _ = _parts(hint)
    if value is None or kinds == (Any,):
        return value
    if dataclasses.is_dataclass(value):
        content: dict[str, Any] = {_KIND: type(value).__name__} if len(kinds) > 1 else {}
        for name, inner in _fields(type(value)).items():  # type: ignore[arg-type]
            packed = _pack(inner, getattr(value, name), _below(path, name), tensors)
            if packed is not None:
                content[name] = packed
        return content
    (kind,) = kinds
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return None
    if isinstance(value, dict):
        of_values = get_args(kind)[1]
        packed_values = {str(key): _pack(of_values, each, _below(path, key), tensors) for key, each in value.items()}
        return None if of_values is torch.Tensor else packed_values
    if isinstance(value, (list, tuple)):
        of_items = get_args(kind)[0]
        return [_pack(of_items, each, _below(path, number), tensors) for number, each in enumerate(value)]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _read_record(kind: type[Any], value: object, path: str, tensors: Tensors, sizes: dict[str, int]) -> Any:
    if not isinstance(value, dict):
        _refuse(path, "an object", value)
    left, own = dict(value), dict(sizes)
    fields: dict[str, Any] = {}
    for name, hint in _fields(kind).items():  # type: ignore[arg-type]
        where = _below(path, name)
        kinds, is_optional, note = _parts(hint)
        if kinds[0] is torch.Tensor:
            fields[name] = tensors.pop(where, None)
            if fields[name] is not None:
                note.check(where, fields[name], own)
            elif not is_optional:
                raise ValueError(f"the tensor `{where}` is missing")
        elif get_args(kinds[0]) == (str, torch.Tensor):
            names = [each for each in tensors if each.startswith(f"{where}.")]
            fields[name] = {each.removeprefix(f"{where}."): tensors.pop(each) for each in names}
        elif name in left:
            fields[name] = _read(hint, left.pop(name), where, tensors, own)
        elif is_optional:
            fields[name] = None
        elif len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]):
            # It may have tensors alone
            fields[name] = _read(hint, {}, where, tensors, own)
        else:
            raise ValueError(f"`{where}` is missing")
        if kinds == (int,) and fields[name] is not None:
            own[name] = fields[name]
    if left:
        raise ValueError(f"`{_below(path, min(left))}` is unknown")
    try:
        record = kind(**fields)
        if hasattr(record, "check"):
            record.check()
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}" if path else str(error)) from error
    return record


def _read(hint: Any, value: Any, path: str, tensors: Tensors, sizes: dict[str, int]) -> Any:
    """Reads what stands in a document; tensors stand beside it."""
    kinds, is_optional, note = _parts(hint)
    if value is None and is_optional:
        return None
    if len(kinds) > 1:
        names = {each.__name__: each for each in kinds}
        own = dict(value) if isinstance(value, dict) else {}
        name = own.pop(_KIND, None)
        if not isinstance(name, str) or name not in names:
            _refuse(_below(path, _KIND), f"one of {list(names)}", name)
        return _read_record(names[name], own, path, tensors, sizes)
    (kind,) = kinds
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is None and dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _read_record(kind, value, path, tensors, sizes)
    if origin in (list, tuple):
        if not isinstance(value, list):
            _refuse(path, "a list", value)
        of_items = get_args(kind)[0]
        items = [_read(of_items, each, _below(path, number), tensors, sizes) for number, each in enumerate(value)]
        return items if origin is list else tuple(items)
    if origin is dict:
        if not isinstance(value, dict):
            _refuse(path, "an object", value)
        return {key: _read(get_args(kind)[1], each, _below(path, key), tensors, sizes) for key, each in value.items()}
    return _read_value(kind, value, path, note)


def _read_value(kind: Any, value: Any, path: str, note: Range | None) -> Any:
    words = list(get_args(kind)) if get_origin(kind) is Literal else list(FLOATS) if kind is torch.dtype else None
    if words is not None:
        if not isinstance(value, str) or value not in words:
            _refuse(path, f"one of {words}", value)
        return FLOATS[value] if kind is torch.dtype else value
    if kind in (bool, str):
        if not isinstance(value, kind):
            _refuse(path, "true or false" if kind is bool else "a string", value)
        return value
    is_integer = kind is int
    bounds = note or (Range() if is_integer else Range(-_MAX_NUMBER, _MAX_NUMBER))
    is_number = isinstance(value, int if is_integer else (int, float)) and not isinstance(value, bool)
    if not is_number or not bounds.least <= value <= bounds.most:
        own = "an integer" if is_integer else "a finite number"
        _refuse(path, own if not is_integer and note is None else f"{own} from {bounds.least} to {bounds.most}", value)
    return value


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _refuse(path: str, expected: str, value: object) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    raise ValueError(f"`{path or 'the document'}` has to be {expected} but got {shown}")
