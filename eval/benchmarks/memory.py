"""Bytes that a decode step allocates beside the cache, and the peak of a whole process, for several caches.

A cache that decompresses a layer at every token holds less and allocates as much. So two numbers stand here beside the
bytes held: the most that one decode step has alive at a time, from every tensor that PyTorch makes during it, and the
peak resident memory of a process of its own that loads the model, reads the context and decodes.

    kvcache-plugins bench memory --context 4096 --cache dynamic --cache gear-2bit --out FILE.json
"""

import multiprocessing
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugins.console.inputs import CachesOption, ModelOption, load_for_evaluation, read_text
from kvcache_plugins.console.interrupts import interrupts_are_ours
from kvcache_plugins.console.results import provenance
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is active that are still alive, and their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view or an operation in place shares its first argument's storage, which is not new
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


@torch.no_grad()
def measure_cache(model_name: str, text_file: str, context: int, spec: str, num_threads: int) -> dict[str, Any]:
    """Reads `context` tokens of a text through a cache, decodes, and returns the bytes; for a fresh process."""
    torch.set_num_threads(num_threads)
    model, tokenizer = load_for_evaluation(model_name)
    token_ids = tokenizer(Path(text_file).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    if token_ids.shape[1] < context + 3:
        raise ValueError(f"`text_file` has {token_ids.shape[1]} tokens, but `context` needs {context + 3}")
    token_ids = token_ids.to(model.device)
    name, options = parse_cache_spec(spec)
    cache = create_cache(name, model, **options)
    loaded = _peak_rss()
    model(token_ids[:, :context], **as_argument(cache), logits_to_keep=1)
    after_prefill = _peak_rss()
    model(token_ids[:, context : context + 1], **as_argument(cache))
    memory = measure_memory(cache)
    with LiveBytes() as live:
        model(token_ids[:, context + 1 : context + 2], **as_argument(cache))
    layers = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
    return {
        "cache": spec,
        "cache_bytes": memory.total_bytes,
        "kv_percent": memory.kv_percent,
        "dense_layer_bytes": memory.dense_bytes // max(len(layers), 1),
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


def benchmark_memory(
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context tokens.")],
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 4096,
) -> dict[str, Any]:
    """Measure the memory of decoding. What caches hold, a step allocates beside them, and a process takes; on Linux.

    \b
    Examples:
        kvcache-plugins bench memory --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench memory --cache gear-2bit:rank=8 --context 1024 --text-file book.txt --out memory.json
    """
    check_caches(cache)
    read_text(text_file, "text_file")
    num_threads = torch.get_num_threads()
    # glibc otherwise keeps freed tensors for later, as many as the order of allocations left there: the peaks of equal
    # runs were measured to differ by 400 MiB. Read when a process starts.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
    rows = []
    for spec in cache:
        # A process each: a peak never falls again
        with interrupts_are_ours():
            pool = multiprocessing.get_context("spawn").Pool(1)
        with pool:
            typer.echo(f"{spec}, in a process of its own", err=True)
            rows.append(pool.apply(measure_cache, (model, str(text_file), context, spec, num_threads)))
        typer.echo(describe(rows[-1]))
    settings = {"model": model, "context": context, "text_file": text_file.name}
    return {"benchmark": "memory", **provenance(torch.device("cpu")), "settings": settings, "rows": rows}


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    mib = {key: value / 2**20 for key, value in row.items() if isinstance(value, int)}
    return (
        f"{row['cache']:<16} holds {mib['cache_bytes']:7.1f} MiB ({row['kv_percent']:5.1f} % of 16 bits); a decode "
        f"step allocates at most {mib['decode_step_peak_bytes']:6.2f} MiB at a time (one dense layer: "
        f"{mib['dense_layer_bytes']:.2f}); process peak {mib['rss_peak']:.0f} MiB, of which "
        f"{mib['rss_peak_after_load']:.0f} after loading"
    )
