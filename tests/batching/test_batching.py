"""Transformers' continuous batching in `compressed_batching`: a batch equals its requests alone, and attention over
coded pages is over the tokens written to them: decoded rows, and exact sink and recent tokens.
"""

import copy
import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from kvcache_plugins import PromptStore
from kvcache_plugins.batching import compressed_batching
from kvcache_plugins.batching.page_store import PageStore
from kvcache_plugins.batching.paged_allocator import BatchingCounters, CodedAllocator, PageCodecConfig, _fit_page
from kvcache_plugins.batching.paged_states import PagedStates
from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.files.records import write_record
from kvcache_plugins.formats.parts import PagedRowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.ops import decode_tiles
from kvcache_plugins.prompt_store.blocks import FORMAT, read_block
from kvcache_plugins.prompt_store.maintenance import find_damaged, list_prompts
from kvcache_plugins.registry import create_cache


NUM_TOKENS = 12


def config(num_new, num_blocks=24, max_batch_tokens=256, offload_space=0.0, **sampling):
    """Makes the configs of a batch whose pages are of 64 tokens."""
    sizes = {"page_size": 64, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    options = {"do_sample": False, "max_new_tokens": num_new, "eos_token_id": -1, "pad_token_id": 0, **sampling}
    paging = ContinuousBatchingConfig(**sizes, cpu_offload_space=offload_space)
    return {"generation_config": GenerationConfig(**options), "continuous_batching_config": paging}


def run(model, prompts, max_batch_tokens=256, num_forks=1, num_blocks=24, offload_space=0.0):
    # Sampling makes forks; with one token to choose from it is greedy
    sampling = {"do_sample": num_forks > 1, "top_k": 1, "num_return_sequences": num_forks}
    configs = config(NUM_TOKENS, num_blocks, max_batch_tokens, offload_space, **sampling)
    outputs = model.generate_batch(prompts, **configs)
    errors = [output.error for output in outputs.values() if output.error]
    assert not errors, errors
    return [output.generated_tokens for output in outputs.values()]


def agreeing(answers, others):
    """Counts tokens that are the same."""
    return sum(a == b for pair in zip(answers, others, strict=True) for a, b in zip(*pair, strict=True))


@pytest.fixture(scope="module")
def prompts(smollm2):
    text = "The cache of a decoder holds keys and values of all tokens before, and grows with every one of them. " * 8
    ids = smollm2[1](text).input_ids
    return [ids[7 * number : 90 + 31 * number] for number in range(3)]


@pytest.fixture
def context(smollm2, prompts):
    """Makes the context: tables of the longest prompt, as a preset of high rate has them."""
    return lambda name="transform-30": compressed_batching(smollm2[0], name, text=torch.tensor(prompts[-1:]))


def test_a_batch_equals_its_requests_alone(tiny_llama, random_windows):
    prompts = [ids[: 90 + 31 * number].tolist() for number, ids in enumerate(random_windows(3, 152))]
    with compressed_batching(tiny_llama, "transform-30", text=torch.tensor(prompts[-1:])) as batching:
        together = run(tiny_llama, prompts)
        stats = batching.stats()
        alone = [run(tiny_llama, [prompt])[0] for prompt in prompts]
        turned = run(tiny_llama, prompts[::-1])[::-1]
    assert together == alone == turned
    require_all_coded(stats, tiny_llama, prompts)


def test_a_batch_is_near_a_dense_one(smollm2, prompts, context):
    model = smollm2[0]
    dense = run(model, prompts)
    with context() as batching:
        together = run(model, prompts)
        require_all_coded(batching.stats(), model, prompts)
        chunked = run(model, prompts, max_batch_tokens=48)
        forks = run(model, prompts[:1], num_forks=2)
    assert forks == [together[0]] * 2
    # At 28 % of the bits the text is nearly the dense one; chunks of a prompt attend to coded tokens of each other
    assert agreeing(together, dense) > 18 and agreeing(chunked, dense) > 18


def require_all_coded(stats, model, prompts):
    """Check that every token of a batch was coded, and that attention read the codes."""
    layers, new = model.config.num_hidden_layers, sum(map(len, prompts)) + 3 * (NUM_TOKENS - 1)
    assert stats["tokens_coded"] == layers * new
    assert stats["fused_calls"] >= layers * 3 * (NUM_TOKENS - 2) and stats["dense_reads"] == 0
    assert stats["kernel_fallbacks"] == 0


def test_a_prefix_is_shared(smollm2, prompts, context):
    model = smollm2[0]
    with (
        context() as batching,
        model.continuous_batching_context_manager(**config(NUM_TOKENS)) as manager,
    ):
        answers, coded = [], []
        for _ in range(2):
            manager.add_request(prompts[-1])
            answers.append(manager.get_result(timeout=600).generated_tokens)
            coded.append(batching.stats()["tokens_coded"])
        block, dense = batching.page_bytes()
    assert answers[0] == answers[1]
    # Two whole pages of the prompt were there
    assert coded[1] - coded[0] == coded[0] - 128 * model.config.num_hidden_layers
    assert block < 0.3 * dense


# Tables of a text, and those of a calibration in the package, which is of this model
@pytest.mark.parametrize(("model_name", "name"), [("tiny_llama", "transform-30"), ("smollm2", "calibrated-16")])
def test_pages_on_disk_are_found_by_another_batch(model_name, name, tmp_path, request, random_windows):
    if model_name == "smollm2":
        model, prompts = request.getfixturevalue("smollm2")[0], request.getfixturevalue("prompts")
        text = None
    else:
        model = request.getfixturevalue("tiny_llama")
        prompts = [ids[: 90 + 31 * number].tolist() for number, ids in enumerate(random_windows(3, 152))]
        text = torch.tensor(prompts[-1:])

    def answer(prompt, folder="store", **options):
        store = PromptStore(tmp_path / folder)
        with compressed_batching(model, name, text=text, store=store) as batching:
            (found,) = run(model, [prompt], **options)
            return found, batching.stats()

    first, cold = answer(prompts[-1])
    again, warm = answer(prompts[-1])
    whole = len(prompts[-1]) // 64 * 64
    assert cold["tokens_loaded"] == 0 and warm["tokens_loaded"] == whole
    layers = model.config.num_hidden_layers
    assert warm["tokens_coded"] == cold["tokens_coded"] - whole * layers
    # Equals a request that finds the same pages in memory
    with (
        compressed_batching(model, name, text=text),
        model.continuous_batching_context_manager(**config(NUM_TOKENS)) as manager,
    ):
        answers = []
        for _ in range(2):
            manager.add_request(prompts[-1])
            answers.append(manager.get_result(timeout=600).generated_tokens)
    assert [first, again] == answers
    # A prompt that shares its beginning
    edited = prompts[-1][:100] + prompts[0]
    assert answer(edited)[1]["tokens_loaded"] == 64 and answer(prompts[0])[1]["tokens_loaded"] == 0
    # Prompts whose pages have no room are read again
    assert answer(prompts[-1], num_blocks=7)[0] == first
    # Blocks are listed, checked and removed like others; damage is found before anything is used
    assert find_damaged(tmp_path / "store") == {}
    assert {each["options"]["class"] for each in list_prompts(tmp_path / "store")} == {"pages"}
    for path in (tmp_path / "store").glob("blocks/*/*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        assert answer(prompts[-1])[0] == first


def test_pages_on_disk_continue_those_in_memory(tiny_llama, random_windows, tmp_path):
    """A request's first page is in memory, and its second one on disk. Its last token is always read."""
    (ids,) = random_windows(1, 152)
    prompt, text = ids.tolist(), ids[None]

    def answer(*requests):
        with (
            compressed_batching(tiny_llama, "transform-30", text=text, store=PromptStore(tmp_path)) as batching,
            tiny_llama.continuous_batching_context_manager(**config(NUM_TOKENS)) as manager,
        ):
            found, loaded = [], []
            for request in requests:
                manager.add_request(request)
                found.append(manager.get_result(timeout=600).generated_tokens)
                loaded.append(batching.stats()["tokens_loaded"])
            return found, loaded

    assert answer(prompt)[1] == [0]
    (text_of_both,), loaded = answer(prompt)
    assert loaded == [128]
    (_, text_of_second), loaded = answer(prompt[:100], prompt)
    assert loaded == [64, 128] and text_of_second == text_of_both
    assert answer(prompt[:128])[1] == [64]


def test_pages_of_other_tables_are_not_read(tiny_llama, random_windows, tmp_path):
    windows, stores = random_windows(2, 152), []
    for ids in windows:
        cache = create_cache("transform", tiny_llama)
        with torch.no_grad():
            tiny_llama(ids[None], past_key_values=cache)
        codecs = {index: layer.codec for index, layer in enumerate(cache.layers)}
        stores.append(PageStore(PromptStore(tmp_path), tiny_llama, codecs, 4, 16))
    token_ids = windows[0].tolist()
    stores[0].write(token_ids, 64, {number: [None] * len(codecs) for number in range(2)})
    assert [block.start for block in stores[0].read(token_ids, 64, 0, 9)] == [0, 64]
    assert [block.start for block in stores[0].read(token_ids, 64, 1, 9)] == [64]
    assert stores[1].read(token_ids, 64, 0, 9) == []


def test_forged_pages_are_read_again(smollm2, prompts, tmp_path):
    model = smollm2[0]

    def answer():
        text = torch.tensor(prompts[-1:])
        with compressed_batching(model, "transform-30", text=text, store=PromptStore(tmp_path)) as batching:
            return run(model, [prompts[-1]])[0], batching.stats()["tokens_loaded"]

    first, _ = answer()
    for path in tmp_path.glob("blocks/*/*.safetensors"):
        block = read_block(path)
        for state in block.layers:
            rows = state.blocks[0].keys
            rows["rows"] = rows["rows"][..., :-1]
        write_record(path, FORMAT, block)
    with pytest.warns(UserWarning, match="a page on disk is damaged"):
        assert answer() == (first, 0)


def test_models_whose_requests_share_no_pages_have_none_on_disk(tiny_model, tmp_path):
    model = tiny_model("gemma3-hybrid")
    text = torch.randint(3, 97, (1, 100))
    context = compressed_batching(model, "transform-30", text=text, store=PromptStore(tmp_path))
    with pytest.raises(ValueError, match="`store` keeps pages that requests share"), context:
        pass


def test_a_cancelled_request_releases_its_blocks(smollm2, prompts, context):
    with (
        context(),
        smollm2[0].continuous_batching_context_manager(**config(400)) as manager,
    ):
        manager.add_request(prompts[0], request_id="kept", max_new_tokens=NUM_TOKENS)
        alone = manager.get_result(timeout=600).generated_tokens
        # With a beginning that is known, and without one
        for number in (0, 1):
            manager.add_request(prompts[number], request_id=f"{number}", streaming=True)
            next(iter(manager.request_id_iter(f"{number}")))
            manager.cancel_request(f"{number}")
        manager.add_request(prompts[0], request_id="again", max_new_tokens=NUM_TOKENS)
        again = next(
            each for each in iter(lambda: manager.get_result(timeout=600), None) if each.request_id == "again"
        )
        batch = manager.batch_processor
        while batch.has_pending_requests():
            time.sleep(0.01)
        batch.cache.evict_cached_blocks()
        assert again.generated_tokens == alone and batch.cache.compute_free_capacity() == 1


def test_offloaded_requests_continue_unchanged(smollm2, prompts, context, monkeypatch):
    model, offloaded = smollm2[0], []
    offload, empty = OffloadingManager._offload_to_cpu, torch.empty

    def watch(self, states, *args):
        copied = offload(self, states, *args)
        offloaded.append((len(states), len(copied)))
        return copied

    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", watch)
    # Pinned memory needs an accelerator
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    with context():
        # Two need a third page of rows at one time, and there is room for two of two pages beside their exact tokens
        growing = [prompts[2][5 * number :][: 122 + 2 * number] for number in range(3)]
        alone = [run(model, [prompt])[0] for prompt in growing]
        assert run(model, growing, num_blocks=1) == alone and offloaded == [(1, 0)]
        assert run(model, growing, num_blocks=1, offload_space=0.05) == alone and offloaded[1:] == [(1, 1)]


def test_windowed_layers_stay_dense(tiny_model, random_windows):
    model, prompts = (
        tiny_model("gemma3-hybrid"),
        [ids[: 90 + 31 * k].tolist() for k, ids in enumerate(random_windows(3, 152))],
    )
    dense = run(model, prompts)
    with compressed_batching(model, "transform-30", text=torch.tensor(prompts[-1:])) as batching:
        together, num_coded = run(model, prompts), batching.stats()["tokens_coded"]
        alone = [run(model, [prompt])[0] for prompt in prompts]
    assert together == alone
    # Two of its four layers attend to all tokens
    assert num_coded == 2 * (sum(map(len, prompts)) + 3 * (NUM_TOKENS - 1))
    assert agreeing(together, dense) > 24


# Bytes of 3 pages beside 15 of windows, of one of each, and of a page that is larger than that of windows
@pytest.mark.parametrize(("size", "pages", "others"), [(190_000, 3, 15 << 19), (30_000, 1, 1 << 15), (3_000, 1, 2048)])
def test_pages_beside_windows_need_no_large_sector(size, pages, others):
    block = _fit_page(size, pages, others) * pages
    assert size <= block < 1.4 * size and math.lcm(block, others) == max(others, block)


def test_a_dense_batch_is_an_error(tiny_llama, random_windows):
    prompts = [random_windows(1, 90)[0].tolist()]
    with compressed_batching(tiny_llama, "transform", text=torch.tensor(prompts)) as batching:
        # A release of Transformers that looks up its allocator elsewhere
        paged_cache.ATTN_TYPE_TO_ALLOCATOR["full_attention"] = paged_cache.FullAttentionCacheAllocator
        with pytest.raises(AssertionError, match="a batch ran from a dense cache"):
            run(tiny_llama, prompts)
    assert run(tiny_llama, prompts) and batching.stats()["dense_reads"] == 0


def test_other_models_keep_their_cache(smollm2, prompts, context, tiny_llama):
    ids = [[3, 4, 5] * 30, [9, 8] * 20]
    expected = run(tiny_llama, ids)
    with context():
        assert run(tiny_llama, ids) == expected
    assert paged_cache.ATTN_TYPE_TO_ALLOCATOR["full_attention"] is paged_cache.FullAttentionCacheAllocator
    assert paged_cache.PagedAttentionMemoryHandler.__name__ == "PagedAttentionMemoryHandler"
    assert paged_cache.PagedAttentionCache.update.__qualname__ == "PagedAttentionCache.update"


def test_two_models_in_two_threads_do_not_mix(tiny_llama, tiny_model, random_windows):
    prompts = [ids[: 90 + 31 * k].tolist() for k, ids in enumerate(random_windows(3, 152))]
    models, are_open = [tiny_llama, tiny_model("llama-mha")], threading.Barrier(2, timeout=600)

    def work(model, wait=lambda: None):
        with compressed_batching(model, "transform", text=torch.tensor(prompts[-1:])) as batching:
            wait()
            return run(model, prompts), batching.stats()["tokens_coded"]

    alone = [work(model) for model in models]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(work, models, [are_open.wait] * 2))
    assert together == alone and alone[0][0] != alone[1][0]


def test_invalid_options_are_refused(tiny_llama, tiny_model):
    refused = {
        "`name` is `transform`, which has no tables": {},
        "`num_recent_tokens`": {"num_recent_tokens": -1},
        r"`text` has to be token ids of shape \[1, tokens\] but got \[100\]": {"text": torch.full((100,), 3)},
        "`text` has to be token ids of shape .* but got 'abc'": {"text": "abc"},
        "`text` .* has 9 tokens, but tables need at least 68": {"text": torch.full((1, 9), 3)},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message), compressed_batching(tiny_llama, "transform", **options):
            pass
    split = copy.deepcopy(tiny_llama)
    split.model.layers[-1].to("meta")
    with pytest.raises(ValueError, match="split over cpu and meta"), compressed_batching(split, "transform"):
        pass
    text = torch.randint(3, 97, (1, 100))
    eager = tiny_model("llama", attn_implementation="eager")
    with pytest.raises(ValueError, match="attends by `eager`"), compressed_batching(eager, "transform", text=text):
        pass
    with compressed_batching(tiny_llama, "transform", text=text), pytest.raises(ValueError, match="multiple of 64"):
        tiny_llama.generate_batch(
            [[3] * 9], continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=4)
        )


