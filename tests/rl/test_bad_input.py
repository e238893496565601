"""Bad input, in every place: a clear error of the tree, and the buffer as it was before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import NonTensorData, TensorDict
from tdstore.errors import ReadOnlyError, TDStoreError
from tdstore.rl.buffers import (
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tdstore.rl.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    TensorStorage,
)
from tdstore.rl.tables import table
from tests.rl.places import KINDS, kinds, maker

CAPACITY = 8
FIXED = [*KINDS, "tensors"]
"""Storages whose rows have one structure; "tensors" is over tensors of the caller."""
LISTS = ["list", "stack"]
"""Storages of whole objects."""
STORED = [kind for kind in KINDS if kind not in ("memory", "shared")]
NAN, INF = float("nan"), float("inf")

Batch = Callable[[int], Any]


def transitions(first: int, n: int) -> TensorDict:
    """Rows with entries of all sorts, which tell their number."""
    i = torch.arange(first, first + n)
    return TensorDict(
        {
            "i": i,
            "x": i.view(-1, 1).repeat(1, 3).float(),
            "next": TensorDict({"done": i % 2 == 0}, [n]),
            "td_error": i + 1.0,
            "t": [f"row {k}" for k in i.tolist()],
        },
        [n],
    )


def rows_for(kind: str, first: int, n: int) -> TensorDict:
    """Rows that a storage of that kind takes."""
    data = transitions(first, n)
    return data.exclude("t") if kind == "tensors" else data


def make_buffer(kind: str, request: pytest.FixtureRequest) -> Any:
    """A buffer of eight slots in which ten rows were written, each with another priority."""
    if kind == "tensors":
        storage: Any = TensorStorage(rows_for(kind, 0, CAPACITY))
    elif kind in LISTS:
        storage = {"list": ListStorage, "stack": LazyStackStorage}[kind](CAPACITY)
    else:
        storage = maker(kind, request)(CAPACITY)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), batch_size=4)
    buffer.extend(rows_for(kind, 0, 6))
    buffer.extend(rows_for(kind, 6, 4))
    return buffer


def plain(value: Any) -> Any:
    """A value that can be compared."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def seen(buffer: Any) -> Any:
    """All that bad input may not change: length, cursor, counts, rows, priorities."""
    rows = []
    for k in range(len(buffer)):
        row = buffer.storage.get(k)
        rows.append({key: plain(row.get(key)) for key in row.keys(True, True)} if hasattr(row, "keys") else row)
    sampler = buffer.sampler.state_dict()
    sampler["_weights"] = sampler["_weights"].tolist()
    return len(buffer), buffer.write_count, buffer.writer._cursor, buffer.storage.epoch, rows, sampler


def refuse(buffer: Any, cases: dict[str, tuple[Callable[[], Any], str]]) -> None:
    """Each call raises an error of the tree that names what is wrong, and changes nothing."""
    before, wrong = seen(buffer), []
    for name, (call, named) in cases.items():
        try:
            returned = call()
        except TDStoreError as error:
            if named not in str(error):
                wrong.append(f"{name}: {named!r} is not named in {str(error)!r}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} is none of the tree: {error}")
        else:
            wrong.append(f"{name}: no error, {type(returned).__name__} was returned")
        if seen(buffer) != before:
            wrong.append(f"{name}: the buffer has changed")
            break
    assert not wrong, "\n".join(wrong)


def changed(**entries: Callable[[int], Any] | None) -> Batch:
    """Make rows of which some entries are others; None for none."""

    def make(n: int) -> TensorDict:
        made = dict(transitions(50, n).items())
        for key, value in entries.items():
            if value is None:
                del made[key]
            else:
                made[key] = value(n)
        return TensorDict(made, [n])

    return make


