"""Transformers' own server, of one model whose every request has a cache of the registry.

Transformers has chat templates, streaming and sampling; `handlers` check options, and `managers` give each request its
cache. `CacheServer` puts them together, answers errors as JSON, counts and stops.
"""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serve import Serve

from kvcache_plugins.batching import CompressedBatching, compressed_batching
from kvcache_plugins.models.reference_model import resolve_model
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.packed.cache import makes_packed_cache
from kvcache_plugins.prompt_store import PromptStore
from kvcache_plugins.registry import check_cache

from .conversations import Conversations
from .disconnects import DisconnectMiddleware
from .handlers import HANDLERS, Handler
from .managers import BatchingManager, CachingManager, LogLine


if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse


_COUNTERS = "requests", "cancelled", "failed", "prompt_tokens", "known_tokens", "generated_tokens", "cache_bytes"
# Tokens of a text that tables are made of
_TEXT_TOKENS = 2048
# Seconds that requests have to end once the server is stopped
_GRACE_S = 10
# Default tokens of a pass, and pages in dense blocks, on a CPU, whose memory other programs share
_CPU_BATCH_TOKENS = 1024
_CPU_BLOCKS = 64


class _UnstartedServe(Serve):
    """Transformers' server, which starts when `CacheServer.run` is called."""

    def start_server(self) -> None:
        """Do nothing."""


class _BatchOptions(NamedTuple):
    """Options of `CacheServer` that only a batch has."""

    text: str | None
    temperature: float | None
    num_blocks: int | None
    max_batch_tokens: int | None

    def refuse(self) -> None:
        """Raise a `ValueError` for the first option that is given."""
        for name, value in self._asdict().items():
            if value is not None:
                option = "text-file" if name == "text" else name.replace("_", "-")
                raise ValueError(f"`--{option}` is given without `--continuous-batching`")


