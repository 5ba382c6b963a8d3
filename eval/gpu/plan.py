"""How large a run of `gpu` is: a whole one on a GPU, and one that proves the script on any machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvcache_plugins.eval.benchmarks.kernels import CACHES, Shape
from kvcache_plugins.registry import describe_caches


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes of a run; of caches the most wanted come first, the first being the measure."""

    # Arguments of pytest
    tests: tuple[str, ...]
    # Attention that is checked: presets, fields of a `LlamaConfig`, and tokens of each call
    presets: tuple[str, ...]
    preset_model: Mapping[str, int]
    preset_tokens: tuple[int, ...]
    # Coded at once, of a prompt and of a chunk
    coding_caches: tuple[str, ...]
    coding_tokens: tuple[int, ...]
    # Attention alone, by the name of the result
    shapes: Mapping[str, Shape]
    attention_caches: tuple[str, ...]
    rounds: int
    # Whole steps; of those that are captured so many tokens have to be the same
    model: Mapping[str, int]
    context: int
    steps: int
    step_caches: tuple[str, ...]
    captured_caches: tuple[str, ...]
    captured_tokens: int
    # The largest batch in so many bytes
    budget: int
    batch_context: int
    batch_caches: tuple[str, ...]
    # Of a context, and decoded: those of a dense cache where everything is fetched
    exact_tokens: tuple[int, int]
    offload_model: Mapping[str, int]
    offload_context: int
    offload_steps: int
    offload_caches: tuple[str, ...]


def make_llama(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int, tokens: int
) -> dict[str, int]:
    """Makes the fields of a `LlamaConfig`."""
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return {**sizes, **heads_of, "max_position_embeddings": tokens}


# One of each kind of kernel goes before its relatives, all that are registered
_FIRST = (
    *("gear", "gear-2bit", "gear-c16", "kivi-2bit", "gear-t16:quantizer=trellis", "gear-c16:quantizer=trellis"),
    *("gear-k4v3", "gear-4bit", "gear-t16", "gear-l-2bit", "kcvt-4bit", "per-token-2bit"),
)
_REGISTERED = (entry.name for entry in describe_caches() if str(entry.factory).endswith(":GEARCache"))
FULL = Plan(
    tests=(
        "tests/triton_kernels/test_attention.py",
        "tests/triton_kernels/test_rows.py",
        "tests/triton_kernels/test_device_lengths.py",
        "tests/triton_kernels/test_static_steps.py",
        "tests/gear/transform/test_coding_kernels.py",
        "tests/triton_kernels/test_gather.py",
        "tests/infinigen/test_on_gpu.py",
    ),
    presets=tuple(dict.fromkeys((*_FIRST, *_REGISTERED))),
    # Heads as below, so that what is compiled is needed again
    preset_model=make_llama(1000, 1024, 1024, 2, 8, 2, 4096),
    # A prompt, decoded tokens at once, and the one that finds them compressed
    preset_tokens=(600, 64, 1),
    coding_caches=("gear-t25", "gear-t16", "gear-c16", "gear-t22", "gear-t30"),
    coding_tokens=(8192, 20),
    # The acceptance's shape first: what time is left goes to the others
    shapes={
        "large": Shape(batch_size=16, context=32768),
        "medium": Shape(batch_size=4, context=16384),
        "small": Shape(batch_size=1, context=4096),
    },
    attention_caches=(*CACHES, "gear-t16", "gear-t16:quantizer=trellis"),
    rounds=50,
    # Llama 3.1 8B
    model=make_llama(128256, 4096, 14336, 32, 32, 8, 131072),
    context=4096,
    # More than a chunk, so that every cache compresses one on the way
    steps=72,
    step_caches=(
        "dynamic",
        "gear",
        "gear-2bit",
        "gear-4bit",
        "kivi-2bit",
        "static",
        "quanto-4bit",
        "quanto-2bit",
        "hqq-4bit",
        "hqq-2bit",
    ),
    captured_caches=("gear", "gear-t16"),
    captured_tokens=150,
    budget=40 * 2**30,
    batch_context=4096,
    batch_caches=("dynamic", "gear-2bit", "gear"),
    exact_tokens=(1100, 40),
    # Llama 2 7B
    offload_model=make_llama(32000, 4096, 11008, 32, 32, 32, 65536),
    offload_context=32768,
    offload_steps=40,
    # Random weights attend broadly, so the default rule always fetches the most that it may, a fifth: its worst case.
    # A twentieth is about what it fetches of a trained model's long contexts.
    offload_caches=("dynamic", "infinigen", "offloaded", "infinigen-gear", "infinigen:share=0.05"),
)
TINY = Plan(
    tests=("tests/triton_kernels/test_attention.py", "-k", "no_tokens"),
    presets=("gear", "gear-t16:quantizer=trellis", "gear-c16", "gear-2bit"),
    preset_model=make_llama(128, 64, 64, 1, 4, 2, 1024),
    preset_tokens=(70, 64, 1),
    coding_caches=("gear-t25",),
    coding_tokens=(70, 9),
    shapes={"large": Shape(batch_size=1, context=128, num_heads=1, groups=2, head_dim=64)},
    attention_caches=("gear-2bit", "gear-l-2bit", "gear-t25"),
    rounds=3,
    model=make_llama(128, 128, 128, 1, 2, 1, 1024),
    context=128,
    steps=3,
    step_caches=("dynamic", "gear", "gear-2bit", "static", "no-such-cache"),
    captured_caches=("gear",),
    captured_tokens=24,
    # One dense sequence and a half
    budget=26_000,
    batch_context=64,
    batch_caches=("dynamic", "gear-2bit"),
    exact_tokens=(120, 6),
    offload_model=make_llama(128, 64, 64, 4, 2, 2, 1024),
    offload_context=100,
    offload_steps=4,
    offload_caches=("dynamic", "infinigen:share=0.1", "infinigen-gear:share=0.1", "offloaded"),
)
