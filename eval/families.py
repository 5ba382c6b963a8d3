"""Caches held against `DynamicCache` on a tiny random model of every decoder family that Transformers has.

Everything goes through `generate`, as a model's own way of counting positions and making masks is part of what has to
work. Tokens are those that the dense cache picks: a cache that loses precision is compared logit by logit along the
same text, not where one other token leads to. A distance between logits is measured in that of the same tokens after
another prompt: 0 is the dense cache's own, 1 is as far off as knowing nothing of the prompt.

Each family is tried in a process of its own: a model that hangs, or takes its process along, costs its own row and
nothing else. Processes are forked where that is possible: PyTorch and Transformers are loaded once, and a cache may be
made by any function, of which nothing has to be sent.

A tiny model has its family's own defaults, with every size that makes a model large replaced. Transformers' configs
name the same things alike, so one table of names serves nearly all families; what a family needs beyond it stands in
`SPECIAL_FIELDS`. Of layers there are two of each kind that the family has, in its order.
"""

import dataclasses
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from logging import CRITICAL
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .benchmark import benchmark
from .rows import Found, Settings


Status = Literal["works", "reads dense", "refuses", "fails"]
CacheMaker = Callable[[PreTrainedModel], Cache]

DENSE: CacheMaker = partial(create_cache, "dynamic")
PROMPT_LENGTH, NUM_NEW = 80, 20
# Of the shorter one of two prompts
_SHORT_LENGTH = 67
_TURN_LENGTH = 12
_NUM_MORE = 6
# Less than this share of the logits' spread, and what is measured in it would be rounding
_LEAST_CONTROL = 1e-3
# Rounding of another order of sums, carried through a few layers; and what 8 bits may change: a lost token or a wrong
# position changes more
_EXACT, _LOSSY = 0.02, 0.1
# Known to run in a second
_FIRST = "llama"
# What code runs into that was not made for a model
CAUGHT = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(RuntimeError, StrictDataclassError, TypeError, ValueError),
)


class Case(NamedTuple):
    """A cache that is tried: its maker, and how far its logits may be, of the distance that another prompt's are."""

    make_cache: CacheMaker
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An answer of a model, why it refuses or fails, and its largest distance from the dense cache's logits."""

    status: Status
    detail: str = ""
    distance: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FamilyResult:
    """A family by its `model_type`, why `DynamicCache` does not run it if so, and outcomes by cache if it does."""

    family: str
    dense: str = ""
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)


class Run(NamedTuple):
    """Tokens `[batch, new tokens]`, their logits `[batch, new tokens, vocabulary]`, and sides read dense since."""

    tokens: torch.Tensor
    logits: torch.Tensor
    dense_reads: int


def dense_reads(cache: Cache) -> int:
    """Counts how often a cache says that it has made a layer's side dense; 0 of one that says nothing."""
    stats = getattr(cache, "stats", None)
    return int(stats().get("dense_reads", 0)) if callable(stats) else 0


def prompt(model: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """Draws random tokens `[1, length]`, none of them special."""
    vocab_size = min(model.config.get_text_config(decoder=True).vocab_size, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size - 1, (1, length), generator=generator, device="cpu")


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    cache: Cache,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    num_new: int,
    forced: torch.Tensor | None,
) -> Run:
    """Generates tokens after a prompt `[batch, length]`: those that are `forced`, or the likeliest."""
    reads: list[int] = []

    def pick(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # From the first on, when the prompt was through
        reads.append(dense_reads(cache))
        if forced is None:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, forced[:, len(reads) - 1, None], 0.0)

    options = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    model.generation_config = GenerationConfig(max_new_tokens=num_new, min_new_tokens=num_new, **options)
    output = model.generate(  # type: ignore[operator]
        tokens,
        attention_mask=torch.ones_like(tokens) if mask is None else mask,
        **as_argument(cache),
        logits_processor=LogitsProcessorList([pick]),
    )
    if cache.get_seq_length() != tokens.shape[1] + num_new - 1:
        raise ValueError(f"its cache holds {cache.get_seq_length()} tokens after {tokens.shape[1] + num_new - 1}")
    logits = torch.stack(output.logits, dim=1).float()
    return Run(output.sequences[:, tokens.shape[1] :], logits, dense_reads(cache) - reads[0])


