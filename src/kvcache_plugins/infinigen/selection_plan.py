"""Plans of a layer's decode steps: selection and attention, prepared once for many."""

from __future__ import annotations

import torch

from kvcache_plugins.kernels.kept_selection import KeptSelection
from kvcache_plugins.kernels.prepared_selection import PreparedSelection
from kvcache_plugins.layers.exact_tokens import ExactTail
from kvcache_plugins.layers.step_plan import DroppedOnCopy
from kvcache_plugins.layers.torch_contexts import in_caller_context

from .config import InfiniGenConfig
from .selection import limits_of


class SelectionPlan(DroppedOnCopy):
    """
    Decode steps in C over a pool in order, which does not change, and a tail, which may grow.

    Args:
        steps (`PreparedSelection`): steps over the tokens of the pool.
        config (`InfiniGenConfig`): options, with the rule `min_weight`.
        num_slots (`int`): slots of the pool in use.
        version (`int`): see below.

    Attributes:
        version (`int`): of the pool that the plan was made for. A plan of another version must not be run.
        num_selected (`int`): tokens that the last step selected, over all heads.
    """

    __slots__ = ("_config", "_num_slots", "_steps", "num_selected", "version")

    def __init__(self, steps: PreparedSelection, config: InfiniGenConfig, num_slots: int, version: int):
        self._steps = steps
        self._config = config
        self._num_slots = num_slots
        self.version = version
        self.num_selected = 0

    def push_into(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Store a token `[B, H, 1, D or E]`, which `attend` writes. Return False if it has to be appended."""
        if tail.unwritten is not None or tail.length == tail.capacity or not tail.fits(keys, values):
            return False
        if not (keys.is_contiguous() and values.is_contiguous()):
            return False
        tail.unwritten = keys, values
        tail.length += 1
        return True

    def attend(self, query: torch.Tensor, scale: float | None, tail: ExactTail) -> torch.Tensor | None:
        """Attend with queries `[B, H * G, 1, D]` of the newest token; `None` if the plan is not for such queries."""
        limits = limits_of(self._config, self._num_slots + tail.length, self._num_slots)
        output = self._steps.attend(query, scale, tail, limits)
        if output is not None:
            self.num_selected = self._steps.num_selected
        return output


class DeviceSelectionPlan(DroppedOnCopy, KeptSelection):
    """Decode steps by Triton's kernels, over any pool in order and any tail."""

    def push_into(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Store a token `[B, H, 1, D or E]` in a tail below its limit. Return False if it has to be appended."""
        # The launch is for as many sequences as there were when it was prepared
        if in_caller_context() or len(keys) != self.batch_size or not tail.fits(keys, values):
            return False
        if tail.length == tail.capacity:
            # Once, where many small steps would be more launches
            tail.reserve(tail.limit)
        with self.on_device():
            self.push(keys, values, tail.storage, tail.length)
        tail.length += 1
        return True
