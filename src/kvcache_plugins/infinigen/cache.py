"""`InfiniGenCache`: a list of InfiniGen layers, and Transformers' own layers where nothing is offloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvcache_plugins.layers.layer_factory import replace_full_attention
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.usage_checks import UsageChecksMixin
from kvcache_plugins.models.layer_config import decoder_config
from kvcache_plugins.option_checks import check_mask
from kvcache_plugins.registry import unwrap_model
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, add_stats
from kvcache_plugins.user_warnings import warn_user

from .calibration import Calibration, choose_full_layers, resolve_calibration
from .config import InfiniGenConfig
from .hooks import (
    AttentionInputs,
    AttentionObserver,
    ModelHooks,
    ModelReference,
    attach,
    hooks_of,
    unknown_queries_warning,
)
from .layer import InfiniGenLayer


_ANOTHER_MODEL = (
    "`model`: the cache was made for another model than the one that it is used with; make one with "
    "`InfiniGenCache(model)` for each model"
)


class InfiniGenCache(AttentionObserver, UsageChecksMixin, ReportingMixin, Cache):
    """
    A cache in host memory. Every decode step fetches only the tokens that matter.

    Implements [InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
    Management](https://www.usenix.org/conference/osdi24/presentation/lee). Keys and values of full-attention layers
    live in a pool in host memory (page-locked if the model is on a GPU). While a layer computes, the queries of the
    next layer are predicted from this layer's input, tokens are chosen by their scores against a small copy of the
    keys, and fetched. Attention, `sdpa` or `eager`, is over those and the newest tokens. Several new tokens at once,
    and latent attention, attend to everything: exact, and slower.

    The model is not patched: all caches of a model share forward hooks. `detach`, the end of a `with` block and
    dropping the cache remove them. Threads can share the model, each with a cache of its own.

    Args:
        model (`PreTrainedModel`):
            The model that the cache is for: any decoder, itself or in a wrapper such as a `PeftModel`. A layer whose
            queries cannot be predicted chooses tokens by its own query, as with `speculate=False`, and a warning says
            why.
        min_weight (`float`, *optional*, defaults to 0.5):
            Rule 1, the default: a token is fetched for a key/value head if its speculated attention weight, averaged
            over the query heads of the group, is at least this many times the weight it would have if all tokens
            weighed the same. Broad heads get more tokens than sharp ones.
        alpha (`float`, *optional*):
            Rule 2, the paper's: tokens whose score is at most `alpha` below the largest one of their head are counted,
            and every head fetches the average count. One rule can be given.
        max_fetch_ratio (`float`, *optional*, defaults to 0.2):
            The most that a head fetches, as a share of the tokens.
        scoring_nbits (`int`, *optional*, defaults to 4):
            Bits a number, 2, 4 or 8, of the copy of the keys that stays on the accelerator for scoring.
        partial_ratio (`float`, *optional*):
            The paper's copy instead: this share of the keys' columns, in full precision.
        skewing (`str`, *optional*, defaults to `"none"`):
            With `partial_ratio`: `"query-svd"` rotates keys and queries to the singular vectors of the prompt's
            queries before columns are chosen, after the rotary embedding. Attention itself is not changed.
        recent (`int`, *optional*, defaults to 32):
            Newest tokens that are always attended to. A few more wait beside them to move into the pool together.
        sink (`int`, *optional*, defaults to 4):
            First tokens that are always fetched and never evicted.
        pool_tokens (`int`, *optional*):
            Tokens that the pool holds at most, for every sequence and head. A new token then replaces a victim. The
            host records the use of tokens, so it has to wait for a GPU in every layer of every step.
        eviction (`str`, *optional*, defaults to `"counter"`):
            With `pool_tokens`, the policy that chooses the victim: `"counter"` (fetched least often), `"lru"` (least
            recently) or `"fifo"` (oldest).
        full_layers (`tuple[int, ...]`, *optional*):
            Layers that stay whole where they are computed. Defaults to those of the calibration, or the first two.
        speculate (`bool`, *optional*):
            True to choose and fetch a layer's tokens ahead, by predicted queries; False to choose by its own query.
            Defaults to True if tokens have to be transferred: to an accelerator.
        calibration (`Calibration`, `str` or `Path`, *optional*):
            Findings of `calibrate` about the model, or their file.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            Padding of the prompt, needed for batches of unequal length under an attention implementation that reads
            dense states, such as one of your own.

    Raises:
        ValueError: if an option is out of range, or the model has no layers that could be offloaded.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import InfiniGenCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> with InfiniGenCache(model) as cache:
    ...     outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.stats()["tokens_fetched"] / cache.stats()["tokens_fetchable"]
    ```
    """

    # Tokens are chosen in steps of one new token: an evaluation of this cache has to decode token by token
    is_exact_for_many = True
    # False after `detach`
    _is_attached = True
    # True if a warning has said so
    _has_warned = False
    # True from the hook of the first layer's attention up to that layer's update, then False: the hooks of the model
    # announce each forward. `None` until they have announced one, as a compiled model may not call them
    _is_announced: bool | None = None

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module,
        *,
        min_weight: float | None = None,
        alpha: float | None = None,
        max_fetch_ratio: float = 0.2,
        scoring_nbits: int | None = None,
        partial_ratio: float | None = None,
        skewing: str | None = None,
        recent: int = 32,
        sink: int = 4,
        pool_tokens: int | None = None,
        eviction: str | None = None,
        full_layers: tuple[int, ...] | None = None,
        speculate: bool | None = None,
        calibration: Calibration | str | Path | None = None,
        attention_mask: torch.Tensor | None = None,
    ):
        model = unwrap_model(model)
        self.infinigen_config = InfiniGenConfig(
            min_weight=min_weight,
            alpha=alpha,
            max_fetch_ratio=max_fetch_ratio,
            scoring_nbits=scoring_nbits,
            partial_ratio=partial_ratio,
            skewing=skewing,
            recent=recent,
            sink=sink,
            pool_tokens=pool_tokens,
            eviction=eviction,
            full_layers=full_layers,
            speculate=speculate,
        )
        check_mask("attention_mask", attention_mask)
        self.calibration = resolve_calibration(calibration, model)
        self._given_mask = attention_mask
        config = decoder_config(model.config)
        self._decoder_config = config
        self._full_layers = choose_full_layers(full_layers, self.calibration, config.num_hidden_layers)
        layers = self._layers_for(config)
        # A layer's attention input comes from the layer before it
        self._targets = {index - 1: index for index, layer in enumerate(layers) if isinstance(layer, InfiniGenLayer)}
        self._model = ModelReference(model)
        self._wants_speculation = self.infinigen_config.speculates_on(model.device)
        super().__init__(layers, config=config)
        if self._wants_speculation:
            reason = attach(model, self).why_unknown()
            if reason is not None:
                warn_user(unknown_queries_warning(reason))

    def __setstate__(self, state: dict[str, object]) -> None:
        # A copy needs hooks of its own
        self.__dict__.update(state)
        model = self._model()
        if self._speculates and model is not None:
            attach(model, self)

    def _layers_for(self, config: PreTrainedConfig) -> list[CacheLayerMixin]:
        """Make all layers; a `ValueError` if nothing is left to offload."""
        layers = replace_full_attention(config, self._layer)
        if not any(type(layer) is DynamicLayer or isinstance(layer, InfiniGenLayer) for layer in layers):
            raise ValueError(
                "`model`: all of its layers attend to a window, which is small already: nothing is left to offload"
            )
        if not any(isinstance(layer, InfiniGenLayer) for layer in layers):
            kept = sorted(self._full_layers)
            raise ValueError(f"`full_layers`, or the calibration, keeps {kept} whole: nothing is left to offload")
        return layers

    def _layer(self, index: int) -> CacheLayerMixin:
        if index in self._full_layers:
            return DynamicLayer()
        policy = self._policy(self._decoder_config, index)
        return InfiniGenLayer(self.infinigen_config, index, self._given_mask, policy)

    def _policy(self, config: PreTrainedConfig, index: int) -> RowPolicy | None:
        """Return how a layer's tokens are coded, given the model's config; `None` if they stay exact."""
        return None

    @property
    def _hooks(self) -> ModelHooks | None:
        model = self._model()
        return None if model is None else hooks_of(model)

    @property
    def _speculates(self) -> bool:
        # A detached cache does not, even if the hooks of other caches are left
        return self._is_attached and self._wants_speculation

    @torch.no_grad()
    def on_attention_input(self, hooks: ModelHooks, layer_idx: int, inputs: AttentionInputs) -> None:
        if hooks.model() is not self._model():
            raise ValueError(_ANOTHER_MODEL)
        if not self._speculates:
            return
        if layer_idx == self._first_layer:
            self._is_announced = True
        # In Transformers 5.20 layers that share the states of other layers are not in the list
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, InfiniGenLayer) and inputs.hidden_states.shape[1] > 1:
            layer.check_queries(hooks.check_once(layer_idx, inputs))
        target = self._targets.get(layer_idx, -1)
        projection = hooks.projections.get(target)
        following = self.layers[target]
        if projection is None or not isinstance(following, InfiniGenLayer) or not following.wants_speculation:
            return
        # Another number of sequences is another prompt, which `update` refuses
        if inputs.hidden_states.shape[:2] != (following.batch_size, 1):
            return
        device = following.device
        try:
            embeddings = hooks.embeddings_for(target, layer_idx, inputs)
        except LookupError:
            return
        if embeddings is not None:
            embeddings = embeddings[0].to(device), embeddings[1].to(device)
        hidden_states = hooks.expected_hidden_states(target, layer_idx, inputs, device)
        if self.calibration is not None:
            hidden_states = self.calibration.corrected(target, hidden_states)
        mask = inputs.attention_mask if hooks.same_type(target, layer_idx) else None
        mask = None if mask is None else mask.to(device)
        following.speculate(projection(hidden_states, embeddings), mask, projection.scaling)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See `Cache.get_mask_sizes`; a `ValueError` if a forward has no new tokens behind those that are held."""
        layer = self.layers[next(iter(self._targets.values()))]
        if query_length == 0 and isinstance(layer, InfiniGenLayer):
            # A layer that is kept whole is Transformers' own, and refuses nothing
            layer.get_mask_sizes(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def _begin_forward(self, layer_idx: int) -> None:
        """See `UsageChecksMixin`; a `ValueError` too if the forward is not one of the cache's model."""
        super()._begin_forward(layer_idx)
        if self._model() is None or (self._is_announced is False and self._speculates):
            raise ValueError(_ANOTHER_MODEL)
        if self._is_announced:
            self._is_announced = False
        self._warn_if_detached()

    def _warn_if_detached(self) -> None:
        if self._is_attached or self._has_warned or not self._wants_speculation:
            return
        self._has_warned = True
        warn_user(
            f"this `{type(self).__name__}` is used after `detach()`, or after the end of its `with` block: results "
            "stay right, but nothing is fetched ahead, as each layer waits for its own query to choose tokens by. "
            "Generate inside of the block, or make the cache with `speculate=False`"
        )

    def detach(self) -> None:
        """
        Remove the hooks from the model, unless another cache needs them. The cache stays usable: a layer then chooses
        tokens by its own query, right before attention needs them, and a warning says so once.
        """
        self._is_attached = False
        hooks = self._hooks
        if hooks is not None:
            hooks.detach(self)

    def __enter__(self) -> InfiniGenCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def memory(self) -> MemoryReport:
        """
        Report the memory that the cache holds. `correction` counts the calibration's corrections; `staging` is the
        most that a next step fetches to a GPU at a time: for one layer, or for two if one fetches while the other
        attends.
        """
        report = super().memory()
        parts = Counter(report.parts)
        devices = Counter(report.devices)
        for tensor in chain.from_iterable(() if self.calibration is None else self.calibration.corrections.values()):
            parts["correction"] += tensor.nbytes
            devices[str(tensor.device)] += tensor.nbytes
        offloaded = self._offloaded
        num_at_once = min(len(offloaded), 2) if self._wants_speculation else 1
        for device in {layer.device for layer in offloaded if layer.most_fetched_bytes()}:
            size = num_at_once * max(each.most_fetched_bytes() for each in offloaded if each.device == device)
            parts["staging"] += size
            devices[str(device)] += size
        return replace(report, parts=dict(parts), devices=dict(devices))

    @property
    def _offloaded(self) -> list[InfiniGenLayer]:
        return [layer for layer in self.layers if isinstance(layer, InfiniGenLayer)]

    def stats(self) -> Mapping[str, float]:
        """
        Sum counters over all offloaded layers. A GPU is waited for.

        Returns:
            `dict[str, int | float]`: `num_layers` and, among them, `layers_offloaded`, which are `layers_speculating`
            (tokens are chosen ahead) and `layers_by_own_query`; `tokens_cached` (tokens of the sequence); and, summed
            over layers, `tokens_pooled` (slots of the pool in use), `attend_calls` and, among them, `selected_calls`
            (one new token, over chosen tokens) and `exact_calls` (over everything); on a CPU, among the selected
            calls, `fused_calls` (by a fused kernel) and `kernel_fallbacks` (the wanted kernel was missing);
            `speculated_calls` (choices made ahead), `tokens_fetched` out of `tokens_fetchable` (over sequences and
            key/value heads), `bytes_fetched`, `tokens_evicted`, `dense_reads` (times a side of a layer was made dense
            for something other than `sdpa`) and `prompts_without_mask` (prompts that were stored before a mask was
            seen).
        """
        layers = self._offloaded
        hooks = self._hooks
        speculating = 0
        if hooks is not None and self._speculates:
            observed = hooks.observed_layers
            known = hooks.projections.keys()
            speculating = sum(source in observed and target in known for source, target in self._targets.items())
        total: dict[str, float] = {**add_stats(self.layers, lambda index: layers[index])}
        return {
            "num_layers": len(self.layers),
            "layers_offloaded": len(layers),
            "layers_speculating": speculating,
            "layers_by_own_query": len(layers) - speculating,
            **total,
        }
