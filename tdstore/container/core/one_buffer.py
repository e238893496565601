"""Containers whose leaves are views of one buffer: build, recognise, move and pickle them in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.locks import CONSOLIDATED, SOURCE_LOCKED
from tdstore.container.core.staging import move
from tdstore.container.core.tensorclasses import Typed, maker_of, resolve_class, unwrap
from tdstore.container.entries.nested_tensors import ragged_dim
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.errors import CorruptStoreError, UnsupportedError
from tdstore.io.consolidated.buffer import BufferViews, arrange
from tdstore.io.consolidated.file import OneFile, file_of
from tdstore.pickling import rebuild
from tdstore.types import Fault

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

Copy = Callable[[list[Tensor], list[Tensor]], None]


def parts_of(leaf: Tensor) -> list[Tensor]:
    """Return the dense tensors of a leaf: itself, or the values, offsets and optional lengths of a jagged one.

    Raises:
        UnsupportedError: a nested tensor of another layout, or a sparse one.
    """
    if _is_dense(leaf):
        return [leaf]
    if leaf.layout is not torch.jagged:
        raise UnsupportedError(
            f"a {'nested' if leaf.is_nested else 'sparse'} tensor of layout {leaf.layout} cannot be consolidated",
            hint="make it with layout=torch.jagged, or store values and sizes as two leaves",
        )
    lengths = leaf.lengths()  # type: ignore[attr-defined]
    return [leaf.values(), leaf.offsets(), *([] if lengths is None else [lengths])]  # type: ignore[attr-defined]


def _is_dense(leaf: Tensor) -> bool:
    return not leaf.is_nested and leaf.layout is torch.strided


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Build the jagged tensor of these values, offsets and optional lengths.

    Raises:
        CorruptStoreError: they do not fit; torch would read beyond the values.
    """
    values, offsets = parts[:2]
    lengths = parts[2] if len(parts) > 2 else None
    if values.is_meta:
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)
    sound = offsets.ndim == 1 and len(offsets) > 0 and not offsets.dtype.is_floating_point and 1 <= dim <= values.ndim
    if sound:
        steps = offsets.diff() if lengths is None else lengths
        room = values.shape[dim - 1]
        sound = bool((offsets >= 0).all()) and bool((offsets <= room).all()) and bool((offsets.diff() >= 0).all())
        sound = sound and steps.shape == (len(offsets) - 1,) and bool((steps >= 0).all())
        sound = sound and bool((offsets[:-1] + steps <= room).all())
    if not sound:
        raise CorruptStoreError("the offsets of a nested tensor do not fit its values")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def rebuilt(leaf: Tensor, views: Iterator[Tensor]) -> Tensor:
    """Build a leaf like this one over the next of `views`."""
    if not leaf.is_nested:
        return next(views)
    return joined([next(views) for _ in parts_of(leaf)], ragged_dim(leaf))


def consolidated(td: Any, new_buffer: Callable[[int], Tensor], copy: Copy) -> TensorDict:
    """Copy a container into one buffer.

    Args:
        new_buffer: makes a uint8 tensor of so many bytes.
        copy: copies the leaves of the second list into those of the first.
    """
    source = td._walkable()
    leaves: list[Tensor] = source._leaf_list()
    parts = [part.detach() for leaf in leaves for part in parts_of(leaf)]
    slots = arrange((part.dtype, part.shape) for part in parts)
    buffer = new_buffer(slots[-1].stop if slots else 0)
    over = BufferViews(buffer)
    views = [over.at(slot.dtype, slot.shape, slot.start) for slot in slots]
    copy(views, parts)
    rest = iter(views)
    made: TensorDict = source._with_leaves(rebuilt(leaf, rest) for leaf in leaves)
    made._state |= CONSOLIDATED | (SOURCE_LOCKED if td.is_locked else 0)
    return made


def is_one_buffer(td: Any) -> bool:
    """Check whether a container was consolidated and no tensor was replaced since."""
    return bool(td._state & CONSOLIDATED) and len(_storages(_parts(td))) <= 1


def _parts(td: Any) -> list[Tensor]:
    leaves: list[Tensor] = td._leaf_list()
    return leaves if all(map(_is_dense, leaves)) else [part for leaf in leaves for part in parts_of(leaf)]


def _storages(parts: Iterable[Tensor]) -> set[int]:
    """Return the distinct storages of the parts; -1 stands for one that cannot be sliced."""
    return {p.untyped_storage()._cdata if p.is_contiguous() else -1 for p in parts if p.numel()}


def buffer_of(td: Any) -> Tensor:
    """Return all of the one storage, as bytes."""
    part = next((p for leaf in td._leaf_list() for p in parts_of(leaf) if p.numel()), None)
    if part is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())


