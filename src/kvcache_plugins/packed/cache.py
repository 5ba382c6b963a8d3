"""`PackedCache`: the base of `GEARCache` and `TransformCodingCache`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.files.atomic import refusals
from kvcache_plugins.files.records import Format, read_record, write_record
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.recurrent_state import recurrent_states
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
        shortest_prompt (`int`): tokens of the shortest prompt that is packed, in part at least.
        token_group (`int`): tokens that are packed together.
    """

    @property
    def residual_length(self) -> int: ...

    @property
    def shortest_prompt(self) -> int: ...

    @property
    def token_group(self) -> int: ...

    def to_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the cache's class that make the same cache."""


class PackedCache(UsageChecksMixin, ReportingMixin, Cache):
    """
    Cache of layers that pack tokens, beside Transformers' own layers for bounded attention and recurrence.

    Subclasses set `cache_config`, call `__init__`, and implement `_layer`, `_make_empty_layer` and `_read_options`.

    Attributes:
        cache_config (`CacheConfig`): the options.
        choice (`PresetChoice`, *optional*): the measurements of `choose_cache`, if it chose this cache.
        uses_query_statistics (`bool`): True if codecs are fitted to queries too, which attention has to show.
    """

    # Format and record of this class's files
    _format: ClassVar[Format]
    _snapshot_class: ClassVar[type[Snapshot]]

    uses_query_statistics = False
    cache_config: CacheConfig

    def __init__(
        self, config: PreTrainedConfig | None, attention_mask: torch.Tensor | None, max_cache_len: int | None = None
    ) -> None:
        check_mask("attention_mask", attention_mask)
        self.choice: PresetChoice | None = None
        self._given_mask = attention_mask
        self._max_cache_len = max_cache_len
        if max_cache_len is not None:
            check_integer("max_cache_len", max_cache_len, 1)
            if config is None:
                raise ValueError("`max_cache_len` needs the model or its config, which the cache is made with")
        self._init_layers(config)
        if max_cache_len is not None and not self.is_compileable:
            raise ValueError("`max_cache_len` is for models whose layers all are of full attention")

    def stats(self) -> dict[str, StatValue]:
        """
        Return counters over all packed layers, 0 if there are none, and the measurements of `choose_cache`, if any.

        Returns:
            `dict`: `num_layers`, and among them `layers_compressing` with compressed tokens, `layers_windowed` that
            are compressed and attend to a window, and `layers_left` to Transformers; `tokens_cached` (length of the
            sequence); and, summed over layers, `tokens_exact`, `tokens_compressed` (each token once, whatever the
            batch size), `chunks_compressed`, `attend_calls` (attentions over compressed tokens), `fused_calls` (those
            by a fused kernel), `kernel_fallbacks` (those without the kernel that was asked for), `dense_reads` (sides
            that were made dense for something other than attention) and `prompts_without_mask` (prompts that were
            compressed before a mask was seen). A chosen cache also has `chosen_preset` (a `str`), its `chosen_kl`, the
            bound `max_kl`, and `kl_by_preset` of all presets that were tried.
        """
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        choice: dict[str, StatValue] = {} if self.choice is None else self.choice.stats()
        kinds = {
            "layers_compressing": sum(1 for layer in layers if layer.storage.segments),
            "layers_windowed": sum(layer.is_sliding for layer in layers),
            "layers_left": len(self.layers) - len(layers),
        }
        # Without layers, a new one has the names of the counters
        return {**kinds, **add_stats(self.layers, self._make_empty_layer), **choice}

    def _make_empty_layer(self, layer_idx: int) -> RowLayer | GroupLayer:
        """Make a layer without a model or a calibration."""
        raise NotImplementedError

    def warm_up(self, model: PreTrainedModel, *, padded: bool = False) -> None:
        """
        Compile all kernels that a sequence of this cache will run on a GPU, before its first token; otherwise they are
        compiled during the first prompt and the first decode steps. One call serves all caches of the model with the
        same options; `padded` is for padded batches. On a CPU nothing is compiled.
        """
        config = unwrap_model(model).config
        for sizes in sizes_of(config, model.dtype, model.device, is_padded=padded):
            warm_up(self.layers or [self._layer(0, config)], sizes)  # type: ignore[call-arg]

    def fork(self: CacheT, count: int) -> list[CacheT]:
        """
        Return `count` caches that continue from here independently; this one can continue too. All of them share the
        packed tokens in memory, for many continuations of one long prefix. `measure_memory` of several caches counts
        shared bytes once. Raise a `ValueError` if `count` is no positive integer.

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
        # `deepcopy` does not copy an object that its memo has
        return [copy.deepcopy(self, {id(tensor): tensor for tensor in shared}) for _ in range(count)]

    def save(self, path: str | Path, model: PreTrainedModel) -> None:
        """
        Write the packed cache to a safetensors file with fingerprints of its model and a checksum. The file replaces
        an older one when it is complete. It has no `max_cache_len`: a loaded cache grows. Raise an `OSError` that
        names `path` if it cannot be written.
        """
        model = unwrap_model(model)
        self._check_one_batch()
        self._commit_prompts()
        make_snapshot: Callable[..., Snapshot] = self._snapshot_class
        snapshot = make_snapshot(
            model=fingerprint(model),
            model_config=config_fingerprint(model.config),
            model_name=str(model.config.name_or_path),
            has_config=self.layer_class_to_replicate is None,
            choice=self.choice,
            layers=[state_of(layer, index) for index, layer in enumerate(self.layers)],
            recurrent=recurrent_states(self.layers, self.get_seq_length()),
            **self._options_to_save(),
        )
        write_record(path, self._format, snapshot)

    def _commit_prompts(self) -> None:
        """Commit prompts whose attention the cache has not seen, as files and stores hold packed tokens."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.commit_prompt()

    def _options_to_save(self) -> dict[str, object]:
        """Return the fields that this class adds to the file's record."""
        return {"config": self.cache_config}

    @classmethod
    def load(cls: type[CacheT], path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> CacheT:
        """
        Read a file of `save`, check it, and copy it into memory, so that later changes of the file have no effect.

        Args:
            model (`PreTrainedModel` or `PreTrainedConfig`): the model that continues from the cache. A config is
                enough, but then the weights are not compared.

        Raises:
            ValueError: if the file `path` is damaged, of another version, or of another model or class.
        """
        return cls._load(path, model)

    @classmethod
    def _load(
        cls: type[CacheT], path: str | Path, model: PreTrainedModel | PreTrainedConfig, given: object = None
    ) -> CacheT:
        """Load a file, and pass `given` to `_read_options`."""
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
            restore_layers(cache.layers, snapshot.layers, snapshot.recurrent, device)
        return cache

    @classmethod
    def _read_options(
        cls, snapshot: Snapshot, model: PreTrainedModel | PreTrainedConfig, given: object
    ) -> dict[str, Any]:
        """Return the keyword arguments of this class that make the cache of a file."""
        raise NotImplementedError


def makes_packed_cache(spec: str) -> bool:
    """Return true if `name` or `name:key=value,...` makes a `PackedCache`. Such a cache puts no hooks on a model."""
    factory = check_cache(parse_cache_spec(spec)[0]).load_factory()
    return isinstance(factory, type) and issubclass(factory, PackedCache)
