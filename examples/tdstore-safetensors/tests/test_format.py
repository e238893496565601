"""What the kit cannot know: files of the safetensors library, ours read by it, and files that lie."""

import json
import struct

import pytest
import safetensors.torch
import torch
from tdstore.errors import CorruptStoreError, OptionError, StoreError
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Read, Write

from tdstore_safetensors.format import DTYPES
from tdstore_safetensors.store import open_safetensors


def test_files_of_the_library(tmp_path):
    tensors = {tag: torch.ones(2, 3).to(getattr(torch, name)) for tag, name in DTYPES.items()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    with open_safetensors(tmp_path / "x.safetensors") as store:
        assert store.metadata == {"format": "pt"}
        assert store.load_header().groups[()].batch_size == ()
        for tag, value in tensors.items():
            (got,) = store.read([Read((tag,))])
            assert got.dtype is value.dtype
            assert torch.equal(got.view(torch.uint8), value.view(torch.uint8))


def test_the_library_reads_ours(tmp_path):
    values = {("next", "obs"): torch.arange(6.0), ("next.obs",): torch.ones(2), ("c",): torch.ones(3).cdouble() * 2j}
    with open_safetensors(tmp_path / "x.safetensors", mode="w", metadata={"format": "pt"}) as store:
        store.create({path: LeafSpec(value.shape, value.dtype) for path, value in values.items()})
        store.write([Write(path, (), value) for path, value in values.items()])
        store.save_header(Header({(): Group(), ("next",): Group()}))
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert sorted(read) == ["c", "next.obs", "next.obs'"]
    assert read["next.obs"].tolist() == [1, 1]
    assert read["next.obs'"].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.view_as_complex(read["c"]).tolist() == [2j, 2j, 2j]
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def tensor(start, stop, shape=(2,), dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def document(**leaves):
    return {"tdstore": json.dumps({"format": 1, "groups": [[[], {}]], "leaves": leaves})}


GOOD = {"a": tensor(0, 2), "b": tensor(2, 4)}
LIES = {
    "overlap": {"a": tensor(0, 2), "b": tensor(1, 3), "c": tensor(3, 4, [1])},
    "hole": {"a": tensor(0, 2), "b": tensor(3, 4, [1])},
    "beyond-the-end": {"a": tensor(0, 2), "b": tensor(2, 6, [4])},
    "bytes-left-over": {"a": tensor(0, 2)},
    "negative": {"a": tensor(0, 2), "b": tensor(-2, 0), "c": tensor(2, 4)},
    "backwards": {**GOOD, "c": tensor(4, 2, [-2])},
    "wrong-size": {"a": tensor(0, 2, [3]), "b": tensor(2, 4)},
    "huge-and-empty": {**GOOD, "c": tensor(4, 4, [1 << 62, 1 << 62, 0])},
    "too-many-digits": {**GOOD, "c": tensor(4, 4, [10**5000, 0])},
    "not-numbers": {**GOOD, "c": tensor(4, 4, [0.0])},
    "no-offsets": {**GOOD, "c": {"dtype": "U8", "shape": [0]}},
    "unknown-dtype": {**GOOD, "c": tensor(4, 4, [0], "Q7")},
    "dtype-of-no-kind": {**GOOD, "c": tensor(4, 4, [0], [])},
    "metadata-of-no-kind": {**GOOD, "__metadata__": {"a": 1}},
    "half-a-surrogate": {**GOOD, "\ud800": tensor(4, 4, [0])},
    "not-an-object": [GOOD],
    "tensor-of-no-kind": {**GOOD, "c": 3},
    "document-of-no-kind": {**GOOD, "__metadata__": {"tdstore": "[1]"}},
    "document-without-leaves": {**GOOD, "__metadata__": {"tdstore": '{"format": 1, "groups": []}'}},
    "one-key-twice": {**GOOD, "__metadata__": document(a=[["x"], "uint8"], b=[["x"], "uint8"])},
    "key-of-no-kind": {**GOOD, "__metadata__": document(a=[[1], "uint8"])},
    "no-key": {**GOOD, "__metadata__": document(a=[[], "uint8"])},
    "another-dtype": {**GOOD, "__metadata__": document(a=[["a"], "complex128"])},
}


def put(path, header, data=b"\1\2\3\4", length=None):
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


@pytest.mark.parametrize("lie", LIES)
def test_lies(tmp_path, lie):
    text = json.dumps(LIES[lie]).encode() if lie != "too-many-digits" else b'{"c": {"shape": [' + b"9" * 5000 + b"]}}"
    with pytest.raises(StoreError, match="x.safetensors"):
        open_safetensors(put(tmp_path / "x.safetensors", text))


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_length_of_the_header(tmp_path, length):
    with pytest.raises(CorruptStoreError, match="x.safetensors"):
        open_safetensors(put(tmp_path / "x.safetensors", json.dumps(GOOD).encode(), length=length))


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 1}', b"[" * 100_000, b"\xff\xfe", b"", b"{"])
def test_headers_that_are_none(tmp_path, text):
    with pytest.raises(CorruptStoreError, match="x.safetensors"):
        open_safetensors(put(tmp_path / "x.safetensors", text))


def test_every_cut_is_noticed(tmp_path):
    whole = put(tmp_path / "x.safetensors", json.dumps(GOOD).encode()).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:size])
        with pytest.raises(CorruptStoreError):
            open_safetensors(tmp_path / "x.safetensors")


