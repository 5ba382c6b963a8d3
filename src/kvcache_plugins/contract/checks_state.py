"""Checks of what a cache remembers: rolling back, starting over, being copied, saved and asked about itself; and of
what happens between the rows of a batch: moving, repeating and padding them, keeping them apart.
"""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Cache

from .comparison import distance, reachable_bytes, require, require_close, require_length, require_same_tokens
from .subject import LONG_APPEND, LONG_CONTEXT, SHORT_CONTEXT, Subject, contract_check, record_calls


NUM_STEPS = 4
NUM_ROUNDS = 9
NUM_DRAFTED = 12
NUM_REJECTED = 4
NUM_CROPPED = 90
NUM_ROWS = 3
NUM_REPEATS = 2
NUM_NEW_PADDED = 8
# Reorderings before a forward. Neither the identity nor its own inverse, so that a permutation that is forgotten or
# applied backwards shows; then one that drops a row; then two at once
_ORDERS = (([2, 0, 1],), ([1, 1, 2],), ([2, 0, 1], [0, 2, 1]))
_LENGTHS = (LONG_CONTEXT, 137, 70)
_LENGTHS_WITH_SHORT_ROW = (LONG_CONTEXT, 137, 11)


@contract_check("`crop(-n)` of what was just appended")
def check_crop_recent(subject: Subject) -> None:
    drafted = subject.prompt(NUM_ROUNDS * NUM_DRAFTED, seed=12).split(NUM_DRAFTED, dim=1)
    kept = tuple(chunk[:, :-NUM_REJECTED] for chunk in drafted)
    continuation = subject.prompt(NUM_STEPS, seed=13)
    for length in (SHORT_CONTEXT, LONG_CONTEXT):
        prompt = subject.prompt(length, seed=11)
        cropped = subject.cache(prompt, drafted[0])
        _crop(cropped, NUM_REJECTED)
        require_length(cropped, length + kept[0].shape[1], "after crop")
        what = f"{NUM_REJECTED} of {NUM_DRAFTED} tokens after {length} removed, and never seen"
        subject.require_alike(cropped, subject.cache(prompt, kept[0]), continuation, what)
        # The rhythm of speculative decoding, some tokens forward and a few back, until any buffer has overflowed
        cropped, straight = subject.cache(prompt), subject.cache(prompt, *kept)
        for chunk in drafted:
            subject.feed(cropped, chunk)
            _crop(cropped, NUM_REJECTED)
        require_length(cropped, straight.get_seq_length(), f"after {NUM_ROUNDS} rounds of drafting and rejecting")
        logits, expected = subject.feed_each(cropped, continuation), subject.feed_each(straight, continuation)
        dense, uncropped = (
            subject.feed_each(subject.dense.cache(prompt, *chunks), continuation) for chunks in (kept, drafted)
        )
        limit = subject.lossy_limit(noise=distance(expected, dense), control=distance(uncropped, dense))
        what = f"{NUM_ROUNDS} rounds of drafting and rejecting after {length} tokens, and never drafting"
        require_close(logits, expected, limit, what)


