"""Attention and coding by Triton's kernels: what these read beside what is stored, and their launches.

Attention is one launch a coded part, and one at the end that merges them and attends to the exact parts. Of a layer
that stands still the launches are kept, with lengths on the device, and the host takes a fraction of the time so.
Nothing is read back from the device, so a step can be captured in a graph. Coding is one launch a side. Plain PyTorch
codes heads of more than 256 channels, and float64.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from triton.runtime import driver

from kvcache_plugins.formats.hadamard import hadamard_matrix, rotate, rotation_size
from kvcache_plugins.formats.parts import DensePart, GroupPart, PagedRowPart, Part, RowPart, SelectableRows
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.quantizer import COEFFICIENTS, MAX_WIDTH, level_gains, thresholds
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import RowFormat, RowFormats
from kvcache_plugins.triton_kernels.arithmetic import has_pairs
from kvcache_plugins.triton_kernels.attention.attend import prepare_groups
from kvcache_plugins.triton_kernels.attention.combine import prepare_combination
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.attention.partials import Partials
from kvcache_plugins.triton_kernels.gather import gather_rows, page_addresses, write_rows
from kvcache_plugins.triton_kernels.launch import ALIGNMENT, KeptLaunch, Launch
from kvcache_plugins.triton_kernels.scores import score_codes as score_codes_kernel
from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels, prepare_rows, shared_bytes
from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
from kvcache_plugins.triton_kernels.transform_coding.coding_tiles import GRID_END, GRID_STEPS, NUM_CELLS
from kvcache_plugins.triton_kernels.transform_coding.launches import Codebook, CodedRows, PushState, RotaryAngles
from kvcache_plugins.triton_kernels.transform_coding.push import prepare_push as prepare_push_launch
from kvcache_plugins.user_warnings import warn_user

from .compiled import GrowingStates
from .masks import slice_mask


# Kernels and a type that are used as they are
__all__ = ["PushState", "gather_rows", "page_addresses", "write_rows"]

# Parts of a kind that a launch at the end takes
_MAX_PARTS = 2
# Positions whose angles are held one by one; of others the multiples, at least so many of them
_NUM_NEAR = 256
_LEAST_FAR = 64
# States that kernels encode: more channels would not fit into registers
_MOST_CHANNELS = 256
_ENCODED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
StoredPart = GroupPart | RowPart
_Pair = Sequence[torch.Tensor]
# Why there may be no attention over rows in bases
TOO_LARGE = "bases of heads of this size do not fit into the GPU's shared memory"
_warn_once = cache(warn_user)


@cache
def shared_memory(device: torch.device) -> int:
    """Tells the bytes of shared memory that a program may have on a device: any, where it is interpreted."""
    is_gpu = device.type == "cuda"
    return driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"] if is_gpu else sys.maxsize


def has_room(formats: RowFormats | None, device: torch.device, dtype: torch.dtype) -> bool:
    """
    Returns whether attention over rows of these formats, or over groups, with queries of a dtype, fits into a device's
    shared memory.
    """
    if formats is None:
        return True
    keys, values = formats
    sizes, is_float32 = (keys.head_dim, keys.num_coefficients, values.num_coefficients), dtype == torch.float32
    if keys.basis is None or shared_bytes(*sizes, is_float32=is_float32) <= shared_memory(device):
        return True
    _warn_once(f"attention over states in calibrated bases runs in plain PyTorch instead of `triton`: {TOO_LARGE}")
    return False


def attend(query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float) -> torch.Tensor:
    """Attends over all parts, of which at least one is coded; see `attention.attend`."""
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    rows = query.reshape(batch_size, num_heads, -1, head_dim)
    dense = [part for part in parts if isinstance(part, DensePart)]
    # The tokens behind the rows may be in two parts, which follow each other and have columns of one mask
    while len(dense) > _MAX_PARTS:
        last = dense[-2:]
        assert all(part.num_tokens is None for part in last), "the host knows the lengths of parts that it joins"
        masks = [slice_mask(part.mask, 0, part.length) for part in last]
        mask = torch.cat([each for each in masks if each is not None], dim=3) if last[0].mask is not None else None
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(*(part.in_use() for part in last), strict=True))
        dense[-2:] = [DensePart(keys, values, keys.shape[2], mask)]
    gathered = [part.gathered() if isinstance(part, PagedRowPart) else part for part in parts]
    coded = [part for part in gathered if not isinstance(part, DensePart)]
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(query):
        steps = [prepare_part(rows, part, scale) for part in coded]
        output: torch.Tensor = _prepare_end([step.finished(step.launch()) for step in steps], dense, rows, scale)()
    return output.reshape(batch_size, num_query_heads, num_queries, -1)


class PartStep(NamedTuple):
    """
    Attention over a stored part, as it is launched.

    Args:
        launch (`Launch`): the launch that leaves partial results.
        finish (`Callable`, *optional*): makes outputs `[B, H, splits, rows, value D]` of those that it leaves, and of
            its totals.
    """

    launch: Launch
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def finished(self, partials: Partials) -> Partials:
        """Returns partial results as they are merged."""
        return partials if self.finish is None else partials._replace(output=self.finish(*partials[::2]))


def score_rows(query: torch.Tensor, tokens: SelectableRows) -> torch.Tensor:
    """Multiplies queries with key rows; see `tokens.score_rows`."""
    # Values are not read: keys in their place
    part = RowPart(tokens.keys, tokens.keys, tokens.formats, tokens.positions, tokens.length, None)
    with torch.cuda.device_of(query):
        scores: torch.Tensor = prepare_part(query, part, math.log(2), only_scores=True).launch()
    return scores


def score_codes(query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, nbits: int) -> torch.Tensor:
    """Multiplies queries with the keys that codes stand for; see `token_scores.score_codes`."""
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(query):
        return score_codes_kernel(codes, scale, query, nbits)


def prepare_part(
    rows: torch.Tensor, part: StoredPart, scale: float, packed: bool | None = None, *, only_scores: bool = False
) -> PartStep:
    """
    Prepares attention of rows `[B, H, rows, D]` over a stored part, without doing it; by pairs of halves if `packed`,
    as by default where rows are on a GPU of NVIDIA's. If `only_scores` of rows are wanted, those are what it leaves.
    """
    where: dict[str, Any] = {
        "length": part.length,
        "mask": slice_mask(part.mask, 0, part.length),
        "scale": scale,
        "packed": has_pairs(rows.device.type) if packed is None else packed,
    }
    if isinstance(part, GroupPart):
        where["num_chunks"] = -(-part.length // part.keys.chunk_length)
        launch = prepare_groups(rows, part.keys, part.values, **where)
        return PartStep(launch, (lambda output, _: rotate(output)) if part.values.is_rotated else None)
    keys, values = part.formats
    assert keys.rope is not None, "keys have a layout, be it one that rotates nothing"
    padding, first = part.positions.padding, part.positions.first
    where |= {"start": first, "padding": None if padding is None else padding.to(rows.device)}
    by_pairs = keys.basis is not None
    angles = rotary_angles(keys.rope, first + part.length, rows.device, by_pairs=by_pairs)
    coded_keys, coded_values = (
        CodedRows(own, table, _coefficients(table.is_weighted, rows.device))
        for own, table in ((part.keys, keys), (part.values, keys if only_scores else values))
    )
    finish = None if values.basis is None and values.mean is None else partial(_combine, values)
    where["num_tokens"] = part.num_tokens
    return PartStep(prepare_rows(rows, coded_keys, coded_values, angles, **where, only_scores=only_scores), finish)


def _combine(row_format: RowFormat, sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Returns sums of states `[B, H, ..., D]`, not to be rotated any more, given those of numbers in the basis or
    without the mean `[B, H, ..., K]`, each times its token's weight, and sums of weights `[B, H, ...]`.
    """
    states = sums.flatten(2, -2)
    if row_format.basis is not None:
        states = row_format.basis.states(states)
    if row_format.mean is not None:
        states = states + weights.flatten(2)[..., None] * row_format.mean.float()[:, :, None]
    return states.reshape(*sums.shape[:-1], row_format.head_dim)


