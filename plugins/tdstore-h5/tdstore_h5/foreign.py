"""Files of other programs: a header built from their contents, and the values that are not tensors."""

from __future__ import annotations

import math
from typing import Any

import h5py
import numpy as np
from h5py import h5t
from torch import Tensor

from tdstore.errors import CorruptStoreError
from tdstore.header import Group, Header
from tdstore.types import Path, path_text
from tdstore.values import encode_value
from tdstore_h5 import strings
from tdstore_h5.file.tree import FREE, Contents
from tdstore_h5.strings import Raw


def foreign_header(
    file: h5py.File, found: Contents, url: str, raw: Raw, leaves: dict[Path, Tensor] | None = None
) -> Header:
    """Build a header for another program's file: keys as h5py lists them, batch sizes left open, values decoded.

    Args:
        file: the open file.
        found: its contents.
        url: the location, for messages.
        raw: reads `[start, stop)` of the file.
        leaves: receives the leaves of long datasets of strings, which are otherwise values in the header, too.
    """
    values: dict[Path, dict[str, Any]] = {}
    for path, name in found.values.items():
        record, more = _value(file[name], path, url, raw, leaves is not None)
        values.setdefault(path[:-1], {})[path[-1]] = record
        if leaves is not None:
            leaves.update(more)
    groups = {
        path: Group(keys=tuple(keys), values=values.get(path, {}))
        for path, keys in sorted(found.groups.items(), key=lambda item: len(item[0]))
    }
    return Header(groups)


def _value(
    dataset: h5py.Dataset, path: Path, url: str, raw: Raw, leaves: bool
) -> tuple[dict[str, Any], dict[Path, Tensor]]:
    if dataset.id.get_type().get_class() == h5t.STRING:
        if dataset.shape:
            return strings.read(dataset, path, url, raw, leaves=leaves)
        try:
            strings.check(dataset, raw)
        except ValueError as error:
            return strings.refuse(path, url, error), {}
        return {"data": encode_value(_text(dataset[()]))}, {}
    if math.prod(dataset.shape) * max(1, dataset.dtype.itemsize) > FREE:
        raise CorruptStoreError(f"{url}: the value {path_text(path)} is larger than {FREE} bytes", url=url)
    data = dataset[()]
    if isinstance(data, np.void) and data.dtype.names is None:
        return {"data": encode_value(data.tobytes())}, {}
    if not dataset.shape:
        return {"data": encode_value(data.item() if isinstance(data, np.ndarray) else data)}, {}
    return {"data": encode_value(data.tolist())}, {}


def _text(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
