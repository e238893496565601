"""An open store together with what its header says: shared by every container over it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from tdstore import lifetime
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.storage.describe import STACK_KIND, decoded
from tdstore.container.storage.entry_kinds import (
    Column,
    Entries,
    Entry,
    Inline,
    Leaf,
    Refused,
    SubGroup,
    Unbatched,
    ValueEntry,
    value_entry,
)
from tdstore.container.storage.inline_values import inline_value
from tdstore.container.values.codecs import trusting
from tdstore.container.values.nontensor import NonTensor
from tdstore.container.varlen.columns import LiveText, PackedStack
from tdstore.container.varlen.compaction import compact_columns
from tdstore.container.varlen.reading import column_rounds
from tdstore.container.varlen.rounds import Rounds, drive
from tdstore.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    KeyNotFoundError,
    StoreError,
    TDStoreError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.header import Group, Header, without_collection
from tdstore.hookspecs import Backend
from tdstore.index.shapes import common_prefix
from tdstore.io.opening import PLAIN, locate, open_unread, refuse_partial
from tdstore.pickling import rebuild
from tdstore.store import LIVE, Cap, Store
from tdstore.storekit import refusals
from tdstore.threads import without_interrupts
from tdstore.types import MAX_TEXT, LeafSpec, Mode, Path, Read, path_text

_PERSISTENT, _VIEW, _LIVE = Cap.PERSISTENT.value, Cap.VIEW.value, LIVE.value
MANY = 64
"""So many leaves make enough objects for the garbage collector to run, which looks at all of torch's."""


