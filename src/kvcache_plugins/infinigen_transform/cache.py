"""`InfiniGenTransformCache`: an InfiniGen cache of transform-coded rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.infinigen import Calibration, InfiniGenCache
from kvcache_plugins.infinigen.config import check_options as check_infinigen
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.models.rotary_frequencies import rotary_embedding
from kvcache_plugins.transform_coding.config import DEFAULT_NBITS, TransformCodingConfig


KEY_NBITS, VALUE_NBITS = DEFAULT_NBITS


class InfiniGenTransformCache(InfiniGenCache):
    """
    A cache of transform-coded rows. Every decode step fetches only the rows that matter from host memory.

    Combines [InfiniGen](https://www.usenix.org/conference/osdi24/presentation/lee) with the rows of
    [`TransformCodingCache`]. Keys are rows on the model's device: they are scored and attended to there, and never
    fetched. Values are rows in the pool in host memory; rows of selected tokens are transferred as codes. The first
    `sink` tokens and the newest are exact. All other options are those of [`InfiniGenCache`]. It has some more for a
    copy that tokens are scored by; here keys are scored as they are stored.

    Args:
        model (`PreTrainedModel`):
            The model that the cache is for, see `InfiniGenCache`.
        key_nbits (`float`, *optional*, defaults to 4), value_nbits (`float`, *optional*, defaults to 3.25):
            Bits of a number on average, of keys on the model's device and of values in the pool.

    Raises:
        ValueError: as `InfiniGenCache`, and if keys or values are not finite or too large.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import InfiniGenTransformCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> with InfiniGenTransformCache(model) as cache:
    ...     outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.stats()["bytes_fetched"]
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module,
        *,
        key_nbits: float = KEY_NBITS,
        value_nbits: float = VALUE_NBITS,
        min_weight: float | None = None,
        alpha: float | None = None,
        max_fetch_ratio: float = 0.2,
        recent: int = 32,
        sink: int = 4,
        pool_tokens: int | None = None,
        eviction: str | None = None,
        full_layers: tuple[int, ...] | None = None,
        speculate: bool | None = None,
        calibration: Calibration | str | Path | None = None,
        attention_mask: torch.Tensor | None = None,
    ):
        self._coding = TransformCodingConfig(key_nbits=key_nbits, value_nbits=value_nbits)
        super().__init__(
            model,
            min_weight=min_weight,
            alpha=alpha,
            max_fetch_ratio=max_fetch_ratio,
            recent=recent,
            sink=sink,
            pool_tokens=pool_tokens,
            eviction=eviction,
            full_layers=full_layers,
            speculate=speculate,
            calibration=calibration,
            attention_mask=attention_mask,
        )

    def _policy(self, config: PreTrainedConfig, index: int) -> RowPolicy:
        coding = replace(self._coding, num_sink_tokens=self.infinigen_config.sink)
        return coding.policy(rotary_embedding(config, index))


def check_options(*, key_nbits: float = KEY_NBITS, value_nbits: float = VALUE_NBITS, **options: Any) -> None:
    """Raise a `ValueError` for options of an `InfiniGenTransformCache` that are wrong for every model."""
    TransformCodingConfig(key_nbits=key_nbits, value_nbits=value_nbits)
    check_infinigen(**options)
