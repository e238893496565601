"""The `meta.json` files of the `tensordict` package: read its directories, and write ones that it can read.

One file per folder mixes leaves (`{"device", "shape", "dtype", "is_nested"}`), sub-folders
(`{"type": class name}`) and the scalars `shape` (batch size), `device` and `_type`.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec
import torch

from tdstore.builtin.memmap.layout import SUFFIX, Layout, LeafFile
from tdstore.dtypes import DTYPE_TO_NAME, NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError, StoreError, UntrustedDataError
from tdstore.header import MAX_DEPTH, MAX_GROUPS, NESTED_SHAPES, NESTED_VALUES, VALUE_KEY, VALUE_KIND, Group, Header
from tdstore.storekit import files
from tdstore.storekit.documents import MAX_DIMS, is_plain_name
from tdstore.storekit.session import FileParts
from tdstore.types import Path, path_text
from tdstore.values import decode_value, encode_value, pickled_form, unique_keys

META = "meta.json"
SHAPE_SUFFIX = ".shape" + SUFFIX
MAX_META = 64 << 20
INNER = "_tensordict"
"""The folder in which tensordict puts the entries of a tensorclass."""
PICKLES = ("other.pickle", "pickle.pkl")
MAX_PICKLE = 256 << 20
# Names that its meta.json uses for itself: it writes such leaves and then cannot find them.
SCALARS = ("shape", "device", "_type")

_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_LAZY = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_STACK = "<class 'tensordict.tensorclass.NonTensorStack'>"
_CLASS = re.compile(r"<class '(?:[^']*\.)?([^.']+)'>")
_VALUES = ("NonTensorData", "NonTensorStack", "MetaData")
_PLAIN_TYPES = ("TensorDict", "TensorDictParams", "PersistentTensorDict", "SubTensorDict")
_ESCAPES = {ord(c): f"%{ord(c):02X}" for c in '/<>:"|?*\\ %\x7f' + "".join(map(chr, range(32)))}


def tensordict_name(key: str) -> str:
    """Return the file name stem that tensordict uses for a key."""
    if key in ("", ".", ".."):
        return "%" if not key else "%2E" * len(key)
    return key.translate(_ESCAPES)


# -- reading ---------------------------------------------------------------------------------
def read_tensordict(root: int, url: str) -> tuple[Header, list[LeafFile]]:
    """Read the `meta.json` files below a folder; no leaf is opened.

    Raises:
        CorruptStoreError: damaged, or a folder that is named is missing.
        UntrustedDataError: a value is pickled.
    """
    reader = TensordictReader(url)
    with files.Tree(root) as tree:
        reader.tree = tree
        return reader.read()


class TensordictReader:
    """Read the folders of a tensordict directory, one after the other; a subclass provides the access to files."""

    tree: files.Tree

    def __init__(self, url: str) -> None:
        self.url = url
        self.groups: dict[Path, Group] = {}
        self.leaves: list[LeafFile] = []

    def read(self) -> tuple[Header, list[LeafFile]]:
        """Read all folders, from the root on."""
        todo: list[tuple[Path, FileParts]] = [((), ())]
        while todo:
            todo += reversed(self.group(*todo.pop()))
            if len(self.groups) > MAX_GROUPS:
                raise CorruptStoreError(f"{self.url} has more than {MAX_GROUPS} groups", url=self.url)
        return Header(self.groups), self.leaves

    def group(self, path: Path, folder: FileParts) -> list[tuple[Path, FileParts]]:
        """Read one folder; returns the groups below it."""
        if len(path) > MAX_DEPTH:
            raise self._corrupt(f"is nested more than {MAX_DEPTH} levels deep", path)
        meta = self._meta(folder, path)
        kind = self._kind(meta, path)
        if kind == "LazyStackedTensorDict":
            return self._lazy_stack(meta, path, folder)
        if kind == VALUE_KIND:
            return self._value_by_itself(meta, path, folder)
        if kind != "TensorDict":
            folder = (*folder, INNER)
            if PICKLES[0] in self._entries(folder[:-1]):
                raise self._pickled(path)
            meta = self._meta(folder, path)
        below: list[tuple[Path, FileParts]] = []
        values: dict[str, Any] = {}
        keys = []
        batch = self._shape(_regular_size(meta.get("shape")), path)
        for key, entry in meta.items():
            if not isinstance(entry, dict):
                continue
            keys.append(key)
            if entry.get("is_nested"):
                values[key] = self._nested((*path, key), folder, entry, batch)
            elif "type" not in entry:
                self._leaf((*path, key), folder, entry)
            elif (found := self._value((*path, key), folder, key)) is not None:
                values[key] = found
            else:
                below.append(((*path, key), (*folder, self._folder_name(folder, key, path))))
        device = meta.get("device")
        self.groups[path] = Group(
            batch_size=batch,
            device=device if isinstance(device, str) and device != "None" else None,
            kind=kind,
            keys=tuple(keys),
            values=values,
        )
        return below

    def _lazy_stack(self, meta: dict[str, Any], path: Path, folder: FileParts) -> list[tuple[Path, FileParts]]:
        dim = meta.get("stack_dim")
        if type(dim) is not int:
            raise self._corrupt(f"is a lazy stack with stack_dim {dim!r}", path)
        names = self._entries(folder)
        count = 0
        while str(count) in names:
            count += 1
        keys = tuple(map(str, range(count)))
        self.groups[path] = Group(kind="LazyStackedTensorDict", keys=keys, extra={"stack_dim": dim})
        return [((*path, key), (*folder, key)) for key in keys]

    def _kind(self, meta: dict[str, Any], path: Path) -> str:
        named = _CLASS.fullmatch(str(meta.get("_type", _TENSORDICT)))
        if named is None:
            raise self._corrupt(f"has the class {str(meta.get('_type'))[:80]!r}", path)
        if named[1] == "LazyStackedTensorDict":
            return named[1]
        if named[1] in _VALUES:
            return VALUE_KIND
        full = str(meta["_type"])[len("<class '") : -len("'>")] if "_type" in meta else ""
        return "TensorDict" if named[1] in _PLAIN_TYPES else f"tensorclass:{full}"

    def _leaf(self, path: Path, folder: FileParts, entry: dict[str, Any]) -> None:
        dtype = self._dtype(entry, path)
        shape = self._shape(entry.get("shape"), path)
        leaf = LeafFile(path, (), dtype, 0, ())
        total = dtype.itemsize
        for n in shape:
            total *= n
        if total >= 2**62:
            raise self._corrupt(f"has the impossible shape {shape[:8]}", path)
        leaf = LeafFile(path, shape, dtype, 0, ("?",))
        if leaf.nbytes:
            leaf.file = (*folder, self._file_name(folder, path[-1], path))
        self.leaves.append(leaf)

    def _dtype(self, entry: dict[str, Any], path: Path) -> torch.dtype:
        dtype = NAME_TO_DTYPE.get(str(entry.get("dtype")).removeprefix("torch."))
        if dtype is None:
            raise self._corrupt(f"has the unknown dtype {entry.get('dtype')!r}", path)
        return dtype

    def _nested(self, path: Path, folder: FileParts, entry: dict[str, Any], batch: tuple[int, ...]) -> dict[str, Any]:
        """Read a strided nested tensor, elements and the shapes of its rows; returns its value record."""
        dtype, size = self._dtype(entry, path), self._shape(entry.get("shape"), path)
        if len(size) != 2 or batch[:1] not in ((), size[:1]) or size[1] > MAX_DIMS or len(batch) > size[1] + 1:
            raise self._corrupt(f"is a nested tensor whose shapes have the impossible shape {list(size)}", path)
        values = LeafFile((*path, NESTED_VALUES), (0,), dtype, 0, ())
        name = (*folder, self._file_name(folder, path[-1], path))
        if (length := self._size(name)) is not None:
            values = LeafFile(values.path, (length // dtype.itemsize,), dtype, 0, name)
        shapes = LeafFile((*path, NESTED_SHAPES), size, torch.int64, 0, ("?",))
        if shapes.nbytes:
            shapes.file = (*folder, self._name(folder, path[-1], SHAPE_SUFFIX, path))
        self.leaves += [values, shapes]
        shape = [size[0], *batch[1:], *[-1] * (size[1] + 1 - max(len(batch), 1))]
        return {"nested": {"layout": "strided", "shape": shape, "spans": False}}

    def _size(self, parts: FileParts) -> int | None:
        """Return the bytes of a file; None if it does not exist."""
        try:
            return os.stat(parts[-1], dir_fd=self.tree.folder(parts[:-1]), follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def _value(self, path: Path, folder: FileParts, key: str) -> dict[str, Any] | None:
        """Return the value record of a non-tensor value; None when the folder is a group."""
        inner = (*folder, self._folder_name(folder, key, path))
        meta = self._meta(inner, path)
        named = _CLASS.fullmatch(str(meta.get("_type", _TENSORDICT)))
        return None if named is None or named[1] not in _VALUES else self._record(named[1], meta, inner, path)

    def _value_by_itself(self, meta: dict[str, Any], path: Path, folder: FileParts) -> list[tuple[Path, FileParts]]:
        record = self._record(_CLASS.fullmatch(str(meta["_type"]))[1], meta, folder, path)  # type: ignore[index]
        batch: tuple[int, ...] = ()
        if isinstance(meta.get("data"), list) and "stack" in record:
            batch = _shape_of_lists(meta["data"])
            record["ndim"] = len(batch)
        self.groups[path] = Group(batch_size=batch, kind=VALUE_KIND, keys=(VALUE_KEY,), values={VALUE_KEY: record})
        return []

    def _record(self, kind: str, meta: dict[str, Any], inner: FileParts, path: Path) -> dict[str, Any]:
        data = meta.get("data")
        if "data" not in meta or (kind == "NonTensorStack" and not isinstance(data, list)):
            return self._pickled_value(inner, path, stacked=kind == "NonTensorStack")
        try:
            if kind == "NonTensorStack":
                return {"stack": encode_value(data), "dim": int(meta.get("stack_dim", 0))}
            return {"data": encode_value(data)}
        except (ValueError, TypeError) as error:
            raise self._corrupt(f"is a value that cannot be kept: {error}", path) from error

    def _meta(self, folder: FileParts, path: Path) -> dict[str, Any]:
        try:
            raw = files.read_small(META, self.tree.folder(folder), MAX_META)
            meta = json.loads(raw, object_pairs_hook=unique_keys)
        except FileNotFoundError:
            raise self._corrupt(f"is missing: there is no {'/'.join((*folder, META))}", path) from None
        except OSError as error:
            if files.is_foreign(error):
                raise self._corrupt(f"{'/'.join((*folder, META))} is no plain file in plain folders", path) from error
            raise
        except StoreError as error:
            raise files.with_url(error, self.url) from None
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"{'/'.join((*folder, META))} is not readable: {error}", path) from error
        if not isinstance(meta, dict):
            raise self._corrupt(f"{'/'.join((*folder, META))} is not an object", path)
        return meta

    def _entries(self, folder: FileParts) -> set[str]:
        with os.scandir(self.tree.folder(folder)) as entries:
            return {entry.name for entry in entries}

    def _file_name(self, folder: FileParts, key: str, path: Path) -> str:
        return self._name(folder, key, SUFFIX, path)

    def _folder_name(self, folder: FileParts, key: str, path: Path) -> str:
        return self._name(folder, key, "", path)

    def _name(self, folder: FileParts, key: str, suffix: str, path: Path) -> str:
        """Return the encoded name, or the bare one that older versions wrote."""
        name = self.wanted_name(key, suffix, path)
        bare = key + suffix
        if bare == name or not key or not is_plain_name(bare):
            return name
        try:
            os.stat(name, dir_fd=self.tree.folder(folder), follow_symlinks=False)
        except FileNotFoundError:
            return bare
        return name

    def wanted_name(self, key: str, suffix: str, path: Path) -> str:
        """Return the name that tensordict gives the file or folder of a key."""
        name = tensordict_name(key) + suffix
        if not is_plain_name(name):
            raise self._corrupt("has a key that cannot be a file name", path)
        return name

    def _shape(self, shape: object, path: Path) -> tuple[int, ...]:
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_DIMS
            or not all(type(n) is int and 0 <= n < 2**62 for n in shape)
        ):
            raise self._corrupt(f"has the impossible shape {str(shape)[:80]}", path)
        return tuple(shape)

    def _corrupt(self, reason: str, path: Path) -> CorruptStoreError:
        return CorruptStoreError(f"{self.url}: {path_text(path)} {reason}", url=self.url)

    def _pickled_value(self, folder: FileParts, path: Path, *, stacked: bool) -> dict[str, Any]:
        """Return the value record of a pickled value: it is not unpickled here, nor anywhere without `trust=True`."""
        try:
            data = self._read_pickle((*folder, PICKLES[1 if stacked else 0]))
        except FileNotFoundError:
            raise self._corrupt("is a value without data", path) from None
        return {"stack": pickled_form(data)} if stacked else {"data": pickled_form(data, "data")}

    def _read_pickle(self, parts: FileParts) -> bytes:
        try:
            return files.read_small(parts[-1], self.tree.folder(parts[:-1]), MAX_PICKLE)
        except StoreError as error:
            raise files.with_url(error, self.url) from None

    def _pickled(self, path: Path) -> UntrustedDataError:
        return UntrustedDataError(
            f"{self.url}: the value {path_text(path)} is pickled; reading it could run code",
            url=self.url,
            hint="if you trust it, load it with the tensordict package and save it again without that value",
        )


def _shape_of_lists(values: list[Any]) -> tuple[int, ...]:
    """Return the lengths of nested lists, down to where they are no lists of one length."""
    shape = [len(values)]
    while len(shape) < MAX_DIMS and values and all(isinstance(v, list) and len(v) == len(values[0]) for v in values):
        shape.append(len(values[0]))
        values = [row for value in values for row in value]
    return tuple(shape)


def _regular_size(shape: Any) -> Any:
    """Return a batch size up to where it is ragged (-1): the entries determine the rest."""
    return shape[: shape.index(-1)] if isinstance(shape, list) and -1 in shape else shape


# -- writing ---------------------------------------------------------------------------------
def meta_files(header: Header, leaves: Iterable[LeafFile], layout: Layout) -> dict[FileParts, bytes]:
    """Return the `meta.json` of each folder, without entries that tensordict could not read.

    Leaves in groups that the header does not describe are left out, too.
    """
    below: defaultdict[Path, dict[str, LeafFile]] = defaultdict(dict)
    for leaf in leaves:
        below[leaf.path[:-1]][leaf.path[-1]] = leaf
    subgroups: dict[Path, list[str]] = {}
    for path in header.groups:
        if path:
            subgroups.setdefault(path[:-1], []).append(path[-1])
    out: dict[FileParts, bytes] = {}
    for path, group in (header.groups or {(): Group()}).items():
        _write_group(path, group, below, subgroups.get(path, []), header.groups, layout, out)
    return out


def write_meta_files(
    root: int, wanted: Mapping[FileParts, bytes], known: MutableMapping[FileParts, bytes], *, fresh: bool
) -> None:
    """Write those of the files that are not there as wanted, and remove others.

    Args:
        root: descriptor of the folder.
        wanted: the output of `meta_files`.
        known: the files that are there; each is recorded at once, as a disk may be full in between.
        fresh: nobody reads the folder yet.
    """
    with files.Tree(root) as tree:
        for parts, data in wanted.items():
            if known.get(parts) != data:
                folder = root if len(parts) == 1 else tree.folder(parts[:-1], create=True)
                if fresh and parts not in known:
                    files.create_file(META, folder, data)
                else:
                    files.replace_file(META, folder, data)
                known[parts] = data
        for parts in known.keys() - wanted.keys():
            files.unlink_if_there(META, tree.folder(parts[:-1]))
            del known[parts]


def stored_meta_files(root: int, names: Iterable[FileParts]) -> dict[FileParts, bytes]:
    """Return the contents of those of the files that can be read."""
    found: dict[FileParts, bytes] = {}
    with files.Tree(root) as tree:
        for parts in names:
            try:
                found[parts] = files.read_small(META, tree.folder(parts[:-1]), MAX_META)
            except (OSError, CorruptStoreError):
                continue
    return found


def _write_group(
    path: Path,
    group: Group,
    below: Mapping[Path, Mapping[str, LeafFile]],
    subgroups: list[str],
    groups: Mapping[Path, Group],
    layout: Layout,
    out: dict[FileParts, bytes],
) -> None:
    folder = layout.folder(path)
    if group.kind == "LazyStackedTensorDict" and type(group.extra.get("stack_dim")) is int:
        out[(*folder, META)] = _dump({"_type": _LAZY, "stack_dim": group.extra["stack_dim"]})
        return
    if group.kind == VALUE_KIND and (one := _tensordict_value(group.values.get(VALUE_KEY))) is not None:
        out[(*folder, META)] = _dump(one)
        return
    meta: dict[str, Any] = {}
    same: dict[tuple[torch.Size, torch.dtype], dict[str, Any]] = {}
    leaves = below.get(path, {})
    for key in dict.fromkeys((*group.keys, *leaves, *subgroups, *group.values)):
        if key in SCALARS:
            continue
        if key in leaves:
            if (leaf := leaves[key]).file in ((), (*folder, tensordict_name(key) + SUFFIX)):
                if (record := same.get((leaf.shape, leaf.dtype))) is None:
                    record = same[leaf.shape, leaf.dtype] = _tensordict_leaf(leaf.shape, leaf.dtype, nested=False)
                meta[key] = record
        elif (*path, key) in groups:
            if layout.folder((*path, key)) == (*folder, tensordict_name(key)):
                lazy = groups[(*path, key)].kind == "LazyStackedTensorDict"
                meta[key] = {"type": "LazyStackedTensorDict" if lazy else "TensorDict"}
        elif NESTED_SHAPES in (parts := below.get((*path, key), {})):
            values, shapes = parts[NESTED_VALUES], parts[NESTED_SHAPES]
            files = tuple((*folder, tensordict_name(key) + suffix) for suffix in (SUFFIX, SHAPE_SUFFIX))
            if (values.file, shapes.file) == files:
                meta[key] = _tensordict_leaf(shapes.shape, values.dtype, nested=True)
        elif key in group.values and (found := _tensordict_value(group.values[key])) is not None:
            name = tensordict_name(key)
            if is_plain_name(name) and layout.is_free(folder, name):
                meta[key] = {"type": "NonTensorStack" if "stack_dim" in found else "NonTensorData"}
                out[(*folder, name, META)] = _dump(found)
    meta |= {"shape": list(group.batch_size or ()), "device": group.device or "None", "_type": _TENSORDICT}
    out[(*folder, META)] = _dump(meta)


def _tensordict_leaf(shape: Iterable[int], dtype: torch.dtype, *, nested: bool) -> dict[str, Any]:
    """Return tensordict's record of a leaf; of a nested one, the shape of its shapes."""
    return {"device": "cpu", "shape": list(shape), "dtype": f"torch.{DTYPE_TO_NAME[dtype]}", "is_nested": nested}


