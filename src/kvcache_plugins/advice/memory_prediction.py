"""What a cache would hold, from a model's config alone: no weights, no numbers, no GPU.

The cache itself is run, on tensors of the device `meta`, which have shapes and no data: so the bytes are those of the
very tensors that it would make, whoever wrote it. Arithmetic of its own beside every method would have to be kept true
to it. Of long contexts that would take minutes: there three shorter ones are run, see `straight_lines`.

The model is built on `meta` too. One token goes through it, and what its layers hand to a dense cache is noted:
that tells the shapes of keys and values whatever an architecture calls its sizes. A cache is then handed the same, of
as many tokens as asked for. Layers that are alike are filled once.
"""

import io
import pickle
import warnings
from dataclasses import replace

import torch
from transformers import Cache

from kvcache_plugins.gear.transform.calibrations import find_calibration
from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.registry import check_cache, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, measure_memory

from .models_without_weights import NO_DATA_ERRORS, ModelSource, build_without_weights, load_config, parse_dtype
from .recorded_calls import record_calls
from .straight_lines import PERIOD, continue_line


DEVICES = ("cuda", "cpu")
# What only a cache on a GPU has
_GPU_PARTS = ("staging",)
# Packages whose layers are alike if their attributes are: an index names them in errors and decides nothing
_KNOWN_PACKAGES = ("kvcache_plugins", "transformers")


class CacheSizingError(ValueError):
    """
    A cache cannot be sized for a model.

    Attributes:
        reason (`str`): why, without saying again which cache.
    """

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
    What a cache would hold: the report of its `memory()` after such a run, without weights and without the run.

    Args:
        model (`str`, `Path`, `PreTrainedConfig` or `PreTrainedModel`):
            A short name of `load_model`, a folder, a hub name, a config, or a model, of which the config is used.
        cache (`str`):
            A name of `list_caches()`, or `name:key=value,key=value` with options.
        context (`int`):
            Tokens that the cache has taken in, for each sequence. The last token of `generate` is not among them.
        batch_size (`int`, *optional*, defaults to 1):
            Sequences, all of the same length.
        new_tokens (`int`, *optional*, defaults to 0):
            How many of the tokens came one by one, after the others in one prompt.
        dtype (`torch.dtype` or `str`, *optional*):
            Of keys and values. Defaults to float32 on `"cpu"` and bfloat16 on `"cuda"`.
        device (`str`, *optional*, defaults to `"cuda"`):
            Where the model would be, `"cuda"` or `"cpu"`. Neither has to be there.

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
    """
    Tells what any caches of one model would hold.

    Args:
        model, dtype, device: as of `predict_memory`.

    Attributes:
        config (`PreTrainedConfig`): the model's config.
        dtype (`torch.dtype`), device (`str`): as given or by default.

    Raises:
        ValueError: if an argument is none of the accepted ones, or there is no such model, or it is no decoder.
    """

    def __init__(self, model: ModelSource, *, dtype: torch.dtype | str | None = None, device: str = "cuda"):
        if device not in DEVICES:
            raise ValueError(f"`device` has to be one of {list(DEVICES)} but got {device!r}")
        self.device = device
        self.dtype = parse_dtype(("float32" if device == "cpu" else "bfloat16") if dtype is None else dtype)
        self.config = load_config(model)
        self._model = build_without_weights(self.config, self.dtype)
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
        """What a cache would hold: see `predict_memory`."""
        check_counts(context, batch_size, new_tokens)
        name, options = parse_cache_spec(cache)
        # Values are what a `CacheSizingError` is about
        check_cache(name).check_options(options)
        num_periods, rest = divmod(context - new_tokens, PERIOD)
        if num_periods > 3:
            # Three shorter prompts tell whether bytes go along a straight line, and where it ends
            lengths = (count * PERIOD + rest + new_tokens for count in (1, 2, 3))
            reports = [self._run(cache, length, batch_size, new_tokens) for length in lengths]
            found = continue_line(reports, num_periods)
            if found is not None:
                return found
        return self._run(cache, context, batch_size, new_tokens)

    def _run(self, cache: str, context: int, batch_size: int, new_tokens: int) -> MemoryReport:
        name, options = parse_cache_spec(cache)
        try:
            # Caches warn of what they would do to results, and there are none
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                filled = create_cache(name, self._model, **options)
                # Nothing is speculated here, and the model would remember every cache
                if isinstance(filled, InfiniGenCache):
                    filled.detach()
                self._fill(filled, batch_size, context - new_tokens, new_tokens)
            report = filled.memory() if isinstance(filled, ReportingMixin) else measure_memory(filled)
        except NO_DATA_ERRORS as error:
            raise CacheSizingError(cache, error) from error
        return self._on_device(report, filled)

    @torch.no_grad()
    def _fill(self, cache: Cache, batch_size: int, prompt_length: int, new_tokens: int) -> None:
        alike: dict[object, int] = {}
        filled: list[int] = []
        for layer_idx, calls in enumerate(self._calls):
            if not calls:
                continue
            key = (_state_of(cache, layer_idx), tuple(call.signature for call in calls))
            first = alike.setdefault(key, layer_idx) if key[0] is not None else layer_idx
            if first != layer_idx:
                cache.layers[layer_idx] = cache.layers[first]
                continue
            filled.append(layer_idx)
            for call in calls:
                call.repeat(cache, layer_idx, batch_size, prompt_length)
        # Forward by forward: caches watch whether each reaches all layers
        decoded = [(index, call) for index in filled for call in self._calls[index] if call.token_dim is not None]
        for _ in range(new_tokens):
            for layer_idx, call in decoded:
                call.repeat(cache, layer_idx, batch_size, 1)

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
    for name, value, least in (("context", context, 1), ("batch_size", batch_size, 1), ("new_tokens", new_tokens, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"`{name}` has to be an integer of at least {least} but got {value!r}")
    if new_tokens >= context:
        raise ValueError(
            f"`new_tokens` are those of the `context` that come after a prompt: they have to be fewer than {context} "
            f"but are {new_tokens}"
        )


def _state_of(cache: Cache, layer_idx: int) -> object:
    """What tells an empty layer from others; `None` if it cannot be told."""
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
