"""Make a tiny Llama of three layers, token ids for it, and its logits token by token."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel


EVERYTHING = {"alpha": float("inf"), "max_fetch_ratio": 1.0, "full_layers": (), "speculate": True}
# The heaviest tenth of the tokens in every head
TENTH = {"alpha": float("inf"), "max_fetch_ratio": 0.1}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}


def make_model(config=None) -> PreTrainedModel:
    """The random model of a config, the same at every call; by default a Llama of two key/value heads of 16."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config or LlamaConfig(**GROUPED)).eval()


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_logits(model, cache, prompt, steps, mask=None) -> torch.Tensor:
    """Logits of the prompt's last token and of every step, one forward each."""
    logits = []
    for part in (prompt, *steps.split(1, dim=1)):
        options = {}
        if mask is not None:
            mask = mask if part is prompt else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -part.shape[1] :]
            options = {"attention_mask": mask, "position_ids": positions}
        logits.append(model(part, past_key_values=cache, **options).logits[:, -1])
    return torch.stack(logits, dim=1)


def assert_same(actual, expected, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
