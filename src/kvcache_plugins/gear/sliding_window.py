"""Layers whose attention has a window: what their newest states are of, and how far they can be rolled back.

A query sees the newest `sliding_window` tokens, itself among them. Positions in a layer stay those of the sequence;
states, masks and tiles begin at the first token that the newest queries see, as in Transformers' own sliding layer.
What no query to come sees is let go of before the next update, so that the newest one can always be taken back, unless
it was longer than the window; with `activate_past_recording` nothing is let go of before a `crop`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvcache_plugins.layers.prompt_layer import PromptLayer


if TYPE_CHECKING:
    # Mixed in: no class between a layer and `PromptLayer`
    _Base = PromptLayer
else:
    # As of all layers, so that a layer may be given the class of one that keeps recurrent states too
    _Base = ABC


class SlidingWindowMixin(_Base):
    """
    Mixed into a `PromptLayer`, before it.

    Attributes:
        sliding_window (`int`, *optional*): tokens that a query sees, itself among them; all by default.
        record_past (`bool`): whether nothing is let go of before a `crop`, as in Transformers' own sliding layer. An
            emptied layer does not, so that it is like a new one.
    """

    sliding_window: int | None = None
    record_past: bool

    def _slide(self, sliding_window: int | None) -> None:
        """Has the layer attend to a window."""
        self.sliding_window, self.is_sliding = sliding_window, sliding_window is not None

    def _clear(self) -> None:
        super()._clear()
        self.record_past = False
        # Position before which everything has been let go of
        self._held_start = 0

    @abstractmethod
    def _let_go(self) -> None:
        """Drops what no query to come sees, as far as that is possible."""

    def activate_past_recording(self) -> None:
        """Lets go of nothing from now on until a `crop`, which can then take back all updates since the last one."""
        self.record_past = True

    def _first_seen(self, length: int) -> int:
        """Position of the first token that a query at position `length` sees."""
        return 0 if self.sliding_window is None else max(length - self.sliding_window + 1, 0)

    @property
    def _first_visible(self) -> int:
        return 0 if self.sliding_window is None else self._first_seen(self._length - self._num_new)

    def lazy_length(self) -> int:
        """See `LazyLayer.lazy_length`."""
        return self._length if self.sliding_window is None else self._length - self._first_visible

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin.get_mask_sizes`."""
        length, _ = super().get_mask_sizes(query_length)
        first = self._first_seen(self._length)
        return length - first, first

    def get_max_length(self) -> int:
        """See `CacheLayerMixin.get_max_length`."""
        return super().get_max_length() if self.sliding_window is None else self.sliding_window

    get_max_cache_shape = get_max_length

    def num_values(self) -> int:
        """See `LazyLayer.num_values`."""
        if self.sliding_window is None or not self.is_initialized:
            return super().num_values()
        length = self._length - self._first_seen(self._length)
        return sum(shape[0] * shape[1] * length * shape[3] for shape in map(self.states_shape, ("keys", "values")))

    def _num_passed(self, count: int) -> int:
        """How many of the newest `count` tokens no query to come sees."""
        return 0 if self.record_past else max(count - (self._length - self._first_seen(self._length)), 0)

    def can_crop(self, count: int) -> bool:
        """See `PromptLayer.can_crop`."""
        length = self._length - count
        return length <= 0 or self._is_pending(count) or self._first_seen(length) >= self._held_start

    def _is_pending(self, count: int) -> bool:
        """Whether the newest `count` tokens, not all, still wait to be stored."""
        return self._pending is not None and self._pending[0].shape[2] == count < self._length

    def crop(self, tokens_to_remove: int) -> None:
        """See `LazyLayer.crop`; a layer that records the past lets go of it here."""
        super().crop(tokens_to_remove)
        if self.record_past and self.is_initialized:
            self.settle_prompt()
            self._let_go()

    def crop_tokens(self, count: int) -> None:
        """See `LazyLayer.crop_tokens`."""
        if self.sliding_window is not None:
            is_pending = self._is_pending(count)
            if not is_pending:
                self.settle_prompt()
            if not self.can_crop(count):
                raise ValueError(
                    f"`crop` of {count} tokens would go back to {self._length - count}, but a window of "
                    f"{self.sliding_window} tokens has let go of what was seen there: call "
                    "`activate_past_recording()` of the cache before the tokens that are to be taken back"
                )
            if is_pending:
                self._pending = None
                self._length -= count
                self._num_new = 0
                return
        super().crop_tokens(count)
        self._num_new = max(self._num_new - count, 0)
