"""`InfiniGenTransformCache`: an InfiniGen cache of transform-coded rows."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.config import check_options as check_infinigen
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.models.rotary_frequencies import rotary_frequencies
from kvcache_plugins.transform_coding.config import DEFAULT_NBITS, TransformCodingConfig


KEY_NBITS, VALUE_NBITS = DEFAULT_NBITS
# Keys are scored as they are stored
_EXCLUDED = frozenset({"scoring_nbits", "partial_ratio", "skewing"})


class InfiniGenTransformCache(InfiniGenCache):
    """
    A cache of transform-coded rows. Every decode step fetches only the rows that matter from host memory.

    Combines [InfiniGen](https://www.usenix.org/conference/osdi24/presentation/lee) with the rows of
    [`TransformCodingCache`]. Keys are rows on the model's device: they are scored and attended to there, and never
    fetched. Values are rows in the pool in host memory; rows of selected tokens are transferred as codes. The first
    `sink` tokens and the newest are exact.

    Args:
        model (`PreTrainedModel`):
            The model that the cache is for, see `InfiniGenCache`.
        key_nbits (`float`, *optional*, defaults to 4), value_nbits (`float`, *optional*, defaults to 3.25):
            Bits of a number on average, of keys on the model's device and of values in the pool.
        options:
            Options of `InfiniGenCache`, except those of its copy for scoring (`scoring_nbits`, `partial_ratio`,
            `skewing`).

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
        **options: Any,
    ):
        self._nbits = key_nbits, value_nbits
        check_options(key_nbits=key_nbits, value_nbits=value_nbits, **options)
        super().__init__(model, **options)

    def _policy(self, config: PreTrainedConfig, index: int) -> RowPolicy:
        key_nbits, value_nbits = self._nbits
        num_sinks = self.infinigen_config.sink
        coding = TransformCodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, num_sink_tokens=num_sinks)
        return coding.policy(rotary_frequencies(config, index))


def check_options(*, key_nbits: float = KEY_NBITS, value_nbits: float = VALUE_NBITS, **options: Any) -> None:
    """Raise a `ValueError` for options of an `InfiniGenTransformCache` that are wrong for every model."""
    excluded = sorted(_EXCLUDED & options.keys())
    if excluded:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in excluded)}: not an option of `InfiniGenTransformCache`, which scores "
            "keys in the bits of `key_nbits`"
        )
    TransformCodingConfig(key_nbits=key_nbits, value_nbits=value_nbits)
    check_infinigen(**options)


# `create_cache` refuses a misspelt option before anything is built
_OWN = list(inspect.signature(InfiniGenTransformCache.__init__).parameters.values())[1:-1]
_KNOWN = {each.name for each in _OWN} | _EXCLUDED
InfiniGenTransformCache.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_OWN, *(each for each in inspect.signature(InfiniGenCache).parameters.values() if each.name not in _KNOWN)]
)
