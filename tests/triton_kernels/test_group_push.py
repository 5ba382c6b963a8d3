"""Triton's push of tokens into a layer of chunks against plain PyTorch, and attention with counts on the device.

They run in Triton's interpreter or on a GPU, or compiled in an emulator: `test_executed.py`.
"""

from collections import namedtuple

import pytest
import torch
from kernel_cases import DEVICE, needs_triton

from kvcache_plugins.codecs.low_rank import starting_matrix
from kvcache_plugins.formats.parts import DensePart, GroupPart
from kvcache_plugins.gear.config import GEARConfig
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.triton import GroupPushState, explain_group_push, hadamard_signs, prepare_group_push


pytestmark = needs_triton
# Share of stored numbers that may differ, where a number lies at a bound to rounding
MOST_DIFFERENT = 0.004
CAPACITY = 3

Case = namedtuple(
    "Case",
    ["options", "key_dim", "value_dim", "length", "batch_size", "num_heads", "dtype"],
    defaults=[16, 16, 16, 1, 2, torch.float32],
)
KIVI = {"rank": 0, "decode_rank": 0, "sparsity": 0.0, "backbone": "kivi"}
DAILY = {
    "gear": Case({"sparsity": 0.15}, batch_size=2),
    "gear-2bit": Case({"nbits": 2, "sparsity": 0.15}, 32, 16, 16, 1, 3, torch.bfloat16),
    "kivi-2bit": Case({"nbits": 2, **KIVI}, 16, 32, 32),
    "k4v3": Case({"key_nbits": 4, "value_nbits": 3, "rotate_values": True, **KIVI}, dtype=torch.float16),
}
LONG = {
    "preset-gear": Case({}, 64, 64, 64, 2, 2, torch.bfloat16),
    "preset-gear-2bit": Case({"nbits": 2}, 128, 128, 64, 1, 8, torch.bfloat16),
    "preset-kivi-2bit": Case({"nbits": 2, **KIVI}, 128, 128, 64, 1, 2, torch.bfloat16),
    "preset-gear-k4v3": Case(
        {"key_nbits": 4, "value_nbits": 3, "rotate_values": True, **KIVI}, 128, 128, 64, 1, 2, torch.bfloat16
    ),
    "odd-dims": Case({"nbits": 3, "sparsity": 0.1, "q_group_size": 20}, 80, 40, 20, 2, 5, torch.float16),
    "one-head": Case({"nbits": 8, "sparsity": 0.05}, 96, 96, 48, 1, 1),
    "many-heads": Case({"nbits": 2, "sparsity": 0.05}, 16, 16, 24, 1, 12, torch.bfloat16),
    "per-token": Case({"backbone": "per-token", "rank": 0, "sparsity": 0.1}, 32, 48, 16),
    "groups": Case(
        {"nbits": 2, "q_group_size": 8, "sparsity": 0.1, "decode_rank": 3, "num_iterations": 5}, 32, 32, 64
    ),
    "outliers-alone": Case({"rank": 0, "sparsity": 0.2}, 16, 16, 24),
    "rotated-low-rank": Case({"nbits": 2, "sparsity": 0.0, "rotate_values": True}, 32, 96, 32, 2, 2, torch.bfloat16),
    "short-chunks": Case({"nbits": 4, **KIVI}, 16, 16, 4),
    "long-chunks": Case({"nbits": 2, **KIVI, "q_group_size": 32}, 64, 64, 128, 1, 2, torch.float16),
    "wide": Case({"nbits": 2}, 256, 256, 64, 1, 2, torch.bfloat16),
}
CASES = {**DAILY, **LONG}
PARAMETERS = [*DAILY, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


class Layer:
    """A layer that tokens are pushed into by the kernels; its codec is the reference of the chunks."""

    def __init__(self, case, capacity=CAPACITY):
        self.case = case
        options = dict(case.options)
        if "nbits" in options:
            options["key_nbits"] = options["value_nbits"] = options.pop("nbits")
        self.codec = GEARConfig(residual_length=case.length, **options).codec(case.key_dim, case.value_dim)
        shape = case.batch_size, case.num_heads
        sides = self.codec.keys, self.codec.values
        self.chunks = []
        for side in sides:
            layout = side.layout(*shape, capacity, case.length, side.sizes(case.num_heads, case.length))
            # Bytes that no test expects
            tensors = {name: torch.full(size, 9, dtype=dtype, device=DEVICE) for name, (size, dtype) in layout.items()}
            self.chunks.append(side.wrap(tensors))
        self.tail = tuple(
            torch.full((*shape, case.length, dim), 99, dtype=case.dtype, device=DEVICE)
            for dim in (case.key_dim, case.value_dim)
        )
        self.counters = torch.tensor([0, 0, 0, 7], device=DEVICE).expand(2, *shape, 4).contiguous()
        starts = [starting_matrix(each.head_dim, each.decode_rank, self.tail[0].device) for each in sides]
        self.state = GroupPushState(
            tail=self.tail,
            chunks=tuple(self.chunks),
            counters=self.counters,
            starts=tuple(start if start.shape[1] else None for start in starts),
            num_iterations=self.codec.values.num_iterations,
            spreads_errors=tuple(each.spreads_errors for each in sides),
            signs=hadamard_signs(case.value_dim, self.tail[1]) if self.codec.values.is_rotated else None,
        )
        self.tokens = [[], []]
        self.coming = iter(())

    def random_token(self):
        found = next(self.coming, None)
        if found is None:
            # Tokens of a chunk. Some channels are larger than others, and values of a head have a common part
            shapes = [each.shape for each in self.tail]
            keys, values = (torch.randn(shape) * torch.linspace(0.2, 3, shape[3]) for shape in shapes)
            keys = distinct(keys, 2)
            values = distinct((values + 1).transpose(1, 2).flatten(2), 2)
            values = values.unflatten(2, (self.case.num_heads, -1)).transpose(1, 2)
            made = [each.to(DEVICE, self.case.dtype).split(1, dim=2) for each in (keys, values)]
            self.coming = zip(*made, strict=True)
            found = next(self.coming)
        return list(found)

    def push(self, push, count):
        for _ in range(count):
            token = self.random_token()
            for held, each in zip(self.tokens, token, strict=True):
                held.append(each)
            push(*token)

    def check(self):
        """Compare chunks, tail and counters with those of the codec."""
        total, length = len(self.tokens[0]), self.case.length
        num_chunks = max(total - 1, 0) // length
        counts = [num_chunks * length, 0, total - num_chunks * length, 7 + total]
        assert self.counters.flatten(0, 2).unique(dim=0).tolist() == [counts]
        states = [torch.cat(held, dim=2) for held in self.tokens]
        for tail, each in zip(self.tail, states, strict=True):
            assert torch.equal(tail[:, :, : counts[2]], each[:, :, counts[0] :])
        if not num_chunks:
            return
        packed = [each[:, :, : counts[0]] for each in states]
        expected = self.codec.encode(*packed, None, num_chunks=num_chunks)
        for side, own in zip(self.chunks, expected, strict=True):
            check_chunks(side.map(lambda tensor: tensor[:, :, :num_chunks]), own)


def distinct(states, dim):
    """Return distinct numbers of bfloat16 in the order of `states`, so that no choice of the largest is by chance."""
    bits = torch.arange(0x3D80, 0x4180, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    table = torch.cat([-bits.flip(0), bits])
    size = states.shape[dim]
    places = torch.arange(size) * (len(table) // size) + len(table) % size // 2
    return table[places][states.argsort(dim=dim).argsort(dim=dim)]


def check_chunks(chunks, expected):
    for (name, tensor), (_, own) in zip(chunks.named_tensors(), expected.named_tensors(), strict=True):
        assert tensor.shape == own.shape and tensor.dtype == own.dtype
        # Factors are sums of many products, in another order
        is_different = (tensor.float() - own.float()).abs() > 2e-3 * own.float().abs() + 2e-3
        if name not in ("low_rank_a", "low_rank_b", "outlier_values"):
            is_different = tensor != own
        assert is_different.sum() <= MOST_DIFFERENT * own.numel() + 1, (name, int(is_different.sum()), own.numel())
    every = slice(0, chunks.chunk_length)
    decoded, other = (each.dequantize_tile(slice(0, own.shape[2]), every) for each in (chunks, expected))
    assert (decoded - other).norm() <= 0.01 * other.norm()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_pushes_equal_pytorch(name):
    layer = Layer(CASES[name])
    assert explain_group_push(*layer.chunks, layer.case.dtype) is None
    push = prepare_group_push(layer.state)
    length = layer.case.length
    for count in (length, 1, length, 2):
        layer.push(push, count)
        layer.check()


def test_errors_that_tokens_share_are_spread():
    """A text that repeats a token."""
    layer = Layer(CASES["kivi-2bit"])
    token = layer.random_token()
    layer.coming = iter([token] * (layer.case.length + 1))
    layer.push(prepare_group_push(layer.state), layer.case.length + 1)
    layer.check()
    decoded = layer.chunks[1].dequantize_tile(slice(0, 1), slice(0, layer.case.length))
    assert decoded.std(dim=-2).amax() > 0


@pytest.mark.parametrize("name", ["gear", "kivi-2bit"])
def test_pushes_beyond_the_capacity_change_nothing(name):
    """A graph may be replayed too often, and the memory behind the chunks belongs to others."""
    layer = Layer(CASES[name], capacity=1)
    push = prepare_group_push(layer.state)
    layer.push(push, 2 * layer.case.length)
    layer.check()
    held = [each.clone() for each in (*layer.tail, layer.counters)]
    for _ in range(3):
        push(*layer.random_token())
    assert all(map(torch.equal, held, (*layer.tail, layer.counters)))


@pytest.mark.parametrize("name", ["gear", "kivi-2bit"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_states_that_cannot_be_stored_set_the_mark(name, value):
    layer = Layer(CASES[name])
    push = prepare_group_push(layer.state)
    tokens = [layer.random_token() for _ in range(layer.case.length + 1)]
    tokens[3][1][0, 1, 0, 2] = value
    tokens[5][1][0, 1, 0, 2] = -value
    for token in tokens:
        push(*token)
    floats = [tensor[:, :, :1] for _, tensor in layer.chunks[1].named_tensors() if tensor.is_floating_point()]
    assert not all(bool(each.isfinite().all()) for each in floats)


@pytest.mark.parametrize("name", ["gear-2bit", "kivi-2bit", pytest.param("gear", marks=pytest.mark.long)])
@pytest.mark.parametrize("num_pushed", [5, 40])
def test_attention_reads_counts_on_the_device(name, num_pushed):
    layer = Layer(CASES[name], capacity=9)
    push = prepare_group_push(layer.state)
    case = layer.case
    layer.push(push, num_pushed)
    num_packed, _, num_tail, _ = layer.counters[0, 0, 0].tolist()
    counters = layer.counters[0, 0, 0]
    query = torch.randn(case.batch_size, 2 * case.num_heads, 1, case.key_dim, device=DEVICE).to(case.dtype)

    def parts(lengths, counts):
        return [
            GroupPart(*layer.chunks, lengths[0], None, counts[0]),
            DensePart(*layer.tail, lengths[1], None, counts[1]),
        ]

    on_device = parts([9 * case.length, case.length], [counters[0:1], counters[2:3]])
    on_host = [part for part in parts([num_packed, num_tail], [None] * 2) if part.length]
    output, expected = (attend(query, each, case.num_heads, None, "triton") for each in (on_device, on_host))
    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "dims", "length", "num_heads", "reason"),
    [
        ({"sparsity": 0.1}, (64, 64), 128, 2, "outliers of chunks of more than 64 tokens"),
        ({"nbits": 2, **KIVI}, (256, 256), 256, 2, "chunks of 256 tokens with 256 channels"),
        ({"rotate_values": True}, (64, 64), 64, 2, "rotated values"),
        ({"rank": 16, "decode_rank": 16}, (64, 64), 64, 2, "rank 16"),
    ],
)
def test_unsupported_chunks_are_refused_with_a_reason(options, dims, length, num_heads, reason):
    layer = Layer(Case(options, *dims, length, 1, num_heads))
    assert reason in explain_group_push(*layer.chunks, torch.float16)
    assert "float64" in explain_group_push(*layer.chunks, torch.float64)
