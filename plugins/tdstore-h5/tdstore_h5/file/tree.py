"""The contents of a file: leaves, groups and values, found without following links that lead outside the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import torch
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

from tdstore.dtypes import NAME_TO_DTYPE, as_dtype, is_bit_pattern, numpy_dtype
from tdstore.errors import CorruptStoreError, UnsupportedError, UntrustedDataError
from tdstore.header import MAX_DEPTH
from tdstore.types import LeafSpec, Path, path_text
from tdstore_h5.file.names import MAX_PLAIN, decode_name

DTYPE_ATTRIBUTE = b"tdstore_dtype"
VALUE_ATTRIBUTE = b"tdstore_value"
MAX_OBJECTS = 1_000_000
FREE = 64 << 20
"""Elements that are declared but not stored are accepted up to this many bytes, or `RATIO` times the stored ones."""
RATIO = 1100

_PLAIN = re.compile(rb"[\w-]{1,255}").fullmatch
"""Tell links that are their own keys and of the commonest kind; others may be their own keys, too."""
_TRUST = "if you trust the file, open it with trust='h5'"
_NUMERIC = {h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.COMPOUND, *([h5t.COMPLEX] if hasattr(h5t, "COMPLEX") else [])}


@dataclass(slots=True)
class Leaf:
    """One dataset that is a leaf."""

    name: bytes
    spec: LeafSpec
    offset: int | None
    """The offset of its bytes in the file, if they are plain native bytes."""
    plain: bool
    """Contiguous and of native type: `offset` describes all of it (None: not allocated yet)."""
    stored: int = 0
    """Bytes that the dataset takes on the storage."""
    committed: Path | None = None
    """Its path at the last commit; None: it was made since."""
    held: bool = False
    """Made since the last commit where that has bytes of its own: until the next one it is reached through HDF5."""


@dataclass(slots=True)
class Contents:
    """Everything below the root."""

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    groups: dict[Path, list[str]] = field(default_factory=dict)
    """Keys of each group, in the file's order."""
    values: dict[Path, bytes] = field(default_factory=dict)
    """Datasets that hold values which are not tensors."""
    copies: set[Path] = field(default_factory=set)
    """Datasets that repeat strings of the header, for other programs."""

    def forget(self, path: Path) -> None:
        """Drop the records of a removed group without leaves, or a removed copy, and of everything below it."""

        def gone(place: Path) -> bool:
            return place[: len(path)] == path

        self.groups = {place: keys for place, keys in self.groups.items() if not gone(place)}
        self.values = {place: name for place, name in self.values.items() if not gone(place)}
        self.copies = {place for place in self.copies if not gone(place)}


