"""Continuations through caches: the dense one gives what one forward gives, in every mode and batch."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.eval.continuations import DECODE, CacheRecord, ContinuationScorer, Feeding, Score
from kvcache_plugins.eval.harness import was_exercised


FEEDINGS = {"prefix": Feeding(), "chunk": Feeding(7, 7), "decode": DECODE}


def draw(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (length,), generator=generator).tolist()


def one_forward(model: PreTrainedModel, context: list[int], continuation: list[int]) -> Score:
    """Scores a request as lm-eval's own model does."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :]
    log_probs, targets = F.log_softmax(logits, dim=-1), torch.tensor(continuation)
    total = log_probs.gather(1, targets[:, None]).sum()
    return Score(float(total), len(continuation), int((log_probs.argmax(-1) == targets).sum()))


def greedy(model: PreTrainedModel, context: list[int], count: int) -> list[int]:
    token_ids = torch.tensor([context])
    said = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=count, do_sample=False)
    return said[0, len(context) :].tolist()


@pytest.mark.parametrize("feeding", FEEDINGS.values(), ids=FEEDINGS.keys())
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "gpt2", "opt", "mistral-sliding"])
def test_dense_cache_scores_as_one_forward(tiny_model, architecture, feeding):
    model = tiny_model(architecture)
    # Contexts of different lengths are padded; continuations of one context share all, some or none of their tokens
    contexts = [draw(41, 1), draw(60, 2), draw(2, 3)]
    shared = draw(5, 4)
    continuations = [
        [draw(9, 5), greedy(model, contexts[0], 6), draw(1, 6)],
        [[*shared, 7], [*shared, 9], shared],
        [draw(17, 7)],
    ]
    scorer = ContinuationScorer(model, partial(DynamicCache, config=model.config))
    scores = scorer.score(contexts, continuations, feeding)
    for context, wanted, found in zip(contexts, continuations, scores, strict=True):
        for continuation, score in zip(wanted, found, strict=True):
            expected = one_forward(model, context, continuation)
            assert score.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-3)
            assert (score.num_tokens, score.num_greedy) == (expected.num_tokens, expected.num_greedy)
    assert scores[0][1].is_greedy and not scores[0][0].is_greedy
    assert scorer.record.counters["contexts"] == scorer.record.counters["contexts_exercised"] == 3
    assert scorer.record.counters["continuations"] == 7
    assert scorer.record.counters["tokens_filled"] == 40 + 59 + 1
    # Two of the second context's continuations differ in their last token alone
    assert scorer.record.counters["tokens_fed"] == 9 + 6 + 1 + 6 + 5 + 17


def test_a_context_of_one_token_is_scored(tiny_llama: PreTrainedModel) -> None:
    scorer = ContinuationScorer(tiny_llama, partial(DynamicCache, config=tiny_llama.config))
    text = draw(30, 1)
    ((score,),) = scorer.score([text[:1]], [[text[1:]]], Feeding(8, 8))
    expected = one_forward(tiny_llama, text[:1], text[1:])
    assert score.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-3)


@pytest.mark.parametrize("feeding", FEEDINGS.values(), ids=FEEDINGS.keys())
@pytest.mark.parametrize("cache", ["gear-2bit", "h2o"])
def test_lossy_caches_change_scores(tiny_llama: PreTrainedModel, cache: str, feeding: Feeding) -> None:
    context, continuations = draw(150, 1), [draw(12, seed) for seed in range(2, 5)]
    options = {"min_tokens": 4, "heavy_ratio": 0.05, "recent_ratio": 0.05} if cache == "h2o" else {}
    scorer = ContinuationScorer(tiny_llama, partial(create_cache, cache, tiny_llama, **options))
    (scores,) = scorer.score([context], [continuations], feeding)
    for continuation, score in zip(continuations, scores, strict=True):
        expected = one_forward(tiny_llama, context, continuation)
        assert abs(score.log_likelihood - expected.log_likelihood) > 1e-3
    # None has seen another's tokens
    (backwards,) = scorer.score([context], [continuations[::-1]], feeding)
    assert backwards[::-1] == scores
    assert scorer.record.counters["contexts_exercised"] == 2
    assert scorer.record.largest is not None and scorer.record.largest_length == 150 + 11
    assert scorer.record.stats["tokens_cached"] == 150 + 11


