"""Forward hooks that hand every attention's input to the model's InfiniGen caches. Nothing is patched.

A model gets its hooks once, for all its caches that speculate, in any number of threads; a forward pass has its
thread's `ForwardRecord`. The hooks act only if the cache of the forward is an observer, and are removed with the last
observer.

Queries of layer i are predicted at layer i-1: the paper pushes the attention input of layer i-1 through the query
projection of layer i. Both inputs are norms of the same slowly changing residual stream, but each layer has a norm of
its own; so here it is the residual stream before layer i-1, normed as layer i norms it. Families share the names of
that norm. A model without one (a norm after attention) hands the stream to attention itself, and the two are the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvcache_plugins.models.cache_argument import CACHE_NAMES
from kvcache_plugins.models.layer_config import config_of_layer
from kvcache_plugins.user_warnings import warn_user

from .queries import (
    InputNorm,
    PositionEmbeddings,
    QueryProjection,
    UnknownQueriesError,
    find_attention_modules,
    first_of,
)


# Arguments of a module's `forward`
Arguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]

_HOOKS: weakref.WeakKeyDictionary[PreTrainedModel, ModelHooks] = weakref.WeakKeyDictionary()
# Held while hooks are added or removed. Reentrant, as garbage, observers included, may be collected at any time
_LOCK = threading.RLock()
_CACHE_NAMES = (*CACHE_NAMES, "layer_past", "past_key_value")
# Names of the norm between the residual stream and attention; Falcon's newer form has the first two
_NORM_NAMES = ("ln_attn", "input_layernorm", "self_attn_layer_norm", "ln_1", "norm_1")


class ModelReference(weakref.ref[PreTrainedModel]):
    """Weak reference to the model of a cache; a deep copy of the cache refers to the same model."""

    def __deepcopy__(self, memo: dict[int, object]) -> ModelReference:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ValueError(
            "an InfiniGen cache cannot be pickled, nor written by `torch.save`: it has hooks on a model in memory. "
            "`copy.deepcopy(cache)` copies it; to keep a prompt in a file, use a `GEARCache` and its `save`"
        )


class AttentionInputs:
    """Hidden states `[B, tokens, hidden size]`, cosine and sine, and mask that attention was called with."""

    def __init__(self, args: Arguments, kwargs: KeywordArguments):
        self.hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        pairs = (value for value in args[1:] if isinstance(value, tuple) and len(value) == 2)
        self.position_embeddings: PositionEmbeddings | None = kwargs.get("position_embeddings", next(pairs, None))
        self.attention_mask = mask_of_tokens(kwargs.get("attention_mask"))


class ForwardRecord(threading.local):
    """
    Record of a thread's forward pass.

    Attributes:
        streams (`dict[int, torch.Tensor]`): residual stream by layer, before the layer's norm.
        rotary (`dict[str, PositionEmbeddings]`): position embeddings by layer type, where types have their own.
        keeps_streams (`bool`): True if streams of several tokens are recorded too, not only those of single ones.
    """

    def __init__(self) -> None:
        self.keeps_streams = False
        self.streams: dict[int, torch.Tensor] = {}
        self.rotary: dict[str, PositionEmbeddings] = {}

    @contextmanager
    def of_all_tokens(self) -> Iterator[None]:
        """Record the streams of several tokens too within the block."""
        self.keeps_streams = True
        try:
            yield
        finally:
            self.keeps_streams = False


class AttentionObserver:
    """Base of caches that the hooks call before every attention, ahead of its layer's `update`."""

    def on_attention_input(self, hooks: ModelHooks, layer_idx: int, inputs: AttentionInputs) -> None:
        """Receive the input of a layer's attention."""
        raise NotImplementedError


