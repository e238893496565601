"""Compare TensorDicts: `==`, values that are not tensors in it, and `assert_close` for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.values.equality import alike
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import InvalidTypeError, KeyNotFoundError
from tdstore.types import Path, path_text


def equal_positions(mine: Any, theirs: Any, batch: torch.Size) -> Tensor:
    """Compare a value with another entry: return a bool tensor of the batch, or of the shape of a tensor on the other
    side.

    Batches broadcast. An entry that is missing (None) is equal to the value None.
    """
    if theirs is None:
        theirs = NonTensorData(None)
    if isinstance(theirs, Tensor):
        number = mine.data if isinstance(mine, NonTensorData) else None
        found = torch.zeros(theirs.shape, dtype=torch.bool, device=theirs.device)
        if isinstance(number, (bool, int, float, complex)):
            found = theirs == number
        return found if found.ndim >= len(batch) else found.expand(batch)
    if not isinstance(theirs, NonTensor):
        return torch.zeros(batch, dtype=torch.bool)
    if isinstance(mine, NonTensorData) and isinstance(theirs, NonTensorData):
        return torch.full(batch, alike(mine.data, theirs.data))
    if mine.same(theirs):
        return torch.full(batch, True)
    try:
        wide = torch.broadcast_shapes(mine.batch_size, theirs.batch_size)
    except RuntimeError:
        return torch.full(batch, False)
    values: NonTensor = mine.expand(wide)
    return values.equal_values(theirs.expand(wide))


def keys_compared(mine: Mapping[str, Any], theirs: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return all keys of two compared TensorDicts; a key that one lacks is None in the other.

    Raises:
        KeyNotFoundError: an entry that one lacks is not None in the other.
    """
    if mine.keys() == theirs.keys():
        return mine
    mismatched = [k for k in mine.keys() ^ theirs.keys() if not _is_none(mine[k] if k in mine else theirs[k])]
    if mismatched:
        raise KeyNotFoundError(f"cannot compare TensorDicts with different keys: {sorted(map(str, mismatched))}")
    return dict.fromkeys([*mine, *theirs])


def _with_values(mine: Any, other: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a dict to compare with, in which a dict or a number that stands beside a value is a value too."""
    made: dict[Any, Any] = {}
    for key, value in other.items():
        plain = isinstance(value, (Mapping, bool, int, float, complex)) and not isinstance(value, Container)
        beside = mine._data.get(key) if plain else None
        if isinstance(beside, NonTensor):
            value = NonTensorData(value, beside.batch_size)
        elif isinstance(beside, Container) and not isinstance(beside, Container._stack_class):
            value = _with_values(beside._resident(), value)
        made[key] = value
    return made


class EqualityMixin(Container):
    """`==` and `!=`, entry by entry."""

    __slots__ = ()

    def __eq__(self, other: object) -> Any:
        return self._compare(other, torch.eq)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, torch.ne)

    def _compare(self, other: Any, op: Any) -> Any:
        if not isinstance(other, (Container, Tensor, dict, bool, int, float, complex, np.ndarray, np.generic)):
            return NotImplemented
        mine = self._resident()
        if isinstance(other, dict):
            keys_compared(mine._data, other)
            other = self._resident_class(_with_values(mine, other), batch_size=self._batch_size)
        elif isinstance(other, np.ndarray):
            other = torch.as_tensor(other)
        return mine._compared(other._resident() if isinstance(other, Container) else other, op)


def _is_none(entry: Any) -> bool:
    return entry is None or (isinstance(entry, NonTensorData) and entry.data is None)


def assert_close(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
    prefix: Any = (),
) -> bool:
    """Check that two TensorDicts have the same entries, and tensors that are close, as `torch.testing.assert_close`.

    Batch sizes and names are not compared. A value by itself counts as a TensorDict of the entry "data". Stored
    TensorDicts are read one entry at a time.

    Args:
        rtol: default: what `torch.testing.assert_close` has for the dtype; given only one of the two, the other is 0.
        intersection: compare only the keys that both have.
        msg: is added to what a failure says.
        prefix: is put before the keys in it.

    Returns:
        True.

    Raises:
        AssertionError: an entry differs, in values, shape, dtype or kind; names its key.
        KeyNotFoundError: keys that only one has. InvalidTypeError: no TensorDict.
    """
    actual, expected = (x._stored_form() if isinstance(x, NonTensor) else x for x in (actual, expected))
    if not isinstance(actual, Container) or not isinstance(expected, Container):
        kinds = f"a {type(actual).__name__} and a {type(expected).__name__}"
        raise InvalidTypeError(f"assert_close compares TensorDicts, not {kinds}")
    if (rtol is None) != (atol is None):
        rtol, atol = rtol or 0.0, atol or 0.0
    path = entry_path(prefix) if prefix else ()
    _compare(actual, expected, {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}, intersection, msg, path)
    return True


assert_allclose_td = assert_close


def _compare(actual: Any, expected: Any, how: dict[str, Any], intersection: bool, msg: str, path: Path) -> None:
    if _alike_stacks(actual, expected):  # whose elements may differ in shape
        for i, (a, b) in enumerate(zip(actual._tds, expected._tds, strict=True)):
            _compare(a, b, how, intersection, msg, (*path, str(i)))
        return
    mine, theirs = set(actual._first_keys()), set(expected._first_keys())
    if mine != theirs and not intersection:
        where = f" of {path_text(path)}" if path else ""
        raise KeyNotFoundError(
            f"the keys{where} differ: {sorted(mine - theirs)} are in the first TensorDict only, "
            f"{sorted(theirs - mine)} in the second"
        )
    for key in [k for k in actual._first_keys() if k in theirs]:
        here = (*path, key)
        kind, a, b = actual._kind(key), actual._raw(key), expected._raw(key)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            try:
                torch.testing.assert_close(a, b, **how)
            except AssertionError as error:
                _fail(here, str(error), msg, error)
        elif {kind, expected._kind(key)} == {LEAF, VALUE}:
            value, tensor = (a, b) if kind == VALUE else (b, a)
            if not equal_positions(value, tensor, tensor.shape).all():
                _fail(here, f"{value.plain()!r} is not {tensor!r}", msg)
        elif kind != expected._kind(key):
            _fail(here, "a tensor, a TensorDict or a value on one side, and another of these on the other", msg)
        elif kind == GROUP:
            _compare(a, b, how, intersection, msg, here)
        elif not equal_positions(a, b, actual.batch_size).all():
            _fail(here, f"{a.plain()!r} is not {b.plain()!r}", msg)


def _alike_stacks(a: Any, b: Any) -> bool:
    if not (isinstance(a, Container._stack_class) and isinstance(b, Container._stack_class)):
        return False
    return a._stack_dim == b._stack_dim and len(a._tds) == len(b._tds)


def _fail(path: Path, what: str, msg: str, cause: AssertionError | None = None) -> None:
    raise AssertionError(f"the entry {path_text(path)} differs: {what}" + (f"\n{msg}" if msg else "")) from cause
