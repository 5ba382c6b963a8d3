"""Drafts over caches: a text is that of the same cache without drafts, some drafts are accepted and some are not, and
one token too many (the deferred stop of Transformers 5.24) is taken back at every edge of what is stored.

Tokens of one update attend to each other exactly, and the first one has the prompt and drafts, packed together.
So texts are compared where packing loses next to nothing; the contract compares those of all presets.
"""

import pytest
import torch
import transformers
from transformers.generation import utils as generation_utils

from kvcache_plugins import create_cache


# Nothing is lost that could change a text, be it by few bits, a choice or an eviction
EXACT = {
    "transform": {"nbits": 8},
    "gear-2bit": {"nbits": 8},
    "kivi-2bit": {"nbits": 8},
    "llamacpp-q8_0": {},
    "infinigen": {"alpha": float("inf"), "max_fetch_ratio": 1.0, "recent": 8, "full_layers": ()},
    "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
}


def count_forwards(model, run):
    """Return the result of a function, and the numbers of tokens of each forward of a model in it."""
    counts = []
    # Drafting layers share the embeddings
    first = model.model.layers[0]
    hook = first.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[1]))
    try:
        return run(), counts
    finally:
        hook.remove()


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", EXACT)
def test_prompt_lookup_generates_the_same_tokens(name, smollm2, generate):
    model, tokenizer = smollm2
    text = "One apple, two pears, three plums, four figs. One apple, two pears, three nuts, four figs. " * 3
    ids = tokenizer(text + "One apple, two", return_tensors="pt").input_ids
    options = {"max_new_tokens": 32, "min_new_tokens": 32}
    expected = generate(model, ids, create_cache(name, model, **EXACT[name]), **options)
    cache, crops = create_cache(name, model, **EXACT[name]), []
    crop = cache.crop
    cache.crop = lambda count: (crops.append(-count), crop(count))
    drafted, counts = count_forwards(model, lambda: generate(model, ids, cache, prompt_lookup_num_tokens=4, **options))
    assert torch.equal(drafted, expected)
    # Fewer forwards than tokens: drafts were accepted; and some of them were taken back
    assert len(counts) < 32 and sum(crops) > 0
    assert cache.get_seq_length() == ids.shape[1] + 31


