"""Keys turned by the angles of their assumed positions, and back: see `rotary`."""

import torch

from kvcache_plugins.ops.dispatch import choose_coding_kernel

from .rotary import RotaryLayout
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
    if choose_coding_kernel(keys) == "compiled":
        # Imported late, as it needs a package that may not be there
        from kvcache_plugins.ops.compiled import turn_states

        turned = keys.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        turn_states(turned, layout, start, padding, is_back=is_back)
        return turned
    angles = Angles.at(layout, start, keys.shape[2], padding, keys.device)
    return layout.rotate(keys.float(), angles.cosines, -angles.sines if is_back else angles.sines)
