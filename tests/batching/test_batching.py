"""Transformers' continuous batching in `compressed_batching`: requests together are what they are alone."""

import copy
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from kvcache_plugins.batching import compressed_batching
from kvcache_plugins.batching.pages import _fit_page


NUM_TOKENS = 12


def run(model, prompts, max_batch_tokens=256, num_forks=1, num_blocks=24, offload_space=0.0, **options):
    # Of one token to choose from; forks are for sampling
    sampling = {"do_sample": num_forks > 1, "top_k": 1, "num_return_sequences": num_forks}
    config = GenerationConfig(**sampling, max_new_tokens=NUM_TOKENS, eos_token_id=-1, pad_token_id=0)
    sizes = {"page_size": 64, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    paging = ContinuousBatchingConfig(**sizes, cpu_offload_space=offload_space)
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=paging, **options)
    errors = [output.error for output in outputs.values() if output.error]
    assert not errors, errors
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture(scope="module")
def prompts(smollm2):
    text = "The cache of a decoder holds keys and values of all tokens before, and grows with every one of them. " * 8
    ids = smollm2[1](text).input_ids
    return [ids[7 * number : 90 + 31 * number] for number in range(3)]


@pytest.fixture
def context(smollm2, prompts):
    """Makes the context: tables of the longest prompt, as a preset of high rate has them."""
    return lambda name="gear-t30": compressed_batching(smollm2[0], name, text=torch.tensor(prompts[-1:]))


def test_requests_together_are_what_they_are_alone(smollm2, prompts, context):
    model = smollm2[0]
    dense = run(model, prompts)
    with context() as batching:
        together = run(model, prompts)
        stats = batching.stats()
        chunked = run(model, prompts, max_batch_tokens=48)
        alone = [run(model, [prompt])[0] for prompt in prompts]
        forks = run(model, prompts[:1], num_forks=2)
        turned = run(model, prompts[::-1])[::-1]
    assert together == alone == turned and forks == [together[0]] * 2
    layers, new = model.config.num_hidden_layers, sum(map(len, prompts)) + 3 * (NUM_TOKENS - 1)
    assert stats["tokens_coded"] == layers * new
    assert stats["fused_calls"] >= layers * 3 * (NUM_TOKENS - 2) and stats["dense_reads"] == 0
    assert stats["kernel_fallbacks"] == 0
    # Of 28 % of the bits the text is nearly the dense one's; chunks of a prompt see each other coded
    for tokens in (together, chunked):
        assert (
            sum(a == b for own, known in zip(tokens, dense, strict=True) for a, b in zip(own, known, strict=True)) > 18
        )


def test_a_prefix_is_shared(smollm2, prompts, context):
    model = smollm2[0]
    with (
        context() as batching,
        model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(page_size=64, num_blocks=24, max_batch_tokens=256),
        ) as manager,
    ):
        answers, coded = [], []
        for _ in range(2):
            manager.add_request(prompts[-1])
            answers.append(manager.get_result(timeout=60).generated_tokens)
            coded.append(batching.stats()["tokens_coded"])
        block, dense = batching.page_bytes()
    assert answers[0] == answers[1]
    # Two whole pages of the prompt were there
    assert coded[1] - coded[0] == coded[0] - 128 * model.config.num_hidden_layers
    assert block < 0.3 * dense


def test_a_cancelled_request_gives_its_blocks_back(smollm2, prompts, context):
    with (
        context(),
        smollm2[0].continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=400, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(page_size=64, num_blocks=24, max_batch_tokens=256),
        ) as manager,
    ):
        manager.add_request(prompts[0], request_id="kept", max_new_tokens=NUM_TOKENS)
        alone = manager.get_result(timeout=60).generated_tokens
        # With a beginning that is known, and without one
        for number in (0, 1):
            manager.add_request(prompts[number], request_id=f"{number}", streaming=True)
            next(iter(manager.request_id_iter(f"{number}")))
            manager.cancel_request(f"{number}")
        manager.add_request(prompts[0], request_id="again", max_new_tokens=NUM_TOKENS)
        again = next(each for each in iter(lambda: manager.get_result(timeout=60), None) if each.request_id == "again")
        batch = manager.batch_processor
        while batch.has_pending_requests():
            time.sleep(0.01)
        batch.cache.evict_cached_blocks()
        assert again.generated_tokens == alone and batch.cache.compute_free_capacity() == 1


