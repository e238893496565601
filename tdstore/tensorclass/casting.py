"""Conversion of a value that is set on a field, by the flags of the class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.tensorclasses import Typed
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.dtypes import torch_ready
from tdstore.errors import InvalidTypeError
from tdstore.tensorclass.fields import Flags, Plan
from tdstore.tensordicts.resident.tensordict import TensorDict

if TYPE_CHECKING:
    pass

Cast = Callable[[Plan, str, Any, torch.Size], Any]
_NUMBERS = (bool, int, float, complex)


def cast_of(flags: Flags) -> Cast:
    """Return the function that a class of these flags uses; what it returns is set on the wrapped container."""
    if flags.nocast:
        return _as_it_is
    if flags.autocast:
        return _to_annotation
    return _tensors_only if flags.tensor_only else _to_tensor


def as_field(obj: Typed, key: object, value: object) -> object:
    """Convert a value that `update` sets on a field: mappings go into an existing nested container."""
    if type(value) is Tensor and not obj._converts:
        return value
    cls: Any = type(obj)
    td = obj._tensordict
    mapping = isinstance(value, Mapping) and not isinstance(value, Container)
    if not isinstance(key, str) or (mapping and td._kind(key) == GROUP):
        return value
    hint = cls._plan.hint(key) if mapping else None
    if hint is not None and issubclass(hint, Typed):
        return as_container(hint, value, td._batch_size)
    made: object = cls._cast(cls._plan, key, value, td._batch_size)
    return made


def _to_tensor(plan: Plan, name: str, value: Any, batch: torch.Size) -> Any:
    """Convert numbers, arrays and lists to tensors, by the container itself; mappings and tuples are values."""
    if isinstance(value, (Mapping, tuple)) and not isinstance(value, Container):
        return NonTensorData(value, batch)
    return value


def _as_it_is(plan: Plan, name: str, value: Any, batch: torch.Size) -> Any:
    if isinstance(value, (Tensor, Container, NonTensor)):
        return value
    if isinstance(value, (*_NUMBERS, np.ndarray, np.generic, Mapping, tuple)):
        return NonTensorData(value, batch)
    return value


def _tensors_only(plan: Plan, name: str, value: Any, batch: torch.Size) -> Any:
    if isinstance(value, (Tensor, Container, NonTensor)):
        return value
    hint = plan.hint(name)
    if hint is not None and issubclass(hint, NonTensor):
        return _to_tensor(plan, name, value, batch)
    if isinstance(value, Mapping):
        return as_container(hint if hint is not None and issubclass(hint, Container) else TensorDict, value, batch)
    if isinstance(value, (*_NUMBERS, np.ndarray, np.generic, list, tuple)):
        try:
            return torch.as_tensor(torch_ready(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(f"the field {name!r} of a tensor_only class takes tensors: {error}") from None
    raise InvalidTypeError(f"the field {name!r} of a tensor_only class takes tensors, not a {type(value).__name__}")


def _to_annotation(plan: Plan, name: str, value: Any, batch: torch.Size) -> Any:
    hint = plan.hint(name)
    if hint is not None and issubclass(hint, NonTensorData) and not isinstance(value, (hint, NonTensorStack)):
        return _to_value(hint, name, value, batch)
    if hint is None or isinstance(value, NonTensor):
        return _to_tensor(plan, name, value, batch)
    if issubclass(hint, Tensor):
        return value if isinstance(value, (Tensor, Container)) else torch.as_tensor(torch_ready(value))
    if issubclass(hint, Container):
        return as_container(hint, value, batch)
    if isinstance(value, hint) and type(value) is not bool:
        return NonTensorData(value, batch)
    convert = _CONVERTERS.get(hint)
    if convert is None:
        return _to_tensor(plan, name, value, batch)
    try:
        return NonTensorData(convert(value), batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"the field {name!r} is a {hint.__name__}: {error}") from None


def _to_value(hint: type[NonTensorData], name: str, value: Any, batch: torch.Size) -> NonTensorData:
    try:
        return hint(value, batch)
    except TypeError as error:
        raise InvalidTypeError(f"the field {name!r} is a {hint.__name__}: {error}") from None


def as_container(hint: type, value: Any, batch: torch.Size) -> Container | Tensor:
    """Convert a mapping or a TensorDict to the container that a field is annotated with."""
    if issubclass(hint, Typed) and not isinstance(value, Typed):
        made: Any = value if isinstance(value, Container) else TensorDict(value, batch)
        found: Container | Tensor = hint.from_tensordict(made)  # type: ignore[attr-defined]
        return found
    if isinstance(value, (Container, Tensor)):
        return value
    return TensorDict(value, batch)


def _scalar(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        return kind(value.item() if isinstance(value, (Tensor, np.ndarray)) and kind is not str else value)

    return convert


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    **{kind: _scalar(kind) for kind in (*_NUMBERS, str)},
    np.ndarray: _array,
    **{kind: kind for kind in (bytes, list, tuple, dict, set, frozenset)},
}
