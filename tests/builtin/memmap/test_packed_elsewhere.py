"""Datasets with packed leaves where they are no local folder: in archives, and read through engines."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memmap.store import open_memmap
from tdstore.builtin.tdz.store import open_tdz
from tdstore.bytestore import open_directory
from tdstore.errors import CorruptStoreError, UnsupportedError
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import Read, Write
from tests.builtin.memmap.support import content, load, same, save
from tests.builtin.memmap.test_packed import MANY, PACK, records

PATH = ("g", "k7")


@pytest.fixture
def location(tmp_path: FsPath) -> FsPath:
    save(tmp_path / "d", MANY, pack=True)
    return tmp_path / "d"


@pytest.fixture
def archive(location: FsPath) -> FsPath:
    return tdstore.pack_memmap(location, location.parent / "x.tdz")


def pack_start(path: FsPath) -> int:
    """Where the packed leaves begin in an archive."""
    with zipfile.ZipFile(path) as found:
        at = found.getinfo(PACK).header_offset
    head = path.read_bytes()[at : at + 30]
    return at + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


def flip(path: FsPath, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def offset_of(location: FsPath, path: tuple[str, ...]) -> int:
    return next(int(r["offset"]) for r in records(location) if tuple(r["path"]) == path)


# -- archives --------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["stored", "deflate", "lzma"])
def test_in_an_archive_and_out_again(location: FsPath, method: str) -> None:
    path = tdstore.pack_memmap(location, location.parent / "x.tdz", compression=method)
    assert tdstore.is_memmap_archive(path)
    if method == "stored":
        assert pack_start(path) % 64 == 0
    for verify in ("size", "full", "none"):
        with open_tdz(str(path), verify=verify) as store:  # type: ignore[arg-type]
            assert same(content(store), MANY)
            assert store.verify() == []
            version = store.view(("flags",))._version
            store.view(PATH)[:] = 0
            assert store.view(("flags",))._version == version, "leaves share a count of versions"
            assert torch.equal(store.view(("g", "k8")), MANY["g", "k8"])
    out = tdstore.unpack_memmap(path, location.parent / "out")
    assert same(load(out), MANY)
    assert (out / PACK).read_bytes() == (location / PACK).read_bytes()
    if method != "stored":
        with pytest.raises(UnsupportedError, match="compressed"):
            open_tdz(str(path), mode="r+")


def test_an_archive_of_another_program(location: FsPath) -> None:
    """Its entries begin anywhere: they are copied to memory."""
    for level in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = location.parent / f"{level}.tdz"
        with zipfile.ZipFile(path, "w", level) as made:
            made.writestr("x", b"x")
            for name in ("tdstore.json", PACK, "large.memmap"):
                made.write(location / name, name)
        with open_tdz(str(path)) as store:
            assert same(content(store), MANY)
            assert store.verify() == []


def test_an_archive_is_changed(archive: FsPath) -> None:
    """Rows of packed leaves, and leaves that get another name or length; the checksums of the zip fit again."""
    want = dict(MANY)
    for number in range(2):
        with open_tdz(str(archive), mode="r+") as store:
            want[PATH] = want[PATH].clone()
            want[PATH][2 + number] = 70
            store.write([Write(PATH, (slice(2 + number, 3 + number, 1),), torch.tensor([70]))])
            store.view(("scalar",)).fill_(8.5 + number)
            want["scalar",] = torch.tensor(8.5 + number)
        with zipfile.ZipFile(archive) as found:
            assert found.testzip() is None
            assert sorted(found.namelist()) == ["large.memmap", "tdstore.json", PACK]
        with open_tdz(str(archive), verify="full") as store:
            assert same(content(store), want)
    with open_tdz(str(archive), mode="r+") as store:
        store.rename({("g", "k1"): ("moved",)})
        store.resize({("g", "k2"): 3})
        store.delete([("half",)])
        store.save_header(store.load_header())
    want["moved",] = want.pop(("g", "k1"))
    want["g", "k2"] = want["g", "k2"][:3]
    del want["half",]
    with open_tdz(str(archive), verify="full") as store:
        assert same(content(store), want)
    assert same(load(tdstore.unpack_memmap(archive, archive.parent / "out")), want)


def test_no_packed_leaf_is_left_in_an_archive(archive: FsPath) -> None:
    """The entry goes with the last of them, and `tensordict` can read the rest."""
    with open_tdz(str(archive), mode="r+") as store:
        store.delete([path for path in MANY if path != ("large",)])
        store.save_header(store.load_header())
    with zipfile.ZipFile(archive) as found:
        names = set(found.namelist())
        assert PACK not in names
        assert {"large.memmap", "meta.json", "tdstore.json"} <= names
        assert found.testzip() is None


@pytest.mark.parametrize("path", [PATH, ("scalar",)])
def test_damage_in_an_archive(location: FsPath, archive: FsPath, path: tuple[str, ...]) -> None:
    flip(archive, pack_start(archive) + offset_of(location, path))
    with pytest.raises(CorruptStoreError, match=repr(path[-1])):
        open_tdz(str(archive))
    with open_tdz(str(archive), verify="none") as store:
        assert [fault.path for fault in store.verify()] == [path]
    with pytest.raises(CorruptStoreError):
        tdstore.unpack_memmap(archive, archive.parent / "out")
    assert not (archive.parent / "out").exists()


@pytest.mark.parametrize("change", ["gone", "short"])
def test_an_archive_without_them(location: FsPath, change: str) -> None:
    path = location.parent / "x.tdz"
    with zipfile.ZipFile(path, "w") as made:
        made.write(location / "tdstore.json", "tdstore.json")
        made.write(location / "large.memmap", "large.memmap")
        if change == "short":
            made.writestr(PACK, (location / PACK).read_bytes()[:-200])
    with pytest.raises(CorruptStoreError, match="expected"):
        open_tdz(str(path))


def test_a_bomb_behind_a_small_leaf(tmp_path: FsPath) -> None:
    """What is unpacked is the whole entry, and it counts, whatever its leaves declare."""
    save(tmp_path / "d", {("a",): torch.ones(4)}, pack=True)
    with zipfile.ZipFile(tmp_path / "x.tdz", "w", zipfile.ZIP_DEFLATED) as made:
        made.write(tmp_path / "d" / "tdstore.json", "tdstore.json")
        made.writestr(PACK, (tmp_path / "d" / PACK).read_bytes() + bytes(1 << 20))
    with pytest.raises(CorruptStoreError, match="max_bytes"):
        open_tdz(str(tmp_path / "x.tdz"), max_bytes=1 << 16)
    with open_tdz(str(tmp_path / "x.tdz")) as store:
        assert store.read([Read(("a",))])[0].tolist() == [1.0] * 4


# -- engines ---------------------------------------------------------------------------------
@pytest.mark.parametrize("verify", ["size", "full", "none"])
def test_read_through_an_engine(location: FsPath, verify: str) -> None:
    with open_directory(LocalEngine(str(location)), verify=verify) as store:  # type: ignore[arg-type]
        assert same(content(store), MANY)
        assert store.verify() == []
        assert store.read([Read(PATH, (slice(2, 5, 1),))])[0].tolist() == [9, 10, 11]
    with tdstore.open(location, storage="remote") as td:
        assert torch.equal(td["g", "k7"], MANY[PATH])


@pytest.mark.parametrize("verify", ["size", "full"])
def test_damage_behind_an_engine(location: FsPath, verify: str) -> None:
    flip(location / PACK, offset_of(location, PATH) + 9)
    with open_directory(LocalEngine(str(location)), verify=verify) as store:  # type: ignore[arg-type]
        with pytest.raises(CorruptStoreError, match="k7"):
            store.read([Read(PATH)])
        assert torch.equal(store.read([Read(("g", "k8"))])[0], MANY["g", "k8"])
        assert [fault.path for fault in store.verify()] == [PATH]


@pytest.mark.parametrize("change", ["gone", "short"])
def test_a_folder_without_them_behind_an_engine(location: FsPath, change: str) -> None:
    data = (location / PACK).read_bytes()
    (location / PACK).unlink()
    if change == "short":
        (location / PACK).write_bytes(data[:1000])
    with (
        open_directory(LocalEngine(str(location))) as store,
        pytest.raises(CorruptStoreError, match=PACK),
    ):
        store.read([Read(("g", "k39"))])


def test_leaves_of_both_kinds_behind_an_engine(location: FsPath) -> None:
    """A packed leaf that grew has a file of its own, and is described among packed ones."""
    with open_memmap(str(location), mode="r+") as store:
        store.resize({PATH: 30})
        store.save_header(store.load_header())
    with open_directory(LocalEngine(str(location)), verify="full") as store:
        got = content(store)
    assert torch.equal(got[PATH][:17], MANY[PATH])
    got[PATH] = MANY[PATH]
    assert same(got, MANY)


def test_uploaded_and_copied_back(tmp_path: FsPath) -> None:
    """A dataset that was packed by default goes through an archive and an engine as it is."""
    td = TensorDict({f"k{i}": torch.full((3,), i) for i in range(300)}, [3])
    td.save(tmp_path / "d").close()
    assert (tmp_path / "d" / PACK).exists()
    shutil.copytree(tmp_path / "d", tmp_path / "uploaded")
    tdstore.copy(tmp_path / "uploaded", tmp_path / "x.tdz", src_storage="remote")
    with tdstore.open(tmp_path / "x.tdz", verify="full") as opened:
        assert (opened == td).all()
