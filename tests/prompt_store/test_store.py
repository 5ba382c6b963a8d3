"""A cache from the store is the one that reading its prompt in the same blocks makes, and prompts share what they
have in common; commands about a folder of prompts, and `generate --store`. A load returns a right cache or none: after
damage, killed and several writers, and a full disk.
"""

import os
import random
import resource
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcache_plugins import GEARCache, PromptStore, create_cache
from kvcache_plugins.files.records import write_record
from kvcache_plugins.prompt_store.blocks import FORMAT, read_block
from kvcache_plugins.prompt_store.maintenance import clear, list_prompts
from kvcache_plugins.transform_coding.calibration import calibrate_transform


# Rows and groups, without and with low rank and outliers; the others differ from these in bits
DAILY = [("llama", "transform"), ("llama", "gear-4bit"), ("llama", "kivi-2bit"), ("gemma3-hybrid", "gear-2bit")]
NAMES = (
    "transform",
    "gear-4bit",
    "gear-2bit",
    "kivi-2bit",
    "per-token-2bit",
    "gear-k4v3",
    "transform-16",
    "transform-30",
)
OTHERS = [(architecture, name) for architecture in ("llama", "gemma3-hybrid") for name in NAMES]


def prompt(num_tokens: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, num_tokens))


def generate(model, input_ids, cache, **options):
    return model.generate(input_ids, past_key_values=cache, max_new_tokens=80, do_sample=False, **options)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [*DAILY, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS if case not in DAILY)],
)
def test_a_loaded_prompt_equals_reading_in_blocks(
    tiny_model, tmp_path, assert_same, read_in_blocks, architecture, name
):
    model, input_ids = tiny_model(architecture), prompt(900)
    PromptStore(tmp_path).read(model, input_ids, name)
    store = PromptStore(tmp_path)
    loaded = store.cache_for(model, input_ids, name)
    assert loaded.get_seq_length() == 768 and store.stats()["tokens_saved"] == 768
    assert_same(loaded, read_in_blocks(model, input_ids[:, :768], create_cache(name, model)))
    expected = read_in_blocks(model, input_ids[:, :768], create_cache(name, model))
    assert torch.equal(generate(model, input_ids, loaded), generate(model, input_ids, expected))
    assert_same(loaded, expected)


@pytest.mark.parametrize("name", ["transform", "gear"])
def test_static_layers_share_prompts_with_growing_ones(tiny_llama, tmp_path, assert_same, name):
    store, input_ids = PromptStore(tmp_path), prompt(700)
    store.read(tiny_llama, input_ids, name)
    growing = store.cache_for(tiny_llama, input_ids, name)
    loaded = store.cache_for(tiny_llama, input_ids, name, max_cache_len=900)
    assert loaded.is_compileable and loaded.get_seq_length() == 512
    assert torch.equal(generate(tiny_llama, input_ids, loaded), generate(tiny_llama, input_ids, growing))
    assert_same(loaded, growing)


def test_calibrations_do_not_share_prompts(tiny_llama, tmp_path, assert_same, read_in_blocks, random_windows):
    first, second = (calibrate_transform(tiny_llama, random_windows(number, 300), num_draws=1) for number in (1, 2))
    input_ids, store = prompt(600), PromptStore(tmp_path)
    store.read(tiny_llama, input_ids, "calibrated-16", calibration=first)
    loaded = store.cache_for(tiny_llama, input_ids, "calibrated-16", calibration=first)
    assert loaded.get_seq_length() == 512 and loaded.calibration is first
    expected = read_in_blocks(
        tiny_llama, input_ids[:, :512], create_cache("calibrated-16", tiny_llama, calibration=first)
    )
    assert_same(loaded, expected)
    assert torch.equal(generate(tiny_llama, input_ids, loaded), generate(tiny_llama, input_ids, expected))
    # Rows mean something by their calibration alone
    for others in ({"calibration": second}, {"calibration": first, "nbits": 5}):
        assert store.cache_for(tiny_llama, input_ids, "calibrated-16", **others).get_seq_length() == 0
    assert store.cache_for(tiny_llama, input_ids, "transform").get_seq_length() == 0


