"""Attention and coding by Triton's kernels: their launches, and the constants that they read beside stored tokens.

Attention is one launch for every coded part, and a last one that merges their results and attends to the exact parts.
Launches of a static layer are kept, with lengths on the device, which saves most of the host's time. Nothing is read
back from the device, so a step can be captured in a graph. Encoding is one launch a side, and a push of a token one
launch. Plain PyTorch encodes heads of more than 256 channels, and float64.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from triton.runtime import driver

from kvcache_plugins.formats.groups import QuantizedChunks
from kvcache_plugins.formats.hadamard import hadamard_matrix, rotation_size
from kvcache_plugins.formats.parts import DensePart, GroupPart, PagedRowPart, Part, RowPart, SelectableRows
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.quantizer import COEFFICIENTS, MAX_WIDTH, level_gains, level_tables
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import RowFormat, RowFormats
from kvcache_plugins.triton_kernels.arithmetic import has_pairs
from kvcache_plugins.triton_kernels.attention.attend import prepare_groups
from kvcache_plugins.triton_kernels.attention.combine import prepare_combination
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.attention.finish import Finish, prepare_finish
from kvcache_plugins.triton_kernels.attention.partials import Partials
from kvcache_plugins.triton_kernels.gather import as_words, gather_rows, page_addresses, prepare_move, write_rows
from kvcache_plugins.triton_kernels.group_packing.launches import GroupPushState, explain_limits
from kvcache_plugins.triton_kernels.group_packing.push import prepare_group_push as prepare_group_push_launches
from kvcache_plugins.triton_kernels.infinigen.attend import prepare_attention
from kvcache_plugins.triton_kernels.infinigen.choose import prepare_choice, prepare_count, token_mask_arguments
from kvcache_plugins.triton_kernels.infinigen.push import prepare_exact_push
from kvcache_plugins.triton_kernels.infinigen.queries import prepare_rms_norm, prepare_rotation
from kvcache_plugins.triton_kernels.launch import ALIGNMENT, KeptLaunch, Launch
from kvcache_plugins.triton_kernels.scores import prepare_code_scores, prepare_column_scores
from kvcache_plugins.triton_kernels.scores import score_codes as score_codes_kernel
from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels, prepare_rows, shared_bytes
from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
from kvcache_plugins.triton_kernels.transform_coding.coding_tiles import GRID_END, GRID_STEPS, NUM_CELLS
from kvcache_plugins.triton_kernels.transform_coding.decode_rows import prepare_decoding as prepare_decoding_launch
from kvcache_plugins.triton_kernels.transform_coding.launches import Codebook, CodedRows, PushState, RotaryAngles
from kvcache_plugins.triton_kernels.transform_coding.push import prepare_push as prepare_push_launch
from kvcache_plugins.triton_kernels.transform_coding.step import RowSegment, prepare_step, shares_tables
from kvcache_plugins.user_warnings import warn_user

from .compiled import GrowingStates
from .current_device import on_device_of
from .masks import slice_mask


# Kernels and a type that are used as they are
__all__ = [
    "ALIGNMENT",
    "GroupPushState",
    "KeptLaunch",
    "PushState",
    "as_words",
    "gather_rows",
    "page_addresses",
    "prepare_attention",
    "prepare_choice",
    "prepare_code_scores",
    "prepare_column_scores",
    "prepare_count",
    "prepare_exact_push",
    "prepare_move",
    "prepare_rms_norm",
    "prepare_rotation",
    "token_mask_arguments",
    "write_rows",
]

# Factor from scores to the base of e to those to the base of 2
LOG2_E = math.log2(math.e)

# Exact and coded parts that the last launch takes
_MAX_DENSE, _MAX_CODED = 2, 3
# Segments of rows that one launch attends to
_MAX_SEGMENTS = 2
# Positions whose angles are stored one by one, and least number of their multiples whose angles are stored
_NUM_NEAR = 256
_LEAST_FAR = 64
# Channels and dtypes of states that kernels encode: more channels would not fit into registers
_MOST_CHANNELS = 256
_ENCODED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
StoredPart = GroupPart | RowPart
# Reason why kernels may not attend to rows in bases
TOO_LARGE = "bases of heads of this size do not fit into the GPU's shared memory"
_warn_once = cache(warn_user)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a device; Triton's interpreter has no limit."""
    is_gpu = device.type == "cuda"
    return driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"] if is_gpu else sys.maxsize


