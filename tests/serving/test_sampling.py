"""Sampling in a batch: samples of the softmax, by a seed that no other request of the batch changes."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


pytest.importorskip("fastapi")

from kvcache_plugins.serving.sampling import make_samplers, sampling_of  # noqa: E402


@pytest.fixture
def samplers(tiny_llama):
    return make_samplers(tiny_llama, GenerationConfig(do_sample=True, temperature=0.3, repetition_penalty=None))


def requests(*options, position=10):
    """Requests of a batch with sampling options `(generation config, seed)`."""
    return [
        SimpleNamespace(
            has_new_token=True,
            state=SimpleNamespace(logit_processor_kwargs=sampling_of(*each), position_offset=position),
        )
        for each in options
    ]


def choose(samplers, scores, batch):
    """The tokens that a batch takes, given scores `[requests, vocabulary]`."""
    arguments = torch.empty(samplers.tensors_required, len(batch) + 3, dtype=torch.int32)
    samplers.fill_defaults(arguments[:, :1])
    arguments[:] = arguments[:, :1]
    for each in batch:
        samplers.check_kwargs(each.state.logit_processor_kwargs)
    samplers.prepare_tensor_args(batch, arguments)
    return samplers(torch.zeros(len(batch), dtype=torch.int64), scores.clone(), arguments).argmax(dim=-1)


def test_tokens_are_samples_of_the_softmax(samplers):
    scores = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    config = GenerationConfig(do_sample=True, temperature=1.5, top_k=5, top_p=0.95)
    expected = scores
    for warper in (TemperatureLogitsWarper(1.5), TopKLogitsWarper(5), TopPLogitsWarper(0.95)):
        expected = warper(None, expected)
    expected = expected.softmax(dim=-1)[0]
    count = 20_000
    batch = requests(*[(config, seed) for seed in range(count)])
    chosen = choose(samplers, scores.expand(count, -1), batch)
    found = torch.bincount(chosen, minlength=6) / count
    assert found[expected == 0].sum() == 0
    # Four standard deviations of each share
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_positions_of_one_seed_are_independent(samplers):
    config, count = GenerationConfig(do_sample=True, top_k=0), 4000
    scores = torch.zeros(1, 2)
    tokens = torch.cat(
        [choose(samplers, scores, requests((config, 7), position=number)) for number in range(count)]
    ).float()
    pairs = (tokens[1:] * tokens[:-1]).mean()
    assert abs(tokens.mean() - 0.5) < 4 * 0.5 / count**0.5 and abs(pairs - 0.25) < 4 * 0.5 / count**0.5


def test_a_request_does_not_depend_on_the_others(samplers):
    scores = torch.randn(4, 1000)
    warm = GenerationConfig(do_sample=True, temperature=2.0, top_p=0.9)
    batch = requests(
        (GenerationConfig(do_sample=False), 3), (warm, 3), (warm, 4), (GenerationConfig(do_sample=True), 5)
    )
    together = choose(samplers, scores, batch)
    alone = [choose(samplers, scores[k : k + 1], batch[k : k + 1])[0] for k in range(4)]
    assert together.tolist() == torch.stack(alone).tolist()
    assert together[0] == scores[0].argmax()
    assert choose(samplers, scores[1:2], batch[2:3]) != together[1]


def test_greedy_requests_alone_cost_nothing(samplers):
    scores = torch.randn(2, 50)
    batch = requests(*[(GenerationConfig(do_sample=False), None)] * 2)
    arguments = torch.empty(samplers.tensors_required, 2, dtype=torch.int32)
    samplers.fill_defaults(arguments)
    samplers.prepare_tensor_args(batch, arguments)
    assert samplers(torch.zeros(2, dtype=torch.int64), scores, arguments) is scores
    # Without a seed one is drawn
    assert sampling_of(GenerationConfig(do_sample=True), None) != sampling_of(GenerationConfig(do_sample=True), None)
