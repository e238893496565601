"""Chunks of HDF5 behind a URL: located in few rounds, fetched in one, and decoded here or by h5py."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch
from remotehelp import name
from tdstore_h5.remote.chunk_tree import children
from tdstore_h5.remote.row_chunks import RowChunks

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError
from tdstore.index.ranges import index_shape
from tdstore.types import LeafSpec, Read
from tests.servers import FaultProxy, WebServer

h5py = pytest.importorskip("h5py")

ROWS = 300
INDICES = (
    slice(0, ROWS, 1),
    slice(7, 260, 5),
    slice(40, 41, 1),
    torch.tensor([299, 3, 3, 150, 0, 298]),
    torch.randint(0, ROWS, (2000,), generator=torch.Generator().manual_seed(0)),
    torch.tensor([], dtype=torch.int64),
)


@pytest.fixture(scope="module")
def way(http: WebServer) -> Iterator[FaultProxy]:
    """The way to a server that keeps connections."""
    with FaultProxy(http.port) as proxy:
        yield proxy


@pytest.fixture
def long_way(way: FaultProxy) -> Iterator[FaultProxy]:
    way.latency_ms = 60
    yield way
    way.latency_ms = 0


@pytest.fixture
def put(http: WebServer, way: FaultProxy) -> Callable[[FsPath], str]:
    def put(path: FsPath) -> str:
        place = f"{name()}.h5"
        shutil.copy(path, http.folder / place)
        return f"{way.url}/{place}"

    return put


@pytest.fixture
def by_h5py(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What h5py was asked to read of chunks."""
    from tdstore_h5.rows import chunked

    asked: list[str] = []
    real = chunked.read

    def read(dataset: Any, spec: LeafSpec, index: Any, out: Any) -> Any:
        if 0 not in index_shape(spec.shape, index):
            asked.append(dataset.name)
        return real(dataset, spec, index, out)

    monkeypatch.setattr(chunked, "read", read)
    return asked


DTYPES = ("uint8", "int16", "float32", "int64", "bool", "complex64")
LAYOUTS: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "gzip and shuffle": {"compression": "gzip", "shuffle": True},
    "shuffle": {"shuffle": True},
    "none": {},
    "lzf": {"compression": "lzf"},
    "fletcher32": {"compression": "gzip", "fletcher32": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_the_file(
    dtype: str, layout: str, put: Callable[[FsPath], str], by_h5py: list[str], tmp_path: FsPath
) -> None:
    values = np.arange(ROWS * 12).reshape(ROWS, 4, 3).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", data=values, chunks=(7, 4, 3), **LAYOUTS[layout])
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        for index in INDICES:
            assert torch.equal(td[index]["a"], torch.from_numpy(values)[index])
    decoded_here = layout not in ("lzf", "fletcher32")
    assert bool(by_h5py) != decoded_here


def test_memory_of_the_caller_is_filled(put: Callable[[FsPath], str], tmp_path: FsPath) -> None:
    values = torch.randn(ROWS, 9)
    TensorDict({"a": values}, [ROWS]).save(tmp_path / "x.h5", chunks=16, compression="gzip", shuffle=True)
    rows = torch.tensor([5, 200, 5])
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        out = TensorDict({"a": torch.zeros(3, 9)}, [3])
        td.read(rows, out=out)
    assert torch.equal(out["a"], values[rows])


def test_what_only_h5py_understands(put: Callable[[FsPath], str], by_h5py: list[str], tmp_path: FsPath) -> None:
    """Chunks that cut rows, chunks that are not there, other orders of bytes, and selections within rows."""
    values = np.arange(ROWS * 12, dtype="<i4").reshape(ROWS, 12)
    filled = np.full((ROWS, 12), 7, "<i4")
    filled[:70] = values[:70]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("cut", data=values, chunks=(7, 5), compression="gzip")
        file.create_dataset("big", data=values.astype(">i4"), chunks=(7, 12), compression="gzip")
        some = file.create_dataset("some", (ROWS, 12), "<i4", chunks=(7, 12), compression="gzip", fillvalue=7)
        some[:70] = values[:70]
        file.create_dataset("within", data=values, chunks=(7, 12), compression="gzip")
    rows = torch.tensor([299, 3, 3, 150])
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        store = td._handle.store
        found = store.read([Read((key,), (rows,)) for key in ("cut", "big", "some")])
        assert [value.tolist() for value in found] == [x[rows].tolist() for x in (values, values, filled)]
        (found,) = store.read([Read(("within",), (rows, slice(2, 9, 3)))])
        assert found.tolist() == values[rows][:, 2:9:3].tolist()
    assert by_h5py == ["/cut", "/big", "/some", "/within"]


def test_filters_that_were_not_applied_to_a_chunk(put: Callable[[FsPath], str], tmp_path: FsPath) -> None:
    values = np.arange(40, dtype="<i4").reshape(20, 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = file.create_dataset("a", (20, 2), "<i4", chunks=(5, 2), compression="gzip", shuffle=True)
        made[...] = values
        made.id.write_direct_chunk((5, 0), values[5:10].tobytes(), filter_mask=0b11)
        made.id.write_direct_chunk((10, 0), zlib.compress(values[10:15].tobytes()), filter_mask=0b01)
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        assert td["a"].tolist() == values.tolist()


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "empty", "cut"])
def test_damaged_chunks(damage: str, put: Callable[[FsPath], str], tmp_path: FsPath) -> None:
    values = np.arange(4000, dtype="<i4").reshape(40, 100)
    good = bytearray(zlib.compress(values[5:10].tobytes()))
    middle = len(good) // 2
    chunk = {
        "flipped": bytes(good[:middle] + bytes([good[middle] ^ 0x55]) + good[middle + 1 :]),
        "shorter": zlib.compress(values[5:9].tobytes()),
        "longer": zlib.compress(bytes(1 << 20)),
        "empty": b"\0",
        "cut": bytes(good[:middle]),
    }[damage]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = file.create_dataset("a", (40, 100), "<i4", chunks=(5, 100), compression="gzip")
        made[...] = values
        made.id.write_direct_chunk((5, 0), chunk)
    rows = torch.tensor([30, 7])
    try:
        with tdstore.open(tmp_path / "x.h5") as local:
            expected = local[rows]["a"].clone()
    except CorruptStoreError:
        expected = None
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        assert td[torch.tensor([30, 11])]["a"].tolist() == values[[30, 11]].tolist()
        if expected is not None:  # HDF5 takes a chunk that is too long or too short
            assert torch.equal(td[rows]["a"][0], expected[0])
        else:
            with pytest.raises(CorruptStoreError, match="'a'"):
                td[rows].to_tensordict()


