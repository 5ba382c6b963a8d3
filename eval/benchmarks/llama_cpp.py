"""llama.cpp beside caches of this package: decode steps with the same weights in float32, taking turns in one process.

llama.cpp comes through llama-cpp-python's bindings, which are not installed by default. Caches on both sides hold a
long context which was not read: of llama.cpp's a short text is read once, and its state is restored into further
sequences, whose cells are given to the first one and to no other; of ours see `harness.fill_cache`. Weights are those
of a packaged model's GGUF file with every tensor in float32, written once: the safetensors that Transformers loads
were made from that file. Where all was read, llama.cpp's next-token probabilities are held against Transformers'.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import PreTrainedModel

from kvcache_plugins.console.inputs import ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.harness import (
    States,
    check_length,
    fill_cache,
    make_cache,
    read_states,
    spread,
    take_turns,
    time_call,
    with_reference,
)
from kvcache_plugins.eval.rows import Content, Failure, Found, Settings
from kvcache_plugins.gear.kernel_check import MismatchError
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import models_folder
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import check_caches
from kvcache_plugins.reports.memory import measure_memory


class KVType(NamedTuple):
    """A type of ggml: its number there, and bits a number with what blocks of them share."""

    number: int
    bits: float


# By llama.cpp's names for `--cache-type-k`
KV_TYPES = {
    "f16": KVType(1, 16),
    "q8_0": KVType(8, 8.5),
    "q5_1": KVType(7, 6),
    "q5_0": KVType(6, 5.5),
    "q4_1": KVType(3, 5),
    "q4_0": KVType(2, 4.5),
}
_TOKENS_READ = 512
# Of one next token, in nats, in f16 and in coded types: more is another model or a bug
_MOST_KL_F16, _MOST_KL = 0.01, 2.0


def import_llama_cpp() -> Any:
    """Imports the bindings of llama.h, silenced; an `ImportError` names the extra if they are not installed."""
    try:
        bindings: Any = import_module("llama_cpp")
    except ImportError as error:
        raise ImportError(
            "`bench llama-cpp` needs llama-cpp-python, which builds llama.cpp from source for some ten minutes: "
            "`pip install kvcache-plugins[llama-cpp]`"
        ) from error
    # Kept alive by the module that calls it
    bindings.kvcache_plugins_log_callback = bindings.llama_log_callback(lambda level, text, user_data: None)
    bindings.llama_log_set(bindings.kvcache_plugins_log_callback, ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings


class LlamaModel:
    """The weights of a GGUF file, loaded once for all contexts."""

    def __init__(self, bindings: ModuleType, path: Path) -> None:
        self.bindings: Any = bindings
        parameters = self.bindings.llama_model_default_params()
        self.handle = self.bindings.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.handle:
            raise ValueError(f"`gguf`: llama.cpp cannot load {path}")
        self.vocab_size = int(self.bindings.llama_vocab_n_tokens(self.bindings.llama_model_get_vocab(self.handle)))

    def close(self) -> None:
        """Frees the memory."""
        self.bindings.llama_model_free(self.handle)


class LlamaContext:
    """
    A KV cache of one type with llama.cpp's step over it, flash attention on: `context` tokens that repeat what is read
    of `token_ids`, and room for `num_steps` more.
    """

    def __init__(
        self, model: LlamaModel, kv_type: str, context: int, token_ids: Sequence[int], num_steps: int
    ) -> None:
        self._model, self._bindings = model, model.bindings
        length = min(len(token_ids), context)
        copies, rest = divmod(context, length)
        parameters = self._bindings.llama_context_default_params()
        parameters.n_ctx = context + num_steps + 256
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = copies + 2
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        parameters.type_k = parameters.type_v = KV_TYPES[kv_type].number
        parameters.flash_attn_type = self._bindings.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.no_perf = True
        self._handle = self._bindings.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise ValueError(f"`kv_type`: llama.cpp makes no context of {context} tokens in {kv_type}")
        self._decode(token_ids[:length])
        self.logits_read = self._logits()
        read = self._state_bytes()
        self._repeat(copies, rest)
        # Cells of other sequences would not be attended to, and a step would look faster than it is
        held = self._state_bytes() / read * length
        if abs(held - context) > 0.01 * context + 1:
            raise RuntimeError(f"llama.cpp's cache holds {held:.0f} tokens, not {context}")
        self.step = partial(self._decode, token_ids[:1])

    def _state_bytes(self) -> int:
        return int(self._bindings.llama_state_seq_get_size(self._handle, 0))

    def _repeat(self, copies: int, rest: int) -> None:
        """Makes `copies` of what was read, and adds the first `rest` tokens of it once more."""
        bindings, memory = self._bindings, self._bindings.llama_get_memory(self._handle)
        size = self._state_bytes()
        state = (ctypes.c_uint8 * size)()
        bindings.llama_state_seq_get_data(self._handle, state, size, 0)
        for sequence in range(1, copies + (rest > 0)):
            if not bindings.llama_state_seq_set_data(self._handle, state, size, sequence):
                raise RuntimeError(f"llama.cpp could not restore a state into sequence {sequence}")
            if sequence == copies:
                bindings.llama_memory_seq_rm(memory, sequence, rest, -1)
            # A cell may belong to several sequences: copying one gives away its cells, and copies no data
            bindings.llama_memory_seq_cp(memory, sequence, 0, -1, -1)
            bindings.llama_memory_seq_rm(memory, sequence, -1, -1)

    def _decode(self, token_ids: Sequence[int]) -> None:
        tokens = (ctypes.c_int32 * len(token_ids))(*token_ids)
        status = self._bindings.llama_decode(self._handle, self._bindings.llama_batch_get_one(tokens, len(token_ids)))
        if status:
            raise RuntimeError(f"llama.cpp's decoding failed with status {status}")

    def _logits(self) -> torch.Tensor:
        pointer = self._bindings.llama_get_logits_ith(self._handle, -1)
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._model.vocab_size)).contents
        return torch.frombuffer(numbers, dtype=torch.float32).clone()

    def close(self) -> None:
        """Frees the memory."""
        self._bindings.llama_free(self._handle)


def float32_gguf(model: str) -> Path:
    """
    Writes the file of a packaged model into the user's cache folder when it is first asked for; returns its path.

    Raises:
        ValueError: if `model` is none of them, or its package is not installed.
    """
    packaged = PACKAGED_MODELS.get(model)
    version = None if packaged is None else packaged.installed_version()
    if packaged is None or version is None:
        names = ", ".join(f"`{name}`" for name in PACKAGED_MODELS)
        raise ValueError(f"`gguf` has to name the same weights for llama.cpp unless `model` is {names}, installed")
    target = models_folder() / f"{model}-{version}-float32.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".partial")
        dequantize_file(packaged.locate_gguf(target.parent), unfinished)
        unfinished.rename(target)
    return target


def dequantize_file(source: Path, target: Path) -> None:
    """Writes a GGUF file with every tensor of another one in float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    reader: Any = GGUFReader(source)
    writer: Any = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        # The writer states these itself
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def time_steps(
    network: PreTrainedModel,
    llama: LlamaModel,
    token_ids: Sequence[int],
    states: States,
    context: int,
    caches: Sequence[str],
    kv_types: Sequence[str],
    rounds: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Times decode steps over `context` tokens, each called once before that; yields a row for each cache."""
    functions: dict[str, Callable[[], Any]] = {}
    held: dict[str, dict[str, Any]] = {}
    token = torch.tensor([token_ids[:1]])
    expected = network(torch.tensor([token_ids[:context]]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
    for spec in caches:
        cache = make_cache(spec, network)
        fill_cache(cache, states, context)
        functions[spec] = partial(network, token, **as_argument(cache))
        functions[spec]()
        check_length(cache, context + 1)
        held[spec] = {"bytes": measure_memory(cache).total_bytes}
    with ExitStack() as stack:
        for kv_type in kv_types:
            # One call comes before the timing
            own = stack.enter_context(closing(LlamaContext(llama, kv_type, context, token_ids, rounds + 1)))
            kl = divergence(kv_type, expected, own.logits_read)
            name = f"llama.cpp {kv_type}"
            held[name] = {"bytes": states_bytes(states, context, kv_type), "kl_after_reading": kl}
            functions[name] = own.step
        numbered = {name: lambda number, each=each: each() for name, each in functions.items()}
        clock = partial(time_call, device=torch.device("cpu"))
        measured = take_turns(numbered, clock, rounds, warm_up=1, seconds=seconds)
    first = statistics.median(next(iter(measured.values())))
    for name, times in measured.items():
        speed = first / statistics.median(times)
        yield {
            "part": "step",
            "context": context,
            "cache": name,
            **spread(times),
            "speed_against_first": speed,
            **held[name],
        }


def divergence(kv_type: str, expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Computes the KL of llama.cpp's next token from Transformers', in nats."""
    kl = float((expected.exp() * (expected - logits.log_softmax(-1))).sum())
    # Not `>`: NaN has to fail
    if not kl < (_MOST_KL_F16 if kv_type == "f16" else _MOST_KL):
        raise MismatchError(f"llama.cpp {kv_type} is {kl:.2f} nats from Transformers after the same text: not timed")
    return kl


def states_bytes(states: States, context: int, kv_type: str) -> int:
    """Counts the bytes that llama.cpp's cache holds of `context` tokens in a type."""
    numbers = sum(side.shape[1] * side.shape[3] for layer in states for side in layer)
    return int(numbers * context * KV_TYPES[kv_type].bits / 8)


@benchmark("llama-cpp")
@torch.inference_mode()
def benchmark_llama_cpp(
    text_file: Annotated[Path, typer.Option(help="A text, of which up to 512 tokens are read.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... whose steps are timed; repeatable.")] = [
        "quanto-4bit",
        "hqq-4bit",
        "gear-k4v3",
        "gear-t22",
        "gear",
    ],
    kv_type: Annotated[list[str], typer.Option(help="f16, q8_0, q5_1, q5_0, q4_1 or q4_0; repeatable.")] = [
        "f16",
        "q8_0",
        "q5_1",
        "q4_0",
    ],
    model: ModelOption = "smollm2",
    gguf: Annotated[Path | None, typer.Option(help="The same weights; made in float32 of a short name's.")] = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [1024, 4096, 16384],
    rounds: Annotated[int, typer.Option(help="Steps of each that a median is over.", min=3)] = 20,
    seconds: Annotated[float, typer.Option(help="After these, three rounds are enough in one context.", min=0)] = 10.0,
    num_threads: NumThreadsOption = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no further context is begun.", min=0)] = 3600.0,
) -> Iterator[Found]:
    """Time decode steps beside llama.cpp. The same weights in float32; all take turns.

    Needs the extra `llama-cpp`. Caches are filled by repeating what was read.

    \b
    Examples:
        kvcache-plugins bench llama-cpp --text-file book.txt --num-threads 1 --out llama_cpp.json
        kvcache-plugins bench llama-cpp --text-file book.txt --kv-type q4_0 --context 4096
    """
    for value in kv_type:
        check_choice("kv_type", value, tuple(KV_TYPES))
    specs = with_reference(check_caches(cache))
    bindings = import_llama_cpp()
    yield Settings(dtype="float32")
    yield Content(versions={"llama-cpp-python": metadata.version("llama-cpp-python")})
    weights = gguf or float32_gguf(model)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model, dtype="float32", device="cpu")
    token_ids = tokenizer(text, return_tensors="pt").input_ids[:, :_TOKENS_READ]
    states, start = read_states(network, token_ids), time.perf_counter()
    with closing(LlamaModel(bindings, weights)) as llama:
        for length in context:
            if time.perf_counter() - start > limit:
                yield Failure(f"steps over {length} tokens", f"{limit:.0f} seconds were over")
                continue
            say(f"steps over {length} tokens")
            own = token_ids[0].tolist()
            yield from time_steps(network, llama, own, states, length, specs, kv_type, rounds, seconds)
