"""Transformers' own caches by name, with `memory()` and `stats()`, so that the same tables can have them."""

from functools import partial

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, QuantizedCache
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer

from kvcache_plugins.option_checks import check_choice, check_integer
from kvcache_plugins.registry import ModelOrConfig, get_config
from kvcache_plugins.reports.memory import ReportingMixin


_ACCEPTED: dict[str, dict[str, tuple[int, ...]]] = {
    "quanto": {"nbits": (2, 4), "axis_key": (0, -1), "axis_value": (0, -1)},
    "hqq": {"nbits": (1, 2, 3, 4, 8), "axis_key": (0, 1), "axis_value": (0, 1)},
}


class ReportingDynamicCache(ReportingMixin, DynamicCache):
    """Transformers' `DynamicCache`, whole or offloaded, with `memory()` and `stats()`."""


class ReportingQuantizedCache(ReportingMixin, QuantizedCache):
    """
    Transformers' `QuantizedCache` with `memory()` and `stats()`. States that `quanto` and `hqq` quantize are padded to
    whole groups with the last token, as otherwise the axes that are best for keys raise for most lengths.
    """

    def __init__(self, backend: str, config: PreTrainedConfig, **layer_options: int) -> None:
        super().__init__(backend, config, **layer_options)
        layer_class = {"quanto": _WholeGroupsQuantoLayer, "hqq": _WholeGroupsHQQLayer}.get(backend)
        if layer_class is not None:
            self.layers = [layer_class(**layer_options) for _ in self.layers]


class _WholeGroupsLayer(QuantizedLayer):
    """Quantized layer that pads states to whole groups of tokens; a mixin before a backend's layer."""

    num_quantized = 0

    def _quantize(self, tensor: torch.Tensor, axis: int) -> object:  # type: ignore[override]
        self.num_quantized = tensor.shape[-2]
        padding = tensor[..., -1:, :].expand(*tensor.shape[:-2], -tensor.shape[-2] % self.q_group_size, -1)
        return super()._quantize(torch.cat([tensor, padding], dim=-2), axis)  # type: ignore[safe-super]

    def _dequantize(self, qtensor: object) -> torch.Tensor:
        return super()._dequantize(qtensor)[..., : self.num_quantized, :]  # type: ignore[safe-super]


class _WholeGroupsQuantoLayer(_WholeGroupsLayer, QuantoQuantizedLayer):
    pass


class _WholeGroupsHQQLayer(_WholeGroupsLayer, HQQQuantizedLayer):
    pass


def create_dynamic(model: ModelOrConfig) -> Cache:
    """Transformers' DynamicCache: dense, the reference"""
    return ReportingDynamicCache(config=get_config(model))


def create_offloaded(model: ModelOrConfig) -> Cache:
    """Transformers' DynamicCache with all but one layer kept in CPU memory"""
    # Transformers would raise in the first `update`: "Torch not compiled with CUDA enabled"
    if not torch.cuda.is_available():
        raise ValueError("The `offloaded` cache needs a CUDA device, and torch finds none: use `dynamic` instead.")
    if isinstance(model, PreTrainedModel) and model.device.type != "cuda":
        raise ValueError(f"The `offloaded` cache needs the model on a CUDA device, but it is on `{model.device}`.")
    return ReportingDynamicCache(config=get_config(model), offloading=True)


def create_fp8(model: ModelOrConfig) -> Cache:
    """Transformers' QuantizedCache, 8-bit floats with one scale a tensor"""
    return ReportingQuantizedCache("fp8", _config_for("fp8", model))


def _create_grouped(
    backend: str,
    model: ModelOrConfig,
    *,
    nbits: int,
    axis_key: int,
    axis_value: int,
    q_group_size: int = 64,
    residual_length: int = 128,
) -> Cache:
    config = _config_for(backend, model)
    options = {"nbits": nbits, "axis_key": axis_key, "axis_value": axis_value}
    check_integer("q_group_size", q_group_size, 1)
    check_integer("residual_length", residual_length, 0)
    # Transformers checks some of these in the first update, and no types
    for name, accepted in _ACCEPTED[backend].items():
        check_choice(name, options[name], accepted)
    options |= {"q_group_size": q_group_size, "residual_length": residual_length}
    return ReportingQuantizedCache(backend, config, **options)


# Transformers' QuantizedCache on optimum-quanto, keys per channel, and on hqq
create_quanto = partial(_create_grouped, "quanto", axis_key=-1, axis_value=0)
create_hqq = partial(_create_grouped, "hqq", axis_key=1, axis_value=1)


def _config_for(backend: str, model: ModelOrConfig) -> PreTrainedConfig:
    config = get_config(model)
    if config is None:
        raise ValueError(f"Caches on `{backend}` need to know the model: pass it, or its config, as `model`.")
    return config
