"""Prediction of the bytes of a cache from a model's config, without weights, data or a GPU.

The model is built on the device `meta`, where tensors have no data, and one token goes through it with a dense cache.
The layers' calls of that cache show the shapes of keys and values, whatever names the config has for them. The same
calls, of as many tokens as asked for, then fill the cache in question, on `meta` too, and `memory()` of it counts the
bytes. Layers that are alike are filled once.
"""

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.layer_config import config_of_layer, count_query_heads
from kvcache_plugins.models.reference_model import ModelSource, load_config, parse_dtype
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.registry import check_cache, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, measure_memory
from kvcache_plugins.transform_coding.calibration import find_calibration


# Errors of a model's or a cache's code that reads data, on tensors without data
NO_DATA_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """
    Call of a cache's method by a layer, for one token of one sequence.

    Attributes:
        method (`str`): name of the method.
        tensors (`tuple[torch.Tensor, ...]`): its first arguments; the layer's index follows.
        token_dim (`int`, *optional*): dimension of the tokens; `None` if they are summed up in a state.
        options (`Mapping[str, object]`): its other arguments.
        num_query_heads (`int`): query heads of the layer.
    """

    method: str
    tensors: tuple[torch.Tensor, ...]
    token_dim: int | None
    options: Mapping[str, object] = field(default_factory=dict)
    num_query_heads: int = 1

    def repeat(self, cache: Cache, layer_idx: int, batch_size: int, num_tokens: int) -> None:
        """Call the method of `cache` for `num_tokens` tokens of every sequence of a batch."""
        tensors = [self._resize(tensor, batch_size, num_tokens) for tensor in self.tensors]
        is_first = self.method == "update" and cache.get_seq_length(layer_idx) == 0
        getattr(cache, self.method)(*tensors, layer_idx, **self.options)
        layer = cache.layers[layer_idx]
        if self.method != "update" or not isinstance(layer, LazyLayer):
            return
        # Attention follows
        keys = tensors[0]
        if layer.stores_attention and not is_first:
            layer.attend(AttentionCall(keys))
            return
        # Layers keep queries until a codec is fitted to them
        num_groups = max(self.num_query_heads // keys.shape[1], 1)
        query = keys.new_empty(batch_size, num_groups * keys.shape[1], num_tokens, keys.shape[3])
        layer.on_exact_attention(AttentionCall(query, is_causal=is_first))

    def _resize(self, tensor: torch.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor:
        shape = [batch_size, *tensor.shape[1:]]
        if self.token_dim is not None:
            shape[self.token_dim] = num_tokens
        return tensor.new_empty(shape)


class _RecordingCache(DynamicCache):
    """Dense cache that records the calls of every layer. Options of `update` have no effect on sizes."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self._decoder = config.get_text_config(decoder=True)
        self.calls: list[list[RecordedCall]] = [[] for _ in range(self._decoder.num_hidden_layers)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads = count_query_heads(config_of_layer(self._decoder, layer_idx))
        self.calls[layer_idx].append(RecordedCall("update", (key_states, value_states), 2, num_query_heads=num_heads))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.calls[layer_idx].append(RecordedCall("update_indexer", (indexer_key_states,), 1))
        return super().update_indexer(indexer_key_states, layer_idx)

    # Older releases have no `state_idx`
    def update_conv_state(  # type: ignore[override]
        self, conv_states: torch.Tensor, layer_idx: int, **options: int
    ) -> torch.Tensor:
        self.calls[layer_idx].append(RecordedCall("update_conv_state", (conv_states,), None, options))
        return super().update_conv_state(conv_states, layer_idx, **options)

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: torch.Tensor, layer_idx: int, **options: int
    ) -> torch.Tensor:
        self.calls[layer_idx].append(RecordedCall("update_recurrent_state", (recurrent_states,), None, options))
        return super().update_recurrent_state(recurrent_states, layer_idx, **options)


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> list[list[RecordedCall]]:
    """Record the calls of a cache by every layer of a model on `meta`, for one token."""
    cache = _RecordingCache(model.config)
    padding = getattr(model.config, "pad_token_id", None)
    try:
        # Some models search their input for padding, which needs data
        model.config.pad_token_id = None
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), **as_argument(cache), use_cache=True)
    except NO_DATA_ERRORS as error:
        raise ValueError(f"`model`: a `{type(model).__name__}` does not run without data: {error}") from error
    finally:
        model.config.pad_token_id = padding
    if not any(cache.calls):
        raise ValueError(f"`model`: a `{type(model).__name__}` hands nothing to a cache")
    return cache.calls


@torch.no_grad()
def fill_without_data(
    cache: Cache, calls: Sequence[Sequence[RecordedCall]], batch_size: int, prompt_length: int, new_tokens: int = 0
) -> None:
    """
    Repeat the calls of every layer on an empty cache, for a prompt and then for new tokens one by one. A layer that is
    like an earlier one becomes that layer.
    """
    first_alike: dict[object, int] = {}
    filled: list[int] = []
    for layer_idx, own in enumerate(calls):
        if not own:
            continue
        state = _state_of(cache, layer_idx)
        shapes = [
            (call.method, str(call.options), [(each.shape, each.dtype) for each in call.tensors]) for call in own
        ]
        first = layer_idx if state is None else first_alike.setdefault((state, str(shapes)), layer_idx)
        if first != layer_idx:
            cache.layers[layer_idx] = cache.layers[first]
            continue
        filled.append(layer_idx)
        for call in own:
            call.repeat(cache, layer_idx, batch_size, prompt_length)
    # One forward after the other, as caches check that each reaches all layers
    decoded = [(index, call) for index in filled for call in calls[index] if call.token_dim is not None]
    for _ in range(new_tokens):
        for layer_idx, call in decoded:
            call.repeat(cache, layer_idx, batch_size, 1)


DEVICES = ("cuda", "cpu")
# Categories that only a cache on a GPU has
_GPU_PARTS = ("staging",)
# Packages whose layers are alike if their attributes are, except for the index, which is for error messages alone
_KNOWN_PACKAGES = ("kvcache_plugins", "transformers")


class CacheSizingError(ValueError):
    """Error of a cache whose memory cannot be predicted for a model. `reason` does not name the cache."""

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
    Predict the report of a cache's `memory()` after a run, without weights and without the run.

    Args:
        model (`str`, `Path`, `PreTrainedConfig` or `PreTrainedModel`): a short name of `load_model`, a folder, a hub
            name, a config, or a model (only its config is used).
        cache (`str`): a name of `list_caches()`, or `name:key=value,key=value` with options.
        context (`int`): tokens in the cache, for each sequence. The last token of `generate` is not among them.
        batch_size (`int`, *optional*, defaults to 1): sequences, all of the same length.
        new_tokens (`int`, *optional*, defaults to 0): tokens of the context that were decoded one by one; the others
            come before them, as one prompt.
        dtype (`torch.dtype` or `str`, *optional*): dtype of keys and values. Defaults to float32 on `"cpu"` and
            bfloat16 on `"cuda"`.
        device (`str`, *optional*, defaults to `"cuda"`): device of the model, `"cuda"` or `"cpu"`. It need not be
            present.

    Returns:
        `MemoryReport`: its `devices` are `"cpu"` alone, or `"cuda"` and, for caches that offload, `"cpu"`. On `"cuda"`
        the fetch buffers of the next step are counted (`staging`).

    Raises:
        ValueError: if an argument is not accepted, there is no such model, or the cache cannot be sized for it, for
            instance because it reads data while it stores them.
        ImportError: if a package that the cache needs is not installed.

    Example:

    ```python
    >>> from kvcache_plugins import predict_memory
    >>> predict_memory("Qwen/Qwen2.5-7B", "gear-2bit", 32768).total_bytes
    ```
    """
    sizer = CacheSizer(model, dtype=dtype, device=device)
    return sizer.measure(cache, context, batch_size=batch_size, new_tokens=new_tokens)


class CacheSizer:
    """Memory prediction for several caches of one model. Arguments and errors are those of `predict_memory`."""

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
        """True if there is a calibration of transform coding for a model of this config, whatever its weights."""
        return find_calibration(self._model) is not None

    @property
    def max_context(self) -> int | None:
        """Largest context of the model, if its config has it."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def measure(self, cache: str, context: int, *, batch_size: int = 1, new_tokens: int = 0) -> MemoryReport:
        """Predict the memory of a cache: see `predict_memory`."""
        check_counts(context, batch_size, new_tokens)
        name, options = parse_cache_spec(cache)
        # An unknown option is no `CacheSizingError`; a wrong value is one
        check_cache(name).check_options(options)
        try:
            # Warnings of caches are about results, and here are none
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                filled = create_cache(cache, self._model)
                # No forward follows, and hooks would keep the cache alive
                if isinstance(filled, InfiniGenCache):
                    filled.detach()
                fill_without_data(filled, self._calls, batch_size, context - new_tokens, new_tokens)
            report = filled.memory() if isinstance(filled, ReportingMixin) else measure_memory(filled)
        except NO_DATA_ERRORS as error:
            raise CacheSizingError(cache, error) from error
        return self._on_device(report, filled)

    def _on_device(self, report: MemoryReport, cache: Cache) -> MemoryReport:
        """Return the report of a cache on `meta` as of one on the device."""
        if self.device == "cpu":
            parts = {part: size for part, size in report.parts.items() if part not in _GPU_PARTS}
            return replace(report, parts=parts, devices={"cpu": sum(parts.values())})
        layers = (layer for layer in cache.layers if isinstance(layer, LazyLayer))
        host = sum(tensor.nbytes for layer in layers for tensor in layer.host_tensors())
        devices = {"cuda": report.total_bytes - host, **({"cpu": host} if host else {})}
        return replace(report, devices=devices)


def check_counts(context: int, batch_size: int, new_tokens: int) -> None:
    """Raise a `ValueError` for numbers that `predict_memory` does not accept."""
    check_integer("context", context, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("new_tokens", new_tokens, 0)
    if new_tokens >= context:
        raise ValueError(
            f"`new_tokens` are those of the `context` that come after a prompt: they have to be fewer than {context} "
            f"but are {new_tokens}"
        )


def _state_of(cache: Cache, layer_idx: int) -> object:
    """Return a key that two empty layers share only if they are alike; `None` if that is unknown."""
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
    """Pickler of a layer's attributes that writes the identity of a module, as its weights would take long."""

    def persistent_id(self, obj: object) -> int | None:
        return id(obj) if isinstance(obj, torch.nn.Module) else None
