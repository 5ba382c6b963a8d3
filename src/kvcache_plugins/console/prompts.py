"""The texts of a command, from its options or files: read before anything is loaded, then encoded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def read_text(path: Path, option: str) -> str:
    """
    The text of a file that an option names; `-` is standard input.

    Raises:
        ValueError: if it is not text in UTF-8, or there is none in it.
        OSError: if it cannot be read.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{option}`: {path} is no text in UTF-8 (byte {error.start}: {error.reason})") from error
    if not text.strip() and option != "prompt_file":
        raise ValueError(f"`{option}`: there is no text in {path}")
    return text


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of a file (`-` is standard input) and after it the prompt; at least one of them has to be given."""
    if prompt_file is None:
        if prompt is None:
            raise ValueError("Give a prompt with `--prompt`, `--prompt-file` or both")
        text = prompt
    else:
        text = read_text(prompt_file, "prompt_file")
        text = text if prompt is None else f"{text.rstrip()}\n\n{prompt}"
    if not text:
        raise ValueError("The prompt is empty: give at least one token")
    return text


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool = False) -> torch.Tensor:
    """Token ids of a prompt, `[num_tokens]`, as the user's turn of the chat template if `chat`."""
    if chat:
        if tokenizer.chat_template is None:
            raise ValueError("`chat` needs a tokenizer with a chat template, and this model's has none")
        turns = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    token_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).input_ids[0]
    if token_ids.numel() == 0:
        raise ValueError("The prompt is empty: give at least one token")
    return token_ids
