"""Log-likelihoods of continuations through a cache that their contexts fill once.

Several contexts are prefilled together, all but the last token of each; shorter ones are padded on their left. Then
continuations are fed in rounds, one of every context in each. Every round has a copy of the filled cache (or one that
is filled again, if it cannot be copied), so that no continuation sees another's tokens, even if the cache cannot
`crop`. The last token of the context is fed with the continuation, as its logits are the first to be scored:

    filled                fed                           scored
    c[0] ... c[n-2]       c[n-1] t[0] ... t[m-2]        t[0] ... t[m-1]
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory

from .harness import cache_stats, feed, holds_inexact, was_exercised


class Feeding(NamedTuple):
    """Numbers of tokens of a context and of a continuation in one forward; all at once by default."""

    context_chunk: int | None = None
    continuation_chunk: int | None = None


# The context at once, continuations token by token, like `generate`
DECODE = Feeding(None, 1)


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, and the number of its tokens that greedy decoding would choose."""

    log_likelihood: float
    num_tokens: int
    num_greedy: int

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding would choose this continuation."""
        return self.num_greedy == self.num_tokens


@dataclass(slots=True)
class CacheRecord:
    """
    Counters of all caches of a run, and memory and `stats()` of the one with most tokens, at its end. Among the
    counters are `contexts` and `contexts_exercised`, those whose cache has not answered with exact states alone.
    """

    counters: Counter[str] = field(default_factory=Counter)
    largest: MemoryReport | None = None
    largest_length: int = 0
    stats: Mapping[str, StatValue] = field(default_factory=dict)

    def note(self, cache: Cache, *, num_contexts: int, exercised: bool) -> None:
        """Count the contexts of a cache, and keep its memory and `stats()` if no cache before was longer."""
        self.counters.update(contexts=num_contexts, contexts_exercised=num_contexts if exercised else 0)
        length = cache.get_seq_length()
        if length > self.largest_length:
            self.largest_length = length
            self.largest, self.stats = measure_memory(cache), cache_stats(cache)


class ContinuationScorer:
    """
    Scores continuations of contexts through fresh caches, and counts in `record`. `autocast` makes the context manager
    around the model, for mixed precision; `softmax_dtype` is the logits' own by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        create_cache: Callable[[], Cache],
        *,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        softmax_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.record = model, CacheRecord()
        self._create_cache, self._autocast, self._softmax_dtype = create_cache, autocast, softmax_dtype

    @torch.no_grad()
    def score(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]], feeding: Feeding
    ) -> list[list[Score]]:
        """Score the continuations of every context of a batch, in their order. A context has at least one token."""
        filled = [list(context[:-1]) for context in contexts]
        width = max(map(len, filled))
        padding = torch.tensor([width - len(each) for each in filled], dtype=torch.int64, device=self.model.device)

        def fill_cache() -> Cache:
            cache = self._create_cache()
            if width:
                rows = [[0] * (width - len(each)) + each for each in filled]
                list(self._feed(rows, cache, padding, feeding.context_chunk, needs_logits=False))
                self.record.counters.update(tokens_filled=sum(map(len, filled)))
            return cache

        cache = fill_cache()
        groups = [_group_by_fed(context, wanted) for context, wanted in zip(contexts, continuations, strict=True)]
        sums = [[[0.0, 0] for _ in wanted] for wanted in continuations]
        num_rounds, exercised = max(map(len, groups)), False
        for number in range(num_rounds):
            # Tokens of each context that are fed in this round, and the numbers of the continuations that they score
            fed = [each[number] if number < len(each) else ((), []) for each in groups]
            longest = max(len(tokens) for tokens, _ in fed)
            rows = [[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in fed]
            fork = cache
            if number < num_rounds - 1:
                try:
                    fork = copy.deepcopy(cache)
                except RuntimeError:
                    # Tensors of some peers cannot be copied (quanto's)
                    fork = fill_cache()
            offset = 0
            held_inexact = holds_inexact(fork)
            for logits in self._feed(rows, fork, padding, feeding.continuation_chunk):
                # A long continuation is stored as a prompt is, after its own attention
                exercised = exercised or (held_inexact and was_exercised(fork))
                held_inexact = exercised or holds_inexact(fork)
                log_probs = F.log_softmax(logits, dim=-1, dtype=self._softmax_dtype)
                for row, (_, scored) in enumerate(fed):
                    for each in scored:
                        token_ids = continuations[row][each][offset:][: log_probs.shape[1]]
                        if token_ids:
                            own = log_probs[row, : len(token_ids)]
                            targets = torch.tensor(token_ids, dtype=torch.int64, device=own.device)
                            sums[row][each][0] += float(own.gather(1, targets[:, None]).sum())
                            sums[row][each][1] += int((own.argmax(dim=-1) == targets).sum())
                offset += log_probs.shape[1]
        self.record.counters.update(
            continuations=sum(map(len, continuations)),
            tokens_fed=sum(len(tokens) for each in groups for tokens, _ in each),
        )
        self.record.note(cache, num_contexts=len(contexts), exercised=exercised)
        return [
            [Score(total, len(each), int(count)) for each, (total, count) in zip(wanted, own, strict=True)]
            for wanted, own in zip(continuations, sums, strict=True)
        ]

    def _feed(
        self, rows: list[list[int]], cache: Cache, padding: torch.Tensor, chunk: int | None, needs_logits: bool = True
    ) -> Iterator[torch.Tensor]:
        """Feed a batch to the model (see `feed`); `padding` `[B]` counts padding on the left."""
        token_ids = torch.tensor(rows, dtype=torch.int64, device=self.model.device)
        places = torch.arange(cache.get_seq_length() + token_ids.shape[1], dtype=torch.int64, device=self.model.device)
        mask = (places >= padding[:, None]).long() if bool(padding.any()) else None
        autocast = self._autocast
        return feed(self.model, token_ids, cache, chunk, mask=mask, needs_logits=needs_logits, autocast=autocast)


def _group_by_fed(
    context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Group continuations by the tokens to feed: the last of `context`, and all of the continuation but its last."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, each in enumerate(continuations):
        groups.setdefault((context[-1], *each[:-1]), []).append(number)
    return list(groups.items())
