"""Plain values as JSON, with tagged forms for what JSON lacks. Decoding never runs code or imports a name.

A tagged form is an object with the one key `"$tuple"`, `"$bytes"`, ...; a dict that itself
has such a key, or keys that are not strings, travels as a `$dict` list of pairs.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tdstore.dtypes import as_dtype, dtype_name

JSON = Any
MAX_DEPTH = 256


def encode_value(value: object, _depth: int = 0) -> JSON:
    """A JSON form of `value`, from which `decode_value` makes an equal object of the same type.

    Takes None, bool, int, float (NaN and infinities too), complex, str, bytes, list, tuple, set,
    dict, numpy scalars, `torch.dtype`, `torch.Size` and `torch.device`, nested at will.

    Raises:
        TypeError: an object of another type (the message names it).
        ValueError: nested more than 256 levels deep, or a string with a lone surrogate.
    """
    if _depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        assert isinstance(value, int)
        # Readers in other languages, and msgspec, stop at 64 bits.
        return value if -(2**63) <= value < 2**63 else {"$int": str(value)}
    if kind is float:
        assert isinstance(value, float)
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        assert isinstance(value, str)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the string {value!r} has a lone surrogate and cannot be written as UTF-8") from None
        return value
    if kind is list:
        return [encode_value(v, _depth + 1) for v in value]  # type: ignore[attr-defined]
    if kind is dict:
        pairs = value.items()  # type: ignore[attr-defined]
        if all(type(k) is str and not k.startswith("$") for k in value):  # type: ignore[attr-defined]
            return {encode_value(k, _depth + 1): encode_value(v, _depth + 1) for k, v in pairs}
        return {"$dict": [[encode_value(k, _depth + 1), encode_value(v, _depth + 1)] for k, v in pairs]}
    for cls, tag, to_json, _ in _TAGGED:
        if kind is cls:
            return {tag: encode_value(to_json(value), _depth + 1)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm":
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored as data")


def decode_value(data: JSON, _depth: int = 0) -> Any:
    """The object that `encode_value` was given.

    Raises:
        ValueError: not a form that `encode_value` writes.
    """
    if _depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(data, list):
        return [decode_value(v, _depth + 1) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, body),) = data.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, body, _depth + 1)
    return {k: decode_value(v, _depth + 1) for k, v in data.items()}


def _decode_tagged(tag: str, body: JSON, depth: int) -> Any:
    try:
        if tag == "$dict":
            return {decode_value(k, depth): decode_value(v, depth) for k, v in body}
        if tag == "$numpy":
            dtype = np.dtype(str(body[0]))
            if dtype.kind not in "biufcSUMm" or dtype.shape:
                raise ValueError(f"numpy dtype {body[0]!r} is not a scalar type")
            return np.frombuffer(base64.b64decode(body[1], validate=True), dtype)[0]
        for _, known, _, from_json in _TAGGED:
            if tag == known:
                return from_json(decode_value(body, depth))
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the tagged value {tag!r} is malformed: {error}") from error
    raise ValueError(f"unknown tagged value {tag!r}; a newer tdstore may have written it")


def _complex(pair: Any) -> complex:
    real, imag = pair
    return complex(real, imag)


def _size(sizes: list[int]) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise ValueError(f"no size: {sizes!r}")
    return torch.Size(sizes)


def _float(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


_TAGGED: tuple[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (tuple, "$tuple", list, tuple),
    (bytes, "$bytes", lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    (torch.Size, "$size", list, _size),
    (torch.dtype, "$dtype", dtype_name, as_dtype),
    (torch.device, "$device", str, torch.device),
    (complex, "$complex", lambda v: [v.real, v.imag], _complex),
    (set, "$set", list, set),
    (frozenset, "$frozenset", list, frozenset),
    (int, "$int", str, int),
    (float, "$float", repr, _float),
)