BATCHES: dict[str, tuple[Batch, str]] = {
    "a wider row": (changed(x=lambda n: torch.zeros(n, 4)), "'x' has shape"),
    "a row without its dimension": (changed(x=torch.zeros), "'x' has shape"),
    "a row of one more dimension": (changed(x=lambda n: torch.zeros(n, 3, 1)), "'x' has shape"),
    "numbers that a cast would cut": (changed(i=lambda n: torch.full((n,), 1.5)), "'i' is float32"),
    "complex numbers": (changed(x=lambda n: torch.zeros(n, 3) * 1j), "'x' is complex64"),
    "strings in place of numbers": (changed(x=lambda n: ["text"] * n), "'x' is a NonTensor"),
    "numbers in place of strings": (changed(t=torch.zeros), "'t' is a tensor"),
    "a missing entry": (changed(x=None), "missing 'x'"),
    "a missing nested entry": (changed(next=lambda n: TensorDict({}, [n])), "missing 'next' / 'done'"),
    "an additional entry": (changed(more=torch.zeros), "unexpected 'more'"),
    "an additional nested entry": (
        changed(next=lambda n: TensorDict({"done": torch.ones(n, dtype=torch.bool), "more": torch.zeros(n)}, [n])),
        "unexpected 'next' / 'more'",
    ),
    "a tensor in place of a group": (changed(next=torch.zeros), "'next' is a Tensor"),
    "a group in place of a tensor": (changed(x=lambda n: TensorDict({"y": torch.zeros(n)}, [n])), "'x' is a Tensor"),
    "an object in place of a tensor": (changed(x=lambda n: NonTensorData(object(), [n])), "'x' is a NonTensorData"),
    "an object in place of a string": (changed(t=lambda n: NonTensorData(object(), [n])), "cannot be stored"),
    "a meta tensor": (changed(x=lambda n: torch.zeros(n, 3, device="meta")), "'x' is a meta tensor"),
    "a sparse tensor": (changed(x=lambda n: torch.ones(n, 3).to_sparse()), "'x' is a sparse_coo tensor"),
    "a tensor": (lambda n: torch.zeros(n, 3), "TensorDicts"),
    "a dict": (lambda n: {"x": torch.zeros(n, 3)}, ""),
    "a number": (lambda n: 5, "TensorDicts"),
    "a string": (lambda n: "rows", "TensorDicts"),
    "None": (lambda n: None, "TensorDicts"),
    "an object": (lambda n: object(), "TensorDicts"),
    "no rows": (lambda n: transitions(50, 0), ""),
    "no batch": (lambda n: TensorDict({"x": torch.zeros(3)}, []), ""),
}
LISTED: dict[str, tuple[Batch, str]] = {
    "a list of numbers": (lambda n: [1.5] * n, "TensorDicts"),
    "a list of other rows": (lambda n: [transitions(50, 1)[0], TensorDict(q=torch.zeros(2))] * 2, "different keys"),
    "an empty list": (lambda n: [], ""),
}
IN_TENSORS = {"numbers in place of strings", "an object in place of a string"}
"""Of entries that a storage of tensors does not have."""


def one_row(make: Batch) -> Any:
    """The first row of a batch, or what is no batch."""
    data = make(1)
    return data[0] if isinstance(data, TensorDict) and data.batch_size and len(data) else data


