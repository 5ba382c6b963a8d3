"""Structures of the C kernels: the header is read as a compiler reads it, and tensors that do not fit are refused."""

import ctypes
import subprocess

import pytest
import torch

from kvcache_plugins.kernels import build
from kvcache_plugins.kernels.c_structs import (
    STRUCTURES,
    TensorField,
    _read_constants,
    _read_structures,
    check,
    make,
    word_offsets,
)


HEADER = """
enum {
    TILE = 64,                      /* tokens */
    LAST = 7
};

typedef struct {
    int64_t next;
} Tasks;

typedef struct {
    Tasks tasks;                    /* of heads */
    int64_t shape[4];
    double scale;
    const float *states SHAPE(batch, 2, TILE, any); /* or 0 */
    const void *order SHAPE(batch) DTYPES(uint8, int16);
    const char *const *pages SHAPES(batch, size) DTYPES(any);
    const Tasks *others;
} Args;
"""


@pytest.mark.skipif(not build.compiler(), reason="needs a compiler")
def test_sizes_and_offsets_equal_the_compilers(tmp_path):
    """Every field that C has is read: a missing one would move the others."""
    lines = ['#include "abi.h"']
    for name, kind in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");')
        for field, *_ in kind._fields_:
            place = getattr(kind, field)
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {place.offset}, "{name}.{field}");')
            lines.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {place.size}, "{name}.{field}");')
    source = tmp_path / "abi.c"
    source.write_text("\n".join(lines))
    command = [*build.compiler(), "-std=gnu11", f"-I{build.SOURCES}", "-c", str(source), "-o", str(tmp_path / "abi.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(STRUCTURES) > 20, done.stderr


class TestReading:
    def test_fields_and_declarations_are_parsed(self):
        constants = _read_constants(HEADER)
        args = _read_structures(HEADER, constants)["Args"]
        assert constants == {"TILE": 64, "LAST": 7}
        assert [field for field, *_ in args._fields_] == [
            "tasks", "shape", "scale", "states", "order", "pages", "others"
        ]  # fmt: skip
        assert ctypes.sizeof(args) == 8 * (1 + 4 + 1 + 4)
        assert args.pointers == {"states", "order", "pages", "others"}
        assert args.tensors == {
            "states": TensorField((torch.float32,), ("batch", 2, 64, None)),
            "order": TensorField((torch.uint8, torch.int16), ("batch",)),
            "pages": TensorField((), ("batch", "size")),
        }

    @pytest.mark.parametrize(
        "line", ["int64_t a, b;", "uint8_t *rows SHAPE(batch) SHAPE(heads);", "float (*rows)[4];"]
    )
    def test_a_field_that_cannot_be_read_is_an_error(self, line):
        source = f"typedef struct {{\n    {line}\n}} Args;\n"
        with pytest.raises(ValueError, match="of `Args` in abi.h is no field that can be read"):
            _read_structures(source, {})


class TestMake:
    def test_numbers_structures_and_tensors_are_filled_in(self):
        rows, padding = torch.zeros(2, 3, 5, 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        sizes = {"batch": 2, "heads": 3, "row_size": 7}
        positions = make("TokenPositions", sizes, rotary=None, first=9, padding=padding)
        target = make("RowTarget", sizes, capacity=5, rows=rows, used=2)
        args = make("EncodeArgs", sizes, positions=positions, target=target, limit=0.5)
        assert (args.positions.first, args.positions.padding, args.positions.rotary) == (9, padding.data_ptr(), None)
        assert (args.target.rows, args.target.used, args.limit, args.overflow) == (rows.data_ptr(), 2, 0.5, 0)
        assert args.inputs["target"].inputs["rows"] is rows

    def test_pointers_to_structures_and_lists_of_tensors_are_filled_in(self):
        pages = [torch.zeros(1, 2, 4, 6) for _ in range(3)]
        sizes = {"batch": 1, "heads": 2}
        tokens = make("SelectableTokens", sizes, page_tokens=4, row_dim=6, pages=pages)
        args = make("SelectedAttentionArgs", sizes, tokens=tokens)
        assert args.tokens == tokens.address == ctypes.addressof(tokens)
        addresses = (ctypes.c_void_p * 3).from_address(tokens.pages)
        assert list(addresses) == [page.data_ptr() for page in pages]
        with pytest.raises(ValueError, match="`pages` has to be 1 x 2 x 4 x 6"):
            make("SelectableTokens", sizes, page_tokens=4, row_dim=6, pages=[*pages, torch.zeros(1, 2, 4, 5)])

    def test_word_offsets_equal_those_of_the_fields(self):
        kind, offsets = STRUCTURES["TopKArgs"], word_offsets("TopKArgs")
        assert offsets.limit == kind.limit.offset // 8 and offsets.count == 1


class TestCheck:
    def test_a_matching_tensor_gives_its_address(self):
        tensor = torch.zeros(2, 3)
        for shape in ((2, 3), (None, 3), (None, None), ("size", 3)):
            assert check("x", tensor, TensorField((torch.float32,), shape), {"size": 2}) == tensor.data_ptr()
        field = TensorField((torch.int64, torch.float32), (1, 3))
        assert check("x", tensor[1:], field, {}) == tensor.data_ptr() + 12

    @pytest.mark.parametrize(
        ("tensor", "shape"),
        {
            "dtype": (torch.zeros(2, 3, dtype=torch.float64), (2, 3)),
            "size": (torch.zeros(2, 4), (2, 3)),
            "fewer-dimensions": (torch.zeros(6), (2, 3)),
            "no-last-dimension": (torch.zeros(2), (2, 3)),
            "more-dimensions": (torch.zeros(1, 2, 3), (2, 3)),
            "one-more-behind": (torch.zeros(2, 3, 4), (2, 3)),
            "transposed": (torch.zeros(3, 2).T, (2, 3)),
            "expanded": (torch.zeros(1, 3).expand(2, 3), (2, 3)),
            "every-other": (torch.zeros(2, 6)[:, ::2], (None, None)),
            "device": (torch.zeros(2, 3, device="meta"), (2, 3)),
        }.values(),
        ids=lambda value: None,
    )
    def test_other_tensors_are_refused(self, tensor, shape):
        with pytest.raises(ValueError, match="`codes` has to be .* of torch.float32, contiguous, on the CPU, but got"):
            check("codes", tensor, TensorField((torch.float32,), shape), {})
