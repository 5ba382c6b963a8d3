"""Sampling of requests that are answered together, each by its own temperature, top-k, top-p and seed.

A batch takes the token with the highest score. Scores of a request that is sampled are divided by its temperature,
filtered by top-k and top-p, and get Gumbel noise: the highest sum is then a sample of the softmax. The noise is a hash
of the request's seed, the position and the token, so that a request's tokens do not depend on the others, and the same
seed gives the same text. Everything is computed by tensors, as GPUs replay it.
"""

from __future__ import annotations

import secrets

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


# Value of `top_k` without an effect
_ALL_TOKENS = 2**31 - 1
# Value of `seed` for the highest score, without noise
_GREEDY = -1
# `top_k` of a generation config that does not say, as in `generate`
_TOP_K = 50
_BITS = 0xFFFFFFFF


def sampling_of(generation: GenerationConfig, seed: int | None) -> dict[str, float | int]:
    """Return the arguments of a request for the processors of `make_samplers`."""
    if not generation.do_sample:
        return {}
    top_k = _TOP_K if generation.top_k is None else generation.top_k
    return {
        "temperature": float(generation.temperature or 1.0),
        "top_k": top_k or _ALL_TOKENS,
        "top_p": float(generation.top_p or 1.0),
        "seed": secrets.randbits(31) if seed is None else _mix(seed & _BITS, seed >> 32 & _BITS),
    }


def make_samplers(model: PreTrainedModel, generation: GenerationConfig) -> ContinuousBatchingLogitsProcessorList:
    """Make the processors of a batch: those of the generation config that do not sample, and one for each option."""
    own = model._get_logits_processor(generation)  # type: ignore[operator]
    sampling = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    kept = [processor for processor in own if not isinstance(processor, sampling)]
    samplers = _Temperature(), _TopK(), _TopP(), _Noise()
    made = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([*kept, *samplers]))
    # Transformers counts those that it has converted
    made.tensors_required = len(samplers)
    return made


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    def __init__(self) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        is_needless = _is_all(scores, tensor_arg.view(torch.float32), 1.0)
        return scores if is_needless else super().__call__(scores, tensor_arg)


class _TopK(ContinuousBatchingTopKLogitsWarper):
    def __init__(self) -> None:
        super().__init__(TopKLogitsWarper(_ALL_TOKENS))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return scores if _is_all(scores, tensor_arg, _ALL_TOKENS) else super().__call__(scores, tensor_arg)


class _TopP(ContinuousBatchingTopPLogitsWarper):
    def __init__(self) -> None:
        super().__init__(TopPLogitsWarper(1.0))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        is_needless = _is_all(scores, tensor_arg.view(torch.float32), 1.0)
        return scores if is_needless else super().__call__(scores, tensor_arg)


class _Noise(ContinuousBatchingLogitsProcessor):
    """Adds Gumbel noise to the scores of requests that are sampled."""

    supported_kwargs = {"seed": int}
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.fill_(_GREEDY)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        seeds = []
        for request in requests_with_new_token:
            seed = request.state.logit_processor_kwargs.get("seed", _GREEDY)
            seeds.append(seed if seed == _GREEDY else _mix(seed, request.state.position_offset))
        return torch.tensor(seeds, dtype=torch.int32, device="cpu")

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if _is_all(scores, tensor_arg, _GREEDY):
            return scores
        seeds = tensor_arg[: scores.shape[0], None]
        return scores + torch.where(seeds == _GREEDY, 0.0, _gumbel_noise(seeds, scores.shape[1]))


def _is_all(scores: torch.Tensor, arguments: torch.Tensor, neutral: float) -> bool:
    """Return true if all requests have an argument without an effect; false on a GPU, which must not be waited for."""
    return scores.device.type == "cpu" and bool((arguments[: scores.shape[0]] == neutral).all())


def _gumbel_noise(seeds: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return Gumbel noise `[requests, tokens]` of seeds `[requests, 1]`."""
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=seeds.device)
    bits = _scramble(_scramble(seeds.long() & _BITS) ^ tokens)
    # 24 bits are exact in float32, and never 0 or 1 with a half added
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _scramble(bits: torch.Tensor) -> torch.Tensor:
    """Scramble 32 bits in integers of 64: the finalizer of MurmurHash3."""
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & _BITS
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & _BITS
    return bits ^ bits >> 16


def _mix(seed: int, number: int) -> int:
    """Return 31 bits of a seed and a number."""
    pair = torch.tensor([seed & _BITS, number & _BITS], dtype=torch.int64, device="cpu")
    first, second = _scramble(pair).tolist()
    mixed = torch.tensor(first * 31 + second & _BITS, dtype=torch.int64, device="cpu")
    return int(_scramble(mixed)) >> 1
