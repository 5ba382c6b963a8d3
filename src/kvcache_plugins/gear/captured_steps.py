"""Whole decode steps of a model with a GEAR cache as one CUDA graph: `GEARCache.captured_steps`.

Between two packings of a chunk a step stores a token and attends, and nothing else. So it is recorded once, over
layers whose storage has its room ahead and stays where it is (`FixedForm`), and replayed for every token after that:

    [ prefix ] [ blocks ] [ open block: room for tokens to come ] [ buffer: room for all that wait ]

What changes from step to step is the token and its position, which are copied to where the recording reads them, and
lengths, which stand on the device (`StepNumbers`) and are counted on by the recording. Any other call of the model is
run as it is: prompts, several tokens at once, and the step before which a chunk is packed. Whatever grows beyond its
room, or is put elsewhere by a crop or a reordering, ends the form, and another one is made. Where there are no CUDA
graphs the model is run with just that, so that a step can be looked at anywhere.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils.generic import ModelOutput

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import (
    MAX_NUM_QUERIES,
    choose_kernel,
    choose_token_kernel,
    compiles_kernels,
    explain_kernel,
)
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.lazy_states import LazyLayer, stored_states
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument, find_cache


# Arguments of a model that are other tensors in every step; its mask hides what the cache hides anyway
_INPUTS = ("input_ids", "position_ids", "cache_position")
_CONSTANTS = (bool, int, float, str, type(None))
# Times in a row that a recording was of use once or never
_MOST_MOVES = 4


class StepNumbers:
    """
    Numbers that change from one token to the next, on the device. All layers are alike.

    Args:
        device (`torch.device`): where kernels read them.

    Attributes:
        stored (`torch.Tensor` of shape `[1]`): tokens of the block that decoded tokens join.
        exact (`torch.Tensor` of shape `[1]`): tokens of the buffer, with the one that is being stored.
        place (`torch.Tensor` of shape `[1]`): where in the buffer that one goes.
        total (`torch.Tensor` of shape `[]`): tokens before it.
        held (three `int`, *optional*): tokens of the open block, of the buffer, and of all that the device holds, as
            far as the host knows.
    """

    def __init__(self, device: torch.device):
        self._numbers = torch.zeros(4, dtype=torch.int64, device=device)
        self._growth = torch.tensor([0, 1, 1, 1], device=device)
        self.stored, self.exact, self.place = self._numbers[:3].split(1)
        self.total = self._numbers[3]
        self.held: tuple[int, int, int] | None = None

    def set(self, numbers: tuple[int, int, int]) -> None:
        """Has the device hold numbers before a step."""
        if numbers != self.held:
            stored, exact, total = numbers
            self.held = None
            self._numbers.copy_(torch.tensor([stored, exact + 1, exact, total]))
            self.held = numbers

    def advance(self) -> None:
        """Counts on by a token, on the device."""
        self._numbers.add_(self._growth)


class FixedBuffer(ResidualBuffer):
    """
    A buffer that stays where it is, as long as what waits fits into its room.

    Args:
        keys, values (`torch.Tensor` of shape `[B, H, 0, D]`): states of its kind.
        limit (`int`): the most that waits in ordinary decoding.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        super().__init__(keys, values, limit)
        # A few tokens at once may come on top, as in assisted decoding
        self._resize(limit + MAX_NUM_QUERIES)

    def drop_first(self, count: int) -> None:
        """See `ResidualBuffer.drop_first`; the room stays."""
        self._write_left()
        self.length -= count
        for states in self.storage:
            states[:, :, : self.length] = states[:, :, count : count + self.length].clone()

    def released(self) -> ResidualBuffer:
        """See `ResidualBuffer.released`: an empty one, in the same place."""
        self.length, self.left = 0, None
        return self

    def ordinary(self) -> ResidualBuffer:
        """Returns a buffer of the same tokens that grows."""
        buffer = ResidualBuffer(self.keys[:, :, :0], self.values[:, :, :0], self.limit)
        buffer.append(self.keys, self.values)
        return buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidualBuffer:
        # Copies of a cache are not replayed
        copied = memo[id(self)] = self.ordinary()
        return copied