HEADS, GROUPS, PAGE, SINKS = 2, 2, 64, 4


def make_codec(model):
    """Tables of a random prompt."""
    cache = create_cache("transform", model)
    with torch.no_grad():
        model(torch.randint(3, 97, (1, 120)), past_key_values=cache)
    return RowCodec(SharedFormats(*cache.layers[0].codec.formats()))


def make_allocator(codec, num_recent, dtype, num_blocks=40):
    codec_config = PageCodecConfig({0: codec}, SINKS, num_recent)
    options = {"index": 0, "config": None, "num_key_value_heads": HEADS, "cache_dtype": dtype, "page_size": PAGE}
    allocator = CodedAllocator(
        codec_config, BatchingCounters(), **options, layer_indices=[0], allow_block_sharing=True
    )
    size = allocator.bytes_per_block
    memory = torch.randint(0, 256, ((num_blocks + 2) * size,), dtype=torch.uint8)
    allocator.register_cache_tensor(size, num_blocks * size, memory, CachePool(num_blocks, 1))
    return allocator


def begin_pass(allocator, members):
    """Allocate blocks for the tokens of a pass, given past and new tokens and the name of each request; batch them."""
    write = []
    for past, new, name in members:
        for _ in range(allocator.needs_new_sectors(name, past, new)):
            allocator.pool.allocate_sector(0)
        allocator.allocate_cache_to_request(name, past, new)
        write += allocator.get_write_indices(name, past, new)
    starts = [0, *itertools.accumulate(new for _, new, _ in members)]
    key_starts = [0, *itertools.accumulate(past + new for past, new, _ in members)]
    allocator.begin_pass(starts, key_starts, torch.tensor(write))
    return allocator.batches


