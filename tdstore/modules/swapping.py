"""Tensors of a module as a tree, and their temporary replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tdstore.container.core.container import Container
from tdstore.container.core.locks import READONLY
from tdstore.container.entries.uninitialized import (
    MappedUninitialized,
    StackedMixin,
    is_uninitialized,
    stack_uninitialized,
)
from tdstore.container.functions.construct_and_join import stack
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, InvalidStateError, InvalidTypeError, KeyNotFoundError
from tdstore.index.tracing import traced
from tdstore.keys import unravel
from tdstore.modules.initializing import Initialization
from tdstore.types import Path

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


# -- out of modules ------------------------------------------------------------------------------
def tensors_of(module: nn.Module, filter_empty: bool = True) -> TensorDict:
    """Return a TensorDict of a module's parameters and buffers, the very objects, nested as its submodules are.

    Args:
        filter_empty: leave out submodules without any tensor.
    """
    if isinstance(module, Container):
        return _bare(module)
    data: dict[str, Any] = {}
    for held in (module._parameters, module._buffers):
        data.update({name: tensor for name, tensor in held.items() if tensor is not None})
    for name, child in module._modules.items():
        if child is not None:
            below = tensors_of(child, filter_empty)
            if below._data or not filter_empty:
                data[name] = below
    return Container._resident_class._new(data, torch.Size(()), None, None)


def _bare(params: Any) -> TensorDict:
    """Return the tree of a TensorDictParams, of plain TensorDicts."""
    made: TensorDict = params._with_leaves(iter(params._leaf_list()))
    return made


def state_of(module: nn.Module) -> TensorDict:
    """Return the same through `module.state_dict()`, whose hooks run: detached, and only persistent buffers."""
    td = Container._resident_class()
    for name, value in module.state_dict().items():
        path = tuple(name.split("."))
        if is_uninitialized(value):
            td.set(path, torch.empty((), device="cpu"))
            (td.get(path[:-1]) if path[1:] else td)._data[path[-1]] = value
        elif isinstance(value, Tensor):
            td.set(path, value)
        else:
            td.set_non_tensor(path, value)
    return td


def stacked(tds: Sequence[Any], expand_identical: bool) -> TensorDict:
    """Stack the tensors of several modules of one architecture: parameters become new ones, of `[n, ...]`.

    Args:
        expand_identical: what is one tensor in all of them is expanded, not copied.
    """
    _check_called_alike(tds)
    made = stack([_detached(td) for td in tds])
    leaves = []
    tied: dict[tuple[int, ...], Tensor] = {}
    for path in made.keys(True, True):
        column = [td[path] for td in tds]
        leaf = made[path]
        name = ".".join(unravel(path))
        if is_uninitialized(column[0]):
            _check_trained_alike(name, column)
            leaf = tied.get(tuple(map(id, column)))
            if leaf is None:
                leaf = tied[tuple(map(id, column))] = stack_uninitialized(column)
        elif expand_identical and all(t is column[0] for t in column):
            leaf = column[0].expand(leaf.shape)
        elif isinstance(column[0], nn.Parameter):
            _check_trained_alike(name, column)
            # what is one parameter in each module is one here
            leaf = tied.setdefault(tuple(map(id, column)), nn.Parameter(leaf, column[0].requires_grad))
        leaves.append(leaf)
    found: TensorDict = made._with_leaves(iter(leaves))
    return found


def _detached(td: Any) -> Any:
    """Return the same tree without gradients; a tensor without values in the place of an uninitialized one."""
    return td._with_leaves(
        torch.empty((), device="cpu") if is_uninitialized(t) else t.detach() for t in td._leaf_list()
    )


def _check_called_alike(tds: Sequence[Any]) -> None:
    waiting = [{path for path, leaf in td._flat_entries((), None) if is_uninitialized(leaf)} for td in tds]
    if mismatched := set().union(*waiting) - set.intersection(*waiting):
        raise InvalidStateError(
            f"the parameter {'.'.join(min(mismatched))!r} is uninitialized in some of the modules only: "
            "call all of them before stacking, or none"
        )


def _check_trained_alike(name: str, column: Sequence[Tensor]) -> None:
    if any(t.requires_grad != column[0].requires_grad for t in column):
        raise InvalidStateError(
            f"the parameter {name!r} requires a gradient in some of the modules only: "
            "make them alike, or pass lazy_stack=True, which leaves each as it is"
        )


# -- into a module -------------------------------------------------------------------------------
class Loan:
    """Tensors on their way into a module: all places are found before any is filled.

    Args:
        inplace: copy values into the module's tensors, instead of putting others in their place.
        preserve: where a parameter is replaced by a tensor without a gradient, make that a parameter, and a buffer
            stay one. Else a parameter becomes a parameter, and another tensor in its place an attribute.
        memo: places that are taken already, and by what was there: a submodule that is used twice is filled once.
    """

    def __init__(self, inplace: bool, preserve: bool, non_blocking: bool, memo: dict[Any, Any]) -> None:
        self.inplace, self.preserve, self.non_blocking, self.memo = inplace, preserve, non_blocking, memo
        self._writes: list[tuple[Any, dict[str, Any], str, Any, Any, bool]] = []

    def plan(self, td: Any, module: Any, path: Path = ()) -> dict[str, Any]:
        """Find a place for each tensor; what is there now, as nested dicts.

        Raises:
            KeyNotFoundError: the module has no parameter, buffer or submodule of that name.
        """
        old: dict[str, Any] = {}
        td = td._resident()
        borrowed = bool(td._state & READONLY)
        for key, value in td._data.items():
            plain = type(value) is Tensor or type(value) is nn.Parameter
            if not plain and isinstance(value, Container):
                child = _child(module, key)
                if child is None:
                    raise _unknown(module, (*path, key), "submodule")
                old[key] = self.plan(value, child, (*path, key))
                continue
            slots = _slots(module, key)
            if slots is None:
                raise _unknown(module, (*path, key), "parameter or buffer")
            if not plain and isinstance(value, NonTensor):
                if value.plain() is not None:
                    raise InvalidTypeError(f"{'.'.join((*path, key))!r} takes a tensor, or None, not {value.plain()!r}")
                value = None
            place = (id(module), key)
            if place in self.memo:
                old[key] = self.memo[place]
                continue
            there = slots[key]
            if not plain and isinstance(value, StackedMixin) and not isinstance(module, Container):
                raise InvalidStateError(
                    f"{'.'.join((*path, key))!r} is a stack of uninitialized parameters: "
                    "map over it with torch.vmap, and put it into the module there"
                )
            if self.inplace and isinstance(there, Tensor):
                if not isinstance(value, Tensor) or value.shape != there.shape:
                    offered = list(value.shape) if isinstance(value, Tensor) else value
                    raise BatchSizeError(
                        f"cannot copy {offered} into {'.'.join((*path, key))!r}, of shape {list(there.shape)}"
                    )
                old[key] = there.detach().clone()
            else:
                old[key] = NonTensorData(None) if there is None else there
            self.memo[place] = old[key]
            self._writes.append((module, slots, key, there, value, borrowed))
        return old

    def fill(self, td: Container, module: nn.Module) -> dict[str, Any]:
        """Put each tensor in its place; what was there, as nested dicts."""
        old = self.plan(td, module)
        self.run()
        return old

    def run(self) -> None:
        """Fill the places that were found."""
        tied: dict[int, Tensor] = {}
        late: list[tuple[Any, dict[str, Any], str, Any, Any]] = []
        compiling, tracing = is_compiling(), traced()
        for module, slots, key, there, value, borrowed in self._writes:
            parameters = type(there) is type(value) is nn.Parameter
            if parameters and self.preserve and not self.inplace and not isinstance(module, Container):
                if not compiling:
                    Initialization.end(module)
                slots[key] = value
            elif self.inplace and isinstance(there, Tensor):
                with torch.no_grad():
                    there.copy_(value, non_blocking=self.non_blocking)
            else:
                of_module = not isinstance(module, Container)
                back = of_module and slots is module.__dict__ and isinstance(value, nn.Parameter)
                made = value if back else self._fitting(there, value, borrowed, tied, tracing)
                if of_module and not compiling:
                    Initialization.end(module)
                    if isinstance(made, MappedUninitialized) or (is_uninitialized(there) and _is_mapped(made)):
                        late.append((module, slots, key, there, made))
                if of_module and (back or not self.preserve) and not tracing:
                    slots = _slots_for(module, slots, key, made)
                slots[key] = made
        for place in late:
            Initialization.await_call(*place)

    def _fitting(self, there: Any, value: Any, borrowed: bool, tied: dict[int, Tensor], tracing: bool) -> Any:
        """Return the replacement for a tensor: one that carries gradients stays what it is.

        What is `borrowed` from a dataset that was opened for reading is copied where training would change it.
        """
        if not self.preserve or not isinstance(there, Tensor) or not isinstance(value, Tensor):
            return value
        if type(there) is type(value) is nn.Parameter:
            return value
        if is_uninitialized(value):
            return value
        if not isinstance(there, nn.Parameter):
            if value.requires_grad:
                return value.as_subclass(Tensor) if isinstance(value, nn.Parameter) else value  # a buffer stays one
            value = value.data if isinstance(value, nn.Parameter) else value
            return value.clone() if borrowed else value
        if isinstance(value, nn.Parameter) or value.requires_grad or tracing:
            return value
        twin = tied.get(id(there))
        if twin is not None and _equal(twin, value):
            return twin  # tied before, tied after
        train = there.requires_grad and (value.is_floating_point() or value.is_complex())
        # detach: of what lies in a mapped file, the plain tensor
        made = nn.Parameter(value.clone() if borrowed and train else value.detach(), train)
        tied.setdefault(id(there), made)
        return made


def _is_mapped(value: Any) -> bool:
    """Check whether torch.vmap maps over a tensor."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def _child(module: Any, key: str) -> Any:
    """Return the submodule of a name, or the TensorDict in a TensorDictParams."""
    child = (module._data if isinstance(module, Container) else module._modules).get(key)  # type: ignore[attr-defined]
    return None if isinstance(child, Tensor) else child


