"""Every option of OpenAI's APIs, tried once by its client: honoured, without an effect, or refused by its name."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from kvcache_plugins import PromptStore


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from kvcache_plugins.serving.conversations import Conversations  # noqa: E402
from kvcache_plugins.serving.disconnects import Request  # noqa: E402
from kvcache_plugins.serving.managers import CachingManager  # noqa: E402
from kvcache_plugins.serving.options import OPTIONS, check_options, options_of  # noqa: E402


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "many_requests.md"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if loud %}!!!{% endif %}"
TURN = {"role": "user", "content": "abc"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
PROMPTS = {
    "chat/completions": {"messages": [TURN], "max_tokens": 1},
    "completions": {"prompt": "abc", "max_tokens": 1},
    "responses": {"input": "abc", "max_output_tokens": 1},
}
# Options: a value that is accepted if the option is known, and one that never is
TRIED = {
    "messages": ([TURN], [{"role": "user", "content": [IMAGE]}]),
    "prompt": ("abc", ["abc", "abd"]),
    "input": ([TURN], [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]),
    "model": (None, "another"),
    "stream": (True, "yes"),
    "stream_options": (None, {"include_usage": "yes"}),
    "max_tokens": (2, 0),
    "max_completion_tokens": (2, -1),
    "max_output_tokens": (2, 1.5),
    "temperature": (0.5, 2.5),
    "top_p": (0.5, 1.5),
    "seed": (-1, 0.5),
    "stop": (["a", "b"], ["a"] * 5),
    "logit_bias": ({"97": 1}, {"a": 1}),
    "frequency_penalty": (0.0, 0.5),
    "presence_penalty": (0, -1),
    "n": (1, 2),
    "best_of": (1, 2),
    "echo": (False, True),
    "suffix": ("", "end"),
    "logprobs": (False, True),
    "top_logprobs": (0, 5),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "text": ({"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
    "modalities": (["text"], ["text", "audio"]),
    "verbosity": ("medium", "low"),
    "instructions": ("Be brief.", ["Be brief."]),
    "tools": ([], [{"type": "function", "function": {"name": "look"}}]),
    "tool_choice": ("none", "required"),
    "parallel_tool_calls": (False, "yes"),
    "function_call": ("none", {"name": "look"}),
    "functions": (None, [{"name": "look"}]),
    "user": ("somebody", 1),
    "safety_identifier": ("somebody", 1),
    "prompt_cache_key": ("a key", 1),
    "metadata": (None, {"a": "b"}),
    "store": (False, True),
    "service_tier": ("auto", "flex"),
    "background": (False, True),
    "include": (None, ["message.output_text.logprobs"]),
    "truncation": ("disabled", "auto"),
    "chat_template_kwargs": ({"loud": True}, {"tokenize": False}),
    "generation_config": (json.dumps({"max_new_tokens": 2}), json.dumps({"num_return_sequences": 2})),
}


def rows_of_guide():
    """Reads the guide's table: of each option a cell for each API."""
    lines = GUIDE.read_text(encoding="utf-8").split("| option | ")[1].splitlines()
    heads = [head.strip(" `") for head in lines[0].split("|")[:3]]
    rows = {}
    for line in lines[2:]:
        if not line.startswith("| `"):
            break
        names, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        rows |= {name: dict(zip(heads, cells, strict=True)) for name in re.findall("`([^`]+)`", names)}
    return rows


