"""Triton's push of tokens into a layer of rows against plain PyTorch, and attention with counts on the device.

They run in Triton's interpreter or on a GPU, or compiled in an emulator: `test_executed.py`.
"""

import dataclasses
from collections import namedtuple

import pytest
import torch
from kernel_cases import DEVICE, Rows, make_query, needs_triton, row_states

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.formats.parts import DensePart, RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.reference import encode_rows, requantize_rows
from kvcache_plugins.kernels.triton import PushState, prepare_push


pytestmark = needs_triton
# Rows that may differ, where a number lies at a bound to rounding or a scale between two steps
MOST_DIFFERENT = 0.005
# Additional bits of recent rows, which are requantized so many at a time, at most
RECENT_NBITS, MOST_REQUANTIZED = 2, 32
# Tokens before the first that is pushed, and of these rows in use
NUM_BEFORE, NUM_OLDER = 60, 3
# Constant of `PushState.start`
START = 2000

Case = namedtuple(
    "Case",
    ["form", "key_dim", "value_dim", "limit", "most_recent", "num_pushed", "dtype", "padding", "layout", "nbits"],
    defaults=[300, torch.float32, None, "half-split", 2.5],
)
DAILY = {
    "default": Case("tables", 16, 16, 5, 128),
    "padded": Case("tables", 32, 16, 5, 24, 50, torch.bfloat16, [0, 7], "interleaved"),
    "calibrated": Case("basis", 16, 24, 5, 24, 50, torch.float16, [3, 0]),
    "no-recent": Case("tables", 16, 16, 20, 0, 70),
    # Rows with more bits than a number may have
    "most-bits": Case("basis", 64, 64, 5, 8, 20, nbits=6),
}
LONG = {
    "one-token": Case("tables", 16, 16, 1, 40, 120),
    "twenty-tokens": Case("tables", 64, 64, 20, 128),
    "many-tokens": Case("tables", 64, 64, 33, 128, 300, torch.float16),
    "many-tokens-in-bases": Case("basis", 64, 64, 33, 40, 200, torch.bfloat16, [0, 70]),
    "unlike-dims": Case("tables", 80, 96, 5, 80, 200, torch.float16, [0, 7], "partial"),
    "unlike-dims-in-bases": Case("basis", 80, 96, 5, 128),
    "wide": Case("tables", 128, 128, 5, 128, 300, torch.bfloat16),
    "wide-in-bases": Case("basis", 128, 128, 5, 128, 300, torch.bfloat16),
    "few-recent": Case("tables", 16, 16, 5, 1, 50, torch.float32, None, "none"),
    "no-recent-one-token": Case("basis", 16, 16, 1, 0, 60),
    "no-recent-many-tokens": Case("tables", 128, 64, 33, 0, 200, torch.float16, [9, 0]),
}
CASES = {**DAILY, **LONG}
PARAMETERS = [*DAILY, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


class Layer:
    """
    A layer that tokens are pushed into by the kernel and, as lists of rows and tokens, by plain PyTorch.

    Attributes:
        state (`PushState`): the kernel's tensors.
        older, recent, tail (two `torch.Tensor` each): plain PyTorch's, those in use.
        total (`int`): tokens of the sequence.
    """

    def __init__(self, case):
        totals = int(case.nbits * case.key_dim / 8), int(case.nbits * case.value_dim / 8)
        sizes = Rows(2 if case.padding else 1, 2, 2, 1, NUM_BEFORE, case.key_dim, case.value_dim, *totals)
        keys, values, codec, _ = row_states(sizes, case.form, case.layout, 0, case.padding)
        self.case = case
        self.has_recent = case.most_recent > 0
        formats = codec.formats()
        if case.form == "tables":
            # Values have a mean, and a channel of keys is constant
            mean = values.mean(dim=2).half()
            formats[0].deviation[:, :, 3] = 0
            formats = formats[0], dataclasses.replace(formats[1], mean=mean)
            codec = RowCodec(tuple(each.map(lambda tensor: tensor.to(DEVICE)) for each in formats))
        self.formats = codec.formats(DEVICE)
        self.finer = codec.with_more_bits(RECENT_NBITS).formats(DEVICE)
        self.padding = None if case.padding is None else torch.tensor(case.padding, device=DEVICE)
        self.num_kept = case.limit // 4 if self.has_recent else 3 * case.limit // 5
        self.num_after = max(case.most_recent // 2, case.most_recent - MOST_REQUANTIZED)
        self.total = NUM_BEFORE
        prompt = keys.to(DEVICE), values.to(DEVICE)
        self.older = self.encode([each[:, :, -NUM_OLDER:] for each in prompt], self.formats, NUM_BEFORE - NUM_OLDER)
        self.recent = [self.older[0].new_zeros(*keys.shape[:2], 0, each.row_size) for each in self.finer]
        self.tail = [each[:, :, :0].to(case.dtype) for each in prompt]
        self.state = self.make_state()

    def make_state(self):
        (batch_size, num_heads, *_), case = self.tail[0].shape, self.case
        capacities = NUM_OLDER + case.num_pushed, case.most_recent + case.limit, case.limit

        def extended(tensors, capacity):
            # Bytes that no test expects
            made = [each.new_full((*each.shape[:2], capacity, each.shape[3]), 99) for each in tensors]
            for new, each in zip(made, tensors, strict=True):
                new[:, :, : each.shape[2]] = each
            return tuple(made)

        counters = torch.tensor([NUM_OLDER, 0, 0, NUM_BEFORE], device=DEVICE)
        return PushState(
            tail=extended(self.tail, capacities[2]),
            older=extended(self.older, capacities[0]),
            recent=extended(self.recent, capacities[1]) if self.has_recent else None,
            counters=counters.expand(2, batch_size, num_heads, 4).contiguous(),
            recent_offset=torch.zeros(batch_size, dtype=torch.int64, device=DEVICE) if self.has_recent else None,
            formats=self.formats,
            finer_formats=self.finer if self.has_recent else None,
            padding=self.padding,
            num_kept=self.num_kept,
            most_recent=case.most_recent,
            num_after=self.num_after,
            num_positions=START,
            start=START,
        )

    def encode(self, states, formats, start):
        positions = Positions(start, self.padding)
        return [encode_rows(each, own, positions) for each, own in zip(states, formats, strict=True)]

    def push(self, *new):
        """Push a token by plain PyTorch."""
        if self.tail[0].shape[2] == self.case.limit:
            self.pack()
        self.tail = join(self.tail, new)
        self.total += 1

    def pack(self):
        limit, count = self.case.limit, self.case.limit - self.num_kept
        oldest = [each[:, :, :count] for each in self.tail]
        rows = self.encode(oldest, self.finer if self.has_recent else self.formats, self.total - limit)
        if not self.has_recent:
            self.older = join(self.older, rows)
        else:
            self.recent = join(self.recent, rows)
            length = self.recent[0].shape[2]
            if length > self.case.most_recent:
                num_moved = length - self.num_after
                moved = [
                    requantize_rows(each[:, :, :num_moved], finer, own)
                    for each, finer, own in zip(self.recent, self.finer, self.formats, strict=True)
                ]
                self.older = join(self.older, moved)
                self.recent = [each[:, :, num_moved:] for each in self.recent]
        self.tail = [each[:, :, count:] for each in self.tail]

    @property
    def counts(self):
        return [*(each[0].shape[2] for each in (self.older, self.recent, self.tail)), self.total]

    def random_token(self):
        scales = torch.rand(2, device=DEVICE).exp()
        return [
            (scale * torch.randn(*each.shape[:2], 1, each.shape[3], device=DEVICE)).to(each.dtype)
            for scale, each in zip(scales, self.tail, strict=True)
        ]

    def check_counts(self):
        assert self.state.counters.flatten(0, 2).unique(dim=0).tolist() == [self.counts]
        if self.has_recent:
            first = self.total - self.tail[0].shape[2] - self.recent[0].shape[2]
            padding = torch.zeros(len(self.tail[0]), device=DEVICE) if self.padding is None else self.padding
            assert (START - self.state.recent_offset).tolist() == (first - padding).tolist()

    def check_rows(self, kernels_rows, rows):
        for own, other in zip(kernels_rows, rows, strict=True):
            count = other.shape[2]
            num_different = int((own[:, :, :count] != other).any(dim=-1).sum())
            assert num_different <= MOST_DIFFERENT * other[..., 0].numel() + (num_different == 1)

    def check(self):
        for own, other in zip(self.state.tail, self.tail, strict=True):
            assert torch.equal(own[:, :, : other.shape[2]], other)
        self.check_rows(self.state.older, self.older)
        if self.has_recent:
            self.check_rows(self.state.recent, self.recent)


def join(tensors, others):
    return [torch.cat([each, other], dim=2) for each, other in zip(tensors, others, strict=True)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_pushes_equal_pytorch(name):
    layer = Layer(CASES[name])
    push = prepare_push(layer.state)
    assert push is not None
    num_requantized = 0
    for _ in range(layer.case.num_pushed):
        token = layer.random_token()
        num_older = layer.older[0].shape[2]
        push(*token)
        layer.push(*token)
        layer.check_counts()
        if layer.older[0].shape[2] > num_older:
            num_requantized += 1
            layer.check()
    layer.check()
    assert num_requantized > 0


@pytest.mark.parametrize("name", ["padded", "calibrated"])
@pytest.mark.parametrize("num_pushed", [3, 40])
def test_attention_reads_counts_on_the_device(name, num_pushed):
    layer = Layer(CASES[name])
    state = layer.state
    push = prepare_push(state)
    for _ in range(num_pushed):
        token = layer.random_token()
        push(*token)
        layer.push(*token)
    num_older, num_recent, num_tail, total = layer.counts
    counters = state.counters[0, 0, 0]
    first = total - num_tail - num_recent
    shapes = Rows(len(state.tail[0]), 2, 2, 1, 1, layer.case.key_dim, layer.case.value_dim, 0, 0)
    query = make_query(shapes).to(DEVICE, layer.case.dtype)
    older_positions = Positions(first - num_older, layer.padding)
    prefix = DensePart(*(torch.randn_like(each) for each in state.tail), layer.case.limit, None)

    def parts(lengths, recent_positions, counts):
        return [
            prefix,
            RowPart(*state.older, layer.formats, older_positions, lengths[0], None, counts[0]),
            RowPart(*state.recent, layer.finer, recent_positions, lengths[1], None, counts[1]),
            DensePart(*state.tail, lengths[2], None, counts[2]),
        ]

    capacities = [each[0].shape[2] for each in (state.older, state.recent, state.tail)]
    on_device = parts(capacities, Positions(START, state.recent_offset), [counters[i : i + 1] for i in range(3)])
    on_host = parts([num_older, num_recent, num_tail], Positions(first, layer.padding), [None] * 3)
    # Without recent rows in use the host's part would have none
    on_host = [part for part in on_host if part.length]
    output, expected = (attend(query, each, 2, None, "triton") for each in (on_device, on_host))
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)


def test_unsupported_dtypes_have_no_push():
    layer = Layer(CASES["no-recent"])
    tail = tuple(each.double() for each in layer.state.tail)
    assert prepare_push(dataclasses.replace(layer.state, tail=tail)) is None


def test_tail_that_would_stay_full_is_refused():
    layer = Layer(CASES["no-recent"])
    with pytest.raises(ValueError, match="`num_kept` has to be less than the tail's 20 tokens, not 20"):
        prepare_push(dataclasses.replace(layer.state, num_kept=20))


@pytest.mark.parametrize("name", ["no-recent", "padded"])
def test_pushes_beyond_the_capacity_change_nothing(name):
    """A graph may be replayed too often, and the memory behind the rows belongs to others."""
    layer = Layer(CASES[name])
    full = layer.case.limit + layer.case.most_recent
    cut = tuple(each[:, :, :NUM_OLDER].contiguous() for each in layer.state.older)
    state = dataclasses.replace(layer.state, older=cut)
    push = prepare_push(state)
    stopped = None
    for _ in range(full + 12):
        before = state.counters.clone()
        push(*layer.random_token())
        if stopped is None and torch.equal(state.counters, before):
            stopped = [each.clone() for each in (*state.tail, *state.older, *(state.recent or ()))]
    assert stopped is not None and state.counters[0, 0, 0, 0] == NUM_OLDER
    assert all(map(torch.equal, stopped, (*state.tail, *state.older, *(state.recent or ()))))
