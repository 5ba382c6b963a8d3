"""`custom_generate`: in `generate`, a pipeline, a chat loop, and from folders as they can be pushed to the hub."""

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, TextStreamer, pipeline

from kvcache_plugins import create_cache, generate_with
from kvcache_plugins.infinigen import calibrate
from kvcache_plugins.models.cache_argument import IS_RENAMED
from kvcache_plugins.transform_coding import TransformCalibration, calibrate_transform


HUB = Path(__file__).resolve().parents[1] / "hub"
NAME = "gear-2bit"
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model(tiny_loaded) -> PreTrainedModel:
    return tiny_loaded[0]


@pytest.fixture
def tokenizer(tiny_loaded):
    return tiny_loaded[1]


@pytest.fixture(autouse=True)
def modules_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the folder that Transformers copies code to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))


def expected(model: PreTrainedModel, inputs: dict[str, torch.Tensor], name: str = NAME, **options: object):
    return model.generate(**inputs, past_key_values=create_cache(name, model), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7},
        {"prefill_chunk_size": 64},
    ],
    ids=str,
)
def test_every_call_uses_a_new_cache(model, tokenizer, options: dict[str, object]) -> None:
    custom = pickle.loads(pickle.dumps(generate_with(NAME)))
    for text in (TEXT, TEXT[40:]):
        inputs = tokenizer(text, return_tensors="pt")
        torch.manual_seed(1)
        tokens = expected(model, inputs, **options)
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs, custom_generate=custom, **{**OPTIONS, **options}), tokens)


def test_the_cache_is_in_the_output_and_of_the_options(model, tokenizer) -> None:
    inputs = tokenizer(TEXT, return_tensors="pt")
    output = model.generate(
        **inputs,
        custom_generate=generate_with("gear-k4v3:value_nbits=4", residual_length=16),
        return_dict_in_generate=True,
        **OPTIONS,
    )
    cache = output.past_key_values
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    assert cache.cache_config.residual_length == 16
    assert cache.stats()["tokens_compressed"] > 0


def test_hooks_are_removed_after_generation(model, tokenizer) -> None:
    inputs = tokenizer(TEXT, return_tensors="pt")
    custom = generate_with("infinigen", full_layers=(), speculate=True)
    output = model.generate(**inputs, custom_generate=custom, return_dict_in_generate=True, **OPTIONS)
    assert output.past_key_values.stats()["speculated_calls"] > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_pipeline_uses_the_cache(model, tokenizer) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [TEXT, TEXT[:150], TEXT[30:]]
    found = generator(texts, custom_generate=generate_with(NAME), return_full_text=False, **OPTIONS)
    for text, (answer,) in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        new = expected(model, inputs)[0, inputs["input_ids"].shape[1] :]
        assert answer["generated_text"] == tokenizer.decode(new, skip_special_tokens=True)
    dense = generator(texts, return_full_text=False, **OPTIONS)
    assert dense != found


