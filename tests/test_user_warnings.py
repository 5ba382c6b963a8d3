"""Warnings name the line of whoever uses a cache, however many calls of Transformers and of ours lie between."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvcache_plugins import GEARCache, InfiniGenCache, create_cache


# Each in a line of its own; what is known of the kernels is forgotten in between
PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from kvcache_plugins import create_cache, generate_with
from kvcache_plugins.kernels import engine

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokens = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(0))
def call(number):
    engine._kernel_on.cache_clear()
    if number == 0:
        model.generate(tokens, past_key_values=create_cache("gear-4bit", model), max_new_tokens=3)
    if number == 1:
        model.generate(tokens, custom_generate=generate_with("gear"), max_new_tokens=3)
    if number == 2:
        model.generate(tokens, past_key_values=create_cache("infinigen", model, full_layers=()), max_new_tokens=3)
for number in range(3):
    call(number)
"""


def test_missing_kernels_at_the_users_line(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(folder=str(tmp_path / "model")))
    environment = {**os.environ, "KVCACHE_PLUGINS_KERNEL_LIBRARY": str(tmp_path), "KVCACHE_PLUGINS_KERNELS": "auto"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [
        number
        for number, line in enumerate(script.read_text().splitlines(), 1)
        if "past_key" in line or "custom_generate=" in line
    ]
    found = [line for line in done.stderr.splitlines() if "run in plain PyTorch instead of `compiled`" in line]
    assert [line.partition(" UserWarning")[0] for line in found] == [f"{script}:{line}:" for line in lines], (
        done.stderr
    )


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