@pytest.fixture(scope="module")
def drafting():
    """A random model of 8 tokens, so that drafts of random layers are right at times."""
    config = transformers.Glm4MoeConfig(
        **{"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "first_k_dense_replace": 2},
        **{"num_mtp_layers": 2, "initializer_range": 0.4, "pad_token_id": None, "eos_token_id": None},
        **{"bos_token_id": None, "max_position_embeddings": 1024},
    )
    torch.manual_seed(2)
    return transformers.Glm4MoeForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", EXACT)
def test_multi_token_prediction_generates_the_same_tokens(name, drafting, generate, monkeypatch):
    from transformers.modeling_layers import MtpModel

    def make(main_model, **options):
        torch.manual_seed(9)
        drafter = MtpModel(main_model, 2).eval()
        # Transformers 5.24 leaves the experts of drafting layers as memory happened to be
        for layer in drafter.layers:
            for weights in layer.mtp_block.mlp.experts.parameters():
                torch.nn.init.normal_(weights, std=0.4)
        return drafter

    # A checkpoint has trained drafting layers; these are random
    monkeypatch.setattr(MtpModel, "from_pretrained", make)
    ids = torch.randint(0, 8, (1, 150), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 40}
    expected = generate(drafting, ids, create_cache(name, drafting, **EXACT[name]), **options)
    cache = create_cache(name, drafting, **EXACT[name])
    drafted, counts = count_forwards(drafting, lambda: generate(drafting, ids, cache, use_mtp=True, **options))
    assert torch.equal(drafted, expected) and cache.get_seq_length() == 150 + 39
    # Forwards have the prompt, or a token and two drafts; 40 of them would mean that none was accepted
    assert counts == [150] + [3] * (len(counts) - 1) and 14 < len(counts) < 36


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", EXACT)
def test_dflash_drafts_generate_the_same_tokens(name, drafting, generate):
    """DFlash: a drafter reads the model's hidden states and fills a block of tokens in one forward."""
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this release of Transformers has no DFlash")
    config = transformers.MuseGlimmerAssistantConfig(
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "block_size": 4, "mask_token_id": 7},
        **{"target_layer_ids": [0, 1], "initializer_range": 0.4, "max_position_embeddings": 1024},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    torch.manual_seed(3)
    drafter = transformers.MuseGlimmerAssistantModel(config).eval()
    ids = torch.randint(0, 8, (1, 150), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 40}
    expected = generate(drafting, ids, create_cache(name, drafting, **EXACT[name]), **options)
    cache = create_cache(name, drafting, **EXACT[name])
    options |= {"assistant_model": drafter, "speculation_type": "dflash"}
    drafted, counts = count_forwards(drafting, lambda: generate(drafting, ids, cache, **options))
    assert torch.equal(drafted, expected) and cache.get_seq_length() == 150 + 39
    # Forwards have the prompt, or a token and three drafts, some of them accepted
    assert counts[:2] == [150, 4] and 9 < len(counts) < 40


class _Event:
    """Stands in for a device's event: CPUs have none."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def deferred(monkeypatch):
    """Let `generate` stop a step late, which Transformers does on `mps` alone."""

    def is_supported(device, cache, cache_is_returned, is_assistant):
        return not is_assistant and (cache is None or cache.is_croppable or not cache_is_returned)

    check = getattr(generation_utils, "DeferredStopCheck", None)
    if check is None:
        pytest.skip("this release of Transformers does not defer")

    def switch(is_on):
        monkeypatch.setattr(check, "is_supported", staticmethod(is_supported if is_on else lambda *a, **k: False))

    monkeypatch.setattr(torch, "Event", _Event)
    return switch


@pytest.mark.filterwarnings("ignore:`config`. all layers")
@pytest.mark.parametrize(
    ("architecture", "name", "options", "lengths"),
    [
        ("llama", "transform", {}, (60, 63, 64)),
        ("llama", "transform", {"max_cache_len": 160}, (60, 63, 64)),
        ("llama", "transform", {"residual_length": 1, "recent_length": 8}, (64, 65)),
        ("llama", "gear-2bit", {}, (63, 64, 65)),
        ("llama", "kivi-2bit", {"residual_length": 8}, (63, 64)),
        ("llama", "turboquant-4bit", {}, (64,)),
        ("llama", "h2o", {"heavy_ratio": 0.2, "recent_ratio": 0.2}, (64,)),
        ("mistral-sliding", "transform", {"sliding": "compressed"}, (24, 31, 32, 60)),
        ("mistral-sliding", "transform", {"sliding": "dense"}, (24, 31, 32, 60)),
        ("gemma3-hybrid", "transform", {}, (24, 60)),
    ],
    ids=str,
)
def test_deferred_stop_leaves_the_cache_of_a_plain_run(
    architecture, name, options, lengths, tiny_model, deferred, prompt, generate
):
    model = tiny_model(architecture)
    # Stops after every number of steps up to a whole round of the tokens that wait
    for length in lengths:
        ids = prompt(length).clamp(max=96)
        steps = generate(model, ids, create_cache(name, model, **options), max_new_tokens=9)[0].tolist()
        for eos in sorted({steps[1], steps[4], steps[5], steps[6], steps[8]}):
            found, lengths_held = [], []
            for is_late in (False, True):
                deferred(is_late)
                cache = create_cache(name, model, **options)
                answer, counts = count_forwards(
                    model,
                    lambda cache=cache, ids=ids, eos=eos: generate(
                        model, ids, cache, max_new_tokens=9, eos_token_id=eos, pad_token_id=0
                    ),
                )
                lengths_held.append(cache.get_seq_length())
                stops = steps.index(eos) + 1
                # One step more, unless the length ends it
                assert len(counts) == stops + (is_late and stops < 9)
                # A next turn goes on as from a cache that has never held the token
                turn = torch.cat([ids, answer, prompt(3, seed=1)], dim=1)
                found.append(torch.cat([answer, generate(model, turn, cache, max_new_tokens=8)], dim=1))
            assert lengths_held[0] == lengths_held[1]
            assert torch.equal(*found), (length, eos)
