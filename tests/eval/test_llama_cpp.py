"""llama.cpp's weights are those of the packaged GGUF file, every tensor in float32."""

import numpy as np
import pytest

from kvcache_plugins.eval import llama_cpp as weights


gguf = pytest.importorskip("gguf")


def test_tensors_and_fields_are_those_of_the_file(tmp_path):
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
    weights._dequantize(tmp_path / "source.gguf", tmp_path / "target.gguf")
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
        weights.float32_gguf(str(tmp_path))
