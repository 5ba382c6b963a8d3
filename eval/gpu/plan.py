"""How large a run of `gpu` is: a whole one on a GPU, and one that proves the script on any machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvcache_plugins.eval.benchmarks.contest import Shape
from kvcache_plugins.eval.benchmarks.kernels import CACHES


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """
    Sizes of a run.

    Attributes:
        tests (`tuple[str, ...]`): arguments of pytest.
        presets (`tuple[str, ...]`): what is attended to once, to be checked, the most wanted first.
        preset_model (`Mapping[str, int]`): fields of a `LlamaConfig`.
        preset_tokens (`tuple[int, ...]`): tokens of each of its calls.
        coding_caches (`tuple[str, ...]`): presets that code tokens, by the layers of `preset_model`.
        coding_tokens (`tuple[int, ...]`): tokens that are coded at once, of a prompt and of a chunk.
        shapes (`Mapping[str, Shape]`): attention alone, by the name of the result.
        attention_caches (`tuple[str, ...]`): what is attended to, the most wanted first.
        rounds (`int`): times that each attention is timed.
        model (`Mapping[str, int]`): fields of a `LlamaConfig`.
        context, steps (`int`): tokens in the cache, and decoded.
        step_caches (`tuple[str, ...]`): what decodes, the first as the measure.
        captured_caches (`tuple[str, ...]`): what decodes captured and not, the most wanted first.
        captured_tokens (`int`): decoded tokens that have to be the same.
        budget (`int`): bytes for the largest batch.
        batch_context (`int`): tokens of each sequence of the largest batch.
        batch_caches (`tuple[str, ...]`): whose largest batch is looked for.
        exact_tokens (`tuple[int, int]`): tokens of a context, and decoded, that have to be a dense cache's where
            everything is fetched.
        offload_model (`Mapping[str, int]`): fields of the `LlamaConfig` that offloaded caches are measured with.
        offload_context, offload_steps (`int`): tokens in those caches, and decoded.
        offload_caches (`tuple[str, ...]`): what decodes there, with options; the most wanted first.
    """

    tests: tuple[str, ...]
    presets: tuple[str, ...]
    preset_model: Mapping[str, int]
    preset_tokens: tuple[int, ...]
    coding_caches: tuple[str, ...]
    coding_tokens: tuple[int, ...]
    shapes: Mapping[str, Shape]
    attention_caches: tuple[str, ...]
    rounds: int
    model: Mapping[str, int]
    context: int
    steps: int
    step_caches: tuple[str, ...]
    captured_caches: tuple[str, ...]
    captured_tokens: int
    budget: int
    batch_context: int
    batch_caches: tuple[str, ...]
    exact_tokens: tuple[int, int]
    offload_model: Mapping[str, int]
    offload_context: int
    offload_steps: int
    offload_caches: tuple[str, ...]


# Every GEAR preset. One of each kind of kernel goes before its relatives
_PRESETS = (
    "gear",
    "gear-2bit",
    "gear-c16",
    "kivi-2bit",
    "gear-t16-trellis",
    "gear-c16-trellis",
    "gear-k4v3",
    "gear-4bit",
    "gear-t16",
    "gear-l-2bit",
    "kcvt-4bit",
    "per-token-2bit",
    "gear-k4v4-g32",
    "gear-k3v2",
    "gear-k4v4",
    "gear-t22",
    "gear-t25",
    "gear-t30",
    "gear-c12",
    "gear-c18",
    "gear-c20",
    "gear-c28",
    "gear-c10-trellis",
    "gear-c12-trellis",
    "gear-t12-trellis",
    "gear-t14-trellis",
    "gear-t22-trellis",
    "gear-t25-trellis",
    "gear-l-4bit",
    "gear-k2v2",
    "kivi-4bit",
    "per-token-4bit",
)
FULL = Plan(
    tests=(
        "tests/triton_kernels/test_attention.py",
        "tests/triton_kernels/test_rows.py",
        "tests/triton_kernels/test_device_lengths.py",
        "tests/gear/test_captured_on_gpu.py",
        "tests/gear/transform/test_coding_kernels.py",
        "tests/triton_kernels/test_gather.py",
        "tests/infinigen/test_on_gpu.py",
    ),
    presets=_PRESETS,
    # Heads as below, so that what is compiled is needed again
    preset_model={
        "vocab_size": 1000,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
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
    attention_caches=(*CACHES, "gear-t16", "gear-t16-trellis"),
    rounds=50,
    # Llama 3.1 8B
    model={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
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
    captured_caches=("gear", "gear-2bit", "kivi-2bit", "gear-t16", "gear-k4v3"),
    captured_tokens=150,
    budget=40 * 2**30,
    batch_context=4096,
    batch_caches=("dynamic", "gear-2bit", "gear"),
    exact_tokens=(1100, 40),
    # Llama 2 7B
    offload_model={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 65536,
    },
    offload_context=32768,
    offload_steps=40,
    # Random weights attend broadly, so the default rule always fetches the most that it may, a fifth: its worst case.
    # A twentieth is about what it fetches of a trained model's long contexts.
    offload_caches=("dynamic", "infinigen", "offloaded", "infinigen-gear", "infinigen:share=0.05"),
)
TINY = Plan(
    tests=("tests/triton_kernels/test_attention.py", "-k", "no_tokens"),
    presets=("gear", "gear-t16-trellis", "gear-c16", "gear-2bit"),
    preset_model={
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    preset_tokens=(70, 64, 1),
    coding_caches=("gear-t25",),
    coding_tokens=(70, 9),
    shapes={"large": Shape(batch_size=1, context=128, num_heads=1, groups=2, head_dim=64)},
    attention_caches=("gear-2bit", "gear-l-2bit", "gear-t25"),
    rounds=3,
    model={
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
    },
    context=128,
    steps=3,
    step_caches=("dynamic", "gear", "gear-2bit", "static", "no-such-cache"),
    captured_caches=("gear", "gear-2bit"),
    captured_tokens=24,
    # One dense sequence and a half
    budget=26_000,
    batch_context=64,
    batch_caches=("dynamic", "gear-2bit"),
    exact_tokens=(120, 6),
    offload_model={
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    offload_context=100,
    offload_steps=4,
    offload_caches=("dynamic", "infinigen:share=0.1", "infinigen-gear:share=0.1", "offloaded"),
)