def test_generate_from_a_folder_uses_the_cache(model, tokenizer) -> None:
    """Pass a streamer and an assistant, which Transformers hands to code of folders only."""

    class Recorder(TextStreamer):
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text

    inputs = tokenizer(TEXT, return_tensors="pt")
    arguments = {"custom_generate": str(HUB), "trust_remote_code": True, "cache": NAME, **OPTIONS}
    streamer = Recorder(tokenizer, skip_prompt=True)
    tokens = model.generate(**inputs, streamer=streamer, **arguments)
    assert torch.equal(tokens, expected(model, inputs))
    assert streamer.text.strip() == tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]).strip()
    drafted = model.generate(**inputs, prompt_lookup_num_tokens=3, return_dict_in_generate=True, **arguments)
    assert drafted.past_key_values.stats()["tokens_compressed"] > 0
    with pytest.raises(ValueError, match="Unknown option `rnak`"):
        model.generate(**inputs, cache_options={"rnak": 1}, **arguments)
    given = {**arguments, "past_key_values": DynamicCache()}
    if IS_RENAMED:
        # The same argument by its older name, which Transformers drops
        with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache`"):
            assert torch.equal(model.generate(**inputs, **given), tokens)
        given = {**arguments, "cache": DynamicCache()}
    with pytest.raises(ValueError, match="leave out `past_key_values`"):
        model.generate(**inputs, **given)


@pytest.fixture
def repository(tiny_folder: str, tmp_path: Path) -> Path:
    """A model's repository with a `generate` of its own."""
    shutil.copytree(tiny_folder, tmp_path / "repository")
    shutil.copytree(HUB / "custom_generate", tmp_path / "repository" / "custom_generate")
    return tmp_path / "repository"


@pytest.fixture
def bound(repository: Path) -> PreTrainedModel:
    """A model whose `generate` Transformers has taken from the model's own repository."""
    return AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True).eval()


@pytest.mark.parametrize("is_positional", [False, True], ids=["by keyword", "by position"])
@pytest.mark.parametrize(
    ("name", "options"), [("transform", {}), (NAME, {"cache": NAME}), ("transform", {"num_beams": 3})], ids=str
)
def test_generate_from_the_models_repository_uses_the_cache(
    bound, model, tokenizer, name, options, is_positional
) -> None:
    input_ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    plain = {key: value for key, value in options.items() if key != "cache"}
    tokens = expected(model, {"input_ids": input_ids}, name, **plain)
    arguments = {"return_dict_in_generate": True, **OPTIONS, **options}
    given = (input_ids,) if is_positional else ()
    output = bound.generate(*given, **arguments, **({} if is_positional else {"input_ids": input_ids}))
    assert torch.equal(output.sequences, tokens)
    assert output.past_key_values.stats()["tokens_compressed"] > 0


@pytest.fixture
def calibration(model: PreTrainedModel, random_windows) -> TransformCalibration:
    return calibrate_transform(model, random_windows(3, 200))


def test_calibrations_in_the_models_repository_are_used(
    repository, calibration, model, tokenizer, random_windows
) -> None:
    calibration.save(repository / "transform_calibration.safetensors")
    corrections = calibrate(model, random_windows(3, 200), rank=4, min_recall=0.0)
    corrections.save(repository / "infinigen.safetensors")
    bound = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True).eval()
    inputs = {**tokenizer(TEXT, return_tensors="pt"), "return_dict_in_generate": True, **OPTIONS}
    presets = ("calibrated-16", {}), ("calibrated-20", {"num_sink_tokens": 8}), ("calibrated-16:nbits=3", {})
    for name, options in presets:
        output = bound.generate(**inputs, cache=name, cache_options=options)
        cache = create_cache(name, model, calibration=calibration, **options)
        assert output.past_key_values.calibration.digest == calibration.digest
        assert torch.equal(output.sequences, model.generate(**inputs, past_key_values=cache).sequences)
    for name, options in (
        ("transform", {}),
        ("calibrated-16", {"calibration": None}),
    ):
        assert bound.generate(**inputs, cache=name, cache_options=options).past_key_values.calibration is None
    options = {"calibration": str(repository / "infinigen.safetensors")}
    output = bound.generate(**inputs, cache="infinigen", cache_options=options)
    assert output.past_key_values.calibration.reports == corrections.reports


def test_lines_of_the_model_card_run(repository, calibration) -> None:
    calibration.save(repository / "transform_calibration.safetensors")
    given = {
        "model_id": repository.as_posix(),
        "base_model": "a/b",
        "cache": "calibrated-16",
        "results": "",
        "texts": "",
    }
    data = ModelCardData(base_model="a/b", library_name="transformers", tags=["custom_generate"])
    ModelCard.from_template(data, template_path=str(HUB / "model_card.md"), **given).save(repository / "README.md")
    card = ModelCard.load(repository / "README.md")
    assert card.data.tags == ["custom_generate"] and "{" not in card.text
    shown: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL):
        exec(block, shown)
    caches = shown["output"].past_key_values, shown["cache"]
    assert [cache.calibration.digest for cache in caches] == [calibration.digest] * 2
    assert caches[0].get_seq_length() == caches[1].get_seq_length() > 0


def test_invalid_calls_are_refused(model, tokenizer) -> None:
    inputs = tokenizer(TEXT, return_tensors="pt")
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        generate_with("gaer")
    with pytest.raises(ValueError, match="Unknown option `rnak`"):
        generate_with("gear-2bit", rnak=3)
    custom = generate_with(NAME)
    used = DynamicCache()
    model(inputs["input_ids"][:, :-1], past_key_values=used)
    for options, message in (
        ({"use_cache": False}, "`use_cache=False` beside"),
        ({"past_key_values": used}, "was also given a DynamicCache"),
        ({"past_key_values": create_cache(NAME, model)}, "was also given a GEARCache"),
        ({"cache_implementation": "static"}, "was also given a StaticCache"),
        (
            {"prompt_lookup_num_tokens": 3},
            r"but got assisted_generation: pass `past_key_values=create_cache\('gear-2bit'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**inputs, custom_generate=custom, **OPTIONS, **options)