class Walker:
    """One walk over a file. `trust` follows links and external storage."""

    def __init__(self, file: h5py.File, url: str, *, trust: bool) -> None:
        self.url = url
        self.trust = trust
        self.file = file
        self.found = Contents()
        self._seen: set[Any] = set()
        self._count = 0
        self._types: dict[np.dtype[Any], h5t.TypeID] = {}
        self._dtypes: dict[np.dtype[Any], torch.dtype] = {}

    def walk(self) -> Contents:
        """Visit every object once; never recurses deeper than `MAX_DEPTH`."""
        root = self.file["/"].id
        self._seen.add(_address(root))
        stack: list[tuple[Path, bytes, h5g.GroupID]] = [((), b"", root)]
        while stack:
            path, name, group = stack.pop()
            if len(path) > MAX_DEPTH:
                raise self._corrupt(path, f"is nested more than {MAX_DEPTH} levels deep")
            keys = self.found.groups.setdefault(path, [])
            used: set[str] = set()
            for link, kind in _links(group):
                self._count += 1
                if self._count > MAX_OBJECTS:
                    raise CorruptStoreError(f"{self.url} has more than {MAX_OBJECTS} objects", url=self.url)
                key = link.decode() if _PLAIN(link) else self._key(path, link)
                if key in used:
                    raise self._corrupt((*path, key), "is there twice")
                used.add(key)
                below = (*path, key)
                if kind != h5l.TYPE_HARD and not self.trust:
                    raise self._followed(below, kind)
                found, place = h5o.open(group, link), name + b"/" + link if name else link
                if isinstance(found, h5d.DatasetID):
                    self._dataset(below, place, found, keys)
                elif isinstance(found, h5g.GroupID):
                    address = _address(found)
                    if address in self._seen:
                        raise self._corrupt(below, "is a group that has two places, or holds itself")
                    self._seen.add(address)
                    keys.append(key)
                    stack.append((below, place, found))
                # A named type holds no data.
        return self.found

    def _key(self, path: Path, link: bytes) -> str:
        try:
            key = link.decode()
            if b"%" in link or len(link) > MAX_PLAIN or not key.strip("."):  # else it is its own key
                key = decode_name(key)
        except UnicodeDecodeError:
            raise self._corrupt((*path, repr(link)), "has a name that is not UTF-8") from None
        return key

    def _followed(self, path: Path, kind: int) -> UntrustedDataError:
        """Create the error for a link to another place."""
        what = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}.get(kind, "a link")
        return UntrustedDataError(
            f"{self.url}: {path_text(path)} is {what}, which is not followed", url=self.url, hint=_TRUST
        )

    def _dataset(self, path: Path, name: bytes, dataset: h5d.DatasetID, keys: list[str]) -> None:
        plist = dataset.get_create_plist()
        layout = plist.get_layout()
        if not self.trust and (layout == h5d.VIRTUAL or plist.get_external_count()):
            raise UntrustedDataError(
                f"{self.url}: the data of {path_text(path)} is kept in other files", url=self.url, hint=_TRUST
            )
        kind = dataset.get_type()
        cls = kind.get_class()
        space = dataset.get_space()
        if space.get_simple_extent_type() == h5s.NULL:
            raise self._corrupt(path, "is a dataset without a value")
        if cls in (h5t.STRING, h5t.OPAQUE):
            if h5a.exists(dataset, VALUE_ATTRIBUTE):
                self.found.copies.add(path)
                return
            keys.append(path[-1])
            self.found.values[path] = name
            return
        if cls not in _NUMERIC:
            error = UnsupportedError if self.trust else UntrustedDataError
            raise error(
                f"{self.url}: {path_text(path)} has elements of variable length, references or another type "
                "that no tensor has",
                url=self.url,
                hint="delete that dataset from a copy of the file, with h5py",
            )
        keys.append(path[-1])
        self.found.leaves[path] = self.leaf(path, name, dataset, kind, layout == h5d.CONTIGUOUS, plist)

    def leaf(
        self, path: Path, name: bytes, dataset: h5d.DatasetID, kind: h5t.TypeID, contiguous: bool, plist: Any
    ) -> Leaf:
        """Describe one dataset of numbers."""
        dtype = kind.dtype
        if h5a.exists(dataset, DTYPE_ATTRIBUTE):
            torch_dtype = self._declared_dtype(path, dataset, dtype)
        elif dtype in self._dtypes:
            torch_dtype = self._dtypes[dtype]
        else:
            torch_dtype = self._dtypes[dtype] = self._torch_dtype(path, dtype)
        spec = LeafSpec(dataset.shape, torch_dtype)
        native = self._types.get(dtype)
        if native is None:
            native = self._types[dtype] = h5t.py_create(dtype, logical=True)
        plain = contiguous and dtype.isnative and bool(kind.equal(native)) and not plist.get_external_count()
        # HDF5 walks the whole index of chunks to count them: over a wire that is a round for each part of it.
        stored = dataset.get_storage_size() if contiguous or spec.nbytes > FREE else spec.nbytes
        offset = dataset.get_offset() if plain else None
        if offset is not None and stored != spec.nbytes:
            raise self._corrupt(path, f"has {stored} stored bytes, its shape needs {spec.nbytes}")
        if plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
            spec = spec.replace(fill_value=_fill_value(plist, dtype, torch_dtype))
        if plist.get_layout() == h5d.CHUNKED:
            spec = spec.replace(chunks=tuple(plist.get_chunk()))  # so that a copy can move whole chunks
        return Leaf(name, spec, offset, plain, stored)

    def _declared_dtype(self, path: Path, dataset: h5d.DatasetID, dtype: np.dtype[Any]) -> torch.dtype:
        """Return the dtype that an attribute names, of which the elements are the bits."""
        name = h5py.AttributeManager(h5py.Dataset(dataset)).get(DTYPE_ATTRIBUTE.decode())
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        wanted = NAME_TO_DTYPE.get(text) if isinstance(text, str) else None
        if wanted is None or not is_bit_pattern(wanted) or numpy_dtype(wanted) != dtype.newbyteorder("="):
            raise self._corrupt(path, f"of type {dtype} claims to be {text!r}")
        return wanted

    def _torch_dtype(self, path: Path, dtype: np.dtype[Any]) -> torch.dtype:
        try:
            return as_dtype(dtype)
        except TypeError:
            raise UnsupportedError(
                f"{self.url}: {path_text(path)} has elements of type {dtype}, which no tensor has",
                url=self.url,
                hint="delete that dataset from a copy of the file, with h5py",
            ) from None

    def _corrupt(self, path: Path, text: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.url}: {path_text(path)} {text}", url=self.url)


