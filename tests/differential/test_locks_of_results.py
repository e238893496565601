"""Which results are locked, what is refused while locked, and what a shallow copy has of its own."""

from __future__ import annotations

import copy
import pickle
import tempfile

import pytest
import torch
from torch import Tensor

import tdstore
from tdstore.errors import InvalidStateError, UnsupportedError

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()

MASK = torch.tensor([True, False, True])


def locked(M: Side) -> object:
    return M.td({"a": t(3, 2), "b.c": t(3), "n": {"e": t(3)}}, [3]).lock_()


RESULTS = {
    "clamp to numbers": lambda td: td.clamp(0, 1),
    "clamp to one number": lambda td: td.clamp(min=0),
    "cummax": lambda td: td.cummax(0)[0],
    "cummin": lambda td: td.cummin(0, return_indices=False),
    "clamp to a TensorDict": lambda td: td.clamp(min=td),
    "norm": lambda td: td.norm(),
    "type": lambda td: td.type(torch.float64),
    "float": lambda td: td.float(),
    "densify": lambda td: td.densify(),
    "where of two": lambda td: td.where(MASK, td),
    "where of a number": lambda td: td.where(MASK, 0),
    "split_keys": lambda td: td.split_keys(["a"])[1],
    "nested in split_keys": lambda td: td.split_keys(["a"])[1]["n"],
    "exclude": lambda td: td.exclude("a"),
    "unflatten_keys": lambda td: td.unflatten_keys(),
    "arithmetic": lambda td: td + td,
}
for name, made in RESULTS.items():
    case(f"the lock of {name}", lambda M, made=made: made(locked(M)).is_locked)


# --- parts of a lazy stack ---
def locked_stack(M: Side, dim: int) -> object:
    tds = [M.td({"a": t(3, 2), "n": {"e": t(3)}}, [3]) for _ in range(2)]
    return M.LazyStackedTensorDict(*tds, stack_dim=dim).lock_()


def takes_a_key(part: object) -> bool:
    try:
        part.set("new", torch.zeros(part.batch_size))  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def lock_of_part(M: Side, dim: int, index: object) -> object:
    td = locked_stack(M, dim)
    part = td[index]  # type: ignore[index]
    found = part.is_locked, takes_a_key(part)
    td.unlock_()  # type: ignore[attr-defined]
    return found, td.is_locked  # type: ignore[attr-defined]


PARTS = {
    "int": 0, "slice": slice(0, 2), "rows": torch.tensor([0, 1]), "inner int": (slice(None), 0), "all": ...,
    "inner slice": (slice(None), slice(0, 1)),
}  # fmt: skip
for name, index in PARTS.items():
    for dim in (0, 1):
        case(f"the lock of {name} of a lazy stack along {dim}", lambda M, d=dim, i=index: lock_of_part(M, d, i))


# --- rows of memory-mapped and shared data ---
def lock_of_rows(M: Side, way: str, index: object) -> object:
    td = M.td({"a": t(4, 3), "n": {"e": t(4, 3)}}, [4, 3])
    part = (td.memmap_() if way == "mapped" else td.share_memory_())[index]
    return part.is_locked, part["n"].is_locked, takes_a_key(part), part["a"]


ROWS = {
    "from the second": slice(1, None), "from the end": slice(-2, None), "no rows": slice(3, 1), "one": 1,
    "the first": slice(0, 2), "every other": slice(None, None, 2), "columns": (slice(None), slice(1, 2)),
    "all": slice(0, None), "new dimension": (None, slice(1, 3)), "ellipsis": (..., slice(1, 3)),
    "one and columns": (1, slice(0, 2)),
}  # fmt: skip
for way in ("mapped", "shared"):
    for name, index in ROWS.items():
        case(f"the lock of rows of {way} data: {name}", lambda M, w=way, i=index: lock_of_rows(M, w, i))


# --- one buffer: a pickle and a file of what was locked come locked ---
def container(M: Side, kind: str) -> object:
    if kind == "lazy":
        return M.LazyStackedTensorDict(*[M.td({"a": t(3)}, []) for _ in range(2)], stack_dim=0)
    return M.td({"a": t(3), "n": {"e": t(3)}}, [3])


def pickled(M: Side, kind: str, lock: bool) -> object:
    td = container(M, kind)
    one = (td.lock_() if lock else td).consolidate()  # type: ignore[attr-defined]
    back = pickle.loads(pickle.dumps(one))
    again = pickle.loads(pickle.dumps(back.consolidate()))
    return one.is_locked, back.is_consolidated(), back.is_locked, again.is_locked, takes_a_key(back)


def filed(M: Side, kind: str, lock: bool) -> object:
    td = container(M, kind)
    with tempfile.TemporaryDirectory() as folder:
        made = (td.lock_() if lock else td).consolidate(f"{folder}/one")  # type: ignore[attr-defined]
        back = M.TensorDict.from_consolidated(f"{folder}/one")
        return made.is_locked, str(made.device), back.is_locked, back.device, takes_a_key(back), back["a"]


