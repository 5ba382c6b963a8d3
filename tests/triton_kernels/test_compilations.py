"""Compilations for prompts of many lengths and the steps after them, counted by a stand-in driver.

In a process of its own, because Triton decides when it is imported whether it interprets. Running this file
(`python tests/triton_kernels/test_compilations.py gear-2bit`) prints the counts.
"""

import json
import random
import sys
from collections import Counter

import pytest
import torch


NUM_PROMPTS, NUM_STEPS = 25, 100
HEAD_DIM, NUM_HEADS, NUM_QUERY_HEADS = 128, 2, 8
# At most so many kernels of each name. Sinks are hidden by a mask where the first chunk holds them too
_GROUPS = {"attend_kernel": 1, "combine_kernel": 1}
MOST = {
    "kivi-2bit": _GROUPS,
    "gear-k4v3": _GROUPS | {"attend_kernel": 2, "finish_kernel": 1},
    "gear-2bit": _GROUPS,
    "gear-4bit": _GROUPS,
    # One each for keys and values, and for both in recent rows, which are longer
    "transform": {"step_kernel": 2, "code_rows_kernel": 4},
}
# A layer of rows compiles attention over them when it first attends to them, which is the first decode step
# and recent rows when there are some
AT_FIRST_STEP = {"transform": ["step_kernel", "code_rows_kernel", "code_rows_kernel", "step_kernel"]}


def count(name, num_prompts, num_steps, mode=""):
    """
    Compilations by kernel, after prompts of many lengths and after the steps that follow the first. The mode is
    `"padded"`, `"warm"` for a cache that is warmed up before its first prompt, or neither.
    """
    from stand_in import make_model, stand_in_driver

    from kvcache_plugins.registry import create_cache

    lengths = [random.Random(number).randint(70, 400) for number in range(num_prompts)]
    is_padded = mode == "padded"
    batch_size = 2 if is_padded else 1
    model = make_model(HEAD_DIM, 1, torch.bfloat16, NUM_QUERY_HEADS) if mode == "warm" else None

    def update(cache, num_new, length):
        states = torch.zeros(batch_size, NUM_HEADS, num_new, HEAD_DIM, dtype=torch.bfloat16)
        query = states.new_zeros(batch_size, NUM_QUERY_HEADS, num_new, HEAD_DIM)
        keys, values = cache.update(states, states, 0)
        mask = None
        if is_padded:
            mask = torch.ones(batch_size, 1, num_new, length, dtype=torch.bool).tril(length - num_new)
            mask[0, :, :, :3] = False
        torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None and num_new > 1, enable_gqa=True
        )

    def generate(length, num_steps):
        cache = create_cache(name, model)
        update(cache, length, length)
        for step in range(num_steps):
            update(cache, 1, length + step + 1)

    with stand_in_driver() as stand_in, torch.inference_mode():
        if model is None:
            generate(lengths[0], 0)
        else:
            create_cache(name, model).warm_up(model)
        first = len(stand_in.compilations)
        for length in lengths:
            generate(length, 1)
        generate(lengths[0], num_steps)
    return {
        "kernels": dict(Counter(kernel for kernel, _ in stand_in.compilations)),
        "later": [(kernel, {name: str(key[name]) for name in key}) for kernel, key in stand_in.compilations[first:]],
        "launches": stand_in.launches,
    }


# Names and modes; those in a list share a process
CASES = [
    [("gear-k4v3", ""), ("transform", "warm")],
    # Cases that padded ones, or others, cover too
    pytest.param(
        [("kivi-2bit", "padded"), ("gear-2bit", "padded"), *((name, "") for name in MOST if name != "gear-k4v3")],
        marks=pytest.mark.long,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES, ids=["daily", "others"])
def test_lengths_cause_no_compilations(cases, run_compiling):
    counts = run_compiling(*(f"{name}:{mode}" for name, mode in cases)).splitlines()
    for (name, mode), counted in zip(cases, map(json.loads, counts), strict=True):
        attention = "step_kernel" if name == "transform" else "attend_kernel"
        assert counted["launches"][attention] >= NUM_PROMPTS + NUM_STEPS
        assert counted["kernels"].keys() == MOST[name].keys()
        most = MOST[name]
        assert [kernel for kernel, _ in counted["later"]] == ([] if mode == "warm" else AT_FIRST_STEP.get(name, []))
        assert all(number <= most[kernel] for kernel, number in counted["kernels"].items()), counted["kernels"]


if __name__ == "__main__":
    # One thread: the steps are many and small
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        name, _, mode = case.partition(":")
        sys.stdout.write(json.dumps(count(name, NUM_PROMPTS, NUM_STEPS, mode)) + "\n")
