"""A model's step of one token, recorded once and replayed: on a GPU one CUDA graph.

What changes from step to step is copied to where the recording reads it: the token and its position. Lengths are
numbers on the device (`StepNumbers`), which the recording itself counts on. Where there are no CUDA graphs, the model
is run with just that, so that a step can be looked at anywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from kvcache_plugins.models.cache_argument import as_argument

from .step_cache import StepCache
from .step_numbers import StepNumbers


class RecordedStep:
    """
    A step that has been recorded, and not run.

    Args:
        forward (`Callable`): the model's.
        cache (`StepCache`): what it is given as its cache.
        numbers (`StepNumbers`): of the cache.
        inputs (`Mapping[str, torch.Tensor]`): arguments that change from step to step, as in the one to come.
        constants (`Mapping[str, object]`): those that do not.

    Attributes:
        num_replays (`int`): how often it has been run.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: StepCache,
        numbers: StepNumbers,
        inputs: Mapping[str, torch.Tensor],
        constants: Mapping[str, object],
    ):
        self._forward, self._cache, self._numbers = forward, cache, numbers
        # Made in inference mode they could not be written to outside
        with torch.inference_mode(False):
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._constants = dict(constants)
        self.num_replays = 0
        device = next(iter(inputs.values())).device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph, self._outputs = _record(self._run, cache.advance, device)

    def __call__(self, inputs: Mapping[str, torch.Tensor], cache: object) -> Any:
        """
        The outputs of a step with other inputs, which stay as they are in later ones; the cache among them is `cache`.
        """
        for name, place in self._inputs.items():
            place.copy_(inputs[name])
        self._numbers.is_advancing()
        if self._graph is None:
            outputs = self._run()
            self._cache.advance()
        else:
            self._graph.replay()
            outputs = self._outputs
        self._numbers.has_advanced()
        self.num_replays += 1
        return _copy(outputs, cache)

    def _run(self) -> Any:
        return self._forward(**self._inputs, **self._constants, **as_argument(self._cache))


def _record(
    run: Callable[[], Any], advance: Callable[[], None], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step, and its outputs."""
    graph = torch.cuda.CUDAGraph()
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Kernels are compiled and libraries choose theirs. The token that it stores is stored there again
        run()
    current.wait_stream(stream)
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph):
            outputs = run()
            advance()
    except RuntimeError as error:
        raise ValueError(f"`captured_steps`: the model's step cannot be captured in a CUDA graph: {error}") from error
    return graph, outputs


def _copy(value: Any, cache: object) -> Any:
    """Outputs that the next step does not overwrite."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, StepCache):
        return cache
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _copy(each, cache) for name, each in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(_copy(each, cache) for each in value)
    return value
