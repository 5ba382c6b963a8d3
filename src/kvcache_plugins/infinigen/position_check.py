"""Whether tokens go on from what a cache holds, by their positions."""

import torch

from kvcache_plugins.layers.prompt_layer import ANOTHER_PROMPT, PromptLayer


def check_positions(
    position_ids: torch.Tensor | None, layer: PromptLayer, attention_mask: torch.Tensor | None = None
) -> None:
    """
    Raises a `ValueError` if all positions of new tokens are among those of the tokens that a layer holds already.

    Args:
        position_ids (`torch.Tensor` of shape `[batch_size, new tokens]`, *optional*):
            Positions of the new tokens. Of another shape they do not count tokens.
        layer (`PromptLayer`): any layer of the cache, before it gets the new tokens.
        attention_mask (`torch.Tensor` of shape `[batch_size, heads or 1, new tokens, all tokens]`, *optional*):
            Tokens that it hides from the newest one are in no position.
    """
    if position_ids is None or position_ids.dim() != 2 or layer.get_seq_length() == 0:
        return
    # A decode step must not make the host wait for a GPU
    if position_ids.shape[1] == 1 and position_ids.device.type != "cpu":
        return
    num_tokens, last = _num_positions(layer, attention_mask), int(position_ids.max())
    if last < num_tokens:
        raise ValueError(
            f"`past_key_values` holds {num_tokens} tokens, but the new ones have positions up to {last}: they are of "
            f"another prompt; make {ANOTHER_PROMPT}"
        )


def _num_positions(layer: PromptLayer, attention_mask: torch.Tensor | None) -> int:
    """Held tokens that are neither padding nor hidden, of the item that has the fewest."""
    held = layer.get_seq_length()
    count = held - (0 if layer.padding is None else int(layer.padding.max()))
    if attention_mask is None or attention_mask.shape[-1] <= held or attention_mask.shape[-2] == 0:
        return count
    newest = attention_mask[:, 0, -1]
    is_seen = newest if newest.dtype == torch.bool else newest > torch.finfo(newest.dtype).min / 2
    # A mask that does not reach the newest token is one of another prompt, and tells nothing of the tokens held
    return min(count, int(is_seen[:, :held].sum(dim=1).min())) if bool(is_seen[:, -1].all()) else count
