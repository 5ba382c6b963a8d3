"""Everything that a transform-coded layer holds beside its options: what a file of a cache keeps of it."""

from dataclasses import dataclass

import torch

from kvcache_plugins.codecs.codec import Codec, QueryMoments
from kvcache_plugins.gear.storage import LayerState

from .storage import CodedBlock


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TransformLayerState(LayerState):
    """
    A `TransformLayer` between two updates.

    Attributes:
        codec (`Codec`, *optional*): how rows are read: once there are enough tokens for tables, or a fixed one.
        moments (`QueryMoments`, *optional*): of the queries so far, while an item has no table.
        waiting_items (`torch.Tensor` of shape `[batch_size]`, bool, *optional*): which items have none, while others
            have one.
    """

    blocks: list[CodedBlock]
    codec: Codec | None
    moments: QueryMoments | None
    waiting_items: torch.Tensor | None
