"""Checks of a cache under other models: attention implementations, dtypes, layer types, devices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import (  # type: ignore[import-untyped]
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from transformers import PreTrainedModel

from .checks_generation import check_greedy, check_prompt_lookup
from .checks_state import check_crop_recent, check_left_padding, check_lengths, check_reorder, check_reset
from .comparison import distance, require_close, require_same_tokens
from .subject import LONG_APPEND, LONG_CONTEXT, SHORT_CONTEXT, Subject, contract_check


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


@contract_check("`eager` attention gives what `sdpa` gives")
def check_eager(subject: Subject) -> None:
    for length in (SHORT_CONTEXT, LONG_CONTEXT):
        with _attention("sdpa", subject.model):
            expected, dense = _logits(subject, length), _logits(subject.dense, length)
        with _attention("eager", subject.model):
            logits = _logits(subject, length)
        # A cache that chooses what to attend to has to hand everything to an implementation that it cannot choose for
        if distance(logits, dense) <= subject.rounding:
            continue
        # Another implementation rounds otherwise, and a rounding error can turn a code over; or it shows no queries,
        # by which a cache tells what matters
        share = 1.0 if getattr(subject.make_cache(), "learns_from_queries", False) else 0.25
        limit = max(10 * subject.rounding, share * distance(expected, dense))
        if getattr(subject.make_cache(), "is_exact_for_many", False) and distance(logits, expected) > limit:
            # It may do so for several new tokens too, with what it has compressed
            with _attention("sdpa", subject.model):
                expected = _logits(subject, length, at_once=True)
            limit = max(10 * subject.rounding, share * distance(expected, dense))
        require_close(logits, expected, limit, f"`eager` and `sdpa` at {length} tokens")


@contract_check("a model in bfloat16")
def check_bfloat16(subject: Subject) -> None:
    _check_dtype(subject, torch.bfloat16)


@contract_check("a model in float16")
def check_float16(subject: Subject) -> None:
    _check_dtype(subject, torch.float16)


@contract_check("a model with sliding-window layers", on_hybrid=True)
def check_hybrid(subject: Subject) -> None:
    for name, check in _HYBRID_CHECKS.items():
        try:
            check(subject)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@contract_check("a model with Accelerate's hooks")
def check_device_map(subject: Subject) -> None:
    prompt, steps = subject.rows(LONG_CONTEXT, 2, seed=92), subject.rows(NUM_STEPS, 2, seed=98)
    expected = subject.generate(subject.make_cache(), prompt, NUM_STEPS, num_beams=2)
    logits = subject.feed_each(subject.cache(prompt), steps)
    with _dispatched(subject.model):
        tokens = subject.generate(subject.make_cache(), prompt, NUM_STEPS, num_beams=2)
        dispatched = subject.feed_each(subject.cache(prompt), steps)
    require_same_tokens(tokens, expected, "with and without a device map")
    require_close(dispatched, logits, subject.rounding, "with and without a device map")


def _logits(subject: Subject, length: int, *, at_once: bool = False) -> torch.Tensor:
    """Logits after a prompt, of steps (or their tokens `at_once`), of several tokens at once, and of steps again."""
    prompt, more = subject.prompt(length, seed=94), subject.prompt(LONG_APPEND, seed=95)
    steps = subject.prompt(NUM_STEPS, seed=96)
    cache = subject.make_cache()
    feed_steps = subject.feed if at_once else subject.feed_each
    parts = [subject.feed(cache, prompt)[:, -1:], feed_steps(cache, steps)]
    parts += [subject.feed(cache, more), feed_steps(cache, steps)]
    return torch.cat(parts, dim=1)


def _check_dtype(subject: Subject, dtype: torch.dtype) -> None:
    """Requires of a cache in `dtype` no more distance than of itself and of `DynamicCache` from their own."""
    own, dense = _logits(subject, LONG_CONTEXT), _logits(subject.dense, LONG_CONTEXT)
    with _dtype(dtype, subject.model):
        low, dense_low = _logits(subject, LONG_CONTEXT), _logits(subject.dense, LONG_CONTEXT)
        subject.generate(subject.make_cache(), subject.prompt(LONG_CONTEXT, seed=94), NUM_STEPS)
    limit = 1.5 * distance(own, dense) + 3 * distance(dense_low, dense) + subject.rounding
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
    """Has a model's own weights be of another dtype for a while, as a cache may have been made for it."""
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
    """`model` with Accelerate's hooks on every block, as `device_map=` attaches them, all on the device it is on."""
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
