"""What an InfiniGen cache hears of a model: the input of every attention, from forward hooks. Nothing is patched.

A model is attached once and serves all its caches. The hooks act only when the `past_key_values` at hand listens.

Queries of layer i are expected from what stands at layer i-1: the paper pushes the attention input of layer i-1
through the query projection of layer i. Both inputs are norms of the same slowly changing residual stream, but each
layer has a norm of its own; so here it is the residual stream before layer i-1, normed as layer i norms it. Which
module norms is seen, not known by name: the one whose output is the attention's input. A model without one (a norm
after attention) hands the stream to attention itself, and the two are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .attention_modules import find_attention_modules
from .queries import PositionEmbeddings, QueryProjection


_ATTACHMENTS: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()
_CACHE_NAMES = ("past_key_values", "layer_past", "past_key_value")


class AttentionListener:
    """What a cache has to be for the hooks to act: it is told of every attention before its layer's `update`."""

    def on_attention_input(self, attachment: Attachment, layer_idx: int, inputs: AttentionInputs) -> None:
        """
        Called before the attention of a layer.

        Args:
            attachment (`Attachment`): what is known of the model.
            layer_idx (`int`): the layer.
            inputs (`AttentionInputs`): what its attention module was called with.
        """
        raise NotImplementedError


class AttentionInputs:
    """
    What an attention module was called with.

    Attributes:
        hidden_states (`torch.Tensor` of shape `[B, tokens, hidden size]`): its input.
        position_embeddings (`tuple[torch.Tensor, torch.Tensor]`, *optional*): cosine and sine.
        attention_mask (`torch.Tensor`, *optional*): its mask, as attention gets it.
        position_ids (`torch.Tensor`, *optional*): positions of the tokens, where the model hands them on.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        pairs = (value for value in args[1:] if isinstance(value, tuple) and len(value) == 2)
        self.position_embeddings: PositionEmbeddings | None = kwargs.get("position_embeddings", next(pairs, None))
        self.position_ids: torch.Tensor | None = kwargs.get("position_ids")
        mask = kwargs.get("attention_mask")
        self.attention_mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None


class Attachment:
    """
    The hooks of one model, and what they know of it.

    Args:
        model (`PreTrainedModel`): any decoder.

    Attributes:
        projections (`dict[int, QueryProjection]`): how every layer makes its queries.
        listeners (`weakref.WeakSet`): caches that were made for the model and not detached.
        checked (`set[int]`): layers whose queries have been compared with the model's own.

    Raises:
        ValueError: if a layer's queries are made in a way that is not known.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        modules = find_attention_modules(model)
        self.projections = {index: QueryProjection(module, config) for index, module in modules.items()}
        self.layer_types: list[str] | None = getattr(config, "layer_types", None)
        self.listeners: weakref.WeakSet[AttentionListener] = weakref.WeakSet()
        self.checked: set[int] = set()
        # Whether residual streams are kept in any forward, not in decode steps only
        self.keeps_streams = False
        # By layer: the module that norms, and in a decode step the residual stream before it
        self._norms: dict[int, nn.Module] = {}
        self._streams: dict[int, torch.Tensor] = {}
        # What may have normed, until that is seen: by layer, module, input and output
        self._candidates: dict[int, list[tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {}
        # By layer type, in models whose types have embeddings of their own
        self._rotary: dict[str, PositionEmbeddings] = {}
        self._handles: list[RemovableHandle] = []
        self._detecting: dict[int, list[RemovableHandle]] = {}
        decoder = model.get_decoder()
        for index, module in modules.items():
            self._handles.append(
                module.register_forward_pre_hook(partial(self._before_attention, index), with_kwargs=True)
            )
            self._detect_norm(index, module, decoder)
        for child in decoder.children():
            if "RotaryEmbedding" in type(child).__name__ and self.layer_types is not None:
                self._handles.append(child.register_forward_hook(self._after_rotary, with_kwargs=True))

    def _detect_norm(self, index: int, attention: nn.Module, decoder: nn.Module) -> None:
        """Watches what stands beside an attention module until its norm is known."""
        siblings = next((list(m.children()) for m in decoder.modules() if attention in m.children()), [])
        self._detecting[index] = [
            sibling.register_forward_hook(partial(self._after_sibling, index))
            for sibling in siblings
            if sibling is not attention
        ]

    def _after_sibling(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self._candidates.setdefault(index, []).append((module, args[0], output))

    def _after_norm(self, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].shape[1] == 1 or self.keeps_streams:
            self._streams[index] = args[0]

    def _after_rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if len(names) == 1:
            self._rotary[names[0]] = output

    # Not for `torch.compile` to trace: which layer's tokens are fetched is the host's business
    @torch.compiler.disable
    def _before_attention(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._settle_norm(index, args[0] if args else kwargs.get("hidden_states"))
        caches = [kwargs.get(name) for name in _CACHE_NAMES] + list(args[1:])
        cache = next((value for value in caches if isinstance(value, AttentionListener)), None)
        if cache is not None:
            cache.on_attention_input(self, index, AttentionInputs(args, kwargs))
        self._streams.pop(index, None)

    def _settle_norm(self, index: int, hidden_states: Any) -> None:
        """Takes the sibling for the norm whose output attention gets."""
        if index not in self._detecting:
            return
        for module, _, output in self._candidates.pop(index, []):
            if output is hidden_states:
                self._norms[index] = module
                self._handles.append(module.register_forward_pre_hook(partial(self._after_norm, index)))
        for handle in self._detecting.pop(index):
            handle.remove()

    def expected_hidden_states(
        self, target: int, source: int, inputs: AttentionInputs, device: torch.device
    ) -> torch.Tensor:
        """
        What a layer's attention is expected to be given, told at the attention of an earlier one.

        Args:
            target (`int`): the layer that is asked about.
            source (`int`): the layer whose attention is about to run.
            inputs (`AttentionInputs`): what that is called with.
            device (`torch.device`): where the target's layer is.

        Returns:
            `torch.Tensor` of shape `[B, tokens, hidden size]`, on that device.
        """
        stream, norm = self._streams.get(source), self._norms.get(target)
        if stream is None or norm is None:
            return inputs.hidden_states.to(device)
        expected: torch.Tensor = norm(stream.to(device))
        # Norming it was seen by the hook of the target's norm
        self._streams.pop(target, None)
        return expected

    def embeddings_for(self, target: int, source: int, inputs: AttentionInputs) -> PositionEmbeddings | None:
        """
        Cosine and sine of a layer's queries, told at the attention of another one; `None` if it gets none.

        Raises:
            LookupError: if the layer gets embeddings of its own and they have not been seen.
        """
        if self.same_type(target, source) or inputs.position_embeddings is None:
            return inputs.position_embeddings
        assert self.layer_types is not None
        return self._rotary[self.layer_types[target]]

    def same_type(self, one: int, other: int) -> bool:
        """Whether two layers get the same mask and position embeddings."""
        return self.layer_types is None or self.layer_types[one] == self.layer_types[other]

    def check_once(self, index: int, inputs: AttentionInputs) -> Callable[[torch.Tensor], None] | None:
        """What compares a layer's queries `[B, num_heads, tokens, head_dim]` with its projection, the first time."""
        if index in self.checked:
            return None
        self.checked.add(index)
        embeddings = inputs.position_embeddings
        last = None if embeddings is None else (embeddings[0][:, -1:], embeddings[1][:, -1:])
        check = partial(self.projections[index].check, inputs.hidden_states[:, -1:].detach(), last)
        return lambda query: check(query[:, :, -1:])

    def detach(self, listener: AttentionListener) -> None:
        """Removes the hooks once no cache listens any more."""
        self.listeners.discard(listener)
        if self.listeners:
            return
        for handle in (*self._handles, *(handle for handles in self._detecting.values() for handle in handles)):
            handle.remove()
        for model, attachment in list(_ATTACHMENTS.items()):
            if attachment is self:
                del _ATTACHMENTS[model]


def attach(model: PreTrainedModel, listener: AttentionListener) -> Attachment:
    """Attaches a model once, whatever the number of its caches."""
    attachment = _ATTACHMENTS.get(model)
    if attachment is None:
        attachment = _ATTACHMENTS[model] = Attachment(model)
    attachment.listeners.add(listener)
    return attachment


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """The attachment of a model, if it has one."""
    return _ATTACHMENTS.get(model)
