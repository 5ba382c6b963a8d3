"""Constant offsets of a few key channels, as the biases of Qwen2.5's keys make them: what they do to 4-bit caches.

SmolLM2 has no such bias, so it gets one, and every cache is compared with the dense cache of the model that results.
The offset is added before the rotary embedding. In channels that turn slowly it stays an offset of the channel, and
adds the same to all scores of a query: the model hardly changes. In channels that turn fast it becomes a wave over the
tokens, and the model another one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.measures.fidelity import measure_fidelity
from kvcache_plugins.registry import describe_caches, parse_cache_spec


ROOT = Path(__file__).resolve().parents[2]
PREFIX, SCORED = 512, 64
# Channels of a head of 64: channel `i` turns with channel `i + 32`, slower the larger `i`
SLOW, FAST = (30, 31, 62, 63), (0, 1, 32, 33)
ALL_LAYERS, FIRST_AND_LAST = tuple(range(30)), (0, 29)
# In the order of the table: channels, range of the offsets' sizes, layers
CASES = {
    "none": ((), 0, 0, ALL_LAYERS),
    "slow": (SLOW, 30, 100, ALL_LAYERS),
    "slow-ends": (SLOW, 100, 400, FIRST_AND_LAST),
    "fast-small": (FAST, 3, 10, ALL_LAYERS),
    "fast": (FAST, 30, 100, ALL_LAYERS),
}


def table() -> dict[str, tuple[float, ...]]:
    """Reads the table of docs/results/gear.md: mean KL by cache and case; dense perplexity in the first row."""
    page = (ROOT / "docs" / "results" / "gear.md").read_text(encoding="utf-8")
    section = page.partition("## Constant offsets of key channels\n")[2].partition("\n## ")[0]
    numbers = r" \| ([\d.]+)" * len(CASES)
    rows = re.findall(rf"^\| `?([^|`]+?)`?{numbers} \|$", section, re.MULTILINE)
    return {name: tuple(map(float, row)) for name, *row in rows}


@contextmanager
def key_bias(model, channels, low, high, layers) -> Iterator[None]:
    """Gives every key head of some layers offsets of random size and sign in some channels."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    projections = [model.model.layers[index].self_attn.k_proj for index in layers]
    for projection in projections:
        bias = torch.zeros(config.num_key_value_heads, config.head_dim)
        size = low + (high - low) * torch.rand(len(bias), len(channels), generator=generator)
        sign = 2 * torch.randint(0, 2, size.shape, generator=generator) - 1
        bias[:, list(channels)] = size * sign
        projection.bias = torch.nn.Parameter(bias.flatten(), requires_grad=False)
    try:
        yield
    finally:
        for projection in projections:
            projection.bias = None


def test_the_table_holds_every_case():
    measured = table()
    assert "perplexity, dense" in measured and {"gear-k4v3", "gear-4bit", "kivi-4bit"} <= measured.keys()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_bias_of_keys_is_as_tabulated(smollm2, licence_ids, case):
    place = list(CASES).index(case)
    expected = {name: row[place] for name, row in table().items()}
    ppl = expected.pop("perplexity, dense")
    model, factories = smollm2[0], {}
    for spec in expected:
        name, options = parse_cache_spec(spec)
        if describe_caches(name)[0].is_available:
            factories[spec] = partial(create_cache, name, model, **options)
    with key_bias(model, *CASES[case]):
        found = measure_fidelity(model, [licence_ids[0, : PREFIX + SCORED + 1]], factories, prefix_length=PREFIX)
    assert all(layer.self_attn.k_proj.bias is None for layer in model.model.layers)
    for spec, each in found.items():
        assert (each.kl, each.dense_ppl) == (pytest.approx(expected[spec], rel=0.1), pytest.approx(ppl, rel=0.05))
