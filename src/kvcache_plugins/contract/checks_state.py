"""Checks of a cache's state (crops, resets, copies, files, reports) and of the sequences of a batch (reordering,
repeating and padding them, independence of each other).
"""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from kvcache_plugins.reports.memory import MemoryReport, StatValue

from .cache_under_test import LONG_APPEND, LONG_CONTEXT, SHORT_CONTEXT, CacheUnderTest
from .comparison import distance, reachable_bytes, require, require_close, require_length, require_same_tokens


NUM_STEPS = 4
NUM_ROUNDS = 9
NUM_DRAFTED = 12
NUM_REJECTED = 4
NUM_CROPPED = 90
NUM_SEQUENCES = 3
NUM_REPEATS = 2
# Distance between logits of a cache and of the reference, over the largest that one code of another value causes
_NOISE_OVER_A_CODE = 20
NUM_NEW_PADDED = 8
# Reorderings before each forward: a permutation that is not its own inverse, so that one that is forgotten or inverted
# shows; one that drops a sequence; and two in a row
_ORDERS = (([2, 0, 1],), ([1, 1, 2],), ([2, 0, 1], [0, 2, 1]))
_LENGTHS = (LONG_CONTEXT, 137, 70)
_LENGTHS_WITH_A_SHORT_ONE = (LONG_CONTEXT, 137, 11)


@runtime_checkable
class _Reporting(Protocol):
    """Cache with the reports of this project, which the contract of Transformers does not have."""

    def memory(self) -> MemoryReport: ...

    def stats(self) -> Mapping[str, StatValue]: ...


@runtime_checkable
class _Savable(Protocol):
    """Cache that can be saved, which the contract of Transformers does not have."""

    def save(self, path: Path, model: PreTrainedModel) -> None: ...

    @classmethod
    def load(cls, path: Path, model: PreTrainedModel) -> Cache: ...


def check_crop_recent(under_test: CacheUnderTest) -> None:
    """`crop(-n)` removes tokens that were just appended."""
    drafted = under_test.prompt(NUM_ROUNDS * NUM_DRAFTED, seed=12).split(NUM_DRAFTED, dim=1)
    kept = tuple(chunk[:, :-NUM_REJECTED] for chunk in drafted)
    continuation = under_test.prompt(NUM_STEPS, seed=13)
    for length in (SHORT_CONTEXT, LONG_CONTEXT):
        prompt = under_test.prompt(length, seed=11)
        cropped = under_test.cache(prompt, drafted[0])
        _crop(cropped, NUM_REJECTED)
        require_length(cropped, length + kept[0].shape[1], "after crop")
        what = f"{NUM_REJECTED} of {NUM_DRAFTED} tokens after {length} removed, and never seen"
        never_seen = under_test.cache(prompt, kept[0]), under_test.dense.cache(prompt, kept[0])
        logits, expected, exact = (under_test.feed_each(cache, continuation) for cache in (cropped, *never_seen))
        # Forwards of more tokens round in another way, which may change a code
        limit = max(under_test.rounding, distance(expected, exact) / _NOISE_OVER_A_CODE)
        require_close(logits, expected, limit, what)
        # Drafts and rejections in turn, as in speculative decoding, until every buffer has overflowed
        cropped, straight = under_test.cache(prompt), under_test.cache(prompt, *kept)
        for chunk in drafted:
            under_test.feed(cropped, chunk)
            _crop(cropped, NUM_REJECTED)
        require_length(cropped, straight.get_seq_length(), f"after {NUM_ROUNDS} rounds of drafting and rejecting")
        logits, expected = under_test.feed_each(cropped, continuation), under_test.feed_each(straight, continuation)
        dense, uncropped = (
            under_test.feed_each(under_test.dense.cache(prompt, *chunks), continuation) for chunks in (kept, drafted)
        )
        limit = under_test.lossy_limit(noise=distance(expected, dense), control=distance(uncropped, dense))
        what = f"{NUM_ROUNDS} rounds of drafting and rejecting after {length} tokens, and never drafting"
        require_close(logits, expected, limit, what)


