"""A session on a store: its contents, its changes, and its commits.

Order of an in-place change: first the data and the nodes go to the redo log; then the root, with a new manifest and the
log's list, is put, which is the commit; then objects are moved to their places, and the root is put without the list.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from tdstore.dtypes import to_numpy
from tdstore.errors import StoreError
from tdstore.header import Header
from tdstore.storekit import WriterState, commit_for_readers, end_writer
from tdstore.threads import without_interrupts
from tdstore.types import Path, path_text
from tdstore_zarr.codec import bridge
from tdstore_zarr.contents import Contents, Rows
from tdstore_zarr.layout.document import NAME, Document, encode_root, unmarked
from tdstore_zarr.layout.leaf import Leaf, Stored
from tdstore_zarr.layout.names import Names
from tdstore_zarr.layout.nodes import put_copies, wanted_nodes
from tdstore_zarr.place.redo_log import Put, RedoLog, encode_logged

_log = logging.getLogger("tdstore")


class Session(Contents):
    """The state of a store: its contents, and its uncommitted changes."""

    # -- changes ---------------------------------------------------------------------------
    def touch(self, paths: Iterable[Path]) -> None:
        """Become the only writer, and record the leaves whose rows are about to be written."""
        if self.place.published:
            self.place.take()
            self.marked.update(paths)

    def restructure(self, paths: Iterable[Path]) -> None:
        """Become the only writer, and record the leaves that are about to be created, deleted, renamed or resized."""
        if not self.place.published:
            return
        self.place.take()
        for path in paths:
            if path not in self._moved:
                self._moved[path] = self._rows(path)

    def _rows(self, path: Path) -> Rows | None:
        """Return the uncommitted writes of a leaf, to restore them."""
        leaf = self.leaves.get(path)
        if leaf is None or path not in self.marked:
            return None
        self.buffers.flush()
        return Rows(dict(leaf.objects), self.engine.hold(map(leaf.key, leaf.objects)))

    def drop_structure(self) -> None:
        """Return to the leaves of the last commit, with the rows that were written into them."""
        self.buffers.flush()
        moved, marked = self._moved, self.marked
        found: dict[Path, Rows | None] = {}
        for path in marked:
            leaf = self.leaves.get(path)
            if path in moved:
                found[path] = moved[path]
            elif leaf is not None:
                found[path] = Rows(dict(leaf.objects), self.engine.hold(map(leaf.key, leaf.objects)))
        self._as_committed()
        puts: dict[str, Put] = {}
        gone: list[str] = []
        for path, rows in found.items():
            leaf = self.leaves.get(path)
            if leaf is not None and rows is not None:
                gone += [leaf.key(number) for number in leaf.objects if number not in rows.objects]
                leaf.objects = rows.objects
                puts.update(rows.puts)
        self.engine.restore(puts, gone)
        self._moved = {}
        self.marked = {path for path, rows in found.items() if rows is not None and path in self.leaves}

    def discard(self) -> None:
        """Discard every change since the last commit, even if the storage can no longer be reached."""
        self.buffers.clear()
        if self.place.published:
            with contextlib.suppress(StoreError):  # the next commit removes the remains of the log
                self.engine.abandon()
            self._as_committed()
            with contextlib.suppress(StoreError):  # `close` releases it
                self.place.release()
        else:
            for path in list(self.leaves):
                self.unlink(path)
            self.document, self._names = Document(ours=True), Names()
            self.reader.forget_all()
        self.marked, self._moved = set(), {}

    def check_places(self, leaves: Mapping[Path, Any]) -> None:
        """Refuse leaves at the path of a group, and below leaves."""
        held = {path[:depth] for path in self.leaves for depth in range(1, len(path))}
        for path in leaves:
            for depth in range(1, len(path)):
                if path[:depth] in self.leaves or path[:depth] in leaves:
                    raise StoreError(
                        f"{path_text(path[:depth])} of {self.url} is a leaf and cannot hold {path[-1]!r}", url=self.url
                    )
            if path in held:
                raise StoreError(
                    f"{path_text(path)} of {self.url} is a group with leaves; delete those first", url=self.url
                )

    def add(self, leaf: Leaf) -> None:
        """Add a new leaf."""
        self.leaves[leaf.path] = leaf
        self.names.put(leaf.path, leaf.node)

    def unlink(self, path: Path) -> None:
        """Remove a leaf, or any other node of that name."""
        leaf = self.leaves.pop(path, None)
        if leaf is None:
            if (node := self.names.nodes.get(path)) is not None and node in self.document.metadata:
                self._remove_node(node, [])
                self.document.groups.pop(path, None)
                self.names.drop(path)
            return
        self.buffers.drop(leaf)
        self.reader.forget(leaf)
        self._remove_node(leaf.node, [leaf.key(number) for number in leaf.objects])
        self.names.drop(path)

    def _remove_node(self, node: str, keys: list[str]) -> None:
        self.document.metadata.pop(node, None)
        self.document.copies.pop(node, None)
        self.place.remove(node, keys)

    def write(self, *writes: tuple[Leaf, Any, Any]) -> None:
        """Write tensors at indices of leaves without repeated rows: all of them, or none if an error is raised.

        Writes into an unpublished store cannot be undone.
        """
        arrays = [(leaf, index, _array_of(value)) for leaf, index, value in writes]
        bridged = {id(leaf): (leaf, dict(leaf.objects)) for leaf, *_ in writes if leaf.cut.pipeline is None}
        for leaf, *_ in writes:
            if leaf.cut.pipeline is not None and not leaf.complete:
                self._complete(leaf)
        steps = self.buffers.steps(job for job in arrays if job[0].cut.pipeline is not None)
        fits = self.buffers.make_room(steps)  # before any change: the storage may refuse it
        self.engine.begin()
        done = False
        try:
            for leaf, index, array in arrays:
                if leaf.cut.pipeline is None:
                    bridge.write(self.place.engine, leaf, index, array, self.url)
            self.buffers.write(steps, fits=fits)
            done = True  # from here on an interrupt takes nothing back
            self._end_write((), keep=True)
        except BaseException:
            self._end_write(bridged.values(), keep=done)
            raise

    @without_interrupts
    def _end_write(self, bridged: Iterable[tuple[Leaf, dict[int, Stored]]], *, keep: bool) -> None:
        """Keep the puts since `engine.begin`, or undo them, and what leaves tell of them."""
        if keep:
            self.buffers.before, self.buffers.replaced = {}, []
        else:
            for leaf, objects in bridged if self.engine.revocable else ():
                leaf.objects = objects
            self.buffers.roll_back()
        self.engine.end(keep=keep)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        """Move leaves; names may be exchanged."""
        moves = {old: new for old, new in moves.items() if old != new}
        self.check_places({new: None for new in moves.values() if new not in self.leaves})
        self.restructure([*moves, *moves.values()])
        self.buffers.flush()
        for new in moves.values():
            if new in self.leaves and new not in moves:
                self.unlink(new)
        leaves = [self.leaves.pop(old) for old in moves]
        for number, (leaf, old) in enumerate(zip(leaves, moves, strict=True)):
            self.reader.forget(leaf)
            if not self.engine.active:
                self._move(leaf, f"tdstore.move-{number}")
            self.names.drop(old)
        keys: dict[str, str] = {}
        for leaf, new in zip(leaves, moves.values(), strict=True):
            if new in self.names.nodes:
                self.unlink(new)  # an empty group, or a value
            node = self.names.node(new)
            if self.engine.active:
                keys.update((leaf.key(number), node + leaf.key(number)[len(leaf.node) :]) for number in leaf.objects)
            else:
                self._move(leaf, node)
        if self.engine.active:
            self.engine.move(keys)
            for leaf in leaves:
                if self.document.metadata.pop(leaf.node, None) is not None:
                    self.place.remove(leaf.node, [])
        for leaf, new in zip(leaves, moves.values(), strict=True):
            leaf.node = self.names.node(new)
            leaf.path = new
            self.add(leaf)

    def _move(self, leaf: Leaf, node: str) -> None:
        """Move a node of an unpublished store."""
        metadata = self.document.metadata.pop(leaf.node, None)
        if metadata is not None or leaf.objects:
            with_metadata = self.place.move(leaf.node, node, [leaf.key(number) for number in leaf.objects])
            if metadata is not None and with_metadata:
                self.document.metadata[node] = metadata
        leaf.node = node

    # -- commit ----------------------------------------------------------------------------
    def commit(self, header: Header) -> None:
        """Write the manifest last, which makes a new store visible."""
        if self.place.published:
            self.place.take()
        self.buffers.flush()
        wanted = wanted_nodes(header, self.leaves, self.names, self.place.keys)
        there = self.document.metadata
        engine = self.engine
        changed = [node for node, data in wanted.metadata.items() if there.get(node) != data]
        for node in changed:
            if node in there and there[node].get("node_type") != wanted.metadata[node]["node_type"]:
                engine.delete([f"{node}/{NAME}"])  # icechunk refuses a group where an array is, and the reverse
        put_copies(engine, wanted, there)
        engine.put_many([(f"{node}/{NAME}", msgspec.json.encode(wanted.metadata[node])) for node in changed])
        for node in [n for n in there if n not in wanted.metadata]:
            self.place.remove(node, [f"{node}/{key}" for key in ("c/0", "c.0", "0") if node in self.document.copies])
            self._forget_node(node)
        document = self.document
        document.metadata, document.groups = wanted.metadata, wanted.groups
        document.copies = {node: copy.path for node, copy in wanted.copies.items()}
        document.attributes = {**document.attributes, **wanted.root}
        try:
            root = encode_root(document, header, self.leaves.values(), url=self.url)
        except ValueError as error:
            raise StoreError(str(error), url=self.url) from error
        self._put_root(root, header)

    def _put_root(self, root: bytes, header: Header | None = None) -> None:
        """Commit, and move everything to its place."""
        if self.durable:
            self.place.sync()
        new = not self.place.published
        log = self.engine.record()
        self._commit_root(root, log, header)
        try:
            if new:
                self.place.settled(self.document)
            elif log is not None:
                self._settle_log()
            else:
                self.engine.clean()
            self.place.release()
        except StoreError as error:
            # It is committed, and every reader of ours sees it.
            _log.warning(
                "tdstore: %s is committed, and the next writer has to tidy up; until then other programs may read "
                "chunks of the commit before: %s",
                self.url,
                error,
            )
            with contextlib.suppress(StoreError):
                self.place.release()

    @without_interrupts
    def _commit_root(self, root: bytes, log: RedoLog | None, header: Header | None) -> None:
        if self.place.published:
            marked = root if log is None or not self.place.redo else encode_logged(root, log)
            self.place.put_root(marked, sync=self.durable)
        else:
            self.place.publish(root, sync=self.durable)
        self.root = root
        self.marked.clear()
        self._moved = {}
        self.engine.follow(log)
        self.accepted = False
        if header is not None:
            document = self.document
            document.ours, document.header, document.mark = True, header, None
            self.foreign = None

    def _forget_node(self, node: str) -> None:
        for path in [p for p, n in self.names.nodes.items() if n == node]:
            self.names.drop(path)

    def settle_rows(self) -> None:
        """Commit the rows written since the last header; a change of structure waits for its header."""
        commit_for_readers(self)

    # -- the steps of the commit policy ------------------------------------------------------
    def state(self) -> WriterState:
        return WriterState(
            pid=self.pid,
            writable=self.writable,
            published=self.place.published,
            structure=bool(self._moved),
            rows=bool(self.marked or self.accepted),
        )

    def commit_rows(self) -> None:
        if self.document.ours:
            self.commit(self.document.header)
            return
        self.place.take()
        self.buffers.flush()
        self._put_root(unmarked(self.root))

    def unmark(self) -> None:
        self.place.release()

    def take_back(self) -> None:
        """Do nothing: `remove_uncommitted` removes the objects, and what is in memory ends with the store."""

    def remove_uncommitted(self) -> None:
        try:
            if self.engine.active:
                self.engine.abandon()
        except StoreError as error:
            _log.warning("tdstore: %s: the next writer has to tidy up: %s", self.url, error)

    def release(self) -> None:
        self.buffers.clear()
        self.place.close()

    def written_keys(self) -> list[str]:
        """Return every object that was put."""
        return [leaf.key(number) for leaf in self.leaves.values() for number in list(leaf.objects)]

    def close(self, *, discard: bool = False) -> None:
        """Commit written rows, and release the location. This happens once: only that caller gets an error."""
        if self.closed:
            return
        self.closed = True
        end_writer(self, keep=not discard)


def _array_of(value: Tensor) -> Any:
    return to_numpy(value.contiguous() if value.is_conj() or value.is_neg() else value)
