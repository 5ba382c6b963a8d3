"""lm-eval's model `kvcache`: with a dense cache it scores as lm-eval's own, with a lossy one it does not. Two
processes, as `accelerate launch` starts them, have the scores of one, and every request is answered once.
"""

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


pytest.importorskip("lm_eval")

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvcache_plugins.eval.lm_eval_model import KVCacheLM, find_rank
from kvcache_plugins.eval.tasks import find_task


CONTEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
PAIRS = [
    (CONTEXT, " Winston"),
    (CONTEXT, " Julia"),
    (CONTEXT, " W"),
    (CONTEXT[:90], " slipped quickly through"),
    (CONTEXT[:200] + " ", "a space moves"),
    ("", "nothing comes before this text, so it follows the token for an end"),
]
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def make_requests(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number, metadata=("task", number, 1))
        for number, each in enumerate(arguments)
    ]


def wrap(loaded: Loaded, **options: object) -> KVCacheLM:
    model, tokenizer = loaded
    return KVCacheLM(model, tokenizer=tokenizer, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", ["auto", "prefix", "chunk", "decode"])
def test_dense_cache_scores_as_lm_evals_own_model(tiny_loaded: Loaded, mode: str, batch_size: int) -> None:
    model, tokenizer = tiny_loaded
    ours = wrap(tiny_loaded, cache_mode=mode, cache_chunk=50, batch_size=batch_size, max_length=250)
    theirs = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=250)
    for kind, arguments in {
        "loglikelihood": PAIRS,
        # One text is longer than a window
        "loglikelihood_rolling": [(CONTEXT * 2,), (CONTEXT[:70],)],
    }.items():
        expected = getattr(theirs, kind)(make_requests(kind, *arguments), disable_tqdm=True)
        found = getattr(ours, kind)(make_requests(kind, *arguments), disable_tqdm=True)
        if kind == "loglikelihood":
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            found, expected = ([score for score, _ in each] for each in (found, expected))
        assert found == pytest.approx(expected, abs=1e-2 if kind == "loglikelihood_rolling" else 1e-3)


@pytest.mark.parametrize("batch_size", ["auto", "auto:2"])
def test_auto_tries_no_batches_on_a_cpu(tiny_loaded: Loaded, batch_size, monkeypatch, caplog) -> None:
    monkeypatch.setattr(KVCacheLM, "_model_call", lambda *_, **__: pytest.fail("a batch was tried"))
    lm = wrap(tiny_loaded, batch_size=batch_size, device="cpu")
    assert lm.batch_size == 1 and "`batch_size` is 1" in caplog.text
    arguments = (CONTEXT, {"until": ["\n"], "max_gen_toks": 2})
    assert len(lm.generate_until(make_requests("generate_until", arguments), disable_tqdm=True)) == 1
    for kind, each in (("loglikelihood", PAIRS[0]), ("loglikelihood_rolling", (CONTEXT,))):
        assert len(getattr(lm, kind)(make_requests(kind, each), disable_tqdm=True)) == 1


def test_auto_tries_batches_of_the_longest_request(tiny_loaded: Loaded, monkeypatch) -> None:
    tried = []
    lm = wrap(tiny_loaded, cache_check=False)
    # As on a GPU
    lm.batch_size_per_gpu = "auto"
    monkeypatch.setattr(lm, "_detect_batch_size", lambda requests: tried.extend(requests) or 2)
    lm.loglikelihood(make_requests("loglikelihood", (CONTEXT[:9], "a"), (CONTEXT[:5], CONTEXT[5:65])))
    ((_, context, continuation),) = tried
    assert len(context) + len(continuation) == 65


