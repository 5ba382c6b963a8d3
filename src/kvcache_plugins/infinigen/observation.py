"""Observation of a forward pass: the inputs of attention, beside those expected at the layer before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.models.cache_argument import as_argument

from .hooks import Attachment, AttentionInputs, AttentionListener, attach
from .queries import PositionEmbeddings


# The newest queries of a window that are measured with
NUM_QUERIES = 64


class Recorder(AttentionListener, DynamicCache):
    """A dense cache that hands on, for every layer, what was expected of its attention input and what it is."""

    def __init__(self, model: PreTrainedModel, on_layer: Callable[[Observation], None]):
        super().__init__(config=model.config)
        self._on_layer = on_layer
        self._expected: torch.Tensor | None = None
        self._input: torch.Tensor | None = None

    def on_attention_input(self, attachment: Attachment, layer_idx: int, inputs: AttentionInputs) -> None:
        if self._expected is not None and self._input is not None and type(self.layers[layer_idx]) is DynamicLayer:
            embeddings = inputs.position_embeddings
            self._on_layer(Observation(layer_idx, self._expected, self._input, inputs.hidden_states, embeddings))
        self._expected = self._input = None
        if layer_idx + 1 < len(self.layers):
            self._expected = attachment.expected_hidden_states(
                layer_idx + 1, layer_idx, inputs, inputs.hidden_states.device
            )
            self._input = inputs.hidden_states


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """Attention inputs `[1, tokens, hidden size]` of a layer: expected, of the layer before, and true."""

    layer_idx: int
    expected: torch.Tensor
    before: torch.Tensor
    true: torch.Tensor
    embeddings: PositionEmbeddings | None

    def newest(self) -> Observation:
        """Returns the observation of the newest tokens alone, which is little to keep."""
        last = slice(-NUM_QUERIES, None)
        embeddings = self.embeddings
        if embeddings is not None:
            embeddings = embeddings[0][:, last].clone(), embeddings[1][:, last].clone()
        expected, before, true = (each[:, last].clone() for each in (self.expected, self.before, self.true))
        return Observation(self.layer_idx, expected, before, true, embeddings)


def observe(
    model: PreTrainedModel, window: torch.Tensor, on_layer: Callable[[Observation], None]
) -> tuple[Recorder, Attachment]:
    """Sends a window through the model, and its first tokens before: which modules norm is seen then."""
    learner, recorder = Recorder(model, lambda observation: None), Recorder(model, on_layer)
    attachment = attach(model, recorder)
    reason = attachment.why_unknown()
    if reason is not None:
        attachment.detach(recorder)
        raise ValueError(reason)
    attachment.notes.keeps_streams = True
    try:
        for cache, count in ((learner, 2), (recorder, window.numel())):
            model.get_decoder()(window[None, :count].to(model.device), **as_argument(cache), use_cache=True)
    finally:
        attachment.notes.keeps_streams = False
    return recorder, attachment


def observe_newest(model: PreTrainedModel, window: torch.Tensor) -> tuple[Recorder, Attachment, list[Observation]]:
    """As `observe`, with every layer's inputs of the newest tokens."""
    observations: list[Observation] = []
    cache, attachment = observe(model, window, lambda observation: observations.append(observation.newest()))
    return cache, attachment, observations
