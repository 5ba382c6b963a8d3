"""Presets on the default config of every decoder family that Transformers has.

A preset that needs no model is made of each of these configs. Tiny models that keep a family's kinds of layers and its
head dimensions fill caches, which are saved and loaded: of families whose layers are alike one, the others are `long`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from kvcache_plugins import PromptStore, create_cache, list_caches
from kvcache_plugins.eval import tiny_models
from kvcache_plugins.eval.families import is_refusal
from kvcache_plugins.models.layer_config import decoder_config
from kvcache_plugins.packed.cache import PackedCache


# Caches of Transformers, and those that a model makes
NOT_OF_CONFIGS = ("dynamic", "fp8", "hqq", "infinigen", "offloaded", "quanto")
PRESETS = [name for name in list_caches() if not name.startswith(NOT_OF_CONFIGS)]
# One of each kind
DAILY = (
    "transform",
    "gear-4bit",
    "calibrated-16",
    "h2o",
    "kivi-2bit",
    "kvarn-k4v4",
    "llamacpp-q4_0",
    "turboquant-4bit",
)
# Transformers' own cache cannot be made of their defaults, or their defaults do not fit
WITHOUT_CACHE = {"blt", "deepseek_v4", "gemma4_assistant", "pi0", "unlimited_ocr"}
DECODERS = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
# One of each layer shape among models that run with their released head dimensions
SHAPES = (
    *("apertus", "arcee", "axk1", "gemma2", "gemma3n_text", "gemma4_text", "gpt_oss", "mimo_v2_flash", "minicpm3"),
    *("mistral",),
)
# Families that cannot be built with these head dimensions, or that a dense cache does not serve in the same way
NOT_RUN = {
    *("blt", "cpmant", "dory", "dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "mamba2", "minimax", "ministral", "musicgen", "musicgen_melody"),
    *("qwen4_exp", "qwen4_exp_text", "reformer", "xlstm"),
}


@pytest.mark.parametrize(
    "name", [*DAILY, *(pytest.param(name, marks=pytest.mark.long) for name in PRESETS if name not in DAILY)]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_preset_is_made_of_every_released_config(name: str, released_configs) -> None:
    for family in sorted(DECODERS - WITHOUT_CACHE):
        config = released_configs[family]
        own = DynamicCache(config=decoder_config(config)).layers
        if any(isinstance(layer, DynamicLayer) for layer in own):
            assert len(create_cache(name, config).layers) == len(own), family
        else:
            with pytest.raises(ValueError, match="none of the model's layers has attention"):
                create_cache(name, config)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PreTrainedModel]:
    """Builds a tiny model of a family, with heads of the released dimensions."""
    sizes = {name: size for name, size in tiny_models._SIZES.items() if "head_dim" not in name}
    monkeypatch.setattr(tiny_models, "_SIZES", sizes)
    for family, fields in tiny_models.SPECIAL_FIELDS.items():
        own = {name: value for name, value in fields.items() if "head_dim" not in name}
        monkeypatch.setitem(tiny_models.SPECIAL_FIELDS, family, own)
    return tiny_models.build_family


@pytest.mark.parametrize(
    "name",
    [
        "transform",
        "gear-4bit",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("kivi-2bit", "calibrated-16")),
    ],
)
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_cache_is_filled_saved_and_loaded(family: str, name: str, build, tmp_path: Path) -> None:
    assert fill_save_and_load(build(family), name, tmp_path / "cache").get_seq_length() == 152


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("transform", "kivi"))])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_family_is_filled_saved_and_loaded_or_refused(name: str, build, tmp_path: Path) -> None:
    for family in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - NOT_RUN):
        try:
            fill_save_and_load(build(family), name, tmp_path / "cache")
        except ValueError as error:
            assert is_refusal(error), family


@torch.no_grad()
def fill_save_and_load(model: PreTrainedModel, name: str, path: Path) -> PackedCache:
    prompt, token = tiny_models.prompt(model, 150, 1), tiny_models.prompt(model, 1, 2)
    cache = create_cache(name, model)
    for tokens in (prompt, token):
        model(tokens, past_key_values=cache)
    cache.save(path, model)
    loaded = type(cache).load(path, model)
    assert loaded.get_seq_length() == cache.get_seq_length()
    logits = [model(token, past_key_values=each).logits for each in (cache, loaded)]
    assert torch.equal(*logits)
    return loaded


@pytest.mark.parametrize("name", ["transform", "gear-4bit"])
def test_a_store_keeps_a_prompt_of_layers_that_share_states(name: str, build, tmp_path: Path) -> None:
    model = build("gemma4_text")
    prompt = tiny_models.prompt(model, 300, 1)
    PromptStore(tmp_path).read(model, prompt, name)
    store = PromptStore(tmp_path)
    cache = store.read(model, prompt, name)
    assert cache.get_seq_length() == 300
    assert store.stats()["tokens_saved"] == 256
