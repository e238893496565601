"""Plain values as JSON, with tagged forms for what JSON lacks. Decoding never runs code or imports a name.

A tagged form is an object with the one key `"$tuple"`, `"$bytes"`, ...; a dict that itself
has such a key, or keys that are not strings, travels as a `$dict` list of pairs.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Hashable
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from tdstore.dtypes import as_dtype, dtype_name
from tdstore.errors import InvalidArgumentError, InvalidTypeError, PluginError, StoreError

JSON = Any
MAX_DEPTH = 256
MAX_DIGITS = 4300
"""Digits of an integer, as Python's own default has it: reading more takes quadratic time."""
MAX_COLLISIONS = 64
"""Elements of one set or dict that may have the same hash. Python's hash of numbers is no secret: a set of integers
that were chosen for it would take quadratic time."""
PICKLE = "pickle"
"""The codec of what is no plain data, written and read only for those who say `trust=True`."""

Encoder = Callable[[object], "tuple[str, Any] | None"]
"""Gives the name of a codec and plain data for an object that is not plain, or None."""
Decoder = Callable[[str, Any], Any]
"""Gives the object back, from the name of a codec and plain data."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of a JSON document: an `object_pairs_hook` of `json.loads` that refuses a repeated key.

    Raises:
        InvalidArgumentError: a key is there twice.

    Example:
        >>> json.loads('{"a": 1, "b": 2}', object_pairs_hook=unique_keys)
        {'a': 1, 'b': 2}
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidArgumentError("a key is there twice")
    return found


class _Malformed(ValueError):
    """Says already which tagged value is malformed: the values around it need not say so again."""


def encode_value(value: object, _depth: int = 0, other: Encoder | None = None) -> JSON:
    """Return a JSON form of `value`, from which `decode_value` makes an equal object of the same type.

    Takes None, bool, int, float (NaN and infinities too), complex, `Decimal`, str, bytes, bytearray, list, tuple,
    set, dict, range, slice, `Path`, `UUID`, dates, times, numpy scalars and arrays, CPU tensors, `torch.dtype`,
    `torch.Size` and `torch.device`, nested at will.

    Args:
        other: asked for what is none of these, wherever it is found.

    Raises:
        TypeError: an object of another type (the message names it).
        InvalidArgumentError: nested more than 256 levels deep, an integer of more than 4,300 digits, a set or dict of
            which more than 64 elements have the same hash, or a string with a lone surrogate.
    """
    try:
        return _encode(value, _depth, other)
    except RecursionError as error:
        raise InvalidArgumentError("nested too deep for the stack of this thread") from error


def _encode(value: object, _depth: int, other: Encoder | None) -> JSON:
    if _depth > MAX_DEPTH:
        raise InvalidArgumentError(f"nested more than {MAX_DEPTH} levels deep")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        assert isinstance(value, int)
        # Readers in other languages, and msgspec, stop at 64 bits.
        return value if -(2**63) <= value < 2**63 else {"$int": _digits(value)}
    if kind is float:
        assert isinstance(value, float)
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        assert isinstance(value, str)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"the string {value!r} has a lone surrogate and cannot be written as UTF-8"
            ) from None
        return value
    if kind is list:
        return [_encode(v, _depth + 1, other) for v in value]  # type: ignore[attr-defined]
    if kind is dict:
        pairs = value.items()  # type: ignore[attr-defined]
        if all(type(k) is str and not k.startswith("$") for k in value):  # type: ignore[attr-defined]
            return {_encode(k, _depth + 1, other): _encode(v, _depth + 1, other) for k, v in pairs}
        _refuse_collisions(list(value))  # type: ignore[call-overload]
        return {"$dict": [[_encode(k, _depth + 1, other), _encode(v, _depth + 1, other)] for k, v in pairs]}
    for cls, tag, to_json, _ in _TAGGED:
        if kind is cls:
            return {tag: _encode(to_json(value), _depth + 1, other)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm":
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUMm":
        return {"$ndarray": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu":  # type: ignore[attr-defined]
        return {"$tensor": _tensor_to_json(value)}  # type: ignore[arg-type]
    if other is not None and (found := other(value)) is not None:
        return {"$codec": [found[0], _encode(found[1], _depth + 1, other)]}
    raise InvalidTypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored as data")


def pickled_form(data: bytes, key: str | None = None) -> JSON:
    """Return the form of a value that is a pickle already, or of a key of the dict that it is."""
    return {"$codec": [PICKLE, encode_value(data if key is None else (data, key))]}


def decode_value(data: JSON, _depth: int = 0, other: Decoder | None = None) -> Any:
    """Return the object that was passed to `encode_value`.

    Args:
        other: makes the objects that the `other` of `encode_value` took apart.

    Raises:
        InvalidArgumentError: not a form that `encode_value` writes, or one that was made to take long.
    """
    try:
        return _decode(data, _depth, other)
    except RecursionError as error:
        raise InvalidArgumentError("nested too deep for the stack of this thread") from error


def decode_number(data: JSON) -> bool | int | float | complex:
    """Return the number that was passed to `encode_value`: a fill value.

    Raises:
        InvalidArgumentError: anything else.
    """
    if isinstance(data, list):
        raise InvalidArgumentError("a list is no number")
    value = decode_value(data)
    if not isinstance(value, bool | int | float | complex):
        raise InvalidArgumentError(f"a value of type {type(value).__name__} is no number")
    return value


def _decode(data: JSON, _depth: int, other: Decoder | None) -> Any:
    if _depth > MAX_DEPTH:
        raise InvalidArgumentError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(data, list):
        return [_decode(v, _depth + 1, other) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, body),) = data.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, body, _depth + 1, other)
    return {k: _decode(v, _depth + 1, other) for k, v in data.items()}


def _decode_tagged(tag: str, body: JSON, depth: int, other: Decoder | None) -> Any:
    if tag == "$codec" and other is not None and isinstance(body, list) and len(body) == 2:
        return other(str(body[0]), _decode(body[1], depth, other))
    try:
        if tag == "$dict":
            pairs = [(_decode(k, depth, other), _decode(v, depth, other)) for k, v in body]
            _refuse_collisions([key for key, _ in pairs])
            return dict(pairs)
        if tag == "$numpy":
            return np.frombuffer(base64.b64decode(body[1], validate=True), _numpy_dtype(body[0]))[0]
        if tag == "$ndarray":
            return _array(*body)
        if tag == "$tensor":
            return _tensor(*body)
        for _, known, _, from_json in _TAGGED:
            if tag == known:
                return from_json(_decode(body, depth, other))
    except (_Malformed, RecursionError, StoreError, PluginError):
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, ArithmeticError, OSError) as error:
        raise _Malformed(f"the tagged value {tag!r} is malformed: {error}") from error
    raise _Malformed(f"unknown tagged value {tag[:80]!r}; a newer tdstore may have written it")


def _refuse_collisions(values: list[Hashable]) -> None:
    if len(values) <= MAX_COLLISIONS:
        return
    ((_, most),) = Counter(map(hash, values)).most_common(1)
    if most > MAX_COLLISIONS:
        raise InvalidArgumentError(
            f"{most} of its {len(values)} elements have the same hash, more than {MAX_COLLISIONS}"
        )


def _listed(values: set[Hashable] | frozenset[Hashable]) -> list[Hashable]:
    found = list(values)
    _refuse_collisions(found)  # nobody could read it back
    return found


def _set(values: list[Hashable]) -> set[Hashable]:
    _refuse_collisions(values)
    return set(values)


def _frozenset(values: list[Hashable]) -> frozenset[Hashable]:
    _refuse_collisions(values)
    return frozenset(values)


def _digits(value: int) -> str:
    if value.bit_length() > 4 * MAX_DIGITS:  # `str` would raise, but not where that limit was lifted
        raise InvalidArgumentError(f"an integer of more than {MAX_DIGITS} digits")
    text = str(value)
    if len(text) - (value < 0) > MAX_DIGITS:
        raise InvalidArgumentError(f"an integer of more than {MAX_DIGITS} digits")
    return text


def _int(text: str) -> int:
    if not isinstance(text, str) or len(text) > MAX_DIGITS + 1:
        raise InvalidArgumentError(f"no integer of at most {MAX_DIGITS} digits")
    return int(text)


_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSUMm][0-9]{0,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?")


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    """Return the dtype of plain data; numpy's own parser of longer texts is not asked."""
    if not isinstance(text, str) or _NUMPY_DTYPE.fullmatch(text) is None:
        raise InvalidArgumentError(f"numpy dtype {str(text)[:80]!r} is not that of plain data")
    return np.dtype(text)