class StoreHandle:
    """The catalogue of one open store, kept in step with it.

    Nothing here changes before the store took it: a failed write leaves the catalogue as it was.
    """

    __slots__ = (
        "__weakref__", "_before", "_deferred", "_ending", "_failed", "_generation", "backend", "blank", "entries",
        "groups", "location", "mode", "needs_compaction", "options", "specs", "store", "trusted", "warned_classes",
    )  # fmt: skip

    def __init__(
        self,
        store: Store,
        backend: Backend,
        location: str | None,
        mode: Mode,
        options: Mapping[str, Any],
        saved: tuple[Mapping[Path, Group], Mapping[Path, LeafSpec]] | None = None,
    ) -> None:
        self.mode = mode
        self._hold(store)
        self._before: tuple[dict[Path, Group], dict[Path, LeafSpec]] | None = None
        """The catalogue of the last commit, while the structure changes."""
        self._deferred = False
        """Whether a transaction is open: changes are committed at its end."""
        self._failed = False
        """Whether a part of the present change failed."""
        self._generation: object = None
        """The store's generation before its catalogue was last read; None if it is not known."""
        self.blank: bool | None = None
        """Whether an allocated dataset had no rows written at the last commit; None for one that was not allocated."""
        self.backend = backend
        self.location = location
        self.options = dict(options)
        self.trusted = self.options.get("trust") is True
        """Whether values may be unpickled: the caller said `trust=True`."""
        self.needs_compaction: set[Path] = set()
        """Columns of live tensors whose text may have to be packed anew."""
        self.warned_classes: set[str] = set()
        """Names of tensorclasses that this data cannot be given, of which the user was warned."""
        self.specs: dict[Path, LeafSpec] = {}
        self.groups: dict[Path, Group] = {}
        if saved is None:
            self.reload()
        else:  # what was just committed is not read back
            groups, specs = saved
            plain = dict(specs)
            for path, spec in specs.items():
                if spec.options:
                    plain[path] = LeafSpec(spec.shape, spec.dtype, fill_value=spec.fill_value)
            whole = _whole(groups, plain)
            known, values = _complete(dict(groups), plain, store.url) if whole is None else (whole, {})
            self._believe(known, plain, values)

    def _hold(self, store: Store) -> None:
        """Take a store. One that is written is closed soon after this handle was dropped, or when the process ends."""
        self.store = store
        self._ending: lifetime.Ending | None = None
        caps = store.caps._value_
        if self.mode != "r" and store.writable and caps & _PERSISTENT:
            if caps & _LIVE == _LIVE:  # it ends with the last of its tensors, which may outlive this handle
                lifetime.register(store, resident=True)
            else:
                # Rows that go to memory of the store are no change that it registers by itself.
                commit = partial(lifetime.commit_store, store) if caps & _VIEW else None
                self._ending = lifetime.Ending(self, store.close, store.url, commit)

    @classmethod
    def open(cls, location: Any = None, *, storage: Any = None, mode: Mode = "r", **options: Any) -> StoreHandle:
        """Open a location through the registry."""
        if type(location) not in PLAIN:
            location, options = locate(location, options)
        store, backend = open_unread(location, storage=storage, mode=mode, **options)
        try:
            is_path = type(location) is not str and isinstance(location, os.PathLike)
            place = os.fspath(location) if is_path else location
            return cls(store, backend, place, mode, options)
        except BaseException:
            store.close()
            raise

    def reload(self) -> None:
        """Read the catalogue from the store."""
        paths = list(self.store.paths())
        with without_collection() if len(paths) >= MANY else nullcontext():
            specs = dict(zip(paths, self.store.specs(paths), strict=True))
            header = self.store.load_header()
            if self.mode in ("r", "r+", "a"):
                refuse_partial(header, self.store.url, self.options)
            whole = _whole(header.groups, specs)
            known, values = _complete(dict(header.groups), specs, self.store.url) if whole is None else (whole, {})
            self._believe(known, specs, values)

    def _believe(
        self,
        groups: dict[Path, Group],
        specs: dict[Path, LeafSpec],
        values: Mapping[Path, ValueEntry] | None = None,
    ) -> None:
        self.groups, self.specs = groups, specs
        self.entries = Entries(groups, specs, self.store.url, values)

    def overlay(self, groups: Mapping[Path, Group]) -> None:
        """Take group records as a reader's own view of the data. The store is not touched."""
        self._believe(dict(groups), self.specs)

    def reopen(self) -> None:
        """Open the store again, and read what others committed; what this one wrote in place is committed first.

        A store whose `generation` says that nobody else committed stays open.
        """
        if self.location is None:
            raise StoreError(f"{self.store.url} has no location to be opened again by", url=self.store.url)
        self.refuse_in_transaction("td.refresh_()")
        generation = self.store.generation()
        if generation is not None and generation == self._generation and not self.store.uncommitted:
            return
        mode: Mode = "r+" if self.store.writable else "r"
        self._close_store()
        options = {name: value for name, value in self.options.items() if name != "recover"}
        store, _ = open_unread(self.location, storage=self.backend.name, mode=mode, **options)
        self._hold(store)
        self._generation = generation
        self.reload()

    # -- looking -----------------------------------------------------------------------------
    def kind(self, path: Path) -> str | None:
        """Return LEAF, GROUP or VALUE; None when nothing is there."""
        entry = self.entries[path]
        return None if entry is None else entry.kind

    def batch_above(self, path: Path) -> list[torch.Size]:
        """Return the batch size that a group's must start with, if its parent has one. Elements of stacks need none."""
        above = self.groups.get(path[:-1]) if path else None
        return [] if above is None or above.kind == STACK_KIND else [torch.Size(above.batch_size or ())]

    def column(self, path: Path) -> bool:
        """Return whether the values at a path lie in leaves of their own."""
        return isinstance(self.entries[path], Column)

    def value(self, path: Path) -> NonTensor:
        """Return the non-tensor entry at a path. It is live where leaves are."""
        entry = self.entries[path]
        if (rounds := self.value_rounds(entry)) is not None:
            return drive(rounds, self.store)
        group = self.groups[path[:-1]]
        match entry:
            case Column():
                return PackedStack.over(self.store.view(entry.leaves[0]), LiveText(self, path))
            case Unbatched():
                return UnbatchedTensor(self.store.view(entry.leaves[0]), group.batch_size)
            case Inline() | Refused():
                return self._inline_value(path, entry.record, torch.Size(group.batch_size or ()))
        raise KeyNotFoundError(f"no value {path_text(path)} in {self.store.url}")

    def value_rounds(self, entry: Entry | None) -> Rounds[NonTensor] | None:
        """Return the read of a non-tensor entry; None for a value in the header, or where leaves are live."""
        if Cap.VIEW in self.store.caps:
            return None
        match entry:
            case Column(path):
                return column_rounds(self, path, self._first_round(entry.leaves[0]))
            case Unbatched(path):
                return _unbatched(self._first_round(entry.leaves[0]), self.groups[path[:-1]].batch_size)
        return None

    def _first_round(self, leaf: Path) -> Rounds[Tensor]:
        return (yield [Read(leaf)])[0]

    def _inline_value(self, path: Path, value_record: Any, batch_size: torch.Size) -> NonTensor:
        try:
            make = partial(inline_value, self, path) if Cap.VIEW in self.store.caps else decoded
            with trusting(self.trusted):
                return make(value_record, batch_size)
        except UntrustedDataError as error:  # a TypeError too, but about a missing codec
            raise UntrustedDataError(
                f"the value {path_text(path)} of {self.store.url}: {error.message}", url=self.store.url, hint=error.hint
            ) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptStoreError(
                f"the value {path_text(path)} of {self.store.url} is malformed: {str(error)[:1000]}", url=self.store.url
            ) from error

    def leaves_below(self, path: Path) -> list[Path]:
        """List the paths of the leaves at or under a path, in key order."""
        found: list[Path] = []
        waiting = [path]
        while waiting:
            at = waiting.pop()
            match entry := self.entries[at]:
                case Leaf():
                    found.append(at)
                case SubGroup():
                    for key in reversed(self.groups[at].keys):
                        waiting.append((*at, key))
                case None:
                    pass
                case _:
                    found += entry.leaves
        return found

    def check_writable(self) -> None:
        """Raise `ReadOnlyError` unless the store was opened for writing."""
        if not self.store.writable:
            raise refusals.read_only(self.store.url)

    def refuse_in_transaction(self, what: str) -> None:
        """Refuse a call that would commit, or end, half of a transaction.

        Args:
            what: the call.

        Raises:
            InvalidStateError: a transaction is open.
        """
        if self._deferred:
            raise InvalidStateError(
                f"{what}: a transaction on {self.store.url} is open: its commit is at its end",
                hint=f"{what} after the block",
            )

    def close(self) -> None:
        """Give back what texts do not need, if nobody else has them open; close the store.

        Raises:
            InvalidStateError: a transaction is open.
        """
        self.refuse_in_transaction("td.close()")
        try:
            if self.needs_compaction and self.store.writable:
                with self.store.alone() as alone:
                    if alone:
                        compact_columns(self, self.needs_compaction)
        finally:
            self.needs_compaction.clear()
            self._close_store()

    @without_interrupts
    def _close_store(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self.store.close()

    # -- changing ----------------------------------------------------------------------------
    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run a change of structure, which ends with `commit`. What fails leaves store and catalogue as they were.

        Rows that were written before are committed first, since taking back a change goes to the last commit.
        """
        self.check_writable()
        if self._before is not None:  # a part of a larger change
            try:
                yield
            except BaseException:
                self._failed = True
                raise
            return
        store = self.store
        revocable = Cap.DISCARD in store.caps
        if revocable and store.uncommitted:
            self._save(self.groups)
        self._before = self.groups, dict(self.specs)
        try:
            yield
        except BaseException as error:
            self._believe(*self._before)
            if revocable:
                try:
                    store.discard()
                    header = store.load_header()
                    if header and not isinstance(error, Exception):  # an interrupt may come after the commit
                        self.reload()
                except TDStoreError as second:
                    error.add_note(f"{store.url} could not be put back ({second}): open it again")
            raise
        finally:
            self._before = None

    def commit(self, groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec] | None = None) -> None:
        """Save new group records, and only then believe them."""
        self.check_writable()
        if self.blank and self.store.uncommitted:
            self.blank = False
        if not self._deferred:
            self._save(groups)
        self._believe(dict(groups), self.specs if specs is None else dict(specs))
        if self._before is not None and not self._deferred:
            self._before = self.groups, dict(self.specs)

    def commit_changes(self) -> None:
        """Commit what was changed since the last commit; where that is known to be nothing, do nothing."""
        self.check_writable()
        store = self.store
        # Nobody tells a store of live tensors what was written to them, and what was accepted is committed anew.
        known = Cap.VIEW not in store.caps and not self.options.get("recover") and store.load_header()
        if store.uncommitted or not known:
            self.commit(self.groups)

    def commit_version(self, message: str) -> None:
        """Commit, and make the commit a version.

        Raises:
            UnsupportedError: the store has no versions.
            InvalidStateError: a transaction is open.
        """
        self.check_writable()
        if Cap.VERSIONS not in self.store.caps:
            raise refusals.no_versions(self.store.url, f"the {self.backend.name!r} backend has none there")
        self.refuse_in_transaction("td.commit(message=...)")
        if not isinstance(message, str):
            raise InvalidTypeError(f"commit: the message of a version is a string, not a {type(message).__name__}")
        if len(message) > MAX_TEXT:
            raise InvalidArgumentError(f"commit: the message has {len(message)} characters, more than {MAX_TEXT}")
        self.store.save_version(Header(self.groups), message)
        self._generation = None
        self.blank = False if self.blank else self.blank

    def _save(self, groups: Mapping[Path, Group]) -> None:
        self.store.save_header(Header(groups))
        self._generation = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes in the block one commit, at its end; where the block raises, none of them has happened.

        Raises:
            UnsupportedError: the store cannot take back what was written (`DISCARD`), or others see rows at once.
        """
        self.check_writable()
        caps = self.store.caps
        if Cap.DISCARD not in caps or caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):
            raise UnsupportedError(
                f"{self.store.url} has no transactions: "
                + ("others see rows as soon as they are written" if Cap.DISCARD in caps else "it cannot take back"),
                url=self.store.url,
                hint="copy the dataset, change the copy, and save it over this one",
            )
        if self._deferred:
            raise InvalidStateError(f"a transaction on {self.store.url} is open already")
        with self.changing():
            self._deferred, self._failed = True, False
            try:
                yield
                if self._failed:
                    raise InvalidStateError(
                        f"a change in the transaction on {self.store.url} failed: all of them are taken back",
                        hint="let its error leave the block",
                    )
                self._deferred = False
                self.commit(self.groups, self.specs)
            finally:
                self._deferred = False

    def remove(self, paths: Iterable[Path]) -> None:
        """Delete entries of any kind, with all below them."""
        gone = list(paths)
        leaves = {leaf for path in gone for leaf in self.leaves_below(path)}
        with self.changing():
            self.store.delete(list(leaves))
            self.commit(without(self.groups, gone), {p: s for p, s in self.specs.items() if p not in leaves})

    def rename(self, old: Path, new: Path) -> None:
        """Move an entry of any kind to another name in the same group, replacing what is there."""
        self.check_writable()
        if self.kind(old) is None:
            raise KeyNotFoundError(f"no entry {path_text(old)} in {self.store.url}")
        groups, replaced = self.groups, set(self.leaves_below(new))
        order = [key for key in groups[old[:-1]].keys if key != old[-1]]
        if self.kind(new) is None:
            order.append(new[-1])
        else:  # its place is taken, too
            groups = without(groups, [new])
        moves = {leaf: new + leaf[len(old) :] for leaf in self.leaves_below(old)}
        parent = groups[old[:-1]]
        values = {(new[-1] if k == old[-1] else k): v for k, v in parent.values.items()}
        renamed: dict[Path, Group] = {}
        for path, group in groups.items():
            if path == old[:-1]:
                renamed[path] = msgspec.structs.replace(group, keys=tuple(order), values=values)
            elif path[: len(old)] == old:
                renamed[new + path[len(old) :]] = group
            else:
                renamed[path] = group
        with self.changing():
            if replaced:
                self.store.delete(list(replaced))
            if moves:
                self.store.rename(moves)
            self.commit(renamed, {moves.get(p, p): s for p, s in self.specs.items() if p not in replaced})

    # -- pickling ----------------------------------------------------------------------------
    def pickles_by_name(self) -> bool:
        """Return whether any process of this machine can open what a pickle names: not memory of this process."""
        try:
            pickle.dumps(self.__reduce__())
        except (StoreError, TypeError, pickle.PicklingError):
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the way to the data, never the data: backend, location, mode and options."""
        self.refuse_in_transaction("pickling")
        token = self.store.reopen_token()
        backend = self.backend.name
        if token is not None:
            backend = self.store.opened_as or backend  # which differ where an opener handed over to another backend
        else:
            if self.location is None:
                text = f"{self.store.url} has no location to be opened again by"
                raise StoreError(text, url=self.store.url, hint="save() it first")
            mode: Mode = "r+" if self.store.writable else "r"
            token = self.location, mode, self.options
        if self.trusted:
            token = (*token[:2], {**token[2], "trust": True})
        return rebuild, ("StoreHandle", backend, token)


def _unbatched(data: Rounds[Tensor], batch_size: tuple[int, ...] | None) -> Rounds[NonTensor]:
    return UnbatchedTensor((yield from data), batch_size)


def reopened(backend: str, token: tuple[Any, Mode, dict[str, Any]]) -> StoreHandle:
    """Open the dataset that a pickle refers to."""
    return StoreHandle.open(token[0], storage=backend, mode=token[1], **token[2])


def without(groups: Mapping[Path, Group], gone: Iterable[Path]) -> dict[Path, Group]:
    """Return group records with the entries at those paths removed."""
    out = dict(groups)
    for path in gone:
        out = {p: g for p, g in out.items() if p[: len(path)] != path}
        parent = out.get(path[:-1])
        if parent is not None:
            out[path[:-1]] = msgspec.structs.replace(
                parent,
                keys=tuple(k for k in parent.keys if k != path[-1]),
                values={k: v for k, v in parent.values.items() if k != path[-1]},
            )
    return out


def _whole(groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]) -> dict[Path, Group] | None:
    """Return groups without values, parents first, if they name all that is there, each once, and batch sizes fit.

    This is what tdstore writes but for values; None for anything else.
    """
    named = 0
    for path, group in groups.items():
        batch, keys = group.batch_size, group.keys
        if batch is None or group.values or len(set(keys)) < len(keys):
            return None
        ndim = len(batch)
        for key in keys:
            at = (*path, key)
            if (spec := specs.get(at)) is not None:
                if spec.shape[:ndim] != batch:
                    return None
            elif (inner := groups.get(at)) is None or (inner.batch_size or ())[:ndim] != batch:
                return None
        named += len(keys)
    if () not in groups or named != len(groups) - 1 + len(specs):
        return None
    ordered = sorted(groups, key=len)
    return dict(zip(ordered, map(groups.__getitem__, ordered), strict=True))


def _complete(
    groups: dict[Path, Group], specs: Mapping[Path, LeafSpec], url: str
) -> tuple[dict[Path, Group], dict[Path, ValueEntry]]:
    """Fill in what a foreign writer left out: groups, key order, batch sizes. Refuse what contradicts the data.

    Returns:
        The groups, parents first, and their values decoded.
    """
    foreign = not groups
    children: dict[Path, dict[str, None]] = {}
    values: dict[Path, ValueEntry] = {}
    parts: set[Path] = set()
    for path, group in groups.items():
        children[path] = {}
        for key, value_record in group.values.items():
            entry = value_entry((*path, key), value_record, specs, url, group.batch_size or ())
            parts.update(entry.leaves)
            values[(*path, key)] = entry
    for path in specs:
        if path in groups:
            raise CorruptStoreError(f"{path_text(path)} of {url} is a leaf and a group", url=url)
        for i in range(len(path) if path not in parts else 0):
            children.setdefault(path[:i], {})[path[i]] = None
            groups.setdefault(path[:i], Group())
    groups.setdefault((), Group())
    children.setdefault((), {})
    for path in groups:
        if path:
            children[path[:-1]][path[-1]] = None
    ordered = sorted(groups, key=len)
    for path in reversed(ordered):
        group = groups[path]
        there = dict.fromkeys((*children[path], *group.values))
        if not foreign:  # else the groups were made above, without keys
            for key in group.keys:
                if key not in there:
                    raise CorruptStoreError(
                        f"{path_text((*path, key))} is in the header of {url}, but its data is missing", url=url
                    )
        keys = dict.fromkeys((*group.keys, *there))
        batch = group.batch_size
        if batch is None:
            below = [specs[(*path, k)].shape for k in keys if (*path, k) in specs]
            below += [groups[(*path, k)].batch_size or () for k in keys if (*path, k) in groups]
            columns = [entry for k in group.values if isinstance(entry := values[(*path, k)], Column)]
            below += [specs[entry.leaves[0]].shape[:-1] for entry in columns]
            batch = tuple(common_prefix(below))
        for key in keys:
            spec = specs.get((*path, key))
            if spec is not None and spec.shape[: len(batch)] != batch:
                raise CorruptStoreError(
                    f"{path_text((*path, key))} of {url} has shape {list(spec.shape)}, "
                    f"which does not start with its group's batch size {list(batch)}",
                    url=url,
                )
            inner = groups.get((*path, key))
            if inner is None or inner.batch_size is None or inner.kind == STACK_KIND:
                continue  # the elements of a lazy stack tell its batch size
            if inner.batch_size[: len(batch)] != batch:
                raise CorruptStoreError(
                    f"the group {path_text((*path, key))} of {url} has the batch size {list(inner.batch_size)}, "
                    f"which does not start with that of its parent, {list(batch)}",
                    url=url,
                )
        if len(keys) != len(group.keys) or group.batch_size is None:
            groups[path] = msgspec.structs.replace(group, keys=tuple(keys), batch_size=batch)
    if values:  # where a leaf or a group has the name of a value too, it is what is shown
        values = {path: entry for path, entry in values.items() if path not in specs and path not in groups}
    return dict(zip(ordered, map(groups.__getitem__, ordered), strict=True)), values
