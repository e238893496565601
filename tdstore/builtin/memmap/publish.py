"""The files of a memmap dataset: a save replaces all of them, and never a file of another program."""

from __future__ import annotations

import json
import os
from functools import partial

from tdstore.builtin.memmap.opening import MAX_MANIFEST, read_contents
from tdstore.builtin.memmap.tensordict_layout import META, tensordict_members
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.storekit import documents, files, refusals, session
from tdstore.storekit.publish import Site
from tdstore.storekit.session import FileParts

FIRST = (META, documents.NAME)
"""Files that mark a folder as a dataset."""


def build_site(location: str, *, timeout: float) -> Site:
    """Begin a folder beside `location`."""
    foreign = partial(_foreign_files, url=location)
    return Site(location, url=location, timeout=timeout, foreign=foreign, first=FIRST)


def _foreign_files(root: int, url: str) -> list[str]:
    """Return the files of a folder that do not belong to the dataset in it; all of them if there is no dataset."""
    names = os.listdir(root)
    if documents.NAME in names:
        return _not_ours(root, url)
    if META in names and _is_tensordict_meta(root):
        return tensordict_members(root, url, _ours_anywhere)
    return sorted(names)


def _not_ours(root: int, url: str) -> list[str]:
    try:
        contents = read_contents(root, url)
    except CorruptStoreError as error:
        raise refusals.damaged_place(url, error.message) from error
    known = {leaf.file for leaf in contents.leaves}
    log = session.read_log(root)
    if log is not None:
        known |= set(log.files)
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
