"""Descriptions of TensorDicts as ranks send them: what is malformed is refused in words."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tdstore import TensorDict
from tdstore.container.storage.describe import describe
from tdstore.errors import CorruptStoreError, MismatchError
from tdstore.parallel import wire


def message(**changes):
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, dtype=torch.int64)}}, [2], names=["t"])
    data = msgspec.json.decode(wire.encode_message(*describe(td)))
    return msgspec.json.encode({**data, **changes})


def test_a_description_there_and_back():
    header, specs = wire.decode_message(message())
    assert header.groups[()].batch_size == (2,)
    assert header.groups[()].names == ("t",)
    assert [(path, spec.shape, spec.dtype) for path, spec in specs.items()] == [
        (("a",), (2, 3), torch.float32),
        (("n", "b"), (2,), torch.int64),
    ]


def test_leaves_lie_in_one_aligned_buffer():
    store = wire.new_store(*wire.decode_message(message()), torch.device("cpu"))
    assert store.buffer.numel() == 128
    addresses = [store.view(path).data_ptr() - store.buffer.data_ptr() for path in store.paths()]
    assert addresses == [0, 64]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"header": {}}',
        b"[" * 100_000,
        message(leaves=[["a"]]),
        message(leaves=[[["a"], [-1], "float32"]]),
        message(leaves=[[["a"], [2], "os.system"]]),
        message(leaves=[[["a"], [2**62], "float32"]]),
        message(leaves=[[["a"], "2", "float32"]]),
        message(header={"format": 99, "groups": []}),
    ],
)
def test_what_is_malformed_is_refused(text):
    with pytest.raises(CorruptStoreError):
        wire.decode_message(text)


def test_differences_in_words():
    a = wire.schema_text([(("x",), describe(TensorDict({"x": torch.zeros(2)}))[1][("x",)])])
    b = wire.error_text(OSError("no disk"))
    assert wire.differences(a, b, "rank 0", "rank 1") == "rank 1 cannot take part: OSError: no disk"
    assert wire.digest(a) != wire.digest(b)
    with pytest.raises(MismatchError, match="rank 3 of the group cannot send its TensorDict: OSError: no disk"):
        wire.refuse_error(b, 3)
