"""`InfiniGenGEARCache`: an InfiniGen cache whose layers hold codes."""

import inspect
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.layer import InfiniGenLayer

from .coded_layer import CodedLayer
from .config import CodingConfig


class InfiniGenGEARCache(InfiniGenCache):
    """
    A cache of codes, of which every decode step fetches only what matters from host memory.

    Puts [GEAR](https://huggingface.co/papers/2403.05527) and
    [InfiniGen](https://www.usenix.org/conference/osdi24/presentation/lee) together. InfiniGen keeps a copy of the keys
    in a few bits where it computes, to choose tokens by. Here that copy *is* the keys, in GEAR's codes: they are
    scored and attended to where they are, and never fetched. Values are in the pool in host memory, as GEAR's codes of
    rotated values; those of the tokens that were chosen cross the bus as codes and are widened where they are attended
    to. The first `sink` tokens and the newest are exact.

    Args:
        model (`PreTrainedModel`):
            The model that the cache is for, see `InfiniGenCache`.
        key_nbits (`int`, *optional*, defaults to 4):
            Bits of a key's number, where the model is: 2, 4 or 8.
        value_nbits (`int`, *optional*, defaults to 4):
            Bits of a value's number, in the pool: 2, 3, 4 or 8.
        q_group_size (`int`, *optional*):
            Consecutive tokens of a channel of the keys, and channels of a value, that share a scale. Defaults to 64,
            or for values to the largest divisor of the head dimension below it.
        options:
            Options of `InfiniGenCache`, but for those of its own copy for scoring (`scoring_nbits`, `partial_ratio`,
            `skewing`) and of a pool with a limit (`pool_tokens`, `eviction`).

    Raises:
        ValueError: as `InfiniGenCache`; and if states that are to be stored are not finite, or exceed float16.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import InfiniGenGEARCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> with InfiniGenGEARCache(model) as cache:
    ...     outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.stats()["bytes_fetched"]
    ```
    """

    excluded_options: ClassVar[frozenset[str]] = frozenset(
        {"scoring_nbits", "partial_ratio", "skewing", "pool_tokens", "eviction"}
    )

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module,
        *,
        key_nbits: int = 4,
        value_nbits: int = 4,
        q_group_size: int | None = None,
        **options: Any,
    ):
        excluded = sorted(self.excluded_options & options.keys())
        if excluded:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in excluded)}: not an option of `{type(self).__name__}`, which has "
                "`key_nbits`, `value_nbits` and `q_group_size`, and a pool without a limit"
            )
        self.coding_config = CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
        super().__init__(model, **options)

    def _offloaded_layer(self, index: int) -> InfiniGenLayer:
        return CodedLayer(self.infinigen_config, index, self._given_mask, coding=self.coding_config)


def _signature() -> inspect.Signature:
    """Names own options and InfiniGen's, so that a misspelt one is told before anything is built."""
    own = list(inspect.signature(InfiniGenGEARCache.__init__).parameters.values())[1:]
    inherited = inspect.signature(InfiniGenCache).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    known = {parameter.name for parameter in named} | InfiniGenGEARCache.excluded_options
    return inspect.Signature([*named, *(parameter for parameter in inherited if parameter.name not in known)])


InfiniGenGEARCache.__signature__ = _signature()  # type: ignore[attr-defined]
