"""Comparisons of the kit, with messages that suffice for a repair."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import dtype_name, to_numpy
from tdstore.header import Group, Header
from tdstore.store import Store
from tdstore.testing.samples import digest, same
from tdstore.types import LeafSpec, Path, Read, path_text

_Error = TypeVar("_Error", bound=BaseException)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _trimmed(text: str) -> str:
    return text.replace("\\", "/").strip(". ")


FOLDS: Mapping[str, Callable[[str], str]] = {
    "they differ in upper and lower case": str.casefold,
    "they differ in code points": _composed,
    "they differ in separators, or in dots and spaces at an end": _trimmed,
}
"""What a file system may take for the same name, by what the difference is."""


def failure(text: str) -> AssertionError:
    """Create the error of a failed comparison: what differs, and the promise of the test that compared."""
    frame = inspect.currentframe()
    while frame is not None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        promise = inspect.getdoc(getattr(type(owner), name, None)) if name.startswith("test_") else None
        if promise:
            return AssertionError(f"{text}\nThe test: {' '.join(promise.splitlines()[0].split())}")
        frame = frame.f_back
    return AssertionError(text)


def difference(got: object, expected: Tensor) -> str | None:
    """Describe how a tensor differs from the expected one, by dtype, shape and bits; None when it does not.

    Args:
        got: the tensor of a store.
        expected: a CPU tensor of any shape and dtype.

    Example:
        >>> import torch
        >>> difference(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4))
        'float64 instead of float32'
        >>> difference(torch.zeros(1), torch.tensor(0.0))
        'shape (1,) instead of ()'
        >>> difference(torch.tensor([[0, 1, 7], [3, 9, 5]]), torch.arange(6).view(2, 3))
        '2 of 6 elements differ, the first at (0, 2): 7 instead of 2'
    """
    if not isinstance(got, Tensor):
        return f"{type(got).__module__}.{type(got).__qualname__} instead of torch.Tensor"
    if got.dtype != expected.dtype:
        return f"{dtype_name(got.dtype)} instead of {dtype_name(expected.dtype)}"
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if same(got, expected):
        return None
    found, wanted = (np.ascontiguousarray(to_numpy(t.cpu())) for t in (got, expected))
    raw = [a.reshape(-1).view(np.uint8).reshape(a.size, a.itemsize) for a in (found, wanted)]
    unequal = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
    first = int(unequal[0])
    at = tuple(map(int, np.unravel_index(first, found.shape)))
    values = [_element(t, first) for t in (got, expected)]
    if values[0] == values[1]:  # 0.0 and -0.0 print alike in some dtypes, and so do two NaN
        values = [f"{v} (bytes {r[first].tobytes().hex()})" for v, r in zip(values, raw, strict=True)]
    return f"{len(unequal)} of {found.size} elements differ, the first at {at}: {values[0]} instead of {values[1]}"


def _element(tensor: Tensor, number: int) -> str:
    return str(tensor.cpu().reshape(-1)[number].item())


def check_same(got: object, expected: Tensor, what: object) -> None:
    """Fail with the difference of dtype, shape or bits.

    Args:
        got: the tensor.
        expected: the tensor that it should equal.
        what: the name of the tensor, for the message.
    """
    __tracebackhide__ = True
    differs = difference(got, expected)
    if differs is not None:
        raise failure(f"{_named(what)}{differs}")


def _named(what: object) -> str:
    return f"leaf {path_text(what)}: " if isinstance(what, tuple) else f"{what}: "


def check_leaves(got: Mapping[Any, Any], expected: Mapping[Any, Tensor], what: str) -> None:
    """Fail with the difference of two sets of leaves: names, dtypes, shapes, bits.

    Args:
        got: tensors by path.
        expected: tensors that they should equal.
        what: the operation, for the message.
    """
    __tracebackhide__ = True
    check_paths(got, expected, what)
    for path, value in expected.items():
        check_same(got[path], value, f"{what}: leaf {path_text(path)}")


def check_paths(got: Any, expected: Any, what: str) -> None:
    """Fail with missing and superfluous leaves.

    Args:
        got: paths.
        expected: the paths that there should be.
        what: the operation, for the message.
    """
    __tracebackhide__ = True
    listed = list(got)
    lost, added = sorted(set(expected) - set(listed)), sorted(set(listed) - set(expected))
    if lost or added or len(listed) != len(set(listed)):
        parts = [_count("missing", lost), _count("not expected", added)]
        parts += ["a leaf is listed twice"] * (len(listed) != len(set(listed)))
        parts += [f"{path_text(a)} and {path_text(b)} are two names ({why})" for a, b, why in _merged(lost, expected)]
        raise failure(f"{what}: {', '.join(part for part in parts if part)}")


def _merged(lost: list[Path], expected: Any) -> Iterator[tuple[Path, Path, str]]:
    """Yield the first missing leaf that differs from another one by something that file systems overlook."""
    for why, fold in FOLDS.items():
        for path in lost:
            joined = fold("/".join(path))
            for other in expected:
                if other != path and fold("/".join(other)) == joined:
                    yield path, other, why
                    return


def _count(kind: str, paths: list[Path]) -> str:
    if not paths:
        return ""
    some = ", ".join(path_text(path) for path in paths[:3])
    return f"{len(paths)} {'leaf is' if len(paths) == 1 else 'leaves are'} {kind}: {some}{', ...' * (len(paths) > 3)}"


def check_out(store: Store, read: Read, expected: Tensor, what: object) -> None:
    """Read into `read.out`; all of it must be filled, and returned.

    Args:
        store: the store.
        read: a request with `out`.
        expected: the tensor that `out` should equal.
        what: the name of the tensor, for the message.
    """
    __tracebackhide__ = True
    check_outs(store, [read], [expected], what)


def check_outs(store: Store, reads: Sequence[Read], expected: Sequence[Tensor], what: object) -> None:
    """Read into the `out` of several requests; all must be filled, and returned.

    Args:
        store: the store.
        reads: requests with `out`.
        expected: the tensors that these should equal.
        what: their name, for the message.
    """
    __tracebackhide__ = True
    outs = [read.out for read in reads if read.out is not None]
    assert len(outs) == len(reads), "a request has no `out`"
    before = [out.clone().contiguous() for out in outs]
    got = store.read(reads)
    for old, out, want in zip(before, outs, expected, strict=True):
        if same(out.contiguous(), old) and not same(old, want):
            raise failure(f"{_named(what)}`out` was not filled: it holds what it held before `read`")
        check_same(out.contiguous(), want, f"{_named(what)}`out` was filled wrongly")
    for answer, out in zip(got, outs, strict=True):
        check_is_out(answer, out, what)


def check_is_out(got: Tensor, out: Tensor, what: object) -> None:
    """Check that the answer of `read` lies in the memory of `out`.

    Args:
        got: the answer of `read`.
        out: the tensor of the request.
        what: the name of the tensor, for the message.
    """
    __tracebackhide__ = True
    if out.numel() and got.data_ptr() != out.data_ptr():
        raise failure(f"{_named(what)}`read` filled `out` but returned another tensor than `out`")


def check_unchanged(before: object, after: object, what: str) -> None:
    """Fail with the differences between two fingerprints of a storage: left behind, changed, removed.

    Args:
        before: a fingerprint, of `StoreSetup.fingerprint`.
        after: a later one.
        what: the operation between them, for the message.
    """
    __tracebackhide__ = True
    if before == after:
        return
    raise failure(f"{what}: {changes(before, after)}")


def changes(before: object, after: object) -> str:
    """Describe the differences between two fingerprints.

    Args:
        before: a fingerprint, of `StoreSetup.fingerprint`.
        after: a later one.
    """
    if before is None and isinstance(after, Mapping):
        return f"where nothing was there is now {_names(after) or 'an empty folder'}"
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return f"the storage holds {_short(after)} instead of {_short(before)}"
    parts = []
    for verb, names in (
        ("left behind", [n for n in after if n not in before]),
        ("gone", [n for n in before if n not in after]),
        ("changed", [n for n in after if n in before and after[n] != before[n]]),
    ):
        if names:
            parts.append(f"{verb}: {_names(names)}")
    return "; ".join(parts)


def _names(names: Any) -> str:
    listed = sorted(str(name) for name in names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


class Caught(Generic[_Error]):
    """The exception of a `raises` block."""

    value: _Error


@contextmanager
def raises(kind: type[_Error] | tuple[type[_Error], ...], *, doing: str, match: str = "") -> Iterator[Caught[_Error]]:
    """Expect an exception; another one, or none, fails with a message that names the expected one.

    Args:
        kind: the class that must be raised, or several.
        doing: the action of the block, for the message.
        match: text that must be in the message.
    """
    __tracebackhide__ = True
    caught = Caught[_Error]()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(error_name(one) for one in kinds)
    try:
        yield caught
    except kinds as error:
        caught.value = error
        text = str(error)
        if match not in text:
            raise failure(f"{doing}: the message of {type(error).__name__} lacks {match!r}: {text}") from error
        return
    except AssertionError:
        raise
    except Exception as error:
        raise failure(f"{doing}: {expected} is expected, not {error_name(type(error))}: {error}") from error
    raise failure(f"{doing}: {expected} is expected, and nothing was raised")


def in_time(action: Callable[[], object], doing: str, seconds: float) -> None:
    """Run an action that may wait for ever, in a thread; its errors are raised here.

    Args:
        action: called without arguments.
        doing: what it does, for the message.
        seconds: after which it waits for ever.
    """
    __tracebackhide__ = True
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        raise failure(f"{doing}: the store waits for ever ({seconds:g} s and more). Where it waits:\n{where}")
    if raised and isinstance(raised[0], AssertionError):
        raise failure(str(raised[0])) from raised[0]
    if raised:
        raise raised[0]


def error_name(kind: type[BaseException]) -> str:
    """Return the name of an exception, with its module where that is neither of Python nor of tdstore."""
    return kind.__name__ if kind.__module__ in ("builtins", "tdstore.errors") else f"{kind.__module__}.{kind.__name__}"


def check_own_memory(tensor: Tensor, what: object = "") -> None:
    """Check that a tensor is writable: one over read-only memory ends the process that writes into it.

    Args:
        tensor: the tensor.
        what: the name of the tensor, for the message.
    """
    __tracebackhide__ = True
    if not tensor.numel() or tensor.device.type != "cpu":
        return
    if _mapped_read_only(tensor.data_ptr()):
        raise failure(
            f"{_named(what)}the tensor lies in memory that cannot be written; writing into it would end the process"
        )


def _mapped_read_only(address: int) -> bool:
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, rights = line.split(maxsplit=2)[:2]
                start, _, stop = span.partition("-")
                if int(start, 16) <= address < int(stop, 16):
                    return "w" not in rights
    except FileNotFoundError:  # not Linux: the other tests of writing into what was read must do
        return False
    return False


def check_read_writable(store: Store, reads: list[Read]) -> None:
    """Check that reads return writable memory.

    Args:
        store: the store.
        reads: the requests.
    """
    __tracebackhide__ = True
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The given (NumPy array|buffer) is not writable")
            got = store.read(reads)
    except UserWarning as warning:
        raise failure(
            "`read` gives a tensor over memory that must not be written (torch warns of it): copy it, or read into an "
            "array of your own"
        ) from warning
    finally:
        torch.set_warn_always(always)
    for read, tensor in zip(reads, got, strict=True):
        check_own_memory(tensor, read.path)


def check_equal(got: object, expected: object, what: str) -> None:
    """Fail with both values where they differ.

    Args:
        got: the value.
        expected: the value that it should equal.
        what: its name, for the message.

    Example:
        >>> check_equal((2,), (3,), "the shape")
        Traceback (most recent call last):
        ...
        AssertionError: the shape: (2,) instead of (3,)
    """
    __tracebackhide__ = True
    if got != expected:
        raise failure(f"{what}: {_short(got)} instead of {_short(expected)}")


def check_digests(got: Mapping[Path, str], expected: Mapping[Any, Tensor], what: str) -> None:
    """Fail with the leaves whose hashes, of another process, are not those of the expected tensors.

    Args:
        got: hashes by path, of `samples.digest`.
        expected: the tensors.
        what: the operation, for the message.
    """
    __tracebackhide__ = True
    check_paths(got, expected, what)
    wrong = [path_text(path) for path, value in expected.items() if got[path] != digest(value)]
    if wrong:
        raise failure(f"{what}: other values in leaf {_names(wrong)}")


def check_mentions(error: BaseException, *words: str) -> None:
    """Check that the message of an error has all of these words.

    Args:
        error: the error.
        *words: the words.
    """
    __tracebackhide__ = True
    for word in words:
        if word not in str(error):
            raise failure(f"the message of {type(error).__name__} does not name {word}: {error}")


def check_spec(got: LeafSpec, expected: LeafSpec, path: Path) -> None:
    """Fail with the difference of two specs: dtype, shape or fill value.

    Args:
        got: the spec of the store.
        expected: the spec that it should equal.
        path: the leaf.
    """
    __tracebackhide__ = True
    for name in ("dtype", "shape", "fill_value"):
        found, wanted = getattr(got, name), getattr(expected, name)
        if found != wanted and not (found != found and wanted != wanted):  # NaN is not itself
            raise failure(f"specs of leaf {path_text(path)}: {name} {_plain(found)} instead of {_plain(wanted)}")


def _plain(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else repr(value)


def check_header(got: object, expected: Header, what: str = "the header") -> None:
    """Fail with the first group, and the field of it, that differs between two headers.

    Args:
        got: the header of the store.
        expected: the header that it should equal.
        what: its name, for the message.
    """
    __tracebackhide__ = True
    if not isinstance(got, Header):
        raise failure(f"{what}: {type(got).__name__} instead of Header")
    if list(got.groups) != list(expected.groups):
        lost = [path_text(p) for p in expected.groups if p not in got.groups]
        added = [path_text(p) for p in got.groups if p not in expected.groups]
        parts = [f"lost: {_names(lost)}"] * bool(lost) + [f"added: {_names(added)}"] * bool(added)
        raise failure(f"{what}: groups were lost, added or reordered ({'; '.join(parts) or 'reordered'})")
    for path, group in expected.groups.items():
        for field in Group.__struct_fields__:
            found, wanted = getattr(got.groups[path], field), getattr(group, field)
            if found != wanted:
                where = f"{what}: {field} of group {path_text(path)}"
                raise failure(f"{where} is {_short(found)} instead of {_short(wanted)}")
        found, wanted = list(got.groups[path].values), list(group.values)
        if found != wanted:
            raise failure(f"{what}: the values of group {path_text(path)} were reordered: {_short(found)}")


def check_names(error: BaseException, place: object, doing: str = "") -> None:
    """Check that the message of an error names the location, with its scheme or without.

    Args:
        error: the error.
        place: the location.
        doing: the operation, for the message.
    """
    __tracebackhide__ = True
    if str(place).rpartition("://")[2] not in str(error):
        raise failure(f"{doing}: the message of {type(error).__name__} does not name {place}: {error}")
