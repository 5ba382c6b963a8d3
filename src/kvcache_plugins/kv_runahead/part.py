"""What one rank does in a prefill: which slice it has, how its forward is called, and what it returns."""

import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import Cache, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.user_warnings import warn_user

from .agreement import Description, agree, digest
from .call_checks import check_cache, check_prompt
from .chain import Chain
from .communication import Neighbours
from .exchange import PrefixExchange
from .failure_reports import FailureReports
from .output import RunaheadOutput
from .partition import resolve_partition
from .prompt_slice import PromptSlice
from .shapes import LayerShape, layer_shapes
from .table import PartitionTable


Partition = str | Sequence[int] | Sequence[float] | PartitionTable | None
# Every rank counts its prefills: what is left in the group's store is told apart by it
_RUNS = itertools.count()
# Where nothing was measured: the fewest tokens that are worth another rank
_MIN_SLICE = 64


@dataclass(kw_only=True, slots=True)
class Part:
    """
    What one rank does in a prefill.

    Attributes:
        partition (`tuple[int, ...]`), rank (`int`): tokens of each slice, and the rank in the group.
        cache (`Cache`, *optional*): the user's cache, on the last rank.
        is_idle (`bool`): whether the rank has no slice.
        chain (`Chain`, *optional*): not there where one rank prefills alone.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    partition: tuple[int, ...]
    rank: int
    cache: Cache | None
    is_idle: bool
    chain: Chain | None = None

    def run_alone(self) -> torch.Tensor:
        """Logits of the last token, the whole prompt being this rank's."""
        assert self.cache is not None
        return self._logits(0, self.input_ids.shape[1], self.cache)

    def run_last(self) -> torch.Tensor:
        """Logits of the last token, this rank having the last slice."""
        assert self.chain is not None
        with self.chain as chain:
            return self._logits(chain.prompt_slice.start, chain.prompt_slice.stop, chain.cache)

    def run_before_last(self) -> None:
        """The slice of a rank before the last one, without the language-model head."""
        assert self.chain is not None and self.cache is None
        with self.chain as chain:
            start, stop = chain.prompt_slice.start, chain.prompt_slice.stop
            self.model.base_model(self.input_ids[:, start:stop], **self._forward_options(start, stop, chain.cache))

    def _logits(self, start: int, stop: int, cache: Cache) -> torch.Tensor:
        options = self._forward_options(start, stop, cache)
        logits: torch.Tensor = self.model(self.input_ids[:, start:stop], logits_to_keep=1, **options).logits
        return logits

    def _forward_options(self, start: int, stop: int, cache: Cache) -> dict[str, Any]:
        """What the model's forward takes for a slice."""
        mask = self.attention_mask
        options: dict[str, Any] = {**as_argument(cache), "use_cache": True}
        if mask is not None:
            options["attention_mask"] = mask[:, :stop]
        if "position_ids" in inspect.signature(self.model.base_model.forward).parameters:
            if mask is None:
                positions = torch.arange(start, stop, device=self.model.device)[None]
            else:
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
            options["position_ids"] = positions
        return options

    def output(self, start: float, logits: torch.Tensor | None) -> RunaheadOutput:
        """What the rank returns, `start` being the time when it was called."""
        stats: dict[str, int | float] = {}
        if not self.is_idle:
            stats["seconds"] = time.perf_counter() - start
        if self.chain is not None:
            exchange = self.chain.exchange
            neighbours, errors = exchange.neighbours, exchange.hop_errors
            stats["seconds_waited"] = neighbours.seconds_waited
            stats["bytes_sent"], stats["bytes_received"] = neighbours.bytes_sent, neighbours.bytes_received
            stats["dot_products"], stats["entries_sent"] = exchange.dot_products, exchange.entries_sent
            if errors:
                stats["hop_error"] = sum(errors) / len(errors)
        return RunaheadOutput(
            past_key_values=self.cache, logits=logits, partition=self.partition, rank=self.rank, stats=stats
        )


def take_part(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    partition: Partition,
    group: dist.ProcessGroup | None,
    hop_nbits: int | None,
) -> Part:
    """
    Checks a call, comes to terms with the other ranks, and makes the rank's part.

    Raises:
        ValueError: on all ranks, if one of them cannot take part.
        RunaheadError: if one of them does not answer.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("`group`: there are no ranks; call `torch.distributed.init_process_group` first")
    rank, size, run = dist.get_rank(group), dist.get_world_size(group), next(_RUNS)
    is_last = rank == size - 1
    shapes: list[LayerShape] = []
    try:
        check_prompt(model, input_ids, attention_mask, hop_nbits)
        most = size if partition is not None else max(min(size, input_ids.shape[1] // _MIN_SLICE), 1)
        slices = resolve_partition(partition, input_ids.shape[1], most, model=model)
        shapes = layer_shapes(model)
        if is_last:
            cache = check_cache(cache, model, len(slices))
        description = Description(
            model=fingerprint(model),
            dtype=str(model.dtype),
            prompt=digest(input_ids, attention_mask),
            partition=slices,
            hop_nbits=hop_nbits,
        )
    except ValueError as error:
        slices, description = (), Description(error=str(error))
    agree(description, group, FailureReports(rank, run))
    first = size - len(slices)
    if len(slices) == 1 and size > 1 and is_last:
        warn_user(f"one rank prefills the {input_ids.shape[1]} tokens alone: more would not be faster")
    part = Part(
        model=model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        partition=slices,
        rank=rank,
        cache=cache if is_last else None,
        is_idle=rank < first,
    )
    if not part.is_idle and len(slices) > 1:
        shapes = [replace(shape, wire=replace(shape.wire, nbits=hop_nbits)) for shape in shapes]
        part.chain = _make_chain(part, Neighbours(group, first, run), shapes, sum(slices[: rank - first]))
    return part


def _make_chain(part: Part, neighbours: Neighbours, shapes: list[LayerShape], start: int) -> Chain:
    slices, mask = part.partition, part.attention_mask
    prompt_slice = PromptSlice(
        start=start,
        stop=start + slices[part.rank - neighbours.first],
        batch_size=part.input_ids.shape[0],
        padding=None if mask is None else (mask == 0).sum(dim=1).tolist(),
    )
    return Chain(
        PrefixExchange(neighbours, shapes, prompt_slice),
        is_lazy=part.model.config.get_text_config(decoder=True)._attn_implementation == "sdpa",
        cache=part.cache,
    )
