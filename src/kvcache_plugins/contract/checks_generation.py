"""Checks of `generate` in all its modes, against a plain loop through the same kind of cache, and `DynamicCache`."""

import copy

import torch
from transformers import Cache, PreTrainedModel

from .cache_under_test import LONG_APPEND, LONG_CONTEXT, SHORT_CONTEXT, CacheUnderTest
from .comparison import distance, require, require_length, require_same_tokens


NUM_NEW = 10
NUM_BEAMS = 3
NUM_BEAM_STEPS = 4
NUM_DRAFTED = 4
_CONTEXTS = {"a short context": SHORT_CONTEXT, "a long context": LONG_CONTEXT}
# Largest error of a lossy cache against `DynamicCache`, as a share of its distance from another history
_NEARER_THAN = 0.6
# Prompts, tokens after them, and their logits
_Followed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_greedy(under_test: CacheUnderTest) -> None:
    """`generate` equals single steps, and is near to `DynamicCache`."""
    for context in _CONTEXTS:
        _check_steps(under_test, context, seed=1)


def check_sampling(under_test: CacheUnderTest) -> None:
    """The same seed gives the same tokens."""
    for context in _CONTEXTS:
        _check_steps(under_test, context, seed=2, do_sample=True, top_k=0)


def check_num_return_sequences(under_test: CacheUnderTest) -> None:
    """Several samples of one prompt."""
    _check_steps(
        under_test, "a long context", seed=2, num_sequences=3, do_sample=True, top_k=0, num_return_sequences=3
    )


def check_beam_search(under_test: CacheUnderTest) -> None:
    """Beams equal those of a search that recomputes every step."""
    options = {"num_beams": NUM_BEAMS, "num_return_sequences": NUM_BEAMS}
    for context, length in _CONTEXTS.items():
        prompt = under_test.prompt(length, seed=3)
        tokens = under_test.generate(under_test.make_cache(), prompt, NUM_BEAM_STEPS, **options)
        expected = _beams_without_reordering(under_test, prompt)
        require_same_tokens(tokens, expected, f"beam search and beams recomputed at every step in {context}")
        prompts = prompt.expand(NUM_BEAMS, -1)
        logits = under_test.follow(under_test.make_cache(), (prompts,), tokens)
        _require_dense_if_exact(under_test, (prompts, tokens, logits), context, **options)


def check_prompt_lookup(under_test: CacheUnderTest) -> None:
    """Rejected drafts leave no trace."""
    _check_drafting(under_test, prompt_lookup_num_tokens=NUM_DRAFTED)


def check_assisted(under_test: CacheUnderTest) -> None:
    """Drafts of an assistant model leave no trace."""
    _check_drafting(under_test, assistant_model=_assistant_of(under_test.model))


def check_multi_turn(under_test: CacheUnderTest) -> None:
    """A second `generate` continues from the first."""
    for context, length in _CONTEXTS.items():
        first = under_test.prompt(length, seed=5)
        second = under_test.prompt(min(length, LONG_APPEND), seed=6)
        cache = under_test.make_cache()
        answer = under_test.generate(cache, first, NUM_NEW)
        conversation = torch.cat([first, answer, second], dim=1)
        tokens = under_test.generate(cache, conversation, NUM_NEW)
        require_length(cache, conversation.shape[1] + NUM_NEW - 1, f"after two turns in {context}")

        looped = under_test.make_cache()
        under_test.decode(looped, (first,), NUM_NEW)
        # `generate` does not feed the last token of an answer
        expected, logits = under_test.decode(looped, (torch.cat([answer[:, -1:], second], dim=1),), NUM_NEW)
        require_same_tokens(tokens, expected, f"the second turn and a loop of single steps in {context}")
        _require_dense_if_exact(under_test, (conversation, tokens, logits), context, num_recent=second.shape[1])


def check_chunked_prefill(under_test: CacheUnderTest) -> None:
    """`prefill_chunk_size` equals chunks that are fed one by one."""
    for context, chunk_size in (("a short context", 5), ("a long context", 48)):
        _check_steps(under_test, context, seed=7, chunk_size=chunk_size)


