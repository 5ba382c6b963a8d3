"""The console script: what it prints where, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from typer.testing import CliRunner, Result

from kvcache_plugins import cli, list_caches, register_cache, registry
from kvcache_plugins.console.results import prepare_file
from kvcache_plugins.eval.measures import generation
from kvcache_plugins.models import reference_model


Reference = tuple[PreTrainedModel, PreTrainedTokenizerBase]
PROMPT = "It was the best of times, it was the worst of times. " * 3
HEADINGS = ["cache", "differs at", "KL", "top-1", "MB", "KV %", "ratio", "prefill s", "ms/token"]


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), **options)


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


BENCHMARKS = [
    "kernels",
    "step",
    "shapes",
    "llama-cpp",
    "decode",
    "memory",
    "prefix",
    "prompts",
    "store",
    "pool",
    "compile",
    "infinigen",
    "predict",
    "machine-code",
    "gpu",
]
BENCHMARKS += ["runahead", "runahead-simulation", "lm-eval"]


def test_benchmarks_are_listed() -> None:
    lines = [line.split()[0] for line in run("bench", "--help").stdout.splitlines() if line.startswith("  ")]
    assert lines[lines.index("kernels") :] == BENCHMARKS


def test_version() -> None:
    assert run("--version").stdout.startswith("kvcache-plugins 0.")


def test_list_shows_every_cache_and_what_it_needs() -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in list_caches()] == list_caches()
    assert max(map(len, lines)) <= 80
    assert "(a CUDA device: " in " ".join(" ".join(lines).split())


def test_list_takes_a_pattern() -> None:
    result = run("list", "quanto*")
    assert "quanto-4bit" in result.stdout
    assert "gear" not in result.stdout
    assert_one_line_error(run("list", "no-such*"), "No cache matches `no-such*`. Known caches: dynamic")


def test_generate_streams_the_text_and_reports_on_stderr(tiny_folder: str) -> None:
    arguments = ["generate", "--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "12"]
    dynamic = run(*arguments, "--cache", "dynamic")
    gear = run(*arguments, "--cache", "gear", "--cache-option", "nbits=8", "--cache-option", "residual_length=32")
    assert dynamic.exit_code == gear.exit_code == 0, gear.output
    assert len(dynamic.stdout.removesuffix("\n")) == 12
    assert PROMPT not in dynamic.stdout
    assert dynamic.stderr.startswith("dynamic: ")
    assert "200.0 % of a cache at 16 bits: dense 200.0 %; " in dynamic.stderr
    assert "prompt of 159 tokens in" in dynamic.stderr and "s of processor time" in dynamic.stderr
    assert dynamic.stderr.rstrip().endswith(" ms")
    assert gear.stderr.startswith("gear: ")
    # The share that is still exact, and the word for it
    assert "residual" in gear.stderr and "are exact" in gear.stderr


def test_the_prompt_follows_the_text_of_the_file(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Call me Ishmael.\n")
    options = ["--model", tiny_folder, "--cache", "dynamic", "--max-new-tokens", "8"]
    together = run("generate", *options, "--prompt", "Call me Ishmael.\n\nIn short:")
    assert "prompt of 27 tokens" in together.stderr
    parted = run("generate", *options, "--prompt-file", str(tmp_path / "text.txt"), "--prompt", "In short:")
    piped = run("generate", *options, "--prompt-file", "-", "--prompt", "In short:", input="Call me Ishmael.\n")
    assert parted.exit_code == piped.exit_code == 0
    assert parted.stdout == piped.stdout == together.stdout


def test_sampling_repeats_with_the_seed(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--cache", "dynamic", "--temperature", "9"]
    texts = [run("generate", *options, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_compare_shows_every_column_in_a_pipe(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "6"]
    result = run("compare", *options, "--cache", "gear-2bit:rank=2", "--cache", "kivi-4bit", env={"COLUMNS": "90"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    top = next(index for index, line in enumerate(lines) if "differs at" in line)
    assert all(heading in lines[top] for heading in HEADINGS)
    assert max(len(line.rstrip()) for line in lines[top : top + 5]) <= 90
    assert [line.split()[0] for line in lines[top + 2 : top + 5]] == ["dynamic", "gear-2bit:rank=2", "kivi-4bit"]
    parts = lines[next(index for index, line in enumerate(lines) if line.startswith("kB held")) + 2].split()
    assert {"dense", "codes", "scales", "low_rank", "outliers"} <= set(parts)
    assert [line for line in lines if line.endswith(":")] == ["dynamic:", "gear-2bit:rank=2:", "kivi-4bit:"]
    assert "\x1b" not in result.output
    assert "gear-2bit:rank=2" in result.stderr


def test_compare_prints_nothing_but_json_when_asked(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--json"]
    result = run("compare", *options, "--cache", "kivi-4bit", "--cache", "dynamic")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert [row["cache"] for row in content["rows"]] == ["dynamic", "kivi-4bit"]
    assert content["rows"][0]["kl"] == 0 < content["rows"][1]["kl"]
    assert content["rows"][1]["memory"]["parts"]["codes"] > 0
    assert content["rows"][1]["memory"]["compression_ratio"] > 1
    assert len(content["rows"][1]["token_ids"]) == 6
    assert content["settings"]["num_prompt_tokens"] == 159
    assert {"commit", "date", "device", "versions"} <= set(content)


class BrokenLayer(DynamicLayer):
    """Fails as soon as it is asked for its length with something in it."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_initialized:
            raise RuntimeError("no [decode] here")
        return super().get_mask_sizes(query_length)


