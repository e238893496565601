"""Locations of the backends over local files: memmap and tdz."""

from __future__ import annotations

import os
import re

from tdstore.errors import OptionError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")


def local_place(location: str, backend: str, what: str, *, new: bool = False) -> str:
    """Return the absolute name of a local file or folder, without the scheme of its backend.

    Args:
        location: a path, perhaps with the scheme `backend://`.
        backend: the name of the backend.
        what: "folder" or "file".
        new: it is made by a `storekit.publish.Site`, which finds the name of the folder above it without links.

    Raises:
        OptionError: a location with another scheme, or one without a name.
    """
    text = location.removeprefix(f"{backend}://")
    scheme = _SCHEME.match(text)
    if scheme is not None:
        raise OptionError(
            f"the {backend} backend supports local {what}s only, and {location!r} names {scheme[1]!r}",
            url=location,
            hint="tdstore.backends() lists which backends take this scheme",
        )
    if not text or "\0" in text:
        raise OptionError(
            f"{location!r} is not the name of a {what}", url=location, hint=f"the {backend} backend needs a local one"
        )
    name = text if text.startswith("/") else os.path.abspath(text)
    if os.pardir in text:
        return os.path.realpath(text)
    # Another name is that of a link, or one that a writer gave meanwhile to what it replaced and will remove.
    if not new and _is_real(name):
        return name
    folder, _, last = name.rpartition("/")
    plain = last not in ("", ".") and not os.path.islink(name) and (new or _is_real(folder))
    return name if plain else os.path.realpath(text)


def _is_real(name: str) -> bool:
    """Check whether something is there, and this is its name without links; False if that cannot be told."""
    try:
        fd = os.open(name, _BY_NAME)
    except OSError:
        return False
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == name
    except OSError:
        return False  # another system than Linux, or one without /proc
    finally:
        os.close(fd)


_BY_NAME = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
