"""Statistics of a model on a text: moments of keys and values, and the cost of their errors.

The first half of a window fills a dense cache, and the model continues from it, some tokens at a time. The cost of an
error `e` of a key or a value is the change of the distribution of the following tokens. To second order their KL
divergence is `e @ F @ e / 2`. `F` is the Fisher information: the mean outer product of gradients of the log-likelihood
of tokens that the model itself draws. One backward pass gives the gradients of every layer and head.

Gradients are taken for all tokens before those of the pass, which stand for a cache's newest, exact tokens. Gradients
for the prompt alone would make errors nearly free in heads that attend to recent tokens, and decoded tokens would be
coded too coarsely for these heads. Passes over few tokens also give the better estimate: their outer products have
fewer terms that cancel on average only.

Layers with a window hold all tokens here, and masks hide those outside of the window, so that their gradient is zero.

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
from kvcache_plugins.layers.query_recorder import DenseLayer, QueryRecordingLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.rotary_frequencies import rotary_embedding


# Number of key positions over which products of queries are averaged
_NUM_POSITIONS = 64
# Tokens of a pass, about as many as caches keep exact
_NUM_TOGETHER = 16
# Bytes of a key in the trial that chooses the layout of the rotary embedding
_TRIAL_BYTES = 16


class OneForward(Cache):
    """
    Cache for one forward with gradients. It stores no recurrent states: Transformers writes them in place, and
    gradients need the ones from before the forward.
    """

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        return recurrent_states


class SideSums:
    """
    Sums over tokens, of keys or of values.

    Attributes:
        count (`int`): number of tokens.
        states (`torch.Tensor` of shape `[H, D]`): sum of the states.
        products (`torch.Tensor` of shape `[H, D, D]`): sum of the states' outer products.
        num_scored (`int`): number of following tokens that gradients were taken of.
        gradients (`torch.Tensor` of shape `[H, D, D]`): sum of the gradients' outer products.
    """

    def __init__(self, num_heads: int, head_dim: int):
        self.count = 0
        self.num_scored = 0
        self.states = torch.zeros(num_heads, head_dim, dtype=torch.float64, device="cpu")
        shape = 2, num_heads, head_dim, head_dim
        self.products, self.gradients = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def add_states(self, states: torch.Tensor) -> None:
        self.count += states.shape[1]
        self.states += states.sum(dim=1).cpu()
        self.products += (states.mT @ states).cpu()

    def add_gradients(self, gradients: torch.Tensor, num_scored: int) -> None:
        """Add gradients for tokens `[H, T, D]`, of one draw of `num_scored` tokens."""
        self.num_scored += num_scored
        self.gradients += (gradients.mT @ gradients).cpu()


@dataclass(eq=False)
class LayerSums:
    """
    Sums of a layer.

    Attributes:
        window (`int`, *optional*): window of the layer's attention.
        layout (`RotaryLayout`): layout of the keys' rotary embedding.
        keys, values (`SideSums`): sums over tokens.
        num_queries (`int`): number of queries.
        queries (`torch.Tensor` of shape `[H, D, D]`): sum of the queries' outer products, after the inverse rotary
            embedding at the positions of keys that they see.
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
    Add the statistics of a window of token ids `[tokens]` to the `sums` by layer, for a model in eval mode.

    Args:
        prefix_length (`int`): tokens that fill the cache, and whose moments are taken.
        num_sinks (`int`): first tokens, which are left out, as they stay exact.
        num_draws (`int`): backward passes for every few of the following tokens.
        generator (`torch.Generator`): random numbers for drawn tokens, on the host.
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
    # A copy, as tensors of inference mode cannot have gradients
    window = window.to(model.device, copy=True)[None]
    with torch.no_grad():
        model(window[:, :prefix_length], **as_argument(cache), use_cache=True)
    observed = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, QueryRecordingLayer)}
    for index, layer in observed.items():
        _add_states(layer, rotary_embedding(config, index).frequencies, windows.get(index), num_sinks, sums, index)
    rest = window[:, prefix_length:].split(_NUM_TOGETHER, dim=1)
    for together in rest:
        for gradients in _gradients(model, together, cache, observed, num_draws, generator):
            for index, (of_keys, of_values) in gradients.items():
                own = sums[index]
                num_scored = together.shape[1]
                unrotated = _without_rotary(of_keys[0, :, num_sinks:].double(), own.layout, num_sinks)
                own.keys.add_gradients(unrotated, num_scored)
                own.values.add_gradients(of_values[0, :, num_sinks:].double(), num_scored)
        if together is not rest[-1]:
            with torch.no_grad():
                model(together, **as_argument(cache), use_cache=True)


def _without_rotary(keys: torch.Tensor, layout: RotaryLayout, first: int) -> torch.Tensor:
    """Return keys `[H, T, D]`, or their gradients, of tokens from `first` on, as before the rotary embedding."""
    cosines, sines = layout.angles(Positions(first).of(keys.shape[1], keys.device))
    return layout.rotate(keys, cosines.double(), -sines.double())


def _add_states(
    layer: QueryRecordingLayer,
    frequencies: tuple[float, ...],
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
        layouts = candidate_layouts(frequencies, seen.shape[3])
        moments = None
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
    """Add outer products of queries `[H * G, Q, D]`, unrotated at the positions of some of the keys."""
    num_heads, head_dim = sums.queries.shape[0], queries.shape[2]
    queries = queries.unflatten(0, (num_heads, -1)).flatten(1, 2)
    products = queries.mT @ queries
    first = 0 if sums.window is None else max(num_keys - sums.window, 0)
    count = min(_NUM_POSITIONS, num_keys - first)
    positions = torch.linspace(first, num_keys - 1, count, dtype=torch.float32, device=queries.device).long()
    cosines, sines = (angles.double()[:, None] for angles in sums.layout.angles(positions))
    unit = torch.eye(head_dim, dtype=torch.float64, device=queries.device)
    # The rows of a rotation are unrotated unit vectors
    rotations = sums.layout.rotate(unit.expand(len(positions), -1, -1), cosines, -sines)
    sums.queries += torch.einsum("nac,hab,nbd->hcd", rotations, products, rotations).cpu() / len(positions)
    sums.num_queries += queries.shape[1]


def _gradients(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    observed: dict[int, QueryRecordingLayer],
    num_draws: int,
    generator: torch.Generator,
) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """
    Yield, for every draw, the gradients for keys and values by layer, of the log-likelihood of tokens that the model
    draws.
    """
    leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if index not in observed:
            layers.append(copy.deepcopy(layer))
            continue
        pair = observed[index].keys, observed[index].values
        keys, values = (each.detach().requires_grad_() for each in pair if each is not None)
        leaves[index] = keys, values
        dense = DenseLayer()
        dense.indexer_keys = observed[index].indexer_keys
        dense.indexer_position_ids = observed[index].indexer_position_ids
        dense.update(keys, values)
        layers.append(dense)
    with torch.enable_grad():
        logits = model(token_ids, **as_argument(OneForward(layers=layers)), use_cache=True).logits[0].float()
        logarithms = logits.log_softmax(dim=-1)
    inputs = [each for pair in leaves.values() for each in pair]
    chances = logarithms.detach().exp().cpu()
    for draw in range(num_draws):
        drawn = torch.multinomial(chances, 1, generator=generator).to(logarithms.device)
        with torch.enable_grad():
            total = logarithms.gather(1, drawn).sum()
        flat = torch.autograd.grad(total, inputs, retain_graph=draw + 1 < num_draws)
        yield {index: (flat[2 * number], flat[2 * number + 1]) for number, index in enumerate(leaves)}
