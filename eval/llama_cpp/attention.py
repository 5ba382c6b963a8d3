"""llama.cpp's decode attention alone: `ggml_flash_attn_ext` over keys and values as its cache lays them out."""

import ctypes
from typing import Any

import torch

from .library import KV_TYPES, load_ggml


_F32 = 0
# Graphs keep what they work in: some kilobytes a call
_WORK_BYTES = 2**26
# Of functions: what they return, and their arguments
_Signatures = dict[str, tuple[Any, list[Any]]]


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
        """What the last call computed, `[1, num_query_heads, 1, head_dim]`."""
        address = self._ggml.ggml_get_data(self._output)
        numbers = (ctypes.c_float * self._shape.numel()).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.float32).clone().view(self._shape)

    def close(self) -> None:
        """Gives the memory back."""
        self._ggml.ggml_free(self._context)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, integer, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_float
    kind = ctypes.c_int
    signatures: _Signatures = {
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
