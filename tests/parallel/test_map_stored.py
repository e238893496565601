"""`map` over stored sources and into stored targets: workers are told where the data is."""

from __future__ import annotations

import multiprocessing
import pickle
import uuid
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.shared.store import remove
from tdstore.container.distribute.map import _Plan, _writable_by_workers
from tdstore.container.distribute.row_tasks import Chunk, place_of
from tdstore.parallel.executors import Crew, PoolExecutor

from . import work

KINDS = ["memmap", "h5", "shared", "named shared"]
FORK = {"num_workers": 2, "mp_start_method": "fork"}


@pytest.fixture
def saved(tmp_path):
    """A function that saves a TensorDict somewhere."""
    named = []

    def save(td, kind, **options):
        if kind == "shared":
            return td.save(storage="shared")
        if kind == "named shared":
            named.append(f"shm://map-{uuid.uuid4().hex}")
            return td.save(named[-1])
        location = str(tmp_path / (uuid.uuid4().hex + (".h5" if kind == "h5" else "")))
        td.save(location, **options).close()
        return tdstore.open(location, mode="r+")

    yield save
    for location in named:
        remove(location)


def rows(n=20):
    return TensorDict({"a": torch.arange(float(n)), "n": {"b": torch.zeros(n, 2)}}, [n])


@pytest.fixture(scope="module")
def spawned():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_sources(saved, kind, spawned):
    td, out = saved(rows(), kind), saved(rows(), kind)
    for where in (FORK, {"executor": spawned}):
        assert (td.map(work.plus_one, chunksize=6, **where) == rows() + 1).all()
        td.map(work.plus_one, chunksize=6, out=out, **where)
        assert (out.to_tensordict() == rows() + 1).all()
    td.close()
    out.close()


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_selections_of_sources(saved, kind):
    td = saved(rows(), kind)
    assert td[4:12].map(work.first_leaf, chunksize=3, **FORK).tolist() == [2.0 * i for i in range(4, 12)]
    assert td[[7, 3, 3]].map(work.first_leaf, chunksize=2, **FORK).tolist() == [14, 6, 6]
    assert set(td.select("a").map(work.plus_one, **FORK).keys()) == {"a"}
    assert (td["n"].map(work.plus_one, chunksize=7, **FORK)["b"] == 1).all()
    td.close()


@pytest.mark.parametrize("kind", ["memmap", "h5", "named shared"])
def test_a_task_is_a_place_and_an_index(saved, kind):
    td = saved(TensorDict({"a": torch.zeros(100_000)}, [100_000]), kind)
    place = place_of(td, by_multiprocessing=False)
    assert len(pickle.dumps(Chunk(place, (slice(0, 50_000),)))) < 1500
    td.close()


def test_a_worker_opens_the_source_once(saved):
    td = saved(rows(), "h5")
    assert set(td.map(work.opened, chunksize=1, **FORK).tolist()) == {1}
    td.close()


@pytest.mark.parametrize("kind", ["memmap", "h5"])
def test_chunks_of_stored_rows_are_in_memory(saved, kind):
    td = saved(rows(), kind)
    assert td.map(work.kind, **FORK).all()
    assert td.map(work.kind, num_workers=0).all()
    td.close()
    td = tdstore.open(td.store.url) if kind == "h5" else td
    if kind == "h5":
        assert (td.map(work.with_new_key, **FORK)["n"] == rows()["a"] * 2).all()
        assert list(td.keys()) == ["a", "n"]


def test_a_worker_may_change_memory_that_is_shared(saved):
    for kind in ("memmap", "shared"):
        td = saved(rows(), kind)
        td.map(work.change_in_place, **FORK)
        assert td["a"].tolist() == [100.0 + i for i in range(20)], kind
        td.close()


def test_what_only_this_process_has_is_sent_by_value():
    temporary = rows().memmap()
    assert (temporary.map(work.plus_one, chunksize=6, **FORK) == rows() + 1).all()


def test_shuffled_rows_of_a_file(saved):
    td = saved(rows(), "h5")
    found = torch.cat(list(td.map_iter(work.first_leaf, chunksize=3, shuffle=True, **FORK)))
    assert sorted(found.tolist()) == [2.0 * i for i in range(20)]
    td.close()


# -- borders of chunks -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "sizes"),
    [({"num_workers": 3}, [48, 48, 4]), ({"num_chunks": 5}, [32, 32, 32, 4]), ({"num_chunks": 20}, [5] * 20)],
)
def test_borders_are_those_of_the_chunks_in_the_file(saved, asked, sizes):
    td = saved(rows(100), "h5", leaf_options={"a": {"chunks": (16,)}})
    arguments = {"num_workers": 2, "mp_start_method": "fork", **asked}
    assert [len(r) for r in td.map_iter(work.first_leaf, **arguments)] == sizes
    assert [len(r) for r in td.map_iter(work.first_leaf, num_workers=0, chunksize=30)] == [30, 30, 30, 10]
    td.close()


# -- out ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["memory", "h5"])
@pytest.mark.parametrize("kind", KINDS)
def test_outs(saved, kind, source):
    td = rows() if source == "memory" else saved(rows(), source)
    out = saved(rows(), kind)
    assert td.map(work.plus_one, out=out, chunksize=3, **FORK) is out
    assert (out.to_tensordict() == rows() + 1).all()
    location = getattr(out, "filename", None)
    out.close()
    if location:
        assert (tdstore.open(location).to_tensordict() == rows() + 1).all()


def test_rows_one_by_one_into_an_out(saved):
    out = saved(rows(), "memmap")
    rows().map(work.plus_one, out=out, chunksize=0, **FORK)
    assert (out == rows() + 1).all()
    out.close()


def test_who_writes_an_out(saved):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        crew = Crew(PoolExecutor(pool), 1)
        for kind, by_workers in {"memmap": True, "shared": True, "named shared": True, "h5": False}.items():
            out = saved(rows(), kind)
            assert (_writable_by_workers(out, crew) is not None) == by_workers, kind
            out.close()
        assert _writable_by_workers(rows(), crew) is None


@pytest.mark.parametrize("kind", ["memmap", "shared"])
def test_workers_tell_of_results_that_do_not_fit_an_out(saved, kind):
    out = saved(rows(), kind)
    with pytest.raises(ValueError, match="batch size"):
        rows().map(work.doubled_rows, out=out, chunksize=5, **FORK)
    with pytest.raises(KeyError, match="'z'"):
        rows().map(work.other_key, out=out, chunksize=5, **FORK)
    out.close()


def test_an_out_that_workers_wrote_is_not_dirty(saved):
    out = saved(rows(), "memmap")
    location = out.saved_path
    rows().map(work.plus_one, out=out, chunksize=3, **FORK)
    out.close()
    with tdstore.open(location, verify="full") as found:
        assert (found == rows() + 1).all()


def test_a_plan_reads_nothing(saved):
    td = saved(rows(), "h5")
    plan = _Plan(td, len, 0, 2, None, None, None, None)
    assert (plan.size, plan.count) == (10, 2)
    td.close()