def test_infinigen_chooses_only_when_it_decodes(tiny_llama: PreTrainedModel) -> None:
    create = partial(create_cache, "infinigen", tiny_llama, recent=8, max_fetch_ratio=0.05)
    counted = {}
    for name, feeding in FEEDINGS.items():
        scorer = ContinuationScorer(tiny_llama, create)
        scorer.score([draw(200, 1)], [[draw(9, 2)]], feeding)
        counted[name] = scorer.record.counters["contexts_exercised"]
    assert counted == {"prefix": 0, "chunk": 0, "decode": 1}


@pytest.mark.parametrize("cache", ["dynamic", "quanto-4bit", "hqq-4bit", "gear-2bit"])
def test_caches_count_as_exercised_once_they_lose_or_pack(tiny_llama: PreTrainedModel, cache: str) -> None:
    pytest.importorskip({"quanto-4bit": "optimum.quanto", "hqq-4bit": "hqq"}.get(cache, "torch"))
    empty = create_cache(cache, tiny_llama.config)
    assert was_exercised(empty) == (cache == "dynamic")
    scorer = ContinuationScorer(tiny_llama, partial(create_cache, cache, tiny_llama.config))
    scorer.score([draw(200, 1)], [[draw(9, 2)]], Feeding())
    assert scorer.record.counters["contexts_exercised"] == 1
    # One forward stores a long continuation as it stores a prompt, after its attention. The context is short, and so
    # exact but in caches that quantize every prompt
    scorer.record = CacheRecord()
    scorer.score([draw(29, 1)], [[draw(390, 2)]], Feeding())
    assert scorer.record.counters["contexts_exercised"] == (cache != "gear-2bit")


@pytest.mark.parametrize("feeding", FEEDINGS.values(), ids=FEEDINGS.keys())
def test_a_cache_that_cannot_be_copied_is_refilled(tiny_llama: PreTrainedModel, feeding: Feeding) -> None:
    class Uncopied(DynamicCache):
        def __deepcopy__(self, memo: dict[int, object]) -> "Uncopied":
            raise RuntimeError("cannot be copied")

    context, continuations = draw(40, 1), [draw(6, seed) for seed in range(2, 5)]
    scorer = ContinuationScorer(tiny_llama, Uncopied)
    (scores,) = scorer.score([context], [continuations], feeding)
    for continuation, score in zip(continuations, scores, strict=True):
        expected = one_forward(tiny_llama, context, continuation).log_likelihood
        assert score.log_likelihood == pytest.approx(expected, abs=1e-3)
    assert scorer.record.counters["tokens_filled"] == 3 * 39


def test_contexts_within_the_buffer_are_not_exercised(tiny_llama: PreTrainedModel) -> None:
    scorer = ContinuationScorer(tiny_llama, partial(create_cache, "h2o", tiny_llama.config))
    ((score,),) = scorer.score([draw(20, 1)], [[draw(5, 2)]], Feeding())
    assert score.log_likelihood == pytest.approx(one_forward(tiny_llama, draw(20, 1), draw(5, 2)).log_likelihood)
    assert (scorer.record.counters["contexts"], scorer.record.counters["contexts_exercised"]) == (1, 0)


def test_a_model_that_ignores_the_cache_is_an_error(tiny_llama: PreTrainedModel) -> None:
    class Deaf(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, **_: object) -> object:
            return tiny_llama(input_ids)

    scorer = ContinuationScorer(Deaf(), partial(DynamicCache, config=tiny_llama.config))
    with pytest.raises(RuntimeError, match="did not go through it"):
        scorer.score([draw(20, 1)], [[draw(5, 2)]], Feeding())
