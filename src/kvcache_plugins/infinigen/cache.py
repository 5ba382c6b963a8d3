"""`InfiniGenCache`: a list of InfiniGen layers, beside Transformers' own for what is not offloaded."""

from __future__ import annotations

import weakref
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvcache_plugins.layer_types import replace_full_attention
from kvcache_plugins.memory import ReportingMixin

from .config import NUM_FIRST_LAYERS, InfiniGenConfig
from .hooks import Attachment, AttentionInputs, AttentionListener, attach, attachment_of
from .layer import InfiniGenLayer


class InfiniGenCache(ReportingMixin, AttentionListener, Cache):
    """DOC"""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        min_weight: float | None = None,
        alpha: float | None = None,
        share: float | None = None,
        mass: float | None = None,
        max_fetch_ratio: float = 0.2,
        scoring_nbits: int | None = None,
        partial_ratio: float | None = None,
        skewing: str | None = None,
        recent: int = 32,
        sink: int = 4,
        pool_tokens: int | None = None,
        eviction: str = "counter",
        full_layers: tuple[int, ...] | None = None,
        speculate: bool = True,
        track_hits: bool = False,
        attention_mask: torch.Tensor | None = None,
    ):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"`model` has to be a `PreTrainedModel`, whose layers tell what will be attended to, but got "
                f"{type(model)}"
            )
        self.infinigen_config = InfiniGenConfig(
            min_weight=min_weight,
            alpha=alpha,
            share=share,
            mass=mass,
            max_fetch_ratio=max_fetch_ratio,
            scoring_nbits=scoring_nbits,
            partial_ratio=partial_ratio,
            skewing=skewing,
            recent=recent,
            sink=sink,
            pool_tokens=pool_tokens,
            eviction=eviction,
            full_layers=None if full_layers is None else tuple(full_layers),
            speculate=speculate,
            track_hits=track_hits,
        )
        self._given_mask = attention_mask
        layers = replace_full_attention(model.config.get_text_config(decoder=True), self._layer)
        self._check_full_layers(len(layers))
        # A layer's attention input comes from the layer before it
        self._targets = {index - 1: index for index, layer in enumerate(layers) if isinstance(layer, InfiniGenLayer)}
        self._model = weakref.ref(model)
        self._announced: int | None = None
        super().__init__(layers=layers)
        attach(model, self)

    def _layer(self, index: int) -> CacheLayerMixin:
        full = self.infinigen_config.full_layers
        if index in (range(NUM_FIRST_LAYERS) if full is None else full):
            return DynamicLayer()
        return InfiniGenLayer(self.infinigen_config, index, self._given_mask)

    def _check_full_layers(self, num_layers: int) -> None:
        full = self.infinigen_config.full_layers or ()
        wrong = [index for index in full if not isinstance(index, int) or not 0 <= index < num_layers]
        if wrong:
            raise ValueError(f"`full_layers` has to hold indices of the model's {num_layers} layers but got {wrong}")

    @property
    def _attachment(self) -> Attachment | None:
        model = self._model()
        return None if model is None else attachment_of(model)

    def on_attention_input(self, attachment: Attachment, layer_idx: int, inputs: AttentionInputs) -> None:
        self._announced = layer_idx
        layer = self.layers[layer_idx]
        if isinstance(layer, InfiniGenLayer) and inputs.hidden_states.shape[1] > 1:
            layer.check_queries = attachment.check_once(layer_idx, inputs)
        target = self._targets.get(layer_idx)
        if target is None or not self.infinigen_config.speculate or inputs.hidden_states.shape[1] != 1:
            return
        following: InfiniGenLayer = self.layers[target]  # type: ignore[assignment]
        if not following.wants_speculation:
            return
        query = attachment.expected_queries(target, layer_idx, inputs)
        if query is None:
            return
        mask = inputs.attention_mask if attachment.same_type(target, layer_idx) else None
        following.speculate(query.to(following.device), mask, attachment.projections[target].scaling)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; raises a `ValueError` if the states come from another model than the cache was made for."""
        announced, self._announced = self._announced, None
        if announced != layer_idx and (self._model() is None or self._attachment is not None):
            raise ValueError(
                "`model`: the cache was made for another model than the one that it is used with; make one with "
                "`InfiniGenCache(model)` for each model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def detach(self) -> None:
        """
        Takes the hooks off the model, unless another cache still listens. What is cached stays usable: tokens are then
        chosen by a layer's own query, when attention is about to need them.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.detach(self)

    def __enter__(self) -> InfiniGenCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def stats(self) -> dict[str, int]:
        layers = [layer for layer in self.layers if isinstance(layer, InfiniGenLayer)]
        total: Counter[str] = Counter()
        for layer in layers:
            total.update(layer.stats())
        total["tokens_cached"] = max((layer.get_seq_length() for layer in layers), default=0)
        return {"num_layers": len(self.layers), "layers_offloaded": len(layers), **total}