def test_larger_batches_score_as_one_and_the_largest_is_found(tiny_loaded: Loaded) -> None:
    options = {"cache": "gear-2bit", "max_batch_size": 3, "max_length": 350}
    models = [wrap(tiny_loaded, batch_size=size, **options) for size in (1, 3)]
    # lm-eval finds the size on a GPU so: all of a batch through a cache
    assert models[0]._detect_batch_size([(None, [5] * 100, [5])]) == 3
    for kind, arguments in {"loglikelihood": PAIRS, "loglikelihood_rolling": [(CONTEXT[:150],)]}.items():
        scores = [torch.tensor(getattr(lm, kind)(make_requests(kind, *arguments), disable_tqdm=True)) for lm in models]
        torch.testing.assert_close(*(each.double() for each in scores), atol=1e-2, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("cache", ["transform", "gear-2bit", "kivi-2bit", "h2o", "infinigen"])
@pytest.mark.parametrize(("task", "limit"), [("kv_openbookqa", 8), ("kv_gsm8k", 2)])
def test_a_task_has_the_same_results_in_every_batch_size(smollm2, shared_data, task: str, limit: int, cache: str):
    results, scores = [], []
    for size in (1, 4, "auto"):
        rows, manager = find_task(task, {"data_folder": str(shared_data)})
        lm = wrap(smollm2, cache=cache, batch_size=size, device="cpu", cache_check=False)
        options = {"limit": limit, "num_fewshot": 5, "bootstrap_iters": 0, "task_manager": manager}
        # Shorter than a solution; choices take no notice
        found = lm_eval.simple_evaluate(model=lm, tasks=[rows], gen_kwargs="max_gen_toks=24", **options)
        results.append(found["results"][task])
        answers = [each for sample in found["samples"][task] for each in sample["resps"]]
        scores.append([float(each[0][0]) if task == "kv_openbookqa" else each for each in answers])
    assert results[1] == results[0] == results[2]
    # Batches add in another order: 6e-4 nats
    assert scores[1] == (pytest.approx(scores[0], abs=5e-3) if task == "kv_openbookqa" else scores[0])
    assert scores[2] == scores[0]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_dense_generation_equals_lm_evals_own_model(tiny_loaded: Loaded, batch_size: int) -> None:
    model, tokenizer = tiny_loaded
    arguments = [
        (CONTEXT[:120], {"until": ["\n"], "max_gen_toks": 12}),
        (CONTEXT, {"until": ["\n"], "max_gen_toks": 12}),
    ]
    expected = HFLM(model, tokenizer=tokenizer, batch_size=batch_size).generate_until(
        make_requests("generate_until", *arguments), disable_tqdm=True
    )
    dense, lossy = (
        wrap(tiny_loaded, batch_size=batch_size),
        wrap(tiny_loaded, cache="gear-2bit", batch_size=batch_size),
    )
    texts = [
        lm.generate_until(make_requests("generate_until", *arguments), disable_tqdm=True) for lm in (dense, lossy)
    ]
    assert texts[0] == expected
    assert texts[1] != expected
    counters = lossy.get_model_info()["cache"]["counters"]
    assert counters == {"contexts": 2, "contexts_exercised": 2}


def test_a_lossy_cache_changes_scores_and_reports_its_memory(tiny_loaded: Loaded) -> None:
    dense, lossy = wrap(tiny_loaded), wrap(tiny_loaded, cache="gear-2bit", cache_rank=2)
    requests = make_requests("loglikelihood", *PAIRS[:4])
    differences = [
        abs(one - other)
        for (one, _), (other, _) in zip(dense.loglikelihood(requests), lossy.loglikelihood(requests), strict=True)
    ]
    assert min(differences) > 1e-3
    info = lossy.get_model_info()
    assert info["model_num_parameters"] == lossy.model.num_parameters()
    cache = info["cache"]
    assert (cache["cache"], cache["options"], cache["mode"]) == ("gear-2bit", {"rank": 2}, "auto")
    assert cache["counters"]["contexts"] == cache["counters"]["contexts_exercised"] == 2
    assert cache["counters"]["continuations"] == 4
    # Percent of 16 bits; dense float32 is at 200
    assert 0 < cache["memory_of_longest"]["kv_percent"] < 80
    assert cache["stats_of_longest"]["tokens_compressed"] > 0


def test_a_cache_that_no_context_reaches_fails(tiny_loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    requests = make_requests("loglikelihood", (CONTEXT[:20], " short"), (CONTEXT[:9], " too"))
    with pytest.raises(ValueError, match="`h2o` was not exercised.*longest has 25 tokens.*`cache_check=false`"):
        wrap(tiny_loaded, cache="h2o").loglikelihood(requests)
    scores = wrap(tiny_loaded, cache="h2o", cache_check=False).loglikelihood(requests)
    dense = wrap(tiny_loaded).loglikelihood(requests)
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in dense], abs=1e-4)
    assert "`h2o` was not exercised" in caplog.text
    # Some are long enough: no error, but a count of those that were not
    mixed = make_requests("loglikelihood", (CONTEXT, " long"), (CONTEXT[:9], " too"))
    wrap(tiny_loaded, cache="h2o", cache_min_tokens=32).loglikelihood(mixed)
    assert "1 of 2 contexts were too short for the cache `h2o`" in caplog.text
    with pytest.raises(ValueError, match="not exercised"):
        wrap(tiny_loaded, cache="h2o").loglikelihood_rolling(make_requests("loglikelihood_rolling", (CONTEXT[:20],)))
    with pytest.raises(ValueError, match="not exercised"):
        arguments = (CONTEXT[:20], {"until": ["\n"], "max_gen_toks": 2})
        wrap(tiny_loaded, cache="h2o").generate_until(make_requests("generate_until", arguments))