def scenarios(
    model: PreTrainedModel, make_cache: CacheMaker, known: Mapping[str, Run] | None = None
) -> Iterator[tuple[str, Run]]:
    """Runs a cache through all scenarios, with the tokens of the dense cache's `known` runs; yields names and runs."""
    long, short = prompt(model, PROMPT_LENGTH, 1), prompt(model, _SHORT_LENGTH, 2)
    cache, tokens = make_cache(model), long
    for name, num_new in (("one prompt", NUM_NEW), ("a second turn", _NUM_MORE)):
        run = generate(model, cache, tokens, None, num_new, known[name].tokens if known else None)
        tokens = torch.cat([tokens, run.tokens, prompt(model, _TURN_LENGTH, 3)], dim=1)
        yield name, run
    name, padding = "two prompts of unequal length", PROMPT_LENGTH - _SHORT_LENGTH
    mask = torch.ones(2, PROMPT_LENGTH, dtype=torch.int64, device="cpu")
    mask[1, :padding] = 0
    pair = torch.cat([long, torch.cat([long.new_zeros(1, padding), short], dim=1)])
    yield name, generate(model, make_cache(model), pair, mask, _NUM_MORE, known[name].tokens if known else None)


def refer(model: PreTrainedModel) -> tuple[dict[str, Run], float]:
    """Runs `DynamicCache`, and measures how far another prompt's logits are; a `ValueError` if they tell nothing."""
    runs = dict(scenarios(model, DENSE))
    first = runs["one prompt"]
    other = generate(model, DENSE(model), prompt(model, PROMPT_LENGTH, 4), None, NUM_NEW, first.tokens)
    logits = first.logits[:, 1:]
    control = float((other.logits[:, 1:] - logits).norm())
    if not control > _LEAST_CONTROL * float((logits - logits.mean(dim=-1, keepdim=True)).norm()):
        raise ValueError("its prompt leaves no trace in the logits")
    return runs, control / logits.numel() ** 0.5


def try_cache(model: PreTrainedModel, runs: Mapping[str, Run], control: float, case: Case) -> Outcome:
    """Runs a cache on a model and says what came of it, beside the dense cache's `runs` and `control`, see `refer`."""
    worst, reads = 0.0, 0
    try:
        for name, run in scenarios(model, case.make_cache, runs):
            distance = float((run.logits - runs[name].logits).pow(2).mean().sqrt()) / control
            worst, reads = max(worst, distance), reads + run.dense_reads
            # Not `>`, so that a NaN fails
            if not distance <= case.limit:
                return Outcome(status="fails", detail=f"{name}: logits are {distance:.2g} apart", distance=distance)
    except CAUGHT as error:
        return Outcome(status="refuses" if is_refusal(error) else "fails", detail=f"{type(error).__name__}: {error}")
    return Outcome(status="reads dense" if reads else "works", distance=worst)


