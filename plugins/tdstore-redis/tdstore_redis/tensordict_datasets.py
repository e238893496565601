"""Datasets of the `tensordict` package on a server, opened for reading.

Its keys are `<prefix>:{<id>}:__keys__` (a set of dotted paths), `:__batch_size__`, `:m:<path>` (a hash
with shape and dtype, or the encoding of a value) and `:d:<path>` (raw bytes). It has no checksums:
only sizes can be compared. Pickled values are never unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import NAME_TO_DTYPE, repair_bools
from tdstore.errors import (
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.header import MAX_DEPTH, Group, Header
from tdstore.index.ranges import index_shape
from tdstore.index.rows import gather
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, refusals
from tdstore.types import LeafSpec, Mode, Path, Read, StoreIndex, path_text
from tdstore.values import PICKLE, encode_value, pickled_form
from tdstore_redis.cells.plans import raw
from tdstore_redis.connection import Line, Wire, pack

_LIMIT = 64 << 20
_SCANNED = 1_000_000
_PIECE = 4 << 20
_SUFFIX = b":__keys__"
_GLOB = re.compile(rb"([*?\[\]\\^])")


def find_tensordict_dataset(wire: Wire, name: str, url: str) -> bytes | None:
    """Return the key prefix of such a dataset: `name` is `prefix`, `prefix/id`, `prefix:{id}` or the id.

    Raises:
        StoreError: several have that prefix.
    """
    text = name.encode()
    prefix, slash, ident = text.rpartition(b"/")
    bases = [text, *([b"%b:{%b}" % (prefix, ident)] if slash else [])]
    kinds = wire.raising([pack(b"TYPE", base + _SUFFIX) for base in bases])
    for base, kind in zip(bases, kinds, strict=True):
        if kind == b"set":
            return base
    found: set[bytes] = set()
    quoted = _GLOB.sub(rb"\\\1", text)
    for pattern in (quoted + b":{*}" + _SUFFIX, b"*:{" + quoted + b"}" + _SUFFIX):
        cursor, seen = b"0", 0
        while seen < _SCANNED:
            cursor, keys = wire.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"10000")
            found |= set(keys)
            seen += 10_000
            if cursor == b"0":
                break
    if len(found) > 1:
        names = [key.removesuffix(_SUFFIX).decode(errors="replace") for key in sorted(found)]
        raise StoreError(
            f"{url}: {len(names)} datasets of the tensordict package have that prefix: {', '.join(names[:5])}",
            url=url,
            hint=f"name one of them in full: {names[0]}",
        )
    return found.pop().removesuffix(_SUFFIX) if found else None


class _StoredLeaf(NamedTuple):
    """A leaf, and the key of its bytes."""

    spec: LeafSpec
    key: bytes


class TensordictStore(CheckedStore[_StoredLeaf]):
    """Leaves that the `tensordict` package wrote. Made by `open_redis` in mode "r"."""

    caps = Cap.PARTIAL_READ | Cap.SHARED | Cap.PERSISTENT | Cap.CONCURRENT_READ

    def __init__(self, line: Line, base: bytes, token: tuple[str, dict[str, Any]]) -> None:
        super().__init__(line.address.url, writable=False)
        self._line, self._base, self._token = line, base, token
        self._lock = RLock()
        self._batch: tuple[int, ...] | None = None
        self._leaves: dict[Path, _StoredLeaf] = {}
        self._values: dict[Path, tuple[bytes, str]] = {}
        with line.errors("opening"):
            line.idempotent(self._load)

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]]:
        """Return location, mode and options as it was opened."""
        location, arguments = self._token
        return location, "r", {k: v for k, v in arguments.items() if v is not None}

    def _load(self, wire: Wire) -> None:
        base = self._base
        names, kind, batch = wire.raising(
            [
                pack(b"SMEMBERS", base + b":__keys__"),
                pack(b"GET", base + b":__type__"),
                pack(b"GETRANGE", base + b":__batch_size__", b"0", b"4096"),
            ],
            limit=_LIMIT,
        )
        if kind is not None:
            raise UnsupportedError(
                f"{self.url} is a {kind.decode(errors='replace')} of the tensordict package, "
                "whose entries have shapes of their own",
                url=self.url,
                hint="read it with that package and save it densely",
            )
        self._batch = self._shape(batch, "the batch size") if batch else None
        self._leaves, self._values = {}, {}
        ordered = sorted(names)
        replies = wire.raising(
            [c for n in ordered for c in (pack(b"HGETALL", base + b":m:" + n), pack(b"STRLEN", base + b":d:" + n))]
            or [pack(b"PING")],
            limit=_LIMIT,
        )
        for i, name in enumerate(ordered):
            try:
                path = tuple(name.decode().split("."))
            except UnicodeDecodeError:
                raise CorruptStoreError(f"{self.url}: the key {name!r} is not text", url=self.url) from None
            if len(path) > MAX_DEPTH:
                raise CorruptStoreError(f"{self.url}: {name[:80]!r} is nested too deep", url=self.url)
            self._add(path, base + b":d:" + name, _pairs(replies[2 * i]), replies[2 * i + 1])

    def _add(self, path: Path, key: bytes, meta: dict[bytes, bytes], size: int) -> None:
        if b"is_non_tensor" in meta:
            self._values[path] = (key, meta.get(b"encoding", b"?").decode(errors="replace"))
            return
        if b"shape" not in meta or b"dtype" not in meta:
            raise CorruptStoreError(f"{self.url}: {path_text(path)} has no shape or dtype", url=self.url)
        shape = self._shape(meta[b"shape"], path_text(path))
        name = meta[b"dtype"].decode(errors="replace").removeprefix("torch.")
        if name not in NAME_TO_DTYPE:
            raise CorruptStoreError(f"{self.url}: {path_text(path)} has the unknown dtype {name!r}", url=self.url)
        spec = LeafSpec(shape, NAME_TO_DTYPE[name])
        if size != spec.nbytes:
            raise CorruptStoreError(
                f"{self.url}: {path_text(path)} has {size} bytes, but shape {list(shape)} and dtype {name} "
                f"take {spec.nbytes}",
                url=self.url,
            )
        self._leaves[path] = _StoredLeaf(spec, key)

    def _shape(self, text: bytes, what: str) -> tuple[int, ...]:
        try:
            shape = json.loads(text)
            plain = isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape)
            if plain and math.prod(shape) < 2**58:
                return tuple(shape)
        except (ValueError, RecursionError):
            pass  # raised below, with the text
        raise CorruptStoreError(f"{self.url}: {what} has the impossible shape {text[:80]!r}", url=self.url)

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, _StoredLeaf]:
        return self._leaves

    def load_header(self) -> Header:
        self._check_open()
        children: dict[Path, dict[str, None]] = {(): {}}
        for path in (*self._leaves, *self._values):
            for depth in range(len(path)):
                children.setdefault(path[:depth], {})[path[depth]] = None
        values: dict[Path, dict[str, Any]] = {}
        with self._line.errors("reading values"):
            for path, (key, encoding) in self._values.items():
                values.setdefault(path[:-1], {})[path[-1]] = self._value(path, key, encoding)
        # tensordict stores one batch size, that of the root; its nested TensorDicts share it.
        return Header(
            {
                path: Group(batch_size=self._batch, keys=tuple(keys), values=values.get(path, {}))
                for path, keys in sorted(children.items(), key=lambda item: len(item[0]))
            }
        )

    def _value(self, path: Path, key: bytes, encoding: str) -> dict[str, Any]:
        if encoding not in ("json", "json_array", PICKLE):
            raise UntrustedDataError(
                f"{self.url}: the value {path_text(path)} was stored by {encoding!r}, "
                "and reading it could run code: it is not read",
                url=self.url,
                hint="open it with the tensordict package, replace that value by plain data (or delete the key), "
                "and open it here again",
            )
        data = self._line.idempotent(lambda wire: wire.raising([pack(b"GET", key)], limit=_LIMIT)[0])
        if encoding == PICKLE:
            return {"data": pickled_form(bytes(data))}
        try:
            value = json.loads(data)
        except (TypeError, ValueError, RecursionError) as error:
            raise CorruptStoreError(
                f"{self.url}: the value {path_text(path)} is no JSON: {error}", url=self.url
            ) from error
        if encoding == "json_array" and isinstance(value, list):
            return {"stack": [encode_value(one) for one in value], "dim": 0}
        return {"data": encode_value(value)}

    # -- data ----------------------------------------------------------------------------
    def _read(self, wanted: Sequence[tuple[_StoredLeaf, Read]]) -> list[Tensor]:
        plans: list[tuple[Tensor, Tensor, StoreIndex]] = []
        work: list[tuple[bytes, int, np.ndarray[Any, Any], Path]] = []
        for (spec, key), r in wanted:
            out = (
                torch.empty(index_shape(spec.shape, r.index), dtype=spec.dtype, device="cpu")
                if r.out is None
                else r.out
            )
            held, rest = _plan(r, spec, key, work)
            plans.append((out, held, rest))
        with self._line.errors("reading"):
            self._line.idempotent(lambda wire: self._fetch(wire, work))
        for out, held, rest in plans:
            repair_bools(held)
            if held is not out:
                gather(held, rest, out)
        return [out for out, _, _ in plans]

    def _fetch(self, wire: Wire, work: list[tuple[bytes, int, np.ndarray[Any, Any], Path]]) -> None:
        at = 0
        while at < len(work):
            group: list[tuple[bytes, int, np.ndarray[Any, Any], Path]] = []
            size = 0
            while at < len(work) and (not group or size + len(work[at][2]) <= 4 * _PIECE):
                group.append(work[at])
                size += len(work[at][2])
                at += 1
            commands = [
                pack(b"GETRANGE", key, b"%d" % start, b"%d" % (start + len(into) - 1)) for key, start, into, _ in group
            ]
            replies = wire.raising(commands, limit=size + 64 * len(group) + 4096)
            for (_, start, into, path), data in zip(group, replies, strict=True):
                if len(data) != len(into):
                    raise CorruptStoreError(
                        f"{self.url}: leaf {path_text(path)} is missing or short: {len(data)} bytes at {start}, "
                        f"not {len(into)}",
                        url=self.url,
                    )
                into[...] = np.frombuffer(data, np.uint8)

    def _read_only(self) -> ReadOnlyError:
        why = "it was written by the tensordict package"
        return refusals.read_only(self.url, "save it under another name to change it", why=why)

    def _close(self) -> None:
        self._line.close()


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _plan(
    r: Read, spec: LeafSpec, key: bytes, work: list[tuple[bytes, int, np.ndarray[Any, Any], Path]]
) -> tuple[Tensor, StoreIndex]:
    """Plan ranges of bytes that fill a tensor of whole rows, and the index to apply to it."""
    shape = spec.shape
    row = spec.replace(shape=shape[1:]).nbytes if shape else spec.nbytes
    term = r.index[0] if r.index else slice(0, shape[0] if shape else 1, 1)
    if isinstance(term, Tensor):
        rows = term.numpy()
        count = len(rows)
    else:
        rows = np.arange(term.start, term.stop, term.step)
        count = len(rows)
    held = torch.empty((count, *shape[1:]) if shape else (), dtype=spec.dtype, device="cpu")
    if held.numel():
        into = raw(held)
        breaks = np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1
        for i, j in zip([0, *breaks.tolist()], [*breaks.tolist(), count], strict=True):
            start = int(rows[i]) * row
            for at in range(i * row, j * row, _PIECE):
                stop = min(at + _PIECE, j * row)
                work.append((key, start + at - i * row, into[at:stop], r.path))
    return held, (slice(0, count, 1), *r.index[1:]) if r.index else ()
