"""Rows of one dimension: gather, scatter, sort, and parse from a user's index."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from threading import get_ident, main_thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from tdstore.dtypes import to_numpy
from tdstore.errors import DimensionError, IndexKindError, InvalidArgumentError, OutOfRangeError
from tdstore.index.masks import masks_as_rows
from tdstore.index.tracing import traced
from tdstore.types import StoreIndex

_THREADS_PAY = 8 << 20
"""Below this many bytes waking OpenMP threads can cost more (13 ms on a busy machine) than it saves."""
_MANY_THREADS = 8
_MANY_THREADS_PAY = 256 << 10
"""The same bound from so many threads on: a machine with them has cores to spare.

On 16 cores numpy gathers 390 KiB in 34 us, torch in 21, and 5 MiB in 486 and 36.
"""
_ROW = 32
"""From rows of this many bytes on numpy scatters faster than torch."""
_NO_OVERRIDE = torch._C._disabled_torch_function_impl
_UINT64 = np.dtype(np.uint64)
FEW = 32
"""Up to this many rows Python finds the least and the greatest faster than numpy does."""
ONE_THREAD = 8192
"""Up to this many elements torch writes rows in the order given; of more, threads may write some at once."""
_PARALLEL_ROWS = 4096
"""Up to this many rows `leaf[rows] = value` keeps the order given too."""
COPIED_DTYPES = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)
"""Dtypes that all copies of torch know; others are copied as their bits."""
NUMPY_DTYPES = COPIED_DTYPES - {torch.bfloat16}
"""Dtypes of torch that numpy has too."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT8 = (
    ("float8_e8m0fnu",)
    if hasattr(torch, "float8_e8m0fnu")
    else ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")  # torch 2.6
)
_NO_KERNELS = frozenset(getattr(torch, name) for name in ("uint16", "uint32", "uint64", *_FLOAT8))
"""Dtypes that torch cannot gather or assign by rows in every case; their bits it can."""


# -- moving rows --------------------------------------------------------------------------


def gather(leaf: Tensor, index: StoreIndex, out: Tensor | None = None) -> Tensor:
    """Return `leaf[index]` in memory of its own, or in `out` (same shape and dtype, any strides).

    Raises:
        InvalidArgumentError: `out` has another shape or dtype than `leaf[index]`.
    """
    for at, term in enumerate(index):
        if isinstance(term, Tensor):
            if leaf.dtype not in _NO_KERNELS:
                return _gather_rows(leaf, index, at, term, out)
            if out is not None:
                _check_out(out, out.shape, leaf.dtype)
                _gather_rows(as_bits(leaf), index, at, term, as_bits(out))
                return out
            return _gather_rows(as_bits(leaf), index, at, term, out).view(leaf.dtype)
    view = leaf[index] if index else leaf
    if out is None:
        return view.clone(memory_format=torch.contiguous_format)
    _check_out(out, view.shape, view.dtype)
    return out.copy_(view.detach())


def _gather_rows(leaf: Tensor, index: StoreIndex, at: int, rows: Tensor, out: Tensor | None) -> Tensor:
    if len(index) > 1:
        leaf = leaf[(*index[:at], slice(None), *index[at + 1 :])]
    shape = (*leaf.shape[:at], len(rows), *leaf.shape[at + 1 :])
    if out is not None:
        _check_out(out, shape, leaf.dtype)
        leaf = leaf.detach()
    if leaf.device.type != "cpu":
        gathered = leaf.index_select(at, rows.to(leaf.device))
        return gathered if out is None else out.copy_(gathered)
    if not leaf.is_contiguous():
        if at == 0 and leaf[:1].is_contiguous():
            gathered = leaf.index_select(at, rows)
        else:  # nothing to copy in blocks: torch's elementwise gather is the faster one
            gathered = leaf[(slice(None),) * at + (rows,)].contiguous()
        return gathered if out is None else out.copy_(gathered)
    if out is not None and (not out.is_contiguous() or out.device.type != "cpu"):
        return out.copy_(_gather_dense(leaf, at, rows, shape, None))
    return _gather_dense(leaf, at, rows, shape, out)


