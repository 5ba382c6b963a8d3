"""Layout of keys or of values that a kernel is compiled for: one constant instead of fourteen.

Legend as in `attend.py`.
"""

from typing import NamedTuple


class Field(NamedTuple):
    """
    A bit field of a word: the codes of channels that lie as far apart as words have bytes.

    Args:
        down (`int`): how far a word is shifted to the right.
        bit (`int`): the field's lowest bit after that.
        width (`int`): its bits.
        shift (`int`): of its bits within the code.
        first_channel (`int`): whose code the first word has.
        group (`int`): the group of all its channels.
    """

    down: int
    bit: int
    width: int
    shift: int
    first_channel: int
    group: int


class Piece(NamedTuple):
    """
    Words of a row that are loaded at once.

    Args:
        first_byte, num_words (`int`): which.
        unit (`int`): bytes of a word, 1 or 2.
        block (`int`): words of the block that covers them.
        plane (`int`): the plane that they are of.
        fields (`tuple[Field, ...]`): what they are taken apart into.
    """

    first_byte: int
    num_words: int
    unit: int
    block: int
    plane: int
    fields: tuple[Field, ...]


class SideLayout(NamedTuple):
    """
    How keys or values are stored.

    Args:
        dim (`int`): D.
        pieces (`tuple[Piece, ...]`): what rows of codes are taken apart into.
        codes_stride_t, scale_stride_s (`int`): from one row to the next. They hardly vary, and addresses that differ
            by constants share a register.
        by_channel (`bool`): whether tokens share a scale.
        num_groups (`int`): of a token, where they do not.
        tokens_per_group (`int`): that share a scale, 0 if it is all of a chunk or none.
        ranks (`tuple[int, ...]`): what R may be, of which there are two where prompts and chunks of decoded tokens
            share a kernel, none without low rank.
        block_rank (`int`): the block that covers R.
        has_outliers (`bool`): whether there are any.
        channel_bits (`int`): of an outlier's index.
    """

    dim: int
    pieces: tuple[Piece, ...]
    codes_stride_t: int
    scale_stride_s: int
    by_channel: bool
    num_groups: int
    tokens_per_group: int
    ranks: tuple[int, ...]
    block_rank: int
    has_outliers: bool
    channel_bits: int
