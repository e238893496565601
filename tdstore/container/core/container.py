"""Base of every container, over a handful of primitives.

A container is a tree of entries (tensors, nested containers, non-tensor values) whose tensors all start
with its batch size. Where the tensors live is the business of a store, never of a subclass per backend:
`TensorDict` holds live tensors, `PersistentTensorDict` reads them on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import check_batch_dims
from tdstore.container.core.dim_names import NamesMixin
from tdstore.container.core.locks import READONLY, LockMixin
from tdstore.container.core.paths import entry_path
from tdstore.container.core.primitives import GROUP as GROUP
from tdstore.container.core.primitives import LEAF as LEAF
from tdstore.container.core.primitives import VALUE as VALUE
from tdstore.container.core.primitives import EntrySource as EntrySource
from tdstore.container.core.primitives import Primitives
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.entries.structured_arrays import fields_of
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.dtypes import torch_ready
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidStateError, KeyNotFoundError, ReadOnlyError
from tdstore.header import Group
from tdstore.index.shapes import as_dim, as_size
from tdstore.index.tracing import traced_setters
from tdstore.ops.arithmetic import ArithmeticOps
from tdstore.ops.cast import CastOps
from tdstore.ops.extremes import ExtremeOps
from tdstore.ops.pointwise import PointwiseOps
from tdstore.ops.rearrange import RearrangeOps
from tdstore.settings import list_to_stack
from tdstore.types import Names, Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
    from tdstore.tensordicts.resident.tensordict import TensorDict


@traced_setters
class Container(ArithmeticOps, PointwiseOps, ExtremeOps, CastOps, RearrangeOps, NamesMixin, LockMixin, Primitives):
    """The state of a container, and what follows from the primitives at once; `TensorDictBase` adds the methods."""

    __slots__ = ("__weakref__", "_batch_size", "_device", "_names", "_tensorclass")

    _batch_size: torch.Size
    _device: torch.device | None
    _names: Names
    _tensorclass: Any
    """The tensorclass that this container is the inside of; not set otherwise."""
    if TYPE_CHECKING:  # at run time these names are unknown here, and typing.get_type_hints would fail
        _resident_class: ClassVar[type[TensorDict]]
        """The in-memory container; set by its module."""
        _stack_class: ClassVar[type[LazyStackedTensorDict]]
        """The stack that is not made; set by its module."""
    _stored_class: ClassVar[Any]
    """The container over a store that is not resident; set by its module."""
    _params_class: ClassVar[Any]
    """The container that is a `torch.nn.Module`; set by its module."""
    _on_redis: ClassVar[Callable[[Any, Any], Any]]
    """Makes a `TensorDictStore` of a container on a redis server and the device of its reads; set by its module."""

    __hash__ = None  # type: ignore[assignment]

    # -- shape -------------------------------------------------------------------------------
    @property
    def batch_size(self) -> torch.Size:
        """Shape of the batch: the leading dimensions that all entries share.

        Setting it checks every leaf and grows nested TensorDicts that are too small; `BatchSizeError`
        otherwise, with nothing changed.
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        if type(batch_size) is torch.Size and batch_size == self._batch_size:
            return  # as in tensordict; a list of the same sizes grows nested ones too
        new = as_size(batch_size)
        if self._resize_plain(new):
            return
        self._check_batch(new, ())
        for above in self._batches_above():
            if new[: len(above)] != above:
                raise BatchSizeError(
                    f"the TensorDict that this one is an entry of has the batch size {list(above)}, "
                    f"with which {list(new)} does not start",
                    hint="set the batch_size of the outer TensorDict first",
                )
        self._set_batch_size(new)

    def _resize_plain(self, batch_size: torch.Size) -> bool:
        """Take a batch size where all entries are plain tensors that start with it; False, and unchanged, elsewhere."""
        return False

    def _batches_above(self) -> list[torch.Size]:
        """Return the batch sizes of the TensorDicts that this one is known to be an entry of: those that are locked."""
        return [p.batch_size for p in self._locked_parents() if not isinstance(p, self._stack_class)]

    def _check_batch(self, new: torch.Size, path: tuple[str, ...]) -> None:
        n = len(new)
        for key in self._first_keys():
            kind = self._kind(key)
            if kind == GROUP:
                self._raw(key)._check_batch(new, (*path, key))
                continue
            size = self._leaf_shape(key) if kind == LEAF else self._value_size(key)
            if size[:n] == new or (kind != LEAF and not isinstance(self._raw(key), NonTensorStack)):
                continue  # one value fits any batch
            raise BatchSizeError(
                f"entry {path_text((*path, key))} of shape {list(size)} does not start with the batch size {list(new)}"
            )

    shape = batch_size

    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    ndim = batch_dims

    def dim(self) -> int:
        """Return the number of batch dimensions.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4]).dim()
            2
        """
        return len(self._batch_size)

    ndimension = dim

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or its length along one dimension.

        Args:
            dim: a batch dimension. Default: all.

        Raises:
            DimensionError: `dim` is out of range.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4])
            >>> td.size(), td.size(-1)
            (torch.Size([3, 4]), 4)
        """
        if dim is None:
            return self._batch_size
        size = self._batch_size
        return size[dim] if type(dim) is int and 0 <= dim < len(size) else size[as_dim(dim, len(size))]

    def numel(self) -> int:
        """Return the number of rows: the product of the batch size, and at least 1. `param_count` counts elements.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4]).numel()
            12
        """
        return max(1, self._batch_size.numel())

    def __len__(self) -> int:
        return self._batch_size[0] if self._batch_size else 0

    def __bool__(self) -> bool:
        raise InvalidStateError("the truth of a TensorDict is ambiguous: use is_empty(), len(), all() or any()")

    @property
    def depth(self) -> int:
        """Number of TensorDicts that the deepest leaf is nested in; 0 when no nested TensorDict has leaves."""
        return max(0, self._leaf_depth())

    def _leaf_depth(self) -> int:
        """Return the depth of the deepest leaf; -1 when there is none."""
        kinds = [(key, self._kind(key)) for key in self._first_keys()]
        below = [self._raw(key)._leaf_depth() for key, kind in kinds if kind == GROUP]
        deepest = max(below, default=-1)
        return deepest + 1 if deepest >= 0 else 0 if len(below) < len(kinds) else -1

    def auto_batch_size_(self, batch_dims: int | None = None, keep_compliant_size: bool = False) -> Self:
        """Set the largest batch size that all entries share, here and in nested TensorDicts.

        Args:
            batch_dims: at most this many batch dimensions. Default: as many as possible.
            keep_compliant_size: leave nested TensorDicts alone that have `batch_dims` batch dimensions or more.

        Returns:
            This TensorDict.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, 5)})
            >>> td.auto_batch_size_().batch_size
            torch.Size([3])
        """
        check_batch_dims(batch_dims)
        for _, group in self._stored_groups():
            if not keep_compliant_size or batch_dims is None or group.batch_dims < batch_dims:
                group.auto_batch_size_(batch_dims, keep_compliant_size)
        common: torch.Size | None = None
        for key in self._first_keys():
            kind = self._kind(key)
            entry: Any = None if kind == LEAF else self._raw(key)
            if isinstance(entry, (NonTensorData, Tensor)) or (kind == GROUP and entry.is_empty()):
                continue  # fits any batch
            shape = self._leaf_shape(key) if entry is None else entry.batch_size
            if common is None:
                common = shape[:batch_dims]
            if shape[: len(common)] == common:
                continue
            same = 0
            while same < min(len(common), len(shape)) and common[same] == shape[same]:
                same += 1
            common = common[:same]
        new = common if common is not None else self.batch_size[:batch_dims]  # nothing in it that says one
        if new != self.batch_size:
            self._set_batch_size(new)
        return self

    # -- device ------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None when entries may differ. Change it with `to(device)`."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise InvalidStateError("the device cannot be set in place: use td.to(device)")

    # -- names -------------------------------------------------------------------------------
    def _check_names(self, names: Names) -> None:
        if names is not None:
            self._refuse_names(names, len(self._batch_size), ())

    def _refuse_names(self, names: Names, ndim: int, above: Path) -> None:
        """Raise an error for names that nested TensorDicts have for their dimensions behind the first `ndim`."""
        for key in self._first_keys():
            if self._kind(key) != GROUP or not isinstance(group := self._raw(key), Container):
                continue
            for name in (group._names or ())[ndim:]:
                if name is not None and name in (names or ()):
                    raise InvalidArgumentError(
                        f"the dimension name {name!r} is already used by the TensorDict {path_text((*above, key))}; "
                        "rename its dimension first"
                    )
            group._refuse_names(names, ndim, (*above, key))

    # -- values ------------------------------------------------------------------------------
    def _groups(self) -> list[Any]:
        return [self._raw(k) for k in self._first_keys() if self._kind(k) == GROUP]

    def _whole(self, what: str) -> None:
        """Raise `UnsupportedError` if this is a view of stored data, whose entries are not its own."""

    def _unwrapped(self, key: str, entry: Any) -> Any:
        """Return a first-level entry as `td[key]` does: non-tensor values without their wrapper."""
        return entry.plain() if isinstance(entry, NonTensor) else entry

    def _is_unbatched(self, key: str) -> bool:
        """Check whether a VALUE is an unbatched tensor: a leaf, though it has no rows."""
        return isinstance(self._raw(key), Tensor)

    def _value_text(self, key: str) -> str:
        """Return the text that stands for a VALUE in `repr`."""
        return repr(self._raw(key))

    def _value_size(self, key: str) -> torch.Size:
        """Return the batch size of a VALUE, without reading it where it is stored."""
        size: torch.Size = self._raw(key).batch_size
        return size

    # -- as a store sees it: a lazy stack shows its elements --------------------------------
    def _own_record(self) -> Group | None:
        """Return the header record of this level; None where the entries determine it."""
        return None

    def _stored_groups(self) -> list[tuple[str, Any]]:
        """Return the groups below this level, by their names in a store."""
        return [(k, self._raw(k)) for k in self._first_keys() if self._kind(k) == GROUP]

    def _child(self, key: str) -> Any:
        """Return the entry of a name in a store."""
        return self._raw(key)

    def _walkable(self) -> Any:
        """Return the form that tree walks can traverse: the resident form, or a lazy stack itself."""
        return self._resident()

    def _check_writable(self) -> None:
        if self._state & READONLY:
            raise ReadOnlyError(
                "these entries belong to a store that was opened for reading only",
                hint="open it with mode='r+' to write, or clone() it to change a copy",
            )

    def _check_all_writable(self) -> None:
        """Refuse a write into all entries where this TensorDict, or one that is nested in it, is read-only."""
        self._check_writable()
        for group in self._groups():
            group._check_all_writable()

    def _coerce(self, key: str, value: Any) -> Any:
        """Turn what a user sets into an entry of this batch size and device."""
        batch, device = self._batch_size, self._device
        if is_batched(value):
            tensor = value
        elif isinstance(value, Container):
            return self._adopt(key, value)
        elif isinstance(value, NonTensor):
            return _fit_value(key, value, batch, device)
        elif isinstance(value, Mapping):
            group: Any = self._resident_class._from_mapping(value, batch, device, self._names)
            if self._is_in(group):
                raise self._refuse_itself((key,))
            return group
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, (Container, NonTensor)) for v in value):
            return self._coerce(key, torch.stack(list(value)))
        elif isinstance(value, (bool, int, float, complex, np.ndarray, np.generic, list, tuple)):
            made = _as_tensor(value, device)
            if made is None and isinstance(value, np.ndarray) and value.dtype.names is not None:
                fields = fields_of(value, lambda below, shape: below)
                return self._resident_class._from_mapping(fields, batch, device, self._names)
            if made is None:
                return _as_value(key, value, batch)
            tensor = made
        else:
            return NonTensorData(value, batch)
        shape = leaf_shape(tensor)
        if shape[: len(batch)] != batch:
            raise BatchSizeError(
                f"batch dimension mismatch: entry {key!r} has shape {list(shape)}, "
                f"which does not start with the batch size {list(batch)}"
            )
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        return tensor

    def _name_after(self, value: Any) -> None:
        """Take the dimension names of an entry that was set, where this TensorDict has none."""
        if self._names is None and isinstance(value, Container) and (found := value._names) is not None:
            names = found[: len(self._batch_size)]
            if any(names):
                self._set_names(names)

    def _with_batch_of(self, key: Any, value: Container) -> Container:
        """Return an entry whose batch size starts with that of this container: itself, or a shallow copy."""
        batch = self._batch_size
        if value.batch_size[: len(batch)] == batch:
            return value
        value = value._shallow()
        try:
            value.batch_size = batch
        except BatchSizeError as error:
            raise BatchSizeError(
                f"batch dimension mismatch: the TensorDict under {key!r} cannot take "
                f"the batch size {list(batch)}: {error.message}"
            ) from None
        return value

    def _adopt(self, key: str, value: Container, *, new: bool = False) -> Container:
        """Return a TensorDict as an entry: with this batch size, this device, and these names of dimensions.

        Args:
            new: this TensorDict is being made, so that it cannot be in another one.
        """
        if not new and self._is_in(value):
            raise self._refuse_itself((key,))
        batch = self._batch_size
        value = self._with_batch_of(key, value)
        if self._device is not None and value.device != self._device:
            value = value._to(self._device, None, False)
        if self._names is not None and (value._names or ())[: len(batch)] != self._names:
            for mine, theirs in zip(self._names, value._names or (), strict=False):
                if None not in (mine, theirs) and mine != theirs:
                    raise InvalidArgumentError(
                        f"the TensorDict under {key!r} has the dimension names {value.names}, this one {self.names}"
                    )
            value = value._shallow()
            value._set_names(self._names + (value._names or (None,) * value.batch_dims)[len(batch) :])
        return value

    def _is_in(self, value: Container) -> bool:
        """Return whether a TensorDict is this one or has it below: nothing that descends into both would end."""
        plain = self._resident_class
        waiting: list[Any] = [value]
        for node in waiting:  # which grows
            group = node if type(node) is plain else getattr(node, "_tensordict", node)  # of a tensorclass
            if group is self:
                return True
            if type(group) is plain:
                for entry in group._data.values():
                    if type(entry) is not Tensor and isinstance(entry, Container):
                        waiting.append(entry)
            elif not isinstance(group, Container._stored_class):  # whose entries are in a store
                waiting += group._groups()
        return False

    def _refuse_itself(self, path: Path) -> InvalidArgumentError:
        """Create the error for a TensorDict that is set into itself."""
        return InvalidArgumentError(
            f"cannot set a TensorDict as its own entry {path_text(path)}, or below it",
            hint="set td.clone(recurse=False)",
        )

    def _missing(self, key: Any) -> KeyNotFoundError:
        """Create the error for a missing entry, which lists the keys of the group that lacks it."""
        path, node, depth = entry_path(key), self, 0
        while depth < len(path) - 1 and node._kind(path[depth]) == GROUP:
            node, depth = node._raw(path[depth]), depth + 1
        known = sorted(node._first_keys())
        listed = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
        place = f"{path_text(path[:depth])}, " if depth else ""
        return KeyNotFoundError(
            f"key {path_text(path)} not found in {place}a {type(node).__name__} with keys [{listed}]"
        )

    # -- context manager ---------------------------------------------------------------------
    def __enter__(self) -> Self:
        offered, *running = self._undo if isinstance(self._undo, list) else (self._undo,)
        if offered is None:
            offered = ""  # nothing to undo
        self._undo = [None, *running, offered]
        return self

    def _return_unchanged(self) -> Self:
        self._offer("")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _, *running, undo = self._undo
        self._undo = [None, *running] if running else None
        if isinstance(undo, str):
            if undo:
                getattr(self, undo)()
                self._offer(None)
        elif callable(undo):  # what is lent to a module comes back, whatever happened
            undo(self)
        elif undo is not None and kind is None:
            ref, back = undo
            source = ref()
            if source is not None and not source.is_locked:
                source.update(back(self))
            elif source is not None and not self.is_locked:
                source._write_replaced(back(self))


def _as_tensor(value: Any, device: torch.device | None) -> Tensor | None:
    """Convert numbers and (nested) sequences of them to a tensor; return None for anything else."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "biufc":
        return None
    if isinstance(value, (list, tuple)) and _holds_no_number(value):
        return None
    try:
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(v, Tensor) for v in value):
                stacked = torch.stack(list(value))
                return stacked if device is None else stacked.to(device)
            return torch.tensor(value, device=device)
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        ready = torch_ready(value)
        return None if ready is value else torch.as_tensor(ready, device=device)


