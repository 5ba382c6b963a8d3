"""A prompt of which the end is held out: checked, cut, and fed to the model part by part."""

import inspect
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import unwrap_model


# By default a quarter of the prompt is held out, within these
_FEWEST_HELD_OUT = 16
_MOST_HELD_OUT = 128


class HeldOutPrompt:
    """A prompt where the model is, checked, and cut into a prefix that fills caches and the tokens that are scored."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        held_out: int | None,
    ) -> None:
        self.model, inner = model, unwrap_model(model)
        self.config: Any = inner.config
        if model.training:
            raise ValueError("`model` is in training mode, where dropout differs each time: call `model.eval()` first")
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError("`input_ids` has to be a tensor of token ids of shape `[batch_size, prompt length]`")
        self.input_ids = input_ids.to(inner.device)
        self.length = input_ids.shape[1]
        self.held_out = _choose_held_out(held_out, self.length)
        self.prefix_length = self.length - self.held_out
        self.mask = _check_mask(attention_mask, self.input_ids)
        self._accepted = inspect.signature(inner.forward).parameters

    @property
    def padding(self) -> torch.Tensor | None:
        """Padding of every item, `[batch_size]`."""
        return None if self.mask is None else (self.mask == 0).sum(dim=1)

    def is_real(self, start: int, stop: int) -> torch.Tensor:
        """Which tokens are not padding, `[batch_size, stop - start]`."""
        if self.mask is None:
            return torch.ones_like(self.input_ids[:, start:stop], dtype=torch.bool)
        return self.mask[:, start:stop] != 0

    def feed(self, cache: Cache, start: int, stop: int) -> torch.Tensor:
        """Logits `[batch_size, stop - start, vocabulary]` of tokens through a cache that holds those before them."""
        options: dict[str, Any] = {}
        if self.mask is not None:
            options["attention_mask"] = self.mask[:, :stop]
            if "position_ids" in self._accepted:
                # As `generate` counts them
                positions = self.mask.long().cumsum(dim=1) - 1
                options["position_ids"] = positions.masked_fill(self.mask == 0, 0)[:, start:stop]
        if start == 0 and "logits_to_keep" in self._accepted:
            # Those of the prefix are nobody's
            options["logits_to_keep"] = 1
        named = as_argument(cache, unwrap_model(self.model).forward)
        output = self.model(input_ids=self.input_ids[:, start:stop], **named, use_cache=True, **options)
        if cache.get_seq_length() != stop:
            raise ValueError(
                f"`model` left {cache.get_seq_length()} tokens in the cache after {stop}: it does not go through "
                "`past_key_values` alone, so nothing can be measured"
            )
        return output.logits


def _choose_held_out(held_out: int | None, length: int) -> int:
    if held_out is None:
        held_out = max(_FEWEST_HELD_OUT, min(length // 4, _MOST_HELD_OUT))
        if held_out >= length:
            raise ValueError(
                f"`input_ids` has {length} tokens, which is too short: {held_out} are held out at the end, and those "
                "before them have to be enough to be compressed"
            )
    if not isinstance(held_out, int) or isinstance(held_out, bool) or not 1 <= held_out < length:
        raise ValueError(
            f"`held_out` has to be an integer from 1 to {length - 1} for this prompt, but got {held_out!r}"
        )
    return held_out


def _check_mask(mask: torch.Tensor | None, input_ids: torch.Tensor) -> torch.Tensor | None:
    """The mask where the model is; `None` if there is no padding."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        raise ValueError(f"`attention_mask` has to be a tensor of the shape of `input_ids`, {tuple(input_ids.shape)}")
    mask = mask.to(input_ids.device).long()
    is_binary = bool(((mask == 0) | (mask == 1)).all())
    if not is_binary or bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise ValueError(
            "`attention_mask` has to be 0 for padding on the left of an item and 1 for all tokens after it"
        )
    return None if bool(mask.all()) else mask
