"""Small leaves in one file: what it holds, when it is written, damage to it, growth, other processes."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import pytest
import tensordict
import torch

import tdstore
from tdstore import MemoryMappedTensor, TensorDict
from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import CorruptStoreError, DirtyStoreError, OptionError, StoreIOError
from tdstore.storekit.checksums import crc32c
from tdstore.storekit.documents import PACKED_FROM
from tdstore.testing.processes import warm
from tdstore.types import LeafSpec, Read, Write
from tests.builtin.memmap.support import content, die, header_of, in_child, load, same, save, small_disk

MANY = {
    **{("g", f"k{i}"): torch.arange(i, i + 10 + i) for i in range(40)},
    ("scalar",): torch.tensor(3.5),
    ("empty",): torch.zeros(0, 3),
    ("half",): torch.ones(7, 3, dtype=torch.bfloat16),
    ("flags",): torch.tensor([True, False, True]),
    ("large",): torch.arange(20_000.0),
}
PACK = "tdstore.pack"


@pytest.fixture
def location(tmp_path: FsPath) -> FsPath:
    save(tmp_path / "d", MANY, pack=True)
    return tmp_path / "d"


def records(location: FsPath) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((location / "tdstore.json").read_bytes().partition(b"\n")[2])["leaves"]
    return found


def test_files(location: FsPath) -> None:
    """Leaves of up to 64 KiB share a file, aligned; larger ones have their own, and nothing is for tensordict."""
    assert sorted(p.name for p in location.iterdir()) == ["large.memmap", "tdstore.json", PACK]
    offsets = {tuple(r["path"]): r.get("offset") for r in records(location)}
    packed = {path: at for path, at in offsets.items() if at is not None}
    assert packed.keys() == MANY.keys() - {("large",), ("empty",)}
    data = (location / PACK).read_bytes()
    for path, at in packed.items():
        assert at % 64 == 0
        raw = MANY[path].view(torch.uint8).numpy().tobytes() if MANY[path].ndim else MANY[path].numpy().tobytes()
        assert data[at : at + len(raw)] == raw
    assert same(load(location), MANY)


def many(count: int) -> TensorDict:
    return TensorDict({f"k{i}": torch.full((2,), float(i)) for i in range(count)}, [2])


@pytest.mark.parametrize("count", [PACKED_FROM - 1, PACKED_FROM])
def test_default(tmp_path: FsPath, count: int) -> None:
    """`save` packs from some number of small leaves on; `memmap` writes what `tensordict` reads, unless asked."""
    td = many(count)
    td.clone().set("wide", torch.zeros(2, 10_000)).save(tmp_path / "save").close()
    assert (tmp_path / "save" / PACK).exists() is (count >= PACKED_FROM)
    assert (tmp_path / "save" / "wide.memmap").exists()
    td.save(tmp_path / "off", pack=False).close()
    td.memmap(tmp_path / "memmap").close()
    td.memmap_like(tmp_path / "like").close()
    for name in ("off", "memmap", "like"):
        assert not (tmp_path / name / PACK).exists()
    assert tensordict.TensorDict.load_memmap(tmp_path / "memmap")["k7"].tolist() == [7.0, 7.0]
    td.memmap(tmp_path / "asked", pack=True).close()
    assert (tmp_path / "asked" / PACK).exists()
    tdstore.copy(tmp_path / "memmap", tmp_path / "copy")
    assert (tmp_path / "copy" / PACK).exists() is (count >= PACKED_FROM)
    with tdstore.open(tmp_path / "copy", verify="full") as opened:
        assert (opened == td).all()


def test_the_package_tensordict_says_so_at_once(location: FsPath) -> None:
    with pytest.raises(FileNotFoundError, match="meta.json"):
        tensordict.TensorDict.load_memmap(location)


def test_not_without_the_option(tmp_path: FsPath) -> None:
    for pack in (False, True):
        handle = TensorDict({"a": torch.ones(3)}, [3]).save(tmp_path / str(pack), storage="memmap", pack=pack)
        assert (tmp_path / str(pack) / PACK).exists() is pack
        handle.close()
    TensorDict({"a": torch.ones(3)}, [3]).memmap(tmp_path / "m")
    assert not (tmp_path / "m" / PACK).exists()


def test_flips(location: FsPath) -> None:
    """A flipped bit in a leaf is reported when the dataset is opened, and names the leaf."""
    chance = random.Random(3)
    pack = location / PACK
    data = pack.read_bytes()
    leaves = [r for r in records(location) if "offset" in r]
    for _ in range(60):
        leaf = chance.choice(leaves)
        damaged = bytearray(data)
        damaged[leaf["offset"] + chance.randrange(leaf["nbytes"])] ^= 1 << chance.randrange(8)
        pack.write_bytes(damaged)
        with pytest.raises(CorruptStoreError, match=repr(leaf["path"][-1])):
            open_memmap(str(location))
        with open_memmap(str(location), verify="none") as store:
            assert [fault.path for fault in store.verify()] == [tuple(leaf["path"])]


@pytest.mark.parametrize("change", ["gone", "empty", "short", "link", "folder"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_another_file(location: FsPath, change: str, mode: Any) -> None:
    pack = location / PACK
    data = pack.read_bytes()
    pack.unlink()
    if change in ("empty", "short"):
        pack.write_bytes(data[: len(data) // 2 if change == "short" else 0])
    elif change == "link":
        (location.parent / "elsewhere").write_bytes(data)
        pack.symlink_to(location.parent / "elsewhere")
    elif change == "folder":
        pack.mkdir()
    with pytest.raises(CorruptStoreError, match="expected"):
        open_memmap(str(location), mode=mode)


def test_longer_is_no_matter(location: FsPath) -> None:
    """Bytes of leaves that were deleted stay in the file, so its length tells nothing."""
    with open(location / PACK, "ab") as file:
        file.write(b"x" * 100)
    assert same(load(location), MANY)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "not aligned": lambda one, other: one.update(offset=one["offset"] + 4),
    "negative": lambda one, other: one.update(offset=-64),
    "far": lambda one, other: one.update(offset=2**40),
    "beyond 64 bits": lambda one, other: one.update(offset=2**70),
    "bytes of another": lambda one, other: one.update(offset=other["offset"]),
    "another file": lambda one, other: one.update(file=["large.memmap"]),
    "deeper": lambda one, other: one.update(file=["g", PACK]),
    "no offset": lambda one, other: one.pop("offset"),
    "no file": lambda one, other: one.update(file=[]),
    "large": lambda one, other: one.update(shape=[100_000], nbytes=800_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_crafted(location: FsPath, change: str) -> None:
    body = json.loads((location / "tdstore.json").read_bytes().partition(b"\n")[2])
    one, other = [r for r in body["leaves"] if r["path"][0] == "g"][:2]
    CHANGES[change](one, other)
    data = json.dumps(body).encode()
    (location / "tdstore.json").write_bytes(b"TDS1 %08x\n" % crc32c(data) + data)
    for mode in ("r", "r+"):
        with pytest.raises(CorruptStoreError):
            open_memmap(str(location), mode=mode)  # type: ignore[arg-type]


def test_rows_in_place(location: FsPath) -> None:
    """Rows go to their place in the file, by `write` and by live tensors, and neighbours stay as they are."""
    new = dict(MANY)
    new[("g", "k3")] = MANY[("g", "k3")].clone()
    new[("g", "k3")][4:6] = 99
    new[("g", "k5")] = MANY[("g", "k5")] * 2
    new[("flags",)] = ~MANY[("flags",)]
    with open_memmap(str(location), mode="r+") as store:
        store.write(
            [Write(("g", "k3"), (slice(4, 6, 1),), torch.tensor([99, 99])), Write(("g", "k5"), (), new["g", "k5"])]
        )
        store.view(("flags",)).logical_not_()
        version = store.view(("scalar",))._version
        store.view(("half",)).add_(0)
        assert store.view(("scalar",))._version == version, "leaves share a count of versions"
    assert same(load(location), new)


@pytest.mark.parametrize("length", [4, 60, 60_000])
def test_other_lengths(location: FsPath, length: int) -> None:
    """A leaf that changes its length moves to a file of its own, at the commit; the others stay."""
    path = ("g", "k30")
    before = (location / PACK).read_bytes()
    with open_memmap(str(location), mode="r+") as store:
        old = store.view(path)
        store.resize({path: length})
        store.discard()
        store.resize({path: length})
        assert not (location / "g").exists()
        store.save_header(store.load_header())
        assert torch.equal(old, MANY[path])
    assert (location / "g" / "k30.memmap").stat().st_size == 8 * length
    assert (location / PACK).read_bytes() == before
    got = load(location)
    assert torch.equal(got[path][:40], MANY[path][:length]) and not got[path][40:].any()
    got[path] = MANY[path]
    assert same(got, MANY)


def test_append_and_resize(tmp_path: FsPath) -> None:
    td = TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}}, [3])
    with td.save(tmp_path / "d", pack=True) as handle:
        handle.append(td[0])
        handle.extend(td)
        handle.resize_(6)
        assert handle.batch_size == (6,)
    with tdstore.open(tmp_path / "d", verify="full") as opened:
        assert (opened.clone() == torch.cat([td, td[:1], td])[:6]).all()
    assert not (tmp_path / "d" / PACK).exists(), "no leaf is packed any more"
    assert (tmp_path / "d" / "meta.json").exists()


def test_rename_and_delete(location: FsPath) -> None:
    with open_memmap(str(location), mode="r+") as store:
        store.rename({("g", "k1"): ("moved", "here"), ("g", "k2"): ("g", "k1")})
        store.delete([("half",), ("large",)])
        left = content(store)
        store.save_header(header_of(left))
    want = {k: v for k, v in MANY.items() if k not in {("half",), ("large",), ("g", "k2")}}
    want["moved", "here"], want["g", "k1"] = MANY["g", "k1"], MANY["g", "k2"]
    assert same(load(location), want)
    assert (location / PACK).exists() and not (location / "large.memmap").exists()


def test_killed_while_a_view_was_written(location: FsPath) -> None:
    def body() -> None:
        store = open_memmap(str(location), mode="r+")
        store.view(("g", "k7"))[:1].add_(1)
        die("")

    in_child(body)
    with pytest.raises(DirtyStoreError) as caught:
        open_memmap(str(location))
    assert caught.value.leaves == (("g", "k7"),)
    open_memmap(str(location), mode="r+", recover="accept").close()
    assert load(location)["g", "k7"][0] == 8


def test_budget(location: FsPath) -> None:
    with pytest.raises(CorruptStoreError, match="max_bytes=100"):
        open_memmap(str(location), max_bytes=100)


def test_fill_values_and_unwritten_leaves(tmp_path: FsPath) -> None:
    with open_memmap(str(tmp_path / "d"), mode="w", pack=True) as store:
        specs = {("a",): LeafSpec((3,), "float32", fill_value=2.5), ("b",): LeafSpec((4,), "int16")}
        store.create(specs)
        store.create({("late",): LeafSpec((2,), "int64", fill_value=7)})
        store.save_header(header_of({path: torch.zeros(1) for path in (*specs, ("late",))}))
    assert (tmp_path / "d" / "late.memmap").exists(), "only leaves that the store is made with are packed"
    got = load(tmp_path / "d")
    assert [got[k].tolist() for k in (("a",), ("b",), ("late",))] == [[2.5] * 3, [0] * 4, [7, 7]]


def test_other_processes(tmp_path: FsPath) -> None:
    """Leaves, their rows and views are pickled by their place in the file; both sides see writes."""
    td = TensorDict({f"k{i}": torch.full((4, 2), float(i)) for i in range(5)}, [4])
    handle = td.save(tmp_path / "d", pack=True)
    leaf = handle["k3"]
    assert isinstance(leaf, MemoryMappedTensor) and leaf.filename == str(tmp_path / "d" / PACK)
    for part in (leaf, leaf[1:3], leaf[:, 1]):
        again = pickle.loads(pickle.dumps(part))
        assert torch.equal(again, part)
        again += 1
        assert torch.equal(again, part)
    assert torch.equal(handle["k2"], td["k2"]) and torch.equal(handle["k4"], td["k4"])
    data = tmp_path / "leaf"
    data.write_bytes(pickle.dumps(leaf))
    code = f"import pickle, tdstore; pickle.load(open({str(data)!r}, 'rb'))[2] = 70"
    subprocess.run([*warm.python(), "-c", code], check=True, timeout=200)
    assert leaf[2].tolist() == [70, 70]
    handle.close()
    with tdstore.open(tmp_path / "d", verify="full") as opened:
        assert opened["k3"][2].tolist() == [70, 70] and opened.is_memmap()


def test_sparse_copy(location: FsPath) -> None:
    """A file with holes gets its blocks when it is opened for writing."""
    with open_memmap(str(location), mode="r+") as store:
        store.view(("g", "k39")).zero_()
    pack = location / PACK
    data = pack.read_bytes()
    pack.unlink()
    with open(pack, "wb") as file:
        file.truncate(len(data) + (1 << 20))
        file.write(data)
    with open_memmap(str(location), mode="r+") as store:
        store.view(("g", "k39")).fill_(3)
    assert load(location)["g", "k39"].tolist() == [3] * 49


def test_full_disk(tmp_path: FsPath) -> None:
    """A disk without room for the leaves is an error, and leaves nothing."""
    with small_disk(tmp_path / "disk", 8) as disk:
        leaves = {(f"k{i}",): torch.zeros(16_000) for i in range(2000)}
        with pytest.raises(StoreIOError):
            save(disk / "d", leaves, pack=True)
        assert os.listdir(disk) == []


def test_a_number_is_the_largest_packed_leaf(tmp_path: FsPath) -> None:
    leaves = {("a",): torch.arange(20000.0), ("b",): torch.arange(20001.0), ("c", "d"): torch.ones(3)}
    save(tmp_path / "d", leaves, pack=80000)
    assert {p.name for p in (tmp_path / "d").iterdir()} == {"tdstore.json", "tdstore.pack", "b.memmap"}
    with open_memmap(str(tmp_path / "d"), verify="full") as store:
        for path, value in leaves.items():
            assert torch.equal(store.read([Read(path)])[0], value)
    for wrong in (-1, (4 << 20) + 1):
        with pytest.raises(OptionError, match=f"pack={wrong}"):
            open_memmap(str(tmp_path / "e"), mode="w", pack=wrong)
