"""Facts about all leaves together: sizes, gradients, places in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.errors import InvalidStateError, InvalidTypeError
from tdstore.keys import key_text
from tdstore.ops.reduce import Over
from tdstore.types import NestedKey

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


class MeasureMixin(Container):
    """bytes, param_count, requires_grad, grad, is_cpu, ..."""

    __slots__ = ()

    # -- sizes -------------------------------------------------------------------------------
    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Count the bytes of all tensor leaves, of their gradients, and of the offsets of jagged leaves.

        Stored leaves are not read, and count as they do in memory.

        Args:
            count_duplicates: False counts a tensor that is used for several entries once.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.uint8)}, [3]).bytes()
            51
        """
        plain = self._memory_leaves() if count_duplicates else None
        if plain is not None:
            grads = [leaf.grad for leaf in plain if leaf.requires_grad and leaf.is_leaf]
            return sum([part.nbytes for part in (*plain, *grads) if part is not None])
        leaves = sum(n * size for n, size in self._sizes(count_duplicates))
        return leaves + sum(self._companion_sizes(count_duplicates))

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Count the elements of all tensor leaves, without reading them. Arguments as of `bytes`."""
        plain = self._memory_leaves() if count_duplicates else None
        return sum([leaf.numel() for leaf in plain] if plain else [n for n, _ in self._sizes(count_duplicates)])

    def _sizes(self, count_duplicates: bool) -> list[tuple[int, int]]:
        """List the number of elements and the element size of each leaf."""
        found: dict[Any, tuple[int, int]] = {}
        for node, key in self._leaf_places():
            shape, _, dtype, *_ = node._leaf_facts(key)
            same = (len(found),) if count_duplicates else node._identity(key)
            count = torch.Size(shape).numel() if -1 not in shape else sum(p.numel() for p in node._raw(key).unbind())
            found[same] = (count, dtype.itemsize)
        return list(found.values())

    def _companion_sizes(self, count_duplicates: bool) -> list[int]:
        """List the bytes of the gradients of in-memory leaves, and of the offsets and lengths of jagged leaves."""
        found: dict[Any, int] = {}
        for node, key in self._leaf_places():
            for part, nbytes in node._companions(key):
                found[len(found) if count_duplicates else part] = nbytes
        return list(found.values())

    def _companions(self, key: str) -> list[tuple[Any, int]]:
        """List the other tensors of a leaf, each with its bytes: the gradient, and the offsets of a jagged leaf."""
        return []

    def _leaf_places(self) -> list[tuple[Any, str]]:
        places: list[tuple[Any, str]] = []
        for key in self._first_keys():
            kind = self._kind(key)
            if kind == LEAF or (kind == VALUE and self._is_unbatched(key)):
                places.append((self, key))
            elif kind == GROUP:
                places += self._raw(key)._leaf_places()
        return places

    def _identity(self, key: str) -> Any:
        """Equal for two leaves that are one: the tensor where it is live, the place where it is stored."""
        return id(self), key

    def data_ptr(self, *, storage: bool = False) -> TensorDictBase:
        """Return the memory addresses of the leaves.

        Args:
            storage: the addresses of the leaves' storages, which views share.

        Returns:
            A TensorDict of int64 scalars, of batch size `[]`. A lazy stack has an entry for each element: "0", "1", ...

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> int(td.data_ptr()["a"]) == td["a"].data_ptr()
            True
        """

        def address(leaf: Tensor) -> Tensor:
            return torch.tensor(leaf.untyped_storage().data_ptr() if storage else leaf.data_ptr(), device="cpu")

        made: TensorDictBase = self._resident()._over_leaves_of(
            address, Over(None, False, self.batch_dims), torch.Size(()), None
        )
        return made

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
        """Return whether every leaf has a floating-point dtype."""
        plain = self._memory_leaves()
        if plain is not None:
            return all(leaf.is_floating_point() for leaf in plain)
        return all(node._leaf_facts(key).dtype.is_floating_point for node, key in self._leaf_places())

    def is_non_tensor(self, key: NestedKey) -> bool:
        """Return whether the entry at a (nested) key is a value that is not a tensor.

        Args:
            key: a string, or a tuple of strings for a nested entry.

        Raises:
            KeyNotFoundError: there is no such entry.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": "text"}, [2])
            >>> td.is_non_tensor("a"), td.is_non_tensor("b")
            (False, True)
        """
        found = self._find(entry_path(key))
        if found is None:
            raise self._missing(key)
        return bool(found[0]._kind(found[1]) == VALUE and not found[0]._is_unbatched(found[1]))

    # -- gradients -------------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires a gradient."""
        return True in [leaf.requires_grad for leaf in self._leaf_list()]

    @property
    def grad(self) -> Self | None:
        """A TensorDict of the gradients of those leaves that have one, and of the values. Locked if this one is.

        None if no leaf has a gradient and there are no values.
        """
        grads: Self | None = self._resident().apply(_grad_of, filter_empty=True)
        return grads.lock_() if grads is not None and self.is_locked else grads

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Drop the gradients of the leaves.

        Args:
            set_to_none: False fills them with zeros instead.

        Returns:
            This TensorDict.

        Example:
            >>> td = TensorDict({"a": torch.ones(2, requires_grad=True)}, [2])
            >>> td["a"].sum().backward()
            >>> td.zero_grad().grad is None
            True
        """
        for leaf in self._leaf_list():
            if leaf.grad is not None:
                if set_to_none:
                    leaf.grad = None
                else:
                    leaf.grad.detach_().zero_()
        return self

    def backward(
        self,
        gradient: Container | Mapping[str, object] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Container | Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients of all leaves that require one, in one pass, and accumulate them in the graph's leaves.

        Args:
            gradient: a TensorDict with the gradient of each of these leaves; default: 1, for leaves of one element.
            retain_graph: keep the graph for another call; default: `create_graph`.
            create_graph: build a graph of the gradients, for gradients of higher order.
            inputs: a TensorDict or tensors; gradients are accumulated only in their `grad`.

        Raises:
            InvalidStateError: no leaf requires a gradient, or one has several elements and no `gradient`.
            InvalidTypeError: `gradient` is not a TensorDict.

        Example:
            >>> x = torch.ones(2, requires_grad=True)
            >>> TensorDict(loss=x.sum(), other=(2 * x).sum()).backward()
            >>> x.grad
            tensor([3., 3.])
        """
        if gradient is not None and not isinstance(gradient, (Container, Mapping)):
            raise InvalidTypeError(
                f"backward: the gradient of a TensorDict is a TensorDict with its keys, not a {type(gradient).__name__}"
            )
        roots = {k: v for k, v in self._resident().items(True, True) if v.requires_grad}
        if not roots:
            raise InvalidStateError("backward: no entry of this TensorDict requires a gradient")
        if gradient is not None:
            nested: Any = gradient
            grads = [nested.get(key, NO_DEFAULT) for key in roots]
        elif large := next((k for k, v in roots.items() if v.numel() != 1), None):
            raise InvalidStateError(
                f"backward: entry {key_text(large)} has {roots[large].numel()} elements; only for single numbers "
                "can the gradient be left out"
            )
        else:
            grads = [None] * len(roots)
        ends: Any = inputs
        if hasattr(ends, "_leaf_list"):
            ends = ends._leaf_list()
        torch.autograd.backward(
            list(roots.values()), grads, retain_graph=retain_graph, create_graph=create_graph, inputs=ends
        )

    def clear_refs_for_compile_(self) -> Self:
        """Forget who locked this TensorDict and what `with` would undo, so that it can leave a compiled function."""
        self._forget_facts()
        self._parents = self._undo = None
        for group in self._groups():
            group.clear_refs_for_compile_()
        return self

    def detach_(self) -> Self:
        """Detach every leaf in place, as `Tensor.detach_`."""
        for leaf in self._leaf_list():
            if leaf.requires_grad:  # views, of a mapped file too, cannot be told to detach
                leaf.detach_()
        return self


def _grad_of(leaf: Tensor) -> Tensor | None:
    """Return the gradient of a tensor. torch warns about reading that of a result, which keeps none."""
    return leaf.grad if leaf.is_leaf or leaf.retains_grad else None