def has_room(formats: RowFormats | None, device: torch.device, dtype: torch.dtype) -> bool:
    """
    Check that attention over rows of these formats, or over groups, with queries of a dtype, fits into a device's
    shared memory.
    """
    if formats is None:
        return True
    keys, values = formats
    sizes = keys.head_dim, keys.num_coefficients, values.num_coefficients
    is_float32 = dtype == torch.float32
    if keys.basis is None or shared_bytes(*sizes, is_float32=is_float32) <= shared_memory(device):
        return True
    _warn_once(f"attention over states in calibrated bases runs in plain PyTorch instead of `triton`: {TOO_LARGE}")
    return False


def attend(query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float) -> torch.Tensor:
    """Attend to all parts, at least one of them coded; see `attention.attend`."""
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    rows = query.reshape(batch_size, num_heads, -1, head_dim)
    dense = [part for part in parts if isinstance(part, DensePart)]
    # The tokens behind the rows may be in two parts, which follow each other and have columns of one mask
    while len(dense) > _MAX_DENSE:
        last = dense[-2:]
        assert all(part.num_tokens is None for part in last), "the host knows the lengths of parts that it joins"
        masks = [slice_mask(part.mask, 0, part.length) for part in last]
        mask = torch.cat([each for each in masks if each is not None], dim=3) if last[0].mask is not None else None
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(*(part.in_use() for part in last), strict=True))
        dense[-2:] = [DensePart(keys, values, keys.shape[2], mask)]
    gathered = [part.gathered() if isinstance(part, PagedRowPart) else part for part in parts]
    coded = [part for part in gathered if not isinstance(part, DensePart)]
    # Launches go to the current device, which may be another than the layer's
    with on_device_of(query):
        launch = _prepare_row_step(rows, coded, dense, scale)
        if launch is not None:
            return launch().reshape(batch_size, num_query_heads, num_queries, -1)
        steps = [prepare_part(rows, part, scale) for part in coded]
        output: torch.Tensor = _prepare_end([step() for step in steps], dense, rows, scale)()
    return output.reshape(batch_size, num_query_heads, num_queries, -1)


class PartStep(NamedTuple):
    """
    The launches of attention over a stored part.

    Args:
        launch (`Launch`): the launch that writes partial results.
        finish (`Launch`, *optional*): makes sums of states of them, if values are in a basis, rotated or less a mean.
    """

    launch: Launch
    finish: Launch | None = None

    @property
    def launches(self) -> list[Launch]:
        """Both in their order."""
        return [self.launch] if self.finish is None else [self.launch, self.finish]

    def __call__(self) -> Partials:
        """Launch, and return partial results in the form in which they are merged."""
        *_, partials = (launch() for launch in self.launches)
        return partials


def score_rows(query: torch.Tensor, tokens: SelectableRows) -> torch.Tensor:
    """Multiply queries with key rows; see `tokens.score_rows`."""
    with on_device_of(query):
        scores: torch.Tensor = prepare_row_scores(query, tokens, math.log(2))()
    return scores


def prepare_row_scores(query: torch.Tensor, tokens: SelectableRows, scale: float) -> Launch:
    """Prepare products of queries `[B, H, G, D]` with key rows, scaled and to the base of 2."""
    # Values are not read
    part = RowPart(tokens.keys, tokens.keys, tokens.formats, tokens.positions, tokens.length, None)
    return prepare_part(query, part, scale, only_scores=True).launch


def prepare_decoding(
    rows: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    tokens: SelectableRows,
    places: torch.Tensor,
    most_programs: int,
) -> Launch:
    """Prepare the launch that decodes selected tokens, whose rows of values are given; see `decode_rows`."""
    keys, values = tokens.formats
    device = rows.device
    assert keys.rope is not None, "formats of keys have a rotary layout"
    coded_keys, coded_values = (
        CodedRows(own, row_format, codebook_of(row_format.is_weighted, device).coefficients)
        for own, row_format in ((tokens.keys, keys), (rows, values))
    )
    padding = tokens.positions.padding
    return prepare_decoding_launch(
        coded_keys,
        coded_values,
        slots,
        count,
        places,
        signs_of(values.head_dim, torch.float16, device),
        rotary_angles(keys.rope, tokens.length, device),
        (tokens.sinks.keys, tokens.sinks.values),
        None if padding is None else padding.to(device),
        most_programs,
    )