def is_refusal(error: BaseException) -> bool:
    """Tells whether a cache has said no: neither the model nor PyTorch raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raiser = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return isinstance(error, ValueError | NotImplementedError) and raiser not in ("transformers", "torch")


def family_names() -> list[str]:
    """Lists the `model_type` of every decoder that the installed Transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_family(family: str, seed: int = 0) -> PreTrainedModel:
    """Builds a tiny random model of a family. PyTorch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(_shrink(CONFIG_MAPPING[family]()), dtype=torch.float32).eval()


def try_family(family: str, cases: Mapping[str, Case]) -> FamilyResult:
    """Tries caches on a family, in this process."""
    try:
        model = build_family(family)
        runs, control = refer(model)
    except CAUGHT as error:
        return FamilyResult(family=family, dense=f"{type(error).__name__}: {error}")
    outcomes = {name: try_cache(model, runs, control, case) for name, case in cases.items()}
    return FamilyResult(family=family, outcomes=outcomes)


def try_families(
    families: Iterable[str],
    cases: Mapping[str, Case],
    announce: Callable[[str], None] = lambda family: None,
    seconds_a_family: float = 180,
) -> Iterator[FamilyResult]:
    """Tries caches on families, each in a process of its own that is given up after some seconds."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork:
        # What is loaded now is so in all processes
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try_family(_FIRST, cases)
        torch.set_num_threads(num_threads)
    for family in families:
        announce(family)
        yield _try_apart(family, cases, seconds_a_family) if can_fork else try_family(family, cases)