@contract_check("`crop(-n)` deep into the prompt, and to nothing")
def check_crop_prompt(subject: Subject) -> None:
    prompt, steps = subject.prompt(LONG_CONTEXT, seed=14), subject.prompt(NUM_STEPS, seed=15)
    continuation, more = subject.prompt(NUM_STEPS, seed=16), subject.prompt(LONG_APPEND, seed=17)
    # Right after the prompt, as assisted generation does, and far back
    for history, num_cropped in (((prompt,), NUM_REJECTED), ((prompt, steps), NUM_CROPPED)):
        left = torch.cat(history, dim=1)[:, :-num_cropped]
        cropped = subject.cache(*history)
        _crop(cropped, num_cropped)
        require_length(cropped, left.shape[1], f"after `crop({-num_cropped})` into the prompt")
        logits = subject.feed_each(cropped, continuation)
        masked = subject.cache(*history)
        # Sliding windows count what is stored, masked or not
        if not any(masked.is_sliding):
            mask = torch.ones_like(torch.cat(history, dim=1))
            mask[:, -num_cropped:] = 0
            expected = subject.feed_each(masked, continuation, mask)
            require_close(logits, expected, subject.rounding, "cropped into the prompt, and the same tokens masked")
        # Beside a cache that never saw the tokens, as near as two compressions are
        shorter, dense_shorter, whole, dense_whole = (
            each.feed_each(each.cache(*chunks), continuation)
            for chunks in ((left,), history)
            for each in (subject, subject.dense)
        )
        noise = max(distance(shorter, dense_shorter), distance(whole, dense_whole))
        limit = max(subject.rounding, 2 * noise)
        require_close(logits, shorter, limit, "cropped into the prompt, and never having seen the rest")
        subject.feed(cropped, more)
        require_length(cropped, left.shape[1] + NUM_STEPS + LONG_APPEND, "after going on from a cropped cache")
    _crop(cropped, cropped.get_seq_length())
    require_length(cropped, 0, "after all tokens were cropped")
    again, expected = (subject.follow(cache, (left,), continuation) for cache in (cropped, subject.make_cache()))
    require_close(again, expected, subject.rounding, "a cache cropped to nothing and used again, and a fresh one")


@contract_check("`crop(0)` changes nothing")
def check_crop_zero(subject: Subject) -> None:
    prompt = subject.prompt(LONG_CONTEXT, seed=18)
    cache, untouched = subject.cache(prompt), subject.cache(prompt)
    for step in subject.prompt(2 * LONG_APPEND, seed=19).split(10, dim=1):
        _crop(cache, 0)
        require_length(cache, untouched.get_seq_length(), "after `crop(0)`")
        what = "with and without `crop(0)` before every forward"
        subject.require_alike(cache, untouched, step, what, at_once=True)


@contract_check("`crop(n)` raises and changes nothing")
def check_crop_positive(subject: Subject) -> None:
    prompt, steps = subject.prompt(LONG_CONTEXT, seed=20), subject.prompt(NUM_STEPS, seed=21)
    cache = subject.cache(prompt)
    require(_refuses_positive(cache), "`crop(3)` has to raise a ValueError")
    subject.require_alike(cache, subject.cache(prompt), steps, "after `crop(3)` was refused")


@contract_check("a reset cache is a fresh one")
def check_reset(subject: Subject) -> None:
    cache = subject.cache(subject.rows(LONG_CONTEXT, 2, seed=22), subject.rows(LONG_APPEND, 2, seed=24))
    # Shorter than the first history and of another batch size, then longer again, then too short to be compressed
    for num_rows, length in ((1, LONG_CONTEXT - 40), (2, LONG_CONTEXT), (1, SHORT_CONTEXT)):
        cache.reset()
        require_length(cache, 0, "after reset")
        prompt, steps = subject.rows(length, num_rows, seed=25), subject.rows(NUM_STEPS, num_rows, seed=27)
        logits, expected = (subject.follow(each, (prompt,), steps) for each in (cache, subject.make_cache()))
        what = f"a reset cache and a fresh one, {num_rows} rows of {length} tokens"
        require_close(logits, expected, subject.rounding, what)


@contract_check("a copy and its original go on independently")
def check_deepcopy(subject: Subject) -> None:
    prompt = subject.rows(LONG_CONTEXT, 2, seed=29)
    original = subject.cache(prompt)
    caches = {"original": original, "copy": copy.deepcopy(original)}
    direct = {name: subject.cache(prompt) for name in caches}
    futures = {
        name: subject.rows(2 * NUM_STEPS + LONG_APPEND, 2, seed) for name, seed in (("original", 31), ("copy", 33))
    }
    # In turns, token by token and then many at once: shared storage that is written in place shows up
    sizes = [1] * NUM_STEPS + [LONG_APPEND] + [1] * NUM_STEPS
    for pieces in zip(*(future.split(sizes, dim=1) for future in futures.values()), strict=True):
        for name, piece in zip(caches, pieces, strict=True):
            what = f"the {name} after `copy.deepcopy`, and a cache built directly"
            subject.require_alike(caches[name], direct[name], piece, what, at_once=True)
    length = original.get_seq_length()
    caches["copy"].reset()
    require_length(original, length, "the original after the reset of its copy")
    piece = subject.rows(NUM_STEPS, 2, seed=35)
    what = "the original after the reset of its copy"
    subject.require_alike(original, direct["original"], piece, what, at_once=True)


