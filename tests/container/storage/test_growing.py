"""append, extend and resize_: the same on every container, whole or not at all, and cheap however long it is."""

from __future__ import annotations

import gc
import pickle
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tdstore.builtin.shared.store import remove
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    KeyNotFoundError,
    LockedError,
    ReadOnlyError,
    StoreIOError,
    UnsupportedError,
)

Make = Callable[..., Any]
WHERE = ["TensorDict", "memory", "memmap", "anonymous memmap", "shm", "anonymous shm", "h5", "zarr", "objects", "redis"]
REOPENED = ["memmap", "shm", "h5", "zarr", "objects", "redis"]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """`place(backend)` gives fresh arguments of `save`, or None for a TensorDict of this process."""
    named: list[str] = []

    def fresh(where: str) -> Any:
        if where in ("memory", "anonymous memmap", "anonymous shm"):
            return {"storage": {"anonymous memmap": "memmap", "anonymous shm": "shared"}.get(where, where)}
        if where == "shm":
            named.append(f"shm://grow-{uuid.uuid4().hex}")
            return {"location": named[-1]}
        if where == "redis":
            return {"location": f"{request.getfixturevalue('redis').url}/0?name=grow-{uuid.uuid4().hex}"}
        folder = tmp_path / uuid.uuid4().hex
        location = f"file://{folder}/" if where == "objects" else f"{folder}.{where}"
        more = {} if where == "objects" else {"durable": "none", "storage": where}
        return {"location": location, **more}

    yield fresh
    if named:
        gc.collect()
    for name in named:
        remove(name)


@pytest.fixture
def make(place: Callable[[str], Any]) -> Make:
    """`make(where, td)` is that TensorDict, there."""
    return lambda where, td: td.clone() if where == "TensorDict" else td.save(**place(where))


def rich(n: int = 3) -> TensorDict:
    """Nested, a larger batch size below, values of both kinds, several dtypes, names."""
    td = TensorDict(
        {"z": torch.arange(2.0 * n).reshape(n, 2), "a": torch.arange(n, dtype=torch.uint8), "n": {"b": torch.ones(n)}},
        [n],
        names=["time"],
    )
    td["wide"] = TensorDict({"x": torch.arange(4 * n).reshape(n, 2, 2)}, [n, 2])
    td["same"] = "all"
    td["each"] = [f"row {i}" for i in range(n)]
    td["n", "tag"] = "t"
    return td


def assert_same(a: Any, b: Any) -> None:
    assert list(a.keys()) == list(b.keys()) and a.batch_size == b.batch_size and a.names == b.names
    for key in a.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), key
        elif isinstance(x, tdstore.TensorDictBase):
            assert_same(x, y)
        else:
            assert x.tolist() == y.tolist() and x.batch_size == y.batch_size, key


@pytest.mark.parametrize("where", WHERE)
def test_grows_as_rows_are_joined(where: str, make: Make) -> None:
    """Appended row by row, extended by many, and resized: what `torch.cat` and slices give."""
    whole = rich(9)
    td = make(where, rich(3))
    below, taken, nested = td.get("n"), td["z"], td["wide"]
    td.append(whole[3])
    td.append({**whole[4].to_dict(), "each": "row 4"})
    td.extend(whole[5:7])
    td.extend([whole[7], whole[8]])
    assert_same(td, whole)
    assert below.batch_size == (9,) and nested.batch_size == (9, 2), "nested TensorDicts follow"
    assert taken.shape == (3, 2) and torch.equal(taken, whole["z"][:3]), "what was taken stays as it was"
    assert td.resize_(4) is td
    assert_same(td, whole[:4])
    td.append(whole[4])
    assert_same(td, whole[:5])
    td.append(NonTensorRow(whole[5]))
    assert td["same"] == ["all"] * 5 + ["another"]
    if hasattr(td, "close"):
        td.close()


def NonTensorRow(row: Any) -> Any:
    row = row.clone()
    row["same"] = "another"
    return row


