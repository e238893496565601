"""Versions: snapshots that the metadata of the last commit lists, and the branches and tags that hold them.

Each commit records in its metadata which snapshots before it are versions, and whether it is one itself, so a commit
and its version are one step. Refs of the repository hold them:

=================================== ====================================================================
branch `tdstore.tag.NAME`           a tag of tdstore: tags of icechunk never move, and their names are used once
tag `tdstore.version.ID`            a version whose place in the history was, or may be, dropped by `prune`
branch `tdstore.dropped.TIME.ID`    a dropped version, whose readers go on until then (seconds since the epoch)
=================================== ====================================================================
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

import icechunk

from tdstore.errors import CorruptStoreError, InvalidArgumentError
from tdstore.header import Header
from tdstore.storekit import refusals
from tdstore.types import Version
from tdstore_icechunk.faults import icechunk_errors
from tdstore_icechunk.location import INITIAL, Location

KEY, MAIN = "tdstore", "main"
TAG, HOLD, DROPPED = "tdstore.tag.", "tdstore.version.", "tdstore.dropped."
MAX_TAG = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Record = tuple[str, int, str, int | None, int]
"""Of a version: its snapshot, microseconds since the epoch, message, rows, new bytes."""


# -- the metadata of a commit ---------------------------------------------------------------
def following(
    before: Mapping[str, Any], base: str, version: tuple[str, Header] | None, nbytes: int, dropped: Collection[str]
) -> dict[str, Any]:
    """Return the metadata of a commit.

    Args:
        before: the metadata of the previous commit.
        base: the snapshot of that commit.
        version: message and header, if the commit is a version.
        nbytes: bytes that it put.
        dropped: versions that were dropped.
    """
    old = before.get(KEY, {})
    records = [record for record in _records(before, base) if record[0] not in dropped]
    found = {"versions": records, "version": None, "pending": old.get("pending", 0) + nbytes}
    if version is not None:
        message, header = version
        root = header.groups.get(())
        batch = None if root is None else root.batch_size
        moment = max(int(time.time() * 1_000_000), records[-1][1] + 1 if records else 0)
        found["version"] = [moment, message, batch[0] if batch else None, found["pending"]]
        found["pending"] = 0
    return {KEY: found}


def _records(metadata: Mapping[str, Any], snapshot: str) -> list[Record]:
    try:
        found = metadata.get(KEY) or {}
        records = [(str(i), int(t), str(m), r, int(n)) for i, t, m, r, n in found.get("versions", [])]
        if found.get("version"):
            moment, message, rows, new = found["version"]
            records.append((snapshot, int(moment), str(message), rows, int(new)))
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptStoreError(f"the metadata of the snapshot {snapshot} is malformed: {error}") from error
    return records


# -- the refs of a repository ---------------------------------------------------------------
def dropped_in(repo: icechunk.Repository) -> dict[str, tuple[str, int]]:
    """Return the versions that were dropped: the branch of each, and how long its readers can go on."""
    found = {}
    for branch in repo.list_branches():
        if branch.startswith(DROPPED):
            deadline, _, version = branch.removeprefix(DROPPED).partition(".")
            found[version] = branch, int(deadline)
    return found


def versions_of(repo: icechunk.Repository, url: str) -> list[Version]:
    """List the versions, oldest first."""
    with icechunk_errors(url, "looking at"):
        tip = repo.lookup_branch(MAIN)
        records = _records(repo.lookup_snapshot(tip).metadata, tip)
        if not records:
            return []
        dropped = dropped_in(repo)
        tags: dict[str, list[str]] = {}
        for name, snapshot in _tags(repo):
            tags.setdefault(snapshot, []).append(name)
    return [
        Version(id, _EPOCH + timedelta(microseconds=moment), message, tuple(sorted(tags.get(id, []))), rows, new)
        for id, moment, message, rows, new in records
        if id not in dropped
    ]


def _tags(repo: icechunk.Repository) -> Iterator[tuple[str, str]]:
    """Yield the tags of tdstore, and those that were made with icechunk itself, with their snapshots."""
    for branch in repo.list_branches():
        if branch.startswith(TAG):
            yield unquote(branch.removeprefix(TAG).replace("=", "%")), repo.lookup_branch(branch)
    for tag in repo.list_tags():
        if not tag.startswith(HOLD):
            yield tag, repo.lookup_tag(tag)


def set_tag(repo: icechunk.Repository, url: str, name: str, version: str | None) -> None:
    """Give a tag to a version, and remove it from any other; None only removes it."""
    branch = TAG + quote(name, safe=" ").replace("%", "=")
    if len(branch) > MAX_TAG:
        raise InvalidArgumentError(f"{url}: the tag {name[:40]!r}... is too long for the name of a branch")
    if version is not None and version not in {v.id for v in versions_of(repo, url)}:
        raise refusals.no_version(url, version)
    with icechunk_errors(url, "tagging a version of"):
        if name in repo.list_tags():
            repo.delete_tag(name)
        there = branch in repo.list_branches()
        if version is None:
            if there:
                repo.delete_branch(branch)
        elif there:
            repo.reset_branch(branch, version)
        else:
            repo.create_branch(branch, version)


def drop_versions(repo: icechunk.Repository, location: Location, versions: Collection[str], grace: float) -> list[str]:
    """Drop versions, and remove what nobody can read any more, of these and of the history between them.

    Args:
        repo: the repository.
        location: where it is.
        versions: the snapshots; those with a tag stay.
        grace: seconds for which their readers, and those of earlier commits, go on.
    """
    url = location.url
    found = versions_of(repo, url)
    doomed = [v.id for v in found if v.id in versions and not v.tags]
    with icechunk_errors(url, "dropping versions of"):
        held = {tag.removeprefix(HOLD) for tag in repo.list_tags() if tag.startswith(HOLD)}
        for version in found:
            if version.id not in doomed and version.id not in held:
                repo.create_tag(HOLD + version.id, version.id)
        now = time.time()
        for id in doomed:
            repo.create_branch(f"{DROPPED}{math.ceil(now + grace) if grace else int(now)}.{id}", id)
        for id in held.intersection(dropped := dropped_in(repo)):
            repo.delete_tag(HOLD + id)
        tip = repo.lookup_branch(MAIN)
        listed = {record[0] for record in _records(repo.lookup_snapshot(tip).metadata, tip)}
        for id, (branch, deadline) in dropped.items():
            if deadline <= now:
                # The last commit lists it still: the branch says that it was dropped, and holds nothing.
                repo.reset_branch(branch, INITIAL) if id in listed else repo.delete_branch(branch)
        _collect(repo, location, grace)
    return doomed


def _collect(repo: icechunk.Repository, location: Location, grace: float) -> None:
    """Forget commits that were replaced more than `grace` seconds ago, and remove what no snapshot names."""
    limit = datetime.now(UTC) - timedelta(seconds=grace)
    replaced = datetime.max.replace(tzinfo=UTC)
    for snapshot in repo.ancestry(branch=MAIN):
        if replaced <= limit:
            repo.expire_snapshots(snapshot.written_at + timedelta(microseconds=1))
            break
        replaced = snapshot.written_at
    repo.garbage_collect(location.collectable(grace))
