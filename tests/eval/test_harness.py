"""The harness: windows of text, caches filled with states, and functions that take turns."""

import json
import math
from contextlib import nullcontext, suppress

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.harness import (
    encode_text,
    fill_with_states,
    median_interval,
    read_rows,
    read_states,
    spread_windows,
    take_turns,
)


def timed(function):
    function()
    return 1.0


def test_functions_take_turns():
    calls = []
    functions = {name: lambda number, name=name: calls.append(f"{name}{number}") for name in "ab"}
    assert take_turns(functions, timed, 3, warm_up=1) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert " ".join(calls) == "a0 b0 a0 b0 a1 b1 a2 b2"
    # Three rounds are the least; what fails is left out from then on
    functions["b"] = lambda number: 1 // (1 - number)
    guards = {"a": nullcontext(), "b": suppress(ZeroDivisionError)}
    measured = take_turns(functions, timed, 100, seconds=0, guard=guards.get)
    assert [len(each) for each in measured.values()] == [3, 1]


@pytest.mark.parametrize("spec", ["dynamic", "gear-k4v3", "infinigen:alpha=inf,max_fetch_ratio=1"])
def test_a_cache_filled_from_saved_states_answers_as_if_it_had_read(spec, tiny_llama):
    token_ids = torch.randint(3, 128, (1, 130))
    read, filled = (create_cache(spec, tiny_llama) for _ in range(2))
    fill_with_states(filled, read_states(tiny_llama, token_ids), 130)
    with torch.inference_mode():
        tiny_llama(token_ids, past_key_values=read)
        expected, logits = (tiny_llama(token_ids[:, :1], past_key_values=cache).logits for cache in (read, filled))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("context", [1, 63, 200])
def test_states_are_repeated_for_longer_contexts(context, tiny_llama):
    states = read_states(tiny_llama, torch.randint(3, 128, (1, 63)))
    cache = create_cache("dynamic", tiny_llama)
    fill_with_states(cache, states, context, batch_size=3)
    keys, values = cache.layers[-1].keys, cache.layers[-1].values
    assert keys.shape[0] == 3 and keys.shape[2] == values.shape[2] == cache.get_seq_length() == context
    last = (context - 1) % 63
    assert torch.equal(keys[2, :, -1], states[-1][0][0, :, last])
    assert torch.equal(values[0, :, -1], states[-1][1][0, :, last])


@pytest.mark.parametrize("count", [6, 10, 40, 72, 100])
def test_interval_covers_the_median_with_95_percent(count: int) -> None:
    first, last = median_interval([float(number) for number in range(count)])
    # Number of samples below the median: binomial
    outside = sum(math.comb(count, below) for below in range(count + 1) if not first < below <= last)
    assert 0.95 <= 1 - outside / 2**count < 0.99
    assert first + last == count - 1


def test_windows_are_disjoint_and_spread() -> None:
    text = torch.arange(1000)
    cut = spread_windows(text, 4, 20, 10)
    assert [window[0].item() for window in cut] == [0, 250, 500, 750]
    assert all(torch.equal(window, torch.arange(window[0], window[0] + 31)) for window in cut)
    with_start = spread_windows(text, 2, 20, 10, start_ids=[5000])
    assert [window[:3].tolist() for window in with_start] == [[5000, 0, 1], [5000, 500, 501]]
    assert all(window.numel() == 31 for window in with_start)
    with pytest.raises(ValueError, match="need a text of 124 tokens, but it has 123"):
        spread_windows(torch.arange(123), 4, 20, 10)
    for arguments, name in (((0, 20, 10), "num_windows"), ((1, 0, 10), "prefix_length"), ((1, 20, 0), "num_scored")):
        with pytest.raises(ValueError, match=f"`{name}` has to be an integer of at least 1"):
            spread_windows(torch.arange(1000), *arguments)


def test_rows_may_hold_separators_of_lines(tmp_path) -> None:
    rows = [{"text": "one\u2028two\x85three"}, {"text": "four"}]
    (tmp_path / "rows.jsonl").write_text("\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    assert read_rows(tmp_path / "rows.jsonl", "data_file") == rows
    (tmp_path / "rows.jsonl").write_text("{}\n{")
    with pytest.raises(ValueError, match="`data_file`: line 2 of .* is no JSON"):
        read_rows(tmp_path / "rows.jsonl", "data_file")


@pytest.mark.long
def test_text_is_encoded_without_special_tokens_and_bos_is_kept_apart(smollm2, gemma3) -> None:
    for (_, tokenizer), start in ((smollm2, []), (gemma3, [gemma3[1].bos_token_id])):
        token_ids, start_ids = encode_text(tokenizer, "Call me Ishmael.")
        assert start_ids == start and tokenizer.decode(token_ids) == "Call me Ishmael."
