"""Programs of the ranks of the tests of KV-Runahead: each runs in processes of its own, by `run_ranks`.

A module with a name of its own, not a test file: the processes import it.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kvcache_plugins import create_cache
from kvcache_plugins.kv_runahead import prefill
from kvcache_plugins.kv_runahead.prefill import runahead_generate, runahead_prefill
from kvcache_plugins.kv_runahead.transport import Neighbours


NO_ANSWER = "killed"
# Seconds: however busy the machine is, only a rank that hangs takes as long
_HANGS = 600


def run_ranks(program: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """
    Runs `program(rank, *args)` in processes joined by gloo.

    Returns what each returned, the exception that it raised, or `NO_ANSWER` for one that ended without a word. None of
    the processes is left.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, in a process that has never computed anything, and shared from there
    context.set_forkserver_preload(["transformers.models.llama", "kvcache_plugins.kv_runahead.prefill"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_run, args=(program, rank, num_ranks, folder, pipes[rank][1], args), daemon=True)
            for rank in range(num_ranks)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        answers = [_answer(receiver) for receiver, _ in pipes]
        for process in processes:
            process.join(timeout=_HANGS)
        left = [process for process in processes if process.is_alive()]
        for process in left:
            process.kill()
        assert not left, "processes were left"
    return answers


def _answer(receiver: Any) -> Any:
    if not receiver.poll(_HANGS):
        return TimeoutError("no answer in time")
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return NO_ANSWER


def _run(program: Callable[..., Any], rank: int, size: int, folder: str, sender: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=100)
    )
    try:
        answer = program(rank, *args)
    except Exception as error:
        answer = error
    # Tensors by value: `send` would share their memory, which is gone if this process ends before they are read
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    dist.destroy_process_group()


