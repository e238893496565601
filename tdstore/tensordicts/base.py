"""TensorDictBase: the whole surface, over the primitives of `Container`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

from tdstore.container.core.container import Container
from tdstore.container.display.text import ReprMixin
from tdstore.container.distribute.collectives import DistributedMixin
from tdstore.container.distribute.map import MappingMixin
from tdstore.container.functions import construct_and_join, torch_functions
from tdstore.container.methods.access import AccessMixin
from tdstore.container.methods.devices import PlacingMixin
from tdstore.container.methods.entry_concat import ColumnsMixin
from tdstore.container.methods.facts import MeasureMixin
from tdstore.container.methods.filling import FillingMixin
from tdstore.container.methods.removing import RemovingMixin
from tdstore.container.methods.selection import SelectionMixin
from tdstore.container.methods.transforms import TransformsMixin
from tdstore.container.methods.writing import WritingMixin
from tdstore.container.persistence.backend_names import NamedStorageMixin
from tdstore.container.persistence.consolidate import ConsolidatingMixin
from tdstore.container.persistence.growing import GrowingMixin
from tdstore.container.persistence.saving import SavingMixin
from tdstore.convert.checkpoints.state_dict import StateDictMixin
from tdstore.convert.methods import ConvertMixin
from tdstore.modules.methods import ModulesMixin

if TYPE_CHECKING:
    from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
    from tdstore.tensordicts.resident.tensordict import TensorDict

T = TypeVar("T")


class TensorDictBase(
    AccessMixin,
    WritingMixin,
    RemovingMixin,
    SelectionMixin,
    TransformsMixin,
    MeasureMixin,
    ColumnsMixin,
    PlacingMixin,
    FillingMixin,
    SavingMixin,
    NamedStorageMixin,
    GrowingMixin,
    ConsolidatingMixin,
    MappingMixin,
    DistributedMixin,
    ConvertMixin,
    StateDictMixin,
    ModulesMixin,
    ReprMixin,
    Container,
):
    """Base of every container: `TensorDict`, `PersistentTensorDict` and `LazyStackedTensorDict`."""

    __slots__ = ()

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)
    """`TensorDict[str, Tensor]`, for annotations."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return torch_functions.dispatch(func, types, args, kwargs)

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: Any = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Build a TensorDict from nested dicts. A TensorDict is returned itself, with its own batch sizes.

        Args:
            batch_size: of every level, whatever `auto_batch_size` says.
            auto_batch_size: give every level the largest batch size its entries share; default: with `batch_dims`.
            batch_dims: at most this many batch dimensions.

        Raises:
            ValueError: both `batch_size` and `batch_dims`.

        Example:
            >>> TensorDict.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3)}}, batch_dims=1).batch_size
            torch.Size([3])
        """
        if isinstance(input_dict, Container):
            same: Self = construct_and_join.from_container(input_dict, batch_size, device, names)
            return same
        plain = cls._resident_class
        kind: Any = cls if issubclass(cls, plain) else plain
        made: Self = construct_and_join.from_dict(
            kind, input_dict, batch_size, auto_batch_size, batch_dims, device, names
        )
        return made

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: Any = 0) -> TensorDict:
        """Create a TensorDict without batch dimensions whose (nested) keys all hold `value`."""
        td = cls._resident_class()
        for key in keys:
            td.set(key, value)
        return td

    @classmethod
    def stack(cls, input: Sequence[T], dim: int = 0, *, out: Any = None) -> T:
        """Stack TensorDicts along a new batch dimension, as `torch.stack`.

        Args:
            input: TensorDicts of one batch size `[*B]`, with the same keys and leaf shapes.
            dim: the place of the new dimension, from `-len(B) - 1` to `len(B)`.
            out: a TensorDict to write the result into, in place.

        Raises:
            DifferentKeysError: keys that not all have.
            BatchSizeError: batch sizes that differ.
            DimensionError: `dim` is out of range.
            InvalidStateError: leaf shapes that differ, or no TensorDicts.

        Example:
            >>> tds = [TensorDict({"a": torch.zeros(3, 2)}, [3]) for _ in range(4)]
            >>> TensorDict.stack(tds, 1).batch_size
            torch.Size([3, 4])
        """
        return construct_and_join.stack(input, dim, out=out)

    @classmethod
    def lazy_stack(cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any) -> LazyStackedTensorDict:
        """Stack TensorDicts that may differ lazily: see `tdstore.lazy_stack`."""
        made: LazyStackedTensorDict = construct_and_join.lazy_stack(input, dim, out=out, **kwargs)
        return made

    @classmethod
    def maybe_dense_stack(cls, input: Sequence[T], dim: int = 0, *, out: Any = None, **kwargs: Any) -> T:
        """Stack as `stack` where keys and shapes allow it, else as `lazy_stack`."""
        return construct_and_join.maybe_dense_stack(input, dim, out=out, **kwargs)

    def to_lazystack(self, dim: int = 0) -> LazyStackedTensorDict:
        """Return a lazy stack of the rows along `dim`, sharing memory."""
        name = self.names[dim] if self._names is not None else None
        return self._stack_class(*self.unbind(dim), stack_dim=dim % max(1, self.batch_dims), stack_dim_name=name)

    def densify(self, layout: torch.layout = torch.strided) -> TensorDict:
        """Return the same entries with every lazy stack below made dense: see `LazyStackedTensorDict.densify`."""
        td = self._resident()
        entries: dict[str, Any] = td._data
        data = {k: v.densify(layout) if isinstance(v, _KINDS) else v for k, v in entries.items()}
        made: TensorDict = td._new(data, td._batch_size, td._device, td._names)
        return made.lock_() if self.is_locked else made

    @classmethod
    def cat(cls, input: Sequence[T], dim: int = 0, *, out: Any = None) -> T:
        """Concatenate TensorDicts along a batch dimension, as `torch.cat`.

        Args:
            input: TensorDicts with the same keys, whose batch sizes differ in `dim` at most.
            dim: the batch dimension to concatenate along.
            out: a TensorDict to write the result into, in place.

        Raises:
            DifferentKeysError: keys that not all have.
            BatchSizeError: batch sizes that differ in another dimension.
            DimensionError: `dim` is out of range.
            InvalidStateError: feature shapes that differ, or no TensorDicts.

        Example:
            >>> tds = [TensorDict({"a": torch.zeros(n, 2)}, [n]) for n in (3, 4)]
            >>> TensorDict.cat(tds)["a"].shape
            torch.Size([7, 2])
        """
        return construct_and_join.cat(input, dim, out=out)


MutableMapping.register(TensorDictBase)  # type: ignore[type-abstract]
_KINDS: Any = Container  # to type checkers it lacks what the bases of this class add
