"""Stores in memory that each answer wrongly in one way: types, catalogues, errors, threads."""

from __future__ import annotations

import sqlite3
import threading

import torch

from tdstore.builtin.memory import MemoryStore
from tdstore.header import Group, Header
from tdstore.store import Store
from tdstore.types import Read


class ByteForBool(MemoryStore):
    """Reads bool as uint8."""

    def read(self, reads):
        return [t.byte() if t.dtype is torch.bool else t for t in super().read(reads)]


class LyingSpecs(MemoryStore):
    """Says float64 of what is float32."""

    def specs(self, paths):
        found = super().specs(paths)
        return [spec.replace(dtype="float64") if spec.dtype is torch.float32 else spec for spec in found]


class SharedAnswers(MemoryStore):
    """Gives the same tensor to two requests of one batch."""

    def read(self, reads):
        seen = {}
        found = super().read(reads)
        return [
            t if r.index or r.out is not None else seen.setdefault(r.path, t) for r, t in zip(reads, found, strict=True)
        ]


class OutNotReturned(MemoryStore):
    """Fills `out`, and returns a copy."""

    def read(self, reads):
        return [t if r.out is None else t.clone() for r, t in zip(reads, super().read(reads), strict=True)]


class NumpyAnswers(MemoryStore):
    """Returns arrays, where numpy has the dtype."""

    def read(self, reads):
        return [t.numpy() if t.dtype is torch.float32 else t for t in super().read(reads)]


class GeneratorAnswers(MemoryStore):
    """Returns an iterator over the answers."""

    def read(self, reads):
        found = super().read(reads)
        return (t for t in found)


class TupleAnswers(MemoryStore):
    """Returns a tuple of the answers."""

    def read(self, reads):
        return tuple(super().read(reads))


class CutRowsReturn(MemoryStore):
    """Keeps the rows that a shrink removed, and shows them again."""

    def resize(self, lengths):
        self._cut = getattr(self, "_cut", {})
        old = {path: self.view(path) for path in lengths}
        super().resize(lengths)
        for path, value in old.items():
            whole = max(value, self._cut.get(path, value), key=len)
            self._cut[path] = whole
            new = self._leaves[path]
            new[len(value) : len(whole)] = whole[len(value) : len(new)]


class LengthsReturn(MemoryStore):
    """Keeps the longest value of a leaf, and shows it when the leaf has that length again."""

    def resize(self, lengths):
        self._longest = getattr(self, "_longest", {})
        for path in lengths:
            value = self.view(path)
            self._longest[path] = max(value.clone(), self._longest.get(path, value), key=len)
        super().resize(lengths)
        for path, length in lengths.items():
            if len(self._longest[path]) == length:
                self._leaves[path].copy_(self._longest[path])


class OneNaN(MemoryStore):
    """Makes each NaN the same NaN."""

    def read(self, reads):
        return [
            torch.where(t.isnan(), torch.nan, t) if t.dtype is torch.float32 and r.out is None else t
            for r, t in zip(reads, super().read(reads), strict=True)
        ]


class SortedKeys(MemoryStore):
    """Sorts the keys of a group."""

    def save_header(self, header):
        groups = {path: _with(group, keys=tuple(sorted(group.keys))) for path, group in header.groups.items()}
        super().save_header(Header(groups))


class LostValues(MemoryStore):
    """Forgets values of the header."""

    def save_header(self, header):
        super().save_header(Header({path: _with(group, values={}) for path, group in header.groups.items()}))


def _with(group: Group, **changes) -> Group:
    fields = {name: getattr(group, name) for name in Group.__struct_fields__}
    return Group(**{**fields, **changes})


class PlainKeyError(MemoryStore):
    """Raises what a dict raises."""

    def view(self, path):
        self._check_open()
        return self._leaves[path]


class WritableLies(MemoryStore):
    """Says that it is read-only."""

    def __init__(self):
        super().__init__()
        self.writable = False

    def _check_writable(self):
        self._check_open()


class ReadsWhole(MemoryStore):
    """Reads the whole leaf, for a corner of it."""

    def read(self, reads):
        super().read([Read(r.path) for r in reads])
        return super().read(reads)


class EagerCreate(MemoryStore):
    """Fills a leaf when it is made."""

    def create(self, leaves):
        super().create(leaves)
        for path, spec in leaves.items():
            self._leaves[path] = torch.full(spec.shape, 1, dtype=spec.dtype).fill_(spec.fill_value)


class ThreadBound(MemoryStore):
    """Works in the thread that opened it, as a connection of sqlite3 does."""

    def __init__(self):
        super().__init__()
        self._connection = sqlite3.connect(":memory:")
        self._thread = threading.get_ident()

    def read(self, reads):
        self._connection.execute("SELECT 1")
        return super().read(reads)


class ForeignWhenClosed(MemoryStore):
    """After `close` lets the error of its library out."""

    def __init__(self):
        super().__init__()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)

    def load_header(self):
        self._connection.execute("SELECT 1")
        return self._header

    def close(self):
        self._connection.close()
        super().close()


class OptionEater(MemoryStore):
    """Its opener takes any option and ignores it."""


class ForgottenLength(MemoryStore):
    """`specs` tells the old length after `resize`."""

    def resize(self, lengths):
        before = dict(zip(lengths, super().specs(list(lengths)), strict=True))
        super().resize(lengths)
        self._before = before

    def specs(self, paths):
        old = getattr(self, "_before", {})
        return [old.get(path, spec) for path, spec in zip(paths, super().specs(paths), strict=True)]


class ListedGroups(MemoryStore):
    """Lists groups among the leaves."""

    def paths(self):
        leaves = list(super().paths())
        groups = dict.fromkeys(path[:1] for path in leaves if len(path) > 1)
        return iter([*leaves, *groups])


ANSWERS: tuple[type[Store], ...] = (
    ByteForBool, LyingSpecs, SharedAnswers, OutNotReturned, NumpyAnswers, GeneratorAnswers, TupleAnswers,
    CutRowsReturn, LengthsReturn, OneNaN, SortedKeys, LostValues, PlainKeyError, WritableLies, ReadsWhole, EagerCreate,
    ThreadBound, ForeignWhenClosed, OptionEater, ForgottenLength, ListedGroups,
)  # fmt: skip
