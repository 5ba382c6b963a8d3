"""The steps of a GEAR decomposition in plain PyTorch: choose outliers, quantize, approximate what is missing, store
the outliers.

A kernel takes the place of a step by a subclass (`ops.triton_compression`), which leaves what it does not cover to the
step here. One object does the steps of everything that is compressed at once, keys and values, and collects whether
all of it fits the range of float16: a question to the device, which is asked once in the end and not after each step.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, K outliers a channel or token, R rank.
"""

import torch

from .low_rank import power_iteration
from .outlier_selection import Outliers, select_key_outliers, select_value_outliers
from .outliers import OutlierPlaces, sort_into_tiles
from .quantization import Grouping, dequantize, pack, quantize


STORAGE_DTYPE = torch.float16
OUT_OF_RANGE = "the states exceed the range of float16 (65504), in which scales, zeros and corrections are stored"


class CompressionSteps:
    """Every step in plain PyTorch."""

    is_fused = False

    def __init__(self) -> None:
        self._in_range: list[torch.Tensor] = []

    def prepare(self, states: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """`states` `[B, H, M, L, D]` as the other methods take them, with zeros for padding (`valid` `[B, M, L]`)."""
        return without_padding(states.float(), valid)

    def select_outliers(
        self, states: torch.Tensor, valid: torch.Tensor | None, sparsity: float, by_channel: bool
    ) -> Outliers | None:
        """
        The largest and the smallest values of every channel (keys) or token (values), `None` if none are to be kept.

        Args:
            states (`torch.Tensor` of shape `[B, H, M, L, D]`): keys or values.
            valid (`torch.Tensor` of shape `[B, M, L]`, bool, *optional*): tokens that are real.
            sparsity (`float`): share of the values to keep, half of it on each side.
            by_channel (`bool`): whether these are keys.
        """
        if by_channel:
            selected = select_key_outliers(states, valid, sparsity)
            if selected is None:
                return None
            indices, in_use = selected
            # An index that is not in use may stand at the place of one that is: it must not erase it, hence the sum
            marks = torch.zeros_like(states).scatter_add_(3, indices, in_use.to(states.dtype).expand(indices.shape))
            keep = _and_real(marks == 0, valid)
            return Outliers(indices, None if valid is None else in_use, keep)
        token_indices = select_value_outliers(states, sparsity)
        if token_indices is None:
            return None
        batch_size, num_heads, num_chunks, length, head_dim = states.shape
        left = states.new_ones(batch_size, num_chunks, length, num_heads * head_dim, dtype=torch.bool)
        left.scatter_(3, token_indices, False)
        left = left.unflatten(3, (num_heads, head_dim)).permute(0, 3, 1, 2, 4)
        return Outliers(token_indices, None if valid is None else valid[..., None], _and_real(left, valid))

    def quantize(
        self,
        states: torch.Tensor,
        keep: torch.Tensor | None,
        nbits: int,
        grouping: Grouping,
        *,
        wants_missing: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Packed codes, scale and zero as in `CompressedStates`, and on request the states less what these stand for,
        `[B, H, M, L, D]`, float32.

        Args:
            states (`torch.Tensor` of shape `[B, H, M, L, D]`): keys or values.
            keep (`torch.Tensor` broadcastable to `states`, bool, *optional*): what may widen the range of its group.
            nbits (`int`): bits a code.
            grouping (`Grouping`): which values share a scale.
            wants_missing (`bool`): whether to return the last.
        """
        codes, scale, zero = quantize(states, keep, nbits, grouping)
        missing = states - dequantize(codes, scale, zero, grouping) if wants_missing else None
        return pack(codes, nbits), scale, zero, missing

    def approximate(
        self,
        missing: torch.Tensor,
        keep: torch.Tensor | None,
        valid: torch.Tensor | None,
        rank: int,
        num_iterations: int,
        recent_ratio: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Factors of what is missing, as they are stored: `[B, H, M, last tokens, R]` and `[B, H, M, D, R]`.

        Args:
            missing (`torch.Tensor` of shape `[B, H, M, L, D]`): what the codes miss.
            keep (`torch.Tensor` broadcastable to `missing`, bool, *optional*): what to approximate.
            valid (`torch.Tensor` of shape `[B, M, L]`, bool, *optional*): tokens that are real.
            rank, num_iterations (`int`): of the power iteration.
            recent_ratio (`float`): share of the real tokens, the most recent ones, to approximate.
        """
        residual = missing if keep is None else torch.where(keep, missing, 0)
        length = missing.shape[3]
        if recent_ratio < 1:
            counts = torch.tensor([[length]], device=missing.device) if valid is None else valid.sum(dim=2)
            recent = (counts.double() * recent_ratio).round().long().clamp(min=1)
            is_recent = torch.arange(length, device=missing.device) >= (length - recent)[:, :, None]
            residual = torch.where(is_recent[:, None, :, :, None], residual, 0)
            residual = residual[:, :, :, -int(recent.max()) :]
        a, b = (factor.to(STORAGE_DTYPE) for factor in power_iteration(residual, rank, num_iterations))
        self._in_range += [a.isfinite().all(), b.isfinite().all()]
        return a, b

    def store_outliers(
        self, missing: torch.Tensor, low_rank: tuple[torch.Tensor, torch.Tensor] | None, outliers: Outliers
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Indices, values and offsets of the outliers, as `ops.outliers.sort_into_tiles` returns them.

        Args:
            missing (`torch.Tensor` of shape `[B, H, M, L, D]`): what the codes miss; is written over.
            low_rank (`tuple` of `torch.Tensor`, *optional*): what `approximate` returned.
            outliers (`Outliers`): which values.
        """
        if low_rank is not None:
            a, b = low_rank
            missing[:, :, :, -a.shape[3] :] -= a.float() @ b.float().transpose(-1, -2)
        _, num_heads, _, length, head_dim = missing.shape
        places = _places(outliers, num_heads, length, head_dim)
        flat = (places.heads * length + places.tokens) * head_dim + places.channels
        values = missing.transpose(1, 2).flatten(2).gather(2, flat).to(STORAGE_DTYPE)
        indices, values, offsets = sort_into_tiles(places, values, num_heads, length, head_dim)
        self._in_range.append(values.isfinite().all())
        return indices, values, offsets

    def check_range(self) -> None:
        """
        Looks at what all steps so far have found, for which the host has to wait for the device.

        Raises:
            ValueError: if something that was compressed does not fit float16.
        """
        if self._in_range and not bool(torch.stack(self._in_range).all()):
            raise ValueError(OUT_OF_RANGE)


def without_padding(states: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """`states` `[B, H, M, L, D]` with zeros for tokens that are not real (`valid` `[B, M, L]`)."""
    return states if valid is None else torch.where(valid[:, None, :, :, None], states, 0)


def _and_real(keep: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return keep if valid is None else keep & valid[:, None, :, :, None]


def _places(outliers: Outliers, num_heads: int, length: int, head_dim: int) -> OutlierPlaces:
    """Head, token and channel of each outlier."""
    indices, in_use = outliers.indices, outliers.in_use
    device = indices.device
    if in_use is not None:
        in_use = in_use.expand(indices.shape)
    if not outliers.by_channel:
        tokens = torch.arange(length, device=device)[:, None].expand(indices.shape)
        used = None if in_use is None else in_use.flatten(2)
        flat = indices.flatten(2)
        return OutlierPlaces(flat // head_dim, tokens.flatten(2), flat % head_dim, used)
    all_heads = torch.arange(num_heads, device=device)[:, None, None, None].expand(indices.shape)
    all_channels = torch.arange(head_dim, device=device).expand(indices.shape)
    heads, tokens, channels = (part.transpose(1, 2).flatten(2) for part in (all_heads, indices, all_channels))
    return OutlierPlaces(heads, tokens, channels, None if in_use is None else in_use.transpose(1, 2).flatten(2))
