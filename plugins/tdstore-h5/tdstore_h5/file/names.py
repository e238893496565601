"""Keys as HDF5 link names: plain keys are unchanged, the rest is percent-encoded, reversibly.

HDF5 reads `/` as a separator and `.` as "here", and ends a name at NUL. All other characters may occur in a link name.
"""

from __future__ import annotations

import re

from tdstore.errors import OptionError
from tdstore.types import Path, path_text

MAX_NAME = 32 << 10
MAX_PLAIN = MAX_NAME // 4
"""Links of up to so many bytes, without "%" and not of dots alone, are their own keys."""
EMPTY = "%"
_SPECIAL = re.compile(r"[%/\x00]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")


def encode_key(key: str) -> str:
    """Return the link name of a key: `"a/b"` -> `"a%2Fb"`, `""` -> `"%"`, `"."` -> `"%2E"`, `"obs.x"` unchanged.

    Raises:
        OptionError: a lone surrogate, or longer than 32 KiB.
    """
    if not key:
        return EMPTY
    if key.strip(".") == "":
        return "%2E" * len(key)
    name = _SPECIAL.sub(lambda m: f"%{ord(m[0]):02X}", key)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise OptionError(
            f"the key {key!r} has a lone surrogate, which HDF5 cannot name", hint="rename the key"
        ) from None
    if size > MAX_NAME:
        raise OptionError(f"a key of {size} bytes is too long for HDF5 (at most {MAX_NAME}): {key[:60]!r}...")
    return name


def decode_name(name: str) -> str:
    """Return the key of a link name. A name that `encode_key` never returns (another program's) is its own key."""
    key = "" if name == EMPTY else _ESCAPE.sub(lambda m: chr(int(m[1], 16)), name)
    return key if len(name) <= MAX_NAME and encode_key(key) == name else name


def encode_path(path: Path) -> str:
    """Return the HDF5 name of a path, from the root."""
    if not path:
        raise OptionError("the root of an HDF5 file cannot be a leaf")
    try:
        return "/".join(map(encode_key, path))
    except OptionError as error:
        error.message += f" (in {path_text(path)})" if len(path) > 1 else ""
        raise