@pytest.mark.parametrize("where", WHERE)
def test_resize_fills(where: str, make: Make) -> None:
    td = make(where, TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, dtype=torch.bool)}, "s": "x"}, [2]))
    td.resize_(0)
    assert td["a"].shape == (0, 3)
    td.resize_(3)
    assert td["a"].tolist() == [[0.0] * 3] * 3 and td["n", "b"].tolist() == [False] * 3
    assert td.get("s").batch_size == (3,)
    with pytest.raises(ValueError, match="0 or more"):
        td.resize_(-1)
    td.close()


@pytest.mark.parametrize("where", REOPENED)
def test_a_length_beyond_any_tensor_is_refused(where: str, place: Callable[[str], Any]) -> None:
    """zarr committed it, and could not be opened again."""
    arguments = place(where)
    td = TensorDict({"a": torch.ones(2, 3)}, [2]).save(**arguments)
    for length in (1 << 60, 10**30):
        with pytest.raises(ValueError, match="cannot have length"):
            td.resize_(length)
    td.close()
    assert tdstore.open(arguments["location"])["a"].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("where", REOPENED)
def test_others_see_it(where: str, place: Callable[[str], Any]) -> None:
    """After it was closed; and by `refresh_`, where a reader may be there at the same time."""
    arguments = place(where)
    location = arguments["location"]
    td = rich(3).save(**arguments)
    reader = tdstore.open(location)
    old = reader["z"]
    if where == "h5":
        reader.close()  # HDF5 has one writer or several readers
    td.extend(rich(5)[3:])
    if where != "h5":
        assert len(reader) == 3 and torch.equal(old, rich(3)["z"]), "until it looks again"
        assert_same(reader.refresh_(), rich(5))
        reader.close()
    if where != "shm":
        td.close()
    with tdstore.open(location) as again:
        assert_same(again, rich(5))


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "last key's shape": (lambda r: r.set(("wide", "x"), torch.zeros(2, 3, dtype=torch.int64)), BatchSizeError),
    "missing": (lambda r: r.exclude(("n", "b")), KeyNotFoundError),
    "unknown": (lambda r: r.set(("n", "new"), torch.zeros(())), KeyNotFoundError),
    "kind": (lambda r: r.set("a", "text"), TypeError),
    "no row": (lambda r: 5, TypeError),
}


@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5", "objects"])
def test_what_does_not_fit_changes_nothing(where: str, make: Make) -> None:
    td = make(where, rich(3))
    for name, (spoil, error) in WRONG.items():
        with pytest.raises(error):
            td.append(spoil(rich(4)[3]))
        assert_same(td, rich(3)), name
    with pytest.raises(BatchSizeError, match="'x'"):
        td.extend(rich(5)[3:].set(("wide", "x"), torch.zeros(2, 2, 3, dtype=torch.int64)))
    td.append(rich(4)[3])
    assert_same(td, rich(4))
    td.close()


CASTS = {
    "floats as integers": (torch.int64, torch.tensor(1.0), False),
    "integers as booleans": (torch.bool, torch.tensor(1), False),
    "complex as floats": (torch.float32, torch.tensor(1j), False),
    "integers as floats": (torch.float32, torch.tensor(3), True),
    "booleans as integers": (torch.int32, torch.tensor(True), True),
    "doubles as floats": (torch.float32, torch.tensor(0.5, dtype=torch.float64), True),
}


@pytest.mark.parametrize("case", CASTS)
@pytest.mark.parametrize("where", ["TensorDict", "memmap", "shm", "h5", "zarr", "objects"])
def test_rows_are_cast_where_torch_says_so(where: str, case: str, make: Make) -> None:
    dtype, value, fits = CASTS[case]
    for call in ("append", "extend", "append a dict", "extend with a list"):
        td = make(where, TensorDict({"n": {"a": torch.zeros(2, dtype=dtype)}}, [2]))
        row = TensorDict({"n": {"a": value}})
        rows: Any = {"append": row, "extend": row[None], "append a dict": row.to_dict(), "extend with a list": [row]}
        if fits:
            getattr(td, call.split()[0])(rows[call])
            assert td["n", "a"].dtype is dtype and td["n", "a"][-1] == value
            continue
        with pytest.raises(InvalidArgumentError, match="'n' / 'a'.* which would be cut"):
            getattr(td, call.split()[0])(rows[call])
        assert len(td) == len(td["n", "a"]) == 2