def score_codes(query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, nbits: int) -> torch.Tensor:
    """Multiply queries with the keys of codes; see `token_scores.score_codes`."""
    # Launches go to the current device, which may be another than the layer's
    with on_device_of(query):
        return score_codes_kernel(codes, scale, query, nbits)


def _prepare_row_step(
    rows: torch.Tensor, coded: Sequence[StoredPart], dense: Sequence[DensePart], scale: float
) -> Launch | None:
    """Prepare attention to rows of one or two segments and exact parts in one launch, `None` for other parts."""
    row_parts = [part for part in coded if isinstance(part, RowPart)]
    if len(row_parts) != len(coded) or not 0 < len(coded) <= _MAX_SEGMENTS:
        return None
    keys, values = row_parts[0].formats
    if keys.basis is not None or values.mean is not None:
        return None
    segments = [_segment_of(part, rows.device) for part in row_parts]
    if not shares_tables(segments[0], segments[-1]):
        return None
    assert keys.rope is not None, "formats of keys have a rotary layout"
    most_positions = max(segment.start + segment.length for segment in segments)
    angles = rotary_angles(keys.rope, most_positions, rows.device)
    packed = has_pairs(rows.device.type)
    return prepare_step(rows, segments, angles, _exact_parts(dense), scale=scale, packed=packed)


def _segment_of(part: RowPart, device: torch.device) -> RowSegment:
    padding, first = part.positions.padding, part.positions.first
    keys, values = (
        CodedRows(own, row_format, codebook_of(row_format.is_weighted, device).coefficients)
        for own, row_format in zip((part.keys, part.values), part.formats, strict=True)
    )
    padding = None if padding is None else padding.to(device)
    mask = slice_mask(part.mask, 0, part.length)
    return RowSegment(keys, values, first, part.length, part.num_tokens, padding, mask)


