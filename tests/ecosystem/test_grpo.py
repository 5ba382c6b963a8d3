"""A GRPO step of TRL whose rollouts come from a compressed cache, and whose log-probabilities come from the model."""

import pytest
import torch

from kvcache_plugins import compressed_by_default, create_cache
from kvcache_plugins.models.cache_argument import as_argument


pytestmark = pytest.mark.long
trl = pytest.importorskip("trl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["transform", "gear-2bit", "kivi-2bit"])
def test_rollouts_come_from_a_compressed_cache(name, tiny_loaded, tmp_path, monkeypatch) -> None:
    from datasets import Dataset

    model, tokenizer = tiny_loaded
    before = {key: each.clone() for key, each in model.state_dict().items()}
    rollouts, caches = [], []
    generate, prepare = model.generate, model._prepare_cache_for_generation

    def note(*arguments, **options):
        output = generate(*arguments, **options)
        rollouts.append(output)
        return output

    def note_cache(generation_config, model_kwargs, *arguments, **options):
        prepare(generation_config, model_kwargs, *arguments, **options)
        caches.append(next(model_kwargs[key] for key in ("cache", "past_key_values") if key in model_kwargs))

    monkeypatch.setattr(model, "generate", note)
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 2
    config = trl.GRPOConfig(
        **{"output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 2},
        **{"max_completion_length": 24, "report_to": [], "use_cpu": True, "bf16": False, "learning_rate": 1e-2},
        **{"save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False, "beta": 0.0},
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text}] * 4),
        processing_class=tokenizer,
    )
    try:
        with compressed_by_default(name):
            prepare = model._prepare_cache_for_generation
            monkeypatch.setattr(model, "_prepare_cache_for_generation", note_cache)
            trainer.train()
        assert all(type(cache) is type(create_cache(name, model)) for cache in caches) and caches
        assert caches[0].stats()["tokens_compressed"] > 0
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses and all(torch.tensor(losses).isfinite())
        assert any(not torch.equal(each, before[key]) for key, each in model.state_dict().items())
        model.load_state_dict(before)
        difference = log_probability_difference(model.eval(), rollouts[0], create_cache(name, model), len(text))
        # Mean over the tokens of a rollout, in nats
        assert 0 < difference < 0.5
    finally:
        model.load_state_dict(before)
        model.eval()


@torch.no_grad()
def log_probability_difference(model, tokens: torch.Tensor, cache, length: int) -> float:
    """Compare log-probabilities of sampled tokens as they were drawn with those of a forward without a cache."""
    plain = model(tokens, use_cache=False).logits
    drawn = [model(tokens[:, :length], **as_argument(cache)).logits[:, -1:]]
    drawn += [model(tokens[:, at : at + 1], **as_argument(cache)).logits for at in range(length, tokens.shape[1] - 1)]
    chosen = tokens[:, length:, None]
    ours, exact = (
        each.log_softmax(dim=-1).gather(2, chosen) for each in (torch.cat(drawn, dim=1), plain[:, length - 1 : -1])
    )
    return float((ours - exact).abs().mean())
