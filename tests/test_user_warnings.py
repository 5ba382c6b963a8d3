"""Warnings name the line of the code that uses a cache, through any calls of Transformers and of ours."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from kvcache_plugins import GEARCache, InfiniGenCache, create_cache, generate_with
from kvcache_plugins.kernels import engine, library


TOKENS = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(0))
OPTIONS = {"max_new_tokens": 3, "do_sample": False}


def require_line(text: str, call: Callable[[], object]) -> None:
    """Requires that a warning with this text names the call's line, and no other one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    own = [(each.filename, each.lineno) for each in caught if text in str(each.message)]
    assert own == [(__file__, call.__code__.co_firstlineno)], text


@pytest.fixture
def forget_kernels(monkeypatch, tmp_path) -> Iterator[Callable[[], None]]:
    """Make the compiled kernels seem to be missing."""

    def forget() -> None:
        library._library.cache_clear()
        engine._kernel_on.cache_clear()

    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "auto")
    yield forget
    forget()


def test_missing_kernels_warn_at_the_users_line(tiny_llama, forget_kernels) -> None:
    gear, infinigen = create_cache("gear-4bit", tiny_llama), InfiniGenCache(tiny_llama, full_layers=())
    for call in (
        lambda: tiny_llama.generate(TOKENS, past_key_values=gear, **OPTIONS),
        lambda: tiny_llama.generate(TOKENS, custom_generate=generate_with("transform"), **OPTIONS),
        lambda: tiny_llama.generate(TOKENS, past_key_values=infinigen, **OPTIONS),
    ):
        forget_kernels()
        require_line("run in plain PyTorch instead of `compiled`", call)


def test_other_warnings_name_the_users_line(tiny_llama, tiny_model) -> None:
    windowed, detached = tiny_model("mistral-sliding"), InfiniGenCache(tiny_llama, full_layers=(), speculate=True)
    detached.detach()
    tiny_llama.set_attn_implementation("eager")
    for text, call in {
        "no calibration": lambda: create_cache("calibrated-16", tiny_llama),
        "attend to a window": lambda: GEARCache(windowed.config, backbone="kivi"),
        "is used after `detach": lambda: tiny_llama.generate(TOKENS, past_key_values=detached, **OPTIONS),
    }.items():
        require_line(text, call)
