"""Options of the wrong type or out of range: one `ValueError` with the option's name and the value as it was given."""

import pytest
import torch

from kvcache_plugins import GEARCache, H2OCache, InfiniGenCache, InfiniGenTransformCache, create_cache, option_checks


WRONG: dict[str, dict[str, list[object]]] = {
    "gear": {
        **{"nbits": [2.0, "2", True], "key_nbits": ["2", 4.0], "backbone": [4, ["kivi"]]},
        **{"sparsity": ["a", True, float("nan")], "rank": ["x", 2.0, True]},
        **{"decode_rank": ["x", 1.0], "residual_length": ["64", 64.0], "q_group_size": ["64", True, 32.0]},
        **{"num_iterations": ["3"], "num_sink_tokens": ["4"]},
        **{"rotate_values": [1, "yes"], "attention_mask": ["x", [[1, 1]], torch.ones(3)]},
    },
    "transform": {
        **{"nbits": ["2", True], "key_nbits": ["2"], "value_nbits": [True], "residual_length": ["64", 64.0]},
        **{"num_sink_tokens": ["4"], "sliding": [True, "window"], "recent_length": ["x", 2.0]},
        **{"recent_nbits": [None, 1.5], "attention_mask": ["x"], "max_cache_len": ["x", 2.0], "calibration": [5]},
    },
    "infinigen": {
        **{"min_weight": ["x", True], "alpha": ["4", float("nan")]},
        **{"max_fetch_ratio": [None, "0.2", True], "scoring_nbits": ["4", 4.0], "partial_ratio": ["0.3"]},
        **{"recent": [None, "32", 32.0], "sink": ["4", True], "pool_tokens": ["100", 100.0], "eviction": [1]},
        **{"full_layers": ["x", 5, (0.0,), (True,), ("0",)], "speculate": [1, "no"]},
        **{"calibration": [5, {}], "attention_mask": ["x"]},
    },
    "infinigen-transform": {"key_nbits": ["4", 9.0, None], "value_nbits": ["4", True, None], "recent": ["32"]},
    "h2o": {
        **{"heavy_ratio": ["x", None, True], "recent_ratio": ["x", None], "min_tokens": ["32", 32.0, None]},
        "grow": [None, 1, "yes"],
    },
    "turboquant-4bit": {"nbits": ["4", 4.0, None], "key_nbits": ["4", True], "residual": [None, 1]},
    "llamacpp-q8_0": {"type": ["q8", 8, None], "value_type": [8], "rotate": [None, 1]},
    "quanto-4bit": {
        **{"nbits": ["4", 4.0, None], "axis_key": ["0", 0.0], "q_group_size": ["64", 64.0, True]},
        "residual_length": [None, "128"],
    },
    "hqq-4bit": {"nbits": ["4"], "axis_value": [None]},
}


@pytest.mark.parametrize(
    ("cache", "option", "value"),
    [
        pytest.param(cache, option, value, id=f"{cache}-{option}-{number}")
        for cache, options in WRONG.items()
        for option, values in options.items()
        for number, value in enumerate(values)
    ],
)
def test_a_value_of_the_wrong_type_is_named_as_it_was_written(cache, option, value, tiny_llama):
    package = {"quanto-4bit": "optimum.quanto", "hqq-4bit": "hqq"}.get(cache)
    if package is not None:
        pytest.importorskip(package)
    with pytest.raises(ValueError, match=rf"`{option}`") as caught:
        create_cache(cache, tiny_llama, **{option: value})
    item = value[0] if option == "full_layers" and isinstance(value, tuple) else value
    shown = "one of shape (3,)" if isinstance(value, torch.Tensor) else repr(item)
    assert str(caught.value).endswith(f"but got {shown}")