@pytest.fixture(scope="module")
def server(serving, saved_with_tokenizer, tmp_path_factory):
    from kvcache_plugins.serving import CacheServer

    folder = saved_with_tokenizer("llama", max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    made = CacheServer(folder, store=tmp_path_factory.mktemp("store"), port=0, device="cpu", dtype="float32")
    with serving(made):
        yield made


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def ask(client):
    """Asks by an API of the client, by its own argument where it has one."""
    apis = {
        "completions": client.completions,
        "responses": client.responses,
        "chat/completions": client.chat.completions,
    }
    model = client.models.list().data[0].id

    def call(api, **options):
        create, own = apis[api].create, {"model": model, **PROMPTS[api], **options}
        named = inspect.signature(create).parameters
        extra = {name: own.pop(name) for name in list(own) if name not in named}
        made = create(**own, extra_body=extra)
        return list(made) if own.get("stream") else made

    return call


@pytest.mark.parametrize("api", PROMPTS)
def test_each_option_is_accepted_or_refused_by_name_as_in_the_guide(api, ask):
    rows = rows_of_guide()
    assert OPTIONS[api].keys() <= rows.keys()
    for name, cells in rows.items():
        accepted, refused = TRIED.get(name, (None, "something"))
        option = OPTIONS[api].get(name)
        if option is None:
            assert cells[api] in ("refused", "-"), name
        else:
            assert cells[api] == option.accepted, name
            if accepted is not None:
                ask(api, **{name: accepted})
        with pytest.raises(openai.BadRequestError, match=f"`{name}`"):
            ask(api, **{name: refused})


def text_of(answer):
    """Joins the text of an answer, streamed or not."""
    if isinstance(answer, list):
        return "".join(text_of(chunk) for chunk in answer if chunk.choices)
    choice = answer.choices[0]
    part = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (choice.text if part is None else part.content) or ""


def test_temperature_top_p_and_seed_decide_how_tokens_are_chosen(ask):
    def text(**options):
        return text_of(ask("completions", max_tokens=16, **options))

    greedy = text()
    assert text(temperature=0, seed=1) == text(temperature=0, top_p=0.5) == greedy
    assert text(top_p=1e-3) == text(temperature=1, top_p=1e-3) == greedy
    sampled = [text(temperature=1, seed=seed) for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] and len({greedy, *sampled}) == 3
    # The seed of one request does not decide on the next one's tokens
    after = [(text(temperature=1, seed=1), text(temperature=1))[1] for _ in range(2)]
    assert after[0] != after[1]


def test_logit_bias_decides_on_a_token(ask):
    for api in ("completions", "chat/completions"):
        assert text_of(ask(api, logit_bias={str(ord("z")): 100}, max_tokens=3)) == "zzz"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["completions", "chat/completions"])
def test_an_answer_ends_before_a_stop_string(api, is_streamed, ask):
    stream = {"stream": True} if is_streamed else {}
    whole = text_of(ask(api, max_tokens=40, **stream))
    assert len(whole) == 40
    for stop in (whole[20:23], [whole[30:32], whole[24:27]]):
        first = min(whole.index(each) for each in ([stop] if isinstance(stop, str) else stop))
        answer = ask(api, max_tokens=40, stop=stop, **stream)
        assert text_of(answer) == whole[:first]
        last = answer[-1] if is_streamed else answer
        assert last.choices[0].finish_reason == "stop"
    # The beginning of a stop string that does not come is no end
    assert text_of(ask(api, max_tokens=40, stop=whole[-1] + "never", **stream)) == whole


@pytest.mark.parametrize(("wanted", "count"), [({}, 1), ({"include_usage": False}, 0), ({"include_usage": True}, 1)])
def test_a_stream_has_its_usage_where_it_is_asked_for(wanted, count, ask):
    options = {"stream_options": wanted} if wanted else {}
    for api in ("completions", "chat/completions"):
        chunks = ask(api, stream=True, **options)
        with_usage = [chunk for chunk in chunks if chunk.usage]
        assert len(with_usage) == count and (not count or chunks[-1].usage.completion_tokens == 1)
        assert bool(chunks[-1].choices) is not bool(wanted.get("include_usage"))
    with pytest.raises(openai.BadRequestError, match="`stream_options` is given without `stream`"):
        ask("completions", stream_options={"include_usage": True})


def test_responses_are_streamed_only_where_that_is_asked_for(ask):
    assert ask("responses").usage.output_tokens == 1
    assert ask("responses", stream=True)[-1].type == "response.completed"
    instructed = ask("responses", instructions="Be brief.").usage
    assert instructed.input_tokens == ask("responses").usage.input_tokens + len("<system>Be brief.")
    with pytest.raises(openai.BadRequestError, match="`instructions`"):
        ask("responses", instructions="Be brief.", input=[{"role": "system", "content": "Be long."}, TURN])


