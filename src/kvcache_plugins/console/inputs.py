"""Options that several commands share, and the texts and models that they name."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


LoadedModel: TypeAlias = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
ModelOption = Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")]
PromptOption = Annotated[str | None, typer.Option(help="The prompt; comes after the text of --prompt-file.")]
PromptFileOption = Annotated[Path | None, typer.Option(help="A file to read the prompt from; - is standard input.")]
MaxNewTokensOption = Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)]
ChatOption = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 (elsewhere) or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")]
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)]
NumThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; PyTorch's default if not given.", min=1)]
CachesOption = Annotated[list[str], typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")]


def read_text(path: Path, option: str) -> str:
    """Read the text of a file, or of standard input for `-`. A `ValueError` names the option if there is no text."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{option}`: {path} is no text in UTF-8 (byte {error.start}: {error.reason})") from error
    except OSError as error:
        raise ValueError(f"`{option}`: {path} cannot be read ({error.strerror})") from error
    if not text.strip() and option != "prompt_file":
        raise ValueError(f"`{option}`: there is no text in {path}")
    return text


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """
    Return the text of a file (`-` is standard input) followed by the prompt. At least one of them has to be given.
    """
    if prompt is None and prompt_file is None:
        raise ValueError("Give a prompt with `--prompt`, `--prompt-file` or both")
    text = prompt or ""
    if prompt_file is not None:
        text = read_text(prompt_file, "prompt_file")
        text = text if prompt is None else f"{text.rstrip()}\n\n{prompt}"
    if not text:
        raise ValueError("The prompt is empty: give at least one token")
    return text


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str, chat: bool = False) -> "torch.Tensor":
    """Encode a prompt as token ids `[num_tokens]`; with `chat` it is the user's turn in the chat template."""
    if chat:
        if tokenizer.chat_template is None:
            raise ValueError("`chat` needs a tokenizer with a chat template, and this model's has none")
        turns = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    token_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).input_ids[0]
    if token_ids.numel() == 0:
        raise ValueError("The prompt is empty: give at least one token")
    return token_ids


def load_for_evaluation(name: str | LoadedModel, dtype: str | None = None, device: str | None = None) -> LoadedModel:
    """Load a model, unless it is loaded: by default on a GPU in bfloat16, or without a GPU in float32."""
    if not isinstance(name, str):
        return name
    from kvcache_plugins.models.packaged_models import check_model_name
    from kvcache_plugins.models.reference_model import load_model

    chosen_dtype, place = prepare_loading(dtype, device)
    check_model_name(name)
    return load_model(name, dtype=chosen_dtype, device=place)


def prepare_loading(dtype: str | None, device: str | None) -> "tuple[torch.dtype, torch.device]":
    """Parse dtype and device, or choose them; disable progress bars if there is no terminal."""
    from transformers.utils import logging

    from kvcache_plugins.models.reference_model import parse_dtype

    place = parse_device(device or default_device())
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return parse_dtype(dtype or ("float32" if place.type == "cpu" else "bfloat16")), place


def default_device() -> str:
    """Return `cuda` if torch finds a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_device(text: str) -> "torch.device":
    """Parse a device; raise a `ValueError` if torch does not know or find it."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ValueError(
            f"`device` must be one that torch knows, such as `cpu` or `cuda:0`, but got `{text}`"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` is `{text}`, but torch finds no CUDA device")
    if device.type == "meta":
        raise ValueError("`device` is `meta`, but tensors there have no data")
    return device