for kind in ("plain", "lazy"):
    for lock in (True, False):
        case(f"pickle of a consolidated one, {kind}, locked: {lock}", lambda M, k=kind, x=lock: pickled(M, k, x))
        case(f"file of a consolidated one, {kind}, locked: {lock}", lambda M, k=kind, x=lock: filed(M, k, x))

# --- refused while locked, whatever else is wrong ---
case("del_ of a missing key of a locked one", lambda M: locked(M).del_("zz"))
case("del of a missing key of a locked one", lambda M: locked(M).__delitem__("zz"))
case("rename_key_ of a missing key of a locked one", lambda M: locked(M).rename_key_("zz", "y"))
case("del_ of a missing key", lambda M: M.td({"a": t(3)}, [3]).del_("zz"))


# --- with ---
def entered(M: Side, lock: bool) -> object:
    td = M.td({"a": t(3)}, [3])
    if lock:
        td.lock_()
    with td as inside:
        return inside is td, td.is_locked


case("with td without an operation", lambda M: entered(M, False))
case("with a TensorDict that lock_ has locked", lambda M: entered(M, True))


# --- dicts and lists of a shallow copy ---
VALUES = {
    "dict": lambda: {"x": 1},
    "nested": lambda: {"x": {"y": 1}},
    "list": lambda: {"x": [1, 2]},
    "set": lambda: {1, 2},
}
COPIES = {
    "clone()": lambda td: td.clone(),
    "clone(False)": lambda td: td.clone(False),
    "copy()": lambda td: td.copy(),
    "copy.copy": copy.copy,
    "select": lambda td: td.select("o"),
}


def shared(M: Side, value: object, way: str) -> object:
    td = M.td({}, [])
    td["o"] = M.NonTensorData(value)
    mine, theirs = td["o"], COPIES[way](td)["o"]
    return mine is theirs, isinstance(mine, dict) and mine["x"] is theirs["x"], mine == theirs


for kind, value in VALUES.items():
    for way in COPIES:
        case(f"{way} of a value, {kind}", lambda M, value=value, way=way: shared(M, value(), way))


# --- padding of batches of two dimensions ---
def padded(M: Side) -> object:
    tds = [M.td({"a": t(n, 3, 2), "b": t(n, 3)}, [n, 3]) for n in (2, 4)]
    made = M.pad_sequence(tds, return_mask=True)
    return made["a"], made["b"], made["masks", "a"], made["masks"].batch_size


case("pad_sequence of batches of two dimensions", padded)


# --- vmap over stacks of elements without a batch ---
def mapped(M: Side, fn: object) -> object:
    stack = M.lazy_stack([M.td({"a": t(3) + i}, []) for i in range(2)])
    made = torch.vmap(fn)(stack)
    return type(made).__name__, made.batch_size, made["a"]


case("vmap over a lazy stack, set", lambda M: mapped(M, lambda td: td.set("b", td["a"] + 1)))
case("vmap over a lazy stack, the same", lambda M: mapped(M, lambda td: td))


@case.parametrize
def test_locks_and_copies(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("lib", ["tensordict", "tdstore"])
def test_one_memory_is_not_moved_to_another(lib: str) -> None:
    package = pytest.importorskip(lib)
    with pytest.raises(RuntimeError, match="memmap and shared memory are mutually exclusive"):
        package.TensorDict({"a": torch.zeros(3)}, []).memmap_().share_memory_()
    with pytest.raises(RuntimeError, match="memmap and shared memory are mutually exclusive"):
        package.TensorDict({"a": torch.zeros(3)}, []).share_memory_().memmap_()


@pytest.mark.parametrize("lib", ["tensordict", "tdstore"])
def test_make_memmap_elsewhere_and_temporary_files(lib: str) -> None:
    package = pytest.importorskip(lib)
    with pytest.raises(RuntimeError, match="memory-mapped"):
        package.TensorDict({"a": torch.zeros(3)}, []).make_memmap("q", (3,))
    assert package.TensorDict({"a": torch.zeros(3)}, []).memmap_().saved_path is None
    assert package.TensorDict({"a": torch.zeros(3)}, []).non_tensor_items() == ()


def test_refusals_say_what_they_are() -> None:
    td = tdstore.TensorDict({"a": torch.zeros(3)}, [])
    with pytest.raises(UnsupportedError, match="not the one over a dataset"):
        td.make_memmap("q", (3,))
    mapped = td.memmap()
    with pytest.raises(InvalidStateError, match="share_memory_"):
        mapped.share_memory_()
    assert mapped.is_memmap() and not mapped.is_shared()


def test_values_that_hold_tensors_are_compared() -> None:
    def made(last: float) -> tdstore.TensorDict:
        value: dict[str, Tensor | list[Tensor]] = {"f": torch.tensor([1.0, last]), "g": [torch.zeros(2)]}
        return tdstore.TensorDict({"v": tdstore.NonTensorData(value)}, [])

    tdstore.assert_close(made(2.0), made(2.0))
    assert bool((made(2.0) == made(2.0)).all()) and not bool((made(2.0) == made(3.0)).all())
    with pytest.raises(AssertionError, match="'v' differs"):
        tdstore.assert_close(made(2.0), made(3.0))
