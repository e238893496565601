"""The memmap store itself: places, options, sparse files, what it tells about itself."""

from __future__ import annotations

import gc
import os
from pathlib import Path as FsPath

import pytest
import torch

from tdstore import TensorDict
from tdstore.builtin.memmap import writing
from tdstore.builtin.memmap.store import open_memmap
from tdstore.builtin.memmap.tensor import scratch_dir
from tdstore.errors import OptionError, StoreNotFoundError, UnsupportedError
from tdstore.lifetime import settle
from tdstore.storekit import files, pages, publish
from tdstore.types import LeafSpec, Read, Write
from tests.builtin.memmap.support import NEW, OLD, content, header_of, in_child, load, same, save

ON_DISK = True  # pages of the page cache


@pytest.mark.parametrize(
    "location", ["s3://bucket/x", "http://x/y", "simplecache::s3://b", "memmap://s3://b", "", "a\0b"]
)
def test_what_is_no_local_folder(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    monkeypatch.chdir(tmp_path)
    for mode in ("r", "w", "a"):
        with pytest.raises(OptionError):
            open_memmap(location, mode=mode)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_scheme_and_relative_places(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("memmap://deep/er/d", OLD)
    assert same(load(tmp_path / "deep" / "er" / "d"), OLD)
    (tmp_path / "link").symlink_to("deep/er/d")
    save("link", NEW)
    assert (tmp_path / "link").is_symlink() and same(load("deep/er/d"), NEW)


def test_parents_of_an_abandoned_store_go(tmp_path: FsPath) -> None:
    open_memmap(str(tmp_path / "x" / "y" / "d"), mode="w").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"durable": "sometimes"}, {"verify": True}, {"recover": "zero"}, {"mode": "rw"}])
def test_bad_options(tmp_path: FsPath, options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        open_memmap(str(tmp_path / "d"), **options)  # type: ignore[arg-type]


def test_huge_zeros_are_sparse_and_cheap(tmp_path: FsPath) -> None:
    """64 GB of zeros take no blocks, at creation, at the commit and at full verification."""
    shape = (1 << 20, 1 << 14)
    with open_memmap(str(tmp_path / "d"), mode="w") as store:
        store.create({("a",): LeafSpec(shape, "float32"), ("b",): LeafSpec((4,), "int64", fill_value=-1)})
        view = store.view(("a",))
        store.save_header(header_of({("a",): torch.zeros(1), ("b",): torch.zeros(1)}))
        view[1 << 19, 3] = 5
        store.write([Write(("a",), (torch.tensor([7, 1 << 18]), slice(0, 2, 1)), torch.ones(2, 2))])
        assert (store.nbytes_stored() or 0) < 1 << 20
    with open_memmap(str(tmp_path / "d")) as store:
        a, b = store.read([Read(("a",), (torch.tensor([1 << 19, 7, 8]), slice(0, 4, 1))), Read(("b",))])
        assert a.tolist() == [[0, 0, 0, 5], [1, 1, 0, 0], [0, 0, 0, 0]] and b.tolist() == [-1] * 4


def test_preallocation_takes_blocks(tmp_path: FsPath) -> None:
    with open_memmap(str(tmp_path / "d"), mode="w") as store:
        store.create({("a",): LeafSpec((1 << 20,), "uint8"), ("b",): LeafSpec((1 << 20,), "uint8", preallocate=False)})
        stored = store.nbytes_stored()
    assert stored is not None and 1 << 20 <= stored < 1 << 21


def anonymous_folders() -> set[str]:
    """Return the folders of the anonymous stores of this process; other programs have some in the same place."""
    opened = (os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd"))
    return {path for path in opened if path.startswith(f"{scratch_dir()}/.tdstore-anon")}


def test_anonymous_store() -> None:
    before = anonymous_folders()
    store = open_memmap(mode="w")
    store.create({("a",): LeafSpec((3,), "float32")})
    (folder,) = anonymous_folders() - before
    view = store.view(("a",))
    view.fill_(2)
    assert store.read([Read(("a",))])[0].tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="anonymous"):
        _ = view.filename  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError):
        store.leaf_file(("a",))
    del store
    gc.collect()
    assert view.tolist() == [2, 2, 2]
    del view
    gc.collect()
    settle()
    assert not os.path.exists(folder)
    with pytest.raises(StoreNotFoundError):
        open_memmap(None)


