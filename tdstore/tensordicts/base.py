"""TensorDictBase: the whole surface, over the primitives of `Container`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

from tdstore.arguments import as_list
from tdstore.container.core.container import Container
from tdstore.container.display.methods import ReprMixin
from tdstore.container.distribute.collectives import DistributedMixin
from tdstore.container.distribute.map import MappingMixin
from tdstore.container.functions import construct_and_join, torch_functions
from tdstore.container.functions.compare import EqualityMixin
from tdstore.container.methods.access import AccessMixin
from tdstore.container.methods.apply import ApplyMixin
from tdstore.container.methods.devices import PlacingMixin
from tdstore.container.methods.entry_concat import ColumnsMixin
from tdstore.container.methods.facts import MeasureMixin
from tdstore.container.methods.filling import FillingMixin
from tdstore.container.methods.key_selection import KeySelectionMixin
from tdstore.container.methods.masking import MaskingMixin
from tdstore.container.methods.removing import RemovingMixin
from tdstore.container.methods.transforms import TransformsMixin
from tdstore.container.methods.writing import WritingMixin
from tdstore.container.persistence.backend_names import NamedStorageMixin
from tdstore.container.persistence.consolidate import ConsolidatingMixin
from tdstore.container.persistence.growing import GrowingMixin
from tdstore.container.persistence.reshaping import ReshapingMixin
from tdstore.container.persistence.saving import SavingMixin
from tdstore.container.values.nontensor import NonTensor
from tdstore.convert.checkpoints.state_dict import StateDictMixin
from tdstore.convert.methods import ConvertMixin
from tdstore.modules.methods import ModulesMixin
from tdstore.types import DeviceLike, NamesLike, NestedKey, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
    from tdstore.tensordicts.resident.tensordict import TensorDict

T = TypeVar("T")


class TensorDictBase(
    AccessMixin,
    WritingMixin,
    RemovingMixin,
    KeySelectionMixin,
    TransformsMixin,
    ApplyMixin,
    MeasureMixin,
    ColumnsMixin,
    PlacingMixin,
    FillingMixin,
    MaskingMixin,
    EqualityMixin,
    SavingMixin,
    NamedStorageMixin,
    GrowingMixin,
    ReshapingMixin,
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
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: NamesLike = None,
    ) -> Self:
        """Build a TensorDict from nested dicts. A TensorDict is returned itself, with its own batch sizes.

        Args:
            input_dict: (nested) keys to tensors, values, or dicts of them.
            auto_batch_size: give every level the largest batch size that its entries share. Default: only with
                `batch_dims`.
            batch_size: the batch size of every level, whatever `auto_batch_size` says.
            device: the device of the tensors.
            batch_dims: at most this many batch dimensions.
            names: names of the batch dimensions.

        Raises:
            InvalidArgumentError: both `batch_size` and `batch_dims`.
            BatchSizeError: an entry does not start with `batch_size`.

        Example:
            >>> TensorDict.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3)}}, batch_dims=1).batch_size
            torch.Size([3])
        """
        if isinstance(input_dict, (Container, NonTensor)):
            same: Self = construct_and_join.from_container(input_dict, batch_size, device, names)
            return same
        plain = cls._resident_class
        kind: Any = cls if issubclass(cls, plain) else plain
        made: Self = construct_and_join.from_dict(
            kind, input_dict, batch_size, auto_batch_size, batch_dims, device, names
        )
        return made

    @classmethod
    def fromkeys(cls, keys: Iterable[NestedKey], value: object = 0) -> TensorDict:
        """Create a TensorDict without batch dimensions whose (nested) keys all hold `value`."""
        td = cls._resident_class()
        for key in as_list(keys, "what fromkeys() takes", "a sequence of keys"):
            td.set(key, value)
        return td

    @classmethod
    def stack(cls, input: Sequence[T], dim: int = 0, *, out: T | None = None) -> T:
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
    def lazy_stack(
        cls, input: Sequence[Container], dim: int = 0, *, out: Container | None = None, **kwargs: Any
    ) -> LazyStackedTensorDict:
        """Stack TensorDicts along a new batch dimension without copying them: the elements stay separate.

        Reading a key stacks the tensors of that key. Elements may differ in keys, in shapes and in batch size: a batch
        dimension that differs has size -1, and entries that differ are read with `get(key, as_list=True)` or
        `get(key, as_nested_tensor=True)`.

        Args:
            input: TensorDicts of batch size `[*B]`.
            dim: the place of the new dimension, from `-len(B) - 1` to `len(B)`.
            out: a TensorDict to write the result into, in place.
            **kwargs: `stack_dim_name=`, the name of the new dimension.

        Raises:
            DimensionError: `dim` is out of range.
            InvalidStateError: no TensorDicts.

        Example:
            >>> td = TensorDict.lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])
            >>> td.batch_size, td[1]["a"].shape
            (torch.Size([2]), torch.Size([3]))
        """
        stacked: Any = construct_and_join.lazy_stack(input, dim, out=out, **kwargs)
        made: LazyStackedTensorDict = stacked
        return made

    @classmethod
    def maybe_dense_stack(cls, input: Sequence[T], dim: int = 0, *, out: T | None = None, **kwargs: Any) -> T:
        """Stack as `stack` where keys and shapes allow it, else as `lazy_stack`.

        Args:
            input: TensorDicts of batch size `[*B]`.
            dim: the place of the new dimension, from `-len(B) - 1` to `len(B)`.
            out: a TensorDict to write the result into, in place.
            **kwargs: those of `lazy_stack`.

        Raises:
            DimensionError: `dim` is out of range.
            InvalidStateError: no TensorDicts.

        Example:
            >>> stacked = TensorDict.maybe_dense_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])
            >>> type(stacked).__name__
            'LazyStackedTensorDict'
        """
        return construct_and_join.maybe_dense_stack(input, dim, out=out, **kwargs)

    def to_lazystack(self, dim: int = 0) -> LazyStackedTensorDict:
        """Return a lazy stack of the rows along a batch dimension, sharing memory.

        Args:
            dim: the batch dimension.

        Raises:
            DimensionError: `dim` is out of range.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 5)}, [3]).to_lazystack()
            >>> type(td).__name__, td.batch_size
            ('LazyStackedTensorDict', torch.Size([3]))
        """
        name = self.names[dim] if self._names is not None else None
        return self._stack_class(*self.unbind(dim), stack_dim=dim % max(1, self.batch_dims), stack_dim_name=name)

    def densify(self, layout: torch.layout = torch.strided) -> TensorDict:
        """Return the same entries with every lazy stack among them made dense.

        Args:
            layout: the layout of the nested tensors that entries of different shapes become, `torch.strided` or
                `torch.jagged`.

        Example:
            >>> lazy = TensorDict.lazy_stack([TensorDict({"a": torch.zeros(2)}) for _ in range(3)])
            >>> TensorDict({"n": lazy}, [3]).densify()["n"]["a"].shape
            torch.Size([3, 2])
        """
        td: Any = self._resident()
        entries: dict[str, Any] = td._data
        data = {k: v.densify(layout) if isinstance(v, _KINDS) else v for k, v in entries.items()}
        unchanged = td is self and all(v is entries[k] for k, v in data.items())
        if unchanged:
            found: TensorDict = td
            return found
        made: TensorDict = td._new(data, td._batch_size, td._device, td._names)
        return made.lock_() if self.is_locked else made

    @classmethod
    def cat(cls, input: Sequence[T], dim: int = 0, *, out: T | None = None) -> T:
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