def _prepare_end(partials: Sequence[Partials], dense: Sequence[DensePart], rows: torch.Tensor, scale: float) -> Launch:
    exact = [KernelDensePart(*part.in_use(), slice_mask(part.mask, 0, part.length), part.num_tokens) for part in dense]
    return prepare_combination(partials, exact, rows, scale)


class KeptAttention:
    """
    Attention of single tokens over parts that stay where they are, by launches that are kept; see `keep_attention`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): queries like those to come.
        coded, dense: parts, at most `_MAX_PARTS` of a kind. The last exact one may be another at every call.
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
        self._scale, self._like, self._dense = scale, (query.shape, query.dtype), dense
        with torch.cuda.device_of(query):
            self._steps = [prepare_part(rows, part, scale) for part in coded]
            self._attending = [KeptLaunch(step.launch, ["query_ptr"]) for step in self._steps]
        # What is turned back between the launches is another tensor every time
        self._turned = [number for number, step in enumerate(self._steps) if step.finish is not None]
        self._keep_end()

    def _keep_end(self) -> None:
        outputs = (f"output_{number}_ptr" for number in self._turned)
        with torch.cuda.device_of(self._rows):
            partials = [step.finished(step.launch.result) for step in self._steps]
            end = _prepare_end(partials, self._dense, self._rows, self._scale)
            self._combining = KeptLaunch(
                end, ["query_ptr", "result_ptr", f"num_tokens_{len(self._dense) - 1}", *outputs]
            )
        self._result_shape = *self._like[0][:3], end.result.shape[3]

    def __call__(self, query: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Attends, to so many tokens of the last exact part, or to all of them."""
        if query.data_ptr() % ALIGNMENT or not query.is_contiguous():
            query = query.clone(memory_format=torch.contiguous_format)
        result, steps = query.new_empty(self._result_shape), self._steps
        length = self._dense[-1].length if length is None else length
        with torch.cuda.device_of(query):
            for launch in self._attending:
                launch(query)
            outputs = (steps[number].finished(self._attending[number].result).output for number in self._turned)
            self._combining(query, result, length, *outputs)
        return result

    def attend(self, query: torch.Tensor, scale: float | None, tail: GrowingStates) -> torch.Tensor | None:
        """Attend to parts and tail, the last exact part; `None` for queries that are not like the planned ones."""
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if (query.shape, query.dtype) != self._like or scale != self._scale:
            return None
        last, (keys, values) = self._dense[-1], tail.storage
        if keys is not last.keys or values is not last.values:
            self._dense = [*self._dense[:-1], DensePart(keys, values, keys.shape[2], None)]
            self._keep_end()
        return self(query, tail.length)