def test_anonymous_folder_of_a_dead_process_is_swept(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    before = anonymous_folders()

    def body() -> None:
        store = open_memmap(mode="w")
        store.create({("a",): LeafSpec((3,), "float32")})
        (tmp_path / "folders").write_text("".join(anonymous_folders() - before))
        os.kill(os.getpid(), 9)

    assert in_child(body) == -9
    folder = (tmp_path / "folders").read_text()
    assert os.path.isdir(folder)
    monkeypatch.setattr(publish, "_saves_until_look", {})  # it is the next look that removes it
    open_memmap(mode="w").close()
    assert not os.path.exists(folder)


def test_anonymous_folder_that_a_rival_sweeps_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take a folder that is not locked yet for one that was left."""
    made: list[str] = []
    make_dir = files.make_dir

    def made_and_swept(name: str, parent: int, mode: int = 0o777) -> None:
        make_dir(name, parent, mode)
        made.append(name)
        if len(made) == 1:
            publish.sweep_dead(name, parent, ())

    monkeypatch.setattr(files, "make_dir", made_and_swept)
    before = anonymous_folders()
    with open_memmap(mode="w") as store:
        store.create({("a",): LeafSpec((3,), "float32")})
        (folder,) = anonymous_folders() - before
        assert len(made) == 2 and os.path.basename(folder) == made[1]
        assert not os.path.exists(os.path.join(scratch_dir(), made[0]))


def test_file_names_and_reopening(tmp_path: FsPath) -> None:
    save(tmp_path / "d", OLD)
    with open_memmap(str(tmp_path / "d"), mode="r+", lock_timeout=3) as store:
        assert store.leaf_file(("n", "b")) == str(tmp_path / "d" / "n" / "b.memmap")
        assert store.view(("n", "b")).filename == store.leaf_file(("n", "b"))  # type: ignore[attr-defined]
        location, mode, options = store.reopen_token()
        assert (location, mode, options["lock_timeout"]) == (str(tmp_path / "d"), "r+", 3)
        with open_memmap(location, mode=mode, **options) as again:
            assert same(content(again), OLD)
    store = open_memmap(str(tmp_path / "e"), mode="w")
    assert store.reopen_token()[1] == "r+"
    store.close()


def test_rename_swaps(tmp_path: FsPath) -> None:
    leaves = {("a",): torch.zeros(3), ("g", "b"): torch.ones(3), ("e",): torch.zeros(0)}
    save(tmp_path / "d", leaves)
    moved = {("g", "b"): leaves[("a",)], ("a",): leaves[("g", "b")], ("f",): leaves[("e",)]}
    with open_memmap(str(tmp_path / "d"), mode="r+") as store:
        store.rename({("a",): ("g", "b"), ("g", "b"): ("a",), ("e",): ("f",)})
        assert same(content(store), moved)
        assert same(load(tmp_path / "d"), leaves)  # not committed
        store.save_header(header_of(moved))
    assert same(load(tmp_path / "d"), moved)


def test_write_from_its_own_leaf(tmp_path: FsPath) -> None:
    """Source and target overlap: the source counts as it was."""
    save(tmp_path / "d", {("a",): torch.arange(10.0)})
    with open_memmap(str(tmp_path / "d"), mode="r+") as store:
        view = store.view(("a",))
        store.write([Write(("a",), (), view.flip(0))])
        store.write([Write(("a",), (slice(2, 10, 1),), view[:8])])
        store.write([Write(("a",), (), view)])
    assert load(tmp_path / "d")[("a",)].tolist() == [9, 8, 9, 8, 7, 6, 5, 4, 3, 2]


@pytest.mark.parametrize("shape", [(40, 30), (3, 2_000_000), (2, 3, 500_001)])
def test_values_that_are_not_contiguous(tmp_path: FsPath, shape: tuple[int, ...]) -> None:
    """Written in blocks, with the same sums as if they were."""
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape).transpose(0, -1)
    expanded = torch.tensor([[1.5], [2.5]]).expand(2, 3_000_000)
    conj = (torch.ones(5) + 1j * torch.arange(5)).conj()
    leaves = {("t",): value, ("x",): expanded, ("c",): conj}
    save(tmp_path / "d", leaves)
    assert same(load(tmp_path / "d"), {k: v.clone().resolve_conj() for k, v in leaves.items()})


def test_recreated_leaf_and_old_views(tmp_path: FsPath) -> None:
    save(tmp_path / "d", OLD)
    with open_memmap(str(tmp_path / "d"), mode="r+") as store:
        old = store.view(("a",))
        store.create({("a",): LeafSpec((4,), "int8")})
        assert torch.equal(old, OLD[("a",)]) and same(load(tmp_path / "d"), OLD)
        store.save_header(store.load_header())
        assert torch.equal(old, OLD[("a",)])
    assert load(tmp_path / "d")[("a",)].tolist() == [0] * 4


def test_rows_for_an_empty_leaf(tmp_path: FsPath) -> None:
    """From no rows, and so no file, to some and back."""
    with open_memmap(str(tmp_path / "d"), mode="w") as store:
        store.create({("a",): LeafSpec((0, 2), "int64", fill_value=3), ("b",): LeafSpec((0,), "int8")})
        store.resize({("a",): 2, ("b",): 16})
        store.save_header(header_of({("a",): torch.zeros(1), ("b",): torch.zeros(1)}))
        store.resize({("a",): 0})
        store.save_header(store.load_header())
        store.resize({("a",): 1})
        store.save_header(store.load_header())
    assert same(load(tmp_path / "d"), {("a",): torch.full((1, 2), 3), ("b",): torch.zeros(16, dtype=torch.int8)})


@pytest.mark.parametrize("rows", [4, 200])
def test_long_runs_are_written_to_the_file(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A run of 512 KiB or more needs no page of the mapping; views show it, and torch counts it as a write."""
    written: list[int] = []
    real = files.write_at
    monkeypatch.setattr(writing, "are_mapped", lambda address, nbytes: False)  # `product` maps them
    with open_memmap(str(tmp_path / "d"), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((500, 1000), "float32")})
        store.save_header(header_of({("a",): torch.zeros(1)}))
        view = store.view(("a",))
        weight = torch.ones(500, 1000, requires_grad=True)
        product = (view * weight).sum()
        monkeypatch.setattr(files, "write_at", lambda fd, data, at: (written.append(len(data)), real(fd, data, at)))
        value = torch.rand(1000, rows).t()  # not contiguous
        store.write([Write(("a",), (slice(100, 100 + rows, 1), slice(0, 1000, 1)), value)])
        assert sum(written) == (value.nbytes if rows == 200 else 0)
        assert torch.equal(view[100 : 100 + rows], value) and not view[:100].any() and not view[100 + rows :].any()
        with pytest.raises(RuntimeError, match="inplace operation"):
            product.backward()
    with open_memmap(str(tmp_path / "d"), verify="full") as store:
        assert torch.equal(store.view(("a",))[100 : 100 + rows], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize(("state", "turns"), [("mapped", 1), ("in memory", 2), ("unknown", 4)])
def test_long_runs_that_are_written_again_are_copied_to_pages(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, state: str, turns: int
) -> None:
    """They go to the file as long as their pages are not mapped, and the first time in any case."""
    written: list[int] = []
    real = files.write_at
    monkeypatch.setattr(files, "write_at", lambda fd, data, at: (written.append(len(data)), real(fd, data, at)))
    if state != "mapped":
        monkeypatch.setattr(writing, "are_mapped", lambda address, nbytes: False)
    if state == "unknown":
        monkeypatch.setattr(pages, "_mincore", lambda start, size, there: -1)
    everything = slice(0, 2400, 1)
    with open_memmap(str(tmp_path / "d"), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((500, 2400), dtype)})
        store.save_header(header_of({("a",): torch.zeros(1)}))
        view, whole = store.view(("a",)), torch.zeros(500, 2400, dtype=dtype)
        weight = torch.ones(500, 2400, requires_grad=True)
        for turn, start in enumerate((0, 250, 0, 100)):
            product = (view * weight).sum() if dtype is torch.float32 and turn else None
            value = (torch.rand(2400, 250) * 2).to(dtype).t()  # not contiguous
            if turn == 3:
                value = value.conj() if dtype.is_complex else value[:1].expand(250, 2400)
            written.clear()
            store.write([Write(("a",), (slice(start, start + 250, 1), everything), value)])
            whole[start : start + 250] = value
            assert sum(written) == (value.nbytes if turn < turns else 0)
            assert torch.equal(view, whole), "which maps all pages"
            if product is not None:
                with pytest.raises(RuntimeError, match="inplace operation"):
                    product.backward()
    with open_memmap(str(tmp_path / "d"), verify="full") as store:
        assert torch.equal(store.view(("a",)), whole)


