"""Rows of pages are moved, and codes scored, as plain PyTorch does it: in Triton's interpreter, or on a GPU.

Outputs are full of NaN before, so that rows written by mistake show, and rows left out too.
"""

import ctypes
import itertools
import mmap

import pytest
import torch
from kernel_cases import DEVICE, Scored, needs_triton, random_codes

from kvcache_plugins.triton_kernels.gather import gather_rows, page_addresses, write_rows
from kvcache_plugins.triton_kernels.scores import score_codes


pytestmark = needs_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
# Error of scores relative to the largest: two parts of 11 bits each
SCORE_TOLERANCE = 1e-5
PAGE_TOKENS = 16


def make_pages(
    num_pages: int, batch_size: int, num_heads: int, row_dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_pages, batch_size, num_heads, PAGE_TOKENS, row_dim)
    pages = torch.randn(shape, generator=generator).to(dtype).unbind(0)
    return [page.clone().pin_memory() if DEVICE.type == "cuda" else page.clone() for page in pages]


def make_slots(num_pages: int, batch_size: int, num_heads: int, num_slots: int) -> torch.Tensor:
    """Distinct slots of each head, in any order."""
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(batch_size, num_heads, num_pages * PAGE_TOKENS, generator=generator)
    return order.argsort(dim=2)[:, :, :num_slots].to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype).to(DEVICE)