class CacheServer:
    """
    OpenAI's API of a model by Transformers' server, with a cache of the registry for each request, or with coded pages
    for all requests together.

    Args:
        name (`str`): the model, and the name that clients call it by.
        cache (`str`, *optional*, defaults to `"transform"`): name of the cache.
        store (`Path`, *optional*): folder of a prompt store that keeps prompts and answers.
        conversations (`int`, *optional*): newest conversations whose caches are kept in memory, for requests that
            continue one or an edited one; none by default.
        continuous_batching (`bool`, *optional*, defaults to `False`): answer requests together, from coded pages.
        text (`str`, *optional*): text that tables of a batch are made of, for caches without a calibration.
        temperature (`float`, *optional*): temperature of requests of a batch that name none.
        num_blocks (`int`, *optional*): memory of pages, in dense blocks of 256 tokens; 64 on a CPU.
        max_batch_tokens (`int`, *optional*): tokens of a pass of a batch; 1024 on a CPU.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen at.
        port (`int`, *optional*, defaults to 8000): port to listen at; 0 for any that is free.
        device, dtype (`str`, *optional*, defaults to `"auto"`): device and dtype of the model.
        say (`Callable`, *optional*): function that gets a line for each request.

    Attributes:
        url (`str`): `base_url` of clients.

    Raises:
        ValueError: for a model that writes no text alone, and for options, which errors name as the command does.
        ImportError: if packages are missing, or Transformers is of another release.
        OSError: if the port is taken.
    """

    _batching: CompressedBatching | None = None

    def __init__(
        self,
        name: str,
        cache: str = "transform",
        *,
        store: Path | None = None,
        conversations: int | None = None,
        continuous_batching: bool = False,
        text: str | None = None,
        temperature: float | None = None,
        num_blocks: int | None = None,
        max_batch_tokens: int | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        device: str = "auto",
        dtype: str = "auto",
        say: LogLine = lambda line: None,
    ) -> None:
        _check_release()
        if continuous_batching:
            _check_batch(cache, text)
        else:
            _BatchOptions(text, temperature, num_blocks, max_batch_tokens).refuse()
        _check_store(cache, store)
        _check_conversations(cache, conversations, has_store=store is not None, is_batched=continuous_batching)
        self._store = None if store is None else PromptStore(store)
        with ExitStack() as stack:
            self._socket = stack.enter_context(closing(_bind(host, port)))
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/v1"
            self._serve = _UnstartedServe(
                force_model=resolve_model(name),
                device=device,
                dtype=dtype,
                continuous_batching=continuous_batching,
                log_level="error",
                non_blocking=True,
            )
            model, tokenizer = self._rename_model(name)
            self._manager: CachingManager | BatchingManager
            if continuous_batching:
                context = compressed_batching(model, cache, text=_encode_text(tokenizer, text), store=self._store)
                self._batching = stack.enter_context(context)
                pages = _choose_pages(model, num_blocks, max_batch_tokens)
                self._manager = BatchingManager(model, pages, self._choose_sampling(model, temperature), say)
            else:
                held = None if conversations is None else Conversations(conversations)
                self._manager = CachingManager(model, cache, self._store, held, say)
            stack.callback(self._manager.stop)
            self._install_manager(name, model, tokenizer)
            self._open = stack.pop_all()

    def run(self) -> None:
        """Serve until the process is interrupted (Ctrl-C or SIGTERM); requests that are being answered end first."""
        # Uvicorn would write a line to standard output for every request
        logging.getLogger("uvicorn.access").handlers.clear()
        # Uvicorn raises the interrupt again after it has stopped
        with self._open, suppress(KeyboardInterrupt):
            self._serve.server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `run` return; any thread may call it."""
        self._serve.server.should_exit = True

    def stats(self) -> dict[str, int | float]:
        """Return counters of requests and answers since the server was made."""
        found: dict[str, int | float] = {name: self._manager.counters[name] for name in _COUNTERS}
        if self._store is not None:
            found["store_bytes"] = self._store.stats()["bytes_on_disk"]
        if self._batching is not None and isinstance(self._manager, BatchingManager):
            found |= {f"batching_{name}": number for name, number in self._batching.stats().items()}
            found["batching_free_share"] = self._manager.free_share()
        return found

    def _rename_model(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Rename the loaded model to `name` for clients; a `ValueError` if it does not write text alone."""
        models = self._serve._model_manager
        ((_, loaded),) = models.loaded_models.items()
        if models.get_model_modality(loaded.model, processor=loaded.processor).value != "LLM":
            raise ValueError(f"`model` is `{name}`, but models of text alone are served")
        models.force_model = name
        models.loaded_models = {models.process_model_name(name): loaded}
        assert isinstance(loaded.processor, PreTrainedTokenizerBase), "models of text alone have a tokenizer"
        return loaded.model, loaded.processor

    def _choose_sampling(self, model: PreTrainedModel, temperature: float | None) -> GenerationConfig:
        """Return the sampling of requests that name none."""
        if temperature is not None:
            model.generation_config.update(do_sample=temperature > 0, temperature=temperature or None)
        chosen: GenerationConfig = self._serve._chat_handler._build_generation_config(
            {}, model.generation_config, use_cb=True
        )
        return chosen

    def _install_manager(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Replace the manager and the handlers of Transformers' server."""
        state = self._serve._generation_state
        is_batched = isinstance(self._manager, BatchingManager)
        if isinstance(self._manager, BatchingManager):
            # `/health` asks whether it is alive
            state._cb_manager = self._manager
        state.get_manager = lambda model_id, use_cb=False: self._manager  # type: ignore[method-assign]
        config = self._serve.server.config
        config.timeout_graceful_shutdown = _GRACE_S
        app: FastAPI = config.app  # type: ignore[assignment]
        self._add_routes(app, name, [kind(self._serve, name, model, tokenizer, is_batched) for kind in HANDLERS])
        self._answer_errors(app)

    def _add_routes(self, app: FastAPI, name: str, handlers: list[Handler]) -> None:
        """Keep `/health` of Transformers' routes, and add handlers and the list of models."""
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) == "/health"]
        for handler in handlers:
            app.post(f"/v1/{handler.api}", response_model=None)(handler.answer)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "kvcache-plugins"}
        app.get("/v1/models")(lambda: {"object": "list", "data": [model]})
        app.add_middleware(DisconnectMiddleware)

    def _answer_errors(self, app: FastAPI) -> None:
        """Answer every error as JSON, and count it."""
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse
        from jinja2 import TemplateError
        from starlette.exceptions import HTTPException

        def answer(code: int, message: str) -> JSONResponse:
            self._manager.counters["failed"] += 1
            kind = "invalid_request_error" if code < 500 else "server_error"
            return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status_code=code)

        async def refuse(request: Request, error: Exception) -> JSONResponse:
            return answer(400, f"{error} is missing" if isinstance(error, KeyError) else str(error))

        async def refuse_body(request: Request, error: Exception) -> JSONResponse:
            return answer(400, "the body of a request has to be a JSON object")

        async def refuse_http(request: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, HTTPException)
            return answer(error.status_code, str(error.detail))

        async def fail(request: Request, error: Exception) -> JSONResponse:
            return answer(500, f"{type(error).__name__}: {error}")

        for kind in (ValueError, TypeError, KeyError, TemplateError):
            app.add_exception_handler(kind, refuse)
        app.add_exception_handler(RequestValidationError, refuse_body)
        app.add_exception_handler(HTTPException, refuse_http)
        app.add_exception_handler(Exception, fail)


