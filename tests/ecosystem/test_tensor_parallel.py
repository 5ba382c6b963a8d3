"""Transformers' tensor parallelism (`tp_plan="auto"`): each rank holds the heads that it computes, compressed."""

import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import create_cache


# Outliers of values are chosen among the heads of a rank, so that `gear-4bit` stores others than one process does
NAMES = ("transform", "kivi-2bit", "infinigen", "h2o", "gear-4bit")
NUM_RANKS, PROMPT, NEW_TOKENS = 2, 150, 4


def batch(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Tokens of requests of a batch, and bytes of a block."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from kvcache_plugins import compressed_batching

    config = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    paging = ContinuousBatchingConfig(page_size=64, num_blocks=24, max_batch_tokens=256)
    with compressed_batching(model, "transform", text=torch.tensor(prompts[-1:])) as batching:
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=paging)
        assert batching.stats()["dense_reads"] == 0
        return [output.generated_tokens for output in outputs.values()], batching.page_bytes()[0]


PROGRAM = f"""
import json, sys
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from kvcache_plugins import compressed_batching, create_cache, runahead_prefill

{inspect.getsource(batch)}

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
prompt = torch.tensor(json.loads(sys.argv[2]))
for name in {NAMES!r}:
    cache = create_cache(name, model)
    tokens = model.generate(prompt, past_key_values=cache, max_new_tokens={NEW_TOKENS}, do_sample=False)
    line = {{"rank": torch.distributed.get_rank(), "name": name, "tokens": tokens.tolist()}}
    sys.stdout.write(json.dumps({{**line, "bytes": cache.memory().total_bytes}}) + "\\n")
    sys.stdout.flush()
sys.stdout.write(json.dumps({{"batch": batch(model, prompt.tolist())}}) + "\\n")
try:
    runahead_prefill(model, prompt)
except ValueError as error:
    sys.stdout.write(json.dumps({{"refused": str(error)}}) + "\\n")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this model has no calibration")
def test_two_ranks_give_the_tokens_of_one_process(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    prompt = torch.randint(1, 128, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(prompt.tolist())],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    lines = [json.loads(line) for output, _ in outputs for line in output.splitlines() if line.startswith("{")]
    refused = [line.pop("refused") for line in lines if "refused" in line]
    assert len(refused) == NUM_RANKS and all("split by tensor parallelism" in message for message in refused)
    batches = [line.pop("batch") for line in lines if "batch" in line]
    tokens, block = batch(model, prompt.tolist())
    # Every rank's blocks have its half of the heads, by tables of its own
    assert batches == [[tokens, block // NUM_RANKS]] * NUM_RANKS
    lines = [line for line in lines if line]
    assert len(lines) == NUM_RANKS * len(NAMES)
    for name in NAMES:
        cache = create_cache(name, model)
        alone = model.generate(prompt, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
        own = [line for line in lines if line["name"] == name]
        expected = own[0]["tokens"] if name == "gear-4bit" else alone.tolist()
        assert [line["tokens"] for line in own] == [expected] * NUM_RANKS
        # Half of the heads each; what every rank needs whole is little
        assert all(line["bytes"] < 0.55 * cache.memory().total_bytes for line in own)
