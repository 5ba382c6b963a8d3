"""`kvcache-plugins recommend`: which caches fit a memory budget, and which one to take, from a config alone."""

from typing import Annotated

import typer

from kvcache_plugins.advice.recommendation import (
    MAX_BATCH_SIZE,
    MAX_CONTEXT,
    CacheFit,
    Recommendation,
    default_caches,
    recommend,
    show_bytes,
)

from .command_line import make_table, open_console, track_progress, user_errors
from .json_output import JsonOption, print_json


def main(
    memory: Annotated[str, typer.Option(help="The budget on the device, such as 8GiB or 500MB.")],
    context: Annotated[int, typer.Option(help="Tokens that the cache holds, for each sequence.")],
    model: Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")] = "smollm2",
    batch_size: Annotated[int, typer.Option(help="Sequences.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Of the context, tokens that are decoded after a prompt.")] = 0,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:key=value,key=value; repeatable. By default all of `kvcache-plugins list`."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default on cuda), float32 (on cpu) or float16.")] = None,
    device: Annotated[str, typer.Option(help="Where the model would be, cuda or cpu; it need not be there.")] = "cuda",
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory that caches may use beside a GPU; unlimited by default.")
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="The budget is for the model's weights too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell which caches fit a memory budget, what each would hold, and how far it would reach.

    Nothing is loaded but the model's config. Bytes are what caches hold, as `memory()` says after such a run;
    activations are not counted, and weights only with --with-weights. The largest context and batch are those for
    which one more does not fit, the other number staying as asked. The most faithful caches come first. Exit code 1 if
    nothing fits.

    JSON: model, context, batch_size, new_tokens, dtype, device, memory_bytes, host_memory_bytes (or null),
    weights_bytes (null if they are quantized), available_bytes (for the cache), max_context (that the model was made
    for, or null), recommended (a name or null), reason, not_sized (why, by name), and caches, a list of cache, fits,
    device_bytes, host_bytes, total_bytes, kv_percent (of a cache at 16 bits), parts (bytes by name), largest_context
    and largest_batch_size (null beyond 16777216 and 65536).

    \b
    Examples:
        kvcache-plugins recommend --model smollm2 --memory 100MB --context 8192
        kvcache-plugins recommend --model Qwen/Qwen2.5-7B --memory 24GiB --with-weights --context 131072
        kvcache-plugins recommend --model ./my-model --memory 8GiB --context 32768 --cache gear:nbits=3,rank=8 --json
    """
    with user_errors():
        specs = cache or default_caches()
        with track_progress(len(specs)) as announce:
            found = recommend(
                model,
                memory,
                context,
                batch_size=batch_size,
                new_tokens=new_tokens,
                dtype=dtype,
                device=device,
                host_memory=host_memory,
                with_weights=with_weights,
                caches=cache,
                on_progress=announce,
            )
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
    if found.recommended is None:
        raise typer.Exit(1)


def _show(found: Recommendation) -> None:
    console = open_console()
    columns = {"cache": "name", "fits": "name", f"on {found.device}": "number", "in host memory": "number"}
    columns |= {"% of 16 bits": "number", "largest context": "number", "largest batch": "number"}
    rows = [_cells(fit, is_recommended=fit.cache == found.recommended) for fit in found.caches]
    console.print(make_table(_title(found), columns, rows))
    console.print(found.reason, markup=False, soft_wrap=True)
    if found.max_context is not None and found.context > found.max_context:
        console.print(
            f"The model was made for {found.max_context:,} tokens: fewer than were asked for.",
            markup=False,
            soft_wrap=True,
        )
    for reason in dict.fromkeys(found.not_sized.values()):
        names = ", ".join(name for name, why in found.not_sized.items() if why == reason)
        console.print(f"Left out: {names}: {reason}", markup=False, soft_wrap=True)


def _title(found: Recommendation) -> str:
    new = f", {found.new_tokens:,} of them decoded" if found.new_tokens else ""
    budget = show_bytes(found.available_bytes)
    if found.available_bytes != found.memory_bytes:
        budget += f" beside weights of {show_bytes(found.weights_bytes or 0)}"
    return (
        f"{found.model}, {found.dtype} on {found.device}: {found.batch_size:,} x {found.context:,} tokens{new}, "
        f"in {budget}"
    )


def _cells(fit: CacheFit, *, is_recommended: bool) -> tuple[str, ...]:
    return (
        fit.cache,
        "recommended" if is_recommended else "yes" if fit.fits else "no",
        show_bytes(fit.device_bytes),
        show_bytes(fit.host_bytes) if fit.host_bytes else "-",
        f"{fit.memory.kv_percent:.1f}",
        _limited(fit.largest_context, MAX_CONTEXT),
        _limited(fit.largest_batch_size, MAX_BATCH_SIZE),
    )


def _limited(number: int | None, limit: int) -> str:
    return f"over {limit:,}" if number is None else f"{number:,}"
