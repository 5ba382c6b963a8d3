"""The command under `torchrun`, and what its `--partition` takes."""

from pathlib import Path

import pytest
import typer

from kvcache_plugins.kv_runahead.__main__ import main, parse_partition


PROJECT_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("even", "even"), ("planned", "planned"), ("0.6,0.4", [0.6, 0.4]), ("300,200", [300, 200]), ("1.0", [1.0])],
)
def test_partitions_are_parsed(tiny_llama, text, expected):
    assert parse_partition(text, tiny_llama, 2) == expected


def test_a_missing_table_is_named(tiny_llama):
    with pytest.raises(ValueError, match=r"`partition`: there is no file half\.json"):
        parse_partition("half.json", tiny_llama, 2)


@pytest.mark.long
def test_torchrun_generates_the_text_of_one_process(smollm2, tmp_path, run_python):
    """The last rank says what one process says, and what it took."""
    model, tokenizer = smollm2
    text = (PROJECT_ROOT / "LICENSE").read_text()[:1500]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(text)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "kvcache_plugins.kv_runahead", "--prompt-file", prompt, "--max-new-tokens", 8]
    finished = run_python(*command, "--partition", "0.55,0.45", OMP_NUM_THREADS=1, timeout=300)
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert finished.stdout.strip() == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    length = inputs.input_ids.shape[1]
    first = round(0.55 * length)
    assert any(f"slices of {first + off} + {length - first - off} tokens" in finished.stderr for off in (-1, 0, 1))
    assert "bytes sent from rank to rank" in finished.stderr


def test_a_run_without_torchrun_names_the_command(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as exit_info:
        main(prompt="Hello")
    assert exit_info.value.exit_code == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
