"""Systems that lack parts of POSIX, as Windows does, and users without a home folder, as in many containers."""

import pwd
from pathlib import Path

import pytest
import torch

from kvcache_plugins import PromptStore, create_cache
from kvcache_plugins.advice.doctor import examine
from kvcache_plugins.models.reference_model import load_model
from kvcache_plugins.transform_coding.calibration import calibration_path


# PyTorch and Transformers are imported first, as those of Windows do without
WITHOUT_POSIX = """
import mmap, os, sys, warnings
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()
for name in ("fcntl", "grp", "pwd", "resource"):
    sys.modules[name] = None
for name in ("O_CLOEXEC", "fork", "posix_fallocate", "sched_getaffinity"):
    delattr(os, name)
for name in [each for each in dir(mmap) if each.startswith("MADV")]:
    delattr(mmap, name)

import kvcache_plugins

for name in kvcache_plugins.__all__:
    getattr(kvcache_plugins, name)
ids = torch.arange(3, 103)[None]
warnings.simplefilter("ignore")
for name in kvcache_plugins.list_caches():
    # With packages of others, or a GPU
    if not name.startswith(("hqq", "quanto", "offloaded")):
        cache = kvcache_plugins.create_cache(name, model)
        made = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        print(name, made.shape[1])
"""


def test_every_cache_generates_where_posix_is_missing(run_python) -> None:
    lines = run_python("-c", WITHOUT_POSIX).stdout.splitlines()
    assert len(lines) > 30
    assert {line.split()[1] for line in lines} == {"104"}


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, whom the system does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "KVCACHE_PLUGINS_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    "name", ["transform", "gear-4bit", "calibrated-16", "infinigen", "infinigen-transform", "h2o"]
)
@pytest.mark.filterwarnings("ignore:this model has no calibration")
def test_a_cache_generates_without_a_home(name: str, no_home: None, tiny_llama) -> None:
    ids = torch.randint(3, 128, (1, 100))
    cache = create_cache(name, tiny_llama)
    made = tiny_llama.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 104)


def test_a_packaged_calibration_is_found_without_a_home(smollm2, no_home: None) -> None:
    assert create_cache("calibrated-16", smollm2[0]).calibration is not None


def test_a_missing_home_names_the_variable_to_set(no_home: None, tiny_llama, tmp_path: Path) -> None:
    calls = [PromptStore, lambda: calibration_path(tiny_llama), lambda: load_model("smollm2")]
    for call in calls:
        with pytest.raises(ValueError, match="`KVCACHE_PLUGINS_HOME` has to name a folder"):
            call()
    with pytest.raises(ValueError, match="`folder` has to be named in full"):
        PromptStore("~/prompts")
    assert PromptStore(tmp_path).read(tiny_llama, torch.randint(3, 128, (1, 300))).get_seq_length() == 300
    assert not any(each.is_converted for each in examine(check=False).models)
