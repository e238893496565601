"""The first call of a lazy module that `torch.vmap` runs with stacked parameters: each of them gets its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from tdstore.container.entries.uninitialized import MappedUninitialized, is_uninitialized
from tdstore.errors import InvalidStateError


class Initialization:
    """Stands in a lazy module for its `initialize_parameters`, while parameters of an ensemble are in it.

    The method runs once for each of the ensemble, and once for the module's own parameters, outside of vmap: so no
    `randomness=` is needed, and each is as a module by itself would have been. It sees zeros in the shapes of the
    arguments, since all that it may ask of them is their shape.

    Args:
        module: the lazy module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []

    @classmethod
    def await_call(cls, module: nn.Module, slots: dict[str, Any], key: str, own: Any, substitute: Any) -> None:
        """Initialize at the first call of a module.

        Args:
            slots, key: where the parameter is.
            own: the module's own parameter.
            lent: what is in its place.
        """
        if not hasattr(module, "initialize_parameters"):
            raise InvalidStateError(
                f"{type(module).__name__} is not a lazy module: its {key!r} cannot be uninitialized"
            )
        found = vars(module).get("initialize_parameters")
        if not isinstance(found, cls):
            found = vars(module)["initialize_parameters"] = cls(module)
        found._places.append((slots, key, own, substitute))

    @classmethod
    def end(cls, module: nn.Module) -> None:
        """Take it from a module that got its own parameters back."""
        if isinstance(vars(module).get("initialize_parameters"), cls):
            del vars(module)["initialize_parameters"]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Initialize; the arguments are those of the call."""
        self.end(self.module)
        stacks = {
            id(substitute): substitute for *_, substitute in self._places if isinstance(substitute, MappedUninitialized)
        }
        waiting = [substitute for substitute in stacks.values() if is_uninitialized(substitute.stack)]
        held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (slots, dict(slots)) for slots in (self.module._parameters, self.module._buffers)
        ]
        sizes = pytree.tree_map_only(Tensor, lambda x: (x.shape, x.dtype, x.device), (args, kwargs))
        others = {
            (id(slots), key): (tensor.shape, tensor.dtype, tensor.device)
            for slots, before in held
            for key, tensor in before.items()
            if tensor is not None and not is_uninitialized(tensor)
        }
        with temporarily_clear_interpreter_stack():
            like = pytree.tree_map(_zeros, sizes, is_leaf=_is_size)
            for slots, _ in held:
                for key in slots:
                    if (id(slots), key) in others:
                        slots[key] = _zeros(others[id(slots), key])
            try:
                self._fill(waiting, *like)
            finally:
                for slots, before in held:
                    slots.update(before)
        for slots, key, _, substitute in self._places:
            if isinstance(substitute, MappedUninitialized):
                slots[key] = substitute.initialized()

    def _fill(self, waiting: list[MappedUninitialized], args: Any, kwargs: Any) -> None:
        rows: list[list[Tensor]] = [[] for _ in waiting]
        numbers = {id(substitute): number for number, substitute in enumerate(waiting)}
        for i in range(waiting[0].stack.count if waiting else 0):
            for slots, key, _, substitute in self._places:
                if id(substitute) in numbers:
                    slots[key] = substitute.stack.single()
                elif isinstance(substitute, MappedUninitialized):
                    slots[key] = substitute.stack.detach()[i].clone()
            self.module.initialize_parameters(*args, **kwargs)
            for slots, key, _, substitute in self._places:
                if id(substitute) in numbers:
                    rows[numbers[id(substitute)]].append(slots[key].detach())
        if any(is_uninitialized(own) for _, _, own, _ in self._places):
            for slots, key, own, _ in self._places:
                slots[key] = own
            self.module.initialize_parameters(*args, **kwargs)
        with torch.no_grad():
            for substitute, made in zip(waiting, rows, strict=True):
                substitute.stack.materialize(made[0].shape)
                substitute.stack.copy_(torch.stack(made))


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], torch.Size)


def _zeros(value: Any) -> Any:
    return torch.zeros(value[0], dtype=value[1], device=value[2]) if _is_size(value) else value
