"""`PackedCache`: the base of `GEARCache` and `TransformCodingCache`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.files.atomic import refusals
from kvcache_plugins.files.records import Format, read_record, write_record
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.policies import GroupPolicy, RowPolicy
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.layers.usage_checks import UsageChecksMixin
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint
from kvcache_plugins.option_checks import check_integer, check_mask
from kvcache_plugins.registry import check_cache, get_config, parse_cache_spec, unwrap_model
from kvcache_plugins.reports.memory import ReportingMixin, StatValue, add_stats

from .snapshot import PresetChoice, Snapshot, check_snapshot, restore_layers, state_of
from .warm_up import sizes_of, warm_up


CacheT = TypeVar("CacheT", bound="PackedCache")
ADVICE = "load it with the class that saved it, or prefill and `save` anew"


class CacheConfig(Protocol):
    """
    Options of a packed cache, validated and immutable.

    Attributes:
        residual_length (`int`): decoded tokens that stay exact until they are packed.
        shortest_prompt (`int`): tokens of the shortest prompt of which anything is packed.
        token_group (`int`): tokens that are packed together.
    """

    @property
    def residual_length(self) -> int: ...

    @property
    def shortest_prompt(self) -> int: ...

    @property
    def token_group(self) -> int: ...

    def policy(self) -> RowPolicy | GroupPolicy:
        """Make the policy of a layer."""

    def to_options(self) -> dict[str, Any]:
        """Return the arguments of the cache's class that make the same cache."""