def _try_apart(family: str, cases: Mapping[str, Case], seconds: float) -> FamilyResult:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(family, cases, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()  # type: ignore[no-any-return]
        reason = f"gave no answer within {seconds:.0f} seconds"
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    return FamilyResult(family=family, dense=reason)


def _send_result(family: str, cases: Mapping[str, Case], sender: Connection) -> None:
    # Of random models with odd settings there is much to be said, which is not what was asked
    warnings.simplefilter("ignore")
    logging.set_verbosity(CRITICAL)
    torch.set_num_threads(1)
    sender.send(try_family(family, cases))


def own_cases() -> dict[str, Case]:
    """Makes cases of GEAR at 8 bits, InfiniGen that fetches everything, H2O that keeps everything."""
    # What everything is fetched for attends as the dense cache does. Speculating as for a model on a GPU
    everything: dict[str, Any] = {"share": 1.0, "max_fetch_ratio": 1.0, "recent": 8, "full_layers": ()}
    h2o = partial(create_cache, "h2o", heavy_ratio=0.5, recent_ratio=0.5)
    return {
        "transform": Case(partial(create_cache, "gear-4bit", nbits=8, residual_length=16), _LOSSY),
        "infinigen": Case(partial(create_cache, "infinigen", **everything, speculate=True), _EXACT),
        "h2o": Case(h2o, _EXACT),
    }


def cases_of(specs: list[str]) -> dict[str, Case]:
    """Makes cases of registered caches by their specs, held to what 8 bits may change."""
    return {spec: Case(partial(create_cache, spec), _LOSSY) for spec in specs}


@benchmark("families")
def survey_families(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[list[str] | None, typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
) -> Iterator[Found]:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache, by default GEAR at 8 bits, InfiniGen that fetches
    everything and H2O that keeps everything, is held against DynamicCache: one prompt and a second turn, and two
    prompts of unequal length. It works, works and reads whole layers dense while decoding, refuses and says why, or
    fails.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.gear.status != "works")'
        kvcache-plugins models --out eval/results/families.json
    """
    families = [name for name in family_names() if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(family_names())}")
    cases = cases_of(cache) if cache else own_cases()
    yield Settings(families=pattern, caches=" ".join(cases))
    with track_progress(len(families)) as announce:
        yield from map(dataclasses.asdict, try_families(families, cases, announce, seconds))


# Small configs

HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 64, 4, 16
VOCAB_SIZE = 97

_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_block_layers "
    "num_encoder_layers"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads"
)
# A size of one name has the same meaning wherever it is
_NAMES_BY_SIZE = {
    2: f"{_LAYERS} index_n_heads linear_num_key_heads n_mamba_heads num_key_value_groups num_kv_shared_layers",
    HIDDEN_SIZE: (
        "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim dim_model embed_dim lru_width "
        "attention_hidden_size embedding_dim hidden_dim index_topk"
    ),
    96: (
        "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
        "dim_ff shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size dff block_ff_dim "
        "intermediate_size_mlp moe_shared_expert_intermediate_size dense_intermediate_size"
    ),
    # All experts of a token: which ones are chosen would hang on rounding
    NUM_HEADS: (
        f"{_HEADS} num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok moe_k moe_topk "
        "num_experts_per_token top_k top_k_experts"
    ),
    VOCAB_SIZE: "vocab_size n_words vocab_size_per_layer_input",
    HEAD_DIM: (
        "hidden_size_per_layer_input mamba_d_state mamba_chunk_size chunk_size ssm_state_size state_size "
        "head_dim swa_head_dim d_kv kv_channels attention_head_dim qk_nope_head_dim v_head_dim index_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"
    ),
    2 * HEAD_DIM: "global_head_dim router_hidden_size kv_lora_rank",
    512: "n_ctx n_positions max_position_embeddings max_seq_len max_target_positions original_max_position_embeddings",
    24: "sliding_window window_size attention_window_size attention_chunk_size sliding_window_size q_lora_rank",
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups mamba_ngroups n_groups",
    0: "num_nextn_predict_layers",
    8: "adapter_rank laurel_rank qk_rope_head_dim mamba_n_heads mamba_num_heads mamba_dt_rank",
    8 * HEAD_DIM: "mamba_d_ssm",
    28: "image_size",
    14: "patch_size",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
# Sharp enough that a wrong key changes the logits
_INITIALIZER_RANGE = 0.1
# What does not follow from the table, by `model_type`; wins over it
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
SPECIAL_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _ALTERNATING,
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 4},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 6},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN_SIZE, "attention_head_dim": 2 * HEAD_DIM},
    "zaya": {"num_experts_per_tok": 1},
}
_KEY_VALUE_HEADS = "num_key_value_heads n_head_kv num_kv_heads swa_num_key_value_heads num_global_key_value_heads"
_KINDS = ("layer_types", "layers_block_type")


def _shrink(default: PreTrainedConfig) -> PreTrainedConfig:
    """Makes a config of the same class as a default one, with all sizes small."""
    fields = {field.name: _value(default, field) for field in dataclasses.fields(default) if field.init}
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _shrink(value)
        elif name == "is_decoder":
            # Models that can be encoders too
            small[name] = True
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            small[name] = _INITIALIZER_RANGE
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[name] = _SIZES[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = min(value, VOCAB_SIZE - 1)
    small |= _key_value_heads(fields)
    small |= _layers(default, fields)
    small |= SPECIAL_FIELDS.get(default.model_type, {})
    return type(default)(**small)


def _value(default: PreTrainedConfig, field: dataclasses.Field[Any]) -> Any:
    """A field's value; where layers have different ones, what the class has written down."""
    try:
        return getattr(default, field.name)
    except (AttributeError, RuntimeError):
        return None if field.default is dataclasses.MISSING else field.default


def _key_value_heads(fields: dict[str, Any]) -> dict[str, int]:
    """Grouped where they are grouped, one where there is one, as many as query heads otherwise."""
    num_heads = next((fields[name] for name in _HEADS.split() if isinstance(fields.get(name), int)), None)
    small = {}
    for name in _KEY_VALUE_HEADS.split():
        count = fields.get(name)
        if isinstance(count, int):
            small[name] = 1 if count == 1 else NUM_HEADS if count == num_heads else NUM_HEADS // 2
    return small


def _layers(default: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Two layers of each kind, where a config lists the kinds, and what else it lists of these layers."""
    kinds = next((fields[name] for name in _KINDS if isinstance(fields.get(name), list)), None)
    if kinds is None:
        return {}
    places = [[index for index, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)]
    # Each kind once, then again: layers that share states of others come last
    kept = [each[turn] for turn in (0, 1) for each in places if turn < len(each)]
    counts = {name: len(kept) for name in _LAYERS.split()[:1] if name in fields}
    lists = {
        name: [value[index] for index in kept]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == len(kinds)
    }
    return counts | lists
