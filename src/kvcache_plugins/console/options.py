"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer


ModelOption = Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")]
PromptOption = Annotated[str | None, typer.Option(help="The prompt; comes after the text of --prompt-file.")]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="A text file to read the prompt from; - is standard input.")
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)]
ChatOption = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 (elsewhere) or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")]
SeedOption = Annotated[int, typer.Option(help="Random seed.")]
NumThreadsOption = Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)]
CachesOption = Annotated[list[str], typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")]
