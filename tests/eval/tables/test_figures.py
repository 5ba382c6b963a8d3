"""Figures: what stands in one line, and that what all caches share is seen."""

import pytest

from kvcache_plugins.eval.tables.figures import _draw_fidelity, _method, _percent_shared, draw_result


@pytest.mark.parametrize(
    ("cache", "method"),
    [
        ("gear-t16", "gear-t"),
        ("gear-t12-trellis", "gear-t-trellis"),
        ("gear-c18:calibration=a.safetensors", "gear-c:calibration=a.safetensors"),
        ("gear-k4v3", "gear-k-v"),
        ("gear-k4v4-g32", "gear-k-v"),
        ("gear-l-2bit", "gear-l"),
        ("infinigen", "infinigen"),
    ],
)
def test_bits_of_a_method_share_a_line(cache, method):
    assert _method(cache) == method


def make_row(cache: str, percent: float, kl: float, shared: int = 0) -> dict[str, object]:
    memory = {"kv_percent": percent, "kv_percent_with_shared": percent + shared, "total_bytes": 100}
    memory |= {"shared": {"calibration": shared} if shared else {}}
    return {"cache": cache, "kl": kl, "kl_spread": 0.001, "windows": [{}, {}], "memory_after_prefix": memory}


def test_fidelity_is_drawn_with_and_without_what_is_shared(tmp_path):
    rows = [make_row("gear-t16", 15, 0.02), make_row("gear-c12", 11, 0.02, 6), make_row("gear-c16", 15, 0.006, 6)]
    content = {
        "settings": {"text_file": "a.txt", "model": "m", "scored": 5, "prefix": 9, "chunk": None},
        "rows": rows,
    }
    assert draw_result(content, tmp_path / "figure.png").stat().st_size > 1000
    (axes,) = _draw_fidelity(content).axes
    dotted = [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert sorted(map(list, dotted)) == [[11, 17], [15, 21]]
    shares = [_percent_shared({"settings": {}, "result": row, "memory": None}) for row in rows]
    assert shares == [0, 6, 6]
