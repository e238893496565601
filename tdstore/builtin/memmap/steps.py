"""Commits that only add rows: a line behind the manifest, instead of a new manifest and new `meta.json` files."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection

import msgspec
import torch

from tdstore.builtin.memmap.layout import LeafFile
from tdstore.header import Group, Header
from tdstore.storekit import documents, files
from tdstore.storekit.checksums import EMPTY, Sums
from tdstore.storekit.documents import Growth
from tdstore.storekit.session import FileParts
from tdstore.types import Path

LOG_BYTES = 64 << 10
"""A log of more bytes, and longer than what it follows, is folded: the next commit writes the manifest anew."""


class Recorded(msgspec.Struct, frozen=True):
    """A leaf as the manifest has it."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype
    file: FileParts
    sums: Sums | None
    leaf: LeafFile


def plan_step(
    before: Header, header: Header, known: list[Recorded], leaves: Collection[LeafFile]
) -> tuple[list[tuple[Path, Group]], list[Growth]] | None:
    """Return the input of `documents.encode_step`, or None for a commit that changes more than rows and lengths.

    Args:
        before: the header of the manifest.
        header: the header to commit.
        known: the leaves of the manifest.
        leaves: the leaves to commit, with their checksums.
    """
    if list(before.groups) != list(header.groups) or len(known) != len(leaves):
        return None
    groups = []
    for path, group in header.groups.items():
        old = before.groups[path]
        if group != old:
            if msgspec.structs.replace(old, batch_size=group.batch_size) != group:
                return None
            groups.append((path, group))
    grown = []
    for at, (then, leaf) in enumerate(zip(known, leaves, strict=True)):
        if leaf is then.leaf and leaf.path == then.path and leaf.sums == then.sums and leaf.temp is None:
            continue
        if (leaf.path, leaf.dtype, leaf.file, leaf.temp) != (then.path, then.dtype, then.file, None):
            return None
        if leaf.packed or not leaf.file or not leaf.shape or leaf.shape[1:] != then.shape[1:]:
            return None
        if leaf.sums != then.sums or leaf.shape != then.shape:
            grown.append(_growth(at, then, leaf))
    return groups, grown


def _growth(at: int, then: Recorded, leaf: LeafFile) -> Growth:
    assert leaf.sums is not None
    old = then.sums or EMPTY
    leading = 0
    if old.block == leaf.sums.block:
        # The last block may be part of a block: it has another checksum once rows follow.
        whole = old.leading(then.shape.numel() * then.dtype.itemsize).crc
        leading = next((len(crc) for crc in (old.crc, whole) if leaf.sums.crc.startswith(crc)), 0)
    crc = base64.b64encode(leaf.sums.crc[leading:]).decode()
    block = 0 if old.block == leaf.sums.block else leaf.sums.block
    return Growth(at, leaf.shape[0], crc, leaf.sums.tips, leading // 4, block)


def has_room(raw: bytes, line: bytes) -> bool:
    """Check whether a line can be appended to a manifest: it has a log, which ends well and is short still."""
    start = documents.log_start(raw)
    fits = len(raw) + len(line) <= documents.MAX_FILE_BYTES and len(raw) - start <= max(LOG_BYTES, start)
    return start > 0 and raw.endswith(b"\n") and fits


def append_step(root: int, raw: bytes, line: bytes, *, sync: bool) -> None:
    """Append a line to the manifest; after a failure it is as before, unless cutting it fails as well.

    Args:
        root: descriptor of the folder.
        raw: the manifest; the caller has found that it is this one, and keeps others from committing.
        line: the output of `documents.encode_step`.
        sync: wait until it is on the storage.
    """
    fd = files.open_plain(documents.NAME, root, os.O_WRONLY)
    try:
        try:
            files.write_at(fd, memoryview(line), len(raw))
            if sync:
                files.fsync(fd)
        except BaseException:
            files.truncate(fd, len(raw))
            raise
    finally:
        os.close(fd)