def rows_of(pages: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """The rows `[B, H, K, R]` of all slots, by plain indexing."""
    stored = torch.cat(pages, dim=2)
    batch, head = (
        torch.arange(size).reshape(shape) for size, shape in zip(slots.shape, [(-1, 1, 1), (-1, 1)], strict=False)
    )
    return stored[batch, head, slots.cpu()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, as NaN equals itself in them."""
    return tensor.cpu().contiguous().view(torch.uint8)


def check_gather(pages, slots, count, *, offset=0, behind=0, room=0):
    """Gathers into rows with other channels before and behind them, and rows behind all of them; none may change."""
    batch_size, num_heads, num_slots = slots.shape
    row_dim, dtype = pages[0].shape[3], pages[0].dtype
    whole = poisoned(batch_size, num_heads, num_slots + room, offset + row_dim + behind, dtype=dtype)
    expected = whole.cpu().clone()
    rows = expected[:, :, :num_slots, offset : offset + row_dim]
    last = len(pages) * PAGE_TOKENS - 1
    is_row = torch.arange(num_slots) < (num_slots if count is None else count.cpu()[..., None])
    known = rows_of(pages, slots.clamp(max=last))
    rows.copy_(torch.where(is_row[..., None], known.float(), rows.float()).to(dtype))
    out = whole[:, :, :num_slots, offset : offset + row_dim]
    gather_rows(page_addresses(pages, DEVICE), slots, count, out, PAGE_TOKENS)
    assert torch.equal(bits(whole), bits(expected))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_pages", "batch_size", "num_heads", "row_dim", "num_slots"),
    [(1, 1, 1, 1, 1), (3, 2, 3, 129, 37), (4, 1, 2, 40, 63), (2, 2, 2, 256, 5), (2, 1, 1, 1026, 9)],
)
def test_rows_up_to_count_are_gathered(num_pages, batch_size, num_heads, row_dim, num_slots, dtype):
    generator = torch.Generator().manual_seed(2)
    count = torch.randint(0, num_slots + 1, (batch_size, num_heads), generator=generator)
    count[-1, -1] = num_slots
    pages = make_pages(num_pages, batch_size, num_heads, row_dim, dtype)
    check_gather(pages, make_slots(num_pages, batch_size, num_heads, num_slots), count.to(DEVICE))


@pytest.mark.parametrize("num_slots", [11, 0])
@pytest.mark.parametrize("number", [None, 4, 20])
def test_counts_beyond_the_slots_are_clamped(number, num_slots):
    pages, slots = make_pages(2, 1, 2, 8, torch.float16), make_slots(2, 1, 2, num_slots)
    # Slots of missing pages, which would be read at address zero
    slots[:, :, 11 if number is None else number :] = 10**9
    check_gather(pages, slots, None if number is None else torch.full((1, 2), number, device=DEVICE), room=2)


@pytest.mark.parametrize("offset", [0, 1, 2, 4], ids="offset{}".format)
def test_any_strides_and_alignment_are_gathered(offset):
    """Slots and counts of every other head, into rows that begin at an odd number and lie apart."""
    slots = make_slots(2, 2, 3, 8).repeat_interleave(2, dim=1)[:, ::2]
    count = torch.tensor([[8, 0, 3], [5, 8, 1]], device=DEVICE).T.contiguous().T
    check_gather(make_pages(2, 2, 3, 6, torch.bfloat16), slots, count, offset=offset, behind=9 - offset)


def test_more_rows_than_programs_hold_are_gathered():
    count = torch.full((1, 1), 601, device=DEVICE)
    check_gather(make_pages(40, 1, 1, 512, torch.float32), make_slots(40, 1, 1, 640), count)


@pytest.mark.parametrize(("row_dim", "stride", "is_counted"), [(33, 40, True), (10, 10, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_written_where_they_belong(dtype, row_dim, stride, is_counted):
    pages, slots = make_pages(3, 2, 2, row_dim, dtype), make_slots(3, 2, 2, 21)
    expected = torch.cat(pages, dim=2)
    rows = torch.randn(2, 2, 21, stride, generator=torch.Generator().manual_seed(3)).to(dtype)[..., :row_dim]
    count = torch.tensor([[21, 4], [0, 13]] if is_counted else [[21, 21], [21, 21]])
    on_device = torch.empty(2, 2, 21, stride, dtype=dtype, device=DEVICE)[..., :row_dim].copy_(rows)
    given = count.to(DEVICE) if is_counted else None
    write_rows(page_addresses(pages, DEVICE), slots, given, on_device, PAGE_TOKENS)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for item, head in itertools.product(range(2), range(2)):
        number = int(count[item, head])
        expected[item, head, slots[item, head, :number].cpu()] = rows[item, head, :number]
    assert torch.equal(bits(torch.cat(pages, dim=2)), bits(expected))


def before_a_guard(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the end of memory behind which nothing may be read."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    end = -(-size // page) * page
    memory = mmap.mmap(-1, end + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + end
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0
    copied = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size)
    return copied.copy_(tensor.contiguous().view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="guards memory of the host, which kernels on a GPU do not read")
def test_nothing_behind_slots_and_rows_is_read():
    """Tiles of 16 slots and 8 words have 11 slots and 5 words in use."""
    pages, slots = make_pages(2, 1, 2, 5, torch.float32), make_slots(2, 1, 2, 11)
    guarded, rows = before_a_guard(slots), before_a_guard(rows_of(pages, slots) + 1)
    out = before_a_guard(poisoned(1, 2, 11, 5, dtype=torch.float32))
    gather_rows(page_addresses(pages, DEVICE), guarded, None, out, PAGE_TOKENS)
    assert torch.equal(out, rows_of(pages, slots))
    write_rows(page_addresses(pages, DEVICE), guarded, None, rows, PAGE_TOKENS)
    assert torch.equal(rows_of(pages, slots), rows)


def test_pages_that_are_not_contiguous_are_refused():
    pages = make_pages(1, 1, 2, 8, torch.float32)
    with pytest.raises(AssertionError):
        page_addresses([pages[0].transpose(1, 2)], DEVICE)


SCORED = {
    "one-token": Scored(1, 1, 1, 8, 2, 1),
    "odd-head": Scored(2, 3, 4, 20, 4, 63),
    "8-bits": Scored(1, 2, 7, 64, 8, 129),
    "many-queries": Scored(1, 1, 33, 128, 4, 200),
    "bytes-not-full": Scored(2, 1, 2, 33, 2, 40),
    "8-bits-odd": Scored(2, 3, 2, 24, 8, 50),
    "wide": Scored(1, 1, 1, 256, 2, 70),
}


@pytest.mark.parametrize("scored", SCORED.values(), ids=SCORED)
def test_scores_of_codes_equal_scores_of_decoded_keys(scored):
    """Scores rows in use of larger storage, by queries of sizes apart by orders that are no one tensor's own."""
    query, codes, scale, keys = random_codes(scored)
    query = (query * torch.logspace(-3, 3, scored.groups)[:, None]).transpose(1, 2).contiguous().transpose(1, 2)
    length, expected = scored.length, query.double() @ keys.transpose(2, 3)
    inputs = codes.to(DEVICE)[:, :, :length], scale.to(DEVICE)[:, :, :length], query.to(DEVICE)
    actual = score_codes(*inputs, scored.nbits).cpu()
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    error = (actual - expected).abs().amax(dim=3) / expected.abs().amax(dim=3)
    assert error.max() < SCORE_TOLERANCE
    none = score_codes(*(each[:, :, :0] for each in inputs[:2]), inputs[2], scored.nbits)
    assert none.shape == (*expected.shape[:3], 0)


def test_many_heads_share_programs_and_short_groups_fill_their_tiles(monkeypatch):
    from kvcache_plugins.triton_kernels import gather, scores

    grids, arguments = [], []

    class Recording:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            grids.append(grid)

            def launch(**given):
                arguments.append(given)
                self.kernel[grid](**given)

            return launch

    monkeypatch.setattr(gather, "_move_rows_kernel", Recording(gather._move_rows_kernel))
    monkeypatch.setattr(scores, "_scores_kernel", Recording(scores._scores_kernel))
    pages = make_pages(1, 5, 32, 4, torch.float32)
    slots = make_slots(1, 5, 32, 3)
    rows = poisoned(5, 32, 3, 4, dtype=torch.float32)
    gather_rows(page_addresses(pages, DEVICE), slots, None, rows, PAGE_TOKENS)
    assert torch.equal(rows.cpu(), rows_of(pages, slots))
    assert grids.pop() == (64, 1)
    codes = torch.zeros(1, 2, 64, 16, dtype=torch.uint8, device=DEVICE)
    score_codes(codes, torch.ones(1, 2, 64, device=DEVICE), torch.ones(1, 2, 1, 32, device=DEVICE), 4)
    assert arguments[-1]["BLOCK_T"] == 64