@pytest.mark.parametrize("name", ["transform", "gear-2bit"])
def test_an_edited_conversation_finds_its_beginning(tiny_llama, tmp_path, name):
    input_ids, store = prompt(900), PromptStore(tmp_path)
    live = store.cache_for(tiny_llama, input_ids, name)
    store.prefill(tiny_llama, live, input_ids)
    output = generate(tiny_llama, input_ids, live)
    edited = torch.cat([output[:, :700], prompt(120)], dim=1)
    # On disk the blocks before the edit are known, and the live cache goes back to the edit itself
    assert store.cache_for(tiny_llama, edited, name).get_seq_length() == 512
    assert live.reuse(edited, output) == 700
    # Tokens that a live cache has read in other pieces are not stored
    generate(tiny_llama, edited, live)
    assert live.record.num_blocks == 2 and store.keep(live, edited) == 0


def test_prompts_share_their_common_beginning(tiny_llama, tmp_path, assert_same, read_in_blocks):
    first = prompt(1100)
    # Unlike from the last token of a block on
    second = torch.cat([first[:, :767], prompt(333)], dim=1)
    store = PromptStore(tmp_path)
    store.read(tiny_llama, first)
    assert store.stats()["blocks_kept"] == 4
    cache = store.read(tiny_llama, second)
    assert store.stats()["blocks_kept"] == 6 and store.stats()["tokens_saved"] == 512
    assert len(list(tmp_path.glob("blocks/*/*.safetensors"))) == 6
    assert_same(cache, read_in_blocks(tiny_llama, second, create_cache("transform", tiny_llama)))


def test_blocks_do_not_depend_on_forks_and_dropped_tokens(tiny_llama, tmp_path, assert_same, read_in_blocks):
    input_ids, store = prompt(1025), PromptStore(tmp_path)
    cache = store.read(tiny_llama, input_ids[:, :256])
    # Ends a segment, but not the use of its tables
    cache.fork(1)
    store.prefill(tiny_llama, cache, input_ids[:, :769])
    read_in_blocks(tiny_llama, prompt(240), cache, length=1)
    # Queries of the dropped tokens were recorded for the fit at 1024 tokens
    cache.crop(-240)
    store.prefill(tiny_llama, cache, input_ids)
    expected = read_in_blocks(tiny_llama, input_ids[:, :1024], create_cache("transform", tiny_llama))
    assert_same(PromptStore(tmp_path).cache_for(tiny_llama, input_ids), expected)


def test_a_prompt_is_stored_after_generation_in_chunks(tiny_llama, tmp_path):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    cache = store.cache_for(tiny_llama, input_ids, "transform-22")
    tokens = generate(tiny_llama, input_ids, cache, prefill_chunk_size=cache.record.length)
    assert store.keep(cache, tokens) == 2 and store.keep(cache, tokens) == 0
    again = PromptStore(tmp_path).cache_for(tiny_llama, input_ids, "transform-22")
    assert again.get_seq_length() == 512
    assert torch.equal(generate(tiny_llama, input_ids, again), tokens)


@pytest.mark.parametrize("name", ["transform", "transform-22"])
def test_a_prompt_fed_at_once_is_not_stored(tiny_llama, tmp_path, name):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    cache = store.cache_for(tiny_llama, input_ids, name)
    generate(tiny_llama, input_ids, cache)
    with pytest.raises(ValueError, match="prefill_chunk_size=256"):
        store.keep(cache, input_ids)
    with pytest.raises(ValueError, match="and no copy"):
        store.keep(cache.fork(1)[0], input_ids)
    assert store.stats()["bytes_on_disk"] == 0