class FixedForm:
    """
    A layer that stands still. Making it moves what the layer stores to where there is room.

    Args:
        layer (`CompressedLayer`): the layer, which `can_stand_still`.
        num_tokens (`int`): decoded tokens that there shall be room for.
    """

    def __init__(self, layer: CompressedLayer, num_tokens: int):
        shapes = [layer.states_shape(side) for side in ("keys", "values")]
        keys, values = (
            torch.empty(*shape[:2], 0, shape[3], dtype=layer.dtype, device=layer.device) for shape in shapes
        )
        self.layer, self.buffer = layer, FixedBuffer(keys, values, layer.packing.residual_length)
        self._packing = layer.packing
        layer.end_recent()
        held = layer.buffer
        if held is not None and held.length:
            self.buffer.append(held.keys, held.values)
        layer.buffer, layer._prepared = self.buffer, None
        if not layer._is_open:
            heads = layer.batch_size, layer._shapes["keys"][1]
            layer.blocks.append(layer.packing.blank(layer.codec, *heads, layer.exact_start, layer.device))
            layer._is_open = True
        self.block = layer.blocks[-1]
        layer.blocks = [block for block in layer.blocks if block.length or block is self.block]
        if self.block.capacity < self.block.length + num_tokens:
            self.block.reserve(self.block.length + num_tokens)
        self._places, self._closed_lengths = self._all_places(), self._lengths()

    def _all_places(self) -> list[object]:
        """Whatever would be another if something stood elsewhere."""
        layer = self.layer
        prefix = () if layer.prefix is None else (layer.prefix.keys, layer.prefix.count)
        blocks = (each for block in layer.blocks for each in (block, block.keys))
        return [layer.padding, layer.buffer, layer.codec, *blocks, *prefix, *self.buffer.tensors()]

    def _lengths(self) -> list[int]:
        """Tokens of the blocks that no tokens join."""
        return [block.length for block in self.layer.blocks[:-1]]

    def stays(self) -> bool:
        """Whether all that the layer stores is where it was."""
        before, now = self._places, self._all_places()
        is_same = len(before) == len(now) and all(mine is theirs for mine, theirs in zip(before, now, strict=True))
        return is_same and self._lengths() == self._closed_lengths

    def has_room(self) -> bool:
        """Whether another token is stored in the buffer, with nothing packed before it."""
        return is_waiting(self.layer) and self.buffer.length < self.buffer.capacity

    def numbers(self) -> tuple[int, int, int]:
        """Tokens of the open block, of the buffer, and of all."""
        return self.block.length, self.buffer.length, self.layer.get_seq_length()

    def count_token(self) -> None:
        """Takes down that a token has been stored and attended to."""
        self.layer._num_new = 1
        self.layer._length += 1
        self.buffer.length += 1
        self.layer._counters["attend_calls"] += 1
        self.layer._counters["fused_calls"] += 1

    def parts(self, numbers: StepNumbers) -> list[Any]:
        """All parts that attention goes over, with the token that is being stored, and lengths on the device."""
        layer, block = self.layer, self.block
        parts = list(layer.packed_parts(None))
        last = parts.pop() if block.length else block.part(layer.codec, layer.padding, None)
        parts.append(dataclasses.replace(last, length=block.capacity, num_tokens=numbers.stored, kept={}))
        # With all columns, so that no step makes them
        parts = [dataclasses.replace(part, mask=slice_mask(part.mask, 0, part.length)) for part in parts]
        keys, values = self.buffer.tensors()
        return [*parts, DensePart(keys, values, keys.shape[2], None, numbers.exact)]

    def attend(self, query: torch.Tensor, parts: list[Any], scale: float | None) -> torch.Tensor:
        """Attention over parts whose lengths are on the device, which is read where that costs nothing."""
        layer, kernel = self.layer, choose_kernel(query)[0]
        if kernel != "triton":
            if query.device.type != "cpu":
                raise ValueError(f"`captured_steps` is not for attention of {query.shape[2]} queries a token")
            parts = [
                part if part.num_tokens is None else dataclasses.replace(part, length=int(part.num_tokens))
                for part in parts
            ]
            parts = [part for part in parts if part.length]
            kernel = layer.packing.choose(layer.codec, query)[0]
        return attend(query, parts, layer._shapes["keys"][1], scale, kernel)

    def end(self) -> None:
        """Makes it an ordinary layer with the same contents, and gives the room back."""
        layer, buffer = self.layer, self.layer.buffer
        layer.buffer, layer._prepared = buffer.ordinary() if isinstance(buffer, FixedBuffer) else buffer, None
        layer.packing = self._packing
        newest = layer.blocks[-1] if layer.blocks else None
        layer.blocks = [block for block in layer.blocks if block.length]
        layer.after_cut(newest)
        if layer.blocks:
            layer.blocks[-1].reserve(layer.blocks[-1].length)


