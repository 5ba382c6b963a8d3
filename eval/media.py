"""Pictures and sounds for tiny models: the inputs that a family takes, found by trying.

A picture or sound is an array that depends on the token before its placeholders, so that tokens determine everything
that a model reads. Families share names of inputs. Inputs are tried by name, in the shapes that families use, until
the model runs and its logits depend on the array.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel


Inputs = dict[str, torch.Tensor]

# Placeholder of a picture or sound
TOKEN = 96
# Begins a decoder's prompt
START = 3
# Other special tokens of a config
_OTHER_TOKEN = 4
_ATTRIBUTE = "survey_media"
_LEAST_TRACE = 1e-4


class Media(NamedTuple):
    """
    A form of pictures or sounds that a model takes.

    Attributes:
        size (`tuple[int, ...]`): shape of an array.
        name (`str`): the input that has the array.
        others (`Inputs`): further inputs, which are the same for all pictures.
        num_tokens (`int`): placeholders for each of them; 0 where a whole sequence has one and no token stands for it.
    """

    size: tuple[int, ...]
    name: str
    others: Inputs
    num_tokens: int

    def inputs(self, seeds: list[int]) -> Inputs:
        """Make the inputs of pictures or sounds, one for each seed."""
        if not seeds:
            return {}
        others = {name: torch.cat([each] * len(seeds)) for name, each in self.others.items()}
        return {self.name: torch.cat([_draw(self.name, self.size, seed) for seed in seeds]), **others}


def _draw(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """Draw an array of values between -1 and 1, or a source text."""
    generator = torch.Generator().manual_seed(seed)
    if name == "input_ids":
        return torch.randint(5, TOKEN - 1, size, generator=generator, device="cpu")
    return torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1


def media_of(model: PreTrainedModel) -> Media | None:
    """Return the form of pictures or sounds that was found for a model, if any."""
    found: Media | None = getattr(model, _ATTRIBUTE, None)
    return found


def media_inputs(model: PreTrainedModel, tokens: torch.Tensor, start: int = 0) -> Inputs:
    """Make the inputs beside tokens `[batch, length]`, of pictures and sounds that begin at `start` or later."""
    media = media_of(model)
    if media is None:
        return {}
    is_placeholder = tokens == TOKEN
    accepted = inspect.signature(model.forward).parameters
    if media.num_tokens:
        begins = is_placeholder & ~is_placeholder.roll(1, dims=1)
        begins[:, :start] = False
        rows, columns = begins.nonzero(as_tuple=True)
        inputs = media.inputs(tokens[rows, columns - 1].tolist())
    else:
        # The first token behind padding is the same in a batch and alone
        firsts = [int(row[row > _OTHER_TOKEN][0]) for row in tokens]
        inputs = media.inputs(firsts) if start == 0 or model.config.is_encoder_decoder else {}
    kinds = [name for name in ("token_type_ids", "mm_token_type_ids") if name in accepted]
    return {**inputs, **dict.fromkeys(kinds, is_placeholder.long())}


def find_media(model: PreTrainedModel) -> Media:
    """
    Find the form of pictures, sounds or source texts that a model takes, and keep it in an attribute. Raise a
    `ValueError` with the reasons if no known form fits.
    """
    _set_tokens(model.config)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            # A projection of zeros would hide the picture
            torch.nn.init.normal_(parameter, std=0.1)
    reason = ""
    accepted = set(inspect.signature(model.forward).parameters)
    for name, size, every in _forms(model):
        function = _feature_function(model, name)
        taken = accepted if function is None else accepted & set(inspect.signature(function).parameters)
        others = {other: value for other, value in every.items() if other in taken}
        try:
            media = Media(size, name, others, _count(model, name, size, others))
            answers = [_read(model, media, seed) for seed in (1, 2)]
        except Exception as error:  # noqa: BLE001 - a form that does not fit raises anything
            reason += f"{name} {list(size)}: {type(error).__name__}: {error}; "
            continue
        if (answers[0] - answers[1]).abs().max() > _LEAST_TRACE * answers[0].std():
            setattr(model, _ATTRIBUTE, media)
            return media
        reason += "its picture leaves no trace in the logits"
    raise ValueError(f"no form of pictures or sounds fits: {reason}")


def _set_tokens(config: PreTrainedConfig) -> None:
    """Give placeholders of pictures and sounds a token of their own in a config and its parts."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _set_tokens(value)
        elif "token" in name and name.endswith(("_id", "_index")) and isinstance(value, int | None):
            is_one = name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
            if is_one or any(each in name for each in ("image", "video", "vision", "audio")):
                setattr(config, name, TOKEN if is_one else _OTHER_TOKEN)


