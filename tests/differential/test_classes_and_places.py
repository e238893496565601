"""Small facts that ported code looks at: generated class names, relative paths, locks of pickles, renamed keys."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore.container.core.tensorclasses import lookup
from tdstore.errors import OptionError

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()


@dataclasses.dataclass
class Reading:
    """A plain dataclass."""

    x: torch.Tensor
    unit: str = "m"


@dataclasses.dataclass
class Pair:
    """A dataclass of dataclasses."""

    left: Reading
    right: Reading


# --- from_dataclass ---
case("the class of a dataclass", lambda M: M.from_dataclass(Reading).__name__)
case("an object of a dataclass", lambda M: type(M.from_dataclass(Reading(t(2)))).__name__)
case("as_tensorclass", lambda M: type(M.TensorDict.from_dataclass(Reading(t(2)), as_tensorclass=True)).__name__)


# --- pickles of one buffer ---
def unpickled(M: Side) -> object:
    one = M.td({"a": t(3), "n": {"b": t(3)}}, [3]).consolidate()
    made = pickle.loads(pickle.dumps(one))
    facts = [one.is_locked, made.is_locked, made["n"].is_locked, made.is_consolidated()]
    made["z"] = t(3)
    return facts, made


case("a consolidated TensorDict unpickled", unpickled)


# --- places ---
def places(M: Side, given: object, how: str) -> object:
    td = M.td({"a": t(3), "n": {"b": t(3)}}, [3])
    Path(M.name, "x").mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(M.name):
        made = getattr(td, how)(given)
        return str(made.saved_path), str(made["n"].saved_path)


for given in ("m", "./m", "m/", "deep/er", "x/../m", Path("m"), Path("deep") / "er"):
    for how in ("memmap", "memmap_", "memmap_like", "save"):
        case(f"{how} to {given!r}", lambda M, given=given, how=how: places(M, given, how))


# --- split_keys with names ---
def split(M: Side, *key_sets: object, **options: object) -> object:
    td = M.td({"a": t(2), "b": t(2), "n": {"c": t(2), "d": t(2)}}, [2])
    parts = td.split_keys(*key_sets, **options)
    return [part.select(*sorted(part.keys())) for part in parts]


SPLITS = {
    "a name": ({"a": "A"},),
    "a name and a list": ({"a": "A"}, ["b"]),
    "a nested name": ({"a": ("new", "A")},),
    "a nested key": ({("n", "c"): "C"},),
    "a nested TensorDict": ({"n": "N"},),
    "a name that is taken": ({("n", "c"): "z", "a": "b"},),
    "two dicts": ({"a": "A"}, {"b": "A"}),
    "the same name": ({"a": "a"},),
    "a key that is missing": ({"zz": "A"},),
}
for name, key_sets in SPLITS.items():
    case(f"split_keys with {name}", lambda M, k=key_sets: split(M, *k))
    case(f"split_keys in place with {name}", lambda M, k=key_sets: split(M, *k, inplace=True))


def split_values(M: Side) -> object:
    found, rest = M.td({"a": t(2), "s": "x"}, [2]).split_keys({"s": "text"})
    return found["text"], sorted(found.keys()), sorted(rest.keys())


case("split_keys with the name of a value", split_values)
case("split_keys, not strict", lambda M: split(M, {"zz": "A", "a": "B"}, strict=False))
case("split_keys, as nested", lambda M: split(M, {("n", "c"): ("n", "C")}, reproduce_struct=True))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@case.parametrize
def test_small_facts(case: Case) -> None:
    case.check()


def test_a_relative_path_becomes_absolute_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tdstore.TensorDict({"a": t(3), "n": {"b": t(3)}}, [3]).memmap("m")
    assert saved.saved_path == "m"
    monkeypatch.chdir("/")
    assert saved.saved_path == str(tmp_path / "m") and saved["n"].saved_path == str(tmp_path / "m" / "n")
    assert tdstore.load(saved.saved_path)["a"].tolist() == [0, 1, 2]


def test_split_keys_refuses_one_name_for_two_keys() -> None:
    td = tdstore.TensorDict({"a": t(2), "b": t(2)}, [2])
    with pytest.raises(OptionError, match="'a' and 'b' cannot both be 'A'"):
        td.split_keys({"a": "A", "b": "A"}, inplace=True)
    assert sorted(td.keys()) == ["a", "b"]


def test_nested_dataclasses_become_tensorclasses() -> None:
    made = tdstore.from_dataclass(Pair(Reading(t(2)), Reading(t(2))))
    assert (type(made).__name__, type(made.left).__name__) == ("Pair_tc", "Reading_tc")


def test_a_file_that_names_the_dataclass_opens_as_its_tensorclass(tmp_path: Path) -> None:
    cls = tdstore.from_dataclass(Reading)
    saved = cls(x=t(2), unit="s", batch_size=[2])
    saved.save(tmp_path / "m")
    assert lookup(f"{cls.__module__}.Reading") is cls
    assert type(tdstore.load(tmp_path / "m")) is cls
