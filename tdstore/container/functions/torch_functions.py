"""torch functions on TensorDicts: `torch.stack(tds)`, `torch.where(mask, td, 0)`, `F.mse_loss(td, target)`, ..."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tdstore.container.core.container import Container
from tdstore.container.functions.construct_and_join import cat, stack
from tdstore.ops.reduce import Over

Function = Callable[..., Any]

SAME = (
    "atleast_1d atleast_2d atleast_3d clone broadcast_to chunk flatten flip fliplr flipud gather masked_select movedim "
    "moveaxis narrow permute repeat_interleave reshape roll rot90 softmax split squeeze swapaxes swapdims tensor_split "
    "tile transpose unbind unflatten unsqueeze"
)
"""Shape functions whose method takes what they take."""

REDUCE = "all amax amin any cummax cummin logsumexp max mean min nanmean nansum prod quantile sum"

POINTWISE = (
    "abs acos asin atan ceil clamp clamp_max clamp_min cos cosh erf erfc exp expm1 floor frac isfinite isnan isneginf "
    "isposinf isreal lerp lgamma log log10 log1p log2 neg reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc "
    "addcmul addcdiv"
)

BINARY = {
    "add": "__radd__",
    "sub": "__rsub__",
    "mul": "__rmul__",
    "div": "__rtruediv__",
    "pow": "__rpow__",
    "maximum": "maximum",
    "minimum": "minimum",
    "logical_and": "logical_and",
    "bitwise_and": "__and__",
    "bitwise_or": "__or__",
    "bitwise_xor": "__xor__",
    "eq": "__eq__",
    "ne": "__ne__",
    "lt": "__gt__",
    "le": "__ge__",
    "gt": "__lt__",
    "ge": "__le__",
}
"""Functions of two operands, and the method of the second that stands for them when the first is no TensorDict."""

FIRST = {"bitwise_or": "__or__", "bitwise_xor": "__xor__"} | {
    n: f"__{n}__" for n in ("eq", "ne", "lt", "le", "gt", "ge")
}
"""The method of the first operand, where it is not named as the function."""

RENAMED = {
    "split_size_or_sections": "split_size",
    "sizes": "unflattened_size",
}
"""Arguments that torch's methods and functions call by two names."""


def _method(name: str) -> Function:
    """Return the function that calls a method: the TensorDict comes first, as `input` (or `tensor`, or `self`)."""

    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if args:
            td, *rest = args
        else:
            td, rest = next(kwargs.pop(k) for k in ("input", "tensor", "self") if k in kwargs), []
        options = {RENAMED.get(k, k): v for k, v in kwargs.items()}
        for word in ("size", "shape", "dims"):  # what methods take by position only
            if word in options and name in ("broadcast_to", "reshape", "flip", "tile", "permute"):
                rest.append(options.pop(word))
        made = getattr(td, name)(*rest, **options)
        return made if out is None else out.update(made, inplace=True)

    return call


def _each_of(name: str) -> Function:
    """Return the implementation of atleast_1d and its kin, which take one tensor, several, or a sequence of them."""

    def call(*tensors: Any) -> Any:
        many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
        made = tuple(getattr(t, name)() if isinstance(t, Container) else getattr(torch, name)(t) for t in many)
        return made[0] if len(made) == 1 and many is tensors else made

    return call


def _like(fn: Function) -> Function:
    def like(input: Any, *args: Any, **kwargs: Any) -> Any:
        made = input._foreach(lambda leaves: [fn(t, *args, **kwargs) for t in leaves])
        if kwargs.get("device") is not None:
            made._set_device(torch.device(kwargs["device"]))
        return made

    return like


def _binary(name: str) -> Function:
    def call(input: Any, other: Any, *, out: Any = None, **kwargs: Any) -> Any:
        if isinstance(input, Container):
            made = getattr(input, FIRST.get(name, name))(other, **kwargs)
        else:
            if "alpha" in kwargs:  # add and sub: input ± alpha * other
                other = other * kwargs.pop("alpha")
            made = getattr(other, BINARY[name])(input, **kwargs)
        return made if out is None else out.update(made, inplace=True)

    return call


