"""`CheckedStore`: the checks that the protocol requires of every store."""

from __future__ import annotations

import inspect
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import is_bit_pattern, to_numpy
from tdstore.errors import InvalidArgumentError, InvalidTypeError, OptionError, ReadOnlyError
from tdstore.header import Header
from tdstore.index.ranges import check_writes, index_shape
from tdstore.index.rows import check_indices, last_wins, take
from tdstore.index.tracing import fake_mode as fake_mode
from tdstore.store import Cap, Store
from tdstore.storekit import refusals
from tdstore.types import LeafSpec, Path, Read, Write, path_text


class Typed(Protocol):
    """An object with a shape and a dtype: a `LeafSpec`, a tensor, or a record of a backend."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an element."""


L = TypeVar("L")
"""What a backend keeps for each leaf."""
_NO_LOCK = nullcontext()
_SPEC: Callable[[Any], LeafSpec] = attrgetter("spec")
"""What `CheckedStore._spec` does, without a Python call for each leaf."""


def check_choices(url: str, **choices: tuple[object, Iterable[object]]) -> None:
    """Refuse an option of an opener whose value is not one of the few that are allowed.

    Args:
        url: the location.
        **choices: for the name of each option, its value and the allowed values.

    Raises:
        OptionError: a value is not allowed.

    Example:
        >>> check_choices("a.h5", mode=("r", ("r", "w")), verify=("all", ("none", "size", "full")))
        Traceback (most recent call last):
        ...
        tdstore.errors.OptionError: a.h5: verify must be one of 'none', 'size', 'full', not 'all'
    """
    for name, (value, allowed) in choices.items():
        known = allowed if isinstance(allowed, tuple) else list(allowed)
        if value not in known:
            raise refusals.option_value(url, name, value, list(known))


