"""Keys turned by the angles of their assumed positions, and back: see `rotary`."""

import torch

from .rotary import RotaryLayout
from .rows import is_coded_in_c
from .statistics import Angles


def turn(
    keys: torch.Tensor, layout: RotaryLayout, start: int, padding: torch.Tensor | None, *, is_back: bool
) -> torch.Tensor:
    """
    Keys of consecutive tokens with the rotary embedding, given those without, or the other way round.

    Args:
        keys (`torch.Tensor` of shape `[B, H, T, D]`): the keys.
        layout (`RotaryLayout`): of their rotary embedding.
        start (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
        is_back (`bool`): whether the embedding is undone.

    Returns:
        `torch.Tensor` of shape `[B, H, T, D]`, float32.
    """
    if not layout.frequencies:
        return keys.float()
    if is_coded_in_c(keys, layout.head_dim):
        # Imported late, as it imports modules beside this one
        from kvcache_plugins.kernels.coding import Turn, turn_states

        return turn_states(keys, Turn(layout, start, padding), is_back=is_back)
    angles = Angles.at(layout, start, keys.shape[2], padding, keys.device)
    return layout.rotate(keys.float(), angles.cosines, -angles.sines if is_back else angles.sines)
