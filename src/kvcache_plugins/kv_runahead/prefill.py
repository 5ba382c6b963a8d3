"""`runahead_prefill`: ranks of `torch.distributed` fill one cache, each with its slice of the prompt.

Implements [KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation](https://huggingface.co/papers/2405.05329).
"""

from __future__ import annotations

import inspect
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.models.fingerprint import fingerprint

from .agreement import Description, agree, digest
from .chain import Chain, LayerShape
from .communication import Neighbours
from .partition import resolve_partition
from .shapes import layer_shapes
from .table import PartitionTable
from .wire import HOP_NBITS


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
        past_key_values (`Cache`, *optional*):
            The complete cache, on the last rank.
        logits (`torch.Tensor` of shape `[batch_size, 1, vocab_size]`, *optional*):
            Logits of the prompt's last token, on the last rank.
        partition (`tuple[int, ...]`):
            Tokens of each slice; the last slice is the last rank's. Fewer slices than ranks leave the first ones idle.
        rank (`int`):
            This rank, in the group.
        stats (`dict[str, int | float]`):
            `seconds` of this rank's part; `seconds_waited` of them for the rank before; `bytes_sent` and
            `bytes_received`; `dot_products` (pairs of queries and keys, for one head) and `entries_sent` (keys and
            values, counted apart, of one head), both summed over layers; `hop_error`, the mean relative error of this
            rank's states as others see them, if they are quantized on the way.
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
        model (`PreTrainedModel`):
            The same model on every rank.
        input_ids (`torch.Tensor` of shape `[batch_size, length]`):
            The whole prompt, on every rank.
        attention_mask (`torch.Tensor` of shape `[batch_size, length]`, *optional*):
            0 for padding, which has to be on the left.
        past_key_values (`Cache`, *optional*):
            The empty cache to fill, of any kind; looked at on the last rank only. A `DynamicCache` by default.
        partition (`str`, `Sequence` or `PartitionTable`, *optional*):
            Which slice each rank gets: lengths of the slices, shares of the prompt, `"even"`, or a table that
            `kvcache-plugins plan` has measured. By default slices that take equally long by the model's shapes.
        group (`dist.ProcessGroup`, *optional*):
            The ranks; all by default.
        hop_nbits (`int`, *optional*):
            Bits a number, 4 or 8, of what goes from rank to rank, for slow links. Not quantized by default.

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
    start = time.perf_counter()
    part = _take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits)
    if part.is_idle:
        return RunaheadOutput(partition=part.partition, rank=part.rank)
    if part.chain is None:
        assert part.cache is not None
        options = part.forward_options(0, input_ids.shape[1], part.cache)
        outputs = model(input_ids, logits_to_keep=1, **options)
        return part.output(start, outputs.logits)
    if part.cache is None:
        part.run_before_last(input_ids)
        return part.output(start, None)
    with part.chain as chain:
        options = part.forward_options(chain.start, chain.stop, chain.cache)
        logits = model(input_ids[:, chain.start : chain.stop], logits_to_keep=1, **options).logits
    return part.output(start, logits)


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
    As `runahead_prefill`, and the last rank goes on with `generate`, in which its own slice is the first forward.

    Args:
        generate_options:
            What `generate` takes beside the prompt and the cache, on the last rank; any way of decoding but those that
            run the prompt in several forwards.

    Returns:
        On the last rank what `generate` returns, on the others `None`; and the `RunaheadOutput`, without logits.
    """
    start = time.perf_counter()
    part = _take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits)
    if part.is_idle:
        return None, RunaheadOutput(partition=part.partition, rank=part.rank)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if part.cache is not None:
        inputs = {"attention_mask": mask, "past_key_values": part.cache, **generate_options}
        # The decorators that Transformers puts on it lose its `self` in the eyes of mypy
        generate: Any = model.generate
        if part.chain is None:
            return generate(input_ids, **inputs), part.output(start, None)
        with part.chain:
            generated = generate(input_ids, **inputs)
        return generated, part.output(start, None)
    part.run_before_last(input_ids)
    return None, part.output(start, None)


@dataclass(kw_only=True, slots=True)
class _Part:
    """What one rank does in a prefill."""

    model: PreTrainedModel
    attention_mask: torch.Tensor | None
    partition: tuple[int, ...]
    rank: int
    # The user's cache, on the last rank
    cache: Cache | None
    is_idle: bool
    # Not there where one rank prefills alone
    chain: Chain | None = None

    def forward_options(self, start: int, stop: int, cache: Cache) -> dict[str, Any]:
        """What the model's forward takes for a slice."""
        mask = self.attention_mask
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if mask is not None:
            options["attention_mask"] = mask[:, :stop]
        if "position_ids" in inspect.signature(self.model.base_model.forward).parameters:
            if mask is None:
                positions = torch.arange(start, stop, device=self.model.device)[None]
            else:
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
            options["position_ids"] = positions
        return options

    def run_before_last(self, input_ids: torch.Tensor) -> None:
        """The slice of a rank before the last one, without the language-model head."""
        assert self.chain is not None and self.cache is None
        with self.chain as chain:
            options = self.forward_options(chain.start, chain.stop, chain.cache)
            self.model.base_model(input_ids[:, chain.start : chain.stop], **options)

    def output(self, start: float, logits: torch.Tensor | None) -> RunaheadOutput:
        """What the rank returns, `start` being the time when it was called."""
        stats: dict[str, int | float] = {"seconds": time.perf_counter() - start}
        if self.chain is not None:
            neighbours, errors = self.chain.neighbours, self.chain.hop_errors
            stats["seconds_waited"] = neighbours.seconds_waited
            stats["bytes_sent"], stats["bytes_received"] = neighbours.bytes_sent, neighbours.bytes_received
            stats["dot_products"], stats["entries_sent"] = self.chain.dot_products, self.chain.entries_sent
            if errors:
                stats["hop_error"] = sum(errors) / len(errors)
        return RunaheadOutput(
            past_key_values=self.cache, logits=logits, partition=self.partition, rank=self.rank, stats=stats
        )


