"""`TransformCodingCache`: rows of bytes for tokens, with more bits for channels of more energy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.files.atomic import RefusedFile
from kvcache_plugins.files.records import Format
from kvcache_plugins.formats.quantizer import NAME
from kvcache_plugins.formats.rotary import NOT_ROTATED
from kvcache_plugins.kernels.engine import has_gpu_kernels
from kvcache_plugins.layers.layer_factory import replace_full_attention
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.layers.static_row_layer import StaticRowLayer
from kvcache_plugins.models.rotary_frequencies import rotary_embedding
from kvcache_plugins.option_checks import split_nbits
from kvcache_plugins.packed.cache import ADVICE, PackedCache
from kvcache_plugins.packed.snapshot import Snapshot
from kvcache_plugins.registry import get_config
from kvcache_plugins.reports.memory import StatValue

from .calibration import (
    AUTO,
    TransformCalibration,
    check_calibration,
    find_saved_calibration,
    resolve_calibration,
)
from .config import DEFAULT_MEAN_NBITS, DEFAULT_NBITS, TransformCodingConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class TransformCodingSnapshot(Snapshot):
    """
    Content of a file of a `TransformCodingCache`. `calibration` is the digest of the cache's calibration, if any.
    """

    config: TransformCodingConfig
    calibration: str | None

    def check(self) -> None:
        if self.calibration is not None and self.config.key_nbits != self.config.value_nbits:
            raise ValueError("it names a calibration, but its options have none")


class TransformCodingCache(PackedCache):
    """
    A cache that stores every token of a head as a row of few bytes, with more bits for channels that vary more.

    Keys are coded before their rotary embedding, and values after a Hadamard rotation. Bits are divided among channels
    by their energy (reverse water-filling), and every token has one scale. The method is this package's own: at equal
    bytes its loss is below that of [`GEARCache`] and of KIVI's groups. A prompt is coded right after its attention,
    decoded tokens a few at a time. Attention of `sdpa`, `eager`, `flex_attention` and flash attention is computed over
    coded tokens; any other implementation makes them dense, one layer at a time.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*):
            The model, or its config. With it, keys are coded before their rotary embedding, layers with a window of
            attention keep no more than the window (see `sliding`), and bounded layers of other kinds stay
            Transformers' own; without it, every layer is coded as one of full attention.
        nbits (`float`, *optional*):
            Bits of a channel on average, up to 8. Defaults to 4 for keys and 3.25 for values, and with a calibration,
            which shares bits among both, to 3.625.
        key_nbits, value_nbits (`float`, *optional*):
            The same for keys or values alone, without a calibration.
        residual_length (`int`, *optional*, defaults to 5):
            Largest number of newest decoded tokens that stay exact. When it is reached, the oldest of them are coded.
        num_sink_tokens (`int`, *optional*, defaults to 4):
            First tokens of a sequence that stay exact
            ([StreamingLLM](https://huggingface.co/papers/2309.17453)).
        sliding (`str`, *optional*, defaults to `"auto"`):
            Treatment of layers with a window, or with chunks, of attention. `"compressed"` codes them, and evicts
            tokens that no later query sees, some at a time; `"dense"` leaves them to Transformers; `"auto"` compresses
            windows of at least 2048 tokens, as shorter ones gain little.
        recent_length (`int`, *optional*, defaults to 128):
            Largest number of newest coded tokens, among the decoded ones, whose rows have more bits, as they are read
            most. Older rows are requantized to the bits of all others. 0 for none.
        recent_nbits (`int`, *optional*, defaults to 2):
            Additional bits of a channel of recent rows.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            Padding of the prompt, needed for batches of unequal length under an attention implementation that reads
            dense states, such as one of your own.
        max_cache_len (`int`, *optional*):
            Tokens that memory is reserved for. The cache is then static, like Transformers' `StaticCache`: all steps
            of one token are the same, so `torch.compile` makes one graph of them, on a GPU a CUDA graph, and
            `generate` compiles steps there without being asked. All layers have to be of full attention.
        calibration (`TransformCalibration`, `str` or `Path`, *optional*):
            Result of `calibrate_transform` for the model, or its file: bases of keys and values, and the cost of their
            errors. `"auto"` is the file that `kvcache-plugins calibrate --cache transform` keeps for the model; if
            there is none, the cache has no calibration, with a warning.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be compressed.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import TransformCodingCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> cache = TransformCodingCache(model)
    >>> outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.memory().kv_percent  # of a 16-bit cache
    ```
    """

    _format = Format("kvcache_plugins.transform_coding", 1, ADVICE)
    _snapshot_class = TransformCodingSnapshot
    uses_query_statistics = True
    cache_config: TransformCodingConfig

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        nbits: float | None = None,
        key_nbits: float | None = None,
        value_nbits: float | None = None,
        residual_length: int = 5,
        num_sink_tokens: int = 4,
        sliding: str = "auto",
        recent_length: int = 128,
        recent_nbits: int = 2,
        attention_mask: torch.Tensor | None = None,
        max_cache_len: int | None = None,
        calibration: TransformCalibration | str | Path | None = None,
    ):
        check_calibration(calibration, key_nbits, value_nbits)
        self.calibration = resolve_calibration(calibration, config)
        default = DEFAULT_NBITS if self.calibration is None else (DEFAULT_MEAN_NBITS, DEFAULT_MEAN_NBITS)
        key_nbits, value_nbits = split_nbits(nbits, key_nbits, value_nbits, default)
        self.cache_config = TransformCodingConfig(
            key_nbits=key_nbits,
            value_nbits=value_nbits,
            residual_length=residual_length,
            num_sink_tokens=num_sink_tokens,
            sliding=sliding,
            recent_length=recent_length,
            recent_nbits=recent_nbits,
        )
        super().__init__(get_config(config, "config"), attention_mask, max_cache_len)

    def _make_empty_layer(self, layer_idx: int) -> RowLayer:
        return RowLayer(self.cache_config.policy(), layer_idx)

    def _layer(self, layer_idx: int, config: PreTrainedConfig | None = None, window: int | None = None) -> RowLayer:
        options = self.cache_config
        codec = None
        rotary = NOT_ROTATED if config is None else rotary_embedding(config, layer_idx)
        # A layer with a window that the calibration does not have is fitted to its prompt
        if self.calibration is not None and (window is None or layer_idx in self.calibration.layers):
            codec = self.calibration.codec(layer_idx, options.key_nbits, rotary.frequencies)
        policy = options.policy(rotary, codec)
        if window is None and (self._max_cache_len or has_gpu_kernels()):
            return StaticRowLayer(policy, layer_idx, self._given_mask, self._max_cache_len)
        return RowLayer(policy, layer_idx, self._given_mask, window)

    def _layers_for(self, config: PreTrainedConfig) -> list[CacheLayerMixin]:
        options = self.cache_config

        def make_windowed(index: int, window: int) -> RowLayer | None:
            is_compressed = options.sliding == "compressed"
            if options.sliding == "auto":
                is_compressed = window >= options.least_window
            return self._layer(index, config, window) if is_compressed else None

        return replace_full_attention(config, lambda index: self._layer(index, config), make_windowed)

    def stats(self) -> dict[str, StatValue]:
        """
        Return the counters of [`PackedCache.stats`]; `layers_unrotated`, the layers whose keys are coded with the
        rotary embedding undone, as it fits them better; and `calibration_bytes` with a calibration (`shared` bytes).
        """
        counters = super().stats()
        codecs = (layer.codec for layer in self.layers if isinstance(layer, RowLayer))
        names = (None if codec is None else codec.rotary_name for codec in codecs)
        counters["layers_unrotated"] = sum(name not in (None, "none") for name in names)
        if self.calibration is not None:
            counters["calibration_bytes"] = sum(self.memory().shared.values())
        return counters

    def _options_to_save(self) -> dict[str, object]:
        digest = None if self.calibration is None else self.calibration.digest
        return {"config": self.cache_config, "calibration": digest}

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        calibration: TransformCalibration | str | Path | None = None,
    ) -> TransformCodingCache:
        """
        Read a file of `save`, check it, and copy it into memory, so that later changes of the file have no effect. The
        file has the digest of the calibration, not the calibration itself.

        Args:
            model (`PreTrainedModel` or `PreTrainedConfig`): the model that continues from the cache. A config is
                enough, but then the weights are not compared.
            calibration (`TransformCalibration`, `str` or `Path`, *optional*): the cache's calibration, or its file. By
                default it is searched among those of `kvcache-plugins calibrate`.

        Raises:
            ValueError: if the file `path` is damaged, of another version, model or class, or was made with another
                calibration.
        """
        if isinstance(calibration, (str, Path)):
            calibration = TransformCalibration.read(calibration)
        return cls._load(path, model, given=calibration)

    @classmethod
    def _read_options(
        cls,
        snapshot: Snapshot,
        model: PreTrainedModel | PreTrainedConfig,
        given: object,
    ) -> dict[str, Any]:
        assert isinstance(snapshot, TransformCodingSnapshot)
        assert given is None or isinstance(given, TransformCalibration)
        quantizer = snapshot.config.quantizer
        if quantizer != NAME:
            raise RefusedFile(f"holds {quantizer} codes, which only earlier versions read: prefill and `save` anew")
        calibration = find_saved_calibration(snapshot.calibration, given, model)
        if calibration is None:
            return snapshot.config.to_options()
        return {**snapshot.config.to_calibrated_options(), "calibration": calibration}


def check_options(*, calibration: object = None, **options: object) -> None:
    """Raise a `ValueError` for options of a `TransformCodingCache` that are wrong for every model."""
    make: Callable[..., TransformCodingCache] = TransformCodingCache
    make(**options)
    check_calibration(calibration, options.get("key_nbits"), options.get("value_nbits"))
    if isinstance(calibration, (str, Path)) and calibration != AUTO and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")