OPERATIONS: dict[str, Callable[[Any, Batch], Any]] = {
    "extend": lambda buffer, make: buffer.extend(make(3)),
    "add": lambda buffer, make: buffer.add(one_row(make)),
    "set": lambda buffer, make: buffer.storage.set(range(3), make(3)),
    "rows": lambda buffer, make: buffer.__setitem__(slice(0, 3), make(3)),
    "row": lambda buffer, make: buffer.__setitem__(2, one_row(make)),
    "scattered": lambda buffer, make: buffer.__setitem__([5, 0, 3], make(3)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@kinds(FIXED)
def test_rows_of_another_structure(kind, operation, request):
    buffer = make_buffer(kind, request)
    batches = {name: case for name, case in BATCHES.items() if kind != "tensors" or name not in IN_TENSORS}
    if operation not in ("add", "row"):
        batches |= LISTED

    def call(make: Batch) -> Callable[[], Any]:
        def fitting(n: int) -> Any:
            data = make(n)
            return data.exclude("t") if kind == "tensors" and isinstance(data, TensorDict) else data

        return lambda: OPERATIONS[operation](buffer, fitting)

    refuse(buffer, {name: (call(make), named) for name, (make, named) in batches.items()})
    buffer.extend(rows_for(kind, 10, 3))
    assert buffer[:]["i"].tolist() == [8, 9, 10, 11, 12, 5, 6, 7]


@pytest.mark.parametrize("operation", ["extend", "add"])
@kinds([*FIXED, *LISTS])
def test_rows_with_bad_priorities(kind, operation, request):
    buffer = make_buffer(kind, request)

    def rows(*priorities: float) -> Any:
        data = rows_for(kind, 50, len(priorities))
        data["td_error"] = torch.tensor(priorities)
        return (lambda: buffer.extend(data)) if operation == "extend" else (lambda: buffer.add(data[-1]))

    refuse(buffer, {
        "negative": (rows(1.0, 2.0, -1.0), "priority -1.0"),
        "NaN": (rows(1.0, 2.0, NAN), "priority nan"),
        "infinite": (rows(1.0, 2.0, INF), "priority inf"),
    })  # fmt: skip


@kinds([*FIXED, *LISTS])
def test_priorities(kind, request):
    buffer = make_buffer(kind, request)
    sample = buffer.sample()

    def with_error(priority: torch.Tensor) -> Any:
        return lambda: buffer.update_tensordict_priority(sample.clone().set("td_error", priority))

    refuse(buffer, {
        "negative": (lambda: buffer.update_priority([0, 1], torch.tensor([1.0, -1.0])), "priority -1.0 at position 1"),
        "NaN": (lambda: buffer.update_priority([0, 1], torch.tensor([NAN, 1.0])), "priority nan at position 0"),
        "infinite": (lambda: buffer.update_priority([0, 1], torch.tensor([1.0, INF])), "priority inf at position 1"),
        "one negative": (lambda: buffer.update_priority(2, -0.5), "priority -0.5"),
        "more": (lambda: buffer.update_priority([0, 1], torch.ones(3)), "3 priorities for 2 rows"),
        "a string": (lambda: buffer.update_priority([0], "x"), "priority"),
        "None": (lambda: buffer.update_priority([0], None), "priority"),
        "complex": (lambda: buffer.update_priority([0], 1j), "priority"),
        "beyond the end": (lambda: buffer.update_priority([0, 8], torch.ones(2)), "index 8"),
        "before the first": (lambda: buffer.update_priority([0, -5], torch.ones(2)), "index -5"),
        "a float index": (lambda: buffer.update_priority([0.5], 1.0), "index"),
        "no index": (lambda: buffer.update_priority(None, 1.0), "index"),
        "a mask": (lambda: buffer.update_priority(torch.ones(8, dtype=torch.bool), 1.0), "index"),
        "a sample: negative": (with_error(-torch.ones(4)), "priority -1.0"),
        "a sample: NaN": (with_error(torch.full((4, 2), NAN)), "priority nan"),
        "a sample without an index": (
            lambda: buffer.update_tensordict_priority(sample.exclude("index")), "no entry 'index'"),
        "a sample without priorities": (
            lambda: buffer.update_tensordict_priority(sample.exclude("td_error")), "no entry 'td_error'"),
        "no sample": (lambda: buffer.update_tensordict_priority(None), "TensorDicts"),
    })  # fmt: skip


@kinds([*FIXED, *LISTS])
def test_indices(kind, request):
    buffer = make_buffer(kind, request)
    row, three = rows_for(kind, 50, 1)[0], rows_for(kind, 50, 3)
    mask = torch.tensor([True, False])
    refuse(buffer, {
        "beyond the end": (lambda: buffer[8], "index 8"),
        "before the first": (lambda: buffer[-9], "index -9"),
        "one of several": (lambda: buffer[[0, 8]], "index 8"),
        "a large number": (lambda: buffer[2**70], str(2**70)),
        "a float": (lambda: buffer[1.5], "float64"),
        "floats": (lambda: buffer[torch.tensor([0.5])], "float32"),
        "strings": (lambda: buffer[["a", "b"]], "rows are integers"),
        "an object": (lambda: buffer[object()], "rows are integers"),
        "a short mask": (lambda: buffer[mask], "mask of shape [2]"),
        "dimensions": (lambda: buffer[0, 0, 0], "3"),
        "writing beyond the end": (lambda: buffer.__setitem__(8, row), "8"),
        "writing before the first": (lambda: buffer.__setitem__(-9, row), "-9"),
        "writing one of several": (lambda: buffer.__setitem__([0, 9, 1], three), "9"),
        "writing a large number": (lambda: buffer.storage.set(2**70, row), ""),
        "writing at a float": (lambda: buffer.__setitem__(1.5, row), "float64"),
        "writing at a mask": (lambda: buffer.__setitem__(mask, three), "bool"),
        "fewer rows": (lambda: buffer.__setitem__(slice(0, 2), three), "3"),
        "more rows": (lambda: buffer.__setitem__(slice(0, 4), three), "3"),
        "a range beyond the end": (lambda: buffer.storage.set(range(6, 9), three), "8"),
        "no place": (lambda: buffer.storage.set(None, row), "rows are integers"),
        "a name as a place": (lambda: buffer.storage.set("x", row), "rows are integers"),
        "a batch of no rows": (lambda: buffer.sample(0), "batch_size"),
        "a negative batch": (lambda: buffer.sample(-1), "batch_size"),
        "half a row": (lambda: buffer.sample(1.5), "batch_size"),
        "a batch of a name": (lambda: buffer.sample("x"), "batch_size"),
    })  # fmt: skip


@kinds(FIXED)
def test_entries(kind, request):
    buffer = make_buffer(kind, request)
    cases = {
        "reading another": (lambda: buffer["none"], "none"),
        "reading another nested one": (lambda: buffer["next", "none"], "none"),
        "another": (lambda: buffer.__setitem__("none", torch.zeros(8)), "none"),
        "a group": (lambda: buffer.__setitem__("next", torch.zeros(8)), "next"),
        "wider": (lambda: buffer.__setitem__("x", torch.zeros(8, 4)), "'x' has shape [8, 4]"),
        "fewer rows": (lambda: buffer.__setitem__("x", torch.zeros(7, 3)), "'x' has shape [7, 3]"),
        "cut": (lambda: buffer.__setitem__("i", torch.full((8,), 1.5)), "'i' is float32"),
        "a string": (lambda: buffer.__setitem__("x", "text"), "'x' is a"),
        "None": (lambda: buffer.__setitem__("x", None), "'x' is a"),
    }
    if kind != "tensors":
        cases["fewer strings"] = (lambda: buffer.__setitem__("t", ["a", "b"]), "'t'")
        cases["numbers as strings"] = (lambda: buffer.__setitem__("t", torch.zeros(8)), "'t' is a tensor")
    refuse(buffer, cases)


@kinds([*FIXED, *LISTS])
def test_parts_and_states(kind, request, tmp_path):
    buffer = make_buffer(kind, request)
    state = buffer.state_dict()
    torn = {name: {**state, name: {}} for name in ("_storage", "_writer", "_sampler")}
    beyond = {**state, "_writer": {"_cursor": 99, "_write_count": 0}}
    larger = {**state, "_sampler": {**state["_sampler"], "_weights": torch.ones(99)}}
    refuse(buffer, {
        "no storage": (lambda: buffer.set_storage(5), "storage="),
        "no sampler": (lambda: buffer.set_sampler(5), "sampler="),
        "no writer": (lambda: buffer.set_writer("x"), "writer="),
        "no generator": (lambda: buffer.set_rng(5), "generator"),
        "no transform": (lambda: buffer.append_transform(5), "transform"),
        "no folder": (lambda: buffer.loads(tmp_path / "none"), str(tmp_path / "none")),
        "no state": (lambda: buffer.load_state_dict(None), "_storage"),
        "an empty state": (lambda: buffer.load_state_dict({}), "_sampler, _storage, _writer"),
        "a state without rows": (lambda: buffer.load_state_dict(torn["_storage"]), "_storage"),
        "a state without a cursor": (lambda: buffer.load_state_dict(torn["_writer"]), "_writer"),
        "a state without priorities": (lambda: buffer.load_state_dict(torn["_sampler"]), "_sampler"),
        "a cursor beyond the end": (lambda: buffer.load_state_dict(beyond), "cursor 99"),
        "priorities beyond the end": (lambda: buffer.load_state_dict(larger), "99"),
    })  # fmt: skip
    buffer.load_state_dict(state)
    assert len(buffer) == CAPACITY and buffer.write_count == 10


@kinds(STORED)
def test_a_place_with_rows_of_another_structure(kind, request):
    buffer = make_buffer(kind, request)
    storage = buffer.storage
    name, place, options = storage.storage_name, storage.place, dict(storage._place.options)
    before = seen(buffer)
    buffer.close()
    for make, named in (BATCHES["a wider row"], BATCHES["a missing entry"], BATCHES["an additional entry"]):
        other = TensorDictReplayBuffer(
            storage=LazyStorage(CAPACITY, name, path=place, existsok=True, **options)
            if "://" not in place
            else LazyStorage(CAPACITY, place, existsok=True, **options)
        )
        with pytest.raises(TDStoreError, match=named.split()[-1] if "has" not in named else "'x'") as caught:
            other.extend(make(3))
        assert place in str(caught.value)
        assert not other.storage.initialized and len(other) == 0
    again = LazyStorage.open(place, storage=None if "://" in place else name, **options)
    found = TensorDictReplayBuffer(storage=again, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    assert seen(found)[:3] == before[:3] and seen(found)[4] == before[4]
    again.close()


@kinds(STORED)
def test_a_place_that_is_only_read(kind, request):
    buffer = make_buffer(kind, request)
    storage = buffer.storage
    name, place, options = storage.storage_name, storage.place, dict(storage._place.options)
    buffer.close()
    storage = LazyStorage.open(place, "r", storage=None if "://" in place else name, **options)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), batch_size=4)
    row, three = transitions(50, 1)[0], transitions(50, 3)
    for call in (
        lambda: buffer.extend(three),
        lambda: buffer.add(row),
        lambda: buffer.__setitem__(slice(0, 3), three),
        lambda: buffer.__setitem__("i", torch.arange(8)),
        lambda: storage.set([3, 1, 2], three),
        buffer.empty,
    ):
        before = seen(buffer)
        with pytest.raises(ReadOnlyError) as caught:
            call()
        assert place in str(caught.value) and seen(buffer) == before
    assert len(buffer.sample()) == 4
    storage.close()


class MediumError(OSError):
    """What a medium raises."""


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@kinds(FIXED)
def test_a_write_that_fails_in_the_middle(kind, at, request, monkeypatch):
    buffer = make_buffer(kind, request)
    calls = []
    if buffer.storage.by_request:
        owner: Any = type(buffer.storage._table.handle.store)
        name = "write"
    else:
        owner, name = table, "memmove" if buffer.storage._table.durable else "to_numpy"
    real = getattr(owner, name)

    def failing(*received: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            if name == "write":
                store, writes = received
                real(store, list(writes)[: len(writes) // 2])
            raise MediumError("the medium failed")
        return real(*received)

    # The rows of two requests: those up to the end, and those from the first slot on. Strided ones, for numpy to read.
    data = rows_for(kind, 50, 14)[::2] if kind != "memory" else transitions(50, 14).exclude("t")[::2]
    if kind == "memory":
        data["t"] = [f"row {k}" for k in range(7)]
    before = seen(buffer)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(MediumError):
        while True:
            buffer.extend(data)
            assert len(calls) < at, "the write was not reached"
            before = seen(buffer)
    monkeypatch.setattr(owner, name, real)
    assert seen(buffer) == before
    cursor = buffer.writer._cursor
    assert buffer.extend(rows_for(kind, 100, 2)).tolist() == [cursor, (cursor + 1) % CAPACITY]
    assert buffer[cursor]["i"] == 100


class Immovable:
    """An object that no device takes."""

    def to(self, device: Any) -> Any:
        raise MediumError("the medium failed")


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage])
def test_objects_that_cannot_be_moved(make):
    storage = make(4, device="cpu")
    storage.append([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.ones(1))])
    with pytest.raises(MediumError):
        storage.append([TensorDict(a=torch.zeros(1)), Immovable()])
    with pytest.raises(MediumError):
        storage.set([0, 1], [TensorDict(a=torch.ones(1)), Immovable()])
    assert (len(storage), storage.cursor, storage.write_count) == (2, 2, 2)
    assert [float(storage.get(k)["a"]) for k in range(2)] == [0.0, 1.0]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", [4]], ids=repr)
def test_capacities(wrong):
    for make, named in (
        (LazyTensorStorage, "max_size"),
        (LazyMemmapStorage, "max_size"),
        (ListStorage, "max_size"),
        (LazyStackStorage, "max_size"),
        (lambda size: LazyStorage(size, "shared"), "max_size"),
        (lambda size: TensorStorage(torch.zeros(4), size), "max_size"),
        (lambda size: LazyTensorStorage(4, ndim=size), "ndim"),
        (lambda size: PrioritizedSampler(size, 0.5, 0.5), "max_capacity"),
        (lambda size: TensorDictReplayBuffer(storage=ListStorage(4), batch_size=size), "batch_size"),
        (lambda size: SliceSampler(num_slices=size), "num_slices"),
        (lambda size: SliceSampler(slice_len=size), "slice_len"),
    ):
        with pytest.raises(TDStoreError, match=named):
            make(wrong)


@pytest.mark.parametrize("wrong", [-0.1, NAN, INF, "0.5", None, 1j], ids=repr)
@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
def test_parameters_of_priorities(name, wrong):
    parameters = {"alpha": 0.5, "beta": 0.5, "eps": 1e-8, name: wrong}
    for make in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(TDStoreError, match=name):
            make(storage=ListStorage(4), **parameters)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_sampler_with_room_for_fewer_rows_grows(ndim):
    storage = LazyTensorStorage(13, ndim=ndim)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(5, 0.7, 0.5), batch_size=999)
    shape = [4, 4] if ndim == 2 else [4]
    for first in range(0, 40, 4):
        buffer.extend(TensorDict({"a": torch.full(shape, first)}, shape))
    assert len(buffer) == storage.max_size == (13 if ndim == 1 else 16)
    assert set(buffer.sample()["index"].reshape(999, -1)[:, 0].tolist()) == set(range(storage.shape[0]))


