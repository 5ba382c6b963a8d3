"""The prompt of a command: from its options or a file, as text and as token ids."""

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of a file (`-` is standard input) and after it the prompt; at least one of them has to be given."""
    if prompt_file is None:
        if prompt is None:
            raise ValueError("Give a prompt with `--prompt`, `--prompt-file` or both")
        return prompt
    text = sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text(encoding="utf-8")
    return text if prompt is None else f"{text.rstrip()}\n\n{prompt}"


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
