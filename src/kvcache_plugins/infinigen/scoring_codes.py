"""Keys for scoring, all columns in a few bits.

Channels are first brought to mean 0 and spread 1 (statistics of the first tokens, per head), then every token gets
codes around zero and one scale. The mean adds the same to every score of a query and drops out of the softmax; the
spread goes into the query. So a key needs no zero point, and its row can be written anew when another token takes its
slot.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

import torch

from kvcache_plugins.codecs.quantization import pack
from kvcache_plugins.kernels.tokens import code_scores

from .scoring import ScoringStates


# Tokens from which a channel's mean and spread are told
NUM_FITTED = 512
_TINY = 1e-6
# A Gaussian in four levels is told best with steps of about its spread
_TWO_BIT_STEP = 1.0


class ScoringCodes(ScoringStates):
    """
    Keys in 2, 4 or 8 bits a number and one float16 scale a token.

    Args:
        nbits (`int`): bits a code.
    """

    def __init__(self, nbits: int):
        super().__init__()
        self.nbits = nbits
        # The fewest real tokens of an item that the statistics are of
        self.num_fitted = 0
        self.mean: torch.Tensor | None = None
        self.spread: torch.Tensor | None = None

    def fit(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        """
        Takes mean and spread of every channel from the first tokens of each item.

        Args:
            keys (`torch.Tensor` of shape `[B, H, tokens, D]`): the first keys.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which of them are no padding.
        """
        keys = keys.float()
        if valid is None:
            keys = keys[:, :, :NUM_FITTED]
            weight = keys.new_ones(keys.shape[0], 1, keys.shape[2], 1)
        else:
            weight = (valid & (valid.cumsum(dim=1) <= NUM_FITTED))[:, None, :, None].float()
        is_known = weight.sum(dim=2, keepdim=True) > 0
        count = weight.sum(dim=2, keepdim=True).clamp(min=1)
        mean = (keys * weight).sum(dim=2, keepdim=True) / count
        spread = ((keys - mean).square() * weight).sum(dim=2, keepdim=True).div(count).sqrt()
        # Of a channel that does not move nothing is known: its size stands in
        spread = torch.maximum(spread, mean.abs() * 0.01 + _TINY)
        # Nor of an item that is all padding so far: its keys are taken as they come, as next to nothing they would
        # overflow
        self.mean, self.spread = mean, torch.where(is_known, spread, 1.0)

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.mean is not None and self.spread is not None
        normal = (keys.float() - self.mean) / self.spread
        top = 2 ** (self.nbits - 1) - 0.5
        if self.nbits == 2:
            scale = normal.square().mean(dim=3, keepdim=True).sqrt() * _TWO_BIT_STEP
        else:
            scale = normal.abs().amax(dim=3, keepdim=True) / top
        scale = scale.clamp(min=_TINY).half()
        codes = (normal / scale.float()).floor().clamp(-(top + 0.5), top - 0.5) + (top + 0.5)
        return {"codes": pack(codes.to(torch.uint8), self.nbits), "scale": scale[..., 0]}

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        assert self.spread is not None
        return code_scores(query * self.spread, self._rows["codes"], self._rows["scale"], self.length, self.nbits)

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        fitted = {"mean": self.mean, "spread": self.spread}
        return {name: tensor for name, tensor in fitted.items() if tensor is not None}