def is_waiting(layer: CompressedLayer) -> bool:
    """Whether the next token is stored with nothing done before it."""
    return layer._pending is None and not layer.is_buffer_full


def can_stand_still(layer: CompressedLayer) -> bool:
    """Whether a step of one token would only be stored in the buffer, and attended to with packed tokens."""
    if not layer.is_initialized or not is_waiting(layer) or layer._needs_queries:
        return False
    first = next((block for block in layer.blocks if block.length), None)
    # Padding is of the first prompt, and hidden by masks of its own part
    return first is not None and (
        layer.padding is None or int(layer.padding.max()) <= first.start + first.length <= layer.exact_start
    )


class StepLayer(LazyLayer):
    """
    Stands for a layer while a step is recorded: lengths stand on the device, and nothing is moved.

    Args:
        form (`FixedForm`): of the layer that it stands for.
        numbers (`StepNumbers`): of the step.
    """

    def __init__(self, form: FixedForm, numbers: StepNumbers):
        super().__init__()
        self._form, self._numbers, self._parts = form, numbers, form.parts(numbers)
        # That its states look as if they were of, the same in every step
        self._length = form.layer.get_seq_length() + 1
        self.dtype, self.device, self.is_initialized = form.layer.dtype, form.layer.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a token `[B, H, 1, D]` in the buffer, and returns all states, lazily."""
        for storage, states in zip(self._form.buffer.storage, (key_states, value_states), strict=True):
            storage.index_copy_(2, self._numbers.place, states.to(storage.dtype))
        shapes = self.states_shape("keys"), self.states_shape("values")
        return stored_states(self, *shapes, self._length, self.dtype, self.device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`."""
        if call.mask is not None or not call.is_plain:
            raise ValueError("`captured_steps` is not for models that add to the scores of attention")
        return self._form.attend(call.query, self._parts, call.scale)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """See `LazyLayer.states_shape`."""
        batch_size, num_heads, _, head_dim = self._form.layer.states_shape(side)
        return batch_size, num_heads, self._length, head_dim

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Tokens before the new one, on the device, as Transformers' own static layers have them for positions."""
        return self._numbers.total

    def lazy_length(self) -> int:
        """See `LazyLayer.lazy_length`."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is made of it, as one token sees all; padding is hidden by masks of the parts."""
        return self._length, 0

    def dense_tiles(self, sides: Collection[str]) -> Iterator[Any]:
        """Refused, as is all that follows from it."""
        _refuse()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the layer that it stands for is initialized."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing of its own."""
        return iter(())

    def num_values(self) -> int:
        """Nothing of its own."""
        return 0

    def stats(self) -> dict[str, float]:
        """Nothing of its own."""
        return {}

    def materialize(self, side: str) -> torch.Tensor:
        """Refused."""
        _refuse()

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refused."""
        _refuse()

    def crop_tokens(self, count: int) -> None:
        """Refused."""
        _refuse()


def _refuse() -> NoReturn:
    raise ValueError(
        "`captured_steps` is for models whose attention is `sdpa`, over keys and values as they are cached"
    )


class StepCache(Cache):
    """The layers of a step, given the number of tokens before it."""

    def __init__(self, layers: list[StepLayer], length: int):
        super().__init__(layers=list[Any](layers))
        self._length = length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Only masks are made of it, and none is."""
        return self._length


