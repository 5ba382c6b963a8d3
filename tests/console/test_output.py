"""Output of commands: tables for people, one JSON document for scripts, in the form that its schema says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import list_caches, predict_memory, register_cache
from kvcache_plugins.advice.recommendation import MEASURED_KL
from kvcache_plugins.cli import generate
from kvcache_plugins.console.display import print_line
from kvcache_plugins.console.results import print_json


SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (Path(__file__).parent / "schemas").glob("*")
}
PROMPT = "It was the best of times, it was the worst of times. " * 3
FOX = "the quick brown fox jumps over the lazy dog "
HEADINGS = ["cache", "differs at", "KL", "top-1", "MB", "KV %", "prefill s", "ms/token"]


@pytest.fixture
def fox(tmp_path: Path) -> str:
    (tmp_path / "fox.txt").write_text(FOX * 40, encoding="utf-8")
    return str(tmp_path / "fox.txt")


def objects(schema: Any) -> list[dict[str, Any]]:
    """Every part of a schema that describes an object."""
    if isinstance(schema, list):
        return [each for item in schema for each in objects(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" else []
    return own + [each for item in schema.values() for each in objects(item)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_strict(name: str) -> None:
    schema, validator = SCHEMAS[name], jsonschema.Draft202012Validator(SCHEMAS[name])
    validator.check_schema(schema)
    described = [each for each in objects(schema) if "properties" in each]
    assert described and all(each["additionalProperties"] is False for each in described)
    assert not validator.is_valid({})
    assert not validator.is_valid({**dict.fromkeys(schema["properties"]), "more": 1})


@pytest.mark.parametrize(
    ("value", "printed"), [(float("inf"), None), (float("nan"), None), (1.5, 1.5), ([(1, float("nan"))], [[1, None]])]
)
def test_json_writes_nan_and_infinity_as_null(
    value: object, printed: object, capsys: pytest.CaptureFixture[str]
) -> None:
    print_json({"value": value})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"value": printed}


def test_lines_are_folded_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    command, path = f"`pip install '{'this and ' * 9}that'`", "/a" + "/long/path" * 8
    line = f"    words, {command} and then more of them than stand in a line of eighty columns, in {path} to the end"
    print_line(line)
    shown = capsys.readouterr().out.splitlines()
    assert " ".join(" ".join(shown).split()) == line.strip() and all(each.startswith("    ") for each in shown)
    assert [each.strip() for each in shown if len(each) > 80] == [command, path] and len(shown) > 4


def test_list_shows_every_cache_and_missing_packages(run, read, forgets: None) -> None:
    assert run("--version").stdout.startswith("kvcache-plugins 0.")
    register_cache("absent", lambda model: Cache(layers=[]), summary="absent", requires="no-such-package")
    lines = run("list").stdout.splitlines()
    # `head -1` shows the head, and a pipe has the width of a terminal
    assert lines[0].split()[0] == "cache" and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.split()[0] in list_caches()] == list_caches()
    together = " ".join(" ".join(lines).split())
    assert "(a CUDA device: " in together and "absent (no-such-package: missing)" in together
    assert "nbits=2" in run("list", "gear-2bit", env={"COLUMNS": "120"}).stdout
    caches = {each["name"]: each for each in read("list", schema="list")["caches"]}
    assert list(caches) == list_caches()
    assert caches["gear-2bit"]["options"]["nbits"] == 2 and caches["offloaded"]["requires"] == "a CUDA device"
    assert [each["name"] for each in read("list", "kivi*")["caches"]] == list_caches("kivi*")
    sizes = {name: (each["kv_percent"], each["host_percent"]) for name, each in caches.items()}
    assert sizes["dynamic"] == (100, 0) and sizes["fp8"] == (pytest.approx(50, abs=0.01), 0)
    # Codes of 2 of 16 bits, two scales of 16 bits for 64 of them in both directions
    assert sizes["per-token-2bit"] == (pytest.approx(100 * (2 + 2 * 16 / 64) / 16, abs=0.01), 0)
    # All that is fetched from is in host memory: 28 of 30 layers
    assert sizes["infinigen"][1] == pytest.approx(100 * 28 / 30, abs=0.01) and sizes["infinigen"][0] < 30
    # Neither can be made, or without numbers
    assert sizes["absent"] == sizes["hqq-4bit"] == (None, None)
    assert {name: each["kl"] for name, each in caches.items() if each["kl"] is not None} == MEASURED_KL
    shown = {line.split()[0]: line.split()[1:] for line in lines if line.split()[0] in list_caches()}
    on_device = f"{sizes['infinigen'][0]:.1f}"
    assert shown["fp8"][:2] == ["50.0", f"{MEASURED_KL['fp8']:.4f}"]
    assert shown["infinigen"][:4] == [on_device, "+", "93", "0.0179"]
    assert shown["absent"][:2] == ["-", "-"]


def test_a_missing_backend_says_what_to_install(refuse, forgets: None) -> None:
    register_cache("absent", lambda model: Cache(layers=[]), summary="absent", requires="no-such-package")
    refuse(
        "needs `no-such-package`: `pip install 'no-such-package'`", "generate", "--prompt", "x", "--cache", "absent"
    )


def test_generate_streams_the_text_and_reports_on_stderr(tiny_folder: str, run, read) -> None:
    arguments = ["generate", "--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "12", "--cache"]
    dynamic = run(*arguments, "dynamic")
    assert len(dynamic.stdout.removesuffix("\n")) == 12
    reading, _, summary = dynamic.stderr.partition("\n")
    assert reading.endswith("s] reading 159 tokens")
    together = " ".join(summary.split())
    assert together.startswith("dynamic: ") and together.endswith(" ms")
    for said in ("200.0 % of a cache at 16 bits", "prompt of 159 tokens in", "s of processor time"):
        assert said in together
    gear = " ".join(run(*arguments, "gear:nbits=8,residual_length=32").stderr.split())
    # The share that is still exact, and the word for it
    assert " gear: " in gear and "residual" in gear and "are exact" in gear
    assert read(*arguments, "gear:nbits=8")["settings"]["options"] == {"nbits": 8}
    content = read(*arguments, "dynamic")
    assert content["text"] == dynamic.stdout.removesuffix("\n") and len(content["token_ids"]) == 12
    assert content["memory"]["total_bytes"] == content["memory"]["dense_bytes"] > 0
    assert content["settings"]["num_prompt_tokens"] == 159
    # Streamed all the same, beside the summary
    assert run(*arguments, "dynamic", "--json").stderr.partition("\n")[2].startswith(dynamic.stdout)


def test_reading_is_shown_layer_by_layer_and_ends_with_the_prompt(tiny_llama, monkeypatch) -> None:
    said = []

    @contextmanager
    def track(total: int) -> Iterator[Callable[[str], None]]:
        said.append(total)
        yield said.append
        said.append("end")

    monkeypatch.setattr(generate, "track_progress", track)
    num_layers = tiny_llama.config.num_hidden_layers
    with generate._show_reading(tiny_llama, 1234, 2):
        for _ in range(3):
            tiny_llama(torch.ones(1, 5, dtype=torch.long))
    assert said == [2 * num_layers, *["reading 1,234 tokens"] * 2 * num_layers, "end"]
    assert not any(module._forward_pre_hooks for module in tiny_llama.modules())


def test_the_prompt_follows_the_text_of_the_file(tiny_folder: str, tmp_path: Path, run) -> None:
    (tmp_path / "text.txt").write_text("Call me Ishmael.\n")
    options = ["generate", "--model", tiny_folder, "--cache", "dynamic", "--max-new-tokens", "8", "--prompt"]
    together = run(*options, "Call me Ishmael.\n\nIn short:")
    assert "prompt of 27 tokens" in " ".join(together.stderr.split())
    parted = run(*options, "In short:", "--prompt-file", str(tmp_path / "text.txt"))
    piped = run(*options, "In short:", "--prompt-file", "-", input="Call me Ishmael.\n")
    assert parted.stdout == piped.stdout == together.stdout


def test_sampling_repeats_with_the_seed(tiny_folder: str, run) -> None:
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--cache", "dynamic", "--temperature", "9"]
    texts = [run("generate", *options, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_that_is_too_short_is_refused(tiny_folder: str, run) -> None:
    options = ["--model", tiny_folder, "--prompt", "12 tokens", "--max-new-tokens", "3", "--cache"]
    for cache in ("gear-2bit", "h2o"):
        said = " ".join(run("generate", *options, cache).stderr.split())
        assert (
            f"reading 9 tokens {cache}: 12 tokens: too short to compress, held exact in " in said and "%" not in said
        )
    lines = run("compare", *options, "gear-2bit").stdout.splitlines()
    assert " exact " in next(line for line in lines if line.split()[:1] == ["gear-2bit"])


class BrokenLayer(DynamicLayer):
    """Fails as soon as it is asked for its length with something in it."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_initialized:
            raise RuntimeError("no [decode] here")
        return super().get_mask_sizes(query_length)