def expected_states(codec, keys, values, past, num_recent):
    """Keys and values as a pass of new tokens behind `past` others has them."""
    rows = codec.encode(keys, values, Positions(0, None))
    found = codec.decode_keys(rows[0], Positions(0, None)), codec.decode_values(rows[1])
    exact = torch.arange(keys.shape[2])
    exact = (exact < SINKS) | (exact >= past - num_recent)
    return [torch.where(exact[:, None], own, coded) for own, coded in zip((keys, values), found, strict=True)]


@pytest.mark.each_value
@pytest.mark.parametrize("kernel", ["torch", "auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_recent", [0, 8])
@torch.no_grad()
def test_attention_covers_the_tokens_written(num_recent, dtype, kernel, tiny_llama, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    codec = make_codec(tiny_llama)
    allocator, head_dim = make_allocator(codec, num_recent, dtype), codec.head_shapes[0][1]
    # Tokens of two requests in every pass: borders of pages, single tokens, a token alone
    names, passes = "ab", [(60, 1), (3, 5), (1, 1), (1, 1), (20, 58), (64, 1), (1, 1)]
    if kernel == "triton":
        # Interpreted, which takes long
        passes = passes[:4]
    held = [[torch.zeros(1, HEADS, 0, head_dim, dtype=dtype) for _ in range(2)] for _ in names]
    for counts in passes:
        new = [[torch.randn(1, HEADS, count, head_dim).to(dtype) for _ in range(2)] for count in counts]
        starts = [0, counts[0], sum(counts)]
        pasts = [own[0].shape[2] for own in held]
        begin_pass(allocator, list(zip(pasts, counts, names, strict=True)))
        joined = [torch.cat([states[side] for states in new], dim=2) for side in range(2)]
        states = PagedStates.store(allocator, 0, *joined)
        query = torch.randn(1, HEADS * GROUPS, sum(counts), head_dim).to(dtype)
        output = states.attend(AttentionCall(query))
        dense = [states.to_dense(side) for side in ("keys", "values")]
        position = 0
        for number, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            held[number] = [torch.cat(each, dim=2) for each in zip(held[number], new[number], strict=True)]
            expected = expected_states(codec, *(each.float() for each in held[number]), past, num_recent)
            for own, known in zip(dense, expected, strict=True):
                own = own[:, :, position : position + past + count]
                torch.testing.assert_close(own, known.to(dtype), atol=1e-5, rtol=0.02)
            position += past + count
            tokens = slice(starts[number], starts[number + 1])
            mask = torch.ones(count, past + count, dtype=torch.bool).tril(past)
            wanted = F.scaled_dot_product_attention(
                query[:, :, tokens].float(), *expected, attn_mask=mask, enable_gqa=True
            )
            limit = 1e-4 if dtype == torch.float32 else 0.02
            assert float((output[:, :, tokens].float() - wanted).abs().max()) < limit
    assert allocator.counters.attend_calls == len(passes) * 2
    assert (allocator.counters.fused_calls > 0) == (kernel != "torch")


def held(allocator, name, past, new):
    """Return all that a new token of a request attends to, and its batch."""
    (batch,) = begin_pass(allocator, [(past, 1, name)])
    parts = allocator.parts(0, batch, allocator.read_exact(0, batch), *new)
    tiles = (decode_tiles(part.gathered() if isinstance(part, PagedRowPart) else part) for part in parts)
    return [tile[side] for tile in itertools.chain(*tiles) for side in range(2)], batch


def make_request(allocator, codec, length):
    keys, values = torch.randn(2, 1, HEADS, length, codec.head_shapes[0][1])
    (batch,) = begin_pass(allocator, [(0, length, "a")])
    allocator.write(0, batch, keys, values)
    return keys, values


# Within a page, and at its end, where the fork has no rows to copy
@pytest.mark.parametrize("length", [70, 128])
def test_forks_share_sinks_and_whole_pages_alone(length, tiny_llama):
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    keys, _ = make_request(allocator, codec, length)
    source = allocator.block_table["a"]
    for _ in range(allocator.count_non_shareable_blocks("a", length)):
        allocator.pool.allocate_sector(0)
    allocator.copy_blocks(*allocator.fork_blocks("a", "b", length))
    shared = [own for own, other in zip(source, allocator.block_table["b"], strict=True) if own == other]
    layout, pages = allocator.layout, length // PAGE
    assert shared == [*source[: layout.num_sink_blocks], *source[layout.num_exact_blocks :][:pages]]
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])
    before, batch = held(allocator, "a", length, new)
    allocator.write(0, batch, *new)
    assert all(map(torch.equal, before, held(allocator, "b", length, new)[0]))
    for name in "ab":
        allocator.free_blocks(name)
    assert allocator.pool.count_free_blocks(0) + allocator.pool.num_free_sectors == 40


