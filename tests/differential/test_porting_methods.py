"""What code written for the peer does with methods of the memory, of shapes in place, and of entries' classes."""

from __future__ import annotations

import torch

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()


# --- bytes: gradients, offsets, tensors that entries share ---
def trained(M: Side) -> object:
    leaf = torch.zeros(3, requires_grad=True)
    (leaf * 2).sum().backward()
    return M.td({"a": leaf, "n": {"b": t(2)}}, [])


def shared(M: Side) -> object:
    x = t(4)
    return M.td({"a": x, "b": x, "n": {"c": x}}, [])


JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
case("bytes with a gradient", lambda M: trained(M).bytes())
case("bytes of a gradient once", lambda M: trained(M).bytes(count_duplicates=False))
case("bytes of a jagged leaf", lambda M: M.td({"j": JAGGED}, [2]).bytes())
for count in (True, False):
    case(f"bytes of shared leaves, {count}", lambda M, c=count: shared(M).bytes(count_duplicates=c))
    case(
        f"bytes of a lazy stack, {count}",
        lambda M, c=count: M.lazy_stack([M.td({"a": t(4)}), M.td({"a": t(4)})]).bytes(count_duplicates=c),
    )
case("param_count with a gradient", lambda M: trained(M).param_count())


# --- shapes in place ---
def square(M: Side) -> object:
    return M.td({"a": t(3, 4), "n": M.td({"b": t(3, 4, 2)}, [3, 4])}, [3, 4])


def reshaped(M: Side, *shape: object) -> object:
    td = square(M)
    inner = td["n"]
    out = td.reshape(*shape, inplace=True)
    return out is td, td["n"] is inner, td


for shape in ((12,), (2, 6), (4, 3), (3, 4), (-1,), (1, 12, 1)):
    case(f"reshape{shape} in place", lambda M, s=shape: reshaped(M, *s))
    case(f"reshape({shape}) in place", lambda M, s=shape: reshaped(M, s))
case("reshape in place to another number", lambda M: reshaped(M, 5))
case("reshape in place of a locked one", lambda M: square(M).lock_().reshape(12, inplace=True))

# --- classes of entries ---
case("entry_class of a parameter", lambda M: M.td({"a": torch.nn.Parameter(t(2))}, []).entry_class("a").__name__)
case("entry_class of a tensor", lambda M: M.td({"n": {"a": t(2)}}, []).entry_class(("n", "a")).__name__)
case("entry_class of a mapped tensor", lambda M: M.td({"a": t(2)}, []).memmap().entry_class("a").__name__)
case("entry_class of a nested one", lambda M: M.td({"n": {"a": t(2)}}, []).entry_class("n").__name__)
case(
    "entry_class in a lazy stack",
    lambda M: M.lazy_stack([M.td({"a": t(2)}), M.td({"a": t(2)})]).entry_class("a").__name__,
)
case(
    "data_ptr of a lazy stack has no batch",
    lambda M: (
        M.lazy_stack([M.td({"a": t(2)}), M.td({"a": t(2)})]).data_ptr().batch_size,
        sorted(M.lazy_stack([M.td({"a": t(2)}), M.td({"a": t(2)})]).data_ptr().keys(True, True)),
    ),
)


# --- parameters ---
def cast(M: Side) -> object:
    made = M.TensorDictParams(M.td({"a": torch.ones(2), "n": {"b": torch.ones(3)}}, [])).to(torch.int)
    return type(made).__name__, made["a"], made["n", "b"], len(list(made.parameters())), len(list(made.buffers()))


def zeroed(M: Side, *path: str) -> object:
    params = M.TensorDictParams(M.td({"a": torch.ones(2)}, []))
    td = M.td({"x": torch.ones(2)}, [])
    td.set(path, params)
    td.zero_()
    return params["a"].detach(), td["x"]


case("parameters to integers", cast)
case("zero_ around parameters", lambda M: zeroed(M, "p"))
case("zero_ around nested parameters", lambda M: zeroed(M, "n", "p"))


# --- empty rows ---
def emptied(M: Side, **how: object) -> object:
    lazy = M.lazy_stack([M.td({"a": torch.ones(2)}, []), M.td({"a": torch.ones(3)}, [])])
    td = M.td({"l": lazy, "x": t(2, 3)}, [2])
    made = td.new_zeros(4, empty_lazy=True)
    kinds = type(made["l"]).__name__, made["l"].batch_size, len(made["l"].tensordicts), list(made["l"].keys())
    made[1:3] = td
    return kinds, made["x"], [dict(element.items()) for element in made["l"].tensordicts]


case("new_zeros with an empty lazy stack, filled later", emptied)


# --- values by themselves ---
def one_value(M: Side) -> object:
    return M.NonTensorData("x", batch_size=[4, 3])


def value_rows(M: Side) -> object:
    return M.NonTensorStack(M.NonTensorStack("a", "b"), M.NonTensorStack("c", "d"))


def named(M: Side, value: object, names: object) -> object:
    value.names = names
    return list(value.names), value.tolist()


for made in (one_value, value_rows):
    n = 12 if made is one_value else 4
    case(f"{made.__name__}: view(size=)", lambda M, f=made, n=n: f(M).view(size=(n,)))
    case(f"{made.__name__}: permute(dims=)", lambda M, f=made: f(M).permute(dims=(1, 0)).batch_size)
    case(
        f"{made.__name__}: unflatten by keywords",
        lambda M, f=made: f(M).unflatten(dim=0, unflattened_size=(2, f(M).batch_size[0] // 2)).batch_size,
    )
    case(f"{made.__name__}: to_dict", lambda M, f=made: f(M).to_dict(retain_none=False, convert_tensors=True))
    case(f"{made.__name__}: tolist", lambda M, f=made: f(M).tolist(convert_tensors=True))
    for update in ("update", "update_"):
        case(f"{made.__name__}: {update}(None)", lambda M, f=made, u=update: getattr(f(M), u)(None).tolist())
    case(f"{made.__name__}: names", lambda M, f=made: named(M, f(M), ["time", "env"]))
    if made is one_value:
        case("empty of another batch", lambda M: M.NonTensorData("x", [3]).empty(batch_size=[2]).tolist())
        case("apply for no batch", lambda M: M.NonTensorData("x", [3]).apply(lambda x: x, batch_size=[]).batch_size)
    case(f"{made.__name__}: no names", lambda M, f=made: named(M, f(M), None))


@case.parametrize
def test_methods(case: Case) -> None:
    case.check()
