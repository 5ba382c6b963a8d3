"""Fixtures shared by all tests: tiny random models, the two reference models, and the shared evaluation data.

No test touches the network: the offline switches are set before anything of Hugging Face is imported.
"""

import json
import os
import signal
import subprocess
import sys
import time


# A shell lets background processes ignore Ctrl-C, and the commands that tests start and interrupt would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A worker of pytest has one, of the terminal that started it or of none: tests say theirs themselves
os.environ.pop("COLUMNS", None)
# On tiny models threads wait for each other more than they work, and on a busy machine for minutes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU kernels run in Triton's interpreter, which Triton chooses when it is imported
if not os.path.exists("/proc/driver/nvidia"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)


SEED = 42
PROJECT_ROOT = Path(__file__).resolve().parents[1]
# Schemas of the JSON that commands print
SCHEMAS = PROJECT_ROOT / "tests" / "console" / "schemas"
# Folders of modules that several tests import by name, also in programs that tests start
HELPERS = ("contract", "fuzz", "gear", "infinigen", "kernels", "kv_runahead", "triton_kernels")
sys.path[:0] = [str(PROJECT_ROOT / "tests" / folder) for folder in HELPERS]

# A standard deviation of 0.1 (Transformers' own is 0.02) makes attention peaked and logits far apart, so that a wrong
# key or value changes what a random model says.
COMMON = {"vocab_size": 128, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ROTARY = {
    **COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
HYBRID_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", ROTARY),
    "llama-mha": ("llama", {**ROTARY, "num_key_value_heads": 4}),
    "llama-mqa": ("llama", {**ROTARY, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", ROTARY),
    "mistral-sliding": ("mistral", {**ROTARY, "sliding_window": 32}),
    "gemma3-hybrid": (
        "gemma3_text",
        {**ROTARY, "num_hidden_layers": 4, "layer_types": HYBRID_LAYERS, "sliding_window": 32},
    ),
    "gpt2": ("gpt2", {**COMMON, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 2048}),
    "opt": (
        "opt",
        {
            **{**COMMON, "init_std": 0.1, "hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048},
        },
    ),
}


def covering(cases: Sequence[Sequence[str]]) -> set[int]:
    """Chooses as few cases, by number, as hold each value of each parameter, with none more often than needed."""
    held = [set(enumerate(case)) for case in cases]
    missing, chosen, uses = set().union(*held), set(), Counter()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda number: (len(held[number] & missing), -sum(uses[value] for value in held[number])),
        )
        chosen.add(best)
        uses.update(held[best])
        missing -= held[best]
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `long` the cases that `each_value` leaves out."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("each_value") and not item.get_closest_marker("long"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = covering([case.callspec._idlist for case in cases])
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("long")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    set_seed(SEED)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """A factory of random models in eval mode: `tiny_model("gemma3-hybrid", sliding_window=16)`.

    The architectures are the keys of `ARCHITECTURES`; keywords override fields of the config, and
    `attn_implementation` chooses the attention. The weights depend on the arguments alone.
    """

    def build(
        architecture: str = "llama", *, attn_implementation: str = "sdpa", seed: int = SEED, **config_fields: object
    ) -> PreTrainedModel:
        model_type, fields = ARCHITECTURES[architecture]
        config = CONFIG_MAPPING[model_type](**{**fields, **config_fields})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()

    return build


@pytest.fixture(scope="session")
def random_windows() -> Callable[[int, int], list[torch.Tensor]]:
    """A factory of windows of random token ids from 3 to 96, always the same: `random_windows(3, 300)`."""

    def make(count: int, length: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(3, 97, (length,), generator=generator) for _ in range(count)]

    return make


@pytest.fixture
def tiny_llama(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A random Llama of 2 layers, 4 query and 2 key/value heads of 32, vocabulary of 128, in eval mode."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def saved_with_tokenizer(
    tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """A factory of folders with a tiny model and a tokenizer of one ASCII character a token; code 0 ends a text."""

    def save(architecture: str, **fields: object) -> str:
        folder: Path = tmp_path_factory.mktemp(architecture)
        end = chr(0)
        characters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        characters.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=end, pad_token=end).save_pretrained(folder)
        tiny_model(architecture, **fields).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def tiny_folder(saved_with_tokenizer: Callable[..., str]) -> str:
    """A folder with the tiny random Llama and a tokenizer of one ASCII character a token."""
    return saved_with_tokenizer("llama")


@pytest.fixture(scope="session")
def tiny_loaded(tiny_folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of `tiny_folder`; shared by the session, so leave the model as it was."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder).eval(), AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads of PyTorch in turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the registry forget what a test registers."""
    from kvcache_plugins import registry

    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


@pytest.fixture(scope="session")
def load_file() -> Callable[[Path], ModuleType]:
    """Loads a file of Python that is no part of a package: `load_file(ROOT / "docs" / "figures" / "draw.py")`."""

    def load(path: Path) -> ModuleType:
        spec = spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before is known, nor after."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def divergence() -> Callable[..., float]:
    """
    `divergence(model, cache, token_ids, together, num_prompt)`: mean KL(dense || cache) behind a prompt, which is half
    of the tokens unless there is a number, so many tokens at a time.
    """

    @torch.no_grad()
    def measure(
        model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, together: int = 1 << 20, num_prompt: int = 0
    ) -> float:
        logarithms = []
        token_ids = token_ids.view(1, -1)
        prompt, rest = token_ids.tensor_split([num_prompt or token_ids.numel() // 2], dim=1)
        for each in (DynamicCache(config=model.config), cache):
            model(prompt, past_key_values=each, logits_to_keep=1)
            logits = [model(ids, past_key_values=each).logits[0] for ids in rest.split(together, dim=1)]
            logarithms.append(torch.cat(logits).double().log_softmax(dim=-1))
        dense, own = logarithms
        return float((dense.exp() * (dense - own)).sum(dim=-1).mean())

    return measure


@pytest.fixture(scope="session")
def contract_models() -> dict[str, PreTrainedModel]:
    """The contract's tiny models, `"llama"` and `"hybrid"`; leave them as they were."""
    from kvcache_plugins.contract import tiny_models

    return tiny_models()


@pytest.fixture(scope="session")
def contract_model(contract_models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    """The contract's tiny Llama."""
    return contract_models["llama"]


def load_reference_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reference model; without its package the test fails in CI and is skipped elsewhere."""
    from kvcache_plugins.models.reference_model import load_model, reference_models

    if not reference_models()[name]:
        reason = f"the package that carries `{name}` is not installed: run `make test`"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return load_model(name, dtype=torch.float32)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs a command line, given as words, and checks what it exits with."""

    def call(*words: str, code: int | None = 0, **options: Any) -> Any:
        from typer.testing import CliRunner

        from kvcache_plugins import cli

        result = CliRunner().invoke(cli.app, list(words), **options)
        assert code is None or result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def read(run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a command line with `--json` and reads standard output, which holds one document and nothing else."""

    def call(*words: str, schema: str | None = None, **options: Any) -> Any:
        content = json.loads(run(*words, "--json", **options).stdout)
        if schema is not None:
            import jsonschema

            described = json.loads((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8"))
            jsonschema.validate(content, described, cls=jsonschema.Draft202012Validator)
        return content

    return call


@pytest.fixture
def refuse(run: Callable[..., Any]) -> Callable[..., None]:
    """Runs a command line whose error is the user's: one line on standard error, with `message` in it."""

    def call(message: str, *words: str) -> None:
        result = run(*words, code=2)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("Error: ") and message in last
        assert result.stdout == "" and "Traceback" not in result.stderr

    return call


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Any]:
    """Runs Python with words, and variables of the environment, `None` for one that is gone; it has to end well."""

    def call(*words: object, cwd: Any = None, timeout: float | None = None, **variables: object) -> Any:
        environment = {name: str(value) for name, value in {**os.environ, **variables}.items() if value is not None}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done

    return call


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds, however busy the machine is; what takes ten minutes hangs."""

    def wait(condition: Callable[[], bool]) -> None:
        for _ in range(12_000):
            if condition():
                return
            time.sleep(0.05)
        pytest.fail("the condition has not come to hold in ten minutes")

    return wait


@pytest.fixture
def run_compiling(request: pytest.FixtureRequest, run_python: Callable[..., Any]) -> Callable[..., str]:
    """
    Runs a program where Triton does not interpret, which it decides when it is imported, and returns what it prints;
    of the words for Python the test's own file is the first unless there are others.
    """
    # Drivers are stood in for on machines with a GPU too
    variables = {"TRITON_INTERPRET": None, "PYTHONSAFEPATH": None, "CUDA_VISIBLE_DEVICES": ""}
    return lambda *words, program=(request.path,): run_python(*program, *words, **variables).stdout


class ByteLocks(ModuleType):
    """Windows' `msvcrt`, as far as it locks: a byte is its file's until that is closed."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.holders: dict[tuple[int, int], int] = {}

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        file = os.fstat(descriptor).st_ino
        place = file, os.lseek(descriptor, 0, os.SEEK_CUR)
        holder = self.holders.get(place, descriptor)
        if holder != descriptor and _is_open_at(holder, file):
            raise PermissionError(13, "Permission denied")
        self.holders[place] = descriptor


def _is_open_at(descriptor: int, file: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == file
    except OSError:
        return False


@pytest.fixture
def byte_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are locked as on Windows, see `files/locks.py`."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", ByteLocks())


@pytest.fixture(scope="session", autouse=True)
def quanto_without_compiling() -> None:
    """quanto compiles C++ for a minute and a half before it first unpacks bits; this unpacks them alike."""

    class Library:
        @staticmethod
        def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
            return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    if find_spec("optimum") is not None and find_spec("optimum.quanto") is not None:
        from optimum.quanto.library.extensions.cpp import ext

        ext._lib = Library


@pytest.fixture(scope="session")
def released_configs() -> dict[str, PreTrainedConfig]:
    """The default config of every type that Transformers has, but for two whose defaults do not fit together."""
    names = [name for name in CONFIG_MAPPING if name not in ("gemma4_assistant", "nougat")]
    return {name: CONFIG_MAPPING[name]() for name in names}


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer; shared by the session, so leave the model as it was."""
    return load_reference_model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M in float32 and its tokenizer, for `long` tests; shared by the session: leave it as it was."""
    return load_reference_model("gemma3-270m")


@pytest.fixture(scope="session")
def licence_ids(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> torch.Tensor:
    """Tokens `[1, 2000 and more]` of the licence's text for SmolLM2."""
    text = (PROJECT_ROOT / "LICENSE").read_text(encoding="utf-8")
    return smollm2[1](text, return_tensors="pt").input_ids


@pytest.fixture(scope="session")
def licence_batch(licence_ids: torch.Tensor, smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]):
    """`licence_batch(678, 73)`: passages of such lengths for SmolLM2, left-padded, and their mask."""

    def make(*lengths: int) -> dict[str, torch.Tensor]:
        input_ids = torch.full((len(lengths), max(lengths)), smollm2[1].eos_token_id)
        mask = torch.zeros_like(input_ids)
        for item, length in enumerate(lengths):
            input_ids[item, -length:] = licence_ids[0, 300 * item : 300 * item + length]
            mask[item, -length:] = 1
        return {"input_ids": input_ids, "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of evaluation sets beside the project's root."""
    folder = PROJECT_ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the evaluation sets are not there: {folder} is no folder")
    return folder
