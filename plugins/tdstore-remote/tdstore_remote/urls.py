"""Parsing of URLs: the store, the folder in it, and the part that messages may show."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from tdstore.errors import OptionError
from tdstore_remote.options import AZURE, HTTP

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


class Place(NamedTuple):
    """A URL of an object store."""

    scheme: str
    bucket: str
    """Bucket or container; scheme and host for http."""
    prefix: str
    """Below it, without slashes around."""
    account: str | None = None
    """Azure's `container@account.host`."""


def scheme_of(url: str) -> str:
    """Return the first scheme of a URL: the protocol of `a::b` is `a`."""
    first = url.partition("::")[0] if "::" in url else url.partition("://")[0] if "://" in url else ""
    scheme = first.partition("://")[0].lower()
    return scheme if _SCHEME.fullmatch(scheme) else ""


def split_url(url: str) -> Place:
    """Split a URL of an object store.

    Raises:
        OptionError: it names no bucket.
    """
    scheme = scheme_of(url)
    if scheme in HTTP:
        parts = urlsplit(url)
        if not parts.hostname:
            raise OptionError(f"{shown(url)} names no host", url=shown(url))
        return Place(scheme, f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))
    bucket, _, prefix = url.partition("://")[2].partition("/")
    account = None
    if scheme in AZURE and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if not bucket:
        raise OptionError(f"{url} names no bucket", url=url, hint=f"{scheme}://bucket/folder")
    return Place(scheme, bucket, prefix.strip("/"), account)


def shown(url: str) -> str:
    """Return the URL for messages: no user, no password, no query, which may be a signature."""
    return "::".join(map(_shown, url.split("::")))


def _shown(url: str) -> str:
    if "://" not in url:
        return url
    scheme = url.partition("://")[0].lower()
    if scheme in HTTP or "@" in url.partition("://")[2].partition("/")[0]:
        try:
            parts = urlsplit(url)
        except ValueError:
            return url.partition("@")[2] or url
        if scheme in AZURE:
            return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        netloc = parts.netloc.rpartition("@")[2]
        query = "..." if parts.query else ""
        return urlunsplit((parts.scheme, netloc, parts.path, query, ""))
    return url


def last_name(url: str) -> str:
    """Return the last name of a URL's path, which may have the suffix of a format; "" if there is none."""
    for part in url.split("::"):
        if "://" in part:
            path = part.partition("://")[2]
            scheme = part.partition("://")[0].lower()
            if scheme in HTTP:
                path = urlsplit(part).path
            name = path.rstrip("/").rpartition("/")[2]
            if name:
                return name
    return ""
