"""What `--json` prints: one document and nothing else, in the form that its schema says."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from typer.testing import CliRunner, Result

from kvcache_plugins import cli, list_caches, register_cache, registry
from kvcache_plugins.console.results import print_json


SCHEMAS = Path(__file__).parent / "schemas"
NAMES = [path.stem for path in sorted(SCHEMAS.glob("*.json"))]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def load_schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def check(name: str, result: Result) -> Any:
    content = json.loads(result.stdout)
    jsonschema.validate(content, load_schema(name), cls=jsonschema.Draft202012Validator)
    return content


def objects(schema: Any) -> list[dict[str, Any]]:
    """Every part of a schema that describes an object."""
    if isinstance(schema, list):
        return [each for item in schema for each in objects(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" else []
    return own + [each for item in schema.values() for each in objects(item)]


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_strict(name: str) -> None:
    schema = load_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    described = [each for each in objects(schema) if "properties" in each]
    assert described
    assert all(each["additionalProperties"] is False for each in described)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_refuse_what_is_not_in_them(name: str) -> None:
    validator = jsonschema.Draft202012Validator(load_schema(name))
    assert not validator.is_valid({})
    assert not validator.is_valid({**dict.fromkeys(load_schema(name)["properties"]), "more": 1})


def test_list() -> None:
    caches = {each["name"]: each for each in check("list", run("list", "--json"))["caches"]}
    assert list(caches) == list_caches()
    assert caches["gear-2bit"]["options"]["nbits"] == 2
    assert caches["offloaded"]["requires"] == "a CUDA device"
    assert [each["name"] for each in check("list", run("list", "kivi*", "--json"))["caches"]] == list_caches("kivi*")


class BrokenLayer(DynamicLayer):
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise RuntimeError("no")


def test_compare(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "_entries", dict(registry._REGISTRY._entries))
    register_cache("broken", lambda model: Cache(layer_class_to_replicate=BrokenLayer), summary="fails")
    caches = ["--cache", "llamacpp-q8_0", "--cache", "broken"]
    result = run("compare", "--model", tiny_folder, "--prompt", "x" * 90, "--max-new-tokens", "4", *caches, "--json")
    assert result.exit_code == 1
    rows = check("compare", result)["rows"]
    assert [(row["cache"], row["error"]) for row in rows] == [
        ("dynamic", None),
        ("llamacpp-q8_0", None),
        ("broken", "RuntimeError: no"),
    ]
    # The table is for people
    assert "differs at" not in result.output


@pytest.mark.parametrize(
    ("memory", "exit_code"), [("64GiB", 0), ("400kB", 0), ("1kB", 1)], ids=["all fit", "some fit", "none fits"]
)
def test_recommend(memory: str, exit_code: int, tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--memory", memory, "--context", "1000", "--device", "cpu", "--json"]
    result = run("recommend", *options, "--cache", "dynamic", "--cache", "gear-2bit", "--cache", "infinigen")
    assert result.exit_code == exit_code, result.output
    content = check("recommend", result)
    assert (content["recommended"] is None) == bool(exit_code)
    assert {each["cache"] for each in content["caches"]} == {"dynamic", "gear-2bit", "infinigen"}


def test_generate(tiny_folder: str) -> None:
    options = ["--model", tiny_folder, "--prompt", "x" * 90, "--max-new-tokens", "6", "--cache", "dynamic"]
    plain, result = run("generate", *options), run("generate", *options, "--json")
    content = json.loads(result.stdout)
    assert content["text"] == plain.stdout.removesuffix("\n")
    assert len(content["token_ids"]) == 6
    assert content["memory"]["total_bytes"] == content["memory"]["dense_bytes"] > 0
    assert content["settings"]["num_prompt_tokens"] == 90
    # Streamed all the same, beside the summary
    assert result.stderr.startswith(plain.stdout)


def test_calibrate(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 12, encoding="utf-8")
    options = ["--text-file", str(tmp_path / "text.txt"), "--windows", "2", "--length", "200", "--rank", "4"]
    file = tmp_path / "new" / "calibration.safetensors"
    result = run("calibrate", "--model", tiny_folder, *options, "--out", str(file), "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["file"] == str(file) and file.is_file()
    # The first layer has none before it to be told by
    assert [layer["layer_idx"] for layer in content["layers"]] == [1]
    assert all(0 < layer["oracle"] <= 1 for layer in content["layers"])


def measure(command: str, tiny_folder: str, text: Path) -> list[str]:
    model = ["--model", tiny_folder]
    book = [*model, "--text-file", str(text)]
    windows = ["--windows", "1", "--cache", "llamacpp-q8_0"]
    return {
        "eval fidelity": [*book, *windows, "--prefix", "40", "--scored", "8"],
        "eval perplexity": [*book, *windows, "--length", "40", "--chunk", "16"],
        "bench step": [*book, "--context", "40", "--steps", "3", "--cache", "dynamic"],
        "bench decode": [*book, "--prompt", "20", "--steps", "6", "--bin-length", "3", "--cache", "dynamic"],
        "bench prefix": [*book, "--prefix", "90", "--continuations", "3", "--new-tokens", "2"],
        "bench predict": ["--bandwidth", "100", "--shape", "1x128", "--cache", "kivi-2bit"],
        "bench runahead-simulation": ["--ranks", "2", "--length", "4096", "--bandwidth", "10"],
    }[command]


MEASURES = ["eval fidelity", "eval perplexity", "bench step", "bench decode", "bench prefix", "bench predict"]


@pytest.mark.parametrize("command", [*MEASURES, "bench runahead-simulation"])
def test_measures_print_what_they_write(command: str, tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4, encoding="utf-8")
    out = tmp_path / "new" / "result.json"
    arguments = measure(command, tiny_folder, tmp_path / "text.txt")
    result = run(*command.split(), *arguments, "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content == json.loads(out.read_text(encoding="utf-8"))
    assert content["rows"] and "settings" in content
    # What it says to people as it goes is not lost
    assert result.stderr.strip()


@pytest.fixture
def sweep_file(tiny_folder: str, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4, encoding="utf-8")
    measures = {"a": {"perplexity": {"text_file": "text.txt", "length": 30}}}
    measures["b"] = {"perplexity": {"text_file": "text.txt", "length": 10**6}}
    content = {"models": [tiny_folder], "caches": ["dynamic"], "out": "results", "measures": measures}
    (tmp_path / "sweep.yaml").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "sweep.yaml"


def test_sweep_lists_what_was_run(sweep_file: Path) -> None:
    planned = json.loads(run("eval", "sweep", str(sweep_file), "--dry-run", "--json").stdout)
    assert [each["error"] for each in planned["runs"]] == [None, None]
    result = run("eval", "sweep", str(sweep_file), "--json")
    assert result.exit_code == 1
    done, failed = json.loads(result.stdout)["runs"]
    assert done["run"].startswith("a/") and Path(done["file"]).is_file() and done["error"] is None
    assert failed["run"].startswith("b/") and "tokens" in failed["error"]


@pytest.mark.parametrize(
    ("value", "printed"), [(float("inf"), None), (float("nan"), None), (1.5, 1.5), ([(1, float("nan"))], [[1, None]])]
)
def test_what_json_does_not_know_is_null(value: object, printed: object, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"value": value})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"value": printed}
