"""Windows of a text: disjoint, of one length, spread evenly from its beginning to its end."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[torch.Tensor, list[int]]:
    """Token ids of a whole text without special tokens, and the special tokens that every text begins with."""
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(token_ids, dtype=torch.long), _start_ids(tokenizer)


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Tokenizers add a beginning (and some an end) of text even around nothing; only the beginning belongs before text.
    return [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]


def spread_windows(
    token_ids: torch.Tensor, num_windows: int, prefix_length: int, num_scored: int, start_ids: Sequence[int] = ()
) -> list[torch.Tensor]:
    """
    Cuts disjoint windows, spread evenly over a text.

    Args:
        token_ids (`torch.Tensor`): The text, `[num_tokens]`, without special tokens.
        num_windows (`int`): How many windows.
        prefix_length (`int`): Tokens that fill the cache, `start_ids` among them.
        num_scored (`int`): Tokens scored through the filled cache.
        start_ids (`Sequence[int]`, *optional*): Special tokens that every window begins with.

    Returns:
        `list[torch.Tensor]`: Windows of `prefix_length + num_scored + 1` tokens. Too short a text is a `ValueError`.
    """
    for name, value, minimum in (
        ("num_windows", num_windows, 1),
        ("prefix_length", prefix_length, len(start_ids) + 1),
        ("num_scored", num_scored, 1),
    ):
        if value < minimum:
            raise ValueError(f"`{name}` must be at least {minimum}, but got {value}")
    length = prefix_length + num_scored + 1 - len(start_ids)
    if token_ids.numel() < num_windows * length:
        raise ValueError(
            f"{num_windows} windows of {length} tokens need a text of {num_windows * length} tokens, but it has "
            f"{token_ids.numel()}: ask for fewer or shorter windows."
        )
    stride = token_ids.numel() // num_windows
    start = torch.tensor(list(start_ids), dtype=token_ids.dtype)
    return [torch.cat([start, token_ids[i * stride : i * stride + length]]) for i in range(num_windows)]


def stretch_stops(stretch: int, num_scored: int) -> list[int]:
    """Where the stretches of `perplexity` end, in scored tokens."""
    return [min(start + stretch, num_scored) for start in range(0, num_scored, stretch)]
