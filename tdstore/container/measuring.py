"""Facts about all leaves together: sizes, gradients, places in memory."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.core import GROUP, LEAF, VALUE
from tdstore.container.paths import entry_path
from tdstore.container.structure import StructureMixin
from tdstore.ops.reduce import Over


class MeasureMixin(StructureMixin):
    """bytes, param_count, requires_grad, grad, is_cpu, ..."""

    __slots__ = ()

    # -- sizes -------------------------------------------------------------------------------
    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Bytes of all tensor leaves, without reading them.

        Args:
            count_duplicates: False counts a tensor that several entries share once.
        """
        return sum(n * size for n, size in self._sizes(count_duplicates))

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Number of elements of all tensor leaves, without reading them; arguments as `bytes`."""
        return sum(n for n, _ in self._sizes(count_duplicates))

    def _sizes(self, count_duplicates: bool) -> list[tuple[int, int]]:
        """Elements and element size of each leaf."""
        found: dict[Any, tuple[int, int]] = {}
        for node, key in self._leaf_places():
            shape, _, dtype, *_ = node._leaf_facts(key)
            same = (len(found),) if count_duplicates else node._identity(key)
            found[same] = (torch.Size(shape).numel(), dtype.itemsize)
        return list(found.values())

    def _leaf_places(self) -> list[tuple[Any, str]]:
        places: list[tuple[Any, str]] = []
        for key in self._first_keys():
            kind = self._kind(key)
            if kind == LEAF:
                places.append((self, key))
            elif kind == GROUP:
                places += self._raw(key)._leaf_places()
        return places

    def _identity(self, key: str) -> Any:
        """Equal for two leaves that are one: the tensor where it is live, the place where it is stored."""
        return id(self), key

    def data_ptr(self, *, storage: bool = False) -> Any:
        """A TensorDict of the addresses of the leaves (int64 scalars), or with `storage` of their storages."""

        def address(leaf: Tensor) -> Tensor:
            return torch.tensor(leaf.untyped_storage().data_ptr() if storage else leaf.data_ptr())

        return self._resident()._over_leaves_of(address, Over(None, False, self.batch_dims), torch.Size(()), None)

    # -- places --------------------------------------------------------------------------------
    @property
    def is_cpu(self) -> bool:
        """Whether the device is the CPU; False when entries may differ (`device` is None)."""
        return self._device is not None and self._device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU; False when entries may differ (`device` is None)."""
        return self._device is not None and self._device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        """Whether the device is "meta"; False when entries may differ (`device` is None)."""
        return self._device is not None and self._device.type == "meta"

    def is_floating_point(self) -> bool:
        """Whether every leaf has a floating-point dtype."""
        return all(node._leaf_facts(key)[2].is_floating_point for node, key in self._leaf_places())

    def is_non_tensor(self, key: Any) -> bool:
        """Whether the entry of a (nested) key is a value that is not a tensor.

        Raises:
            KeyNotFoundError: no such entry.
        """
        found = self._find(entry_path(key))
        if found is None:
            raise self._missing(key)
        return bool(found[0]._kind(found[1]) == VALUE)

    # -- gradients -------------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires a gradient."""
        return any(leaf.requires_grad for leaf in self._leaf_list())

    @property
    def grad(self) -> Any:
        """A TensorDict of the leaves' gradients, those that have one; None when none has."""
        td = self._resident().apply(lambda leaf: leaf.grad, filter_empty=True)
        return None if td is None or td.is_empty() else td

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Forget the leaves' gradients, or with `set_to_none=False` fill them with zeros."""
        for leaf in self._leaf_list():
            if leaf.grad is not None:
                if set_to_none:
                    leaf.grad = None
                else:
                    leaf.grad.detach_().zero_()
        return self

    def detach_(self) -> Self:
        """Detach every leaf in place, as `Tensor.detach_`."""
        for leaf in self._leaf_list():
            leaf.detach_()
        return self
