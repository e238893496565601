"""Reading and writing at any index, on every kind of dataset, against torch."""

from __future__ import annotations

import os
from pathlib import Path as FsPath
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from h5help import bits, fill, header_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tdstore_h5.rows.contiguous import RawFile, block_of, blocks_of, groups_of, index_shape
from tdstore_h5.store import H5Store, open_h5

from tdstore.types import LeafSpec, Read, StoreIndex, Write

SHAPE = (7, 5, 3)
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (3, 2, 3)},
    "rows": {"chunks": 2, "compression": "gzip", "shuffle": True, "fletcher32": True},
}


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> StoreIndex:
    dims = draw(st.integers(0, len(shape)))
    gather = draw(st.integers(-1, dims - 1))
    terms: list[Any] = []
    for dim in range(dims):
        size = shape[dim]
        if dim == gather:
            rows = draw(st.lists(st.integers(0, size - 1), max_size=9))
            terms.append(torch.tensor(rows, dtype=torch.int64))
        else:
            start = draw(st.integers(0, size))
            stop = draw(st.integers(start, size))
            terms.append(slice(start, stop, draw(st.integers(1, 3))))
    return tuple(terms)


def expected_write(leaf: torch.Tensor, index: StoreIndex, value: torch.Tensor) -> torch.Tensor:
    result = leaf.clone()
    at = next((i for i, t in enumerate(index) if isinstance(t, torch.Tensor)), None)
    if at is None:
        result[index if index else ...] = value
    else:
        for n, row in enumerate(index[at].tolist()):  # one by one: the last wins
            result[(*index[:at], row, *index[at + 1 :])] = value[(slice(None),) * at + (n,)]
    return result


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, H5Store]:
    folder = tmp_path_factory.mktemp("index")
    value = torch.arange(105, dtype=torch.int32).view(SHAPE)
    result = {}
    for kind, options in KINDS.items():
        result[kind] = open_h5(folder / f"{kind}.h5", mode="w", durable="none", **options)
        fill(result[kind], {("x",): value})
        result[kind].save_header(header_of({("x",): value}))
    with h5py.File(folder / "foreign.h5", "w") as f:
        f.create_dataset("x", data=value.numpy().astype(">i4"))
    result["big-endian"] = open_h5(folder / "foreign.h5", mode="r+", durable="none")
    with h5py.File(folder / "odd.h5", "w") as f:
        f.create_dataset("shift", data=np.zeros(3, np.uint8))  # so that `x` lies at an odd address
        f.create_dataset("x", data=value.numpy())
        assert f["x"].id.get_offset() % 4
    result["misaligned"] = open_h5(folder / "odd.h5", mode="r+", durable="none")
    with h5py.File(folder / "late.h5", "w") as f:
        f.create_dataset("x", SHAPE, "i4")  # never written: HDF5 has not given it room
    result["late"] = open_h5(folder / "late.h5", mode="r+", durable="none")
    result["late"].write([Write(("x",), (), value)])
    result["by call"] = open_h5(folder / "call.h5", mode="w", durable="none")
    fill(result["by call"], {("x",): value})
    raw = result["by call"]._session.raw
    raw._sparse = True
    raw._may_take_memory = lambda: True  # type: ignore[method-assign] # as on a tmpfs with holes
    yield result
    for store in result.values():
        store.close()