def test_cut_while_open(tmp_path):
    store = open_safetensors(put(tmp_path / "x.safetensors", json.dumps(GOOD).encode()))
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.truncate(20)
    with store, pytest.raises(CorruptStoreError, match="cut short"):
        store.read([Read(("a",))])


def test_a_bool_of_any_byte_is_a_bool(tmp_path):
    header = json.dumps({"a": tensor(0, 4, [4], "BOOL")}).encode()
    with open_safetensors(put(tmp_path / "x.safetensors", header, b"\0\1\2\xff")) as store:
        assert store.read([Read(("a",))])[0].view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = put(tmp_path / "x.safetensors", json.dumps(GOOD).encode())
    before = path.read_bytes()
    store = open_safetensors(path, mode="r+")
    store.write([Write(("a",), (), torch.zeros(2, dtype=torch.uint8))])
    with open(path, "r+b") as file:
        file.truncate(len(before) - 1)  # the other leaf cannot be copied
    with pytest.raises(CorruptStoreError):
        store.close()
    assert path.read_bytes() == before[:-1]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mode", "metadata"), [("r", {"a": "b"}), ("w", {"a": 1}), ("w", {1: "a"})])
def test_metadata_is_text_to_write(tmp_path, mode, metadata):
    put(tmp_path / "x.safetensors", json.dumps(GOOD).encode())
    with pytest.raises(OptionError, match="metadata="):
        open_safetensors(tmp_path / "x.safetensors", mode=mode, metadata=metadata)


def test_metadata_of_others_is_kept(tmp_path):
    path = put(tmp_path / "x.safetensors", json.dumps({**GOOD, "__metadata__": {"format": "pt"}}).encode())
    with open_safetensors(path, mode="r+", metadata={"more": "text"}) as store:
        store.delete([("b",)])
        store.save_header(store.load_header())
    with open_safetensors(path) as store:
        assert store.metadata == {"format": "pt", "more": "text"}
        assert list(store.paths()) == [("a",)]


def test_a_key_that_is_no_text(tmp_path):
    with open_safetensors(tmp_path / "x.safetensors", mode="w") as store:
        store.create({("\ud800",): LeafSpec((2,), "uint8")})
        with pytest.raises(OptionError, match="surrogate"):
            store.save_header(Header({(): Group()}))
    assert list(tmp_path.iterdir()) == []