def check_crop_prompt(under_test: CacheUnderTest) -> None:
    """`crop(-n)` removes tokens far into the prompt, and all tokens."""
    prompt, steps = under_test.prompt(LONG_CONTEXT, seed=14), under_test.prompt(NUM_STEPS, seed=15)
    continuation, more = under_test.prompt(NUM_STEPS, seed=16), under_test.prompt(LONG_APPEND, seed=17)
    # Right after the prompt, as assisted generation does, and far back
    for history, num_cropped in (((prompt,), NUM_REJECTED), ((prompt, steps), NUM_CROPPED)):
        remaining = torch.cat(history, dim=1)[:, :-num_cropped]
        cropped = under_test.cache(*history)
        _crop(cropped, num_cropped)
        require_length(cropped, remaining.shape[1], f"after `crop({-num_cropped})` into the prompt")
        logits = under_test.feed_each(cropped, continuation)
        masked = under_test.cache(*history)
        # A sliding window counts stored tokens, masked or not
        if not any(masked.is_sliding):
            mask = torch.ones_like(torch.cat(history, dim=1))
            mask[:, -num_cropped:] = 0
            expected = under_test.feed_each(masked, continuation, mask)
            require_close(logits, expected, under_test.rounding, "cropped into the prompt, and the same tokens masked")
        # Two compressions may differ by the errors of both
        shorter, dense_shorter, whole, dense_whole = (
            each.feed_each(each.cache(*chunks), continuation)
            for chunks in ((remaining,), history)
            for each in (under_test, under_test.dense)
        )
        noise = max(distance(shorter, dense_shorter), distance(whole, dense_whole))
        limit = max(under_test.rounding, 2 * noise)
        require_close(logits, shorter, limit, "cropped into the prompt, and never having seen the rest")
        under_test.feed(cropped, more)
        require_length(cropped, remaining.shape[1] + NUM_STEPS + LONG_APPEND, "after going on from a cropped cache")
    _crop(cropped, cropped.get_seq_length())
    require_length(cropped, 0, "after all tokens were cropped")
    again, expected = (
        under_test.follow(cache, (remaining,), continuation) for cache in (cropped, under_test.make_cache())
    )
    require_close(again, expected, under_test.rounding, "a cache cropped to nothing and used again, and a fresh one")


def check_crop_zero(under_test: CacheUnderTest) -> None:
    """`crop(0)` changes nothing."""
    prompt = under_test.prompt(LONG_CONTEXT, seed=18)
    cache, untouched = under_test.cache(prompt), under_test.cache(prompt)
    for step in under_test.prompt(2 * LONG_APPEND, seed=19).split(10, dim=1):
        _crop(cache, 0)
        require_length(cache, untouched.get_seq_length(), "after `crop(0)`")
        what = "with and without `crop(0)` before every forward"
        under_test.require_alike(cache, untouched, step, what, at_once=True)


def check_crop_positive(under_test: CacheUnderTest) -> None:
    """`crop(n)` raises and changes nothing."""
    prompt, steps = under_test.prompt(LONG_CONTEXT, seed=20), under_test.prompt(NUM_STEPS, seed=21)
    cache = under_test.cache(prompt)
    require(_refuses_positive(cache), "`crop(3)` has to raise a ValueError")
    under_test.require_alike(cache, under_test.cache(prompt), steps, "after `crop(3)` was refused")


def check_reset(under_test: CacheUnderTest) -> None:
    """A reset cache equals a fresh one."""
    cache = under_test.cache(under_test.prompts(LONG_CONTEXT, 2, seed=22), under_test.prompts(LONG_APPEND, 2, seed=24))
    # Shorter than the first history and of another batch size, then longer again, then too short to be compressed
    for batch_size, length in ((1, LONG_CONTEXT - 40), (2, LONG_CONTEXT), (1, SHORT_CONTEXT)):
        cache.reset()
        require_length(cache, 0, "after reset")
        prompt = under_test.prompts(length, batch_size, seed=25)
        steps = under_test.prompts(NUM_STEPS, batch_size, seed=27)
        logits, expected = (under_test.follow(each, (prompt,), steps) for each in (cache, under_test.make_cache()))
        what = f"a reset cache and a fresh one, {batch_size} sequences of {length} tokens"
        require_close(logits, expected, under_test.rounding, what)