def _take_part(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    partition: Partition,
    group: dist.ProcessGroup | None,
    hop_nbits: int | None,
) -> _Part:
    """Checks the call, comes to terms with the other ranks, and makes the rank's part."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("`group`: there are no ranks; call `torch.distributed.init_process_group` first")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    run, is_last = next(_RUNS), rank == size - 1
    shapes: list[LayerShape] = []
    try:
        _check_prompt(model, input_ids, attention_mask, hop_nbits)
        most = size if partition is not None else max(min(size, input_ids.shape[1] // _MIN_SLICE), 1)
        slices = resolve_partition(partition, input_ids.shape[1], most, model=model)
        shapes = layer_shapes(model)
        if is_last:
            cache = _checked(cache, model, len(slices))
        description = Description(
            model=fingerprint(model),
            dtype=str(model.dtype),
            prompt=digest(input_ids, attention_mask),
            partition=slices,
            hop_nbits=hop_nbits,
        )
    except ValueError as error:
        slices, description = (), Description(error=str(error))
    agree(description, group)
    first = size - len(slices)
    if len(slices) == 1 and size > 1 and is_last:
        warnings.warn(
            f"one rank prefills the {input_ids.shape[1]} tokens alone: more would not be faster", stacklevel=3
        )
    part = _Part(
        model=model,
        attention_mask=attention_mask,
        partition=slices,
        rank=rank,
        cache=cache if is_last else None,
        is_idle=rank < first,
    )
    if part.is_idle or len(slices) == 1:
        return part
    start = sum(slices[: rank - first])
    part.chain = Chain(
        Neighbours(group, first, run),
        [replace(shape, wire=replace(shape.wire, nbits=hop_nbits)) for shape in shapes],
        start=start,
        stop=start + slices[rank - first],
        padding=None if attention_mask is None else _left_padding(attention_mask),
        batch_size=input_ids.shape[0],
        is_lazy=model.config.get_text_config(decoder=True)._attn_implementation == "sdpa",
        cache=part.cache,
    )
    return part


def _check_prompt(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, hop_nbits: int | None
) -> None:
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise ValueError(f"`model` has to be a decoder of Transformers but is a {type(model).__name__}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"`input_ids` has to be of shape [batch_size, length], both at least 1, but is {tuple(input_ids.shape)}"
        )
    if hop_nbits is not None and hop_nbits not in HOP_NBITS:
        raise ValueError(f"`hop_nbits` has to be one of {HOP_NBITS} or `None` but is {hop_nbits}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has to have the shape of `input_ids`, {tuple(input_ids.shape)}, but has "
            f"{tuple(attention_mask.shape)}"
        )
    if not bool((attention_mask.bool().cumsum(dim=1) > 0).eq(attention_mask.bool()).all()):
        raise ValueError("`attention_mask` has to be 0 for padding on the left, and 1 for every token behind it")


def _left_padding(attention_mask: torch.Tensor) -> list[int]:
    padding: list[int] = (attention_mask == 0).sum(dim=1).tolist()
    return padding


def _checked(cache: Cache | None, model: PreTrainedModel, num_slices: int) -> Cache:
    """The cache to fill."""
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
