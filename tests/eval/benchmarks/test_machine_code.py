"""Loops and kinds of instruction are read from a disassembly; committed counts are those that kernels compile to."""

import json
from pathlib import Path

import pytest

from kvcache_plugins.eval.benchmarks.kernels import Listing


COMMITTED = Path(__file__).resolve().parents[3] / "eval" / "results" / "machine_code_sm90.json"
TOLERANCE = 0.05
# One of each kind, as options; the last are all that there are
CASES = {
    "chunks": ("--cache", "kivi-2bit", "--cache", "gear-4bit"),
    "rows": ("--cache", "transform", "--head-dim", "64"),
    "all": (),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_counts_equal_the_committed_ones(case, tmp_path, run_compiling):
    options = [*CASES[case], "--out", str(tmp_path / "counts.json")]
    run_compiling(*options, program=("-m", "kvcache_plugins.cli", "bench", "machine-code"))
    counted, committed = rows_of(tmp_path / "counts.json"), rows_of(COMMITTED)
    assert len(counted) == {"chunks": 2, "rows": 1}.get(case, sum(key[1] == "attention" for key in committed))
    for key, row in counted.items():
        expected = committed[key]["instructions_a_number"]
        assert row["instructions_a_number"] == pytest.approx(expected, rel=TOLERANCE), key
        assert row["spilled"] <= committed[key]["spilled"] + 32, key


def rows_of(path):
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["cache"], row["kernel"], row["head_dim"]): row for row in rows}


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_4:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_2:
        /*0020*/                   LDG.E.U16 R3, desc[UR4][R2.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_1:
        /*0040*/                   STL [R1], R3 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   PRMT R3, R3, 0x5410, R4 ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/               @P2 BRA `(.L_x_4) ;
        /*0090*/                   EXIT ;
.L_x_5:
        /*00a0*/                   BRA `(.L_x_5);
"""


def test_tile_loop_lies_within_the_chunk_loop():
    listing = Listing(LISTING)
    loop = listing.tile_loop()
    assert loop == (2, 7)
    assert listing.loops_within(loop) == [(4, 5)]
    assert listing.count(loop) == {
        "global memory": 1,
        "tensor core": 1,
        "local memory": 1,
        "byte permutation": 1,
        "control": 2,
    }
    counts = listing.count(loop, without=listing.loops_within(loop))
    assert counts == {"global memory": 1, "tensor core": 1, "byte permutation": 1, "control": 1}


def test_shortest_loop_with_products_is_over_whole_tiles():
    rest = """
.L_x_6:
        /*00b0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00c0*/               @P3 BRA `(.L_x_6) ;
        /*00d0*/                   EXIT ;
"""
    listing = Listing(LISTING + rest)
    assert listing.tile_loop() == (2, 7)
    assert listing.shortest_loop() == (11, 12)


def test_a_kernel_without_products_has_no_loop_over_tiles():
    with pytest.raises(ValueError, match="no loop with products"):
        Listing(LISTING.replace("HMMA.16816.F32", "FADD")).tile_loop()
