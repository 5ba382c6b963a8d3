"""Comparison: the reference first, distributions rather than texts, and one cache's failure is one row."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import create_cache, register_cache
from kvcache_plugins.console.inputs import encode_prompt
from kvcache_plugins.eval.harness import TokenTimer
from kvcache_plugins.eval.measures.comparison import compare_caches, first_difference, generate_with


Reference = tuple[PreTrainedModel, PreTrainedTokenizerBase]


# Writes token ids as numbers
DIGITS = SimpleNamespace(decode=lambda token_ids, skip_special_tokens=False: " ".join(map(str, token_ids)))


class BrokenLayer(DynamicLayer):
    """Takes the prompt and fails at the first decoded token."""

    def update(self, key_states: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        if self.get_seq_length():
            raise IndexError("too many indices for tensor of dimension 1")
        return super().update(key_states, *args, **kwargs)


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(2, 128, (150,))


def test_reference_comes_first_once_and_is_exact(tiny_llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    caches = ["gear-2bit", "dynamic", "gear-2bit"]
    rows = compare_caches(tiny_llama, DIGITS, prompt, caches, max_new_tokens=8)
    assert [row["cache"] for row in rows] == ["dynamic", "gear-2bit"]
    assert (rows[0]["kl"], rows[0]["first_difference"], rows[0]["error"]) == (0, None, None)
    assert rows[1]["kl"] > 0
    expected = tiny_llama.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, 150:].tolist()
    assert rows[0]["token_ids"] == expected
    assert rows[0]["text"] == " ".join(map(str, expected))


def test_kl_is_over_the_references_continuation_through_the_filled_cache(tiny_llama, prompt):
    rows = compare_caches(tiny_llama, DIGITS, prompt, ["kivi-4bit"], max_new_tokens=6)
    fed = torch.tensor(rows[0]["token_ids"][:-1])[None]
    logits = []
    with torch.no_grad():
        for name in ("dynamic", "kivi-4bit"):
            cache = create_cache(name, tiny_llama)
            tiny_llama(prompt[None], past_key_values=cache)
            logits.append(tiny_llama(fed, past_key_values=cache).logits[0].double().log_softmax(-1))
    expected = F.kl_div(logits[1], logits[0], log_target=True, reduction="batchmean").item()
    assert rows[1]["kl"] == pytest.approx(expected, rel=1e-4)
    assert rows[1]["kl"] > 0


def test_caches_that_choose_in_decode_steps_are_decoded(tiny_llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    cache = "infinigen:max_fetch_ratio=0.02,recent=4"
    rows = compare_caches(tiny_llama, DIGITS, prompt, [cache], max_new_tokens=6)
    # All at once they would be scored exactly, and show no error at all
    assert rows[1]["kl"] > 1e-6
    assert rows[1]["top1_agreement"] <= 1


def test_bytes_are_those_held_at_the_end(tiny_llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    row = compare_caches(tiny_llama, DIGITS, prompt, [], max_new_tokens=5)[0]
    # The last token is never fed
    assert row["memory"]["total_bytes"] == 2 * 2 * 2 * 32 * 4 * (150 + 5 - 1)
    assert row["memory"]["kv_percent"] == pytest.approx(200)
    assert row["seconds_per_token"] > 0
    assert row["prefill_seconds"] > 0


def test_a_failing_cache_has_a_row_with_its_error(tiny_llama, prompt, forgets):
    register_cache("broken", lambda model: Cache(layer_class_to_replicate=BrokenLayer), summary="fails")
    rows = compare_caches(tiny_llama, DIGITS, prompt, ["broken", "kivi-4bit"], max_new_tokens=4)
    assert [row["cache"] for row in rows] == ["dynamic", "broken", "kivi-4bit"]
    assert rows[1] == {"cache": "broken", "error": "IndexError: too many indices for tensor of dimension 1"}
    assert rows[2]["error"] is None


def test_one_token_has_kl_and_no_speed(tiny_llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    rows = compare_caches(tiny_llama, DIGITS, prompt, ["kivi-4bit"], max_new_tokens=1)
    assert rows[1]["kl"] > 0
    assert rows[1]["tokens_per_second"] is None


def test_wrong_arguments_are_errors_before_anything_runs(tiny_llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        compare_caches(tiny_llama, DIGITS, prompt, ["gaer"], max_new_tokens=4)
    with pytest.raises(ValueError, match="`max_new_tokens` has to be an integer of at least 1 but got 0"):
        compare_caches(tiny_llama, DIGITS, prompt, [], max_new_tokens=0)
    with pytest.raises(ValueError, match="`temperature` has to be a number above 0 or None but got 0.0"):
        generate_with(tiny_llama, prompt, DynamicCache(), max_new_tokens=4, temperature=0.0)


def test_timer_leaves_the_first_decoded_token_out():
    # start, first token after 5, a slow warm-up of 9, then 1, 2 and 3
    clock = iter([10.0, 15.0, 24.0, 25.0, 27.0, 30.0])
    tokens = []
    timer = TokenTimer(on_token=lambda: tokens.append(1), clock=lambda: next(clock))
    for _ in range(5):
        assert not timer(torch.zeros(1, 1), None).any()
    assert timer.prefill_seconds == 5
    assert timer.seconds_per_token == 2
    assert len(tokens) == 5


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [], None), ([], [4], 0)],
)
def test_first_difference_is_the_first_unequal_token(
    reference: list[int], other: list[int], expected: int | None
) -> None:
    assert first_difference(reference, other) == expected


@pytest.mark.long
def test_prompts_are_encoded_plain_or_as_a_turn_of_chat(smollm2: Reference, gemma3: Reference) -> None:
    _, tokenizer = smollm2
    assert tokenizer.decode(encode_prompt(tokenizer, "Hello")) == "Hello"
    chat = tokenizer.decode(encode_prompt(tokenizer, "Hello", chat=True))
    assert "<|im_start|>user\nHello<|im_end|>" in chat
    assert chat.rstrip().endswith("<|im_start|>assistant")
    with pytest.raises(ValueError, match="The prompt is empty"):
        encode_prompt(tokenizer, "")
    _, base_tokenizer = gemma3
    assert encode_prompt(base_tokenizer, "Hello")[0] == base_tokenizer.bos_token_id
    with pytest.raises(ValueError, match="chat template"):
        encode_prompt(base_tokenizer, "Hello", chat=True)