def _complex(pair: Any) -> complex:
    real, imag = pair
    return complex(real, imag)


def _size(sizes: list[int]) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise InvalidArgumentError(f"no size: {sizes!r}")
    return torch.Size(sizes)


def _array(dtype: str, shape: list[int], data: str) -> Any:
    return np.frombuffer(base64.b64decode(data, validate=True), _numpy_dtype(dtype)).reshape(shape).copy()


def _tensor_to_json(tensor: torch.Tensor) -> JSON:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    flat = torch.from_numpy(_array("|u1", [-1], data))
    flat = flat.view(as_dtype(dtype)) if len(flat) else torch.empty(0, dtype=as_dtype(dtype), device="cpu")
    return flat.reshape(_size(shape))


def _from_datetime(value: datetime.datetime) -> JSON:
    import zoneinfo  # on use: it brings sysconfig and the paths of the system

    if isinstance(value.tzinfo, zoneinfo.ZoneInfo) and value.tzinfo.key:
        return [value.replace(tzinfo=None).isoformat(), value.tzinfo.key, value.fold]
    if type(value.tzinfo) not in (type(None), datetime.timezone):
        raise InvalidTypeError(
            f"a datetime with a tzinfo of type {type(value.tzinfo).__name__} cannot be stored as data"
        )
    return value.isoformat()


