"""Detection of tracing: tensors then have no values to look at, and fused kernels no rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

T = TypeVar("T")
_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", is_compiling)  # torch 2.6 has none

_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class _TracedProperty(property):
    def __set__(self, instance: Any, value: Any) -> None:
        assert self.fset is not None, "properties that cannot be set stay as they are"
        self.fset(instance, value)


def traced_setters(cls: type[T]) -> type[T]:
    """Let torch 2.11 trace the setters of the properties of a class: it knows those that are written in Python.

    Those of `property` it calls when a compiled program has ended, on objects that have no attributes yet.
    """
    for name, value in list(vars(cls).items()):
        if type(value) is property and value.fset is not None:
            setattr(cls, name, _TracedProperty(value.fget, value.fset, value.fdel))  # its doc is the getter's
    return cls


def traced() -> bool:
    """Check whether values are out of reach: under `torch.compile`, `torch.vmap` and the like, or `FakeTensorMode`."""
    return is_compiling() or _level() is not None or _mode(_FAKE) is not None


def symbolic(size: Sequence[int]) -> bool:
    """Check whether lengths in a size may differ between runs of a program that `torch.export` traces now."""
    if is_dynamo_compiling():
        return is_exporting()  # there symbolic lengths look like ints
    return fake_mode() and any(isinstance(n, torch.SymInt) for n in size)


def fake_mode() -> bool:
    """Check whether the code runs in a `FakeTensorMode`: tensors have a shape and a dtype, and no values."""
    return _mode(_FAKE) is not None


class _Depth:
    """A number that code which torch 2.11 traces may change: a global one breaks the graph, as does one of a class."""

    def __init__(self) -> None:
        self.value = 0


_depth = _Depth()
"""The depth of nested `torch.vmap` calls in the code that torch.compile traces, which cannot ask torch."""


class mapping:  # noqa: N801  # read as a word: `with mapping():`
    """Around what `torch.vmap` runs."""

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            _depth.value += 1

    def __exit__(self, *error: object) -> None:
        if is_dynamo_compiling():
            _depth.value -= 1


def mapped() -> bool:
    """Check whether `torch.vmap`, `torch.func.grad` or a similar transform is active, which lack rules for fused
    kernels.
    """
    if is_dynamo_compiling():
        return _depth.value > 0
    return _level() is not None


def _loop(single: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def loop(leaves: Sequence[Tensor], *operands: Any) -> list[Tensor]:
        columns = [o if isinstance(o, list) else [o] * len(leaves) for o in operands]
        return [single(*row) for row in zip(leaves, *columns, strict=True)]

    return loop


_LOOPS: dict[Any, Callable[..., list[Tensor]]] = {
    getattr(torch, name): _loop(getattr(Tensor, name.removeprefix("_foreach_")))
    for name in dir(torch)
    if name.startswith("_foreach_") and hasattr(Tensor, name.removeprefix("_foreach_"))
}


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch._foreach_add` and its kin by loops, which vmap has rules for; return other functions as given."""
    return _LOOPS.get(fn, fn)


def keep_out(fn: Callable[..., Any]) -> None:
    """Keep torch.compile out of a function and of all that it calls: files and servers are not to be traced.

    What `torch.compiler.disable` does, but that it would import the compiler now.
    """
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = "it reads or writes a store"  # type: ignore[attr-defined]
    hook = torch._C._dynamo.eval_frame
    if hasattr(hook, "set_code_exec_strategy"):
        skip = hook._FrameAction.SKIP
        hook.set_code_exec_strategy(fn.__code__, hook._FrameExecStrategy(skip, skip))


def keep_methods_out(*classes: type) -> None:
    """Keep torch.compile out of all methods that classes define themselves; `keep_out` says why."""
    for cls in classes:
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                keep_out(method)
