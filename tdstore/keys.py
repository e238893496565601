"""Nested keys, and their names in places where a key is part of a file name.

The rules of `encode_file_name`, which `decode_file_name` undoes:

* ``/ < > : " | ? * \\ space %``, control characters and 0x7f become `%XX`; other Unicode stays.
* The empty key is `%`, which no other key gives; `.` and `..` are `%2E` and `%2E%2E`.
* A leading `~` is `%7E`: plain, it marks the hash of a key that is too long for a file name.
* Names that a folder of ours or of the `tensordict` package gives a meaning (`meta.json...`, `tdstore...`) have
  their first character escaped, and a group's `.memmap` ending its dot.
* Portable names further escape what Windows cannot hold: `CON`, `NUL.txt`, a trailing dot.

The first two are the names of the `tensordict` package, so that it finds the leaves of ordinary keys.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Container, Iterable

from tdstore.errors import InvalidArgumentError, InvalidKeyError
from tdstore.types import NestedKey, Path, path_text

KEY_SEPARATOR = "."
"""What `flatten_keys` and other methods join the parts of a nested key with, if nothing else is passed."""
MAX_NAME_BYTES = 200
"""Longest name as UTF-8; file systems end at 255, and the suffix of a leaf comes on top."""

_UNSAFE = re.compile(r'[/<>:"|?*\\ %\x00-\x1f\x7f]')
_PLAIN = re.compile(r"[0-9A-Za-z_-]{1,50}")
"""Most keys: nothing to escape, and too short to be replaced by a hash."""
_FOLDED = re.compile(r"[A-Z]|[^\x00-\x7f]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")
_OURS = re.compile(r"meta\.json|tdstore\.", re.IGNORECASE)
_LEAF_ENDING = re.compile(r"\.(memmap)\Z", re.IGNORECASE)
_WINDOWS = re.compile(
    r"(?:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[0-9\u00b9\u00b2\u00b3])(?:\.|\Z)", re.IGNORECASE
)


# -- nested keys ----------------------------------------------------------------------------


def unravel(key: NestedKey) -> Path:
    """Flatten a nested key: `"a"` and `("a", ("b", "c"))` become `("a",)` and `("a", "b", "c")`.

    Raises:
        InvalidKeyError: not a string or a (nested) tuple of strings.

    Example:
        >>> unravel(("next", ("obs", "pixels")))
        ('next', 'obs', 'pixels')
    """
    if type(key) is str:
        return (key,)
    if type(key) is tuple and key:
        for part in key:  # which takes a third of `all(...)` of a generator
            if type(part) is not str:
                break
        else:
            return key
    parts: list[str] = []
    stack: list[object] = [key]  # not recursion: a deep tuple must not end in a RecursionError
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            parts.append(str.__str__(part))
        elif isinstance(part, tuple):
            stack.extend(reversed(part))
        else:
            what = f"{part!r} of type {type(part).__qualname__}"
            inside = "" if part is key else f" in {key!r}"
            raise InvalidKeyError(f"a key is a string or a (nested) tuple of strings, not {what}{inside}")
    return tuple(parts)


def join(path: Path, sep: str) -> str:
    """Write a path as one string. Not to be undone where a part holds `sep`."""
    return path[0] if len(path) == 1 else sep.join(path)


def key_text(key: NestedKey) -> str:
    """Format a key for messages: `'next' / 'obs'`."""
    return path_text(unravel(key))


def _utf8(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the key {key!r} has a lone surrogate and cannot be written as UTF-8") from None


# -- file names -----------------------------------------------------------------------------


def encode_file_name(key: str, *, group: bool = False, portable: bool = True) -> str:
    """Name the file (without its suffix) or folder that holds `key`.

    Distinct keys have distinct names, also a leaf's file `NAME.memmap` and a group's folder. Names that
    differ only in case are `encode_names`'s business.

    Args:
        key: one part of a path.
        group: name a folder, which must not look like a leaf's file.
        portable: also escape what Windows refuses; without it the peer finds a key such as `aux`.

    Returns:
        At most 200 bytes of UTF-8. A longer one is replaced by `~` and a hash: keep the key elsewhere.

    Raises:
        ValueError: a lone surrogate in the key.

    Example:
        >>> encode_file_name("a/b"), encode_file_name(""), encode_file_name("..")
        ('a%2Fb', '%', '%2E%2E')
    """
    if _PLAIN.fullmatch(key) and not (portable and _WINDOWS.match(key)):
        return key
    data = _utf8(key)
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    name = _UNSAFE.sub(lambda m: _percent(m[0]), key)
    if name[0] == "~" or _OURS.match(name) or (portable and _WINDOWS.match(name)):
        name = _percent(name[0]) + name[1:]
    if group:
        name = _LEAF_ENDING.sub(r"%2E\1", name)
    if portable and name[-1] == ".":
        name = f"{name[:-1]}%2E"
    return _shorten(name, data)


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _shorten(name: str, key: bytes) -> str:
    # UTF-8 is at most 4 bytes a character: most names need not be encoded to be measured.
    if len(name) * 4 <= MAX_NAME_BYTES or len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return "~" + base64.b32encode(hashlib.blake2b(key, digest_size=20).digest()).decode().lower()


def is_hashed(name: str) -> bool:
    """Check whether `encode_file_name` replaced a long key by its hash, so that the name does not tell it."""
    return name.startswith("~")


def decode_file_name(name: str) -> str:
    """Return the key for which `encode_file_name` or `encode_names` returned this name.

    Raises:
        InvalidArgumentError: the hash of a long key, or not such a name.
    """
    if name == "%":
        return ""
    if is_hashed(name):
        raise InvalidArgumentError(f"{name!r} is the hash of a long key, which is stored elsewhere")
    if not name or "/" in name or "\0" in name:
        raise InvalidArgumentError(f"{name!r} is not a file name")
    data = bytearray()
    end = 0
    for match in _ESCAPE.finditer(name):
        data += _plain(name, end, match.start())
        data.append(int(match[1], 16))
        end = match.end()
    data += _plain(name, end, len(name))
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"the escapes in {name!r} are not UTF-8") from None


def _plain(name: str, start: int, stop: int) -> bytes:
    text = name[start:stop]
    if "%" in text:
        raise InvalidArgumentError(f"{name!r} has a '%' that does not begin an escape such as '%2F'")
    return _utf8(text)


def fold(name: str) -> str:
    """Fold a name: two names with one fold may be one file on a file system that ignores case or Unicode form."""
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def encode_names(
    keys: Iterable[str], *, groups: Container[str] = (), taken: Iterable[str] = (), portable: bool = True
) -> dict[str, str]:
    """Name the siblings in one folder so that they stay apart even where case is ignored.

    A key that differs from an earlier one only in case (or in Unicode form) has its capitals and
    non-ASCII letters escaped, or, when that does not tell them apart, every character. All others have
    the name that `encode_file_name` gives.

    Args:
        keys: the keys, in order.
        groups: which of them are folders.
        taken: names in that folder already, of other keys.
        portable: as `encode_file_name`.

    Raises:
        InvalidArgumentError: a lone surrogate in a key.

    Example:
        >>> encode_names(["obs", "Obs", "reward"])
        {'obs': 'obs', 'Obs': '%4Fbs', 'reward': 'reward'}
    """
    used = {fold(name) for name in taken}
    names: dict[str, str] = {}
    for key in keys:
        if key in names:
            continue
        for name in _candidates(key, key in groups, portable):
            if fold(name) not in used:
                break
        else:
            raise InvalidArgumentError(f"no free file name for the key {key!r}: is it among the names taken already?")
        used.add(fold(name))
        names[key] = name
    return names


def _candidates(key: str, group: bool, portable: bool) -> Iterable[str]:
    name = encode_file_name(key, group=group, portable=portable)
    yield name
    if is_hashed(name) or not key:
        return
    data = key.encode()
    # Escapes hold capitals (%2F) that must stay as they are.
    pieces = re.split(r"(%[0-9A-F]{2})", name)
    pieces[::2] = [_FOLDED.sub(lambda m: _percent(m[0]), piece) for piece in pieces[::2]]
    yield _shorten("".join(pieces), data)
    yield _shorten(_percent(key), data)
