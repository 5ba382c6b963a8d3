"""How many programs share a sequence: as many as keep the last wave of programs full."""

_MAX_WAVES = 4


def choose_tiles_per_split(num_tiles: int, num_sequences: int, num_slots: int, *, min_tiles: int) -> int:
    """
    Tiles that a program goes through.

    All programs take equally long, so a wave that is half empty takes as long as a full one. Of the numbers of splits
    that fill one wave, two, ... the one is taken with which all waves together go through the fewest tiles.

    Args:
        num_tiles (`int`): tiles of a sequence.
        num_sequences (`int`): sequences, times heads, times blocks of rows.
        num_slots (`int`): programs that run at once.
        min_tiles (`int`): of one program, unless there are fewer.
    """
    candidates = {max(min_tiles, num_tiles)}
    for waves in range(1, _MAX_WAVES + 1):
        num_splits = max(1, waves * num_slots // max(1, num_sequences))
        candidates.add(max(min_tiles, -(-num_tiles // num_splits)))

    def tiles_in_turn(tiles: int) -> int:
        num_programs = num_sequences * -(-num_tiles // tiles)
        return -(-num_programs // num_slots) * tiles

    # Of equal ones that with the fewest partial results
    return min(sorted(candidates, reverse=True), key=tiles_in_turn)
