"""Files with a format, a version and a checksum: JSON, or safetensors with a JSON document and tensors.

    [ length ][ {"__metadata__": {"checksum": ..., "kvcache_plugins": document}, name: dtype, shape, offsets} ][ data ]

The checksum is of the whole file, with zeros in place of the checksum itself. safetensors' own reader is not used: it
maps the file into memory, so that a later write to the file changes the tensors, and a truncated file ends the
process. A checksum finds damage, not forgery. So sizes are compared with the file's size before memory is allocated,
tensors get the shapes and dtypes of the header, and `schema` checks every field.
"""

import io
import json
import math
import os
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch

from .atomic import RefusedFile, new_file
from .schema import Document, Tensors, pack, parse_json, unpack


RecordT = TypeVar("RecordT")
PathLike = str | os.PathLike[str]
# Names of safetensors
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_DOCUMENT = "kvcache_plugins"
_CHECKSUM = "checksum"
_NO_CHECKSUM = "0" * 64
# Limit and alignment of safetensors
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_MAX_NUM_DIMS = 8
_MAX_NUM_VALUES = 2**48
_PIECE_BYTES = 2**24


class Format(NamedTuple):
    """
    Kind of file.

    Attributes:
        name (`str`): its name.
        version (`int`): the only version that is read.
        advice (`str`): how to get a file that can be read, for the error about any other.
    """

    name: str
    version: int
    advice: str

    def stamp(self, content: Document) -> Document:
        """Return a document that begins with name and version."""
        return {"format": self.name, "version": self.version, **content}

    def content(self, document: Document) -> Document:
        """Return a document without name and version; raise a `RefusedFile` if they differ from this format's."""
        content = dict(document)
        name = content.pop("format", None)
        version = content.pop("version", None)
        if name != self.name or type(version) is not int or version != self.version:
            raise RefusedFile(
                f"holds format {name!r} version {version!r}, but only {self.name!r} version {self.version} can be "
                f"read: {self.advice}"
            )
        return content


def write_json_record(path: PathLike, form: Format, record: object) -> None:
    """Write a record without tensors to a JSON file, complete or not at all."""
    write_json(path, form.stamp(pack(record)[0]))


def write_json(path: PathLike, document: Document) -> None:
    """Write a document and its checksum to a JSON file, without checking its fields."""
    document = {**document, _CHECKSUM: _json_checksum(document)}
    with new_file(path) as file:
        file.write(f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())


def read_json_record(path: PathLike, form: Format, kind: type[RecordT]) -> RecordT:
    """Read a file of `write_json_record`; raise a `ValueError` if it is wrong in any way. Call it in `refusals`."""
    try:
        document = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise RefusedFile(f"is no JSON file or is damaged: {error}") from error
    # Another version may have another checksum, so the version is checked first
    form.content(document)
    if document.pop(_CHECKSUM, None) != _json_checksum(document):
        raise ValueError("its checksum does not fit what it holds")
    return unpack(kind, form.content(document))


def _json_checksum(document: Document) -> str:
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=32).hexdigest()


def write_record(path: PathLike, form: Format, record: object, mode: int | None = None) -> None:
    """Write a record to a safetensors file, complete or not at all; tensors are copied to the host one at a time."""
    content, tensors = pack(record)
    write_tensors(path, form.stamp(content), tensors, mode)


def write_tensors(path: PathLike, document: Document, tensors: Tensors, mode: int | None = None) -> None:
    """Write a document, tensors and their checksum to a safetensors file, without checking its fields."""
    with new_file(path, mode) as file:
        _write(file, document, tensors)


def dump_record(form: Format, record: object) -> bytes:
    """Return a record as the bytes of a safetensors file."""
    content, tensors = pack(record)
    file = io.BytesIO()
    _write(file, form.stamp(content), tensors)
    return file.getvalue()


def _write(file: BinaryIO, document: Document, tensors: Tensors) -> None:
    metadata = {_CHECKSUM: _NO_CHECKSUM, _DOCUMENT: json.dumps(document, allow_nan=False)}
    header: dict[str, object] = {_METADATA: metadata}
    # The widest dtypes come first, so that every tensor of a mapped file is aligned
    order = sorted(tensors, key=lambda each: (-tensors[each].element_size(), each))
    stop = 0
    for each in order:
        tensor = tensors[each]
        start = stop
        stop += tensor.numel() * tensor.element_size()
        header[each] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = blake2b(digest_size=32)
    for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text):
        file.write(part)
        digest.update(part)
    for each in order:
        data = tensors[each].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        file.write(data)
        digest.update(data)
    file.seek(_LENGTH_BYTES + text.index(_NO_CHECKSUM.encode()))
    file.write(digest.hexdigest().encode())