def share_prefix(allocator, codec, ids):
    """Request "b" begins with the 128 tokens that "a" has left; returns their keys and values, and blocks."""
    states = make_request(allocator, codec, 128)
    allocator.mark_complete_blocks("a", ids, 2)
    allocator.free_blocks("a")
    matched = allocator.match_prefix_blocks(ids)
    allocator.acquire_prefix_blocks("b", 128, matched)
    return *states, matched


def test_a_shared_prefix_has_exact_sinks_and_decodes_its_recent_tokens(tiny_llama):
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    ids = list(range(130))
    keys, values, matched = share_prefix(allocator, codec, ids)
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])
    (*_, exact_keys, exact_values), _ = held(allocator, "b", 128, new)
    rows = codec.encode(keys, values, Positions(0, None))
    decoded = codec.decode_keys(rows[0], Positions(0, None)), codec.decode_values(rows[1])
    for own, states, coded in zip((exact_keys, exact_values), (keys, values), decoded, strict=True):
        assert torch.equal(own[:, :, :SINKS], states[:, :, :SINKS])
        torch.testing.assert_close(own[:, :, SINKS:-1], coded[:, :, -8:])
    # The same blocks again, written by another request, are given back for those that are known
    allocator.free_blocks("b")
    make_request(allocator, codec, 128)
    allocator.mark_complete_blocks("a", ids, 2)
    assert allocator.block_table["a"][allocator.layout.num_exact_blocks :] == matched
    allocator.free_blocks("a")
    allocator.pool.free_blocks(0, allocator.ledger.evict_cached_blocks())
    assert allocator.pool.count_free_blocks(0) + allocator.pool.num_free_sectors == 40


