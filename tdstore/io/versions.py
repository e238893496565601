"""Versions of a dataset, that is, states that never change: list, tag, open and prune them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import NoneType
from typing import Any

from tdstore.arguments import refuse_type
from tdstore.errors import InvalidArgumentError, InvalidTypeError, OptionError, StoreNotFoundError
from tdstore.io.opening import Location, Storage, find_backend, open_store
from tdstore.store import Cap, Store
from tdstore.storekit import refusals
from tdstore.types import MAX_TEXT, Mode, Version

GRACE = 3600.0
"""Seconds for which the readers of a pruned version go on."""
PINS = frozenset(("version", "tag", "at"))
"""Options of opening that name a version."""


def versions(location: Location, *, storage: Storage = None, **options: Any) -> list[Version]:
    """List the versions of a dataset, oldest first.

    Args:
        location: a path or URL.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Returns:
        A `Version` for each: its id, time, message, tags, number of rows, and the bytes that it took.

    Raises:
        StoreNotFoundError: there is no dataset at the location.
        UnsupportedError: the backend has no versions.

    Example:
        >>> td = TensorDict({"a": torch.arange(3)}, [3]).save("file://runs/1")
        >>> td.commit(message="three rows").close()
        >>> [(v.message, v.rows) for v in tdstore.versions("file://runs/1")]
        [('three rows', 3)]
    """
    with _opened(location, storage, "r", options) as store:
        return store.versions()


def tag(
    location: Location, name: str, version: str | Version | None = None, *, storage: Storage = None, **options: Any
) -> None:
    """Give a tag to a version, and remove it from any other version that has it. `prune` never drops tagged versions.

    Writers that have the dataset open are not disturbed.

    Args:
        location: a path or URL.
        name: the tag, 1 to 65,536 characters.
        version: the id of the version. Default: the newest.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError: there is no dataset at the location, or no such version.
        UnsupportedError: the backend has no versions.

    Example:
        >>> td = TensorDict({"a": torch.arange(3)}, [3]).save("file://runs/1")
        >>> td.commit(message="three rows").close()
        >>> tdstore.tag("file://runs/1", "published")
        >>> tdstore.open("file://runs/1", tag="published")["a"].tolist()
        [0, 1, 2]
    """
    _check_tag(name)
    with _opened(location, storage, "r+", options) as store:
        chosen = version.id if isinstance(version, Version) else version
        if not isinstance(chosen, (str, NoneType)):
            raise refuse_type("version", "the id of a version, a string", chosen)
        if chosen is None:
            found = store.versions()
            if not found:
                raise StoreNotFoundError(
                    f"{store.url} has no version to be tagged", url=store.url, hint="td.commit(message=...) makes one"
                )
            chosen = found[-1].id
        store.set_tag(name, chosen)


def untag(location: Location, name: str, *, storage: Storage = None, **options: Any) -> None:
    """Remove a tag. The version stays until it is pruned.

    Args:
        location: a path or URL.
        name: the tag; it is not an error if no version has it.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError: there is no dataset at the location.
        UnsupportedError: the backend has no versions.

    Example:
        >>> td = TensorDict({"a": torch.arange(3)}, [3]).save("file://runs/1")
        >>> td.commit(message="three rows").close()
        >>> tdstore.tag("file://runs/1", "draft")
        >>> tdstore.untag("file://runs/1", "draft")
        >>> tdstore.versions("file://runs/1")[0].tags
        ()
    """
    _check_tag(name)
    with _opened(location, storage, "r+", options) as store:
        store.set_tag(name, None)


def prune(
    location: Location,
    *,
    keep: int | None = None,
    older_than: float | timedelta | None = None,
    grace: float | timedelta = GRACE,
    storage: Storage = None,
    **options: Any,
) -> list[Version]:
    """Drop versions, and free the bytes that only they need.

    Versions that have a tag stay. A reader that opened a dropped version can go on for `grace`; data that only this
    version needs is removed by the next `prune` after that, or by a later commit. A `prune` that is killed leaves every
    other version readable.

    Args:
        location: a path or URL.
        keep: the number of newest versions that stay.
        older_than: versions younger than this stay; seconds or a `timedelta`. With `keep`, a version is dropped if
            both allow it. Without either, no version is dropped, and only data of versions dropped earlier is removed.
        grace: how long the data of dropped versions stays; seconds or a `timedelta`.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Returns:
        The versions that were dropped.

    Raises:
        InvalidArgumentError: a negative number.
        StoreNotFoundError: there is no dataset at the location.
        UnsupportedError: the backend has no versions.

    Example:
        >>> with TensorDict({"a": torch.zeros(3)}, [3]).save("file://runs/1") as td:
        ...     for i in range(3):
        ...         td["a"][0] = i
        ...         _ = td.commit(message=f"step {i}")
        >>> [v.message for v in tdstore.prune("file://runs/1", keep=1, grace=0)]
        ['step 0', 'step 1']
    """
    count, age, stay = _limits(keep, older_than, grace)
    with _opened(location, storage, "r+", options) as store:
        found = store.versions() if count is not None or age is not None else []
        limit = None if age is None else datetime.now(UTC) - timedelta(seconds=age)
        candidates = found[: max(len(found) - (count or 0), 0)]
        doomed = [v for v in candidates if not v.tags and (limit is None or v.time <= limit)]
        dropped = set(store.drop_versions([v.id for v in doomed], stay))
        return [v for v in doomed if v.id in dropped]


def pinned(location: Location, storage: Storage, mode: Mode, options: dict[str, Any]) -> dict[str, Any]:
    """Resolve the options `version=`, `tag=` and `at=` of opening to the option `version` of the backend.

    Returns:
        The options, without these three if each of them is None.

    Raises:
        UnsupportedError: the backend has no versions.
        StoreNotFoundError: no version fits.
        OptionError: more than one of the three.
        ReadOnlyError: the mode is not "r".
    """
    pins = {name: options[name] for name in PINS if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in PINS}
    if not pins:
        return rest
    if len(pins) > 1:
        raise OptionError(f"{location}: a version is opened by one of {', '.join(pins)}, not by several")
    (name, value), *_ = pins.items()
    backend, text = find_backend(location, storage, mode)
    place = str(text if location is None else os.fspath(location))
    if Cap.VERSIONS not in backend.caps:
        raise refusals.no_versions(place, f"the {backend.name!r} backend has none")
    if mode != "r":
        raise refusals.version_read_only(place, str(value))
    if name == "version":
        value = value.id if isinstance(value, Version) else value
        if not isinstance(value, str):
            raise InvalidTypeError(
                f"the id of a version is a string, not a {type(value).__name__}",
                hint="tdstore.versions(location) lists the versions",
            )
        return {**rest, "version": value}
    with _opened(location, storage, "r", rest) as store:
        found = store.versions()
    return {**rest, "version": _tagged(found, value, place) if name == "tag" else _at(found, value, place)}


def _tagged(found: Sequence[Version], name: str, place: str) -> str:
    _check_tag(name)
    for version in found:
        if name in version.tags:
            return version.id
    tags = sorted(tag for version in found for tag in version.tags)
    raise StoreNotFoundError(
        f"{place} has no version with the tag {name!r}",
        url=place,
        hint=f"its tags are {', '.join(map(repr, tags[:20]))}" if tags else "tdstore.tag(location, name) sets one",
    )


def _at(found: Sequence[Version], moment: datetime, place: str) -> str:
    if not isinstance(moment, datetime):
        raise InvalidTypeError(f"at= takes a datetime, not a {type(moment).__name__}")
    before = [version for version in found if version.time <= moment.astimezone(UTC)]
    if not before:
        first = f"its first is of {found[0].time.isoformat()}" if found else "it has none"
        raise StoreNotFoundError(
            f"{place} has no version as old as {moment.isoformat()}: {first}",
            url=place,
            hint="tdstore.versions(location) lists them",
        )
    return before[-1].id


def _opened(location: Location, storage: Storage, mode: Mode, options: Mapping[str, Any]) -> Store:
    """Open a store with versions."""
    store, backend = open_store(location, storage=storage, mode=mode, **options)
    if Cap.VERSIONS not in store.caps:
        store.close()
        raise refusals.no_versions(store.url, f"the {backend.name!r} backend has none there")
    return store


def _check_tag(name: str) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a tag is a string, not a {type(name).__name__}")
    if not 1 <= len(name) <= MAX_TEXT:
        raise InvalidArgumentError(f"a tag has 1 to {MAX_TEXT} characters, not {len(name)}")


def _limits(
    keep: int | None, older_than: float | timedelta | None, grace: float | timedelta
) -> tuple[int | None, float | None, float]:
    seconds = [v.total_seconds() if isinstance(v, timedelta) else v for v in (older_than, grace)]
    for name, value in (("keep", keep), ("older_than", seconds[0]), ("grace", seconds[1])):
        if not isinstance(value, int if name == "keep" else (int, float)) and value is not None:
            raise refuse_type(f"prune: {name}", "an int" if name == "keep" else "a number of seconds", value)
        if value is not None and not 0 <= value < 2**60:
            raise InvalidArgumentError(f"prune: {name} must not be negative or over 2**60, and is {value}")
    return keep, seconds[0], seconds[1] or 0.0
