"""Bytes of several caches: what they hold, and what a decode step allocates beside them.

A cache that decompresses a layer at every token holds less and allocates as much. So rows have two more numbers: the
peak bytes of tensors that one decode step makes, and the peak resident memory of a process that loads the model, reads
the context and decodes.
"""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache

from kvcache_plugins.eval.harness import load_with_tokens
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import measure_memory


class LiveBytes(TorchDispatchMode):
    """Mode that records the `peak` of bytes of all live tensors that were made inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view or an operation in place shares its first argument's storage, which is not new
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


@torch.no_grad()
def measure_cache(model_name: str, text_file: str, context: int, spec: str, num_threads: int) -> dict[str, Any]:
    """Read `context` tokens of a text through a cache, decode, and return the bytes; for a fresh process."""
    torch.set_num_threads(num_threads)
    model, token_ids = load_with_tokens(model_name, Path(text_file), context + 2)
    cache = create_cache(spec, model)
    loaded = _peak_rss()
    model(token_ids[:, :context], **as_argument(cache), logits_to_keep=1)
    after_prefill = _peak_rss()
    model(token_ids[:, context : context + 1], **as_argument(cache))
    memory = measure_memory(cache)
    # Layers with a window hold less than the largest ones
    dense_layers = [measure_memory(Cache(layers=[layer])).dense_bytes for layer in cache.layers]
    with LiveBytes() as live:
        model(token_ids[:, context + 1 : context + 2], **as_argument(cache))
    return {
        "cache": spec,
        "cache_bytes": memory.total_bytes,
        "kv_percent": memory.kv_percent,
        "dense_layer_bytes": max(dense_layers),
        "decode_step_peak_bytes": live.peak,
        "rss_peak_after_load": loaded,
        "rss_peak_after_prefill": after_prefill,
        "rss_peak": _peak_rss(),
    }


def _peak_rss() -> int:
    # Not on Windows, where importing this module has to work all the same
    import resource

    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
