"""Measurements of the KV-Runahead paper on several GPUs, and the same simulated from those on one.

Tables 1 and 3 of https://arxiv.org/abs/2405.05329. The compute of Llama 7B is fitted to the timings of one GPU; other
models are scaled by their shapes.
"""

from dataclasses import dataclass
from typing import Any

from kvcache_plugins.kv_runahead.planner import RECTANGLE, CostModel, Link, Timing, planned, predict_ttft

from .tsp import predict_tsp_ttft


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """
    What of a model decides its cost.

    Attributes:
        num_layers (`int`): layers.
        num_heads (`int`): query heads.
        width (`int`): channels of all query heads together.
        key_width (`int`): channels of all key heads together, as many as of the value heads.
        num_weights (`int`): of the linear layers of one layer.
    """

    num_layers: int
    num_heads: int
    width: int
    key_width: int
    num_weights: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the float16 keys and values of one token in one layer."""
        return 2 * 2 * self.key_width

    @property
    def projection_share(self) -> float:
        return self.width * (self.width + 2 * self.key_width) / self.num_weights


def _llama(num_layers: int, num_heads: int, ffn_width: int) -> Shapes:
    width = 128 * num_heads
    weights = 4 * width * width + 3 * width * ffn_width
    return Shapes(num_layers=num_layers, num_heads=num_heads, width=width, key_width=width, num_weights=weights)


def _falcon(num_layers: int, num_heads: int, num_key_heads: int) -> Shapes:
    width, key_width = 64 * num_heads, 64 * num_key_heads
    weights = 2 * width * width + 2 * width * key_width + 8 * width * width
    return Shapes(num_layers=num_layers, num_heads=num_heads, width=width, key_width=key_width, num_weights=weights)


MODELS = {
    "llama-7b": _llama(32, 32, 11008),
    "llama-13b": _llama(40, 40, 13824),
    "llama-30b": _llama(60, 52, 17920),
    "falcon-1b": _falcon(24, 32, 32),
    "falcon-7b": _falcon(32, 71, 1),
}
FITTED = "llama-7b"
# Table 3, one GPU: tokens and seconds
_ONE_GPU = {1024: 0.10, 2048: 0.24, 4096: 0.65, 8192: 1.95, 12288: 3.95}
# Table 1, at 300 GB/s: tokens, then seconds of TSP and KVR-S on 4 GPUs and of both on 8
_TABLE_1 = {
    "llama-7b": {
        1024: (0.107, 0.097, 0.117, 0.098),
        2048: (0.111, 0.100, 0.117, 0.103),
        4096: (0.20, 0.17, 0.12, 0.11),
        8192: (0.54, 0.41, 0.30, 0.22),
        12288: (1.06, 0.76, 0.57, 0.41),
        16384: (1.76, 1.24, 0.92, 0.65),
    },
    "llama-13b": {
        1024: (0.140, 0.126, 0.150, 0.129),
        2048: (0.143, 0.131, 0.153, 0.131),
        4096: (0.32, 0.29, 0.19, 0.16),
        8192: (0.87, 0.68, 0.49, 0.36),
        12288: (1.71, 1.25, 0.91, 0.66),
        16384: (2.89, 2.05, 1.46, 1.05),
    },
    "llama-30b": {1024: (0.21, 0.20, 0.23, 0.19), 2048: (0.28, 0.26, 0.24, 0.20)},
    "falcon-1b": {
        1024: (0.073, 0.061, 0.081, 0.066),
        2048: (0.067, 0.060, 0.079, 0.065),
        4096: (0.09, 0.07, 0.08, 0.06),
        8192: (0.25, 0.19, 0.15, 0.10),
    },
    "falcon-7b": {
        1024: (0.107, 0.095, 0.119, 0.096),
        2048: (0.117, 0.103, 0.118, 0.099),
        4096: (0.28, 0.21, 0.18, 0.12),
        8192: (0.78, 0.54, 0.47, 0.29),
    },
}
_FAST = 300.0
# Table 3, Llama 7B: GB/s, then tokens, then seconds of KVR on 2 and on 4 GPUs
_TABLE_3 = {
    10.0: {1024: (0.10, 0.10), 2048: (0.16, 0.19), 4096: (0.38, 0.36), 8192: (0.99, 0.72), 12288: (1.82, 1.15)},
    1.0: {1024: (0.11, 0.19), 2048: (0.21, 0.35), 4096: (0.84, 0.93), 8192: (1.31, 2.06), 12288: (2.28, 2.30)},
}


def cost_of(model: str) -> CostModel:
    """
    The cost of a model of the paper: Llama 7B fitted to timings of one GPU, others scaled from it.

    Linear layers are scaled by their weights; attention by its heads, not their channels: what the paper ran wrote
    every score to memory and read it again, and there is one a head.
    """
    timings = [Timing(length=length, seconds=seconds) for length, seconds in _ONE_GPU.items()]
    own, known = MODELS[model], MODELS[FITTED]
    fitted = CostModel.fit(timings, triangle=RECTANGLE)
    return CostModel(
        per_token=fitted.per_token * own.num_layers * own.num_weights / (known.num_layers * known.num_weights),
        per_pair=fitted.per_pair * own.num_layers * own.num_heads / (known.num_layers * known.num_heads),
        fixed=fitted.fixed * own.num_layers / known.num_layers,
        triangle=RECTANGLE,
        projection_share=own.projection_share,
    )


def paper_rows() -> list[dict[str, Any]]:
    """
    Simulated seconds beside the paper's, all ranks used.

    Below 300 GB/s direct transfers between GPUs were switched off, so the link is taken as shared by all; and
    beside the partition planned for that link stands the one planned for the fast link.
    """
    rows = []
    for model, by_length in _TABLE_1.items():
        for length, (tsp_4, runahead_4, tsp_8, runahead_8) in by_length.items():
            for num_ranks, tsp, runahead in ((4, tsp_4, runahead_4), (8, tsp_8, runahead_8)):
                rows.append(_paper_row(1, model, length, num_ranks, _FAST, runahead, tsp))
    for bandwidth, by_tokens in _TABLE_3.items():
        for length, of_ranks in by_tokens.items():
            for num_ranks, runahead in zip((2, 4), of_ranks, strict=True):
                rows.append(_paper_row(3, FITTED, length, num_ranks, bandwidth, runahead, None))
    return rows


def _paper_row(
    table: int, model: str, length: int, num_ranks: int, bandwidth: float, paper: float, paper_tsp: float | None
) -> dict[str, Any]:
    shapes, cost = MODELS[model], cost_of(model)
    sizes = (shapes.bytes_per_token, shapes.num_layers)
    link = Link(bytes_per_second=bandwidth * 1e9, shared=bandwidth < _FAST)

    def plan(planned_for: Link) -> tuple[int, ...]:
        return planned(
            length,
            num_ranks,
            cost,
            link=planned_for,
            bytes_per_token=sizes[0],
            num_layers=sizes[1],
            allow_fewer=False,
        )

    unadapted = plan(Link(bytes_per_second=_FAST * 1e9))
    seconds = {
        "runahead_s": predict_ttft(plan(link) if bandwidth < _FAST else unadapted, cost, link, *sizes),
        "unadapted_s": predict_ttft(unadapted, cost, link, *sizes),
    }
    tsp = predict_tsp_ttft(length, num_ranks, cost, link, *sizes)
    return {
        "table": table,
        "model": model,
        "length": length,
        "num_ranks": num_ranks,
        "gb_s": bandwidth,
        "paper_tsp_s": paper_tsp,
        "tsp_s": tsp,
        "tsp_against_paper": None if paper_tsp is None else tsp / paper_tsp,
        "paper_runahead_s": paper,
        **seconds,
        "runahead_against_paper": seconds["runahead_s"] / paper,
        "unadapted_against_paper": seconds["unadapted_s"] / paper,
    }
