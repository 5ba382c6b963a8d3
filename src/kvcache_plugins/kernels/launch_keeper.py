"""Launches of Triton's kernels that are kept from step to step, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from .engine import load_triton


class LaunchKeeper:
    """Kept launches by kind, each made at its first use. A copy keeps none."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Callable[..., None]] = {}

    def __deepcopy__(self, memo: object) -> LaunchKeeper:
        return LaunchKeeper()

    def __reduce__(self) -> tuple[type[LaunchKeeper], tuple[()]]:
        return LaunchKeeper, ()

    def run(self, kind: Hashable, prepare: Callable[[], object], **changed: torch.Tensor | int) -> None:
        """
        Launch with changed arguments, tensors and numbers by name: the same names for every launch of a kind. The
        first launch of a kind is prepared, and gives all other arguments.
        """
        kept = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = load_triton().KeptLaunch(prepare(), list(changed))
        kept(*changed.values())

    def drop(self, kind: Hashable) -> None:
        """Drop the launch of a kind, whose other arguments have changed."""
        self._kept.pop(kind, None)
