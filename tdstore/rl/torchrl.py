"""Adapters of storages to torchrl's buffers, samplers and writers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tdstore.errors import MissingDependencyError
from tdstore.interop import from_tensordict, to_tensordict
from tdstore.rl.kinds import is_collection, is_foreign
from tdstore.rl.storages.tabular import TabularStorage

if TYPE_CHECKING:
    from torchrl.data import TensorStorage  # type: ignore[import-untyped,import-not-found,unused-ignore]


def torchrl_storage(storage: TabularStorage) -> TensorStorage:
    """Wrap a storage of this package as one of torchrl, which reads and writes TensorDicts of `tensordict`.

    Args:
        storage: the storage of the rows.

    Raises:
        MissingDependencyError: `torchrl` is not installed.

    Example:
        >>> storage = torchrl_storage(LazyStorage(1000, "zarr"))  # doctest: +SKIP
        >>> buffer = torchrl.data.TensorDictReplayBuffer(storage=storage, batch_size=32)  # doctest: +SKIP
    """
    made: TensorStorage = _storage_class()(storage)
    return made


@functools.cache
def _storage_class() -> Any:
    """Return the class, which cannot be defined before torchrl is imported."""
    try:
        from torchrl.data import TensorStorage  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from torchrl.data.replay_buffers.storages import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
            Storage,
        )
    except ImportError as error:
        raise MissingDependencyError(
            "this needs the package 'torchrl', which is not installed", hint="pip install torchrl"
        ) from error

    class OurRows(TensorStorage):  # type: ignore[misc,unused-ignore]
        """Rows of a storage of tdstore."""

        def __init__(self, rows: TabularStorage) -> None:
            Storage.__init__(self, rows.max_size)
            self.rows = rows
            self.ndim = rows.ndim

        # Attributes that torchrl's parts read.
        @property
        def initialized(self) -> bool:
            return self.rows.initialized

        @initialized.setter
        def initialized(self, value: bool) -> None:
            """Ignore the value that torchrl sets; the rows know better."""

        @property
        def shape(self) -> Any:
            return self.rows.shape

        @property
        def device(self) -> Any:
            return self.rows.device  # type: ignore[attr-defined]

        @property
        def _storage(self) -> Any:
            return self.get(slice(None)) if self.rows.initialized else None

        @property
        def _len(self) -> int:
            return len(self.rows)

        @property
        def _is_full(self) -> bool:
            return len(self.rows) == self.rows.max_size

        @property
        def _max_size_along_dim0(self) -> Any:
            return lambda **_: self.rows.capacity

        @property
        def _len_along_dim0(self) -> int:
            return 0 if self.rows.shape is None else self.rows.shape[0]

        @property
        def _total_shape(self) -> Any:
            shape = self.rows.shape
            return None if shape is None else (self.rows.capacity, *shape[1:])

        @property
        def _last_cursor(self) -> Any:
            return (self.rows.cursor - 1) % self.rows.capacity

        @_last_cursor.setter
        def _last_cursor(self, value: Any) -> None:
            """Ignore the value that torchrl sets; the rows have a cursor of their own."""

        # Rows.
        def get(self, index: Any) -> Any:
            found = self.rows.get(index)
            return to_tensordict(found) if is_collection(found) else found

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            if isinstance(data, list):
                data = [from_tensordict(one) if is_foreign(one) else one for one in data]
            elif is_foreign(data):
                data = from_tensordict(data)
            self.rows.set(cursor, data, set_cursor=set_cursor)
            self.rows.filled_directly = False  # a writer of torchrl wrote

        def __len__(self) -> int:
            return len(self.rows)

        def contains(self, item: Any) -> Any:
            return self.rows.contains(item)

        def flush(self) -> None:
            self.rows.flush()

        # Checkpoints.
        def state_dict(self) -> Any:
            return self.rows.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.rows.load_state_dict(state_dict)

        def dumps(self, path: Any) -> None:
            self.rows.dumps(path)

        def loads(self, path: Any) -> None:
            self.rows.loads(path)

        dump, save, load = dumps, dumps, loads

        def _empty(self) -> None:
            self.rows.empty()

        def __repr__(self) -> str:
            return f"OurRows({self.rows!r})"

    return OurRows