def _holds_no_number(value: Any) -> bool:
    """Check whether nested sequences begin with something that is no number: torch.compile cannot try and see."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value is None or isinstance(value, (str, bytes, dict))


def _as_value(key: str, value: Any, batch: torch.Size) -> NonTensor:
    """Wrap a value: a list as one value per row, anything else as one value for the batch."""
    if isinstance(value, list) and value and list_to_stack():
        stack = NonTensorStack.from_list(value, _levels(value, batch))
        if stack.ndim < len(batch):
            raise BatchSizeError(
                f"batch dimension mismatch: the list for {key!r} has the lengths {list(stack.batch_size)}, "
                f"the batch size is {list(batch)}",
                hint="give nested lists, one level per batch dimension, or NonTensorData(value) for one value",
            )
        return _fit_value(key, stack, batch)
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "US":
        return _fit_value(key, NonTensorStack.from_list(value.tolist(), value.ndim), batch)
    return NonTensorData(value, batch)


def _levels(value: list[Any], batch: torch.Size) -> int:
    """Count the levels of nested lists that are dimensions of the batch."""
    levels, parts = 0, [value]
    for size in batch:
        if not all(isinstance(part, list) and len(part) == size for part in parts):
            break
        levels, parts = levels + 1, [v for part in parts for v in part]
    return max(1, levels)


def _fit_value(key: str, value: NonTensor, batch: torch.Size, device: torch.device | None = None) -> NonTensor:
    if device is not None and isinstance(value, Tensor) and value.device != device:
        value = value.to(device)  # an unbatched tensor
    if value.batch_size[: len(batch)] == batch and not isinstance(value, Tensor):
        return value
    if (made := value.for_batch(batch)) is not None:
        return made
    raise BatchSizeError(
        f"batch dimension mismatch: the values of {key!r} have shape {list(value.batch_size)}, "
        f"the batch size is {list(batch)}",
        hint="give one value for each position, or one value for all" if value.ndim < len(batch) else None,
    )
