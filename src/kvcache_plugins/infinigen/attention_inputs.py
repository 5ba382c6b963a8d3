"""What an attention module is called with, and what of a forward pass is noted until then."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from .queries import PositionEmbeddings


class AttentionInputs:
    """
    What an attention module was called with.

    Attributes:
        hidden_states (`torch.Tensor` of shape `[B, tokens, hidden size]`): its input.
        position_embeddings (`tuple[torch.Tensor, torch.Tensor]`, *optional*): cosine and sine.
        attention_mask (`torch.Tensor`, *optional*): its mask, as attention gets it.
        position_ids (`torch.Tensor`, *optional*): positions of the tokens, where the model hands them on.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        pairs = (value for value in args[1:] if isinstance(value, tuple) and len(value) == 2)
        self.position_embeddings: PositionEmbeddings | None = kwargs.get("position_embeddings", next(pairs, None))
        self.position_ids: torch.Tensor | None = kwargs.get("position_ids")
        mask = kwargs.get("attention_mask")
        self.attention_mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None


class ForwardNotes(threading.local):
    """
    What the hooks of a model have noted of the forward pass that a thread is in: every thread has its own, as several
    may generate with one model. A copy has none.

    Attributes:
        is_from_start (`bool`): whether the hooks have seen the pass from its beginning.
        keeps_streams (`bool`): whether residual streams are kept in any pass, not in decode steps only.
        streams (`dict[int, torch.Tensor]`): by layer, the residual stream before the module that norms it.
        candidates (`dict[int, list]`): by layer, what may have normed: module and output.
        rotary (`dict[str, tuple]`): by layer type, position embeddings, in models whose types have their own.
    """

    def __init__(self) -> None:
        self.keeps_streams = self.is_from_start = False
        self.streams: dict[int, torch.Tensor] = {}
        self.candidates: dict[int, list[tuple[nn.Module, torch.Tensor]]] = {}
        self.rotary: dict[str, PositionEmbeddings] = {}

    def begin(self) -> None:
        """A pass begins; of one that failed nothing is left."""
        self.is_from_start = True
        for noted in (self.streams, self.candidates, self.rotary):
            noted.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return ForwardNotes, ()