def test_compare_shows_a_failed_cache_and_exits_with_1(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "_entries", dict(registry._REGISTRY._entries))
    register_cache("broken", lambda model: Cache(layer_class_to_replicate=BrokenLayer), summary="fails")
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4", "--cache", "broken"]
    result = run("compare", *options)
    assert result.exit_code == 1
    assert "failed with RuntimeError: no [decode] here" in result.stdout
    assert (
        json.loads(run("compare", *options, "--json").stdout)["rows"][1]["error"] == "RuntimeError: no [decode] here"
    )


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "gaer", "--prompt", "x"], "Unknown cache `gaer`. Did you mean `gear`?"),
        (["--prompt-file", "no-such-file"], "No such file or directory: 'no-such-file'"),
        ([], "Give a prompt with `--prompt`, `--prompt-file` or both"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--prompt", "x", "--dtype", "int4"], "`dtype` must be one of `float32`, `bfloat16`, `float16`"),
        (["--prompt", "x", "--device", "gpu"], "`device` must be one that torch knows"),
        (["--prompt", "x", "--chat"], "`chat` needs a tokenizer with a chat template"),
    ],
)
def test_errors_of_the_user_are_one_line(command: str, arguments: list[str], message: str, tiny_folder: str) -> None:
    assert_one_line_error(run(command, "--model", tiny_folder, *arguments), message)


def test_errors_of_options_name_the_accepted_ones(tiny_folder: str) -> None:
    options = ["generate", "--model", tiny_folder, "--prompt", "x"]
    assert_one_line_error(run(*options, "--cache-option", "rnk=2"), "Unknown option `rnk` for the cache `gear`")
    assert_one_line_error(run(*options, "--cache-option", "rank"), "`key=value`")
    assert_one_line_error(run(*options, "--cache-option", "nbits=5"), "`nbits`")
    assert_one_line_error(run(*options, "--temperature", "-1"), "`temperature` must be above 0")


def test_bench_writes_what_it_prints(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(PROMPT)
    options = ["--model", tiny_folder, "--text-file", str(tmp_path / "text.txt"), "--context", "100", "--steps", "4"]
    options += ["--dtype", "bfloat16", "--cache", "dynamic", "--cache", "kivi-4bit"]
    result = run("bench", "step", *options, "--out", str(tmp_path / "s"))
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "s").read_text())
    assert content["benchmark"] == "step" and content["settings"]["dtype"] == "bfloat16"
    assert [row["cache"] for row in content["rows"]] == ["dynamic", "kivi-4bit"]
    assert all(row["cache"] in line for row, line in zip(content["rows"], result.stdout.splitlines(), strict=True))
    assert content["rows"][1]["stats"]["attend_calls"] == 2 * 4


