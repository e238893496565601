"""A method that takes several entries does all of it or nothing: the last is wrong, and the first is untouched."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack

ROWS = 4
_numbers = itertools.count()


def entries(rows: int = ROWS) -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(rows * 2.0).view(rows, 2),
            "n": {"c": torch.arange(rows), "d": torch.zeros(rows, 3)},
            "s": "text",
            "t": [f"row {i}" for i in range(rows)],
            "z": torch.ones(rows, 2),
        },
        [rows],
    )


def saved(td: Any, location: str, rows: Any = None) -> tuple[Any, Callable[[], Any]]:
    """What is written to, and how another process would find all of it."""
    td.save(location).close()
    root = tdstore.open(location, "r+")
    return (root if rows is None else root[rows]), lambda: snapshot(root) + snapshot_once(location)


def snapshot_once(location: str) -> list[Any]:
    if location.endswith(".h5"):
        return []  # one writer, and no reader beside it
    td = tdstore.open(location)
    try:
        return snapshot(td)
    finally:
        td.close()


def live(td: Any) -> tuple[Any, Callable[[], Any]]:
    return td, lambda: snapshot(td)


def elements() -> Any:
    return lazy_stack([td.clone() for td in entries().unbind(0)])


def wide() -> TensorDict:
    return entries(ROWS + 2)


INNER = slice(1, 1 + ROWS)
KINDS: dict[str, Callable[[str, Any], tuple[Any, Callable[[], Any]]]] = {
    "TensorDict": lambda place, server: live(entries()),
    "lazy stack": lambda place, server: live(elements()),
    "memmap()": lambda place, server: live(entries().memmap(place)),
    "memmap r+": lambda place, server: saved(entries(), place),
    "rows of memmap": lambda place, server: saved(wide(), place, INNER),
    "h5": lambda place, server: saved(entries(), place + ".h5"),
    "zarr": lambda place, server: saved(entries(), place + ".zarr"),
    "remote": lambda place, server: saved(entries(), f"memory://whole/{uuid.uuid4().hex}"),
    "redis": lambda place, server: saved(entries(), f"{server.url}/whole-{uuid.uuid4().hex}"),
    "window of h5": lambda place, server: saved(wide(), place + ".h5", INNER),
    "window of zarr": lambda place, server: saved(wide(), place + ".zarr", INNER),
    "lazy stack in h5": lambda place, server: saved(elements(), place + ".h5"),
}


def snapshot(td: Any) -> list[Any]:
    """Keys, shapes, dtypes and values, in order."""
    found: list[Any] = [td.batch_size]
    for key, value in sorted(td.to_tensordict().items(True), key=lambda pair: str(pair[0])):
        if isinstance(value, torch.Tensor):
            found.append((key, value.dtype, value.shape, value.tolist()))
        elif not isinstance(value, tdstore.TensorDictBase):
            found.append((key, str(value)))
    return found


def seven(*shape: int) -> torch.Tensor:
    return torch.full(shape, 7.0)


def source(bad: Any, rows: int = ROWS) -> dict[Any, Any]:
    return {"a": seven(rows, 2), "n": {"c": torch.full((rows,), 7), "d": bad}}


def put(td: Any, index: Any, value: Any) -> None:
    td[index] = value


class Unstorable:
    pass


SHAPE, OBJECT = (lambda rows: torch.zeros(rows, 7)), (lambda rows: Unstorable())
META = lambda rows: torch.zeros(rows, 3, device="meta")  # noqa: E731
MISSING = lambda rows: {"no such": torch.zeros(rows)}  # noqa: E731
DEEP = lambda rows: {"x": torch.zeros(rows), "y": Unstorable()}  # noqa: E731
SURROGATE = lambda rows: {"\ud800": torch.zeros(rows)}  # noqa: E731

# name: (how it is called with a source for some rows, how many rows that is, what makes it fail for every container)
CALLS: dict[str, tuple[Callable[[Any, Any], Any], int, tuple[Any, ...]]] = {
    "update inplace": (lambda td, new: td.update(new, inplace=True), ROWS, (SHAPE, META)),
    "update_": (lambda td, new: td.update_(new), ROWS, (SHAPE, META)),
    "update_ of a TensorDict": (lambda td, new: td.update_(TensorDict(new, [ROWS])), ROWS, (SHAPE, META)),
    "update_at_": (lambda td, new: td.update_at_(new, [0, 2]), 2, (SHAPE, OBJECT, MISSING)),
    "set rows": (lambda td, new: put(td, slice(0, 2), new), 2, (SHAPE, META)),
    "update_ of rows": (lambda td, new: td[0:2].update_(new), 2, (SHAPE,)),
    "set_": (lambda td, new: td.set_("n", new["n"]), ROWS, (SHAPE, MISSING)),
    "load_state_dict": (
        lambda td, new: td.load_state_dict(TensorDict({**entries().to_dict(), **new}, [ROWS]).state_dict()),
        ROWS,
        (SHAPE, META),
    ),
}
STORED = [kind for kind in KINDS if kind not in ("TensorDict", "lazy stack", "memmap()", "rows of memmap")]


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str, Any], tuple[Any, Callable[[], Any]]]:
    return lambda kind, server: KINDS[kind](str(tmp_path / str(next(_numbers))), server)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind: str, place: Any, redis: Any) -> None:
    """Another shape, an object, a tensor without data, a missing key: nothing before it is written."""
    td, look = place(kind, redis)
    before = look()
    for name, (call, rows, wrong) in CALLS.items():
        for bad in wrong:
            with pytest.raises((ValueError, RuntimeError, KeyError, TypeError)):
                call(td, source(bad(rows), rows))
            assert look() == before, (name, bad)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("bad", [OBJECT, META, DEEP, SURROGATE], ids=["object", "meta", "deep", "surrogate"])
def test_new_entries(kind: str, bad: Any, place: Any, redis: Any) -> None:
    """What cannot be stored, below entries that can: nothing is set, replaced or removed."""
    td, look = place(kind, redis)
    before = look()
    for new in (
        {"a": seven(ROWS, 2), "n": {"c": torch.full((ROWS,), 7), "e": bad(ROWS)}},
        {"a": seven(ROWS, 5), "first": seven(ROWS), "n": {"d": bad(ROWS)}},
        {"a": seven(ROWS, 2), ("m", "x"): seven(ROWS), ("m", "y"): bad(ROWS)},
        {"s": "other", "t": list("abcd"), "z": bad(ROWS)},
    ):
        for call in (td.update, lambda given: td.update(TensorDict(given, [ROWS])), lambda given: td.set("n", given)):
            with pytest.raises((ValueError, RuntimeError, TypeError)):
                call(new)
            assert look() == before, new


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_new_entries(kind: str, place: Any, redis: Any) -> None:
    """An entry that was made for rows goes again where the rows cannot be written."""
    td, look = place(kind, redis)
    before = look()
    for bad in (SHAPE, META):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            td[0:2] = {"new": seven(2), "a": seven(2, 2), "n": {"e": seven(2), "d": bad(2)}}
        assert look() == before


@pytest.mark.parametrize("kind", ["memmap r+", "h5", "redis"])
def test_values_per_row(kind: str, place: Any, redis: Any) -> None:
    """One of many values cannot be stored: of the tensors beside them nothing is written."""
    td, look = place(kind, redis)
    before = look()
    for call in (
        lambda: td.update_({"a": seven(ROWS, 2), "t": ["p", "q", "r", Unstorable()]}),
        lambda: put(td, slice(0, 2), {"a": seven(2, 2), "t": ["p", Unstorable()]}),
        lambda: td[0:2].update_({"a": seven(2, 2), "t": ["p", Unstorable()]}),
        lambda: td.extend([{**entries(1)[0].to_dict(), "t": Unstorable()}]),
    ):
        with pytest.raises(tdstore.errors.UntrustedDataError, match="Unstorable"):
            call()
        assert look() == before


def test_live_tensors_are_looked_at_before_the_first_is_written() -> None:
    """What torch refuses when it writes: leaves of autograd, expanded memory, layouts and tensors without data."""
    good = torch.zeros(3)
    for leaf, value in (
        (torch.zeros(3, requires_grad=True), torch.ones(3)),
        (torch.zeros(1).expand(3), torch.ones(3)),
        (torch.zeros(3), torch.ones(3, device="meta")),
        (torch.eye(3)[0], torch.ones(3).to_sparse()),
    ):
        td, new = TensorDict({"a": good, "z": leaf}, [3]), TensorDict({"a": torch.ones(3), "z": value}, [3])
        for call in (
            lambda td=td, new=new: td.update_(new),
            lambda td=td, new=new: td.update(new, inplace=True),
            lambda td=td, new=new: td.update_(new.to_dict()),
        ):
            with pytest.raises(RuntimeError):
                call()
            assert not good.any(), value
    with torch.no_grad():
        td = TensorDict({"a": good, "z": torch.zeros(3, requires_grad=True)}, [3])
        assert td.update_({"a": torch.ones(3), "z": torch.ones(3)})["z"].all()


def test_locked_below() -> None:
    """The nested TensorDict that is locked takes nothing new, and then nothing else does."""
    td = entries()
    td["n"].lock_()
    before = snapshot(td)
    for new in ({"a": seven(4, 2), "n": {"e": seven(4)}}, {"a": seven(4, 2), ("n", "e"): seven(4)}):
        with pytest.raises(tdstore.errors.LockedError):
            td.update(new)
        assert snapshot(td) == before


def test_one_commit_for_all(tmp_path: Path) -> None:
    """Entries of several levels are one change of the store."""
    td = entries().to_h5(tmp_path / "a.h5")
    store, commits = td.store, []
    save = store.save_header
    store.save_header = lambda header: (commits.append(header), save(header))
    td.update({"a": seven(4, 5), "n": {"e": seven(4), "f": "text"}, ("m", "x"): seven(4), "t": list("abcd")})
    assert len(commits) == 1
    td.close()
    again = tdstore.open(tmp_path / "a.h5")
    assert again["a"].shape == (4, 5)
    assert list(again["n"].keys()) == ["c", "d", "e", "f"]
    assert again["t"] == list("abcd")
    assert again["m", "x"].tolist() == [7.0] * 4
    assert list(again.keys()) == ["a", "n", "s", "t", "z", "m"]
    again.close()


def test_nested_keys_of_one_new_group_come_together() -> None:
    """`{("m", "x"): ..., ("m", "y"): ...}`, beside what is given for "m" itself."""
    td = TensorDict({}, [2]).update({("m", "x"): torch.zeros(2), ("m", "k", "y"): torch.ones(2)})
    assert list(td.keys(True, True)) == [("m", "x"), ("m", "k", "y")]
    given = TensorDict({"w": torch.zeros(2)}, [2])
    td = TensorDict({}, [2]).update({"m": given, ("m", "x"): torch.ones(2)})
    assert list(td["m"].keys()) == ["w", "x"]
    assert list(given.keys()) == ["w"]
