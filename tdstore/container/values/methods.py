"""Methods of a TensorDict on entries that hold no tensor, for code that treats all entries alike.

An entry without tensors is the same on every device, for every dtype and after any function of tensors. It has no
entries of its own, and its batch takes any shape that the batch of a TensorDict takes.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, Self, overload

import torch

from tdstore.container.values.saved import SavedValues
from tdstore.errors import InvalidArgumentError
from tdstore.index.index_terms import on_cpu
from tdstore.types import NamesLike, SizeLike

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from tdstore.container.values.nontensor import NonTensor

    class Movable(Protocol):
        """The methods that those of shapes call."""

        def move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> NonTensor:
            """Apply a shape operation of tensors to the batch."""


class ValueCasts:
    """Casts of an entry that holds no tensor.

    They are apart because methods named `float` or `int` would hide the builtins in annotations.
    """

    __slots__ = ()

    def type(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def bool(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def double(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def float(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def half(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def bfloat16(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def int(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def float16(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def float32(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def float64(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def complex32(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def complex64(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def complex128(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def int8(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def int16(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def int32(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def int64(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def uint8(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def uint16(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def uint32(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def uint64(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def qint8(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def qint32(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def quint8(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def quint4x2(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self


class ValueMethods(SavedValues, ValueCasts):
    """Methods of a TensorDict on an entry that holds no tensor.

    Methods about devices, dtypes, gradients, keys and functions of tensors return the entry itself; those of shapes
    work as they do on a batch. `keys`, `items` and `values` are empty.

    Example:
        >>> td = TensorDict({"x": torch.zeros(2), "s": ["a", "b"]}, [2])
        >>> [(key, entry.cpu().flip(0).tolist()) for key, entry in td.items()]
        [('x', [0.0, 0.0]), ('s', ['b', 'a'])]
    """

    __slots__ = ()

    dtype: None = None
    depth: int = 0
    is_cpu: bool = False
    is_cuda: bool = False
    is_meta: bool = False
    requires_grad: bool = False
    is_locked: bool = False
    """Also False after `lock_()`: there are no entries that could be added or removed."""

    @property
    def names(self: Any) -> list[str | None]:
        """Dimension names of the TensorDict that `get` read this entry from; else None for each dimension."""
        known = getattr(self, "_names", None)
        return list(known) if known and len(known) == len(self.batch_size) else [None] * len(self.batch_size)

    @names.setter
    def names(self: Any, names: NamesLike) -> None:
        if names is not None and len(names) != len(self.batch_size):
            raise InvalidArgumentError(f"{list(names)} are not names of the {len(self.batch_size)} dimensions")
        self._names = None if names is None else tuple(names)

    @property
    def sorted_keys(self) -> list[str]:
        """An empty list."""
        return []

    def keys(self, *args: Any, **kwargs: Any) -> KeysView[str]:
        """Return no keys."""
        return {}.keys()

    def values(self, *args: Any, **kwargs: Any) -> ValuesView[Any]:
        """Return no entries."""
        return {}.values()

    def items(self, *args: Any, **kwargs: Any) -> ItemsView[str, Any]:
        """Return no entries."""
        return {}.items()

    def get(self: Any, key: Any, default: Any = None) -> Any:
        """Return the value for the key "data", and `default` for all others."""
        return self.data if key == "data" else default

    def is_empty(self) -> bool:
        """Return False: there is a value."""
        return False

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self: Any, dim: int | None = None) -> Any:
        """Return the batch size, or its length along `dim`."""
        return self.batch_size if dim is None else self.batch_size[dim]

    def ndimension(self: Any) -> int:
        """Return the number of batch dimensions."""
        return len(self.batch_size)

    def bytes(self, **kwargs: Any) -> int:
        """Return 0: there are no tensors."""
        return 0

    def param_count(self, **kwargs: Any) -> int:
        """Return 0: there are no tensors."""
        return 0

    def is_floating_point(self) -> bool:
        """Return False: there are no tensors."""
        return False

    def is_memmap(self) -> bool:
        """Return False: there are no tensors."""
        return False

    def is_shared(self) -> bool:
        """Return False: there are no tensors."""
        return False

    def is_consolidated(self) -> bool:
        """Return False: there are no tensors."""
        return False

    def is_contiguous(self) -> bool:
        """Return True."""
        return True

    def numpy(self: Any) -> Any:
        """Return the value, or nested lists of values."""
        return self.data

    def copy(self: Any) -> NonTensor:
        """Copy the entry without its values, as `clone(recurse=False)` does."""
        made: NonTensor = self.clone(recurse=False)
        return made

    def expand_as(self: Any, other: Any) -> NonTensor:
        """Expand the values to the batch size of a container, or to the shape of a tensor."""
        made: NonTensor = self.expand(other.shape)
        return made

    # -- methods that leave an entry without tensors as it is -------------------------------
    def cpu(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def detach(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def detach_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def requires_grad_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def zero_grad(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def zero_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def record_stream(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def pin_memory(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def pin_memory_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def share_memory_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def clear_device_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def auto_device_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def auto_batch_size_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def clear_refs_for_compile_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def lock_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def unlock_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def apply(self: Any, *args: Any, batch_size: SizeLike | None = None, **kwargs: Any) -> NonTensor:
        """Return the entry itself; one value for another batch, if there is a `batch_size`."""
        return _of_batch(self, batch_size)

    def apply_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def named_apply(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def select(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def exclude(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def empty(self: Any, *args: Any, batch_size: SizeLike | None = None, **kwargs: Any) -> NonTensor:
        """Return the entry itself; one value for another batch, if there is a `batch_size`."""
        return _of_batch(self, batch_size)

    def flatten_keys(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def unflatten_keys(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def filter_empty_(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def filter_non_tensor_data(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def to_tensordict(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def to_pytree(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def to_padded_tensor(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    def densify(self, *args: Any, **kwargs: Any) -> Self:
        """Return the entry itself."""
        return self

    # -- shapes: the same as of a batch ------------------------------------------------------
    def broadcast_to(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.broadcast_to` to the batch."""
        return self.move(lambda t: torch.Tensor.broadcast_to(t, *args, **kwargs))

    def flip(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.flip` to the batch."""
        return self.move(lambda t: torch.Tensor.flip(t, *args, **kwargs))

    def fliplr(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.fliplr` to the batch."""
        return self.move(lambda t: torch.Tensor.fliplr(t, *args, **kwargs))

    def flipud(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.flipud` to the batch."""
        return self.move(lambda t: torch.Tensor.flipud(t, *args, **kwargs))

    def gather(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.gather` to the batch."""
        on, named = on_cpu(args), {name: on_cpu(value) for name, value in kwargs.items()}
        return self.move(lambda t: torch.Tensor.gather(t, *on, **named))

    def index_select(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.index_select` to the batch."""
        on, named = on_cpu(args), {name: on_cpu(value) for name, value in kwargs.items()}
        return self.move(lambda t: torch.Tensor.index_select(t, *on, **named))

    def masked_select(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.masked_select` to the batch."""
        on, named = on_cpu(args), {name: on_cpu(value) for name, value in kwargs.items()}
        return self.move(lambda t: torch.Tensor.masked_select(t, *on, **named))

    def moveaxis(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.moveaxis` to the batch."""
        return self.move(lambda t: torch.Tensor.moveaxis(t, *args, **kwargs))

    def movedim(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.movedim` to the batch."""
        return self.move(lambda t: torch.Tensor.movedim(t, *args, **kwargs))

    def narrow(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.narrow` to the batch."""
        return self.move(lambda t: torch.Tensor.narrow(t, *args, **kwargs))

    def repeat(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.repeat` to the batch."""
        return self.move(lambda t: torch.Tensor.repeat(t, *args, **kwargs))

    def repeat_interleave(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.repeat_interleave` to the batch."""
        on, named = on_cpu(args), {name: on_cpu(value) for name, value in kwargs.items()}
        return self.move(lambda t: torch.Tensor.repeat_interleave(t, *on, **named))

    def roll(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.roll` to the batch."""
        return self.move(lambda t: torch.Tensor.roll(t, *args, **kwargs))

    def rot90(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.rot90` to the batch."""
        return self.move(lambda t: torch.Tensor.rot90(t, *args, **kwargs))

    def swapaxes(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.swapaxes` to the batch."""
        return self.move(lambda t: torch.Tensor.swapaxes(t, *args, **kwargs))

    def swapdims(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.swapdims` to the batch."""
        return self.move(lambda t: torch.Tensor.swapdims(t, *args, **kwargs))

    def tile(self: Movable, *args: Any, **kwargs: Any) -> NonTensor:
        """Apply `TensorDict.tile` to the batch."""
        return self.move(lambda t: torch.Tensor.tile(t, *args, **kwargs))

    def unflatten(self: Movable, dim: Any, unflattened_size: Any) -> NonTensor:
        """Apply `TensorDict.unflatten` to the batch."""
        return self.move(lambda t: t.unflatten(dim, unflattened_size))

    def atleast_1d(self: Any) -> NonTensor:
        """Apply `TensorDict.atleast_1d` to the batch."""
        made: NonTensor = self.move(lambda t: _at_least(1, t))
        return made

    def atleast_2d(self: Any) -> NonTensor:
        """Apply `TensorDict.atleast_2d` to the batch."""
        made: NonTensor = self.move(lambda t: _at_least(2, t))
        return made

    def atleast_3d(self: Any) -> NonTensor:
        """Apply `TensorDict.atleast_3d` to the batch."""
        made: NonTensor = self.move(lambda t: _at_least(3, t))
        return made

    def chunk(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Apply `TensorDict.chunk` to the batch."""
        return tuple(self.spread(lambda t: torch.Tensor.chunk(t, *args, **kwargs)))

    def tensor_split(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Apply `TensorDict.tensor_split` to the batch."""
        return tuple(self.spread(lambda t: torch.Tensor.tensor_split(t, *args, **kwargs)))


def _at_least(ndim: int, t: torch.Tensor) -> torch.Tensor:
    """Add dimensions of length one in front, as TensorDicts do; torch appends some of them."""
    return t[(None,) * (ndim - t.ndim)] if t.ndim < ndim else t


def _of_batch(entry: NonTensor, batch_size: Any) -> NonTensor:
    """Return one value for another batch; the entry itself if there is no other, or it has values per row."""
    made = None if batch_size is None else entry.for_batch(torch.Size(batch_size))
    return entry if made is None else made
