"""The guard's choice: it is the cheapest that keeps the bound, it measures what an ordinary run would show, and a
prompt that it cannot judge is an error."""

import copy
import json
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, DynamicCache

from kvcache_plugins import TransformCodingCache, choose_cache, create_cache, measure_kl
from kvcache_plugins.advice.choose_by_kl import DEFAULT_CANDIDATES
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.registry import parse_cache_spec


LENGTH = 200
HELD_OUT = 50
# Bounds that every candidate meets, and none
LOOSE, TIGHT = 1e3, 1e-12
CHOICE = {"chosen_preset", "chosen_kl", "max_kl", "kl_by_preset"}
ARCHITECTURES = ["llama", "gemma3-hybrid"]


def prompt(length=LENGTH, batch_size=1):
    return torch.randint(2, 128, (batch_size, length), generator=torch.Generator().manual_seed(5))


def padded():
    """Items of 200, 130 and 30 tokens: the last one's prefix is nothing but padding."""
    input_ids, mask = prompt(batch_size=3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :70], mask[2, :170] = 0, 0
    return input_ids.masked_fill(mask == 0, 0), mask


def measure_all(model, input_ids, **options):
    """Reads the KL of each candidate from the message of a bound that is too low."""
    with pytest.raises(ValueError, match="`max_kl`") as error:
        choose_cache(model, input_ids, max_kl=TIGHT, **options)
    listed = str(error.value).partition("dense cache: ")[2].partition(". Accepted")[0]
    return {spec.strip("`"): float(kl) for spec, kl in (each.rsplit(" ", 1) for each in listed.split(", `"))}


@torch.no_grad()
def ordinary_kl(model, cache, input_ids, mask, held_out, chunk=16):
    """Measures KL with nothing of the guard: the prefix is prefilled through the cache itself."""
    first, length = input_ids.shape[1] - held_out, input_ids.shape[1]
    mask = torch.ones_like(input_ids) if mask is None else mask
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    def feed(cache, start, stop):
        options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        return model(input_ids[:, start:stop], past_key_values=cache, **options).logits

    dense = DynamicCache(config=model.config)
    for each in (cache, dense):
        feed(each, 0, first)
    exact = feed(dense, first, length).double()
    parts = [feed(cache, start, min(start + chunk, length)) for start in range(first, length, chunk)]
    log_probs = F.log_softmax(torch.cat(parts, dim=1).double(), dim=-1)
    each = F.kl_div(log_probs, F.log_softmax(exact, dim=-1), reduction="none", log_target=True).sum(dim=-1)
    return each[mask[:, first:] == 1].mean().item()


# All pairs
@pytest.mark.parametrize(
    ("architecture", "is_padded", "implementation"),
    [
        *(("llama", False, "sdpa"), ("llama", True, "eager")),
        *(("gemma3-hybrid", False, "eager"), ("gemma3-hybrid", True, "sdpa")),
    ],
)
def test_measured_kl_equals_that_of_an_ordinary_run(tiny_model, architecture, is_padded, implementation):
    model = tiny_model(architecture, attn_implementation=implementation)
    input_ids, mask = padded() if is_padded else (prompt(batch_size=2), None)
    options = {"attention_mask": mask, "held_out": HELD_OUT}
    of_windows = ("gear-k4v3:key_nbits=2", "transform-22:sliding=compressed")
    more = of_windows if architecture == "gemma3-hybrid" else ()
    for spec in ("gear-k4v3:key_nbits=2", "transform-22", "gear-2bit:residual_length=32,q_group_size=16", *more):
        cache = choose_cache(model, input_ids, max_kl=LOOSE, candidates=[spec], **options)
        name, own = parse_cache_spec(spec)
        twin = create_cache(name, model, attention_mask=mask, **own)
        expected = ordinary_kl(model, twin, input_ids, mask, HELD_OUT)
        assert expected > 1e-4
        assert cache.stats()["chosen_kl"] == pytest.approx(expected, rel=1e-3)


# Lengths of turns: some are read at once, others are replies
CHAT_LENGTHS = (20, 90, 130, 40, 3, 35)


