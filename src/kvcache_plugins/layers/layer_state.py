"""State of a layer between two updates, as tensors and numbers: the schema of files, stores and copies.

A state may come from anywhere. `files.schema` sees to it that every field is what its annotation says;
`restore_row_segments` and `restore_group_segments` to what holds between fields, under the options of a cache.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from kvcache_plugins.codecs.codec import Codec, CodecState, QueryMoments
from kvcache_plugins.codecs.groups import GroupCodec
from kvcache_plugins.files.schema import FLOATS, MAX_INTEGER, Range, Stored, check_layout
from kvcache_plugins.formats.parts import SIDES

from .exact_tokens import ExactPrefix
from .policies import GroupPolicy, RowPolicy
from .segments import ROWS, GroupSegment, RowSegment


Size = Annotated[int, Range(1, 2**20)]
_FLOATS = tuple(FLOATS.values())
_TOKENS = "batch_size", "num_heads", "num_tokens"


@dataclass(frozen=True, eq=False, slots=True)
class ExactStates:
    """Tokens as they came in: keys and values `[B, H, tokens, D]`."""

    keys: Annotated[torch.Tensor, Stored((*_TOKENS, "key_head_dim"), *_FLOATS, is_finite=False)]
    values: Annotated[torch.Tensor, Stored((*_TOKENS, "value_head_dim"), *_FLOATS, is_finite=False)]

    def check(self) -> None:
        """Raise a `ValueError` if keys and values are of two dtypes."""
        if self.keys.dtype != self.values.dtype:
            raise ValueError(f"keys in {self.keys.dtype} have values in {self.values.dtype}")


@dataclass(frozen=True, eq=False, slots=True)
class SegmentState:
    """
    Tokens of a `Segment`: tensors of both sides by name, without spare capacity. `tables` are how rows are read, if
    the layer has made others since.
    """

    start: int
    length: Annotated[int, Range(1)]
    keys: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    is_recent: bool = False
    tables: CodecState | None = None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LayerState:
    """
    A layer between two updates, however it compresses.

    Attributes:
        dtype (`torch.dtype`): of the states that came in.
        batch_size, num_heads, key_head_dim, value_head_dim (`int`): their sizes.
        length (`int`): tokens of the sequence, padding included.
        held_start (`int`): position before which a layer of a window has evicted all tokens.
        is_open (`bool`): True if further decoded tokens join the last block.
        counters (`dict[str, int]`): counters of `stats()`.
        padding (`torch.Tensor` of shape `[batch_size]`, *optional*): left padding of every sequence.
        prefix (`ExactPrefix`, *optional*): exact tokens in front.
        blocks (`list[SegmentState]`): compressed tokens.
        buffer (`ExactStates`, *optional*): exact tokens behind.
        tables (`CodecState`, *optional*): how rows are read, once the layer has made tables of its prompt.
        moments (`QueryMoments`, *optional*): of the queries so far, while a sequence has no table, or before others
            are made.
        pending (`torch.Tensor` of shape `[batch_size]`, uint8, *optional*): 1 for sequences that have none, while
            others have one.
    """

    dtype: torch.dtype
    batch_size: Size
    num_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    length: int
    held_start: int
    is_open: bool
    counters: dict[str, int]
    padding: Annotated[torch.Tensor, Stored(("batch_size",), torch.int64, least=0, most=MAX_INTEGER)] | None
    prefix: ExactPrefix | None
    blocks: list[SegmentState]
    buffer: ExactStates | None
    tables: CodecState | None = None
    moments: QueryMoments | None = None
    pending: Annotated[torch.Tensor, Stored(("batch_size",), torch.uint8, most=1)] | None = None

    @property
    def exact_start(self) -> int:
        """Position of the first token of the buffer."""
        return self.length - (0 if self.buffer is None else self.buffer.keys.shape[2])


@dataclass(frozen=True, eq=False, slots=True)
class DenseState:
    """One of Transformers' own layers after `length` tokens: states of those that the next one can still see."""

    length: Annotated[int, Range(1)]
    keys: Annotated[torch.Tensor, Stored((*_TOKENS, None), *_FLOATS, is_finite=False)]
    values: Annotated[torch.Tensor, Stored((*_TOKENS, None), *_FLOATS, is_finite=False)]

    check = ExactStates.check