def test_indices_come_in_few_rounds_and_rows_in_one(
    put: Callable[[FsPath], str], long_way: FaultProxy, tmp_path: FsPath
) -> None:
    """The nodes of the trees lie between the chunks: they were 80 requests, one after the other."""
    data = TensorDict({key: torch.randint(0, 255, (1500, 4000), dtype=torch.uint8) for key in ("a", "b", "c")}, [1500])
    data.save(tmp_path / "x.h5", chunks=1, compression="gzip")
    where = put(tmp_path / "x.h5")
    long_way.forget()
    with tdstore.open(where) as td:
        assert long_way.rounds() == 1, "to open"
        assert [request.method for request in long_way.requests] == ["GET", "GET"]
        long_way.forget()
        rows = torch.randint(0, 1500, (40,), generator=torch.Generator().manual_seed(0))
        assert torch.equal(td[rows]["b"], data[rows]["b"])
        # roots, their nodes, the rows; and connections, which are new
        assert long_way.rounds() <= 5
        assert long_way.bytes_sent < 8 << 20, "of 18 MB"
        td[rows].to_tensordict()
        long_way.forget()
        for _ in range(2):
            assert torch.equal(td[rows.flip(0)]["b"], data[rows.flip(0)]["b"])
        assert long_way.rounds() == 2, "one for each batch"
        assert len({request.range for request in long_way.requests}) * 2 == len(long_way.requests)


def test_an_index_of_another_kind(put: Callable[[FsPath], str], tmp_path: FsPath) -> None:
    """Files of newer versions have arrays and other trees for indices."""
    values = np.arange(3000 * 8, dtype="<i4").reshape(3000, 8)
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file.create_dataset("fixed", data=values, chunks=(1, 8), compression="gzip")
        file.create_dataset("growing", data=values, chunks=(1, 8), maxshape=(None, 8), compression="gzip")
        file.create_dataset("tree", data=values, chunks=(1, 8), maxshape=(None, None), compression="gzip")
    rows = torch.tensor([2999, 0, 1500, 1500])
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        for key in ("fixed", "growing", "tree"):
            assert td[rows][key].tolist() == values[rows].tolist()


def test_small_leaves_between_large_ones_do_not_fetch_the_file(
    put: Callable[[FsPath], str], way: FaultProxy, tmp_path: FsPath
) -> None:
    """A checksum covers chunks that lie all over the file: to compare it would cost the file."""
    data = TensorDict({"a": torch.randint(0, 255, (2000, 8000), dtype=torch.uint8), "b": torch.arange(2000)}, [2000])
    data.save(tmp_path / "x.h5", chunks=2, compression="gzip")
    where = put(tmp_path / "x.h5")
    with tdstore.open(where) as td:
        way.forget()
        assert torch.equal(td[torch.tensor([3, 1000])]["b"], torch.tensor([3, 1000]))
        assert way.bytes_sent < 2 << 20


def test_children_of_nodes() -> None:
    assert children(memoryview(b""), 1) == []
    assert children(memoryview(b"TREE\x01\x00" + bytes(100)), 1) == []  # a leaf
    node = bytearray(b"TREE\x01\x01\x02\x00" + bytes(16))
    for address in (4096, 8192):
        node += bytes(8 + 8 * 2) + address.to_bytes(8, "little")
    assert children(memoryview(bytes(node)), 1) == [4096, 8192]
    assert children(memoryview(bytes(node[:-1])), 1) == []
    assert children(memoryview(b"SNOD" + bytes(node[4:])), 1) == []


def test_many_chunks_are_decoded_in_threads(put: Callable[[FsPath], str], tmp_path: FsPath) -> None:
    values = torch.randint(0, 255, (64, 1 << 18), dtype=torch.uint8)
    TensorDict({"a": values}, [64]).save(tmp_path / "x.h5", chunks=1, compression="gzip", compression_opts=1)
    with tdstore.open(put(tmp_path / "x.h5")) as td:
        rows = torch.randperm(64)
        assert torch.equal(td[rows]["a"], values[rows])
        assert isinstance(td._handle.store._row_chunks["a",], RowChunks)
