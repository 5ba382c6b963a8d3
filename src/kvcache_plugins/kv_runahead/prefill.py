"""`runahead_prefill`: ranks of `torch.distributed` fill one cache, each with its slice of the prompt.

Implements [KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation](https://huggingface.co/papers/2405.05329).
"""

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from transformers import Cache, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument

from .output import RunaheadOutput
from .part import Partition, take_part


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
    part = take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits)
    logits = None
    if part.chain is None and part.cache is not None:
        logits = part.run_alone()
    elif part.cache is not None:
        logits = part.run_last()
    elif not part.is_idle:
        part.run_before_last()
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
    part = take_part(model, input_ids, attention_mask, past_key_values, partition, group, hop_nbits)
    if part.cache is None:
        if not part.is_idle:
            part.run_before_last()
        return None, part.output(start, None)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    inputs = {"attention_mask": mask, **as_argument(part.cache), **generate_options}
    # The decorators that Transformers puts on it lose its `self` in the eyes of mypy
    generate: Any = model.generate
    with part.chain or nullcontext():
        generated = generate(input_ids, **inputs)
    return generated, part.output(start, None)
