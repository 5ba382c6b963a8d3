"""Observation of a model while it reads a text: moments of keys and values, and the cost of their errors.

A window's first half fills a dense cache, and the model goes on from it, some tokens at a time. The cost of an error
of a key or a value is what it does to the distribution of the tokens that follow: to second order, the KL divergence
is `e @ F @ e / 2`, with `F` the Fisher information, the mean outer product of gradients of the log-likelihood of
tokens that the model itself draws. So one backward pass gives every layer and head at once.

Tokens that are read together are not looked at yet, as a cache keeps its newest ones exact, but all before them are.
If only those of the prompt were, heads that look at what stands just before would seem to cost next to nothing, and
what is decoded and read again would be coded too coarsely for them. Passes of few tokens are the better estimate too:
their outer products have less in them that only cancels out on average.

Layers of a window hold all tokens here, as masks say what is seen. What is not seen any more has no gradient.

Legend: H key/value heads, D head dim, T tokens.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from kvcache_plugins.codecs.codec import QueryMoments
from kvcache_plugins.codecs.prompt_codec import make_key_format
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryLayout, candidate_layouts
from kvcache_plugins.layers.layer_factory import replace_full_attention
from kvcache_plugins.layers.query_recorder import QueryRecordingLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.rotary_frequencies import rotary_frequencies


# Positions of keys that queries are turned back by
_NUM_POSITIONS = 64
# Tokens that are read together, about as many as caches keep exact
_NUM_TOGETHER = 16
# Bytes of a key when layouts of the rotary embedding are told apart
_TRIAL_BYTES = 16


class OneForward(Cache):
    """
    A cache for one forward with gradients. Recurrent states are not stored, as Transformers writes them in place, and
    gradients need those from before the forward.
    """

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        return recurrent_states


class SideSums:
    """
    Sums over tokens of one side: `count`; states `[H, D]`; their products, and those of gradients `[H, D, D]`, which
    are of `num_scored` tokens that followed.
    """

    def __init__(self, num_heads: int, head_dim: int):
        self.count = self.num_scored = 0
        self.states = torch.zeros(num_heads, head_dim, dtype=torch.float64, device="cpu")
        shape = 2, num_heads, head_dim, head_dim
        self.products, self.gradients = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def add_states(self, states: torch.Tensor) -> None:
        self.count += states.shape[1]
        self.states += states.sum(dim=1).cpu()
        self.products += (states.mT @ states).cpu()

    def add_gradients(self, gradients: torch.Tensor, num_scored: int) -> None:
        """Adds those of tokens `[H, T, D]`, of one draw of as many tokens as were scored."""
        self.num_scored += num_scored
        self.gradients += (gradients.mT @ gradients).cpu()


@dataclass(eq=False)
class LayerSums:
    """
    What is known of a layer: `queries` `[H, D, D]` are products of queries, turned back by the angles of keys that
    they see, and `window` is how many these are at most.
    """

    window: int | None
    layout: RotaryLayout
    keys: SideSums
    values: SideSums
    num_queries: int
    queries: torch.Tensor


def observe_window(
    model: PreTrainedModel,
    window: torch.Tensor,
    prefix_length: int,
    num_sinks: int,
    num_draws: int,
    sums: dict[int, LayerSums],
    generator: torch.Generator,
) -> None:
    """
    Adds what a window of token ids `[tokens]` shows a model in eval mode to `sums`, by layer.

    Args:
        prefix_length (`int`): tokens that fill the cache, whose moments are taken; the others follow.
        num_sinks (`int`): first tokens that are left out, as they stay exact.
        num_draws (`int`): backward passes for every few tokens that follow.
        generator (`torch.Generator`): draws tokens, on the host.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if any(issubclass(kind, LinearAttentionLayer) and issubclass(kind, DynamicLayer) for kind in kinds):
        raise ValueError("`model` has layers of attention beside a recurrence, which cannot be calibrated")
    windows: dict[int, int] = {}

    def record_window(index: int, window: int) -> QueryRecordingLayer:
        windows[index] = window
        return QueryRecordingLayer()

    cache = Cache(layers=replace_full_attention(config, lambda _: QueryRecordingLayer(), record_window))
    # A copy, as one from inference mode cannot be used where gradients are taken
    window = window.to(model.device, copy=True)[None]
    with torch.no_grad():
        model(window[:, :prefix_length], **as_argument(cache), use_cache=True)
    observed = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, QueryRecordingLayer)}
    for index, layer in observed.items():
        _add_states(layer, rotary_frequencies(config, index), windows.get(index), num_sinks, sums, index)
    rest = window[:, prefix_length:].split(_NUM_TOGETHER, dim=1)
    for together in rest:
        for gradients in _gradients(model, together, cache, observed, num_draws, generator):
            for index, (of_keys, of_values) in gradients.items():
                own, num_scored = sums[index], together.shape[1]
                turned = _without_rotary(of_keys[0, :, num_sinks:].double(), own.layout, num_sinks)
                own.keys.add_gradients(turned, num_scored)
                own.values.add_gradients(of_values[0, :, num_sinks:].double(), num_scored)
        if together is not rest[-1]:
            with torch.no_grad():
                model(together, **as_argument(cache), use_cache=True)


