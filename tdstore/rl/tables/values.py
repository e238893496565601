"""Values of rows that are not tensors, as bytes of a fixed width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import NonTensorData, NonTensorStack
from tdstore.errors import UnsupportedError
from tdstore.rl.types import Rows
from tdstore.values import decode_value, encode_value

_HEAD = 4
"""Bytes before a value: its length, and 1, so that rows that were never written read as None."""
_TEXT, _JSON = 0x73, 0x6A
_SMALLEST = 64


def encode_values(data: Rows) -> list[bytes]:
    """Encode each value of an entry, in the order of its rows."""
    values = _flat_values(data) if tdstore.is_non_tensor(data) else [data]
    made = []
    for value in values:
        if type(value) is str:
            made.append(b"s" + value.encode())
        elif value is None:
            made.append(b"")
        else:
            try:
                made.append(b"j" + msgspec.json.encode(encode_value(value)))
            except TypeError as error:
                raise UnsupportedError(f"a value cannot be stored as a row: {error}") from None
    return made


def _flat_values(data: Any) -> list[Any]:
    if isinstance(data, NonTensorData):
        return [data.data]
    values = data.tolist()
    for _ in data.batch_size[1:]:
        values = [value for row in values for value in row]
    return list(values)


def width_of(values: Sequence[bytes]) -> int:
    """Return a width for values, with space for longer ones: a power of two."""
    longest = max(map(len, values), default=0) + _HEAD
    return max(_SMALLEST, 1 << (2 * longest - 1).bit_length())


def pack_values(values: Sequence[bytes], shape: Sequence[int], width: int) -> Tensor:
    """Pack values into a tensor of bytes `[*shape, width]`."""
    room = np.zeros((len(values), width), np.uint8)
    for row, value in zip(room, values, strict=True):
        row[:_HEAD] = np.frombuffer((len(value) + 1).to_bytes(_HEAD, "little"), np.uint8)
        row[_HEAD : _HEAD + len(value)] = np.frombuffer(value, np.uint8)
    return torch.from_numpy(room.reshape(*shape, width))


def decode_values(rows: Tensor, lead: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    """Decode a tensor of bytes to the entry of a TensorDict."""
    shape = rows.shape[:-1]
    flat = rows.cpu().contiguous().view(-1, rows.shape[-1]).numpy()
    values = [_value(row.tobytes()) for row in flat]
    if not shape:
        return NonTensorData(values[0])
    if not values:
        return NonTensorData(None, batch_size=shape)
    return NonTensorStack.from_list(_lists(values, tuple(shape)))


def plain_value(value: NonTensorData | NonTensorStack) -> object:
    """Return a value in its original form, also within dicts and tuples; a list of them for several rows."""
    return value.data if isinstance(value, NonTensorData) else value.tolist()


def _lists(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = len(values) // shape[0]
    return [_lists(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _value(row: bytes) -> Any:
    length = int.from_bytes(row[:_HEAD], "little") - 1
    if length <= 0:
        return None
    body = row[_HEAD + 1 : _HEAD + length]
    if row[_HEAD] == _TEXT:
        return body.decode()
    return decode_value(msgspec.json.decode(body))
