"""`kvcache-plugins serve`, asked by OpenAI's client: chats, the store, clients that go, errors and the end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from kvcache_plugins import PromptStore, cli


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

GREEDY = {"model": "smollm2", "temperature": 0}
SYSTEM = "Answer by this text. " + "The cache of a decoder holds keys and values of all tokens before. " * 16
QUESTION = {"role": "user", "content": "What is this about? One sentence."}


def connect(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    from kvcache_plugins.serving import CacheServer

    server = CacheServer("smollm2", store=tmp_path_factory.mktemp("store"), port=0, device="cpu", dtype="float32")
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.fixture
def client(server):
    return connect(server.url)


def metrics(server):
    with urllib.request.urlopen(server.url.replace("/v1", "/metrics")) as answer:
        return {
            name.removeprefix("kvcache_"): int(value)
            for name, value in map(str.split, answer.read().decode().splitlines())
        }


def wait_for(server, **wanted):
    """Waits until the server has counted so many."""
    for _ in range(600):
        if wanted.items() <= metrics(server).items():
            return
        time.sleep(0.05)
    raise AssertionError(f"{metrics(server)} has not come to {wanted}")


def test_the_second_turn_of_a_chat_finds_the_first(server, client, smollm2, tmp_path):
    model, tokenizer = smollm2
    turns = [{"role": "system", "content": SYSTEM}, QUESTION]
    first = client.chat.completions.create(messages=turns, max_tokens=24, **GREEDY)
    # The prompt is less than a block of the store, with its answer it is more
    assert first.usage.prompt_tokens < 256 < first.usage.total_tokens and metrics(server)["known_tokens"] == 0
    turns += [first.choices[0].message.model_dump(include={"role", "content"}), QUESTION]
    chunks = list(client.chat.completions.create(messages=turns, max_tokens=4, stream=True, **GREEDY))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert metrics(server)["known_tokens"] == 256
    whole = client.chat.completions.create(messages=turns, max_tokens=4, **GREEDY)
    assert whole.choices[0].message.content == streamed
    assert metrics(server)["known_tokens"] == 512
    # The same as without a server, read in the same blocks
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    store = PromptStore(tmp_path)
    cache = store.cache_for(model, ids["input_ids"])
    store.prefill(model, cache, ids["input_ids"])
    alone = model.generate(**ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == streamed


def test_a_request_ends_when_its_client_has_gone(server, client):
    before = metrics(server)
    stream = client.completions.create(prompt="One, two,", max_tokens=1000, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    wait_for(server, cancelled=before["cancelled"] + 1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).completions.create(prompt="One, two,", max_tokens=1000, **GREEDY)
    wait_for(server, cancelled=before["cancelled"] + 2)
    assert client.completions.create(prompt="One, two,", max_tokens=3, **GREEDY).usage.completion_tokens == 3
    assert metrics(server)["cancelled"] == before["cancelled"] + 2


WRONG = {
    "model": ({"model": "other"}, 400, "pinned to 'smollm2'"),
    "cache": ({"extra_body": {"generation_config": '{"cache_implementation": "static"}'}}, 400, "must not choose"),
    "option": ({"extra_body": {"nothing": 1}}, 422, "nothing"),
    "prompt": ({"prompt": ""}, 400, "prompt is empty"),
    "tokens": ({"max_tokens": -1}, 400, "max_new_tokens"),
}


@pytest.mark.parametrize(("wrong", "code", "message"), WRONG.values(), ids=WRONG)
def test_errors_are_json(client, wrong, code, message):
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.completions.create(**{**GREEDY, "prompt": "One,", **wrong})
    assert caught.value.status_code == code


def test_errors_of_a_stream_and_of_routes_are_json(server, client):
    wrong = {"generation_config": json.dumps({"cache_implementation": "static"})}
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(prompt="One,", stream=True, extra_body=wrong, **GREEDY))
    assert "must not choose" in caught.value.body
    with pytest.raises(openai.BadRequestError, match="'messages' is missing"):
        client.post("/chat/completions", body={"model": "smollm2"}, cast_to=object)
    # Other models are not loaded
    with pytest.raises(openai.NotFoundError):
        client.post("/../load_model", body={"model": "gemma3-270m"}, cast_to=object)
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_ctrl_c_lets_an_answer_end(tiny_folder):
    command = [sys.executable, "-m", "kvcache_plugins.cli", "serve", tiny_folder, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    said = []
    for line in process.stderr:
        said.append(line)
        if "startup complete" in line:
            break
    url = re.search(r"http://127\.0\.0\.1:\d+/v1", "".join(said))
    assert url is not None and "without authentication" in "".join(said), said
    stream = connect(url[0]).completions.create(model=tiny_folder, prompt="abc", max_tokens=200, stream=True)
    chunks = iter(stream)
    next(chunks)
    process.send_signal(signal.SIGINT)
    assert list(chunks)[-1].usage.completion_tokens == 200
    assert process.wait(timeout=60) == 0
    assert "Interrupted" not in process.stderr.read()


REFUSED = {
    "cache": (["smollm2", "--cache", "geer"], "Unknown cache `geer`"),
    "store": (["smollm2", "--cache", "h2o", "--store", "{folder}"], "`cache` has to be a cache of GEAR's"),
    "model": (["./nothing"], "`model` is `./nothing`, but there is no such folder"),
    "port": (["smollm2", "--port", "99999"], "'--port'"),
    "host": (["{folder}", "--host", "192.0.2.1"], "cannot be listened at"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_options_are_refused(words, message, tiny_folder):
    result = CliRunner().invoke(cli.app, ["serve", *(word.format(folder=tiny_folder) for word in words)])
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
