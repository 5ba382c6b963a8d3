"""A digest of a model, so that files made with it are not used with another."""

import hashlib
import json

from transformers import PreTrainedModel


_SAMPLES_PER_PARAMETER = 8


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of the model's type, rotary settings, parameter names, shapes and dtypes, and a few weights of each."""
    digest = hashlib.sha256()
    config = model.config.get_text_config(decoder=True).to_dict()
    digest.update(
        json.dumps([config.get(key) for key in ("model_type", "rope_parameters", "rope_theta")], default=str).encode()
    )
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        # Weights that accelerate keeps elsewhere are not worth loading for this
        if not parameter.is_meta:
            stride = max(parameter.numel() // _SAMPLES_PER_PARAMETER, 1)
            digest.update(parameter.detach().flatten()[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()
