"""Steps of one new token that attends to chosen tokens by Triton's kernels, with launches that are kept.

    scores -> choose, behind a count by the paper's rule -> gather, on another stream -> decode rows -> attend -> merge

Every address and length that may change is given anew at each launch, so that a pool may grow and a tail may move. The
host reads nothing back: slots and their numbers stay on the device.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, K slots of a
selection, N slots in use, R numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from kvcache_plugins.formats.parts import SelectableRows

from .compiled import GrowingStates
from .current_device import on_device_of
from .engine import choose_token_kernel, load_triton
from .launch_keeper import LaunchKeeper
from .selective_attention import Selection, States
from .token_scores import KeyCodes


# Channels of a head, and query heads a key/value head, that fit into registers
_MOST_CHANNELS, _MOST_GROUPS = 256, 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Programs of a launch whose grid is that of every step
_MOST_PROGRAMS = 512


class SelectionRule(NamedTuple):
    """
    Rule by which tokens are chosen.

    Attributes:
        num_first, num_newest (`int`): first and newest tokens of a sequence, which are chosen in any case.
        ratio (`float`): share of the tokens that are chosen at most, unless more are chosen in any case.
        min_weight (`float`): least weight of a token, in units of the mean; -inf for none.
        distance (`float`, *optional*): the number of tokens is that of scores at most so far below the largest one.
    """

    num_first: int
    num_newest: int
    ratio: float
    min_weight: float
    distance: float | None


def can_select(query: torch.Tensor, num_heads: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Check that kernels take queries `[B, H * G, 1, D]`, and exact states of a dtype."""
    channels = max(query.shape[3], value_dim)
    is_known = query.dtype in _DTYPES and dtype == query.dtype and query.shape[2] == 1
    fits = channels <= _MOST_CHANNELS and query.shape[1] <= _MOST_GROUPS * num_heads
    return is_known and fits and choose_token_kernel(query)[0] == "triton"