def _spread(name: str) -> Function:
    """Return the implementation of std and var: with `correction`, or with `unbiased` in its older place."""

    def call(
        input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        return getattr(input, name)(dim, keepdim, correction=correction)

    return call


def _where(condition: Tensor, input: Any = None, other: Any = None, *, out: Any = None, **kwargs: Any) -> Any:
    input = kwargs.pop("self", input)
    if isinstance(input, Container):
        return input.where(condition, other, out=out, **kwargs)  # type: ignore[attr-defined]
    return other.where(~condition, input, out=out, **kwargs)


def _loss(fn: Function) -> Function:
    """Return the implementation of a loss, leaf by leaf; reduced, a TensorDict of scalars without batch dimensions."""

    @functools.wraps(fn)
    def loss(input: Any, target: Any, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        if not isinstance(input, Container):
            input, target = target, input  # these losses are symmetric
        td: Any = input._resident()._in_rows()
        leaves = td._leaf_list()
        columns = [_spelled(td, target, leaves), *([] if weight is None else [_spelled(td, weight, leaves)])]
        names = ("weight",) if weight is not None else ()
        results = [
            fn(leaf, theirs, *args, **dict(zip(names, rest, strict=True)), **kwargs)
            for leaf, theirs, *rest in zip(leaves, *columns, strict=True)
        ]
        values = iter(results)
        if all(r.shape == leaf.shape for r, leaf in zip(results, leaves, strict=True)) and td.batch_dims:
            return td._with_leaves(values)
        return td._over_leaves_of(lambda _: next(values), Over(None, False, td.batch_dims), torch.Size(()), None)

    return loss


def _spelled(td: Any, operand: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Return an operand as one tensor per leaf, of its shape: losses warn of anything else."""
    parts = td._operand(operand, leaves)
    return [torch.as_tensor(p, device=t.device).expand_as(t) for p, t in zip(parts, leaves, strict=True)]


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Compute `torch.autograd.grad` of TensorDicts and tensors with respect to TensorDicts and tensors.

    A TensorDict of `inputs` gives a TensorDict of gradients, without those that `allow_unused` lets be None;
    one alone is not in a tuple.
    """
    gradients = None if grad_outputs is None else _flat(grad_outputs, dense=True)
    found = iter(
        torch.autograd.grad(
            _flat(outputs, dense=True),
            _flat(inputs),
            gradients,
            retain_graph,
            create_graph,
            only_inputs,
            allow_unused,
            is_grads_batched,
            materialize_grads,
        )
    )
    made = tuple(_rebuilt(like, found) for like in inputs)  # torch made a tuple of one
    return made[0] if len(made) == 1 and isinstance(made[0], Container) else made


def _flat(values: Any, *, dense: bool = False) -> list[Tensor]:
    """Return all leaves; `dense` stacks lazy ones, so that outputs and their gradients have one structure."""
    if values is None or isinstance(values, Tensor):
        return [values]  # type: ignore[list-item]  # None: no gradient for this output
    if isinstance(values, Container):
        td: Any = values._resident()._in_rows() if dense else values._walkable()
        return list(td._leaf_list())
    return [leaf for value in values for leaf in _flat(value, dense=dense)]


def _rebuilt(like: Any, leaves: Iterator[Any]) -> Any:
    if not isinstance(like, Container):
        return next(leaves)
    made: Any = like._walkable()._with_leaves(leaves)
    unused = [key for key, value in made.items(True) if value is None]
    return made.exclude(*unused) if unused else made


def _named(names: str, make: Callable[[str], Function]) -> dict[Function, Function]:
    return {getattr(torch, name): make(name) for name in names.split()}


TABLE: dict[Function, Function] = {
    torch.stack: stack,
    torch.cat: cat,
    torch.concat: cat,
    torch.where: _where,
    torch.autograd.grad: _grad,
    **{getattr(torch, name): _like(getattr(torch, name)) for name in ("zeros_like", "ones_like", "empty_like")},
    **{getattr(torch, name): _like(getattr(torch, name)) for name in ("rand_like", "randn_like", "full_like")},
    **{fn: _loss(fn) for fn in (functional.l1_loss, functional.mse_loss, functional.smooth_l1_loss)},
    **_named(SAME, _method),
    **_named("atleast_1d atleast_2d atleast_3d", _each_of),
    **_named(REDUCE, _method),
    **_named(POINTWISE, _method),
    **_named("std var", _spread),
    **_named(" ".join(BINARY), _binary),
    # What the operators of a tensor that comes first call: `tensor * td`.
    **{getattr(Tensor, name): _binary(name) for name in BINARY},
}


def teach_collate() -> None:
    """Let a `DataLoader` take TensorDicts: its default stacks them, and without batches leaves them as they are.

    They are mappings by declaration, and torch would take them apart by iteration, which gives rows.
    """
    torch_collate = torch.utils.data._utils.collate
    torch_collate.default_collate_fn_map[Container] = lambda batch, *, collate_fn_map=None: stack(batch)
    convert: Any = torch_collate.default_convert
    if getattr(convert, "__wrapped__", None) is not None:
        return

    @functools.wraps(convert)  # by its name it is found in worker processes
    def default_convert(data: Any) -> Any:
        return data if isinstance(data, Container) else convert(data)

    torch_collate.default_convert = default_convert
    torch.utils.data.default_convert = default_convert


def dispatch(func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Implement `__torch_function__` for every container."""
    handler = TABLE.get(func)
    if handler is None and isinstance(func, torch._ops.HigherOrderOperator):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    if handler is None or not (_OURS.issuperset(types) or all(map(_is_ours, types))):
        return NotImplemented
    if not kwargs:
        return handler(*args)
    if "tensors" in kwargs:  # stack and cat
        args = (kwargs.pop("tensors"), *args)
    return handler(*args, **kwargs)


_OURS: set[type] = {torch.Tensor}
"""Classes found to be tensors or containers: asking an abstract class takes longer than the rest of the dispatch."""


def _is_ours(kind: type) -> bool:
    if not issubclass(kind, (torch.Tensor, Container)):
        return False
    _OURS.add(kind)
    return True
