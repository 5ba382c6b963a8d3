"""`runahead_prefill` and `runahead_generate`: ranks of `torch.distributed` fill one cache together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument, reading_options
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.option_checks import check_left_padding
from kvcache_plugins.user_warnings import warn_user

from .messages import MessageLayout, message_layouts
from .planner import PartitionTable, resolve_partition
from .prefix_exchange import PrefixExchange, PromptSlice
from .runahead_layer import SlicePrefill
from .transport import FailureReports, Neighbours, agree, digest


if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput
    from transformers.utils.generic import ModelOutput


Partition = str | Sequence[int] | Sequence[float] | PartitionTable | None
Result = TypeVar("Result")
# Numbers of prefills, counted alike by every rank: reports in the group's store are by number
_RUNS = itertools.count()
# Fewest tokens that are worth another rank, unless a partition is given
_MIN_SLICE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunaheadOutput:
    """
    Result of a prefill on one rank.

    Attributes:
        past_key_values (`Cache`, *optional*): the complete cache, on the last rank.
        logits (`torch.Tensor` of shape `[batch_size, 1, vocab_size]`, *optional*): logits of the prompt's last token,
            on the last rank.
        partition (`tuple[int, ...]`): tokens of each slice; the last slice is the last rank's. Fewer slices than ranks
            leave the first ones idle.
        rank (`int`): this rank, in the group.
        stats (`dict[str, int | float]`): `seconds` of this rank's part; `seconds_waited` of them for the rank before;
            `bytes_sent` and `bytes_received`; `dot_products` (pairs of queries and keys, for one head) and
            `entries_sent` (keys and values, counted apart, of one head), both summed over layers.
    """

    past_key_values: Cache | None = None
    logits: torch.Tensor | None = None
    partition: tuple[int, ...]
    rank: int
    stats: dict[str, int | float] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """True if this rank has the cache."""
        return self.past_key_values is not None


@torch.no_grad()
def runahead_prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    partition: Partition = None,
    group: dist.ProcessGroup | None = None,
) -> RunaheadOutput:
    """
    Prefill a prompt with all ranks of a group; called by each of them with the same prompt.

    Every rank runs the whole model on its slice of the prompt. In each layer it receives the keys and values of all
    tokens before its slice from the previous rank, sends them on with its own, and attends. The last rank ends with
    the complete cache.

    Args:
        model (`PreTrainedModel`): the same model on every rank.
        input_ids (`torch.Tensor` of shape `[batch_size, length]`): the whole prompt, on every rank.
        attention_mask (`torch.Tensor` of shape `[batch_size, length]`, *optional*): 0 for padding, which has to be on
            the left.
        past_key_values (`Cache`, *optional*): the empty cache to fill, of any kind; ignored on all ranks but the last.
            A `DynamicCache` by default.
        partition (`str`, `Sequence` or `PartitionTable`, *optional*): slices of the ranks: lengths, shares of the
            prompt, `"even"`, or a table that `kvcache-plugins plan` has measured. The default is slices that take
            equally long by the model's shapes.
        group (`dist.ProcessGroup`, *optional*): the ranks; all by default.

    Returns:
        `RunaheadOutput`: with the cache and the logits of the last token on the last rank.

    Raises:
        ValueError: on all ranks, before anything is computed, if one of them cannot take part; it names the rank.
        RunaheadError: if a rank fails on the way, or does not answer within the group's timeout. The cache is empty.

    Example:

    ```python
    >>> dist.init_process_group("gloo")
    >>> output = runahead_prefill(model, input_ids, past_key_values=create_cache("gear-2bit", model))
    >>> if output.is_last:
    ...     next_token = output.logits.argmax(dim=-1)
    ```
    """
    call = _Call(model, input_ids, attention_mask, past_key_values, partition, group)

    def read(cache: Cache) -> torch.Tensor:
        logits: torch.Tensor = call.read(model, cache, input_ids.shape[1])["logits"]
        return logits

    logits, output = _take_part(call, read)
    return replace(output, logits=logits)


@torch.no_grad()
def runahead_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    partition: Partition = None,
    group: dist.ProcessGroup | None = None,
    **generate_options: object,
) -> tuple[torch.Tensor | GenerateOutput | None, RunaheadOutput]:
    """
    Prefill a prompt as `runahead_prefill` does, and continue it by `generate` on the last rank, whose slice is the
    first forward. `generate_options` are those of `generate`: any way of decoding but those that run the prompt in
    several forwards.

    Returns:
        On the last rank the result of `generate`, on the others `None`; and the `RunaheadOutput`, without logits.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask

    def decode(cache: Cache) -> torch.Tensor | GenerateOutput:
        options = {"attention_mask": mask, **as_argument(cache), **generate_options}
        return model.generate(input_ids, **options)  # type: ignore[operator]

    return _take_part(_Call(model, input_ids, attention_mask, past_key_values, partition, group), decode)


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """Arguments of a prefill on one rank."""

    model: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    cache: Cache | None
    partition: Partition
    group: dist.ProcessGroup | None

    def read(self, model: torch.nn.Module, cache: Cache, stop: int) -> ModelOutput:
        """Run a model, or its base without a head, on the prompt up to `stop`."""
        options = reading_options(model.forward, cache, self.input_ids, self.attention_mask, stop, needs_logits=False)
        output: ModelOutput = model(**options)
        return output

    def prompt_slice(self, slices: Sequence[int], number: int) -> PromptSlice:
        """Return a slice by its number."""
        start = sum(slices[:number])
        padding = None if self.attention_mask is None else (self.attention_mask == 0).sum(dim=1).tolist()
        batch_size = self.input_ids.shape[0]
        return PromptSlice(start=start, stop=start + slices[number], batch_size=batch_size, padding=padding)


