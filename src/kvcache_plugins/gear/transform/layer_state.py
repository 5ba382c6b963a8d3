"""Everything that a transform-coded layer holds beside its options: what a file of a cache keeps of it."""

from dataclasses import dataclass

import torch

from kvcache_plugins.gear.storage import LayerState
from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder
from kvcache_plugins.ops.transform_coding.parts import RowCoder
from kvcache_plugins.ops.transform_coding.statistics import QueryMoments

from .storage import CodedBlock


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TransformLayerState(LayerState):
    """
    A `TransformLayer` between two updates.

    Attributes:
        coder (`RowCoder` or `BasisCoder`, *optional*): its tables, once there are enough tokens for them, or those of
            a calibration.
        moments (`QueryMoments`, *optional*): of the queries so far, while an item has no table.
        waiting_items (`torch.Tensor` of shape `[batch_size]`, bool, *optional*): which items have none, while others
            have one.
    """

    blocks: list[CodedBlock]
    coder: RowCoder | BasisCoder | None
    moments: QueryMoments | None
    waiting_items: torch.Tensor | None