def check_deepcopy(under_test: CacheUnderTest) -> None:
    """A copy and its original continue independently."""
    prompt = under_test.prompts(LONG_CONTEXT, 2, seed=29)
    original = under_test.cache(prompt)
    caches = {"original": original, "copy": copy.deepcopy(original)}
    direct = {name: under_test.cache(prompt) for name in caches}
    futures = {
        name: under_test.prompts(2 * NUM_STEPS + LONG_APPEND, 2, seed)
        for name, seed in (("original", 31), ("copy", 33))
    }
    # In turns, single tokens and many at once, so that writes to shared storage show
    sizes = [1] * NUM_STEPS + [LONG_APPEND] + [1] * NUM_STEPS
    for pieces in zip(*(future.split(sizes, dim=1) for future in futures.values()), strict=True):
        for name, piece in zip(caches, pieces, strict=True):
            what = f"the {name} after `copy.deepcopy`, and a cache built directly"
            under_test.require_alike(caches[name], direct[name], piece, what, at_once=True)
    length = original.get_seq_length()
    caches["copy"].reset()
    require_length(original, length, "the original after the reset of its copy")
    piece = under_test.prompts(NUM_STEPS, 2, seed=35)
    what = "the original after the reset of its copy"
    under_test.require_alike(original, direct["original"], piece, what, at_once=True)


def check_lengths(under_test: CacheUnderTest) -> None:
    """Lengths and mask sizes agree at every step."""
    cache = under_test.make_cache()
    updates = _record_updates(cache)
    require_length(cache, 0, "before the first forward")
    num_seen = 0
    for size in (LONG_CONTEXT, 1, 1, 5, LONG_APPEND, 1, LONG_CONTEXT, 1):
        announced_lengths = []
        for layer_idx in range(len(cache.layers)):
            length, offset = cache.get_mask_sizes(size, layer_idx)
            right = length + offset == num_seen + size and (offset == 0 or cache.is_sliding[layer_idx])
            sizes = f"`get_mask_sizes({size})` says {(length, offset)}"
            require(right, f"layer {layer_idx} has seen {num_seen} tokens, but {sizes}")
            announced_lengths.append(length)
        under_test.feed(cache, under_test.prompt(size, seed=num_seen))
        num_seen += size
        # A cache without a config has no layers before its first forward
        for layer_idx, expected in enumerate(announced_lengths or [num_seen] * len(cache.layers)):
            lengths = [states.shape[-2] for states in updates[layer_idx]]
            message = f"layer {layer_idx} returned {lengths} keys and values, {expected} were announced"
            require(lengths == [expected, expected], message)
            length = cache.get_seq_length(layer_idx)
            require(length == num_seen, f"`get_seq_length({layer_idx})` says {length}, it should be {num_seen}")
            max_length = cache.get_max_length(layer_idx)
            roomy = max_length == -1 or max_length >= num_seen or cache.is_sliding[layer_idx]
            require(roomy, f"`get_max_length({layer_idx})` says {max_length}, but it holds {num_seen} tokens")
    require(cache.is_initialized, "`is_initialized` is False after several forwards")


def check_memory(under_test: CacheUnderTest) -> None:
    """`memory()` equals the bytes of the tensors, and `stats()` counts."""
    cache = under_test.make_cache()
    if not isinstance(cache, _Reporting):
        raise NotImplementedError("not supported: the cache has no `memory()` and `stats()`")
    _require_memory(cache, "when empty")
    for length in (LONG_CONTEXT, 1, LONG_APPEND, 1):
        under_test.feed(cache, under_test.prompts(length, 2, seed=36))
        _require_memory(cache, f"after {cache.get_seq_length()} tokens")
    stats = cache.stats()
    # A chosen cache has measurements beside its counters
    counts = [value for value in stats.values() if isinstance(value, int)]
    is_plain = all(isinstance(value, (int, float, str, Mapping)) for value in stats.values())
    require(is_plain and bool(counts), f"`stats()` has to count, but got {stats}")
    require(any(counts), f"`stats()` shows no sign that the cache was used: {stats}")
    cache.reset()
    _require_memory(cache, "after reset")


def check_save_load(under_test: CacheUnderTest) -> None:
    """A loaded cache continues like the one that was saved."""
    history = [under_test.prompts(length, 2, seed=37 + length) for length in (LONG_CONTEXT, LONG_APPEND, 1, NUM_STEPS)]
    cache = under_test.cache(*history)
    if not isinstance(cache, _Savable):
        raise NotImplementedError("not supported: the cache has no `save` and `load`")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path, under_test.model)
        loaded = type(cache).load(path, under_test.model)
    require_length(loaded, cache.get_seq_length(), "after loading")
    future = under_test.prompts(2 * NUM_STEPS + LONG_APPEND, 2, seed=41)
    for piece in future.split([1] * NUM_STEPS + [LONG_APPEND] + [1] * NUM_STEPS, dim=1):
        under_test.require_alike(loaded, cache, piece, "a loaded cache and the one that was saved", at_once=True)


