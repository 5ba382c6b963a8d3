"""Attention and coding by Triton's kernels: what these read beside what is stored, and their launches.

Attention is one launch a coded part, and one at the end that merges them and attends to the exact parts. Of one token
after the other the launches are kept: only the query and the newest exact tokens change, until something is
compressed, and the host takes a fraction of the time so. Nothing is read back from the device, and all that is
allocated is the result and a workspace, so a step can be captured in a graph. Coding is one launch a side. Not coded
here but in plain PyTorch are a trellis, whose codes are found one after the other, heads of more than 256 channels,
and float64.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.groups import TENSOR_NAMES, CompressedStates
from kvcache_plugins.codecs.parts import CodedPart, CompressedPart, DensePart, PagedPart, Part
from kvcache_plugins.codecs.quantizers import QUANTIZERS, thresholds
from kvcache_plugins.codecs.rope import RotaryLayout, channels_of
from kvcache_plugins.codecs.rotation import hadamard_matrix, rotate, rotation_size
from kvcache_plugins.codecs.rows import RowCodec, RowTable
from kvcache_plugins.triton_kernels.attention.attend import prepare
from kvcache_plugins.triton_kernels.attention.combine import combine, combine_kernel, prepare_combination
from kvcache_plugins.triton_kernels.attention.compressed_tensors import CompressedTensors
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.attention.partials import Launch, Partials
from kvcache_plugins.triton_kernels.dot import has_pairs
from kvcache_plugins.triton_kernels.kept_launch import ALIGNMENT, KeptLaunch, can_keep
from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels, prepare_rows
from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
from kvcache_plugins.triton_kernels.transform_coding.coding_tiles import GRID_END, GRID_STEPS, NUM_CELLS
from kvcache_plugins.triton_kernels.transform_coding.launches import Codebook, CodedRows, CodingLaunch, RotaryAngles

from .masks import slice_mask


# Parts of a kind that a launch at the end takes
_MAX_PARTS = 2
_FLOAT32_BYTES = 4
# Under which name a part keeps a step
_STEP = "step"
# What every step has of its own
_CHANGING = ("query", "output", "maximum", "total")
# Positions whose angles are held one by one; of others the multiples, at least so many of them
_NUM_NEAR = 256
_LEAST_FAR = 64
StoredPart = CompressedPart | CodedPart


def attend(query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float) -> torch.Tensor:
    """
    Attends over all parts, of which at least one is coded; see `attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Sequence[Part]`): what is attended to.
        num_heads (`int`): H.
        scale (`float`): factor of the scores.
    """
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    rows = query.reshape(batch_size, num_heads, -1, head_dim)
    dense = [part for part in parts if isinstance(part, DensePart)]
    # What stands behind the rows may be in two pieces, which follow each other and have columns of one mask
    while len(dense) > _MAX_PARTS:
        last = dense[-2:]
        masks = [slice_mask(part.mask, 0, part.length) for part in last]
        mask = torch.cat([each for each in masks if each is not None], dim=3) if last[0].mask is not None else None
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(*(part.in_use() for part in last), strict=True))
        dense[-2:] = [DensePart(keys, values, keys.shape[2], mask)]
    gathered = [part.gathered() if isinstance(part, PagedPart) else part for part in parts]
    coded = [part for part in gathered if not isinstance(part, DensePart)]
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(query):
        output = _attend_parts(rows, dense, coded, scale)
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


def prepare_part(rows: torch.Tensor, part: StoredPart, scale: float, packed: bool | None = None) -> PartStep:
    """
    Prepares attention of rows `[B, H, rows, D]` over a stored part, without doing it.

    Args:
        rows (`torch.Tensor` of shape `[B, H, rows, D]`): queries.
        part (`CompressedPart` or `CodedPart`): what is attended to.
        scale (`float`): factor of the scores.
        packed (`bool`, *optional*): whether pairs of halves are computed with, by default where rows are on a GPU of
            NVIDIA's.
    """
    where: dict[str, Any] = {
        "length": part.length,
        "num_tokens": part.num_tokens,
        "mask": slice_mask(part.mask, 0, part.length),
        "scale": scale,
        "packed": has_pairs(rows.device.type) if packed is None else packed,
    }
    if isinstance(part, CompressedPart):
        launch = prepare(
            rows,
            _tensors(part.keys),
            _tensors(part.values),
            num_chunks=-(-part.length // part.keys.chunk_length),
            value_head_dim=part.values.head_dim,
            **where,
        )
        return PartStep(launch, _rotate_back if part.values.is_rotated else None)
    assert isinstance(part.codec, RowCodec), "only rows of tables have kernels"
    keys, values = part.codec.tables(rows.device)
    padding, first = part.positions.padding, part.positions.first
    where |= {"start": first, "padding": None if padding is None else padding.to(rows.device)}
    angles = rotary_angles(part.codec.rope, first + part.length, rows.device)
    coded_keys, coded_values = (
        CodedRows(own, table, coefficients_of(table)) for own, table in ((part.keys, keys), (part.values, values))
    )
    finish = None if values.basis is None and values.mean is None else values.combine
    return PartStep(prepare_rows(rows, coded_keys, coded_values, angles, **where), finish)


def _tensors(states: CompressedStates) -> CompressedTensors:
    tensors = {name: getattr(states, name) for name in TENSOR_NAMES}
    return CompressedTensors(
        **tensors, nbits=states.nbits, axis=states.grouping.axis, group_size=states.grouping.group_size
    )


def _rotate_back(output: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return rotate(output)


def _attend_parts(
    rows: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[StoredPart], scale: float
) -> torch.Tensor:
    """Attends with rows `[B, H, rows, D]`; over parts that were seen before by launches that are kept."""
    step = compressed[0].kept.get(_STEP)
    if isinstance(step, KeptStep) and step.fits(rows, dense, compressed, scale):
        return step(rows, dense[-1])
    parts = [prepare_part(rows, part, scale) for part in compressed]
    if _can_keep(rows, dense, parts):
        step = compressed[0].kept[_STEP] = KeptStep(rows, dense, compressed, parts, scale)
        return step.take_first_result()
    partials = [part.finished(part.launch()) for part in parts]
    return combine(partials, _exact(dense), rows, scale)


def _exact(dense: Sequence[DensePart]) -> list[KernelDensePart]:
    return [KernelDensePart(*part.in_use(), slice_mask(part.mask, 0, part.length), part.num_tokens) for part in dense]


class KeptStep:
    """
    The launches of attention over compressed parts and exact ones, of which the last grows. It is made by making them.

    Args:
        rows (`torch.Tensor` of shape `[B, H, rows, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence`): compressed parts, the first of which keeps the step.
        parts (`Sequence[PartStep]`): what is done with them.
        scale (`float`): factor of the scores.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        dense: Sequence[DensePart],
        compressed: Sequence[StoredPart],
        parts: Sequence[PartStep],
        scale: float,
    ) -> None:
        self._query, self._scale, self._newest = _query_layout(rows), scale, _newest_layout(dense[-1])
        self._others, self._first_dense = list(compressed[1:]), list(dense[:-1])
        self._finish = [part.finish for part in parts]
        launches = [part.launch for part in parts]
        self._shapes = [launch.partials.output.shape for launch in launches]
        # Numbers of outputs, of maxima and of totals of each part in the workspace
        self._sizes = [(_padded(math.prod(shape)), _padded(math.prod(shape[:-1]))) for shape in self._shapes]
        self._workspace_size = sum(outputs + 2 * maxima for outputs, maxima in self._sizes)
        self._attending = [
            KeptLaunch(launch.kernel, launch.grid, launch.arguments, launch.options) for launch in launches
        ]
        partials = [part.finished(part.launch.partials) for part in parts]
        launch = prepare_combination(partials, _exact(dense), rows, scale)
        self._combining = KeptLaunch(combine_kernel, launch.grid, launch.arguments, launch.options)
        self._first_result: torch.Tensor | None = launch.result
        self._result_shape = launch.result.shape
        for kept in (*self._attending, self._combining):
            kept.forget((*_CHANGING, "result"))
        self._attending_places = [kept.places(f"{name}_ptr" for name in _CHANGING) for kept in self._attending]
        self._combining_places = self._combining.places(self._changing_names())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies and pickles of a cache have tensors of their own, and make steps of their own
        return type(None), ()

    def take_first_result(self) -> torch.Tensor:
        """Hands out, once, the result of the step that the kept step was made by."""
        result, self._first_result = self._first_result, None
        assert result is not None
        return result

    def fits(
        self, rows: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[StoredPart], scale: float
    ) -> bool:
        """Whether a step over these parts, of which the first compressed one keeps this one, is this one again."""
        return (
            scale == self._scale
            and _are_same(self._first_dense, dense[:-1])
            and _are_same(self._others, compressed[1:])
            and _query_layout(rows) == self._query
            and _newest_layout(dense[-1]) == self._newest
        )

    def __call__(self, rows: torch.Tensor, newest: DensePart) -> torch.Tensor:
        """Attention `[B, H, rows, value D]` with other queries and newest tokens."""
        result = rows.new_empty(self._result_shape)
        workspace = rows.new_empty(self._workspace_size, dtype=torch.float32)
        query, address, start = rows.data_ptr(), workspace.data_ptr(), 0
        changes: list[Any] = [query, result.data_ptr()]
        for index, launch in enumerate(self._attending):
            num_outputs, num_maxima = self._sizes[index]
            output: Any = address + _FLOAT32_BYTES * start
            maximum = output + _FLOAT32_BYTES * num_outputs
            total = maximum + _FLOAT32_BYTES * num_maxima
            launch.change(self._attending_places[index], (query, output, maximum, total))
            launch()
            finish = self._finish[index]
            if finish is not None:
                shape, behind = self._shapes[index], start + num_outputs + num_maxima
                totals = workspace[behind : behind + math.prod(shape[:-1])].view(shape[:-1])
                output = finish(workspace[start : start + math.prod(shape)].view(shape), totals)
            changes += (output, maximum, total)
            start += num_outputs + 2 * num_maxima
        # The newest tokens have grown, and may have moved
        for states in (newest.keys, newest.values):
            changes += (states.data_ptr(), *states.stride()[:2])
        self._combining.change(self._combining_places, [*changes, newest.length])
        self._combining()
        return result

    def _changing_names(self) -> list[str]:
        """Lists the arguments that the last launch is given anew in every step, in their order."""
        blocks = [f"{name}_{index}_ptr" for index in range(len(self._attending)) for name in _CHANGING[1:]]
        newest = len(self._first_dense)
        states = [f"{name}_{newest}_{end}" for name in ("keys", "values") for end in ("ptr", "stride_b", "stride_h")]
        return ["query_ptr", "result_ptr", *blocks, *states, f"num_tokens_{newest}"]