class KeptSelection:
    """
    Kept launches of a layer's steps.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): queries of the same shape and dtype as those to come.
        num_heads (`int`): key/value heads.
        rule (`SelectionRule`): the rule of choice.
        scale (`float`): factor of scores.
    """

    def __init__(self, query: torch.Tensor, num_heads: int, rule: SelectionRule, scale: float):
        self._kind = query.shape, query.dtype, query.device
        self._heads = len(query), num_heads, query.shape[1] // num_heads
        self._rule = rule
        self._scale = scale
        self._launches = LaunchKeeper()
        # Launches of attention and of what merges its results, without a mask and with one
        self._attention: dict[bool, tuple[Callable[..., None], Callable[..., None]]] = {}
        self._ratio = torch.tensor([rule.ratio], dtype=torch.float64, device="cpu").to(query.device)
        # Version of the rows that launches over rows are for, and places of channels in them
        self._version = -1
        self._places: torch.Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of sequences that the launches are for."""
        return self._heads[0]

    def fits(self, query: torch.Tensor, scale: float) -> bool:
        """Check that the launches are for such queries."""
        is_same = (query.shape, query.dtype, query.device) == self._kind and scale == self._scale
        return is_same and choose_token_kernel(query)[0] == "triton"

    def on_device(self) -> AbstractContextManager[object]:
        """Make the queries' device the current one: launches go to that."""
        return on_device_of(self._ratio)

    def push(self, keys: torch.Tensor, values: torch.Tensor, tail: States, place: int) -> None:
        """Write a token `[B, H, 1, D or E]` at a place of storage `[B, H, capacity, D or E]`."""
        new = keys.contiguous(), values.contiguous()
        self._launches.run(
            "push",
            lambda: load_triton().prepare_exact_push(new, tail),
            new_keys_ptr=new[0],
            new_values_ptr=new[1],
            keys_ptr=tail[0],
            values_ptr=tail[1],
            capacity=tail[0].shape[2],
            place=place,
        )

    def aligned(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries as kernels read them: `[B, H, G, D]`, contiguous."""
        if not query.is_contiguous() or query.data_ptr() % load_triton().ALIGNMENT:
            query = query.clone(memory_format=torch.contiguous_format)
        return query.view(*self._heads, -1)

    def score_codes(self, query: torch.Tensor, keys: KeyCodes) -> torch.Tensor:
        """Score keys in few bits by queries of `aligned`: `[B, H, G, N]`, scaled and to the base of 2."""
        scores = query.new_empty(*query.shape[:3], keys.length, dtype=torch.float32)
        codes, scales = keys.codes[:, :, : keys.length], keys.scales[:, :, : keys.length]
        spread = keys.spread.view(*query.shape[:2], -1)
        options = {"nbits": keys.nbits, "spread": spread, "factor": self._factor, "most_programs": _MOST_PROGRAMS}
        self._launches.run(
            "codes",
            lambda: load_triton().prepare_code_scores(query, codes, scales, **options),
            codes_ptr=codes,
            codes_stride_b=codes.stride(0),
            codes_stride_h=codes.stride(1),
            scale_ptr=scales,
            scale_stride_b=scales.stride(0),
            scale_stride_h=scales.stride(1),
            query_ptr=query,
            spread_ptr=spread,
            scores_ptr=scores,
            length=keys.length,
        )
        return scores

    def score_columns(
        self, query: torch.Tensor, columns: torch.Tensor, length: int, rotation: torch.Tensor
    ) -> torch.Tensor:
        """Score the first keys by their columns `[B, H, capacity, C]`; see `score_codes`."""
        scores = query.new_empty(*query.shape[:3], length, dtype=torch.float32)
        options = {"factor": self._factor, "most_programs": _MOST_PROGRAMS}
        self._launches.run(
            "columns",
            lambda: load_triton().prepare_column_scores(query, columns, length, rotation, **options),
            columns_ptr=columns,
            columns_stride_b=columns.stride(0),
            columns_stride_h=columns.stride(1),
            rotation_ptr=rotation,
            query_ptr=query,
            scores_ptr=scores,
            length=length,
        )
        return scores

    @property
    def _factor(self) -> float:
        """Factor of scores to the base of 2."""
        return self._scale * load_triton().LOG2_E

    def score_rows(self, query: torch.Tensor, tokens: SelectableRows, version: int) -> torch.Tensor:
        """Score keys as rows, of a version that is another when any of them has changed; see `score_codes`."""
        self._set_version(version)
        scores = query.new_empty(*query.shape[:3], tokens.length, dtype=torch.float32)
        self._launches.run(
            "rows",
            lambda: load_triton().prepare_row_scores(query, tokens, self._scale),
            query_ptr=query,
            output_ptr=scores,
        )
        return scores

    def _set_version(self, version: int) -> None:
        if version != self._version:
            for kind in ("rows", "decode"):
                self._launches.drop(kind)
            self._places = None
            self._version = version

    def choose(
        self,
        scores: torch.Tensor,
        query: torch.Tensor,
        tail: GrowingStates,
        length: int,
        limit: int,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> Selection:
        """
        Choose slots of a pool in order by scores `[B, H, G, N]`, when the sequence has `length` tokens.

        Args:
            query: queries of `aligned`, by which the tail is scored.
            limit (`int`): slots of the selection.
            mask (`torch.Tensor` of shape `[B or 1, length]`, bool, *optional*): True for tokens that may be chosen.
            padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of sequences that may not.
        """
        triton, rule = load_triton(), self._rule
        batch_size, num_heads, _, num_slots = scores.shape
        shape = batch_size, num_heads
        slots = query.new_empty(*shape, limit, dtype=torch.int64)
        count = query.new_empty(shape, dtype=torch.int64)
        weights = query.new_empty(*shape, num_slots, dtype=torch.float32)
        changed = {"scores_ptr": scores, "num_slots": num_slots, **_mask_arguments(mask, padding)}
        seen = mask is not None, padding is not None
        wanted = self._count_wanted(scores, mask, padding, changed)
        if wanted is not None:
            changed["wanted_ptr"] = wanted
        keys = tail.storage[0]
        options = {
            "ratio": self._ratio,
            "min_weight": rule.min_weight,
            "wanted": wanted,
            "num_first": rule.num_first,
            "num_newest": rule.num_newest,
            "scale": self._scale,
            "weights": weights,
            "slots": slots,
            "count": count,
        }
        self._launches.run(
            ("choose", *seen),
            lambda: triton.prepare_choice(scores, query, keys, tail.length, length, limit, mask, padding, **options),
            **changed,
            query_ptr=query,
            tail_ptr=keys,
            weights_ptr=weights,
            slots_ptr=slots,
            count_ptr=count,
            num_tail=tail.length,
            tail_capacity=keys.shape[2],
            length=length,
            limit=limit,
        )
        return Selection(slots, count)

    def _count_wanted(
        self,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
        changed: dict[str, torch.Tensor | int],
    ) -> torch.Tensor | None:
        """Count the tokens that are near the largest score, `[B, H]`; `None` if the rule has no such distance."""
        distance = self._rule.distance
        if distance is None:
            return None
        wanted = scores.new_empty(scores.shape[:2], dtype=torch.int64)
        self._launches.run(
            ("count", mask is not None, padding is not None),
            lambda: load_triton().prepare_count(scores, mask, padding, distance, wanted),
            **changed,
            wanted_ptr=wanted,
        )
        return wanted

    def gather(self, addresses: torch.Tensor, selection: Selection, rows: torch.Tensor, page_tokens: int) -> None:
        """Copy the rows of selected slots from pages into `rows` `[B, H, K, R]`, on the current stream."""
        slots, count = selection.slots, selection.count
        limit = slots.shape[2]
        words = load_triton().as_words(rows)
        strides = {f"slots_stride_{name}": stride for name, stride in zip("bh", slots.stride(), strict=False)}
        strides |= {f"rows_stride_{name}": stride for name, stride in zip("bh", words.stride(), strict=False)}
        self._launches.run(
            "gather",
            lambda: load_triton().prepare_move(addresses, slots, count, rows, page_tokens, writes=False),
            page_addresses_ptr=addresses,
            slots_ptr=slots,
            count_ptr=count,
            rows_ptr=words,
            num_slots=limit,
            **strides,
        )

    def decode_rows(
        self, rows: torch.Tensor, selection: Selection, tokens: SelectableRows, version: int
    ) -> torch.Tensor:
        """Decode selected tokens, whose rows of values are given, to `[B, H, K, D + E]`."""
        self._set_version(version)
        keys, values = tokens.formats
        slots, count = selection.slots, selection.count
        shape = *slots.shape, keys.head_dim + values.head_dim
        states = rows.new_empty(shape, dtype=tokens.sinks.keys.dtype)
        if self._places is None:
            assert keys.order is not None, "keys have the order of a prompt"
            self._places = keys.order.long().argsort(dim=2).to(torch.int16)
        places = self._places
        self._launches.run(
            "decode",
            lambda: load_triton().prepare_decoding(rows, slots, count, tokens, places, _MOST_PROGRAMS),
            value_rows_ptr=rows,
            slots_ptr=slots,
            count_ptr=count,
            states_ptr=states,
            limit=slots.shape[2],
        )
        return states

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        selection: Selection,
        tail: GrowingStates,
        num_slots: int,
        mask: torch.Tensor | None,
        fetched: torch.Tensor,
    ) -> torch.Tensor:
        """
        Attend to the selected tokens of a pool of `num_slots`, whose keys and values `[B, H, K, D + E]` are given, and
        to the tail: `[B, H * G, 1, E]`. The numbers of tokens are added to `fetched` `[]`, int64.
        """
        triton = load_triton()
        slots, count = selection.slots, selection.count
        keys, values = tail.storage
        own = self.aligned(query)
        shape, dtype, _ = self._kind
        result = query.new_empty(*shape[:3], values.shape[3], dtype=dtype)
        changed = {
            **_mask_arguments(mask, None),
            "query_ptr": own,
            "rows_ptr": rows,
            "slots_ptr": slots,
            "count_ptr": count,
            "tail_keys_ptr": keys,
            "tail_values_ptr": values,
            "fetched_ptr": fetched,
            "num_slots": num_slots,
            "num_tail": tail.length,
            "tail_capacity": keys.shape[2],
            "limit": slots.shape[2],
        }
        kept = self._attention.get(mask is not None)
        if kept is None:
            # Both at once, as the second reads what the first writes
            attention, merging = triton.prepare_attention(
                own.view(shape), rows, slots, count, tail.storage, tail.length, num_slots, mask, self._scale, fetched
            )
            kept = triton.KeptLaunch(attention, list(changed)), triton.KeptLaunch(merging, ["result_ptr"])
            self._attention[mask is not None] = kept
        attend, merge = kept
        attend(*changed.values())
        merge(result)
        return result


def _mask_arguments(mask: torch.Tensor | None, padding: torch.Tensor | None) -> dict[str, torch.Tensor | int]:
    """Return the arguments of a launch that a mask and padding give, if there are such."""
    given: dict[str, torch.Tensor | int] = {} if mask is None else load_triton().token_mask_arguments(mask)
    return given if padding is None else {**given, "padding_ptr": padding}
