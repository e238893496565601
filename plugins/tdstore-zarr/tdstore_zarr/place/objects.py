"""A store behind an engine: an object store, memory. It has no rename, and zarr gives every chunk a fixed name.

Commits are atomic nevertheless:

* A new store is written under chunk keys that the previous one does not use (zarr allows four spellings:
  `c/0/1`, `c.0.1`, `0.1`, `0/1`), and the root's `zarr.json`, whose consolidated metadata names the spelling, is put
  last, on the condition that it is unchanged since it was read. Then the old chunks are removed.
* In place, changes go to a redo log (`redo_log`), which the root names, on the same condition.
* A writer, of a new store or in place, holds the object `tdstore.claim`, so that another one detects it before
  it writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

import msgspec

from tdstore.engine import Engine, EngineCap, get_and_look
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.storekit import refusals
from tdstore.types import Path
from tdstore_zarr.codec.metadata import KEY_ENCODINGS, ArrayMeta, parse_array
from tdstore_zarr.layout.document import MAX_ROOT, NAME, Document, Mark, decode_root, mark_now
from tdstore_zarr.layout.leaf import Leaf
from tdstore_zarr.place.base import Place, no_group
from tdstore_zarr.place.redo_log import LoggedEngine

CLAIM = "tdstore.claim"
THIS = "this process"
OTHER_FORMATS = (".zgroup", ".zarray", "tdstore.json", "meta.json")
"""Objects that show a zarr group or array of version 2, or a dataset of another layout: a save would hide it."""


class ObjectPlace(Place):
    """Objects below one URL."""

    def __init__(self, engine: Engine, url: str, *, timeout: float, take_over: bool, single: bool) -> None:
        self.engine = LoggedEngine(engine)
        self.url = url
        self.timeout = timeout
        self.pid = os.getpid()
        self._take_over = take_over
        self._single = single
        self._tag: str | None = None
        self.explains = True
        """Whether a missing root is explained, by two requests: which other zarr store is there."""
        self._exclusive = False
        self._token = ""
        """Of our claim; empty while we have none."""
        self._unreleased = ""
        """Of a claim that is not ours any more, and that the storage did not remove."""
        self._lost = False
        """Whether another writer wrote although this one had the claim."""
        self._there = False
        """Whether a root was there when this store was begun."""
        self._old: dict[str, ArrayMeta] = {}
        """Metadata of the arrays that a new store replaces."""
        self._groups: list[str] = []
        self._leaves: dict[Path, Leaf] = {}
        self._written: Callable[[], Iterable[str]] = tuple

    @classmethod
    def existing(cls, engine: Engine, url: str, *, timeout: float, take_over: bool, single: bool) -> ObjectPlace:
        """Open an existing store.

        Args:
            engine: the engine, at the root of the store.
            url: the location, for messages.
            timeout: seconds to wait for another writer.
            take_over: take the claim of a writer that may have ended.
            single: the assurance of the caller that there is no other writer.
        """
        place = cls(engine, url, timeout=timeout, take_over=take_over, single=single)
        place.engine.active = True
        return place

    @classmethod
    def new(
        cls, engine: Engine, url: str, *, timeout: float, exclusive: bool, take_over: bool, single: bool
    ) -> ObjectPlace:
        """Begin a new store.

        Args:
            engine: the engine, at the root of the store.
            url: the location, for messages.
            timeout: seconds to wait for another writer.
            exclusive: refuse an existing store.
            take_over: take the claim of a writer that may have ended.
            single: the assurance of the caller that there is no other writer.

        Raises:
            StoreExistsError: `exclusive`, and one exists.
            StoreBusyError: another writer is building one.
        """
        place = cls(engine, url, timeout=timeout, take_over=take_over, single=single)
        if EngineCap.WRITE not in engine.can:
            raise engine.unsupported(EngineCap.WRITE)
        place.published = False
        place._exclusive = exclusive
        if (who := place._try_claim()) is not None:
            raise place._busy(who)
        try:
            place._look()
        except BaseException:
            place.close()
            raise
        return place

    def wrote(self, keys: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the keys put so far: they are removed if the store is abandoned."""
        self._written = keys

    @property
    def _conditional(self) -> bool:
        return self.engine.conditional()

    # -- the claim -------------------------------------------------------------------------
    def _try_claim(self) -> str | None:
        """Become the only writer; if that fails, return a description of the current one."""
        mark = mark_now()
        data = msgspec.json.encode(mark)
        conditional = self._conditional
        if not conditional and not self._single:
            raise UnsupportedError(
                f"{self.url} has no conditional put here, so writers cannot keep out of each other's way",
                url=self.url,
                hint="if no other process writes there, pass single_writer=True; a process that was forked from one "
                "that uses obstore has none either: use spawn or forkserver",
            )
        try:
            if not conditional and (who := self.holder(None)) is not None:
                return who
            self.engine.base.put(CLAIM, data, if_absent=conditional)
        except ConflictError:
            there, tag = self._claimant()
            if there is None or there.token != mark.token:  # else only the answer was lost
                if there is not None and not self._take_over and (who := _live(there)) is not None:
                    return who
                try:
                    self.engine.base.put(CLAIM, data, if_match=tag, if_absent=tag is None)
                except ConflictError:
                    return "another writer"
        self._token, self._unreleased = mark.token, ""
        _TOKENS.add(mark.token)
        return None

    def _claimant(self) -> tuple[Mark | None, str | None]:
        """Return the holder of the claim, and the tag of that object."""
        try:
            blob = self.engine.get(CLAIM, 1 << 20)
        except StoreNotFoundError:
            return None, None
        try:
            return msgspec.json.decode(bytes(blob.data), type=Mark), blob.tag
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, blob.tag

    def holder(self, mark: Mark | None) -> str | None:
        if mark is not None and mark.is_here() and not mark.is_dead():
            return mark.who
        there, _ = self._claimant()
        return None if there is None or self._take_over else _live(there)

    def _busy(self, who: str) -> StoreBusyError:
        hint = (
            f"commit or close it there; if that writer is dead, pass recover='accept', or delete the object {CLAIM!r}"
        )
        return refusals.busy(self.url, who, hint=hint)

    def _look(self) -> None:
        """Find the current store, and chunk keys that it does not use."""
        blob, others = get_and_look(self.engine.base, NAME, MAX_ROOT, OTHER_FORMATS)
        if blob is None:
            if others:
                raise refusals.foreign_files(self.url, others, "a zarr store")
            return
        self._there, self._tag = True, blob.tag
        if self._exclusive:
            raise refusals.place_exists(self.url)
        try:
            self._old = self._arrays(bytes(blob.data))
        except (CorruptStoreError, UnsupportedError) as error:
            raise refusals.damaged_place(self.url, error.message) from error
        used = {meta.keys for meta in self._old.values()}
        free = [keys for keys in KEY_ENCODINGS if keys not in used]
        if not free:
            raise refusals.other_kind(self.url, "a group with every spelling of chunk keys, which no save can replace")
        self.keys = free[0]

    def _arrays(self, data: bytes) -> dict[str, ArrayMeta]:
        document = decode_root(data, url=self.url)
        nodes = document.metadata
        if not document.consolidated and EngineCap.LIST in self.engine.can:
            keys = [e.key for e in self.engine.list() if e.key.endswith("/" + NAME)]
            nodes = {key[: -len(NAME) - 1]: msgspec.json.decode(bytes(self.engine.get(key).data)) for key in keys}
        arrays = {n: d for n, d in nodes.items() if isinstance(d, dict) and d.get("node_type") == "array"}
        self._groups = [node for node in nodes if node not in arrays]
        self._leaves = document.leaves
        return {node: parse_array(d, repr(node), self.url, trust=True) for node, d in arrays.items()}

    # -- the root --------------------------------------------------------------------------
    def read_root(self) -> bytes:
        try:
            blob = self.engine.get(NAME, MAX_ROOT)
        except StoreNotFoundError:
            raise no_group(self.url, self._is_there if self.explains else None) from None
        self._tag = blob.tag
        return bytes(blob.data)

    def _is_there(self, name: str) -> bool:
        try:
            self.engine.size(name)
        except StoreError:
            return False
        return True

    def newest_root(self) -> bytes:
        return bytes(self.engine.base.get(NAME, MAX_ROOT).data)

    def take(self) -> None:
        if self._token:
            return
        if EngineCap.WRITE not in self.engine.can:
            raise self.engine.unsupported(EngineCap.WRITE)
        deadline = time.monotonic() + self.timeout
        while (who := self._try_claim()) is not None:
            if time.monotonic() >= deadline or who == THIS:
                raise self._busy(who)
            time.sleep(0.05)
        try:
            tag = self.engine.get(NAME, MAX_ROOT).tag
        except StoreNotFoundError:
            tag = ""
        if tag != self._tag:
            self.release()
            raise self._changed_error()

    def release(self) -> None:
        if not self._token:
            return
        token, self._token = self._token, ""
        _TOKENS.discard(token)
        self._unreleased = token
        if not (self._lost and self._is_claimed_by_another(token)):
            self.engine.base.delete([CLAIM])
        self._unreleased = ""

    def _is_claimed_by_another(self, token: str) -> bool:
        there, _ = self._claimant()
        return there is not None and there.token != token

    def _release_again(self) -> None:
        """Remove a claim that the storage did not remove, unless another writer has taken it over."""
        with contextlib.suppress(StoreError):  # the process ends some day, and the claim with it
            if not self._is_claimed_by_another(self._unreleased):
                self.engine.base.delete([CLAIM])

    def _changed_error(self) -> StoreBusyError:
        return refusals.overtaken(self.url, "nothing of this change is visible; open it again")

    def stale(self) -> bool:
        try:
            return self.engine.get(NAME, MAX_ROOT).tag != self._tag
        except StoreNotFoundError:
            return True

    def put_root(self, data: bytes, *, sync: bool) -> None:
        self._put(data)

    def _put(self, data: bytes, *, absent: bool = False) -> None:
        conditional = self._conditional
        try:
            if conditional and absent:
                self._tag = self.engine.put(NAME, data, if_absent=True)
            elif conditional and self._tag is not None:
                self._tag = self.engine.put(NAME, data, if_match=self._tag)
            else:
                self._tag = self.engine.base.put(NAME, data)
        except ConflictError as error:
            if self._is_ours(data):
                return  # the put went through and its answer was lost
            self._lost = True
            raise self._changed_error() from error

    def _is_ours(self, data: bytes) -> bool:
        try:
            blob = self.engine.get(NAME, MAX_ROOT)
        except StoreError:
            return False
        if bytes(blob.data) != data:
            return False
        self._tag = blob.tag
        return True

    def publish(self, data: bytes, *, sync: bool) -> None:
        try:
            self._put(data, absent=not self._there)
        except StoreBusyError as error:
            if self._exclusive:
                raise refusals.place_exists(self.url) from error
            raise
        self.published = self.engine.active = True

    def settled(self, document: Document) -> None:
        """Remove the remains of the previous store, and the claim."""
        gone: list[str] = []
        new = {leaf.node: leaf.meta.keys for leaf in document.leaves.values()}
        for node, meta in self._old.items():
            if new.get(node) != meta.keys:
                gone += self._chunk_keys(node, meta)
            if node not in document.metadata:
                gone.append(f"{node}/{NAME}")
        gone += [f"{node}/{NAME}" for node in self._groups if node and node not in document.metadata]
        self._old, self._groups = {}, []
        self.engine.base.delete(gone)

    def _chunk_keys(self, node: str, meta: ArrayMeta) -> list[str]:
        known = next((leaf for leaf in self._leaves.values() if leaf.node == node), None)
        if known is not None:
            return [known.key(number) for number in known.objects]
        if EngineCap.LIST not in self.engine.can:
            return []
        start = f"{node}/" if node else ""
        return [e.key for e in self.engine.list(start) if meta.number_of(e.key[len(start) :]) is not None]

    def close(self) -> None:
        try:
            if self._token and self.pid == os.getpid():
                if not self.published:
                    self.engine.delete(list(self._written()))
                self.release()
            elif self._unreleased and self.pid == os.getpid():
                self._release_again()
        finally:
            self.engine.close()


_TOKENS: set[str] = set()
"""Of the claims that stores of this process hold."""


def _live(mark: Mark) -> str | None:
    """Describe the writer that holds a claim, unless it has ended. Writers of another machine count as alive."""
    if mark.is_dead():
        return None
    if mark.is_here() and mark.pid == os.getpid():
        return THIS if mark.token in _TOKENS or not mark.token else None
    return mark.who


os.register_at_fork(after_in_child=_TOKENS.clear)
