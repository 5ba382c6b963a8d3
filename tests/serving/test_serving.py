"""`kvcache-plugins serve`, asked by OpenAI's client: chats, the store, clients that go, errors and the end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvcache_plugins import PromptStore, compressed_batching, create_cache
from kvcache_plugins.prompt_store.blocks import read_block


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

ON_CPU = {"device": "cpu", "dtype": "float32"}
GREEDY = {"model": "smollm2", "temperature": 0}
SYSTEM = "Answer by this text. " + "The cache of a decoder holds keys and values of all tokens before. " * 16
QUESTION = {"role": "user", "content": "What is this about? One sentence."}


def connect(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def server(serving, smollm2, tmp_path_factory):
    from kvcache_plugins.serving import CacheServer

    store = tmp_path_factory.mktemp("store")
    with serving(CacheServer("smollm2", store=store, port=0, **ON_CPU)) as server:
        yield server


@pytest.fixture
def client(server):
    return connect(server.url)


def wait_for(server, **wanted):
    """Wait until the server has counted as much, ten minutes at most."""
    for _ in range(12_000):
        if wanted.items() <= server.stats().items():
            return
        time.sleep(0.05)
    raise AssertionError(f"{server.stats()} has not come to {wanted}")


def test_the_second_turn_of_a_chat_reuses_the_first(server, client, smollm2, tmp_path):
    model, tokenizer = smollm2
    turns = [{"role": "system", "content": SYSTEM}, QUESTION]
    first = client.chat.completions.create(messages=turns, max_tokens=24, **GREEDY)
    # A name that the next request may give
    assert first.model == GREEDY["model"]
    # The prompt is less than a block of the store, with its answer it is more
    assert first.usage.prompt_tokens < 256 < first.usage.total_tokens and server.stats()["known_tokens"] == 0
    turns += [first.choices[0].message.model_dump(include={"role", "content"}), QUESTION]
    chunks = list(client.chat.completions.create(messages=turns, max_tokens=4, stream=True, **GREEDY))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length" and {chunk.model for chunk in chunks} == {"smollm2"}
    # An answer is counted before its last chunk is sent
    assert server.stats()["known_tokens"] == 256
    whole = client.chat.completions.create(messages=turns, max_tokens=4, **GREEDY)
    assert whole.choices[0].message.content == streamed
    assert server.stats()["known_tokens"] == 512
    # The same as without a server, read in the same blocks
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    store = PromptStore(tmp_path)
    cache = store.cache_for(model, ids["input_ids"])
    store.prefill(model, cache, ids["input_ids"])
    alone = model.generate(**ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == streamed


def test_conversations_continue_with_their_caches(serving, smollm2):
    from kvcache_plugins.serving import CacheServer

    model, tokenizer = smollm2

    def ask(client, server, turns, num_new=6):
        known = server.stats()["known_tokens"]
        answer = client.chat.completions.create(messages=turns, max_tokens=num_new, **GREEDY)
        assert answer.usage.prompt_tokens_details.cached_tokens == server.stats()["known_tokens"] - known
        text = answer.choices[0].message.content
        return [*turns, {"role": "assistant", "content": text}], server.stats()["known_tokens"] - known

    def tokens(turns):
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]

    with serving(CacheServer("smollm2", conversations=2, port=0, **ON_CPU)) as server:
        client = connect(server.url)
        first, known = ask(client, server, [{"role": "system", "content": SYSTEM}, QUESTION])
        assert known == 0
        other, known = ask(client, server, [{"role": "user", "content": "Count: one, two, three, four,"}])
        # Both begin with the same few tokens of the template alone
        assert known == 0
        longer, known = ask(client, server, [*first, QUESTION])
        # The last token of an answer has not been read
        assert known == len(tokens(first[:-1])) + 5
        # A turn rewritten
        edited = [*longer[:-2], {"role": "user", "content": "Say it in French."}]
        _, known = ask(client, server, edited)
        ids, held = tokens(edited), tokens(longer[:-1])
        assert known == next(k for k in range(len(ids)) if ids[k] != held[k])
        # The last one's text is that of a fresh cache which reads the same pieces
        prompt = tokens([*first, QUESTION])
        cache = create_cache("transform", model)
        whole = torch.tensor([tokens(first[:-1])])
        output = model.generate(whole, past_key_values=cache, max_new_tokens=6, do_sample=False)
        cache.reuse(torch.tensor([prompt]), output)
        output = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
        assert text == longer[-1]["content"]
        # A third takes the place of the least recently used
        ask(client, server, [{"role": "user", "content": "Something else entirely, please: " + "a b c " * 9}])
        assert ask(client, server, [*other, QUESTION])[1] == 0


def test_a_request_ends_when_its_client_disconnects(server, client):
    before = server.stats()
    stream = client.completions.create(prompt="One, two,", max_tokens=1000, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    wait_for(server, cancelled=before["cancelled"] + 1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).completions.create(prompt="One, two,", max_tokens=1000, **GREEDY)
    wait_for(server, cancelled=before["cancelled"] + 2)
    assert client.completions.create(prompt="One, two,", max_tokens=3, **GREEDY).usage.completion_tokens == 3
    assert server.stats()["cancelled"] == before["cancelled"] + 2


WRONG = {
    "model": ({"model": "other"}, 'accepted is `"smollm2"`'),
    "cache": ({"extra_body": {"generation_config": '{"cache_implementation": "static"}'}}, "names no cache"),
    "option": ({"extra_body": {"nothing": 1}}, "`nothing` is no option of /v1/completions"),
    "prompt": ({"prompt": ""}, "prompt is empty"),
    "tokens": ({"max_tokens": -1}, "`max_tokens` is -1, but accepted is 1 or more"),
    "config": ({"extra_body": {"generation_config": '{"max_new_tokens": "a"}'}}, "`generation_config` has a value"),
    "field": ({"extra_body": {"generation_config": '{"nothing": 1}'}}, "JSON of a `GenerationConfig`"),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_errors_are_json(client, wrong, message, is_streamed):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{**GREEDY, "prompt": "One,", "stream": is_streamed, **wrong})
    assert caught.value.type == "invalid_request_error"


def test_errors_of_a_stream_and_of_routes_are_json(server, client):
    # An unknown token is detected once tokens are chosen
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(prompt="One,", stream=True, logit_bias={"1000000": 1}, **GREEDY))
    assert "1000000" in caught.value.body
    with pytest.raises(openai.BadRequestError, match="`messages` is missing"):
        client.post("/chat/completions", body={"model": "smollm2"}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="the body of a request has to be a JSON object") as caught:
        client.post("/completions", body=[1], cast_to=object)
    assert ".py" not in str(caught.value)
    # Numbers of the server are of its lines and of no route
    with pytest.raises(openai.NotFoundError):
        client.get("/../metrics", cast_to=object)
    # Other models are not loaded
    with pytest.raises(openai.NotFoundError):
        client.post("/../load_model", body={"model": "gemma3-270m"}, cast_to=object)
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_ctrl_c_waits_for_a_running_answer(tiny_folder):
    command = [sys.executable, "-m", "kvcache_plugins.cli", "serve", tiny_folder, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    said = []
    for line in process.stderr:
        said.append(line)
        if "startup complete" in line:
            break
    url = re.search(r"http://127\.0\.0\.1:\d+/v1", "".join(said))
    assert url is not None and "without authentication" in "".join(said), said
    stream = connect(url[0]).completions.create(model=tiny_folder, prompt="abc", max_tokens=60, stream=True)
    chunks = iter(stream)
    next(chunks)
    process.send_signal(signal.SIGINT)
    assert list(chunks)[-1].usage.completion_tokens == 60
    assert process.wait(timeout=600) == 0
    rest = process.stderr.read()
    assert "Interrupted" not in rest
    # No line is folded, however long
    assert re.search(
        r"^3 tokens, 0 of them known, ready in .* s; 60 generated in .* s; cache .* MB$", rest, re.MULTILINE
    )


def test_transformers_server_runs_the_folder_of_a_models_repository(tiny_folder, tmp_path, monkeypatch):
    from transformers.cli.serve import Serve

    repository, made = tmp_path / "repository", []
    shutil.copytree(tiny_folder, repository)
    shutil.copytree(Path(__file__).resolve().parents[2] / "hub" / "custom_generate", repository / "custom_generate")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))

    def watch(*args, **options):
        made.append(create_cache(*args, **options))
        return made[-1]

    monkeypatch.setattr("kvcache_plugins.create_cache", watch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"host": "127.0.0.1", "port": port, "log_level": "error", "non_blocking": True}
    server = Serve(force_model=str(repository), trust_remote_code=True, **sizes, **ON_CPU)
    try:
        client = connect(f"http://127.0.0.1:{port}/v1").with_options(max_retries=8)
        asked = {"model": str(repository), "prompt": "abc " * 64, "max_tokens": 4, "temperature": 0}
        whole = client.completions.create(**asked).choices[0].text
        streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked))
    finally:
        server.kill_server()
    assert whole == streamed and len(made) == 2
    assert all(cache.stats()["tokens_compressed"] > 200 for cache in made)


_BATCHED = "{folder}", "--continuous-batching", "--text-file", str(Path(__file__))
REFUSED = {
    "cache": (["smollm2", "--cache", "geer"], "Unknown cache `geer`"),
    "store": (["smollm2", "--cache", "h2o", "--store", "{folder}"], "`--store` keeps packed tokens"),
    "batch": (["smollm2", "--num-blocks", "9"], "`--num-blocks` is given without `--continuous-batching`"),
    "conversations": (["smollm2", "--cache", "h2o", "--conversations", "2"], "keeps caches of packed tokens"),
    "conversations on disk": (
        ["smollm2", "--store", "{folder}", "--conversations", "2"],
        "`--conversations` is given with `--store`",
    ),
    "spec": ([*_BATCHED, "--cache", "gear:nbits=4"], "`--cache gear:nbits=4` has options"),
    "tables": (["smollm2", "--continuous-batching"], "give a `--text-file`"),
    "pages": ([*_BATCHED, "--num-blocks", "100000000"], "`--num-blocks` or `--max-batch-tokens` is too large"),
    "text": (["smollm2", "--continuous-batching", "--text-file", "nothing"], "`--text-file`: nothing cannot be read"),
    "model": (["./nothing"], "`model` is `./nothing`, but there is no such folder"),
    "port": (["smollm2", "--port", "99999"], "'--port'"),
    "host": (["{folder}", "--host", "192.0.2.1"], "cannot be listened at"),
    "name of a host": (["{folder}", "--host", "no..name"], "`--host` has to be an address"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_options_are_refused(words, message, tiny_folder, refuse):
    refuse(message, "serve", "--port", "0", *(word.format(folder=tiny_folder) for word in words))


@pytest.fixture(scope="module")
def batching(serving, smollm2):
    from kvcache_plugins.serving import CacheServer

    sizes = {"continuous_batching": True, "num_blocks": 6, "max_batch_tokens": 256}
    with serving(CacheServer("smollm2", "calibrated-16", temperature=0, port=0, **sizes, **ON_CPU)) as server:
        yield server


def test_requests_are_answered_together(batching):
    client, before = connect(batching.url), batching.stats()
    prompts = ["One, two, three,", "Paris is the capital of"]
    streams = [client.completions.create(prompt=prompt, max_tokens=4, stream=True, **GREEDY) for prompt in prompts]
    together = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    alone = [client.completions.create(prompt=prompt, max_tokens=4, **GREEDY).choices[0].text for prompt in prompts]
    assert together == alone and "four, five" in together[0]
    # A client that goes leaves its pages to others
    stream = client.completions.create(prompt="One, two,", max_tokens=1000, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).completions.create(prompt="One, two,", max_tokens=1000, **GREEDY)
    wait_for(batching, cancelled=2, requests=6, batching_free_share=before["batching_free_share"])
    stats = batching.stats()
    assert stats["batching_fused_calls"] > 0 and stats["batching_dense_reads"] == stats["failed"] == 0
    wrong = {
        "stop": "five",
        "extra_body": {"generation_config": '{"do_sample": true}'},
    }
    for name, value in wrong.items():
        with pytest.raises(openai.BadRequestError, match="generation_config" if name == "extra_body" else f"`{name}`"):
            client.completions.create(**{**GREEDY, "prompt": "One,", name: value})
    with pytest.raises(openai.BadRequestError, match="the prompt has .* tokens, but this server takes at most 8191"):
        client.completions.create(prompt="One, two, " * 3000, **GREEDY)
    assert client.responses.create(model="smollm2", input="Hi", max_output_tokens=2).usage.output_tokens == 2


def test_each_request_of_a_batch_is_sampled_by_its_own_options(batching):
    client = connect(batching.url)

    def ask(**options):
        made = client.completions.create(model="smollm2", prompt="My favourite words are", max_tokens=12, **options)
        return made.choices[0].text

    wanted = [{"temperature": 0}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 2}, {"seed": 2**40}]
    # Top-p of next to nothing is the likeliest token, whatever the seed
    wanted += [{"temperature": 1.5, "top_p": 1e-6, "seed": 5}, {"temperature": 1, "top_p": 0.9, "seed": -7}]
    alone = [ask(**options) for options in wanted]
    assert alone[0] == alone[4] == alone[3] and len(set(alone)) == 4
    with ThreadPoolExecutor(len(wanted)) as threads:
        assert list(threads.map(lambda options: ask(**options), wanted)) == alone
    # Without a seed answers differ
    assert len({ask(temperature=2) for _ in range(3)}) > 1


def test_failed_and_cancelled_requests_do_not_disturb_others(batching):
    client, before = connect(batching.url), batching.stats()
    prompts = ["Count: one, two, three,", "The seasons are spring,"]

    def ask(prompt):
        return client.completions.create(prompt=prompt, max_tokens=24, **GREEDY).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as threads:
        together = threads.map(ask, prompts)
        stream = client.completions.create(prompt="One, two,", max_tokens=1000, stream=True, **GREEDY)
        manager = batching._manager
        manager._add([5] * 200, request_id="bad", max_new_tokens=4, seed="no number")
        next(iter(stream))
        stream.close()
        assert list(together) == alone
    # Results of others may stand before it, and are put back
    results = (manager._cb.get_result("bad", timeout=1) for _ in range(100))
    assert "seed" in next(result for result in results if result is not None).error
    wait_for(batching, cancelled=before["cancelled"] + 1)
    assert ask(prompts[0]) == alone[0] and free_share(batching) == 1


def test_a_batch_loads_pages_stored_by_another_server(serving, tmp_path):
    from kvcache_plugins.serving import CacheServer

    sizes = {"continuous_batching": True, "num_blocks": 6, "max_batch_tokens": 512, "store": tmp_path}
    turns, found = [{"role": "system", "content": SYSTEM}, QUESTION], []
    for _ in range(2):
        with serving(CacheServer("smollm2", "calibrated-16", port=0, **sizes, **ON_CPU)) as server:
            answer = connect(server.url).chat.completions.create(messages=turns, max_tokens=8, **GREEDY)
            found.append((answer.choices[0].message.content, server.stats()["batching_tokens_loaded"]))
            assert server.stats()["store_bytes"] > 0
    assert [number for _, number in found] == [0, 128] and found[0][0][:12] == found[1][0][:12]


def cold_answers(folder, text, prompts):
    """Answers of batches of one request each, which share no beginning with others."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    table_ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=2048).input_ids
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    paging = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=512)
    found = []
    with compressed_batching(model, "transform-30", text=table_ids):
        for prompt in prompts:
            ids = tokenizer(prompt).input_ids
            outputs = model.generate_batch([ids], generation_config=config, continuous_batching_config=paging)
            found += [
                tokenizer.decode(output.generated_tokens, skip_special_tokens=True) for output in outputs.values()
            ]
    return found


