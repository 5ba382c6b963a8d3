"""Several processes fill one cache: what they end with is what one process ends with."""

import pytest
import torch
from rank_programs import (
    MOMENTS,
    NO_ANSWER,
    compare_with_one_process,
    differ,
    fail_at,
    generate_with_beams,
    prefill_each,
    run_ranks,
)

from kvcache_plugins.kv_runahead.prefill import runahead_prefill


CACHES = ["dynamic", "gear-4bit", "gear-2bit", "infinigen"]
# Each architecture, and each implementation with and without windows
CASES = [
    ("llama", "sdpa", [2, 4], CACHES),
    ("gemma3-hybrid", "eager", [3], CACHES[2:]),
    ("mistral-sliding", "sdpa", [4], ["dynamic"]),
    ("opt", "eager", [2], CACHES[1:2]),
]
LONG = [
    ("llama", "eager", [3], CACHES[1:]),
    ("gemma3-hybrid", "sdpa", [2, 4], CACHES[2:]),
    ("mistral-sliding", "eager", [3], ["dynamic"]),
    ("opt", "sdpa", [3], CACHES[1:2]),
]


@pytest.mark.parametrize(
    ("architecture", "implementation", "sizes", "caches"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_logits_and_tokens_equal_those_of_one_process(
    saved_with_tokenizer, architecture, implementation, sizes, caches
):
    answers = run_ranks(
        compare_with_one_process, 4, saved_with_tokenizer(architecture), implementation, sizes, [1, 3], caches, 6
    )
    assert answers[:3] == [[], [], []]
    assert len(answers[3]) == len(sizes) * 2 * len(caches)
    for label, difference, continued, generated in answers[3]:
        assert difference < 1e-4, label
        assert continued, label
        assert generated, label


def test_beams_and_sampling_equal_those_of_one_process(saved_with_tokenizer):
    assert run_ranks(generate_with_beams, 2, saved_with_tokenizer("llama")) == [True, True]


def test_work_and_traffic_are_counted(saved_with_tokenizer):
    """The paper's example: nine tokens in slices of 4, 3 and 2."""
    answers = run_ranks(prefill_each, 3, saved_with_tokenizer("llama"), [{"length": 9, "partition": [4, 3, 2]}])
    num_layers, num_heads, head_dim = 2, 2, 32
    stats = [each[0][1] for each in answers]
    assert [each["dot_products"] // num_layers for each in stats] == [16, 21, 18]
    assert sum(each["entries_sent"] for each in stats) // num_layers == 22
    sent = 22 * num_layers * num_heads * head_dim * 4
    assert sum(each["bytes_sent"] for each in stats) == sum(each["bytes_received"] for each in stats) == sent


def test_sliding_windows_send_their_window(saved_with_tokenizer):
    answers = run_ranks(prefill_each, 2, saved_with_tokenizer("mistral-sliding"), [{"partition": [100, 30]}])
    assert answers[0][0][1]["entries_sent"] == 2 * 2 * 31


BAD_OPTIONS = [
    ({"length": 2}, "rank 0: the context has 2 tokens, but each of 3 ranks needs one"),
    ({"partition": [100, 20, 6, 4]}, "rank 0: `partition` has 4 slices, but there are 3 ranks"),
    ({"partition": [130, 0]}, "rank 0: `partition`"),
    ({"partition": [100, 20]}, "rank 0: `partition`"),
    ({"partition": "half"}, "rank 0: `partition` has to be"),
]


def test_bad_options_leave_ranks_ready(saved_with_tokenizer):
    """Bad ones are errors that leave the ranks ready for the next call; short prompts are left to one rank."""
    bad = [{"partition": "even", **options} for options, _ in BAD_OPTIONS]
    answers = run_ranks(
        prefill_each, 3, saved_with_tokenizer("llama"), [*bad, {"length": 70}, {"partition": [100, 30]}]
    )
    for rank, answer in enumerate(answers):
        *errors, short, two_slices = answer
        for error, (_, message) in zip(errors, BAD_OPTIONS, strict=True):
            assert isinstance(error, ValueError) and str(error).startswith(message), error
        assert short[0] == (70,) and two_slices[0] == (100, 30)
        assert (short[2] is None) == (two_slices[2] is None) == (rank < 2)
        # Fewer slices than ranks leave the first ranks idle
        assert bool(two_slices[1]) == (rank > 0)


DIFFERENCES = {
    "dtype": "rank 2: `",
    "model": "rank 2: `model` has to be the same on all ranks",
    "prompt": "rank 2: `prompt` has to be the same on all ranks",
    "partition": "rank 2: `partition` has to be the same on all ranks",
    "h2o": "rank 2: `past_key_values`: a `H2OCache`",
    "filled": "rank 2: `past_key_values` has to be empty but holds 3 tokens",
    "memory": "rank 2: MemoryError: no memory left",
}


def test_different_settings_of_ranks_are_named(saved_with_tokenizer):
    for messages in run_ranks(differ, 3, saved_with_tokenizer("llama"), list(DIFFERENCES)):
        for message, expected in zip(messages, DIFFERENCES.values(), strict=True):
            assert message.startswith(expected)


@pytest.mark.parametrize(
    ("moment", "failing"),
    [
        pytest.param(moment, failing, marks=pytest.mark.long if number % 2 == failing and number < 6 else ())
        for number, moment in enumerate(MOMENTS)
        for failing in ((0, 1) if number < 6 else (0,))
    ],
)
def test_failure_of_a_rank_ends_the_others_with_an_error(saved_with_tokenizer, moment, failing):
    """Fail at any moment: ranks that wait get one kind of error, with their rank and the layer."""
    # Over a connection that was made before, and over one that was not
    folder, warm = saved_with_tokenizer("llama", num_hidden_layers=8), failing == 0
    answers = run_ranks(fail_at, 3, folder, failing, moment, warm)
    for rank, answer in enumerate(answers):
        if rank == failing and moment.startswith("killed"):
            assert answer == NO_ANSWER
        elif rank > failing or MOMENTS[moment] == "before layer 0" or (rank == failing and "raises" in moment):
            kind, message, held = answer
            assert kind == "RunaheadError" and held == 0
            assert message.startswith(f"rank {rank}:") and (rank == failing or MOMENTS[moment] in message)
            assert "raises" not in moment or "no memory left" in message
            assert rank == failing or "raises" not in moment or f"rank {failing} (process" in message
        else:
            # A rank may have sent everything before
            assert answer is None or (answer[0] == "RunaheadError" and answer[1].startswith(f"rank {rank}:"))


def test_a_missing_process_group_is_an_error(tiny_llama):
    with pytest.raises(ValueError, match="init_process_group"):
        runahead_prefill(tiny_llama, torch.ones(1, 200, dtype=torch.long))
