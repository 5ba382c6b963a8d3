"""Requests whose clients may disconnect: the state that threads share, and the end of their computation.

A request arrives on the server's event loop, and a manager computes its answer on another thread. Both hold its
`Request`: `DisconnectMiddleware` sets `disconnected` on the event loop, and layers of the model see it on the other
thread, also in the middle of a prompt.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(eq=False)
class Request:
    """
    State of a request that threads share.

    Attributes:
        disconnected (`threading.Event`): set once its client has disconnected.
        seed (`int`, *optional*): seed that it asks for.
        sampling (`dict`): how a batch samples its tokens.
        num_known (`int`, *optional*): tokens of its prompt that a store had, once they are counted.
    """

    disconnected: threading.Event = field(default_factory=threading.Event)
    seed: int | None = None
    sampling: dict[str, float | int] = field(default_factory=dict)
    num_known: int | None = None


# The request that the event loop handles
CURRENT: ContextVar[Request] = ContextVar("CURRENT")


class ClientDisconnected(Exception):
    """Ends a forward pass that no client waits for."""


class DisconnectMiddleware:
    """ASGI middleware that makes a `Request` for each answer, and cancels the answer if its client disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, at most until its client disconnects."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        disconnected = threading.Event()
        CURRENT.set(Request(disconnected))
        messages: asyncio.Queue[Message] = asyncio.Queue()
        is_answered = False

        async def forward(message: Message) -> None:
            nonlocal is_answered
            is_answered = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def listen() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    if not is_answered:
                        disconnected.set()
                        answer.cancel()
                    return

        answer = asyncio.ensure_future(self._app(scope, messages.get, forward))
        listener = asyncio.ensure_future(listen())
        try:
            await answer
        except asyncio.CancelledError:
            # Otherwise the server is stopping
            if not disconnected.is_set():
                disconnected.set()
                raise
        finally:
            listener.cancel()


@contextmanager
def stop_if_disconnected(model: PreTrainedModel, disconnected: threading.Event) -> Iterator[None]:
    """Make each layer of a model raise `ClientDisconnected` once a client has disconnected."""

    def check(*args: object) -> None:
        if disconnected.is_set():
            raise ClientDisconnected

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [module.register_forward_pre_hook(check) for module in (model, *layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
