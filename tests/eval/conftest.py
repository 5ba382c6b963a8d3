"""Models in folders, with a tokenizer, for commands that load them in processes of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def saved_with_tokenizer(
    tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """A factory of folders with a tiny model and a tokenizer of one ASCII character a token, code 0 ends a text."""

    def save(architecture: str, **fields: object) -> str:
        folder: Path = tmp_path_factory.mktemp(architecture)
        end = chr(0)
        characters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        characters.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=end, pad_token=end).save_pretrained(folder)
        tiny_model(architecture, **fields).save_pretrained(folder)
        return str(folder)

    return save
