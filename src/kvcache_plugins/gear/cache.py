"""`GEARCache`: a list of GEAR layers, beside Transformers' own layers for what is not full attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.files.atomic import refusals
from kvcache_plugins.files.records import write_record
from kvcache_plugins.kernels.engine import has_gpu_kernels
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.layer_state import compact_states
from kvcache_plugins.layers.model_match import ModelMatchMixin, replace_full_attention
from kvcache_plugins.layers.static_layer import StaticLayer
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint
from kvcache_plugins.models.layer_config import head_dims
from kvcache_plugins.models.rotary_frequencies import rotary_frequencies
from kvcache_plugins.option_checks import check_integer, check_mask
from kvcache_plugins.registry import get_config, unwrap_model
from kvcache_plugins.reports.memory import ReportingMixin, StatValue, add_stats

from .config import BACKBONE, OWN_OPTIONS, GEARConfig, PresetChoice, TransformConfig, transform_config
from .snapshot import FORMAT, Snapshot, read_snapshot, restore_layers, state_of
from .transform.calibration import (
    AUTO,
    TransformCalibration,
    calibration_of_file,
    check_calibrated,
    resolve_calibration,
)
from .warm_up import sizes_of, warm_up, warm_up_for_prompt


class GEARCache(ModelMatchMixin, ReportingMixin, Cache):
    """
    A cache that stores keys and values in a few bits, really packed: transform-coded, or as a quantized backbone
    with a low-rank correction and sparse outliers.

    Implements [GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of
    LLM](https://huggingface.co/papers/2403.05527), and transform coding, which keeps more for the same bytes and is
    what a cache without options does, the same as `create_cache("gear")`. GEAR's form is taken when one of its options
    is given: `nbits`, `rank`, `sparsity`, ... The prompt is compressed right after its attention, decoded tokens
    in chunks; nothing is compressed twice. Under `sdpa`, `eager`, `flex_attention` and
    flash attention the cache is read tile by tile and never made dense; under any other implementation it is made
    dense a layer at a time. Codes stand in `uint8`; scales, zeros, factors and outliers in float16.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*):
            The model, or its config. With it, layers whose attention has a window keep no more than the window (see
            `sliding`), and bounded layers of other kinds stay Transformers' own; without it, every layer is compressed
            as one of full attention.
        nbits (`float`, *optional*):
            Bits a code: 2, 3, 4 or 8, and 4 by default; with `backbone="transform"` bits a channel on average, any
            number up to 8, by default 4 for keys and 3.25 for values (with a calibration 3.625, shared among all).
        backbone (`str`, *optional*):
            `"transform"` codes every token by itself, keys before the rotary embedding and bits where channels have
            energy: its other options are `nbits`, `key_nbits`, `value_nbits`, `residual_length` (5 by default),
            `num_sink_tokens` (4), `quantizer`, `sliding`, `recent_length`, `recent_nbits` and `calibration`. The
            others say how values are grouped for quantization: `"kcvt"` (keys per channel, values per token), `"kivi"`
            (the same in groups of `q_group_size`), `"per-token"` (both per token, in groups) or `"kvarn"`
            ([KVarN](https://huggingface.co/papers/2606.03458): both rotated, and variances of tokens and channels
            normalized in tiles of `q_group_size` tokens, without `rank` and `sparsity`). Defaults to
            `"transform"` if no option is given but those of both, which are `residual_length`, `num_sink_tokens` and
            `sliding`; else to `"kcvt"` at 4 bits and more and to `"kivi"` below.
        q_group_size (`int`, *optional*):
            Group of the `kivi` and `per-token` backbones, and the shortest prompt that is compressed. Defaults to 64,
            or where that does not divide the head dimension (values) or `residual_length` (keys), to the largest
            divisor below it.
        residual_length (`int`, *optional*, defaults to 64):
            Decoded tokens that wait in exact form until they are compressed as one chunk; with the `transform`
            backbone the older three quarters of them, or with `recent_length=0` two fifths.
        sparsity (`float`, *optional*, defaults to 0.02):
            Share of the values kept as outliers, half of it the largest and half the smallest, per channel of keys and
            per token of values. 0 is GEAR-L.
        rank (`int`, *optional*, defaults to 4):
            Rank of the prompt's low-rank correction, per head. 0 is the quantized backbone with outliers only.
        decode_rank (`int`, *optional*):
            The same for chunks of decoded tokens. Defaults to 2, or `rank` where that is smaller.
        num_iterations (`int`, *optional*, defaults to 3):
            Power iterations that find the low-rank correction, at most 1000.
        low_rank_recent_ratio (`float`, *optional*, defaults to 1.0):
            Share of the prompt, its most recent tokens, that has a low-rank correction.
        num_sink_tokens (`int`, *optional*, defaults to 0):
            First tokens of a sequence that stay exact, as most heads attend to them and their keys and values are
            unlike all others ([StreamingLLM](https://huggingface.co/papers/2309.17453)).
        rotate_values (`bool`, *optional*, defaults to `False`):
            Whether values are compressed as rotated by a Hadamard matrix, so that no channel stands out of its group.
        quantizer (`str`, *optional*, defaults to `"lloyd-max"`):
            With the `transform` backbone, how numbers become codes: `"lloyd-max"` one by one, or `"trellis"` (up to 6
            bits), each with those before it, which makes errors a third smaller and coding slower.
        sliding (`str`, *optional*, defaults to `"auto"`):
            What is done with layers whose attention has a window or goes by chunks: `"compressed"`, with the
            `transform` backbone alone, where tokens that no later query sees are dropped, some at a time;
            `"dense"`, which leaves them Transformers' own; or `"auto"`, which compresses windows of at least 2048
            tokens with the `transform` backbone, which is worth little in shorter ones.
        recent_length (`int`, *optional*, defaults to 128):
            With the `transform` backbone, newest of the coded tokens that were decoded, at most, whose rows have more
            bits, as they are read most; when they are no longer among these, they are coded as all others. 0 for none.
        recent_nbits (`int`, *optional*, defaults to 2):
            How many bits a channel these have more.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            Padding of the prompt, needed for batches of unequal length under an attention implementation that reads
            dense states, such as one of your own.
        key_nbits, key_backbone, key_sparsity, key_rank, key_decode_rank, value_nbits, value_backbone, value_sparsity,
        value_rank, value_decode_rank (*optional*):
            The same options for keys or values alone.
        max_cache_len (`int`, *optional*):
            Of the `transform` backbone: tokens that there is room for from the beginning. The cache is then static, as
            Transformers' `StaticCache` is: every step of one token is the same, so `torch.compile` makes one graph of
            it, on a GPU a CUDA graph, and `generate` compiles steps by itself there. All layers have to be of full
            attention.
        calibration (`TransformCalibration`, `str` or `Path`, *optional*):
            Of the `transform` backbone: what `calibrate_transform` found out about the model, or its file; `nbits` are
            then shared between all layers, heads, keys and values. `"auto"` takes the file that
            `kvcache-plugins calibrate --cache gear` keeps of the model, and goes without one, with a warning, where
            there is none. A cache without options whose `config` is the model takes it too if you have made one,
            silently.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be compressed.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import GEARCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> cache = GEARCache(model.config, nbits=2)
    >>> outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.memory().kv_percent  # of a 16-bit cache
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        nbits: float | None = None,
        backbone: str | None = None,
        q_group_size: int | None = None,
        residual_length: int | None = None,
        sparsity: float | None = None,
        rank: int | None = None,
        decode_rank: int | None = None,
        num_iterations: int | None = None,
        low_rank_recent_ratio: float | None = None,
        num_sink_tokens: int | None = None,
        rotate_values: bool | None = None,
        quantizer: str | None = None,
        sliding: str | None = None,
        recent_length: int | None = None,
        recent_nbits: int | None = None,
        attention_mask: torch.Tensor | None = None,
        key_nbits: float | None = None,
        key_backbone: str | None = None,
        key_sparsity: float | None = None,
        key_rank: int | None = None,
        key_decode_rank: int | None = None,
        value_nbits: float | None = None,
        value_backbone: str | None = None,
        value_sparsity: float | None = None,
        value_rank: int | None = None,
        value_decode_rank: int | None = None,
        max_cache_len: int | None = None,
        calibration: TransformCalibration | str | Path | None = None,
    ):
        # Those of the two forms: `None` is what was not given
        options: dict[str, Any] = dict(locals())
        for name in ("self", "config", "backbone", "attention_mask", "max_cache_len", "calibration"):
            del options[name]
        model, config = config, get_config(config, "config")
        check_mask("attention_mask", attention_mask)
        by_default = is_default(backbone, options)
        if by_default:
            backbone = BACKBONE
        check_calibrated(calibration, backbone, options)
        self.gear_config: GEARConfig | TransformConfig
        self.calibration: TransformCalibration | None = None
        if backbone != BACKBONE:
            self.gear_config = GEARConfig.from_options(backbone=backbone, **options)
        else:
            self.calibration = resolve_calibration(calibration, model, by_default=by_default)
            self.gear_config = transform_config(options, is_calibrated=self.calibration is not None)
        # Set by `choose_cache`
        self.choice: PresetChoice | None = None
        self._given_mask, self._max_cache_len = attention_mask, max_cache_len
        if max_cache_len is not None:
            check_integer("max_cache_len", max_cache_len, 1)
            if isinstance(self.gear_config, GEARConfig) or self.gear_config.quantizer != "lloyd-max":
                raise ValueError('`max_cache_len` is for the `transform` backbone with the `"lloyd-max"` quantizer')
            if config is None:
                raise ValueError("`max_cache_len` needs the model or its config, which the cache is made with")
        self._init_layers(config)
        if max_cache_len is not None and not self.is_compileable:
            raise ValueError("`max_cache_len` is for models whose layers all are of full attention")

    def _layer(
        self, layer_idx: int, config: PreTrainedConfig | None = None, window: int | None = None
    ) -> CompressedLayer:
        options, codec = self.gear_config, None
        if isinstance(options, GEARConfig):
            layer = CompressedLayer(options.packing(), layer_idx, self._given_mask)
            layer.on_first_prompt = warm_up_for_prompt
            return layer
        frequencies = None if config is None else rotary_frequencies(config, layer_idx)
        # Not all calibrations have looked at layers of a window, which then go by their prompt
        if self.calibration is not None and (window is None or layer_idx in self.calibration.layers):
            codec = self.calibration.codec(layer_idx, options.key_nbits, options.quantizer, frequencies)
        packing = options.packing(frequencies, codec)
        if window is None and options.quantizer == "lloyd-max" and (self._max_cache_len or has_gpu_kernels()):
            return StaticLayer(packing, layer_idx, self._given_mask, self._max_cache_len)
        return CompressedLayer(packing, layer_idx, self._given_mask, window)

    def _layers_for(self, config: PreTrainedConfig) -> list[Any]:
        options = self.gear_config

        def make_windowed(index: int, window: int) -> CompressedLayer | None:
            # Groups leave windows to Transformers
            if isinstance(options, GEARConfig) or options.sliding == "dense":
                return None
            is_compressed = options.sliding == "compressed" or window >= options.least_window
            return self._layer(index, config, window) if is_compressed else None

        layers = replace_full_attention(config, lambda index: self._layer(index, config), make_windowed)
        if isinstance(options, GEARConfig):
            for head_dim in sorted(head_dims(config)):
                options.codec(head_dim, head_dim)
        return layers

    @property
    def learns_from_queries(self) -> bool:
        """Tells whether what is stored of a prompt depends on its queries, so that attention has to show them."""
        return isinstance(self.gear_config, TransformConfig)

    def stats(self) -> dict[str, StatValue]:
        """
        Counters over all GEAR layers, 0 if there are none, and for a cache of `choose_cache` what it measured.

        Returns:
            `dict`: `num_layers` and, of those, `layers_compressing` with at least one compressed chunk,
            `layers_windowed` that are compressed and attend to a window, and `layers_left` as Transformers' own;
            `tokens_cached` (tokens of the sequence); and, summed over layers, `tokens_exact`, `tokens_compressed`
            (each token once, however many items the batch has), `chunks_compressed`, `attend_calls`
            (attentions over compressed states), `fused_calls` (those of them by a fused kernel), `kernel_fallbacks`
            (those for which the kernel that was wanted could not be had), `dense_reads` (sides made dense for
            something other than attention) and `prompts_without_mask` (prompts compressed without having seen a mask).
            Only of a chosen cache `chosen_preset` (a `str`), its `chosen_kl`, the bound `max_kl`, and `kl_by_preset`
            of all that were tried.
            Only with a calibration `calibration_bytes`, which `memory()` has apart as `shared`.
        """
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        choice: dict[str, StatValue] = {} if self.choice is None else self.choice.stats()
        if self.calibration is not None:
            choice["calibration_bytes"] = sum(self.memory().shared.values())
        kinds = {
            "layers_compressing": sum(1 for layer in layers if layer.blocks),
            "layers_windowed": sum(layer.is_sliding for layer in layers),
            "layers_left": len(self.layers) - len(layers),
        }
        # Counters alone are asked of a new layer, which no calibration has to know
        packing = self.gear_config.packing()
        return {**kinds, **add_stats(self.layers, lambda index: CompressedLayer(packing, index)), **choice}

    def warm_up(self, model: PreTrainedModel, *, padded: bool = False) -> None:
        """
        Compiles everything that a sequence of this cache will run on a GPU, before its first token, where the first
        prompt does it otherwise; for all caches of the model with the same options, with `padded` for batches with
        padding. On a CPU nothing is left to compile.
        """
        config = unwrap_model(model).config
        for sizes in sizes_of(config, model.dtype, model.device, is_padded=padded):
            warm_up(self.layers or [self._layer(0, config)], sizes)

    def fork(self, count: int) -> list[GEARCache]:
        """
        Returns `count` caches that go on from here, each by itself, as this one can too, while what is compressed
        stands in memory once for all of them: one long prefix, many continuations. `measure_memory` of all of them
        counts what they share once. Raises a `ValueError` if `count` is no positive integer.

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
        # What `deepcopy` finds under its identity it takes for copied
        return [copy.deepcopy(self, {id(tensor): tensor for tensor in shared}) for _ in range(count)]

    def save(self, path: str | Path, model: PreTrainedModel, *, compact: bool = False) -> None:
        """
        Writes the cache to a safetensors file, compressed as it is, with fingerprints of the model that made it and a
        checksum. The file takes its place when it is complete. A calibration is not in it, but by which one knows it.
        Raises an `OSError` naming `path` if it cannot be written.

        Args:
            compact (`bool`, *optional*, defaults to `False`): whether rows, of the `transform` backbone with the
                `"lloyd-max"` quantizer, become streams of fewer bytes, which takes longer; other caches are written
                as ever. What is loaded is the same, bit by bit.
        """
        model = unwrap_model(model)
        layers = [state_of(layer, index) for index, layer in enumerate(self.layers)]
        snapshot = Snapshot(
            model=fingerprint(model),
            model_config=config_fingerprint(model.config),
            model_name=str(model.config.name_or_path),
            has_config=self.layer_class_to_replicate is None,
            config=self.gear_config,
            calibration=None if self.calibration is None else self.calibration.digest,
            choice=self.choice,
            layers=compact_states(self.layers, layers) if compact else layers,
        )
        write_record(path, FORMAT, snapshot)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        calibration: TransformCalibration | str | Path | None = None,
    ) -> GEARCache:
        """
        Reads a cache that `save` wrote, checks all of it, and holds it in memory of its own: what happens to the file
        afterwards does not matter.

        Args:
            model (`PreTrainedModel` or `PreTrainedConfig`): the model that goes on from the cache, or its config,
                which cannot tell whether the weights are the same.
            calibration (`TransformCalibration`, `str` or `Path`, *optional*): the one that the cache was made with, or
                its file. By default it is looked for where `kvcache-plugins calibrate` keeps calibrations.

        Raises:
            ValueError: naming `path`, if the file is damaged, of another version, or of another model, or was made
                with another calibration.
        """
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model)
        if isinstance(calibration, (str, Path)):
            calibration = TransformCalibration.read(calibration)
        with refusals("path", path):
            snapshot = read_snapshot(path, model)
            config = get_config(model) if snapshot.has_config else None
            options = calibration_of_file(snapshot.config, snapshot.calibration, calibration, model)
            cache = cls(config, **options)
            cache.choice = snapshot.choice
            if not snapshot.has_config:
                for _ in snapshot.layers:
                    cache.layers.append(cache._next_layer())
            device = torch.device("cpu") if isinstance(model, PreTrainedConfig) else model.device
            restore_layers(cache.layers, snapshot.layers, device)
        return cache


def check_gear(*, calibration: object = None, **options: Any) -> None:
    """Raises a `ValueError` for what can be told to be wrong without a model."""
    GEARCache(**options)
    backbone = options.pop("backbone", None)
    check_calibrated(calibration, BACKBONE if is_default(backbone, options) else backbone, options)
    if isinstance(calibration, (str, Path)) and calibration != AUTO and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")


def is_default(backbone: str | None, options: Mapping[str, object]) -> bool:
    """Whether nothing is set that tells one form from the other; `None` is what was not given."""
    return backbone is None and all(value is None for name, value in options.items() if name not in OWN_OPTIONS)
