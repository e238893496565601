"""Archives: one file, mapped where it lies; the peer's open here and ours there; what is hostile opens nowhere."""

from __future__ import annotations

import os
import pickle
import stat
import struct
import zipfile

import pytest
import tensordict
import torch

import tdstore
from tdstore import NonTensorStack, TensorDict, lazy_stack
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    LockedError,
    OptionError,
    ReadOnlyError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)

ON_DISK = True  # files with large holes
METHODS = ["stored", "deflate", "bzip2", "lzma"]


def example(module=tdstore, **kwargs):
    below = {"c": torch.arange(6, dtype=torch.int32).view(3, 2), "d": torch.ones(3, dtype=torch.bool)}
    nested = module.TensorDict(below, [3])
    return module.TensorDict({"a": torch.arange(3.0), "b": nested, "s": "hi", "e": torch.zeros(3, 0)}, [3], **kwargs)


def check(td, a=(0.0, 1.0, 2.0)) -> None:
    assert set(td.keys()) == {"a", "b", "s", "e"}
    assert td["a"].tolist() == list(a)
    assert td["b", "c"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert td["b", "d"].tolist() == [True] * 3
    assert td["s"] == "hi"
    assert td["e"].shape == (3, 0)
    assert td.batch_size == (3,)


def places(path):
    """Names, and where the bytes of each entry begin."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
            yield info, info.header_offset + 30 + name + extra


# -- ours and theirs -------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("writer", "reader"), [(tdstore, tensordict), (tensordict, tdstore), (tdstore, tdstore)])
def test_both_ways(tmp_path, method, writer, reader):
    example(writer).memmap(tmp_path / "x.tdz", compression=method)
    check(reader.TensorDict.load(tmp_path / "x.tdz"))
    check(reader.TensorDict.load_memmap(tmp_path / "x.tdz"))
    nested = reader.TensorDict.load_memmap(tmp_path / "x.tdz", subpath="b")
    assert sorted(nested.keys()) == ["c", "d"]
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        assert archive.testzip() is None
    for info, start in places(tmp_path / "x.tdz"):
        if info.filename.endswith(".memmap") and method == "stored":
            assert start % 64 == 0
    assert [name for name in os.listdir(tmp_path) if name != "x.tdz"] == []


def test_every_way_in_and_out(tmp_path):
    td = example(names=["t"])
    ways = {
        "save": lambda to: td.save(to),
        "memmap": lambda to: td.memmap(to),
        "dumps": lambda to: td.dumps(to),
        "tdstore": lambda to: tdstore.save(td, to),
        "storage": lambda to: td.save(to, storage="tdz"),
        "early": lambda to: td.memmap(to, return_early=True).result(),
    }
    for name, way in ways.items():
        made = way(tmp_path / f"{name}.tdz")
        check(made)
        assert made.is_locked
        assert made.is_memmap()
        assert str(made.saved_path) == str(tmp_path / f"{name}.tdz")
        for back in (TensorDict.load(tmp_path / f"{name}.tdz"), tdstore.open(tmp_path / f"{name}.tdz")):
            check(back)
            assert back.names == ["t"]
            assert list(back.keys()) == list(td.keys())
    assert os.path.isfile(td.memmap(tmp_path / "plain", archive=True).saved_path)
    assert zipfile.is_zipfile(tmp_path / "plain")
    check(TensorDict.load(tmp_path / "plain"))  # recognised by its first bytes
    assert os.path.isdir(td.memmap(tmp_path / "dir.tdz", archive=False).saved_path)
    check(TensorDict.load(tmp_path / "dir.tdz"))
    with pytest.raises(OptionError):
        td.memmap(tmp_path / "dir", compression="deflate")
    for wrong in ("zstd", True, 99):
        with pytest.raises(OptionError):
            td.save(tmp_path / "x.tdz", compression=wrong)
    with pytest.raises(OptionError):
        td.save(archive=True)
    with pytest.raises(LockedError):
        td.memmap(tmp_path / "l.tdz")["new"] = torch.ones(3)


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "lazy", "window"])
def test_from_every_container(tmp_path, kind):
    td = example()
    source = {
        "memmap": lambda: td.memmap(tmp_path / "mm"),
        "h5": lambda: td.save(tmp_path / "x.h5", storage="h5"),
        "zarr": lambda: td.save(tmp_path / "x.zarr", storage="zarr"),
        "lazy": lambda: lazy_stack(list(td.unbind(0)), 0),
        "window": lambda: td.save(tmp_path / "x.h5", storage="h5")[0:3],
    }[kind]()
    source.save(tmp_path / "x.tdz")
    back = TensorDict.load(tmp_path / "x.tdz").to_tensordict()
    check(back.set("s", "hi") if kind == "lazy" else back)
    if kind == "lazy":  # whose elements have a value each
        return
    check(tdstore.copy(tmp_path / "x.tdz", tmp_path / "y.h5", storage="h5") or tdstore.open(tmp_path / "y.h5"))


def test_what_the_peer_has_no_place_for(tmp_path):
    td = TensorDict(
        {
            "a/b": {"..": torch.ones(2)},
            "shape": torch.zeros(2),
            "f8": torch.ones(2).to(torch.float8_e4m3fn),
            "t": [(1, b"x"), (2, b"y")],
            "v": NonTensorStack("p", "q"),
        },
        [2],
        names=["t"],
    )
    td.save(tmp_path / "x.tdz")
    back = TensorDict.load(tmp_path / "x.tdz")
    assert list(back.keys(True)) == list(td.keys(True))
    assert back["a/b", ".."].tolist() == [1, 1]
    assert back["t"] == [(1, b"x"), (2, b"y")]
    assert back["v"] == ["p", "q"]
    assert back["f8"].dtype == torch.float8_e4m3fn
    assert back.names == ["t"]


def test_ragged_lazy_stack(tmp_path):
    for writer in (tdstore, tensordict):
        stack = writer.lazy_stack([writer.TensorDict({"x": torch.ones(n)}) for n in (2, 3)])
        stack.memmap(tmp_path / "x.tdz")
        for reader in (tdstore, tensordict):
            back = reader.TensorDict.load(tmp_path / "x.tdz")
            assert [part.shape[0] for part in back.get("x", as_list=True)] == [2, 3]


# -- modes -----------------------------------------------------------------------------------
def test_reading_changes_nothing(tmp_path):
    example().save(tmp_path / "x.tdz")
    before = (tmp_path / "x.tdz").read_bytes()
    td = tdstore.open(tmp_path / "x.tdz")
    with pytest.raises(ReadOnlyError):
        td.zero_()
    td["a"].fill_(9)  # private memory, as that of a memmap directory
    td.close()
    assert (tmp_path / "x.tdz").read_bytes() == before


def test_writing_into_leaves(tmp_path):
    example().save(tmp_path / "x.tdz")
    with tdstore.open(tmp_path / "x.tdz", "r+") as td:
        view = td["a"]
        td["b", "c"].fill_(0)
        td.set_("a", torch.full((3,), 7.0))
        td.get("b")[1:] = TensorDict({"c": torch.full((2, 2), 4), "d": torch.zeros(2, dtype=torch.bool)}, [2])
        view[0] = 8
        check(tdstore.open(tmp_path / "x.tdz", verify="full"))
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        assert archive.testzip() is None
    for reader in (tdstore, tensordict):
        td = reader.TensorDict.load(tmp_path / "x.tdz")
        assert td["a"].tolist() == [8, 7, 7]
        assert td["b", "c"].tolist() == [[0, 0], [4, 4], [4, 4]]
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:  # what unzip makes of it is whole, too
        archive.extractall(tmp_path / "unzipped")
    assert tdstore.open(tmp_path / "unzipped", verify="full")["a"].tolist() == [8, 7, 7]


def test_structure_changes_and_live_tensors_stay_live(tmp_path):
    example().save(tmp_path / "x.tdz")
    td = tdstore.open(tmp_path / "x.tdz", "r+")
    view = td["a"]
    td["new"] = torch.full((3,), 5.0)
    fresh = td["new"]
    view.fill_(1)
    fresh[0] = 6
    td["b", "deep"] = {"x": torch.ones(3, 2)}
    td.rename_key_("new", "newer")
    del td["e"]
    td["s"] = "other"
    td.batch_size = []
    view[2] = 3
    td.close()
    for reader in (tdstore, tensordict):
        back = reader.TensorDict.load(tmp_path / "x.tdz")
        assert back["a"].tolist() == [1, 1, 3]
        assert back["newer"].tolist() == [6, 5, 5]
        assert back["b", "deep", "x"].shape == (3, 2)
        assert back["s"] == "other"
        assert "e" not in back.keys()
        assert back.batch_size == ()
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        assert archive.testzip() is None
    assert [name for name in os.listdir(tmp_path) if name != "x.tdz"] == []


def test_replaced_while_open(tmp_path):
    saved = example().save(tmp_path / "x.tdz")
    example().apply(lambda t: t + 1 if t.is_floating_point() else t).save(tmp_path / "x.tdz")
    check(saved)  # what was mapped stays readable
    check(TensorDict.load(tmp_path / "x.tdz"), (1, 2, 3))
    with pytest.raises(ConflictError):
        saved.commit()


def test_places(tmp_path):
    (tmp_path / "dir").mkdir()
    (tmp_path / "text.tdz").write_text("mine")
    for there in (tmp_path / "dir", tmp_path / "text.tdz"):
        with pytest.raises(StoreExistsError):
            example().save(there, storage="tdz")
    assert (tmp_path / "text.tdz").read_text() == "mine"
    example().save(tmp_path / "below" / "deeper" / "x.tdz")
    with pytest.raises(StoreExistsError):
        example().save(tmp_path / "below" / "deeper" / "x.tdz", mode="x")
    with pytest.raises(StoreNotFoundError):
        tdstore.open(tmp_path / "none.tdz")
    assert not (tmp_path / "none.tdz").exists()
    check(tdstore.open(f"tdz://{tmp_path}/below/deeper/x.tdz"))
    for elsewhere in ("s3://bucket/x.tdz", "cache::x.tdz", "tdz://", "nul\0l.tdz", None):
        with pytest.raises(OptionError, match="tdz backend|not the name of a file"):
            example().save(elsewhere, storage="tdz")


def test_a_failed_save_leaves_the_old(tmp_path, monkeypatch):
    example().save(tmp_path / "x.tdz")
    before = (tmp_path / "x.tdz").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
    for method in ("stored", "deflate"):
        with pytest.raises(OSError, match="full"):
            example().save(tmp_path / "x.tdz", compression=method)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x.tdz"]
    assert (tmp_path / "x.tdz").read_bytes() == before


def test_a_commit_that_failed_can_be_repeated(tmp_path, monkeypatch):
    example().save(tmp_path / "x.tdz").close()
    td = tdstore.open(tmp_path / "x.tdz", "r+")
    td["a"].fill_(7)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            td["new"] = torch.ones(3)
    check(TensorDict.load(tmp_path / "x.tdz"))
    td["new"] = torch.ones(3)
    check(TensorDict.load(tmp_path / "x.tdz").exclude("new"), (7, 7, 7))
    td.close()
    assert TensorDict.load(tmp_path / "x.tdz")["new"].tolist() == [1, 1, 1]
    data = (tmp_path / "x.tdz").read_bytes()
    for info, _ in places(tmp_path / "x.tdz"):  # in both places, for there are readers of either
        assert struct.unpack_from("<I", data, info.header_offset + 14) == (info.CRC,)
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_large_sparse_archives_take_no_room(tmp_path):
    td = TensorDict({"x": torch.zeros(1).expand(1 << 18, 64)}, [1 << 18])
    like = td.memmap_like(tmp_path / "x.tdz")
    assert like["x"].shape == (1 << 18, 64)
    assert os.stat(tmp_path / "x.tdz").st_blocks * 512 < 1 << 20
    like["x"][77] = 1
    like.commit()
    assert os.stat(tmp_path / "x.tdz").st_blocks * 512 < 80 << 20, "a leaf that was written, and no copy of it"
    assert TensorDict.load(tmp_path / "x.tdz")["x"].sum() == 64


def test_pickled_as_its_place(tmp_path):
    td = TensorDict({"x": torch.arange(100_000)}, [100_000]).save(tmp_path / "x.tdz")
    data = pickle.dumps(td)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data)["x"], td["x"])


def test_unaligned_and_compressed_entries(tmp_path):
    example().memmap(tmp_path / "dir").close()
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as archive:  # as any zip program makes it
        for folder, _, names in os.walk(tmp_path / "dir"):
            for name in names:
                full = os.path.join(folder, name)
                archive.write(full, os.path.relpath(full, tmp_path / "dir"))
    assert any(start % 4 for info, start in places(tmp_path / "x.tdz") if info.filename == "a.memmap")
    check(TensorDict.load(tmp_path / "x.tdz"))
    with tdstore.open(tmp_path / "x.tdz", "r+") as td:
        td["a"][0] = 9
        td["b", "c"].numpy()[0, 0] = 8
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        assert archive.testzip() is None
    back = tdstore.open(tmp_path / "x.tdz", verify="full")
    assert (back["a"].tolist(), back["b", "c"].tolist()) == ([9, 1, 2], [[8, 1], [2, 3], [4, 5]])
    example().save(tmp_path / "y.tdz", compression=zipfile.ZIP_DEFLATED, compresslevel=9)
    with pytest.raises(UnsupportedError, match="compressed"):
        tdstore.open(tmp_path / "y.tdz", "r+")
    check(tdstore.open(tmp_path / "y.tdz", verify="full"))


# -- pack and unpack -------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("packer", "unpacker"), [(tdstore, tensordict), (tensordict, tdstore), (tdstore, tdstore)])
def test_pack_and_unpack(tmp_path, method, packer, unpacker):
    example(packer).memmap(tmp_path / "dir")
    assert packer.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz", compression=method) == tmp_path / "x.tdz"
    packer.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz", compression=method)
    check(unpacker.TensorDict.load(tmp_path / "x.tdz"))
    assert unpacker.is_memmap_archive(tmp_path / "x.tdz")
    for _ in range(2):
        assert unpacker.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out") == tmp_path / "out"
    check(unpacker.TensorDict.load(tmp_path / "out"))
    for name in ("a.memmap", "b/c.memmap"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "dir" / name).read_bytes()


def test_pack_and_unpack_keep_what_is_private_private(tmp_path):
    example().memmap(tmp_path / "dir")
    tdstore.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz")
    tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    (tmp_path / "x.tdz").chmod(0o600)
    (tmp_path / "out").chmod(0o700)
    tdstore.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz")
    tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("x.tdz", "out")] == [0o600, 0o700]


def test_pack_keeps_the_whole_header(tmp_path):
    td = TensorDict({"x": torch.ones(2), "t": (1, "x"), "f": torch.ones(2).to(torch.float8_e5m2)}, [], names=[])
    td.auto_batch_size_()
    td.names = ["t"] * td.batch_dims or None
    td.memmap(tmp_path / "dir")
    tdstore.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz")
    with tdstore.open(tmp_path / "x.tdz", "r+") as opened:
        assert opened["f"].dtype == torch.float8_e5m2
        opened["x"].fill_(3)
    tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    back = tdstore.open(tmp_path / "out", verify="full")
    assert back["x"].tolist() == [3, 3]
    assert back.names == td.names


def test_refresh(tmp_path):
    example(tensordict).memmap(tmp_path / "x.tdz")
    tensordict.TensorDict.load_memmap(tmp_path / "x.tdz", mode="r+")["a"].fill_(6)
    assert zipfile.ZipFile(tmp_path / "x.tdz").testzip() == "a.memmap"
    store = tdstore.open(tmp_path / "x.tdz")
    assert store["a"].tolist() == [6, 6, 6]
    with pytest.raises(CorruptStoreError, match="a.*CRC"):
        tdstore.open(tmp_path / "x.tdz", verify="full")
    with pytest.raises(CorruptStoreError):
        tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert tdstore.refresh_archive_checksums(tmp_path / "x.tdz") == tmp_path / "x.tdz"
    assert zipfile.ZipFile(tmp_path / "x.tdz").testzip() is None
    check(tensordict.TensorDict.load(tmp_path / "x.tdz"), (6, 6, 6))


def test_what_is_an_archive(tmp_path):
    example().memmap(tmp_path / "dir")
    (tmp_path / "text").write_text("PK")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("dir/meta.json", "{}")
    for name in ("dir", "text", "other.zip", "none"):
        assert not tdstore.is_memmap_archive(tmp_path / name)
        assert not tensordict.is_memmap_archive(tmp_path / name)
    with pytest.raises(CorruptStoreError, match="meta"):
        tdstore.open(tmp_path / "other.zip")
    with pytest.raises(StoreNotFoundError):
        tdstore.pack_memmap(tmp_path, tmp_path / ".." / "x.tdz")
    with pytest.raises(StoreExistsError):
        tdstore.pack_memmap(tmp_path / "dir", tmp_path / "dir" / "x.tdz")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    tdstore.pack_memmap(tmp_path / "dir", tmp_path / "x.tdz")
    with pytest.raises(StoreExistsError):
        tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "mine")
    (tmp_path / "dir" / "link.memmap").symlink_to("/etc/passwd")
    with pytest.raises(CorruptStoreError):
        tdstore.pack_memmap(tmp_path / "dir", tmp_path / "y.tdz")
    assert not (tmp_path / "y.tdz").exists()


# -- hostile archives ------------------------------------------------------------------------
META = (
    '{"a":{"device":"cpu","shape":[3],"dtype":"torch.float32","is_nested":false},"shape":[3],"device":"cpu",'
    '"_type":"<class \'tensordict._td.TensorDict\'>"}'
)


def crafted(path, *more, meta=META, data=bytes(12), method=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("meta.json", meta)
        archive.writestr("a.memmap", data)
        for name, content in more:
            archive.writestr(name, content)


def refused(path) -> None:
    for read in (
        lambda: tdstore.open(path),
        lambda: tdstore.open(path, "r+"),
        lambda: tdstore.unpack_memmap(path, path.parent / "out"),
    ):
        with pytest.raises(CorruptStoreError, match=r"x\.tdz"):
            read()
    assert sorted(os.listdir(path.parent)) == ["x.tdz"]


def test_a_crafted_archive_that_is_right_opens(tmp_path):
    crafted(tmp_path / "x.tdz", ("__MACOSX/._a", b"x"), ("notes.txt", b"y"))
    assert tdstore.open(tmp_path / "x.tdz")["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/evil", "b/../../evil", "b//evil", "./evil", "..", "b\\..\\evil", "b/..", "nul\0l", "x" * 300],
)
def test_names_that_climb_out(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as archive:
        archive.writestr("meta.json", META)
        archive.writestr("a.memmap", bytes(12))
        info = zipfile.ZipInfo("placeholder")
        info.filename = name
        archive.writestr(info, b"evil")
    refused(tmp_path / "x.tdz")
    assert not (tmp_path.parent / "evil").exists()


def test_links_and_doubles(tmp_path):
    for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR):
        info = zipfile.ZipInfo("link.memmap")
        info.external_attr = (kind | 0o777) << 16
        info.create_system = 3
        crafted(tmp_path / "x.tdz", (info, b"/etc/passwd"))
        refused(tmp_path / "x.tdz")
    with pytest.warns(UserWarning, match="Duplicate"):
        crafted(tmp_path / "x.tdz", ("a.memmap", bytes(12)))
    refused(tmp_path / "x.tdz")


def directory(data: bytearray, name: bytes) -> int:
    """Where the record of an entry is in the directory of a zip."""
    at = data.find(b"PK\x01\x02")
    while data[at + 46 : at + 46 + len(name)] != name:
        at = data.find(b"PK\x01\x02", at + 4)
        assert at > 0
    return at


@pytest.mark.parametrize(
    "change",
    [
        ("overlap", 42, "<I", 0),
        ("far away", 42, "<I", 2**31),
        ("longer", 24, "<I", 2**30),
        ("both longer", 20, "<2I", 2**30, 2**30),
        ("shorter", 24, "<I", 4),
        ("another method", 10, "<H", 8),
        ("unknown method", 10, "<H", 77),
    ],
    ids=lambda change: change[0],
)
def test_lying_directories(tmp_path, change):
    crafted(tmp_path / "x.tdz")
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    struct.pack_into(change[2], data, directory(data, b"a.memmap") + change[1], *change[3:])
    (tmp_path / "x.tdz").write_bytes(data)
    refused(tmp_path / "x.tdz")


def test_bombs(tmp_path):
    big = META.replace('[3],"dtype"', f'[{1 << 40}],"dtype"').replace('"shape":[3]', '"shape":[]')
    crafted(tmp_path / "x.tdz", meta=big)
    refused_to_open(tmp_path / "x.tdz")
    crafted(tmp_path / "x.tdz", meta=META + " " * (65 << 20), method=zipfile.ZIP_DEFLATED)
    refused_to_open(tmp_path / "x.tdz")
    # Says that it is small, and unpacks to more; and the other way round.
    for claimed, real in ((12, 4 << 20), (4 << 20, 12)):
        meta = META.replace('[3],"dtype"', f'[{claimed // 4}],"dtype"').replace('"shape":[3]', '"shape":[]')
        crafted(tmp_path / "x.tdz", meta=meta, data=bytes(real), method=zipfile.ZIP_DEFLATED)
        data = bytearray((tmp_path / "x.tdz").read_bytes())
        struct.pack_into("<I", data, directory(data, b"a.memmap") + 24, claimed)
        (tmp_path / "x.tdz").write_bytes(data)
        refused_to_open(tmp_path / "x.tdz")
    meta = META.replace('[3],"dtype"', f'[{1 << 20}],"dtype"').replace('"shape":[3]', '"shape":[]')
    crafted(tmp_path / "x.tdz", meta=meta, data=bytes(4 << 20), method=zipfile.ZIP_DEFLATED)
    assert tdstore.open(tmp_path / "x.tdz")["a"].sum() == 0
    with pytest.raises(CorruptStoreError, match="max_bytes"):
        tdstore.open(tmp_path / "x.tdz", max_bytes=1 << 20)


def refused_to_open(path) -> None:
    with pytest.raises(CorruptStoreError, match=r"x\.tdz"):
        tdstore.open(path)


def test_damaged_archives(tmp_path):
    example().save(tmp_path / "x.tdz")
    whole = (tmp_path / "x.tdz").read_bytes()
    for cut in (4, 100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "x.tdz").write_bytes(whole[:cut])
        refused_to_open(tmp_path / "x.tdz")
    encrypted = bytearray(whole)
    encrypted[directory(encrypted, b"a.memmap") + 8] |= 1
    (tmp_path / "x.tdz").write_bytes(encrypted)
    with pytest.raises(UnsupportedError):
        tdstore.open(tmp_path / "x.tdz")
    manifest = bytearray(whole)
    manifest[manifest.find(b"TDS1 ") + 40] ^= 1
    (tmp_path / "x.tdz").write_bytes(manifest)
    refused_to_open(tmp_path / "x.tdz")
    pickled = META.replace("tensordict._td.TensorDict", "os.system")
    crafted(tmp_path / "x.tdz", meta=pickled)
    refused_to_open(tmp_path / "x.tdz")


SMALL_LEAVES = {
    "numbers": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(5, dtype=torch.int16),
    "bits": torch.tensor([True, False]),
    "bfloat16": torch.ones(2, 2, dtype=torch.bfloat16),
    "float8": torch.ones(4, 1, dtype=torch.float8_e4m3fn),
    "complex": torch.ones(2, 1, 2, dtype=torch.complex64).conj(),
    "unsigned": torch.ones(3, dtype=torch.uint16),
    "größe": torch.ones(2, 2),
}


@pytest.mark.parametrize("name", SMALL_LEAVES)
def test_leaves_of_every_kind_are_compared_when_an_archive_is_opened(name: str, tmp_path) -> None:
    place = tmp_path / "x.tdz"
    TensorDict(SMALL_LEAVES, []).save(place).close()
    td = tdstore.load(place)
    for key, value in SMALL_LEAVES.items():
        assert td[key].shape == value.shape
        assert td[key].tolist() == value.tolist(), key
        # Each has memory of its own: a pickle of one does not hold the archive.
        assert td[key].untyped_storage().nbytes() == value.nbytes
    td.close()
    found = next(at for info, at in places(place) if info.filename == f"{name}.memmap")
    data = bytearray(place.read_bytes())
    data[found] ^= 1
    place.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=f"leaf '{name}' is damaged"):
        tdstore.load(place)
