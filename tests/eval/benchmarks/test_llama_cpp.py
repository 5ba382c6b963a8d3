"""`bench llama-cpp` without llama-cpp-python, which no test installs: it is refused before anything is loaded."""

import sys

import numpy as np
import pytest
import torch

from kvcache_plugins.eval.benchmarks import llama_cpp as benchmark
from kvcache_plugins.gear.kernel_check import MismatchError


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch):
    # What importing a module that is not installed comes to
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(benchmark, "load_for_evaluation", lambda *_, **__: pytest.fail("a model was loaded"))


def test_the_extra_is_named_where_it_is_missing():
    with pytest.raises(ImportError, match=r"`pip install kvcache-plugins\[llama-cpp\]`"):
        benchmark.benchmark_llama_cpp(text_file=None)


@pytest.mark.parametrize(("option", "value"), [("kv_type", "q2_K"), ("cache", "gear-k9v9")])
def test_wrong_names_are_refused_first(option, value):
    with pytest.raises(ValueError, match=value):
        benchmark.benchmark_llama_cpp(text_file=None, **{option: [value]})


def test_bytes_are_those_of_blocks_of_32():
    states = [(torch.zeros(1, 3, 5, 64), torch.zeros(1, 3, 5, 64))] * 2
    # 18 bytes for each 32 numbers of two layers, two sides and three heads of 64
    assert benchmark.states_bytes(states, 1000, "q4_0") == 2 * 2 * 3 * 1000 * 64 // 32 * 18
    assert benchmark.states_bytes(states, 1000, "f16") == 2 * 2 * 3 * 1000 * 64 * 2


def test_another_model_is_not_timed():
    expected = torch.tensor([0.0, 0.0]).log_softmax(-1)
    assert benchmark.divergence("f16", expected, torch.tensor([1.0, 1.0])) == pytest.approx(0)
    for logits in ([9.0, 0.0], [float("nan"), 0.0]):
        with pytest.raises(MismatchError, match=r"llama.cpp f16 is .* nats from Transformers"):
            benchmark.divergence("f16", expected, torch.tensor(logits))


def test_tensors_and_fields_are_those_of_the_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    matrix = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    packed = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(3)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", matrix[0])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    benchmark.dequantize_file(tmp_path / "source.gguf", tmp_path / "target.gguf")
    reader = gguf.GGUFReader(tmp_path / "target.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type for tensor in tensors.values()} == {gguf.GGMLQuantizationType.F32}
    assert np.array_equal(tensors["packed"].data, gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
    assert np.array_equal(tensors["norm"].data, matrix[0])
    fields = {name: reader.get_field(name).contents() for name in ("llama.block_count", "tokenizer.ggml.tokens")}
    assert fields == {"llama.block_count": 3, "tokenizer.ggml.tokens": ["a", "b"]}
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType.ALL_F32


def test_other_models_want_a_file(tmp_path):
    with pytest.raises(ValueError, match="`gguf` has to name the same weights"):
        benchmark.float32_gguf(str(tmp_path))
