"""Speeds of many shapes in one line each, with what is slower made bold and counted."""

from kvcache_plugins.eval.tables.shape_tables import render_shapes


def make_rows(part: str, first: str, context: int, speeds: dict[str, float]) -> list[dict[str, object]]:
    place = {"part": part, "shape": "mqa", "dtype": "float32", "batch_size": 8, "num_threads": 2, "context": context}
    return [
        {**place, "cache": name, "median_s": 0.01 / speed, "speed_against_first": speed}
        for name, speed in {first: 1.0, **speeds}.items()
    ]


def test_a_line_a_kind_and_a_column_a_context():
    rows = make_rows("step", "dynamic", 64, {"gear-k4v3": 0.97, "gear-t22": 0.99})
    rows += make_rows("step", "dynamic", 4096, {"gear-k4v3": 2.0, "gear-t22": 1.5})
    lines = render_shapes(rows).splitlines()
    assert "`gear-k4v3` / `gear-t22`" in lines[0]
    assert lines[2] == "| heads | dtype | batch | threads | 64 tokens | 4096 tokens |"
    assert lines[4] == "| mqa | float32 | 8 | 2 | 10.00: **0.97** / 0.99 | 10.00: 2.00 / 1.50 |"
    assert "`gear-k4v3` in 1 of 2, at worst 0.97 times as fast; `gear-t22` in 0 of 2" in lines[-1]


def test_attention_stands_in_a_table_of_its_own():
    rows = make_rows("attention", "dense float32", 64, {"gear-k4v3": 0.5})
    rows += make_rows("step", "dynamic", 1, {"gear-k4v3": 1.0})
    text = render_shapes(rows)
    assert text.index("whole steps") < text.index("attention alone")
    assert "10.00: **0.50**" in text
