"""llama.cpp's own decode step, over a cache that holds a long context which was not read.

A short text is read once. Its state is then restored into further sequences, whose cells are given to the first one
and to no other: the cache holds these tokens as often as the context needs them, and a step attends to all of them.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .library import KV_TYPES


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
        """Gives the memory back."""
        self.bindings.llama_model_free(self.handle)

    @property
    def vocab_size(self) -> int:
        """Words that it knows."""
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
        """Of the last token, `[vocab_size]`."""
        pointer = self._bindings.llama_get_logits_ith(self._handle, -1)
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._model.vocab_size)).contents
        return torch.frombuffer(numbers, dtype=torch.float32).clone()

    def close(self) -> None:
        """Gives the memory back."""
        self._bindings.llama_free(self._handle)