def _load(folder: str | Path, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()


def make_prompt(batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, and a mask that leaves the first item whole and pads the others by a fifth more each."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, 128, (batch_size, length), generator=generator)
    mask = torch.ones_like(input_ids)
    for item in range(batch_size):
        mask[item, : item * length // 5 * 2] = 0
    return input_ids, mask


GREEDY = {"do_sample": False, "pad_token_id": 0}


def compare_with_one_process(
    rank: int, folder: str, implementation: str, sizes: list[int], batch_sizes: list[int], caches: list[str], new: int
) -> list[tuple[str, float, bool, bool]]:
    """
    Return on the last rank, for every number of ranks, batch and cache: the largest difference of the last token's
    logits from those of one process, and if the tokens that follow a prefill, and a generation, equal those of one.
    """
    model = _load(folder, implementation)
    results = []
    world = dist.get_world_size()
    for size in sizes:
        # The last ranks of the world, so that group and world count differently
        group = dist.new_group(list(range(world - size, world))) if size < world else None
        if rank < world - size:
            continue
        is_last = rank == world - 1
        for batch_size, name in itertools.product(batch_sizes, caches):
            input_ids, mask = make_prompt(batch_size, 130)
            given_mask = mask if batch_size > 1 else None
            # Eager attention shows no padding to a cache in one process
            is_shown = name == "dynamic" or implementation == "sdpa"
            make = partial(create_cache, name, model, **({} if is_shown else {"attention_mask": given_mask}))
            own, greedy = make() if is_last else None, {**GREEDY, "max_new_tokens": new}
            partition = [0.5, *[0.5 / (size - 1)] * (size - 1)]
            output = runahead_prefill(model, input_ids, given_mask, own, partition, group)
            own = make() if is_last else None
            generated, _ = runahead_generate(model, input_ids, mask, own, "even", group, **greedy)
            if not is_last:
                assert output.past_key_values is None and output.logits is None and generated is None
                continue
            given = {"attention_mask": given_mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
            with torch.no_grad():
                expected = model(input_ids, past_key_values=make(), **given).logits[:, -1]
            alone = model.generate(input_ids, attention_mask=mask, past_key_values=make(), **greedy)
            prompt = torch.cat([input_ids, output.logits.argmax(dim=-1)], dim=1)
            greedy |= {"attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)}
            greedy |= {"past_key_values": output.past_key_values, "max_new_tokens": new - 1}
            continued = model.generate(prompt, **greedy)
            difference = float((output.logits[:, 0] - expected).abs().max())
            label = f"{implementation}, {size} ranks, batch {batch_size}, {name}"
            results.append((label, difference, torch.equal(continued, alone), torch.equal(generated, alone)))
    return results


def prefill_each(rank: int, folder: str, calls: list[dict[str, Any]]) -> list[Any]:
    """Partition, statistics and logits of one prefill after the other, or the error that it raised."""
    model = _load(folder, "sdpa")
    answers: list[Any] = []
    for call in calls:
        options = {"length": 130, "batch_size": 1, **call}
        input_ids, mask = make_prompt(options.pop("batch_size"), options.pop("length"))
        try:
            output = runahead_prefill(model, input_ids, mask if len(mask) > 1 else None, **options)
        except ValueError as error:
            answers.append(error)
        else:
            answers.append((output.partition, output.stats, output.logits))
    return answers


def generate_with_beams(rank: int, folder: str) -> bool | None:
    """Return True if beam search, and sampling from a seed, equal those of one process."""
    model = _load(folder, "sdpa")
    input_ids, mask = make_prompt(2, 130)
    verdict = True
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}):
        options = {**options, "max_new_tokens": 12, "pad_token_id": 0}
        torch.manual_seed(0)
        generated, _ = runahead_generate(model, input_ids, mask, partition="even", **options)
        if rank == dist.get_world_size() - 1:
            torch.manual_seed(0)
            alone = model.generate(input_ids, attention_mask=mask, **options)
            verdict = verdict and torch.equal(generated, alone)
    return verdict


# Changes of the last rank
def _without_memory(*args: Any) -> None:
    raise MemoryError("no memory left")


DIFFERENCES: dict[str, Callable[[Any, torch.Tensor, dict[str, Any]], object]] = {
    "dtype": lambda model, ids, options: model.to(torch.bfloat16),
    "model": lambda model, ids, options: model.get_input_embeddings().weight.add_(1),
    "prompt": lambda model, ids, options: ids[0, 5].add_(1),
    "partition": lambda model, ids, options: options.update(partition="even"),
    "h2o": lambda model, ids, options: options.update(past_key_values=create_cache("h2o", model)),
    "filled": lambda model, ids, options: options.update(past_key_values=model(ids[:, :3]).past_key_values),
    "memory": lambda model, ids, options: model.register_forward_pre_hook(_without_memory),
}


def differ(rank: int, folder: str, ways: list[str]) -> list[str]:
    """The last rank is called with something else than the others, one thing after the other: the errors."""
    messages = []
    for way in ways:
        model = _load(folder, "sdpa")
        input_ids, _ = make_prompt(1, 130)
        options: dict[str, Any] = {}
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                DIFFERENCES[way](model, input_ids, options)
        try:
            runahead_prefill(model, input_ids, **options)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


# Failures of a rank in the order of a prefill, and the moment that errors of others name
MOMENTS = {
    "killed before it is called": "before layer 0",
    "killed while the ranks agree": "before layer 0",
    "killed before it sends layer 0": "in layer",
    "killed while layer 1 is computed": "in layer",
    "killed while it sends layer 3": "in layer",
    "killed before it sends the last layer": "in layer",
    "hangs while layer 1 is computed": "in layer",
    "raises while layer 1 is computed": "in layer",
}


def fail_at(rank: int, folder: str, failing: int, moment: str, warm: bool) -> Any:
    """One rank is killed, hangs or raises; the others say what they see, and what their cache holds."""
    model = _load(folder, "sdpa")
    input_ids, _ = make_prompt(1, 130)
    group = dist.new_group(timeout=timedelta(seconds=5)) if moment.startswith("hangs") else None
    cache = create_cache("gear-4bit", model)
    if warm:
        # Ranks that have met find a closed connection, others none
        runahead_prefill(model, input_ids, partition="even", group=group)
    if rank == failing:
        _fail_at(moment, model)
    try:
        runahead_prefill(model, input_ids, past_key_values=cache, partition="even", group=group)
    except Exception as error:
        held = cache.get_seq_length() + sum(tensor.numel() for _, tensor in cache.layers[0].named_tensors())
        dist.distributed_c10d._get_default_store().set(f"answered {rank}", "")
        return type(error).__name__, str(error), held
    return None


def _fail_at(moment: str, model: Any) -> None:
    how, _, when = moment.partition(" ")

    def fail(*args: Any, **kwargs: Any) -> Any:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hangs":
            # Until all others have given it up
            store = dist.distributed_c10d._get_default_store()
            store.wait([f"answered {rank}" for rank in range(1, 3)], timedelta(seconds=_HANGS))
        else:
            raise RuntimeError("no memory left")

    if when == "before it is called":
        fail()
    elif when == "while the ranks agree":
        # Sizes are gathered before messages: these are the second of two collectives
        gather, calls = dist.distributed_c10d.all_gather, []

        def gather_once(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return fail() if len(calls) == 2 else gather(*args, **kwargs)

        dist.distributed_c10d.all_gather = gather_once
    elif when == "while layer 1 is computed":
        agree = prefill.agree

        def agree_and_listen(*args: Any) -> None:
            agree(*args)
            model.model.layers[1].mlp.register_forward_hook(fail)

        prefill.agree = agree_and_listen
    else:
        layer = {"before it sends layer 0": 0, "while it sends layer 3": 3}.get(when, len(model.model.layers) - 1)
        send = Neighbours.send

        def send_or_fail(self: Neighbours, layer_idx: int, tensor: torch.Tensor) -> None:
            if layer_idx == layer and "while" not in when:
                fail()
            send(self, layer_idx, tensor)
            if layer_idx == layer:
                fail()

        Neighbours.send = send_or_fail  # type: ignore[method-assign]
