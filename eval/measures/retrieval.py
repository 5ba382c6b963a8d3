"""Retrieval from long contexts: is one line, or one value, of thousands of tokens still found through a cache?

Two sets, told apart by their fields: LongChat's lines (`prompt`, `expected_number`) and lost-in-the-middle's key-value
pairs (`ordered_kv_records`, `key`, `value`). The context with its question fills the cache; the answer is then fed
token by token, and a row is right if every token of it is the most likely one: just what greedy decoding would say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.eval.continuations import DECODE, ContinuationScorer, Score
from kvcache_plugins.eval.harness.caches import CacheFactory
from kvcache_plugins.reports.memory import MemoryReport, StatValue

from .questions import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """
    A cache on all questions.

    Args:
        correct (`tuple[bool, ...]`): Whether the whole answer was right, by question.
        token_accuracy (`float`): Share of the answers' tokens that were most likely.
        memory (`MemoryReport`, *optional*): What the longest cache held at its end.
        stats (`dict`): Its counters.
    """

    correct: tuple[bool, ...]
    token_accuracy: float
    memory: MemoryReport | None
    stats: dict[str, StatValue]

    @property
    def accuracy(self) -> float:
        """Share of questions answered right."""
        return sum(self.correct) / len(self.correct)

    @property
    def standard_error(self) -> float:
        """Of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.correct))


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    factories: Mapping[str, CacheFactory],
    on_progress: Callable[[str], None],
    batch_size: int = 1,
) -> dict[str, Retrieval]:
    """Every cache on every question, by the names of `factories`; `batch_size` questions are decoded together."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` has to be at least 1 but is {batch_size}")
    pairs = [
        (tokenizer(each.context).input_ids, tokenizer(each.answer, add_special_tokens=False).input_ids)
        for each in questions
    ]
    scorers = {name: ContinuationScorer(model, factory) for name, factory in factories.items()}
    scores: dict[str, list[Score]] = {name: [] for name in factories}
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        for name, scorer in scorers.items():
            on_progress(f"question {start + len(batch)} of {len(questions)}")
            found = scorer.score([context for context, _ in batch], [[answer] for _, answer in batch], DECODE)
            scores[name].extend(score for (score,) in found)
    return {
        name: Retrieval(
            correct=tuple(score.is_greedy for score in scores[name]),
            token_accuracy=sum(score.num_greedy for score in scores[name])
            / sum(score.num_tokens for score in scores[name]),
            memory=scorer.largest,
            stats=dict(scorer.stats),
        )
        for name, scorer in scorers.items()
    }
