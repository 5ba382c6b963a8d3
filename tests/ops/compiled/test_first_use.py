"""What the first decode step on a machine has to compile: nothing that a preset never runs, nothing by accident."""

import json
import os
import subprocess
import sys

import pytest


PROGRAM = """
import json, sys
import torch
from numba.core import event
from transformers import LlamaConfig, LlamaForCausalLM
from kvcache_plugins import create_cache

class Listener(event.Listener):
    def on_start(self, happening):
        function = happening.data["dispatcher"].py_func
        compiled.append(f"{function.__module__}.{function.__name__}")

    def on_end(self, happening):
        pass

compiled = []
event.register("numba:compile", Listener())
config = LlamaConfig(vocab_size=8, hidden_size=192, intermediate_size=8, num_hidden_layers=1, num_attention_heads=3,
                     num_key_value_heads=1)
model, ids = LlamaForCausalLM(config).eval(), torch.zeros(1, 200, dtype=torch.long)
cache = create_cache(sys.argv[1], model)
with torch.no_grad():
    model(ids, past_key_values=cache)
    compiled.clear()
    model(ids[:, :1], past_key_values=cache)
print(json.dumps(compiled))
"""
# With room for a handful more
MOST = {"gear": 60}


@pytest.mark.long
@pytest.mark.parametrize("name", MOST)
def test_a_step_compiles_few_functions(name, tmp_path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, name]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    compiled = json.loads(shown)
    own = [each for each in compiled if each.startswith("kvcache_plugins")]
    # One worker, for the queries that a head of this model has, and every function of it once
    assert [each.rsplit(".", 1)[1] for each in own].count("attend_row_parts") == 1
    assert [each.rsplit(".", 1)[1] for each in own].count("dot_rows") == 1
    # Messages of errors, which an assignment of slices brings along
    assert not [each for each in compiled if "unicode" in each or "raise" in each]
    assert 10 < len(compiled) <= MOST[name], compiled
