"""The kit's state machine: Hypothesis searches for a sequence of calls after which a store and a dict differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from tdstore.header import Group, Header
from tdstore.store import Cap, Store
from tdstore.testing.comparing import check_header, check_paths, check_same, check_spec
from tdstore.testing.samples import assign, pick, sample, store_indices
from tdstore.testing.setup import Location, StoreSetup
from tdstore.types import LeafSpec, Mode, Path, Read, StoreIndex, Write

PATHS: tuple[Path, ...] = (("a",), ("b",), ("A",), ("g", "a"), ("g", "h", "x"), ("g/a",), ("meta.json",))
DTYPES = ("float32", "int64", "bool", "bfloat16", "uint16", "complex64")
SHAPES = st.one_of(st.just(()), st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple))


class StoreMachine(RuleBasedStateMachine):
    """A store and a dict of tensors as its model."""

    def __init__(self, open_store: Callable[[Mode], Store], caps: Cap) -> None:
        super().__init__()
        self._open = open_store
        self.caps = caps
        self.model: dict[Path, Tensor] = {}
        self.fills: dict[Path, int] = {}
        self.header = Header({(): Group(batch_size=(0,))})
        self.store = open_store("w")
        self.store.save_header(self.header)
        self.committed = (dict(self.model), dict(self.fills), self.header)

    def teardown(self) -> None:
        """Close the store, even after a failure."""
        self.store.close()

    def _any_path(self, data: st.DataObject) -> Path:
        return data.draw(st.sampled_from(sorted(self.model)), label="path")

    @rule(path=st.sampled_from(PATHS), shape=SHAPES, dtype=st.sampled_from(DTYPES), fill=st.integers(0, 1))
    def create(self, path: Path, shape: tuple[int, ...], dtype: str, fill: int) -> None:
        """Make a leaf, new or over an old one.

        Args:
            path, shape, dtype: of the leaf.
            fill: its fill value.
        """
        spec = LeafSpec(shape, dtype, fill_value=fill)
        self.store.create({path: spec})
        self.model[path] = torch.full(spec.shape, fill, dtype=spec.dtype)
        self.fills[path] = fill

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 3), count=st.integers(1, 3))
    def write(self, data: st.DataObject, seed: int, count: int) -> None:
        """Write up to three values in one batch."""
        writes = []
        for k in range(count):
            path = self._any_path(data)
            old = self.model[path]
            index: StoreIndex = ()
            if Cap.PARTIAL_WRITE in self.caps:
                index = data.draw(store_indices(tuple(old.shape)), label="index")
            value = sample(old.dtype, tuple(pick(old, index).shape), seed + k)
            self.model[path] = assign(old, index, value)
            writes.append(Write(path, index, value))
        self.store.write(writes)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 4), into=st.booleans())
    def read(self, data: st.DataObject, count: int, into: bool) -> None:
        """Read up to four times in one batch, the same leaf perhaps twice, into buffers perhaps."""
        reads, expected = [], []
        for _ in range(count):
            path = self._any_path(data)
            old = self.model[path]
            index: StoreIndex = ()
            if Cap.PARTIAL_READ in self.caps:
                index = data.draw(store_indices(tuple(old.shape)), label="index")
            expected.append(pick(old, index))
            reads.append(Read(path, index, torch.zeros_like(expected[-1]) if into else None))
        for read, want, got in zip(reads, expected, self.store.read(reads), strict=True):
            check_same(got, want, f"read of {read.path} at {read.index}")
            if read.out is not None:
                check_same(read.out, want, f"`out` of {read.path} at {read.index}")

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Remove some leaves."""
        paths = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=3), label="paths")
        self.store.delete(paths)
        for path in paths:
            del self.model[path]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), new=st.sampled_from(PATHS))
    def rename(self, data: st.DataObject, new: Path) -> None:
        """Move a leaf, perhaps over another or to where it is."""
        path = self._any_path(data)
        self.store.rename({path: new})
        self.model[new] = self.model.pop(path)
        self.fills[new] = self.fills[path]

    @precondition(lambda self: Cap.RESIZE in self.caps and any(t.ndim for t in self.model.values()))
    @rule(data=st.data(), length=st.integers(0, 7))
    def resize(self, data: st.DataObject, length: int) -> None:
        """Make a leaf longer or shorter."""
        path = data.draw(st.sampled_from(sorted(p for p, t in self.model.items() if t.ndim)), label="path")
        self.store.resize({path: length})
        old = self.model[path]
        new = torch.full((length, *old.shape[1:]), self.fills[path], dtype=old.dtype)
        keep = min(length, len(old))
        new[:keep] = old[:keep]
        self.model[path] = new

    @rule(size=st.integers(0, 100))
    def save_header(self, size: int) -> None:
        """Commit with another header."""
        self.header = Header({(): Group(batch_size=(size,)), ("g",): Group(values={"n": size})})
        self.store.save_header(self.header)
        self.committed = (dict(self.model), dict(self.fills), self.header)

    # What is written where others write, too, stays.
    @precondition(lambda self: Cap.DISCARD in self.caps and not self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE))
    @rule()
    def discard(self) -> None:
        """Discard uncommitted changes."""
        self.store.discard()
        model, fills, self.header = self.committed
        self.model, self.fills = dict(model), dict(fills)

    @precondition(lambda self: Cap.PERSISTENT in self.caps)
    @rule(mode=st.sampled_from(["r+", "a"]))
    def reopen(self, mode: Mode) -> None:
        """Commit, close, and open again."""
        self.store.save_header(self.header)
        self.committed = (dict(self.model), dict(self.fills), self.header)
        self.store.close()
        self.store = self._open(mode)

    @invariant()
    def agrees(self) -> None:
        """Check that names, specs, values and header are those of the dict."""
        paths = list(self.model)
        check_paths(self.store.paths(), paths, "paths()")
        check_header(self.store.load_header(), self.header)
        for path, spec in zip(paths, self.store.specs(paths), strict=True):
            check_spec(spec, LeafSpec(self.model[path].shape, self.model[path].dtype, fill_value=spec.fill_value), path)
        for path, got in zip(paths, self.store.read([Read(path) for path in paths]), strict=True):
            check_same(got, self.model[path], path)


class MachineTests(StoreSetup):
    """A test that no sequence of calls makes the store differ from a dict of tensors."""

    def test_state_machine(self, location: Location) -> None:
        """Create, write, read, delete, rename, resize, commit and reopen in any order."""
        self.needs(Cap.WRITE)
        dtypes = set(DTYPES) & self.dtypes_refused
        assert not dtypes, f"the state machine needs {dtypes}: declare it as a deviation"
        run_state_machine_as_test(
            lambda: StoreMachine(lambda mode: self.opened(location, mode), self.caps),  # type: ignore[arg-type]  # a factory will do
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                # No memory of failures: the kit's classes share this test, their stores do not.
                database=None,
            ),
        )
