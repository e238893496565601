"""The files of a memmap dataset: a save replaces all of them, and never a file of another program."""

from __future__ import annotations

import json
import os
from operator import attrgetter

from tdstore.builtin.memmap.opening import MAX_MANIFEST
from tdstore.builtin.memmap.tensordict_layout import META, tensordict_members
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.storekit import documents, files, refusals, session
from tdstore.storekit.publish import Site
from tdstore.storekit.session import FileParts

_MANIFEST = documents.SealedDocument(documents.Manifest, {b'"nbytes":': (documents.MAX_LEAVES, "leaves")})
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
        try:
            known = self._known(root)
        except FileNotFoundError:
            names = os.listdir(root)
            if META in names and _is_tensordict_meta(root):
                return tensordict_members(root, self.url, _ours_anywhere)
            return sorted(names)
        found: list[FileParts] = []
        with os.scandir(root) as entries:  # listed after that: what a commit adds has been noted by then
            rest = [e for e in entries if (e.name,) not in known]
        if not rest:
            return []
        for entry in rest:
            if not entry.is_dir(follow_symlinks=False):
                found.append((entry.name,))
                continue
            with files.closing(os.open(entry.name, files.SAFE_DIR, dir_fd=root)) as fd:
                found += [parts for parts, is_dir in files.walk(fd, (entry.name,)) if not is_dir]
        # Folders of groups without leaves, and of values, hold only tensordict's description.
        folders = {file[:depth] for file in known if len(file) > 1 for depth in range(1, len(file))}
        return ["/".join(p) for p in found if p not in known and not _ours_anywhere(p) and p not in folders]

    def _known(self, root: int) -> frozenset[FileParts]:
        """Return the files of leaves, as of the last commit, and of one that is under way; and those beside them."""
        try:
            raw = files.read_small(documents.NAME, root, MAX_MANIFEST)
            if raw != self._raw:
                self._raw, self._named = raw, _named_files(raw, self.url)
        except CorruptStoreError as error:
            message = files.with_url(error, self.url).message
            raise refusals.damaged_place(self.url, message) from error
        log = session.read_log(root)
        return self._named.union(log.files) if log is not None and log.files else self._named


def _named_files(raw: bytes, url: str) -> frozenset[FileParts]:
    """Return the files that a manifest names. Whether its leaves are sound matters to those that read them."""
    if raw.startswith(documents.LOGGED) or documents.is_objects(body := _MANIFEST.body(raw, url=url)):
        leaves = documents.decode_manifest(raw, url=url)[0].leaves
    else:
        leaves = _MANIFEST.decode_body(body, url=url).leaves
    return frozenset([*_BESIDE, *map(_FILE, leaves)])


_FILE = attrgetter("file")
_BESIDE = ((documents.NAME,), (session.NAME,), (META,))
"""The files of the root folder that hold no leaf."""


def _ours_anywhere(parts: FileParts) -> bool:
    return parts[-1] == META or parts in _BESIDE or files.is_temp(parts[-1])


def _is_tensordict_meta(root: int) -> bool:
    try:
        meta = json.loads(files.read_small(META, root, MAX_MANIFEST))
    except (OSError, StoreError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and "_type" in meta
