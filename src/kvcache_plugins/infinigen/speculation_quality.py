"""How much attention mass speculated queries capture, and the linear map that brings them nearer to the true ones."""

import torch

from .hooks import Attachment
from .observation import Observation


# The share of tokens chosen
_SHARE = 0.1
_RIDGE = 1e-2


def low_rank_map(own: torch.Tensor, cross: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Factors of the ridge regression with these moments, cut to the directions in which what it predicts varies most.

    Args:
        own (`torch.Tensor` of shape `[hidden size, hidden size]`): of the regressors with themselves.
        cross (`torch.Tensor` of shape `[hidden size, hidden size]`): of the regressors with what is predicted.
        rank (`int`): columns of the first factor, rows of the second.
    """
    own, cross = own.double(), cross.double()
    ridge = _RIDGE * own.diagonal().mean() * torch.eye(own.shape[0], dtype=own.dtype, device=own.device)
    solution = torch.linalg.solve(own + ridge, cross)
    directions = torch.linalg.eigh(solution.T @ own @ solution).eigenvectors[:, -rank:]
    return (solution @ directions).float(), directions.T.float()


def captured_masses(
    attachment: Attachment,
    keys: torch.Tensor,
    observation: Observation,
    corrections: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, float]:
    """Attention mass that a tenth of the tokens captures, chosen by each of the guesses; see `LayerReport`."""
    projection = attachment.projections[observation.layer_idx]
    guesses = {"oracle": observation.true, "by_input": observation.before, "by_stream": observation.expected}
    guesses["corrected"] = observation.expected
    if observation.layer_idx in corrections:
        down, up = corrections[observation.layer_idx]
        guesses["corrected"] = observation.expected + ((observation.expected.float() @ down) @ up).to(keys.dtype)
    weights = {
        name: _weights(projection(guess, observation.embeddings), keys, projection.scaling)
        for name, guess in guesses.items()
    }
    count = max(int(_SHARE * keys.shape[2]), 1)
    true = weights["oracle"]
    return {
        name: float(true.gather(3, guess.topk(count, dim=3).indices).sum(dim=3).mean())
        for name, guess in weights.items()
    }


def _weights(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention weights of the newest tokens, averaged over each group of query heads, `[1, H, queries, tokens]`."""
    count, num_queries = keys.shape[2], query.shape[2]
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.float()[:, :, None].transpose(3, 4) * scaling
    positions = torch.arange(count, device=keys.device)
    later = positions > positions[count - num_queries :, None]
    return scores.masked_fill(later, -torch.inf).softmax(dim=4).mean(dim=2)