def read_record(path: PathLike, form: Format, kind: type[RecordT]) -> RecordT:
    """
    Read a file of `write_record`, with tensors on the host; raise a `ValueError` if it is wrong in any way. Call it in
    `refusals`.
    """
    with open(path, "rb") as file:
        return _read(file, os.fstat(file.fileno()).st_size, form, kind)


def load_record(data: bytes, form: Format, kind: type[RecordT]) -> RecordT:
    """Read bytes of `dump_record`; raise a `ValueError` that begins with `data` if they are wrong in any way."""
    try:
        return _read(io.BytesIO(data), len(data), form, kind)
    except RefusedFile as error:
        raise ValueError(f"`data` {error}") from error
    except ValueError as error:
        raise ValueError(f"`data` is damaged: {error}") from error


def _read(file: BinaryIO, size: int, form: Format, kind: type[RecordT]) -> RecordT:
    # Tensors made in `torch.inference_mode()` could not be written to outside of it
    with torch.inference_mode(False):
        header, text = _read_header(file, size)
        document, checksum = _take_metadata(header)
        content = form.content(document)
        if not isinstance(checksum, str):
            raise ValueError("it has no checksum")
        layouts = _check_header(header, size - _LENGTH_BYTES - len(text))
        digest = blake2b(len(text).to_bytes(_LENGTH_BYTES, "little"), digest_size=32)
        digest.update(text.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1))
        tensors = {each.name: _read_tensor(file, each, digest) for each in layouts}
    if digest.hexdigest() != checksum:
        raise ValueError("its checksum does not fit what it holds")
    return unpack(kind, content, tensors)


def read_content(path: PathLike, form: Format) -> Document:
    """Read a file's document alone, unchecked, to list files; raise a `ValueError` if it is of another format."""
    with open(path, "rb") as file:
        header, _ = _read_header(file, os.fstat(file.fileno()).st_size)
    return form.content(_take_metadata(header)[0])


def _read_header(file: BinaryIO, size: int) -> tuple[Document, bytes]:
    """Read the header of a file of `size` bytes, parsed and as bytes."""
    prefix = file.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or not 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise RefusedFile("is no safetensors file or is damaged: its header does not fit into it")
    text = file.read(length)
    try:
        return parse_json(text), text
    except ValueError as error:
        raise RefusedFile(f"is no safetensors file or is damaged: {error}") from error


def _take_metadata(header: Document) -> tuple[Document, object]:
    """Remove document and checksum from a header and return them; files of older versions have no checksum."""
    metadata = header.pop(_METADATA, None)
    document = metadata.get(_DOCUMENT) if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(document, str):
        raise RefusedFile("is a safetensors file, but none that this package wrote")
    unknown = metadata.keys() - {_DOCUMENT, _CHECKSUM}
    if unknown:
        raise ValueError(f"`{min(unknown)}` is unknown")
    return parse_json(document), metadata.get(_CHECKSUM)


class _TensorLayout(NamedTuple):
    """Offsets in the data, name, dtype and shape of a tensor."""

    start: int
    stop: int
    name: str
    dtype: torch.dtype
    shape: list[int]


def _check_header(header: Document, num_bytes: int) -> list[_TensorLayout]:
    """Return the layouts of all tensors by offset; together they have to fill `num_bytes`."""
    layouts = sorted((_check_entry(name, entry) for name, entry in header.items()), key=lambda each: each[:3])
    end = 0
    for each in layouts:
        if each.start != end:
            raise ValueError(f"`{each.name}` does not begin where the tensor before it ends")
        end = each.stop
    if end != num_bytes:
        raise ValueError(f"its tensors take {end} bytes, but {num_bytes} are there")
    return layouts


def _check_entry(name: str, entry: object) -> _TensorLayout:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"`{name}` has to have `dtype`, `shape` and `data_offsets` alone")
    dtype_name, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        raise ValueError(f"`{name}.dtype` has to be one of {list(_DTYPES)} but got {dtype_name!r}")
    dtype = _DTYPES[dtype_name]
    are_lists = isinstance(shape, list) and isinstance(offsets, list)
    if not are_lists or not all(type(size) is int and 0 <= size <= _MAX_NUM_VALUES for size in (*shape, *offsets)):
        raise ValueError(f"`{name}` has to have lists of integers from 0 to {_MAX_NUM_VALUES}")
    if len(shape) > _MAX_NUM_DIMS or math.prod(max(size, 1) for size in shape) > _MAX_NUM_VALUES:
        raise ValueError(f"`{name}` has a shape that no tensor can have, {shape}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"`{name}` of shape {shape} does not fill its place in the file, {offsets}")
    return _TensorLayout(offsets[0], offsets[1], name, dtype, shape)


def _read_tensor(file: BinaryIO, layout: _TensorLayout, digest: blake2b) -> torch.Tensor:
    tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise ValueError("it became shorter while it was read")
        digest.update(piece)
    return tensor
