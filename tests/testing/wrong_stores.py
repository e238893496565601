"""Stores in memory and of objects that each break one promise. `test_wrong_stores.py` wants each caught."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fsspec
import torch

from tdstore.builtin.memory import MemoryStore
from tdstore.errors import KeyNotFoundError, StoreNotFoundError
from tdstore.header import Header
from tdstore.index.selection import gather
from tdstore.store import Cap, Store
from tdstore.storekit.checked import full
from tdstore.types import Read, Write
from tests.testing import wrong_answers
from tests.testing.wrong_bytestore import ByteStore

_count = itertools.count()


def opener(cls: type[Store]) -> Callable[..., Store]:
    """A function of this module that opens `cls`, so that a registry can find it by its name."""

    def open_memory(location: str | None = None, *, mode: str = "w") -> Store:
        if mode in ("r", "r+"):
            raise StoreNotFoundError(f"{location} cannot be opened again")
        if mode not in ("w", "x", "a"):
            raise ValueError(mode)
        return cls()

    def open_bytes(location: str, *, mode: str = "r") -> Store:
        fs, root = fsspec.core.url_to_fs(location)
        return cls.at(location, fs, root, mode)  # type: ignore[attr-defined]

    function = open_bytes if issubclass(cls, ByteStore) else open_memory
    function.__qualname__ = f"open_{cls.__name__}"
    setattr(sys.modules[__name__], function.__qualname__, function)
    return function


class LyingFlag(MemoryStore):
    """Claims RESIZE and has none."""

    resize = Store.resize


class HiddenFlag(MemoryStore):
    """Has views that it does not declare."""

    caps = MemoryStore.caps & ~Cap.VIEW


class LostFlag(MemoryStore):
    """Declares less than its author says."""

    caps = MemoryStore.caps & ~Cap.PARTIAL_WRITE


class AliasingRead(MemoryStore):
    def read(self, reads):
        copied = super().read(reads)
        return [t if r.index or r.out is not None else self.view(r.path) for r, t in zip(reads, copied)]


class WrongDtype(MemoryStore):
    """Reads single precision as double."""

    def read(self, reads):
        return [t.double() if t.dtype is torch.float32 else t for t in super().read(reads)]


class WrongShape(MemoryStore):
    """Reads what has no dimension as if it had one."""

    def read(self, reads):
        return [t.reshape(1) if not t.ndim else t for t in super().read(reads)]


class AliasingWrite(MemoryStore):
    """Keeps the caller's tensor."""

    def write(self, writes):
        super().write(writes)
        for w in writes:
            if not w.index:
                self._leaves[w.path] = w.value


class CopiedView(MemoryStore):
    def view(self, path):
        return super().view(path).clone()

    def read(self, reads):
        return [MemoryStore.view(self, r.path).clone() if not r.index else None for r in reads]


class DroppedDuplicates(MemoryStore):
    def read(self, reads):
        seen = {(r.path, id(r.index)): r for r in reads}
        return super().read(list(seen.values()))


class WrongOrder(MemoryStore):
    def read(self, reads):
        order = sorted(range(len(reads)), key=lambda i: reads[i].path)
        return super().read([reads[i] for i in order])


class IgnoredIndex(MemoryStore):
    def read(self, reads):
        return super().read([Read(r.path) for r in reads])


class IgnoredStep(MemoryStore):
    def read(self, reads):
        plain = lambda t: slice(t.start, t.stop, 1) if isinstance(t, slice) else t  # noqa: E731
        return super().read([Read(r.path, tuple(map(plain, r.index)), r.out) for r in reads])


class ClippedIndex(MemoryStore):
    """What is beyond the end is the end, as numpy has it."""

    def _clipped(self, request):
        sizes = self.view(request.path).shape
        terms = request.index[: len(sizes)]
        inside = [
            slice(*t.indices(n)) if isinstance(t, slice) else torch.as_tensor(t).reshape(-1).clamp(0, n - 1)
            for t, n in zip(terms, sizes, strict=False)
        ]
        return replace(request, index=tuple(inside))

    def read(self, reads):
        return super().read([self._clipped(r) for r in reads])

    def write(self, writes):
        clipped = [self._clipped(w) for w in writes]
        super().write([replace(w, value=w.value.expand(gather(self.view(w.path), w.index).shape)) for w in clipped])