@contract_check("lengths and mask sizes agree at every step")
def check_lengths(subject: Subject) -> None:
    cache = subject.make_cache()
    updates = record_calls(cache, "update")
    require_length(cache, 0, "before the first forward")
    num_seen = 0
    for size in (LONG_CONTEXT, 1, 1, 5, LONG_APPEND, 1, LONG_CONTEXT, 1):
        announced = []
        for layer_idx in range(len(cache.layers)):
            length, offset = cache.get_mask_sizes(size, layer_idx)
            right = length + offset == num_seen + size and (offset == 0 or cache.is_sliding[layer_idx])
            sizes = f"`get_mask_sizes({size})` says {(length, offset)}"
            require(right, f"layer {layer_idx} has seen {num_seen} tokens, but {sizes}")
            announced.append(length)
        subject.feed(cache, subject.prompt(size, seed=num_seen))
        num_seen += size
        # A cache without a config has no layers before its first forward
        returned = {arguments[2]: [states.shape[-2] for states in result] for arguments, _, result in updates}
        for layer_idx, expected in enumerate(announced or [num_seen] * len(cache.layers)):
            message = f"layer {layer_idx} returned {returned[layer_idx]} keys and values, {expected} were announced"
            require(returned[layer_idx] == [expected, expected], message)
            length = cache.get_seq_length(layer_idx)
            require(length == num_seen, f"`get_seq_length({layer_idx})` says {length}, it should be {num_seen}")
            max_length = cache.get_max_length(layer_idx)
            roomy = max_length == -1 or max_length >= num_seen or cache.is_sliding[layer_idx]
            require(roomy, f"`get_max_length({layer_idx})` says {max_length}, but it holds {num_seen} tokens")
    require(cache.is_initialized, "`is_initialized` is False after several forwards")


@contract_check("`memory()` is what the tensors have, `stats()` counts")
def check_memory(subject: Subject) -> None:
    # This project's addition to the contract of Transformers, as `save` and `load` are
    cache: Any = subject.make_cache()
    if not (hasattr(cache, "memory") and hasattr(cache, "stats")):
        raise NotImplementedError("not supported: the cache has no `memory()` and `stats()`")
    _require_memory(cache, "when empty")
    for length in (LONG_CONTEXT, 1, LONG_APPEND, 1):
        subject.feed(cache, subject.rows(length, 2, seed=36))
        _require_memory(cache, f"after {cache.get_seq_length()} tokens")
    stats = cache.stats()
    # How a cache was chosen may stand beside what it counts
    counts = [value for value in stats.values() if isinstance(value, int)]
    is_plain = all(isinstance(value, (int, float, str, Mapping)) for value in stats.values())
    require(is_plain and bool(counts), f"`stats()` has to count, but got {stats}")
    require(any(counts), f"`stats()` shows no sign that the cache was used: {stats}")
    cache.reset()
    _require_memory(cache, "after reset")


