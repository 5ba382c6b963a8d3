"""KL of text behind prompts that repeat one token or two, against the same text behind text.

Behind a prompt the text's errors are those of the prompt's tokens alone; decoded 16 tokens at a time, they are those
of the text's own tokens too, which are coded by what such a prompt said of them.

    python -m kvcache_plugins.eval.measures.repeated_tokens eval/results/repeated_tokens_smollm2.json
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from transformers import PreTrainedModel

from kvcache_plugins.console.results import provenance
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import load_model
from kvcache_plugins.registry import create_cache


PROMPTS = {"newlines": "\n" * 800, '" the"': " the" * 400, '" 0"': " 0" * 400, "1200 dots": "." * 1200}
# The promises' text
_TEXT_FILE = Path(__file__).parents[1] / "results" / "promises" / "text.txt"
CACHES = ("gear-t16", "gear", "gear-t30", "gear-c16", "gear-4bit", "gear-k4v3", "kivi-2bit")
_TEXT_FILE = Path(__file__).parents[1] / "results" / "promises" / "text.txt"
_TEXT, _PROMPT, _BEHIND, _DECODED, _SCORED = "text", 400, 64, 160, 64


def log_probabilities(
    model: PreTrainedModel, name: str, prompt: torch.Tensor, text: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Returns log-probabilities of a text behind a prompt, `chunk` tokens at a time: `[tokens, vocabulary]`."""
    cache = create_cache(name, model)
    model(prompt, **as_argument(cache), logits_to_keep=1)
    parts = [model(part, **as_argument(cache)).logits[0] for part in text.split(chunk, dim=1)]
    return torch.cat(parts).float().log_softmax(-1)


@torch.inference_mode()
def measure(names: Sequence[str], text: str) -> list[dict[str, Any]]:
    """A row for each prompt: tokens, and each cache's KL behind it and of the last tokens that are decoded."""
    model, tokenizer = load_model("smollm2")
    ids = tokenizer(text, return_tensors="pt").input_ids
    following, rows = ids[:, _PROMPT : _PROMPT + _DECODED], []
    for prompt, repeated in {**PROMPTS, _TEXT: text}.items():
        prompt_ids = tokenizer(repeated, return_tensors="pt").input_ids[:, :_PROMPT]
        found: dict[str, dict[str, float]] = {}
        for column, count, chunk in (("behind", _BEHIND, _BEHIND), ("decoded", _DECODED, 16)):
            dense, *coded = (
                log_probabilities(model, name, prompt_ids, following[:, :count], chunk)[-_SCORED:]
                for name in ("dynamic", *names)
            )
            found[column] = {
                name: F.kl_div(each, dense, log_target=True, reduction="batchmean").item()
                for name, each in zip(names, coded, strict=True)
            }
        rows.append({"prompt": prompt, "tokens": prompt_ids.shape[1], **found})
        typer.echo(json.dumps(rows[-1]))
    return rows


def main(
    out: Annotated[Path, typer.Argument(help="Where to write the result.")], caches: str = ",".join(CACHES)
) -> None:
    """Measures SmolLM2 on one text, and writes the result."""
    torch.set_num_threads(1)
    rows = measure(caches.split(","), _TEXT_FILE.read_text(encoding="utf-8"))
    content = {**provenance(torch.device("cpu")), "benchmark": "repeated-tokens", "rows": rows}
    content["settings"] = {"model": "smollm2", "dtype": "float32", "threads": 1}
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