def test_a_short_continuation_of_the_longest_context_is_no_error_before_a_long_one(tiny_loaded: Loaded) -> None:
    lm = wrap(tiny_loaded, cache="gear-2bit", cache_mode="decode")
    scores = lm.loglikelihood(make_requests("loglikelihood", (CONTEXT[:30], " a"), (CONTEXT[:20], CONTEXT[20:150])))
    counters = lm.get_model_info()["cache"]["counters"]
    assert len(scores) == 2 and (counters["contexts"], counters["contexts_exercised"]) == (2, 1)


@pytest.mark.parametrize("cache", ["dynamic", "gear-2bit"])
def test_every_window_of_rolling_perplexity_is_read_in_chunks(tiny_loaded: Loaded, cache: str) -> None:
    # The last of two windows has tokens of the first as its context
    scores = {
        mode: wrap(tiny_loaded, cache=cache, cache_mode=mode, max_length=180).loglikelihood_rolling(
            make_requests("loglikelihood_rolling", (CONTEXT[:300],)), disable_tqdm=True
        )
        for mode in ("auto", "chunk", "prefix")
    }
    assert scores["auto"] == scores["chunk"]
    assert (scores["auto"] != pytest.approx(scores["prefix"], abs=1e-2)) == (cache == "gear-2bit")