def test_errors_of_bench_are_one_line(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(PROMPT)
    options = ["--model", tiny_folder, "--text-file", str(tmp_path / "text.txt"), "--cache", "dynamic"]
    assert_one_line_error(run("bench", "step", *options), "the text has 159 tokens, but 4136 are needed")
    assert_one_line_error(run("bench", "decode", *options), "the text has 159 tokens, but 5256 are needed")
    assert_one_line_error(run("bench", "kernels", "--dtype", "int4"), "`dtype` must be one of `float32`")
    assert_one_line_error(run("bench", "kernels", "--device", "gpu"), "`device` must be one that torch knows")
    assert_one_line_error(run("bench", "predict", "--bandwidth", "1", "--shape", "16"), "`shape` has the form")


def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub() -> None:
    result = run("generate", "--model", "/no/such/folder", "--prompt", "x")
    assert_one_line_error(result, "`model` is `/no/such/folder`, but there is no such folder")


def test_a_missing_backend_says_what_to_install(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "_entries", dict(registry._REGISTRY._entries))
    register_cache("absent", lambda model: Cache(layers=[]), summary="absent", requires="no-such-package")
    result = run("generate", "--model", tiny_folder, "--prompt", "x", "--cache", "absent")
    assert_one_line_error(result, "`absent` needs `no-such-package`: `pip install 'no-such-package'`")
    assert "no-such-package: missing" in run("list", "absent").stdout


def test_ctrl_c_exits_with_130(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate_with", interrupted)
    result = run("generate", "--model", tiny_folder, "--prompt", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


@pytest.mark.long
def test_console_script_on_a_real_model(smollm2: Reference) -> None:
    script = Path(sys.executable).parent / "kvcache-plugins"
    arguments = ["compare", "--prompt", "The capital of France is", "--max-new-tokens", "4", "--cache", "kivi-4bit"]
    finished = subprocess.run([script, *arguments], capture_output=True, text=True, check=True, timeout=300)
    assert all(heading in finished.stdout for heading in HEADINGS)
    dynamic = finished.stdout.split("dynamic:\n")[1]
    assert "Paris" in dynamic
    assert "\x1b" not in finished.stdout + finished.stderr


def test_one_spelling_of_options_everywhere(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4", "--json"]
    spec = run("generate", *options, "--cache", "gear-2bit:rank=8,residual_length=32")
    both = run("generate", *options, "--cache", "gear-2bit:rank=8", "--cache-option", "residual_length=32")
    parted = [json.loads(each.stdout) for each in (spec, both)]
    assert parted[0]["settings"]["options"] == {"rank": 8, "residual_length": 32}
    assert parted[0]["settings"] == parted[1]["settings"] and parted[0]["memory"] == parted[1]["memory"]
    twice = run("generate", *options, "--cache", "gear-2bit:rank=8", "--cache-option", "rank=4")
    assert_one_line_error(twice, "`rank` is given twice for the cache `gear-2bit`: 8 and 4")


def test_a_text_that_is_too_short_is_said_to_be(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", "12 tokens", "--max-new-tokens", "3"]
    for cache in ("gear-2bit", "h2o"):
        said = run("generate", *options, "--cache", cache).stderr
        assert said.startswith(f"{cache}: 12 tokens: too short to compress, held exact in ")
        assert "%" not in said
    assert "200.0 % of a cache at 16 bits" in run("generate", *options, "--cache", "dynamic").stderr
    lines = run("compare", *options, "--cache", "gear-2bit").stdout.splitlines()
    assert " exact " in next(line for line in lines if line.split()[:1] == ["gear-2bit"])


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what modules of commands import by name: one that is first imported here would keep it
    monkeypatch.setattr(reference_model, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


COMMANDS = {
    "generate": ["--prompt", "x"],
    "compare": ["--prompt", "x"],
    "bench step": ["--text-file", "LICENSE"],
    "bench decode": ["--text-file", "LICENSE"],
    "bench compile": ["--text-file", "LICENSE"],
    "bench infinigen": ["--text-file", "LICENSE"],
    "bench prefix": ["--text-file", "LICENSE"],
    "eval fidelity": ["--text-file", "LICENSE"],
    "eval perplexity": ["--text-file", "LICENSE"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("cache", ["gaer", "gear:rnk=1", "gear:nbits=5", "gear:"])
def test_caches_are_checked_before_a_model_is_loaded(command: str, cache: str, no_model_is_loaded: None) -> None:
    result = run(*command.split(), *COMMANDS[command], "--cache", cache)
    assert_one_line_error(result, cache.partition(":")[0])


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("generate", "compare")])
def test_texts_are_read_before_a_model_is_loaded(command: str, no_model_is_loaded: None, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    arguments = [*command.split(), "--cache", "gear", "--text-file"]
    assert_one_line_error(run(*arguments, str(tmp_path / "binary")), "binary is no text in UTF-8 (byte 0:")
    assert_one_line_error(run(*arguments, str(tmp_path / "nothing")), "nothing")
    (tmp_path / "empty").write_text("\n")
    assert_one_line_error(run(*arguments, str(tmp_path / "empty")), "there is no text in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["generate", "--prompt", "x", "--temperature", "0"], "`temperature` must be above 0"),
        (["generate", "--prompt", ""], "The prompt is empty"),
        (["bench", "step", "--context", "-1", "--cache", "gear", "--text-file", "LICENSE"], "'--context'"),
        (["bench", "kernels", "--context", "0"], "'--context'"),
        (["bench", "kernels", "--cache", "gear:"], "has the form `name`"),
        (["eval", "fidelity", "--windows", "0", "--cache", "gear", "--text-file", "LICENSE"], "'--windows'"),
        (["calibrate", "--text-file", "LICENSE", "--out", "/proc/a"], "/proc/a"),
        (["plan", "--world-size", "1", "--lengths", "64", "--out", "/proc/a"], "/proc/a"),
        (["bench", "predict", "--bandwidth", "1", "--out", "/proc/a.json"], "/proc/a.json"),
        (["generate", "--prompt", "x", "--model", "smollm"], "did you mean `smollm2`?"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_is_done(arguments: list[str], message: str) -> None:
    assert_one_line_error(run(*arguments), message)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    result = run("generate", "--prompt", "x", "--model", str(tmp_path))
    assert_one_line_error(result, f"`model` is the folder `{tmp_path}`, but there is no `config.json` in it")


def test_a_binary_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n")
    result = run("generate", "--prompt-file", str(tmp_path / "photo.png"))
    assert_one_line_error(result, "photo.png is no text in UTF-8")


def test_the_list_begins_with_its_head() -> None:
    first, *_ = run("list").stdout.splitlines()
    assert first.split()[0] == "cache"


def test_a_file_that_was_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    prepare_file(tmp_path / "old.json")
    prepare_file(tmp_path / "new" / "new.json")
    assert (tmp_path / "old.json").read_text() == "{}"
    assert list((tmp_path / "new").iterdir()) == []
