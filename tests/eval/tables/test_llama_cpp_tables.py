"""Steps beside llama.cpp: a line a cache, a column a context; and attention alone by heads."""

from kvcache_plugins.eval.tables.llama_cpp_tables import render_llama_cpp


def make_row(cache: str, context: int, **more: object) -> dict[str, object]:
    times = {"median_s": 0.002, "lower_quartile_s": 0.001, "upper_quartile_s": 0.003}
    return {"part": "step", "cache": cache, "context": context, "bytes": 1e6 * context, **times, **more}


def test_columns_are_contexts():
    rows = [make_row("dynamic", 4), make_row("dynamic", 9), make_row("llama.cpp f16", 9, kl_after_reading=0.0001)]
    lines = render_llama_cpp(rows).splitlines()
    assert lines[0] == "| decode step over | 4 tokens, ms | 9 tokens, ms | MB of 9 | KL to Transformers, same text |"
    assert lines[2] == "| `dynamic` | 2.00 (1.00 to 3.00) | 2.00 (1.00 to 3.00) | 9.0 |  |"
    assert lines[3] == "| `llama.cpp f16` | - | 2.00 (1.00 to 3.00) | 9.0 | 0.0001 |"


def test_heads_have_a_table_each():
    heads = [{"num_heads": 3, "groups": 3, "head_dim": 64}, {"num_heads": 8, "groups": 4, "head_dim": 128}]
    rows = [make_row("gear-k4v3", 64, **each) | {"part": "attention"} for each in heads]
    text = render_llama_cpp(rows)
    assert "attention over 3 x 3 heads of 64" in text and "attention over 8 x 4 heads of 128" in text
    assert "KL" not in text
