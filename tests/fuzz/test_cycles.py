"""Thirty times a cache is made, generated with and dropped: nothing of it stays, in memory or on the model."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import create_cache


NUM_CYCLES, NUM_WARM = 30, 6
CACHES = (
    "gear-t22",
    "infinigen-gear",
    "gear-2bit",
    "h2o",
    "gear-k4v3",
    "kcvt-4bit",
    "infinigen",
    "infinigen-paper",
)
WHOLE = {"full_layers": ()}
PAGE = 4096
# A cycle's cache is of 2 MiB and more: were each kept, or one in ten, it would show
MOST_GROWTH = 2**22


def resident_bytes() -> int:
    return PAGE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.long
@pytest.mark.parametrize("name", CACHES)
def test_nothing_stays(name: str, contract_model: PreTrainedModel) -> None:
    model, before = contract_model, num_hooks(contract_model)
    prompt = torch.randint(1, 200, (4, 300))
    sizes, living = [], []
    for _ in range(NUM_CYCLES):
        cache = create_cache(name, model, **(WHOLE if name.startswith("infinigen") else {}))
        model.generate(prompt, past_key_values=cache, max_new_tokens=3, do_sample=False)
        living += [weakref.ref(layer) for layer in cache.layers]
        del cache
        gc.collect()
        sizes.append(resident_bytes())
    assert [layer for layer in living if layer() is not None] == []
    assert num_hooks(model) == before
    growth = min(sizes[-NUM_WARM:]) - max(sizes[:NUM_WARM])
    assert growth < MOST_GROWTH, sizes
