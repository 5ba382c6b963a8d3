"""`kvcache-plugins recommend`: which caches fit a memory budget, and which one to take, from a config alone."""

from typing import Annotated

import typer

from kvcache_plugins.advice.byte_sizes import in_thousands
from kvcache_plugins.console.command_group import FAILED
from kvcache_plugins.console.json_output import JsonOption, print_json
from kvcache_plugins.registry import check_caches, list_caches


def main(
    memory: Annotated[str, typer.Option(help="The budget on the device, such as 8GiB or 500MB.")],
    context: Annotated[int, typer.Option(help="Tokens that the cache holds, for each sequence.", min=1)],
    model: Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")] = "smollm2",
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    new_tokens: Annotated[
        int, typer.Option(help="Of the context, tokens that are decoded after a prompt.", min=0)
    ] = 0,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:key=value,key=value; repeatable. By default all of `kvcache-plugins list`."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default on cuda), float32 (on cpu) or float16.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the model would be, cuda or cpu; by default a GPU where there is one.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory that caches may use beside a GPU; unlimited by default.")
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="The budget is for the model's weights too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell which caches fit a memory budget.

    Also what each would hold, and how far it would reach. Nothing is loaded but the model's config. Bytes are what
    caches hold, as `memory()` says after such a run; activations are not counted, and weights only with
    --with-weights. The largest context and batch are those for which one more does not fit, the other number staying
    as asked. Caches come by their measured KL to the dense one, the nearest first. Exit code 1 if nothing fits.

    JSON: model, context, batch_size, new_tokens, dtype, device, memory_bytes, host_memory_bytes (or null),
    weights_bytes (null if they are quantized), available_bytes (for the cache), max_context (that the model was made
    for, or null), recommended (a name or null), reason, not_sized (why, by name), and caches, a list of cache, fits,
    device_bytes, host_bytes, total_bytes, kl (or null), kv_percent (of 16 bits), parts (bytes by name),
    largest_context and largest_batch_size (null beyond 16777216 and 65536).

    \b
    Examples:
        kvcache-plugins recommend --model smollm2 --memory 100MB --context 8192
        kvcache-plugins recommend --model Qwen/Qwen2.5-7B --memory 24GiB --with-weights --context 131072
        kvcache-plugins recommend --model ./my-model --memory 8GiB --context 32768 --cache gear:nbits=3,rank=8 --json
    """
    from kvcache_plugins.advice.recommendation import recommend
    from kvcache_plugins.console.loading import default_device
    from kvcache_plugins.console.progress import track_progress
    from kvcache_plugins.console.recommend_tables import print_recommendation

    specs = check_caches(cache) if cache else list_caches()
    with track_progress(len(specs)) as announce:
        found = recommend(
            model,
            memory,
            context,
            batch_size=batch_size,
            new_tokens=new_tokens,
            dtype=dtype,
            device=device or default_device(),
            host_memory=host_memory,
            with_weights=with_weights,
            caches=cache,
            on_progress=announce,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_recommendation(found, in_thousands(memory))
    if found.recommended is None:
        raise typer.Exit(FAILED)
