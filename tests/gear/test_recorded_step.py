"""What a recorded step asks of a GPU, under a stand-in for its driver: step after step, chunk after chunk, the same
operations on the same shapes, the same launches with the same arguments, and nothing that is read back. That is what a
CUDA graph needs, which replays one of them. Nor is anything compiled from the first of them on, within a step or
between two, where a chunk is compressed.

In a process of its own, as Triton decides when it is imported whether it interprets.
"""

import sys
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig


# What a step allocates, in a graph always in the same place
OWN = ("query", "output", "maximum", "total", "result")
WRITING = {"index_copy_", "add_", "copy_"}
READING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_cpu"}
# Arguments of a launcher before those of the kernel, of which the first three are the grid
NUM_BEFORE = 9
PRESETS_OF_CHUNKS = ("gear-2bit", "kivi-2bit", "gear-k4v3")
# By preset: decoded tokens, in which several chunks are compressed
NUM_TOKENS = {"gear": 110, "gear-t16": 30, "gear-c16": 30, **dict.fromkeys(PRESETS_OF_CHUNKS, 150)}


def describe(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return [describe(each) for each in value] if isinstance(value, list | tuple) else value


class Recorded(TorchDispatchMode):
    """Operations with the shapes of what they are given and, of what they write into, its address."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # Of what a step writes into of its own nothing is known
        place = args[0].data_ptr() if name in WRITING else None
        self.operations.append((name, describe(args), place))
        return func(*args, **(kwargs or {}))


def make_model():
    """One of two layers."""
    config = LlamaConfig(
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_size=256,
        head_dim=32,
        intermediate_size=64,
        vocab_size=32,
        eos_token_id=None,
        pad_token_id=0,
        num_hidden_layers=2,
    )
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().bfloat16()


def check(name, batch_size):
    from kvcache_plugins.eval import machine_code
    from kvcache_plugins.gear.captured_steps import RecordedStep
    from kvcache_plugins.gear.transform.calibration import calibrate_transform
    from kvcache_plugins.registry import create_cache
    from kvcache_plugins.triton_kernels.attention.attend_kernel import attend_kernel
    from kvcache_plugins.triton_kernels.attention.combine import combine_kernel
    from kvcache_plugins.triton_kernels.transform_coding.attend_kernel import attend_kernel as attend_rows_kernel

    model, num_tokens = make_model(), NUM_TOKENS[name]
    options = {}
    if name.startswith("gear-c"):
        # Rows of a layer are as long as it needs them, and kernels are compiled for each length
        options = {"calibration": calibrate_transform(model, [torch.arange(200) % 32], num_draws=1)}
    cache = create_cache(name, model, **options)
    attending = attend_rows_kernel if cache.layers[-1].packing.has_windows else attend_kernel
    kernels = {attending.fn.__name__: attending, "combine_kernel": combine_kernel}
    launches, recorded, num_compiled = [], [], []
    run_step = RecordedStep.__call__

    def run(self, *arguments):
        if self._name in kernels:
            names = [parameter.name for parameter in kernels[self._name].params]
            given = {
                argument: value.data_ptr() if isinstance(value, torch.Tensor) else value
                for argument, value in zip(names, arguments[NUM_BEFORE:], strict=True)
                if not (argument.endswith("_ptr") and argument.startswith(OWN)) or value is None
            }
            launches.append((self._name, arguments[:3], given))

    def recorded_call(self, *arguments):
        launches.clear()
        num_compiled.append(len(stand_in.compilations))
        with Recorded() as mode:
            outputs = run_step(self, *arguments)
        recorded.append((list(launches), mode.operations))
        return outputs

    ids = torch.ones(batch_size, 140, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, : 3 * (batch_size - 1)] = 0
    with (
        machine_code.stand_in_driver() as stand_in,
        patch.object(machine_code._Kernel, "run", run),
        patch.object(RecordedStep, "__call__", recorded_call),
        cache.captured_steps(model, num_tokens) as steps,
    ):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False)
    packing = cache.layers[0].packing
    num_chunks = 1 + (num_tokens - 2 - packing.residual_length) // (packing.residual_length - packing.num_kept)
    assert num_chunks >= 1 and steps.num_recorded == 1, (num_chunks, steps.num_recorded)
    assert steps.num_replayed == len(recorded) == num_tokens - 1 - num_chunks, (steps.num_replayed, len(recorded))
    # With the recording itself, before the first replay
    assert len(stand_in.compilations) == num_compiled[0], stand_in.compilations[num_compiled[0] :]
    # What is computed once for all steps is computed in the first one, which on a GPU is run before it is captured
    first_launches, first_operations = recorded[1]
    assert [name for name, _, _ in first_launches][-1] == "combine_kernel"
    # Of the block that decoded tokens join, and of the newest tokens
    assert any(given.get("length_ptr") for _, _, given in first_launches)
    ends = [given for name, _, given in first_launches if name == "combine_kernel"]
    assert len(ends) == 2 and all(given["num_tokens_0_ptr"] or given["num_tokens_1_ptr"] for given in ends)
    for number, (made, operations) in enumerate(recorded[1:]):
        assert made == first_launches, difference(made, first_launches, number)
        assert operations == first_operations, difference(operations, first_operations, number)
        assert not READING & {operation for operation, *_ in operations}
    sys.stdout.write(f"{name}: {len(recorded)} steps, {len(first_launches)} launches, {len(first_operations)} ops\n")


def difference(got, expected, number):
    """The first that differs."""
    pairs = zip(got, expected, strict=False)
    return number, len(got), len(expected), next((pair for pair in pairs if pair[0] != pair[1]), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        pytest.param(name, size, marks=[] if (name, size) == ("gear", 2) else pytest.mark.long)
        for name in NUM_TOKENS
        for size in (1, 2)
    ],
)
def test_every_step_is_the_first_one_again(name, batch_size, run_compiling):
    run_compiling(name, str(batch_size))


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(sys.argv[1], int(sys.argv[2]))