class PackedCache(UsageChecksMixin, ReportingMixin, Cache):
    """
    A list of layers that pack tokens, beside Transformers' own layers for what is not full attention.

    Subclasses set `cache_config`, call `_init_layers`, and implement `_layer`, `_make_empty_layer` and
    `_read_options`.

    Attributes:
        cache_config (`CacheConfig`): the options.
        choice (`PresetChoice`, *optional*): why `choose_cache` chose this cache.
    """

    # Of a file of this class: format, and its record
    _format: ClassVar[Format]
    _snapshot_class: ClassVar[type[Snapshot]]

    # Whether the codec is fitted to queries, which attention then has to show
    uses_query_statistics = False
    cache_config: CacheConfig

    def __init__(self, config: PreTrainedConfig | None, attention_mask: torch.Tensor | None) -> None:
        check_mask("attention_mask", attention_mask)
        self.choice: PresetChoice | None = None
        self._given_mask = attention_mask
        self._init_layers(config)

    def stats(self) -> dict[str, StatValue]:
        """
        Counters over all packed layers, 0 if there are none, and for a cache of `choose_cache` its measurements.

        Returns:
            `dict`: `num_layers` and, of those, `layers_compressing` with at least one compressed chunk,
            `layers_windowed` that are compressed and attend to a window, and `layers_left` as Transformers' own;
            `tokens_cached` (tokens of the sequence); and, summed over layers, `tokens_exact`, `tokens_compressed`
            (each token once, however many sequences the batch has), `chunks_compressed`, `attend_calls`
            (attentions over compressed states), `fused_calls` (those of them by a fused kernel), `kernel_fallbacks`
            (those for which the kernel that was wanted could not be had), `dense_reads` (sides made dense for
            something other than attention) and `prompts_without_mask` (prompts compressed without having seen a mask).
            Only of a chosen cache `chosen_preset` (a `str`), its `chosen_kl`, the bound `max_kl`, and `kl_by_preset`
            of all that were tried.
        """
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        choice: dict[str, StatValue] = {} if self.choice is None else self.choice.stats()
        kinds = {
            "layers_compressing": sum(1 for layer in layers if layer.storage.segments),
            "layers_windowed": sum(layer.is_sliding for layer in layers),
            "layers_left": len(self.layers) - len(layers),
        }
        # A new layer, where there is none yet, lends the names of counters
        return {**kinds, **add_stats(self.layers, self._make_empty_layer), **choice}

    def _make_empty_layer(self, layer_idx: int) -> RowLayer | GroupLayer:
        """Make a layer that holds nothing and knows no model, whose counters are those of all layers."""
        raise NotImplementedError

    def warm_up(self, model: PreTrainedModel, *, padded: bool = False) -> None:
        """
        Compile all kernels that a sequence of this cache will run on a GPU, before its first token. The first prompt
        does it otherwise. Serves all caches of the model with the same options, with `padded` for padded batches. On
        a CPU there is nothing to compile.
        """
        config = unwrap_model(model).config
        for sizes in sizes_of(config, model.dtype, model.device, is_padded=padded):
            warm_up(self.layers or [self._layer(0, config)], sizes)  # type: ignore[call-arg]

    def fork(self: CacheT, count: int) -> list[CacheT]:
        """
        Return `count` caches that continue from here independently; this one can continue too. Packed tokens are in
        memory once for all of them: one long prefix, many continuations. `measure_memory` of all of them counts
        shared bytes once. Raises a `ValueError` if `count` is no positive integer.

        Example:

        ```python
        >>> with torch.no_grad():
        ...     model(prefix_ids, past_key_values=cache)
        >>> for question, fork in zip(questions, cache.fork(len(questions))):
        ...     model.generate(torch.cat([prefix_ids, question], dim=1), past_key_values=fork)
        ```
        """
        check_integer("count", count, 1)
        shared = [tensor for layer in self.layers if isinstance(layer, CompressedLayer) for tensor in layer.share()]
        # `deepcopy` takes objects listed in its memo as copied
        return [copy.deepcopy(self, {id(tensor): tensor for tensor in shared}) for _ in range(count)]

    def save(self, path: str | Path, model: PreTrainedModel) -> None:
        """
        Write the cache, packed as it is, to a safetensors file with fingerprints of its model and a checksum. The
        file replaces an older one when it is complete. Raises an `OSError` naming `path` if it cannot be written.
        """
        model = unwrap_model(model)
        snapshot = self._snapshot_class(
            model=fingerprint(model),
            model_config=config_fingerprint(model.config),
            model_name=str(model.config.name_or_path),
            has_config=self.layer_class_to_replicate is None,
            choice=self.choice,
            layers=[state_of(layer, index) for index, layer in enumerate(self.layers)],
            **self._options_to_save(),
        )
        write_record(path, self._format, snapshot)

    def _options_to_save(self) -> dict[str, Any]:
        """Return the fields of the file's record that only this class has."""
        return {"config": self.cache_config}

    @classmethod
    def load(cls: type[CacheT], path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> CacheT:
        """
        Read a cache that `save` wrote, check all of it, and copy it into memory: later changes of the file do not
        matter.

        Args:
            model (`PreTrainedModel` or `PreTrainedConfig`): the model that continues from the cache, or its config,
                which cannot tell whether the weights are the same.

        Raises:
            ValueError: naming `path`, if the file is damaged, of another version, or of another model or class.
        """
        return cls._load(path, model)

    @classmethod
    def _load(
        cls: type[CacheT], path: str | Path, model: PreTrainedModel | PreTrainedConfig, given: object = None
    ) -> CacheT:
        """Load a file; `given` is passed on to `_read_options`."""
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model)
        with refusals("path", path):
            snapshot = read_record(path, cls._format, cls._snapshot_class)
            check_snapshot(snapshot, model)
            config = get_config(model) if snapshot.has_config else None
            cache = cls(config, **cls._read_options(snapshot, model, given))
            cache.choice = snapshot.choice
            if not snapshot.has_config:
                for _ in snapshot.layers:
                    cache.layers.append(cache._next_layer())
            device = torch.device("cpu") if isinstance(model, PreTrainedConfig) else model.device
            restore_layers(cache.layers, snapshot.layers, device)
        return cache

    @classmethod
    def _read_options(
        cls, snapshot: Any, model: PreTrainedModel | PreTrainedConfig, given: Any = None
    ) -> dict[str, Any]:
        """Return the options of the cache that a file holds."""
        options: dict[str, Any] = snapshot.config.to_options()
        return options


def makes_packed_cache(spec: str) -> bool:
    """Return whether `name` or `name:key=value,...` makes a `PackedCache`, which leaves the model as it is."""
    factory = check_cache(parse_cache_spec(spec)[0]).load_factory()
    return isinstance(factory, type) and issubclass(factory, PackedCache)
