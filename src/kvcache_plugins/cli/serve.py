"""`kvcache-plugins serve`: a model over HTTP, as OpenAI's API has it, with a cache for each request."""

from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.inputs import DeviceOption, DtypeOption, prepare_loading, read_text
from kvcache_plugins.models.packaged_models import check_model_name
from kvcache_plugins.registry import check_cache


# Addresses that other machines cannot reach
_LOCAL = ("127.0.0.1", "localhost", "::1")


def main(
    model: Annotated[str, typer.Argument(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")] = "smollm2",
    cache: Annotated[
        str, typer.Option(help="NAME of `kvcache-plugins list`, or NAME:key=value,key=value.")
    ] = "transform",
    store: Annotated[Path | None, typer.Option(help="Prompt store's folder: prompts and answers are kept.")] = None,
    conversations: Annotated[int | None, typer.Option(help="Newest conversations kept in memory.", min=1)] = None,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Answer requests together, from compressed pages.")
    ] = False,
    text_file: Annotated[Path | None, typer.Option(help="Text for tables of a batch without a calibration.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default temperature in batches; 0 greedy.", min=0)] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Memory of pages, in dense blocks of 256 tokens; 64 on a CPU.", min=1)
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch in one forward; 1024 on a CPU.", min=1)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; this machine alone reaches the default.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen at; 0 is any that is free.", min=0, max=65535)] = 8000,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    This is Transformers' server, for text: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models and
    /health. Requests are answered one after the other, each with a cache of its own. With --conversations a request
    that continues or edits an earlier one uses its cache. With --continuous-batching requests are answered together,
    from pages whose memory is allocated at the start. A request ends when its connection is closed. Options that the
    server does not have are refused. Standard error gets a line for each request.

    There is no authentication: everyone who can reach the address may use the model, and with --store can infer from
    response times what others have asked. Ctrl-C stops the server after running requests.

    It needs the extra `serving`: pip install '.[serving]' in a clone of the repository.

    \b
    Examples:
        kvcache-plugins serve smollm2
        kvcache-plugins serve HuggingFaceTB/SmolLM2-135M-Instruct --cache transform-16 --store prompts --port 8001
        kvcache-plugins serve smollm2 --continuous-batching --cache calibrated-16
        kvcache-plugins serve smollm2 --continuous-batching --cache transform --text-file LICENSE --temperature 0
    """
    check_model_name(model)
    check_cache(cache)
    text = None if text_file is None else read_text(text_file, "--text-file")
    _check_extra()
    from kvcache_plugins.serving import CacheServer

    chosen_dtype, place = prepare_loading(dtype, device)
    server = CacheServer(
        model,
        cache,
        store=store,
        conversations=conversations,
        continuous_batching=continuous_batching,
        text=text,
        temperature=temperature,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        host=host,
        port=port,
        device=str(place),
        dtype=str(chosen_dtype).removeprefix("torch."),
        say=_log,
    )
    _log(f"{model} with {cache} at {server.url}, without authentication: for {_users(host)}")
    server.run()


def _users(host: str) -> str:
    return "everyone on this machine" if host in _LOCAL else "everyone who reaches this machine"


def _check_extra() -> None:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("`serve` needs more packages: `pip install '.[serving]'` in a clone of the repository")


def _log(line: str) -> None:
    """Write a line to standard error without wrapping it, so that it can be searched."""
    typer.echo(line, err=True)
