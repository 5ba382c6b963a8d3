"""Errors by layer: none through the dense cache, and none below the first layer that loses something."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.eval.measures.fidelity import measure_fidelity
from kvcache_plugins.eval.measures.layer_errors import LayerErrors, record_attention


def test_outputs_of_all_layers_are_recorded_in_order(tiny_model) -> None:
    model = tiny_model("gemma3-hybrid")
    tokens = torch.randint(2, 128, (1, 20))
    cache = DynamicCache(config=model.config)
    with record_attention(model) as recorded, torch.no_grad():
        whole = model(tokens).logits
        outputs = recorded.by_layer()
        recorded.parts.clear()
        for part in tokens.split(7, dim=1):
            model(part, past_key_values=cache)
    assert [each.shape for each in outputs] == [(20, 128)] * 4
    for one, other in zip(outputs, recorded.by_layer(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    # Outside of the block nothing is recorded, and the model is as it was
    before = len(recorded.parts[0])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, whole)
    assert len(recorded.parts[0]) == before


def test_relative_errors_over_windows() -> None:
    errors = LayerErrors()
    errors.add([torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)], [torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)])
    errors.add([torch.tensor([[0.0, 5.0]]), torch.ones(1, 2)], [torch.tensor([[0.0, 0.0]]), torch.ones(1, 2)])
    assert errors.relative() == pytest.approx([(25 / 50) ** 0.5, (2 / 4) ** 0.5])


def test_in_fidelity(tiny_llama: PreTrainedModel) -> None:
    window = torch.randint(2, 128, (121,))
    factories = {name: partial(create_cache, name, tiny_llama) for name in ("dynamic", "gear-4bit", "gear-2bit")}
    results = measure_fidelity(tiny_llama, [window], factories, prefix_length=90)
    assert results["dynamic"].layer_errors == (0.0, 0.0)
    assert results["dynamic"].first_difference == results["dynamic"].num_scored == 30
    fine, coarse = results["gear-4bit"].layer_errors, results["gear-2bit"].layer_errors
    assert len(fine) == 2 and all(0 < one < other for one, other in zip(fine, coarse, strict=True))
    assert results["gear-2bit"].first_difference < 30
