"""Storages over existing data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore import PersistentTensorDict
from tdstore.errors import InvalidArgumentError, InvalidTypeError
from tdstore.interop import from_tensordict
from tdstore.rl.kinds import is_foreign
from tdstore.rl.storages.lazy_kinds import LazyTensorStorage
from tdstore.rl.storages.tabular import OnMismatch
from tdstore.rl.tables.columns import Column
from tdstore.rl.tables.conversion import columns_of, length_of, structure_of
from tdstore.rl.tables.row_sets import RowSet, count_rows
from tdstore.rl.tables.state import Ints, State
from tdstore.rl.tables.structure import Structure
from tdstore.rl.tables.table import ArrayTable, DeviceTable, Table


class TensorStorage(LazyTensorStorage):
    """A storage over a TensorDict, a tensorclass, a tensor, or a dict or tuple of these: full from the start.

    Writes go into that data: into its tensors, or, if it is on a backend, into its place.

    Args:
        storage: the data.
        max_size: number of slots; it can only be that of the data.
        device: where the tensors are moved to; "auto" and "cpu" leave them where they are.
        ndim: number of leading dimensions of the data that are slots.
        compilable: no effect; accepted for callers of torchrl.
        on_mismatch: as of `LazyStorage`.

    Raises:
        ValueError: the data has no rows or is not contiguous, or `max_size` is a different number.
        TypeError: the data has values that are not tensors.

    Example:
        >>> data = TensorDict({"obs": torch.zeros(10, 4)}, [10])
        >>> storage = TensorStorage(data)
        >>> storage[3] = TensorDict({"obs": torch.ones(4)})
        >>> len(storage), data["obs"][3]
        (10, tensor([1., 1., 1., 1.]))
    """

    _may_change = False

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: Any = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        on_mismatch: OnMismatch = "raise",
    ) -> None:
        if is_foreign(storage):
            storage = from_tensordict(storage)
        lead = length_of(storage, ndim)
        if len(lead) < ndim or not lead[0]:
            raise InvalidArgumentError(f"the data has the leading shape {list(lead)}: no rows for ndim={ndim}")
        slots = torch.Size(lead).numel()
        if max_size is not None and max_size not in (slots, lead[0]):
            raise InvalidArgumentError(f"max_size={max_size}, and the data has {slots} slots")
        super().__init__(slots, device="auto", ndim=ndim, compilable=compilable, on_mismatch=on_mismatch)
        if device not in (None, "auto", "cpu"):
            storage = storage.to(device)
        structure = structure_of(storage, ndim, lead[1:])
        self._device = structure.device or self.device
        self._uses(_table_of(storage, structure, lead), structure)

    def _widen(self, columns: list[Column]) -> None:
        table = self._ready()
        assert isinstance(table, ContainerTable), "tensors have no values that become longer"
        structure = Structure(self._structure.root, columns, self._structure.inner)
        wider = ContainerTable(table.td, structure, (table.capacity, *table.inner))
        wider.commit(table.state)
        self._uses(wider, structure)


def _table_of(data: Any, structure: Structure, lead: tuple[int, ...]) -> Table:
    table: Table
    if isinstance(data, PersistentTensorDict):
        table = ContainerTable(data, structure, lead)
    elif structure.has_values:
        raise InvalidTypeError(
            "a TensorStorage is over tensors, and this data has values that are none: "
            "write it into a LazyTensorStorage, which keeps them as bytes"
        )
    else:
        tensors = structure.take(data)
        device = next((t.device.type for t in tensors), "cpu")
        loose = [c.path for c, t in zip(structure.columns, tensors, strict=True) if not t.is_contiguous()]
        if loose:
            raise InvalidArgumentError(f"{'/'.join(loose[0])} is not contiguous: pass data.contiguous()")
        kind = ArrayTable if device == "cpu" else DeviceTable
        table = kind(structure.columns, lead[0], lead[1:], tensors)
    table.commit(State(length=lead[0]))
    return table


class ContainerTable(Table):
    """Rows of a TensorDict on a backend."""

    def __init__(self, td: PersistentTensorDict, structure: Structure, lead: tuple[int, ...]) -> None:
        super().__init__(structure.columns, lead[0], lead[1:])
        self.td, self.structure = td, structure
        self._state = State()

    @property
    def state(self) -> State:
        """The counters."""
        return self._state

    def commit(self, state: State) -> None:
        """Make counters valid."""
        self._state = state

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows to the backend."""
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        count = count_rows(rows)
        self.td[index] = self.structure.build([value.reshape(count, *value.shape[1:]) for value in values], (count,))

    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots."""
        flat = self.td if not self.inner else self.td.reshape(-1)
        return columns_of(self.structure, flat[torch.from_numpy(slots)].to_tensordict(), (len(slots),))

    def look(self, rows: slice) -> list[Tensor]:
        """Return copies of rows."""
        return columns_of(self.structure, self.td[rows].to_tensordict(), (rows.stop - rows.start, *self.inner))
