"""Checks of what happens between the rows of a batch: moving, repeating and padding them, keeping them apart."""

import torch
from torch.nn.functional import pad
from transformers import Cache

from .comparison import distance, require, require_close, require_same_tokens
from .subject import LONG_APPEND, LONG_CONTEXT, Subject, contract_check


NUM_ROWS = 3
NUM_REPEATS = 2
NUM_STEPS = 4
NUM_NEW = 8
# Reorderings before a forward. Neither the identity nor its own inverse, so that a permutation that is forgotten or
# applied backwards shows; then one that drops a row; then two at once
_ORDERS = (([2, 0, 1],), ([1, 1, 2],), ([2, 0, 1], [0, 2, 1]))
_LENGTHS = (LONG_CONTEXT, 137, 70)
_LENGTHS_WITH_SHORT_ROW = (LONG_CONTEXT, 137, 11)


@contract_check("`reorder_cache` moves all of a row")
def check_reorder(subject: Subject) -> None:
    reordered, direct, dense = _cache_with_rows(subject), _cache_with_rows(subject), _cache_with_rows(subject.dense)
    sources = torch.arange(NUM_ROWS, device=subject.model.device)
    for turn, orders in enumerate(_ORDERS):
        for order in orders:
            beam_idx = torch.tensor(order, device=sources.device)
            reordered.reorder_cache(beam_idx)  # type: ignore[arg-type]
            sources = sources[beam_idx]
        # Every row goes on with the tokens of the row that it comes from
        steps = subject.rows(NUM_STEPS, NUM_ROWS, seed=60 + NUM_ROWS * turn)
        logits, expected = subject.feed_each(reordered, steps[sources]), subject.feed_each(direct, steps)
        require_close(logits, expected[sources], subject.rounding, f"reordering {turn + 1}, by {orders}")
        subject.feed_each(dense, steps)

    # What is held back for a while has to be in order still when it is compressed at last
    more, last = subject.rows(LONG_APPEND, NUM_ROWS, seed=70), subject.rows(NUM_STEPS, NUM_ROWS, seed=73)
    logits = subject.follow(reordered, (more[sources],), last[sources])
    expected, exact = (subject.follow(cache, (more,), last) for cache in (direct, dense))
    control = min(distance(exact.roll(shift, dims=0), exact) for shift in range(1, NUM_ROWS))
    limit = subject.lossy_limit(distance(expected, exact), control)
    require_close(logits, expected[sources], limit, f"reordered rows after {LONG_APPEND} more tokens")


@contract_check("`batch_repeat_interleave` gives independent copies")
def check_repeat_interleave(subject: Subject) -> None:
    for num_rows in (1, 2):
        repeated = _cache_with_rows(subject, num_rows)
        repeated.batch_repeat_interleave(NUM_REPEATS)
        # Every repeat goes its own way: repeats that share memory would write over each other
        steps = [subject.rows(NUM_STEPS, num_rows, seed=75 + 2 * repeat) for repeat in range(NUM_REPEATS)]
        logits = subject.feed_each(repeated, torch.stack(steps, dim=1).flatten(0, 1))
        for repeat, tokens in enumerate(steps):
            expected = subject.feed_each(_cache_with_rows(subject, num_rows), tokens)
            what = f"repeat {repeat} of a batch of {num_rows}, and the batch itself"
            require_close(logits[repeat::NUM_REPEATS], expected, subject.rounding, what)


@contract_check("`batch_select_indices` keeps the rows asked for")
def check_select_indices(subject: Subject) -> None:
    selected, direct = _cache_with_rows(subject), _cache_with_rows(subject)
    sources = torch.arange(NUM_ROWS, device=subject.model.device)
    for indices in ([2, 0], [1]):
        chosen = torch.tensor(indices, device=sources.device)
        selected.batch_select_indices(chosen)
        sources = sources[chosen]
        steps = subject.rows(NUM_STEPS, NUM_ROWS, seed=80 + len(indices))
        logits, expected = subject.feed_each(selected, steps[sources]), subject.feed_each(direct, steps)
        require_close(logits, expected[sources], subject.rounding, f"rows {sources.tolist()} of {NUM_ROWS}")