def test_infinigen_is_fed_token_by_token(tiny_loaded: Loaded) -> None:
    lm = wrap(tiny_loaded, cache="infinigen", cache_recent=8, cache_max_fetch_ratio=0.05)
    lm.loglikelihood(make_requests("loglikelihood", *PAIRS[:2]))
    assert lm.get_model_info()["cache"]["stats_of_longest"]["selected_calls"] > 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"cache": "gaer"}, "Unknown cache `gaer`.*gear"),
        ({"cache": "gear", "cache_rnak": 2}, "Unknown option `rnak`.*Did you mean `rank`"),
        ({"cache_mode": "fast"}, "`cache_mode` has to be one of .'auto', 'prefix', 'chunk', 'decode'. but got 'fast'"),
        ({"cache_chunk": 0}, "`cache_chunk`.*at least 1"),
        ({"cache_chunk": "many"}, "`cache_chunk`.*at least 1"),
        ({"cache_check": 1}, "`cache_check` has to be True or False but got 1"),
        ({"backend": "seq2seq"}, "`backend` has to be `causal`"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        KVCacheLM("/there/is/no/such/model", **options)


def test_an_unknown_model_argument_is_named(tiny_folder: str) -> None:
    with pytest.raises(ValueError, match="`model_args` has an option .* 'cach'"):
        KVCacheLM(tiny_folder, cach="transform", device="cpu")


def test_invalid_requests_are_refused(tiny_loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="`cache_implementation` in `gen_kwargs`"):
        arguments = (CONTEXT, {"until": ["\n"], "cache_implementation": "static"})
        wrap(tiny_loaded).generate_until(make_requests("generate_until", arguments))
    with pytest.raises(ValueError, match="`max_length` is 8 tokens, but a continuation has 11"):
        wrap(tiny_loaded, max_length=8).loglikelihood(make_requests("loglikelihood", ("a", "hello world")))


@pytest.mark.parametrize("name", ["kvcache", "hf-kvcache"])
def test_entry_points_name_the_model_as_lm_evals_plugin_registry_stores_it(name: str) -> None:
    (point,) = entry_points(group="lm_eval.models", name=name)
    assert point.load() is KVCacheLM
    registry = Registry("model")
    registry.register(name, target=point.value)
    # A placeholder becomes the class that registers itself under the name
    registry.register(name)(KVCacheLM)
    assert registry.get(name) is KVCacheLM


def test_models_are_found_by_name_and_argument_string(saved_with_tokenizer: Callable[..., str]) -> None:
    assert get_model("kvcache") is get_model("hf-kvcache") is KVCacheLM
    # lm-eval's own models are there all the same
    assert get_model("hf") is HFLM
    folder = saved_with_tokenizer("llama")
    lm = KVCacheLM.create_from_arg_string(
        f"pretrained={folder},cache=gear,cache_nbits=2,cache_rank=3,dtype=bfloat16",
        {"batch_size": 2, "device": None},
    )
    assert lm.cache_options == {"nbits": 2, "rank": 3}
    assert lm.model.dtype == torch.bfloat16 and lm.batch_size == 2
    spec = KVCacheLM(folder, cache="gear:nbits=2,rank=3", device="cpu")
    assert (spec.cache_name, spec.cache_options) == ("gear", {"nbits": 2, "rank": 3})


def test_two_settings_cannot_share_stored_responses(tiny_loaded: Loaded, tmp_path, make_task) -> None:
    task = make_task("stored", [{"text": CONTEXT[number:]} for number in range(3)], ["yes", "no"])

    def evaluate(**options: object) -> float:
        results = lm_eval.simple_evaluate(
            model=wrap(tiny_loaded, **options),
            tasks=[dict(task)],
            use_cache=str(tmp_path / "store"),
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
        return results["samples"]["stored"][0]["resps"][0][0][0]

    first = evaluate()
    assert evaluate() == first
    for other in ({"cache": "gear-2bit"}, {"max_length": 100}):
        with pytest.raises(ValueError, match="`use_cache` is a file of another model or cache setting"):
            evaluate(**other)
    # Neither of them was stored, and a batch changes nothing but rounding
    assert evaluate(batch_size=2) == first


# Arguments of `accelerate launch` on GPUs; on CPUs it starts one process alone
LAUNCH = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@pytest.fixture
def task(tmp_path: Path, make_task) -> Path:
    """Five questions, so that one process has one more; the last contexts are too short for a cache to compress."""
    rows = [{"text": CONTEXT[number:][:length]} for number, length in enumerate((200, 150, 180, 20, 10))]
    path = tmp_path / "five.yaml"
    path.write_text(yaml.safe_dump(make_task("five", rows, [" yes", " no", " perhaps"])))
    return path


def evaluate(run_python, model: str, task: Path, folder: Path, launch=()) -> tuple[dict, list[dict]]:
    arguments = f"pretrained={model},cache=gear-2bit"
    command = [*launch, "kvcache_plugins.eval", "run", "--model", "kvcache", "--model_args", arguments]
    command += ["--tasks", str(task), "--output_path", str(folder), "--log_samples", "--device", "cpu"]
    variables = {"HF_DATASETS_CACHE": folder / "datasets", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    run_python("-P", "-m", *command, **variables, KVCACHE_PLUGINS_KERNELS="torch")
    (results,), (samples,) = (list(folder.rglob(f"{name}_*")) for name in ("results", "samples"))
    return json.loads(results.read_text()), [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.mark.long
def test_two_processes_score_as_one(tiny_folder, task, tmp_path, run_python) -> None:
    one, alone = evaluate(run_python, tiny_folder, task, tmp_path / "one")
    two, shared = evaluate(run_python, tiny_folder, task, tmp_path / "two", LAUNCH)
    assert two["results"]["five"]["acc,none"] == one["results"]["five"]["acc,none"]
    assert sorted(sample["doc_id"] for sample in shared) == [0, 1, 2, 3, 4]
    by_document = {sample["doc_id"]: sample["filtered_resps"] for sample in shared}
    for sample in alone:
        answers = by_document[sample["doc_id"]], sample["filtered_resps"]
        found, expected = ([float(score) for score, _ in each] for each in answers)
        assert found == pytest.approx(expected, abs=1e-4)
    assert [each["config"]["cache"]["processes"] for each in (one, two)] == [1, 2]
    counters = [each["config"]["cache"]["counters"] for each in (one, two)]
    assert [each["contexts"] for each in counters] == [5, 5]
    assert [each["contexts_exercised"] for each in counters] == [3, 3]
    held = [each["config"]["cache"]["memory_of_longest"] for each in (one, two)]
    assert held[0] == held[1]


def test_processes_wait_for_each_other_at_the_barrier_alone(tiny_loaded: Loaded, monkeypatch) -> None:
    # A process calls no method if it has all answers in a store of responses
    lm = wrap(tiny_loaded, cache="gear-2bit")
    gathered = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda records, own: gathered.append(own))
    lm._world_size = 2
    lm.accelerator = SimpleNamespace(wait_for_everyone=lambda: None, unwrap_model=lambda model: model)
    lm.loglikelihood(make_requests("loglikelihood", PAIRS[0]), disable_tqdm=True)
    assert not gathered
    lm.barrier()
    lm.barrier()
    assert [record.counters["contexts"] for record in gathered] == [1, 0]
    # Both processes have the same one here
    assert lm.get_model_info()["cache"]["counters"]["contexts"] == 2


def test_rank_is_the_launchers_where_processes_share_a_machine_without_gpus() -> None:
    own = SimpleNamespace(rank=0, world_size=1)
    assert find_rank(own) == (0, 1)
    launched = SimpleNamespace(rank=0, world_size=1, accelerator=SimpleNamespace(process_index=1, num_processes=2))
    assert find_rank(launched) == (1, 2)
