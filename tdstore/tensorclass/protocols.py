"""Protocols that tensorclasses share with plain dataclasses: signature, hash, setters, dicts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any

import torch

from tdstore.container.core.container import Container

_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_ANY_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD


class _Factory:
    """Stands in a signature for a default that is made for each object."""

    def __repr__(self) -> str:
        return "<factory>"


def set_dataclass_attributes(cls: Any, root: Any) -> None:
    """Set the attributes that code for dataclasses reads on a class.

    Args:
        cls: a class that was declared.
        root: the base whose constructor and setter are ours.
    """
    cls.__signature__ = _signature(cls) if cls.__init__ is root.__init__ else None
    cls.__expected_keys__ = set(cls._plan.names)
    declared = vars(cls)["__dataclass_fields__"]
    if not isinstance(declared, DeclaredFields):  # one that is was set by a declaration with other flags
        cls.__dataclass_fields__ = cls._fields_of(cls)
    cls._own_setter = cls.__setattr__ is not root.__setattr__
    if cls._flags.frozen and "__hash__" not in vars(cls):
        cls.__hash__ = object.__hash__  # by identity: entries may change in place


class DeclaredFields:
    """`__dataclass_fields__`: the fields of a class; for an object, also what `dataclasses.replace` passes on."""

    def __init__(self, cls: Any) -> None:
        self._passed: dict[str, Field[Any]] = dict(cls.__dataclass_fields__)
        names = {*cls._plan.names, *cls._plan.passed}
        self._fields = {name: field for name, field in self._passed.items() if name in names}

    def __get__(self, obj: Any, owner: Any = None) -> dict[str, Field[Any]]:
        if obj is None:
            return self._fields
        return self.of(obj, owner)

    def of(self, obj: Any, owner: Any) -> dict[str, Field[Any]]:
        """Return the fields of an object."""
        return self._passed


def _signature(cls: Any) -> inspect.Signature:
    fields = cls.__dataclass_fields__
    parameters = []
    for name in (n for n in cls._plan.order if n not in cls._plan.unasked):
        field = fields[name]
        default = _Factory() if field.default_factory is not MISSING else field.default
        parameters.append(
            inspect.Parameter(
                name,
                _BY_NAME if field.kw_only else _ANY_WAY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=field.type,
            )
        )
    more = [name for name in ("batch_size", "device", "names") if name not in cls._plan.shadowed]
    parameters += [inspect.Parameter(name, _BY_NAME, default=None) for name in more]
    parameters.sort(key=lambda p: p.kind)
    return inspect.Signature(parameters, return_annotation=None)


def cast_back(obj: Any, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Cast the result of `obj.to_dict()` to the types of the fields, where the class is an autocast one."""
    return {key: _cast_back(obj, key, value) for key, value in values.items()} if obj._flags.autocast else values


def _cast_back(obj: Any, key: Any, value: Any) -> Any:
    if key not in obj._field_names or value is None:
        return value
    like = obj._tensordict.get(key, None) if isinstance(value, Mapping) else None
    if isinstance(like, Container):  # it makes its entries itself
        return value
    return obj._cast(obj._plan, key, value, torch.Size(()))
