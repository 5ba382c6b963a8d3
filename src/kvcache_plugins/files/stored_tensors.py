"""The tensors of a file, each taken once with its shape and dtype, and none left over."""

from collections.abc import Sequence

import torch


class StoredTensors:
    """
    Tensors by name, taken one by one.

    Args:
        tensors (`dict[str, torch.Tensor]`): what the file holds; is emptied.
        prefix (`str`, *optional*, defaults to `""`): what all names begin with.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], prefix: str = ""):
        self._tensors = tensors
        self._prefix = prefix

    def below(self, prefix: str) -> "StoredTensors":
        """Those of which the names go on with `prefix`."""
        return StoredTensors(self._tensors, f"{self._prefix}{prefix}")

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self._tensors

    def size(self, name: str, dim: int) -> int:
        """The size of a dimension of a tensor, 0 if it is missing or has no such dimension."""
        tensor = self._tensors.get(f"{self._prefix}{name}")
        return 0 if tensor is None or tensor.dim() <= dim else tensor.shape[dim]

    def take(self, name: str, shape: Sequence[int | None], *dtypes: torch.dtype) -> torch.Tensor:
        """
        A tensor.

        Args:
            name (`str`): its name.
            shape (`Sequence[int | None]`): its shape, `None` where any size will do.
            dtypes (`torch.dtype`): those that will do.

        Raises:
            ValueError: if it is missing, or of another shape or dtype.
        """
        name = f"{self._prefix}{name}"
        if name not in self._tensors:
            raise ValueError(f"the tensor `{name}` is missing")
        tensor = self._tensors.pop(name)
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype not in dtypes:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"the tensor `{name}` has to be of shape [{sizes}] in {' or '.join(map(str, dtypes))} but is of shape "
                f"{list(tensor.shape)} in {tensor.dtype}"
            )
        return tensor

    def finish(self) -> None:
        """Refuses tensors that nothing has taken."""
        if self._tensors:
            raise ValueError(f"the tensor `{min(self._tensors)}` is unknown")
