"""Records as files with a format, a version and a checksum: JSON alone, or with tensors, as safetensors.

    [ length ][ {"__metadata__": {"checksum": ..., "kvcache_plugins": document}, name: dtype, shape, place } ][ data ]

The checksum is of the whole file, with zeros in its own place. The file is not read by safetensors' reader: that maps
it into memory, where whoever writes to it later changes the tensors too, and a file that is cut off ends the process.
A checksum tells damage and no malice. So sizes are compared with the file's before anything is allocated, tensors are
of the shapes and dtypes that the header states, and `schema` checks what they say.
"""

import json
import math
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch

from .atomic import RefusedFile, new_file
from .schema import Tensors, pack, parse_json, unpack


RecordT = TypeVar("RecordT")
PathLike = str | os.PathLike[str]
# As safetensors calls them
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
# As safetensors has them
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8
_MAX_NUM_DIMS = 8
_MAX_NUM_VALUES = 2**48
_PIECE_BYTES = 2**24


class Format(NamedTuple):
    """Name of a kind of file, its only version that can be read, and how to come to a file that can be read."""

    name: str
    version: int
    advice: str

    def stamp(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns a document with name and version in front."""
        return {"format": self.name, "version": self.version, **content}

    def content(self, document: dict[str, Any]) -> dict[str, Any]:
        """Returns a document without name and version; a `RefusedFile` if they are others."""
        content = dict(document)
        found = content.pop("format", None), content.pop("version", None)
        if found[0] != self.name or type(found[1]) is not int or found[1] != self.version:
            raise RefusedFile(
                f"holds format {found[0]!r} version {found[1]!r}, but only {self.name!r} version {self.version} can "
                f"be read: {self.advice}"
            )
        return content


def write_json_record(path: PathLike, form: Format, record: object) -> None:
    """Writes a record without tensors to a JSON file, whole or not at all."""
    write_json(path, form.stamp(pack(record)[0]))


def write_json(path: PathLike, document: dict[str, Any]) -> None:
    """Writes a document with its checksum, whatever it says."""
    document = {**document, _CHECKSUM: _json_checksum(document)}
    with new_file(path) as file:
        file.write(f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())


def read_json_record(path: PathLike, form: Format, kind: type[RecordT]) -> RecordT:
    """Reads what `write_json_record` wrote, within `refusals`; all that it cannot be is a `ValueError`."""
    try:
        document = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise RefusedFile(f"is no JSON file or is damaged: {error}") from error
    form.content(document)
    if document.pop(_CHECKSUM, None) != _json_checksum(document):
        raise ValueError("its checksum does not fit what it holds")
    return unpack(kind, form.content(document))


def _json_checksum(document: dict[str, Any]) -> str:
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=32).hexdigest()


def write_record(path: PathLike, form: Format, record: object, mode: int | None = None) -> None:
    """Writes a record to a safetensors file, whole or not at all, its tensors brought to the host one at a time."""
    content, tensors = pack(record)
    write_tensors(path, form.stamp(content), tensors, mode)


def write_tensors(path: PathLike, document: dict[str, Any], tensors: Tensors, mode: int | None = None) -> None:
    """Writes a document and tensors with their checksum, whatever they say; see `write_record`."""
    metadata = {_CHECKSUM: _NO_CHECKSUM, _DOCUMENT: json.dumps(document, allow_nan=False)}
    header: dict[str, Any] = {_METADATA: metadata}
    # Wide ones first, so that each is aligned for whoever maps the file
    order = sorted(tensors, key=lambda each: (-tensors[each].element_size(), each))
    stop = 0
    for each in order:
        tensor, start = tensors[each], stop
        stop += tensor.numel() * tensor.element_size()
        header[each] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = blake2b(digest_size=32)
    with new_file(path, mode) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for each in order:
            data = tensors[each].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.seek(8 + text.index(_NO_CHECKSUM.encode()))
        file.write(digest.hexdigest().encode())


def read_record(path: PathLike, form: Format, kind: type[RecordT]) -> RecordT:
    """Reads what `write_record` wrote, within `refusals`, onto the host; all that it cannot be is a `ValueError`."""
    # Tensors of `torch.inference_mode()` could not be written to outside of it
    with open(path, "rb") as file, torch.inference_mode(False):
        size = os.fstat(file.fileno()).st_size
        header, text = _read_header(file, size)
        document, checksum = _metadata(header)
        content = form.content(document)
        if not isinstance(checksum, str):
            raise ValueError("it has no checksum")
        places = _places(header, size - 8 - len(text))
        digest = blake2b(len(text).to_bytes(8, "little"), digest_size=32)
        digest.update(text.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1))
        tensors: Tensors = {name: _read_tensor(file, *place, digest) for name, place in places.items()}
    if digest.hexdigest() != checksum:
        raise ValueError("its checksum does not fit what it holds")
    return unpack(kind, content, tensors)


def read_content(path: PathLike, form: Format) -> dict[str, Any]:
    """Reads a file's document alone, unchecked, to list files by; another format, or none, is a `ValueError`."""
    with open(path, "rb") as file:
        header, _ = _read_header(file, os.fstat(file.fileno()).st_size)
    return form.content(_metadata(header)[0])


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise RefusedFile("is no safetensors file or is damaged: its header does not fit into it")
    text = file.read(length)
    try:
        return parse_json(text), text
    except ValueError as error:
        raise RefusedFile(f"is no safetensors file or is damaged: {error}") from error


def _metadata(header: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """Takes document and checksum out of a header; files of older versions have no checksum."""
    metadata = header.pop(_METADATA, None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_DOCUMENT), str):
        raise RefusedFile("is a safetensors file, but none that this package wrote")
    if metadata.keys() - {_DOCUMENT, _CHECKSUM}:
        raise ValueError(f"`{min(metadata.keys() - {_DOCUMENT, _CHECKSUM})}` is unknown")
    return parse_json(metadata[_DOCUMENT]), metadata.get(_CHECKSUM)


def _places(header: dict[str, Any], num_bytes: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Lists dtype and shape of every tensor in the order of their bytes, which have to fill `num_bytes`."""
    places = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"`{name}` has to have `dtype`, `shape` and `data_offsets` alone")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
            raise ValueError(f"`{name}.dtype` has to be one of {list(_DTYPES)} but got {entry['dtype']!r}")
        dtype = _DTYPES[entry["dtype"]]
        are_lists = isinstance(shape, list) and isinstance(offsets, list)
        if not are_lists or not all(type(size) is int and 0 <= size <= _MAX_NUM_VALUES for size in (*shape, *offsets)):
            raise ValueError(f"`{name}` has to have lists of integers from 0 to {_MAX_NUM_VALUES}")
        if len(shape) > _MAX_NUM_DIMS or math.prod(max(size, 1) for size in shape) > _MAX_NUM_VALUES:
            raise ValueError(f"`{name}` has a shape that no tensor can have, {shape}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"`{name}` of shape {shape} does not fill its place in the file, {offsets}")
        places.append((offsets, name, dtype, shape))
    end = 0
    places.sort(key=lambda place: place[:2])
    for (start, stop), name, *_ in places:
        if start != end:
            raise ValueError(f"`{name}` does not begin where the tensor before it ends")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors take {end} bytes, but {num_bytes} are there")
    return {name: (dtype, shape) for _, name, dtype, shape in places}


def _read_tensor(file: BinaryIO, dtype: torch.dtype, shape: list[int], digest: Any) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise ValueError("it became shorter while it was read")
        digest.update(piece)
    return tensor