def keep_attention(
    query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float | None
) -> KeptAttention | None:
    """
    Keeps attention of single tokens `[B, H * G, 1, D]` over parts that stay where they are, with as many tokens or
    with lengths on the device; see `attend`. `None` if they are more than are attended to where they stand.
    """
    dense = [part for part in parts if isinstance(part, DensePart)]
    coded = [part for part in parts if isinstance(part, RowPart | GroupPart)]
    if max(len(dense), len(coded)) > _MAX_PARTS or not dense or not coded or len(dense) + len(coded) < len(parts):
        return None
    return KeptAttention(query, coded, dense, num_heads, query.shape[3] ** -0.5 if scale is None else scale)


def prepare_push(state: PushState[RowFormat]) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """
    Prepare pushes of single tokens, keys and values `[B, H, 1, D or E]`, into a layer: a launch each, which decides
    nothing on the host, so that graphs can replay it. Return `None` if no kernel encodes such states.
    """
    keys, values = state.formats
    states = state.tail[0]
    if not all(can_encode(states.dtype, each.head_dim) for each in state.formats):
        return None
    tensors = [*state.tail, *state.older, *(state.recent or ())]
    assert all(each.is_contiguous() for each in tensors), "kernels know the strides of contiguous tensors"
    assert keys.rope is not None, "keys have a layout, be it one that rotates nothing"
    codebooks = codebook_of(keys.is_weighted, states.device), codebook_of(values.is_weighted, states.device)
    angles = rotary_angles(keys.rope, state.num_positions, states.device)
    with torch.cuda.device_of(states):
        launch = prepare_push_launch(state, codebooks, _signs_for(values, states), angles)
        kept = KeptLaunch(launch, ["new_keys_ptr", "new_values_ptr"])

    def push(keys: torch.Tensor, values: torch.Tensor) -> None:
        with torch.cuda.device_of(keys):
            kept(keys.to(states.dtype).contiguous(), values.to(states.dtype).contiguous())

    return push


