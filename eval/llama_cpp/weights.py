"""The same weights for llama.cpp: a packaged model's GGUF file with every tensor in float32, written once.

The safetensors that Transformers loads were made from that file: both compute with the same numbers in one type.
"""

from pathlib import Path
from typing import Any

from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import models_folder


def float32_gguf(model: str) -> Path:
    """
    The file of a packaged model, written into the user's cache folder when it is first asked for.

    Raises:
        ValueError: if `model` is none of them, or its package is not installed.
    """
    packaged = PACKAGED_MODELS.get(model)
    version = None if packaged is None else packaged.installed_version()
    if packaged is None or version is None:
        names = ", ".join(f"`{name}`" for name in PACKAGED_MODELS)
        raise ValueError(f"`gguf` has to name the same weights for llama.cpp unless `model` is {names}, installed")
    target = models_folder() / f"{model}-{version}-float32.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        _dequantize(packaged.locate_gguf(target.parent), partial)
        partial.rename(target)
    return target


def _dequantize(source: Path, target: Path) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    reader: Any = GGUFReader(source)
    writer: Any = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        # The writer states these itself
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        element = field.types[-1] if is_array else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
