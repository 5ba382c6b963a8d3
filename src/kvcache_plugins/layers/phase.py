"""Phases of a layer."""

from enum import Enum


class Phase(Enum):
    """
    State of a layer between two calls.

    A prompt is committed right after its attention; decoded tokens are packed at the beginning of the next update, so
    that a rollback finds them exact.
    """

    EMPTY = "holds no tokens"
    PROMPT = "holds an update that waits for its attention, and is committed then"
    DENSE = "holds too few tokens to pack any: two tensors, as in a dense cache"
    STORED = "holds tokens in the layer's own form"