@torch.no_grad()
def _read(model: PreTrainedModel, media: Media, seed: int) -> torch.Tensor:
    """Compute the logits of the last token of a prompt with a picture."""
    tokens = torch.tensor([[7, 8, *[TOKEN] * media.num_tokens, 9, 10, 11]], dtype=torch.int64, device="cpu")
    setattr(model, _ATTRIBUTE, media)
    try:
        inputs = {**media_inputs(model, tokens), **media.inputs([seed])}
    finally:
        delattr(model, _ATTRIBUTE)
    own = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {"input_ids": tokens}
    logits: torch.Tensor = model(**inputs, **own).logits[:, -1].float()
    if not bool(logits.isfinite().all()):
        raise ValueError("its logits are not finite")
    return logits


def _forms(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...], Inputs]]:
    """List forms that a model may take, by the names of its forward's arguments."""
    accepted = inspect.signature(model.forward).parameters
    sizes = _numbers(model.config)
    if model.config.is_encoder_decoder and not {"pixel_values", "input_features", "input_values"} & set(accepted):
        # A source text
        yield "input_ids", (1, 30), {}
    if "pixel_values" in accepted:
        side, patch = sizes("image_size", 28), sizes("patch_size", 14)
        in_time, merge = sizes("temporal_patch_size", 1), sizes("spatial_merge_size", 1)
        # Pictures as patches in a row, with their number in each direction
        rows = 2 * max(merge, 1)
        grid = torch.tensor([[1, rows, rows]], dtype=torch.int64, device="cpu")
        others = {"image_grid_thw": grid, "image_merge_sizes": torch.tensor([merge], dtype=torch.int64, device="cpu")}
        for depth in dict.fromkeys((in_time, 1, 2)):
            yield "pixel_values", (rows * rows, 3 * depth * patch * patch), others
        for lead, edge in product(((1,), (1, 1), (1, 2)), dict.fromkeys((side, 28, 56, 4 * patch))):
            others = {
                "image_sizes": torch.tensor([[edge, edge]], dtype=torch.int64, device="cpu"),
                "pixel_attention_mask": torch.ones(*lead, edge, edge, dtype=torch.bool, device="cpu"),
                "image_attention_mask": torch.ones(1, 1, 1, dtype=torch.float32, device="cpu"),
            }
            yield "pixel_values", (*lead, 3, edge, edge), others
        for lead in ((rows * rows,), (1, rows * rows)):
            yield "pixel_values", (*lead, 3, patch, patch), {"image_grid_thw": grid}
        if "image_position_ids" in accepted:
            # Patches with a position each, pooled by the model or before
            pool = sizes("pooling_kernel_size", 1)
            for number, edge in ((2 * pool, patch), (2, pool * patch)):
                places = torch.cartesian_prod(*[torch.arange(number, dtype=torch.int64, device="cpu")] * 2)[None]
                yield "pixel_values", (1, number * number, 3 * edge * edge), {"image_position_ids": places}
        others = {
            "spatial_shapes": torch.tensor([[2, 2]], dtype=torch.int64, device="cpu"),
            "pixel_attention_mask": torch.ones(1, 4, dtype=torch.long, device="cpu"),
        }
        yield "pixel_values", (1, 4, 3 * patch * patch), others
    for name in ("input_features", "input_values"):
        if name not in accepted:
            continue
        frames, bins = 2 * sizes("max_source_positions", 32), sizes("num_mel_bins", 0)
        bins = bins or sizes("feature_projection_input_dim", 0) or sizes("input_dim", 80)
        shapes: list[tuple[int, ...]] = [(1, 4000)]
        if name == "input_features":
            shapes = [(1, bins, frames), (1, frames, bins)]
        for shape in shapes:
            mask = torch.ones(1, max(shape[1:]), dtype=torch.long, device="cpu")
            yield name, shape, dict.fromkeys(("input_features_mask", "feature_attention_mask", "padding_mask"), mask)


def _feature_function(model: PreTrainedModel, name: str) -> Callable[..., Any] | None:
    """Return the method that makes features of pictures or sounds, if placeholders stand for them."""
    method = "get_image_features" if name == "pixel_values" else "get_audio_features"
    holders = [each for each in (model, getattr(model, "model", None)) if hasattr(each, method)]
    return getattr(holders[0], method) if holders and not model.config.is_encoder_decoder else None


def _count(model: PreTrainedModel, name: str, size: tuple[int, ...], others: Inputs) -> int:
    """Count the features of a picture or sound, which is the number of its placeholders."""
    function = _feature_function(model, name)
    if function is None:
        return 0
    with torch.no_grad():
        features = function(**{name: _draw(name, size, 1), **others})
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, list | tuple) else [features]
    embedding: Any = model.get_input_embeddings()
    return int(sum(part.numel() for part in parts) // embedding.weight.shape[1])


def _numbers(config: PreTrainedConfig) -> Any:
    """Return a function that finds the smallest number of a name in a config and its parts."""
    found: dict[str, list[int]] = {}

    def walk(part: PreTrainedConfig) -> None:
        for name, value in vars(part).items():
            if isinstance(value, PreTrainedConfig):
                walk(value)
            elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
                found.setdefault(name, []).append(value[0])
            elif isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(name, []).append(value)

    walk(config)
    return lambda name, default: min(found.get(name, [default]))
