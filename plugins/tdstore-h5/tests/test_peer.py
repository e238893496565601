"""Files exchanged with the `tensordict` package and with h5py, in both directions."""

from __future__ import annotations

import warnings
from pathlib import Path as FsPath

import h5py
import numpy as np
import pytest
import torch
from h5help import everything, fill, header_of, load, same, save
from tdstore_h5.store import open_h5

from tdstore.errors import CorruptStoreError
from tdstore.header import Group, Header
from tdstore.types import Read, Write
from tdstore.values import decode_value

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import NonTensorData, PersistentTensorDict, TensorDict

LEAVES = {
    ("f",): torch.randn(4, 3),
    ("half",): torch.randn(4).half(),
    ("n", "flag"): torch.tensor([True, False, True, True]),
    ("n", "z"): torch.randn(4, 2, dtype=torch.complex64),
    ("n", "deep", "u"): torch.arange(4, dtype=torch.uint8),
}


@pytest.mark.parametrize("layout", [{}, {"chunks": 2, "compression": "gzip"}])
def test_the_peer_reads_ours(file: FsPath, layout: dict[str, object]) -> None:
    save(file, LEAVES, values={"s": "grüße", "k": 3}, **layout)
    peer = PersistentTensorDict.from_h5(str(file), batch_size=[4])
    for path, value in LEAVES.items():
        assert torch.equal(peer.get(path), value)
    assert peer["s"] in ("grüße", "grüße".encode())
    assert set(peer.keys()) == {"f", "half", "n", "s"}
    peer.close()


def test_we_read_the_peers(file: FsPath) -> None:
    td = TensorDict({}, [4])
    for path, value in LEAVES.items():
        td.set(path, value)
    td.set("s", NonTensorData("grüße", batch_size=[4]))
    td.set("k", NonTensorData(3, batch_size=[4]))
    PersistentTensorDict.from_dict(td, str(file)).close()
    with open_h5(file, verify="full") as store:
        assert same(everything(store), LEAVES)
        header = store.load_header()
    assert header.groups[()].keys == ("f", "half", "k", "n", "s")
    assert header.groups[()].batch_size is None
    assert set(header.groups) == {(), ("n",), ("n", "deep")}
    values = {key: decode_value(envelope["data"]) for key, envelope in header.groups[()].values.items()}
    assert values == {"s": "grüße", "k": 3}


def test_a_peers_file_in_place(file: FsPath) -> None:
    """ "r+" on a file without manifest changes it; a saved header makes it ours; the peer still reads it."""
    td = TensorDict({"a": torch.zeros(3, 2), "s": NonTensorData("old", batch_size=[3])}, [3])
    PersistentTensorDict.from_dict(td, str(file)).close()
    with open_h5(file, mode="r+") as store:
        store.write([Write(("a",), (torch.tensor([2, 0]),), torch.ones(2, 2))])
    with open_h5(file, mode="r+") as store:
        assert not store.load_header().groups[()].batch_size
        fill(store, {("b",): torch.arange(3)})
        values = {"s": {"data": "new"}}
        store.save_header(Header({(): Group(batch_size=(3,), keys=("b", "a", "s"), values=values)}))
    with open_h5(file, verify="full") as store:
        assert store.load_header().groups[()].keys == ("b", "a", "s")
        assert store.read([Read(("a",))])[0].tolist() == [[1, 1], [0, 0], [1, 1]]
    peer = PersistentTensorDict.from_h5(str(file), batch_size=[3])
    assert peer["a"].sum() == 4
    assert peer["b"].tolist() == [0, 1, 2]
    assert peer["s"] in ("new", b"new")
    peer.close()


def test_strings_follow_the_header(file: FsPath) -> None:
    """Strings that the header no longer has vanish from the file; those that changed change."""
    save(file, {("a",): torch.zeros(1)}, values={"s": "one", "t": "two", "nul": "a\0b"})
    with h5py.File(file) as f:
        assert {k: f[k][()] for k in f if k != "a"} == {"s": b"one", "t": b"two"}
    with open_h5(file, mode="r+") as store:
        store.save_header(header_of({("a",): torch.zeros(1)}, {"s": "three"}))
        assert list(store.paths()) == [("a",)]
    with h5py.File(file) as f:
        assert sorted(f) == ["a", "s"]
        assert f["s"][()] == b"three"


def test_empty_groups_are_there(file: FsPath) -> None:
    groups = {(): Group(keys=("e",)), ("e",): Group(keys=("f",)), ("e", "f"): Group()}
    with open_h5(file, mode="w") as store:
        store.save_header(Header(groups))
    with h5py.File(file) as f:
        assert isinstance(f["e/f"], h5py.Group)
    with open_h5(file, mode="r+") as store:
        assert set(store.load_header().groups) == set(groups)
        store.save_header(Header({(): Group()}))
    with h5py.File(file) as f:
        assert not len(f)


def test_files_of_others(file: FsPath) -> None:
    """Byte orders, string columns, fixed strings, compact and never written datasets, as h5py makes them."""
    with h5py.File(file, "w") as f:
        f["big"] = np.arange(6, dtype=">f8").reshape(2, 3)
        f["words"] = np.array(["a", "bé"], dtype=h5py.string_dtype())
        f["fixed"] = np.array([b"x", b"yz"])
        f["opaque"] = np.void(b"\x01\x02")
        f.create_dataset("late", (2, 3), "f4", fillvalue=1.5)
        f.create_dataset("sparse", (100, 3), "i2", chunks=(10, 3))
        f.create_group("g")["100%2F"] = np.int8([1])
        f["big"].attrs["unit"] = "m"
    found = load(file)
    assert found[("big",)].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found[("big",)].dtype == torch.float64
    assert (found[("late",)] == 1.5).all()
    assert not found[("sparse",)].any()
    assert found[("g", "100/")].tolist() == [1]
    with open_h5(file) as store:
        values = store.load_header().groups[()].values
    assert values["words"] == {"stack": ["a", "bé"], "dim": 0}
    assert values["fixed"] == {"stack": ["x", "yz"], "dim": 0}
    assert decode_value(values["opaque"]["data"]) == b"\x01\x02"


def test_a_program_that_changed_our_file_is_noticed(file: FsPath) -> None:
    save(file, {("a",): torch.zeros(3), ("b",): torch.zeros(3)})
    with h5py.File(file, "r+") as f:
        f["extra"] = np.ones(2)
        f["a"][1] = 9
        del f["b"]
    with pytest.raises(CorruptStoreError, match="'b' is in the manifest"):
        open_h5(file)
    with open_h5(file, mode="r+", recover="accept") as store:
        store.save_header(store.load_header())
    found = load(file, verify="full")
    assert {p: t.tolist() for p, t in found.items()} == {("a",): [0, 9, 0], ("extra",): [1, 1]}
