"""States of convolutions and recurrences, which Transformers' own code keeps beside keys and values.

They are small, exact, and of the newest token alone. Every forward writes over them, so they cannot be cut out of a
longer sequence as keys and values can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from .torch_contexts import without_caller_contexts


@dataclass(frozen=True, eq=False, slots=True)
class RecurrentState:
    """
    States of one layer after its newest token, by number; the batch is the first dimension of each.

    Attributes:
        convolutions (`dict`): inputs `[B, ..., kernel size]` that the next token's convolution sees.
        recurrences (`dict`): what a recurrence continues from.
    """

    convolutions: dict[str, torch.Tensor]
    recurrences: dict[str, torch.Tensor]

    def clone(self) -> RecurrentState:
        """Return a copy that later forwards do not write to."""
        return RecurrentState(
            {number: tensor.clone() for number, tensor in self.convolutions.items()},
            {number: tensor.clone() for number, tensor in self.recurrences.items()},
        )


# One for each layer, `None` for a layer without; `None` for a model without
RecurrentStates = list[RecurrentState | None] | None


def recurrent_states(layers: Sequence[object], num_tokens: int) -> RecurrentStates:
    """
    Return the states of all layers of a cache that holds some tokens, as they are. Raise a `ValueError` if the model
    keeps them elsewhere.
    """
    if not num_tokens or not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return None
    states: list[RecurrentState | None] = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, LinearAttentionLayer):
            states.append(None)
            continue
        state = _state_of(layer)
        if not state.convolutions and not state.recurrences:
            raise ValueError(
                f"layer {index} has a recurrence whose states the model keeps in its own modules, not in the cache"
            )
        states.append(state)
    return states


def _state_of(layer: LinearAttentionLayer) -> RecurrentState:
    convolutions = {}
    for number, tensor in layer.conv_states.items():
        if tensor is not None:
            size = layer.conv_kernel_size[number] or tensor.shape[-1]
            # A layer that records the past has more, or fewer after a short prompt
            convolutions[str(number)] = pad(tensor, (max(size - tensor.shape[-1], 0), 0))[..., -size:]
    recurrences = {str(number): tensor for number, tensor in layer.recurrent_states.items() if tensor is not None}
    return RecurrentState(convolutions, recurrences)


@without_caller_contexts
def select_sequences(layer: LinearAttentionLayer, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the batch of a layer's states by the sequences that `select` returns of all their numbers."""
    for states in (layer.conv_states, layer.recurrent_states):
        for number, tensor in states.items():
            if tensor is not None:
                numbers = torch.arange(tensor.shape[0], dtype=torch.int64, device=tensor.device)
                states[number] = tensor.index_select(0, select(numbers))


@without_caller_contexts
def restore_recurrent_states(
    layers: Sequence[object], states: RecurrentStates, batch_size: int, device: torch.device
) -> None:
    """
    Copy states that may come from anywhere to the layers of a new cache, which holds `batch_size` sequences, 0 if it
    holds nothing. Raise a `ValueError` if they do not fit.
    """
    for index, layer in enumerate(layers):
        state = states[index] if states else None
        path = f"recurrent.{index}"
        if not isinstance(layer, LinearAttentionLayer):
            if state is not None:
                raise ValueError(f"`{path}` has states, but the layer has no recurrence")
        elif (state is not None) != (batch_size > 0):
            raise ValueError(f"`{path}` has to have states if, and only if, the cache holds tokens")
        elif state is not None:
            _check(f"{path}.convolutions", state.convolutions, layer, batch_size)
            _check(f"{path}.recurrences", state.recurrences, layer, batch_size)
            for number, tensor in state.convolutions.items():
                layer.update_conv_state(tensor.to(device), state_idx=int(number))
            for number, tensor in state.recurrences.items():
                layer.update_recurrent_state(tensor.to(device), state_idx=int(number))


def _check(path: str, tensors: Mapping[str, torch.Tensor], layer: LinearAttentionLayer, batch_size: int) -> None:
    for number, tensor in tensors.items():
        if number not in map(str, range(layer.number_of_states)):
            raise ValueError(f"the tensor `{path}.{number}` is unknown")
        fits = tensor.dim() > 1 and tensor.shape[0] == batch_size and tensor.numel() > 0
        if not fits or not tensor.is_floating_point():
            raise ValueError(
                f"the tensor `{path}.{number}` has to be of floats for {batch_size} sequences but is of shape "
                f"{list(tensor.shape)} in {tensor.dtype}"
            )
