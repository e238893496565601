"""What a commit is: rows and structure apart, the way back, readers beside a writer, zip files that are written on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any, cast

import pytest
import torch
import zarr
from tdstore_zarr.place.memory_engine import MemoryEngine
from tdstore_zarr.place.redo_log import LoggedEngine
from tdstore_zarr.store import ZarrStore, open_on, open_zarr
from zarrhelp import NEW, OLD, everything, fill, header_of, load, same, save

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreBusyError, StoreIOError
from tdstore.types import LeafSpec, Mode, Read, Write
from tests import scripts


class Medium:
    """A place that stores are opened at, and what lies there."""

    def __init__(self, place: FsPath | None) -> None:
        self.place = place
        self.engine = MemoryEngine("memory://x")

    def open(self, mode: Mode = "r", **options: Any) -> ZarrStore:
        if self.place is not None:
            return open_zarr(self.place, mode=mode, **options)
        return open_on(MemoryEngine("memory://x", self.engine.objects), mode=mode, **options)

    def content(self) -> dict[str, bytes]:
        if self.place is None:
            return {key: data for key, (data, _) in self.engine.objects.items()}
        return {str(p.relative_to(self.place)): p.read_bytes() for p in self.place.rglob("*") if p.is_file()}

    def load(self) -> Any:
        with self.open(verify="full") as store:
            return everything(store)

    def tidy(self) -> bool:
        return not [name for name in self.content() if name.startswith("tdstore")]


@pytest.fixture(params=["folder", "objects"])
def medium(request: pytest.FixtureRequest, place: FsPath) -> Iterator[Medium]:
    """A folder and an object store, with `OLD`."""
    medium = Medium(place if request.param == "folder" else None)
    with medium.open("w", chunks=8, shards=32) as store:
        fill(store, OLD)
        store.save_header(header_of(OLD))
    yield medium
    assert medium.tidy()


# -- the way back ----------------------------------------------------------------------------
def change(store: ZarrStore) -> None:
    """Everything that can be changed, without a commit."""
    store.write([Write(("a",), (slice(0, 50, 1),), NEW[("a",)][:50])])
    store.create({("a",): LeafSpec((3, 2), "int8", fill_value=1), ("new", "x"): LeafSpec((7,), "float64")})
    store.write([Write(("new", "x"), (), torch.ones(7, dtype=torch.float64))])
    store.resize({("n", "b"): 30})
    store.rename({("n", "b"): ("c",), ("c",): ("n", "b")})
    store.delete([("c",)])
    store.flush()


def test_discard_takes_everything_back(medium: Medium) -> None:
    before = medium.content()
    with medium.open("r+") as store:
        change(store)
        store.discard()
        assert same(everything(store), OLD)
        assert store.load_header() == header_of(OLD)
        change(store)
        store.discard()
    assert medium.content() == before
    assert same(medium.load(), OLD)


def test_discard_goes_back_to_the_last_commit(medium: Medium) -> None:
    with medium.open("r+") as store:
        store.write([Write(p, (), v) for p, v in NEW.items()])
        store.save_header(header_of(NEW))
        change(store)
        store.discard()
        assert same(everything(store), NEW)
        store.write([Write(("c",), (), OLD[("c",)])])
    assert same(medium.load(), {**NEW, ("c",): OLD[("c",)]})


def test_discard_of_a_new_store_leaves_nothing(tmp_path: FsPath) -> None:
    for medium in (Medium(tmp_path / "n.zarr"), Medium(None)):
        with medium.open("w") as store:
            fill(store, OLD)
            store.flush()
            store.discard()
            assert list(store.paths()) == []
            fill(store, {("other",): torch.arange(5)})
            store.save_header(header_of({("other",): torch.arange(5)}))
        assert same(medium.load(), {("other",): torch.arange(5)})


def test_a_replaced_leaf_whose_write_fails_is_the_old_one(place: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after close(), and also where nobody discards."""
    for discards in (True, False):
        save(place, OLD)
        store = open_zarr(place, mode="r+")
        store.create({("a",): LeafSpec((100,), "float64"), ("new",): LeafSpec((100,), "int8")})
        with monkeypatch.context() as patch:
            patch.setattr("tdstore.storekit.files.write_at", _no_space)
            with pytest.raises(StoreIOError):
                store.write([Write(("a",), (), torch.ones(100, dtype=torch.float64))])
                store.flush()
            if discards:
                store.discard()
                assert same(everything(store), OLD)
        store.close()
        assert same(load(place, verify="full"), OLD)


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_commit_that_cannot_be_moved_to_its_place_is_a_commit(
    medium: Medium, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The medium refuses right after the commit: it is said, readers see it, and the next commit does the rest."""

    def refuse(engine: LoggedEngine[Any]) -> None:
        raise StoreIOError(f"{engine.url}: no space left", url=engine.url)

    store = medium.open("r+")
    with monkeypatch.context() as patch:
        patch.setattr(LoggedEngine, "apply", refuse)
        store.write([Write(p, (), v) for p, v in NEW.items()])
        store.save_header(header_of(NEW))
        assert "is committed, and the next writer has to tidy up" in capsys.readouterr().err
        assert same(everything(store), NEW)
        assert same(medium.load(), NEW)
        store.create({("a",): LeafSpec((3,), "int8")})
        store.discard()
        assert same(everything(store), NEW)
        store.close()
    assert same(medium.load(), NEW)
    assert not medium.tidy()
    with medium.open("r+") as store:
        assert medium.tidy()
        store.write([Write(("c",), (), OLD[("c",)])])
    assert same(medium.load(), {**NEW, ("c",): OLD[("c",)]})


# -- close() ---------------------------------------------------------------------------------
def test_close_keeps_rows_and_drops_structure(medium: Medium) -> None:
    with medium.open("r+") as store:
        store.write([Write(("c",), (slice(0, 9, 1),), NEW[("c",)][:9])])
        change(store)
    half = OLD[("a",)].clone()
    half[:50] = NEW[("a",)][:50]
    flags = OLD[("c",)].clone()
    flags[:9] = NEW[("c",)][:9]
    assert same(medium.load(), {**OLD, ("a",): half, ("c",): flags})


def test_rows_after_a_change_of_structure_are_of_the_leaf_that_stays(medium: Medium) -> None:
    with medium.open("r+") as store:
        store.resize({("n", "b"): 130})
        store.write([Write(("a",), (), NEW[("a",)]), Write(("n", "b"), (slice(0, 1, 1),), torch.tensor([7]))])
    assert same(medium.load(), {**OLD, ("a",): NEW[("a",)]})


def test_structure_without_rows_changes_nothing(medium: Medium) -> None:
    before = medium.content()
    with medium.open("r+") as store:
        store.delete([("a",)])
        store.create({("z",): LeafSpec((3,), "int8")})
    assert medium.content() == before


# -- readers beside a writer -----------------------------------------------------------------
def test_a_reader_reads_the_last_commit(medium: Medium) -> None:
    """It neither waits nor is told to come later, whatever the writer is doing."""
    writer = medium.open("r+")
    reader = medium.open()
    change(writer)
    assert same(everything(reader), OLD)
    assert same(medium.load(), OLD)
    writer.discard()
    writer.write([Write(p, (), v) for p, v in NEW.items()])
    writer.flush()
    assert same(everything(reader), OLD)
    writer.save_header(header_of(NEW))
    assert same(medium.load(), NEW)
    found = everything(reader)  # over a wire small objects were fetched when it was opened
    assert same(found, NEW if medium.place is not None else OLD), "a reader that was open follows"
    writer.close()
    reader.close()


BIG = {("x",): torch.randint(0, 255, (4000, 500), dtype=torch.uint8), ("y",): torch.arange(4000)}


def test_a_reader_follows_rows_but_no_change_of_structure(medium: Medium) -> None:
    """Also over a wire, where it learns of a commit from objects that are not those it knows."""
    with medium.open("w", chunks=500, shards=2000) as store:
        fill(store, BIG)
        store.save_header(header_of(BIG))
    reader = medium.open()
    rows = torch.tensor([3, 1700, 3999])
    assert torch.equal(reader.read([Read(("x",), (rows,))])[0], BIG[("x",)][rows])
    with medium.open("r+") as writer:
        writer.write([Write(("x",), (), BIG[("x",)].flip(0))])
    assert torch.equal(reader.read([Read(("x",), (rows,))])[0], BIG[("x",)].flip(0)[rows])
    assert torch.equal(reader.read([Read(("y",), (rows,))])[0], rows)
    with medium.open("r+") as writer:
        writer.create({("x",): LeafSpec((3,), "float32")})
        writer.write([Write(("x",), (), torch.ones(3))])
        writer.save_header(header_of(BIG))
    with pytest.raises(StoreBusyError, match="open it again"):
        reader.read([Read(("x",), (rows,))])
    reader.close()


def test_a_reader_of_a_store_that_grows_sees_the_rows_it_knows(medium: Medium) -> None:
    reader = medium.open()
    before = everything(reader)
    with medium.open("r+") as writer:
        for path, value in BIG.items():
            writer.create({path: LeafSpec(value.shape, value.dtype, chunks=500)})
            writer.write([Write(path, (), value)])
        writer.resize(dict.fromkeys(OLD, 130))
        writer.write([Write(p, (slice(100, 130, 1),), v[:30]) for p, v in NEW.items()])
        writer.write([Write(p, (slice(0, 1, 1),), v[:1]) for p, v in NEW.items()])
        writer.save_header(header_of(BIG))
    now = {path: torch.cat([NEW[path][:1], value[1:]]) for path, value in before.items()}
    after = everything(reader)
    assert same(after, now if medium.place is not None else before)
    assert torch.equal(reader.read([Read(("a",), (slice(90, 100, 1),))])[0], OLD[("a",)][90:])
    with pytest.raises(IndexError):
        reader.read([Read(("a",), (slice(99, 101, 1),))])
    with medium.open() as fresh:
        assert fresh.specs([("a",)])[0].shape == (130, 40)
    reader.close()


def test_threads_that_read_beside_a_writer_get_one_commit_each(medium: Medium) -> None:
    values = {("x",): torch.zeros(3000, 200, dtype=torch.int32), ("y",): torch.zeros(3000, dtype=torch.int64)}
    with medium.open("w", chunks=100, shards=1000) as store:
        fill(store, values)
        store.save_header(header_of(values))
    reader = medium.open()
    stop = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        try:
            while not stop.is_set():
                x, y = reader.read([Read(("x",)), Read(("y",))])
                if x.unique().tolist() != y.unique().tolist() or x.unique().numel() != 1:
                    wrong.append((x.unique(), y.unique()))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(1, 8):
            with medium.open("r+", durable="none") as writer:
                writer.write([Write(p, (), torch.full_like(v, turn)) for p, v in values.items()])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert int(medium.load()[("y",)][0]) == 7
    reader.close()


def test_rows_read_while_another_thread_follows_a_commit_are_read_again(tmp_path: FsPath) -> None:
    """The read ends while the other thread holds the session's lock: its rows may be of both commits."""
    with open_zarr(tmp_path / "t.zarr", mode="w") as store:
        fill(store, OLD)
        store.save_header(header_of(OLD))
    reader = open_zarr(tmp_path / "t.zarr")
    lock, turns = reader._session._following, []

    class Taken:
        """The lock of a session; the first to wait for it waits until the other thread has followed."""

        def __enter__(self) -> None:
            turns.append(1)
            if len(turns) == 1:
                with open_zarr(tmp_path / "t.zarr", mode="r+") as writer:
                    writer.write([Write(p, (), v) for p, v in NEW.items()])
                assert reader._session.follow(ask=False)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    reader._session._following = cast(Any, Taken())
    assert same(everything(reader), NEW)
    reader.close()


# -- zip files -------------------------------------------------------------------------------
def test_a_zip_file_is_written_on(tmp_path: FsPath) -> None:
    """Rows that were written after the save are there after close()."""
    place = tmp_path / "t.zarr.zip"
    with open_zarr(place, mode="w", chunks=8, shards=32) as store:
        fill(store, OLD)
        store.save_header(header_of(OLD))
        store.write([Write(("n", "b"), (slice(3, 5, 1),), torch.tensor([-1, -2]))])
        assert same(load(place, verify="full"), OLD)
        store.create({("dropped",): LeafSpec((3,), "int8")})
    found = load(place, verify="full")
    assert found.pop(("n", "b"))[:6].tolist() == [0, 1, 2, -1, -2, 5]
    assert same(found, {path: value for path, value in OLD.items() if path != ("n", "b")})
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


def test_a_zip_file_that_cannot_be_packed_again_is_the_old_one(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "t.zarr.zip"
    store = open_zarr(place, mode="w")
    fill(store, OLD)
    store.save_header(header_of(OLD))
    with monkeypatch.context() as patch:
        patch.setattr("tdstore.storekit.files.create_empty", _no_space)
        store.create({("a",): LeafSpec((2,), "int8")})
        store.write([Write(("n", "b"), (), NEW["n", "b"])])
        with pytest.raises(StoreIOError):
            store.save_header(header_of(OLD))
        store.discard()
    assert same(everything(store), OLD)
    store.write([Write(("c",), (), NEW[("c",)])])
    store.close()
    assert same(load(place, verify="full"), {**OLD, ("c",): NEW[("c",)]})
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


# -- the end of a script ---------------------------------------------------------------------
SCRIPT = """
import sys, torch, tdstore
from tdstore import LeafSpec, TensorDict
place, how = sys.argv[1:]
if how == "schema":
    td = TensorDict.from_schema({"x": LeafSpec((), "float32")}, batch_size=[10], location=place, mode="w")
elif how == "save":
    td = TensorDict({"x": torch.zeros(10)}, [10]).save(place)
else:
    td = tdstore.open(place, mode=how)
if how != "r":
    td[3:5] = {"x": torch.ones(2)}
"""


@pytest.mark.parametrize(
    ("suffix", "how"),
    [
        (".zarr", "r+"),
        (".zarr", "save"),
        (".zarr", "schema"),
        (".zarr", "r"),
        (".zarr.zip", "save"),
        (".zarr.zip", "r"),
    ],
)
def test_a_script_that_ends_without_close(tmp_path: FsPath, suffix: str, how: str) -> None:
    """Its rows are there, and it says nothing at its end."""
    place = tmp_path / f"t{suffix}"
    TensorDict({"x": torch.zeros(10)}, [10]).save(place).close()
    done = scripts.run(SCRIPT, place, how)
    assert (done.status, done.errors) == (0, "")
    with tdstore.open(place) as td:
        assert td["x"].tolist() == ([0.0] * 10 if how == "r" else [0, 0, 0, 1, 1, 0, 0, 0, 0, 0])
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


def test_a_chunk_where_a_folder_of_chunks_was(tmp_path: FsPath) -> None:
    """Chunks of a leaf with fewer dimensions have names that were folders."""
    td = TensorDict({"a": torch.zeros(4, 2, 3)}, [4]).to_zarr(tmp_path / "x.zarr")
    td["a"] = torch.ones(4)
    td.add_(1)
    td["a"] = torch.zeros(4, 2, 3)
    del td["a"]
    td["a"] = torch.ones(4)
    td.close()
    with tdstore.open(tmp_path / "x.zarr") as again:
        assert again["a"].tolist() == [1] * 4


def test_a_reader_of_a_folder_that_is_replaced_as_a_whole(tmp_path: FsPath) -> None:
    """It reads on from the files that it has open; for others it is told what happened."""
    place = str(tmp_path / "data.zarr")
    TensorDict({"a": torch.arange(100.0), "b": torch.zeros(100)}, [100]).save(place, chunks=10, shards=100).close()
    reader = tdstore.open(place)
    assert reader["a"][:20].tolist() == list(range(20))
    TensorDict({"a": torch.ones(100), "b": torch.ones(100)}, [100]).save(place, chunks=10, shards=100).close()
    assert reader["a"][30:50].tolist() == list(range(30, 50))
    with pytest.raises(StoreBusyError, match="data.zarr was replaced as a whole") as caught:
        reader["b"]
    assert "open it again" in str(caught.value.hint)
    with tdstore.open(place) as again:
        assert again["b"].sum() == 100
    reader.close()


# -- the end of a process ------------------------------------------------------------------------
SPAWNED = """
import multiprocessing, sys
import torch
from tdstore import TensorDict

def work(place):
    global td
    td = TensorDict.from_schema({"a": "int64"}, batch_size=[20], location=place)
    td[3:7] = TensorDict({"a": torch.full((4,), 5)}, [4])

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, args=sys.argv[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
THREAD = """
import sys, threading
import torch, tdstore
from tdstore import TensorDict

def work(place):
    global td
    threading.main_thread().join()  # no new threads start from now on
    td = tdstore.open(place, "r+")
    td[3:7] = TensorDict({"a": torch.full((4,), 5)}, [4])

threading.Thread(target=work, args=sys.argv[1:]).start()
"""


def test_rows_of_a_spawned_process_are_committed_when_it_ends(tmp_path: FsPath) -> None:
    place, script = tmp_path / "x.zarr", tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = scripts.run_file(script, place)
    assert (done.status, done.output, done.errors) == (0, "", "")
    with tdstore.open(place) as td:
        assert td["a"][:].tolist() == [0] * 3 + [5] * 4 + [0] * 13


def test_rows_of_a_thread_that_outlives_the_main_one_are_committed(tmp_path: FsPath) -> None:
    place = tmp_path / "x.zarr"
    TensorDict({"a": torch.zeros(20, dtype=torch.int64)}, [20]).save(place).close()
    done = scripts.run(THREAD, place)
    assert (done.status, done.errors) == (0, "")
    with tdstore.open(place) as td:
        assert td["a"][:].tolist() == [0] * 3 + [5] * 4 + [0] * 13


def test_the_generation_is_that_of_the_newest_manifest(medium: Medium) -> None:
    with medium.open() as reader:
        before = reader.generation()
        assert reader.generation() == before is not None
        with medium.open("r+") as writer:
            writer.write([Write(("a",), (slice(0, 1, 1),), OLD[("a",)][:1])])
            assert writer.generation() == before, "nothing is committed"
            writer.save_header(header_of(OLD))
        assert reader.generation() not in (before, None)


def test_the_generation_of_a_place_that_is_replaced(place: FsPath) -> None:
    for location in (place, place.with_suffix(".zip")):
        save(location, OLD)
        with open_zarr(location) as reader:
            before = reader.generation()
            assert before is not None
            with open_zarr(location, mode="w") as writer:
                assert writer.generation() is None
                fill(writer, OLD)
                writer.save_header(header_of(OLD))
                assert writer.generation() == reader.generation() not in (before, None)


def test_another_program_names_no_generation(place: FsPath) -> None:
    zarr.create_group(place).create_array("a", data=torch.zeros(3).numpy())
    with open_zarr(place) as store:
        assert store.generation() is None
