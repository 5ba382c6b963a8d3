"""llama.cpp through llama-cpp-python's bindings, not installed by default: its decode step and its attention.

The step is over a cache that holds a long context which was not read: a short text is read once, and its state is
restored into further sequences, whose cells are given to the first one and to no other. Weights are those of a
packaged model's GGUF file with every tensor in float32, written once: the safetensors that Transformers loads were
made from that file, so both compute with the same numbers in one type.
"""

import ctypes
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import models_folder


_F32 = 0
# Graphs keep what they work in: some kilobytes a call
_WORK_BYTES = 2**26


class KVType(NamedTuple):
    """A type of ggml: its number there, and bits a number with what blocks of them share."""

    number: int
    bits: float


# By llama.cpp's names for `--cache-type-k`
KV_TYPES = {
    "f16": KVType(1, 16),
    "q8_0": KVType(8, 8.5),
    "q5_1": KVType(7, 6),
    "q5_0": KVType(6, 5.5),
    "q4_1": KVType(3, 5),
    "q4_0": KVType(2, 4.5),
}


def import_llama_cpp() -> ModuleType:
    """Imports the bindings of llama.h, silenced; an `ImportError` names the extra if they are not installed."""
    try:
        bindings: Any = import_module("llama_cpp")
    except ImportError as error:
        raise ImportError(
            "`bench llama-cpp` needs llama-cpp-python, which builds llama.cpp from source for some ten minutes: "
            "`pip install kvcache-plugins[llama-cpp]`"
        ) from error
    # Kept alive by the module that calls it
    bindings.kvcache_plugins_log_callback = bindings.llama_log_callback(lambda level, text, user_data: None)
    bindings.llama_log_set(bindings.kvcache_plugins_log_callback, ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings  # type: ignore[no-any-return]


def load_ggml() -> ctypes.CDLL:
    """Finds ggml by the handle of llama.cpp's library, which links it: no second copy is loaded."""
    import_llama_cpp()
    library: ctypes.CDLL = import_module("llama_cpp.llama_cpp")._lib
    return library


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class GgmlAttention:
    """
    One token's attention over keys and values that ggml holds, all of one type.

    Args:
        query (`torch.Tensor` of shape `[1, num_query_heads, 1, head_dim]`): in float32.
        keys (`torch.Tensor` of shape `[1, num_heads, seq_len, head_dim]`): in float32.
        values (`torch.Tensor` of shape `[1, num_heads, seq_len, head_dim]`): in float32.
        kv_type (`str`): one of `KV_TYPES`.
        num_threads (`int`): that ggml computes with.
    """

    def __init__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv_type: str, num_threads: int
    ) -> None:
        self.num_threads, self._ggml = num_threads, load_ggml()
        ggml = self._ggml
        _declare(ggml)
        number = KV_TYPES[kv_type].number
        _, num_heads, seq_len, head_dim = keys.shape
        num_bytes = 2 * num_heads * seq_len * ggml.ggml_row_size(number, head_dim)
        self._context = ggml.ggml_init(_InitParams(num_bytes + _WORK_BYTES, None, False))
        sizes = (head_dim, query.shape[1], 1, 1)
        # `[head_dim, tokens, heads]` in ggml's order, which begins with the innermost
        self._query = ggml.ggml_permute(self._context, self._new(_F32, sizes, query), 0, 2, 1, 3)
        sides = [
            ggml.ggml_permute(
                self._context,
                # A token's heads lie together, as in llama.cpp's cache
                self._new(number, (head_dim, num_heads, seq_len, 1), states.transpose(1, 2)),
                *(0, 2, 1, 3),
            )
            for states in (keys, values)
        ]
        self._output = ggml.ggml_flash_attn_ext(self._context, self._query, *sides, None, head_dim**-0.5, 0.0, 0.0)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, self._output)
        self._shape = query.shape

    def _new(self, number: int, sizes: tuple[int, int, int, int], states: torch.Tensor) -> int:
        ggml = self._ggml
        tensor: int = ggml.ggml_new_tensor_4d(self._context, number, *sizes)
        flat = states.float().contiguous()
        target = ggml.ggml_get_data(tensor)
        if number == _F32:
            ctypes.memmove(target, flat.data_ptr(), flat.nbytes)
        else:
            ggml.ggml_quantize_chunk(number, flat.data_ptr(), target, 0, flat.numel() // sizes[0], sizes[0], None)
        return tensor

    def __call__(self) -> None:
        """Computes the attention once."""
        self._ggml.ggml_graph_compute_with_ctx(self._context, self._graph, self.num_threads)

    def output(self) -> torch.Tensor:
        """Returns the output of the last call, `[1, num_query_heads, 1, head_dim]`."""
        address = self._ggml.ggml_get_data(self._output)
        numbers = (ctypes.c_float * self._shape.numel()).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.float32).clone().view(self._shape)

    def close(self) -> None:
        """Frees the memory."""
        self._ggml.ggml_free(self._context)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, integer, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_float
    kind = ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_InitParams]),
        "ggml_free": (None, [pointer]),
        "ggml_row_size": (size, [kind, integer]),
        "ggml_new_tensor_4d": (pointer, [pointer, kind, *[integer] * 4]),
        "ggml_permute": (pointer, [pointer, pointer, *[kind] * 4]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_quantize_chunk": (size, [kind, pointer, pointer, integer, integer, integer, pointer]),
        "ggml_flash_attn_ext": (pointer, [*[pointer] * 5, *[number] * 3]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_graph_compute_with_ctx": (kind, [pointer, pointer, kind]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class LlamaModel:
    """
    A GGUF file's weights, loaded once for all contexts.

    Args:
        bindings (`ModuleType`): llama-cpp-python, see `import_llama_cpp`.
        path (`Path`): the file.
    """

    def __init__(self, bindings: ModuleType, path: Path) -> None:
        self.bindings: Any = bindings
        self.handle = self.bindings.llama_model_load_from_file(
            str(path).encode(), self.bindings.llama_model_default_params()
        )
        if not self.handle:
            raise ValueError(f"`gguf`: llama.cpp cannot load {path}")

    def close(self) -> None:
        """Frees the memory."""
        self.bindings.llama_model_free(self.handle)

    @property
    def vocab_size(self) -> int:
        """Counts the words that it knows."""
        return int(self.bindings.llama_vocab_n_tokens(self.bindings.llama_model_get_vocab(self.handle)))


class LlamaContext:
    """
    A KV cache of one type with llama.cpp's step over it, flash attention on.

    Args:
        model (`LlamaModel`): whose.
        kv_type (`str`): one of `KV_TYPES`, for keys and values.
        context (`int`): tokens that it is to hold.
        token_ids (`Sequence[int]`): what is read; of these are all tokens that it holds.
        num_steps (`int`): steps that there is to be room for.
        num_threads (`int`): that llama.cpp computes with.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv_type: str,
        context: int,
        token_ids: Sequence[int],
        num_steps: int,
        num_threads: int,
    ) -> None:
        self._model, self._bindings = model, model.bindings
        length = min(len(token_ids), context)
        self._copies, rest = divmod(context, length)
        parameters = self._bindings.llama_context_default_params()
        parameters.n_ctx = context + num_steps + 256
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = self._copies + 2
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = num_threads
        parameters.type_k = parameters.type_v = KV_TYPES[kv_type].number
        parameters.flash_attn_type = self._bindings.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.no_perf = True
        self._handle = self._bindings.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise ValueError(f"`kv_type`: llama.cpp makes no context of {context} tokens in {kv_type}")
        self._read(token_ids[:length])
        self.logits_read = self.logits()
        read = self._state_bytes()
        self._repeat(rest)
        # Cells of other sequences would not be attended to, and a step would look faster than it is
        held = self._state_bytes() / read * length
        if abs(held - context) > 0.01 * context + 1:
            raise RuntimeError(f"llama.cpp's cache holds {held:.0f} tokens, not {context}")
        self._token = (ctypes.c_int32 * 1)(token_ids[0])

    def _read(self, token_ids: Sequence[int]) -> None:
        tokens = (ctypes.c_int32 * len(token_ids))(*token_ids)
        self._decode(self._bindings.llama_batch_get_one(tokens, len(token_ids)))

    def _state_bytes(self) -> int:
        return int(self._bindings.llama_state_seq_get_size(self._handle, 0))

    def _repeat(self, rest: int) -> None:
        """Adds what was read again and again, and the first `rest` tokens of it once more."""
        bindings, memory = self._bindings, self._bindings.llama_get_memory(self._handle)
        size = self._state_bytes()
        state = (ctypes.c_uint8 * size)()
        bindings.llama_state_seq_get_data(self._handle, state, size, 0)
        for sequence in range(1, self._copies + (rest > 0)):
            if not bindings.llama_state_seq_set_data(self._handle, state, size, sequence):
                raise RuntimeError(f"llama.cpp could not restore a state into sequence {sequence}")
            if sequence == self._copies:
                bindings.llama_memory_seq_rm(memory, sequence, rest, -1)
            # A cell may belong to several sequences: copying one gives away its cells, and copies no data
            bindings.llama_memory_seq_cp(memory, sequence, 0, -1, -1)
            bindings.llama_memory_seq_rm(memory, sequence, -1, -1)

    def step(self) -> None:
        """Decodes one token."""
        self._decode(self._bindings.llama_batch_get_one(self._token, 1))

    def _decode(self, batch: Any) -> None:
        status = self._bindings.llama_decode(self._handle, batch)
        if status:
            raise RuntimeError(f"llama.cpp's decoding failed with status {status}")

    def logits(self) -> torch.Tensor:
        """Returns the logits of the last token, `[vocab_size]`."""
        pointer = self._bindings.llama_get_logits_ith(self._handle, -1)
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._model.vocab_size)).contents
        return torch.frombuffer(numbers, dtype=torch.float32).clone()

    def close(self) -> None:
        """Frees the memory."""
        self._bindings.llama_free(self._handle)


def float32_gguf(model: str) -> Path:
    """
    Writes the file of a packaged model into the user's cache folder when it is first asked for; returns its path.

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