def test_custom_generate_loads_and_stores_the_prompt(tiny_llama, tmp_path):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    options = {"max_new_tokens": 40, "do_sample": False, "custom_generate": store.generate}
    tokens = tiny_llama.generate(input_ids, spec="transform-22", **options)
    assert torch.equal(tiny_llama.generate(input_ids, spec="transform-22", **options), tokens)
    assert store.stats()["hits"] == 1 and store.stats()["tokens_saved"] == 512
    expected = store.cache_for(tiny_llama, input_ids, "transform-22")
    plain = tiny_llama.generate(input_ids, past_key_values=expected, max_new_tokens=40, do_sample=False)
    assert torch.equal(plain, tokens)
    padded = torch.ones_like(input_ids)
    padded[:, :3] = 0
    with pytest.raises(ValueError, match="`attention_mask` hides tokens"):
        tiny_llama.generate(input_ids, attention_mask=padded, **options)


def test_other_settings_and_models_share_nothing(tiny_model, tmp_path):
    model, input_ids, store = tiny_model("llama"), prompt(600), PromptStore(tmp_path)
    store.read(model, input_ids)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 1.1
    for asked, name in ((other, "transform"), (model, "gear:nbits=2"), (tiny_model("llama").bfloat16(), "transform")):
        assert store.cache_for(asked, input_ids, name).get_seq_length() == 0
    assert PromptStore(tmp_path, block_tokens=320).cache_for(model, input_ids).get_seq_length() == 0
    assert store.cache_for(model, input_ids, GEARCache(model.config, nbits=4)).get_seq_length() == 0
    assert store.cache_for(model, input_ids, create_cache("transform", model)).get_seq_length() == 512


@pytest.mark.parametrize(
    ("name", "least", "length"), [("kivi-2bit", 300, 320), ("kivi-2bit", 1, 256), ("transform", 1, 68)]
)
def test_blocks_are_the_fewest_tokens_that_are_packed_at_once(tiny_llama, tmp_path, name, least, length):
    store, input_ids = PromptStore(tmp_path, block_tokens=least), prompt(650)
    store.read(tiny_llama, input_ids, name)
    assert store.cache_for(tiny_llama, input_ids, name).get_seq_length() == 650 // length * length