def can_encode(dtype: torch.dtype, head_dim: int) -> bool:
    """Returns whether kernels encode states of a dtype and head dim."""
    return head_dim <= _MOST_CHANNELS and dtype in _ENCODED_DTYPES


def encode(states: torch.Tensor, table: RowFormat, positions: Positions) -> torch.Tensor:
    """Encodes states `[B, H, T, D]` as rows `[B, H, T, R]`."""
    if table.is_rotated and table.mean is not None:
        states = states.float() - table.mean.float()[:, :, None]
    states, where, padding = states.detach(), dict[str, Any](), positions.padding
    if table.rope is not None:
        where["angles"] = rotary_angles(table.rope, positions.first + states.shape[2], states.device)
        where["start"], where["padding"] = positions.first, None if padding is None else padding.to(states.device)
    book = codebook_of(table.is_weighted, states.device)
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(states):
        rows: torch.Tensor = prepare_coding(states, table, book, _signs_for(table, states), **where)()
    return rows


def _signs_for(table: RowFormat, states: torch.Tensor) -> torch.Tensor | None:
    """Returns the matrix that states are rotated by, or `None` where they are not."""
    if not table.is_rotated:
        return None
    # Products of bfloat16 are what GPUs have and Triton's interpreter has not
    is_own = states.dtype == torch.float16 or states.dtype == torch.bfloat16 and states.is_cuda
    return signs_of(table.head_dim, states.dtype if is_own else torch.float16, states.device)


@cache
def _coefficients(is_weighted: bool, device: torch.device) -> torch.Tensor:
    """Returns the coefficients of `CodedRows`; levels of values have their gain corrected."""
    with torch.inference_mode(False):
        levels = torch.tensor(COEFFICIENTS, dtype=torch.float64, device="cpu")
        if not is_weighted:
            levels = levels * level_gains()[:, None]
        factor = 0.5 ** torch.arange(MAX_WIDTH + 1, dtype=torch.float64, device="cpu")
        return torch.cat([factor[:, None], levels], dim=1).float().to(device)


def rotary_angles(
    layout: RotaryLayout, num_positions: int, device: torch.device, *, by_pairs: bool = False
) -> RotaryAngles | None:
    """
    Returns the angles of a layout up to a number of positions, of channels or `by_pairs` of them; or `None` where it
    rotates nothing.
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
    """Returns the codes of numbers and their points, weighted or with their gain corrected."""
    with torch.inference_mode(False):
        bounds = thresholds(torch.device("cpu"))
        # As the kernel computes it, so that a number is above all bounds of the cells before its own
        cells = _cells(bounds)
        codes = torch.searchsorted(
            cells, torch.arange(NUM_CELLS.value, dtype=torch.int32, device="cpu").expand(len(cells), -1).contiguous()
        )
        own = torch.full(codes.shape, torch.inf, dtype=torch.float32, device="cpu").scatter_(1, cells.long(), bounds)
        return Codebook(_coefficients(is_weighted, device), codes.to(torch.uint8).to(device), own.to(device))


def _cells(numbers: torch.Tensor) -> torch.Tensor:
    """The cells of the kernel's grid that numbers lie in, int32."""
    return ((numbers.clamp(-GRID_END.value, GRID_END.value) + GRID_END.value) * GRID_STEPS.value).int()


@cache
def signs_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the Hadamard matrix that values are rotated by, of ones, as `code_rows.prepare_coding` takes it."""
    size = rotation_size(head_dim)
    with torch.inference_mode(False):
        signs = hadamard_matrix(size, torch.device("cpu")).sign()
        signs = torch.block_diag(*[signs] * (head_dim // size))
        return in_tile_order(signs).to(dtype).to(device)


def in_tile_order(matrix: torch.Tensor) -> torch.Tensor:
    """Columns `[..., D]` at their places of a tile, as `coding_tiles.row_places` says, zeros where there are none."""
    padded = F.pad(matrix, (0, block_channels(matrix.shape[-1]) - matrix.shape[-1]))
    return padded.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2).contiguous()
