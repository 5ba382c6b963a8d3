"""`runahead_prefill`: ranks of `torch.distributed` fill one cache, each with its slice of the prompt."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument, reading_options
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.option_checks import check_left_padding
from kvcache_plugins.user_warnings import warn_user

from .chain import Chain, PrefixExchange, PromptSlice
from .messages import HOP_NBITS, message_layouts
from .planner import PartitionTable, resolve_partition
from .transport import FailureReports, Neighbours, agree, digest


Partition = str | Sequence[int] | Sequence[float] | PartitionTable | None
# Every rank counts its prefills: what is left in the group's store is told apart by it
_RUNS = itertools.count()
# Where nothing was measured: the fewest tokens that are worth another rank
_MIN_SLICE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunaheadOutput:
    """
    What a prefill left on a rank.

    Attributes:
        past_key_values (`Cache`, *optional*): the complete cache, on the last rank.
        logits (`torch.Tensor` of shape `[batch_size, 1, vocab_size]`, *optional*): of the prompt's last token, on the
            last rank.
        partition (`tuple[int, ...]`): tokens of each slice; the last slice is the last rank's. Fewer slices than ranks
            leave the first ones idle.
        rank (`int`): this rank, in the group.
        stats (`dict[str, int | float]`): `seconds` of this rank's part; `seconds_waited` of them for the rank before;
            `bytes_sent` and `bytes_received`; `dot_products` (pairs of queries and keys, for one head) and
            `entries_sent` (keys and values, counted apart, of one head), both summed over layers; `hop_error`, the
            mean relative error of this rank's states as others see them, if they are quantized on the way.
    """

    past_key_values: Cache | None = None
    logits: torch.Tensor | None = None
    partition: tuple[int, ...]
    rank: int
    stats: dict[str, int | float] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the cache."""
        return self.past_key_values is not None


