"""`CheckedStore`: what reaches a backend, what is refused before, and the page that lists public names."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path as FsPath

import pytest
import torch
from torch import Tensor

from tdstore import storekit
from tdstore.errors import (
    InvalidArgumentError,
    KeyNotFoundError,
    OptionError,
    OutOfRangeError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, refusals
from tdstore.types import LeafSpec, Path, Read, Write

PAGE = FsPath(__file__).parents[2] / "docs" / "reference" / "storage-protocol.md"


class Leaf:
    def __init__(self, spec: LeafSpec) -> None:
        self.spec, self.data = spec, torch.full(spec.shape, spec.fill_value, dtype=spec.dtype)


class RecordingStore(CheckedStore[Leaf]):
    """Tensors in a dict, and a list of the calls that reached it."""

    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE
    leaf_options = frozenset({"chunks"})

    def __init__(self, *, writable: bool = True) -> None:
        super().__init__("place", writable=writable)
        self.leaves: dict[Path, Leaf] = {("a",): Leaf(LeafSpec((4, 2), "int64"))}
        self.calls: list[str] = []

    def _catalogue(self) -> Mapping[Path, Leaf]:
        return self.leaves

    def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
        self.calls.append("read")
        return [leaf.data[r.index].clone() for leaf, r in wanted]

    def _write(self, wanted: Sequence[tuple[Leaf, Write]]) -> None:
        self.calls.append("write")
        for leaf, w in wanted:
            assert all(len(term.unique()) == len(term) for term in w.index if isinstance(term, Tensor))
            leaf.data[w.index] = w.value

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self.calls.append("create")
        self.leaves.update({path: Leaf(spec) for path, spec in leaves.items()})

    def _delete(self, paths: Sequence[Path]) -> None:
        self.calls.append("delete")
        for path in paths:
            del self.leaves[path]

    def _save(self, header: Header) -> None:
        self.calls.append("save")
        self._header = header

    def _close(self) -> None:
        self.calls.append("close")


ROWS = (torch.tensor([2, 0, 2]),)
VALUE = torch.tensor([[1, 1], [2, 2], [3, 3]])


def test_repeated_rows_reach_the_backend_once_and_the_last_wins() -> None:
    store = RecordingStore()
    store.write([Write(("a",), ROWS, VALUE)])
    assert store.leaves["a",].data.tolist() == [[2, 2], [0, 0], [3, 3], [0, 0]]


def test_out_is_filled_where_the_backend_did_not() -> None:
    store = RecordingStore()
    store.write([Write(("a",), (), torch.arange(8).view(4, 2))])
    out = torch.zeros(3, 4, dtype=torch.int64)[:, ::2]
    assert store.read([Read(("a",), ROWS, out)])[0] is out
    assert out.tolist() == [[4, 5], [0, 1], [4, 5]]


BAD = {
    "no leaf": (lambda s: s.read([Read(("a",)), Read(("b",))]), KeyNotFoundError, "no leaf 'b' in place"),
    "no leaf of specs": (lambda s: s.specs([("b",)]), KeyNotFoundError, "no leaf 'b' in place"),
    "no leaf to delete": (lambda s: s.delete([("a",), ("b",)]), KeyNotFoundError, "no leaf 'b'"),
    "row": (lambda s: s.read([Read(("a",), (torch.tensor([4]),))]), IndexError, "4 is out of range"),
    "slice": (lambda s: s.write([Write(("a",), (slice(3, 5, 1),), VALUE[:2])]), OutOfRangeError, "out of range"),
    "shape": (lambda s: s.write([Write(("a",), (), VALUE)]), InvalidArgumentError, r"takes shape \[4, 2\]"),
    "dtype": (lambda s: s.write([Write(("a",), ROWS, VALUE.float())]), InvalidArgumentError, "not .* torch.float32"),
    "out": (lambda s: s.read([Read(("a",), (), VALUE)]), InvalidArgumentError, "out= for 'a' has shape"),
    "option": (lambda s: s.create({("b",): LeafSpec((), "int8", chunk=1)}), OptionError, "did you mean 'chunks'"),
    "name": (lambda s: s.create({(): LeafSpec((), "int8")}), InvalidArgumentError, "needs a name"),
    "new name": (lambda s: s.rename({("a",): ()}), InvalidArgumentError, "needs a name"),
    "length": (lambda s: s.resize({("a",): -1}), InvalidArgumentError, "cannot have length -1"),
    "too long": (lambda s: s.resize({("a",): 1 << 62}), InvalidArgumentError, "cannot have length 4611686018427387904"),
    "no ability": (lambda s: s.resize({("a",): 5}), UnsupportedError, "RESIZE"),
    "no way back": (lambda s: s.discard(), UnsupportedError, "DISCARD"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_does_not_reach_the_backend(name: str) -> None:
    store = RecordingStore()
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call(store)
    assert store.calls == []


CHANGES = {
    "create": lambda s: s.create({}),
    "write": lambda s: s.write([]),
    "delete": lambda s: s.delete([]),
    "resize": lambda s: s.resize({}),
    "rename": lambda s: s.rename({}),
    "save_header": lambda s: s.save_header(Header()),
    "discard": lambda s: s.discard(),
}
LOOKS = {
    "paths": lambda s: s.paths(),
    "specs": lambda s: s.specs([]),
    "load_header": lambda s: s.load_header(),
    "read": lambda s: s.read([]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_refused_in_mode_r_and_in_a_child(name: str) -> None:
    store = RecordingStore(writable=False)
    with pytest.raises(ReadOnlyError, match="place was opened for reading only"):
        CHANGES[name](store)
    inherited = RecordingStore()
    inherited._lock = threading.Lock()
    inherited._lock.acquire()  # by a thread that the child does not have
    inherited._pid = os.getppid()
    with pytest.raises(StoreBusyError, match="its parent alone writes it"):
        CHANGES[name](inherited)
    assert store.calls == inherited.calls == []


@pytest.mark.parametrize("name", [*CHANGES, *LOOKS])
def test_nothing_works_after_close(name: str) -> None:
    store = RecordingStore()
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="place was closed"):
        (CHANGES | LOOKS)[name](store)
    assert store.calls == ["close"]


def test_a_store_whose_close_raises_is_closed() -> None:
    class Failing(RecordingStore):
        def _close(self) -> None:
            raise refusals.busy(self.url, "process 1", 2.0)

    store = Failing()
    with pytest.raises(StoreBusyError, match="open for writing in process 1; waited 2 s"):
        store.close()
    with pytest.raises(StoreClosedError):
        store.paths()


def test_a_rename_without_a_method_of_the_backend_copies() -> None:
    store = RecordingStore()
    store.write([Write(("a",), ROWS, VALUE)])
    store.rename({("a",): ("b",)})
    assert list(store.paths()) == [("b",)]
    assert store.leaves["b",].data[2].tolist() == [3, 3]


def test_the_page_lists_the_public_names() -> None:
    text = PAGE.read_text()
    section = text[text.index("## The storekit") : text.index("## Modes")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(storekit.__all__)
    assert all(hasattr(storekit, name) for name in storekit.__all__)


@pytest.mark.parametrize("name", ["_lock", "_closed", "_pid", "_header"])
def test_a_method_by_the_name_of_what_the_class_keeps_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine.{name} is a method") as caught:
        type("Mine", (RecordingStore,), {name: lambda self: None})
    assert getattr(caught.value, "hint", "") == "give the method another name"
    type("Mine", (RecordingStore,), {"_lock": threading.RLock()})


def test_an_answer_of_another_shape_is_not_broadcast_into_out() -> None:
    class Wide(RecordingStore):
        def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
            return [value[:1] for value in super()._read(wanted)]

    store = Wide()
    store.create({("a",): LeafSpec((3,), "float32")})
    with pytest.raises(InvalidArgumentError, match=r"Wide._read gives shape \(1,\) for leaf 'a' of .*, and \(3,\) was"):
        store.read([Read(("a",), (), torch.zeros(3))])


def test_each_refusal_names_the_place() -> None:
    leaf, other = ("a",), ("b", "c")
    made = [
        refusals.closed("p/x"),
        refusals.read_only("p/x"),
        refusals.forked("p/x"),
        refusals.replaced("p/x"),
        refusals.overtaken("p/x"),
        refusals.not_saved("p/x"),
        refusals.no_leaf("p/x", leaf),
        refusals.no_name("p/x"),
        refusals.same_name("p/x", {leaf: other}),
        refusals.bad_length("p/x", leaf, -1),
        refusals.leaf_option("p/x", leaf, "chunk"),
        refusals.place_exists("p/x"),
        refusals.not_found("p/x"),
        refusals.other_kind("p/x", "a folder"),
        refusals.foreign_files("p/x", [str(n) for n in range(9)], "a dataset"),
        refusals.busy("p/x", "process 1", 3),
        refusals.dirty("p/x", [leaf, other]),
    ]
    assert all("p/x" in error.message for error in made)
    assert made[-1].leaves == (leaf, other)
    assert "0, 1, 2, 3, 4 and 4 more" in made[-3].message