def test_wrong_options_are_refused(tiny_llama, tmp_path):
    store = PromptStore(tmp_path)
    (tmp_path / "file").touch()
    for message, call in {
        "one prompt of shape": lambda: store.read(tiny_llama, torch.zeros(2, 300, dtype=torch.long)),
        "has to be a `TransformCodingCache` or a `GEARCache`": lambda: store.cache_for(tiny_llama, prompt(10), "h2o"),
        "`attention_mask` of the cache": lambda: store.cache_for(
            tiny_llama, prompt(10), create_cache("gear", tiny_llama, attention_mask=torch.arange(10)[None] > 2)
        ),
        "`sliding` has to be": lambda: store.cache_for(tiny_llama, prompt(10), sliding="compressed"),
        "`block_tokens`": lambda: PromptStore(tmp_path, block_tokens=0),
        "`max_bytes`": lambda: PromptStore(tmp_path, max_bytes="much"),
        "`folder`": lambda: PromptStore(tmp_path / "file" / "below"),
        "`folder` has to be a path": lambda: PromptStore(5),
        "`cache` has to be one that": lambda: store.keep(create_cache("transform", tiny_llama), prompt(10)),
        "that `cache_for` or": lambda: store.prefill(tiny_llama, create_cache("transform", tiny_llama), prompt(10)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.fixture
def folder(tiny_llama, tmp_path) -> Path:
    """Two prompts that share their first block, and one of another cache."""
    first = torch.randint(3, 128, (1, 520))
    second = torch.cat([first[:, :300], torch.randint(3, 128, (1, 500))], dim=1)
    store = PromptStore(tmp_path)
    store.read(tiny_llama, first)
    store.read(tiny_llama, second)
    store.read(tiny_llama, first, "transform-22")
    return tmp_path


def test_prompts_are_listed_by_their_ends(folder, run, read):
    prompts = list_prompts(folder)
    sizes = [(each["num_tokens"], each["num_blocks"], each["num_missing"]) for each in prompts]
    assert sizes == [(512, 2, 0), (768, 3, 0), (512, 2, 0)]
    assert (
        prompts[0]["options"]["class"] == "TransformCodingPromptCache" and len({each["key"] for each in prompts}) == 3
    )
    listed = run("store", "list", "--store", str(folder))
    assert all(each["key"][:12] in listed.stdout for each in prompts)
    content = read("store", "list", "--store", str(folder))
    assert [each["num_tokens"] for each in content["prompts"]] == [512, 768, 512]


def test_damage_is_named_and_removed(folder, run, read):
    path = next(folder.glob("blocks/*/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    verify = "store", "verify", "--store", str(folder)
    assert list(read(*verify, code=1)["damaged"]) == [str(path)]
    shown = run(*verify, "--remove", code=1).stdout
    assert path.name in shown and "1 damaged files removed" in shown
    run(*verify)
    assert not path.exists()


def test_a_folder_is_cleared(folder, tmp_path, run, refuse):
    assert "6 blocks removed" in run("store", "clear", "--store", str(folder)).stdout
    assert list_prompts(folder) == []
    refuse("no folder of a prompt store", "store", "clear", "--store", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_generate_loads_its_prompt_the_second_time(tiny_folder, tmp_path, run, refuse):
    options = ["--model", tiny_folder, "--cache", "transform-22", "--store", str(tmp_path / "store")]
    options += ["--prompt", "so it goes, " * 50, "--max-new-tokens", "12"]
    first, second = (run("generate", *options) for _ in range(2))
    assert first.stdout == second.stdout
    assert "0 of 600 tokens were known" in first.stderr and "512 of 600 tokens were known" in second.stderr
    said = [" ".join(each.stderr.split()) for each in (first, second)]
    assert "prompt of 600 tokens, 0 of them from the store, in" in said[0]
    assert "prompt of 600 tokens, 512 of them from the store, in" in said[1]
    # Two blocks are read for the store, the rest by `generate`
    assert "reading 512 tokens" in said[0] and "reading 88 tokens" in said[0]
    assert "reading 512 tokens" not in said[1] and "reading 88 tokens" in said[1]
    refuse("`store`", "generate", *options[:2], *options[4:], "--max-kl", "0.1")


def blocks_in(folder: Path) -> list[Path]:
    """The files of a folder's blocks by their starts; a `ValueError` for a damaged one."""
    return sorted(folder.glob("blocks/*/*.safetensors"), key=lambda path: read_block(path).start)


def in_child(function: Callable[[], object], kill_after: float | None = None) -> int:
    """Runs a function in a process of its own, which is killed if it takes longer; its exit status."""
    child = os.fork()
    if child == 0:
        # Threads that OpenMP made are not forked with the process, which would wait for them
        torch.set_num_threads(1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function()
            os._exit(0)
        finally:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def exchange(path: Path, chance: random.Random) -> None:
    """The file of another block, whose checksum is right."""
    others = [each for each in blocks_in(path.parents[2]) if each != path]
    path.write_bytes(chance.choice(others).read_bytes())


@pytest.mark.parametrize("harm", [truncate, flip, exchange])
@pytest.mark.parametrize("number", [0, 1])
def test_damage_is_reported_once_and_repaired(tiny_llama, tmp_path, assert_same, harm, number):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    expected = store.read(tiny_llama, input_ids)
    path = blocks_in(tmp_path)[number]
    whole = path.read_bytes()
    harm(path, random.Random(1))
    with pytest.warns(UserWarning, match=path.name) as reports:
        assert_same(store.read(tiny_llama, input_ids), expected)
    assert len(reports) == 1 and store.stats()["blocks_damaged"] == 1
    assert store.stats()["tokens_saved"] == 256 * number
    assert path.read_bytes() == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(store.read(tiny_llama, input_ids), expected)
    assert store.stats()["tokens_saved"] == 256 * number + 512


@pytest.mark.parametrize("step", ["store.read_block", "prompt_cache.PromptCache.fill"])
def test_an_error_while_loading_ends_the_lease(tiny_llama, tmp_path, monkeypatch, step):
    input_ids, store = prompt(300), PromptStore(tmp_path)
    kept = store.read(tiny_llama, input_ids)
    leases = set((tmp_path / "leases").iterdir())

    def run_out_of_memory(*args):
        raise MemoryError

    monkeypatch.setattr(f"kvcache_plugins.prompt_store.{step}", run_out_of_memory)
    with pytest.raises(MemoryError):
        store.read(tiny_llama, input_ids)
    assert set((tmp_path / "leases").iterdir()) == leases and kept.get_seq_length() == 300


def test_forged_values_are_not_loaded(tiny_llama, tmp_path, assert_same):
    """A checksum that is right, and numbers that no cache can have."""
    input_ids, store = prompt(600), PromptStore(tmp_path)
    expected = store.read(tiny_llama, input_ids, "gear-k4v3:value_nbits=4")
    path = blocks_in(tmp_path)[1]
    block = read_block(path)
    block.layers[0].blocks[0].keys["scale"][:] = torch.nan
    write_record(path, FORMAT, block)
    with pytest.warns(UserWarning, match="finite"):
        assert_same(store.read(tiny_llama, input_ids, "gear-k4v3:value_nbits=4"), expected)
    assert store.stats()["tokens_saved"] == 256 and len(blocks_in(tmp_path)) == 2
    assert FORMAT[:2] == ("kvcache_plugins.prompt_block", 4)


def test_files_are_their_owners_alone(tiny_llama, tmp_path):
    folder = tmp_path / "store"
    PromptStore(folder).read(tiny_llama, prompt(600))
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 6
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("kind", ["flock", "byte"])
def test_least_recently_used_blocks_are_removed_first_and_none_in_use(tiny_llama, tmp_path, request, kind):
    if kind == "byte":
        request.getfixturevalue("byte_locks")
    prompts = [prompt(520) for _ in range(4)]
    store = PromptStore(tmp_path)
    store.read(tiny_llama, prompts[0])
    num_bytes = store.stats()["bytes_on_disk"]
    small = PromptStore(tmp_path, max_bytes=3 * num_bytes + 100_000)
    small.read(tiny_llama, prompts[1])
    small.read(tiny_llama, prompts[2])
    # Used again, so the second one is the oldest
    small.cache_for(tiny_llama, prompts[0])
    held = small.cache_for(tiny_llama, prompts[2])
    small.read(tiny_llama, prompts[3])
    known = [PromptStore(tmp_path).cache_for(tiny_llama, each).get_seq_length() for each in prompts]
    assert known == [512, 0, 512, 512]
    assert small.stats()["bytes_on_disk"] <= small.max_bytes
    # One prompt's room: what is in use stays, and the new one is read without being kept
    one = PromptStore(tmp_path, max_bytes=num_bytes)
    with pytest.warns(UserWarning, match="in use"):
        cache = one.read(tiny_llama, prompt(520))
    assert cache.get_seq_length() == 520 and one.stats()["blocks_not_kept"] > 0
    assert PromptStore(tmp_path).cache_for(tiny_llama, prompts[2]).get_seq_length() == 512
    assert clear(tmp_path)[0] < 6
    del held, cache
    clear(tmp_path)
    assert list_prompts(tmp_path) == []


def test_blocks_in_use_by_another_process_are_kept(tiny_llama, tmp_path):
    input_ids, (reading, writing) = prompt(520), os.pipe()

    def use() -> None:
        torch.set_num_threads(1)
        cache = PromptStore(tmp_path).read(tiny_llama, input_ids)
        os.write(writing, b"!")
        signal.pause()
        del cache

    child = os.fork()
    if child == 0:
        try:
            use()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    assert clear(tmp_path)[0] == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert clear(tmp_path)[0] == 2 and list((tmp_path / "leases").iterdir()) == []


def test_a_full_disk_is_reported_in_one_sentence(tiny_llama, tmp_path, assert_same, read_in_blocks, monkeypatch):
    input_ids = prompt(1100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = PromptStore(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.warns(UserWarning, match="takes no more of the prompt") as reports:
            cache = store.read(tiny_llama, input_ids)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(reports) == 1
    assert_same(cache, read_in_blocks(tiny_llama, input_ids, create_cache("transform", tiny_llama)))
    assert store.stats()["blocks_kept"] == 0 and blocks_in(tmp_path) == []
    assert list(tmp_path.rglob("*.tmp")) == [] and store.read(tiny_llama, input_ids).get_seq_length() == 1100
    assert len(blocks_in(tmp_path)) == 4


def test_a_killed_writer_leaves_no_partial_block(tiny_llama, tmp_path, monkeypatch):
    input_ids = prompt(600)

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_while_writing() -> None:
        monkeypatch.setattr(os, "fsync", die)
        PromptStore(tmp_path).read(tiny_llama, input_ids)

    assert in_child(killed_while_writing) == signal.SIGKILL
    assert blocks_in(tmp_path) == [] and len(list(tmp_path.rglob("*.tmp"))) == 1
    PromptStore(tmp_path).read(tiny_llama, input_ids)
    assert len(blocks_in(tmp_path)) == 2 and list(tmp_path.rglob("*.tmp")) == []


class Rounds:
    """A store to which something happens in every round, and prompts that are asked for after it."""

    def __init__(self, model, folder, read_in_blocks, assert_same):
        self.model, self.folder, self.chance = model, folder, random.Random(20)
        base = prompt(1000)
        self.prompts = [torch.cat([base[:, :shared], prompt(1000 - shared)], dim=1) for shared in (0, 300, 600, 900)]
        empty = [create_cache("transform-22", model) for _ in self.prompts]
        self.expected = [read_in_blocks(model, *pair) for pair in zip(self.prompts, empty, strict=True)]
        self.assert_same = assert_same

    def read(self, number: int, **options: object) -> None:
        found = PromptStore(self.folder, **options).read(self.model, self.prompts[number], "transform-22")
        self.assert_same(found, self.expected[number])

    def any_read(self) -> None:
        self.read(self.chance.randrange(len(self.prompts)))

    def kill(self) -> None:
        in_child(self.any_read, kill_after=self.chance.uniform(0.0, 0.25))

    def damage(self) -> None:
        paths = sorted(self.folder.glob("blocks/*/*.safetensors"))
        if paths:
            self.chance.choice([truncate, flip])(self.chance.choice(paths), self.chance)

    def two_writers(self) -> None:
        first, second = self.chance.sample(range(len(self.prompts)), 2)
        thread = threading.Thread(target=lambda: in_child(lambda: self.read(first)))
        thread.start()
        self.read(second)
        thread.join()

    def full_disk(self) -> None:
        def read_on_full_disk() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.chance.randrange(60_000), resource.RLIM_INFINITY))
            self.any_read()

        assert in_child(read_on_full_disk) == 0

    def little_room(self) -> None:
        self.read(self.chance.randrange(len(self.prompts)), max_bytes=self.chance.randrange(1, 400_000))

    def remove(self) -> None:
        clear(self.folder)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.long)])
def test_random_faults_never_change_loaded_prompts(tiny_llama, tmp_path, read_in_blocks, assert_same, count):
    rounds = Rounds(tiny_llama, tmp_path, read_in_blocks, assert_same)
    events = [rounds.kill, rounds.damage, rounds.two_writers, rounds.full_disk, rounds.little_room, rounds.damage]
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (rounds.remove if number % 20 == 19 else rounds.chance.choice(events))()
            rounds.any_read()
    # Damage is found when a block is loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(len(rounds.prompts)):
            rounds.read(number)
    assert blocks_in(rounds.folder)
    rounds.remove()
    assert [path for path in rounds.folder.rglob("*") if path.is_file()] == [rounds.folder / ".lock"]
