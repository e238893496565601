"""The files of a memmap dataset: a save replaces all of them, and never a file of another program."""

from __future__ import annotations

import json
import os

from tdstore.builtin.memmap.opening import MAX_MANIFEST
from tdstore.builtin.memmap.tensordict_layout import META, tensordict_members
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.storekit import documents, files, refusals, session
from tdstore.storekit.publish import Site
from tdstore.storekit.session import FileParts

FIRST = (META, documents.NAME)
"""Files that mark a folder as a dataset."""


def build_site(location: str, *, timeout: float) -> Site:
    """Begin a folder beside `location`."""
    return Site(location, url=location, timeout=timeout, foreign=_ForeignFiles(location), first=FIRST)


class _ForeignFiles:
    """The files of a folder that do not belong to the dataset in it; all of them if there is no dataset.

    A save asks twice, when it begins and before it swaps: a manifest that is the same is decoded once.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._raw = b""
        self._named: frozenset[FileParts] = frozenset()

    def __call__(self, root: int) -> list[str]:
        names = os.listdir(root)
        if documents.NAME in names:
            return self._not_ours(root)
        if META in names and _is_tensordict_meta(root):
            return tensordict_members(root, self.url, _ours_anywhere)
        return sorted(names)

    def _not_ours(self, root: int) -> list[str]:
        try:
            raw = files.read_small(documents.NAME, root, MAX_MANIFEST)
            if raw != self._raw:
                found, _ = documents.decode_manifest(raw, url=self.url)
                self._raw, self._named = raw, frozenset(leaf.file for leaf in found.leaves)
        except CorruptStoreError as error:
            message = files.with_url(error, self.url).message
            raise refusals.damaged_place(self.url, message) from error
        log = session.read_log(root)
        known = self._named if log is None else self._named.union(log.files)
        folders = {file[:depth] for file in known for depth in range(1, len(file))}
        # Folders of groups without leaves, and of values, hold only tensordict's description.
        return [
            "/".join(parts)
            for parts, is_dir in files.walk(root)
            if not is_dir and parts not in known and not _ours_anywhere(parts) and parts not in folders
        ]


def _ours_anywhere(parts: FileParts) -> bool:
    name = parts[-1]
    if len(parts) == 1 and (name in (documents.NAME, session.NAME) or files.is_temp(name)):
        return True
    return name == META or files.is_temp(name)


def _is_tensordict_meta(root: int) -> bool:
    try:
        meta = json.loads(files.read_small(META, root, MAX_MANIFEST))
    except (OSError, StoreError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and "_type" in meta
