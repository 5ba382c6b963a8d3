"""Scores from codes, and attention over rows where they stand: every kernel against float64."""

import mmap
from dataclasses import dataclass, replace

import pytest
import torch

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.codecs.quantization import pack
from kvcache_plugins.kernels import engine, library
from kvcache_plugins.kernels.compiled_tokens import attend_rows as attend_compiled
from kvcache_plugins.kernels.tokens import attend_staged, choose_rows_kernel, code_scores, gather_rows, largest


KERNELS = ["torch", "compiled"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# The compiled kernel rounds queries to 16 bits
SCORE_TOLERANCE = 1e-4


def relative_error(output, expected):
    return ((output.double() - expected).square().mean() / expected.square().mean().clamp(min=1e-30)).sqrt().item()


@pytest.fixture
def kernel_of(monkeypatch):
    return lambda kernel: monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Items, key/value heads, queries a head, head dim, tokens, bits
CODE_CASES = {
    "one token": (1, 1, 1, 64, 1, 4),
    "seven tokens in 2 bits": (1, 2, 3, 64, 7, 2),
    "batch, fields of 20 bytes": (3, 2, 3, 40, 63, 4),
    "more than a task": (1, 3, 3, 64, 2049, 4),
    "8 bits, a head dim that words do not divide": (2, 1, 1, 80, 63, 8),
    "nine queries a head, fewer bytes than are read at once": (1, 1, 9, 20, 130, 2),
    "bytes that hold fewer channels than they could": (2, 1, 3, 50, 65, 4),
    "8 bits of many channels": (1, 1, 1, 300, 65, 8),
}


def random_codes(case):
    """Query, packed codes and scales with some room beyond, and the keys in float64."""
    batch_size, num_heads, groups, head_dim, length, nbits = case
    codes = torch.randint(0, 2**nbits, (batch_size, num_heads, length, head_dim), dtype=torch.uint8)
    scale = (torch.rand(batch_size, num_heads, length) + 0.1).half()
    keys = scale.double()[..., None] * (codes.double() - (2 ** (nbits - 1) - 0.5))
    packed = pack(codes, nbits)
    room = torch.full((batch_size, num_heads, 5, packed.shape[3]), 255, dtype=torch.uint8)
    nothing = torch.full((batch_size, num_heads, 5), torch.nan, dtype=torch.half)
    query = torch.randn(batch_size, num_heads, groups, head_dim)
    return query, torch.cat([packed, room], dim=2), torch.cat([scale, nothing], dim=2), keys


class TestCodeScores:
    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("name", CODE_CASES)
    def test_match_float64(self, kernel_of, name, kernel):
        kernel_of(kernel)
        query, codes, scale, keys = random_codes(CODE_CASES[name])
        scores = code_scores(query, codes, scale, keys.shape[2], CODE_CASES[name][-1])
        assert scores.dtype == torch.float32
        assert scores.shape == (*query.shape[:3], keys.shape[2])
        assert relative_error(scores, query.double() @ keys.transpose(2, 3)) < SCORE_TOLERANCE

    def test_kernel_for_gpus_takes_the_same(self, kernel_of):
        if engine._kernel_on("cpu", "triton")[1]:
            pytest.skip("Triton runs on GPUs only")
        kernel_of("triton")
        query, codes, scale, keys = random_codes(CODE_CASES["seven tokens in 2 bits"])
        scores = code_scores(query, codes, scale, keys.shape[2], 2)
        assert relative_error(scores, query.double() @ keys.transpose(2, 3)) < SCORE_TOLERANCE

    def test_threads_and_neighbours_do_not_change_a_bit(self, kernel_of, num_threads):
        kernel_of("compiled")
        query, codes, scale, keys = random_codes(CODE_CASES["batch, fields of 20 bytes"])
        together = code_scores(query, codes, scale, keys.shape[2], 4)
        for item in range(3):
            one = slice(item, item + 1)
            assert torch.equal(together[one], code_scores(query[one], codes[one], scale[one], keys.shape[2], 4))

    @pytest.mark.parametrize("size", [0.0, 1e-40, 1e30])
    def test_queries_of_any_size(self, kernel_of, size):
        kernel_of("compiled")
        query, codes, scale, keys = random_codes(CODE_CASES["seven tokens in 2 bits"])
        query = torch.full_like(query, size)
        scores = code_scores(query, codes, scale, keys.shape[2], 2)
        assert torch.allclose(scores.double(), query.double() @ keys.transpose(2, 3), atol=1e-4 * size + 1e-30)

    def test_expanded_and_transposed_tensors(self, kernel_of):
        kernel_of("compiled")
        query, codes, scale, keys = random_codes((1, 2, 3, 64, 63, 4))
        query = query.expand(2, -1, -1, -1).transpose(0, 1).contiguous().transpose(0, 1)
        expanded = [each.expand(2, *each.shape[1:]) for each in (codes, scale, keys)]
        scores = code_scores(query, *expanded[:2], 63, 4)
        assert relative_error(scores, query.double() @ expanded[2].transpose(2, 3)) < SCORE_TOLERANCE


class TestLargest:
    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("length", [1, 7, 2049])
    def test_are_in_order(self, kernel_of, num_threads, length, kernel):
        kernel_of(kernel)
        numbers = torch.randn(2, 3, length) * 10.0 ** torch.randint(-20, 20, (2, 3, length))
        numbers[..., length // 2] = -torch.inf
        values, indices = largest(numbers, length)
        assert torch.equal(values, numbers.sort(dim=2, descending=True).values)
        assert torch.equal(numbers.gather(2, indices), values)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_what_is_not_below_the_least_is_there(self, kernel_of, kernel):
        kernel_of(kernel)
        numbers = torch.randn(2, 3, 200)
        least = torch.tensor([-5.0, 1.0])[:, None, None]
        values, indices = largest(numbers, 60, least)
        expected = numbers.topk(60, dim=2)
        counts = (expected.values >= least).sum(dim=2, keepdim=True)
        assert int(counts.min()) < 60 == int(counts.max())
        is_wanted = torch.arange(60) < counts
        assert torch.equal((values >= least).sum(dim=2, keepdim=True), counts)
        assert torch.equal(values[is_wanted], expected.values[is_wanted])
        assert torch.equal(indices[is_wanted], expected.indices[is_wanted])

    def test_equal_numbers_keep_their_order(self, kernel_of):
        kernel_of("compiled")
        numbers = torch.randint(-3, 3, (4, 500)).float()
        expected = numbers.sort(dim=1, descending=True, stable=True)
        assert torch.equal(largest(numbers, 300)[1], expected.indices[:, :300])

    def test_what_is_no_number_is_left_out(self, kernel_of):
        kernel_of("compiled")
        values, indices = largest(torch.tensor([[torch.nan, 1.0, 2.0]]), 3)
        assert (values.tolist(), indices.tolist()) == ([[2.0, 1.0, -torch.inf]], [[2, 1, 0]])


@dataclass(frozen=True)
class Rows:
    """Sizes of what is attended to."""

    batch_size: int = 2
    num_heads: int = 2
    groups: int = 3
    key_dim: int = 64
    value_dim: int = 64
    num_slots: int = 90
    most: int = 40
    window: int = 7
    # Several of them
    page_tokens: int = 32


ROW_CASES = {
    "groups of three": Rows(),
    "one of each": Rows(batch_size=1, num_heads=1, groups=1, num_slots=1, most=1, window=1),
    "as many heads as queries, small": Rows(groups=1, key_dim=20, value_dim=20, most=63),
    "one head for nine queries": Rows(num_heads=1, groups=9, key_dim=40, value_dim=40, window=65),
    "different keys and values": Rows(groups=4, key_dim=80, value_dim=24, num_slots=200, most=130),
    "a head as small as a vector": Rows(key_dim=8, value_dim=9, page_tokens=1),
    "smaller than any vector": Rows(key_dim=3, value_dim=1),
    "large": Rows(batch_size=1, key_dim=300, value_dim=256, most=70),
    "long": Rows(batch_size=1, num_slots=2500, most=2049, page_tokens=1024),
}


def random_rows(case, dtype=torch.float32, counts=None):
    """Arguments of `attend_rows`; nobody looks at rows that were not chosen, nor at room beyond the window."""
    num_pages = -(-case.num_slots // case.page_tokens)
    slots = torch.rand(case.batch_size, case.num_heads, case.num_slots).topk(case.most, dim=2).indices
    count = torch.randint(0, case.most + 1, slots.shape[:2])
    count[0, 0] = case.most
    count[-1, -1] = min(count[-1, -1], 0 if case.batch_size > 1 else case.most)
    count = count if counts is None else torch.tensor(counts)
    is_filling = torch.arange(case.most) >= count[..., None]
    slots = slots.masked_fill(is_filling, 0)
    row_dim = case.key_dim + case.value_dim
    rows = torch.randn(case.batch_size, case.num_heads, num_pages * case.page_tokens, row_dim)
    is_chosen = torch.zeros(rows.shape[:3], dtype=torch.bool).scatter_(2, slots, True)
    # In plain PyTorch filling is read, if only to count nothing
    is_chosen[:, :, 0] = True
    rows = rows.masked_fill(~is_chosen[..., None], torch.nan).to(dtype)
    window = torch.randn(case.batch_size, case.num_heads, case.window + 3, row_dim)
    window[:, :, case.window :] = torch.nan
    keys, values = (part.to(dtype).contiguous() for part in window.split([case.key_dim, case.value_dim], dim=3))
    query = torch.randn(case.batch_size, case.num_heads, case.groups, case.key_dim).to(dtype)
    pages = [page.contiguous() for page in rows.split(case.page_tokens, dim=2)]
    return [query, pages, slots, count, keys[:, :, : case.window], values[:, :, : case.window], 0.3]


def attend_rows(query, pages, slots, count, keys, values, scale, kernel, mask=None, positions=None, window_start=0):
    """Attention over rows by either kernel: where they stand, or brought together."""
    if kernel == "compiled":
        return attend_compiled(query, pages, slots, count, keys, values, scale, mask, positions, window_start)
    rows = gather_rows(pages, slots).split([query.shape[3], values.shape[3]], dim=3)
    mask = None if mask is None else mask[:, None, None]
    positions = slots if positions is None else positions
    return attend_staged(query, *rows, count, keys, values, scale, mask, positions, window_start)


def reference(query, pages, slots, count, keys, values, scale, mask=None, positions=None, window_start=0):
    """Head by head in float64."""
    rows = torch.cat([page.double() for page in pages], dim=2)
    output = query.new_zeros(*query.shape[:3], values.shape[3], dtype=torch.double)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own = slots[b, h, : count[b, h]]
            all_keys = torch.cat([rows[b, h, own, : query.shape[3]], keys[b, h].double()])
            all_values = torch.cat([rows[b, h, own, query.shape[3] :], values[b, h].double()])
            scores = query[b, h].double() @ all_keys.T * scale
            if mask is not None:
                columns = own if positions is None else positions[b, h, : count[b, h]]
                line = torch.cat([mask[b, columns], mask[b, window_start : window_start + keys.shape[2]]])
                line = torch.zeros_like(scores[0]).masked_fill(~line, -torch.inf) if line.dtype == torch.bool else line
                scores = scores + line
            output[b, h] = scores.softmax(dim=1).nan_to_num() @ all_values
    return output


def check(arguments, kernel, **masking):
    query = arguments[0]
    output = attend_rows(*arguments, **masking, kernel=kernel)
    assert output.dtype == query.dtype
    assert relative_error(output, reference(*arguments, **masking)) < TOLERANCE[query.dtype]


@pytest.mark.parametrize("kernel", KERNELS)
class TestAttendRows:
    @pytest.mark.parametrize("name", ROW_CASES)
    def test_matches_float64(self, name, kernel):
        check(random_rows(ROW_CASES[name]), kernel)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("sizes", [{}, {"key_dim": 20, "value_dim": 28}], ids=str)
    def test_matches_float64_in_half_precision(self, dtype, sizes, kernel):
        check(random_rows(replace(ROW_CASES["groups of three"], **sizes), dtype), kernel)

    def test_heads_that_fetch_nothing(self, kernel):
        check(random_rows(ROW_CASES["groups of three"], counts=[[0, 40], [1, 0]]), kernel)
        check(random_rows(ROW_CASES["groups of three"], counts=[[0, 0], [0, 0]]), kernel)

    def test_left_padding(self, kernel):
        case = ROW_CASES["groups of three"]
        mask = torch.arange(case.num_slots + case.window) >= torch.tensor([0, 60])[:, None]
        check(random_rows(case), kernel, mask=mask, window_start=case.num_slots)

    def test_sliding_window_of_one_item_expanded(self, kernel):
        case = ROW_CASES["groups of three"]
        mask = (torch.arange(case.num_slots + case.window) >= 70)[None].expand(2, -1)
        check(random_rows(case), kernel, mask=mask, window_start=case.num_slots)

    @pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
    def test_additive_mask(self, lowest, kernel):
        case = ROW_CASES["different keys and values"]
        mask = torch.randn(2, case.num_slots + case.window)
        mask[1, :150] = lowest
        check(random_rows(case), kernel, mask=mask, window_start=case.num_slots)

    @pytest.mark.parametrize("is_boolean", [True, False])
    def test_slots_in_another_order_than_positions(self, is_boolean, kernel):
        case = ROW_CASES["different keys and values"]
        arguments = random_rows(case)
        mask = torch.randn(2, 300) if not is_boolean else torch.rand(2, 300) > 0.5
        positions = torch.randint(0, 250, arguments[2].shape)
        # What is behind the counts has no token
        positions[torch.arange(case.most).expand_as(positions) >= arguments[3][..., None]] = -1
        check(arguments, kernel, mask=mask, positions=positions, window_start=250)

    def test_nothing_to_attend_to_is_zero(self, kernel):
        arguments = random_rows(ROW_CASES["groups of three"])
        mask = torch.ones(2, 97, dtype=torch.bool)
        mask[1] = False
        output = attend_rows(*arguments, mask=mask, window_start=90, kernel=kernel)
        assert output[0].isfinite().all() and (output[0] != 0).any()
        assert (output[1] == 0).all()

    def test_what_stands_in_the_filling_does_not_matter(self, kernel):
        outputs, arguments = [], random_rows(ROW_CASES["groups of three"], counts=[[0, 40], [1, 2]])
        filling = torch.arange(arguments[2].shape[2]) >= arguments[3][..., None]
        for place in (0, 5):
            arguments[2] = arguments[2].masked_fill(filling, place)
            outputs.append(attend_rows(*arguments, kernel=kernel))
            arguments[1] = [page.nan_to_num(torch.inf) for page in arguments[1]]
        assert torch.equal(*outputs)

    def test_scores_of_any_size(self, kernel):
        arguments = random_rows(ROW_CASES["groups of three"])
        arguments[-1] = 60.0
        check(arguments, kernel)

    def test_threads_and_neighbours_do_not_change_a_bit(self, num_threads, kernel):
        query, pages, slots, count, keys, values, scale = random_rows(ROW_CASES["different keys and values"])
        count = torch.tensor([[130, 7], [64, 0]])
        together = attend_rows(query, pages, slots, count, keys, values, scale, kernel=kernel)
        for item in range(2):
            one = slice(item, item + 1)
            alone = [query[one], [page[one] for page in pages], slots[one], count[one], keys[one]]
            assert torch.equal(together[one], attend_rows(*alone, values[one], scale, kernel=kernel))

    def test_window_and_rows_of_any_strides(self, kernel):
        arguments = random_rows(ROW_CASES["groups of three"])
        expected = attend_rows(*arguments, kernel=kernel)
        arguments[1] = [page.transpose(1, 2).contiguous().transpose(1, 2) for page in arguments[1]]
        arguments[4:6] = [states.transpose(2, 3).contiguous().transpose(2, 3) for states in arguments[4:6]]
        torch.testing.assert_close(attend_rows(*arguments, kernel=kernel), expected)


def test_compiled_threads_agree():
    arguments, outputs = random_rows(ROW_CASES["one head for nine queries"]), []
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(attend_rows(*arguments, kernel="compiled"))
    torch.set_num_threads(before)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kernel", ["torch", "compiled"])
@pytest.mark.parametrize("are_mapped", [False, True])
@pytest.mark.parametrize(
    ("num_pages", "page_tokens", "row_dim", "dtype"),
    [(1, 64, 128, torch.float32), (3, 64, 7, torch.uint8), (30, 16, 33, torch.bfloat16), (12, 32, 1, torch.float16)],
)
def test_gathered_rows_are_those_of_all_pages(
    kernel, kernel_of, num_threads, are_mapped, num_pages, page_tokens, row_dim, dtype
):
    pages = []
    for _ in range(num_pages):
        # In memory of its own: what is let go of is lost if it is no file
        file = mmap.mmap(-1, 6 * page_tokens * row_dim * dtype.itemsize)
        pages.append(torch.frombuffer(file, dtype=dtype).view(2, 3, page_tokens, row_dim))
        pages[-1].copy_(torch.randint(0, 100, pages[-1].shape))
    slots = torch.randint(0, num_pages * page_tokens, (2, 3, 41))
    expected = torch.cat(pages, dim=2).gather(2, slots[..., None].expand(-1, -1, -1, row_dim))
    kernel_of(kernel)
    found = gather_rows(pages, slots[:, :, :40], are_mapped=are_mapped)
    none = gather_rows(pages, slots[:, :, :0], are_mapped=are_mapped)
    assert torch.equal(found, expected[:, :, :40]) and none.shape == (2, 3, 0, row_dim)


class TestChoice:
    @pytest.fixture(autouse=True)
    def forget(self, monkeypatch):
        monkeypatch.delenv("KVCACHE_PLUGINS_KERNELS", raising=False)
        engine._kernel_on.cache_clear()
        yield
        engine._kernel_on.cache_clear()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_by_default_cpus_run_compiled_whatever_the_group(self, dtype):
        assert choose_rows_kernel(torch.randn(1, 1, 71, 64), 64, dtype) == ("compiled", False)

    @pytest.mark.parametrize(("dims", "dtype"), [((64, 64), torch.float64), ((64, 700), torch.float32)], ids=str)
    def test_what_the_kernel_cannot_read_is_left_to_pytorch(self, dims, dtype):
        assert choose_rows_kernel(torch.randn(1, 1, 3, dims[0]), dims[1], dtype) == ("torch", True)

    def test_variable_overrides(self, kernel_of):
        kernel_of("torch")
        assert choose_rows_kernel(torch.randn(1, 1, 3, 64), 64, torch.float32) == ("torch", False)

    def test_without_kernels_pytorch_does_the_same(self, monkeypatch):
        query, codes, scale, keys = random_codes(CODE_CASES["one token"])
        monkeypatch.setattr(library, "why_missing", lambda: "the C kernels are not compiled")
        with pytest.warns(UserWarning, match="plain PyTorch.*C kernels are not compiled"):
            scores = code_scores(query, codes, scale, 1, 4)
        assert relative_error(scores, query.double() @ keys.transpose(2, 3)) < SCORE_TOLERANCE
        assert choose_rows_kernel(query, 64, torch.float32) == ("torch", True)


@pytest.mark.parametrize("nbits", [2, 4])
def test_model_says_the_same_through_every_kernel(tiny_llama, kernel_of, nbits):
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    outputs = []
    for kernel in KERNELS:
        kernel_of(kernel)
        with InfiniGenCache(tiny_llama, scoring_nbits=nbits, full_layers=()) as cache:
            options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
            outputs.append(tiny_llama.generate(input_ids, past_key_values=cache, **options))
        stats = cache.stats()
        assert stats["fused_calls"] == (0 if kernel == "torch" else stats["selected_calls"])
        assert stats["selected_calls"] > 0 == stats["kernel_fallbacks"]
    assert torch.equal(*outputs)
