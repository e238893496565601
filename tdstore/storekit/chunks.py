"""The presets of backends that store chunks: how many rows are read, decoded and written together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tdstore.errors import OptionError

LAYOUTS = {"random": 32 << 10, "scan": 1 << 20}
"""Values of the option `layout`: about so many bytes to a chunk."""
ROW = 4 << 10
"""With "random", rows from here on are a chunk each: a read of random rows decodes nothing else."""
SMALLEST = 8 << 10
"""Bytes of the smallest chunk of a column of variable length."""


def preset_chunks(
    layout: str, shape: Sequence[int], itemsize: int, *, most: int | None, widest: int
) -> tuple[int, ...]:
    """Return chunks of whole rows along the first dimension: for single rows ("random") or long runs of rows ("scan").

    Args:
        layout: a key of `LAYOUTS`.
        shape: of the leaf.
        itemsize: bytes of an element.
        most: rows that the leaf can have; None: any number.
        widest: bytes of the largest chunk. A longer row is cut into blocks, each one run of its bytes.

    Example:
        >>> preset_chunks("random", (1000, 84, 84), 1, most=1000, widest=4 << 20)
        (1, 84, 84)
        >>> preset_chunks("scan", (100_000, 3), 4, most=None, widest=4 << 20)
        (87381, 3)
    """
    if not shape:
        return ()
    rest = tuple(max(1, n) for n in shape[1:])
    row = math.prod(rest) * itemsize
    if row > widest:
        return _block((1, *rest), itemsize, widest)
    rows = 1 if layout == "random" and row >= ROW else max(1, LAYOUTS[layout] // row)
    return (rows if most is None else max(1, min(rows, most)), *rest)


def _block(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """Return the shape of the longest block that is one run in C order of at most `target` bytes."""
    block = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        fits = max(1, target // (math.prod(block) * itemsize))
        block[dim] = min(shape[dim], fits)
        if block[dim] < shape[dim]:
            break
    return tuple(block)


def column_rows(shape: Sequence[int], itemsize: int) -> int:
    """Return the rows of a chunk of a var-length column: nearly every random row is in a chunk of its own.

    Args:
        shape: of the leaf.
        itemsize: bytes of an element.
    """
    row = max(1, math.prod(shape[1:]) * itemsize)
    nbytes = math.prod(shape) * itemsize
    return max(1, min(max(SMALLEST, nbytes >> 20), LAYOUTS["random"]) // row)


def check_layout(value: Any, where: str, url: str) -> None:
    """Check the value of the option `layout`.

    Args:
        value: the value.
        where: the leaf, for messages.
        url: the location, for messages.

    Raises:
        OptionError: it is not a key of `LAYOUTS`.
    """
    if value not in tuple(LAYOUTS):
        raise wrong_value("layout", value, f"one of {', '.join(map(repr, LAYOUTS))}", where, url)


def leading_sizes(value: Any, name: str, where: str, url: str) -> tuple[int, ...]:
    """Return an option that gives sizes of the leading dimensions: `chunks=64` means 64 rows.

    Args:
        value: the value.
        name: the option.
        where: the leaf, for messages.
        url: the location, for messages.

    Raises:
        OptionError: it is neither a positive integer nor a tuple of them.
    """
    items: Any = (value,) if type(value) is int else value
    if not isinstance(items, (tuple, list)) or not all(type(n) is int and n > 0 for n in items):
        raise wrong_value(name, value, "a positive integer, or a tuple of them", where, url)
    return tuple(items)


def wrong_value(name: str, value: Any, wanted: str, where: str, url: str) -> OptionError:
    """Create the error for a layout option with an impossible value.

    Args:
        name: the option.
        value: the value of the caller.
        wanted: the values that it may have.
        where: the leaf.
        url: the location.
    """
    return OptionError(f"{url}: {name} of {where} must be {wanted}, not {value!r}", url=url)