def _slots(module: Any, key: str) -> dict[str, Any] | None:
    """Return the dict of a module that holds a name."""
    if isinstance(module, Container):
        module._forget_facts()
        data: dict[str, Any] = module._data  # type: ignore[attr-defined]
        return data if isinstance(data.get(key), Tensor) else None
    if key in module._parameters:
        return module._parameters  # type: ignore[no-any-return]
    if key in module._buffers:
        return module._buffers  # type: ignore[no-any-return]
    return module.__dict__ if isinstance(module.__dict__.get(key), Tensor) else None


def _slots_for(module: Any, slots: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the dict of a module for a new value: a parameter goes with parameters, another tensor does not."""
    wanted = slots
    if type(value) is nn.Parameter or isinstance(value, nn.Parameter):
        wanted = module._parameters
    elif isinstance(value, Tensor) and slots is module._parameters:
        wanted = module.__dict__
    if wanted is not slots:
        del slots[key]
    return wanted


def _unknown(module: Any, path: Path, what: str) -> KeyNotFoundError:
    name = ".".join(path)
    hint = None
    if path[-1] in getattr(module, "parametrizations", ()):
        hint = f"it is parametrized: use the keys below ('parametrizations', {path[-1]!r})"
    return KeyNotFoundError(f"{type(module).__name__} has no {what} {name!r}: nothing was changed", hint=hint)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.device.type == "meta" or traced():
        return True  # no values to compare
    return torch.equal(a, b)


def load_state(module: nn.Module, td: Container, inplace: bool) -> TensorDict:
    """Fill a module through its `load_state_dict`, whose hooks run; what was there, where that changed.

    Raises:
        KeyNotFoundError: keys that the module does not take.
    """
    before = tensors_of(module)
    if inplace:
        before = before.data.clone()
    flat: dict[str, Any] = {}
    for path, value in td._resident()._flat_entries((), None):
        flat[".".join(path)] = value.plain() if isinstance(value, NonTensor) else value
    found = module.load_state_dict(flat, strict=False, assign=not inplace)
    if found.unexpected_keys:
        Loan(inplace, False, False, {}).fill(before, module)
        raise KeyNotFoundError(f"{type(module).__name__} has no {', '.join(map(repr, found.unexpected_keys))}")
    return before if inplace else _changed(before, tensors_of(module))


def _changed(before: Any, after: Any) -> Any:
    remaining: dict[str, Any] = {}
    for key, value in before._data.items():
        if isinstance(value, Container):
            below = _changed(value, after._data[key])
            if below._data:
                remaining[key] = below
        elif value is not after._data.get(key):
            remaining[key] = value
    return before._new(remaining, before._batch_size, None, None)
