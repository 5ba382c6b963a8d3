"""Bytes that a cache would hold, from a model's config alone: no weights, no numbers, no GPU.

The model is built on the device `meta`, where tensors have no data, and one token goes through it: what its layers
hand to a dense cache tells the shapes of keys and values whatever an architecture calls its sizes. The cache itself
is then handed the same, of as many tokens as asked for, so the bytes are those of the tensors that it would make,
whoever wrote it. Layers that are alike are filled once.
"""

import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import ModelSource, load_config, parse_dtype
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.registry import check_cache, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, measure_memory
from kvcache_plugins.transform_coding.calibration import find_calibration


# What a model's code, or a cache's, raises where it needs numbers that there are not
NO_DATA_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Call of a layer to its cache; `token_dim` of its tensors are tokens, `None` where tokens are summed up."""

    method: str
    tensors: tuple[torch.Tensor, ...]
    token_dim: int | None
    options: dict[str, Any] = field(default_factory=dict)

    def repeat(self, cache: Cache, layer_idx: int, batch_size: int, num_tokens: int) -> None:
        """Hands the same to `cache`, for a batch of `num_tokens` tokens a sequence."""
        shapes = [[batch_size, *tensor.shape[1:]] for tensor in self.tensors]
        for shape in shapes if self.token_dim is not None else ():
            shape[self.token_dim or 0] = num_tokens
        given = [tensor.new_empty(shape) for tensor, shape in zip(self.tensors, shapes, strict=True)]
        is_first = self.method == "update" and cache.get_seq_length(layer_idx) == 0
        getattr(cache, self.method)(*given, layer_idx, **self.options)
        layer = cache.layers[layer_idx]
        if self.method != "update" or not isinstance(layer, LazyLayer):
            return
        # As attention does. Its queries have as many heads as the keys here: none are stored.
        if is_first:
            layer.on_exact_attention(AttentionCall(given[0], is_causal=True))
        elif layer.stores_attention:
            layer.attend(AttentionCall(given[0]))


# What layers hand to a cache: by method the number of tensors, and which dimension of them are tokens
_METHODS = {
    "update": (2, 2),
    "update_indexer": (1, 1),
    "update_conv_state": (1, None),
    "update_recurrent_state": (1, None),
}


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> list[list[RecordedCall]]:
    """Records the calls that every layer of a model makes to its cache for one token."""
    cache, padding = DynamicCache(config=model.config), getattr(model.config, "pad_token_id", None)
    calls: list[list[RecordedCall]] = [[] for _ in range(model.config.get_text_config(decoder=True).num_hidden_layers)]

    def recorded(method: Callable[..., Any], num_tensors: int, token_dim: int | None) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(method).bind(*args, **kwargs).arguments
            options = given.pop("kwargs", {})
            given.pop("args", None)
            layer_idx = given.pop("layer_idx")
            tensors = tuple(given.pop(name) for name in list(given)[:num_tensors])
            # Of keys and values a dense cache has no use for more
            options = {**given, **options} if token_dim is None else {}
            calls[layer_idx].append(RecordedCall(method.__name__, tensors, token_dim, options))
            return method(*args, **kwargs)

        return record

    for name, kind in _METHODS.items():
        if hasattr(cache, name):
            setattr(cache, name, recorded(getattr(cache, name), *kind))
    try:
        # Some models look for padding in what they are given
        model.config.pad_token_id = None
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), **as_argument(cache), use_cache=True)
    except NO_DATA_ERRORS as error:
        raise ValueError(f"`model`: a `{type(model).__name__}` does not run without data: {error}") from error
    finally:
        model.config.pad_token_id = padding
    if not any(calls):
        raise ValueError(f"`model`: a `{type(model).__name__}` hands nothing to a cache")
    return calls


@torch.no_grad()
def fill_without_data(
    cache: Cache, calls: Sequence[Sequence[RecordedCall]], batch_size: int, prompt_length: int, new_tokens: int = 0
) -> None:
    """Hands the calls of every layer to an empty cache: a prompt, and new tokens one by one. Like layers are one."""
    alike: dict[object, int] = {}
    filled: list[int] = []
    for layer_idx, own in enumerate(calls):
        if not own:
            continue
        shapes = [[(each.shape, each.dtype) for each in call.tensors] for call in own]
        key = _state_of(cache, layer_idx), str([(call.method, call.options) for call in own]), str(shapes)
        first = alike.setdefault(key, layer_idx) if key[0] is not None else layer_idx
        if first != layer_idx:
            cache.layers[layer_idx] = cache.layers[first]
            continue
        filled.append(layer_idx)
        for call in own:
            call.repeat(cache, layer_idx, batch_size, prompt_length)
    # Forward by forward: caches watch whether each reaches all layers
    decoded = [(index, call) for index in filled for call in calls[index] if call.token_dim is not None]
    for _ in range(new_tokens):
        for layer_idx, call in decoded:
            call.repeat(cache, layer_idx, batch_size, 1)


DEVICES = ("cuda", "cpu")
# What only a cache on a GPU has
_GPU_PARTS = ("staging",)
# Packages whose layers are alike if their attributes are: an index names them in errors and decides nothing
_KNOWN_PACKAGES = ("kvcache_plugins", "transformers")


class CacheSizingError(ValueError):
    """Says that a cache cannot be sized for a model; the `reason` does not say again which cache."""

    def __init__(self, cache: str, error: Exception) -> None:
        is_refusal = isinstance(error, (ImportError, ValueError))
        self.reason = str(error) if is_refusal else f"it cannot be sized without being run ({error})"
        super().__init__(f"the cache `{cache}` cannot be sized for this model: {self.reason}")


def predict_memory(
    model: ModelSource,
    cache: str,
    context: int,
    *,
    batch_size: int = 1,
    new_tokens: int = 0,
    dtype: torch.dtype | str | None = None,
    device: str = "cuda",
) -> MemoryReport:
    """
    Predicts the report of a cache's `memory()` after a run, without weights and without the run.

    Args:
        model (`str`, `Path`, `PreTrainedConfig` or `PreTrainedModel`): a short name of `load_model`, a folder, a hub
            name, a config, or a model, of which the config is used.
        cache (`str`): a name of `list_caches()`, or `name:key=value,key=value` with options.
        context (`int`): tokens that the cache has taken in, for each sequence. The last of `generate` is not among
            them.
        batch_size (`int`, *optional*, defaults to 1): sequences, all of the same length.
        new_tokens (`int`, *optional*, defaults to 0): how many of the tokens came one by one, after the others in one
            prompt.
        dtype (`torch.dtype` or `str`, *optional*): of keys and values. Defaults to float32 on `"cpu"` and bfloat16 on
            `"cuda"`.
        device (`str`, *optional*, defaults to `"cuda"`): where the model would be, `"cuda"` or `"cpu"`. Neither has to
            be there.

    Returns:
        `MemoryReport`: its `devices` are `"cuda"` and, for caches that offload, `"cpu"`, or `"cpu"` alone. On `"cuda"`
        the buffers for fetching that the next step would make are counted (`staging`).

    Raises:
        ValueError: if an argument is none of the accepted ones, there is no such model, or the cache cannot be sized
            for it, as one that looks at numbers while it stores them.
        ImportError: if what the cache needs is not installed.

    Example:

    ```python
    >>> from kvcache_plugins import predict_memory
    >>> predict_memory("Qwen/Qwen2.5-7B", "gear-2bit", 32768).total_bytes
    ```
    """
    sizer = CacheSizer(model, dtype=dtype, device=device)
    return sizer.measure(cache, context, batch_size=batch_size, new_tokens=new_tokens)


class CacheSizer:
    """Tells what any caches of one model would hold; its arguments, and errors, are those of `predict_memory`."""

    def __init__(self, model: ModelSource, *, dtype: torch.dtype | str | None = None, device: str = "cuda"):
        if device not in DEVICES:
            raise ValueError(f"`device` has to be one of {list(DEVICES)} but got {device!r}")
        self.device = device
        self.dtype = parse_dtype(("float32" if device == "cpu" else "bfloat16") if dtype is None else dtype)
        self.config = load_config(model)
        try:
            with torch.device("meta"):
                self._model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
        except NO_DATA_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"`model` is no decoder that can be built from its config: {reason}") from error
        self._calls = record_calls(self._model)

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of the model's parameters in the dtype; `None` if the config says that they are quantized."""
        if getattr(self.config, "quantization_config", None) is not None:
            return None
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def is_calibrated(self) -> bool:
        """Whether there is a calibration of transform coding for a model of this config; weights are not looked at."""
        return find_calibration(self._model) is not None

    @property
    def max_context(self) -> int | None:
        """Tokens that the model was made for, if its config says so."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def measure(self, cache: str, context: int, *, batch_size: int = 1, new_tokens: int = 0) -> MemoryReport:
        """Predicts the memory of a cache: see `predict_memory`."""
        check_counts(context, batch_size, new_tokens)
        name, options = parse_cache_spec(cache)
        # Values are what a `CacheSizingError` is about
        check_cache(name).check_options(options)
        try:
            # Caches warn of what they would do to results, and there are none
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                filled = create_cache(cache, self._model)
                # Nothing is speculated here, and the model would remember every cache
                if isinstance(filled, InfiniGenCache):
                    filled.detach()
                fill_without_data(filled, self._calls, batch_size, context - new_tokens, new_tokens)
            report = filled.memory() if isinstance(filled, ReportingMixin) else measure_memory(filled)
        except NO_DATA_ERRORS as error:
            raise CacheSizingError(cache, error) from error
        return self._on_device(report, filled)

    def _on_device(self, report: MemoryReport, cache: Cache) -> MemoryReport:
        """A report of tensors without data as it would be on the device."""
        if self.device == "cpu":
            parts = {part: size for part, size in report.parts.items() if part not in _GPU_PARTS}
            return replace(report, parts=parts, devices={"cpu": sum(parts.values())})
        layers = (layer for layer in cache.layers if isinstance(layer, LazyLayer))
        host = sum(tensor.nbytes for layer in layers for tensor in layer.host_tensors())
        devices = {"cuda": report.total_bytes - host, **({"cpu": host} if host else {})}
        return replace(report, devices=devices)


def check_counts(context: int, batch_size: int, new_tokens: int) -> None:
    """Raises a `ValueError` for numbers that `predict_memory` does not accept."""
    check_integer("context", context, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("new_tokens", new_tokens, 0)
    if new_tokens >= context:
        raise ValueError(
            f"`new_tokens` are those of the `context` that come after a prompt: they have to be fewer than {context} "
            f"but are {new_tokens}"
        )


def _state_of(cache: Cache, layer_idx: int) -> object:
    """Returns a key that only like layers share while they are empty; `None` if it cannot be told."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if any(type(each).__module__.partition(".")[0] not in _KNOWN_PACKAGES for each in (cache, layer)):
        return None
    state = {name: value for name, value in vars(layer).items() if name != "layer_idx"}
    file = io.BytesIO()
    try:
        _StatePickler(file).dump(state)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return type(layer), file.getvalue()


class _StatePickler(pickle.Pickler):
    """Writes which module a layer has, not its numbers: these take long, and two modules seldom have the same."""

    def persistent_id(self, obj: object) -> int | None:
        return id(obj) if isinstance(obj, torch.nn.Module) else None
