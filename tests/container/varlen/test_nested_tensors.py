"""Nested tensors (`torch.nested`, both layouts) in every store: saved, read by rows, copied, set; what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tdstore.builtin.shared.store import remove
from tdstore.errors import BatchSizeError, CorruptStoreError, StoreNotFoundError, UnsupportedError
from tdstore.store import Store

STORED = ["h5", "zarr", "memory://"]
LIVE = ["memmap", "tdz", "shm://"]
LAYOUTS = [torch.strided, torch.jagged]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """`fresh(kind)` is a new location of a backend."""
    named: list[str] = []

    def location(kind: str) -> str:
        name = uuid.uuid4().hex
        if "://" in kind:
            named.append(f"{kind}{name}")
            return named[-1]
        return str(tmp_path / (name if kind == "memmap" else f"{name}.{kind}"))

    yield location
    for name in named:
        if name.startswith("shm://"):
            with contextlib.suppress(StoreNotFoundError):  # the last one to close it removes it
                remove(name)


def nested(layout: torch.layout, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    counts = [torch.Size(size).numel() for size in sizes]
    parts = [torch.arange(n).reshape(size).to(dtype) + 10 * i for i, (n, size) in enumerate(zip(counts, sizes))]
    return torch.nested.nested_tensor(parts, layout=layout)


def sample(layout: torch.layout) -> TensorDict:
    td = TensorDict({"n": nested(layout, (2,), (4,), (0,), (3,)), "x": torch.arange(4)}, [4])
    td["sub"] = {"wide": nested(layout, (2, 3), (1, 3), (0, 3), (4, 3), dtype=torch.bfloat16)}
    td["sub", "turned"] = td["sub", "wide"].transpose(1, 2)
    return td


NESTED = ["n", ("sub", "wide"), ("sub", "turned")]


def same(made: Any, wanted: torch.Tensor) -> bool:
    return (
        made.is_nested
        and (made.layout, made.dtype) == (wanted.layout, wanted.dtype)
        and made.dim() == wanted.dim()
        and all(map(torch.equal, made.unbind(0), wanted.unbind(0)))
        and len(made.unbind(0)) == len(wanted.unbind(0))
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", [*STORED, *LIVE])
def test_saved_and_opened(kind: str, layout: torch.layout, fresh: Any) -> None:
    td, where = sample(layout), fresh(kind)
    saved = td.save(where)
    for key in NESTED:
        assert same(saved[key], td[key]), key
        assert saved.get_item_shape(key) == td.get_item_shape(key)
    assert "-1" in repr(saved) and list(saved.keys(True, True)) == list(td.keys(True, True))
    resident = saved.to_tensordict()
    assert all(same(resident[key], td[key]) for key in NESTED)
    assert saved.bytes() == td.bytes() == resident.bytes()
    assert saved[1:].bytes() == saved[1:].to_tensordict().bytes()
    if not kind.startswith("memory"):
        saved.close()
        again = tdstore.open(where)
        assert all(same(again[key], td[key]) for key in NESTED)
        again.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_on_redis(layout: torch.layout, redis: Any) -> None:
    td = sample(layout)
    saved = td.save(f"{redis.url}/{uuid.uuid4().hex}")
    assert all(same(saved[key], td[key]) for key in NESTED)
    assert torch.equal(saved[1]["n"], td["n"][1])
    saved.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", STORED)
def test_rows(kind: str, layout: torch.layout, fresh: Any) -> None:
    td = sample(layout)
    saved = td.save(fresh(kind))
    for key in NESTED:
        rows = td[key].unbind()
        assert torch.equal(saved[1][key], rows[1]) and torch.equal(saved[-1][key], rows[3])
        assert saved[3].get_item_shape(key) == rows[3].shape
        assert torch.equal(saved.get_at(key, 1), rows[1])
        assert torch.equal(saved.get_at(key, (3, slice(0, 2))), rows[3][:2])
        for index in (slice(1, 3), slice(None, None, 2), [3, 0, 0], [], torch.tensor([True, False, False, True])):
            wanted = [rows[i] for i in torch.arange(4)[index].tolist()]
            part = saved[index][key]
            assert part.is_nested and part.layout is layout and part.dtype == rows[0].dtype
            assert list(map(torch.Tensor.tolist, part.unbind())) == list(map(torch.Tensor.tolist, wanted))
        assert torch.equal(saved[1:][1:][1][key], rows[3])
    assert [row["n"].tolist() for row in saved] == [row.tolist() for row in td["n"].unbind()]
    window = saved[[3, 1]].save(fresh("memmap"))
    assert [row.tolist() for row in window["sub", "wide"].unbind()] == [td["sub", "wide"][i].tolist() for i in (3, 1)]
    one = saved[1].save(fresh("memmap"))
    assert torch.equal(one["n"], td["n"][1])
    with pytest.raises(UnsupportedError, match="index its rows"):
        saved[None]["n"]


class _Counting:
    """Counts the bytes that a store is asked for."""

    def __init__(self, store: Store) -> None:
        self._store, self.bytes = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, reads: Any) -> Any:
        found = self._store.read(reads)
        self.bytes += sum(part.nbytes for part in found)
        return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_is_read_without_the_others(layout: torch.layout, fresh: Any) -> None:
    td = TensorDict({"n": nested(layout, *[(i % 7,) for i in range(1000)])}, [1000])
    saved = td.save(fresh("h5"))
    counting: Any = _Counting(saved._handle.store)
    saved._handle.store = counting
    assert saved[500]["n"].tolist() == td["n"][500].tolist()
    assert counting.bytes < 100
    counting.bytes = 0
    assert [r.tolist() for r in saved[10:20]["n"].unbind()] == [r.tolist() for r in td["n"].unbind()[10:20]]
    assert counting.bytes < 1000


def test_larger_batches(fresh: Any) -> None:
    td = TensorDict({"n": nested(torch.jagged, (2, 3, 4), (2, 1, 4))}, [2, 2])
    saved = td.save(fresh("h5"))
    assert saved.get_item_shape("n") == td.get_item_shape("n") == (2, 2, -1, 4)
    assert saved[1].batch_size == (2,) and torch.equal(saved[1]["n"], td["n"][1])
    assert torch.equal(saved[1, 0]["n"], td["n"][1][0])
    assert [r.tolist() for r in saved[:, 1]["n"].unbind()] == [r[1].tolist() for r in td["n"].unbind()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_odd_ones(layout: torch.layout, fresh: Any) -> None:
    """None with rows, rows without elements; gaps between the rows, a batch size of none."""
    begins, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    gaps = nested(layout, (2, 3), (1, 3)).transpose(1, 2)
    if layout is torch.jagged:
        gaps = torch.nested.narrow(torch.arange(12.0).reshape(2, 6), 1, begins, lengths, layout=layout)
    td = TensorDict({"hollow": nested(layout, (0,), (0,)), "gaps": gaps, "b": nested(layout, (1,), dtype=torch.bool)})
    for kind in ("memmap", "h5"):
        saved = td.save(fresh(kind))
        assert all(same(saved[key], td[key].contiguous()) for key in td.keys())
    none = td.save(fresh("h5")).to_tensordict().select("hollow")
    none.batch_size = [2]
    assert len(none.save(fresh("h5"))[0:0]["hollow"].unbind()) == 0


@pytest.mark.parametrize("kind", ["memmap", "h5"])
def test_copied_set_renamed_removed(kind: str, fresh: Any) -> None:
    td, where = sample(torch.jagged), fresh(kind)
    td.save(where).close()
    for target in ("zarr", "memmap"):
        there = fresh(target)
        tdstore.copy(where, there, keys=["n", "x"])
        copied = tdstore.open(there)
        assert same(copied["n"], td["n"]) and torch.equal(copied["x"], td["x"]) and "sub" not in copied
        copied.close()
    with tdstore.open(where, mode="r+") as live:
        other = nested(torch.strided, (1,), (2,), (3,), (1,))
        live["n"] = other
        live["new"] = td["sub", "wide"]
        live["x"] = nested(torch.jagged, (1,), (1,), (1,), (2,))  # where a tensor was
        live.rename_key_("new", "renamed")
        live["sub", "turned"] = torch.ones(4, 2)
        del live["sub", "wide"]
        live["more"] = {"deep": other}
    again = tdstore.open(where)
    assert same(again["n"], other) and same(again["renamed"], td["sub", "wide"]) and same(again["more", "deep"], other)
    assert again["x"].layout is torch.jagged and again["x"].unbind()[3].tolist() == [0 + 30, 1 + 30]
    assert torch.equal(again["sub", "turned"], torch.ones(4, 2)) and list(again["sub"].keys()) == ["turned"]
    again.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_live_rows_are_written_in_place(layout: torch.layout, fresh: Any) -> None:
    where = fresh("memmap")
    sample(layout).save(where).close()
    with tdstore.open(where, mode="r+") as td:
        td["n"][1].fill_(7)
        td[3] = {"n": torch.tensor([1.0, 2.0, 3.0]), "x": torch.tensor(9)}
    again = tdstore.open(where, verify="full")
    assert again["n"][1].tolist() == [7] * 4 and again["n"][3].tolist() == [1, 2, 3] and again["x"][3] == 9
    again.close()


@pytest.mark.parametrize("kind", ["h5", "zarr", "memory://"])
def test_what_is_refused(kind: str, fresh: Any) -> None:
    """Rows of another length would move all that follow: nothing of it is done, nor of what comes with it."""
    td = sample(torch.jagged)
    where = fresh(kind)
    saved = td.save(where).unlock_()
    if not kind.startswith("memory"):
        saved.close()
        saved = tdstore.open(where, mode="r+")
    row = td[1]
    for refused in (
        lambda: saved.update_at_(row, 1),
        lambda: saved.set_at_("n", torch.ones(4), 1),
        lambda: saved.__setitem__(1, row),
        lambda: saved.set_("n", td["n"]),
        lambda: saved[1:].set("n", nested(torch.jagged, (1,), (1,), (1,))),
        lambda: saved.read([0, 1], out=TensorDict({"x": torch.zeros(2, dtype=torch.int64)}, [2])),
    ):
        with pytest.raises(UnsupportedError, match="nested"):
            refused()
    assert saved.batch_size == (4,) and torch.equal(saved["x"], td["x"]) and same(saved["n"], td["n"])
    saved["x"] = torch.ones(4, dtype=torch.int64)
    assert saved["x"].tolist() == [1] * 4


def test_a_ragged_batch_size_is_not_stored(tmp_path: Path) -> None:
    td = lazy_stack([TensorDict({"n": torch.ones(n)}, [n]) for n in (1, 3)]).densify()
    assert td.batch_size == (2, -1)
    for save in (td.save, td.memmap, td.to_h5, td.consolidate):
        with pytest.raises(UnsupportedError, match=r"batch_size = \[2\]"):
            save(str(tmp_path / "x.data"))
    assert not list(tmp_path.iterdir())
    td.batch_size = [2]
    assert same(td.save(tmp_path / "y")["n"], td["n"])


def test_structures_without_data(fresh: Any) -> None:
    td = sample(torch.strided)
    like = td.memmap_like(fresh("memmap"))
    assert [row.shape for row in like["n"].unbind()] == [row.shape for row in td["n"].unbind()]
    assert not any(row.any() for row in like["n"].unbind())
    with pytest.raises(UnsupportedError, match="set\\(\\)"):
        td.memmap(fresh("memmap")).make_memmap_from_tensor("m", td["n"])


def test_stacks_and_tensorclasses_below(fresh: Any) -> None:
    td = TensorDict({"l": lazy_stack([sample(torch.jagged).select("n"), sample(torch.jagged).select("n")])}, [2])
    saved = td.save(fresh("h5"))
    assert same(saved["l"].tensordicts[1]["n"], td["l"].tensordicts[1]["n"])
    assert torch.equal(saved["l"][1, 1]["n"], td["l"].tensordicts[1]["n"][1])


# -- the peer's folders ------------------------------------------------------------------------
def of(cls: Any) -> Any:
    return cls(
        {
            "n": nested(torch.strided, (1, 2), (3, 2)),
            "sub": cls({"a.b/c": nested(torch.strided, (2,), (1,)), "Nt": nested(torch.strided, (4,), (1,))}, [2]),
        },
        [2],
    )


def test_folders_of_the_peer(tmp_path: Path, fresh: Any) -> None:
    theirs = of(tensordict.TensorDict)
    theirs.memmap(tmp_path / "p")
    for opened in (TensorDict.load_memmap(tmp_path / "p"), tdstore.open(f"file://{tmp_path}/p")):
        assert all(same(opened[key], theirs[key]) for key in ("n", ("sub", "a.b/c"), ("sub", "Nt")))
    tdstore.copy(tmp_path / "p", tmp_path / "p.h5")
    copied = tdstore.open(tmp_path / "p.h5")
    assert torch.equal(copied[1]["n"], theirs["n"][1]) and same(copied["n"], theirs["n"])
    shutil.make_archive(str(tmp_path / "z"), "zip", tmp_path / "p")
    assert same(tdstore.open(tmp_path / "z.zip", storage="tdz")["n"], theirs["n"])
    ragged = tensordict.lazy_stack([tensordict.TensorDict({"n": torch.ones(n)}, [n]) for n in (1, 3)]).densify()
    ragged.memmap(tmp_path / "r")
    assert tdstore.open(tmp_path / "r").batch_size == (2,) and same(tdstore.open(tmp_path / "r")["n"], ragged["n"])


def test_our_folders_in_the_peer(tmp_path: Path) -> None:
    mine = of(TensorDict)
    mine["j"] = nested(torch.jagged, (1,), (2,))
    mine.memmap(tmp_path / "o").close()
    theirs = tensordict.TensorDict.load_memmap(tmp_path / "o")
    assert all(same(theirs[key], mine[key]) for key in ("n", ("sub", "a.b/c"), ("sub", "Nt")))
    assert "j" not in theirs.keys()  # it has no files for that layout
    with tdstore.open(tmp_path / "o", mode="r+") as live:
        live["n"] = torch.zeros(2)
        live["sub", "Nt"] = {"nested": torch.ones(2)}
    again = tdstore.open(tmp_path / "o")
    assert again["n"].tolist() == [0, 0] and again["sub", "Nt", "nested"].tolist() == [1, 1]
    assert same(again["sub", "a.b/c"], mine["sub", "a.b/c"]) and same(again["j"], mine["j"])


# -- damage --------------------------------------------------------------------------------------
def _unsealed(tmp_path: Path) -> Path:
    """A folder of the peer, which has no checksums that would tell first."""
    of(tensordict.TensorDict).memmap(tmp_path / "p")
    return tmp_path / "p"


@pytest.mark.parametrize(
    "numbers", [[[1, 2], [9, 2]], [[-1, -2], [3, 2]], [[1 << 62, 4], [3, 2]], [[1, 2], [3, 1]]], ids=str
)
def test_shapes_that_lie(numbers: list[list[int]], tmp_path: Path) -> None:
    folder = _unsealed(tmp_path)
    (folder / "n.shape.memmap").write_bytes(torch.tensor(numbers).numpy().tobytes())
    with pytest.raises(CorruptStoreError, match="'n'"):
        tdstore.open(folder)["n"]
    with pytest.raises(CorruptStoreError, match="'n'"):
        tdstore.open(f"file://{folder}")[1]["n"]


@pytest.mark.parametrize(
    "change", [{"shape": [2]}, {"shape": [3, 2]}, {"shape": [2, 99]}, {"dtype": "torch.x"}], ids=str
)
def test_descriptions_that_lie(change: dict[str, Any], tmp_path: Path) -> None:
    folder = _unsealed(tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["n"] |= change
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CorruptStoreError, match="'n'"):
        tdstore.open(folder)


@pytest.mark.parametrize("spans", [[[0, 2], [3, 5]], [[0, 2], [2, 99]], [[2, 0], [0, 5]], [[-1, 2], [2, 5]]], ids=str)
@pytest.mark.parametrize(
    "about", [{"layout": "odd"}, {"dim": 7}, {"shape": [3, -1]}, {"shape": [2, 5]}, {"spans": False}], ids=str
)
def test_headers_that_lie(about: dict[str, Any], spans: list[list[int]], tmp_path: Path) -> None:
    where = str(tmp_path / "x.h5")
    TensorDict({"n": nested(torch.jagged, (2,), (3,))}, [2]).save(where).close()
    stored = tdstore.open(where, mode="r+")
    store = stored._handle.store
    store.write([tdstore.types.Write(("n", "nested.spans"), (), torch.tensor(spans))])
    header = store.load_header()
    store.save_header(header)
    with pytest.raises(CorruptStoreError, match="'n'"):
        _over(store)["n"]
    header.groups[()].values["n"]["nested"] |= about
    store.save_header(header)
    with pytest.raises(CorruptStoreError, match="'n'"):
        _over(store)
    store.close()


def test_rows_that_lie_over_one_another(tmp_path: Path) -> None:
    """Which would make any amount of memory of a small file; a row that is asked for twice is another matter."""
    where = str(tmp_path / "x.h5")
    TensorDict({"n": nested(torch.jagged, (2,), (3,))}, [2]).save(where).close()
    with tdstore.open(where) as read:
        assert [row.tolist() for row in read[[1, 0, 1]]["n"].unbind()] == [[10, 11, 12], [0, 1], [10, 11, 12]]
    stored = tdstore.open(where, mode="r+")
    store = stored._handle.store
    store.write([tdstore.types.Write(("n", "nested.spans"), (), torch.tensor([[0, 5], [0, 4]]))])
    with pytest.raises(CorruptStoreError, match="rows overlap"):
        _over(store)[[0, 1]]["n"]
    store.close()


def _over(store: Store) -> Any:
    from tdstore.container.storage.handle import StoreHandle
    from tdstore.container.storage.open_and_save import over
    from tdstore.registry import registry

    return over(StoreHandle(store, registry().get("h5"), None, "r", {}))


def test_update_takes_strided_nested_tensors() -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    td = TensorDict({"x": torch.ones(2)}, [2])
    td.update({"image": torch.nested.as_nested_tensor(parts, layout=torch.strided)})
    assert [row.shape for row in td["image"].unbind()] == [part.shape for part in parts]
    with pytest.raises(BatchSizeError):
        td.update({"more": torch.nested.as_nested_tensor([*parts, *parts], layout=torch.strided)})
    assert list(td.keys()) == ["x", "image"]