def test_forks_of_a_shared_prefix_decode_its_recent_tokens(tiny_llama):
    """A request whose last token alone is unknown has a pass without tokens, in which Transformers forks it."""
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    keys, *_ = share_prefix(allocator, codec, list(range(129)))
    assert begin_pass(allocator, [(128, 0, "b")]) == []
    for _ in range(allocator.count_non_shareable_blocks("b", 128)):
        allocator.pool.allocate_sector(0)
    allocator.copy_blocks(*allocator.fork_blocks("b", "c", 128))
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])
    (*_, exact_keys, _), _ = held(allocator, "b", 128, new)
    (*_, fork_keys, _), _ = held(allocator, "c", 128, new)
    decoded = codec.decode_keys(codec.encode(keys, keys, Positions(0, None))[0], Positions(0, None))
    torch.testing.assert_close(exact_keys[:, :, SINKS:-1], decoded[:, :, -8:])
    assert torch.equal(exact_keys, fork_keys)


def test_blocks_that_cannot_be_loaded_are_free(tiny_llama, random_windows, tmp_path, monkeypatch):
    """Memory that ends while a page is loaded ends a batch, and the next one of its manager has all blocks."""
    (ids,) = random_windows(1, 152)
    with compressed_batching(tiny_llama, "transform-30", text=ids[None], store=PromptStore(tmp_path)):
        run(tiny_llama, [ids.tolist()])

    def fail(*args):
        raise torch.OutOfMemoryError("planted")

    with (
        compressed_batching(tiny_llama, "transform-30", text=ids[None], store=PromptStore(tmp_path)),
        tiny_llama.continuous_batching_context_manager(**config(NUM_TOKENS)) as manager,
    ):
        monkeypatch.setattr(CodedAllocator, "_write_states", fail)
        manager.add_request(ids.tolist())
        assert "planted" in manager.get_result(timeout=600).error
        assert manager.batch_processor.cache.compute_free_capacity() == 1
