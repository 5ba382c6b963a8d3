"""A chat as token ids of its turns: what a model reads and what it replied, by turns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


# Messages of a chat, or token ids `[1, tokens]` that are read and replied by turns
Chat = Sequence[Mapping[str, Any]] | Sequence[torch.Tensor]


def split_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor]:
    """
    Return the token ids `[1, tokens]` of turns: those that are read come first, and then by turns. Tokens after the
    last reply are left out. Raise a `ValueError` if there is no reply.
    """
    turns = [turn for turn in chat if isinstance(turn, torch.Tensor)]
    messages = [message for message in chat if isinstance(message, Mapping)]
    if messages and len(messages) == len(chat):
        if tokenizer is None:
            raise ValueError("`tokenizer` is needed for a chat of messages, whose template it has")
        turns = _tokenize(messages, tokenizer)
    elif len(turns) != len(chat):
        turns = []
    turns = turns[: len(turns) // 2 * 2]
    is_of_ids = all(turn.dim() == 2 and not turn.is_floating_point() for turn in turns)
    if not turns or not is_of_ids or any(len(turn) != 1 or not turn.numel() for turn in turns):
        raise ValueError(
            "`input_ids` has to be a tensor of token ids of shape `[batch_size, prompt length]`, or a chat: messages "
            "with a reply of the assistant, or token ids of shape `[1, tokens]` that are read and replied by turns"
        )
    return turns


def _tokenize(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Return the turns of messages: those before each reply of the assistant, and the reply."""
    turns: list[torch.Tensor] = []
    whole = torch.empty(1, 0, dtype=torch.int64, device="cpu")
    for index, message in enumerate(messages):
        if not {"role", "content"} <= message.keys():
            raise ValueError(f"`input_ids`: a message of a chat needs `role` and `content` but has {sorted(message)}")
        if message["role"] != "assistant":
            continue
        for stop, is_open in ((index, True), (index + 1, False)):
            text = tokenizer.apply_chat_template(
                [dict(each) for each in messages[:stop]], tokenize=False, add_generation_prompt=is_open
            )
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            length = whole.shape[1]
            if not torch.equal(ids[:, :length], whole):
                raise ValueError(
                    "`tokenizer` has a template that changes earlier messages of a chat: give the token ids of turns"
                )
            turns.append(ids[:, length:])
            whole = ids
    return turns
