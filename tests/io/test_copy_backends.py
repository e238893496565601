"""Copies by the protocol alone: stores that move whole leaves, that give chunks, that fail, of a third party."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import Backend, Cap, LeafSpec, TensorDict
from tdstore.builtin.memory import MemoryStore
from tdstore.errors import DirtyStoreError, OptionError, StoreBusyError, StoreExistsError, StoreNotFoundError
from tdstore.header import Header
from tdstore.types import Mode, Path, Read, Write
from tests.conftest import assert_same

SHELVES: dict[str, Shelf] = {}
KEEPS = Cap.WRITE | Cap.PERSISTENT


class Shelf(MemoryStore):
    """Leaves in memory that can be opened again by a name, as long as the process lives."""

    reads: list[Read]
    writes: list[Write]
    options: dict[Path, dict[str, Any]]

    def __init__(self, name: str, caps: Cap) -> None:
        super().__init__()
        self.url, self.name, self.caps = f"shelf://{name}", name, caps  # type: ignore[misc]
        self.reads, self.writes, self.options, self.commits = [], [], {}, 0

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        for path, spec in leaves.items():
            if unknown := set(spec.options) - {"chunks", "shards"}:
                raise OptionError(f"{self.url} has no leaf option {unknown}", url=self.url)
            self.options[path] = dict(spec.options)
        super().create({path: LeafSpec(s.shape, s.dtype, fill_value=s.fill_value) for path, s in leaves.items()})

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        found = super().specs(paths)
        return [spec.replace(**self.options.get(path, {})) for path, spec in zip(paths, found, strict=True)]

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        self.reads += reads
        assert Cap.PARTIAL_READ in self.caps or not any(r.index for r in reads)
        return super().read(reads)

    def write(self, writes: Sequence[Write]) -> None:
        self.writes += writes
        assert Cap.PARTIAL_WRITE in self.caps or not any(w.index for w in writes)
        super().write(writes)

    def save_header(self, header: Header) -> None:
        super().save_header(header)
        SHELVES[self.name] = self
        self.commits += 1

    def close(self) -> None:
        self.reads, self.writes = self.reads[:], self.writes[:]


def open_shelf(location: str, *, mode: Mode = "r", caps: Cap = KEEPS, busy: bool = False) -> Shelf:
    name = location.removeprefix("shelf://")
    if busy:
        raise StoreBusyError(f"{location} is being written", url=location)
    if mode in ("r", "r+"):
        if name not in SHELVES:
            raise StoreNotFoundError(f"no {location}", url=location)
        return SHELVES[name]
    if mode == "x" and name in SHELVES:
        raise StoreExistsError(f"{location} exists", url=location)
    return Shelf(name, caps)


@pytest.fixture(autouse=True)
def shelves() -> Iterator[None]:
    tdstore.register_backend(Backend(name="shelf", opener=f"{__name__}:open_shelf", summary="", schemes=("shelf",)))
    yield
    tdstore.unregister_backend("shelf")
    SHELVES.clear()


@pytest.mark.parametrize("reads", [Cap.NONE, Cap.PARTIAL_READ])
@pytest.mark.parametrize("writes", [Cap.NONE, Cap.PARTIAL_WRITE])
@pytest.mark.parametrize("verify", [True, False])
def test_stores_are_asked_for_no_more_than_they_declare(rich, tmp_path, reads, writes, verify):
    rich.save(tmp_path / "a").close()
    caps = KEEPS | reads | writes
    tdstore.copy(tmp_path / "a", "shelf://b", caps=caps, block_bytes=40, checkpoint=0, verify=verify)
    assert_same(tdstore.open("shelf://b").to_tensordict(), rich)
    assert (SHELVES["b"].commits > 1) == (Cap.PARTIAL_WRITE in caps)
    tdstore.copy("shelf://b", tmp_path / "c", block_bytes=40, verify=verify)
    with TensorDict.load(tmp_path / "c", verify="full") as copied:
        assert_same(copied, rich)


@pytest.mark.parametrize(("rule", "step"), [({"chunks": (4, 8)}, 8), ({"chunks": (4, 8), "shards": (16, 8)}, 16)])
def test_writes_keep_to_chunks_and_shards_of_the_target(tmp_path, rule, step):
    TensorDict({"x": torch.arange(64 * 8, dtype=torch.uint8).reshape(64, 8)}, [64]).save(tmp_path / "a").close()
    caps = KEEPS | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE
    tdstore.copy(tmp_path / "a", "shelf://b", caps=caps, rules={"x": rule}, block_bytes=90)
    written = [w.index[0] for w in SHELVES["b"].writes]
    assert written == [slice(at, at + step, 1) for at in range(0, 64, step)]
    SHELVES["b"].reads.clear()
    tdstore.copy("shelf://b", tmp_path / "c", block_bytes=90, resume=False)
    whole = [r.index[0] for r in SHELVES["b"].reads]
    assert whole == [slice(at, at + 8, 1) for at in range(0, 64, 8)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("at", [1, 4])
def test_a_target_that_fails_is_gone_on_with(tmp_path, monkeypatch, at):
    td = TensorDict({"x": torch.arange(640).reshape(64, 10), "y": torch.arange(64)}, [64])
    td.save(tmp_path / "a").close()
    caps = KEEPS | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE
    count = 0
    real = Shelf.write

    def failing(self: Shelf, writes: Sequence[Write]) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Broken("the wire is cut")
        real(self, writes)

    monkeypatch.setattr(Shelf, "write", failing)
    with pytest.raises(Broken):
        tdstore.copy(tmp_path / "a", "shelf://b", caps=caps, block_bytes=800, checkpoint=0)
    if at == 1:
        assert "b" not in SHELVES
    else:
        with pytest.raises(DirtyStoreError, match="3 of 8 blocks"):
            tdstore.open("shelf://b")
    before = count
    tdstore.copy(tmp_path / "a", "shelf://b", caps=caps, block_bytes=800, checkpoint=0)
    assert count - before == (8 if at == 1 else 5)
    assert_same(tdstore.open("shelf://b").to_tensordict(), td)


def test_a_source_that_is_not_a_file_is_known_by_its_rows(tmp_path, monkeypatch):
    td = TensorDict({"x": torch.arange(640).reshape(64, 10)}, [64])
    tdstore.copy(td, "shelf://a", caps=KEEPS | Cap.PARTIAL_READ)
    real = Shelf.read

    def begin() -> None:
        # Through a store that reads rows; the first and the last are samples.
        monkeypatch.setattr(Shelf, "read", _failing(real, 4))
        with pytest.raises(Broken):
            tdstore.copy("shelf://a", tmp_path / "b", block_bytes=800, checkpoint=0)
        monkeypatch.setattr(Shelf, "read", real)

    begin()
    SHELVES["a"].reads.clear()
    tdstore.copy("shelf://a", tmp_path / "b", block_bytes=800)
    assert len(SHELVES["a"].reads) == 1 + 4  # the samples, and what was missing
    (tmp_path / "b").rename(tmp_path / "done")
    begin()
    SHELVES["a"].view(("x",))[-1] = 0
    with pytest.warns(UserWarning, match="was changed since"):
        tdstore.copy("shelf://a", tmp_path / "b", block_bytes=800)
    assert torch.equal(tdstore.load(tmp_path / "b")["x"][-1], torch.zeros(10, dtype=torch.int64))


def _failing(real: Any, after: int) -> Any:
    left = after

    def read(self: Shelf, reads: Sequence[Read]) -> list[Tensor]:
        nonlocal left
        if not left:
            raise Broken("the wire is cut")
        left -= 1
        return real(self, reads)  # type: ignore[no-any-return]

    return read


def test_a_target_that_somebody_writes_is_busy_and_not_replaced(rich, tmp_path):
    tdstore.copy(rich, "shelf://b")
    for mode in ("x", "w"):
        with pytest.raises(StoreBusyError):
            tdstore.copy(rich, "shelf://b", mode=mode, busy=True)
    with pytest.raises(OptionError):
        tdstore.copy(rich, "shelf://c", rules={"z": {"compression": "gzip"}})
    assert list(SHELVES) == ["b"]


def test_onto_itself(tmp_path, rich):
    for name in ("a", "a.h5"):
        rich.save(tmp_path / name).close()
        with pytest.raises(StoreExistsError):
            tdstore.copy(tmp_path / name, tmp_path / name)
        tdstore.copy(tmp_path / name, tmp_path / name, mode="w")
        with TensorDict.load(tmp_path / name, verify="full") as copied:
            assert_same(copied, rich)
