"""Options of a request that this server takes, by API, and the one check of them.

OpenAI's APIs have more. An option that is not listed, or has a value that would be ignored, is refused before anything
is computed, by a `ValueError` that names it and the accepted values. A value without an effect, such as `n=1`, is
accepted; `null`, `[]` and `{}` count as left out.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformers import GenerationConfig, PreTrainedTokenizerBase


class Option(NamedTuple):
    """
    Accepted values of an option.

    Attributes:
        accepted (`str`): description of the values.
        takes (`Callable`): test of a value.
    """

    accepted: str
    takes: Callable[[object], bool]


Options = Mapping[str, Option]


def _number(low: float, high: float, words: str) -> Option:
    def takes(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return Option(words, takes)


def _integer(low: int, words: str) -> Option:
    return Option(words, lambda value: type(value) is int and low <= value < 2**63)


def _values(*values: object) -> Option:
    known = [json.dumps(value) for value in values]
    return Option(" or ".join(f"`{each}`" for each in known), lambda value: json.dumps(value) in known)


def _nothing(reason: str) -> Option:
    return Option(f"nothing, as {reason}", lambda value: False)


def _takes_stop(value: object) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= 4 and all(isinstance(stop, str) and stop for stop in stops)


def _takes_bias(value: object) -> bool:
    bias = _number(-100, 100, "")
    return isinstance(value, dict) and all(key.isdecimal() and bias.takes(each) for key, each in value.items())


def _takes_generation_config(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        config = json.loads(value)
    except ValueError:
        return False
    if not isinstance(config, dict) or config.get("num_return_sequences") not in (None, 1):
        return False
    # The server chooses the cache, and reads the output as tokens
    others = (config.get(name) for name in ("cache_implementation", "cache_config", "return_dict_in_generate"))
    is_known = config.keys() <= vars(GenerationConfig()).keys()
    return is_known and not any(others) and config.get("use_cache") is not False


def _takes_template_arguments(value: object) -> bool:
    # Arguments of the method are the server's, and a template of a client's could run for ever
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
    return isinstance(value, dict) and not own & value.keys()


def _takes_functions(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and each.get("type") == "function" for each in value)


_FLAG = _values(False, True)
_LABEL = Option("a text, without an effect", lambda value: isinstance(value, str))
_COUNT = _integer(1, "1 or more")
_ZERO = _number(0, 0, "`0`")
_SHARED = {
    "model": Option("the model that is served", lambda value: isinstance(value, str)),
    "stream": _FLAG,
    "temperature": _number(0, 2, "0 (greedy) to 2"),
    "top_p": _number(1e-6, 1, "above 0, up to 1"),
    "seed": _integer(-(2**63), "a whole number"),
    "user": _LABEL,
    "generation_config": Option(
        "JSON of a `GenerationConfig`, for one answer; it names no cache", _takes_generation_config
    ),
}
_COMPLETION = {
    **_SHARED,
    "max_tokens": _COUNT,
    "stop": Option("a text, or up to 4", _takes_stop),
    "logit_bias": Option("-100 to 100, by token id", _takes_bias),
    "frequency_penalty": _ZERO,
    "presence_penalty": _ZERO,
    "n": _values(1),
    "stream_options": _values({"include_usage": True}, {"include_usage": False}),
}
_CHAT = {
    "tools": Option("functions, if the model's chat template has tools", _takes_functions),
    "tool_choice": Option('`"auto"`; `"none"` where there are no tools', _values("auto").takes),
    "parallel_tool_calls": _values(True),
    "store": _values(False),
    "service_tier": _values("auto", "default"),
    "safety_identifier": _LABEL,
    "prompt_cache_key": _LABEL,
    "top_logprobs": _values(0),
    "chat_template_kwargs": Option("arguments of the chat template", _takes_template_arguments),
}
# The first option of each API is its prompt
OPTIONS: Mapping[str, Options] = {
    "chat/completions": {
        "messages": Option("messages of text", lambda value: isinstance(value, list)),
        **_COMPLETION,
        **_CHAT,
        "max_completion_tokens": _COUNT,
        "logprobs": _values(False),
        "response_format": _values({"type": "text"}),
        "modalities": _values(["text"]),
        "verbosity": _values("medium"),
        "function_call": _values("none"),
    },
    "completions": {
        "prompt": Option("one text", lambda value: isinstance(value, str)),
        **_COMPLETION,
        "best_of": _values(1),
        "echo": _values(False),
        "suffix": _values(""),
    },
    "responses": {
        "input": Option("a text, or messages of text", lambda value: isinstance(value, str | list)),
        **_SHARED,
        **_CHAT,
        "instructions": Option("a text, if no system message begins `input`", lambda value: isinstance(value, str)),
        "max_output_tokens": _COUNT,
        "stream_options": _values({"include_obfuscation": False}),
        "background": _values(False),
        "text": _values({"format": {"type": "text"}}),
        "truncation": _values("disabled"),
    },
}
# Keys of messages, and types of their parts and of items, that reach the chat template
_MESSAGE_KEYS = {"role", "content", "reasoning_content", "type", "id", "status"}
_TOOL_KEYS = {"tool_calls", "tool_call_id"}
_TEXTS = {"text", "input_text", "output_text"}
_TOOL_ITEMS = {"function_call", "function_call_output"}


def options_of(api: str, name: str, *, takes_tools: bool, is_batched: bool) -> Options:
    """
    Return the options of an API of one server.

    Args:
        api (`str`): a key of `OPTIONS`.
        name (`str`): the name of the model.
        takes_tools (`bool`): True if the model's chat template has tools.
        is_batched (`bool`): True if requests are answered together.
    """
    options = {**OPTIONS[api], "model": _values(name)}
    if "tools" in options and not takes_tools:
        options["tools"] = _nothing("this model's chat template has none")
        options |= {"tool_choice": _values("auto", "none"), "parallel_tool_calls": _FLAG}
    if is_batched:
        reason = (
            "Transformers has it for no request of a batch: leave it out, or serve without `--continuous-batching`"
        )
        options |= {each: _nothing(reason) for each in ("stop", "logit_bias", "generation_config") if each in options}
    return options


def check_options(api: str, options: Options, body: Mapping[str, object], *, takes_tools: bool) -> None:
    """Raise a `ValueError` for the first option of a request that is unknown or has a value that is not accepted."""
    for name, value in body.items():
        if name not in options:
            known = ", ".join(f"`{each}`" for each in sorted(options))
            raise ValueError(f"`{name}` is no option of /v1/{api} here, leave it out: accepted are {known}")
        if not options[name].takes(value):
            raise ValueError(f"`{name}` is {json.dumps(value)[:200]}, but accepted is {options[name].accepted}")
    prompt = next(iter(OPTIONS[api]))
    if prompt not in body:
        raise ValueError(f"`{prompt}` is missing or empty")
    if "stream_options" in body and not body.get("stream"):
        raise ValueError("`stream_options` is given without `stream`")
    messages = body[prompt]
    if isinstance(messages, list):
        for message in messages:
            _check_message(prompt, message, takes_tools)
        if "instructions" in body and messages[0].get("role") == "system":
            raise ValueError(
                "`instructions` is given with an `input` that begins with a system message: leave out one"
            )


def _check_message(name: str, message: object, takes_tools: bool) -> None:
    """Raise a `ValueError` for content of a message that would not reach the chat template."""
    if not isinstance(message, dict):
        raise ValueError(f"`{name}` holds {json.dumps(message)[:200]}, but accepted are messages")
    if "role" in message or name == "messages":
        if not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}` has a message without a `role`, which is a text")
        keys = _MESSAGE_KEYS | (_TOOL_KEYS if takes_tools else set())
        unknown = [key for key, value in message.items() if value and key not in keys]
        if unknown:
            raise ValueError(f"`{name}` has a message with `{unknown[0]}`, but accepted are {', '.join(sorted(keys))}")
        content = message.get("content") or []
        if not isinstance(content, str | list):
            raise ValueError(f"`{name}` has `content` {json.dumps(content)[:200]}, but accepted are a text or parts")
        parts = [] if isinstance(content, str) else content
        kinds = _TEXTS
    else:
        parts = [message]
        kinds = _TEXTS | {"reasoning"} | (_TOOL_ITEMS if takes_tools else set())
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"`{name}` has a part of type `{kind}`, but accepted are {', '.join(sorted(kinds))}")
        if kind in _TEXTS and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise ValueError(f"`{name}` has a part of type `{kind}` without a `text`")