@contract_check("a saved cache goes on after loading")
def check_save_load(subject: Subject) -> None:
    history = [subject.rows(length, 2, seed=37 + length) for length in (LONG_CONTEXT, LONG_APPEND, 1, NUM_STEPS)]
    cache: Any = subject.cache(*history)
    if not (hasattr(cache, "save") and hasattr(cache, "load")):
        raise NotImplementedError("not supported: the cache has no `save` and `load`")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path, subject.model)
        loaded = type(cache).load(path, subject.model)
    require_length(loaded, cache.get_seq_length(), "after loading")
    future = subject.rows(2 * NUM_STEPS + LONG_APPEND, 2, seed=41)
    for piece in future.split([1] * NUM_STEPS + [LONG_APPEND] + [1] * NUM_STEPS, dim=1):
        subject.require_alike(loaded, cache, piece, "a loaded cache and the one that was saved", at_once=True)


@contract_check("`reorder_cache` moves all of a row")
def check_reorder(subject: Subject) -> None:
    reordered, direct, dense = _cache_with_rows(subject), _cache_with_rows(subject), _cache_with_rows(subject.dense)
    sources = torch.arange(NUM_ROWS, dtype=torch.int64, device=subject.model.device)
    for turn, orders in enumerate(_ORDERS):
        for order in orders:
            beam_idx = torch.tensor(order, dtype=torch.int64, device=sources.device)
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
    sources = torch.arange(NUM_ROWS, dtype=torch.int64, device=subject.model.device)
    for indices in ([2, 0], [1]):
        chosen = torch.tensor(indices, dtype=torch.int64, device=sources.device)
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


def _crop(cache: Cache, num_tokens: int) -> None:
    """Crops. A cache that cannot has to say so by `is_croppable` as well."""
    try:
        cache.crop(-num_tokens)
    except (NotImplementedError, ValueError) as error:
        require(not cache.is_croppable, f"`crop({-num_tokens})` raises, but `is_croppable` is True: {error}")
        raise


def _refuses_positive(cache: Cache) -> bool:
    # A sliding-window layer of Transformers beyond its window has an error of its own
    refusal = (ValueError, RuntimeError) if any(cache.is_sliding) else ValueError
    try:
        cache.crop(3)
    except refusal:
        return True
    return False


def _require_memory(cache: Any, when: str) -> None:
    report, held = cache.memory(), reachable_bytes(cache)
    says = f"`memory()` says {report.total_bytes} bytes {report.parts} {when}"
    require(report.total_bytes == held, f"{says}, but the tensors reachable from the cache have {held}")
    per_device = sum(report.devices.values())
    require(per_device == held, f"`memory()` gives {per_device} bytes over all devices {when}, not {held}")


def _cache_with_rows(subject: Subject, num_rows: int = NUM_ROWS) -> Cache:
    """Makes a cache with history that is compressed and history that is not yet."""
    cache = subject.cache(subject.rows(LONG_CONTEXT, num_rows, seed=50))
    subject.feed_each(cache, subject.rows(NUM_STEPS, num_rows, seed=55))
    return cache


def _logits_beside(subject: Subject, row: torch.Tensor, neighbour: torch.Tensor) -> torch.Tensor:
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
    tokens = subject.generate(subject.make_cache(), padded, NUM_NEW_PADDED, attention_mask=mask)
    expected, logits = subject.decode(subject.make_cache(), (padded,), NUM_NEW_PADDED, mask=mask)
    require_same_tokens(tokens, expected, "`generate` and a loop of single steps over a padded batch")
    for row, prompt in enumerate(prompts):
        alone, alone_logits = subject.decode(subject.make_cache(), (prompt,), NUM_NEW_PADDED)
        dense = subject.follow(subject.dense.make_cache(), (prompt,), alone)
        # Kernels round otherwise for another shape, and a rounding error can turn a code over, which then shows by far
        # less than the error of the cache. Padding that enters a range shows by as much as that.
        limit = max(subject.rounding, distance(alone_logits, dense) / 20)
        what = f"row {row} ({prompt.shape[1]} tokens) of a left-padded batch, and alone"
        require_close(logits[row : row + 1, :1], alone_logits[:, :1], limit, what)
        require_same_tokens(tokens[row : row + 1], alone, what)
        require_close(logits[row : row + 1], alone_logits, limit, what)
