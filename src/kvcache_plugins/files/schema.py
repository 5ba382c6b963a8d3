"""Dataclasses as a JSON document and named tensors, and back, with a check of every field: files may be forged.

A record is a dataclass whose annotations say what its fields may be. The path of a field is the name of its tensor:
`layers.0.prefix.keys`.

    int, float, bool, str       JSON: an integer from 0 on, a finite number; `Annotated[..., Range(...)]` for bounds
    Literal["a", "b"]           one of these words
    torch.dtype                 its name, one of `FLOATS`
    list, tuple, dict           items of one type; keys are strings
    records                     an object; in a union of several, `kind` is the class's name
    X | None                    left out if it is None
    torch.Tensor                `Annotated[torch.Tensor, Stored(...)]`, with shape, dtype and bounds
    dict[str, torch.Tensor]     all tensors below the path; their codec checks them by `check_layout`
    object                      unchecked JSON

A size may be named: after an integer field of the record or of one around it, or else by the first tensor with that
name. A record's method `check` raises a `ValueError` for fields that do not fit each other. All errors are a
`ValueError` that names the field.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Mapping, Sequence
from typing import (
    Annotated,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import torch


# Bound of positions, lengths and counts, which keeps their products from overflowing
MAX_INTEGER = 2**40
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MAX_NUMBER = 1e300
_MAX_SHOWN = 80
_KIND = "kind"

RecordT = TypeVar("RecordT")
Document = dict[str, object]
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest number of a field, both included."""

    least: float = 0
    most: float = MAX_INTEGER


class Stored:
    """
    Description of a tensor.

    Args:
        shape (`Sequence`): sizes, names of sizes, or `None` for any size.
        dtypes (`torch.dtype`): accepted dtypes.
        least, most, above (`float`, *optional*): bounds of the values; `least` and `most` are included.
        is_finite (`bool`, *optional*, defaults to `True`): refuse infinity and NaN.
    """

    def __init__(
        self,
        shape: Sequence[int | str | None],
        *dtypes: torch.dtype,
        least: float | None = None,
        most: float | None = None,
        above: float | None = None,
        is_finite: bool = True,
    ):
        self.shape = tuple(shape)
        self.dtypes = dtypes
        self.least = least
        self.most = most
        self.above = above
        self.is_finite = is_finite

    def check(self, name: str, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
        """Raise a `ValueError` unless `tensor` fits; add sizes that it is the first to name to `sizes`."""
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


@runtime_checkable
class _Checked(Protocol):
    def check(self) -> None:
        """Raise a `ValueError` if the record's fields do not fit each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Hint:
    """
    Parsed annotation of a field.

    Attributes:
        kinds (`tuple[type, ...]`): the type, or the records of a union. `object` is unchecked JSON.
        is_optional (`bool`): True if the field may be None.
        note (`Range` or `Stored`, *optional*): bounds, or the description of a tensor.
        words (`tuple[str, ...]`): accepted words, if the field is one of several words.
        items (`_Hint`, *optional*): items of a list, a tuple or a dict.
    """

    kinds: tuple[type, ...]
    is_optional: bool = False
    note: object = None
    words: tuple[str, ...] = ()
    items: "_Hint | None" = None

    @property
    def holds_tensors(self) -> bool:
        """True for a dict of tensors."""
        return self.items is not None and self.items.kinds == (torch.Tensor,)


def _parse_hint(annotation: object) -> _Hint:
    note = None
    if get_origin(annotation) is Annotated:
        annotation, note = get_args(annotation)[:2]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        hints = [_parse_hint(each) for each in arguments if each is not type(None)]
        is_optional = len(hints) < len(arguments)
        if len(hints) == 1:
            return dataclasses.replace(hints[0], is_optional=is_optional, note=hints[0].note or note)
        return _Hint(tuple(each.kinds[0] for each in hints), is_optional)
    if origin is Literal:
        return _Hint((str,), words=arguments)
    if annotation is torch.dtype:
        return _Hint((torch.dtype,), words=tuple(FLOATS))
    if origin in (list, tuple, dict):
        return _Hint((origin,), items=_parse_hint(arguments[1 if origin is dict else 0]))
    assert isinstance(annotation, type), f"{annotation} is no annotation of a record"
    return _Hint((annotation,), note=note)


@functools.cache
def _hints_of(kind: type) -> dict[str, _Hint]:
    """Parse the annotations of a record's fields, by name."""
    annotations = get_type_hints(kind, include_extras=True)
    return {field.name: _parse_hint(annotations[field.name]) for field in dataclasses.fields(kind)}


def check_layout(path: str, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, Stored]) -> None:
    """Raise a `ValueError` unless `tensors` are those of `layout`; errors prefix their names with `path`."""
    for name, stored in layout.items():
        if name not in tensors:
            raise ValueError(f"the tensor `{path}.{name}` is missing")
        stored.check(f"{path}.{name}", tensors[name], {})
    unknown = sorted(tensors.keys() - layout.keys())
    if unknown:
        raise ValueError(f"the tensor `{path}.{unknown[0]}` is unknown")


def pack(record: object) -> tuple[Document, Tensors]:
    """Return the document and the tensors of a record. Tensors are not copied."""
    tensors: Tensors = {}
    return _pack_record(record, "", tensors), tensors


def unpack(kind: type[RecordT], content: object, tensors: Tensors | None = None) -> RecordT:
    """Make a record of a document and tensors from anywhere; raise a `ValueError` that names a wrong field."""
    remaining = dict(tensors or {})
    record = _read_record(kind, content, "", remaining, {})
    if remaining:
        raise ValueError(f"the tensor `{min(remaining)}` is unknown")
    assert isinstance(record, kind)
    return record


