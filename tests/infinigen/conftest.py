"""Stand-ins for streams, events and page-locked memory, for machines without a GPU.

Streams work at once and keep account of what is known to come before what: an operation's past is all that its stream
has done, and all that came before events that the stream waited for. On a GPU nothing else is certain to have been.
"""

import os
from contextlib import contextmanager

import pytest
import torch
from decoding import make_model

from kvcache_plugins.infinigen import pool, staging
from kvcache_plugins.kernels import kept_selection


# Two for each head of two sequences, where a GPU has thousands
FEW_PROGRAMS = 8


class FakeStream:
    def __init__(self, device=None):
        self.past = set()

    def do(self, name):
        """Do an operation; return all that is certain to have happened before it."""
        before = frozenset(self.past)
        self.past.add(name)
        return before

    def wait_event(self, event):
        self.past |= event.past

    def wait_stream(self, stream):
        self.past |= stream.past

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.past, self.time, self.enable_timing = frozenset(), None, enable_timing

    def record(self, stream):
        self.past, self.time = frozenset(stream.past), len(stream.past)

    def synchronize(self):
        FakeCuda.synchronized.append(self.past)

    def query(self):
        return True

    def elapsed_time(self, end):
        assert self.enable_timing and end.enable_timing
        return 1e3 * (end.time - self.time)


class FakeCuda:
    """
    The streams of one device.

    Attributes:
        compute, current (`FakeStream`): where models compute, and the current stream.
        synchronized (`list[frozenset[str]]`): the past of every event that the host waited for.
        recorded (`list[tuple[int, FakeStream]]`): addresses, and streams that use them.
    """

    Stream, Event = FakeStream, FakeEvent
    synchronized = []

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.current = self.compute = FakeStream()
        FakeCuda.synchronized = []
        self.recorded = []
        empty, zeros = torch.empty, torch.zeros
        for name, value in {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "current_stream": lambda device=None: self.current,
            "stream": self.inside,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        # Ordinary memory passes for page-locked
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
        monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append((tensor.data_ptr(), stream))
        )

    @contextmanager
    def inside(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def use_gpu_pools(self, kernel):
        """Treat tokens of every pool as a GPU's from now on, transferred as in `use_kernel`."""
        self.use_kernel(kernel)
        self.monkeypatch.setattr(pool, "is_gpu", lambda device: True)

    def use_kernel(self, kernel):
        """Transfer by `"triton"`, in its interpreter, or by the host, `"torch"`."""
        if kernel == "triton":
            pytest.importorskip("triton")
            if os.environ.get("TRITON_INTERPRET") != "1":
                pytest.skip("needs Triton's interpreter, as tensors are on the CPU")
            # The interpreter runs programs one after another; some of these loop over several tiles
            self.monkeypatch.setattr(kept_selection, "_MOST_PROGRAMS", FEW_PROGRAMS)
        self.monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)


@pytest.fixture(scope="module")
def llama():
    """A random Llama of three layers and two key/value heads of 16; leave it as it was."""
    return make_model()


@pytest.fixture
def cuda(monkeypatch):
    staging._stream_of.cache_clear()
    yield FakeCuda(monkeypatch)
    staging._stream_of.cache_clear()


@pytest.fixture
def transfers(cuda, monkeypatch):
    """The past of every transfer."""
    cuda.use_gpu_pools("triton")
    pasts, run = [], staging._gather

    def noted(*args):
        pasts.append(cuda.current.do(f"transfer {len(pasts)}"))
        run(*args)

    monkeypatch.setattr(staging, "_gather", noted)
    return pasts
