"""Transform-coded layers in a file: in whatever state, they go on exactly; what no layer can be is refused."""

import dataclasses
import functools
import operator

import pytest
import torch

from kvcache_plugins import TransformCodingCache
from kvcache_plugins.files.schema import pack, unpack
from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.layer_state import LayerState
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.transform_coding.config import TransformCodingConfig


NUM_HEADS, HEAD_DIM = 2, 20
FREQUENCIES = tuple((100.0 ** -(torch.arange(10) / 10)).tolist())
CONFIG = TransformCodingConfig(key_nbits=3, value_nbits=2.5)


def filled_layer(lengths=(200, 150), num_decoded=11, dtype=torch.float32, frequencies=FREQUENCIES) -> RowLayer:
    """A layer that took in a left-padded prompt of items of these lengths, and tokens one by one."""
    layer, longest = RowLayer(CONFIG.policy(RotaryEmbedding(frequencies)), 0), max(lengths)
    padding = longest - torch.tensor(lengths)
    for count in (longest, *[1] * num_decoded):
        shape = len(lengths), NUM_HEADS, count, HEAD_DIM
        layer.update(*(torch.randn(shape).to(dtype) for _ in range(2)))
        mask = torch.arange(layer.get_seq_length()) >= padding[:, None]
        mask = mask[:, None, None].expand(-1, 1, count, -1).tril(layer.get_seq_length() - count)
        layer.attend(AttentionCall(torch.randn(len(lengths), 4, count, HEAD_DIM).to(dtype), mask))
    return layer


def written(layer) -> tuple[dict, dict]:
    """Document and tensors that share nothing with the layer."""
    document, tensors = pack(layer.state())
    return document, {name: tensor.clone() for name, tensor in tensors.items()}


def read(document, tensors, frequencies=FREQUENCIES, config=CONFIG) -> RowLayer:
    layer = RowLayer(config.policy(RotaryEmbedding(frequencies)), 0)
    layer.restore(unpack(LayerState, document, tensors), torch.device("cpu"))
    return layer


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "lengths", [(200, 150), (3,), (67,), (68,), (200, 15), (90, 67, 1)], ids=lambda each: "-".join(map(str, each))
)
def test_a_loaded_layer_continues_exactly(lengths, dtype):
    """Save before tables are fitted, after, and while a sequence has none yet; continue until it has one."""
    for num_decoded in (0, 1, 20):
        layer = filled_layer(lengths, num_decoded, dtype)
        twin = read(*written(layer))
        assert twin.stats() == layer.stats() | {"dense_reads": 0}
        for _ in range(80):
            new = [torch.randn(len(lengths), NUM_HEADS, 1, HEAD_DIM).to(dtype) for _ in range(2)]
            query = torch.randn(len(lengths), 4, 1, HEAD_DIM).to(dtype)
            outputs = []
            for each in (layer, twin):
                each.update(*new)
                outputs.append(each.attend(AttentionCall(query)))
            assert torch.equal(*outputs)
        for side in ("keys", "values"):
            assert torch.equal(layer.to_dense(side), twin.to_dense(side))
    assert layer.codec is not None and layer._unfitted_sequences is None


def test_only_rows_in_use_and_tables_are_written():
    layer = filled_layer((300,), num_decoded=9)
    document, tensors = written(layer)
    block, recent = layer.storage.segments
    assert document["blocks"] == [
        {"start": 4, "length": block.length, "is_recent": False},
        {"start": recent.start, "length": recent.length, "is_recent": True},
    ]
    assert tensors["blocks.0.keys.rows"].shape == (
        1,
        NUM_HEADS,
        block.length,
        1 + CONFIG.code_bytes(HEAD_DIM, HEAD_DIM)[0],
    )
    assert document["tables"]["rotary"] == layer.codec.rope.name
    # Frequencies beside the tensors of the layer, without widths of recent rows, which follow from the others
    held = [tensor for part, tensor in layer.named_tensors() if part != "spare"]
    assert len(tensors) == len(held) + 1 - 2


def test_another_rotary_embedding_is_refused():
    layer = filled_layer()
    # That has no say where keys are coded as they come
    keys, values = layer.codec.formats()
    layer.codec._formats = dataclasses.replace(keys, rope=layer._unfitted.layouts[0]), values
    for frequencies in ((), FREQUENCIES[:5], tuple(1.001 * each for each in FREQUENCIES)):
        with pytest.raises(ValueError, match=r"rotary"):
            read(*written(layer), frequencies=frequencies)
    almost = tuple(each * (1 + 1e-7) for each in FREQUENCIES)
    assert read(*written(layer), frequencies=almost).codec.rope.name == layer._unfitted.layouts[0].name


def test_another_number_of_bits_is_refused():
    document, tensors = written(filled_layer())
    with pytest.raises(ValueError, match=r"keys.widths` have to be 10 together in every head"):
        read(document, tensors, config=TransformCodingConfig(key_nbits=3.3, value_nbits=2.5))


def change(name, index, value):
    return lambda document, tensors: tensors[name].__setitem__(index, value)


def drop(name):
    return lambda document, tensors: tensors.pop(name)


def put(value, *path):
    *holders, key = path
    return lambda document, tensors: functools.reduce(operator.getitem, holders, document).update({key: value})