# State of a layer, `None` without tokens
State = LayerState | DenseState | None


def _check_order(state: LayerState, sliding_window: int | None, path: str) -> None:
    """Raise a `ValueError` unless prefix, blocks and buffer follow each other and end where the sequence does."""
    first_seen = 0 if sliding_window is None else max(state.length - sliding_window + 1, 0)
    if state.held_start > first_seen:
        raise ValueError(
            f"`{path}`: there is nothing before token {state.held_start}, but token {first_seen} can be seen"
        )
    exact_start, prefix = state.exact_start, state.prefix
    position = state.blocks[0].start if state.blocks else exact_start
    if prefix is None:
        if state.length and (state.held_start == 0 or position != state.held_start):
            raise ValueError(f"`{path}`: there are tokens but none that they begin with")
    elif state.held_start:
        if position < state.held_start:
            raise ValueError(f"`{path}`: there are tokens before those that were evicted")
    # A sequence that has padding alone so far may begin behind all tokens
    elif bool(((prefix.end < position) | (prefix.end > exact_start) & (prefix.count > 0)).any()):
        raise ValueError(f"`{path}`: the exact tokens in front do not reach to those behind them, or go beyond")
    for block in state.blocks:
        if block.start != position:
            raise ValueError(f"`{path}`: a block begins at {block.start}, but the tokens before it end at {position}")
        position += block.length
    if position != exact_start or exact_start < 0:
        raise ValueError(
            f"`{path}`: compressed tokens end at {position}, but exact ones behind them begin at {exact_start}"
        )
    if state.padding is not None and bool((state.padding > exact_start).all()):
        raise ValueError(f"`{path}.padding` goes beyond all tokens")
    is_pending = None if state.pending is None else state.pending.bool()
    if is_pending is not None and prefix is not None and bool((prefix.end[is_pending] < exact_start).any()):
        raise ValueError(f"`{path}`: an item that waits for a table has to have all its tokens in front")


def restore_row_segments(
    state: LayerState, policy: RowPolicy, sliding_window: int | None, path: str
) -> tuple[Codec | None, list[RowSegment]]:
    """
    Make codec and segments of a `RowLayer` of a state that may come from anywhere; a `ValueError`, with the `path` in
    its file, if no layer of that policy can be in this state.
    """
    heads = state.batch_size, state.num_heads
    unfitted = policy.codec(state.key_head_dim, state.value_head_dim)
    codec = None
    if policy.shared_codec is not None:
        codec = _shared_codec(state, policy.shared_codec, path)
    elif state.tables is not None:
        codec = unfitted.restore(state.tables, heads, f"{path}.tables")
    if state.moments is not None and state.moments.products.shape[2] != len(unfitted.layouts):
        raise ValueError(f"`{path}.moments.products` has to be of {len(unfitted.layouts)} rotary embeddings")
    if codec is None:
        _check_all_exact(state, "tables", path)
        return None, []
    _check_begin(state, "tables", path)
    _check_order(state, sliding_window, path)
    segments = []
    for number, segment in enumerate(state.blocks):
        where = f"{path}.blocks.{number}"
        own: Codec | None = codec
        replaced = None
        if segment.tables is not None:
            if policy.shared_codec is not None or segment.is_recent or number + 1 == len(state.blocks):
                raise ValueError(f"`{where}` has tables of its own, but no other rows behind it")
            own = replaced = unfitted.restore(segment.tables, heads, f"{where}.tables")
        elif segment.is_recent:
            own = (
                codec.with_more_bits(policy.recent_nbits)
                if policy.recent_length and number + 1 == len(state.blocks)
                else None
            )
        if own is None:
            raise ValueError(f"`{where}.is_recent` asks for a last block, of a cache that has recent rows")
        for side, tensors, size in zip(SIDES, (segment.keys, segment.values), own.row_sizes, strict=True):
            layout = {ROWS: Stored((*heads, segment.length, size), torch.uint8)}
            check_layout(f"{where}.{side}", tensors, layout)
        rows = segment.keys[ROWS], segment.values[ROWS]
        is_open = state.is_open and replaced is None
        segments.append(RowSegment(*rows, segment.start, segment.length, segment.is_recent, is_open, replaced))
    return codec, segments


