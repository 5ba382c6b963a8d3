"""What all ranks have to agree on before a prefill: told to each other once, before any layer runs.

It is the one collective of a prefill. Every rank comes to the same verdict, so that all of them raise, or none.
"""

import hashlib
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from .failure_reports import FailureReports


@dataclass(frozen=True, slots=True)
class Description:
    """
    How one rank was called.

    Attributes:
        model (`str`), dtype (`str`): digest of the model, and the dtype that it computes in.
        prompt (`str`): shape and digest of the tokens and their padding.
        partition (`tuple[int, ...]`): lengths of the slices.
        hop_nbits (`int`, *optional*): bits of quantized states on the way.
        error (`str`, *optional*): what is wrong on this rank alone; the others are not compared then.
    """

    model: str = ""
    dtype: str = ""
    prompt: str = ""
    partition: tuple[int, ...] = ()
    hop_nbits: int | None = None
    error: str | None = None


def digest(*tensors: torch.Tensor | None) -> str:
    """Shapes of some integer tensors, and a digest of what they hold."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(b"-" if tensor is None else tensor.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    shapes = ", ".join("none" if tensor is None else "x".join(map(str, tensor.shape)) for tensor in tensors)
    return f"{shapes}: {sha.hexdigest()[:16]}"


def agree(description: Description, group: dist.ProcessGroup | None, failures: FailureReports) -> None:
    """
    Compares what all ranks of a group are about to do.

    Raises:
        ValueError: on every rank, if one of them cannot take part or differs from the first; it names the rank.
        RunaheadError: if one of them does not answer.
    """
    described: list[Description | None] = [None] * dist.get_world_size(group)
    failures.guarded(
        lambda: dist.all_gather_object(described, description, group=group), "another rank", "before layer 0"
    )
    first = described[0]
    for rank, each in enumerate(described):
        if each is not None and each.error is not None:
            raise ValueError(f"rank {rank}: {each.error}")
    for rank, each in enumerate(described):
        assert each is not None and first is not None
        for name, value in asdict(each).items():
            expected = getattr(first, name)
            if value != expected:
                raise ValueError(
                    f"rank {rank}: `{name}` has to be the same on all ranks, but is {value} there and {expected} on "
                    "rank 0"
                )
