"""Transformers' own server, of one model whose every request has a cache of the registry.

Transformers has chat templates, streaming and sampling; `handlers` check options, and `requests` gives each request
its cache. What stands here puts them together, answers errors as JSON, counts and stops.
"""

import logging
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serve import Serve

from kvcache_plugins.batching import CompressedBatching, compressed_batching
from kvcache_plugins.models.reference_model import resolve_model
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import check_cache

from .handlers import HANDLERS
from .requests import BatchingManager, CachingManager, Departures, Say


_COUNTERS = "requests", "cancelled", "failed", "prompt_tokens", "known_tokens", "generated_tokens", "cache_bytes"
# Of a text that tables are made of
_TEXT_TOKENS = 2048
# Requests that are answered when the server is stopped have as long to end
_GRACE_S = 10
# Of a batch on a CPU, whose memory other programs share: tokens of a pass, and pages in bytes of dense blocks
_CPU_BATCH_TOKENS, _CPU_BLOCKS = 1024, 64


class _Parts(Serve):  # type: ignore[misc]
    def start_server(self) -> None:
        """Leaves the start to whoever has made it."""


class CacheServer:
    """
    Serves a model, by the `name` that clients call it, as OpenAI's API does, by Transformers' server, with a cache of
    the registry for each request; or, with `continuous_batching`, from coded pages: `text` makes tables for caches
    without a calibration, `temperature` is of all requests, `num_blocks` dense blocks of 256 tokens say how many bytes
    pages have, and `max_batch_tokens` are those of a pass (on a CPU 64 and 1024 unless they are given). In the folder
    `store` prompts and answers are kept. `url` is what clients take for their `base_url`, and `say` takes a line for
    each request. Errors name the command's options.

    A `ValueError` refuses models that write no text and options, an `ImportError` packages or a release of
    Transformers, an `OSError` a port that is taken.
    """

    def __init__(
        self,
        name: str,
        cache: str = "transform",
        *,
        store: Path | None = None,
        continuous_batching: bool = False,
        text: str | None = None,
        temperature: float | None = None,
        num_blocks: int | None = None,
        max_batch_tokens: int | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        device: str = "auto",
        dtype: str = "auto",
        say: Say = lambda line: None,
    ) -> None:
        if "start_server" not in vars(Serve):
            raise ImportError(
                f"the server of Transformers {transformers.__version__} is not known, but those of 5.23 and 5.24 are"
            )
        batched = {"text-file": text, "temperature": temperature, "num-blocks": num_blocks}
        batched |= {"max-batch-tokens": max_batch_tokens}
        if continuous_batching:
            _check_batch(cache, store, text)
        elif given := [option for option, value in batched.items() if value is not None]:
            raise ValueError(f"`--{given[0]}` is given without `--continuous-batching`")
        self._store = None if store is None else PromptStore(store)
        self._batching: CompressedBatching | None = None
        with ExitStack() as stack:
            self._socket = stack.enter_context(closing(_bind(host, port)))
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/v1"
            self._parts = _Parts(
                force_model=resolve_model(name),
                device=device,
                dtype=dtype,
                continuous_batching=continuous_batching,
                log_level="error",
                non_blocking=True,
            )
            state, sampling = self._parts._generation_state, None
            model, tokenizer = self._take_model(name)
            self._manager: CachingManager | BatchingManager
            if continuous_batching:
                own = {"return_tensors": "pt", "truncation": True, "max_length": _TEXT_TOKENS}
                ids = tokenizer(text, **own).input_ids if text else None
                self._batching = stack.enter_context(compressed_batching(model, cache, text=ids))
                sampling = self._choose_sampling(model, temperature)
                pages = _choose_pages(model, num_blocks, max_batch_tokens)
                self._manager = state._cb_manager = BatchingManager(model, pages, sampling, say)
            else:
                self._manager = CachingManager(model, cache, self._store, say)
            stack.callback(self._manager.stop)
            state.get_manager = lambda model_id, use_cb=False: self._manager  # type: ignore[method-assign]
            handlers = [kind(self._parts, name, model, tokenizer, sampling) for kind in HANDLERS]
            self._add_routes(self._parts.server.config.app, name, handlers)
            self._parts.server.config.timeout_graceful_shutdown = _GRACE_S
            self._open = stack.pop_all()

    def run(self) -> None:
        """Serves until the process is told to stop (Ctrl-C or SIGTERM); what is being answered is answered first."""
        # Otherwise a line to standard output for every request
        logging.getLogger("uvicorn.access").handlers.clear()
        # Ctrl-C is what it has ended by
        with self._open, suppress(KeyboardInterrupt):
            self._parts.server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Has `run` return, from any thread."""
        self._parts.server.should_exit = True

    def stats(self) -> dict[str, int | float]:
        """Counts what was asked and answered since the server was made."""
        found: dict[str, int | float] = {name: self._manager.counters[name] for name in _COUNTERS}
        if self._store is not None:
            found["store_bytes"] = self._store.stats()["bytes_on_disk"]
        if self._batching is not None and isinstance(self._manager, BatchingManager):
            found |= {f"batching_{name}": number for name, number in self._batching.stats().items()}
            found["batching_free_share"] = self._manager.free_share()
        return found

    def _take_model(self, name: str) -> tuple[Any, Any]:
        """Has clients call the model that was loaded by a name; a `ValueError` if it does not write text alone."""
        models = self._parts._model_manager
        ((_, loaded),) = models.loaded_models.items()
        if models.get_model_modality(loaded.model, processor=loaded.processor).value != "LLM":
            raise ValueError(f"`model` is `{name}`, but models of text alone are served")
        models.force_model, models.loaded_models = name, {models.process_model_name(name): loaded}
        return loaded.model, loaded.processor

    def _choose_sampling(self, model: Any, temperature: float | None) -> GenerationConfig:
        """Chooses how tokens of a batch are sampled, which is also what requests that say nothing begin with."""
        if temperature is not None:
            model.generation_config.update(do_sample=temperature > 0, temperature=temperature or None)
        chosen: GenerationConfig = self._parts._chat_handler._build_generation_config(
            {}, model.generation_config, use_cb=True
        )
        return chosen

    def _add_routes(self, app: Any, name: str, handlers: list[Any]) -> None:
        """Leaves of Transformers' routes `/health`, and adds handlers, the list of models and errors as JSON."""
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse
        from jinja2 import TemplateError
        from starlette.exceptions import HTTPException

        app.router.routes[:] = [route for route in app.router.routes if route.path == "/health"]
        for handler in handlers:
            app.post(f"/v1/{handler.api}")(handler.answer)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "kvcache-plugins"}
        app.get("/v1/models")(lambda: {"object": "list", "data": [model]})

        def answer(code: int, message: str) -> JSONResponse:
            self._manager.counters["failed"] += 1
            kind = "invalid_request_error" if code < 500 else "server_error"
            return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status_code=code)

        async def refuse(request: Any, error: Exception) -> JSONResponse:
            return answer(400, f"{error} is missing" if isinstance(error, KeyError) else str(error))

        async def refuse_http(request: Any, error: HTTPException) -> JSONResponse:
            return answer(error.status_code, str(error.detail))

        async def fail(request: Any, error: Exception) -> JSONResponse:
            return answer(500, f"{type(error).__name__}: {error}")

        for kind in (ValueError, TypeError, KeyError, TemplateError, RequestValidationError):
            app.add_exception_handler(kind, refuse)
        app.add_exception_handler(HTTPException, refuse_http)
        app.add_exception_handler(Exception, fail)
        app.add_middleware(Departures)