def check_believable(found: Contents, url: str) -> None:
    """Refuse leaves of another program's file that declare far more than the storage holds.

    Raises:
        CorruptStoreError: names the leaf.
    """
    for path, leaf in found.leaves.items():
        if leaf.spec.nbytes > max(FREE, RATIO * leaf.stored):
            raise CorruptStoreError(
                f"{url}: {path_text(path)} declares {leaf.spec.nbytes} bytes, of which {leaf.stored} are stored",
                url=url,
                hint=_TRUST,
            )


def changed(leaves: Mapping[Path, Leaf], specs: Mapping[Path, LeafSpec]) -> set[Path]:
    """Return the leaves whose shape or dtype differs from the manifest, and those missing on either side."""
    found = specs.keys() - leaves.keys()
    for path, leaf in leaves.items():
        known = specs.get(path)
        if known is None or known.shape != leaf.spec.shape or known.dtype is not leaf.spec.dtype:
            found.add(path)
    return found


def differences(leaves: Mapping[Path, Leaf], specs: Mapping[Path, LeafSpec], named: set[Path]) -> Sequence[str]:
    """Describe how a file differs from its manifest."""
    found = [f"{path_text(p)} is in the manifest, but not in the file" for p in specs if p not in leaves]
    found += [
        f"{path_text(p)} is in the file, but not in the manifest" for p in leaves if p not in specs and p not in named
    ]
    for path, spec in specs.items():
        if path in leaves and leaves[path].spec != spec:
            found.append(f"{path_text(path)} is {leaves[path].spec}, the manifest says {spec}")
    return found


def _links(group: h5g.GroupID) -> Iterator[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []

    def add(name: bytes, info: Any) -> None:
        found.append((name, info.type))

    group.links.iterate(add, info=True)
    return iter(found)


def _address(group: h5g.GroupID) -> Any:
    info = h5o.get_info(group)
    return info.fileno, info.addr


def _fill_value(plist: Any, dtype: np.dtype[Any], torch_dtype: torch.dtype) -> Any:
    value = np.zeros((), dtype)
    plist.get_fill_value(value)
    if not any(value.tobytes()):  # -0.0 has a bit
        return 0
    if not is_bit_pattern(torch_dtype):
        return value.item()
    bits = torch.from_numpy(value.reshape(1).astype(dtype.newbyteorder("=")))
    number = bits.view(torch_dtype)
    return complex(number.to(torch.complex64)) if torch_dtype.is_complex else float(number.to(torch.float32))