def _to_datetime(body: JSON) -> datetime.datetime:
    if isinstance(body, str):
        return datetime.datetime.fromisoformat(body)
    import zoneinfo

    text, zone, fold = body
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone), fold=fold)


def _from_time(value: datetime.time) -> str:
    if type(value.tzinfo) not in (type(None), datetime.timezone):
        raise InvalidTypeError(f"a time with a tzinfo of type {type(value.tzinfo).__name__} cannot be stored as data")
    return value.isoformat()


def _float(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


_TAGGED: tuple[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (tuple, "$tuple", list, tuple),
    (bytes, "$bytes", lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    (torch.Size, "$size", list, _size),
    (torch.dtype, "$dtype", dtype_name, as_dtype),
    (torch.device, "$device", str, torch.device),
    (complex, "$complex", lambda v: [v.real, v.imag], _complex),
    (set, "$set", _listed, _set),
    (frozenset, "$frozenset", _listed, _frozenset),
    (bytearray, "$bytearray", bytes, bytearray),
    (range, "$range", lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    (slice, "$slice", lambda v: [v.start, v.stop, v.step], lambda v: slice(*v)),
    (Decimal, "$decimal", str, Decimal),
    (uuid.UUID, "$uuid", str, uuid.UUID),
    (type(pathlib.Path()), "$path", str, pathlib.Path),
    (pathlib.PurePosixPath, "$posixpath", str, pathlib.PurePosixPath),
    (pathlib.PureWindowsPath, "$windowspath", str, pathlib.PureWindowsPath),
    (datetime.datetime, "$datetime", _from_datetime, _to_datetime),
    (datetime.date, "$date", datetime.date.isoformat, datetime.date.fromisoformat),
    (datetime.time, "$time", _from_time, datetime.time.fromisoformat),
    (datetime.timedelta, "$timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)),
    (int, "$int", _digits, _int),
    (float, "$float", repr, _float),
)
