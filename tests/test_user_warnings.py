"""Warnings name the line of whoever uses a cache, however many calls of Transformers and of ours lie between."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import GEARCache, InfiniGenCache, create_cache


PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from kvcache_plugins import create_cache, generate_with

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokens = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(0))
def call():
    return {call}  # the line

call()
"""
CALLS = {
    "generate": 'model.generate(tokens, past_key_values=create_cache("gear-4bit", model), max_new_tokens=3)',
    "generate_with": 'model.generate(tokens, custom_generate=generate_with("gear"), max_new_tokens=3)',
    "forward": 'model(tokens, past_key_values=create_cache("infinigen-gear", model, full_layers=()))',
}


@pytest.mark.parametrize("call", CALLS)
def test_missing_kernels_at_the_users_line(tiny_llama: PreTrainedModel, tmp_path: Path, call: str) -> None:
    tiny_llama.save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(folder=str(tmp_path / "model"), call=CALLS[call]))
    environment = {**os.environ, "KVCACHE_PLUGINS_KERNEL_LIBRARY": str(tmp_path), "KVCACHE_PLUGINS_KERNELS": "auto"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = 1 + script.read_text().split("\n").index(f"    return {CALLS[call]}  # the line")
    lines = [each for each in done.stderr.splitlines() if "run in plain PyTorch instead of `compiled`" in each]
    assert [each.partition(" UserWarning")[0] for each in lines] == [f"{script}:{line}:"], done.stderr


def test_other_warnings_at_the_users_line(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    llama, windowed = tiny_model("llama"), tiny_model("mistral-sliding")
    detached = InfiniGenCache(llama, full_layers=(), speculate=True)
    detached.detach()
    tokens = torch.randint(3, 97, (1, 150))
    llama.set_attn_implementation("eager")
    calls: dict[str, Callable[[], object]] = {
        "no calibration": lambda: create_cache("gear-c16", llama),
        "attend to a window": lambda: GEARCache(windowed.config, backbone="kivi"),
        "is used after `detach": lambda: llama.generate(tokens, past_key_values=detached, max_new_tokens=2),
    }
    for text, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        own = [each for each in caught if text in str(each.message)]
        assert [(each.filename, each.lineno) for each in own] == [(__file__, call.__code__.co_firstlineno)], text
