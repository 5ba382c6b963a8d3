"""Batches of many requests: dense ways run beside coded pages, in one process."""


def test_every_batched_cache_has_a_row(rows_of):
    rows = rows_of("batching --cache transform --cache transform-16 --requests 2 --context 256 --steps 3")
    assert [row["cache"] for row in rows] == ["Transformers", "dense, by request", "transform", "transform-16"]
    assert rows[0]["speed_against_first"] == 1 and all(row["median_s"] > 0 for row in rows)
    dense, by_request, larger, smaller = (row["bytes"] for row in rows)
    assert dense == by_request > larger > smaller > 0
    assert rows[0]["stats"] == {} and all(row["stats"]["fused_calls"] > 0 for row in rows[2:])