def test_usage_says_how_many_tokens_were_known(ask):
    prompt = "The store keeps what it has read. " * 20
    known = [ask("completions", prompt=prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert known == [0, 512]
    asked = ask("chat/completions", messages=[{"role": "user", "content": prompt}], stream=True)
    assert asked[-1].usage.prompt_tokens_details.cached_tokens == 0
    for stream in ({}, {"stream": True}):
        answer = ask("responses", input=prompt, **stream)
        usage = answer[-1].response.usage if stream else answer.usage
        assert usage.input_tokens_details.cached_tokens == 512


def test_a_prompt_is_refused_at_once_if_it_is_longer_than_the_model_takes(server, ask):
    before = server.stats()["prompt_tokens"]
    for api, name in (("completions", "prompt"), ("responses", "input")):
        for stream in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError, match=r"prompt has 10\d\d tokens, but .* at most 1023"):
                ask(api, **{name: "a" * 1030}, **stream)
    assert server.stats()["prompt_tokens"] == before
    cut = ask("completions", prompt="a" * 1020, max_tokens=100)
    assert cut.usage.completion_tokens == 4 and cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [IMAGE]}, "part of type `image_url`"),
        ({"role": "user", "content": "abc", "name": "somebody"}, "message with `name`"),
        ({"role": "tool", "content": "abc", "tool_call_id": "1"}, "message with `tool_call_id`"),
        ("abc", "accepted are messages"),
        ({"content": "abc"}, "message without a `role`"),
        ({"role": 5, "content": "abc"}, "message without a `role`"),
        ({"role": "user", "content": 5}, "`content` 5, but accepted are a text or parts"),
        ({"role": "user", "content": [["abc"]]}, "has a part of type"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type `text` without a `text`"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "without a `text`"),
    ],
    ids=["image", "name", "tool", "text", "no-role", "no-text-role", "number", "list", "no-text", "number-as-text"],
)
def test_messages_with_parts_hidden_from_the_model_are_refused(message, words, ask):
    with pytest.raises(openai.BadRequestError, match=f"`messages` .*{words}"):
        ask("chat/completions", messages=[TURN, message])
    texts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    answer = ask("chat/completions", messages=[{"role": "user", "content": texts}])
    # An answer as the client has it, with all its fields that hold nothing, may go into a next turn
    ask("chat/completions", messages=[TURN, answer.choices[0].message.model_dump(), TURN])


