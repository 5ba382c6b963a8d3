"""The cache that a model is given while a step of it is recorded: lengths stand on the device, and nothing is moved.

It stores the new token where `StepNumbers` says, and attends to the parts of a `FixedForm`. What the cache itself
counts is brought up to date by whoever replays the step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from transformers import Cache

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_states import LazyLayer, stored_states

from .fixed_storage import FixedForm
from .fixed_window import FixedWindow
from .step_numbers import StepNumbers


class StandIn(LazyLayer):
    """
    A layer of it.

    Args:
        numbers (`StepNumbers`): of the step.
        length (`int`): tokens that its states look as if they were of, the same in every step.
    """

    def __init__(self, numbers: StepNumbers, length: int):
        super().__init__()
        self._numbers, self._length = numbers, length
        self.is_initialized = True

    def _all_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = self.states_shape("keys"), self.states_shape("values")
        return stored_states(self, *shapes, shapes[0][2], self.dtype, self.device)

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Tokens before the new one, on the device, as Transformers' own static layers have them for positions."""
        return self._numbers.total

    def lazy_length(self) -> int:
        """See `LazyLayer.lazy_length`."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is made of it, as one token sees all; padding is hidden by masks of the parts."""
        return self._length, 0

    def materialize(self, side: str) -> torch.Tensor:
        """Refused, as is all that follows from it."""
        _refuse()

    def dense_tiles(self, sides: Collection[str]) -> Iterator[Any]:
        """See `materialize`."""
        _refuse()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It has been."""

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refused."""
        _refuse()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing of its own."""
        return iter(())

    def num_values(self) -> int:
        """Nothing of its own."""
        return 0

    def stats(self) -> dict[str, float]:
        """Nothing of its own."""
        return {}

    def crop_tokens(self, count: int) -> None:
        """Refused."""
        _refuse()


class StepLayer(StandIn):
    """
    One that is compressed.

    Args:
        form (`FixedForm`): of the layer that it stands for.
        numbers (`StepNumbers`): of the step.
    """

    def __init__(self, form: FixedForm, numbers: StepNumbers):
        super().__init__(numbers, form.layer.get_seq_length() + 1)
        self._layer, self._storage = form.layer, form.buffer.storage
        self._parts = form.parts(numbers)
        self.dtype, self.device = form.layer.dtype, form.layer.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a token `[B, H, 1, D]` in the buffer, and returns all states, lazily."""
        for storage, states in zip(self._storage, (key_states, value_states), strict=True):
            storage.index_copy_(2, self._numbers.place, states.to(storage.dtype))
        return self._all_states()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`."""
        _require_plain(call)
        return self._layer.attend_in_step(call.query, self._parts, call.scale)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """See `LazyLayer.states_shape`."""
        batch_size, num_heads, _, head_dim = self._layer.states_shape(side)
        return batch_size, num_heads, self._length, head_dim


class StepWindow(StandIn):
    """
    One of Transformers' own, with a window.

    Args:
        form (`FixedWindow`): of the layer that it stands for.
        numbers (`StepNumbers`): of the step.
    """

    is_sliding = True

    def __init__(self, form: FixedWindow, numbers: StepNumbers):
        # Of a full window a mask would be made
        super().__init__(numbers, min(form.layer.cumulative_length + 1, form.size - 1))
        self._form = form
        self.dtype, self.device = form.held()[0].dtype, form.held()[0].device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a token `[B, H, 1, D]`, and returns what is seen, lazily."""
        self._form.store(key_states, value_states)
        return self._all_states()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`."""
        _require_plain(call)
        return self._form.attend(call.query, self._numbers, call.scale)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """See `LazyLayer.states_shape`."""
        batch_size, num_heads, _, head_dim = self._form.held()[side == "values"].shape
        return batch_size, num_heads, self._length, head_dim


class StepCache(Cache):
    """
    The layers of a step.

    Args:
        forms (`Sequence[FixedForm | FixedWindow]`): of the cache's layers, in order.
        numbers (`StepNumbers`): of the step.
        length (`int`): tokens before it.
    """

    def __init__(self, forms: Sequence[FixedForm | FixedWindow], numbers: StepNumbers, length: int):
        layers: list[Any] = [
            StepWindow(form, numbers) if isinstance(form, FixedWindow) else StepLayer(form, numbers) for form in forms
        ]
        super().__init__(layers=layers)
        self._windows = [form for form in forms if isinstance(form, FixedWindow)]
        self._numbers, self._length = numbers, length

    def advance(self) -> None:
        """What a step does in the end, on the device."""
        for window in self._windows:
            window.move_up()
        self._numbers.advance()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Only masks are made of it, and none is."""
        return self._length


def _require_plain(call: AttentionCall) -> None:
    if call.mask is not None or not call.is_plain:
        raise ValueError("`captured_steps` is not for models that add to the scores of attention")


def _refuse() -> NoReturn:
    raise ValueError(
        "`captured_steps` is for models whose attention is `sdpa`, over keys and values as they are cached"
    )
