"""Saved caches that were damaged or forged: refused by a `ValueError` that names the file, or as good as undamaged.

Damage is random bytes; then nothing but a refusal will do, as a checksum covers all of a file. A forged file has the
right checksum over anything: it may be loaded as a cache, but attention over that cache must be memory-safe, and no
other error may be raised. A read out of bounds ends the process, and thus the test.
"""

import json
import random
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from kvcache_plugins import create_cache


# And how much padding the second of two items has: with 75 tokens of it, one waits for its table in the file
SUBJECTS = (("gear-4bit", 20), ("gear-k4v3", 20), ("kivi-2bit", 20), ("transform-22", 20), ("transform-22", 75))
NUM_NEW = 18
# Instead of a number or a list of a document
NUMBERS = (-1, 0, 1, 2, 7, 64, 2**31, 2**40, 2**62, 10**30, 0.5, 1e308)
STRANGE = (*NUMBERS, None, "", "x", True, False, [], [1], {}, {"x": 1})


class Subject:
    """A tiny model, a file with a cache of it, and the logits of what follows."""

    def __init__(self, model, preset: str, padding: int, folder: Path):
        self.model, self.path = model, folder / "cache.safetensors"
        cache = create_cache(preset, model, residual_length=16)
        self.cache_class = type(cache)
        input_ids = torch.randint(3, 128, (2, 90))
        mask = torch.ones_like(input_ids)
        mask[1, :padding] = 0
        with torch.no_grad():
            model(input_ids, attention_mask=mask, past_key_values=cache)
            for _ in range(40):
                model(torch.randint(3, 128, (2, 1)), past_key_values=cache)
        cache.save(self.path, model)
        self.content = self.path.read_bytes()
        self.next_ids = torch.randint(3, 128, (2, NUM_NEW))
        self.logits = self.continued()

    def continued(self) -> torch.Tensor:
        cache = self.cache_class.load(self.path, self.model)
        with torch.no_grad():
            steps = [self.model(ids, past_key_values=cache).logits for ids in self.next_ids.split(1, dim=1)]
        return torch.cat(steps, dim=1)

    def outcome(self, content: bytes) -> str:
        """Loads a file with this content and says what came of it."""
        self.path.write_bytes(content)
        try:
            cache = self.cache_class.load(self.path, self.model)
        except ValueError as error:
            assert f"`path`: {self.path}" in str(error)
            return "refused"
        del cache
        try:
            return "same" if torch.equal(self.continued(), self.logits) else "different"
        except ValueError:
            # The error of states that cannot be compressed
            return "refused later"


@pytest.fixture(params=SUBJECTS, ids=lambda each: "{}-padded-by-{}".format(*each))
def subject(request, tiny_llama, tmp_path) -> Subject:
    return Subject(tiny_llama, *request.param, tmp_path)


def header_length(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with a flipped bit, or with pieces cut out, doubled, moved or overwritten, in header or data."""
    start = header_length(content)
    low, high = rng.choice(((0, start), (start, len(content))))
    place, size = rng.randrange(low, high), rng.choice((1, 2, 8, 64, 1000))
    other = rng.randrange(len(content))
    way = rng.randrange(6)
    if way <= 1:
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    if way == 2:
        return content[:place] + content[place + size :]
    if way == 3:
        return content[:place] + content[other : other + size] + content[place:]
    if way == 4:
        return content[:place] + content[other : other + size] + content[place + size :]
    return content[:place] + rng.randbytes(size) + content[place + size :]


def signed(header: dict, document: object, data: bytes) -> bytes:
    """A file with the right checksum."""
    header = {"__metadata__": {"checksum": "0" * 64, "kvcache_plugins": json.dumps(document)}, **header}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text
    return (content + data).replace(b"0" * 64, blake2b(content + data, digest_size=32).hexdigest().encode(), 1)


def parts(content: bytes) -> tuple[dict, dict, bytes]:
    start = header_length(content)
    header = json.loads(content[8:start])
    return header, json.loads(header.pop("__metadata__")["kvcache_plugins"]), content[start:]


def forge_document(document: dict, rng: random.Random) -> None:
    """Replaces, removes or adds something anywhere in the document."""
    holder, key = document, rng.choice([each for each in ("config", *["layers"] * 3, *document) if each in document])
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.9:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    way = rng.randrange(8)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder["more"] = holder[key]
    elif way <= 4 and type(holder[key]) is int:
        holder[key] += rng.choice((-64, -16, -1, 1, 16, 64))
    else:
        holder[key] = rng.choice(STRANGE)


def forge_header(header: dict, rng: random.Random) -> None:
    """Change the description of one tensor, or exchange two."""
    name, other = rng.choice(list(header)), rng.choice(list(header))
    entry = header[name]
    way = rng.randrange(6)
    if way == 0:
        header[f"{name}{rng.choice(('', 'x'))}"] = header.pop(name)
    elif way == 1:
        entry["dtype"] = rng.choice(("U8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "BOOL", 5))
    elif way == 2:
        rng.shuffle(entry["shape"])
    elif way == 3 and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] += rng.choice((-1, 1, 2**62))
    elif way == 4:
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-64, -1, 1, 64, 2**62))
    else:
        header[name], header[other] = header[other], header[name]


def forge_data(header: dict, data: bytes, rng: random.Random) -> bytes:
    """Writes over numbers of one tensor, more often over the few that are indices."""
    by_name = ("order", "widths", "pending")
    indices = [name for name in header if header[name]["dtype"].startswith("I") or name.endswith(by_name)]
    start, stop = header[rng.choice(rng.choice((indices, list(header))) or list(header))]["data_offsets"]
    for _ in range(rng.choice((1, 1, 5, 100)) if stop > start else 0):
        place = rng.randrange(start, stop)
        data = data[:place] + rng.choice((b"\x00", b"\xff", b"\x7f", rng.randbytes(1))) + data[place + 1 :]
    return data


def forged(content: bytes, rng: random.Random) -> bytes:
    header, document, data = parts(content)
    way = rng.randrange(4)
    if way <= 1:
        for _ in range(rng.choice((1, 1, 2))):
            forge_document(document, rng)
    elif way == 2:
        forge_header(header, rng)
    else:
        data = forge_data(header, data, rng)
    return signed(header, document, data)


def test_checksum_of_the_test_equals_the_files(subject):
    assert subject.outcome(signed(*parts(subject.content))) == "same"


# Transform coding iterates nothing
@pytest.mark.parametrize("subject", [each for each in SUBJECTS if "-t" not in each[0]], indirect=True)
def test_endless_iterations_are_refused(subject):
    header, document, data = parts(subject.content)
    for number in (0, 1001, 2**40, "3"):
        document["config"]["num_iterations"] = number
        assert subject.outcome(signed(header, document, data)) == "refused"


@pytest.mark.parametrize(("num_damaged", "num_forged"), [(30, 50), pytest.param(3400, 1200, marks=pytest.mark.long)])
def test_damaged_files_are_refused_and_forged_ones_stay_in_bounds(subject, num_damaged, num_forged):
    rng = random.Random(0)
    outcomes = Counter(subject.outcome(damaged(subject.content, rng)) for _ in range(num_damaged))
    # Nothing but copying equal bytes over each other leaves a file as it was
    assert outcomes["refused"] + outcomes["same"] == num_damaged and outcomes["refused"] > 0.95 * num_damaged
    of_forged = Counter(subject.outcome(forged(subject.content, rng)) for _ in range(num_forged))
    # Both are reached: a file that is refused, and attention over what it holds
    assert of_forged["refused"] > num_forged / 3 and of_forged["different"] + of_forged["same"] > num_forged / 20