@torch.no_grad()
def runahead_prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    partition: Partition = None,
    group: dist.ProcessGroup | None = None,
    *,
    hop_nbits: int | None = None,
) -> RunaheadOutput:
    """
    Prefills a prompt with all ranks of a group; called by each of them with the same prompt.

    Every rank runs the whole model on its slice of the prompt. In each layer it receives keys and values of what comes
    before from the rank before, sends them on with its own, and attends. The last rank ends with the complete cache.

    Args:
        model (`PreTrainedModel`): the same model on every rank.
        input_ids (`torch.Tensor` of shape `[batch_size, length]`): the whole prompt, on every rank.
        attention_mask (`torch.Tensor` of shape `[batch_size, length]`, *optional*): 0 for padding, which has to be on
            the left.
        past_key_values (`Cache`, *optional*): the empty cache to fill, of any kind; looked at on the last rank only. A
            `DynamicCache` by default.
        partition (`str`, `Sequence` or `PartitionTable`, *optional*): which slice each rank gets: lengths of the
            slices, shares of the prompt, `"even"`, or a table that `kvcache-plugins plan` has measured. By default
            slices that take equally long by the model's shapes.
        group (`dist.ProcessGroup`, *optional*): the ranks; all by default.
        hop_nbits (`int`, *optional*): bits a number, 4 or 8, of what goes from rank to rank, for slow links. Not
            quantized by default.

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

    def read(cache: Cache) -> torch.Tensor:
        return _read(model, cache, input_ids, attention_mask, input_ids.shape[1]).logits

    logits, output = _take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits, read)
    return replace(output, logits=logits)


@torch.no_grad()
def runahead_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    partition: Partition = None,
    group: dist.ProcessGroup | None = None,
    *,
    hop_nbits: int | None = None,
    **generate_options: Any,
) -> tuple[Any, RunaheadOutput]:
    """
    As `runahead_prefill`, and the last rank goes on with `generate`, in which its own slice is the first forward, and
    which takes `generate_options`: any way of decoding but those that run the prompt in several forwards.

    Returns:
        On the last rank what `generate` returns, on the others `None`; and the `RunaheadOutput`, without logits.
    """

    def decode(cache: Cache) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # The decorators that Transformers puts on it lose its `self` in the eyes of mypy
        generate: Any = model.generate
        return generate(input_ids, **{"attention_mask": mask, **as_argument(cache), **generate_options})

    return _take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits, decode)


def _read(
    model: torch.nn.Module, cache: Cache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, stop: int
) -> Any:
    return model(**reading_options(model.forward, cache, input_ids, attention_mask, stop, needs_logits=False))


def _take_part(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    partition: Partition,
    group: dist.ProcessGroup | None,
    hop_nbits: int | None,
    finish: Callable[[Cache], Any],
) -> tuple[Any, RunaheadOutput]:
    """
    Checks a call, comes to terms with the other ranks, and does this one's part: `finish` on the last rank, whose
    result is returned too. Errors are those of `runahead_prefill`.
    """
    begun = time.perf_counter()
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("`group`: there are no ranks; call `torch.distributed.init_process_group` first")
    rank, size, run = dist.get_rank(group), dist.get_world_size(group), next(_RUNS)
    is_last = rank == size - 1
    try:
        _check_prompt(model, input_ids, attention_mask)
        if hop_nbits is not None and hop_nbits not in HOP_NBITS:
            raise ValueError(f"`hop_nbits` has to be one of {HOP_NBITS} or `None` but is {hop_nbits}")
        most = size if partition is not None else max(min(size, input_ids.shape[1] // _MIN_SLICE), 1)
        slices = resolve_partition(partition, input_ids.shape[1], most, model=model)
        layouts = [replace(layout, nbits=hop_nbits) for layout in message_layouts(model)]
        cache = _checked_cache(cache, model, len(slices)) if is_last else None
        call: dict[str, object] = {"model": fingerprint(model), "dtype": str(model.dtype)}
        call |= {"prompt": digest(input_ids, attention_mask), "partition": slices, "hop_nbits": hop_nbits}
    except ValueError as error:
        call = {"error": str(error)}
    # Of an error of any rank all hear here
    agree(call, group, FailureReports(rank, run))
    first, result = size - len(slices), None
    if rank < first:
        return None, RunaheadOutput(partition=slices, rank=rank)
    stats: dict[str, int | float] = {}
    if len(slices) > 1:
        start = sum(slices[: rank - first])
        stop = start + slices[rank - first]
        padding = None if attention_mask is None else (attention_mask == 0).sum(dim=1).tolist()
        prompt_slice = PromptSlice(start=start, stop=stop, batch_size=input_ids.shape[0], padding=padding)
        is_lazy = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        exchange = PrefixExchange(Neighbours(group, first, run), layouts, prompt_slice)
        with Chain(exchange, is_lazy=is_lazy, cache=cache).running() as filled:
            if is_last:
                result = finish(filled)
            else:
                # Without the language-model head, for which they have no use
                _read(model.base_model, filled, input_ids, attention_mask, stop)
        stats = exchange.stats()
    else:
        assert cache is not None
        if size > 1:
            warn_user(f"one rank prefills the {input_ids.shape[1]} tokens alone: more would not be faster")
        result = finish(cache)
    stats = {"seconds": time.perf_counter() - begun, **stats}
    return result, RunaheadOutput(past_key_values=cache, partition=slices, rank=rank, stats=stats)


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


def _checked_cache(cache: Cache | None, model: PreTrainedModel, num_slices: int) -> Cache:
    """Returns the cache to fill, a `DynamicCache` by default; what ranks cannot fill together is a `ValueError`."""
    if cache is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    if not isinstance(cache, Cache):
        raise ValueError(f"`past_key_values` has to be a `Cache` of Transformers but is a {type(cache).__name__}")
    if cache.get_seq_length() > 0:
        raise ValueError(f"`past_key_values` has to be empty but holds {cache.get_seq_length()} tokens")
    make_layer: Any = cache.layer_class_to_replicate
    layers: list[Any] = cache.layers or [make_layer()]
    if num_slices > 1 and any(getattr(layer, "needs_prompt_attention", False) for layer in layers):
        raise ValueError(
            f"`past_key_values`: a `{type(cache).__name__}` with these options chooses what it keeps by the attention "
            "of the whole prompt, of which the last rank sees its own slice only"
        )
    return cache