class SortedRows(MemoryStore):
    def read(self, reads):
        tidy = lambda t: t if isinstance(t, slice) else t.sort().values  # noqa: E731
        return super().read([Read(r.path, tuple(map(tidy, r.index)), r.out) for r in reads])


class IgnoredOut(MemoryStore):
    def read(self, reads):
        return super().read([Read(r.path, r.index) for r in reads])


class SilentMissing(MemoryStore):
    def read(self, reads):
        return [super(SilentMissing, self).read([r])[0] if r.path in self._leaves else torch.zeros(1) for r in reads]


class NamelessMissing(MemoryStore):
    def view(self, path):
        self._check_open()
        if path not in self._leaves:
            raise KeyNotFoundError(f"no such leaf: {path[-1]!r}")
        return self._leaves[path]


class FlippedBfloat16(MemoryStore):
    def read(self, reads):
        flip = lambda t: (t.view(torch.int16) ^ 1).view(t.dtype) if t.dtype is torch.bfloat16 else t  # noqa: E731
        return [flip(t) for t in super().read([Read(r.path, r.index) for r in reads])]


class NormalisedZero(MemoryStore):
    def read(self, reads):
        return [t + 0 if t.dtype is torch.float32 else t for t in super().read(reads)]


class FirstWins(MemoryStore):
    def write(self, writes):
        def turned(w):
            at = next((i for i, t in enumerate(w.index) if isinstance(t, torch.Tensor)), None)
            if at is None:
                return w
            index = (*w.index[:at], w.index[at].flip(0), *w.index[at + 1 :])
            return replace(w, index=index, value=w.value.flip(at))

        super().write([turned(w) for w in writes])


class OneByOne(MemoryStore):
    """Looks at each write when its turn comes."""

    def write(self, writes):
        for w in writes:
            super().write([w])


class PartialDelete(MemoryStore):
    def delete(self, paths):
        self._check_writable()
        for path in paths:
            self.view(path)
            del self._leaves[path]


class ForgottenFill(MemoryStore):
    def create(self, leaves):
        super().create({path: spec.replace(fill_value=0) for path, spec in leaves.items()})


class ResizeToZero(MemoryStore):
    def resize(self, lengths):
        fills, self._fills = self._fills, {}
        super().resize(lengths)
        self._fills = fills


class KeptOnCreate(MemoryStore):
    """Creating a leaf again keeps the values when the spec is the same."""

    def create(self, leaves):
        old = self._leaves
        kept = {p: old[p] for p, s in leaves.items() if p in old and full(s).shape == old[p].shape}
        super().create(leaves)
        self._leaves |= kept


class JoinedKeys(MemoryStore):
    """Puts keys together with a slash."""

    def create(self, leaves):
        super().create({tuple("/".join(p).split("/")): s for p, s in leaves.items()})

    def view(self, path):
        return super().view(tuple("/".join(path).split("/")))

    def write(self, writes):
        super().write([Write(tuple("/".join(w.path).split("/")), w.index, w.value) for w in writes])


class AnyOption(MemoryStore):
    def create(self, leaves):
        super().create({p: replace_options(s) for p, s in leaves.items()})


def replace_options(spec: Any) -> Any:
    return type(spec)(spec.shape, spec.dtype, fill_value=spec.fill_value)


class MergedHeader(MemoryStore):
    def save_header(self, header):
        super().save_header(Header({**self._header.groups, **header.groups}))


class LostHeader(MemoryStore):
    def load_header(self):
        super().load_header()
        return Header()


class OpenAfterClose(MemoryStore):
    def load_header(self):
        return self._header


class NaiveRename(MemoryStore):
    def rename(self, moves):
        for old, new in moves.items():
            self._leaves[new] = self.view(old)
            del self._leaves[old]


