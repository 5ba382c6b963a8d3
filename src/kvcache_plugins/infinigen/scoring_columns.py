"""Keys for scoring as in the paper's partial key cache: some columns of the (skewed) keys, in full precision.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

import torch

from .scoring import ScoringStates


class ScoringColumns(ScoringStates):
    """
    Some columns of the keys, turned before where skewing is asked for, in the keys' own dtype.

    Args:
        keys (`torch.Tensor` of shape `[B, H, tokens, D]`):
            The first keys.
        queries (`torch.Tensor` of shape `[B, H * G, prompt length, D]`, *optional*):
            Queries of the prompt. Without them the columns are those in which keys are large, and nothing is turned.
        valid (`torch.Tensor` of shape `[B, prompt length]`, *optional*):
            Which tokens of the prompt are no padding.
        partial_ratio (`float`):
            Share of the columns that is kept.
        skewing (`str`):
            `"none"`, or `"query-svd"`: columns of the right singular vectors of a group's queries.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor | None,
        valid: torch.Tensor | None,
        partial_ratio: float,
        skewing: str,
    ):
        super().__init__()
        batch_size, num_heads, count, head_dim = keys.shape
        identity = torch.eye(head_dim, device=keys.device).expand(batch_size, num_heads, head_dim, head_dim)
        keys_used = keys.float() if valid is None else keys.float() * valid[:, None, :count, None]
        turn, query_sums = identity, torch.zeros_like(keys_used[:, :, 0])
        if queries is not None:
            grouped = queries.float().unflatten(1, (num_heads, -1))
            if valid is not None:
                grouped = grouped * valid[:, None, None, :, None]
            groups = grouped.shape[2]
            grouped = grouped.flatten(2, 3)
            if skewing == "query-svd":
                # Eigenvectors of what queries have with themselves are their right singular vectors
                turn = torch.linalg.eigh(grouped.transpose(2, 3) @ grouped).eigenvectors
            query_sums = (grouped @ turn).abs().sum(dim=2) / groups
        sums = query_sums + (keys_used @ turn).abs().sum(dim=2)
        columns = sums.topk(max(1, round(partial_ratio * head_dim)), dim=2).indices
        # `[B, H, D, columns]`: what turns keys and picks columns at once
        self.turn = turn.gather(3, columns[:, :, None].expand(-1, -1, head_dim, -1)).to(keys.dtype)

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"columns": keys @ self.turn}

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        columns = self._rows["columns"][:, :, : self.length]
        return (query @ self.turn.to(query.dtype)) @ columns.to(query.dtype).transpose(2, 3)

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        return {"turn": self.turn}
