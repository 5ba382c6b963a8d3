"""Queries of a decoder layer from its attention's input, without keys, values or attention.

Speculation needs the queries of a layer before the layer runs. `QueryProjection` finds out how an attention module of
Transformers makes its queries, and repeats just these steps on any hidden states:

    projection - norm over the whole width - clipping - norm of every head - rotary embedding - factor

The steps follow from attributes that families of models share: the name of the query projection, the size of the query
norm's weight, the parameters of `forward`. A projection is refused if attention is known to differ from products of
keys and queries; `QueryProjection.check` compares with the queries that attention got, and catches the rest.

B: batch size, T: tokens, H: query heads, D: size of a head.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcache_plugins.kernels.current_device import on_device_of
from kvcache_plugins.kernels.engine import choose_token_kernel, load_triton
from kvcache_plugins.kernels.launch_keeper import LaunchKeeper


if TYPE_CHECKING:
    from typing_extensions import Self


PROJECTION_NAMES = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
_COMPRESSED_NAMES = ("q_a_proj", "kv_a_proj_with_mqa")
# Attributes of modules that look up positions themselves, where the caller has no position embeddings
_OWN_POSITION_NAMES = ("rotary_emb", "embed_positions", "rotary_dim")
# Layers without rotary embedding, in models that have one. Other models have `use_rope`, or no position embeddings.
_IS_WITHOUT_ROTARY: dict[str, Callable[[Any], bool]] = {
    "afmoe": lambda module: not module.is_local_attention,
    "cohere2": lambda module: module.sliding_window is None,
    "cohere2_moe": lambda module: module.sliding_window is None and not module.force_rope,
    "exaone4": lambda module: module.sliding_window is not None and not module.is_sliding,
    "exaone_moe": lambda module: module.sliding_window is not None and not module.is_sliding,
    "kolibri1": lambda module: module.sliding_window is not None and not module.is_sliding,
}
_NORM_NAMES = ("q_norm", "q_layernorm", "query_layernorm")
# Families that multiply queries by `scaling` themselves and have attention multiply by 1
_SCALES_QUERIES = {"opt"}

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]


class UnknownQueriesError(ValueError):
    """Attention got other queries than a projection makes."""


class RootMeanSquare(NamedTuple):
    """
    Numbers of a root mean square norm.

    Args:
        epsilon (`float`): number below the root, beside the mean of squares.
        offset (`float`): number that is added to the weight.
    """

    epsilon: float
    offset: float

    @classmethod
    def of(cls, module: nn.Module) -> "Self | None":
        """Return the numbers of a module that is such a norm, which it shows on the CPU before it has hooks."""
        weight, epsilon = getattr(module, "weight", None), first_of(module, ("variance_epsilon", "eps"))
        if not _is_unhooked(module) or type(weight) is not nn.Parameter or weight.dim() != 1 or weight.is_meta:
            return None
        if epsilon is None or getattr(module, "bias", None) is not None:
            return None
        module = copy.deepcopy(module).to("cpu", torch.float32)
        # Small, so that the number below the root counts
        states = 1e-3 * _any_numbers(1, 1, weight.shape[0])
        with torch.no_grad():
            normed = module(states)
            plain = states * (states.square().mean() + epsilon).rsqrt()
            own = weight.to("cpu", torch.float32)
            offsets = (each for each in (0.0, 1.0) if torch.allclose(normed, plain * (own + each), 1e-4, 1e-6))
            offset = next(offsets, None)
        return None if offset is None else cls(epsilon, offset)


class InputNorm:
    """Norm of attention's input: one launch for a single token on a GPU if it is a root mean square norm."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._launches = LaunchKeeper()
        self._numbers = RootMeanSquare.of(module)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Norm states `[B, T, C]`."""
        weight = getattr(self._module, "weight", None)
        numbers = self._numbers
        is_fused = (
            numbers is not None
            and isinstance(weight, torch.Tensor)
            and states.shape[1] == 1
            and states.dtype == weight.dtype
            and states.is_contiguous()
            and choose_token_kernel(states)[0] == "triton"
        )
        if not is_fused:
            normed: torch.Tensor = self._module(states)
            return normed
        assert isinstance(weight, torch.Tensor) and numbers is not None
        result = torch.empty_like(states)
        with on_device_of(states):
            self._launches.run(
                (states.shape, states.dtype, states.device),
                lambda: load_triton().prepare_rms_norm(states, weight, *numbers),
                states_ptr=states,
                weight_ptr=weight,
                result_ptr=result,
            )
        return result


class QueryProjection:
    """
    Makes the queries that an attention module hands to `torch.nn.functional.scaled_dot_product_attention` from the
    module's input, with the module's own parameters and submodules.

    Attributes:
        num_heads, head_dim (`int`): sizes of the queries.
        has_rotary (`bool`): True if queries depend on position embeddings.
        scaling (`float`): factor of attention scores.

    Raises:
        ValueError: if the queries cannot be made, on the module's device, from input and position embeddings alone.
    """

    def __init__(self, module: nn.Module, layer_config: PreTrainedConfig):
        self._name = f"`{type(module).__name__}` of layer {getattr(module, 'layer_idx', None)}"
        parameters = inspect.signature(type(module).forward).parameters
        reason = _reason_to_refuse(module, layer_config, set(parameters))
        if reason is not None:
            raise ValueError(f"{self._name} {reason}")

        self.num_heads: int = (
            first_of(module, ("num_heads", "num_attention_heads")) or layer_config.num_attention_heads
        )
        self.head_dim: int = first_of(module, ("head_dim", "head_size")) or layer_config.hidden_size // self.num_heads
        num_projected_heads: int = first_of(module, ("num_key_value_heads", "num_kv_heads", "kv_heads")) or (
            self.num_heads // (first_of(module, ("num_key_value_groups",)) or 1)
        )

        self._projection_name: str = next(name for name in PROJECTION_NAMES if first_of(module, (name,)) is not None)
        self._module = module
        self._num_groups = self._count_groups(module, num_projected_heads)
        self._norm_stage = self._find_norm_stage()
        # Norm of each head, if it is one that the kernel that rotates computes
        is_of_heads = self._norm is not None and self._norm_stage == "split"
        self._norm_numbers = RootMeanSquare.of(self._norm) if is_of_heads else None
        self._clip: float | None = first_of(module, ("clip_qkv",)) or getattr(layer_config, "clip_qkv", None)

        takes_positions = "position_embeddings" in parameters
        self._rotate = self._find_rotary_function(module) if takes_positions else None
        self._rotary_size: int = first_of(module, ("rotary_ndims",)) or self.head_dim
        is_without = _IS_WITHOUT_ROTARY.get(
            layer_config.model_type, lambda module: not getattr(module, "use_rope", True)
        )
        self.has_rotary = takes_positions and not is_without(module)

        # Falcon has a name of its own, for ALiBi alone; otherwise attention takes its default, which is the same
        scaling: float | None = first_of(module, ("scaling", "inv_norm_factor"))
        if scaling is None:
            raise ValueError(f"{self._name} does not say how it scales attention scores: it has no `scaling`")
        is_folded = layer_config.model_type in _SCALES_QUERIES
        self._factor = scaling if is_folded else None
        self.scaling = 1.0 if is_folded else scaling
        # True if a kernel rotates queries, where nothing else happens to them behind the projection
        self._has_kernel = self.has_rotary and self._is_half_split() and self._clip is None and self._factor is None
        self._launches = LaunchKeeper()

    @property
    def _projection(self) -> Any:
        """Current projection: quantization and adapters replace the module, and only calls are sure to work."""
        return getattr(self._module, self._projection_name)

    @property
    def _norm(self) -> Any:
        return first_of(self._module, _NORM_NAMES)

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: PositionEmbeddings | None) -> torch.Tensor:
        """
        Make queries `[B, H, T, D]` from the attention module's input: hidden states `[B, T, hidden_size]` after the
        layer's input norm, and cosine and sine of positions, or `None` if the model has none.
        """
        states = self._project(hidden_states)  # [B, T, H * D]
        if position_embeddings is not None and self._rotates_by_kernel(states, *position_embeddings):
            return self._rotated_by_kernel(states, *position_embeddings)
        states = self._normed("projected", states)
        if self._clip is not None:
            states = states.clamp(min=-self._clip, max=self._clip)
        states = self._normed("split", states.unflatten(-1, (self.num_heads, self.head_dim)))  # [B, T, H, D]
        states = self._normed("transposed", states.transpose(1, 2))  # [B, H, T, D]
        if self.has_rotary and position_embeddings is not None:
            states = self._rotated(states, *position_embeddings)
        states = self._normed("rotated", states)
        return states if self._factor is None else states * self._factor

    def check(
        self, hidden_states: torch.Tensor, position_embeddings: PositionEmbeddings | None, query: torch.Tensor
    ) -> None:
        """
        Compare with the queries `[B, H, T, D]` that attention got; an `UnknownQueriesError` if they differ by more
        than rounding, a `ValueError` if they hold NaN or infinity.
        """
        with torch.no_grad():
            own = self(hidden_states, position_embeddings)
        if own.shape != query.shape:
            raise UnknownQueriesError(
                f"queries of {self._name} have the shape {tuple(query.shape)}, not {tuple(own.shape)}"
            )
        tolerance = torch.finfo(query.dtype).eps ** 0.5
        query = query.detach().float()
        error = float((own.float() - query).norm() / query.norm())
        # Not `>`, so that a NaN is refused as well
        if not error <= tolerance:
            if not bool(query.isfinite().all()):
                raise ValueError(f"queries of {self._name} hold NaN or infinity: `reset` the cache")
            raise UnknownQueriesError(
                f"{self._name} makes its queries in a way that is not known: they differ from their projection, norm "
                f"and rotary embedding by {error:.1e} of their size, and rounding explains {tolerance:.1e}"
            )

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._projection_name == "q_proj" and self._num_groups == 1:
            return self._projection(hidden_states)
        num_features = self.num_heads * self.head_dim // self._num_groups
        if not _is_plain(self._projection):
            fused = self._projection(hidden_states).unflatten(-1, (self._num_groups, -1))
            return fused[..., :num_features].flatten(-2)
        weight = self._projection.weight
        bias = self._projection.bias
        weight = weight.T if isinstance(self._projection, Conv1D) else weight
        # One product a group, as joining the query rows of all groups would copy them
        weight = weight.unflatten(0, (self._num_groups, -1))[:, :num_features]
        tokens = hidden_states.flatten(0, 1).expand(self._num_groups, -1, -1)
        states = torch.bmm(tokens, weight.mT)
        if bias is not None:
            states = states + bias.unflatten(0, (self._num_groups, 1, -1))[..., :num_features]
        return states.transpose(0, 1).reshape(*hidden_states.shape[:2], -1)

    def _normed(self, stage: str, states: torch.Tensor) -> torch.Tensor:
        return self._norm(states) if stage == self._norm_stage and self._norm is not None else states

    def _rotated(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        assert self._rotate is not None
        rest = states[..., self._rotary_size :]
        rotary = self._rotate(states[..., : self._rotary_size], cos, sin)
        return torch.cat((rotary, rest), dim=-1) if rest.shape[-1] > 0 else rotary

    def _is_half_split(self) -> bool:
        """Return whether the model's rotary function pairs channels of the first half with those of the second."""
        assert self._rotate is not None
        size = self._rotary_size
        states = _any_numbers(1, 2, 1, size)
        cosines, sines = _any_numbers(1, 1, size).cos(), _any_numbers(1, 1, size)
        first, second = states.chunk(2, dim=3)
        expected = states * cosines[:, None] + torch.cat((-second, first), dim=3) * sines[:, None]
        try:
            rotated = self._rotate(states, cosines, sines)
        except (IndexError, RuntimeError, TypeError, ValueError):
            # Cosines and sines of another shape
            return False
        return rotated.shape == expected.shape and torch.allclose(rotated, expected, 1e-4, 1e-6)

    def _rotates_by_kernel(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        norm, numbers = self._norm, self._norm_numbers
        return (
            self._has_kernel
            and states.shape[1] == 1
            and (norm is None or numbers is not None and _is_unhooked(norm) and norm.weight.shape == (self.head_dim,))
            and cos.shape[1:] == sin.shape[1:] == (1, self._rotary_size)
            and states.stride(2) == cos.stride(2) == sin.stride(2) == 1
            and choose_token_kernel(states)[0] == "triton"
        )

    def _rotated_by_kernel(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Norm and rotate projected states `[B, 1, H * D]` of single tokens: `[B, H, 1, D]`."""
        batch_size = len(states)
        weight = None if self._norm is None else self._norm.weight
        result = states.new_empty(batch_size, self.num_heads, 1, self.head_dim)
        strides = [0 if len(each) == 1 else each.stride(0) for each in (cos, sin)]
        with on_device_of(states):
            self._launches.run(
                (states.shape, states.dtype, cos.dtype, states.device, None if weight is None else weight.dtype),
                lambda: load_triton().prepare_rotation(
                    states, cos, sin, self.head_dim, weight, *(self._norm_numbers or ())
                ),
                states_ptr=states,
                stride_b=states.stride(0),
                **({} if weight is None else {"weight_ptr": weight}),
                cosine_ptr=cos,
                cosine_stride_b=strides[0],
                sine_ptr=sin,
                sine_stride_b=strides[1],
                result_ptr=result,
            )
        return result

    def _count_groups(self, module: nn.Module, num_key_value_heads: int) -> int:
        """Count the equal parts of the projection's output that begin with queries; heads are in order."""
        width = first_of(self._projection, ("out_features", "nf"))
        own_width = self.num_heads * self.head_dim
        if self._projection_name == "q_proj":
            # Queries alone or, from Qwen3-Next on, queries and gate of each head
            expected = [own_width, 2 * own_width]
        else:
            expected = [own_width + 2 * num_key_value_heads * self.head_dim]
        if width not in (None, *expected):
            raise ValueError(f"`{self._projection_name}` of {self._name} has {width} outputs, not {expected[0]}")
        if self._projection_name == "q_proj":
            return self.num_heads if width == expected[1] else 1
        if getattr(module, "new_decoder_architecture", False):
            return num_key_value_heads
        is_by_heads = self._projection_name == "query_key_value" or first_of(module, ("multi_query",)) is not None
        return self.num_heads if is_by_heads and not getattr(module, "multi_query", False) else 1

    def _find_norm_stage(self) -> str:
        """Return the stage at which the query norm is applied, by the size of the norm's weight."""
        weight = getattr(self._norm, "weight", None)
        if self._norm is not None and self._norm is getattr(self._module, "query_layernorm", None):
            return "rotated"
        if weight is None:
            return "transposed"
        return "projected" if weight.shape == (self.num_heads * self.head_dim,) else "split"

    def _find_rotary_function(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the model's own rotary function, of queries, cosine and sine."""
        function: Callable[..., Any] | None
        function = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if function is not None:
            names = list(inspect.signature(function).parameters)
            if names[:3] == ["x", "cos", "sin"]:
                return function
            if names[:4] == ["q", "k", "cos", "sin"]:
                # The function needs keys: those of no head
                return lambda states, cos, sin: function(states, states[:, :0], cos, sin)[0]
        raise ValueError(
            f"{self._name} takes position embeddings, but its code has no function `apply_rotary_pos_emb` of queries, "
            "keys, cosine and sine"
        )


def _is_plain(projection: Any) -> bool:
    """Return whether a projection is its weight and bias alone: not quantized, adapted, hooked or sharded."""
    is_known = type(projection) in (nn.Linear, Conv1D) and type(projection.weight) is nn.Parameter
    return is_known and _is_unhooked(projection)


def _is_unhooked(module: nn.Module) -> bool:
    """Return whether a module computes its own `forward` alone, which Accelerate replaces."""
    return not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)


def _any_numbers(*shape: int) -> torch.Tensor:
    """Make numbers without any regularity, on the CPU."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu").square()).view(shape)


def find_attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """
    Return the self-attention modules of a model's text decoder by their `layer_idx`, in that order, without linear
    attention; a `ValueError` if the model is an encoder-decoder, has no such module, or two with the same index.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"`{type(model).__name__}` has an encoder: only the attention of decoders is known")
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or {}
    found: dict[int, nn.Module] = {}
    for module in model.get_decoder().modules():
        layer_idx = getattr(module, "layer_idx", None)
        is_cross = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
        if not isinstance(layer_idx, int) or is_cross or not first_of(module, PROJECTION_NAMES + _COMPRESSED_NAMES):
            continue
        if layer_types and layer_types[layer_idx] == "linear_attention":
            continue
        if found.setdefault(layer_idx, module) is not module:
            raise ValueError(
                f"two attention modules of `{type(model).__name__}` have the `layer_idx` {layer_idx}: "
                f"a `{type(found[layer_idx]).__name__}` and a `{type(module).__name__}`"
            )
    if not found:
        raise ValueError(
            f"`{type(model).__name__}` has no attention modules with a `layer_idx` and one of the query projections "
            f"{_quoted(PROJECTION_NAMES)}"
        )
    return dict(sorted(found.items()))


def _reason_to_refuse(module: nn.Module, layer_config: PreTrainedConfig, parameters: set[str]) -> str | None:
    """Return why attention of `module` is no product of keys with queries that follow from its input; else `None`."""
    if first_of(module, _COMPRESSED_NAMES) is not None:
        return "makes its queries and keys of a compressed part (multi-head latent attention)"
    projection = first_of(module, PROJECTION_NAMES)
    if projection is None:
        return f"has none of the query projections {_quoted(PROJECTION_NAMES)}"
    own = list(inspect.signature(type(projection).forward).parameters.values())[2:]
    needed = [each.name for each in own if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed:
        return f"has a query projection that takes {_quoted(tuple(needed))} beside its input"
    # Bloom and MPT always add them; Falcon has an option
    if {"alibi", "position_bias"} & parameters and getattr(layer_config, "alibi", True):
        return "adds positions to attention scores (ALiBi), which queries do not hold"
    if first_of(module, ("rel_logits_proj",)) is not None:
        return "adds relative positions to attention scores, which queries do not hold"
    if "position_embeddings" not in parameters and first_of(module, _OWN_POSITION_NAMES) is not None:
        return "looks up positions itself: it takes no `position_embeddings`"
    rope_parameters = getattr(layer_config, "rope_parameters", None) or {}
    if "attention_scaling" in parameters or rope_parameters.get("llama_4_scaling_beta") is not None:
        return "scales its queries by their positions, which position embeddings do not hold"
    if first_of(module, ("sinks",)) is not None:
        return "has attention sinks (`sinks`): probabilities do not follow from queries and keys alone"
    softcap = first_of(module, ("attn_logit_softcapping",))
    if softcap is not None and layer_config._attn_implementation != "sdpa":
        return f"caps attention scores: `attn_logit_softcapping` has to be `None`, but is {softcap}"
    return None


def first_of(module: nn.Module, names: tuple[str, ...]) -> Any:
    """Return the first of these attributes that a module has and that is not `None`."""
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