def _padded(count: int) -> int:
    """Float32 numbers behind which others are aligned."""
    return -(-count * _FLOAT32_BYTES // ALIGNMENT) * ALIGNMENT // _FLOAT32_BYTES


def _can_keep(rows: torch.Tensor, dense: Sequence[DensePart], parts: Sequence[PartStep]) -> bool:
    """
    Whether a step's launches can be kept: without a mask that every token has anew, where Triton compiles, and where
    no graph keeps them.
    """
    return (
        0 < len(dense) <= _MAX_PARTS
        and dense[-1].mask is None
        and dense[-1].num_tokens is None
        and can_keep(combine_kernel)
        and len(parts) <= _MAX_PARTS
        and all(part.length for part in dense)
        and all(part.launch.partials.output.numel() for part in parts)
        and rows.stride(-1) == 1
        and rows.data_ptr() % ALIGNMENT == 0
        and all(_newest_layout(dense[-1])[-4:])
    )


def _query_layout(rows: torch.Tensor) -> tuple[Any, ...]:
    """Describes the queries that a kept step is for."""
    return rows.shape, rows.stride(), rows.dtype, rows.data_ptr() % ALIGNMENT


def _newest_layout(part: DensePart) -> tuple[Any, ...]:
    """Describes the newest tokens that a kept step is for; they come to be more and move."""
    layout: tuple[Any, ...] = (part.mask is None, part.length > 0)
    are_aligned: tuple[bool, ...] = ()
    for states in (part.keys, part.values):
        batch, head, token, channel = states.stride()
        layout += (token, channel, states.dtype)
        are_aligned += (states.data_ptr() % ALIGNMENT == 0, batch % ALIGNMENT == 0 and head % ALIGNMENT == 0)
    return layout + are_aligned


def _are_same(kept: Sequence[object], given: Sequence[object]) -> bool:
    return len(kept) == len(given) and all(mine is theirs for mine, theirs in zip(kept, given, strict=True))


def encode(states: torch.Tensor, table: RowTable, positions: Positions) -> torch.Tensor:
    """Codes states `[B, H, T, D]` as rows `[B, H, T, R]`; if they are rotated, the mean has been taken off."""
    launch = prepare_encoding(states, table, positions, has_products_of_bfloat16=states.is_cuda)
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(launch.rows):
        launch()
    return launch.rows


def prepare_encoding(
    states: torch.Tensor, table: RowTable, positions: Positions, *, has_products_of_bfloat16: bool
) -> CodingLaunch:
    """The launch of `encode`; products of bfloat16 are what GPUs have and Triton's interpreter has not."""
    states, where, padding = states.detach(), dict[str, Any](), positions.padding
    if table.rope is not None:
        where["angles"] = rotary_angles(table.rope, positions.first + states.shape[2], states.device)
        where["start"], where["padding"] = positions.first, None if padding is None else padding.to(states.device)
    codebook = codebook_of(table.is_weighted, states.device)
    if table.is_rotated:
        is_own = states.dtype == torch.float16 or states.dtype == torch.bfloat16 and has_products_of_bfloat16
        where["signs"] = signs_of(table.head_dim, states.dtype if is_own else torch.float16, states.device)
    return prepare_coding(states, table, codebook, **where)


def coefficients_of(table: RowTable) -> torch.Tensor:
    """Returns the coefficients of `CodedRows`; points of values have their gain corrected."""
    return _coefficients(table.quantizer, table.is_weighted, table.widths.device)


@cache
def _coefficients(quantizer: str, is_weighted: bool, device: torch.device) -> torch.Tensor:
    own = QUANTIZERS[quantizer]
    with torch.inference_mode(False):
        points = torch.tensor(own.coefficients, dtype=torch.float64)
        if not is_weighted:
            points = points * own.gains()[:, None]
        factor = 0.5 ** torch.tensor(own.number_bits).double()
        multipliers = torch.tensor(own.multipliers).double()
        columns = [factor, -1023 * factor - 1, *points.unbind(dim=1), multipliers]
        return torch.stack(columns, dim=1).float().to(device)


def rotary_angles(layout: RotaryLayout, num_positions: int, device: torch.device) -> RotaryAngles | None:
    """Returns the angles of a layout up to a number of positions, or `None` where it rotates nothing."""
    if not layout.frequencies:
        return None
    num_far = max(_LEAST_FAR, 1 << (-(-num_positions // _NUM_NEAR)).bit_length())
    return _angles_of(layout, num_far, device)


@cache
def _angles_of(layout: RotaryLayout, num_far: int, device: torch.device) -> RotaryAngles:
    with torch.inference_mode(False):
        near, far = (
            torch.stack(layout.angles(torch.arange(count) * step), dim=1).to(device)
            for count, step in ((_NUM_NEAR, 1), (num_far, _NUM_NEAR))
        )
        return RotaryAngles(channels_of(layout, device)[0].int(), near, far)


@cache
def codebook_of(is_weighted: bool, device: torch.device) -> Codebook:
    """Returns what numbers become that are coded one by one."""
    with torch.inference_mode(False):
        bounds = thresholds(torch.device("cpu"))
        # As the kernel computes it, so that a number is above all bounds of the cells before its own
        cells = _cells(bounds)
        codes = torch.searchsorted(
            cells, torch.arange(NUM_CELLS.value, dtype=torch.int32).expand(len(cells), -1).contiguous()
        )
        own = torch.full(codes.shape, torch.inf).scatter_(1, cells.long(), bounds)
        coefficients = _coefficients("lloyd-max", is_weighted, device)
        return Codebook(coefficients, codes.to(torch.uint8).to(device), own.to(device))


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
