"""Writes of the same few rows of many leaves: what is the same for leaves of one form is computed once for all.

Most writes are a block of neighbouring rows of every leaf, and leaves with rows of the same size have the same cells.
Their values are copied, and their commands packed, by a few calls for all of these leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tdstore.types import Path, Write
from tdstore_redis.cells.fetch import Damaged, Promised
from tdstore_redis.cells.layout import CHECK, Array, Command, checks_between, extend, marks_of, undo_check
from tdstore_redis.cells.plans import is_whole_rows, raw
from tdstore_redis.connection import Wire

MOST = 1 << 20
"""Bytes of values of all leaves. Larger writes have changes of bounded size."""


class _Form:
    """Leaves with the same cells, and where in these the rows are."""

    __slots__ = ("arrays", "block", "ends", "first", "offset", "paths", "skip", "stop", "used", "values")

    def __init__(self, array: Array, start: int, stop: int) -> None:
        cell = array.cell
        self.paths: list[Path] = []
        self.arrays: list[Array] = []
        self.values: list[Tensor] = []
        self.first, self.skip = divmod(start, cell)
        self.stop = -(-stop // cell)
        self.used = stop % cell
        """Bytes of the last cell before the end of the bytes; 0 if it is written whole."""
        self.block, at = divmod(self.first, array.per_block)
        self.offset = at * array.stride
        ends = ((self.first, self.skip), (self.stop - 1, self.used))
        self.ends = sorted({cell for cell, part in ends if part})
        """The cells that are written in part."""


class SameRows:
    """Writes of neighbouring rows, a leaf at most once. Created by `same_rows`."""

    def __init__(self, forms: list[_Form], paths: set[Path]) -> None:
        self._forms = forms
        self.paths = paths

    def partial_blocks(self) -> list[bytes]:
        return sorted([array.key(form.block) for form in self._forms if form.ends for array in form.arrays])

    def commands(self, wire: Wire, promised: Promised, before: Sequence[bytes]) -> list[Command]:
        """Return packed commands that write the cells.

        Raises:
            Damaged: the present content of a cell does not have its checksum.
        """
        asked = [command for form in self._forms for command in _gets(form)]
        replies: list[bytes] = []
        if asked or before:
            replies = wire.raising([*before, *asked])[len(before) :]
        found: list[Command] = []
        at = 0
        for form in self._forms:
            count = len(form.ends) * len(form.arrays)
            found += _sets(form, replies[at : at + count])
            at += count
        return found


def same_rows(items: Sequence[tuple[Write, Array]]) -> SameRows | None:
    """Return writes grouped by the form of their leaves; None if one of them is of another kind.

    Args:
        items: writes to committed leaves, each with its layout.
    """
    found: dict[tuple[object, ...], _Form] = {}
    size = 0
    for w, array in items:
        index, value = w.index, w.value
        if len(index) == 0 or type(rows := index[0]) is not slice or rows.step != 1:
            return None
        shape, row = array.spec.shape, array.row
        size += (rows.stop - rows.start) * row
        if not row or size > MOST or rows.start >= rows.stop or not is_whole_rows(index, shape):
            return None
        key = (value.dtype, value.shape, array.cell, array.per_block, rows.start)
        form = found.get(key)
        if form is None:
            form = found[key] = _Form(array, rows.start * row, rows.stop * row)
        per, cells = array.per_block, form.stop - form.first
        if form.stop > array.sealed or form.stop > (form.block + 1) * per or cells == per:
            return None  # cells to be noted as written, or several blocks, or a whole one
        form.paths.append(w.path)
        form.arrays.append(array)
        form.values.append(value)
    paths = {w.path for w, _ in items}
    return SameRows(list(found.values()), paths) if len(paths) == len(items) else None


def _gets(form: _Form) -> list[bytes]:
    """Return packed GETRANGEs for the cells that are changed in part, of one leaf after another."""
    stride = form.arrays[0].stride
    ranges = []
    for cell in form.ends:
        at = form.offset + (cell - form.first) * stride
        start, last = b"%d" % at, b"%d" % (at + stride - 1)
        ranges.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(start), start, len(last), last))
    keys = [array.packed_key(form.block) for array in form.arrays]
    return [b"*4\r\n$8\r\nGETRANGE\r\n%b%b" % (key, some) for key in keys for some in ranges]


def _sets(form: _Form, old: Sequence[bytes]) -> list[bytes]:
    """Return packed SETRANGEs.

    Args:
        form: the leaves and the values.
        old: the stored cells that are changed in part, of one leaf after another.

    Raises:
        Damaged: one of these cells does not have its checksum.
    """
    arrays, first, stop = form.arrays, form.first, form.stop
    cell, stride, n = arrays[0].cell, arrays[0].stride, stop - first
    marks = marks_of(arrays, first, stop + 1)
    flat = np.empty((len(arrays), n * cell), np.uint8)
    end = n * cell - (cell - form.used if form.used else 0)
    for i, value in enumerate(form.values):
        flat[i, form.skip : end] = raw(value.contiguous())
    if form.ends:
        at = [one - first for one in form.ends]
        starts, goals = marks[:, at].ravel().tolist(), marks[:, [one + 1 for one in at]].ravel().tolist()
        if set(map(len, old)) != {stride} or [*map(extend, starts, old)] != goals:
            raise Damaged(form.paths[0], arrays[0], "a cell of it or of another leaf does not have its checksum")
        there = np.frombuffer(b"".join(old), np.uint8).reshape(len(arrays), len(at), stride)
        flat[:, : form.skip] = there[:, 0, : form.skip]
        if form.used:
            flat[:, end:] = there[:, -1, form.used : cell]
    cells = flat.reshape(-1, cell)
    checks = checks_between(marks[:, :-1].ravel(), undo_check(marks[:, 1:].ravel()), cells)
    stored = np.empty((len(cells), stride), np.uint8)
    stored[:, :cell] = cells
    stored[:, cell:] = checks.astype("<u4").view(np.uint8).reshape(-1, CHECK)
    offset, size = b"%d" % form.offset, n * stride
    place = b"$%d\r\n%b\r\n$%d\r\n" % (len(offset), offset, size)
    rows = stored.reshape(len(arrays), size)
    return [
        b"".join((b"*4\r\n$8\r\nSETRANGE\r\n", array.packed_key(form.block), place, row.data, b"\r\n"))
        for array, row in zip(arrays, rows, strict=True)
    ]