def add(name, tensor):
    return lambda document, tensors: tensors.update({name: tensor})


def without(field):
    """Leaves out a field, with its tensors."""

    def apply(document, tensors):
        document[field] = [] if isinstance(document[field], list) else None
        for name in [name for name in tensors if name.startswith(f"{field}.")]:
            del tensors[name]

    return apply


def shorter_rows(document, tensors):
    tensors["blocks.0.keys.rows"] = tensors["blocks.0.keys.rows"][:, :, 1:]


def move_bits(name, source, target):
    """Moves a bit from one width to another."""

    def apply(document, tensors):
        tensors[name][target] += 1
        tensors[name][source] -= 1

    return apply


FIRST = (0, 0, 0)
FORGED = {
    "a channel twice": (change("tables.keys.order", FIRST, 1), "keys.order` has to name every channel once"),
    "a channel beyond": (change("tables.keys.order", FIRST, 255), "keys.order` has to name every channel once"),
    "nine bits": (change("tables.keys.widths", FIRST, 9), "keys.widths` has to be at most 8"),
    "bits of another head": (
        move_bits("tables.keys.widths", (0, 1, 0), FIRST),
        "keys.widths` have to be 9 together in every head",
    ),
    "values of a bit more": (change("tables.values.widths", FIRST, 7), "values.widths` have to be 8 together"),
    "values of unlike widths": (
        move_bits("tables.values.widths", (0, 0, -1), FIRST),
        "values.widths` have to be the same but for one bit",
    ),
    "no number": (change("tables.keys.mean", FIRST, torch.nan), "keys.mean` has to be finite"),
    "an endless deviation": (change("tables.values.deviation", FIRST, torch.inf), "deviation` has to be finite"),
    "a negative deviation": (change("tables.keys.deviation", FIRST, -1), "keys.deviation` has to be at least 0"),
    "endless moments": (change("moments.squares", FIRST, torch.inf), "moments.squares` has to be finite"),
    "negative moments": (change("moments.squares", FIRST, -1), "moments.squares` has to be at least 0"),
    "products that are none": (change("moments.products", (0, 0, 0, 0), torch.nan), "products` has to be finite"),
    "half an item waits": (change("pending", 0, 2), "`pending` has to be at most 1"),
    "another item waits": (change("pending", 0, 1), "has to have all its tokens in front"),
    "no sequence waits": (drop("pending"), "of queries that no codec will be fitted to"),
    "no prefix": (without("prefix"), "not what goes with them"),
    "a prefix beyond its room": (change("prefix.count", 1, 10**6), "`prefix`: `count` has to be at most 19"),
    "a prefix without tokens": (change("prefix.count", 0, 0), "the exact tokens in front do not reach"),
    "no order": (drop("tables.keys.order"), "the tensor `state.tables.keys.order` is missing"),
    "values in an order": (add("tables.values.order", torch.zeros(1)), "tables.values.order` is unknown"),
    "no tables": (without("tables"), "has no tables, but not all tokens"),
    "an open block, and no rows": (without("blocks"), "not what goes with them"),
    "rows elsewhere": (put(3, "blocks", 0, "start"), "a block begins at 200, but the tokens before it end at"),
    "fewer rows": (shorter_rows, r"blocks.0.keys.rows` has to be of shape \[2, 2, 196, 10\]"),
    "recent rows first": (put(True, "blocks", 0, "is_recent"), "asks for a last block"),
    "recent rows of as few bits": (put(False, "blocks", 1, "is_recent"), r"blocks.1.keys.rows` has to be of shape"),
    "another rotation": (put("spiral", "tables", "rotary"), "tables`: keys were coded with another rotary embedding"),
    "rotated elsewhere": (put(2, "tables", "first_rotated"), "another rotary embedding"),
    "a longer text": (put(300, "length"), "compressed tokens end at"),
}


@pytest.mark.parametrize("name", FORGED)
def test_impossible_states_are_refused(name):
    layer = filled_layer((200, 15), num_decoded=9)
    assert layer._unfitted_sequences is not None
    document, tensors = written(layer)
    read(*written(layer))
    forge, message = FORGED[name]
    forge(document, tensors)
    with pytest.raises(ValueError, match=message):
        read(document, tensors)


def test_a_layer_without_table_saves_its_exact_tokens():
    document, tensors = written(filled_layer((50,), num_decoded=3))
    for forge in (put(54, "length"), add("pending", torch.zeros(1, dtype=torch.uint8)), put(True, "is_open")):
        forged, copies = dict(document), dict(tensors)
        forge(forged, copies)
        with pytest.raises(ValueError, match="has no tables, but not all tokens"):
            read(forged, copies)


@pytest.mark.parametrize("fields", [{"key_nbits": 0}, {"value_nbits": "2"}], ids=repr)
def test_options_of_a_file_are_checked(tiny_llama, tmp_path, fields, monkeypatch):
    path = tmp_path / "cache.safetensors"
    cache = TransformCodingCache(tiny_llama.config)
    options = {**cache.cache_config.to_options(), **fields}
    monkeypatch.setattr(TransformCodingConfig, "to_options", lambda self: options)
    cache.save(path, tiny_llama)
    with pytest.raises(ValueError, match=f"`path`: {path} is damaged: "):
        TransformCodingCache.load(path, tiny_llama)