def chat(*lengths):
    return list(prompt(sum(lengths or CHAT_LENGTHS)).split(lengths or CHAT_LENGTHS, dim=1))


@torch.no_grad()
def kl_of_replies(model, cache, turns):
    """Measures KL with nothing of the guard: turns one after another, replies in chunks."""
    dense, total = DynamicCache(config=model.config), []
    for number, turn in enumerate(turns):
        exact = model(turn, past_key_values=dense).logits.double()
        parts = turn.split(16 if number % 2 else turn.shape[1], dim=1)
        own = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1).double()
        if number % 2:
            log_probs, exact = F.log_softmax(own, dim=-1), F.log_softmax(exact, dim=-1)
            total.append(F.kl_div(log_probs, exact, reduction="none", log_target=True).sum(dim=-1))
    return torch.cat(total, dim=1).mean().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("spec", ["transform-22", "gear-k4v3:key_nbits=2"])
def test_chat_kl_equals_turn_by_turn_measurement(tiny_model, architecture, spec):
    model, turns = tiny_model(architecture), chat()
    cache = choose_cache(model, turns, max_kl=LOOSE, candidates=[spec])
    name, own = parse_cache_spec(spec)
    expected = kl_of_replies(model, create_cache(name, model, **own), turns)
    assert cache.stats()["chosen_kl"] == pytest.approx(expected, rel=1e-3)
    assert cache.get_seq_length() == 0
    # The same tokens as one prompt are another measurement
    whole = choose_cache(
        model, torch.cat(turns, dim=1), max_kl=LOOSE, candidates=[spec], held_out=sum(CHAT_LENGTHS[3:])
    )
    assert whole.stats()["chosen_kl"] != pytest.approx(expected, rel=1e-2)
    assert measure_kl(model, turns, candidates=[spec]) == cache.stats()["kl_by_preset"]
    # Tokens after the last reply are left out
    assert choose_cache(model, [*turns, prompt(9)], max_kl=LOOSE, candidates=[spec]).stats() == cache.stats()