@contract_check("a padded row gives what it gives alone")
def check_left_padding(subject: Subject) -> None:
    _check_padded(subject, _LENGTHS)


@contract_check("the same with a row of a few tokens")
def check_left_padding_short(subject: Subject) -> None:
    _check_padded(subject, _LENGTHS_WITH_SHORT_ROW)


@contract_check("a row depends on no other, bit for bit")
def check_row_isolation(subject: Subject) -> None:
    # Several rows beside several others, one of them the same token again and again: a range taken over the whole
    # batch need not change with every neighbour
    rows = subject.rows(LONG_CONTEXT + LONG_APPEND + NUM_STEPS, 4, seed=90).split(1)
    neighbours = (*rows[2:], rows[2][:, :1].expand_as(rows[2]))
    for row in rows[:2]:
        for each, blame in ((subject.dense, "inconclusive, with `DynamicCache` too: "), (subject, "")):
            first, *others = (_logits_beside(each, row, neighbour) for neighbour in neighbours)
            num_changed = max(int((logits != first).sum()) for logits in others)
            count = f"{num_changed} of {first.numel()} logits of a row"
            require(num_changed == 0, f"{blame}{count} changed with the content of the other row")


def _cache_with_rows(subject: Subject, num_rows: int = NUM_ROWS) -> Cache:
    """A cache that has seen a prompt and decoded tokens: history that is compressed and history that is not yet."""
    cache = subject.cache(subject.rows(LONG_CONTEXT, num_rows, seed=50))
    subject.feed_each(cache, subject.rows(NUM_STEPS, num_rows, seed=55))
    return cache


def _logits_beside(subject: Subject, row: torch.Tensor, neighbour: torch.Tensor) -> torch.Tensor:
    """All logits of a row that stands beside another in a batch."""
    prompt, more, steps = torch.cat([row, neighbour]).split([LONG_CONTEXT, LONG_APPEND, NUM_STEPS], dim=1)
    cache = subject.make_cache()
    parts = [subject.feed(cache, prompt), subject.feed(cache, more), subject.feed_each(cache, steps)]
    return torch.cat(parts, dim=1)[0]


def _check_padded(subject: Subject, lengths: tuple[int, ...]) -> None:
    """Every row of a left-padded batch generates what it generates alone, from the same logits to rounding."""
    width = max(lengths)
    prompts = [subject.prompt(length, seed=85 + row) for row, length in enumerate(lengths)]
    padded = torch.cat([pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (width - prompt.shape[1], 0)) for prompt in prompts])
    tokens = subject.generate(subject.make_cache(), padded, NUM_NEW, attention_mask=mask)
    trace = subject.decode(subject.make_cache(), (padded,), NUM_NEW, mask=mask)
    require_same_tokens(tokens, trace.tokens, "`generate` and a loop of single steps over a padded batch")
    for row, prompt in enumerate(prompts):
        alone = subject.decode(subject.make_cache(), (prompt,), NUM_NEW)
        dense = subject.follow(subject.make_reference(), (prompt,), alone.tokens)
        # Kernels round otherwise for another shape, and a rounding error can turn a code over, which then shows by far
        # less than the error of the cache. Padding that enters a range shows by as much as that.
        limit = max(subject.rounding, distance(alone.logits, dense) / 20)
        what = f"row {row} ({prompt.shape[1]} tokens) of a left-padded batch, and alone"
        require_close(trace.logits[row : row + 1, :1], alone.logits[:, :1], limit, what)
        require_same_tokens(tokens[row : row + 1], alone.tokens, what)
        require_close(trace.logits[row : row + 1], alone.logits, limit, what)
