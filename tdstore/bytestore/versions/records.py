"""What a commit, a new version, a tag and a prune change in the list of versions of a manifest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from tdstore.bytestore.manifest import Document, Held, ObjectRecord, Retired, RetiredList, VersionRecord, version_name
from tdstore.types import Version

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def following(
    document: Document, before: Document | None, *, keep_old: float, now: float
) -> tuple[Document, list[str]]:
    """Give a new generation the versions of the one before, and what that needed and this does not.

    Args:
        document: the new generation.
        before: the generation that it replaces.
        keep_old: seconds for which objects stay that only older generations need.
        now: the time, in seconds since the epoch.

    Returns:
        The new generation, and the names of objects that may be removed once it is published.
    """
    if before is None:
        return document, []
    used = {record.name for record in document.objects}
    versioned = {record.name for record in before.objects if record.versioned} | {held.name for held in before.held}
    gone = [record for record in before.objects if record.name not in used]
    held = [item for item in before.held if item.name not in used]
    held += [Held(record.name, record.size) for record in gone if record.versioned]
    old = [Retired(record.name, record.size, int(now)) for record in gone if not record.versioned]
    retired = RetiredList.of(before.retired).without(used).plus(old)
    retired, expired = split_expired(retired, keep_old=keep_old, now=now)
    objects = _flagged(document.objects, versioned) if versioned else document.objects
    return msgspec.structs.replace(
        document, objects=objects, versions=before.versions, held=held, retired=retired
    ), expired


def split_expired(old: Sequence[Retired], *, keep_old: float, now: float) -> tuple[RetiredList, list[str]]:
    """Separate retired objects that stay from the names of those whose time has come."""
    moment = int(now)
    old = RetiredList.of(old)
    if not old.is_due(keep_old, moment):
        return old, []
    stays = [item.since + (item.stay if item.stay >= 0 else keep_old) > moment for item in old]
    unexpired = [item for item, stay in zip(old, stays, strict=True) if stay]
    return RetiredList.of(unexpired), [item.name for item, stay in zip(old, stays, strict=True) if not stay]


def with_version(document: Document, message: str, *, now: float) -> Document:
    """Make a generation a version: add its record, and mark all its objects."""
    last = document.versions[-1].time if document.versions else 0
    group = document.header.groups.get(())
    batch = None if group is None else group.batch_size
    record = VersionRecord(
        document.generation,
        max(int(now * 1_000_000), last + 1),
        message,
        batch[0] if batch else -1,
        sum(item.size for item in document.objects if not item.versioned),
    )
    names = {item.name for item in document.objects}
    return msgspec.structs.replace(
        document, objects=_flagged(document.objects, names), versions=[*document.versions, record]
    )


def alone(document: Document) -> Document:
    """Return the manifest of a version: without versions, and without objects that it does not need."""
    return msgspec.structs.replace(document, objects=_flagged(document.objects, ()), versions=(), held=(), retired=())


def with_tag(document: Document, tag: str, version: str | None) -> Document:
    """Give a tag to a version, and take it from any other; None only takes it."""
    versions = []
    for record in document.versions:
        tags = tuple(name for name in record.tags if name != tag)
        versions.append(msgspec.structs.replace(record, tags=(*tags, tag) if record.id == version else tags))
    return msgspec.structs.replace(document, versions=versions)


def without_versions(
    document: Document, dropped: Collection[str], named: Collection[str], *, grace: float, now: float
) -> Document:
    """Drop versions, and retire what only they need.

    Args:
        document: the manifest.
        dropped: the ids.
        named: the objects that the other versions name.
        grace: seconds for which the versions can be read by those who opened them.
        now: the time, in seconds since the epoch.
    """
    moment, stay = int(now), int(grace)
    retired = list(document.retired)
    retired += [Retired(item.name, item.size, moment, stay) for item in document.held if item.name not in named]
    retired += [Retired(version_name(version), 0, moment, stay) for version in dropped]
    return msgspec.structs.replace(
        document,
        objects=_flagged(document.objects, named),
        versions=[record for record in document.versions if record.id not in dropped],
        held=[item for item in document.held if item.name in named],
        retired=retired,
    )


def to_version(record: VersionRecord) -> Version:
    """Convert a record to what callers see."""
    time = _EPOCH + timedelta(microseconds=record.time)
    rows = None if record.rows < 0 else record.rows
    return Version(record.id, time, record.message, record.tags, rows, record.added)


def _flagged(objects: Sequence[ObjectRecord], versioned: Collection[str]) -> list[ObjectRecord]:
    return [
        record
        if record.versioned == (record.name in versioned)
        else msgspec.structs.replace(record, versioned=record.name in versioned)
        for record in objects
    ]
