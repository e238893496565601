"""Plan writes to var-length columns: bytes are added, offsets point at them, and a header may change."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.container.storage.describe import naming, stored_value
from tdstore.container.values.codecs import pickling
from tdstore.container.values.elements import spread_over
from tdstore.container.values.nontensor import NonTensor
from tdstore.container.varlen.columns import checked_end, column_leaves, grow, text_writes
from tdstore.container.varlen.compaction import compact_columns
from tdstore.container.varlen.encoding import encode_rows
from tdstore.container.varlen.nested_leaves import parts_of_nested, specs_of_nested
from tdstore.container.varlen.reading import check_mark
from tdstore.store import Cap
from tdstore.storekit.foreign_strings import HEAD, TEXT
from tdstore.types import LeafSpec, Path, Read, Write, path_text


class ValuePlan:
    """All that is to be written for values, found out before any of it is written."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.values: dict[Path, dict[str, Any]] = {}
        """Envelopes by group and key."""
        self.fresh: dict[Path, LeafSpec] = {}
        self.gone: list[Path] = []
        """Values whose leaves go."""
        self.writes: list[Write] = []
        self.beside: dict[Path, Path] = {}
        """Leaves that are replaced, and the names under which the new ones are written first.

        Only where the store cannot take a change back: there, the old leaf stays until the new one is whole.
        """
        self._added: dict[Path, tuple[int, list[bytes]]] = {}
        self._needs_compaction: list[Path] = []

    def keep(self, path: Path, entry: NonTensor) -> None:
        """Store a whole entry anew."""
        with pickling(self.handle.trusted):
            self.values.setdefault(path[:-1], {})[path[-1]], leaves = stored_value(entry, path)
        self.fresh.update(leaves)
        self.writes += [Write(leaf, (), entry._raw(leaf[-1]).detach().cpu()) for leaf in leaves]  # type: ignore[attr-defined]
        if path not in self.handle.specs and set(self.handle.leaves_below(path)) - set(leaves):
            self.gone.append(path)

    def nest(self, path: Path, tensor: Tensor) -> list[tuple[Path, Tensor]]:
        """Store a nested tensor anew: the leaves to be written."""
        self.values.setdefault(path[:-1], {})[path[-1]], parts = parts_of_nested(tensor)
        self.fresh.update({(*path, name): spec for name, spec in specs_of_nested(parts).items()})
        return [((*path, name), part) for name, part in parts.items()]

    def place(self, path: Path, values: Sequence[Any]) -> Tensor:
        """Add values to a column: their offsets `[n, 2]`, to be written by the caller."""
        text = (*path, TEXT)
        if text not in self._added:
            head = self.handle.store.read([Read(text, self._part(text, 0, HEAD))])[0]
            check_mark(head, self.handle, path)
            what = f"the values {path_text(path)} of {self.handle.store.url}"
            length = self.handle.store.specs([text])[0].shape[0]
            self._added[text] = (checked_end(head, length, what, self.handle.store.url), [])
        end, parts = self._added[text]
        with naming(path), pickling(self.handle.trusted):
            offsets, data = encode_rows(values, end + sum(map(len, parts)))
        parts.append(data)
        return torch.from_numpy(offsets)

    def rows(self, path: Path, start: int, entry: NonTensor) -> Write:
        """Add the values of rows from `start` on to a column: the write of their offsets."""
        leaf = column_leaves(path)[0]
        shape = torch.Size((entry.batch_size[0], *self.handle.specs[leaf].shape[1:]))
        offsets = self.place(path, spread_over(entry, shape[:-1])).reshape(shape)
        return Write(leaf, (slice(start, start + shape[0], 1),), offsets)

    def grown(self) -> list[Path]:
        """List the data leaves that values were added to."""
        return list(self._added)

    def _part(self, path: Path, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(start, stop, 1),) if Cap.PARTIAL_READ in self.handle.store.caps else ()

    def prepare(self, *, seal: bool = False) -> list[Write]:
        """Make leaves and room; what then is to be written.

        Args:
            seal: commit the room at once. Else a crash could cut it off below offsets that were written in place.
        """
        store = self.handle.store
        added = [w for path, (end, parts) in self._added.items() for w in self._add(path, end, b"".join(parts))]
        if seal and self._needs_compaction:
            self.handle.commit(self.handle.groups)
        if Cap.DISCARD not in store.caps:
            self.beside = {
                p: (*p[:-1], f"{p[-1]}.new-{secrets.token_hex(4)}") for p in self.fresh if p in self.handle.specs
            }
        if self.fresh:
            store.create({self.beside.get(path, path): spec for path, spec in self.fresh.items()})
        return added + self.writes

    def tidy(self) -> None:
        """Release, after the commit, what the data leaves that had to grow do not need."""
        give_back(self.handle, self._needs_compaction)

    def _add(self, path: Path, end: int, data: bytes) -> list[Write]:
        spec, store = self.handle.specs[path], self.handle.store
        if (Cap.RESIZE | Cap.PARTIAL_WRITE) in store.caps:
            if end + len(data) > spec.shape[0]:
                grow(self.handle, path, end + len(data))
                self._needs_compaction.append(path[:-1])
            return text_writes(path, end, data)
        whole = store.read([Read(path)])[0][:end].numpy().tobytes()
        head = (end + len(data)).to_bytes(8, "little") + whole[8:HEAD]
        text = torch.frombuffer(bytearray(head + whole[HEAD:] + data), dtype=torch.uint8)
        self._needs_compaction.append(path[:-1])
        self.fresh[path] = LeafSpec(text.shape, torch.uint8)
        return [Write(path, (), text)]


def give_back(handle: Any, paths: Sequence[Path]) -> None:
    """Pack columns anew of whose text few bytes are in use.

    Where leaves are live tensors others may hold them: there, it is done by `StoreHandle.close`.
    """
    if Cap.VIEW in handle.store.caps:
        handle.needs_compaction.update(paths)
    else:
        compact_columns(handle, paths)