def _check_release() -> None:
    """Raise an `ImportError` if Transformers' server is not the one that this module is written for."""
    if "start_server" not in vars(Serve):
        raise ImportError(
            f"the server of Transformers {transformers.__version__} is not known, but those of 5.23 and 5.24 are"
        )


def _check_batch(cache: str, text: str | None) -> None:
    """Raise a `ValueError` for options that a batch cannot have, before the model is loaded."""
    if ":" in cache:
        raise ValueError(f"`--cache {cache}` has options, with `--continuous-batching` accepted are names alone")
    if text is None and "calibration" not in check_cache(cache).options:
        raise ValueError(
            f"`--cache {cache}` has no tables that requests of a batch can share: give a `--text-file` to make them "
            "of, or a calibrated cache, such as `calibrated-16` after `kvcache-plugins calibrate`"
        )


def _check_conversations(cache: str, count: int | None, *, has_store: bool, is_batched: bool) -> None:
    """Raise a `ValueError` for conversations that cannot be kept; without a `count` none are."""
    if count is None:
        return
    check_integer("--conversations", count, 1)
    if has_store or is_batched:
        other = "store" if has_store else "continuous-batching"
        raise ValueError(f"`--conversations` is given with `--{other}`, and both share what requests begin with")
    if not makes_packed_cache(cache):
        raise ValueError(f"`--conversations` keeps caches of packed tokens, which `--cache {cache}` is not")


def _check_store(cache: str, store: Path | None) -> None:
    """Raise a `ValueError` for a cache that no store keeps, before the model is loaded."""
    if store is not None and not makes_packed_cache(cache):
        raise ValueError(f"`--store` keeps packed tokens, which `--cache {cache}` does not hold")


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str | None) -> torch.Tensor | None:
    """Encode the beginning of a text that tables are made of."""
    if not text:
        return None
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", truncation=True, max_length=_TEXT_TOKENS).input_ids
    return ids


def _choose_pages(
    model: PreTrainedModel, num_blocks: int | None, max_batch_tokens: int | None
) -> ContinuousBatchingConfig:
    """Choose the size of pages; on a GPU Transformers takes all free memory unless a size is given."""
    if model.device.type == "cpu":
        num_blocks = num_blocks or _CPU_BLOCKS
        max_batch_tokens = max_batch_tokens or _CPU_BATCH_TOKENS
    # Each request has blocks for exact tokens as well, so blocks are small; `num_blocks` counts them as 256 tokens
    count = None if num_blocks is None else 2 * num_blocks
    # Processors of scores need memory beside the pages
    return ContinuousBatchingConfig(
        page_size=128, num_blocks=count, max_batch_tokens=max_batch_tokens, max_memory_percent=0.8
    )


def _bind(host: str, port: int) -> socket.socket:
    """Take a port, before the model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`--host` has to be an address of this machine but got {host!r} ({error})") from error
    family, kind, protocol, _, address = found[0]
    taken = socket.socket(family, kind, protocol)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise OSError(f"`--port` is {port}, but {host}:{port} cannot be listened at ({error.strerror})") from error
    return taken