def _tensordict_value(record: Any) -> dict[str, Any] | None:
    """Return tensordict's record of a value, if JSON can hold it."""
    if not isinstance(record, dict):
        return None
    try:
        if "stack" in record:
            data = decode_value(record["stack"])
            found = {"_type": _STACK, "stack_dim": int(record.get("dim", 0)), "device": None, "data": data}
        elif "data" in record:
            data = decode_value(record["data"])
            found = {"_type": _NON_TENSOR, "data": data, "_is_non_tensor": True, "_metadata": None}
        else:
            return None
        return found if _is_json(data) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _is_json(value: Any) -> bool:
    """Check whether tensordict reads the same value back from JSON (as in its own files, tuples become lists)."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(type(k) is str and _is_json(v) for k, v in value.items())
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return value is None or type(value) in (bool, str) or (type(value) is float and value - value == 0)


def _dump(meta: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(meta)
    except UnicodeEncodeError:  # a lone surrogate
        pass
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


# -- belonging -------------------------------------------------------------------------------
def tensordict_members(root: int, url: str, belongs: Callable[[FileParts], bool]) -> list[str]:
    """Return entries below a tensordict directory that none of its `meta.json` accounts for.

    Args:
        root: descriptor of the directory.
        url: the location, for messages.
        belongs: accepts files that are ours.
    """
    foreign = []
    for parts, is_dir in files.walk(root):
        name = parts[-1]
        known = is_dir or name == META or name in PICKLES or name.endswith(SUFFIX)
        if not known and not belongs(parts):
            foreign.append("/".join(parts))
    return foreign
