"""One window of text through one cache: its prefix, the logits of what follows, and sums beside the dense ones."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from kvcache_plugins.eval.harness.caches import (
    check_is_empty,
    check_length,
)
from kvcache_plugins.models.cache_argument import as_argument


# Rows of logits turned into float64 at a time: a vocabulary of 50k takes 25 MB for them.
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowScore:
    """
    Sums over the scored positions of one window.

    Args:
        num_scored (`int`): Scored tokens.
        nll (`float`): Negative log-likelihood of the text through the cache, in nats, summed.
        dense_nll (`float`): The same through the dense cache.
        kl (`float`): KL(dense || cache) of the next-token distributions, in nats, summed.
        num_agreeing (`int`): Positions whose most likely token is the dense cache's.
        first_difference (`int`, *optional*): The first position where it is not, if there is one.
    """

    num_scored: int
    nll: float
    dense_nll: float
    kl: float
    num_agreeing: int
    first_difference: int | None = None

    @property
    def mean_kl(self) -> float:
        """Mean KL(dense || cache) of the window's positions."""
        return self.kl / self.num_scored

    @property
    def ppl_ratio(self) -> float:
        """The window's perplexity as a multiple of the dense cache's."""
        return math.exp((self.nll - self.dense_nll) / self.num_scored)


@torch.no_grad()
def fill_cache(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache) -> None:
    """Feeds `[num_tokens]` to the model in one forward through an empty cache, which must then hold all of them."""
    check_is_empty(cache)
    # Only the last logits are computed where the model can do so: the others are a vocabulary each and nobody's.
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=token_ids[None].to(model.device), **as_argument(cache), use_cache=True, **keep)
    check_length(cache, token_ids.numel())


@torch.no_grad()
def continuation_logits(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    after_forward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """
    Feeds `[num_tokens]` to the model through a filled cache and returns all their logits, `[num_tokens, vocabulary]`.

    Args:
        chunk (`int`, *optional*):
            Tokens a forward; 1 is decode. By default all in one, or one by one if the cache would be exact for many.
        after_forward (`Callable[[], None]`, *optional*):
            Called after each forward.
    """
    if chunk is None and getattr(cache, "is_exact_for_many", False):
        chunk = 1
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be at least 1 or `None`, but got {chunk}")
    length_before = cache.get_seq_length()
    if length_before == 0:
        raise ValueError("The cache is empty: scores over it would say nothing about it. Fill it first.")
    parts = token_ids.to(model.device).split(chunk or token_ids.numel())
    logits = []
    for part in parts:
        logits.append(model(input_ids=part[None], **as_argument(cache), use_cache=True).logits[0])
        if after_forward is not None:
            after_forward()
    check_length(cache, length_before + token_ids.numel())
    return torch.cat(logits)


def score_logits(dense_logits: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> WindowScore:
    """Compares a cache's `[num_tokens, vocabulary]` logits with the dense cache's, in float64."""
    nll = dense_nll = kl = 0.0
    agreeing = []
    rows = zip(
        dense_logits.split(_ROWS_AT_A_TIME), logits.split(_ROWS_AT_A_TIME), targets.split(_ROWS_AT_A_TIME), strict=True
    )
    for dense_rows, cache_rows, target_rows in rows:
        dense_log_probs = F.log_softmax(dense_rows.double(), dim=-1)
        log_probs = F.log_softmax(cache_rows.double(), dim=-1)
        target_rows = target_rows.to(log_probs.device)
        dense_nll += F.nll_loss(dense_log_probs, target_rows, reduction="sum").item()
        nll += F.nll_loss(log_probs, target_rows, reduction="sum").item()
        kl += F.kl_div(log_probs, dense_log_probs, reduction="sum", log_target=True).item()
        agreeing.extend((dense_rows.argmax(-1) == cache_rows.argmax(-1)).tolist())
    return WindowScore(
        num_scored=targets.numel(),
        nll=nll,
        dense_nll=dense_nll,
        kl=kl,
        num_agreeing=sum(agreeing),
        first_difference=None if all(agreeing) else agreeing.index(False),
    )
