"""Directories of files, ours and the peer's, that were uploaded as they are."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
import torch

from tdstore.builtin.memmap.store import open_memmap
from tdstore.bytestore import ByteStore, open_directory, open_objects
from tdstore.engine import EngineCap
from tdstore.errors import CorruptStoreError, ReadOnlyError, StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec, Read, Write
from tdstore.values import pickled_form
from tests.bytestore.memory_engine import Bucket, MemoryEngine
from tests.bytestore.support import contents, equal

HEADER = Header({(): Group(batch_size=(5000,), keys=("frames", "next", "flag")), ("next",): Group(keys=("reward",))})
LEAVES = {
    ("frames",): torch.arange(5000 * 2000, dtype=torch.int64).to(torch.uint8).view(5000, 2000),
    ("next", "reward"): torch.arange(5000.0),
    ("flag",): torch.arange(5000) % 2 == 0,
    ("nothing",): torch.zeros(0, 3),
}


def uploaded(folder: FsPath) -> Bucket:
    bucket = Bucket()
    for file in folder.rglob("*"):
        if file.is_file():
            bucket.put(str(file.relative_to(folder)), file.read_bytes())
    return bucket


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours") / "td"
    with open_memmap(str(folder), mode="w", durable="none") as store:
        store.create({path: LeafSpec(value.shape, value.dtype) for path, value in LEAVES.items()})
        store.write([Write(path, (), value) for path, value in LEAVES.items() if value.numel()])
        store.save_header(HEADER)
    return uploaded(folder)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    tensordict = pytest.importorskip("tensordict")
    folder = tmp_path_factory.mktemp("peer") / "td"
    td = tensordict.TensorDict(
        {
            "a": torch.arange(12.0).view(4, 3),
            "next": {"obs": torch.arange(8).view(4, 2), "deep": {"x": torch.ones(4, dtype=torch.bool)}},
            "odd key/": torch.arange(4),
        },
        batch_size=[4],
    )
    td["note"] = tensordict.NonTensorData("hello", batch_size=[4])
    td.memmap(str(folder))
    lazy = tensordict.lazy_stack([tensordict.TensorDict({"v": torch.full((i + 1,), i)}) for i in range(3)])
    lazy.memmap(str(folder.parent / "lazy"))
    return uploaded(folder), uploaded(folder.parent / "lazy"), td


def flip(bucket, name, at):
    data = bytearray(bucket.bytes_of(name))
    data[at] ^= 1
    bucket.put(name, bytes(data))


# -- ours --------------------------------------------------------------------------------------
@pytest.mark.parametrize("opener", [open_objects, open_directory])
@pytest.mark.parametrize("verify", ["size", "full"])
def test_our_directory_opens_with_one_request(ours, opener, verify):
    engine = MemoryEngine(ours)
    store = opener(engine, verify=verify)
    assert isinstance(store, ByteStore)
    assert engine.requests == 1
    assert store.load_header() == HEADER
    assert equal(contents(store), LEAVES)
    assert engine.rounds == 2
    rows = torch.randperm(5000)[:40]
    engine.reset()
    fresh = opener(engine, verify=verify)
    got = fresh.read([Read(path, (rows,)) for path in list(LEAVES)[:3]])
    assert all(torch.equal(g, v[rows]) for g, v in zip(got, LEAVES.values()))
    assert engine.rounds == 2
    if verify == "size":
        assert engine.bytes_read < 8 * sum(g.nbytes for g in got) + 100_000
    assert store.verify() == []
    assert store.opened_generation


def test_it_can_only_be_read(ours):
    engine = MemoryEngine(ours)
    with pytest.raises(ReadOnlyError, match="directory of files") as caught:
        open_objects(engine, mode="r+")
    assert "anew" in caught.value.hint
    store = open_objects(engine)
    with pytest.raises(ReadOnlyError):
        store.delete([("flag",)])
    assert not store.writable


def test_damage_to_a_directory(ours):
    for name, at, verify in (
        ("frames.memmap", 5_000_000, "full"),  # in the second block
        ("frames.memmap", 3, "size"),  # in its tips
        ("next/reward.memmap", 9000, "size"),  # a leaf that is always fetched whole
    ):
        bucket = ours.copy()
        flip(bucket, name, at)
        leaf = ("frames",) if name.startswith("frames") else ("next", "reward")
        store = open_objects(MemoryEngine(bucket), verify=verify)
        row = at // 2000 if leaf == ("frames",) else at // 4
        with pytest.raises(CorruptStoreError, match=repr(leaf[-1])):
            store.read([Read(leaf, (slice(row, row + 1, 1),))])
        assert [f.path for f in store.verify()] == [leaf]
        assert store.read([Read(("flag",), (slice(1, 3, 1),))])[0].tolist() == [False, True]


def test_whole_blocks_for_scattered_rows_do_not_fill_the_memory(ours, monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.read.ROUND", 8 << 20)
    engine = MemoryEngine(ours)
    store = open_objects(engine, verify="full")
    rows = torch.arange(0, 5000, 500)
    engine.reset()
    rows = rows[torch.randperm(len(rows))]
    assert torch.equal(store.read([Read(("frames",), (rows,))])[0], LEAVES[("frames",)][rows])
    assert engine.rounds > 1
    assert engine.bytes_read <= 16 << 20  # in the order of the medium: no block comes twice, but at an edge


def test_files_of_another_save_are_noticed(ours):
    """Somebody uploaded a new leaf over the old one, of the same size, and not the manifest."""
    bucket = ours.copy()
    bucket.put("frames.memmap", bytes(5000 * 2000))
    store = open_objects(MemoryEngine(bucket))
    with pytest.raises(CorruptStoreError, match="other data than was committed"):
        store.read([Read(("frames",), (torch.tensor([17]),))])


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_file_that_is_gone_or_short(ours, damage):
    bucket = ours.copy()
    data = bucket.objects.pop("frames.memmap")[0]
    if damage == "short":
        bucket.put("frames.memmap", data[:-1])
    store = open_objects(MemoryEngine(bucket))
    with pytest.raises(CorruptStoreError, match="leaf 'frames'"):
        store.read([Read(("frames",), (slice(0, 1, 1),))])


# -- the peer's --------------------------------------------------------------------------------
@pytest.mark.parametrize("can", [EngineCap.LIST, EngineCap.NONE])
def test_the_peers_directory(peers, can):
    bucket, _, td = peers
    engine = MemoryEngine(bucket, can=can)
    with pytest.raises(StoreNotFoundError):
        open_objects(engine)
    engine.reset()
    store = open_directory(engine, no_manifest=True)
    assert engine.rounds == 3  # one for each level
    assert open_directory(engine).load_header() == store.load_header()
    found = contents(store)
    assert {path: t.tolist() for path, t in found.items()} == {
        ("a",): td["a"].tolist(),
        ("next", "obs"): td["next", "obs"].tolist(),
        ("next", "deep", "x"): td["next", "deep", "x"].tolist(),
        ("odd key/",): td["odd key/"].tolist(),
    }
    header = store.load_header()
    assert header.groups[()].batch_size == (4,)
    assert header.groups[()].values["note"] == {"data": "hello"}
    assert store.verify() == []
    assert store.opened_generation is None


@pytest.mark.parametrize("can", [EngineCap.LIST, EngineCap.NONE])
def test_the_peers_lazy_stack(peers, can):
    store = open_directory(MemoryEngine(peers[1], can=can))
    assert {path: t.tolist() for path, t in contents(store).items()} == {
        ("0", "v"): [0],
        ("1", "v"): [1, 1],
        ("2", "v"): [2, 2, 2],
    }
    assert store.load_header().groups[()].kind == "LazyStackedTensorDict"


def test_what_is_wrong_with_a_peers_directory(peers):
    bucket = peers[0].copy()
    del bucket.objects["next/deep/meta.json"]
    with pytest.raises(CorruptStoreError, match=r"'deep'.*no next/deep/meta\.json"):
        open_directory(MemoryEngine(bucket))
    bucket = peers[0].copy()
    bucket.put("next/meta.json", b"[1]")
    with pytest.raises(CorruptStoreError, match="not an object"):
        open_directory(MemoryEngine(bucket))
    bucket = peers[0].copy()
    bucket.put("note/meta.json", bucket.bytes_of("note/meta.json").replace(b'"data"', b'"date"'))
    with pytest.raises(CorruptStoreError, match="'note' is a value without data"):
        open_directory(MemoryEngine(bucket))
    bucket.put("note/other.pickle", b"whatever")  # passed on as it is: nothing below the containers unpickles
    with open_directory(MemoryEngine(bucket)) as store:
        assert store.load_header().groups[()].values["note"] == {"data": pickled_form(b"whatever", "data")}
    bucket = peers[0].copy()
    bucket.put("a.memmap", bucket.bytes_of("a.memmap")[:-4])
    with pytest.raises(CorruptStoreError, match="leaf 'a'"):
        contents(open_directory(MemoryEngine(bucket)))


def test_nothing_there():
    with pytest.raises(StoreNotFoundError, match=r"tdstore\.json nor meta\.json"):
        open_directory(MemoryEngine())


def test_a_local_directory_through_an_engine(tmp_path):
    with open_memmap(str(tmp_path / "td"), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((3,), "float32", fill_value=2)})
        store.save_header(Header())
    assert contents(open_objects(LocalEngine(tmp_path / "td")))[("a",)].tolist() == [2, 2, 2]