class _Plan(NamedTuple):
    """Slices of the prompt, rows of every layer, and on the last rank the cache to fill."""

    slices: tuple[int, ...]
    layouts: list[MessageLayout]
    cache: Cache | None


def _take_part(call: _Call, finish: Callable[[Cache], Result]) -> tuple[Result | None, RunaheadOutput]:
    """
    Check a call, compare it with the other ranks', and do this rank's part. The last rank calls `finish` with the
    cache, and its result is returned too. Errors are those of `runahead_prefill`.
    """
    begun = time.perf_counter()
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("`group`: there are no ranks; call `torch.distributed.init_process_group` first")
    rank, size = dist.get_rank(call.group), dist.get_world_size(call.group)
    run = next(_RUNS)
    plan = _agree_on_plan(call, rank, size, run)
    first = size - len(plan.slices)
    if rank < first:
        return None, RunaheadOutput(partition=plan.slices, rank=rank)
    result: Result | None = None
    stats: dict[str, int | float] = {}
    if len(plan.slices) > 1:
        neighbours = Neighbours(call.group, first, run)
        prompt_slice = call.prompt_slice(plan.slices, rank - first)
        exchange = PrefixExchange(neighbours, plan.layouts, prompt_slice)
        is_lazy = call.model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        with SlicePrefill(exchange, is_lazy=is_lazy, cache=plan.cache).running() as filled:
            if rank == size - 1:
                result = finish(filled)
            else:
                # Logits are only needed of the last token
                call.read(call.model.base_model, filled, prompt_slice.stop)
        stats = exchange.stats()
    else:
        assert plan.cache is not None
        if size > 1:
            warn_user(f"one rank prefills the {call.input_ids.shape[1]} tokens alone: more would not be faster")
        result = finish(plan.cache)
    stats = {"seconds": time.perf_counter() - begun, **stats}
    return result, RunaheadOutput(past_key_values=plan.cache, partition=plan.slices, rank=rank, stats=stats)


def _agree_on_plan(call: _Call, rank: int, size: int, run: int) -> _Plan:
    """Plan a prefill, and compare it with the other ranks'; an error of one is a `ValueError` on all."""
    plan = None
    compared: dict[str, object]
    try:
        plan = _make_plan(call, rank, size)
        compared = {
            "model": fingerprint(call.model),
            "dtype": str(call.model.dtype),
            "prompt": digest(call.input_ids, call.attention_mask),
            "partition": plan.slices,
        }
    except Exception as error:
        # A rank that left out the comparison would keep the others waiting
        compared = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    agree(compared, call.group, FailureReports(rank, run))
    assert plan is not None, "ranks that cannot take part do not agree"
    return plan


def _make_plan(call: _Call, rank: int, size: int) -> _Plan:
    """Check a call, and plan the slices of the ranks."""
    _check_prompt(call.model, call.input_ids, call.attention_mask)
    length = call.input_ids.shape[1]
    most = size if call.partition is not None else max(min(size, length // _MIN_SLICE), 1)
    slices = resolve_partition(call.partition, length, most, model=call.model)
    cache = _check_cache(call.cache, call.model, len(slices)) if rank == size - 1 else None
    return _Plan(slices, message_layouts(call.model), cache)


def _check_prompt(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise ValueError(f"`model` has to be a decoder of Transformers but is a {type(model).__name__}")
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError(
            "`model` is split by tensor parallelism; each rank of a prefill runs all of it: load it without `tp_plan`"
        )
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"`input_ids` has to be of shape [batch_size, length], both at least 1, but is {tuple(input_ids.shape)}"
        )
    if attention_mask is not None:
        check_left_padding(attention_mask, input_ids)


def _check_cache(cache: Cache | None, model: PreTrainedModel, num_slices: int) -> Cache:
    """Return the cache to fill, a `DynamicCache` by default; a `ValueError` if ranks cannot fill it together."""
    if cache is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    if not isinstance(cache, Cache):
        raise ValueError(f"`past_key_values` has to be a `Cache` of Transformers but is a {type(cache).__name__}")
    if cache.get_seq_length() > 0:
        raise ValueError(f"`past_key_values` has to be empty but holds {cache.get_seq_length()} tokens")
    layers = list(cache.layers)
    if not layers and cache.layer_class_to_replicate is not None:
        layers = [cache.layer_class_to_replicate()]
    if num_slices > 1 and any(getattr(layer, "needs_prompt_attention", False) for layer in layers):
        raise ValueError(
            f"`past_key_values`: a `{type(cache).__name__}` with these options chooses tokens by the attention of the "
            "whole prompt, but the last rank sees its own slice only"
        )
    return cache