def test_compare_shows_a_row_for_every_cache(tiny_folder: str, run, read, forgets: None) -> None:
    register_cache("broken", lambda model: Cache(layer_class_to_replicate=BrokenLayer), summary="fails")
    options = ["compare", "--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--cache"]
    result = run(*options, "gear-2bit:rank=2", "--cache", "kivi-4bit", env={"COLUMNS": "90"})
    lines = result.stdout.splitlines()
    top = next(index for index, line in enumerate(lines) if "differs at" in line)
    assert all(heading in lines[top] for heading in HEADINGS)
    assert max(len(line.rstrip()) for line in lines[top : top + 5]) <= 90
    assert [line.split()[0] for line in lines[top + 2 : top + 5]] == ["dynamic", "gear-2bit:rank=2", "kivi-4bit"]
    assert (lines[top + 2].split()[1], lines[top + 3].split()[1].isdigit()) == ("never", True)
    parts = lines[next(index for index, line in enumerate(lines) if line.startswith("kB held")) + 2].split()
    assert {"dense", "codes", "scales", "low_rank", "outliers"} <= set(parts)
    assert [line for line in lines if line.endswith(":")] == ["dynamic:", "gear-2bit:rank=2:", "kivi-4bit:"]
    assert "\x1b" not in result.output and "gear-2bit:rank=2" in result.stderr

    assert "failed with RuntimeError: no [decode] here" in run(*options, "broken", code=1).stdout
    content = read(*options, "kivi-4bit", "--cache", "broken", schema="compare", code=1)
    dynamic, kivi, broken = content["rows"]
    assert (dynamic["cache"], kivi["cache"]) == ("dynamic", "kivi-4bit")
    assert dynamic["kl"] == 0 < kivi["kl"] and kivi["memory"]["compression_ratio"] > 1
    assert len(kivi["token_ids"]) == 6 and content["settings"]["num_prompt_tokens"] == 159
    assert (kivi["error"], broken["error"]) == (None, "RuntimeError: no [decode] here")


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config and nothing else."""
    path: Path = tmp_path_factory.mktemp("config-alone")
    tiny_model("llama").config.save_pretrained(path)
    return str(path)


SMALL = ["--context", "1000", "--device", "cuda", "--cache", "dynamic", "--cache", "gear-2bit", "--cache", "infinigen"]


def test_recommend_equals_predicted_memory(folder: str, run, read) -> None:
    options = ["recommend", "--model", folder, *SMALL, "--memory", "400kB", "--new-tokens", "2"]
    content = read(*options, "--host-memory", "1GiB", schema="recommend")
    for row in content["caches"]:
        report = predict_memory(folder, row["cache"], 1000, new_tokens=2)
        assert (row["total_bytes"], row["kv_percent"]) == (report.total_bytes, report.kv_percent)
        assert row["device_bytes"] == report.devices["cuda"]
        assert sum(row["parts"].values()) == row["total_bytes"]
    assert (content["host_memory_bytes"], content["recommended"]) == (2**30, "infinigen")
    # Every field is named where a user looks for it
    documented = run("recommend", "--help").stdout
    assert all(name in documented for name in [*content, *content["caches"][0]])


def test_recommend_marks_the_recommended_cache(folder: str, run, read) -> None:
    options = ["recommend", "--model", folder, *SMALL, "--memory"]
    result = run(*options, "400kB")
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}
    assert " no " in lines["dynamic"] and " take it " in lines["infinigen"] and " yes " in lines["gear-2bit"]
    # A narrow console has no room for "KV %"
    headings = ["cache", "KL", "fits", "on cuda", "in host", "max context", "max batch"]
    assert " ".join(lines["cache"].split()) == " ".join(headings)
    assert all(len(lines[name]) <= 80 for name in ("cache", "infinigen"))
    # The title is folded where the folder's name is long
    assert "in 400.00 kB" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "`infinigen` is nearest to the dense cache in measured KL of what fits" in result.stdout
    assert "made for" not in result.stdout and "infinigen" in result.stderr
    assert "No cache fits: the smallest, `" in run(*options, "1kB", code=1).stdout
    content = read(*options, "1kB", schema="recommend", code=1)
    assert content["recommended"] is None
    assert all(row["largest_batch_size"] == 0 for row in content["caches"])


def test_recommend_cuts_no_number_of_a_wide_table(folder: str, run) -> None:
    wide = ["--cache", "gear-k4v3:key_nbits=8,value_nbits=8", "--memory", "900TB"]
    shown = run("recommend", "--model", folder, *SMALL, *wide).stdout
    assert "…" not in shown and ">65,536" in shown


def test_recommend_shows_limits_in_units_of_the_budget(folder: str, run, monkeypatch, read) -> None:
    options = ["recommend", "--model", folder, "--cache"]
    said = run(*options, "h2o", "--memory", "64GiB", "--context", "9000", "--with-weights").stdout
    assert "The model was made for 8,192 tokens: fewer than were asked for." in said
    asked = [*options, "dynamic", "--memory", "64GiB", "--context", "900"]
    assert "Max context is what fits the memory: the model was made for 8,192 tokens." in run(*asked).stdout
    assert "beside weights of" in " ".join(said.split()) and ">16,777,216" in said
    options += ["dynamic", "--context", "1000", "--memory"]
    for memory, shown in {"100MB": "100.00 MB", "1.5 GB": "1.50 GB", "8GiB": "8.00 GiB"}.items():
        said = run(*options, memory).stdout
        assert f"in {shown}" in " ".join(said.split())
        assert ("KiB" in said or "MiB" in said) == ("i" in memory)
    for has_gpu, expected in ((False, ("cpu", "float32")), (True, ("cuda", "bfloat16"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        content = read(*options, "1GB")
        assert (content["device"], content["dtype"]) == expected


def test_calibrate_writes_a_file_that_infinigen_loads(tiny_folder: str, tmp_path: Path, fox: str, run, read) -> None:
    file = tmp_path / "new" / "calibration.safetensors"
    options = ["--cache", "infinigen", "--model", tiny_folder, "--text-file", fox, "--out", str(file)]
    options += ["--windows", "2", "--length", "300"]
    assert "oracle" in run("calibrate", *options, "--rank", "8", "--min-recall", "0.01").stdout
    compared = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4"]
    run("compare", *compared, "--cache", f"infinigen:calibration={file}")
    content = read("calibrate", *options, "--rank", "4")
    assert content["file"] == str(file) and file.is_file()
    # No layer comes before the first one to predict it
    assert [layer["layer_idx"] for layer in content["layers"]] == [1]
    assert all(0 < layer["oracle"] <= 1 for layer in content["layers"])


def test_calibrate_writes_a_file_that_presets_find(tiny_folder: str, tmp_path: Path, fox: str, run, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path / "home"))
    options = ["--model", tiny_folder, "--text-file", fox, "--text-file", fox]
    shown = run("calibrate", *options, "--windows", "1", "--length", "200").stdout
    (file,) = (tmp_path / "home" / "calibrations").iterdir()
    assert file.name in shown.replace("\n", "")
    for cache in ("calibrated-16", f"calibrated-12:calibration={file}"):
        compared = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4", "--cache", cache]
        assert "no calibration" not in run("compare", *compared).output


def test_calibrate_needs_no_text_for_gear(tiny_folder: str, tmp_path: Path, fox: str, read) -> None:
    files = [tmp_path / name for name in ("one.safetensors", "again.safetensors", "more.safetensors")]
    options = ["calibrate", "--cache", "transform", "--model", tiny_folder, "--windows", "2", "--length", "90"]
    for file, more in zip(files, ([], [], ["--text-file", fox]), strict=True):
        settings = read(*options, *more, "--out", str(file))["settings"]
        assert (settings["text_file"], settings["windows"], settings["length"]) == ("fox.txt" if more else None, 2, 90)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()


BOOK = "--model MODEL --text-file TEXT "
MEASURES = [
    f"eval fidelity {BOOK} --windows 1 --cache llamacpp-q8_0 --prefix 40 --scored 8",
    f"eval perplexity {BOOK} --windows 1 --cache llamacpp-q8_0 --length 40 --chunk 16",
    f"bench step {BOOK} --context 40 --steps 3 --cache dynamic --cache kivi-4bit",
]


@pytest.mark.parametrize("line", MEASURES, ids=lambda line: " ".join(line.split()[:2]))
def test_printed_json_equals_the_written_file(line: str, tiny_folder: str, fox: str, tmp_path: Path, run) -> None:
    out = tmp_path / "new" / "result.json"
    words = [word.replace("MODEL", tiny_folder).replace("TEXT", fox) for word in line.split()]
    result = run(*words, "--json", "--out", str(out))
    content = json.loads(result.stdout)
    assert content == json.loads(out.read_text(encoding="utf-8"))
    assert content["rows"] and "settings" in content
    # Messages to people still go to stderr
    assert result.stderr.strip()
    if "kivi-4bit" in words:
        assert [row["cache"] for row in content["rows"]] == ["dynamic", "kivi-4bit"]
        assert all(f"{name} " in result.stderr for name in ("dynamic", "kivi-4bit"))


def test_sweep_lists_its_runs(tiny_folder: str, fox: str, tmp_path: Path, read) -> None:
    measures = {"a": {"perplexity": {"text_file": "fox.txt", "length": 30}}}
    measures["b"] = {"perplexity": {"text_file": "fox.txt", "length": 10**6}}
    content = {"models": [tiny_folder], "caches": ["dynamic"], "out": "results", "measures": measures}
    (tmp_path / "sweep.yaml").write_text(json.dumps(content), encoding="utf-8")
    sweep = ["eval", "sweep", str(tmp_path / "sweep.yaml")]
    assert [each["error"] for each in read(*sweep, "--dry-run")["runs"]] == [None, None]
    done, failed = read(*sweep, code=1)["runs"]
    assert done["run"].startswith("a/") and Path(done["file"]).is_file() and done["error"] is None
    assert failed["run"].startswith("b/") and "tokens" in failed["error"]
