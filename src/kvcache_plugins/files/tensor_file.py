"""Tensors and a JSON document in one safetensors file with a checksum, read so that nothing in it is believed.

The container is safetensors' (8 bytes with the header's length, a header in JSON, the tensors' bytes one behind the
other), so other programs can read it. Its metadata has two entries: the document, and a checksum of the whole file,
taken with zeros in its own place. It is read here and not by safetensors' reader: that maps the file into memory,
where whoever writes to it later changes the tensors too, and a file that is cut off ends the process.

    [ length ][ {"__metadata__": {"checksum": ..., "kvcache_plugins": document}, name: dtype, shape, place } ][ data ]

A checksum tells damage and no malice. So everything else holds without it: sizes are compared with the file's before
anything is allocated, and what is returned are tensors of the shapes and dtypes that the header states. What values
mean is for the caller to check.
"""

import json
import math
import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, BinaryIO

import torch

from .atomic import new_file
from .document import Document, parse_json
from .json_file import check_format
from .refusal import RefusedFile


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


def write_tensor_file(
    path: str | os.PathLike[str],
    name: str,
    version: int,
    content: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    mode: int | None = None,
) -> None:
    """
    Writes tensors and a document, whole or not at all.

    Args:
        path (`str` or `os.PathLike`): where to.
        name (`str`), version (`int`): of the format.
        content (`Mapping`): the rest of the document, of what JSON can hold.
        tensors (`Mapping[str, torch.Tensor]`): on any device; brought to the host one at a time.
        mode (`int`, *optional*): permissions of the file, see `new_file`.
    """
    document = json.dumps({"format": name, "version": version, **content}, allow_nan=False)
    header: dict[str, Any] = {_METADATA: {_CHECKSUM: _NO_CHECKSUM, _DOCUMENT: document}}
    # Wide ones first, so that each is aligned for whoever maps the file
    order = sorted(tensors, key=lambda each: (-tensors[each].element_size(), each))
    stop = 0
    for each in order:
        tensor, start = tensors[each], stop
        stop += tensor.numel() * tensor.element_size()
        header[each] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
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


def read_tensor_file(
    path: str | os.PathLike[str], name: str, version: int, advice: str
) -> tuple[Document, dict[str, torch.Tensor]]:
    """
    The document of a file that `write_tensor_file` wrote, and its tensors in memory of their own, on the host.

    To be called within `refusals`.

    Args:
        path (`str` or `os.PathLike`): the file.
        name (`str`), version (`int`): of the format.
        advice (`str`): what to do with a file of another one.

    Raises:
        ValueError: if the file is damaged, or of another format or version.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, text = _read_header(file, size)
        document, checksum = _metadata(header)
        check_format(document, name, version, advice)
        if checksum is None:
            raise ValueError("it has no checksum")
        places = _places(header, size - 8 - len(text))
        digest = blake2b(len(text).to_bytes(8, "little"), digest_size=32)
        digest.update(text.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1))
        tensors = {each: _read_tensor(file, dtype, shape, digest) for each, (_, dtype, shape) in places.items()}
    if digest.hexdigest() != checksum:
        raise ValueError("its checksum does not fit what it holds")
    return document, tensors


def read_document(path: str | os.PathLike[str], name: str, version: int, advice: str) -> Document:
    """
    The document of a file alone, to list files by: nothing says that it is as it was written.

    Args:
        path, name, version, advice: as for `read_tensor_file`.

    Raises:
        ValueError: if there is none, or one of another format or version.
    """
    with open(path, "rb") as file:
        header, _ = _read_header(file, os.fstat(file.fileno()).st_size)
    document, _ = _metadata(header)
    check_format(document, name, version, advice)
    return document


def _read_header(file: BinaryIO, size: int) -> tuple[Document, bytes]:
    """The header of a file of so many bytes, and its text."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise RefusedFile("is no safetensors file or is damaged: its header does not fit into it")
    text = file.read(length)
    try:
        return Document(parse_json(text), "header"), text
    except ValueError as error:
        raise RefusedFile(f"is no safetensors file or is damaged: {error}") from error


def _metadata(header: Document) -> tuple[Document, str | None]:
    """Document and checksum that stand in a header; the latter not in files of older versions."""
    foreign = RefusedFile("is a safetensors file, but none that this package wrote")
    if not header.has(_METADATA):
        raise foreign
    metadata = header.inner(_METADATA)
    if not metadata.has(_DOCUMENT):
        raise foreign
    document = Document({"format": None, "version": None, **_object(metadata.text(_DOCUMENT))})
    checksum = metadata.text(_CHECKSUM) if metadata.has(_CHECKSUM) else None
    metadata.finish()
    return document, checksum


def _object(text: str) -> dict[str, Any]:
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"its document is a JSON {type(content).__name__}")
    return content


def _places(header: Document, num_bytes: int) -> dict[str, tuple[int, torch.dtype, list[int]]]:
    """First byte, dtype and shape of every tensor in the order of their bytes, which have to fill `num_bytes`."""
    places = {}
    for name in header.names():
        entry = header.inner(name)
        dtype = _DTYPES[entry.choice("dtype", list(_DTYPES))]
        shape, offsets = entry.integers("shape"), entry.integers("data_offsets")
        entry.finish()
        if len(shape) > _MAX_NUM_DIMS or math.prod(max(size, 1) for size in shape) > _MAX_NUM_VALUES:
            raise ValueError(f"`{name}` has a shape that no tensor can have, {shape}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"`{name}` of shape {shape} does not fill its place in the file, {offsets}")
        places[name] = offsets[0], offsets[1], dtype, shape
    ordered = dict(sorted(places.items(), key=lambda item: item[1][:2]))
    end = 0
    for name, (start, stop, *_) in ordered.items():
        if start != end:
            raise ValueError(f"`{name}` does not begin where the tensor before it ends")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors take {end} bytes, but {num_bytes} are there")
    return {name: (start, dtype, shape) for name, (start, _, dtype, shape) in ordered.items()}


def _read_tensor(file: BinaryIO, dtype: torch.dtype, shape: list[int], digest: Any) -> torch.Tensor:
    """The next tensor of a file."""
    tensor = torch.empty(shape, dtype=dtype)
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise ValueError("it became shorter while it was read")
        digest.update(piece)
    return tensor