def prepare_part(
    rows: torch.Tensor, part: StoredPart, scale: float, packed: bool | None = None, *, only_scores: bool = False
) -> PartStep:
    """
    Prepare attention of query rows `[B, H, rows, D]` to a stored part, without launching it. Arithmetic is on pairs of
    halves if `packed`, the default on NVIDIA's GPUs. With `only_scores` the launch writes the scores of rows.
    """
    arguments: dict[str, Any] = {
        "length": part.length,
        "mask": slice_mask(part.mask, 0, part.length),
        "scale": scale,
        "packed": has_pairs(rows.device.type) if packed is None else packed,
    }
    if isinstance(part, GroupPart):
        arguments["num_chunks"] = -(-part.length // part.keys.chunk_length)
        arguments["num_tokens"] = part.num_tokens
        launch = prepare_groups(rows, part.keys, part.values, **arguments)
        if not part.values.is_rotated:
            return PartStep(launch)
        head_dim = part.values.head_dim
        signs = signs_of(head_dim, torch.int8, rows.device, is_tiled=False)[None]
        finish = Finish(signs, scale=rotation_size(head_dim) ** -0.5)
        return PartStep(launch, prepare_finish(launch.result, finish, head_dim))
    keys, values = part.formats
    assert keys.rope is not None, "formats of keys have a rotary layout"
    padding, first = part.positions.padding, part.positions.first
    arguments |= {"start": first, "padding": None if padding is None else padding.to(rows.device)}
    by_pairs = keys.basis is not None
    angles = rotary_angles(keys.rope, first + part.length, rows.device, by_pairs=by_pairs)
    coded_keys, coded_values = (
        CodedRows(own, row_format, codebook_of(row_format.is_weighted, rows.device).coefficients)
        for own, row_format in ((part.keys, keys), (part.values, keys if only_scores else values))
    )
    arguments["num_tokens"] = part.num_tokens
    launch = prepare_rows(rows, coded_keys, coded_values, angles, **arguments, only_scores=only_scores)
    basis = values.basis
    if only_scores or basis is None and values.mean is None:
        return PartStep(launch)
    finish = Finish(mean=values.mean)
    if basis is not None:
        finish = Finish(basis.vectors, basis.steps, basis.factors, mean=values.mean)
    return PartStep(launch, prepare_finish(launch.result, finish, values.head_dim))


def _prepare_end(partials: Sequence[Partials], dense: Sequence[DensePart], rows: torch.Tensor, scale: float) -> Launch:
    return prepare_combination(partials, _exact_parts(dense), rows, scale)


def _exact_parts(dense: Sequence[DensePart]) -> list[KernelDensePart]:
    return [KernelDensePart(*part.in_use(), slice_mask(part.mask, 0, part.length), part.num_tokens) for part in dense]


class KeptAttention:
    """
    Attention of single tokens to parts at fixed addresses, by launches that are kept; see `keep_attention`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): queries of the same shape and dtype as those to come.
        coded, dense: parts, as many as the last launch takes. The last dense part may change at every call.
        num_heads, scale: as in `attention.attend`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        coded: Sequence[StoredPart],
        dense: Sequence[DensePart],
        num_heads: int,
        scale: float,
    ):
        rows = query.reshape(len(query), num_heads, -1, query.shape[3])
        self._rows = rows = rows.clone(memory_format=torch.contiguous_format)
        self._scale = scale
        self._query_kind = query.shape, query.dtype
        self._coded, self._dense = coded, dense
        with on_device_of(query):
            # Attention to rows may be one launch, which is prepared as the last one
            whole = _prepare_row_step(rows, coded, dense, scale)
            self._steps = [] if whole is not None else [prepare_part(rows, part, scale) for part in coded]
            self._attending = [KeptLaunch(step.launch, ["query_ptr"]) for step in self._steps]
            self._finishing = [KeptLaunch(step.finish) for step in self._steps if step.finish is not None]
            self._keep_end(whole)

    def _keep_end(self, end: Launch | None) -> None:
        """Keep the last launch: `end`, or the one that merges what the others wrote."""
        with on_device_of(self._rows):
            if end is None:
                partials = [step.launches[-1].result for step in self._steps]
                end = _prepare_end(partials, self._dense, self._rows, self._scale)
            self._combining = KeptLaunch(end, ["query_ptr", "result_ptr", f"num_tokens_{len(self._dense) - 1}"])
        self._result_shape = *self._query_kind[0][:3], end.result.shape[3]

    def __call__(self, query: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Attend, with `length` tokens of the last dense part, or all of them."""
        if query.data_ptr() % ALIGNMENT or not query.is_contiguous():
            query = query.clone(memory_format=torch.contiguous_format)
        result = query.new_empty(self._result_shape)
        length = self._dense[-1].length if length is None else length
        with on_device_of(query):
            for launch in self._attending:
                launch(query)
            for launch in self._finishing:
                launch()
            self._combining(query, result, length)
        return result

    def attend(self, query: torch.Tensor, scale: float | None, tail: GrowingStates) -> torch.Tensor | None:
        """Attend to parts and tail, the last exact part; `None` for queries that are not like the planned ones."""
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if (query.shape, query.dtype) != self._query_kind or scale != self._scale:
            return None
        last, (keys, values) = self._dense[-1], tail.storage
        if keys is not last.keys or values is not last.values:
            self._dense = [*self._dense[:-1], DensePart(keys, values, keys.shape[2], None)]
            with on_device_of(query):
                whole = None if self._steps else _prepare_row_step(self._rows, self._coded, self._dense, self._scale)
                self._keep_end(whole)
        return self(query, tail.length)


def keep_attention(
    query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float | None
) -> KeptAttention | None:
    """
    Keep the launches of attention of single tokens `[B, H * G, 1, D]` to parts at fixed addresses, whose lengths are
    constant or on the device; see `attend`. Return `None` if there are more parts than a launch takes.
    """
    dense = [part for part in parts if isinstance(part, DensePart)]
    coded = [part for part in parts if isinstance(part, RowPart | GroupPart)]
    if not 0 < len(dense) <= _MAX_DENSE or not 0 < len(coded) <= _MAX_CODED or len(dense) + len(coded) < len(parts):
        return None
    return KeptAttention(query, coded, dense, num_heads, query.shape[3] ** -0.5 if scale is None else scale)


def prepare_push(state: PushState[RowFormat]) -> Callable[[torch.Tensor, torch.Tensor, bool], None] | None:
    """
    Prepare pushes of single tokens, keys and values `[B, H, 1, D or E]`, into a layer: a launch each, whether the tail
    may be full or not. Return `None` if no kernel encodes such states.
    """
    keys, values = state.formats
    states = state.tail[0]
    if not all(can_encode(states.dtype, each.head_dim) for each in state.formats):
        return None
    tensors = [*state.tail, *state.older, *(state.recent or ())]
    assert all(each.is_contiguous() for each in tensors), "the kernel takes no strides"
    assert keys.rope is not None, "formats of keys have a rotary layout"
    codebooks = codebook_of(keys.is_weighted, states.device), codebook_of(values.is_weighted, states.device)
    angles = rotary_angles(keys.rope, state.num_positions, states.device)
    with on_device_of(states):
        launch = prepare_push_launch(state, codebooks, _signs_for(values, states), angles)
        kept = KeptLaunch(launch, ["new_keys_ptr", "new_values_ptr"])

    def push(keys: torch.Tensor, values: torch.Tensor, may_pack: bool = True) -> None:
        with on_device_of(keys):
            kept(keys.to(states.dtype).contiguous(), values.to(states.dtype).contiguous())

    return push


def prepare_group_push(state: GroupPushState) -> Callable[[torch.Tensor, torch.Tensor, bool], None]:
    """
    Prepare pushes of single tokens, keys and values `[B, H, 1, D or E]`, into a layer of chunks: the same launches for
    each that may find a full tail, so that graphs can replay them. See `explain_group_push` for chunks that no kernel
    packs.
    """
    states = state.tail[0]
    with on_device_of(states):
        *first, last = prepare_group_push_launches(state)
        kept = [KeptLaunch(launch) for launch in first]
        pushing = KeptLaunch(last, ["new_keys_ptr", "new_values_ptr"])

    def push(keys: torch.Tensor, values: torch.Tensor, may_pack: bool = True) -> None:
        with on_device_of(keys):
            for launch in kept if may_pack else ():
                launch()
            pushing(keys.to(states.dtype).contiguous(), values.to(states.dtype).contiguous())

    return push


def explain_group_push(keys: QuantizedChunks, values: QuantizedChunks, dtype: torch.dtype) -> str | None:
    """Return the reason why no kernel packs states of a dtype into such chunks, or `None`."""
    if dtype not in _ENCODED_DTYPES:
        return f"none packs states in {dtype}"
    return explain_limits(keys, values, is_rotated=values.is_rotated)


def hadamard_signs(head_dim: int, states: torch.Tensor) -> torch.Tensor:
    """Return the matrix that values like `states` are rotated by, `[D, next power of two]`: ones and minus ones."""
    return signs_of(head_dim, _sign_dtype(states), states.device, is_tiled=False)


def can_encode(dtype: torch.dtype, head_dim: int) -> bool:
    """Check that kernels encode states of a dtype and head dim."""
    return head_dim <= _MOST_CHANNELS and dtype in _ENCODED_DTYPES


def encode(states: torch.Tensor, row_format: RowFormat, positions: Positions) -> torch.Tensor:
    """Encode states `[B, H, T, D]` as rows `[B, H, T, R]`."""
    if row_format.is_rotated and row_format.mean is not None:
        states = states.float() - row_format.mean.float()[:, :, None]
    states = states.detach()
    arguments: dict[str, Any] = {}
    if row_format.rope is not None:
        padding = positions.padding
        arguments["angles"] = rotary_angles(row_format.rope, positions.first + states.shape[2], states.device)
        arguments["start"] = positions.first
        arguments["padding"] = None if padding is None else padding.to(states.device)
    codebook = codebook_of(row_format.is_weighted, states.device)
    signs = _signs_for(row_format, states)
    # Launches go to the current device, which may be another than the layer's
    with on_device_of(states):
        rows: torch.Tensor = prepare_coding(states, row_format, codebook, signs, **arguments)()
    return rows


def _signs_for(row_format: RowFormat, states: torch.Tensor) -> torch.Tensor | None:
    """Return the matrix that states are rotated by, or `None` if they are not."""
    if not row_format.is_rotated:
        return None
    return signs_of(row_format.head_dim, _sign_dtype(states), states.device)


def _sign_dtype(states: torch.Tensor) -> torch.dtype:
    # GPUs have products of bfloat16, Triton's interpreter has none
    is_own = states.dtype == torch.float16 or states.dtype == torch.bfloat16 and states.is_cuda
    return states.dtype if is_own else torch.float16


def _coefficients(is_weighted: bool) -> torch.Tensor:
    """Make the coefficients of `CodedRows`, on the CPU; levels of values have their gain corrected."""
    levels = torch.tensor(COEFFICIENTS, dtype=torch.float64, device="cpu")
    if not is_weighted:
        levels = levels * level_gains()[:, None]
    factor = 0.5 ** torch.arange(MAX_WIDTH + 1, dtype=torch.float64, device="cpu")
    return torch.cat([factor[:, None], levels], dim=1).float()


def rotary_angles(
    layout: RotaryLayout, num_positions: int, device: torch.device, *, by_pairs: bool = False
) -> RotaryAngles | None:
    """
    Return the angles of a layout up to a number of positions, of channels or `by_pairs` of them; `None` if it rotates
    nothing.
    """
    if not layout.frequencies:
        return None
    num_far = max(_LEAST_FAR, 1 << (-(-num_positions // _NUM_NEAR)).bit_length())
    return _angles_of(layout, num_far, device, by_pairs)


@cache
def _angles_of(layout: RotaryLayout, num_far: int, device: torch.device, by_pairs: bool) -> RotaryAngles:
    with torch.inference_mode(False):
        near, far = (
            torch.stack(layout.angles(torch.arange(count, dtype=torch.int64, device="cpu") * step), dim=1)
            for count, step in ((_NUM_NEAR, 1), (num_far, _NUM_NEAR))
        )
        partners = channels_of(layout, torch.device("cpu"))[0]
        if by_pairs:
            channels = torch.arange(layout.head_dim, dtype=torch.int64, device="cpu")
            alone = channels[partners == channels]
            half = (len(alone) + 1) // 2
            firsts, seconds = channels[partners > channels], channels.new_full((half,), layout.head_dim)
            seconds[: len(alone) - half] = alone[half:]
            partners = torch.stack([torch.cat([firsts, alone[:half]]), torch.cat([partners[firsts], seconds])])
            near, far = near[..., partners[0]].contiguous(), far[..., partners[0]].contiguous()
        return RotaryAngles(partners.int().to(device), near.to(device), far.to(device))


@cache
def codebook_of(is_weighted: bool, device: torch.device) -> Codebook:
    """Return codes and levels, those of weighted scales or those with their gain corrected."""
    with torch.inference_mode(False):
        bounds = level_tables(torch.device("cpu")).bounds
        # The kernel's own arithmetic, so that a number is above all bounds of the cells before its own
        cells = _cells(bounds)
        codes = torch.searchsorted(
            cells, torch.arange(NUM_CELLS.value, dtype=torch.int32, device="cpu").expand(len(cells), -1).contiguous()
        )
        own = torch.full(codes.shape, torch.inf, dtype=torch.float32, device="cpu").scatter_(1, cells.long(), bounds)
        return Codebook(_coefficients(is_weighted).to(device), codes.to(torch.uint8).to(device), own.to(device))


def _cells(numbers: torch.Tensor) -> torch.Tensor:
    """Find the cells of the kernel's grid that numbers lie in, int32."""
    return ((numbers.clamp(-GRID_END.value, GRID_END.value) + GRID_END.value) * GRID_STEPS.value).int()


@cache
def signs_of(head_dim: int, dtype: torch.dtype, device: torch.device, *, is_tiled: bool = True) -> torch.Tensor:
    """
    Return the Hadamard matrix of ones that values are rotated by: `[D, next power of two]`, or tiled as `signs` of
    `code_rows.prepare_coding`.
    """
    with torch.inference_mode(False):
        size = rotation_size(head_dim)
        signs = torch.block_diag(*[hadamard_matrix(size, torch.device("cpu")).sign()] * (head_dim // size))
        padded = in_tile_order(signs) if is_tiled else F.pad(signs, (0, (1 << (head_dim - 1).bit_length()) - head_dim))
        return padded.to(dtype).to(device)


def in_tile_order(matrix: torch.Tensor) -> torch.Tensor:
    """Move columns `[..., D]` to their places of a tile, see `coding_tiles.row_places`, with zeros elsewhere."""
    padded = F.pad(matrix, (0, block_channels(matrix.shape[-1]) - matrix.shape[-1]))
    return padded.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2).contiguous()
