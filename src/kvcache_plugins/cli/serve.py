"""`kvcache-plugins serve`: a model over HTTP, as OpenAI's API has it, with a cache for each request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.inputs import DeviceOption, DtypeOption
from kvcache_plugins.models.packaged_models import check_model_name
from kvcache_plugins.registry import check_cache, parse_cache_spec


# Other addresses can be reached from elsewhere
_LOCAL = ("127.0.0.1", "localhost", "::1")


def main(
    model: Annotated[str, typer.Argument(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")] = "smollm2",
    cache: Annotated[str, typer.Option(help="NAME of `kvcache-plugins list`, or NAME:key=value,key=value.")] = "gear",
    store: Annotated[
        Path | None, typer.Option(help="Folder of a prompt store: prompts and answers are kept, and not read again.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; by default none but this machine reaches it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen at; 0 is any that is free.", min=0, max=65535)] = 8000,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Transformers' server, so far as it answers with text: /v1/chat/completions, /v1/completions, /v1/responses and
    /v1/models; /health and /metrics say how it is. Every request gets a cache of its own, one after the other. A
    request ends when its connection is closed. A line for each goes to standard error.

    There is no authentication: whoever reaches the address may use the model, and with --store sees by the time that
    it takes what others have asked. Ctrl-C stops the server, once it has answered.

    It needs the extra `serving`: pip install 'kvcache-plugins[serving]'.

    \b
    Examples:
        kvcache-plugins serve smollm2
        kvcache-plugins serve HuggingFaceTB/SmolLM2-135M-Instruct --cache gear-t16 --store prompts --port 8001
    """
    check_model_name(model)
    name, options = parse_cache_spec(cache)
    check_cache(name, **options)
    from transformers.utils import logging
    from transformers.utils.import_utils import is_serve_available

    from kvcache_plugins.console.display import print_line
    from kvcache_plugins.console.inputs import default_device, parse_device, parse_dtype

    if not is_serve_available():
        raise ImportError("packages are missing: pip install 'kvcache-plugins[serving]'")
    from kvcache_plugins.serving import CacheServer

    chosen = parse_device(device or default_device())
    dtype = dtype or ("float32" if chosen.type == "cpu" else "bfloat16")
    parse_dtype(dtype)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    server = CacheServer(
        model,
        name,
        options,
        store=store,
        host=host,
        port=port,
        device=str(chosen),
        dtype=dtype,
        say=lambda line: print_line(line, stderr=True),
    )
    whom = "whoever reaches this machine" if host not in _LOCAL else "whoever uses this machine"
    print_line(f"{model} with {cache} at {server.url}, without authentication: for {whom}", stderr=True)
    server.run()