@pytest.mark.parametrize("leaves", [2, 40])
@pytest.mark.parametrize("durable", ["commit", "none"])
def test_long_leaves_reach_the_storage_while_others_are_written(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, durable: str, leaves: int
) -> None:
    events: list[str] = []
    for name in ("write_at", "start_writeback", "fsync"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *a, n=name, f=real: (events.append(n), f(*a))[1])
    td = TensorDict({f"a{i}": torch.full((66_000,), i) for i in range(leaves)}, [66_000])
    td.save(tmp_path / "d", durable=durable).close()
    each = ["write_at", "start_writeback"] if durable == "commit" else ["write_at"]
    assert events[: leaves * len(each)] == each * leaves
    assert TensorDict.load(tmp_path / "d")["a1"].eq(1).all()


def test_a_long_pack_reaches_the_storage_while_checksums_are_computed(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for module, name in [(files, "start_writeback"), (writing, "sums_of_block")]:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=real: (events.append(n), f(*a))[1])
    leaves = {(f"a{i}",): torch.full((40_000,), i) for i in range(2)}
    save(tmp_path / "d", leaves, durable="commit", pack=1 << 20)
    assert events[:3] == ["start_writeback", "sums_of_block", "sums_of_block"]
    assert same(load(tmp_path / "d"), leaves)
