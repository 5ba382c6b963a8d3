"""Batches of many requests: dense ways run beside coded pages, in one process."""


def test_every_way_has_a_row(rows_of):
    rows = rows_of("batching --cache gear-t25 --cache gear-t16 --requests 2 --context 256 --steps 3")
    assert [row["cache"] for row in rows] == ["Transformers", "dense, by request", "gear-t25", "gear-t16"]
    assert rows[0]["speed_against_first"] == 1 and all(row["median_s"] > 0 for row in rows)
    dense, by_request, larger, smaller = (row["bytes"] for row in rows)
    assert dense == by_request > larger > smaller > 0
    assert rows[0]["stats"] == {} and all(row["stats"]["fused_calls"] > 0 for row in rows[2:])


def test_tokens_of_a_batch_stray_as_those_of_plain_decoding(rows_of, saved_with_tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times. " * 200, encoding="utf-8")
    words = "batching-kl --cache gear-t25 --requests 2 --prefix 130 --scored 6 --recent 0 --recent 8 --prompt-tables"
    plain, none, some = rows_of(
        words, "--model", saved_with_tokenizer("llama"), "--text-file", str(tmp_path / "text.txt")
    )
    assert [plain["recent"], none["recent"], some["recent"]] == ["plain", "0", "8"]
    assert 0 < some["kl"] < none["kl"] and 0 < plain["kl"] < 0.1
    assert plain["bytes"] > 0 and none["bytes"] < some["bytes"]