def test_requests_that_make_room_go_on_as_they_were(smollm2, prompts, context, monkeypatch):
    model, offloaded = smollm2[0], []
    offload, empty = OffloadingManager._offload_to_cpu, torch.empty

    def watch(self, states, *args):
        copied = offload(self, states, *args)
        offloaded.append((len(states), len(copied)))
        return copied

    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", watch)
    # Without an accelerator there is no pinned memory
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    with context():
        # Two need a third page of rows at one time, and there is room for two of two pages beside their exact tokens
        growing = [prompts[2][5 * number :][: 122 + 2 * number] for number in range(3)]
        alone = [run(model, [prompt])[0] for prompt in growing]
        assert run(model, growing, num_blocks=1) == alone and offloaded == [(1, 0)]
        assert run(model, growing, num_blocks=1, offload_space=0.05) == alone and offloaded[1:] == [(1, 1)]


def test_windows_stay_as_they_are(tiny_model, random_windows):
    model, prompts = (
        tiny_model("gemma3-hybrid"),
        [ids[: 90 + 31 * k].tolist() for k, ids in enumerate(random_windows(3, 152))],
    )
    dense = run(model, prompts)
    with compressed_batching(model, "gear-t30", text=torch.tensor(prompts[-1:])) as batching:
        together, num_coded = run(model, prompts), batching.stats()["tokens_coded"]
        alone = [run(model, [prompt])[0] for prompt in prompts]
    assert together == alone
    # Two of its four layers attend to all tokens
    assert num_coded == 2 * (sum(map(len, prompts)) + 3 * (NUM_TOKENS - 1))
    assert (
        sum(a == b for own, known in zip(together, dense, strict=True) for a, b in zip(own, known, strict=True)) > 24
    )


# Bytes of 3 pages beside 15 of windows, of one of each, and of a page that is larger than that of windows
@pytest.mark.parametrize(("size", "pages", "others"), [(190_000, 3, 15 << 19), (30_000, 1, 1 << 15), (3_000, 1, 2048)])
def test_pages_beside_windows_need_no_large_sector(size, pages, others):
    block = _fit_page(size, pages, others) * pages
    assert size <= block < 1.4 * size and math.lcm(block, others) == max(others, block)


def test_a_dense_batch_is_an_error_and_a_dropped_cache_is_told(tiny_llama, random_windows):
    prompts = [random_windows(1, 90)[0].tolist()]
    with compressed_batching(tiny_llama, "gear-t25", text=torch.tensor(prompts)) as batching:
        with pytest.warns(UserWarning, match="`past_key_values` is dropped by `generate_batch`"):
            run(tiny_llama, prompts, past_key_values=DynamicCache())
        # As if Transformers no longer asked where it does
        paged_cache.ATTN_TYPE_TO_ALLOCATOR["full_attention"] = paged_cache.FullAttentionCacheAllocator
        with pytest.raises(AssertionError, match="a batch ran from a dense cache"):
            run(tiny_llama, prompts)
    assert run(tiny_llama, prompts) and batching.stats()["dense_reads"] == 0


def test_other_models_are_left_alone(smollm2, prompts, context, tiny_llama):
    ids = [[3, 4, 5] * 30, [9, 8] * 20]
    expected = run(tiny_llama, ids)
    with context():
        assert run(tiny_llama, ids) == expected
    assert paged_cache.ATTN_TYPE_TO_ALLOCATOR["full_attention"] is paged_cache.FullAttentionCacheAllocator
    assert paged_cache.PagedAttentionMemoryHandler.__name__ == "PagedAttentionMemoryHandler"
    assert paged_cache.PagedAttentionCache.update.__qualname__ == "PagedAttentionCache.update"


def test_two_models_in_two_threads(tiny_llama, tiny_model, random_windows):
    prompts = [ids[: 90 + 31 * k].tolist() for k, ids in enumerate(random_windows(3, 152))]
    models, are_open = [tiny_llama, tiny_model("llama-mha")], threading.Barrier(2, timeout=60)

    def work(model, wait=lambda: None):
        with compressed_batching(model, "gear-t25", text=torch.tensor(prompts[-1:])) as batching:
            wait()
            return run(model, prompts), batching.stats()["tokens_coded"]

    alone = [work(model) for model in models]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(work, models, [are_open.wait] * 2))
    assert together == alone and alone[0][0] != alone[1][0]


def test_what_cannot_be_had_is_refused(tiny_llama, smollm2):
    with (
        pytest.raises(ValueError, match="`name` is `gear-t25`, which has no tables"),
        compressed_batching(tiny_llama, "gear-t25"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="`num_recent_tokens`"),
        compressed_batching(tiny_llama, "gear-t25", num_recent_tokens=-1),
    ):
        pass
    split = copy.deepcopy(tiny_llama)
    split.model.layers[-1].to("meta")
    with pytest.raises(ValueError, match="split over cpu and meta"), compressed_batching(split, "gear-t25"):
        pass
    text = torch.randint(3, 97, (1, 100))
    with compressed_batching(tiny_llama, "gear-t25", text=text), pytest.raises(ValueError, match="multiple of 64"):
        tiny_llama.generate_batch(
            [[3] * 9], continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=4)
        )
