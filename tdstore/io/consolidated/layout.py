"""The layout of a consolidated file, that of the `tensordict` package: leaves, a JSON document, its length.

    [leaves, each padded to 8 bytes] [JSON, UTF-8] [length of the JSON, int64 little-endian]

One object for each TensorDict: `cls`, `leaves` (`key: [dtype, shape, start, stop, pad]`), `non_tensors`
(`key: [value, batch size, device]`), `cls_metadata`, and an object for each nested one under its own key. What that
cannot say (order of keys, values that are not JSON, groups with one of those names, checksums) stands under `size`,
which the reader of `tensordict` ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tdstore.dtypes import NAME_TO_DTYPE, dtype_name
from tdstore.errors import CorruptStoreError
from tdstore.header import MAX_BYTES, MAX_DEPTH, MAX_GROUPS, VALUE_KIND, Group, Header, header_from_builtins
from tdstore.io.consolidated.buffer import Slot
from tdstore.io.consolidated.sums import Placed, aligned, blank
from tdstore.storekit.documents import MAX_DIMS
from tdstore.types import Path, path_text
from tdstore.values import encode_value, unique_keys

LAZY = "LazyStackedTensorDict"
_PLAIN = ("TensorDict", "TensorDictParams", "PersistentTensorDict", "SubTensorDict", "_SubTensorDict")
_VALUES = "NonTensorStack"
_OWN = ("cls", "non_tensors", "leaves", "cls_metadata", "size")
_EXTRA = "tdstore"
_SUMS = "sums"
_KNOWN = {_EXTRA, _SUMS, "batch_size", "values", "meta", "groups", "kind", "keys"}
_TYPED = "tensorclass:"
TAIL = 8
_RAGGED = _, _OFFSETS, _ = "<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>"


class Ragged(msgspec.Struct):
    """A jagged nested tensor: the places of its parts, and which dimension is ragged."""

    parts: tuple[Slot, ...]
    """Values, offsets and, if the rows are not contiguous, lengths."""
    dim: int


class Contents(msgspec.Struct):
    """Contents of a consolidated file."""

    header: Header
    slots: dict[Path, Slot]
    ragged: dict[Path, Ragged] = msgspec.field(default_factory=dict)
    summed: bool = True
    """Whether the description has checksums (`sealing`)."""
    locked: bool = False
    """Whether what was written was locked, and comes locked."""

    def every_slot(self) -> list[Slot]:
        """Return the slots of all leaves, and of the parts of ragged ones."""
        found = list(self.slots.values())
        return found + [slot for leaf in self.ragged.values() for slot in leaf.parts]

    def placed(self) -> Placed:
        """Return the slots with elements and their leaves, by position."""
        found = list(self.slots.items())
        found += [(path, slot) for path, leaf in self.ragged.items() for slot in leaf.parts]
        return sorted((pair for pair in found if pair[1].nbytes), key=lambda pair: pair[1].start)


# -- writing ---------------------------------------------------------------------------------
def encode(contents: Contents) -> bytes:
    """Encode the JSON document and its length, which follow the bytes of the leaves."""
    below: dict[Path, list[Path]] = {}
    for path in contents.header.groups:
        if path:
            below.setdefault(path[:-1], []).append(path)
    leaves: dict[Path, dict[str, Any]] = {path: {} for path in contents.header.groups}
    for path, slot in contents.slots.items():
        leaves[path[:-1]][path[-1]] = _record(slot)
    for path, ragged in contents.ragged.items():
        records = {prefix + path[-1]: _record(slot) for prefix, slot in zip(_RAGGED, ragged.parts, strict=False)}
        records[_OFFSETS + path[-1]].append(ragged.dim)
        offsets = records.pop(_OFFSETS + path[-1])  # `tensordict` regards the leaf as complete once it has them
        leaves[path[:-1]] |= records | {_OFFSETS + path[-1]: offsets}
    made: dict[Path, dict[str, Any]] = {}
    for path in sorted(contents.header.groups, key=len, reverse=True):
        groups = {p[-1]: made.pop(p) for p in below.get(path, ())}
        made[path] = _object(contents.header.groups[path], leaves[path], groups, contents.locked)
    root = made[()]
    own = root.pop("size", {_EXTRA: 1})
    root["size"] = own | {_SUMS: blank(contents.placed())}  # the very end of the text
    text = json.dumps(root, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    text = aligned(text, max((slot.stop for slot in contents.every_slot()), default=0))
    return text + len(text).to_bytes(TAIL, "little")


def _record(slot: Slot) -> list[Any]:
    return [
        f"torch.{dtype_name(slot.dtype)}",
        list(slot.shape),
        slot.start,
        slot.start + slot.nbytes + slot.pad,
        slot.pad,
    ]


def _object(group: Group, leaves: dict[str, Any], groups: dict[str, Any], locked: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if group.kind == LAZY:
        facts = {"stack_dim": group.extra["stack_dim"], "stack_dim_name": group.extra.get("name"), "is_locked": locked}
        extra = {"batch_size": group.extra["batch_size"]} if "batch_size" in group.extra else {}
        made = {"cls": LAZY, "non_tensors": {}, "leaves": leaves, "cls_metadata": facts, **groups}
    else:
        batch = list(group.batch_size or ())
        names = list(group.names) if group.names is not None else [None] * len(batch)
        facts = {"device": group.device, "names": names, "batch_size": batch, "is_locked": locked}
        values, stacks, records = _split(group, batch, locked)
        hidden = {key: groups.pop(key) for key in list(groups) if key in _OWN}
        made = {"cls": "TensorDict", "non_tensors": values, "leaves": leaves, "cls_metadata": facts, **stacks, **groups}
        meta = [key for key in values if group.values[key].get("meta") is True]
        extra = {name: part for name, part in (("values", records), ("meta", meta), ("groups", hidden)) if part}
        if group.kind != "TensorDict":
            extra["kind"] = group.kind
        shown = [*_leaf_names(leaves), *values, *stacks, *groups, *records, *hidden]
        if shown != list(group.keys):
            extra["keys"] = list(group.keys)
    if extra:
        made["size"] = {_EXTRA: 1, **extra}
    return made


def _split(group: Group, batch: list[int], locked: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split values into those that `tensordict` can write, such stacks, and value records of the others."""
    values: dict[str, Any] = {}
    stacks: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for key, record in group.values.items():
        if "data" in record and "codec" not in record and _is_json(record["data"]):
            values[key] = [record["data"], batch, group.device]
        elif "stack" in record and key not in _OWN and _is_json(record["stack"]) and record["stack"]:
            stacks[key] = _stack_object(record["stack"], record.get("ndim", 1), group.device, batch, locked)
        else:
            records[key] = record
    return values, stacks, records


