"""Forward hooks by which an InfiniGen cache hears the input of every attention of a model. Nothing is patched.

A model is attached once and serves all its caches that speculate, in any number of threads; a forward pass has its
thread's `ForwardNotes`. The hooks act only when the cache at hand listens, and go with the last cache that does.

Queries of layer i are expected from what stands at layer i-1: the paper pushes the attention input of layer i-1
through the query projection of layer i. Both inputs are norms of the same slowly changing residual stream, but each
layer has a norm of its own; so here it is the residual stream before layer i-1, normed as layer i norms it. Families
share the names of that norm. A model without one (a norm after attention) hands the stream to attention itself, and
the two are the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvcache_plugins.models.cache_argument import CACHE_NAMES
from kvcache_plugins.models.layer_config import config_of_layer
from kvcache_plugins.user_warnings import warn_user

from .queries import PositionEmbeddings, QueryProjection, UnknownQueriesError, find_attention_modules, first_of


_ATTACHMENTS: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()
# Held while hooks are added or removed. Reentrant, as garbage may be collected, and listeners with it, at any time
_LOCK = threading.RLock()
_CACHE_NAMES = (*CACHE_NAMES, "layer_past", "past_key_value")
# Of what norms the residual stream for attention, which it stands beside; Falcon's newer form has the first two
_NORM_NAMES = ("ln_attn", "input_layernorm", "self_attn_layer_norm", "ln_1", "norm_1")


class ModelReference(weakref.ref[PreTrainedModel]):
    """Names the model of a cache without keeping it; a deep copy of the cache refers to the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReference:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "an InfiniGen cache cannot be pickled, nor written by `torch.save`: it listens to a model in memory. "
            "`copy.deepcopy(cache)` copies it; to keep a prompt in a file, use a `GEARCache` and its `save`"
        )


class AttentionInputs:
    """Finds hidden states `[B, tokens, hidden size]`, cosine and sine, and mask that attention was called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        pairs = (value for value in args[1:] if isinstance(value, tuple) and len(value) == 2)
        self.position_embeddings: PositionEmbeddings | None = kwargs.get("position_embeddings", next(pairs, None))
        self.attention_mask = mask_of_tokens(kwargs.get("attention_mask"))


class ForwardNotes(threading.local):
    """
    Notes of a thread's forward pass the residual `streams` by layer, before they are normed (of several tokens only
    where `keeps_streams`), and `rotary` position embeddings by layer type, where types have their own.
    """

    def __init__(self) -> None:
        self.keeps_streams = False
        self.streams: dict[int, torch.Tensor] = {}
        self.rotary: dict[str, PositionEmbeddings] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # Copied with a model that has hooks
        return ForwardNotes, ()


class AttentionListener:
    """Base of caches for which the hooks act: they are told of every attention before its layer's `update`."""

    def on_attention_input(self, attachment: Attachment, layer_idx: int, inputs: AttentionInputs) -> None:
        """Called before the attention of a layer."""
        raise NotImplementedError