def _without_rotary(keys: torch.Tensor, layout: RotaryLayout, first: int) -> torch.Tensor:
    """Keys `[H, T, D]`, or gradients for them, of tokens from `first` on as before the rotary embedding."""
    cosines, sines = layout.angles(Positions(first).of(keys.shape[1], keys.device))
    return layout.rotate(keys, cosines.double(), -sines.double())


def _add_states(
    layer: QueryRecordingLayer,
    frequencies: tuple[float, ...] | None,
    window: int | None,
    num_sinks: int,
    sums: dict[int, LayerSums],
    index: int,
) -> None:
    if layer.keys is None or layer.values is None:
        raise ValueError("`model` has layers of attention that it did not call with a cache")
    keys, values = (states.detach()[0, :, num_sinks:].double() for states in (layer.keys, layer.values))
    if index not in sums:
        own_keys, own_values = (SideSums(each.shape[0], each.shape[2]) for each in (keys, values))
        seen = layer.keys.detach()[:, :, num_sinks:]
        layouts, moments = candidate_layouts(frequencies, seen.shape[3]), None
        if layer.queries is not None:
            moments = QueryMoments.of(layer.queries, seen.shape[1], layouts, None)
        valid = torch.ones(1, seen.shape[2], dtype=torch.bool, device=seen.device)
        size = min(_TRIAL_BYTES, seen.shape[3])
        layout = make_key_format(seen, valid, moments, layouts, Positions(num_sinks), size).rope
        assert layout is not None
        sums[index] = LayerSums(window, layout, own_keys, own_values, 0, torch.zeros_like(own_keys.products))
    own = sums[index]
    own.keys.add_states(_without_rotary(keys, own.layout, num_sinks))
    own.values.add_states(values)
    if layer.queries is not None:
        _add_queries(layer.queries[0].double(), own, keys.shape[1])


def _add_queries(queries: torch.Tensor, sums: LayerSums, num_keys: int) -> None:
    """Adds products of queries `[H * G, Q, D]`, turned back by the angles of some of the keys in turn."""
    num_heads, head_dim = sums.queries.shape[0], queries.shape[2]
    queries = queries.unflatten(0, (num_heads, -1)).flatten(1, 2)
    products = queries.mT @ queries
    first = 0 if sums.window is None else max(num_keys - sums.window, 0)
    count = min(_NUM_POSITIONS, num_keys - first)
    positions = torch.linspace(first, num_keys - 1, count, dtype=torch.float32, device=queries.device).long()
    cosines, sines = (angles.double()[:, None] for angles in sums.layout.angles(positions))
    unit = torch.eye(head_dim, dtype=torch.float64, device=queries.device)
    # Rows of it are the unit vectors, turned back
    turns = sums.layout.rotate(unit.expand(len(positions), -1, -1), cosines, -sines)
    sums.queries += torch.einsum("nac,hab,nbd->hcd", turns, products, turns).cpu() / len(positions)
    sums.num_queries += queries.shape[1]


def _gradients(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    observed: dict[int, QueryRecordingLayer],
    num_draws: int,
    generator: torch.Generator,
) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """By layer, gradients for keys and values of the log-likelihood of tokens that the model draws, for every draw."""
    leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if index not in observed:
            layers.append(copy.deepcopy(layer))
            continue
        pair = observed[index].keys, observed[index].values
        keys, values = (each.detach().requires_grad_() for each in pair if each is not None)
        leaves[index] = keys, values
        dense = DynamicLayer()
        dense.update(keys, values)
        layers.append(dense)
    with torch.enable_grad():
        logits = model(token_ids, **as_argument(OneForward(layers=layers)), use_cache=True).logits[0].float()
        logarithms = logits.log_softmax(dim=-1)
    inputs = [each for pair in leaves.values() for each in pair]
    chances = logarithms.detach().exp().cpu()
    for number in range(num_draws):
        drawn = torch.multinomial(chances, 1, generator=generator).to(logarithms.device)
        with torch.enable_grad():
            total = logarithms.gather(1, drawn).sum()
        flat = torch.autograd.grad(total, inputs, retain_graph=number + 1 < num_draws)
        yield {index: (flat[2 * place], flat[2 * place + 1]) for place, index in enumerate(leaves)}
