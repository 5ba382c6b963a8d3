"""Caches, files and calibrations are the same, bit for bit, whatever PyTorch's default dtype and device are, were or
become. This file is also a program, in which every table is made under a foreign default.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from decoding import decode_logits, make_model, tokens
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvcache_plugins import GEARCache, InfiniGenCache, PromptStore, create_cache
from kvcache_plugins.infinigen import calibrate
from kvcache_plugins.registry import describe_caches
from kvcache_plugins.transform_coding import calibrate_transform


# quanto compiles C++ first, and what needs a calibration has one below
NAMES = sorted(
    entry.name
    for entry in describe_caches()
    if entry.is_available and not entry.name.startswith(("calibrated", "quanto"))
)
PROMPT, STOP = 200, 206


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}
Inputs = tuple[PreTrainedModel, torch.Tensor]


def decode(name: str, inputs: Inputs) -> torch.Tensor:
    """Logits of a sequence alone, and of a batch with padding, which other kernels compute."""
    model, ids = inputs
    mask = torch.ones_like(pair := torch.cat([ids, ids.flip(1)]))[:, :PROMPT]
    mask[1, :50] = 0
    alone = decode_logits(model, create_cache(name, model), ids[:, :PROMPT], ids[:, PROMPT:STOP])
    padded = decode_logits(model, create_cache(name, model), pair[:, :PROMPT], pair[:, PROMPT:STOP], mask)
    return torch.cat([alone, padded])


def save_and_load(inputs: Inputs) -> torch.Tensor:
    model, ids = inputs
    cache = create_cache("gear-4bit", model)
    decode_logits(model, cache, ids[:, :PROMPT], ids[:, PROMPT : PROMPT + 1])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path, model)
        loaded = GEARCache.load(path, model)
    return decode_logits(model, loaded, ids[:, PROMPT + 1 : PROMPT + 2], ids[:, PROMPT + 2 : STOP])


def read_stored(inputs: Inputs) -> torch.Tensor:
    model, ids = inputs
    with TemporaryDirectory() as folder:
        PromptStore(folder).read(model, ids[:, :300])
        return decode_logits(model, PromptStore(folder).cache_for(model, ids), ids[:, 256:300], ids[:, 300:303])


def calibrate_rows(inputs: Inputs) -> torch.Tensor:
    model, ids = inputs
    calibration = calibrate_transform(model, [ids[0]], num_draws=1)
    cache = create_cache("calibrated-16", model, calibration=calibration)
    return decode_logits(model, cache, ids[:, :PROMPT], ids[:, PROMPT:STOP])


def calibrate_queries(inputs: Inputs) -> torch.Tensor:
    model, ids = inputs
    calibration = calibrate(model, [ids[0], ids[0].flip(0)], rank=8, min_recall=0.0)
    with InfiniGenCache(model, speculate=True, calibration=calibration) as cache:
        return decode_logits(model, cache, ids[:, :PROMPT], ids[:, PROMPT:STOP])


OTHERS = {each.__name__: each for each in (save_and_load, read_stored, calibrate_rows, calibrate_queries)}
# One of every kind of table
AFTERWARDS = (
    "transform",
    "gear-4bit",
    "transform-16",
    "kvarn-k4v4",
    "turboquant-3bit",
    "llamacpp-q4_0",
    "infinigen-transform",
)


def compute(name: str, inputs: Inputs) -> torch.Tensor:
    return OTHERS[name](inputs) if name in OTHERS else decode(name, inputs)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs()


def make_inputs() -> Inputs:
    return make_model(), tokens(400)


@pytest.fixture(scope="module")
def expected(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: compute(name, inputs) for name in (*NAMES, *OTHERS)}


# A narrower dtype, and a device without data; the other dtypes differ from the first in numbers alone
@pytest.mark.parametrize(
    "default",
    [each if each in ("bfloat16", "meta") else pytest.param(each, marks=pytest.mark.long) for each in DEFAULTS],
)
def test_numbers_are_the_same_under_and_after_a_foreign_default(
    default: str, expected: dict[str, torch.Tensor], run_python, tmp_path
) -> None:
    run_python(__file__, default, tmp_path / "found", PYTHONPATH=Path(__file__).parent / "infinigen")
    found = load_file(tmp_path / "found")
    assert len(found) == len(expected) + len(AFTERWARDS)
    other = {key for key, logits in found.items() if not torch.equal(logits, expected[key.split()[0]])}
    assert not other


@pytest.mark.parametrize("default", ["bfloat16", "meta"])
@pytest.mark.parametrize("name", ["transform", "gear-4bit", "infinigen-transform"])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_leave_the_same_partial_results(name: str, default: str, threads: int) -> None:
    model, ids = make_model(), tokens(1202)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = decode_logits(model, create_cache(name, model), ids[:, :1200], ids[:, 1200:])
        with DEFAULTS[default]():
            found = decode_logits(model, create_cache(name, model), ids[:, :1200], ids[:, 1200:])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def main(default: str, path: str) -> None:
    inputs = make_inputs()
    with DEFAULTS[default]():
        found = {name: compute(name, inputs) for name in (*NAMES, *OTHERS)}
    found |= {f"{name} afterwards": compute(name, inputs) for name in AFTERWARDS}
    save_file(found, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
