"""Random sequences of operations on every cache that runs on a CPU: four each, in `make test-long` three hundred."""

from collections.abc import Iterator
from typing import Any

import pytest
from cache_operations import CacheOperations, Kind
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from transformers.utils import logging


# Groups and buffers that a sequence of some hundred tokens fills many times
SMALL = {"residual_length": 16}
WHOLE = {"full_layers": ()}
EVERYTHING = {**WHOLE, "alpha": float("inf"), "max_fetch_ratio": 1.0}
EXACT, EIGHT_BITS = 1e-4, 0.15
# Logits of a sequence in a batch may differ from those of it alone: pools and windows begin at other lengths, and
# score codecs are fitted to the first tokens of the whole batch
CHOOSES: dict[str, Any] = {"reads_dense": False, "as_alone": 0.5, "least_real": 33}
KINDS = {
    "gear-2bit": Kind(name="gear-2bit", options={}),
    "gear-2bit-small": Kind(name="gear-2bit", options=SMALL),
    "gear-l-2bit": Kind(name="gear-l-2bit", options=SMALL),
    "gear-k4v3": Kind(name="gear-k4v3", options=SMALL),
    "kivi-2bit": Kind(name="kivi-2bit", options=SMALL),
    "per-token-2bit": Kind(name="per-token-2bit", options=SMALL),
    "kcvt-4bit": Kind(name="kcvt-4bit", options=SMALL),
    # Exact tokens in front beyond the first groups, and a low rank of the newest tokens alone
    "gear-sinks": Kind(name="gear-2bit", options={"num_sink_tokens": 70, "rotate_values": True, **SMALL}),
    "gear-8bit": Kind(name="gear-4bit", options={"nbits": 8, **SMALL}, exactness=EIGHT_BITS),
    "gear-exact": Kind(name="gear-2bit", options={"residual_length": 4096, "num_sink_tokens": 4096}, exactness=EXACT),
    "transform-22": Kind(name="transform-22", options={}, least_real=68, fits_again=True),
    # Rows with too few tokens for a table: when they have enough depends on the buffer, which all rows share
    "transform-22-waiting": Kind(name="transform-22", options={}, as_alone=1.5),
    "transform-8bit": Kind(name="transform-22", options={"key_nbits": 8, "value_nbits": 8}, exactness=EIGHT_BITS),
    "turboquant-3bit": Kind(name="turboquant-3bit", options={}),
    "llamacpp-q4_0": Kind(name="llamacpp-q4_0", options={}),
    "infinigen": Kind(name="infinigen", options={**WHOLE, "speculate": True}, **CHOOSES),
    "infinigen-pool": Kind(name="infinigen", options={**WHOLE, "pool_tokens": 40}, **{**CHOOSES, "as_alone": 1.5}),
    "infinigen-paper": Kind(name="infinigen-paper", options=WHOLE, **CHOOSES),
    "infinigen-exact": Kind(name="infinigen", options=EVERYTHING, exactness=EXACT),
    # A row of fewer tokens is exact alone, and coded beside longer ones
    "infinigen-transform": Kind(name="infinigen-transform", options=WHOLE, **{**CHOOSES, "least_real": 68}),
    "infinigen-transform-8bit": Kind(
        name="infinigen-transform", options={**EVERYTHING, "key_nbits": 8, "value_nbits": 8}, exactness=EIGHT_BITS
    ),
    "h2o": Kind(name="h2o", options={"min_tokens": 8}, reads_dense=False),
    "h2o-exact": Kind(name="h2o", options={"heavy_ratio": 0.5, "recent_ratio": 0.5}, exactness=EXACT),
}
# These differ from others in options alone, and those have more options
LONG = ("gear-2bit", "gear-l-2bit", "per-token-2bit")
NUM_STEPS = 12


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence advice on other attention implementations."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("num_sequences", [4, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in LONG else kind for kind in KINDS]
)
def test_random_operations_keep_caches_near_dense(kind: str, num_sequences: int) -> None:
    machine = type("Operations", (CacheOperations,), {"kind": KINDS[kind]})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=num_sequences,
            stateful_step_count=NUM_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
