"""The state of an optimizer as a TensorDict, and back.

`optimizer.state_dict()` has two parts: `state` by parameter, and the list `param_groups`. Numbers that are
keys, and places in lists, become names of digits; what is no tensor is a value. Some optimizers keep lists
of tensors deeper down: beside the entries of one a value `__kind__` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import InvalidTypeError, KeyNotFoundError

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

KIND = "__kind__"
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


def optimizer_tree(cls: type, optimizer: torch.optim.Optimizer) -> TensorDict:
    """Return the state of an optimizer as a TensorDict of class `cls`, around the same tensors."""
    _check(optimizer)
    held = optimizer.state_dict()
    groups = {str(i): _tree(cls, group) for i, group in enumerate(held["param_groups"])}
    parts = {"state": _tree(cls, held["state"]), "param_groups": _node(cls, groups)}
    return _node(cls, parts | {key: _entry(cls, value) for key, value in held.items() if key not in parts})


def load_optimizer(td: Container, optimizer: torch.optim.Optimizer) -> None:
    """Load such a TensorDict, which must be resident, into an optimizer; tensors are copied."""
    _check(optimizer)
    for part in ("state", "param_groups"):
        if not isinstance(td.get(part), Container):
            raise KeyNotFoundError(
                f"this is not the state of an optimizer: it has no TensorDict {part!r}",
                hint="make it by TensorDict.from_optimizer(optimizer)",
            )
    held = {key: _plain(value) for key, value in td.items()}
    held["param_groups"] = [held["param_groups"][i] for i in range(len(held["param_groups"]))]
    optimizer.load_state_dict(held)


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(f"expected a torch.optim.Optimizer, not a {type(optimizer).__name__}")


def _node(cls: type[TensorDict], entries: dict[str, Any]) -> TensorDict:
    return cls._new(entries, torch.Size(()), None, None)


def _entry(cls: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    return _tree(cls, value) if _holds_tensors(value) else NonTensorData(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _tree(cls: Any, value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    made = {str(key): _entry(cls, item) for key, item in pairs}
    if not isinstance(value, Mapping):
        made[KIND] = NonTensorData(type(value).__name__)
    elif [_key(name) for name in made] != list(value):
        raise InvalidTypeError(f"the state of an optimizer has keys that are neither names nor numbers: {list(value)}")
    return _node(cls, made)


def _key(name: str) -> int | str:
    return int(name) if name.isdecimal() else name


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, NonTensor):
        return value.plain()
    made = {_key(name): _plain(item) for name, item in value._resident()._data.items() if name != KIND}
    kind = value.get_non_tensor(KIND, None)
    return made if kind is None else _SEQUENCES[kind](made[i] for i in range(len(made)))
