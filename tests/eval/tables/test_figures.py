"""Figures: what stands in one line, and that what all caches share is seen."""

import pytest

from kvcache_plugins.eval.tables.figures import _draw_fidelity, _draw_steps, _method, _percent_shared, draw_result


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


def make_step(cache: str, context: int, **more: object) -> dict[str, object]:
    times = {"median_s": 1e-5 * context, "lower_quartile_s": 0.9e-5 * context, "upper_quartile_s": 2e-5 * context}
    return {"cache": cache, "context": context, **times, **more}


def test_steps_over_many_contexts_have_logarithmic_axes():
    content = {"settings": {"model": "m"}, "device": "CPU"}
    near = [make_step("dynamic", context) for context in (1024, 4096)]
    far = [make_step("dynamic", context, part="step") for context in (64, 1024, 16384)]
    alone = [make_step("gear-k4v3", 64, part="attention")]
    (axes,) = _draw_steps({**content, "rows": near}).axes
    assert axes.get_xscale() == "linear" and axes.get_ylim()[0] == 0
    (axes,) = _draw_steps({**content, "rows": far + alone}).axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dynamic"]
    with pytest.raises(ValueError, match="with steps only"):
        _draw_steps({**content, "rows": alone})