def check_reorder(under_test: CacheUnderTest) -> None:
    """`reorder_cache` moves the whole state of a sequence."""
    reordered = _cache_with_history(under_test)
    direct = _cache_with_history(under_test)
    dense = _cache_with_history(under_test.dense)
    sources = torch.arange(NUM_SEQUENCES, dtype=torch.int64, device=under_test.model.device)
    for turn, orders in enumerate(_ORDERS):
        for order in orders:
            beam_idx = torch.tensor(order, dtype=torch.int64, device=sources.device)
            reordered.reorder_cache(beam_idx)  # type: ignore[arg-type]
            sources = sources[beam_idx]
        # Every sequence continues with the tokens of the sequence that it was copied from
        steps = under_test.prompts(NUM_STEPS, NUM_SEQUENCES, seed=60 + NUM_SEQUENCES * turn)
        logits, expected = under_test.feed_each(reordered, steps[sources]), under_test.feed_each(direct, steps)
        require_close(logits, expected[sources], under_test.rounding, f"reordering {turn + 1}, by {orders}")
        under_test.feed_each(dense, steps)

    # Buffered tokens have to be in order when they are compressed
    more = under_test.prompts(LONG_APPEND, NUM_SEQUENCES, seed=70)
    last = under_test.prompts(NUM_STEPS, NUM_SEQUENCES, seed=73)
    logits = under_test.follow(reordered, (more[sources],), last[sources])
    expected, exact = (under_test.follow(cache, (more,), last) for cache in (direct, dense))
    control = min(distance(exact.roll(shift, dims=0), exact) for shift in range(1, NUM_SEQUENCES))
    limit = under_test.lossy_limit(distance(expected, exact), control)
    require_close(logits, expected[sources], limit, f"reordered sequences after {LONG_APPEND} more tokens")


def check_repeat_interleave(under_test: CacheUnderTest) -> None:
    """`batch_repeat_interleave` gives independent copies."""
    for batch_size in (1, 2):
        repeated = _cache_with_history(under_test, batch_size)
        repeated.batch_repeat_interleave(NUM_REPEATS)
        # Every repeat continues with other tokens: repeats that share memory would overwrite each other
        steps = [under_test.prompts(NUM_STEPS, batch_size, seed=75 + 2 * repeat) for repeat in range(NUM_REPEATS)]
        logits = under_test.feed_each(repeated, torch.stack(steps, dim=1).flatten(0, 1))
        for repeat, tokens in enumerate(steps):
            expected = under_test.feed_each(_cache_with_history(under_test, batch_size), tokens)
            what = f"repeat {repeat} of a batch of {batch_size}, and the batch itself"
            require_close(logits[repeat::NUM_REPEATS], expected, under_test.rounding, what)


def check_select_indices(under_test: CacheUnderTest) -> None:
    """`batch_select_indices` keeps the selected sequences."""
    selected, direct = _cache_with_history(under_test), _cache_with_history(under_test)
    sources = torch.arange(NUM_SEQUENCES, dtype=torch.int64, device=under_test.model.device)
    for indices in ([2, 0], [1]):
        chosen = torch.tensor(indices, dtype=torch.int64, device=sources.device)
        selected.batch_select_indices(chosen)
        sources = sources[chosen]
        steps = under_test.prompts(NUM_STEPS, NUM_SEQUENCES, seed=80 + len(indices))
        logits, expected = under_test.feed_each(selected, steps[sources]), under_test.feed_each(direct, steps)
        what = f"sequences {sources.tolist()} of {NUM_SEQUENCES}"
        require_close(logits, expected[sources], under_test.rounding, what)


def check_left_padding(under_test: CacheUnderTest) -> None:
    """A padded sequence equals the same sequence alone."""
    _check_padded(under_test, _LENGTHS)


def check_left_padding_short(under_test: CacheUnderTest) -> None:
    """A padded sequence equals itself alone, also if it has few tokens."""
    _check_padded(under_test, _LENGTHS_WITH_A_SHORT_ONE)


