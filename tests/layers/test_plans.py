"""Plans of decode steps are made anew only when what they depend on has changed."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.layers import compressed_layer


# Lengths of the sequence at which a layer plans: rows behind the first step, and when the first ones become recent;
# groups at each chunk
PLANNED = {"transform": [201, 206], "transform-16": [201, 206], "gear": [201, 265, 329], "kivi-2bit": [201, 265, 329]}


@pytest.mark.parametrize(("name", "expected"), PLANNED.items(), ids=PLANNED)
@torch.no_grad()
def test_steps_are_planned_once(name, expected, tiny_model, random_windows, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    (ids,) = random_windows(1, 360)
    cache, planned, plan_steps = create_cache(name, model), [], compressed_layer.plan_steps

    def count(*args):
        planned.append(cache.get_seq_length())
        return plan_steps(*args)

    monkeypatch.setattr(compressed_layer, "plan_steps", count)
    model(ids[None, :200], past_key_values=cache)
    for token in ids[200:].split(1):
        model(token[None], past_key_values=cache)
    assert planned == expected
    # A rollback into packed tokens, and a copy of the cache, change what plans depend on
    cache.crop(-100)
    model(ids[None, :1], past_key_values=cache)
    assert planned[len(expected) :] == [261]
