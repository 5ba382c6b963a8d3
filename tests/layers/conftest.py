"""Fixtures for tests of layers."""

import pytest
import torch

from kvcache_plugins import GEARCache


@pytest.fixture
def layer():
    """Return a layer that has compressed a prompt of 150 tokens, of 2 sequences and 2 heads of 32 channels."""
    layer = GEARCache(nbits=2)._next_layer()
    layer.update(torch.randn(2, 2, 150, 32), torch.randn(2, 2, 150, 32))
    layer.commit_prompt()
    return layer
