"""The baseline of KV-Runahead: what its ranks say is what one process says, and counts are the paper's."""

import pytest
import torch

from kvcache_plugins.eval.runahead.measure import ONE_RANK, TSP, prefill
from kvcache_plugins.eval.runahead.rank_processes import Ranks


def random_tokens(length: int) -> list[int]:
    return torch.randint(2, 128, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(("architecture", "size"), [("llama", 3), ("gemma3-hybrid", 2)])
def test_same_logits_and_the_papers_counts(saved_with_tokenizer, architecture, size):
    with Ranks(saved_with_tokenizer(architecture), size) as ranks:
        for length in (130, 9):
            ranks.call(prefill, random_tokens(length), ONE_RANK)
            answers = ranks.call(prefill, random_tokens(length), TSP)
            assert 0 <= answers[-1].difference < 1e-4
            assert [each.difference for each in answers[:-1]] == [None] * (size - 1)
        with pytest.raises(ValueError, match="too few for an even slice for"):
            ranks.call(prefill, random_tokens(size - 1), TSP)
    if architecture == "llama":
        # Nine tokens on three ranks, and two layers
        assert [each.stats["dot_products"] // 2 for each in answers] == [27, 27, 27]
        assert sum(each.stats["entries_sent"] for each in answers) // 2 == 36
        sent = 36 * 2 * 2 * 32 * 4
        assert sum(each.stats["bytes_sent"] for each in answers) == sent