class CheckedStore(Store, Generic[L]):
    """A store whose backend sees checked input only. Derive from it instead of from `Store`.

    The backend implements `_catalogue` and other methods with an underscore; their arguments are checked:

    =========================== =================================================================================
    `_catalogue()`              the leaves by path; `_spec(leaf)` is the `LeafSpec` of one, by default `leaf.spec`
    `_read(wanted)`             `(leaf, read)` for each request; a result other than `read.out` is copied into it
    `_write(wanted)`            `(leaf, write)` for each; no row is named twice
    `_create(leaves)`           specs by path, with options of `leaf_options` only
    `_delete(paths)`            paths of leaves, each once
    `_resize(lengths)`          of leaves with dimensions, none negative (only with `RESIZE`)
    `_rename(moves)`            of leaves, to names that differ (optional)
    `_save(header)`             the commit, which sets `self._header = header` when it is done
    `_discard()`                undo what was not committed (only with `DISCARD`)
    `_close()`                  called once
    =========================== =================================================================================

    Refused first: calls after `close`, changes in mode "r", changes by a forked child of the process that opened the
    store, paths without a leaf, indices out of range, values and `out=` of another shape or dtype, unknown options.

    Args:
        url: the location, for messages.
        writable: False in mode "r".

    Example:
        >>> from tdstore.storekit import CheckedStore
        >>> issubclass(CheckedStore, Store)
        True
    """

    leaf_options: ClassVar[frozenset[str] | None] = frozenset()
    """Names of the layout options of a leaf. None: `_create` checks them."""
    _closed = False
    _lock: AbstractContextManager[Any] | None = None
    """A reentrant lock that every change holds, where threads must take turns."""
    _pid: int | None = None
    """The process that may change the store; None for any."""
    _header: Header
    """Of the last commit."""
    _own_spec = _own_typed = True
    """Whether the class has a `_spec`, or a `_spec` or `_typed`, of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_spec = cls._spec is not CheckedStore._spec
        cls._own_typed = cls._own_spec or cls._typed is not CheckedStore._typed
        for name in ("_lock", "_closed", "_pid", "_header", "_guard"):
            if inspect.isroutine(vars(cls).get(name)):
                raise InvalidTypeError(
                    f"{cls.__qualname__}.{name} is a method, and CheckedStore keeps something else by that name"
                    + (": the lock that every change holds, or None" if name == "_lock" else ""),
                    hint="give the method another name",
                )

    def __init__(self, url: str, *, writable: bool) -> None:
        self.url, self.writable = url, writable
        self._pid = os.getpid()
        self._header = Header()

    # -- of the backend ---------------------------------------------------------------------
    @abstractmethod
    def _catalogue(self) -> Mapping[Path, L]:
        """Return the current leaves, by path."""

    def _spec(self, leaf: L) -> LeafSpec:
        """Return shape, dtype and fill value of a leaf."""
        spec: LeafSpec = leaf.spec  # type: ignore[attr-defined]
        return spec

    def _typed(self, leaf: L) -> Typed:
        """Return an object with the shape and dtype of a leaf; override where that is cheaper than its spec."""
        return self._spec(leaf)

    @abstractmethod
    def _read(self, wanted: Sequence[tuple[L, Read]]) -> list[Tensor]:
        """Return a tensor for each request, in memory of its own or in `read.out`."""

    def _write(self, wanted: Sequence[tuple[L, Write]]) -> None:
        """Write values, completely or not at all."""
        raise self.unsupported(Cap.WRITE)

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Create leaves, replacing existing ones."""
        raise self.unsupported(Cap.WRITE)

    def _delete(self, paths: Sequence[Path]) -> None:
        """Remove leaves."""
        raise self.unsupported(Cap.WRITE)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        """Set the lengths of first dimensions."""
        super().resize(lengths)

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        """Rename leaves, all at once."""
        super().rename(moves)

    def _save(self, header: Header) -> None:
        """Commit."""
        raise self.unsupported(Cap.WRITE)

    def _discard(self) -> None:
        """Undo what was not committed."""
        super().discard()

    def _close(self) -> None:
        """Commit rows of committed leaves, and release every handle."""

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child of the process that opened the store: it neither writes nor commits."""
        return self._pid is not None and self._pid != os.getpid()

    @property
    def _guard(self) -> AbstractContextManager[Any]:
        """Return the lock that a change holds: none in a forked child, where a thread of the parent may hold it."""
        if self._lock is None or self._forked:
            return _NO_LOCK
        return self._lock

    # -- checks -----------------------------------------------------------------------------
    def _check_open(self) -> None:
        """Refuse a call after `close`."""
        if self._closed:
            raise refusals.closed(self.url)

    def _check_writable(self) -> None:
        """Refuse a change that this store, or this process, cannot make. Extend it if there are more reasons."""
        if self._closed:
            raise refusals.closed(self.url)
        if not self.writable:
            raise self._read_only()
        if self._forked:
            raise refusals.forked(self.url)

    def _read_only(self) -> ReadOnlyError:
        """Create the error for a change in mode "r"."""
        return refusals.read_only(self.url)

    def _leaf(self, path: Path) -> L:
        """Return a leaf of the open store."""
        if self._closed:
            raise refusals.closed(self.url)
        try:
            return self._catalogue()[path]
        except KeyError:
            raise refusals.no_leaf(self.url, path) from None

    def _wanted(self, reads: Sequence[Read], leaves: Mapping[Path, L] | None = None) -> list[tuple[L, Read]]:
        """Check requests, and return each with its leaf.

        Args:
            leaves: a catalogue to use instead of the current one.
        """
        if self._closed:
            raise refusals.closed(self.url)
        if leaves is None:
            leaves = self._catalogue()
        typed = self._typed if self._own_typed else _SPEC
        found: list[tuple[L, Read]] = []
        places = []
        for r in reads:
            if (leaf := leaves.get(r.path)) is None:
                raise refusals.no_leaf(self.url, r.path)
            found.append((leaf, r))
            places.append((r.index, typed(leaf).shape))
        check_indices(places)
        for leaf, r in found:
            if (out := r.out) is not None:
                known = typed(leaf)
                shape = index_shape(known.shape, r.index)
                if tuple(out.shape) != shape or out.dtype != known.dtype:
                    raise refusals.wrong_out(r.path, out.shape, out.dtype, shape, known.dtype)
        return found

    def _check_all(self, paths: Iterable[Path]) -> None:
        leaves = self._catalogue()
        for path in paths:
            if path not in leaves:
                raise refusals.no_leaf(self.url, path)

    # -- the protocol -----------------------------------------------------------------------
    def paths(self) -> Iterator[Path]:
        """Return the paths of all leaves, as `Store.paths` does."""
        if self._closed:
            raise refusals.closed(self.url)
        return iter(tuple(self._catalogue()))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        """Return a spec for each path, as `Store.specs` does."""
        if self._closed:
            raise refusals.closed(self.url)
        leaves, spec_of = self._catalogue(), self._spec if self._own_spec else _SPEC
        try:
            found = list(map(leaves.__getitem__, paths))
        except KeyError:
            raise refusals.no_leaf(self.url, next(p for p in paths if p not in leaves)) from None
        return list(map(spec_of, found))

    def load_header(self) -> Header:
        """Return the header, as `Store.load_header` does: by default `_header`."""
        if self._closed:
            raise refusals.closed(self.url)
        return self._header

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Check requests and read, as `Store.read` does."""
        found = self._read(self._wanted(reads))
        for at, r in enumerate(reads):
            if r.out is not None and found[at] is not r.out:
                if found[at].shape != r.out.shape:  # `copy_` would broadcast it
                    raise InvalidArgumentError(
                        f"{type(self).__qualname__}._read gives shape {tuple(found[at].shape)} for leaf "
                        f"{path_text(r.path)} of {self.url}, and {tuple(r.out.shape)} was asked for",
                        hint="a defect of the backend: tell its authors",
                    )
                r.out.detach().copy_(found[at])
                found[at] = r.out
        return found

    def write(self, writes: Sequence[Write]) -> None:
        """Check values and write, as `Store.write` does."""
        with self._guard:
            self._check_writable()
            leaves, typed = self._catalogue(), self._typed if self._own_typed else _SPEC
            found: list[tuple[L, Write]] = []
            places = []
            whole = True
            for w in writes:
                if (leaf := leaves.get(w.path)) is None:
                    raise refusals.no_leaf(self.url, w.path)
                found.append((leaf, w))
                known = typed(leaf)
                places.append((w, known.shape, known.dtype))
                whole = whole and not w.index
            check_writes(places)
            self._write(found if whole else _last_writes(found))

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Check specs and create leaves, as `Store.create` does."""
        with self._guard:
            self._check_writable()
            for path, spec in leaves.items():
                if not path:
                    raise refusals.no_name(self.url)
                if self.leaf_options is not None:
                    for name in spec.options:
                        if name not in self.leaf_options:
                            raise refusals.leaf_option(self.url, path, name, sorted(self.leaf_options))
            self._create(leaves)

    def delete(self, paths: Sequence[Path]) -> None:
        """Check paths and remove leaves, as `Store.delete` does."""
        with self._guard:
            self._check_writable()
            self._check_all(paths)
            self._delete(list(dict.fromkeys(paths)))

    def resize(self, lengths: Mapping[Path, int]) -> None:
        """Check lengths and set them, as `Store.resize` does."""
        with self._guard:
            self._check_writable()
            for path, length in lengths.items():
                known = self._typed(self._leaf(path))
                row = max(1, math.prod(known.shape[1:]) * known.dtype.itemsize)
                if not known.shape or not 0 <= length <= sys.maxsize // row:  # no tensor has more bytes
                    raise refusals.bad_length(self.url, path, length)
            self._resize(lengths)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        """Check names and move leaves, as `Store.rename` does."""
        with self._guard:
            self._check_writable()
            self._check_all(moves)
            if () in moves.values():
                raise refusals.no_name(self.url)
            if len(set(moves.values())) < len(moves):
                raise refusals.same_name(self.url, moves)
            self._rename(moves)

    def save_header(self, header: Header) -> None:
        """Commit, as `Store.save_header` does."""
        with self._guard:
            self._check_writable()
            self._save(header)

    def discard(self) -> None:
        """Undo changes, as `Store.discard` does."""
        with self._guard:
            self._check_writable()
            self._discard()

    def mark_closed(self) -> None:
        """Have every later call refused, after the resources of the store were released without it."""
        self._closed = True

    def close(self) -> None:
        """Commit rows and release every handle, as `Store.close` does. A store whose `_close` raises is closed."""
        with self._guard:
            if not self._closed:
                try:
                    self._close()
                finally:
                    self._closed = True


def last_write(w: Write) -> Write:
    """Drop repeated rows of a write, except the last one of each.

    Example:
        >>> found = last_write(Write(("a",), (torch.tensor([4, 1, 4]),), torch.tensor([1, 2, 3])))
        >>> found.index, found.value
        ((tensor([1, 4]),), tensor([2, 3]))
    """
    for at, term in enumerate(w.index):
        if isinstance(term, Tensor):
            rows, positions = last_wins(term)
            if positions is not None:
                return Write(w.path, (*w.index[:at], rows, *w.index[at + 1 :]), take(w.value, at, positions))
    return w


def _last_writes(found: Sequence[tuple[L, Write]]) -> list[tuple[L, Write]]:
    """Drop repeated rows of all writes. Rows that several writes share are checked once."""
    distinct: Tensor | None = None
    checked = []
    for leaf, w in found:
        if not w.index:
            checked.append((leaf, w))
            continue
        rows = w.index[0] if len(w.index) == 1 else None
        if distinct is None or rows is not distinct:
            last = last_write(w)
            if last is w and isinstance(rows, Tensor):
                distinct = rows
            w = last
        checked.append((leaf, w))
    return checked


_LAZY_BYTES = 1 << 20


def full(spec: LeafSpec, device: str | torch.device = "cpu") -> Tensor:
    """Return a tensor full of the fill value of a leaf; large zeros on the CPU cost no memory until touched.

    Args:
        spec: the leaf, with its shape `[*S]`, dtype and fill value.
        device: where the tensor is created.

    Example:
        >>> full(LeafSpec((3,), torch.int16, fill_value=-1))
        tensor([-1, -1, -1], dtype=torch.int16)
    """
    if spec.fill_value or str(spec.fill_value) == "-0.0":
        return torch.full(spec.shape, spec.fill_value, dtype=spec.dtype, device=device)
    if torch.device(device).type == "cpu" and spec.nbytes >= _LAZY_BYTES:
        # torch.zeros writes its zeros; numpy's come from the system, page by page as they are touched.
        return torch.from_numpy(np.zeros(spec.nbytes, np.uint8)).view(spec.dtype).view(spec.shape)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def fill_pattern(spec: LeafSpec, url: str) -> bytes:
    """Return the bytes of one element that was never written.

    Args:
        spec: the leaf, with its fill value.
        url: the location, for the error.

    Raises:
        OptionError: the dtype cannot hold the fill value.

    Example:
        >>> fill_pattern(LeafSpec((3,), torch.int16, fill_value=-1), "runs/1")
        b'\\xff\\xff'
    """
    if type(spec.fill_value) is int and spec.fill_value == 0 and not is_bit_pattern(spec.dtype):
        return bytes(spec.dtype.itemsize)
    try:
        element = torch.tensor([spec.fill_value], device="cpu").to(spec.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"{url}: {spec.fill_value!r} is not a fill value for {spec.dtype}: {error}", url=url
        ) from None
    return to_numpy(element).tobytes()