def check_row_isolation(under_test: CacheUnderTest) -> None:
    """A sequence is independent of all others, bit for bit."""
    # Several neighbours, one with a single repeated token, as not every neighbour changes a range over the batch
    sequences = under_test.prompts(LONG_CONTEXT + LONG_APPEND + NUM_STEPS, 4, seed=90).split(1)
    neighbours = (*sequences[2:], sequences[2][:, :1].expand_as(sequences[2]))
    for sequence in sequences[:2]:
        for each, blame in ((under_test.dense, "inconclusive, with `DynamicCache` too: "), (under_test, "")):
            first, *others = (_logits_beside(each, sequence, neighbour) for neighbour in neighbours)
            num_changed = max(int((logits != first).sum()) for logits in others)
            count = f"{num_changed} of {first.numel()} logits of a sequence"
            require(num_changed == 0, f"{blame}{count} changed with the content of the other sequence")


def _crop(cache: Cache, num_tokens: int) -> None:
    """Crop. If the cache refuses, require that its `is_croppable` is false."""
    try:
        cache.crop(-num_tokens)
    except (NotImplementedError, ValueError) as error:
        require(not cache.is_croppable, f"`crop({-num_tokens})` raises, but `is_croppable` is True: {error}")
        raise


def _refuses_positive(cache: Cache) -> bool:
    # A full sliding-window layer of Transformers raises a `RuntimeError`
    refusal = (ValueError, RuntimeError) if any(cache.is_sliding) else ValueError
    try:
        cache.crop(3)
    except refusal:
        return True
    return False


def _record_updates(cache: Cache) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return a dict of the states that the last call of `update` returned for each layer."""
    returned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    update = cache.update

    def recording(
        keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        returned[layer_idx] = update(keys, values, layer_idx, *args, **kwargs)
        return returned[layer_idx]

    cache.update = recording  # type: ignore[method-assign, assignment]
    return returned


def _require_memory(cache: _Reporting, when: str) -> None:
    report = cache.memory()
    held = reachable_bytes(cache)
    says = f"`memory()` says {report.total_bytes} bytes {report.parts} {when}"
    require(report.total_bytes == held, f"{says}, but the tensors reachable from the cache have {held}")
    per_device = sum(report.devices.values())
    require(per_device == held, f"`memory()` gives {per_device} bytes over all devices {when}, not {held}")


def _cache_with_history(under_test: CacheUnderTest, batch_size: int = NUM_SEQUENCES) -> Cache:
    """Return a cache with compressed tokens and tokens that are not compressed yet."""
    cache = under_test.cache(under_test.prompts(LONG_CONTEXT, batch_size, seed=50))
    under_test.feed_each(cache, under_test.prompts(NUM_STEPS, batch_size, seed=55))
    return cache


def _logits_beside(under_test: CacheUnderTest, sequence: torch.Tensor, neighbour: torch.Tensor) -> torch.Tensor:
    """Return the logits of a sequence in a batch with a neighbour."""
    prompt, more, steps = torch.cat([sequence, neighbour]).split([LONG_CONTEXT, LONG_APPEND, NUM_STEPS], dim=1)
    cache = under_test.make_cache()
    parts = [under_test.feed(cache, prompt), under_test.feed(cache, more), under_test.feed_each(cache, steps)]
    return torch.cat(parts, dim=1)[0]


def _check_padded(under_test: CacheUnderTest, lengths: tuple[int, ...]) -> None:
    """Require of a sequence in a left-padded batch the tokens, and up to rounding the logits, that it has alone."""
    width = max(lengths)
    prompts = [under_test.prompt(length, seed=85 + index) for index, length in enumerate(lengths)]
    padded = torch.cat([pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (width - prompt.shape[1], 0)) for prompt in prompts])
    tokens = under_test.generate(under_test.make_cache(), padded, NUM_NEW_PADDED, attention_mask=mask)
    expected, logits = under_test.decode(under_test.make_cache(), (padded,), NUM_NEW_PADDED, mask=mask)
    require_same_tokens(tokens, expected, "`generate` and a loop of single steps over a padded batch")
    for index, prompt in enumerate(prompts):
        alone, alone_logits = under_test.decode(under_test.make_cache(), (prompt,), NUM_NEW_PADDED)
        dense = under_test.follow(under_test.dense.make_cache(), (prompt,), alone)
        # Kernels round differently for another shape, and so may change a code: far less than the error of the cache.
        # Padding that enters a range makes as much difference as that error.
        limit = max(under_test.rounding, distance(alone_logits, dense) / 20)
        own = slice(index, index + 1)
        what = f"sequence {index} ({prompt.shape[1]} tokens) of a left-padded batch, and alone"
        require_close(logits[own, :1], alone_logits[:, :1], limit, what)
        require_same_tokens(tokens[own], alone, what)
        require_close(logits[own], alone_logits, limit, what)