def compare_copied(leaves: Iterable[Tensor], rows: slice | Tensor | None, batch: torch.Size) -> None:
    """Compare leaves of a consolidated file with its checksums before rows of them are copied.

    Args:
        rows: of the leaves whose first dimension is that of `batch`; None for any.

    Raises:
        CorruptStoreError: the file holds other bytes than were written.
    """
    for leaf in leaves:
        for part in parts_of(leaf) if leaf.is_nested else (leaf,):
            if (file := file_of(part)) is not None:
                file.check(part, rows if part.shape[:1] == batch[:1] else None)


def cloned(leaf: Tensor) -> Tensor:
    """Copy a leaf, and compare what is copied where it is a view of a consolidated file.

    Raises:
        CorruptStoreError: the file holds other bytes than were written.
    """
    if leaf.is_nested:
        compare_copied([leaf], None, torch.Size())
        return leaf.clone()
    file = file_of(leaf)
    return leaf.clone() if file is None else file.clone(leaf)


def consolidated_faults(td: Any) -> list[Fault]:
    """Compare the consolidated files that back a container with their checksums, and return the differences."""
    found: dict[int, tuple[OneFile, set[int]]] = {}
    for part in _parts(td):
        if (file := file_of(part)) is not None:
            starts = found.setdefault(id(file), (file, set()))[1]
            starts.add(part.data_ptr() - part.untyped_storage().data_ptr())
    return [fault for file, starts in found.values() for fault in file.verify(starts)]


def moved(td: Any, device: torch.device, non_blocking: bool) -> TensorDict:
    """Move a consolidated container to another device by moving its one buffer."""
    made = unpacked(packed(td), move([buffer_of(td)], device, non_blocking=non_blocking)[0])
    made._set_device(device)
    made._state |= td._state & SOURCE_LOCKED
    return made.lock_() if td.is_locked else made


# -- pickling --------------------------------------------------------------------------------
_DENSE, _JAGGED, _OTHER, _TREE, _STACK, _CLASS, _UNBATCHED = range(7)


def packed(td: Any) -> tuple[Any, ...]:
    """Return everything but the buffer, as tuples."""
    if isinstance(td, Typed):
        return _CLASS, maker_of(type(td)), packed(unwrap(td))
    if isinstance(td, Container._stack_class):
        return _STACK, [packed(element) for element in td._tds], td._stack_dim, td._dim_name, td._empty_batch_size
    entries: list[tuple[Any, ...]] = []
    for key in td._first_keys():
        value = td._raw(key)
        if type(value) is Tensor and _is_dense(value):
            entries.append((key, _DENSE, _place(value)))
        elif is_batched(value):
            places = [_place(part) for part in parts_of(value)]
            entries.append((key, _JAGGED, ragged_dim(value), places) if value.is_nested else (key, _DENSE, *places))
        elif isinstance(value, UnbatchedTensor):
            entries.append((key, _UNBATCHED, _place(value.wrapped)))
        elif isinstance(value, Container):
            entries.append((key, _TREE, packed(value)))
        else:
            entries.append((key, _OTHER, value))
    return _TREE, entries, td._batch_size, td._device, td._names


def _place(part: Tensor) -> tuple[torch.dtype, tuple[int, ...], int]:
    start = int(part.storage_offset()) * part.dtype.itemsize if part.numel() else 0
    return part.dtype, tuple(part.shape), start


def unpacked(parts: tuple[Any, ...], buffer: Tensor) -> TensorDict:
    """Rebuild the container that `packed` took apart, over its buffer."""
    made: TensorDict = _unpacked(parts, BufferViews(buffer))
    made._state |= CONSOLIDATED
    return made


def _unpacked(parts: tuple[Any, ...], buffer: BufferViews) -> Any:
    if parts[0] == _CLASS:
        return resolve_class(parts[1])._wrap_if_fits(_unpacked(parts[2], buffer))
    if parts[0] == _STACK:
        _, elements, *rest = parts
        return Container._stack_class._of([_unpacked(element, buffer) for element in elements], *rest)
    _, entries, batch, device, names = parts
    data: dict[str, Any] = {}
    for key, kind, *found in entries:
        if kind == _DENSE:
            data[key] = buffer.at(*found[0])
        elif kind == _UNBATCHED:
            data[key] = UnbatchedTensor(buffer.at(*found[0]), batch)
        elif kind == _JAGGED:
            data[key] = joined([buffer.at(*place) for place in found[1]], found[0])
        else:
            data[key] = _unpacked(found[0], buffer) if kind == _TREE else found[0]
    return Container._resident_class._new(data, torch.Size(batch), device, names)


def unpickled(parts: tuple[Any, ...], buffer: Tensor, locked: bool, source_locked: bool = False) -> TensorDict:
    """Rebuild a consolidated container from its pickle: locked if what was consolidated was, whatever it was itself."""
    made = unpacked(parts, buffer)
    if source_locked:
        made._state |= SOURCE_LOCKED
        made.lock_()
    return made


def reduced(td: Any) -> tuple[Any, ...]:
    """Return the pickled form of a consolidated container: one buffer and the structure."""
    return rebuild, ("consolidated", packed(td), buffer_of(td), td.is_locked, bool(td._state & SOURCE_LOCKED))