def parse_json(text: str | bytes) -> Document:
    """Parse a JSON object; raise a `ValueError` for other JSON, a repeated key, `NaN` and too deep nesting."""
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError(f"the JSON has to be an object but is a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, object]]) -> Document:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("the JSON names a key twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the JSON holds {name}")


def _pack_record(record: object, path: str, tensors: Tensors) -> Document:
    content: Document = {}
    kind: type = type(record)
    for name, hint in _hints_of(kind).items():
        packed = _pack(hint, getattr(record, name), _below(path, name), tensors)
        if packed is not None:
            content[name] = packed
    return content


def _pack(hint: _Hint, value: object, path: str, tensors: Tensors) -> object:
    """Return a field as JSON; put its tensors into `tensors`, and return `None` if it has nothing else."""
    if value is None or hint.kinds == (object,):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value):
        content = _pack_record(value, path, tensors)
        return content if len(hint.kinds) == 1 else {_KIND: type(value).__name__, **content}
    if hint.items is not None and isinstance(value, dict):
        packed = {str(key): _pack(hint.items, each, _below(path, key), tensors) for key, each in value.items()}
        return None if hint.holds_tensors else packed
    if hint.items is not None and isinstance(value, list | tuple):
        return [_pack(hint.items, each, _below(path, index), tensors) for index, each in enumerate(value)]
    return value


def _read_record(kind: type, content: object, path: str, tensors: Tensors, sizes: dict[str, int]) -> object:
    """Make a record of a document; take its tensors out of `tensors`. `sizes` are those of the records around it."""
    if not isinstance(content, dict):
        _refuse(path, "an object", content)
    remaining = dict(content)
    own_sizes = dict(sizes)
    fields: dict[str, object] = {}
    for name, hint in _hints_of(kind).items():
        where = _below(path, name)
        if hint.kinds == (torch.Tensor,):
            fields[name] = _take_tensor(hint, where, tensors, own_sizes)
        elif hint.holds_tensors:
            names = [each for each in tensors if each.startswith(f"{where}.")]
            fields[name] = {each.removeprefix(f"{where}."): tensors.pop(each) for each in names}
        elif name in remaining:
            fields[name] = _read(hint, remaining.pop(name), where, tensors, own_sizes)
        elif hint.is_optional:
            fields[name] = None
        elif len(hint.kinds) == 1 and dataclasses.is_dataclass(hint.kinds[0]):
            # A record of tensors alone is not in the document
            fields[name] = _read(hint, {}, where, tensors, own_sizes)
        else:
            raise ValueError(f"`{where}` is missing")
        value = fields[name]
        if hint.kinds == (int,) and isinstance(value, int):
            own_sizes[name] = value
    if remaining:
        raise ValueError(f"`{_below(path, min(remaining))}` is unknown")
    try:
        record: object = kind(**fields)
        if isinstance(record, _Checked):
            record.check()
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}" if path else str(error)) from error
    return record


def _take_tensor(hint: _Hint, path: str, tensors: Tensors, sizes: dict[str, int]) -> torch.Tensor | None:
    tensor = tensors.pop(path, None)
    if tensor is None and not hint.is_optional:
        raise ValueError(f"the tensor `{path}` is missing")
    if tensor is not None:
        assert isinstance(hint.note, Stored), f"`{path}` has no description of its tensor"
        hint.note.check(path, tensor, sizes)
    return tensor


def _read(hint: _Hint, value: object, path: str, tensors: Tensors, sizes: dict[str, int]) -> object:
    """Check a field of a document, and return it as the record has it."""
    if value is None and hint.is_optional:
        return None
    if len(hint.kinds) > 1:
        kinds = {each.__name__: each for each in hint.kinds}
        content = dict(value) if isinstance(value, dict) else {}
        name = content.pop(_KIND, None)
        if not isinstance(name, str) or name not in kinds:
            _refuse(_below(path, _KIND), f"one of {list(kinds)}", name)
        return _read_record(kinds[name], content, path, tensors, sizes)
    (kind,) = hint.kinds
    if kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, path, tensors, sizes)
    if hint.items is None:
        return _read_value(hint, kind, value, path)
    if kind is dict:
        if not isinstance(value, dict):
            _refuse(path, "an object", value)
        return {key: _read(hint.items, each, _below(path, key), tensors, sizes) for key, each in value.items()}
    if not isinstance(value, list):
        _refuse(path, "a list", value)
    items = [_read(hint.items, each, _below(path, index), tensors, sizes) for index, each in enumerate(value)]
    return items if kind is list else tuple(items)


def _read_value(hint: _Hint, kind: type, value: object, path: str) -> object:
    if hint.words:
        if not isinstance(value, str) or value not in hint.words:
            _refuse(path, f"one of {list(hint.words)}", value)
        return FLOATS[value] if kind is torch.dtype else value
    if kind in (bool, str):
        if not isinstance(value, kind):
            _refuse(path, "true or false" if kind is bool else "a string", value)
        return value
    is_integer = kind is int
    bounds = Range() if is_integer else Range(-_MAX_NUMBER, _MAX_NUMBER)
    expected = "an integer" if is_integer else "a finite number"
    if isinstance(hint.note, Range):
        bounds = hint.note
    if is_integer or isinstance(hint.note, Range):
        expected += f" from {bounds.least} to {bounds.most}"
    if isinstance(value, bool) or not isinstance(value, int | float) or (is_integer and not isinstance(value, int)):
        _refuse(path, expected, value)
    # False for NaN
    if not bounds.least <= value <= bounds.most:
        _refuse(path, expected, value)
    return value


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _refuse(path: str, expected: str, value: object) -> NoReturn:
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    raise ValueError(f"`{path or 'the document'}` has to be {expected} but got {shown}")
