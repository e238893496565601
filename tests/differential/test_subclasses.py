"""A subclass of TensorDict stays it where a method gives another TensorDict of the same kind."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import tdstore

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()
METHODS = {
    "empty": lambda td: td.empty(),
    "empty of another batch size": lambda td: td.empty(batch_size=[]),
    "empty, recursively": lambda td: td.empty(recurse=True),
    "split_keys": lambda td: td.split_keys(["a"]),
    "split_keys in place": lambda td: td.split_keys(["a"], inplace=True),
    "separates": lambda td: td.separates("a"),
    "memmap": lambda td: td.memmap(),
    "memmap to a place": lambda td: td.memmap(mkdtemp()),
    "memmap_": lambda td: td.memmap_(),
    "memmap twice": lambda td: td.memmap().memmap(),
    "a clone of memmap": lambda td: td.memmap().clone(),
    "a row of memmap": lambda td: td.memmap()[0],
    "clone": lambda td: td.clone(),
    "a row": lambda td: td[0],
    "select": lambda td: td.select("a"),
    "maths": lambda td: td + 1,
    "stack": lambda td: torch.stack([td, td]),
    "from_dict": lambda td: type(td).from_dict({"a": t(2)}, batch_size=[2]),
    "from_dict with auto_batch_size": lambda td: type(td).from_dict({"a": t(2)}, auto_batch_size=True),
}


def kinds(M: Side, method: object) -> object:
    cls = type("Sub", (M.TensorDict,), {})
    found = method(cls({"a": t(2, 3), "b": t(2)}, [2]))
    parts = found if isinstance(found, tuple) else (found,)
    return [
        (type(part).__name__, part.batch_size, sorted(part.keys()), part.is_locked, part.is_memmap()) for part in parts
    ]


for name, method in METHODS.items():
    case(name, lambda M, m=method: kinds(M, m))


@case.parametrize
def test_subclasses(case: Case) -> None:
    case.check()


def test_what_memmap_gives_is_over_the_files(tmp_path: Path) -> None:
    cls = type("Sub", (tdstore.TensorDict,), {})
    td = cls({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2]).memmap(tmp_path)
    td["a"].fill_(3)
    td["n", "b"].fill_(4)
    back = tdstore.load(tmp_path)
    assert back["a"].tolist() == [3, 3] and back["n", "b"].tolist() == [4, 4]
    with pytest.raises(RuntimeError):
        td["n"]["new"] = torch.ones(2)