def _check_batch(cache: str, store: Path | None, text: str | None) -> None:
    """Refuses before anything is loaded what a batch cannot have."""
    if store is not None:
        raise ValueError("`--store` is given with `--continuous-batching`")
    if ":" in cache:
        raise ValueError(f"`--cache {cache}` has options, with `--continuous-batching` accepted are names alone")
    if text is None and "calibration" not in check_cache(cache).options:
        raise ValueError(
            f"`--cache {cache}` has no tables that requests of a batch can share: give a `--text-file` to make them "
            "of, or a calibrated cache, such as `calibrated-16` after `kvcache-plugins calibrate`"
        )


def _choose_pages(model: Any, num_blocks: int | None, max_batch_tokens: int | None) -> ContinuousBatchingConfig:
    """Chooses the size of pages; on other devices than a CPU Transformers takes what is free, if nobody says."""
    if model.device.type == "cpu":
        num_blocks = num_blocks or _CPU_BLOCKS
        max_batch_tokens = max_batch_tokens or _CPU_BATCH_TOKENS
    # A request has blocks for exact tokens too, so small ones: `num_blocks` are of 256 tokens
    count = None if num_blocks is None else 2 * num_blocks
    return ContinuousBatchingConfig(page_size=128, num_blocks=count, max_batch_tokens=max_batch_tokens)


def _bind(host: str, port: int) -> socket.socket:
    """Takes a port, before anything is loaded."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    taken = socket.socket(family, kind, protocol)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise OSError(f"`--port` is {port}, but {host}:{port} cannot be listened at ({error.strerror})") from error
    return taken
