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
@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_another_model_is_refused(tiny_model, architecture: str, is_detached: bool, others_listen: bool) -> None:
    """Of OPT, whose attention looks up positions itself, it is not known how queries are made."""
    options = {"full_layers": (), "speculate": architecture == "llama"}
    own, other = (tiny_model(architecture, seed=seed) for seed in (1, 2))
    cache, expected = (InfiniGenCache(own, **options) for _ in range(2))
    listening = [InfiniGenCache(model, **options) for model in (own, other) if others_listen]
    for each in (cache, expected):
        logits(own, each, tokens(150))
        if is_detached:
            each.detach()

    def assert_refused(count: int) -> None:
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match="made for another model than the one"):
            logits(other, cache, tokens(count))
        assert cache.get_seq_length() == before

    for _ in range(2):
        assert_refused(1)
        torch.testing.assert_close(logits(own, cache, tokens(1)), logits(own, expected, tokens(1)))
    assert cache.get_seq_length() == 152
    cache.reset()
    assert_refused(20)
    del own, expected, listening
    gc.collect()
    assert_refused(20)
