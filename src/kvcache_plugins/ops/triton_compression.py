"""The steps of a GEAR decomposition by Triton kernels: four launches a side for a chunk of decoded tokens.

What a kernel does not cover is computed in plain PyTorch, step by step:

- choosing outliers among the tokens of a prompt, of which there is any number, or among more than 4096 values, or
  more than 64 a side;
- low rank of a prompt, for which products of large matrices are what PyTorch does best, of more than 256 tokens or
  channels, or above rank 16;
- storing more than 65536 outliers of a chunk.

Quantization is always by kernel, so of states that are compressed here none is a library's work alone.
"""

import torch

from kvcache_plugins.triton_kernels.compression.low_rank import MAX_RANK, MAX_SIDE, power_iteration
from kvcache_plugins.triton_kernels.compression.outlier_storage import MAX_OUTLIERS, store_outliers
from kvcache_plugins.triton_kernels.compression.outliers import MAX_ROW_LENGTH, select_outliers
from kvcache_plugins.triton_kernels.compression.quantization import quantize_and_pack

from .compression_steps import OUT_OF_RANGE, STORAGE_DTYPE, CompressionSteps, without_padding
from .low_rank import starting_matrix
from .outlier_selection import Outliers, num_key_outliers, num_outliers_per_side
from .outliers import OUTLIER_TILE, channel_bits, index_dtype
from .quantization import Grouping


# They are taken one after the other
_MAX_PER_SIDE = 64


class TritonSteps(CompressionSteps):
    """Every step that a kernel covers by that kernel; on a GPU nothing waits for it before `check_range`."""

    is_fused = True

    def __init__(self, device: torch.device, *, is_prompt: bool = False) -> None:
        super().__init__()
        self._is_prompt = is_prompt
        self._exceeded = torch.zeros(1, dtype=torch.int32, device=device)

    def prepare(self, states: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        return without_padding(states, valid)

    def select_outliers(
        self, states: torch.Tensor, valid: torch.Tensor | None, sparsity: float, by_channel: bool
    ) -> Outliers | None:
        _, num_heads, _, length, head_dim = states.shape
        row_length = length if by_channel else num_heads * head_dim
        is_any_length = self._is_prompt and by_channel
        if is_any_length or row_length > MAX_ROW_LENGTH or num_outliers_per_side(row_length, sparsity) > _MAX_PER_SIDE:
            return super().select_outliers(states.float(), valid, sparsity, by_channel)
        if by_channel:
            return _select_key_outliers(states, valid, sparsity)
        return _select_value_outliers(states, valid, sparsity)

    def quantize(
        self,
        states: torch.Tensor,
        keep: torch.Tensor | None,
        nbits: int,
        grouping: Grouping,
        *,
        wants_missing: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        missing = states.new_empty(states.shape, dtype=torch.float32) if wants_missing else None
        packed = quantize_and_pack(states, keep, nbits, grouping.axis, grouping.group_size, missing, self._exceeded)
        return *packed, missing

    def approximate(
        self,
        missing: torch.Tensor,
        keep: torch.Tensor | None,
        valid: torch.Tensor | None,
        rank: int,
        num_iterations: int,
        recent_ratio: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, head_dim = missing.shape[3:]
        if self._is_prompt or rank > MAX_RANK or max(length, head_dim) > MAX_SIDE or recent_ratio < 1:
            return super().approximate(missing, keep, valid, rank, num_iterations, recent_ratio)
        start = starting_matrix(head_dim, rank, missing.device)
        return power_iteration(missing, rank, num_iterations, start, keep, STORAGE_DTYPE, self._exceeded)

    def store_outliers(
        self, missing: torch.Tensor, low_rank: tuple[torch.Tensor, torch.Tensor] | None, outliers: Outliers
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch_size, _, num_chunks, _, head_dim = missing.shape
        if outliers.indices.numel() > MAX_OUTLIERS * batch_size * num_chunks:
            return super().store_outliers(missing, low_rank, outliers)
        in_use = outliers.in_use
        if in_use is not None:
            in_use = in_use[:, 0, :, :, 0] if outliers.by_channel else in_use[..., 0]
        return store_outliers(
            missing,
            outliers.indices,
            in_use,
            low_rank,
            self._exceeded,
            tile=OUTLIER_TILE,
            channel_bits=channel_bits(head_dim),
            dtype=index_dtype(head_dim),
        )

    def check_range(self) -> None:
        if bool(self._exceeded):
            raise ValueError(OUT_OF_RANGE)
        super().check_range()


def _select_key_outliers(states: torch.Tensor, valid: torch.Tensor | None, sparsity: float) -> Outliers | None:
    valid_rows = counts = in_use = None
    num_per_side = num_outliers_per_side(states.shape[3], sparsity)
    if valid is not None:
        item_counts, num_per_side = num_key_outliers(states.shape[3], valid, sparsity)
        item_counts = item_counts.to(states.device)
        slots = torch.arange(num_per_side, device=states.device).repeat(2)
        in_use = (slots < item_counts[:, :, None])[:, None, :, :, None]
        valid_rows, counts = valid[:, None, :, None, :], item_counts[:, None, :, None]
    if num_per_side == 0:
        return None
    keep = torch.empty(states.shape, dtype=torch.bool, device=states.device)
    indices = select_outliers(states.transpose(3, 4), num_per_side, valid_rows, counts, keep.transpose(3, 4))
    return Outliers(indices.transpose(3, 4), in_use, keep)


def _select_value_outliers(states: torch.Tensor, valid: torch.Tensor | None, sparsity: float) -> Outliers | None:
    num_per_side = num_outliers_per_side(states.shape[1] * states.shape[4], sparsity)
    if num_per_side == 0:
        return None
    keep = torch.empty(states.shape, dtype=torch.bool, device=states.device)
    # Rows of all heads of a token, `[B, M, L, H, D]`
    rows, kept_rows = (tensor.permute(0, 2, 3, 1, 4) for tensor in (states, keep))
    valid_rows = None if valid is None else valid[..., None, None]
    indices = select_outliers(rows, num_per_side, valid_rows, keep=kept_rows, row_dims=2)
    return Outliers(indices, None if valid is None else valid[..., None], keep)