class RecordedStep:
    """
    A step that has been recorded, and not run: on a GPU one CUDA graph.

    Args:
        forward (`Callable`): the model's.
        cache (`StepCache`): what it is given as its cache.
        numbers (`StepNumbers`): of the cache.
        inputs (`Mapping[str, torch.Tensor]`): arguments that change from step to step, as in the one to come.
        constants (`Mapping[str, object]`): those that do not.

    Attributes:
        num_replays (`int`): how often it has been run.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: StepCache,
        numbers: StepNumbers,
        inputs: Mapping[str, torch.Tensor],
        constants: Mapping[str, object],
    ):
        self._forward, self._cache, self._numbers = forward, cache, numbers
        # Made in inference mode they could not be written to outside
        with torch.inference_mode(False):
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._constants = dict(constants)
        self.num_replays = 0
        device = next(iter(inputs.values())).device
        self._graph = self._record(device) if device.type == "cuda" else None

    def __call__(self, inputs: Mapping[str, torch.Tensor], cache: object) -> Any:
        """
        The outputs of a step with other inputs, which stay as they are in later ones; the cache among them is `cache`.
        """
        for name, place in self._inputs.items():
            place.copy_(inputs[name])
        # Until the step is known to have been, the host does not know what the device holds
        numbers, before = self._numbers, self._numbers.held
        numbers.held = None
        if self._graph is None:
            self._outputs = self._run()
            numbers.advance()
        else:
            self._graph.replay()
        assert before is not None
        numbers.held = before[0], before[1] + 1, before[2] + 1
        self.num_replays += 1
        return _copy(self._outputs, cache)

    def _run(self) -> Any:
        return self._forward(**self._inputs, **self._constants, **as_argument(self._cache))

    def _record(self, device: torch.device) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Kernels are compiled and libraries choose theirs. The token that it stores is stored there again
            self._run()
        current.wait_stream(stream)
        try:
            with torch.cuda.device(device), torch.cuda.graph(graph):
                self._outputs = self._run()
                self._numbers.advance()
        except RuntimeError as error:
            raise ValueError(
                f"`captured_steps`: the model's step cannot be captured in a CUDA graph: {error}"
            ) from error
        return graph


def _copy(value: Any, cache: object) -> Any:
    """Outputs that the next step does not overwrite."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, StepCache):
        return cache
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _copy(each, cache) for name, each in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(_copy(each, cache) for each in value)
    return value


class StepMasks:
    """
    Masks of steps, which may hide what a recording hides, the padding, and nothing else.

    A recording has no mask of its caller's: `generate` appends ones to what it began with. Any other caller may do
    something else, and only the device knows what a mask holds. So it is compared there, with nothing read, and what
    came of it is asked for where the host waits anyway.

    Args:
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every sequence that are hidden.
    """

    def __init__(self, padding: torch.Tensor | None):
        self._padding = padding
        self._is_right: torch.Tensor | None = None

    def hides_padding_alone(self, mask: torch.Tensor) -> torch.Tensor:
        """Whether a mask `[B, tokens]` hides nothing else, on its device."""
        if self._padding is None:
            return mask.all()
        self._padding = self._padding.to(mask.device)
        return (mask.bool() == (torch.arange(mask.shape[1], device=mask.device) >= self._padding[:, None])).all()

    def add(self, mask: torch.Tensor) -> None:
        """Takes the mask of a step into account; nothing is read."""
        is_right = self.hides_padding_alone(mask)
        self._is_right = is_right if self._is_right is None else self._is_right.logical_and(is_right)

    def check(self) -> None:
        """Raises a `ValueError` if a mask since the last check hid anything else. The host waits for the device."""
        is_right, self._is_right = self._is_right, None
        if is_right is not None and not bool(is_right):
            raise ValueError(
                "`captured_steps`: `attention_mask` hides other tokens than the padding of the prompt in a step that "
                "was replayed, where they were attended to: tokens since the last chunk was compressed may be wrong. "
                "It may only grow by ones; use the cache outside of `captured_steps` with any other"
            )


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
        """Sorts the arguments of a call; `None` if they are not for one token, or of another kind."""
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
        """Equal for calls that one recording is of use for."""
        layouts = [(name, each.shape, each.dtype, each.device) for name, each in self.inputs.items()]
        return (*layouts, self.mask is None, tuple(self.constants.items()))