def free_share(server):
    """Tells how much of a batch's pages is free once no request is left, and no beginning kept for a next one."""
    batch = server._manager._cb.batch_processor
    while batch.has_pending_requests():
        time.sleep(0.05)
    batch.cache.evict_cached_blocks()
    return server.stats()["batching_free_share"]


@pytest.mark.long
@pytest.mark.parametrize("is_batched", [False, True], ids=["store", "batched"])
def test_many_clients_get_the_answers_of_one_alone(serving, is_batched, tiny_folder, tmp_path):
    """Send 200 requests of 8 clients, some of them leaving, to three servers in turn; answers are as of one alone."""
    from kvcache_plugins.serving import CacheServer

    licence = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="ascii")
    # Beginnings of a block and more of characters, and ends of their own
    prompts = [licence[900 * (k % 4) :][:270] + licence[5000 + 150 * k :][: 20 + 5 * k] for k in range(12)]
    batching = {"continuous_batching": True, "text": licence, "num_blocks": 40, "max_batch_tokens": 4096}

    def make(folder, port=0):
        kind = batching if is_batched else {"store": tmp_path / folder}
        return CacheServer(tiny_folder, "transform-30", port=port, **kind, **ON_CPU)

    def ask(client, prompt, is_cancelled=False):
        asked = {"model": tiny_folder, "prompt": prompt, "temperature": 0}
        if is_cancelled:
            with client.completions.create(max_tokens=900, stream=True, **asked) as stream:
                return next(iter(stream)).choices[0].text
        return client.completions.create(max_tokens=8, **asked).choices[0].text

    with serving(make("alone")) as server:
        alone = [[ask(connect(server.url), prompt) for prompt in prompts] for _ in range(2)]
    if is_batched:
        # A beginning that others have asked for is read as its codes
        alone.append(cold_answers(tiny_folder, licence, prompts))
    else:
        assert alone[0] == alone[1]
    answers = []

    def work(client, number):
        for _ in range(200):
            try:
                is_cancelled = number % 5 == 4
                text = ask(client, prompts[number % len(prompts)], is_cancelled)
                answers.append(is_cancelled or text in [known[number % len(prompts)] for known in alone])
                return
            except (openai.APIConnectionError, openai.InternalServerError):
                # Between two servers
                time.sleep(0.1)

    server = make("shared")
    port = int(server.url.split(":")[-1].removesuffix("/v1"))
    with ThreadPoolExecutor(8) as clients:
        for wanted in (70, 140, 200):
            with serving(server):
                if wanted == 70:
                    client = connect(server.url)
                    done = [clients.submit(work, client, number) for number in range(200)]
                while len(answers) < wanted and not all(each.done() for each in done):
                    time.sleep(0.05)
                if wanted == 200:
                    wait_for(server, failed=0)
                    free = free_share(server) if is_batched else 1
            server = make("shared", port) if wanted < 200 else None
    assert all(answers) and len(answers) == 200 and free == 1
    for path in [] if is_batched else (tmp_path / "shared").glob("blocks/*/*.safetensors"):
        assert read_block(path).num_bytes()
