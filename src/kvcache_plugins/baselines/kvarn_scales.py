"""Variance normalization of KVarN: scales that equalize the standard deviations of a tile's tokens and channels.

Constants, the order of rounds and the selection of a round follow the authors' implementation
(vllm-project/vllm#46812), with the paper's 16 rounds.
"""

import torch


_NUM_ROUNDS = 16
_MIN_STD = 1e-3
_MAX_STD = 1e3
_MIN_LOG = -0.3
_MAX_LOG = 10.0
_TINY = 1e-8


def cross_scales(tiles: torch.Tensor, keep: torch.Tensor | None, *, of_tokens: bool) -> torch.Tensor:
    """
    Return the scales of one axis: tokens for keys, channels for values. Every round normalizes this axis and the
    other. The round after which the standard deviations are most alike is selected, or none.

    Args:
        tiles (`torch.Tensor` of shape `[..., G, D]`, float32): rotated states, zero for tokens that do not count.
        keep (`torch.Tensor` of shape `[..., G, 1]`, bool, *optional*): tokens that count; all by default.
        of_tokens (`bool`): return scales of tokens `[..., G, 1]` instead of channels `[..., 1, D]`.
    """
    number = None if keep is None else keep.sum(dim=-2, keepdim=True)

    def deviation(states: torch.Tensor, dim: int) -> torch.Tensor:
        if dim == -1 or keep is None or number is None:
            return states.std(dim=dim, keepdim=True)
        mean = states.sum(dim=-2, keepdim=True) / number.clamp(min=1)
        squares = torch.where(keep, states - mean, 0).square().sum(dim=-2, keepdim=True)
        return (squares / (number - 1).clamp(min=1)).sqrt()

    def imbalance(states: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | float = 0.0
        for dim in (-2, -1):
            most = least = deviation(states, dim)
            if dim == -1 and keep is not None:
                most = torch.where(keep, most, -torch.inf)
                least = torch.where(keep, least, torch.inf)
            total = total + most.amax(dim=(-2, -1)) / least.amin(dim=(-2, -1)).clamp(min=_TINY)
        assert isinstance(total, torch.Tensor)
        return total[..., None, None]

    dims = (-1, -2) if of_tokens else (-2, -1)
    balanced = tiles
    best = imbalance(tiles)
    logs = [torch.zeros_like(tiles.sum(dim=dim, keepdim=True)) for dim in dims]
    chosen = logs[0].exp()
    for _ in range(_NUM_ROUNDS):
        for axis, dim in enumerate(dims):
            step = deviation(balanced, dim).clamp(_MIN_STD, _MAX_STD).log()
            logs[axis] = (logs[axis] + step).clamp(_MIN_LOG, _MAX_LOG)
            balanced = tiles / logs[0].exp() / logs[1].exp()
        found = imbalance(balanced)
        is_better = found <= best
        chosen = torch.where(is_better, logs[0].exp(), chosen)
        best = torch.where(is_better, found, best)
    return chosen
