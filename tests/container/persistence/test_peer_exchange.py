"""Datasets go back and forth between tdstore and the released `tensordict` package."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorDict

peer = pytest.importorskip("tensordict")


def entries(dtypes):
    source = {str(d).removeprefix("torch."): torch.arange(6).reshape(3, 2).to(d) for d in dtypes}
    source["zero d feature"] = torch.arange(3.0)
    source["none"] = torch.zeros(3, 0)
    source["a/b"] = torch.ones(3)
    source["nested"] = {"deeper": {"x": torch.randn(3, 4)}, "y": torch.arange(3)}
    return source


MEMMAP_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
H5_DTYPES = [d for d in MEMMAP_DTYPES if d != torch.bfloat16]


def compare(ours, theirs):
    assert tuple(ours.batch_size) == tuple(theirs.batch_size)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        a, b = ours.get(key), theirs.get(key)
        assert a.dtype == b.dtype, key
        assert torch.equal(a, b), key


def test_memmap_from_the_peer(tmp_path):
    theirs = peer.TensorDict(entries(MEMMAP_DTYPES), [3])
    theirs["text"] = "hello"
    theirs["rows"] = ["a", "b", "c"]
    theirs["config"] = peer.NonTensorData({"lr": 0.1}, batch_size=[3])
    theirs["nested", "wide"] = peer.TensorDict({"z": torch.zeros(3, 2)}, [3, 2])
    theirs.memmap(tmp_path / "x")
    ours = TensorDict.load(tmp_path / "x")
    compare(ours, theirs)
    assert ours["text"] == "hello"
    assert ours["rows"] == ["a", "b", "c"]
    assert ours[1]["rows"] == "b"
    assert ours["config"] == {"lr": 0.1}
    assert ours["nested", "wide"].batch_size == (3, 2)
    assert tdstore.open(tmp_path / "x", "r").is_memmap()


def test_memmap_to_the_peer(tmp_path):
    ours = TensorDict(entries(MEMMAP_DTYPES), [3])
    ours["text"] = "hello"
    ours["config"] = tdstore.NonTensorData({"lr": 0.1}, [3])
    ours["rows"] = ["a", "b", "c"]
    ours.memmap(tmp_path / "x").close()
    theirs = peer.TensorDict.load_memmap(tmp_path / "x")
    compare(ours, theirs)
    assert theirs["text"] == "hello"
    assert list(theirs["rows"]) == ["a", "b", "c"]
    assert theirs["config"] == {"lr": 0.1}


def test_memmap_changed_in_place_by_us_reads_at_the_peer(tmp_path):
    ours = TensorDict(entries(MEMMAP_DTYPES), [3]).memmap(tmp_path / "x")
    ours[1] = ours[0].clone()
    ours.make_memmap_from_tensor("late", torch.arange(3))
    ours.close()
    compare(TensorDict.load(tmp_path / "x"), peer.TensorDict.load_memmap(tmp_path / "x"))


def test_h5_from_the_peer(tmp_path):
    theirs = peer.TensorDict(entries(H5_DTYPES), [3])
    del theirs["a/b"]
    theirs["text"] = "hello"
    theirs.to_h5(tmp_path / "x.h5").close()
    ours = TensorDict.load(tmp_path / "x.h5")
    compare(ours, theirs)
    assert ours["text"] == "hello"
    assert TensorDict.from_h5(tmp_path / "x.h5", batch_size=[3]).batch_size == (3,)
    rows = ours[[2, 0, 0]].to_tensordict()
    assert torch.equal(rows["nested", "y"], torch.tensor([2, 0, 0]))


def test_h5_to_the_peer(tmp_path):
    ours = TensorDict(entries(H5_DTYPES), [3])
    del ours["a/b"]
    ours["text"] = "hello"
    ours.to_h5(tmp_path / "x.h5").close()
    theirs = peer.PersistentTensorDict.from_h5(tmp_path / "x.h5", batch_size=[3])
    compare(ours, theirs)
    theirs.close()


def test_the_peers_pickles_are_refused(tmp_path):
    class Thing:
        pass

    import warnings

    globals()["Thing"] = Thing
    Thing.__qualname__ = "Thing"
    theirs = peer.TensorDict({"a": torch.zeros(2)}, [2])
    theirs["obj"] = Thing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.memmap(tmp_path / "x")
    with pytest.raises(tdstore.errors.UntrustedDataError, match="obj"):
        TensorDict.load(tmp_path / "x")
