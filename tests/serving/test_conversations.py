"""`Conversations`: which live caches are kept, and which one a prompt continues."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.serving.conversations import Conversations


@pytest.fixture
def conversations(tiny_llama):
    """At most two conversations after three of 40 tokens were kept, and the tokens of these."""
    held, prompts = Conversations(2), [torch.randint(3, 97, (1, 40)) for _ in range(3)]
    for first, prompt in enumerate(prompts, start=3):
        prompt[0, 0] = first
        cache = create_cache("transform", tiny_llama)
        with torch.no_grad():
            tiny_llama(prompt, past_key_values=cache)
        held.keep(prompt, cache)
    return held, prompts


def edited(prompt, num_shared):
    """A prompt that differs from token `num_shared` on."""
    return torch.cat([prompt[:, :num_shared], 125 - prompt[:, num_shared:], prompt[:, :5]], dim=1)


def test_the_newest_conversations_are_kept(conversations):
    held, (oldest, middle, newest) = conversations
    assert held.take(edited(oldest, 40)) is None
    cache = held.take(edited(middle, 40))
    assert cache.get_seq_length() == 40
    # A conversation that was taken and is kept again is the newest
    held.keep(middle, cache)
    held.keep(oldest, cache.fork(1)[0])
    assert held.take(edited(newest, 40)) is None and held.take(edited(middle, 40)) is cache


def test_half_of_the_tokens_held_are_enough_to_continue(conversations):
    held, (_, middle, newest) = conversations
    assert held.take(edited(newest, 19)) is None
    cache = held.take(edited(newest, 20))
    assert cache.get_seq_length() == 20
    # It is not held any more, and the other one is
    assert held.take(edited(newest, 40)) is None and held.take(edited(middle, 40)) is not None
    assert held.take(newest) is None
