"""Checks of `generate` in all its modes: against a plain loop through the same kind of cache, and `DynamicCache`."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from .comparison import distance, require, require_length, require_same_tokens
from .subject import (
    LONG_APPEND,
    LONG_CONTEXT,
    SHORT_CONTEXT,
    Subject,
    contract_check,
    record_calls,
)


NUM_NEW = 10
NUM_BEAMS = 3
NUM_BEAM_STEPS = 4
NUM_DRAFTED = 4
_CONTEXTS = {"a short context": SHORT_CONTEXT, "a long context": LONG_CONTEXT}
# Error of a lossy cache against `DynamicCache`, at most, as a share of its distance from another history
_NEARER_THAN = 0.6
# Prompts, tokens after them, and their logits
_Followed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contract_check("what single steps give, near to `DynamicCache`")
def check_greedy(subject: Subject) -> None:
    for context in _CONTEXTS:
        _check_steps(subject, context, seed=1)


@contract_check("the same seed gives the same tokens")
def check_sampling(subject: Subject) -> None:
    for context in _CONTEXTS:
        _check_steps(subject, context, seed=2, do_sample=True, top_k=0)


@contract_check("several samples of one prompt")
def check_num_return_sequences(subject: Subject) -> None:
    _check_steps(subject, "a long context", seed=2, num_sequences=3, do_sample=True, top_k=0, num_return_sequences=3)


@contract_check("beams as if recomputed at every step")
def check_beam_search(subject: Subject) -> None:
    options = {"num_beams": NUM_BEAMS, "num_return_sequences": NUM_BEAMS}
    for context, length in _CONTEXTS.items():
        prompt = subject.prompt(length, seed=3)
        tokens = subject.generate(subject.make_cache(), prompt, NUM_BEAM_STEPS, **options)
        expected = _beams_without_reordering(subject, prompt)
        require_same_tokens(tokens, expected, f"beam search and beams recomputed at every step in {context}")
        prompts = prompt.expand(NUM_BEAMS, -1)
        logits = subject.follow(subject.make_cache(), (prompts,), tokens)
        _require_dense_if_exact(subject, (prompts, tokens, logits), context, **options)


@contract_check("rejected drafts leave no trace")
def check_prompt_lookup(subject: Subject) -> None:
    _check_drafting(subject, prompt_lookup_num_tokens=NUM_DRAFTED)


@contract_check("drafts of an assistant model leave no trace")
def check_assisted(subject: Subject) -> None:
    _check_drafting(subject, assistant_model=_assistant_of(subject.model))


@contract_check("a second `generate` goes on from the first")
def check_multi_turn(subject: Subject) -> None:
    for context, length in _CONTEXTS.items():
        first = subject.prompt(length, seed=5)
        second = subject.prompt(min(length, LONG_APPEND), seed=6)
        cache = subject.make_cache()
        answer = subject.generate(cache, first, NUM_NEW)
        conversation = torch.cat([first, answer, second], dim=1)
        tokens = subject.generate(cache, conversation, NUM_NEW)
        require_length(cache, conversation.shape[1] + NUM_NEW - 1, f"after two turns in {context}")

        looped = subject.make_cache()
        subject.decode(looped, (first,), NUM_NEW)
        # The last token of an answer is not in the cache yet
        expected, logits = subject.decode(looped, (torch.cat([answer[:, -1:], second], dim=1),), NUM_NEW)
        require_same_tokens(tokens, expected, f"the second turn and a loop of single steps in {context}")
        _require_dense_if_exact(subject, (conversation, tokens, logits), context, num_recent=second.shape[1])


@contract_check("`prefill_chunk_size` gives what chunks by hand give")
def check_chunked_prefill(subject: Subject) -> None:
    for context, chunk_size in (("a short context", 5), ("a long context", 48)):
        _check_steps(subject, context, seed=7, chunk_size=chunk_size)


def _check_steps(
    subject: Subject, context: str, seed: int, *, num_sequences: int = 1, chunk_size: int | None = None, **options: Any
) -> None:
    """Compares what `generate` makes of a prompt with a loop over its chunks, if any, and single steps."""
    length = _CONTEXTS[context]
    prompts, cache = subject.prompt(length, seed).expand(num_sequences, -1), subject.make_cache()
    chunks = prompts.split(chunk_size or length, dim=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = subject.generate(cache, prompts[:1], NUM_NEW, prefill_chunk_size=chunk_size, **options)
        require_length(cache, length + NUM_NEW - 1, f"after `generate` in {context}")
        torch.manual_seed(0)
        expected, logits = subject.decode(subject.make_cache(), chunks, NUM_NEW, is_sampled=bool(options))
        require_same_tokens(tokens, expected, f"`generate` and a loop of single steps in {context}")
        torch.manual_seed(0)
        _require_dense_if_exact(subject, (prompts, tokens, logits), context, num_recent=chunk_size or 0, **options)


def _require_dense_if_exact(
    subject: Subject, followed: _Followed, context: str, *, num_recent: int = 0, **options: Any
) -> None:
    """Requires the tokens that `DynamicCache` gives with the same options, where logits are its own to rounding."""
    if _is_exact(subject, followed, context, num_recent):
        prompts, tokens, _ = followed
        expected = subject.generate(subject.dense.make_cache(), prompts[:1], tokens.shape[1], **options)
        require_same_tokens(tokens, expected, f"exact in {context}, but not the tokens of `DynamicCache`")


def _is_exact(subject: Subject, followed: _Followed, context: str, num_recent: int = 0) -> bool:
    """
    Tells whether logits of tokens `followed` are those of `DynamicCache` to rounding, so that the tokens have
    to be too. A lossy cache has to be nearer to it than to a `DynamicCache` that has seen another history, but for the
    `num_recent` newest tokens, by default a sixth: as near to both is a cache that has lost its history.
    """
    prompts, tokens, logits = followed
    expected = subject.follow(subject.dense.make_cache(), (prompts,), tokens)
    error = distance(logits, expected)
    if error <= subject.rounding:
        return True
    num_other = prompts.shape[1] - (num_recent or prompts.shape[1] // 6)
    other_prompts = torch.cat([subject.rows(num_other, len(prompts), seed=100), prompts[:, num_other:]], dim=1)
    limit = _NEARER_THAN * distance(logits, subject.follow(subject.dense.make_cache(), (other_prompts,), tokens))
    what = f"the logits in {context} are {error:.2g} away from those of `DynamicCache`"
    require(error <= limit, f"{what}, at most {limit:.2g} is right")
    return False


@torch.no_grad()
def _beams_without_reordering(subject: Subject, prompt: torch.Tensor) -> torch.Tensor:
    """
    Searches by beams that are fed again to a fresh cache at every step, `[NUM_BEAMS, NUM_BEAM_STEPS]`, best first.
    """
    prompts = prompt.expand(NUM_BEAMS, -1)
    beams = prompts.new_empty(NUM_BEAMS, 0)
    # All beams begin equal, so that only one of them may be continued
    scores = torch.tensor([0.0] + [-1e9] * (NUM_BEAMS - 1), dtype=torch.float32, device=prompt.device)
    for _ in range(NUM_BEAM_STEPS):
        cache = subject.make_cache()
        logits = subject.feed(cache, prompts)
        for step in range(beams.shape[1]):
            logits = subject.feed(cache, beams[:, step : step + 1])
        continued = scores[:, None] + logits[:, -1].log_softmax(dim=-1)
        scores, best = continued.flatten().topk(NUM_BEAMS)
        vocab_size = continued.shape[1]
        beams = torch.cat([beams[best // vocab_size], (best % vocab_size)[:, None]], dim=1)
    return beams


def _check_drafting(subject: Subject, **options: object) -> None:
    """Assisted tokens are those of greedy search: rejected drafts leave no trace in what comes after them."""
    num_removed = 0
    for context, length in _CONTEXTS.items():
        # Said twice, so that prompt lookup finds something to draft
        prompt = subject.prompt(length // 2, seed=4).repeat(1, 2)
        cache = subject.make_cache()
        crops = record_calls(cache, "crop")
        tokens = subject.generate(cache, prompt, NUM_NEW, **options)[:, :NUM_NEW]
        require_length(cache, prompt.shape[1] + NUM_NEW - 1, f"after assisted generation in {context}")
        num_removed += sum(-n for (n,), *_ in crops)
        # The first forward takes in drafts with the prompt, and both may be compressed together
        prompt_and_drafts = torch.cat([prompt, tokens[:, :-2]], dim=1)
        followed = [
            (chunk, rest, subject.follow(subject.make_cache(), (chunk,), rest))
            for chunk, rest in ((prompt, tokens), (prompt_and_drafts, tokens[:, -2:]))
        ]
        if all(_is_exact(subject, each, context) for each in followed):
            expected = subject.generate(subject.dense.make_cache(), prompt, NUM_NEW)
            require_same_tokens(tokens, expected, f"exact in {context}, but not the tokens of `DynamicCache`")
        else:
            _require_likeliest(subject, followed, context)
    require(num_removed > 0, "inconclusive: no draft was rejected, so nothing was rolled back")


def _require_likeliest(subject: Subject, followed: list[_Followed], context: str) -> None:
    """Tokens that a lossy cache picked beside drafts have to be the likeliest without them, up to its own error."""
    error = 0.0
    for chunk, tokens, logits in followed:
        difference = logits - subject.follow(subject.dense.make_cache(), (chunk,), tokens)
        error = max(error, (difference - difference.mean(dim=-1, keepdim=True)).abs().max().item())
    _, tokens, logits = followed[0]
    gap = (logits.amax(dim=-1) - logits.gather(-1, tokens[..., None]).squeeze(-1)).max().item()
    what = f"a token of assisted generation in {context} is {gap:.2g} below the best logit"
    require(gap <= 2 * error, f"{what}, but the cache errs by {error:.2g}")


@torch.no_grad()
def _assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model with noise on its weights, so that some of what it drafts is accepted and some rejected."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu").to(parameter)
        parameter.add_(0.1 * parameter.std(correction=0) * noise)
    return assistant
