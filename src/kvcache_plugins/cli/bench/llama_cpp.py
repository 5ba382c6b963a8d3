"""`kvcache-plugins bench llama-cpp`: options and help; what it does stands in `eval.benchmarks.llama_cpp`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text, of which up to 512 tokens are read.")],
    part: Annotated[list[str], typer.Option(help="step or attention; repeatable.")] = ["step", "attention"],  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... whose steps are timed; repeatable.")] = [  # noqa: B006
        "quanto-4bit",
        "hqq-4bit",
        "gear-k4v3",
        "gear-t22",
        "gear",
    ],
    attention_cache: Annotated[list[str], typer.Option(help="A GEAR preset whose attention is; repeatable.")] = [  # noqa: B006
        "gear-k4v4",
        "gear-k4v3",
        "gear-k3v2",
        "gear-t22",
    ],
    kv_type: Annotated[list[str], typer.Option(help="f16, q8_0, q5_1, q5_0, q4_1 or q4_0; repeatable.")] = [  # noqa: B006
        "f16",
        "q8_0",
        "q5_1",
        "q4_0",
    ],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    gguf: Annotated[Path | None, typer.Option(help="The same weights; made in float32 of a short name's.")] = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [1024, 4096, 16384],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Steps of each that a median is over; twice of attention.", min=3)] = 20,
    seconds: Annotated[float, typer.Option(help="After these, three rounds are enough in one context.", min=0)] = 10.0,
    num_threads: Annotated[int | None, typer.Option(help="Of both; PyTorch's default if not given.", min=1)] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no further context is begun.", min=0)] = 3600.0,
) -> dict[str, Any]:
    """Time steps and attention beside llama.cpp. The same weights in float32; all take turns.

    Needs the extra `llama-cpp`. Caches are filled by repeating what was read.

    \b
    Examples:
        kvcache-plugins bench llama-cpp --text-file book.txt --num-threads 1 --out llama_cpp.json
        kvcache-plugins bench llama-cpp --text-file book.txt --part attention --kv-type q4_0 --context 4096
    """
    from kvcache_plugins.eval.benchmarks.llama_cpp import benchmark_llama_cpp

    return benchmark_llama_cpp(
        text_file=text_file,
        part=part,
        cache=cache,
        attention_cache=attention_cache,
        kv_type=kv_type,
        model=model,
        gguf=gguf,
        context=context,
        rounds=rounds,
        seconds=seconds,
        num_threads=num_threads,
        limit=limit,
    )
