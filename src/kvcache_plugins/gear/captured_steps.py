"""Whole decode steps of a model with a GEAR cache as one CUDA graph: `GEARCache.captured_steps`.

Between two compressions of a chunk a step stores a token and attends, and nothing else. So it is recorded once
(`recorded_step`), over layers that stand still (`fixed_storage`), and replayed for every token after that. Any other
call of the model is run as it is: prompts, several tokens at once, and the step before which a chunk is compressed.
After it the recording still holds, as nothing has moved and lengths stand on the device (`step_numbers`).
"""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.kernels.engine import choose_token_kernel, compiles_kernels, explain_kernel
from kvcache_plugins.layers.recurrent_states import RecurrentStates
from kvcache_plugins.models.cache_argument import CACHE_NAMES, find_cache

from .fixed_storage import FixedForm
from .fixed_window import FixedWindow
from .recorded_step import RecordedStep
from .replayable import ReplayableMixin
from .step_cache import StepCache
from .step_masks import StepMasks
from .step_numbers import StepNumbers


# Arguments of a model that are other tensors in every step; its mask hides what the cache hides anyway (`step_masks`)
_INPUTS = ("input_ids", "position_ids", "cache_position")
_CONSTANTS = (bool, int, float, str, type(None))
_WINDOWED = "sliding_attention"
# Times in a row that a recording was of use once or never
_MOST_MOVES = 4


class StepCall(NamedTuple):
    """
    A call of a model for one token.

    Args:
        inputs (`dict[str, torch.Tensor]`): arguments that are other tensors in every step.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): which tokens are no padding.
        constants (`dict[str, object]`): all other arguments.
    """

    inputs: dict[str, torch.Tensor]
    mask: torch.Tensor | None
    constants: dict[str, object]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> "StepCall | None":
        """What arguments are; `None` if they are not for one token, or of another kind."""
        rest = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
        mask = rest.pop("attention_mask", None)
        inputs = {name: rest.pop(name) for name in _INPUTS if rest.get(name) is not None}
        ids = inputs.get("input_ids")
        is_token = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] == 1
        is_plain = mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2)
        if not is_token or not is_plain or not all(isinstance(value, _CONSTANTS) for value in rest.values()):
            return None
        return cls(inputs, mask, rest)

    @property
    def kind(self) -> tuple[object, ...]:
        """What has to be the same for a recording to be of use."""
        layouts = [(name, each.shape, each.dtype, each.device) for name, each in self.inputs.items()]
        return (*layouts, self.mask is None, tuple(self.constants.items()))