EDITED = {
    "a cursor beyond the end": ("cursor", 8, "cursor 8 is beyond the 8 rows"),
    "a cursor before the first row": ("cursor", -1, "cursor .* -1"),
    "a cursor that is no number": ("cursor", "4", "cursor .* '4'"),
    "a cursor of half a row": ("cursor", 0.5, "cursor .* 0.5"),
    "no cursor": ("cursor", None, "cursor .* None"),
    "a negative count": ("write_count", -5, "write_count .* -5"),
}


@pytest.mark.parametrize("written", [2, 0], ids=["filled", "empty"])
@pytest.mark.parametrize("what", EDITED)
def test_an_edited_cursor_is_refused_before_rows_are_loaded(tmp_path, what, written):
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    one.extend(TensorDict({"a": torch.arange(6)}, [6]))
    one.dumps(tmp_path / "checkpoint")
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "own"), batch_size=4)
    if written:
        buffer.extend(TensorDict({"a": torch.tensor([10, 11])}, [2]))
    file = tmp_path / "checkpoint" / "writer" / "metadata.json"
    about = json.loads(file.read_text())
    name, value, message = EDITED[what]
    file.write_text(json.dumps({**about, name: value}))
    with pytest.raises(ValueError, match=message):
        buffer.loads(tmp_path / "checkpoint")
    assert len(buffer) == buffer.write_count == written and buffer.storage.initialized is bool(written)
    assert not written or (buffer[:]["a"].tolist() == [10, 11] and buffer.writer._cursor == 2)
    file.write_text(json.dumps(about))
    buffer.loads(tmp_path / "checkpoint")
    assert buffer[:]["a"].tolist() == list(range(6)) and buffer.writer._cursor == 6


@pytest.mark.parametrize("what", ["buffer_metadata.json", "writer/metadata.json", "a smaller sampler"])
def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(tmp_path, what):
    def make(slots):
        sampler = PrioritizedSampler(slots, 1.0, 0.0)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=50)

    def rows(*numbers):
        return TensorDict({"a": torch.tensor(numbers)}, [len(numbers)])

    make_one = make(8)
    make_one.extend(rows(*range(6)))
    make_one.dumps(tmp_path / "checkpoint")
    buffer = make(3 if what == "a smaller sampler" else 8)
    buffer.extend(rows(10, 11))
    buffer.update_priority([0, 1], torch.tensor([0.0, 1.0]))
    if what != "a smaller sampler":
        (tmp_path / "checkpoint" / what).write_text("{broken")
    with pytest.raises(ValueError, match="do not fit" if what == "a smaller sampler" else what):
        buffer.loads(tmp_path / "checkpoint")
    assert buffer[:]["a"].tolist() == [10, 11] and buffer.write_count == 2
    assert set(buffer.sample()["a"].tolist()) == {11}
