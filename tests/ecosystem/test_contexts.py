"""Every cache by its name: under `torch.autocast`, whose keys and values differ in dtype, in and out of
`torch.inference_mode`, its file, and the names of its counters.
"""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import list_caches
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.layers.static_group_layer import StaticGroupLayer
from kvcache_plugins.layers.static_row_layer import StaticRowLayer


Context = Callable[[], AbstractContextManager[object]]
Maker = Callable[[str, PreTrainedModel], Cache]
# One of each kind; all names are tried in `make test-long`
KINDS = (
    "transform",
    "gear-4bit",
    "infinigen",
    "infinigen-transform",
    "h2o",
    "llamacpp-q4_0",
)
# Transformers' own, which may not be used so
OTHERS = ("dynamic", "offloaded", "fp8", "quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit")
NAMES = [
    *KINDS,
    *(pytest.param(name, marks=pytest.mark.long) for name in list_caches() if name not in (*KINDS, *OTHERS)),
]
PROMPT, STEPS = 150, 25


def run(model: PreTrainedModel, cache: Cache, contexts: list[Context]) -> torch.Tensor:
    """Logits of a prompt of two rows, and of single tokens, as many in each further context."""
    tokens = torch.randint(1, 128, (2, PROMPT + STEPS * len(contexts)), generator=torch.Generator().manual_seed(0))
    logits, at = [], 0
    for number, context in enumerate(contexts):
        lengths = [1] * STEPS if number else [PROMPT]
        with context():
            for length in lengths:
                logits.append(model(tokens[:, at : at + length], past_key_values=cache).logits[:, -1].float())
                at += length
    return torch.stack([each.detach().clone() for each in logits])


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits - expected).square().mean() / expected.var()).sqrt().item()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_logits_no_more_than_dense(
    tiny_llama: PreTrainedModel, name: str, dtype: torch.dtype, make_any: Maker
) -> None:
    model = tiny_llama
    autocast = partial(torch.autocast, "cpu", dtype)
    contexts = [autocast, autocast, torch.no_grad, autocast]
    with torch.no_grad():
        dense, plain = (
            run(model, DynamicCache(config=model.config), each) for each in (contexts, [torch.no_grad] * 4)
        )
        own, own_plain = (run(model, make_any(name, model), each) for each in (contexts, [torch.no_grad] * 4))
    assert own.isfinite().all()
    # A choice of tokens, or a code, may be another one where numbers are rounded
    assert error(own, dense) < 1.3 * error(own_plain, plain) + 3 * error(dense, plain) + 0.01


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_changes_no_logits(tiny_llama: PreTrainedModel, name: str, make_any: Maker) -> None:
    model = tiny_llama
    inside, outside = torch.inference_mode, torch.no_grad
    expected = run(model, make_any(name, model), [outside] * 4)
    for contexts in ([inside, outside, nullcontext, inside], [outside, inside, outside, inside]):
        cache = make_any(name, model)
        logits = run(model, cache, contexts)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        with outside():
            cache.reorder_cache(torch.tensor([1, 0]))
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)


# One of each kind; all names are tried in `make test-long`
FILED_KINDS = (
    "dynamic",
    "transform",
    "gear-4bit",
    "calibrated-16",
    "infinigen",
    "infinigen-transform",
    "h2o",
    "turboquant-4bit",
)
FILED_NAMES = [
    *FILED_KINDS,
    *(pytest.param(name, marks=pytest.mark.long) for name in list_caches() if name not in FILED_KINDS),
]


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randint(3, 97, (2, size), generator=generator) for size in sizes)
    return torch.cat([model(part, past_key_values=cache).logits[:, -1] for part in parts])


def through_pickle(cache: Cache) -> Cache:
    return pickle.loads(pickle.dumps(cache))


def through_torch(cache: Cache) -> Cache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("name", FILED_NAMES)
def test_layers_have_few_base_classes_of_ours(name: str, family: str, make_any) -> None:
    """Static and hybrid layers have five: layers of rows and of chunks share what these add."""
    for kind in (StaticGroupLayer, StaticRowLayer, *map(type, make_any(name, build_family(family)).layers)):
        ours = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("kvcache_plugins")]
        assert len(ours) <= 4 + bool({"StaticLayer", "HybridLayer"} & {*ours}), ours


@pytest.mark.each_value
@pytest.mark.parametrize("is_filled", [True, False], ids=["filled", "empty"])
@pytest.mark.parametrize("through", [through_pickle, through_torch])
@pytest.mark.parametrize("name", FILED_NAMES)
def test_pickle_and_torch_restore_a_cache_or_name_its_save(tiny_llama, name, through, is_filled, make_any):
    """A cache comes back as it was, or says what to use instead; neither changes it."""
    cache = make_any(name, tiny_llama)
    sizes = (PROMPT, 1, 20) if is_filled else ()
    if is_filled:
        logits(tiny_llama, cache, *sizes)
    if name.startswith("infinigen"):
        with pytest.raises(ValueError, match="cannot be pickled, .* `copy.deepcopy.*`GEARCache` and its `save`"):
            through(cache)
        loaded = copy.deepcopy(cache)
    elif name == "fp8" and is_filled and through is through_pickle:
        # PyTorch's: the FAQ says so
        with pytest.raises(AttributeError, match="UntypedStorage"):
            through(cache)
        return
    else:
        loaded = through(cache)
    assert loaded.get_seq_length() == cache.get_seq_length() == sum(sizes)
    expected = logits(tiny_llama, cache, 12, 1, 1)
    assert torch.equal(logits(tiny_llama, loaded, 12, 1, 1), expected)


@pytest.mark.filterwarnings("ignore:`config`. all layers of the model attend to a window")
@pytest.mark.parametrize("name", FILED_NAMES)
def test_counters_have_equal_names_for_all_layers(tiny_model, name: str, make_any) -> None:
    names = []
    for architecture in ("llama", "gemma3-hybrid", "mistral-sliding"):
        model = tiny_model(architecture)
        try:
            cache = make_any(name, model)
        except pytest.skip.Exception:
            # InfiniGen takes no model with windows alone, and Transformers' own quantized caches none with any
            assert architecture == "mistral-sliding" or not names or name.startswith(("quanto", "hqq", "fp8"))
            continue
        names.append(list(cache.stats()))
        logits(model, cache, PROMPT, 1)
        names.append(list(cache.stats()))
    if not names:
        pytest.skip(f"`{name}` can be made for none of the models on this machine")
    assert all(each == names[0] for each in names), names
