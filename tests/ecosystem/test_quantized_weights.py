"""Models whose weights are quantized: what a cache does is what it does with the same weights, dequantized."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def quantize_by_quanto(model, tmp_path):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def quantize_by_bitsandbytes(model, tmp_path):
    pytest.importorskip("bitsandbytes")
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )


def quantize_by_torchao(model, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


QUANTIZERS = {"quanto": quantize_by_quanto, "bitsandbytes": quantize_by_bitsandbytes, "torchao": quantize_by_torchao}


def weights_in_use(model, plain):
    """A copy of the plain model whose linear layers compute what the quantized ones do."""
    modules = dict(model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(modules[name](torch.eye(module.in_features)).T)
    return plain


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_tokens_equal_those_of_the_dequantized_model(
    quantizer, tiny_model, tmp_path, make_cache, prompt, generate, cache_name
):
    model = QUANTIZERS[quantizer](tiny_model("llama"), tmp_path)
    assert type(model.model.layers[0].self_attn.q_proj) is not nn.Linear or quantizer == "torchao"
    dequantized = weights_in_use(model, tiny_model("llama"))
    assert not torch.equal(dequantized.lm_head.weight, tiny_model("llama").lm_head.weight) or quantizer != "quanto"
    cache = make_cache(cache_name, model)
    tokens = generate(model, prompt(), cache)
    # Sums in another order may turn a code over, some tokens on
    assert torch.equal(tokens[:, :4], generate(dequantized, prompt(), make_cache(cache_name, dequantized))[:, :4])
    assert cache.stats()["attend_calls"] == 14


def test_infinigen_speculates_with_weights_quantized_later(tiny_llama, tmp_path, make_cache, prompt, generate):
    with make_cache("infinigen", tiny_llama) as before:
        generate(tiny_llama, prompt(), before)
        quantize_by_quanto(tiny_llama, tmp_path)
        late = generate(tiny_llama, prompt(), make_cache("infinigen", tiny_llama))
    with make_cache("infinigen", tiny_llama) as cache:
        assert torch.equal(late, generate(tiny_llama, prompt(), cache))
        assert cache.stats()["speculated_calls"] == 7
