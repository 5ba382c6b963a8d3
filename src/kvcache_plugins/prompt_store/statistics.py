"""What a store has done since it was made."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class StoreStatistics:
    """
    Attributes:
        prompts (`int`): prompts that a cache was asked for.
        hits (`int`): those of which a beginning was known.
        tokens_asked (`int`), tokens_saved (`int`): tokens of all of them, and those that did not have to be read.
        blocks_loaded (`int`), bytes_loaded (`int`), load_seconds (`float`): files read.
        blocks_kept (`int`), bytes_kept (`int`), keep_seconds (`float`): files written.
        blocks_damaged (`int`): files that were found to be damaged, and removed.
        blocks_not_kept (`int`): those that could not be written, or for which there was no room.
    """

    prompts: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_saved: int = 0
    blocks_loaded: int = 0
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    blocks_kept: int = 0
    bytes_kept: int = 0
    keep_seconds: float = 0.0
    blocks_damaged: int = 0
    blocks_not_kept: int = 0

    def note_prompt(self, num_tokens: int, num_saved: int) -> None:
        """A cache was asked for a prompt."""
        self.prompts += 1
        self.hits += num_saved > 0
        self.tokens_asked += num_tokens
        self.tokens_saved += num_saved

    def to_dict(self) -> dict[str, int | float]:
        """All of them by name."""
        return asdict(self)
