"""How far each layer's attention output is from the dense cache's, on the same text.

A layer's error holds that of the layers below, whose outputs it is fed with: it is what reaches the residual stream.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcache_plugins.infinigen.queries import find_attention_modules


@dataclass
class AttentionOutputs:
    """What the attention modules of a model have put out, by layer: parts of `[tokens, hidden_size]`."""

    parts: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def by_layer(self) -> list[torch.Tensor]:
        """`[tokens, hidden_size]` for each layer."""
        return [torch.cat(self.parts[index]) for index in sorted(self.parts)]


@contextmanager
def record_attention(model: PreTrainedModel) -> Iterator[AttentionOutputs]:
    """
    Records the attention outputs of all forwards in a `with` block, for a batch of one.

    Nothing is recorded of a model whose attention modules are not known: its other measures are worth having.
    """
    recorded = AttentionOutputs()
    try:
        modules = find_attention_modules(model)
    except ValueError:
        modules = {}

    def record(index: int, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        recorded.parts.setdefault(index, []).append(states[0].detach())

    def listen(index: int, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda module, inputs, output: record(index, output))

    handles = [listen(index, module) for index, module in modules.items()]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


class LayerErrors:
    """Adds up, over windows, the squares of differences and of what they are differences from."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[float, float]] = {}

    def add(self, dense: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Outputs of every layer on one window."""
        for index, (exact, other) in enumerate(zip(dense, outputs, strict=True)):
            difference, norm = self._squares.get(index, (0.0, 0.0))
            difference += float((other.double() - exact.double()).square().sum())
            self._squares[index] = (difference, norm + float(exact.double().square().sum()))

    def relative(self) -> tuple[float, ...]:
        """Norm of the difference over that of the dense output, by layer."""
        return tuple(math.sqrt(difference / norm) for difference, norm in self._squares.values())