class ModelHooks:
    """
    Hooks on one model for all caches that observe it.

    Attributes:
        projections (`dict[int, QueryProjection]`): query projection by layer.
        unknown (`dict[int, str]`): reason by layer for which there is no projection; -1 means all layers.
        observed_layers (`frozenset[int]`): layers whose attention calls the observers.
        checked (`set[int]`): layers whose projection was compared with the queries that attention got.
        record (`ForwardRecord`): record of this thread's forward pass.
    """

    # True if a copy of the model has these hooks: its caches have hooks of their own
    is_copy = False

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.model = ModelReference(model)
        self.projections: dict[int, QueryProjection] = {}
        self.unknown: dict[int, str] = {}
        modules: dict[int, nn.Module] = {}
        try:
            modules = find_attention_modules(model)
        except ValueError as error:
            self.unknown[-1] = str(error)
        for index, module in modules.items():
            try:
                self.projections[index] = QueryProjection(module, config_of_layer(config, index))
            except ValueError as error:
                self.unknown[index] = str(error)
        self.observed_layers = frozenset(self.projections)
        self.layer_types: list[str] | None = getattr(config, "layer_types", None)
        self.observers: weakref.WeakSet[AttentionObserver] = weakref.WeakSet()
        self.checked: set[int] = set()
        self.record = ForwardRecord()
        # Norm of attention's input by layer: a sibling of the attention module
        decoder = model.get_decoder()
        parents = {id(child): module for module in decoder.modules() for child in module.children()}
        found = {index: first_of(parents[id(modules[index])], _NORM_NAMES) for index in self.observed_layers}
        norms: dict[int, nn.Module] = {index: norm for index, norm in found.items() if norm is not None}
        # Before they have hooks
        self._norms = {index: InputNorm(norm) for index, norm in norms.items()}
        self._handles: list[RemovableHandle] = [decoder.register_forward_pre_hook(self._start_forward)]
        for index in self.observed_layers:
            hook = partial(self._before_attention, index)
            self._handles.append(modules[index].register_forward_pre_hook(hook, with_kwargs=True))
        for index, norm in norms.items():
            self._handles.append(norm.register_forward_pre_hook(partial(self._record_stream, index)))
        for child in decoder.children():
            if "RotaryEmbedding" in type(child).__name__ and self.layer_types is not None:
                self._handles.append(child.register_forward_hook(self._record_rotary, with_kwargs=True))

    def __deepcopy__(self, memo: dict[int, object]) -> ModelHooks:
        # A model is copied with its hooks, but not with the caches that observe it
        made = ModelHooks.__new__(ModelHooks)
        made.is_copy = True
        made.record = ForwardRecord()
        return made

    def why_unknown(self) -> str | None:
        """Return the first reason why a layer's queries cannot be predicted; `None` if all layers' can."""
        return next(iter(self.unknown.values()), None)

    def _start_forward(self, module: nn.Module, args: Arguments) -> None:
        # The last forward may have failed
        self.record.streams.clear()
        self.record.rotary.clear()

    def _record_stream(self, index: int, module: nn.Module, args: Arguments) -> None:
        if args and (args[0].shape[1] == 1 or self.record.keeps_streams):
            self.record.streams[index] = args[0]

    def _record_rotary(self, module: nn.Module, args: Arguments, *given: Any) -> None:
        if len(given) == 1:
            # No keyword arguments: another thread has just removed the hooks
            return
        kwargs, output = given
        names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if len(names) == 1:
            self.record.rotary[names[0]] = output

    # `torch.compile` must not trace this: the host decides which layer's tokens are fetched
    @torch.compiler.disable
    def _before_attention(
        self, index: int, module: nn.Module, args: Arguments, kwargs: KeywordArguments | None = None
    ) -> None:
        # `None` if another thread has just removed the hooks
        if kwargs is not None and not self.is_copy:
            caches = [kwargs.get(name) for name in _CACHE_NAMES] + list(args[1:])
            cache = next((value for value in caches if isinstance(value, AttentionObserver)), None)
            if cache is not None:
                cache.on_attention_input(self, index, AttentionInputs(args, kwargs))
        self.record.streams.pop(index, None)

    def expected_hidden_states(
        self, target: int, source: int, inputs: AttentionInputs, device: torch.device
    ) -> torch.Tensor:
        """Predict the attention input of layer `target`, on its `device`, right before attention of `source` runs."""
        stream = self.record.streams.get(source)
        norm = self._norms.get(target)
        if stream is None or norm is None:
            return inputs.hidden_states.to(device)
        expected = norm(stream.to(device))
        # Calling the target's norm has run its hook
        self.record.streams.pop(target, None)
        return expected

    def embeddings_for(self, target: int, source: int, inputs: AttentionInputs) -> PositionEmbeddings | None:
        """Return cosine and sine of layer `target`, if it has any; a `LookupError` if its own have not been seen."""
        if self.same_type(target, source) or inputs.position_embeddings is None:
            return inputs.position_embeddings
        assert self.layer_types is not None
        return self.record.rotary[self.layer_types[target]]

    def same_type(self, one: int, other: int) -> bool:
        """Return whether two layers get the same mask and position embeddings."""
        return self.layer_types is None or self.layer_types[one] == self.layer_types[other]

    def check_once(self, index: int, inputs: AttentionInputs) -> Callable[[torch.Tensor], None] | None:
        """Return a check of queries `[B, num_heads, tokens, head_dim]` against the projection of `index`, once."""
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

    def detach(self, observer: AttentionObserver) -> None:
        """Remove an observer, and the hooks with the last one."""
        with _LOCK:
            self.observers.discard(observer)
            self.remove_if_unused()

    def remove_if_unused(self) -> None:
        """Remove the hooks if there is no observer."""
        with _LOCK:
            # `len` may still count an observer that is being collected
            if any(True for _ in self.observers):
                return
            while self._handles:
                self._handles.pop().remove()
            model = self.model()
            if model is not None and _HOOKS.get(model) is self:
                del _HOOKS[model]


def unknown_queries_warning(reason: str) -> str:
    """Return the warning about layers whose queries cannot be predicted, for a `reason`."""
    return (
        f"`model`: {reason}. Layers of this kind choose tokens by their own query, as with `speculate=False`: right, "
        "and nothing is fetched ahead"
    )


def attach(model: PreTrainedModel, observer: AttentionObserver) -> ModelHooks:
    """Add an observer to a model's hooks, which are made for the first one and removed with the last one."""
    with _LOCK:
        hooks = None
        while hooks is None or _HOOKS.get(model) is not hooks:
            hooks = _HOOKS.get(model)
            if hooks is None:
                hooks = _HOOKS[model] = ModelHooks(model)
            # From here on the hooks stay; garbage that was collected before may have removed them
            hooks.observers.add(observer)
    weakref.finalize(observer, _on_observer_collected, weakref.ref(hooks)).atexit = False
    return hooks


def _on_observer_collected(reference: weakref.ref[ModelHooks]) -> None:
    hooks = reference()
    if hooks is not None:
        hooks.remove_if_unused()


def hooks_of(model: PreTrainedModel) -> ModelHooks | None:
    """Return the hooks of a model, if it has any."""
    return _HOOKS.get(model)


def mask_of_tokens(mask: object) -> torch.Tensor | None:
    """Return a mask that attention was called with, if it is one over all tokens."""
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None
