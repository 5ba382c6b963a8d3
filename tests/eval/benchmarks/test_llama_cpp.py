"""`bench llama-cpp` without llama-cpp-python, which no test installs: it is refused before anything is loaded."""

import sys

import pytest
import torch

from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import llama_cpp as benchmark
from kvcache_plugins.eval.benchmarks.llama_cpp import benchmark_llama_cpp
from kvcache_plugins.gear.kernel_check import MismatchError


command = with_results(benchmark_llama_cpp)


OPTIONS = {
    "text_file": None,
    "part": ["step", "attention"],
    "cache": ["gear-k4v3"],
    "attention_cache": ["gear-k4v3"],
    "kv_type": ["q4_0"],
    "model": "smollm2",
    "gguf": None,
    "context": [64],
    "rounds": 3,
    "seconds": 0,
    "num_threads": None,
    "limit": 3600,
}


@pytest.fixture
def without_llama_cpp(monkeypatch):
    # What importing a module that is not installed comes to
    monkeypatch.setitem(sys.modules, "llama_cpp", None)

    def load(*arguments, **options):
        raise AssertionError("a model is loaded before the extra is found missing")

    monkeypatch.setattr(benchmark, "load_for_evaluation", load)


def test_the_extra_is_named_where_it_is_missing(without_llama_cpp):
    with pytest.raises(ImportError, match=r"`pip install kvcache-plugins\[llama-cpp\]`"):
        command(**OPTIONS)


@pytest.mark.parametrize(("option", "value"), [("part", "prefill"), ("kv_type", "q2_K"), ("cache", "gear-k9v9")])
def test_wrong_names_are_refused_first(option, value, without_llama_cpp):
    with pytest.raises(ValueError, match=value):
        command(**{**OPTIONS, option: [value]})


def test_bytes_are_those_of_blocks_of_32():
    states = [(torch.zeros(1, 3, 5, 64), torch.zeros(1, 3, 5, 64))] * 2
    # 18 bytes for each 32 numbers of two layers, two sides and three heads of 64
    assert benchmark.states_bytes(states, 1000, "q4_0") == 2 * 2 * 3 * 1000 * 64 // 32 * 18
    assert benchmark.states_bytes(states, 1000, "f16") == 2 * 2 * 3 * 1000 * 64 * 2


def test_another_model_is_not_timed():
    expected = torch.tensor([0.0, 0.0]).log_softmax(-1)
    assert benchmark._divergence("llama.cpp f16", expected, torch.tensor([1.0, 1.0])) == pytest.approx(0)
    with pytest.raises(MismatchError, match=r"llama.cpp f16 is .* nats from Transformers"):
        benchmark._divergence("llama.cpp f16", expected, torch.tensor([9.0, 0.0]))
    with pytest.raises(MismatchError):
        benchmark._divergence("llama.cpp f16", expected, torch.tensor([float("nan"), 0.0]))
