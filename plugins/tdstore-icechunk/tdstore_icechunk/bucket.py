"""Repositories in a bucket of S3, and the location that a text names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import icechunk
from tdstore_remote.options import for_obstore, split_settings
from tdstore_remote.urls import split_url

from tdstore.engine import Engine
from tdstore.errors import ConflictError, OptionError, StoreNotFoundError, UnsupportedError
from tdstore.registry import registry, split_scheme
from tdstore.storekit import refusals
from tdstore_icechunk.faults import icechunk_errors
from tdstore_icechunk.location import INITIAL, PARTS, REF, FolderLocation, Location


def location_of(text: str, options: Mapping[str, Any] | None, timeout: float) -> Location:
    """Return the location that a path or URL names.

    Raises:
        OptionError: there is no path. UnsupportedError: a scheme other than `s3`.
    """
    text = text.removeprefix("icechunk://")
    scheme, rest = split_scheme(text)
    if scheme in ("s3", "s3a"):
        return BucketLocation(text, options or {})
    if scheme not in ("", "file", "local"):
        raise UnsupportedError(
            f"{text}: the 'icechunk' backend reaches local folders and s3://, not {scheme}://",
            url=text,
            hint="save to s3://bucket/x.icechunk, or without the suffix: the object layout has versions, too",
        )
    if options:
        raise OptionError(f"{text}: a local folder has no option {next(iter(options))!r}", url=text)
    if not rest:
        raise OptionError("the 'icechunk' backend needs a location", hint="the name of a folder, 'data.icechunk'")
    return FolderLocation(os.path.realpath(os.path.expanduser(rest)), timeout)


class BucketLocation(Location):
    """A prefix in a bucket of S3, whose conditional puts serialize commits."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._options = dict(options)
        self._new = False

    def storage(self) -> icechunk.Storage:
        """Return icechunk's object for the prefix, by the options that the `remote` backend takes."""
        place = split_url(self.url)
        target = for_obstore(place.scheme, split_settings(self._options, self.url)[1], self.url)
        config, env = dict(target.config), os.environ.get
        endpoint = config.pop("endpoint", None) or env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
        region = config.pop("region", None) or env("AWS_REGION") or env("AWS_DEFAULT_REGION")
        virtual = config.pop("virtual_hosted_style_request", endpoint is None)
        arguments: dict[str, Any] = {
            "access_key_id": config.pop("access_key_id", None),
            "secret_access_key": config.pop("secret_access_key", None),
            "session_token": config.pop("session_token", config.pop("token", None)),
            "anonymous": config.pop("skip_signature", None),
            "requester_pays": bool(config.pop("request_payer", False)),
        }
        if config or target.profile or set(target.client) - {"allow_http"}:
            name = next(iter([*config, *target.client, "profile"]))
            raise OptionError(f"{self.url}: icechunk has no storage option {name!r}", url=self.url)
        if arguments["access_key_id"] is None and not arguments["anonymous"]:
            arguments["from_env"] = True
        return icechunk.s3_storage(
            bucket=place.bucket,
            prefix=place.prefix,
            region=region,
            endpoint_url=endpoint,
            allow_http=bool(target.client.get("allow_http")) or (endpoint or "").startswith("http:"),
            force_path_style=str(virtual).lower() in ("false", "0"),
            **arguments,
        )

    def begin(self) -> icechunk.Repository:
        """Create a repository at the location; without a commit of tdstore, there is nothing to open."""
        with self.engine() as engine:  # there is no branch: remains of a removal, beside which icechunk makes none
            engine.delete(own_keys(engine, self.url))
        with icechunk_errors(self.url, "making"):
            repo = icechunk.Repository.create(self.storage())
        self._new = True
        return repo

    def publish(self, *, replace: bool) -> icechunk.Repository | None:
        """Keep it."""
        self._new = False
        return None

    def give_up(self) -> None:
        """Remove a repository that this writer created, unless another one has committed to it."""
        if self._new:
            self._new = False
            with self.engine() as engine, suppress(StoreNotFoundError):  # another one removed it
                remove_objects(engine, only_if_empty=True)

    def engine(self) -> Engine:
        """Return an engine at the prefix."""
        return registry().engine(self.url, self._options)


def own_keys(engine: Engine, url: str) -> list[str]:
    """Return the names of all objects, which must be those of a repository.

    Raises:
        StoreExistsError: there are others.
    """
    keys = [entry.key for entry in engine.list()]
    strange = sorted(key for key in keys if key.partition("/")[0] not in PARTS)
    if strange:
        raise refusals.foreign_files(url, strange, "an icechunk repository")
    return keys


def remove_objects(engine: Engine, *, only_if_empty: bool = False) -> None:
    """Remove a repository from a bucket: its branch first, so that nobody can open it or commit to it.

    Args:
        engine: an engine at the root of the repository.
        only_if_empty: do nothing if there was a commit.
    """
    blob = engine.get(REF)
    if only_if_empty and INITIAL.encode() not in bytes(blob.data):
        return
    if engine.conditional():
        # Another writer of the place compares the snapshot before it commits, and finds one that never was.
        try:
            engine.put(REF, b'{"snapshot":"00000000000000000000"}', if_match=blob.tag)
        except ConflictError:
            if only_if_empty:
                return
            raise
    keys = [entry.key for entry in engine.list()]
    engine.delete([REF])
    engine.delete([key for key in keys if key != REF])