class CapturedSteps:
    """
    A context in which steps of one token are recorded and replayed; see `GEARCache.captured_steps`.

    Args:
        cache (`Cache`): a cache of `CompressedLayer`s.
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
        forms, self._forms, self._step = self._forms, [], None
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

    def _layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, CompressedLayer)]

    def _compile(self) -> None:
        """Compiles what all steps to come will run, once a prompt has told whether there is padding."""
        layers = [layer for layer in self._layers() if layer.is_initialized]
        is_padded = any(layer.padding is not None for layer in layers)
        if layers and not self._is_warm[is_padded]:
            self._warm_up(self.model, padded=is_padded)
            self._is_warm[is_padded] = True

    def _can_replay(self, call: StepCall) -> bool:
        """Whether the call is one for the recording, or for one that can be made."""
        if torch.is_grad_enabled() or self.model.training or not self._stand_still():
            return False
        layer = self._forms[0].layer
        if call.mask is not None and call.mask.shape[1] != layer.get_seq_length() + 1:
            return False
        if self._step is not None and call.kind == self._kind:
            return True
        self._masks.check()
        self._masks = StepMasks(layer.padding)
        if call.mask is not None:
            # Some models count positions by the mask
            is_counted = layer.padding is not None and "position_ids" not in call.inputs
            if is_counted or not bool(self._masks.hides_padding_alone(call.mask)):
                return False
        self._step, self._kind = None, call.kind
        return True

    def _stand_still(self) -> bool:
        """Whether all layers stand still and have room for another token; has them do so, if that is all."""
        if not self._forms or not all(form.stays() for form in self._forms):
            self._check_layers()
            layers = self._layers()
            if not layers or not all(can_stand_still(layer) for layer in layers):
                return False
            self._count_move()
            self._step = None
            with torch.inference_mode(False), torch.no_grad():
                self._forms = [FixedForm(layer, self.num_tokens) for layer in layers]
        is_alike = len({form.numbers() for form in self._forms}) == 1
        return is_alike and all(form.has_room() for form in self._forms)

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
            layers = [StepLayer(form, self._numbers) for form in self._forms]
            cache = StepCache(layers, self._forms[0].layer.get_seq_length())
            constants = call.constants if call.mask is None else {**call.constants, "attention_mask": None}
            self._step = RecordedStep(self._forward, cache, self._numbers, call.inputs, constants)
            self.num_recorded += 1
        if call.mask is not None:
            self._masks.add(call.mask)
        outputs = self._step(call.inputs, self.cache)
        for form in self._forms:
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
        # Without a config a cache knows nothing of the model's windows, which masks hide that grow with the sequence
        elif any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=config).layers):
            refused = "models with layers that attend to a window"
        if refused is not None:
            raise ValueError(f"`captured_steps` is not for {refused}: decode outside of it")

    def _check_layers(self) -> None:
        for index, layer in enumerate(self.cache.layers):
            reason = None
            if not isinstance(layer, CompressedLayer) or type(layer) is not CompressedLayer:
                reason = "layers that keep states of another kind"
            elif layer.has_index:
                reason = "layers of indexed sparse attention"
            if reason is not None:
                raise ValueError(f"`captured_steps` is not for {reason}, such as layer {index}: decode outside of it")
