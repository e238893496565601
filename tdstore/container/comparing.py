"""An assertion for tests: two TensorDicts are close."""

from __future__ import annotations

from typing import Any

import torch

from tdstore.container.core import GROUP, LEAF, Container
from tdstore.container.paths import entry_path
from tdstore.errors import KeyNotFoundError
from tdstore.types import Path, path_text


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

    Batch sizes and names are not compared. Stored TensorDicts are read one entry at a time.

    Args:
        rtol: default: what `torch.testing.assert_close` has for the dtype; given only one of the two, the other is 0.
        intersection: compare only the keys that both have.
        msg: is added to what a failure says.
        prefix: is put before the keys in it.

    Returns:
        True.

    Raises:
        AssertionError: an entry differs, in values, shape, dtype or kind; names its key.
        KeyNotFoundError: keys that only one has. TypeError: no TensorDict.
    """
    if not isinstance(actual, Container) or not isinstance(expected, Container):
        kinds = f"a {type(actual).__name__} and a {type(expected).__name__}"
        raise TypeError(f"assert_close compares TensorDicts, not {kinds}")
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
        kind = actual._kind(key)
        if kind != expected._kind(key):
            _fail(here, "a tensor, a TensorDict or a value on one side, and another of these on the other", msg)
        a, b = actual._raw(key), expected._raw(key)
        if kind == GROUP:
            _compare(a, b, how, intersection, msg, here)
        elif kind == LEAF:
            try:
                torch.testing.assert_close(a, b, **how)
            except AssertionError as error:
                _fail(here, str(error), msg, error)
        elif a.tolist() != b.tolist():
            _fail(here, f"{a.plain()!r} is not {b.plain()!r}", msg)


def _alike_stacks(a: Any, b: Any) -> bool:
    if not (isinstance(a, Container._stack_class) and isinstance(b, Container._stack_class)):
        return False
    return a._stack_dim == b._stack_dim and len(a._tds) == len(b._tds)


def _fail(path: Path, what: str, msg: str, cause: AssertionError | None = None) -> None:
    raise AssertionError(f"the entry {path_text(path)} differs: {what}" + (f"\n{msg}" if msg else "")) from cause
