"""What non-tensor entries answer where code goes over the entries of a TensorDict and treats all of them alike.

An entry without tensors is the same on every device, of every dtype, and after any function of tensors; it has no
entries of its own; and its batch takes any shape that the batch of a TensorDict takes. So three tables say all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tdstore.errors import UnsupportedError
from tdstore.ops.cast import CastOps

_UNCHANGED = """
    cpu cuda detach detach_ requires_grad_ zero_grad zero_ record_stream
    pin_memory pin_memory_ share_memory_ clear_device_ auto_device_ auto_batch_size_ clear_refs_for_compile_
    lock_ unlock_ apply apply_ named_apply select exclude empty flatten_keys unflatten_keys filter_empty_
    filter_non_tensor_data to_tensordict to_pytree to_padded_tensor densify consolidate
""".split()
_MOVED = """
    broadcast_to flip fliplr flipud gather index_select masked_select moveaxis movedim narrow repeat repeat_interleave
    roll rot90 swapaxes swapdims tile unflatten
""".split()
_SPREAD = ("chunk", "tensor_split")


class ValueMethods:
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
    """False also after `lock_()`: there are no entries that could be added or removed."""

    @property
    def names(self: Any) -> list[str | None]:
        """The names of the dimensions, as the TensorDict had them that `get` gave this entry of; else None for each."""
        known = getattr(self, "_names", None)
        return list(known) if known and len(known) == len(self.batch_size) else [None] * len(self.batch_size)

    @property
    def sorted_keys(self) -> list[str]:
        """No keys."""
        return []

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """No keys."""
        return {}.keys()

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """No entries."""
        return {}.values()

    def items(self, *args: Any, **kwargs: Any) -> Any:
        """No entries."""
        return {}.items()

    def get(self: Any, key: Any, default: Any = None) -> Any:
        """The value for the key "data"; `default` for all others."""
        return self.data if key == "data" else default

    def is_empty(self) -> bool:
        """False: there is a value."""
        return False

    def size(self: Any, dim: int | None = None) -> Any:
        """The batch size, or its length along `dim`."""
        return self.batch_size if dim is None else self.batch_size[dim]

    def ndimension(self: Any) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    def bytes(self, **kwargs: Any) -> int:
        """0: there are no tensors."""
        return 0

    def param_count(self, **kwargs: Any) -> int:
        """0: there are no tensors."""
        return 0

    def is_floating_point(self) -> bool:
        """False: there are no tensors."""
        return False

    def is_memmap(self) -> bool:
        """False: there are no tensors."""
        return False

    def is_shared(self) -> bool:
        """False: there are no tensors."""
        return False

    def is_consolidated(self) -> bool:
        """False: there are no tensors."""
        return False

    def is_contiguous(self) -> bool:
        """True."""
        return True

    def numpy(self: Any) -> Any:
        """The value, or nested lists of values."""
        return self.data

    def copy(self: Any) -> Any:
        """As `clone(recurse=False)`."""
        return self.clone(recurse=False)

    def expand_as(self: Any, other: Any) -> Any:
        """The values for the batch of another: of a tensor, its shape."""
        return self.expand(other.shape)

    def memmap(self: Any, prefix: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The entry itself; with a `prefix`, `UnsupportedError`: values are saved with a TensorDict."""
        if prefix is not None:
            raise UnsupportedError(
                "a non-tensor entry has no file of its own", hint="save a TensorDict with it: TensorDict(key=value)"
            )
        return self

    memmap_ = memmap_like = memmap


def _unchanged(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return _called(method, name, "The entry itself.")


def _moved(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.move(lambda t: fn(t, *args, **kwargs))

    return _called(method, name, f"As `TensorDict.{name}`.")


def _spread(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(self.spread(lambda t: fn(t, *args, **kwargs)))

    return _called(method, name, f"As `TensorDict.{name}`.")


def _at_least(ndim: int, t: torch.Tensor) -> torch.Tensor:
    """With dimensions of length one in front, as TensorDicts have it; torch puts some behind."""
    return t[(None,) * (ndim - t.ndim)] if t.ndim < ndim else t


def _called(method: Any, name: str, doc: str) -> Callable[..., Any]:
    method.__name__, method.__qualname__, method.__doc__ = name, f"ValueMethods.{name}", doc
    found: Callable[..., Any] = method
    return found


for _name in (*_UNCHANGED, *(name for name in vars(CastOps) if name[0] != "_")):
    setattr(ValueMethods, _name, _unchanged(_name))
for _name in _MOVED:
    setattr(ValueMethods, _name, _moved(_name, getattr(torch.Tensor, _name)))
for _number in (1, 2, 3):
    _name = f"atleast_{_number}d"
    setattr(ValueMethods, _name, _moved(_name, functools.partial(_at_least, _number)))
for _name in _SPREAD:
    setattr(ValueMethods, _name, _spread(_name, getattr(torch.Tensor, _name)))
