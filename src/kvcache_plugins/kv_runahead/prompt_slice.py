"""The part of a prompt that one rank prefills."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """
    Consecutive tokens of a prompt.

    Attributes:
        start, stop (`int`): the first token, and the one behind the last.
        batch_size (`int`): items of the prompt.
        padding (`list[int]`, *optional*): padding at the start of every item of the prompt.
    """

    start: int
    stop: int
    batch_size: int
    padding: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the slice."""
        return self.stop - self.start

    def padding_for(self, batch_size: int) -> list[int] | None:
        """Padding of every item of a forward, which may repeat the prompt's items for beams."""
        if self.padding is None:
            return None
        repeats = batch_size // self.batch_size
        return [count for count in self.padding for _ in range(repeats)]
