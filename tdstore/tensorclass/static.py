"""Declarations for type checkers: the base of every tensorclass, and its constructor.

At run time there is nothing of it: `TensorClass` makes objects itself, and `install` gives it every method.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, dataclass_transform

from tdstore.container.core.tensorclasses import Typed
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import DeviceLike

if TYPE_CHECKING:
    from abc import ABCMeta

    T = TypeVar("T", covariant=True)
    V = TypeVar("V", contravariant=True)

    NOT_GIVEN: Any  # a default of whatever type

    class ConstructorArgument(Generic[T, V]):
        """Argument that is passed as one type, and read as another."""

        def __get__(self, instance: object, owner: object = None) -> T: ...
        def __set__(self, instance: object, value: V) -> None: ...

    # Metaclasses, since a class that names such a one is neither frozen nor not: only so may subclasses be frozen.
    # `==` compares entries, and is a TensorDict's.
    @dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
    class Fields(ABCMeta):
        """Gives a class a constructor of its fields."""

    @dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(dataclasses.field,))
    class FieldsByName(Fields):
        """Gives a class a constructor that takes its fields by name only."""

    class Surface(Typed, TensorDict):  # type: ignore[misc]  # two layouts of slots
        """Every method of a TensorDict. These are of the class, where others leave it to the kind of container."""

        def clone(self, recurse: bool = True) -> Self:
            """Copy as `TensorDict.clone`."""

        def to(self, *args: Any, **kwargs: Any) -> Self:
            """Convert as `TensorDict.to`."""

        def cpu(self, **kwargs: Any) -> Self:
            """Move as `TensorDict.cpu`."""

        def cuda(self, device: DeviceLike | None = None, **kwargs: Any) -> Self:
            """Move as `TensorDict.cuda`."""

        def detach(self) -> Self:
            """Detach as `TensorDict.detach`."""

        def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
            """Return contiguous leaves, as `TensorDict.contiguous`."""

else:
    Fields = FieldsByName = type
    Surface = Typed