def _gather_dense(leaf: Tensor, at: int, rows: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    # Both copy whole rows (`leaf[rows]` goes element by element, 5-20 times slower). numpy takes scattered
    # rows from memory in less than half the time, and never waits for threads.
    if leaf.ndim > 1 and math.prod(shape) * leaf.itemsize < threads_pay_from() and not leaf.requires_grad:
        if out is None:
            out = torch.empty(shape, dtype=leaf.dtype, device="cpu")
        # mode="clip" writes straight into `out`; "raise" would go through a buffer. Rows are in range.
        np.take(to_numpy(leaf), rows.numpy(), axis=at, out=to_numpy(out), mode="clip")
        return out
    if out is None:
        return leaf.index_select(at, rows)
    return torch.index_select(leaf, at, rows, out=out)


def threads_pay_from() -> int:
    """Return the bytes of rows from which torch, with its threads, gathers faster than numpy.

    In the main thread only: each thread that calls torch has a team of threads of its own. Two that read batches of
    5 MiB on 16 cores were slower than one.
    """
    if torch.get_num_threads() < _MANY_THREADS or get_ident() != main_thread().ident:
        return _THREADS_PAY
    return _MANY_THREADS_PAY


def _check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise InvalidArgumentError(
            f"out= has shape {list(out.shape)} and dtype {out.dtype}, but what is read has {list(shape)} and {dtype}"
        )


def has_bits(dtype: torch.dtype) -> bool:
    """Return whether a dtype has integers of its width, as `as_bits` needs."""
    return dtype.itemsize in _BITS


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers of the same width, which torch can gather, assign and join in every case."""
    return tensor.view(_BITS[tensor.itemsize])


def take(tensor: Tensor, dim: int, rows: Tensor) -> Tensor:
    """Select rows along `dim`: `index_select` for every dtype, on the device of `tensor`."""
    rows = rows.to(tensor.device)
    if tensor.dtype in _NO_KERNELS:
        return as_bits(tensor).index_select(dim, rows).view(tensor.dtype)
    return tensor.index_select(dim, rows)


def take_by_numpy(entries: dict[str, Any], rows: np.ndarray[Any, Any], most: int, out: dict[str, Any]) -> list[str]:
    """Take rows of the first dimension of each dense leaf that numpy copies sooner than torch.

    Args:
        entries: leaves and other entries.
        rows: the rows; numpy checks them as it copies.
        most: the bytes of the largest leaf whose rows numpy copies sooner; up to a page a row, in half the time.
        out: gets the rows, in the order of `entries`, and None for what is left.

    Returns:
        the names of the entries that are left.

    Raises:
        IndexError: a row out of range.
    """
    left = []
    for key, value in entries.items():
        kind = type(value)
        if (
            (kind is Tensor or getattr(kind, "__torch_function__", None) is _NO_OVERRIDE)
            and value.dtype in NUMPY_DTYPES
            and value.is_cpu
            and not (value.is_nested or value.requires_grad)
            and value.ndim > 1
            and value.nbytes <= most
            and value.is_contiguous()
        ):
            out[key] = torch.from_numpy(value.numpy().take(rows, 0))
        else:
            out[key] = None
            left.append(key)
    return left


def scatter(leaf: Tensor, index: StoreIndex, value: Tensor) -> None:
    """Put `value` at `leaf[index]`; where rows repeat the last one wins (torch leaves that open)."""
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    if at is None:
        (leaf[index] if index else leaf).copy_(value)
        return
    rows, positions = last_wins(index[at])  # type: ignore[arg-type]
    value = value.to(leaf.device, leaf.dtype)
    if positions is not None:
        value = take(value, at, positions)
    if len(index) == 1 and _whole_rows(leaf, rows, value):
        _copy_rows(leaf, rows, value)
        return
    if leaf.dtype in _NO_KERNELS:
        leaf, value = as_bits(leaf), as_bits(value)
    leaf[(*index[:at], rows.to(leaf.device), *index[at + 1 :])] = value


def rows_on(device: torch.device, rows: Tensor, size: int, made: dict[torch.device, Tensor]) -> Tensor:
    """Return rows on a device, checked before they go there: on a GPU bad ones would end the work of the process.

    Args:
        device: where they are needed.
        rows: int64, on another device.
        size: of their dimension.
        made: those that were moved before.

    Raises:
        OutOfRangeError: a row out of range.
    """
    found = made.get(device)
    if found is None:
        found = made[device] = check_rows(rows, size).to(device)
    return found


def at_rows(leaf: Tensor, index: Any) -> Tensor:
    """Return `leaf[index]` for every dtype, and for rows on the device of a leaf, unchecked and maybe negative."""
    if leaf.dtype in _NO_KERNELS:
        return as_bits(leaf)[index].view(leaf.dtype)
    return leaf[index]


def put_rows(
    leaf: Tensor,
    rows: Tensor,
    value: Tensor,
    by_device: dict[torch.device, tuple[Tensor, Tensor | None]] | None = None,
) -> None:
    """Write `leaf[rows] = value` for checked rows; the last of repeated rows wins, as far as torch knows order.

    Of rows that are on a device already torch does not say which wins.

    Args:
        leaf: the tensor.
        rows: int64; unchecked if they are on the device of the leaf.
        value: of the shape `[len(rows), *leaf.shape[1:]]`, on any device.
        by_device: the rows on other devices, none of them twice, and where the value of each stands.
    """
    dtype, on_cpu = leaf.dtype, leaf.is_cpu
    if value.dtype is not dtype or not ((on_cpu and value.is_cpu) or value.device == leaf.device):
        value = value.to(leaf.device, dtype)
    elif _share(leaf, value):
        value = value.clone()  # torch refuses some that lie over one another, others it reads as it writes
    if on_cpu and not rows.is_cpu:
        rows = check_rows(rows, len(leaf)).cpu()
    if not on_cpu and not leaf.is_meta:
        positions = None
        if rows.device != leaf.device:
            rows, positions = _last_rows_on(leaf.device, rows, len(leaf), {} if by_device is None else by_device)
        _assign(leaf, rows, value if positions is None else at_rows(value, positions))
    elif on_cpu and dtype in COPIED_DTYPES and value.numel() <= ONE_THREAD:
        leaf.index_copy_(0, rows, value)  # in order, at half the cost
    elif len(rows) > _PARALLEL_ROWS:
        scatter(leaf, (rows,), value)
    else:
        put(leaf, (rows,), value)


def for_index_copy(pairs: Iterable[tuple[Tensor, Tensor]], rows: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Pair leaves with what `leaf.index_copy_(0, rows, value)` writes into them as `put_rows` would.

    Args:
        pairs: leaves, and values as those of `put_rows`.
        rows: int64, checked.

    Returns:
        None if `put_rows` writes one of them in another way.
    """
    if not rows.is_cpu:
        return None
    ready = []
    for leaf, value in pairs:
        dtype = leaf.dtype
        if not leaf.is_cpu or dtype not in COPIED_DTYPES or value.numel() > ONE_THREAD:
            return None
        if value.dtype is not dtype or not value.is_cpu:
            value = value.to(leaf.device, dtype)
        elif _share(leaf, value):
            value = value.clone()
        ready.append((leaf, value))
    return ready


def _share(leaf: Tensor, value: Tensor) -> bool:
    return (value._is_view() or leaf._is_view()) and value.untyped_storage()._cdata == leaf.untyped_storage()._cdata


def _last_rows_on(
    device: torch.device, rows: Tensor, size: int, made: dict[torch.device, tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    found = made.get(device)
    if found is None:
        last, positions = last_wins(check_rows(rows, size).cpu())
        found = made[device] = last.to(device), positions if positions is None else positions.to(device)
    return found


def put(leaf: Tensor, terms: tuple[Any, ...], value: Tensor) -> None:
    """Write `leaf[terms] = value` for any torch index and every dtype; `value` has the leaf's dtype."""
    if len(terms) == 1 and _whole_rows(leaf, terms[0], value):
        _copy_rows(leaf, terms[0], value)
        return
    _assign(leaf, masks_as_rows(terms) if len(terms) > 1 else terms, value)


def _assign(leaf: Tensor, terms: Any, value: Tensor) -> None:
    if leaf.dtype in _NO_KERNELS:
        leaf, value = as_bits(leaf), as_bits(value)
    try:
        leaf[terms] = value
    except NotImplementedError:  # torch lacks the kernel for this dtype, and has written nothing
        if not has_bits(leaf.dtype):
            raise
        as_bits(leaf)[terms] = as_bits(value)


def _whole_rows(leaf: Tensor, rows: Any, value: Tensor) -> bool:
    """Check whether numpy can copy whole rows; torch goes element by element, 100 times slower for frames."""
    return (
        type(rows) is Tensor
        and rows.dtype is torch.int64
        and rows.ndim == 1
        and value.ndim == leaf.ndim
        and len(value) == len(rows)
        and value.nbytes >= _ROW * len(rows)
        and value.shape[1:] == leaf.shape[1:]
        and value.dtype is leaf.dtype
        and leaf.device.type == value.device.type == rows.device.type == "cpu"
        and not (leaf.requires_grad or value.requires_grad)
        and not traced()
    )


def _copy_rows(leaf: Tensor, rows: Tensor, value: Tensor) -> None:
    to_numpy(leaf)[rows.numpy()] = to_numpy(value)
    increment_version(leaf)  # as torch does: a backward pass that needs what was there before must notice


# -- putting rows in order ----------------------------------------------------------------


def _increasing(rows: np.ndarray[Any, Any]) -> bool:
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())


def last_wins(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drop repeated rows, each keeping its last position.

    Returns:
        The rows, and the positions to take from the value that goes with them: `None` when
        no row repeats (the rows are then those given; otherwise they come back sorted).

    Example:
        >>> last_wins(torch.tensor([4, 1, 4]))
        (tensor([1, 4]), tensor([1, 2]))
    """
    array = rows.numpy()
    if _increasing(array):
        return rows, None
    order = np.argsort(array, kind="stable")
    ordered = array[order]
    last = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=last[:-1])
    if last.all():
        return rows, None
    return torch.from_numpy(ordered[last]), torch.from_numpy(order[last])


def sorted_unique(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sort rows and drop repeated ones.

    Returns:
        Strictly increasing rows and `inverse`, with `rows == unique[inverse]`; `inverse` is
        `None` when the rows were strictly increasing already.

    Example:
        >>> sorted_unique(torch.tensor([4, 1, 4]))
        (tensor([1, 4]), tensor([1, 0, 1]))
    """
    array = rows.numpy()
    if _increasing(array):
        return rows, None
    unique, inverse = np.unique(array, return_inverse=True)
    return torch.from_numpy(unique), torch.from_numpy(inverse)


def runs(rows: Tensor, gap: int = 0) -> list[tuple[int, int]]:
    """Merge strictly increasing rows into `[start, stop)` runs.

    Args:
        rows: strictly increasing rows, int64 `[n]`.
        gap: bridge up to this many rows that were not asked for.

    Example:
        >>> runs(torch.tensor([0, 1, 2, 5, 7])), runs(torch.tensor([0, 1, 2, 5, 7]), gap=1)
        ([(0, 3), (5, 6), (7, 8)], [(0, 3), (5, 8)])
    """
    array = rows.numpy()
    if not len(array):
        return []
    breaks = np.flatnonzero(array[1:] - array[:-1] > gap + 1)
    starts = [int(array[0]), *array[breaks + 1].tolist()]
    stops = [*(array[breaks] + 1).tolist(), int(array[-1]) + 1]
    return list(zip(starts, stops, strict=True))


# -- reading rows off an index ------------------------------------------------------------


def as_index_tensor(index: object) -> Tensor:
    """Read a list, range, numpy array or tensor as an index: int64 or bool, on the CPU, any number of dimensions.

    Raises:
        OutOfRangeError: it holds floats, strings, ... or uint8, which torch takes for a mask and numpy for rows.
    """
    if isinstance(index, Tensor):
        tensor = index.detach()
        if tensor.device.type not in ("cpu", "meta"):
            tensor = tensor.cpu()
        if tensor.dtype is torch.int64 or tensor.dtype is torch.bool:
            return tensor
        if tensor.dtype is torch.uint8:
            raise _ambiguous("a uint8 tensor")
        if tensor.is_floating_point() or tensor.is_complex():
            raise OutOfRangeError(f"an index holds ints or bools, not {tensor.dtype}")
        return tensor.to(torch.int64)
    if isinstance(index, range):
        return torch.from_numpy(np.arange(index.start, index.stop, index.step, dtype=np.int64))
    if isinstance(index, list) and index and type(index[0]) is not int and any(isinstance(p, Tensor) for p in index):
        index = [part.tolist() if isinstance(part, Tensor) else part for part in index]
    if is_compiling() and isinstance(index, (list, tuple)):
        return as_index_tensor(
            torch.tensor(index, device="cpu") if index else torch.empty(0, dtype=torch.int64, device="cpu")
        )
    try:
        array = np.asarray(index)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists
        raise OutOfRangeError(f"{_show(index)} cannot be an index: {error}") from None
    if array.dtype.kind not in "bui":
        if array.size or not isinstance(index, (list, tuple)):
            raise OutOfRangeError(f"an index holds ints or bools, not {_show(index)}")
        array = array.astype(np.int64)
    if array.dtype == np.uint8:
        raise _ambiguous("a uint8 array")
    if array.dtype == bool:
        return torch.from_numpy(array if array.flags.writeable and _positive(array) else array.copy())
    if array.dtype != np.int64 or not array.flags.writeable or not _positive(array):
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def _positive(array: np.ndarray[Any, Any]) -> bool:
    return all(stride >= 0 for stride in array.strides)  # torch has no negative strides


def _ambiguous(what: str) -> IndexKindError:
    return IndexKindError(f"{what} is a mask to torch and rows to numpy: index with .bool() or with int64 to say which")


def _show(index: object) -> str:
    text = repr(index)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_rows(rows: Tensor, size: int, dim: int = 0) -> Tensor:
    """Check an int64 tensor against `[-size, size)` and count negative rows from the end.

    Raises:
        OutOfRangeError: a row out of range; names it, the dimension and its size.
    """
    if traced() or rows.is_meta:  # torch tells when it runs
        return torch.where(rows < 0, rows + size, rows)
    count = rows.numel()
    if not count:
        return rows
    if count <= FEW and rows.ndim == 1:
        numbers = rows.tolist()
        low, high = min(numbers), max(numbers)
    elif type(rows) is Tensor and rows.is_cpu:
        array = rows.numpy()
        unsigned = array.view(_UINT64)  # negative ones are the largest of all here
        if unsigned.item(unsigned.argmax()) < size:  # a quarter of the time of `max`, for the rows of a batch
            return rows
        low, high = int(array.min()), int(array.max())
    else:
        low, high = (int(v) for v in torch.aminmax(rows))
    if low < -size or high >= size:
        raise out_of_range(low if low < -size else high, dim, size)
    return torch.where(rows < 0, rows + size, rows) if low < 0 else rows


def check_indices(places: Iterable[tuple[StoreIndex, Sequence[int]]]) -> None:
    """Check that indices which reach a store lie within their leaves, all before any is read or written.

    Args:
        places: `(index, shape of the leaf)`, one for each request. Rows that several of them share are looked at once.

    Raises:
        OutOfRangeError: a row, the end of a slice or the number of dimensions is out of range; or a term is neither a
            slice with a positive step nor an int64 tensor of rows.
    """
    known: Tensor | None = None
    limit = 0
    before: StoreIndex = ()
    sizes: Sequence[int] = ()
    for index, shape in places:
        if not index:
            continue
        lead = shape[: len(index)]
        if index is before and lead == sizes:
            continue
        before, sizes = index, lead
        if len(index) > len(shape):
            raise OutOfRangeError(f"an index with {len(index)} terms for a leaf of {len(shape)} dimensions")
        for dim, term in enumerate(index):
            size = shape[dim]
            if type(term) is slice:
                if not (0 <= term.start <= term.stop <= size and term.step >= 1):
                    raise OutOfRangeError(f"{term} is out of range for dimension {dim} with size {size}")
            elif term is not known or size < limit:
                if not isinstance(term, Tensor) or term.dtype is not torch.int64 or term.ndim != 1:
                    raise OutOfRangeError(
                        f"{_show(term)} is out of place: a store takes slices, and one tensor of rows"
                    )
                if len(term) and np.maximum.reduce(term.numpy().view(np.uint64)) >= size:  # negative: the largest
                    raise out_of_range(int(term.min() if int(term.min()) < 0 else term.max()), dim, size)
                known, limit = term, size


def out_of_range(index: int, dim: int, size: int) -> OutOfRangeError:
    """Create the error for an index outside its dimension."""
    return OutOfRangeError(f"index {index} is out of range for dimension {dim} with size {size}")


def as_slice(index: slice, size: int) -> range:
    """Apply a slice to a dimension: the positions it selects.

    Raises:
        InvalidArgumentError: the step is not positive.
    """
    if index.step is not None and operator.index(index.step) <= 0:
        raise InvalidArgumentError(f"the step of a slice must be greater than zero, not {operator.index(index.step)}")
    return range(*index.indices(size))


def to_slice(positions: range) -> slice:
    """Return the slice of a `StoreIndex` that selects `positions` (increasing, in range)."""
    if not positions:
        return slice(0, 0, 1)
    if len(positions) == 1:
        return slice(positions[0], positions[0] + 1, 1)
    return slice(positions.start, positions[-1] + 1, positions.step)


def as_rows(index: object, size: int, dim: int = 0) -> Tensor | slice | None:
    """Turn a one-dimensional index over one dimension into rows, checked once for every leaf to use.

    A list, a mask, a numpy array or a tensor becomes int64 rows in `[0, size)` (which may share
    memory with `index`); a slice, and a range that counts up, becomes a slice as in `StoreIndex`.

    Returns:
        `None` for every other kind of index: ints, tuples, None, more dimensions.

    Raises:
        OutOfRangeError: out of range, a mask of another length, or floats.
        InvalidArgumentError: a slice with a step that is not positive.
    """
    if isinstance(index, slice):
        return to_slice(as_slice(index, size))
    if isinstance(index, range):
        if index.step > 0 and index:
            if index[0] < -size or index[-1] >= size:
                raise out_of_range(index[0] if index[0] < -size else index[-1], dim, size)
            shift = size if index[-1] < 0 else 0
            if index[0] + shift >= 0:
                return to_slice(range(index[0] + shift, index[-1] + shift + 1, index.step))
    elif not isinstance(index, (Tensor, list, np.ndarray)):
        return None
    tensor = as_index_tensor(index)
    if tensor.ndim != 1:
        return None
    if tensor.dtype is torch.bool:
        if len(tensor) != size:
            raise mask_mismatch(tensor.shape, dim, (size,))
        return torch.from_numpy(np.flatnonzero(tensor.numpy()))
    return check_rows(tensor, size, dim)


def mask_mismatch(mask: Sequence[int], dim: int, sizes: Sequence[int]) -> DimensionError:
    """Create the error for a mask whose shape differs from that of its dimensions."""
    dims = f"dimension {dim}" if len(mask) == 1 else f"dimensions {dim} to {dim + len(mask) - 1}"
    return DimensionError(f"a mask of shape {list(mask)} does not match {dims} of shape {list(sizes)}")
