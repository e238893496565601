"""Transfer of objects to other processes by value, with any executor: by plain pickle, tensors as bytes.

`multiprocessing` moves the whole storage of a tensor, which the caller shares, to shared memory. In-place changes
of a worker would then change the caller's tensor, under some executors and not under others.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tdstore.builtin.memmap.tensor import MemoryMappedTensor
from tdstore.errors import InvalidTypeError

PLAIN = (Tensor, MemoryMappedTensor)
"""The classes that are sent as bytes; other classes define their own pickling."""


def rebuilt(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], device: str, grad: bool) -> Tensor:
    """Rebuild the tensor that `_as_bytes` reduced.

    Args:
        data: the bytes, in C order.
        dtype: the dtype.
        shape: the shape.
        device: the device.
        grad: whether the tensor requires a gradient.
    """
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    tensor = flat.reshape(shape)
    if device != "cpu":
        tensor = tensor.to(device)
    return tensor.requires_grad_() if grad else tensor


def _as_bytes(value: Any) -> Any:
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return NotImplemented
    if value.device.type not in ("cpu", "cuda"):
        return NotImplemented
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = bytearray(flat.view(torch.uint8).numpy().data) if flat.numel() else bytearray()
    return rebuilt, (data, value.dtype, tuple(value.shape), str(value.device), value.requires_grad)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return _as_bytes(obj) if isinstance(obj, Tensor) else NotImplemented


@cache
def _cloud_pickler() -> Any:
    """Return a pickler that supports lambdas and local functions; None without cloudpickle."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return None

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            return _as_bytes(obj) if isinstance(obj, Tensor) else super().reducer_override(obj)

    return CloudPickler


def pack(value: object, *, cloud_first: bool = False) -> bytes:
    """Pickle a value with plain pickle or, if that fails or with `cloud_first`, with cloudpickle.

    Raises:
        InvalidTypeError: neither can pickle it.
    """
    cloud = _cloud_pickler()
    kinds = [_Pickler] if cloud is None else [cloud] if cloud_first else [_Pickler, cloud]
    for kind in kinds:
        target = io.BytesIO()
        try:
            kind(target, protocol=5).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as problem:
            error: Exception = problem
        else:
            return target.getvalue()
    hint = "" if cloud is not None else ". With `pip install cloudpickle` lambdas and local functions can be sent"
    raise InvalidTypeError(f"{_description(value)} cannot be sent to another process: {error}{hint}") from error


def _description(value: object) -> str:
    return f"a {type(value).__name__}" if not callable(value) else repr(getattr(value, "__qualname__", value))


class Packed:
    """A value to send by value, which arrives as a `Sealed`. It is pickled once, on first use."""

    __slots__ = ("_cloud", "_data", "value")

    def __init__(self, value: Any, *, cloud_first: bool = False) -> None:
        self.value = value
        self._data: bytes | None = None
        self._cloud = cloud_first

    def data(self) -> bytes:
        """Return the pickle."""
        if self._data is None:
            self._data = pack(self.value, cloud_first=self._cloud)
        return self._data

    def __reduce__(self) -> Any:
        return Sealed, (self.data(),)


class Sealed:
    """The received form of a `Packed`, which is unpickled where an error, such as a missing module, can be reported."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def opened(self) -> Any:
        """Unpickle the value."""
        return pickle.loads(self.data)  # data of this program's own caller or worker


def plain(value: Any) -> Any:
    """Return the value of a `Packed` or `Sealed`, or the value itself."""
    if type(value) is Sealed:
        return value.opened()
    return value.value if type(value) is Packed else value
