"""llama-cpp-python, which is not installed by default: it builds llama.cpp from source."""

import ctypes
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple


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


def import_llama_cpp() -> ModuleType:
    """The bindings of llama.h, silenced. An `ImportError` that names the extra if they are not installed."""
    try:
        bindings = import_module("llama_cpp")
    except ImportError as error:
        raise ImportError(
            "`bench llama-cpp` needs llama-cpp-python, which builds llama.cpp from source for some ten minutes: "
            "`pip install kvcache-plugins[llama-cpp]`"
        ) from error
    bindings.llama_log_set(_ignore(bindings), ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings


def _ignore(bindings: Any) -> Any:
    def ignore(level: int, text: bytes, user_data: object) -> None:
        pass

    # Kept alive by the module that calls it
    bindings.kvcache_plugins_log_callback = bindings.llama_log_callback(ignore)
    return bindings.kvcache_plugins_log_callback


def load_ggml() -> ctypes.CDLL:
    """ggml's functions, by the handle of llama.cpp's library, which links them: no second copy of them is loaded."""
    import_llama_cpp()
    library: ctypes.CDLL = import_module("llama_cpp.llama_cpp")._lib
    return library
