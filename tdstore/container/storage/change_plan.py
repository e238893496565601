"""What is to be set and written in the containers of a tree: all of it is checked, and only then done.

A method that takes several entries adds a step for each container, and each step raises what is wrong with it before
any has changed anything. What goes to one store, whichever container said so, is one plan: leaves are made, values are
written and the header is saved once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from torch.compiler import is_compiling

from tdstore.container.storage.column_plan import ValuePlan
from tdstore.container.storage.handle import StoreHandle, without
from tdstore.errors import OptionError, TDStoreError
from tdstore.header import Group
from tdstore.store import Cap
from tdstore.threads import without_interrupts
from tdstore.types import Path, Read, Write, path_text


class StorePlan(ValuePlan):
    """All that changes in one store."""

    def __init__(self, handle: StoreHandle) -> None:
        super().__init__(handle)
        self.data: list[Write] = []
        """Writes into leaves, after those of values."""
        self.records: dict[Path, Group] = {}
        """New groups."""
        self.keys: dict[Path, dict[str, bool]] = {}
        """Entries that are set, by their group: whether they are values."""

    def set(self, group: Path, key: str, value: bool) -> None:
        """Note that an entry is set, and whether it is a value."""
        self.keys.setdefault(group, {})[key] = value

    def check_names(self) -> None:
        """Refuse names that no store can write down.

        Raises:
            OptionError: a lone surrogate, which UTF-8 does not have.
        """
        for path in (*self.fresh, *self.records, *((*group, key) for group in self.keys for key in self.keys[group])):
            try:
                "".join(path).encode()
            except UnicodeEncodeError:
                raise OptionError(
                    f"the key {path_text(path)} has a lone surrogate, which {self.handle.store.url} cannot name",
                    url=self.handle.store.url,
                ) from None

    def perform(self) -> None:
        """Change the store, and then the catalogue: what fails leaves both as they were."""
        handle = self.handle
        gone = list(dict.fromkeys(self.gone))
        stale = [leaf for path in gone for leaf in handle.leaves_below(path) if leaf not in self.fresh]
        structural = self.fresh or stale or self._groups(gone) != handle.groups
        with handle.changing() if structural else nullcontext():
            self._change(gone, stale)
        self.tidy()

    def _change(self, gone: list[Path], stale: list[Path]) -> None:
        handle, store = self.handle, self.handle.store
        # A leaf cannot stand where others are to be below it, nor above it; the others go when all is written.
        above = {path[:depth] for path in self.fresh for depth in range(1, len(path))}
        blocking = [p for p in stale if p in above or any(p[:depth] in self.fresh for depth in range(1, len(p)))]
        if blocking:
            store.delete(blocking)
        replaced: list[Write] = []
        try:
            writes = self.prepare(seal=not blocking) + self.data
            if Cap.DISCARD not in store.caps and (self.fresh or stale):
                inside = [Read(w.path, w.index) for w in writes if w.path not in self.fresh]
                old = store.read(inside)
                replaced = [Write(r.path, r.index, value) for r, value in zip(inside, old, strict=True)]
            if writes:
                store.write([Write(self.beside.get(w.path, w.path), w.index, w.value) for w in writes])
        except BaseException as error:
            if Cap.DISCARD not in store.caps:
                self._put_back(replaced, error)
            raise
        if self.beside:
            store.rename({new: path for path, new in self.beside.items()})
        groups = self._groups(gone)
        if later := [leaf for leaf in stale if leaf not in blocking]:
            store.delete(later)
        if self.fresh or stale or groups != handle.groups:
            lost = set(stale)
            handle.commit(groups, {**{p: s for p, s in handle.specs.items() if p not in lost}, **self.fresh})

    def _put_back(self, replaced: list[Write], error: BaseException) -> None:
        """Undo a failure in a store without DISCARD: write old values again, remove what is not in the catalogue."""
        store = self.handle.store
        try:
            if replaced:
                store.write(replaced)
            there = set(store.paths())
            store.delete(
                [new for p in self.fresh if (new := self.beside.get(p, p)) in there and new not in self.handle.specs]
            )
        except TDStoreError as second:
            error.add_note(f"{store.url} could not be put back ({second}): open it again")

    def _groups(self, gone: list[Path]) -> dict[Path, Group]:
        """Return the records of the groups after the change."""
        before = self.handle.groups
        groups = without(before, [path for path in gone if path in before])
        for path in dict.fromkeys((*self.keys, *self.values)):
            made, group = self.keys.get(path, {}), groups[path]
            unchanged = {key: value for key, value in group.values.items() if made.get(key, True)}
            groups[path] = msgspec.structs.replace(
                group,
                keys=tuple(dict.fromkeys((*before[path].keys, *made))),
                values={**unchanged, **self.values.get(path, {})},
            )
        return {**groups, **self.records}


Undo = Callable[[], None]


def _begin_nothing(back: list[Undo]) -> None:
    """Begin a write into memory only."""


class Prepared:
    """A write into the entries of one container, all checked.

    Args:
        finish: writes to memory.
        begin: writes what a store may refuse for want of room, before. It adds to the list what takes that back.
    """

    __slots__ = ("begin", "finish")

    def __init__(self, finish: Callable[[], None], begin: Callable[[list[Undo]], None] = _begin_nothing) -> None:
        self.begin = begin
        self.finish = finish

    def __call__(self) -> None:
        """Do all of it; Ctrl-C waits."""
        (self._run if is_compiling() else self._run_whole)()

    def _run(self) -> None:
        begin_all([self])
        self.finish()

    _run_whole = without_interrupts(_run)


Step = Callable[[], None]
"""A `Prepared` write, or what cannot fail any more."""


def together(steps: Sequence[Step]) -> Prepared:
    """Combine many prepared writes into one."""

    def begin(back: list[Undo]) -> None:
        for step in steps:
            if isinstance(step, Prepared):
                step.begin(back)

    def finish() -> None:
        for step in steps:
            step.finish() if isinstance(step, Prepared) else step()

    return Prepared(finish, begin)


def begin_all(steps: Iterable[Prepared | Changes]) -> None:
    """Begin changes and prepared writes: all of them, or, where one is refused, none."""
    back: list[Undo] = []
    try:
        for step in steps:
            step.begin(back)
    except BaseException as error:
        for undo in reversed(back):
            try:
                undo()
            except TDStoreError as second:
                error.add_note(f"some of what was written before could not be put back: {second}")
        raise


class Changes:
    """One change of many entries, in any number of containers."""

    def __init__(self) -> None:
        self._plans: dict[int, StorePlan] = {}
        self._steps: list[Step] = []
        self._following: list[Step] = []
        self.done = False
        """Whether all was done, also where an interrupt came meanwhile."""

    def write(self, node: Any, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> None:
        """Add a write into existing entries of a container, at a batch index or whole.

        Raises:
            Whatever is wrong with it.
        """
        if entries:
            node._plan_write(self, entries, at)

    def set(self, node: Any, entries: Mapping[str, Any]) -> None:
        """Add entries (already coerced) that are set in a container.

        Raises:
            Whatever is wrong with them.
        """
        if entries:
            node._plan_set(self, entries)

    def plan_of(self, handle: StoreHandle) -> StorePlan:
        """Plan what changes in a store."""
        return self._plans.setdefault(id(handle), StorePlan(handle))

    def then(self, step: Step) -> None:
        """Add a `Prepared` write, or a step that cannot fail any more, after those that change stores."""
        self._steps.append(step)

    def follow(self, step: Step) -> None:
        """Add a step that takes over what a store has; it is done after an interrupt, too: that may follow a commit."""
        self._steps.append(step)
        self._following.append(step)

    def run(self, *, whole: bool = False) -> None:
        """Do all of it: stores first.

        Ctrl-C waits for the end of writes into several places of memory, or into memory and a store. What changes one
        store may take long, and be interrupted: the store does it or not.

        Args:
            whole: Ctrl-C waits anyway.
        """
        steps = len(self._steps) - len(self._following)
        divided = whole or steps + (len(self._plans) if steps else 0) > 1 or Prepared in map(type, self._steps)
        (self._run_whole if divided and not is_compiling() else self._run)()

    def _run(self) -> None:
        try:
            begin_all([self])
            self.finish()
            self.done = True
        except Exception:
            raise
        except BaseException:
            for step in self._following:
                step()
            raise

    _run_whole = without_interrupts(_run)

    def begin(self, back: list[Undo]) -> None:
        """Do what a store may refuse. What takes writes to live rows back is added to the list."""
        for plan in self._plans.values():
            plan.check_names()
        for plan in self._plans.values():
            plan.perform()
        for step in self._steps:
            if isinstance(step, Prepared):
                step.begin(back)

    def finish(self) -> None:
        """Do the rest."""
        for step in self._steps:
            step.finish() if isinstance(step, Prepared) else step()
