"""Observation of a text for a calibration."""

import torch

from kvcache_plugins.gear.transform.observation import SideSums, observe_window


def test_what_was_read_counts_for_the_tokens_that_follow_up_to_the_newest(tiny_model, random_windows, monkeypatch):
    model = tiny_model("llama", seed=0, vocab_size=97)
    seen: list[tuple[torch.Tensor, int]] = []
    monkeypatch.setattr(SideSums, "add_gradients", lambda _, gradients, count: seen.append((gradients.clone(), count)))
    (window,) = random_windows(1, 75)
    observe_window(model, window, 37, 4, 1, {}, torch.Generator().manual_seed(0))
    sides = 2 * model.config.num_hidden_layers
    # Four sinks are left out; of 38 tokens behind the prompt 16, 16 and 6 are read together
    assert [(each.shape[1], count) for each, count in seen] == [
        (num_read - 4, count) for num_read, count in ((37, 16), (53, 16), (69, 6)) for _ in range(sides)
    ]
    for gradients, _ in seen:
        assert (gradients.abs().amax(dim=(0, 2)) > 0).all()


def test_a_layer_of_a_window_costs_nothing_where_it_is_not_seen(tiny_model, random_windows, monkeypatch):
    model = tiny_model("gemma3-hybrid", seed=0, sliding_window=24)
    windowed = [index for index, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    sums, seen = {}, []
    add = SideSums.add_gradients

    def record(self, gradients, count):
        seen.append((self, gradients.clone()))
        add(self, gradients, count)

    monkeypatch.setattr(SideSums, "add_gradients", record)
    (window,) = random_windows(1, 100)
    observe_window(model, window, 50, 4, 2, sums, torch.Generator().manual_seed(0))
    assert windowed and all((sums[index].window is not None) == (index in windowed) for index in sums)
    for index, own in sums.items():
        assert own.keys.num_scored == own.values.num_scored == 2 * 50
        for gradients in (each for side, each in seen if side in (own.keys, own.values)):
            # The first of those that are read together sees itself and 23 tokens before it
            hidden = gradients[:, : gradients.shape[1] - 23]
            assert (hidden.abs().max() == 0) == (index in windowed)
            assert (gradients[:, -23:].abs().amax(dim=(0, 2)) > 0).all()