def _stack_object(values: list[Any], levels: int, device: str | None, batch: list[int], locked: bool) -> dict[str, Any]:
    facts = {"stack_dim": 0, "stack_dim_name": None, "is_locked": locked}
    made: dict[str, Any] = {"cls": _VALUES, "non_tensors": {}, "leaves": {}, "cls_metadata": facts}
    if levels <= 1:
        made["non_tensors"] = {str(i): [value, batch[1:], device] for i, value in enumerate(values)}
        return made
    return made | {str(i): _stack_object(part, levels - 1, device, batch[1:], locked) for i, part in enumerate(values)}


def _is_json(data: Any) -> bool:
    """Check whether the result of `encode_value` is the value itself, without a tagged form."""
    if isinstance(data, list):
        return all(map(_is_json, data))
    if isinstance(data, dict):
        return all(not key.startswith("$") and _is_json(value) for key, value in data.items())
    return True


def _leaf_names(leaves: Mapping[str, Any]) -> list[str]:
    found: dict[str, None] = {}
    for name in leaves:
        prefix = next((p for p in _RAGGED if name.startswith(p)), "")
        found[name.removeprefix(prefix)] = None
    return list(found)


# -- reading ---------------------------------------------------------------------------------
def decode(text: bytes, size: int, url: str) -> Contents:
    """Decode and check the description of `size` bytes of leaves.

    Raises:
        CorruptStoreError: the document is malformed, or leaves exceed the file or overlap.
    """
    try:
        root = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{url}: its description is not readable: {error}", url=url) from error
    reader = _Reader(size, url)
    todo: list[tuple[Path, Any]] = [((), root)]
    while todo:
        todo += reversed(reader.object(*todo.pop()))
        if len(reader.groups) > MAX_GROUPS:
            raise CorruptStoreError(f"{url} has more than {MAX_GROUPS} groups", url=url)
    header = header_from_builtins({"format": 1, "groups": [[list(p), g] for p, g in reader.groups.items()]}, url=url)
    locked = root["cls_metadata"].get("is_locked") is True
    contents = Contents(header, reader.slots, reader.ragged, reader.summed, locked)
    at = 0
    for slot in sorted((slot for slot in contents.every_slot() if slot.nbytes), key=lambda slot: slot.start):
        if slot.start < at:
            raise CorruptStoreError(f"{url}: two leaves share the bytes from {slot.start} on", url=url)
        at = slot.start + slot.nbytes
    return contents


