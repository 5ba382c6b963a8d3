"""Bases that do not fit into a GPU's shared memory: plain PyTorch attends and scores in place of kernels."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import INTERPRETED, Rows, row_states
from stand_in import make_model
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvcache_plugins import TransformCodingCache
from kvcache_plugins.batching import compressed_batching
from kvcache_plugins.eval.kernel_check import plain_pytorch
from kvcache_plugins.formats.parts import SelectableRows, SinkStates
from kvcache_plugins.kernels import triton
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.token_scores import PreparedRows, score_rows
from kvcache_plugins.layers.static_row_layer import StaticRowLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.transform_coding.calibration import calibrate_transform


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter, for which limits can be set")
# Less and more than any head of these tests takes
SMALL, LARGE = 2**11, 2**20
HEAD_DIM, PROMPT = 16, 75


@pytest.fixture
def limit(monkeypatch):
    """Has programs find so many bytes of shared memory; nothing has warned before."""
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    triton._warn_once.cache_clear()
    yield lambda most: monkeypatch.setattr(triton, "shared_memory", lambda device: most)
    triton._warn_once.cache_clear()


@pytest.fixture(scope="module")
def model():
    return make_model(HEAD_DIM, 2)


@pytest.fixture(scope="module")
def calibration(model):
    return calibrate_transform(model, [torch.arange(200) % 32], num_draws=1)


@pytest.fixture
def make_cache(model, calibration):
    def make(**options):
        return TransformCodingCache(model, calibration=calibration, residual_length=4, **options)

    return make


def read(model, cache, *counts):
    with torch.no_grad():
        for count in counts:
            model(torch.arange(count)[None] % 32, **as_argument(cache))


def test_attention_beyond_the_limit_equals_pytorch(model, make_cache, limit):
    cache = make_cache(recent_length=0)
    limit(LARGE)
    # Nothing of a prompt is attended to in its own pass
    read(model, cache, PROMPT)
    query = torch.randn(1, 4, 1, HEAD_DIM)
    by_kernel = cache.layers[0].attend(AttentionCall(query))
    limit(SMALL)
    before = cache.stats()
    with pytest.warns(UserWarning, match="plain PyTorch instead of `triton`.*shared memory") as warned:
        read(model, cache, 1, 1)
        output = cache.layers[0].attend(AttentionCall(query))
    stats = {name: count - before[name] for name, count in cache.stats().items()}
    assert len(warned) == 1 and before["kernel_fallbacks"] == 0 < before["fused_calls"]
    assert stats["kernel_fallbacks"] == stats["attend_calls"] == 5 and stats["fused_calls"] == 0
    with plain_pytorch():
        assert torch.equal(output, cache.layers[0].attend(AttentionCall(query)))
    assert by_kernel.shape == output.shape and not torch.equal(by_kernel, output)


def require_counts(stats, most):
    none, some = ("fused_calls", "kernel_fallbacks")[:: 1 if most == SMALL else -1]
    assert stats[none] == 0 < stats[some]


@pytest.mark.filterwarnings("ignore:attention over states")
@pytest.mark.parametrize("most", [SMALL, LARGE])
def test_a_layer_is_static_with_kernels_alone(most, model, make_cache, limit, monkeypatch):
    monkeypatch.setattr("kvcache_plugins.layers.static_layer.compiles_kernels", lambda states: True)
    monkeypatch.setattr("kvcache_plugins.transform_coding.cache.has_gpu_kernels", lambda: True)
    limit(most)
    cache, cache_of_room = make_cache(), make_cache(max_cache_len=300)
    read(model, cache, PROMPT, 1, 1)
    assert isinstance(cache.layers[0], StaticRowLayer) and cache.layers[0]._pushes_on_device == (most == LARGE)
    require_counts(cache.stats(), most)
    refused = pytest.raises(ValueError, match="`max_cache_len` needs Triton's kernels: .*shared memory")
    with refused if most == SMALL else nullcontext():
        read(model, cache_of_room, PROMPT)


@pytest.mark.filterwarnings("ignore:attention over states")
def test_batches_with_little_shared_memory_give_the_same_tokens(model, make_cache, limit, monkeypatch):
    monkeypatch.setattr("kvcache_plugins.batching.context.create_cache", lambda name, model: make_cache())
    config = GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=-1, pad_token_id=0)
    paging = ContinuousBatchingConfig(page_size=64, num_blocks=8, max_batch_tokens=64)
    prompts, answers = [[*range(20)], [*range(5, 31)]], []
    for most in (SMALL, LARGE):
        limit(most)
        with compressed_batching(model, "calibrated-16") as batching:
            outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=paging)
        require_counts(batching.stats(), most)
        answers.append([output.generated_tokens for output in outputs.values()])
    assert answers[0] == answers[1]


def test_scores_with_little_shared_memory_are_the_same(limit):
    sizes = Rows(1, 2, 3, 1, 65, 64, 64, 19, 16)
    keys, values, codec, positions = row_states(sizes, "basis")
    rows, _ = codec.encode(keys, values, positions)
    query = torch.randn(1, 2, 3, 64)
    none = [query[:, :, :0]] * 2
    tokens = PreparedRows(SelectableRows(rows, 65, [], codec.formats(), positions, SinkStates(None, *none)))
    limit(LARGE)
    by_kernel = score_rows(query, tokens)
    limit(SMALL)
    with pytest.warns(UserWarning, match="shared memory") as warned:
        scores = [score_rows(query, tokens) for _ in range(2)]
    assert len(warned) == 1
    with plain_pytorch():
        expected = score_rows(query, tokens)
    assert torch.equal(scores[0], expected) and torch.equal(scores[1], expected)
    assert not torch.equal(by_kernel, expected)
    # Products are of halves: of float32 queries the same bytes decide
    limit(triton.shared_bytes(64, *(table.num_coefficients for table in codec.formats()), is_float32=False))
    assert torch.equal(score_rows(query, tokens), by_kernel)


def test_the_limit_is_the_devices_own(monkeypatch):
    asked = {0: {"max_shared_mem": 101376}, 1: {"max_shared_mem": 232448}}
    utils = SimpleNamespace(get_device_properties=asked.__getitem__)
    monkeypatch.setattr(triton, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    triton.shared_memory.cache_clear()
    devices = "cuda:1", "cuda:0", "cpu"
    assert [triton.shared_memory(torch.device(name)) for name in devices] == [232448, 101376, sys.maxsize]
    triton.shared_memory.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "is_float32", "most", "fits"),
    [
        (128, False, 101376, True),
        (128, True, 101376, True),
        (256, False, 101376, False),
        (256, False, 166912, True),
        (256, True, 232448, False),
        (300, False, 232448, False),
    ],
)
def test_known_gpus_fit_their_head_dims(head_dim, is_float32, most, fits):
    assert (triton.shared_bytes(head_dim, head_dim, head_dim, is_float32=is_float32) <= most) == fits
