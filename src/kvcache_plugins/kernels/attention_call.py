"""`AttentionCall`: one attention as a model requests it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


Projection = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCall:
    """
    Attributes:
        query (`torch.Tensor` of shape `[batch_size, num_heads, num_queries, head_dim]`): queries; `num_heads` is a
            multiple of the key/value heads.
        mask (`torch.Tensor`, *optional*): as `scaled_dot_product_attention` takes it, over all positions that the
            layer reports.
        is_causal (`bool`): True if a causal mask aligned to the upper left applies instead.
        scale (`float`, *optional*, defaults to `1 / sqrt(head_dim)`): factor of the scores.
        softcap (`float`, *optional*): bound that scores are kept within by a hyperbolic tangent, before the mask.
        sinks (`torch.Tensor`, *optional*): scores of a token without a value, which broadcast to
            `[batch_size, num_heads, num_queries, 1]`.
        project (`Callable`, *optional*): makes the keys and values that are attended to of some tokens' stored
            `"keys"` and `"values"`, as in latent attention; the stored ones are attended to as they are without.
    """

    query: torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    project: Projection | None = None

    def full_mask(self, num_tokens: int) -> torch.Tensor | None:
        """Spell the mask out over `num_tokens` tokens, where it is the causal one."""
        if not self.is_causal:
            return self.mask
        shape = self.query.shape[2], num_tokens
        return torch.ones(shape, dtype=torch.bool, device=self.query.device).tril()[None, None]

    @property
    def is_plain(self) -> bool:
        """Tell whether kernels know all that it asks for, which are no softcaps and no sinks."""
        return self.softcap is None and self.sinks is None
