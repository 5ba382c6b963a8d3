"""The models that caches are made for: configs, models, and models in wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


ModelOrConfig: TypeAlias = "PreTrainedModel | PreTrainedConfig | None"
# A model may also be wrapped
WrappedOrConfig: TypeAlias = "torch.nn.Module | PreTrainedConfig | None"


def get_config(model: WrappedOrConfig, name: str = "model") -> PreTrainedConfig | None:
    """The config of what `create_cache`, or a cache's class as its argument `name`, was given."""
    import torch
    from transformers import PreTrainedConfig

    if model is None or isinstance(model, PreTrainedConfig):
        return model
    if isinstance(model, torch.nn.Module):
        return unwrap_model(model).config
    hint = ""
    if isinstance(model, str):
        hint = f"; a cache is made by its name with `create_cache({model!r}, model)`"
    elif isinstance(model, int | float):
        hint = f"; options are given by their names, such as `nbits={model!r}`"
    shown = repr(model) if hint else str(type(model))
    raise ValueError(f"`{name}` must be a `PreTrainedModel`, a `PreTrainedConfig` or `None`, but got {shown}{hint}")


def unwrap_model(model: torch.nn.Module) -> PreTrainedModel:
    """
    The model that a module is or holds: a `PeftModel`, what `torch.compile` returns and data-parallel modules hold it.

    Raises:
        ValueError: if there is none, or if it is prefix-tuned: such a prefix stands in a cache of its own.
    """
    import torch
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ValueError(f"`model` must be a `PreTrainedModel` or a module that holds one, but got {type(model)}")
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is not None and peft_config.peft_type == "PREFIX_TUNING":
        raise ValueError(
            "`model`: prefix tuning is not supported, as PEFT puts the prefix into a `DynamicCache` of its own; "
            "adapters of weights (LoRA) and of the prompt's embeddings (prompt tuning) are"
        )
    return found