def test_chat_of_messages_equals_chat_of_its_tokens(tiny_model, tiny_folder):
    model, tokenizer = tiny_model("llama"), AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = (
        "{% for each in messages %}<{{ each.role }}>{{ each.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    words = "It was the best of times, it was the worst of times. " * 3
    messages = [
        {"role": "system", "content": "Be brief."},
        *({"role": ("user", "assistant")[number % 2], "content": words} for number in range(4)),
    ]
    texts = [
        f"<system>Be brief.\n<user>{words}\n<assistant>",
        f"{words}\n",
        f"<user>{words}\n<assistant>",
        f"{words}\n",
    ]
    turns = [tokenizer(each, add_special_tokens=False, return_tensors="pt").input_ids for each in texts]
    options = {"max_kl": LOOSE, "candidates": ["transform-22"]}
    by_messages = choose_cache(model, messages, tokenizer=tokenizer, **options)
    assert by_messages.stats() == choose_cache(model, turns, **options).stats()
    with pytest.raises(ValueError, match="`tokenizer` is needed for a chat of messages"):
        choose_cache(model, messages)
    with pytest.raises(ValueError, match="needs `role` and `content` but has"):
        choose_cache(model, [*messages, {"content": "x"}], tokenizer=tokenizer)
    tokenizer.chat_template = "{% for each in messages %}{{ messages | length }}{{ each.content }}{% endfor %}"
    with pytest.raises(ValueError, match="a template that changes earlier messages"):
        choose_cache(model, messages, tokenizer=tokenizer)


def test_chat_too_short_to_compress_is_refused(tiny_model):
    with pytest.raises(
        ValueError, match="of the chat's 60 tokens it compresses none, as a sequence needs at least 68"
    ):
        choose_cache(tiny_model("llama"), chat(20, 40), max_kl=LOOSE, candidates=["transform-22"])


def test_choice_follows_the_bound(tiny_model):
    model, input_ids = tiny_model("llama"), prompt()
    kl = measure_all(model, input_ids, held_out=HELD_OUT)
    # The cheapest first, whatever the order in which they are given
    assert list(kl) == list(DEFAULT_CANDIDATES)
    assert measure_all(model, input_ids, held_out=HELD_OUT, candidates=DEFAULT_CANDIDATES[::-1]) == kl
    values = list(kl.values())
    assert values == sorted(values, reverse=True) and values[-1] > 0
    for place, (spec, value) in enumerate(kl.items()):
        bound = 1.001 * value
        cache = choose_cache(model, input_ids, max_kl=bound, held_out=HELD_OUT)
        expected = next(each for each in kl if kl[each] <= bound)
        stats = cache.stats()
        assert stats["chosen_preset"] == expected
        assert stats["chosen_kl"] <= stats["max_kl"] == bound
        tried = list(kl)[: list(kl).index(expected) + 1]
        assert list(stats["kl_by_preset"]) == tried and len(tried) <= place + 1
        assert stats["kl_by_preset"][expected] == stats["chosen_kl"]
        if spec == expected:
            name, _, own = spec.partition(":")
            options = {"key_nbits": 8, "value_nbits": 8} if own else {}
            assert cache.cache_config == create_cache(name, model, **options).cache_config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chosen_cache_is_empty_and_generates_like_its_preset(tiny_model, architecture):
    model = tiny_model(architecture)
    input_ids, mask = padded()
    cache = choose_cache(model, input_ids, max_kl=LOOSE, attention_mask=mask, candidates=["gear-k4v3"])
    assert cache.get_seq_length() == cache.stats()["tokens_compressed"] == 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    twin = create_cache("gear-k4v3", model)
    chosen = model.generate(input_ids, past_key_values=cache, **options)
    assert torch.equal(chosen, model.generate(input_ids, past_key_values=twin, **options))
    assert {name: value for name, value in cache.stats().items() if name not in CHOICE} == twin.stats()
    assert cache.stats()["tokens_compressed"] > 0


def test_choosing_works_with_latent_attention():
    model = build_family("deepseek_v3")
    cache = choose_cache(model, prompt() % 97, max_kl=LOOSE, candidates=["gear-k4v3"])
    assert cache.stats()["chosen_preset"] == "gear-k4v3"


# Operations on the chosen cache


def test_choice_survives_copies_forks_and_files(tiny_model, tmp_path):
    model, input_ids = tiny_model("llama"), prompt()
    cache = choose_cache(model, input_ids, max_kl=LOOSE)
    chosen = {name: value for name, value in cache.stats().items() if name in CHOICE}
    assert set(chosen) == CHOICE
    with torch.no_grad():
        model(input_ids, past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors", model)
    others = [copy.deepcopy(cache), *cache.fork(2), TransformCodingCache.load(tmp_path / "cache.safetensors", model)]
    for other in others:
        assert other.stats().items() >= chosen.items()
    cache.reset()
    assert cache.stats().items() >= chosen.items()
    assert not CHOICE & set(TransformCodingCache(model.config).stats())


# Refusals


def test_nan_never_passes(tiny_model, monkeypatch):
    attend = CompressedLayer.attend

    def attend_badly(self, *arguments, **options):
        output = attend(self, *arguments, **options)
        # In the last layer, which only logits follow, and nothing is compressed after it
        return output * math.nan if self.policy.make_codec.config.key_nbits < 4 and self.layer_idx == 1 else output

    monkeypatch.setattr(CompressedLayer, "attend", attend_badly)
    cache = choose_cache(tiny_model("llama"), prompt(), max_kl=LOOSE)
    assert cache.stats()["chosen_preset"] == "transform"
    assert math.isnan(cache.stats()["kl_by_preset"]["transform-16"])
    with pytest.raises(ValueError, match="`transform-16` nan"):
        choose_cache(tiny_model("llama"), prompt(), max_kl=LOOSE, candidates=["transform-16"])


@pytest.mark.parametrize(
    ("length", "held_out", "message"),
    [
        (12, None, "12 tokens, which is too short: 16 are held out"),
        (79, None, "of the 60 tokens before the 19 held out it compresses none, as a sequence needs at least 64"),
        (LENGTH, 150, "of the 50 tokens before the 150 held out it compresses none"),
    ],
)
def test_prompt_too_short_to_compress_is_refused(tiny_model, length, held_out, message):
    with pytest.raises(ValueError, match=message):
        # A cache with groups of 32 would compress some
        choose_cache(
            tiny_model("llama"),
            prompt(length),
            max_kl=LOOSE,
            held_out=held_out,
            candidates=["gear-k4v3:key_nbits=2", "gear-k4v3"],
        )


def test_default_held_out_share_has_lower_and_upper_bounds(tiny_model):
    def fed(length):
        lengths = []
        model = tiny_model("llama")
        model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        choose_cache(model, prompt(length), max_kl=LOOSE, candidates=["gear-k4v3:key_nbits=2"])
        return lengths

    assert fed(85) == [64, 21, 16, 5]
    assert fed(600) == [472, 128, *[16] * 8]


CHAT_OPTIONS = {"held_out": 9, "attention_mask": torch.ones(1, 9)}
INPUT_IDS = "`input_ids` has to be a tensor of token ids"
MASK = "`attention_mask` has to be"
SEQUENCE = "`candidates` has to be a sequence"
REFUSED = [
    *(
        ({"max_kl": each}, "`max_kl` has to be a number above 0")
        for each in (0, -1, math.nan, math.inf, "1", True, None)
    ),
    *(({"held_out": each}, "`held_out` has to be an integer from 1 to 199") for each in (0, -1, LENGTH, 1.5, True)),
    *(({"candidates": each}, SEQUENCE) for each in ("gear-k4v3:key_nbits=2", [])),
    ({"candidates": ["geer"]}, "Unknown cache `geer`. Did you mean `gear`"),
    ({"candidates": ["gear:ranks=2"]}, "Unknown option `ranks`"),
    ({"candidates": ["gear:nbits=5"]}, "`nbits`"),
    (
        {"candidates": ["gear-k4v3:key_nbits=2", "dynamic"]},
        "`candidates` have to be presets of `TransformCodingCache` or `GEARCache`.*got `dynamic`",
    ),
    *(({"attention_mask": each}, MASK) for each in (torch.ones(1, 3), torch.ones(2, LENGTH))),
    # No mask but of 0 and 1, and none of padding on the right
    *(({"attention_mask": each}, MASK) for each in (torch.full((1, LENGTH), 2), torch.arange(LENGTH)[None] < 150)),
    *(({"input_ids": each}, INPUT_IDS) for each in (prompt()[0], prompt().float(), prompt().tolist())),
    *(({"input_ids": each}, INPUT_IDS) for each in ("It was", [], [prompt()], [prompt(), prompt(batch_size=2)])),
    ({"input_ids": [{"role": "user", "content": "It was"}, "It is"]}, INPUT_IDS),
    *(({"input_ids": chat(), name: value}, "are options of a prompt") for name, value in CHAT_OPTIONS.items()),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_options_are_checked_before_anything_runs(tiny_model, options, message):
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        choose_cache(model, **{"input_ids": prompt(), **options})


def test_a_model_in_training_is_refused(tiny_model):
    with pytest.raises(ValueError, match="`model` is in training mode"):
        choose_cache(tiny_model("llama").train(), prompt())


# On the console, and on a real model


def test_generate_command_chooses_by_a_bound(tiny_folder, run):
    options = [
        "generate",
        "--model",
        tiny_folder,
        "--prompt",
        "It was the best of times. " * 8,
        "--max-new-tokens",
        "4",
    ]
    result = run(*options, "--max-kl", "1000", "--json")
    assert result.stderr.startswith("transform-16 was chosen: KL 0.")
    content = json.loads(result.stdout)
    assert (content["settings"]["cache"], content["settings"]["max_kl"]) == ("transform-16", 1000)
    assert content["stats"]["chosen_preset"] == "transform-16"
    assert run(*options, "--cache", "transform-16").stdout == run(*options, "--max-kl", "1000").stdout
    tight = run(*options, "--max-kl", "1e-12", code=2)
    assert tight.stderr.startswith("Error: `max_kl` is 1e-12, but on this prompt no candidate")
    later = run(*options, "--max-kl", str(1.01 * content["stats"]["chosen_kl"] / 4))
    assert "; too far: transform-16 0." in " ".join(later.stderr.split())
