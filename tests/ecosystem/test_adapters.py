"""PEFT: a cache is made for the model inside a `PeftModel`, and speculates with its adapters."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from kvcache_plugins import InfiniGenCache, PromptStore, TransformCodingCache, create_cache
from kvcache_plugins.infinigen.hooks import hooks_of
from kvcache_plugins.models.cache_argument import IS_RENAMED
from kvcache_plugins.registry import unwrap_model


PEFT_IS_OLD = IS_RENAMED and Version(version("peft")) < Version("0.22")


peft = pytest.importorskip("peft")
# PEFT asks what Transformers is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora() -> "peft.LoraConfig":
    return peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")


def with_lora(model):
    """A `PeftModel` with a LoRA adapter of random weights, the same ones every time."""
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora()).eval()


def test_lora_generates_as_the_merged_model(tiny_model, make_cache, prompt, generate, cache_name):
    plain, adapted = tiny_model("llama"), with_lora(tiny_model("llama"))
    cache = make_cache(cache_name, adapted)
    tokens = generate(adapted, prompt(), cache)
    assert not torch.equal(tokens, generate(plain, prompt(), make_cache(cache_name, plain)))
    merged = with_lora(tiny_model("llama")).merge_and_unload()
    assert torch.equal(tokens[:, :4], generate(merged, prompt(), make_cache(cache_name, merged))[:, :4])
    assert cache.stats()["attend_calls"] == 14


def test_infinigen_hooks_the_adapted_base_model(tiny_model, prompt, generate):
    adapted = with_lora(tiny_model("llama"))
    with InfiniGenCache(adapted, full_layers=(), speculate=True) as cache:
        generate(adapted, prompt(), cache)
        hooks = hooks_of(adapted.get_base_model())
        assert hooks is not None
        hidden_states = torch.randn(1, 3, 128)
        # The adapter is part of the query that is expected
        inner = hooks.projections[1]._project(hidden_states)
        assert torch.allclose(inner, adapted.get_base_model().model.layers[1].self_attn.q_proj(hidden_states))
        assert cache.stats()["speculated_calls"] == 7
    assert hooks_of(adapted.get_base_model()) is None


@pytest.mark.skipif(PEFT_IS_OLD, reason="this release of Transformers wants PEFT 0.22 or newer")
def test_infinigen_uses_an_adapter_added_later(tiny_llama, make_cache, prompt, generate):
    with make_cache("infinigen", tiny_llama) as before:
        generate(tiny_llama, prompt(), before)
        torch.manual_seed(1)
        tiny_llama.add_adapter(lora())
        late = generate(tiny_llama, prompt(), make_cache("infinigen", tiny_llama))
    assert torch.equal(late, generate(tiny_llama, prompt(), make_cache("infinigen", tiny_llama)))


@pytest.mark.skipif(PEFT_IS_OLD, reason="this release of Transformers wants PEFT 0.22 or newer")
def test_prompt_tuning_generates_as_without_a_cache(tiny_model, prompt, generate):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    adapted = peft.get_peft_model(tiny_model("llama"), config).eval()
    with pytest.warns(UserWarning, match="Position ids are not supported"):
        expected = generate(adapted, prompt(15))
        cache = TransformCodingCache(unwrap_model(adapted).config, residual_length=512)
        assert torch.equal(generate(adapted, prompt(15), cache), expected)
    assert cache.get_seq_length() == 15 + 6 + 7


def test_a_store_keeps_adapters_apart(tiny_model, tmp_path, prompt, generate):
    adapted, ids = with_lora(tiny_model("llama")), prompt(300)
    store = PromptStore(tmp_path)

    def answer():
        cache = store.cache_for(adapted, ids)
        num_known = cache.get_seq_length()
        store.prefill(adapted, cache, ids)
        return generate(adapted, ids, cache), num_known

    first, known = answer()
    assert known == 0 and answer()[1] == 256
    with adapted.disable_adapter():
        plain, known = answer()
        assert known == 0 and answer()[1] == 256
    # Another adapter is another model, also for prompts of the first one, which has two adapters now
    torch.manual_seed(2)
    adapted.add_adapter("other", lora())
    second, known = answer()
    assert known == 0 and torch.equal(second, first)
    adapted.set_adapter("other")
    other, known = answer()
    assert known == 0 and not torch.equal(other, first) and not torch.equal(other, plain)
    adapted.set_adapter("default")
    again, known = answer()
    assert known == 256 and torch.equal(again, first)


@pytest.mark.parametrize("name", ["gear-2bit", "infinigen", "h2o", "dynamic"])
def test_prefix_tuning_is_refused(name, tiny_model):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    adapted = peft.get_peft_model(tiny_model("llama"), config).eval()
    with pytest.raises(ValueError, match="prefix tuning is not supported"):
        create_cache(name, adapted)
