"""Counts of Python functions that a model calls per layer: in a decode step, and where a prompt is coded."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import kvcache_plugins
from kvcache_plugins import TransformCodingCache
from kvcache_plugins.models.cache_argument import as_argument


ROOT = Path(kvcache_plugins.__file__).parent
# Functions and files, at most
STEP, PLAIN_STEP, CODING = (6, 4), (3, 3), (48, 16)
# Lines of the functions that `docs/design.md` lists, and files, at most
READING = (350, 5)
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
# Lines of a function that a reader need not look up, and functions of phases and windows
TRIVIAL = 5
OF_PHASES = {"_enter_dense", "_leave_dense", "_dense_ends", "_evict_out_of_window", "set_prefix"}
COMMIT = "RowLayer._commit"


def functions_of_a_layer(run, *, is_coding, layer_idx=1):
    """
    Files and names of the functions that are called from the update of a layer to that of the next one, or of these
    what codes the tokens.
    """
    calls, is_inside = [], not is_coding

    def note(frame, event, _):
        nonlocal is_inside
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event in ("call", "return") and is_coding and name == COMMIT:
            is_inside = event == "call"
        if event == "call" and path.is_relative_to(ROOT) and (is_inside or name == "UsageChecksMixin.update"):
            calls.append((str(path.relative_to(ROOT)), name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    starts = [
        index for index, call in enumerate(calls) if call == ("layers/usage_checks.py", "UsageChecksMixin.update")
    ]
    return calls[starts[layer_idx] + is_coding : starts[layer_idx + 1]]


# A step between two codings, one while nothing is compressed, and a prompt that is coded: tokens and steps behind them
@pytest.mark.parametrize(
    ("mode", "prompt", "num_steps", "most"),
    [
        (torch.no_grad, 200, 4, STEP),
        (torch.inference_mode, 200, 4, STEP),
        (torch.no_grad, 8, 4, PLAIN_STEP),
        (torch.no_grad, 200, 0, CODING),
    ],
)
def test_a_decode_step_calls_few_functions(mode, prompt, num_steps, most, tiny_model, capsys):
    """Counts the last of some steps behind a prompt, or with none the prompt."""
    llama, cache, token_ids = (
        tiny_model("llama", num_hidden_layers=3),
        TransformCodingCache(),
        torch.arange(prompt)[None] % 64,
    )
    inputs = [token_ids, *(token_ids[:, :1] for _ in range(num_steps))]
    with mode():
        for each in inputs[:-1]:
            llama(each, **as_argument(cache))
        calls = functions_of_a_layer(lambda: llama(inputs[-1], **as_argument(cache)), is_coding=not num_steps)
    counts, files = Counter(calls), {path for path, _ in calls}
    lines = [f"{len(counts)} functions in {len(files)} files, {len(calls)} calls"]
    lines += [f"{times:3d} {path} {name}" for (path, name), times in counts.items()]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *lines, ""]))
    # In a step none is called twice
    assert len(calls if num_steps else counts) <= most[0] and len(files) <= most[1]


def listed_functions():
    """Files and functions of the table of `docs/design.md`."""
    rows = re.findall(r"^\| `(layers/\w+\.py)` \| (`.*`) \|$", DESIGN.read_text(), re.MULTILINE)
    return {(path, name) for path, names in rows for name in re.findall(r"`(\w+)`", names)}


def count_lines(path, name):
    functions = [each for each in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(each, ast.FunctionDef)]
    return max(each.end_lineno - each.lineno + 1 for each in functions if each.name == name)


def test_design_lists_the_functions_that_store_a_decoded_token(monkeypatch):
    """All that 60 updates run in files of the list, in C and in PyTorch, but short functions, phases and windows."""
    listed, run = listed_functions(), set()
    files = {path for path, _ in listed}
    states = torch.randn(2, 1, 2, 150, 16, generator=torch.Generator().manual_seed(0))

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in files:
            run.add((str(path.relative_to(ROOT)), frame.f_code.co_name))

    for kernel in ("auto", "torch"):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        cache = TransformCodingCache(recent_length=20)
        sdpa(cache, states[:, :, :, :90])
        sys.setprofile(note)
        try:
            for position in range(90, 150):
                cache.update(*states[:, :, :, position : position + 1], 0)
        finally:
            sys.setprofile(None)
    own = {each for each in run if "<" not in each[1] and count_lines(*each) > TRIVIAL and each[1] not in OF_PHASES}
    assert own - listed == set(), "missing in the table of docs/design.md"
    assert not listed - run - {("layers/row_layer.py", "_pack_by_plan"), ("layers/segments.py", "adopt")}
    lines = sum(count_lines(*each) for each in listed)
    sys.stdout.write(f"{lines} lines in {len(files)} files\n")
    assert lines <= READING[0] and len(files) <= READING[1]


def sdpa(cache, states):
    keys, values = cache.update(*states, 0)
    torch.nn.functional.scaled_dot_product_attention(states[0], keys, values, is_causal=True)
