"""Caches for the decoder's own tokens of an encoder-decoder: what is attended to across belongs into another cache."""

from transformers import PreTrainedConfig


class UpdateOrder:
    """
    Tells by the order of updates whether a cache gets an encoder's states too: each layer of the model updates it
    twice then. Of a model with one layer nothing can be told, and no decoder alone is watched (`is_watched`).

    Args:
        config (`PreTrainedConfig`, *optional*): of the decoder; `None` if the cache was made without.
        num_layers (`int`): of the decoder.
    """

    def __init__(self, config: PreTrainedConfig | None, num_layers: int):
        self.is_watched = config is not None and config.is_encoder_decoder and num_layers > 1
        self._last: int | None = None

    def note(self, layer_idx: int) -> None:
        """
        Called before each update.

        Raises:
            ValueError: if it is the second one of a layer in a row.
        """
        last, self._last = self._last, layer_idx
        if last == layer_idx and self.is_watched:
            self._last = None
            raise ValueError(
                "`past_key_values` is a cache for the decoder's own tokens, and the encoder's would be stored among "
                "them: pass `EncoderDecoderCache(cache, DynamicCache())`"
            )

    def restart(self) -> None:
        """The next update may be of any layer."""
        self._last = None