def test_functions_are_accepted_if_the_chat_template_has_them():
    functions = [{"type": "function", "function": {"name": "look"}}]
    turns = [TURN, {"role": "tool", "content": "abc", "tool_call_id": "1"}]
    known = {"takes_tools": True}
    options = options_of("chat/completions", "m", is_batched=False, **known)
    check_options("chat/completions", options, {"messages": turns, "tools": functions, "tool_choice": "auto"}, **known)
    for wrong in ({"tools": [{"type": "web_search"}]}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        with pytest.raises(ValueError, match=f"`{min(wrong)}`"):
            check_options("chat/completions", options, {"messages": turns, **wrong}, **known)


def test_batch_requests_are_sampled_by_their_own_options():
    for api in OPTIONS:
        body = {name: value for name, value in PROMPTS[api].items() if name != "model"}
        options = options_of(api, "m", takes_tools=False, is_batched=True)
        taken = {"temperature": 0.7, "top_p": 0.5, "seed": 3}
        check_options(api, options, {**body, **taken}, takes_tools=False)
        for name, value in {"stop": "a", "logit_bias": {"97": 1}, "generation_config": "{}"}.items():
            with pytest.raises(ValueError, match=f"`{name}`"):
                check_options(api, options, {**body, name: value}, takes_tools=False)


def test_a_prompt_ends_at_the_next_layer_once_its_client_has_disconnected(tiny_loaded, tmp_path):
    model, tokenizer = tiny_loaded
    ids, passes, said = tokenizer("abc " * 200, return_tensors="pt").input_ids, [], []
    manager = CachingManager(model, "transform", PromptStore(tmp_path), None, said.append)
    request = Request()

    def leave(*args):
        passes.append(0)
        # Two passes of the first layer: the client goes while the second block of the store is read
        if passes.count(0) == 2:
            request.disconnected.set()

    layers = model.model.layers
    hooks = [layers[0].register_forward_hook(leave), layers[1].register_forward_hook(lambda *args: passes.append(1))]
    try:
        answer = manager.generate(ids, request, generation_config=GenerationConfig(max_new_tokens=4))
    finally:
        for hook in hooks:
            hook.remove()
    # The first block went through both layers, the second through one
    assert passes.count(1) == 1 and passes[-1] == 0 and answer is ids
    assert said == ["800 tokens; the client has disconnected"] and manager.counters["cancelled"] == 1
    assert not any(layer._forward_pre_hooks for layer in layers)
    # The block that was read is known to the next request
    assert manager.generate(ids, Request(), generation_config=GenerationConfig(max_new_tokens=4)).shape == (1, 804)
    assert manager.counters["known_tokens"] == 256
    manager.stop()


def test_a_batch_refuses_requests_beyond_its_pages_and_goes_on(serving, saved_with_tokenizer):
    from kvcache_plugins.serving import CacheServer

    folder, said = saved_with_tokenizer("gemma3-hybrid", max_position_embeddings=9999), []
    text = (GUIDE.parents[2] / "LICENSE").read_text(encoding="ascii")
    sizes = {"num_blocks": 1, "max_batch_tokens": 512, "device": "cpu", "dtype": "float32", "port": 0}
    made = CacheServer(folder, "transform-30", continuous_batching=True, text=text, say=said.append, **sizes)
    assert re.fullmatch(r"pages take \d+ MB, for about \d+ tokens of all .*`--num-blocks`.*", said[0])
    with serving(made):
        client = openai.OpenAI(base_url=made.url, api_key="none", max_retries=0, timeout=600)

        def usage(start, length):
            prompt = text[start : start + length]
            return client.completions.create(model=folder, prompt=prompt, max_tokens=9).usage

        # Pages of prompts that were read are kept for others
        assert usage(0, 300).completion_tokens == usage(2000, 300).completion_tokens == 9
        with pytest.raises(openai.BadRequestError, match="at most") as caught:
            usage(0, 9000)
        most = int(re.search(r"at most (\d+)", str(caught.value))[1])
        assert 600 < most < 5000 and usage(4000, most).completion_tokens == 1
        with pytest.raises(openai.BadRequestError, match=f"{most + 1} tokens, but .* at most {most}"):
            usage(1, most + 1)
        assert usage(0, 300).completion_tokens == 9


def test_pages_of_a_cpu_are_bounded_unless_their_number_is_given(tiny_loaded):
    from kvcache_plugins.serving.server import _choose_pages

    chosen, given = _choose_pages(tiny_loaded[0], None, None), _choose_pages(tiny_loaded[0], 3, 256)
    assert (chosen.page_size * chosen.num_blocks, chosen.max_batch_tokens) == (64 * 256, 1024)
    assert (given.page_size * given.num_blocks, given.max_batch_tokens) == (3 * 256, 256)


@pytest.mark.parametrize(("num_passes", "num_known"), [(1, 0), (4, 800)], ids=["while it reads", "while it answers"])
def test_a_conversation_continues_behind_an_answer_that_broke_off(tiny_loaded, num_passes, num_known):
    """The client goes between the two layers: the first one has read more than the second."""
    model, tokenizer = tiny_loaded
    ids, said = tokenizer("abc " * 200, return_tensors="pt").input_ids, []
    manager = CachingManager(model, "transform", None, Conversations(2), said.append)
    request, passes = Request(), []

    def leave(*args):
        passes.append(0)
        if len(passes) == num_passes:
            request.disconnected.set()

    greedy = {"generation_config": GenerationConfig(max_new_tokens=8, do_sample=False)}
    hook = model.model.layers[0].register_forward_hook(leave)
    try:
        assert manager.generate(ids, request, **greedy) is ids
    finally:
        hook.remove()
    assert len(passes) == num_passes
    # A next turn knows what was read before, and is answered as behind the prompt alone
    longer = torch.cat([ids, ids[:, :9]], dim=1)
    answer = manager.generate(longer, Request(), **greedy)
    assert manager.counters["known_tokens"] == num_known
    fresh = CachingManager(model, "transform", None, Conversations(2), said.append)
    if num_known:
        fresh.generate(ids, Request(), generation_config=GenerationConfig(max_new_tokens=1))
    assert torch.equal(answer, fresh.generate(longer, Request(), **greedy))
    for each in (manager, fresh):
        each.stop()