def _check_steps(
    under_test: CacheUnderTest,
    context: str,
    seed: int,
    *,
    num_sequences: int = 1,
    chunk_size: int | None = None,
    **options: object,
) -> None:
    """Compare `generate` with a loop over the prompt's chunks, if any, and single steps."""
    length = _CONTEXTS[context]
    prompts = under_test.prompt(length, seed).expand(num_sequences, -1)
    cache = under_test.make_cache()
    chunks = prompts.split(chunk_size or length, dim=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = under_test.generate(cache, prompts[:1], NUM_NEW, prefill_chunk_size=chunk_size, **options)
        require_length(cache, length + NUM_NEW - 1, f"after `generate` in {context}")
        torch.manual_seed(0)
        expected, logits = under_test.decode(under_test.make_cache(), chunks, NUM_NEW, is_sampled=bool(options))
        require_same_tokens(tokens, expected, f"`generate` and a loop of single steps in {context}")
        torch.manual_seed(0)
        _require_dense_if_exact(under_test, (prompts, tokens, logits), context, num_recent=chunk_size or 0, **options)


def _require_dense_if_exact(
    under_test: CacheUnderTest, followed: _Followed, context: str, *, num_recent: int = 0, **options: object
) -> None:
    """Require the tokens of `DynamicCache` with the same options, if the logits equal its logits up to rounding."""
    if _is_exact(under_test, followed, context, num_recent):
        prompts, tokens, _ = followed
        expected = under_test.generate(under_test.dense.make_cache(), prompts[:1], tokens.shape[1], **options)
        require_same_tokens(tokens, expected, f"exact in {context}, but not the tokens of `DynamicCache`")


def _is_exact(under_test: CacheUnderTest, followed: _Followed, context: str, num_recent: int = 0) -> bool:
    """
    Return true if the logits of `followed` tokens equal those of `DynamicCache` up to rounding: then the tokens have
    to be equal too. Require of a lossy cache that it is nearer to `DynamicCache` than to one with another history, in
    which the `num_recent` newest tokens, by default a sixth, are the same. A cache that has lost its history is as
    near to both.
    """
    prompts, tokens, logits = followed
    expected = under_test.follow(under_test.dense.make_cache(), (prompts,), tokens)
    error = distance(logits, expected)
    if error <= under_test.rounding:
        return True
    num_other = prompts.shape[1] - (num_recent or prompts.shape[1] // 6)
    other_prompts = torch.cat([under_test.prompts(num_other, len(prompts), seed=100), prompts[:, num_other:]], dim=1)
    limit = _NEARER_THAN * distance(logits, under_test.follow(under_test.dense.make_cache(), (other_prompts,), tokens))
    what = f"the logits in {context} are {error:.2g} away from those of `DynamicCache`"
    require(error <= limit, f"{what}, at most {limit:.2g} is right")
    return False


@torch.no_grad()
def _beams_without_reordering(under_test: CacheUnderTest, prompt: torch.Tensor) -> torch.Tensor:
    """Return beams `[NUM_BEAMS, NUM_BEAM_STEPS]`, best first, of a search that feeds a fresh cache at every step."""
    prompts = prompt.expand(NUM_BEAMS, -1)
    beams = prompts.new_empty(NUM_BEAMS, 0)
    # All beams are equal at first, so that only one of them may be continued
    scores = torch.tensor([0.0] + [-1e9] * (NUM_BEAMS - 1), dtype=torch.float32, device=prompt.device)
    for _ in range(NUM_BEAM_STEPS):
        cache = under_test.make_cache()
        logits = under_test.feed(cache, prompts)
        for step in range(beams.shape[1]):
            logits = under_test.feed(cache, beams[:, step : step + 1])
        continued = scores[:, None] + logits[:, -1].log_softmax(dim=-1)
        scores, best = continued.flatten().topk(NUM_BEAMS)
        vocab_size = continued.shape[1]
        beams = torch.cat([beams[best // vocab_size], (best % vocab_size)[:, None]], dim=1)
    return beams


def _check_drafting(under_test: CacheUnderTest, **options: object) -> None:
    """Compare assisted generation with greedy search: rejected drafts have to leave no trace."""
    num_removed = 0
    for context, length in _CONTEXTS.items():
        # Repeated, so that prompt lookup finds something to draft
        prompt = under_test.prompt(length // 2, seed=4).repeat(1, 2)
        cache = under_test.make_cache()
        crops = _record_crops(cache)
        tokens = under_test.generate(cache, prompt, NUM_NEW, **options)[:, :NUM_NEW]
        require_length(cache, prompt.shape[1] + NUM_NEW - 1, f"after assisted generation in {context}")
        num_removed -= sum(crops)
        # The first forward has the prompt and drafts, which may be compressed together
        prompt_and_drafts = torch.cat([prompt, tokens[:, :-2]], dim=1)
        followed = [
            (chunk, rest, under_test.follow(under_test.make_cache(), (chunk,), rest))
            for chunk, rest in ((prompt, tokens), (prompt_and_drafts, tokens[:, -2:]))
        ]
        if all(_is_exact(under_test, each, context) for each in followed):
            expected = under_test.generate(under_test.dense.make_cache(), prompt, NUM_NEW)
            require_same_tokens(tokens, expected, f"exact in {context}, but not the tokens of `DynamicCache`")
        else:
            _require_likeliest(under_test, followed, context)
    require(num_removed > 0, "inconclusive: no draft was rejected, so nothing was rolled back")


def _record_crops(cache: Cache) -> list[int]:
    """Return a list to which every later call of `crop` appends its argument."""
    arguments: list[int] = []
    crop = cache.crop

    def recording(argument: int) -> None:
        arguments.append(argument)
        crop(argument)

    cache.crop = recording  # type: ignore[method-assign, assignment]
    return arguments


def _require_likeliest(under_test: CacheUnderTest, followed: list[_Followed], context: str) -> None:
    """Require that tokens picked with drafts are the likeliest without drafts, up to the cache's own error."""
    error = 0.0
    for chunk, tokens, logits in followed:
        difference = logits - under_test.follow(under_test.dense.make_cache(), (chunk,), tokens)
        error = max(error, (difference - difference.mean(dim=-1, keepdim=True)).abs().max().item())
    _, tokens, logits = followed[0]
    gap = (logits.amax(dim=-1) - logits.gather(-1, tokens[..., None]).squeeze(-1)).max().item()
    what = f"a token of assisted generation in {context} is {gap:.2g} below the best logit"
    require(gap <= 2 * error, f"{what}, but the cache errs by {error:.2g}")


@torch.no_grad()
def _assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with noise on its weights, so that some drafts are accepted and some rejected."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu").to(parameter)
        parameter.add_(0.1 * parameter.std(correction=0) * noise)
    return assistant
