"""Options of InfiniGen: where tokens are chosen ahead unless it is said."""

import pytest
import torch

from kvcache_plugins import InfiniGenCache, create_cache
from kvcache_plugins.infinigen.config import InfiniGenConfig


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_speculates_where_tokens_have_to_be_brought(device: str, tmp_path) -> None:
    where = torch.device(device)
    assert InfiniGenConfig().speculates_on(where) is (device != "cpu")
    assert InfiniGenConfig(pool_folder=tmp_path).speculates_on(where)
    for asked in (True, False):
        assert InfiniGenConfig(speculate=asked).speculates_on(where) is asked
        assert InfiniGenConfig(speculate=asked, pool_folder=tmp_path).speculates_on(where) is asked


@torch.no_grad()
def test_on_a_cpu_a_layer_chooses_by_its_own_query(tiny_llama, tmp_path) -> None:
    prompt = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    counts = {}
    for name, options in {"memory": {}, "asked": {"speculate": True}, "disk": {"pool_folder": tmp_path}}.items():
        with InfiniGenCache(tiny_llama, full_layers=(0,), **options) as cache:
            tiny_llama(prompt, past_key_values=cache)
            for _ in range(3):
                tiny_llama(prompt[:, :1], past_key_values=cache)
            stats = cache.stats()
            own, ahead = stats["layers_by_own_query"], stats["layers_speculating"]
        assert stats["selected_calls"] == 3 * stats["layers_offloaded"]
        counts[name] = (own > 0, ahead > 0, stats["speculated_calls"] > 0)
    assert counts == {"memory": (True, False, False), "asked": (False, True, True), "disk": (False, True, True)}


@torch.no_grad()
def test_landmarks_choose_in_steps_like_the_last_too(tiny_llama) -> None:
    """The prepared call knows each key by itself: it is for steps without landmarks."""
    prompt = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    for landmarks in (None, 16):
        with InfiniGenCache(tiny_llama, full_layers=(0,), landmarks=landmarks) as cache:
            for tokens in (prompt, *prompt[:, :4].split(1, dim=1)):
                tiny_llama(tokens, past_key_values=cache)
            assert cache.stats()["selected_calls"] == 4
            assert (cache.layers[1]._call is None) is (landmarks is not None)


def test_the_papers_form_speculates_everywhere(tiny_llama) -> None:
    with create_cache("infinigen-paper", tiny_llama) as cache:
        assert cache.infinigen_config.speculate