def _shared_codec(state: LayerState, codec: Codec, path: str) -> Codec | None:
    """Return the codec that a model's caches share, if tokens of the state are packed by it."""
    if state.tables is not None:
        raise ValueError(f"`{path}` has tables of its own, but the cache a calibration")
    keys, values = (
        torch.empty(state.batch_size, state.num_heads, 0, dim, dtype=torch.float32, device="meta")
        for dim in (state.key_head_dim, state.value_head_dim)
    )
    codec.check_shapes(keys, values)
    # Tokens are packed behind the prefix, which a window may have evicted
    return codec if state.prefix is not None or state.held_start else None


def restore_group_segments(
    state: LayerState, policy: GroupPolicy, path: str
) -> tuple[GroupCodec | None, list[GroupSegment]]:
    """Make codec and segments of a `GroupLayer`, like `restore_row_segments`."""
    if any(each is not None for each in (state.tables, state.moments, state.pending)):
        raise ValueError(f"`{path}` has tables, which groups do not have")
    what = "exact tokens in front"
    if state.prefix is None:
        _check_all_exact(state, what, path)
        return None, []
    _check_begin(state, what, path)
    _check_order(state, None, path)
    codec = policy.codec(state.key_head_dim, state.value_head_dim)
    segments = []
    for number, segment in enumerate(state.blocks):
        where = f"{path}.blocks.{number}"
        if segment.is_recent:
            raise ValueError(f"`{where}.is_recent` asks for a last block, of a cache that has recent rows")
        if segment.tables is not None:
            raise ValueError(f"`{where}` has tables, which groups do not have")
        is_open = state.is_open and number + 1 == len(state.blocks)
        heads = state.batch_size, state.num_heads
        segments.append(_read_groups(segment, codec, policy.residual_length, heads, where, is_open=is_open))
    return codec, segments


def _check_all_exact(state: LayerState, what: str, path: str) -> None:
    """Raise a `ValueError` unless a state without a codec has all its tokens in the tail."""
    if state.prefix is not None or state.pending is not None or state.is_open or state.blocks or state.exact_start:
        raise ValueError(f"`{path}` has no {what}, but not all tokens are exact ones in the buffer")


def _check_begin(state: LayerState, what: str, path: str) -> None:
    """Raise a `ValueError` unless a state with a codec has what a fitted layer begins with."""
    has_begin = state.prefix is not None or (state.held_start > 0 and state.pending is None)
    has_moments = state.moments is not None and state.pending is None and state.tables is None
    if not has_begin or has_moments or (state.is_open and not state.blocks):
        raise ValueError(f"`{path}` has {what}, but not what goes with them")


def _read_groups(
    segment: SegmentState, codec: GroupCodec, decoded_length: int, heads: tuple[int, int], path: str, *, is_open: bool
) -> GroupSegment:
    keys = codec.keys.read(f"{path}.keys", segment.keys, *heads, decoded_length)
    values = codec.values.read(f"{path}.values", segment.values, *heads, decoded_length)
    chunks = keys.num_chunks, keys.chunk_length
    if (values.num_chunks, values.chunk_length) != chunks or -(-segment.length // chunks[1]) != chunks[0]:
        raise ValueError(f"`{path}`: {segment.length} tokens do not fit {chunks[0]} chunks of {chunks[1]}")
    # Further chunks of decoded tokens are written into an open segment, so it must consist of such chunks
    is_whole = chunks[1] == decoded_length and segment.length % decoded_length == 0
    if is_open and not (is_whole and codec.keys.is_of_decoded(keys) and codec.values.is_of_decoded(values)):
        raise ValueError(f"`{path}` is open, and has to be of whole chunks of decoded tokens")
    return GroupSegment(keys, values, segment.start, segment.length, is_open=is_open)
