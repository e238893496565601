"""Moving a container to a device or a dtype."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.columns import ColumnsMixin
from tdstore.container.core import Container


class PlacingMixin(ColumnsMixin):
    """to, cpu, cuda, detach, requires_grad_, ..."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert to a device, a dtype, both, or those of another tensor or TensorDict.

        Args:
            *args: a device, a `torch.dtype` (cast of every leaf, integers included), a tensor, or a TensorDict.
            batch_size: change the batch size in place, and return this TensorDict.
            non_blocking: as `Tensor.to`.
            inplace: change this TensorDict instead of making one.

        Returns:
            This TensorDict when there is nothing to change.
        """
        kwargs.pop("num_threads", None), kwargs.pop("non_blocking_pin", None)
        inplace = kwargs.pop("inplace", False)
        batch_size = kwargs.pop("batch_size", None)
        other = kwargs.pop("other", None)
        if args and isinstance(args[0], Container):
            other, args = args[0], args[1:]
        device, dtype, non_blocking = None, None, False
        if other is not None and isinstance(other, Container):
            device, dtype = other.device, _common_dtype(other)
        elif other is not None:
            device, dtype = other.device, other.dtype
        if args or kwargs:
            asked_device, asked_dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            device, dtype = asked_device or device, asked_dtype or dtype
        if batch_size is not None:
            self.batch_size = batch_size
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if dtype is None and (device is None or device == self._device):
            return self
        made = self._to(device, dtype, non_blocking)
        if not inplace:
            return made
        self._assign(dict(made.items()))
        self._device = device or self._device
        return self

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        def convert(leaves: list[Tensor]) -> list[Tensor]:
            return [t.to(device=device or t.device, dtype=dtype or t.dtype, non_blocking=non_blocking) for t in leaves]

        made = self._resident()._foreach(convert)
        if made is not self and device is not None:
            made._set_device(device)
        return made

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        for group in self._groups():
            group._set_device(device)

    def cpu(self, **kwargs: Any) -> Any:
        """`to("cpu")`."""
        return self.to("cpu", **kwargs)

    def cuda(self, device: Any = None, **kwargs: Any) -> Any:
        """`to("cuda")`, or to `cuda:device`."""
        return self.to("cuda" if device is None else torch.device("cuda", device), **kwargs)

    def auto_device_(self) -> Self:
        """Set the device to that of the leaves, where they share one; nested TensorDicts too."""
        devices = {leaf.device for leaf in self._leaf_list()}
        if len(devices) == 1:
            self._set_device(devices.pop())
        return self

    def clear_device_(self) -> Self:
        """Forget the device, here and in nested TensorDicts: entries may then differ."""
        self._set_device(None)
        return self

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all leaves, or None when they differ."""
        return _common_dtype(self)

    def detach(self) -> Any:
        """A TensorDict of detached leaves, sharing memory."""
        return self._resident()._foreach(lambda leaves: [t.detach() for t in leaves])

    @property
    def data(self) -> Any:
        """A TensorDict of `leaf.data`."""
        return self._resident()._foreach(lambda leaves: [t.data for t in leaves])

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set `requires_grad` of every leaf."""
        for leaf in self._leaf_list():
            leaf.requires_grad_(requires_grad)
        return self


def _common_dtype(td: Any) -> torch.dtype | None:
    dtypes = set()
    stack = [td]
    while stack:
        node = stack.pop()
        for key in node._first_keys():
            kind = node._kind(key)
            if kind == "leaf":
                dtypes.add(node._leaf_facts(key)[2])
            elif kind == "group":
                stack.append(node._raw(key))
    return dtypes.pop() if len(dtypes) == 1 else None