def split_tail(tail: bytes, total: int, url: str) -> tuple[int, int]:
    """Return `(size of the leaves, length of the document)` of a file of `total` bytes, from its last 8."""
    length = int.from_bytes(tail, "little", signed=True) if len(tail) == TAIL else -1
    if not 2 <= length <= min(total - TAIL, MAX_BYTES):
        raise CorruptStoreError(
            f"{url} has {total} bytes, and claims {length} of description at its end: not a consolidated file, or "
            "one that was cut off",
            url=url,
        )
    return total - TAIL - length, length


class _Reader:
    """The state of `decode`, which reads one object after the other."""

    def __init__(self, size: int, url: str) -> None:
        self.size = size
        self.url = url
        self.groups: dict[Path, dict[str, Any]] = {}
        self.slots: dict[Path, Slot] = {}
        self.ragged: dict[Path, Ragged] = {}
        self.summed = False

    def object(self, path: Path, source: Any) -> list[tuple[Path, Any]]:
        """Read one TensorDict, and return the objects of those below it."""
        if len(path) > MAX_DEPTH:
            raise self._corrupt(f"is nested more than {MAX_DEPTH} levels deep", path)
        if not isinstance(source, dict):
            raise self._corrupt("is not an object", path)
        facts, leaves, values = (self._dict(source, name, path) for name in ("cls_metadata", "leaves", "non_tensors"))
        extra = source.get("size")
        extra = extra if isinstance(extra, dict) and extra.get(_EXTRA) == 1 else {}
        if not set(extra) <= _KNOWN or (_SUMS in extra and path):
            raise self._corrupt(f"has the facts {sorted(map(str, extra))[:20]}, not those that are known", path)
        self.summed |= _SUMS in extra
        below = {key: part for key, part in source.items() if key not in _OWN}
        if not extra and isinstance(source.get("size"), dict):
            below["size"] = source["size"]  # a nested TensorDict of that name, which `tensordict` loses
        below |= self._dict(extra, "groups", path)
        kind = source.get("cls")
        if kind == LAZY:
            return self._lazy_stack(path, facts, below, extra)
        if kind not in _PLAIN:
            raise self._corrupt(f"has the class {str(kind)[:80]!r}", path)
        value_records = {key: self._value(record, (*path, key)) for key, record in values.items()}
        meta = extra.get("meta", [])
        if not isinstance(meta, list) or not all(isinstance(key, str) and key in value_records for key in meta):
            raise self._corrupt("marks values that it does not have", path)
        for key in meta:
            value_records[key]["meta"] = True
        for key in [key for key, part in below.items() if isinstance(part, dict) and part.get("cls") == _VALUES]:
            levels, stack = self._stack(below.pop(key), (*path, key))
            value_records[key] = {"stack": stack, "dim": 0, "ndim": levels}
        value_records |= self._dict(extra, "values", path)
        names = self._leaves(leaves, path)
        found = dict.fromkeys((*names, *value_records, *below))
        if len(found) != len(names) + len(value_records) + len(below):
            raise self._corrupt("has two entries with one name", path)
        keys = extra.get("keys", list(found))
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(found):
            raise self._corrupt("has other entries than its list of keys", path)
        dims = facts.get("names")
        self.groups[path] = {
            "kind": self._kind(extra.get("kind", "TensorDict"), path),
            "batch_size": facts.get("batch_size"),
            "names": dims if isinstance(dims, list) and any(name is not None for name in dims) else None,
            "device": facts.get("device"),
            "keys": keys,
            "values": value_records,
        }
        return [((*path, key), part) for key, part in below.items()]

    def _lazy_stack(
        self, path: Path, facts: dict[str, Any], below: dict[str, Any], extra: dict[str, Any]
    ) -> list[tuple[Path, Any]]:
        keys = [str(i) for i in range(len(below))]
        if set(keys) != set(below):
            raise self._corrupt(f"is a lazy stack of the elements {sorted(below)[:8]}", path)
        stack_facts = {"stack_dim": facts.get("stack_dim"), "count": len(keys), "name": facts.get("stack_dim_name")}
        if "batch_size" in extra:
            stack_facts["batch_size"] = extra["batch_size"]
        self.groups[path] = {"kind": LAZY, "batch_size": [], "keys": keys, "extra": stack_facts}
        return [((*path, key), below[key]) for key in keys]

    def _kind(self, kind: Any, path: Path) -> str:
        """Check the class of a container: a TensorDict, or a declared tensorclass."""
        if isinstance(kind, str) and (
            kind in ("TensorDict", VALUE_KIND) or (kind.startswith(_TYPED) and len(kind) < 1000)
        ):
            return str(kind)
        raise self._corrupt(f"has the class {str(kind)[:80]!r}", path)

    def _leaves(self, leaves: dict[str, Any], path: Path) -> list[str]:
        parts: dict[str, dict[str, Any]] = {}
        names: dict[str, None] = {}
        for name, record in leaves.items():
            prefix = next((p for p in _RAGGED if name.startswith(p)), "")
            key = name.removeprefix(prefix)
            if prefix:
                parts.setdefault(key, {})[prefix] = record
            else:
                self.slots[(*path, key)] = self._slot(record, (*path, key), 5)
            names[key] = None
        for key, found in parts.items():
            full = (*path, key)
            if full in self.slots or not set(_RAGGED[:2]) <= set(found):
                raise self._corrupt("is neither one tensor nor a whole nested one", full)
            slots = [self._slot(found[p], full, 6 if p == _OFFSETS else 5) for p in _RAGGED if p in found]
            self.ragged[full] = Ragged(tuple(slots), self._int(found[_OFFSETS][5], full))
        return list(names)

    def _slot(self, record: Any, path: Path, length: int) -> Slot:
        if not isinstance(record, list) or len(record) != length or not isinstance(record[0], str):
            raise self._corrupt(f"is described as {str(record)[:80]}", path)
        dtype = NAME_TO_DTYPE.get(record[0].removeprefix("torch."))
        if dtype is None:
            raise self._corrupt(f"has the unknown dtype {record[0][:80]!r}", path)
        shape = record[1]
        if not isinstance(shape, list) or len(shape) > MAX_DIMS:
            raise self._corrupt(f"has the impossible shape {str(shape)[:80]}", path)
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= self._int(n, path)
        start, stop, pad = (self._int(n, path) for n in record[2:5])
        if stop > self.size or stop - start - pad != nbytes:
            raise self._corrupt(
                f"of {nbytes} bytes should be bytes {start} to {stop} of {self.size}, {pad} of them unused",
                path,
            )
        if nbytes and start % dtype.itemsize:
            raise self._corrupt(f"begins at byte {start}, where no element of {dtype_name(dtype)} can", path)
        return Slot(dtype, tuple(shape), start, nbytes, pad)

    def _stack(self, source: Any, path: Path, depth: int = 1) -> tuple[int, list[Any]]:
        """Return the levels and nested lists of a stack of values."""
        if depth > MAX_DIMS or not isinstance(source, dict) or source.get("cls") != _VALUES:
            raise self._corrupt("is not a stack of values", path)
        facts, values = self._dict(source, "cls_metadata", path), self._dict(source, "non_tensors", path)
        below = {key: part for key, part in source.items() if key not in _OWN}
        count = max(len(values), len(below))
        if facts.get("stack_dim") != 0 or set(values or below) != set(map(str, range(count))) or (values and below):
            raise self._corrupt("is a stack of values along another dimension, or with holes", path)
        if values or not below:
            return 1, [self._value(values[str(i)], path)["data"] for i in range(count)]
        parts = [self._stack(below[str(i)], path, depth + 1) for i in range(count)]
        if len({(levels, len(part)) for levels, part in parts}) != 1:
            raise self._corrupt("is a ragged stack of values", path)
        return parts[0][0] + 1, [part for _, part in parts]

    def _value(self, record: Any, path: Path) -> dict[str, Any]:
        """Return the value record of a value. A dict that resembles a tagged form is a plain dict."""
        if not isinstance(record, list) or len(record) != 3:
            raise self._corrupt(f"is a value described as {str(record)[:80]}", path)
        try:
            return {"data": encode_value(record[0])}
        except (ValueError, TypeError) as error:
            raise self._corrupt(f"is a value that cannot be stored: {error}", path) from error

    def _dict(self, source: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
        found = source.get(name, {})
        if not isinstance(found, dict):
            raise self._corrupt(f"has {name} that are no object", path)
        return found

    def _int(self, value: Any, path: Path) -> int:
        if type(value) is not int or not 0 <= value < 2**62:
            raise self._corrupt(f"has the impossible number {str(value)[:80]}", path)
        return value

    def _corrupt(self, reason: str, path: Path) -> CorruptStoreError:
        return CorruptStoreError(f"{self.url}: {path_text(path)} {reason}", url=self.url)