class Attachment:
    """
    Hooks into one model for all caches that listen. By layer, `projections` make its queries, or it is `unknown` why
    not (-1 stands for all); `heard` layers' attention listeners are told of, `checked` ones' projections are right.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.model = ModelReference(model)
        self.projections: dict[int, QueryProjection] = {}
        self.unknown: dict[int, str] = {}
        try:
            modules = find_attention_modules(model)
        except ValueError as error:
            modules, self.unknown[-1] = {}, str(error)
        for index, module in modules.items():
            try:
                self.projections[index] = QueryProjection(module, config_of_layer(config, index))
            except ValueError as error:
                self.unknown[index] = str(error)
        self.heard = frozenset(self.projections)
        self.layer_types: list[str] | None = getattr(config, "layer_types", None)
        self.listeners: weakref.WeakSet[AttentionListener] = weakref.WeakSet()
        self.checked: set[int] = set()
        self.notes = ForwardNotes()
        decoder = model.get_decoder()
        # By layer, the module that norms the input of attention: it stands beside it
        parents = {id(child): module for module in decoder.modules() for child in module.children()}
        norms = {index: first_of(parents[id(modules[index])], _NORM_NAMES) for index in self.heard}
        self._norms: dict[int, nn.Module] = {index: norm for index, norm in norms.items() if norm is not None}
        self._handles: list[RemovableHandle] = [decoder.register_forward_pre_hook(self._before_decoder)]
        for index in self.heard:
            hook = partial(self._before_attention, index)
            self._handles.append(modules[index].register_forward_pre_hook(hook, with_kwargs=True))
        for index, norm in self._norms.items():
            self._handles.append(norm.register_forward_pre_hook(partial(self._after_stream, index)))
        for child in decoder.children():
            if "RotaryEmbedding" in type(child).__name__ and self.layer_types is not None:
                self._handles.append(child.register_forward_hook(self._after_rotary, with_kwargs=True))

    def why_unknown(self) -> str | None:
        """Tells the first reason why the queries of a layer cannot be told ahead; `None` if those of all can."""
        return next(iter(self.unknown.values()), None)

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # The last pass may have failed
        self.notes.streams.clear()
        self.notes.rotary.clear()

    def _after_stream(self, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and (args[0].shape[1] == 1 or self.notes.keeps_streams):
            self.notes.streams[index] = args[0]

    def _after_rotary(self, module: nn.Module, args: tuple[Any, ...], *given: Any) -> None:
        if len(given) == 1:
            # Without keywords: another thread has just removed the hooks
            return
        kwargs, output = given
        names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if len(names) == 1:
            self.notes.rotary[names[0]] = output

    # Not for `torch.compile` to trace: which layer's tokens are fetched is the host's business
    @torch.compiler.disable
    def _before_attention(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None:
            # Another thread has just removed the hooks
            return
        caches = [kwargs.get(name) for name in _CACHE_NAMES] + list(args[1:])
        cache = next((value for value in caches if isinstance(value, AttentionListener)), None)
        if cache is not None:
            cache.on_attention_input(self, index, AttentionInputs(args, kwargs))
        self.notes.streams.pop(index, None)

    def expected_hidden_states(
        self, target: int, source: int, inputs: AttentionInputs, device: torch.device
    ) -> torch.Tensor:
        """Guesses the input of attention of layer `target` on its `device`, when that of `source` is about to run."""
        stream, norm = self.notes.streams.get(source), self._norms.get(target)
        if stream is None or norm is None:
            return inputs.hidden_states.to(device)
        expected: torch.Tensor = norm(stream.to(device))
        # Norming it was seen by the hook of the target's norm
        self.notes.streams.pop(target, None)
        return expected

    def embeddings_for(self, target: int, source: int, inputs: AttentionInputs) -> PositionEmbeddings | None:
        """Returns cosine and sine of layer `target`, if any; a `LookupError` if its own have not been seen."""
        if self.same_type(target, source) or inputs.position_embeddings is None:
            return inputs.position_embeddings
        assert self.layer_types is not None
        return self.notes.rotary[self.layer_types[target]]

    def same_type(self, one: int, other: int) -> bool:
        """Tells whether two layers get the same mask and position embeddings."""
        return self.layer_types is None or self.layer_types[one] == self.layer_types[other]

    def check_once(self, index: int, inputs: AttentionInputs) -> Callable[[torch.Tensor], None] | None:
        """Returns a check of queries `[B, num_heads, tokens, head_dim]` against a projection of `index`, once."""
        if index in self.checked or index not in self.projections:
            return None
        embeddings = inputs.position_embeddings
        last = None if embeddings is None else (embeddings[0][:, -1:], embeddings[1][:, -1:])
        hidden_states = inputs.hidden_states[:, -1:].detach()

        def check(query: torch.Tensor) -> None:
            try:
                self.projections[index].check(hidden_states, last, query[:, :, -1:])
            except UnknownQueriesError as error:
                if not self.unknown:
                    warn_user(unknown_queries_warning(str(error)))
                self.projections.pop(index, None)
                self.unknown[index] = str(error)
            self.checked.add(index)

        return check

    def detach(self, listener: AttentionListener) -> None:
        """Removes the hooks once no cache listens any more."""
        with _LOCK:
            self.listeners.discard(listener)
            self.remove_unheard()

    def remove_unheard(self) -> None:
        """Removes the hooks if no cache listens."""
        with _LOCK:
            # Not their number, in which one that is just being collected may still be counted
            if any(True for _ in self.listeners):
                return
            while self._handles:
                self._handles.pop().remove()
            model = self.model()
            if model is not None and _ATTACHMENTS.get(model) is self:
                del _ATTACHMENTS[model]


def unknown_queries_warning(reason: str) -> str:
    """Words the warning of layers whose queries cannot be told ahead, for a `reason`."""
    return (
        f"`model`: {reason}. Layers of this kind choose tokens by their own query, as with `speculate=False`: right, "
        "and nothing is fetched ahead"
    )


def attach(model: PreTrainedModel, listener: AttentionListener) -> Attachment:
    """Attaches a model once, whatever the number of its caches, and until the last of them is detached or gone."""
    with _LOCK:
        attachment = None
        while attachment is None or _ATTACHMENTS.get(model) is not attachment:
            attachment = _ATTACHMENTS.get(model)
            if attachment is None:
                attachment = _ATTACHMENTS[model] = Attachment(model)
            # From here on garbage that is collected takes no hooks along; until here it may have
            attachment.listeners.add(listener)
    weakref.finalize(listener, _on_listener_gone, weakref.ref(attachment)).atexit = False
    return attachment


def _on_listener_gone(attachment: weakref.ref[Attachment]) -> None:
    left = attachment()
    if left is not None:
        left.remove_unheard()


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """Returns the attachment of a model, if it has one."""
    return _ATTACHMENTS.get(model)


def mask_of_tokens(mask: Any) -> torch.Tensor | None:
    """Returns a mask that attention was called with, if it is one over all tokens."""
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None
