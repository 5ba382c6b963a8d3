"""Checks of a cache under other models: attention implementations, dtypes, layer types, devices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import (  # type: ignore[import-untyped]
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from transformers import PreTrainedModel

from .cache_under_test import LONG_APPEND, LONG_CONTEXT, SHORT_CONTEXT, CacheUnderTest
from .checks_generation import check_greedy, check_prompt_lookup
from .checks_state import check_crop_recent, check_left_padding, check_lengths, check_reorder, check_reset
from .comparison import distance, require_close, require_same_tokens


NUM_STEPS = 4
_HYBRID_CHECKS = {
    "greedy": check_greedy,
    "reorder": check_reorder,
    "left padding": check_left_padding,
    "lengths": check_lengths,
    "prompt lookup": check_prompt_lookup,
    "crop": check_crop_recent,
    "reset": check_reset,
}


def check_eager(under_test: CacheUnderTest) -> None:
    """`eager` attention equals `sdpa`."""
    for length in (SHORT_CONTEXT, LONG_CONTEXT):
        with _attention("sdpa", under_test.model):
            expected = _logits(under_test, length)
            dense = _logits(under_test.dense, length)
        with _attention("eager", under_test.model):
            logits = _logits(under_test, length)
        # A cache that selects tokens gives all of them to an implementation that it cannot select for
        if distance(logits, dense) <= under_test.rounding:
            continue
        # The other implementation rounds differently, which can change a code; or it shows the cache no queries,
        # whose statistics decide on codes
        share = 1.0 if getattr(under_test.make_cache(), "uses_query_statistics", False) else 0.25
        limit = max(10 * under_test.rounding, share * distance(expected, dense))
        if getattr(under_test.make_cache(), "is_exact_for_many", False) and distance(logits, expected) > limit:
            # Such a cache also gives all tokens, some of them compressed, to several new tokens at once
            with _attention("sdpa", under_test.model):
                expected = _logits(under_test, length, at_once=True)
            limit = max(10 * under_test.rounding, share * distance(expected, dense))
        require_close(logits, expected, limit, f"`eager` and `sdpa` at {length} tokens")


def check_bfloat16(under_test: CacheUnderTest) -> None:
    """A model in bfloat16."""
    _check_dtype(under_test, torch.bfloat16)


def check_float16(under_test: CacheUnderTest) -> None:
    """A model in float16."""
    _check_dtype(under_test, torch.float16)


def check_hybrid(under_test: CacheUnderTest) -> None:
    """A model with sliding-window layers."""
    for name, check in _HYBRID_CHECKS.items():
        try:
            check(under_test)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_device_map(under_test: CacheUnderTest) -> None:
    """A model with Accelerate's hooks."""
    prompt, steps = under_test.prompts(LONG_CONTEXT, 2, seed=92), under_test.prompts(NUM_STEPS, 2, seed=98)
    expected = under_test.generate(under_test.make_cache(), prompt, NUM_STEPS, num_beams=2)
    logits = under_test.feed_each(under_test.cache(prompt), steps)
    with _dispatched(under_test.model):
        tokens = under_test.generate(under_test.make_cache(), prompt, NUM_STEPS, num_beams=2)
        dispatched = under_test.feed_each(under_test.cache(prompt), steps)
    require_same_tokens(tokens, expected, "with and without a device map")
    require_close(dispatched, logits, under_test.rounding, "with and without a device map")


def _logits(under_test: CacheUnderTest, length: int, *, at_once: bool = False) -> torch.Tensor:
    """
    Return the logits after a prompt, of single steps (or of their tokens `at_once`), of several tokens at once, and of
    steps again.
    """
    prompt, more = under_test.prompt(length, seed=94), under_test.prompt(LONG_APPEND, seed=95)
    steps = under_test.prompt(NUM_STEPS, seed=96)
    cache = under_test.make_cache()
    feed_steps = under_test.feed if at_once else under_test.feed_each
    parts = [under_test.feed(cache, prompt)[:, -1:], feed_steps(cache, steps)]
    parts += [under_test.feed(cache, more), feed_steps(cache, steps)]
    return torch.cat(parts, dim=1)


def _check_dtype(under_test: CacheUnderTest, dtype: torch.dtype) -> None:
    """Bound the distance from `DynamicCache` in `dtype` by the distance in float32 and the rounding of `dtype`."""
    own = _logits(under_test, LONG_CONTEXT)
    dense = _logits(under_test.dense, LONG_CONTEXT)
    with _dtype(dtype, under_test.model):
        low = _logits(under_test, LONG_CONTEXT)
        dense_low = _logits(under_test.dense, LONG_CONTEXT)
        under_test.generate(under_test.make_cache(), under_test.prompt(LONG_CONTEXT, seed=94), NUM_STEPS)
    limit = 1.5 * distance(own, dense) + 3 * distance(dense_low, dense) + under_test.rounding
    require_close(low, dense_low, limit, f"{dtype} against `DynamicCache`")


@contextmanager
def _attention(implementation: str, model: PreTrainedModel) -> Iterator[None]:
    original = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(original)


@contextmanager
def _dtype(dtype: torch.dtype, model: PreTrainedModel) -> Iterator[None]:
    """Convert a model's weights in place, as a cache may refer to the model, and restore them at the end."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in originals:
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@contextmanager
def _dispatched(model: PreTrainedModel) -> Iterator[None]:
    """Attach Accelerate's hooks to every block, in the way of `device_map=`, all on the model's own device."""
    block_names = model._no_split_modules or []
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in block_names]
    attach_align_device_hook_on_blocks(
        model,
        execution_device=dict.fromkeys(("", *blocks), model.device),
        offload=dict.fromkeys(("", *blocks), False),
        skip_keys=model._skip_keys_device_placement,
    )
    model.hf_device_map = dict.fromkeys(blocks, str(model.device))  # type: ignore[assignment]
    try:
        yield
    finally:
        remove_hook_from_submodules(model)
        del model.hf_device_map
