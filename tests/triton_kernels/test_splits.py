"""Splits keep the last wave of programs full."""

import pytest

from kvcache_plugins.triton_kernels.attention.splits import choose_tiles_per_split


@pytest.mark.parametrize("num_sequences", [1, 8, 34 * 8, 40 * 8, 20 * 8, 9 * 32, 2000])
def test_programs_are_busy(num_sequences):
    num_tiles, num_slots = 512, 132 * 8
    tiles = choose_tiles_per_split(num_tiles, num_sequences, num_slots, min_tiles=4)
    programs = num_sequences * -(-num_tiles // tiles)
    waves = -(-programs // num_slots)
    # What all slots could go through, of which sequences times tiles are wanted
    busy = num_sequences * num_tiles / (waves * tiles * num_slots)
    assert busy > 0.85 or tiles == 4


def test_a_split_has_its_least_tiles():
    assert choose_tiles_per_split(16, 1, 1000, min_tiles=4) == 4
    assert choose_tiles_per_split(2, 1, 1000, min_tiles=4) == 4
    assert choose_tiles_per_split(0, 1, 1000, min_tiles=4) == 4
