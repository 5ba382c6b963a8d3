"""Steps of one new token that attends to some of the stored tokens in C: scores, selection and attention.

Arguments of the three kernels are made once and hold for many steps: a step writes addresses and numbers.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, W tokens of
the tail.
"""

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from .c_structs import BLOCK_QUERIES, TILE, Structure, as_words, make, word_offsets
from .compiled import GrowingStates, TailReader, kind_of_tokens
from .library import bind
from .selective_attention import SelectionLimits, States, describe_pages, describe_tail, selection_scratch
from .token_scores import KeyCodes, PreparedRows, code_score_args, row_score_args, sizes_of


# Words of structures that change from step to step
_QUERIES, _WINDOW, _SELECTED = (word_offsets(name) for name in ("TokenQueries", "Window", "SelectedSlots"))
_SELECTION, _ATTENTION = (word_offsets(name) for name in ("SelectionArgs", "SelectedAttentionArgs"))


class PreparedScores(NamedTuple):
    """
    Scores of stored tokens.

    Attributes:
        kernel (`str`): name of the kernel that computes them.
        queries (`Structure`): queries to prepare for, and their scale.
        args (`Structure`): arguments of the kernel.
    """

    kernel: str
    queries: Structure
    args: Structure


class PreparedSelection(TailReader):
    """
    Steps over stored tokens that do not change, and a tail that grows: scores of all tokens, a selection by weight,
    and attention to selected tokens and the tail. Everything that does not change is checked here.

    Args:
        scores (`PreparedScores`): scores of the tokens.
        tokens (`Structure`): the tokens.
        tail (two `torch.Tensor` of shape `[B, H, any, D or E]`): storage of the newest tokens.
        dtype (`torch.dtype`): dtype of exact tokens.

    Attributes:
        num_selected (`int`): tokens that the last step selected, over all heads.
    """

    def __init__(self, scores: PreparedScores, tokens: Structure, tail: States, dtype: torch.dtype):
        queries, args = scores.queries, scores.args
        value_dim = tokens.inputs["value_dim"]
        sizes = {name: getattr(queries, name) for name in ("batch", "heads", "key_dim")}
        super().__init__({**sizes, "value_dim": value_dim}, dtype, queries.scale)
        if tuple(map(kind_of_tokens, tail)) != self._kind:
            raise ValueError(f"tokens of {dtype} and a tail of {[kind_of_tokens(each) for each in tail]}")
        self._shape = torch.Size((queries.batch, queries.heads, queries.query_groups, queries.key_dim))
        self._heads = queries.batch * queries.heads
        self._value_dim = value_dim
        self._length = args.length
        selected = make("SelectedSlots")
        selection = make(
            "SelectionArgs",
            max_threads=self._threads,
            batch=queries.batch,
            heads=queries.heads,
            query_groups=queries.query_groups,
            length=args.length,
            queries=queries,
            value_dim=value_dim,
            selected=selected,
        )
        attention = make(
            "SelectedAttentionArgs",
            max_threads=self._threads,
            queries=queries,
            value_dim=value_dim,
            tokens=tokens,
            selected=selected,
        )
        self._structures = queries, args, selected, selection, attention
        self._queries, self._scores, self._selected, self._selection, self._attention = map(as_words, self._structures)
        self._scores_at = word_offsets(type(args).__name__).scores
        self._selection_doubles = memoryview(selection).cast("B").cast("d")
        blocks = self._heads * -(-queries.query_groups // BLOCK_QUERIES)
        self._runs = [
            self._prepare_run(scores.kernel, args, blocks * args.splits),
            self._prepare_run("select_by_weight", selection, self._heads),
            self._prepare_run("attend_selected", attention, blocks),
        ]
        # Bytes of a thread without those for scores of the tail
        self._scratch_size = selection_scratch(args.length)
        # Bytes to sort the slots of rows, of all threads: for each slot of a selection, and for all tiles
        tiles = -(-args.length // TILE)
        self._sort_sizes = (16 * self._threads, 8 * self._threads * tiles) if tokens.rows else (0, 0)
        self.num_selected = 0

    def _prepare_run(self, name: str, args: Structure, count: int) -> "tuple[Callable[[], None], memoryview[int]]":
        """Return a run of a kernel's `count` tasks, and the words of its arguments."""
        args.tasks.count = count
        return bind(name, args, min(self._threads, count)), as_words(args)

    def attend(
        self, query: torch.Tensor, scale: float | None, tail: GrowingStates, limits: SelectionLimits
    ) -> torch.Tensor | None:
        """
        Attend with the queries of one new token, `[B, H * G, 1, D]` or another shape of as many numbers.

        Args:
            tail (`GrowingStates`): the newest tokens; an unwritten one is written.
            limits (`SelectionLimits`): limits of the selection.

        Returns:
            `torch.Tensor` like the queries, of E channels; `None` if queries, scale or threads are not those that the
            steps were prepared for.

        Raises:
            ValueError: if tail or newest token do not have the prepared dtype and sizes.
        """
        if not self._fits(query, scale):
            return None
        length, newest = tail.length, tail.unwritten
        if tail.storage is not self._storage:
            self._set_storage(tail.storage)
        if not 0 <= length <= self._capacity:
            raise ValueError(f"{length} tokens in use of {self._capacity}")
        if newest is not None:
            key, value = newest
            kind = key.shape, value.shape, key.dtype, value.dtype, key.is_cpu, value.is_cpu
            if kind != self._newest_kind or not (length and key.is_contiguous() and value.is_contiguous()):
                raise ValueError(f"the newest token has to be {self._newest_kind}, contiguous, as steps were prepared")
        data = query if query.dtype is torch.float32 and query.is_contiguous() else query.float().contiguous()
        result = data.new_empty((*query.shape[:3], self._value_dim))
        memory = self._reserve(limits.limit, length)
        self._queries[_QUERIES.data] = data.data_ptr()
        self._window[_WINDOW.length] = length
        selection = self._selection
        selection[_SELECTION.first] = max(limits.first, 0)
        selection[_SELECTION.newest] = max(limits.newest, 0)
        selection[_SELECTION.cap] = limits.cap
        self._selection_doubles[_SELECTION.least] = limits.least
        selection[_SELECTION.num_resident] = length
        selection[_SELECTION.num_selected] = 0
        selection[_SELECTION.threads_entered] = 0
        selection[_SELECTION.newest_key] = 0 if newest is None else newest[0].data_ptr()
        selection[_SELECTION.newest_value] = 0 if newest is None else newest[1].data_ptr()
        self._attention[_ATTENTION.threads_entered] = 0
        self._attention[_ATTENTION.result] = result.data_ptr()
        for run, words in self._runs:
            # The next task, which is the first word of each kernel's arguments
            words[_SELECTION.tasks] = 0
            run()
        del memory
        tail.unwritten = None
        self.num_selected = selection[_SELECTION.num_selected]
        return result if query.dtype is torch.float32 else result.to(query.dtype)

    def _fits(self, query: torch.Tensor, scale: float | None) -> bool:
        """Return whether a step's queries, scale and threads are the prepared ones."""
        shape = query.shape
        batch_size, num_heads, groups, channels = self._shape
        return (
            shape[0] == batch_size
            and shape[3] == channels
            and shape[1] * shape[2] == num_heads * groups
            and query.is_cpu
            and (channels**-0.5 if scale is None else scale) == self._scale
            and (torch.get_num_threads(), os.getpid()) == self._origin
        )

    def _reserve(self, limit: int, tail_length: int) -> torch.Tensor:
        """Allocate scores, slots and scratch memory of a step; it has to live until the kernels are done."""
        heads, groups = self._heads, self._shape[2]
        # Scores of the tail, in whole words
        scratch_size = self._scratch_size + 8 * (-(-tail_length * groups // 2))
        # Whole words first, floats last
        sizes = (
            8 * heads * limit,
            8 * heads,
            scratch_size * self._threads,
            self._sort_sizes[0] * limit,
            self._sort_sizes[1],
            4 * heads * groups * self._length,
        )
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        slots, counts, scratch, coded, tile_ends, scores, _ = accumulate(sizes, initial=memory.data_ptr())
        self._scores[self._scores_at] = scores
        self._selected[_SELECTED.limit] = limit
        self._selected[_SELECTED.slots] = slots
        self._selected[_SELECTED.counts] = counts
        self._selection[_SELECTION.scores] = scores
        self._selection[_SELECTION.scratch] = scratch
        self._selection[_SELECTION.scratch_size] = scratch_size
        self._attention[_ATTENTION.coded] = coded
        self._attention[_ATTENTION.tile_ends] = tile_ends
        return memory

    def _set_storage(self, storage: States) -> None:
        keys, values = storage
        kind = tuple(map(kind_of_tokens, storage))
        if kind != self._kind or keys.shape[2] != values.shape[2] or not (keys.is_cpu and values.is_cpu):
            raise ValueError(f"the tail has to be {self._kind} on the CPU, as steps were prepared for, not {kind}")
        described = describe_tail(self._shape, storage, self._value_dim, keys.dtype, 0)
        self._selection[_SELECTION.window] = described.address
        self._attention[_ATTENTION.window] = described.address
        self._described_tail = described
        self._window = as_words(described)
        self._storage = storage
        self._capacity = keys.shape[2]


def prepare_by_codes(
    query: torch.Tensor, scale: float, keys: KeyCodes, pages: Sequence[torch.Tensor], tail: States
) -> PreparedSelection:
    """
    Prepare steps with queries like `query` `[B, H, G, D]` over tokens that are scored by their codes, see
    `score_codes`, and attended to in `pages`, see `attend_selected`.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    queries = make("TokenQueries", **sizes_of(query), scale=scale)
    args = code_score_args(queries, keys, spread=keys.spread[:, :, 0].contiguous())
    tokens = describe_pages(query, pages, tail[1].shape[3], keys.length)
    return PreparedSelection(PreparedScores("score_codes", queries, args), tokens, tail, pages[0].dtype)


def prepare_by_rows(query: torch.Tensor, scale: float, rows: PreparedRows, tail: States) -> PreparedSelection:
    """
    Prepare steps with queries like `query` `[B, H, G, D]` over tokens that are scored, see `score_rows`, and attended
    to, see `attend_selected`, as rows.

    Raises:
        ValueError: if sizes or dtypes do not fit each other.
    """
    described = rows.describe(query)
    queries = make("TokenQueries", **sizes_of(query), scale=scale)
    args = row_score_args(queries, described)
    dtype = rows.tokens.sinks.keys.dtype
    return PreparedSelection(PreparedScores("score_rows", queries, args), described, tail, dtype)
