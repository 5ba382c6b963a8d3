"""`H2OCache`: a list of H2O layers, beside Transformers' own layers for what is not full attention."""

from __future__ import annotations

import torch
from transformers import Cache, PreTrainedConfig

from kvcache_plugins.layers.model_match import ModelMatchMixin
from kvcache_plugins.registry import get_config
from kvcache_plugins.reports.memory import ReportingMixin, add_stats

from .h2o_layer import H2OConfig, H2OLayer


class H2OCache(ModelMatchMixin, ReportingMixin, Cache):
    """
    A cache that keeps the tokens with the largest accumulated attention weights and the newest ones, and drops all
    others for good.

    Implements [H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models](https://huggingface.co/papers/2306.14048), the baseline that other methods are measured against. Every
    layer, item of a batch and key/value head keeps tokens of its own; weights are summed over all queries and over the
    query heads of a group. A prompt is attended to exactly and dropped from right after its attention, layer by layer;
    beyond it, tokens are dropped at the beginning of the next update (and of a prompt in chunks, between the chunks).
    Lengths, positions and masks are those of the whole sequence.

    Weights are computed from queries and keys under `sdpa`, `eager`, `flex_attention` and flash attention. Under any
    other implementation, and of families that write attention out in their own code, the first update that would have
    to drop a token raises a `ValueError`.

    A `crop` of up to 32 tokens of the newest update, as in assisted decoding, leaves no trace, unless that update was
    the prompt. Any other `crop` removes what it is asked to remove, but the weights that the removed queries gave
    stay, and tokens that were dropped in the meantime do not come back: the cache holds fewer tokens than its budget
    until new ones come.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own and tokens are dropped in full-attention layers only;
            without it, in every layer.
        heavy_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept for its weights.
        recent_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept for being the
            newest. Nothing is ever dropped if both add up to 1 or more.
        min_tokens (`int`, *optional*, defaults to 32): tokens that are kept at least, whatever the shares, in the same
            proportion: shorter sequences stay whole.
        grow (`bool`, *optional*, defaults to `True`): whether both are shares of the current length, so that tokens
            that are decoded, or come with a chunk of a prompt or another turn, enlarge the budget. Otherwise, as in
            the paper's code, they are shares of the first update, the prompt, and stay what they are.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            tokens cannot be dropped of.

    Example:

    ```python
    >>> from kvcache_plugins import H2OCache
    >>> cache = H2OCache(model.config, heavy_ratio=0.05, recent_ratio=0.05)
    >>> outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.stats()["tokens_dropped"]
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        heavy_ratio: float = 0.1,
        recent_ratio: float = 0.1,
        min_tokens: int = 32,
        grow: bool = True,
    ):
        self._config = H2OConfig(heavy_ratio=heavy_ratio, recent_ratio=recent_ratio, min_tokens=min_tokens, grow=grow)
        self._init_layers(get_config(config, "config"))

    def _layer(self, layer_idx: int) -> H2OLayer:
        return H2OLayer(self._config, layer_idx)

    def stats(self) -> dict[str, int]:
        """
        Counters over all H2O layers, 0 if there are none.

        Returns:
            `dict[str, int]`: `num_layers` and, of those, `layers_dropping` that have dropped tokens; `tokens_cached`
            (tokens of the sequence); and, summed over layers, `tokens_kept` and `tokens_dropped` (of the item and head
            that has most of them), `attend_calls` (attentions over what was kept), `prompts_without_mask` and
            `updates_without_weights` (those whose attention was not seen), and `dense_reads` (times a side of a layer
            was made dense for something other than `sdpa`).
        """
        dropping = sum(layer.num_dropped() > 0 for layer in self.layers if isinstance(layer, H2OLayer))
        return {**add_stats(self.layers, self._layer), "layers_dropping": dropping}