ALL = (*KINDS, "big-endian", "misaligned", "late", "by call")


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=indices(), seed=st.integers(0, 1000), strided=st.booleans())
def test_any_index(stores: dict[str, H5Store], kind: str, index: StoreIndex, seed: int, strided: bool) -> None:
    store = stores[kind]
    (before,) = store.read([Read(("x",))])
    (got,) = store.read([Read(("x",), index)])
    want = before[index] if index else before
    assert torch.equal(got, want)
    out = torch.zeros((*want.shape, 2), dtype=want.dtype)[..., 0] if strided else torch.zeros_like(want)
    (same,) = store.read([Read(("x",), index, out)])
    assert same is out
    assert torch.equal(out, want)
    value = torch.randint(0, 10**6, want.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    store.write([Write(("x",), index, value)])
    (after,) = store.read([Read(("x",))])
    assert torch.equal(after, expected_write(before, index, value))
    assert got.data_ptr() != after.data_ptr() or not got.numel()


@given(index=indices(), itemsize=st.sampled_from([1, 4, 16]))
@settings(max_examples=200, deadline=None)
def test_blocks_are_the_index(index: StoreIndex, itemsize: int) -> None:
    starts, size = blocks_of(SHAPE, index)
    flat = torch.arange(105).view(SHAPE)
    elements = (starts[:, None] + np.arange(size)).reshape(-1)
    want = flat[index] if index else flat
    assert elements.tolist() == want.reshape(-1).tolist()
    assert index_shape(SHAPE, index) == tuple(want.shape)
    block = block_of(SHAPE, index)
    if block is None:
        plain = all(isinstance(term, slice) and term.step == 1 for term in index)
        assert not want.numel() or len(starts) > 1 or not plain
    else:
        assert list(range(block[0], sum(block))) == elements.tolist() != []
    unique = np.unique(starts)
    if size and len(unique):
        cut = list(groups_of(unique, size, itemsize))
        assert [i for i, _, _ in cut] == [0, *(j for _, j, _ in cut[:-1])]
        assert cut[-1][1] == len(unique)
        for i, j, solid in cut:
            assert not solid or (np.diff(unique[i:j]) == size).all()


def test_thousands_of_scattered_elements(tmp_path: FsPath) -> None:
    """Columns and lone elements: read, changed and written back in stretches, neighbours untouched."""
    leaf = torch.zeros(3000, 50, dtype=torch.int16)
    with open_h5(tmp_path / "t.h5", mode="w", durable="none") as store:
        store.create({("x",): LeafSpec(leaf.shape, leaf.dtype)})
        for index in ((slice(0, 3000, 1), slice(7, 8, 1)), (torch.randperm(3000), slice(3, 40, 9))):
            value = torch.randint(1, 99, index_shape(leaf.shape, index), dtype=leaf.dtype)
            store.write([Write(("x",), index, value)])
            leaf[index] = value
        assert torch.equal(store.read([Read(("x",))])[0], leaf)


def test_many_rows_of_chunks(tmp_path: FsPath) -> None:
    """More rows than one HDF5 selection takes, in any order, with repeats."""
    leaf = torch.arange(30_000, dtype=torch.int64).view(10_000, 3)
    rows = torch.randint(0, 10_000, (4000,))
    with open_h5(tmp_path / "t.h5", mode="w", durable="none", chunks=64) as store:
        fill(store, {("x",): leaf})
        assert torch.equal(store.read([Read(("x",), (rows,))])[0], leaf[rows])
        unique = rows.unique()
        store.write([Write(("x",), (unique.flip(0),), -leaf[unique].flip(0))])
        leaf[unique] = -leaf[unique]
        assert torch.equal(store.read([Read(("x",))])[0], leaf)


def test_h5py_sees_what_was_written_past_it(tmp_path: FsPath) -> None:
    """Raw writes and HDF5's own view of the same open file never differ."""
    with open_h5(tmp_path / "t.h5", mode="w", durable="none") as store:
        fill(store, {("x",): torch.zeros(1000, dtype=torch.int64)})
        dataset = store._session.handle.file["x"]
        for i in range(20):
            store.write([Write(("x",), (slice(i, i + 9, 2),), torch.full((5,), i))])
            assert dataset[:].tolist() == store.read([Read(("x",))])[0].tolist()


def test_mapping_is_never_longer_than_the_file(tmp_path: FsPath) -> None:
    """A leaf just made can be read to its end, and a short file is an error, not SIGBUS."""
    with open_h5(tmp_path / "t.h5", mode="w", durable="none") as store:
        store.create({("x",): LeafSpec((1 << 20,), "float64")})
        assert store.read([Read(("x",))])[0].sum() == 0
    (tmp_path / "short").write_bytes(bytes(100))
    fd = os.open(tmp_path / "short", os.O_RDONLY)
    with pytest.raises(Exception, match="has 100 bytes, its datasets need 1016"):
        RawFile(fd, "short").read(16, LeafSpec((125,), "float64"), (), None)
    os.close(fd)


def test_bools_of_other_bytes(file: FsPath) -> None:
    """A bool leaf with a byte 7 (a damaged or foreign file) reads as True."""
    with h5py.File(file, "w") as f:
        f.create_dataset("x", data=np.array([0, 1, 1], bool))
        offset = f["x"].id.get_offset()
    with open(file, "r+b") as f:
        f.seek(offset + 1)
        f.write(b"\x07")
    with open_h5(file) as store:
        assert bits(store.read([Read(("x",))])[0]) == b"\x00\x01\x01"
