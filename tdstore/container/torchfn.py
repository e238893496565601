"""torch functions on TensorDicts: `torch.stack(tds)`, `torch.zeros_like(td)`, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdstore.container.core import Container
from tdstore.container.making import cat, stack


def _like(fn: Callable[..., Any]) -> Callable[..., Any]:
    def like(td: Any, **kwargs: Any) -> Any:
        return td.apply(lambda t: fn(t, **kwargs), filter_empty=False, propagate_lock=True)

    return like


def _full_like(td: Any, fill_value: Any, **kwargs: Any) -> Any:
    return td.apply(lambda t: torch.full_like(t, fill_value, **kwargs), filter_empty=False, propagate_lock=True)


def _method(name: str) -> Callable[..., Any]:
    def call(td: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(td, name)(*args, **kwargs)

    return call


TABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: stack,
    torch.cat: cat,
    torch.zeros_like: _like(torch.zeros_like),
    torch.ones_like: _like(torch.ones_like),
    torch.empty_like: _like(torch.empty_like),
    torch.rand_like: _like(torch.rand_like),
    torch.randn_like: _like(torch.randn_like),
    torch.full_like: _full_like,
    torch.where: lambda condition, input, other, **kw: input.where(condition, other, **kw),
    **{
        getattr(torch, name): _method(name)
        for name in (
            "clone split chunk unbind gather squeeze unsqueeze permute transpose reshape flatten unflatten "
            "masked_select"
        ).split()
    },
}


def dispatch(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What `__torch_function__` of every container does."""
    handler = TABLE.get(func)
    if handler is None or not (_OURS.issuperset(types) or all(map(_is_ours, types))):
        return NotImplemented
    return handler(*args, **(kwargs or {}))


_OURS: set[type] = {torch.Tensor}
"""Classes found to be tensors or containers: asking an abstract class takes longer than the rest of the dispatch."""


def _is_ours(kind: type) -> bool:
    if not issubclass(kind, (torch.Tensor, Container)):
        return False
    _OURS.add(kind)
    return True
