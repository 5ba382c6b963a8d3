"""`torchrun --nproc-per-node 2 -m kvcache_plugins.kv_runahead`: all ranks prefill a prompt, the last continues it.

It also runs under `accelerate launch`, on CPUs with `--multi_gpu`, without which one process is started there. The
last rank prints the text, and on standard error the time to the first token, the partition and the bytes sent; the
others print nothing but errors.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from transformers import PreTrainedModel, StoppingCriteriaList, TextStreamer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.commands import user_errors
from kvcache_plugins.console.display import print_line
from kvcache_plugins.eval.harness import TokenTimer
from kvcache_plugins.registry import create_cache

from .planner import PartitionTable
from .prefill import runahead_generate
from .transport import FailureReports, RunaheadError


def parse_partition(text: str, model: PreTrainedModel, world_size: int) -> str | Sequence[float] | PartitionTable:
    """Parse `even`, `planned`, lengths or shares with commas between them, or a table's file; else a `ValueError`."""
    if text in ("even", "planned"):
        return text
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        return PartitionTable.load(text, model, world_size)
    # Shares sum to 1; a single slice is a length
    is_lengths = all(number.is_integer() for number in numbers) and sum(numbers) > 1
    return [int(number) for number in numbers] if is_lengths else numbers


def main(
    model: inputs.ModelOption = "smollm2",
    prompt_file: inputs.PromptFileOption = None,
    prompt: inputs.PromptOption = None,
    cache: Annotated[str, typer.Option(help="NAME or NAME:key=value,key=value, for the last rank.")] = "dynamic",
    max_new_tokens: inputs.MaxNewTokensOption = 64,
    partition: Annotated[
        str,
        typer.Option(help="even, planned, lengths or shares such as 0.6,0.4, or a file of `kvcache-plugins plan`."),
    ] = "planned",
    dtype: inputs.DtypeOption = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default a GPU for each rank, if there are.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a silent rank is given up.", min=1)] = 600,
) -> None:
    """Prefill a prompt with several processes, each on its slice of it, and continue it on the last one.

    \b
    Examples:
        torchrun --nproc-per-node 2 -m kvcache_plugins.kv_runahead --prompt-file book.txt --cache gear-2bit
        accelerate launch --num-processes 2 -m kvcache_plugins.kv_runahead --prompt-file book.txt --partition 0.6,0.4
    """
    with user_errors():
        if "RANK" not in os.environ:
            raise ValueError(
                "Start it with `torchrun --nproc-per-node N -m kvcache_plugins.kv_runahead ...`, or with `accelerate "
                "launch --num_processes N` (on CPUs also `--multi_gpu`)"
            )
        text = inputs.read_prompt(prompt, prompt_file)
        target = _choose_device(device)
        dist.init_process_group("nccl" if target.startswith("cuda") else "gloo", timeout=timedelta(seconds=timeout))
        try:
            loaded, tokenizer = inputs.load_for_evaluation(model, dtype, target)
            input_ids = inputs.encode_prompt(tokenizer, text)[None].to(loaded.device)
            streamer = None
            if _is_last():
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            _generate(loaded, input_ids, cache, partition, max_new_tokens, streamer)
        except RunaheadError as error:
            raise ValueError(str(error)) from error
        finally:
            dist.destroy_process_group()


def _choose_device(device: str | None) -> str:
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen != "cuda":
        return chosen
    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(own)
    return own


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: str,
    partition: str,
    max_new_tokens: int,
    streamer: TextStreamer | None,
) -> None:
    """Prefill and continue a prompt; the last rank streams the text, and prints a line about the prefill."""
    rank, size = dist.get_rank(), dist.get_world_size()
    slices = None if partition == "planned" else parse_partition(partition, model, size)
    filled = create_cache(cache, model) if _is_last() else None
    failures = FailureReports(rank, run=-1)
    # Ranks load at their own pace, which does not count as time to the first token
    failures.guarded(dist.barrier, "another rank", "before layer 0")
    timer = TokenTimer()
    _, output = runahead_generate(
        model,
        input_ids,
        past_key_values=filled,
        partition=slices,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([timer]),
    )
    sent = [0] * size
    own = int(output.stats.get("bytes_sent", 0))
    failures.guarded(lambda: dist.all_gather_object(sent, own), "another rank", "behind the last layer")
    if _is_last():
        lengths = " + ".join(map(str, output.partition))
        print_line(
            f"{cache}: first of the tokens after {input_ids.shape[1]} in {timer.prefill_seconds:.2f} s; "
            f"slices of {lengths} tokens; {sum(sent):,} bytes sent from rank to rank",
            stderr=True,
        )


if __name__ == "__main__":
    typer.run(main)
