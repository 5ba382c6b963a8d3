"""Models without a cache of ours compute as before, by their own attention functions; so do those with one."""

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from kvcache_plugins import create_cache


def test_eager_attention_is_not_replaced(tiny_llama):
    create_cache("transform", tiny_llama)
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    assert "eager" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", len) is len


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"])
def test_dense_states_are_passed_to_the_original_entry(monkeypatch, name):
    entry = ALL_ATTENTION_FUNCTIONS[name]
    original = flex_attention_forward if name == "flex_attention" else flash_attention_forward
    assert entry.__wrapped__ is original
    given = []
    monkeypatch.setattr(entry.__closure__[0], "cell_contents", lambda *args, **options: given.extend((args, options)))
    args = [object(), *(torch.ones(1) for _ in range(3)), None]
    entry(*args, scaling=2, s_aux=3)
    assert all(one is other for one, other in zip(given[0], args, strict=True))
    assert given[1] == {"scaling": 2, "s_aux": 3}


def logits(model, cache, input_ids):
    with torch.no_grad():
        parts = [model(each, past_key_values=cache).logits for each in input_ids.split([100, 1, 3, 1], dim=1)]
    return torch.cat(parts, dim=1)


@pytest.fixture
def input_ids():
    return torch.randint(3, 128, (2, 105))


class Traced:
    """Eager attention in which no query attends to the first token, as in causal tracing."""

    def __init__(self):
        self.calls = []

    def attend(self, module, query, key, value, attention_mask, scaling, **options):
        self.calls.append(module.layer_idx)
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling + attention_mask
        weights = scores.softmax(dim=-1)
        weights = torch.cat([torch.zeros_like(weights[..., :1]), weights[..., 1:]], dim=-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights

    def forward(self):
        """Make a module's `forward` of one's own, which names its own function."""

        def forward(module, hidden_states, position_embeddings, attention_mask, **options):
            shape = (*hidden_states.shape[:2], -1, module.head_dim)
            projections = module.q_proj, module.k_proj, module.v_proj
            query, key, value = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
            query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
            cache = options.get("cache", options.get("past_key_values"))
            key, value = cache.update(key, value, module.layer_idx)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, self.attend)
            output, weights = attend(module, query, key, value, attention_mask, scaling=module.scaling)
            return module.o_proj(output.reshape(*hidden_states.shape[:2], -1)), weights

        return forward


@pytest.mark.filterwarnings("ignore:the whole cache is fetched for every token:UserWarning")
@pytest.mark.parametrize("name", ["transform", "infinigen", "h2o"])
@pytest.mark.parametrize("place", ["module", "class"])
def test_a_custom_function_is_called_with_and_without_our_caches(tiny_model, input_ids, monkeypatch, name, place):
    model, traced = tiny_model("llama", attn_implementation="eager"), Traced()
    usual = logits(model, DynamicCache(), input_ids)
    if place == "module":
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", traced.attend)
    else:
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", traced.forward())
    options = {
        "transform": {"nbits": 8},
        "infinigen": {"full_layers": ()},
        "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
    }
    cache = create_cache(name, model, **options[name])
    expected = logits(model, DynamicCache(), input_ids)
    assert traced.calls == [0, 1] * 4
    assert not torch.allclose(expected, usual, atol=usual.std().item())
    found = logits(model, cache, input_ids)
    assert traced.calls == [0, 1] * 8
    assert torch.allclose(found, expected, atol=0.1 * expected.std().item())
    assert cache.stats()["dense_reads"] > 0


def test_a_model_whose_function_has_another_name_computes_as_before(tiny_model, input_ids, monkeypatch):
    """Code that comes with a model on the hub: `get_interface` is given whatever its module calls for `eager`."""
    model, usual = tiny_model("llama", attn_implementation="eager"), modeling_llama.eager_attention_forward
    expected = logits(model, DynamicCache(), input_ids)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *args, **options: usual(*args, **options))
    assert torch.equal(logits(model, DynamicCache(), input_ids), expected)
    cache = create_cache("transform", model, nbits=8)
    assert torch.allclose(logits(model, cache, input_ids), expected, atol=0.1 * expected.std().item())
    # Its steps are those of any other
    assert cache.stats()["dense_reads"] == 0
