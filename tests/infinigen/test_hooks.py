"""What ties an InfiniGen cache to its model: neither is taken for another's, and nothing of it goes into a file."""

import copy
import gc
import io
import pickle

import pytest
import torch
from decoding import tokens
from transformers import PreTrainedModel

from kvcache_plugins import InfiniGenCache


@torch.no_grad()
def logits(model: PreTrainedModel, cache: InfiniGenCache, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids, past_key_values=cache).logits[:, -1]


def test_pickling_is_refused_and_copying_is_not(tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    cache = InfiniGenCache(model)
    logits(model, cache, tokens(150))
    for write in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(ValueError, match="cannot be pickled, .* `copy.deepcopy.*`GEARCache` and its `save`"):
            write(cache)
    copied = copy.deepcopy(cache)
    assert torch.equal(logits(model, cache, tokens(1)), logits(model, copied, tokens(1)))


@pytest.mark.parametrize("others_listen", [False, True])
def test_another_model_is_refused(tiny_model, others_listen: bool) -> None:
    own, other = (tiny_model("llama", num_hidden_layers=4, seed=seed) for seed in (1, 2))
    cache, others = InfiniGenCache(own), [InfiniGenCache(other)] * others_listen
    logits(own, cache, tokens(150))
    for each in others:
        logits(other, each, tokens(150))
    with pytest.raises(ValueError, match="made for another model than the one"):
        logits(other, cache, tokens(1))
    # Nothing of it was stored
    assert cache.get_seq_length() == 150
    logits(own, cache, tokens(1))
    assert cache.get_seq_length() == 151
    del own
    gc.collect()
    with pytest.raises(ValueError, match="made for another model than the one"):
        logits(other, cache, tokens(1))


@pytest.mark.parametrize("others_listen", [False, True])
def test_another_model_is_refused_after_detaching(tiny_model, others_listen: bool) -> None:
    own, other = (tiny_model("llama", num_hidden_layers=4, seed=seed) for seed in (1, 2))
    cache, expected = InfiniGenCache(own), InfiniGenCache(own)
    listening = [InfiniGenCache(model) for model in (own, other) if others_listen]
    for each in (cache, expected):
        logits(own, each, tokens(150))
    cache.detach()
    if not others_listen:
        expected.detach()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in own.modules())
    for _ in range(2):
        with pytest.raises(ValueError, match="made for another model than the one"):
            logits(other, cache, tokens(1))
        torch.testing.assert_close(logits(own, cache, tokens(1)), logits(own, expected, tokens(1)))
    assert cache.get_seq_length() == 152
    cache.reset()
    with pytest.raises(ValueError, match="made for another model than the one"):
        logits(other, cache, tokens(20))
    assert cache.get_seq_length() == 0
    del listening


def test_a_model_that_is_not_known_is_told_from_another(tiny_model) -> None:
    """Attention that looks up positions itself announces nothing."""
    own, other = (tiny_model("opt", seed=seed) for seed in (1, 2))
    for is_detached in (False, True):
        cache = InfiniGenCache(own, full_layers=())
        logits(own, cache, tokens(150))
        if is_detached:
            cache.detach()
        with pytest.raises(ValueError, match="made for another model than the one"):
            logits(other, cache, tokens(1))
        logits(own, cache, tokens(1))
        assert cache.get_seq_length() == 151