INFINIGEN: dict[str, tuple[object, ...]] = {
    **{"alpha": (0.0, -1.0), "min_weight": (0,), "max_fetch_ratio": (0.0, 1.01)},
    **{"partial_ratio": (2.0,), "scoring_nbits": (3,), "skewing": ("query-svd",), "recent": (0,), "sink": (-1,)},
    **{"pool_tokens": (4, 2.5), "eviction": ("random", "lru"), "full_layers": ((7,),)},
    "calibration": ("/no/such/file",),
}
OUT_OF_RANGE = {
    "gear": [
        ({"nbits": 5}, "nbits.*2, 3, 4, 8.*5"),
        ({"key_nbits": 1}, "key_nbits.*2, 3, 4, 8"),
        ({"backbone": "kvit"}, "backbone.*kcvt.*kivi.*per-token.*kvit"),
        ({"sparsity": 1.0}, r"sparsity.*\[0, 1\)"),
        ({"rank": -1}, "rank.*at least 0"),
        ({"rank": 65}, "rank.*at most 64"),
        ({"decode_rank": 21, "residual_length": 20}, "decode_rank.*at most 20"),
        ({"num_sink_tokens": -1}, "num_sink_tokens.*at least 0 but got -1"),
        ({"residual_length": 0}, "residual_length.*at least 1"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"q_group_size": 0}, "q_group_size"),
        ({"nbits": 2, "q_group_size": 48}, "q_group_size.*divide.*residual_length.*48"),
        ({"max_cache_len": 0}, "`max_cache_len`.*at least 1"),
    ],
    "transform": [
        ({"nbits": 0}, "`key_nbits`/`nbits`.*0"),
        ({"nbits": 9}, "`key_nbits`/`nbits`.*9"),
        ({"residual_length": 0}, "`residual_length`.*at least 1"),
        ({"num_sink_tokens": -1}, "`num_sink_tokens`.*at least 0"),
        ({"recent_length": -1}, "`recent_length`.*at least 0"),
        ({"sliding": "window"}, r"`sliding`.*auto.*compressed.*dense.*'window'"),
        ({"max_cache_len": 0}, "`max_cache_len`.*at least 1"),
    ],
    "h2o": [
        ({"heavy_ratio": 0}, r"`heavy_ratio`.*\(0, 1\].*0"),
        ({"heavy_ratio": 1.5}, r"`heavy_ratio`.*\(0, 1\].*1\.5"),
        ({"recent_ratio": -0.1}, r"`recent_ratio`.*\(0, 1\].*-0\.1"),
        ({"min_tokens": 1}, "`min_tokens`.*at least 2.*1"),
    ],
    "turboquant-4bit": [
        ({"nbits": 7}, r"`key_nbits`/`nbits` has to be one of \[1, 2, 3, 4, 5, 6, 8\] but got 7"),
        ({"value_nbits": 0}, r"`value_nbits`/`nbits` has to be one of"),
        ({"nbits": 1, "residual": True}, r"`key_nbits`/`nbits` has to be one of \[2, 3, 4, 5, 6\] but got 1"),
    ],
    "infinigen": [
        *(({name: value}, f"`{name}`") for name, values in INFINIGEN.items() for value in values),
        ({"alpha": 4.0, "min_weight": 0.5}, "only one of `min_weight` and `alpha`"),
        ({"partial_ratio": 0.3, "scoring_nbits": 4}, "exclude each other"),
        ({"partial_ratio": 0.3, "skewing": "svd"}, "`skewing`"),
    ],
    "infinigen-transform": [
        ({"key_nbits": 9}, "`key_nbits`.* got 9"),
        ({"value_nbits": 0}, "`value_nbits`.* got 0"),
        *(({name: value}, f"`{name}`") for name, value in {"scoring_nbits": 4, "partial_ratio": 0.3}.items()),
        ({"max_fetch_ratio": 2}, "`max_fetch_ratio`"),
        ({"full_layers": (0, 1)}, "nothing is left to offload"),
    ],
    "llamacpp-q8_0": [({"type": "q6_k"}, r"`key_type`/`type` has to be one of \['q8_0', 'q5_1', .*but got 'q6_k'")],
}


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [(cache, *case) for cache, cases in OUT_OF_RANGE.items() for case in cases],
    ids=str,
)
def test_options_out_of_range_are_named_with_what_is_accepted(cache, options, message, tiny_llama):
    with pytest.raises(ValueError, match=message):
        create_cache(cache, tiny_llama if cache.startswith("infinigen") else None, **options)


@pytest.mark.parametrize("cache_class", [GEARCache, H2OCache])
@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("gear-2bit", r"got 'gear-2bit'; .*`create_cache\('gear-2bit', model\)`"),
        ("smollm2", r"got 'smollm2'; load it first, as by `AutoModelForCausalLM.from_pretrained\('smollm2'\)`"),
        (2, "got 2; options are given by their names, such as `nbits=2`"),
        (object(), "got <class 'object'>"),
    ],
    ids=["name", "model's-name", "number", "object"],
)
def test_arguments_that_are_no_model_are_named(cache_class, given, hint):
    with pytest.raises(ValueError, match=f"`config` must be a `PreTrainedModel`, .*{hint}"):
        cache_class(given)


@pytest.mark.parametrize("cache_class", [InfiniGenCache, InfiniGenTransformCache])
def test_infinigen_needs_a_model(cache_class, tiny_llama):
    for given in ("infinigen", tiny_llama.config):
        with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel`"):
            cache_class(given)
    for given in (None, tiny_llama.config):
        with pytest.raises(ValueError, match="`model`"):
            create_cache("infinigen", given)


def test_swapped_arguments_of_create_cache_are_named(tiny_llama):
    with pytest.raises(ValueError, match=r'write `create_cache\("transform", model\)`, the name first'):
        create_cache(tiny_llama, "transform")


@pytest.mark.parametrize("cache_class", [GEARCache, H2OCache])
def test_a_model_is_accepted_for_its_config(cache_class, tiny_model):
    model = tiny_model("gemma3-hybrid")
    from_model, from_config = cache_class(model), cache_class(model.config)
    assert [type(layer) for layer in from_model.layers] == [type(layer) for layer in from_config.layers]
    wrapped = torch.nn.ModuleDict({"inner": model})
    assert [type(layer) for layer in cache_class(wrapped).layers] == [type(layer) for layer in from_config.layers]


@pytest.mark.parametrize(
    ("bounds", "accepted", "refused", "expected"),
    [
        ({"least": 0.0}, [0, 0.0, 5.5], [-1, -1e-9], "a number of at least 0"),
        ({"above": 0.0}, [1e-9, 7], [0, -1], "a number above 0"),
        ({"least": 0.0, "below": 1.0}, [0, 0.99], [1, -0.1], r"a number in \[0, 1\)"),
        ({"above": 0.0, "most": 1.0}, [0.01, 1], [0, 1.01], r"a number in \(0, 1\]"),
    ],
)
def test_numbers_are_checked_against_bounds(bounds, accepted, refused, expected):
    for value in accepted:
        option_checks.check_number("x", value, **bounds)
    for value in [*refused, None, "1", True, float("nan"), float("inf")]:
        with pytest.raises(ValueError, match=f"`x` has to be {expected} but got"):
            option_checks.check_number("x", value, **bounds)
    option_checks.check_number("x", None, **bounds, is_optional=True)


def test_an_option_with_two_names_is_named_by_both():
    with pytest.raises(ValueError, match="^`key_rank`/`rank` has to be an integer of at least 0 but got '4'$"):
        option_checks.check_integer("key_rank/rank", "4", 0)