@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5"])
def test_rows_of_another_batch_size_are_refused(where: str, make: Make) -> None:
    td = make(where, TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))
    for batch in ([], [1], [4]):
        row = TensorDict({"a": torch.zeros(*batch, 3)}, batch)
        with pytest.raises(BatchSizeError, match="row of batch size \\[3\\]"):
            td.append(row)
        with pytest.raises(BatchSizeError, match="batch"):
            td.extend(row)
    assert td.batch_size == (2, 3)
    td.append(TensorDict({"a": torch.ones(3)}, [3]))
    td.append({"a": torch.ones(3)})
    td.append(TensorDict({"a": torch.ones(2, 3)}, [2, 3]))
    td.extend(TensorDict({"a": torch.ones(1, 3)}, [1, 3]))
    assert td.batch_size == (7, 3) and td["a"].sum() == 15


def test_an_empty_list_is_a_row_of_any_dtype() -> None:
    td = TensorDict.from_schema({"tokens": ((-1,), "int64"), "none": ((0,), "int64")}, batch_size=[0])
    td.append({"tokens": [], "none": []})
    td.append({"tokens": [5, 6], "none": []})
    assert [row.tolist() for row in td["tokens"].unbind()] == [[], [5, 6]] and td["none"].dtype is torch.int64