class CapturedSteps:
    """
    A context in which steps of one token are recorded and replayed; see `GEARCache.captured_steps`.

    Args:
        cache (`Cache`): a cache of `ReplayableMixin`s.
        model (`PreTrainedModel`): the model.
        num_tokens (`int`): decoded tokens that there is room for before anything is moved.
        warm_up (`Callable`): compiles what steps run, captured ones too, of a model and of whether there is padding
            (`padded=`).

    Attributes:
        num_recorded, num_replayed, num_others (`int`): steps that were recorded, that were replayed, and all other
            calls of the model.
    """

    def __init__(self, cache: Cache, model: PreTrainedModel, num_tokens: int, warm_up: Callable[..., None]):
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 1:
            raise ValueError(f"`num_tokens` has to be an integer of at least 1 but got {num_tokens!r}")
        self.cache, self.model, self.num_tokens, self._warm_up = cache, model, num_tokens, warm_up
        self.num_recorded = self.num_replayed = self.num_others = 0
        # Of all layers, and of those that are compressed
        self._all_forms: list[FixedForm | FixedWindow] = []
        self._forms: list[FixedForm] = []
        self._step: RecordedStep | None = None
        self._kind: tuple[object, ...] = ()
        self._num_moves = 0
        self._masks = StepMasks(None)

    def __enter__(self) -> "CapturedSteps":
        self._check_model()
        self._check_layers()
        device = self.model.device
        if device.type == "cuda" and choose_token_kernel(torch.empty(0, device=device))[0] != "triton":
            raise ValueError(f"`captured_steps` needs Triton's kernels: {explain_kernel('cuda')[1] or 'not chosen'}")
        self._numbers = StepNumbers(device)
        # With and without padding
        self._is_warm = dict.fromkeys((False, True), not compiles_kernels(torch.empty(0, device=device)))
        self._compile()
        self._forward = self.model.forward
        self._names = list(inspect.signature(self._forward).parameters)
        self._own_forward = vars(self.model).get("forward")
        self.model.forward = self._replaying_forward()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_forward is None:
            del self.model.forward
        else:
            self.model.forward = self._own_forward
        forms, self._all_forms, self._forms, self._step = self._all_forms, [], [], None
        for form in forms:
            form.end()
        if error is None:
            self._masks.check()

    def _replaying_forward(self) -> Any:
        forward = self._forward

        @functools.wraps(forward)
        def replaying_forward(*args: Any, **kwargs: Any) -> Any:
            # In a graph of `torch.compile` a layer is an operator: see `graph_states`
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            arguments = dict(zip(self._names, args, strict=False)) | kwargs
            if find_cache(arguments) is not self.cache:
                return forward(*args, **kwargs)
            call = StepCall.of(arguments)
            if call is None or not self._can_replay(call):
                self._masks.check()
                self.num_others += 1
                outputs = forward(*args, **kwargs)
                self._compile()
                return outputs
            return self._replay(call)

        return replaying_forward

    def _compile(self) -> None:
        """Compiles what all steps to come will run, once a prompt has told whether there is padding."""
        layers = [layer for layer in self.cache.layers if isinstance(layer, ReplayableMixin) and layer.is_initialized]
        is_padded = any(layer.padding is not None for layer in layers)
        if layers and not self._is_warm[is_padded]:
            self._warm_up(self.model, padded=is_padded)
            self._is_warm[is_padded] = True

    def _can_replay(self, call: StepCall) -> bool:
        """Whether the call is one for the recording, or for one that can be made."""
        if torch.is_grad_enabled() or self.model.training or not self._stand_still():
            return False
        length = self._forms[0].layer.get_seq_length()
        if call.mask is not None and call.mask.shape[1] != length + 1:
            return False
        if self._step is not None and call.kind == self._kind:
            return True
        self._masks.check()
        padding = self._forms[0].layer.padding
        self._masks = StepMasks(padding)
        if call.mask is not None:
            # Some models count positions by the mask
            is_counted = padding is not None and "position_ids" not in call.inputs
            if is_counted or not self._masks.fits(call.mask):
                return False
        self._step, self._kind = None, call.kind
        return True

    def _stand_still(self) -> bool:
        """Whether all layers stand still and have room for another token; has them do so, if that is all."""
        if not self._forms or not all(form.stays() for form in self._all_forms):
            self._check_layers()
            layers = [layer for layer in self.cache.layers if isinstance(layer, ReplayableMixin)]
            windows = [layer for layer in self.cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
            is_ready = all(layer.is_waiting() and layer.is_replayable() for layer in layers)
            if not layers or not is_ready or not all(layer.is_initialized for layer in windows):
                return False
            self._count_move()
            self._step = None
            with torch.inference_mode(False), torch.no_grad():
                self._all_forms = [self._form_of(layer, layers[0].padding) for layer in self.cache.layers]
            self._forms = [form for form in self._all_forms if isinstance(form, FixedForm)]
        length = self._forms[0].layer.get_seq_length()
        fixed = [form for form in self._all_forms if isinstance(form, FixedWindow)]
        is_alike = len({form.numbers() for form in self._forms}) == 1 and all(each.is_at(length) for each in fixed)
        if not is_alike or not all(form.has_room() for form in self._forms):
            return False
        for window in fixed:
            window.take_up()
        return True

    def _form_of(self, layer: object, padding: torch.Tensor | None) -> FixedForm | FixedWindow:
        if isinstance(layer, ReplayableMixin):
            return FixedForm(layer, self.num_tokens)
        assert isinstance(layer, DynamicSlidingWindowLayer), "what `_check_layers` lets through"
        return FixedWindow(layer, padding)

    def _count_move(self) -> None:
        """Notices when recordings are of no use."""
        is_useless = bool(self._forms) and (self._step is None or self._step.num_replays < 2)
        self._num_moves = self._num_moves + 1 if is_useless else 0
        if self._num_moves == _MOST_MOVES:
            raise ValueError(
                "`captured_steps` is of no use where what the cache stores is put elsewhere before every token, as "
                "beam search does: use the cache outside of it"
            )

    def _replay(self, call: StepCall) -> Any:
        self._numbers.set(self._forms[0].numbers())
        if self._step is None:
            cache = StepCache(self._all_forms, self._numbers, self._forms[0].layer.get_seq_length())
            constants = call.constants if call.mask is None else {**call.constants, "attention_mask": None}
            self._step = RecordedStep(self._forward, cache, self._numbers, call.inputs, constants)
            self.num_recorded += 1
        if call.mask is not None:
            self._masks.add(call.mask)
        outputs = self._step(call.inputs, self.cache)
        for form in self._all_forms:
            form.count_token()
        self.num_replayed += 1
        return outputs

    def _check_model(self) -> None:
        config = self.model.config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {each.get("rope_type") for each in (rope, *(each for each in rope.values() if isinstance(each, dict)))}
        refused = None
        if self.model.config.is_encoder_decoder:
            refused = "encoder-decoder models"
        elif config._attn_implementation != "sdpa":
            refused = f"models whose attention is `{config._attn_implementation}`; only for `sdpa`"
        elif kinds & {"dynamic", "longrope"}:
            refused = "models whose rotary embedding goes by the length of the sequence (`dynamic`, `longrope`)"
        elif len({parameter.device for parameter in self.model.parameters()}) > 1:
            refused = "models on several devices"
        if refused is not None:
            raise ValueError(f"`captured_steps` is not for {refused}")

    def _check_layers(self) -> None:
        config, layers = self.model.config.get_text_config(decoder=True), self.cache.layers
        types = getattr(config, "layer_types", None) or []
        # Without a config a cache knows nothing of the model's windows, which masks hide that grow with the sequence
        for index, own in enumerate(DynamicCache(config=config).layers):
            is_known = index < len(layers) and getattr(layers[index], "is_sliding", False)
            if getattr(own, "is_sliding", False) and not is_known:
                raise _not_for("layers with a sliding window that the cache is not told of", index, "GEARCache(model)")
        for index, layer in enumerate(layers):
            reason: str | None = "layers that keep states of another kind"
            if type(layer) is DynamicSlidingWindowLayer:
                kind = types[index] if index < len(types) else _WINDOWED
                # What goes by chunks, or sees more than a window, has another mask
                reason = None if kind == _WINDOWED else f"layers of type `{kind}`"
            elif isinstance(layer, ReplayableMixin) and layer.is_sliding:
                raise _not_for("compressed layers with a sliding window", index, 'sliding="dense"')
            elif isinstance(layer, ReplayableMixin) and not isinstance(layer, RecurrentStates):
                reason = layer.why_never_replayed()
            if reason is not None:
                raise _not_for(reason, index, None)
        if layers and not any(isinstance(layer, ReplayableMixin) for layer in layers):
            raise ValueError("`captured_steps` is for caches that compress layers of the model, and this one does not")


def _not_for(reason: str, index: int, instead: str | None) -> ValueError:
    """The error of a layer, with an option that helps, if there is any."""
    advice = "decode outside of it" if instead is None else f"make the cache with `{instead}`, or decode outside of it"
    return ValueError(f"`captured_steps` is not for {reason}, such as layer {index}: {advice}")
