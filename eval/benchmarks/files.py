"""Files of saved caches: bytes, as they are held and compact, and how fast they become caches again."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.inputs import CachesOption, ModelOption, load_for_evaluation, read_text
from kvcache_plugins.eval.benchmark import benchmark
from kvcache_plugins.eval.harness import read_tokens
from kvcache_plugins.eval.measures.fidelity import continuation_logits, fill_cache
from kvcache_plugins.eval.rows import Found
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import measure_memory


_NUM_NEXT = 64


@benchmark("files", "Files of caches of {model}")
def benchmark_files(
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least the tokens of the longest context, and 64.")],
    model: ModelOption = "smollm2",
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; several for several.", min=1)] = [1024],
    rounds: Annotated[int, typer.Option(help="Times that a file is loaded.", min=1)] = 5,
    num_threads: Annotated[int, typer.Option(min=1)] = 1,
) -> Iterator[Found]:
    """Measure files of saved caches. Bytes, speed, and whether a loaded cache goes on as the saved one.

    \b
    Examples:
        kvcache-plugins bench files --cache gear --cache gear-c16 --context 4096 --text-file book.txt
    """
    network, tokenizer = load_for_evaluation(model)
    token_ids = read_tokens(tokenizer, read_text(text_file, "text_file"), max(context) + _NUM_NEXT, network.device)
    for length in context:
        for spec in cache:
            saved: Any = create_cache(spec, network)
            with tempfile.TemporaryDirectory() as folder:
                fill_cache(network, token_ids[:, :length], saved)
                bytes_of_16_bits = 2 * measure_memory(saved).num_values
                row: dict[str, Any] = {"cache": spec, "context": length, "bytes_of_16_bits": bytes_of_16_bits}
                for form in ("plain", "compact"):
                    path, start = Path(folder) / form, time.perf_counter()
                    saved.save(path, network, compact=form == "compact")
                    row |= {f"{form}_bytes": path.stat().st_size, f"{form}_save_s": time.perf_counter() - start}
                    seconds = []
                    for _ in range(rounds):
                        start = time.process_time()
                        loaded = GEARCache.load(path, network.config, calibration=saved.calibration)
                        seconds.append(time.process_time() - start)
                    row[f"{form}_bytes_per_s"] = bytes_of_16_bits / statistics.median(seconds)
                following = token_ids[:, length : length + _NUM_NEXT]
                both = [continuation_logits(network, following, each) for each in (saved, loaded)]
                yield row | {"is_same": torch.equal(*both)}
