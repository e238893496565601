"""Conversion of a printed `repr(td)` back to a TensorDict of that form, to reproduce a reported problem."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from tdstore.container.core.container import Container
from tdstore.dtypes import as_dtype
from tdstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

_SIZES = re.compile(r"(?:batch_size|shape)=torch\.Size\(\[([^\]]*)\]\)")
_DEVICE = re.compile(r"device=([\w:]+)")
_DTYPE = re.compile(r"dtype=torch\.(\w+)")
_ENTRY = re.compile(r"^(\s*)([^\n]+?): (\w+)\(", re.MULTILINE)


def parse_tensor_dict_string(s: str) -> TensorDict:
    """Make a TensorDict of zeros with the keys, shapes, dtypes and devices that a `repr` shows.

    Entries that are not tensors are left out.

    Raises:
        InvalidArgumentError: not the repr of a TensorDict.

    Example:
        >>> td = TensorDict({"a": torch.ones(3, 2), "n": {"b": [1, 2, 3]}}, [3])
        >>> str(parse_tensor_dict_string(str(td))) == str(td)
        True
    """
    end = s.rfind("batch_size=")
    if end < 0 or "fields={" not in s:
        raise InvalidArgumentError("no batch_size and fields in the text: it is not what a TensorDict prints")
    body = s[s.index("fields={") + len("fields={") : end]
    made = Container._resident_class(batch_size=_sizes(s[end:]), device=_device(s[end:]))
    at = 0
    while (entry := _ENTRY.search(body, at)) is not None:
        at = _closing(body, entry.end())
        text = body[entry.end() : at]
        if "fields={" in text:
            made.set(entry[2], parse_tensor_dict_string(text))
        elif dtype := _DTYPE.search(text):
            made.set(entry[2], torch.zeros(_sizes(text), dtype=as_dtype(dtype[1]), device=_device(text)))
    return made


def _closing(text: str, start: int) -> int:
    """Find the closing bracket of the one before `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise InvalidArgumentError("a bracket is not closed: the text is not all of what a TensorDict printed")


def _sizes(text: str) -> list[int]:
    found = _SIZES.search(text)
    if found is None:
        raise InvalidArgumentError(f"no sizes in {text.strip()[:80]!r}")
    return [int(n) for n in found[1].split(",") if n.strip()]


def _device(text: str) -> torch.device | None:
    found = _DEVICE.search(text)
    return None if found is None or found[1] == "None" else torch.device(found[1])