@pytest.mark.parametrize("call", ["resize", "write", "save_header"])
@pytest.mark.parametrize("where", ["memmap", "shm", "h5", "zarr", "objects"])
def test_a_store_that_fails_keeps_the_old_length(
    where: str, call: str, place: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at any step: the length, all leaves, and what is read later are as they were."""
    arguments = place(where)
    td = rich(3).save(**arguments)
    store = td.store if hasattr(td, "store") else td._binding[0].store
    with monkeypatch.context() as patch:
        real, fails = getattr(store, call), [True]

        def full(*args: Any) -> Any:
            if fails.pop() if fails else False:
                if call == "resize":  # half of it done
                    real(dict(list(args[0].items())[:2]))
                raise StoreIOError("no space left", errno=28)
            return real(*args)

        patch.setattr(store, call, full)
        with pytest.raises(StoreIOError, match="no space"):
            td.append(rich(4)[3])
        assert_same(td, rich(3))
    if where != "shm":
        td.close()
        with tdstore.open(arguments["location"]) as again:
            assert_same(again, rich(3))
        td = tdstore.open(arguments["location"], "r+")
    td.append(rich(4)[3])
    assert_same(td, rich(4))
    td.close()


def test_what_cannot_grow(make: Make, tmp_path: Path) -> None:
    td = make("h5", rich(3))
    for part, error in ((td[1:], UnsupportedError), (td.select("a"), UnsupportedError), (td.get("n"), LockedError)):
        with pytest.raises(error):
            part.resize_(1)
    td.close()
    mapped = make("memmap", rich(3))
    for part, error in ((mapped[1:], UnsupportedError), (mapped.get("n"), (BatchSizeError, LockedError))):
        with pytest.raises(error):
            part.resize_(1)
    with pytest.raises(BatchSizeError, match="no rows"):
        TensorDict({"a": torch.zeros(2)}).append({"a": torch.zeros(2)})
    with pytest.raises(UnsupportedError, match="one value per row"):
        rich(2).resize_(3)
    rich(3).save(tmp_path / "r").close()
    with tdstore.open(tmp_path / "r") as reader, pytest.raises(ReadOnlyError):
        reader.append(rich(4)[3])
    rich(3).save(tmp_path / "x.zip", storage="zarr").close()
    with (
        tdstore.open(tmp_path / "x.zip", storage="zarr") as zipped,
        pytest.raises(UnsupportedError, match="zarr.*\n.*copy"),
    ):
        zipped.append(rich(4)[3])


def test_a_lock_keeps_the_keys_not_the_length() -> None:
    td = rich(2).lock_()
    td.append(rich(3)[2])
    assert_same(td, rich(3))
    with pytest.raises(LockedError, match="outermost"):
        td["n"].resize_(1)


def test_memory_is_shared_with_nobody_else() -> None:
    """Two TensorDicts that share tensors, and views of before: each grows into memory of its own."""
    td = TensorDict({"a": torch.arange(4.0)}, [4])
    for i in range(3):
        td.append({"a": 10.0 + i})
    twin, view = td.clone(False), td["a"]
    td.append({"a": 1.0})
    twin.append({"a": 2.0})
    assert td["a"][-1] == 1 and twin["a"][-1] == 2 and len(view) == 7
    part = td[:4]
    part.append({"a": -1.0})
    assert td["a"][4] == 10 and part["a"][-1] == -1
    td.resize_(5).append({"a": 3.0})
    assert view[5] == 11 and td["a"][5] == 3
    back = pickle.loads(pickle.dumps(td))
    back.append({"a": 4.0})
    assert back["a"][-1] == 4 and len(td) == 6


def test_autograd_goes_on() -> None:
    weight = torch.ones(2, requires_grad=True)
    td = TensorDict({"w": weight * 2, "x": torch.arange(2.0)}, [2])
    td.extend({"w": torch.zeros(1), "x": torch.ones(1)})
    td.extend({"w": torch.zeros(1), "x": torch.ones(1)})
    loss = (weight * td["x"][:2]).sum() + td["w"].sum()
    td.append({"w": 0.0, "x": 5.0})  # writes behind what the graph has saved, not into it
    loss.backward()
    assert weight.grad.tolist() == [2.0, 3.0]


def test_memory_grows_by_doubling() -> None:
    td = TensorDict({"a": torch.zeros(1, 4)}, [1])
    places = set()
    for i in range(5000):
        td.append({"a": torch.full((4,), float(i))})
        places.add(td["a"].data_ptr())
    assert len(places) < 20 and td["a"].untyped_storage().nbytes() <= 2 * 5001 * 16
    assert torch.equal(td["a"][1:, 0], torch.arange(5000.0))


@pytest.mark.parametrize("where", ["memmap", "h5"])
def test_an_append_writes_what_is_new(where: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a dataset has grown, the next append neither reads nor copies the rows before it (16 MiB here)."""
    td = make(where, TensorDict({"a": torch.zeros(4096, 1024)}, [4096]))
    row = {"a": torch.ones(1024)}
    td.append(row)
    before = io_bytes()
    for _ in range(3):
        td.append(row)
    assert io_bytes() - before < 16 << 20, "each append reads at most the last block of checksums"
    td.close()


def io_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


def test_what_is_written_through_old_tensors_counts(tmp_path: Path) -> None:
    """The checksums of a leaf that grew are right, though somebody wrote through a tensor of before."""
    td = TensorDict({"a": torch.zeros(3 << 10, 1 << 10)}, [3 << 10]).save(tmp_path / "d", durable="none")
    old = td["a"]
    td.append({"a": torch.ones(1 << 10)})
    old[5] = 7
    td.append({"a": torch.ones(1 << 10)})
    del old
    td.resize_(3 << 10)
    td.close()
    with tdstore.open(tmp_path / "d", verify="full") as again:
        assert again["a"][5, 0] == 7 and again["a"].sum() == 7 << 10


def test_stored_rows_are_copied_in_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, td = make("h5", rich(7)), make("zarr", rich(2))
    monkeypatch.setattr(type(source), "_row_blocks", lambda self: iter([(0, 2), (2, 5)]))
    td.extend(source[2:])
    assert_same(td, rich(7))
    td.extend(td)
    assert_same(td[7:].to_tensordict(), rich(7))
    td.close(), source.close()


@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5"])
@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks_below(where: str, dim: int, make: Make) -> None:
    """Along the stack dimension they get elements, along another each element grows."""

    def stack(n: int) -> Any:
        shapes = [(n, 2 + i) for i in range(3)] if dim else [(3, 2)] * n
        parts = [TensorDict({"v": torch.arange(float(torch.Size(s).numel())).reshape(s)}, s[:1]) for s in shapes]
        return TensorDict({"x": torch.arange(n), "s": lazy_stack(parts, dim)}, [n])

    td = make(where, stack(2))
    td.append(stack(3)[2])
    assert td.batch_size == (3,) and td["s"].batch_size == (3, 3)
    for mine, theirs in zip(td["s"].tensordicts, stack(3)["s"].tensordicts, strict=True):
        assert_same(mine, theirs)
    td.resize_(1)
    assert td["s"].batch_size == (1, 3) and td["x"].tolist() == [0]
    td.close()


@pytest.mark.parametrize("where", ["memmap", "h5", "objects"])
def test_elements_of_a_stored_lazy_stack(where: str, place: Callable[[str], Any]) -> None:
    parts = [TensorDict({"v": torch.full((3, 2 + i), float(i)), "t": f"e{i}"}, [3]) for i in range(4)]
    arguments = place(where)
    lazy_stack(parts[:1]).save(**arguments).close()
    with tdstore.open(arguments["location"], "r+") as td:
        td.append(parts[1])
        td.extend(parts[2:])
        with pytest.raises(BatchSizeError):
            td.append(TensorDict({"v": torch.zeros(5)}, [5]))
        with pytest.raises(UnsupportedError, match="clone"):
            td.insert(0, parts[0])
        for mine, theirs in zip(td.tensordicts, parts, strict=True):
            assert_same(mine, theirs)
        td.resize_(3)
    with tdstore.open(arguments["location"]) as td:
        assert len(td) == 3 and torch.equal(td[2]["v"], parts[2]["v"]) and td[2]["t"] == "e2"
        with pytest.raises((ReadOnlyError, UnsupportedError)):
            td.append(parts[3])
            raise UnsupportedError("in memory, as before") if where == "memmap" else AssertionError


def test_mixed_trees() -> None:
    """A part that lives elsewhere grows there, and is put back when another part fails."""
    mapped = TensorDict({"m": torch.zeros(2)}, [2]).memmap()
    td = TensorDict({"a": torch.zeros(2), "far": mapped}, [2])
    td.append({"a": 1.0, "far": {"m": 2.0}})
    assert td["far"].is_memmap() and mapped["m"].tolist() == [0, 0, 2] and td["a"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5", "objects"])
def test_many_values_become_leaves(where: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 256 values on a row is added to two leaves; a failure leaves neither rows nor checksums that are wrong."""

    def data(n: int) -> TensorDict:
        return TensorDict({"a": torch.arange(n), "each": [f"row {i}" for i in range(n)]}, [n])

    td = make(where, data(254))
    for n in range(254, 258):
        td.append(data(n + 1)[n])
    with pytest.raises(UnsupportedError, match="one value per row"):
        td.resize_(300)
    if where == "TensorDict":
        assert_same(td, data(258))
        return
    handle = td._handle if hasattr(td, "_handle") else td._binding[0]
    assert handle.column(("each",))
    with monkeypatch.context() as patch:
        real, fails = handle.store.save_header, [True]

        def full(header: Any) -> None:
            if fails:
                raise StoreIOError(f"no space left {fails.pop()}", errno=28)
            real(header)

        patch.setattr(handle.store, "save_header", full)
        with pytest.raises(StoreIOError, match="no space"):
            td.append(data(259)[258])
    assert_same(td, data(258))
    location = handle.store.url
    td.close()
    more: dict[str, Any] = {"storage": "remote"} if where == "objects" else {}
    with tdstore.open(location.removeprefix("h5://"), verify="full", **more) as again:
        assert_same(again, data(258))