class WrongBytes(ByteStore):
    @classmethod
    def at(cls, url, fs, root, mode):
        there = fs.exists(f"{root}/MANIFEST")
        if mode in ("r", "r+") and not there:
            raise StoreNotFoundError(f"nothing at {url}")
        if mode == "x" and there:
            raise FileExistsError(url)  # not an error of tdstore's
        if mode not in ("r", "r+", "w", "x", "a"):
            raise ValueError(mode)
        return cls(url, fs, root, writable=mode != "r", load=there and mode in ("r", "r+", "a"))


class ForeignError(WrongBytes):
    """Lets a `FileExistsError` of the system through."""


class WritesInReadOnly(WrongBytes):
    def _check(self, *, write=False):
        super()._check()


class CommitsOnRead(WrongBytes):
    """Changes the medium when a reader closes."""

    def close(self):
        if not self._closed and self._committed:
            self._fs.pipe_file(f"{self._root}/last-read", str(next(_count)).encode())
        super().close()


class PublishesEarly(WrongBytes):
    def write(self, writes):
        super().write(writes)
        self._commit()


class EmptiesAtOpen(WrongBytes):
    """Mode "w" removes the old store at once."""

    @classmethod
    def at(cls, url, fs, root, mode):
        store = super().at(url, fs, root, mode)
        if mode == "w":
            for name in fs.find(root):
                fs.rm_file(name)
        return store


class LeavesTraces(WrongBytes):
    def close(self):
        self._mine.clear()
        super().close()


class AppendTruncates(WrongBytes):
    @classmethod
    def at(cls, url, fs, root, mode):
        return super().at(url, fs, root, "w" if mode == "a" else mode)


class BlindVerify(WrongBytes):
    def verify(self, paths=None):
        self._check()
        return []


class ZerosForMissingBytes(WrongBytes):
    """Does not look at sizes, and pads what is short."""

    def _load(self):
        size, self._fs = self._fs, _NoSizes(self._fs)
        try:
            super()._load()
        finally:
            self._fs = size

    def _fetch(self, wanted):
        lengths = [sum(b - a for a, b in plan.tolist()) for _, plan in wanted]
        return [d + bytes(n - len(d)) for d, n in zip(super()._fetch(wanted), lengths)]


class _NoSizes:
    def __init__(self, fs):
        self._fs = fs

    def __getattr__(self, name):
        return getattr(self._fs, name)

    def size(self, name):
        return AnySize()


class AnySize:
    def __ne__(self, other):
        return False


class LostDelete(WrongBytes):
    def delete(self, paths):
        gone = {p: self._blob(p) for p in paths}
        super().delete(paths)
        self._gone = gone

    def _commit(self):
        shown, self._blobs = self._blobs, {**getattr(self, "_gone", {}), **self._blobs}
        super()._commit()
        self._blobs = shown


class TwiceIsNotFine(WrongBytes):
    closed = 0

    def close(self):
        self.closed += 1
        if self.closed == 2:  # so that a test can be taken down
            raise RuntimeError("already closed")
        super().close()


MEMORY: tuple[type[Store], ...] = (
    LyingFlag, HiddenFlag, WrongDtype, WrongShape, LostFlag,
    AliasingRead, AliasingWrite, CopiedView, DroppedDuplicates, WrongOrder,
    IgnoredIndex, IgnoredStep, ClippedIndex, SortedRows, IgnoredOut, SilentMissing, NamelessMissing, FlippedBfloat16,
    NormalisedZero,
    FirstWins, OneByOne, PartialDelete, ForgottenFill, ResizeToZero, KeptOnCreate, JoinedKeys, AnyOption, MergedHeader,
    LostHeader, OpenAfterClose, NaiveRename,
)  # fmt: skip
BYTES: tuple[type[Store], ...] = (
    ForeignError, WritesInReadOnly, CommitsOnRead, PublishesEarly, EmptiesAtOpen, LeavesTraces, AppendTruncates,
    BlindVerify, ZerosForMissingBytes, LostDelete, TwiceIsNotFine,
)  # fmt: skip


OPENERS = {cls.__name__: opener(cls) for cls in (*MEMORY, *wrong_answers.ANSWERS, *BYTES)}


def open_OptionEater(location: str | None = None, *, mode: str = "w", **ignored: Any) -> Store:  # noqa: N802
    return wrong_answers.OptionEater()


OPENERS["OptionEater"] = open_OptionEater
