"""The programs that torch.compile must take whole, each a function of a few TensorDicts and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tdstore import LazyStackedTensorDict, TensorDict, cat, lazy_stack

PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in PROGRAMS, f"two programs are called {name!r}"
        PROGRAMS[name] = fn
        return fn

    return add


def sample() -> TensorDict:
    """Batch [3, 2]: floats, ints and a nested TensorDict."""
    return TensorDict(
        {
            "a": torch.arange(24.0).reshape(3, 2, 4),
            "i": torch.arange(6).reshape(3, 2),
            "n": {"b": torch.linspace(0.1, 1.2, 6).reshape(3, 2)},
        },
        [3, 2],
    )


def floats() -> TensorDict:
    return sample().exclude("i")


# -- making ---------------------------------------------------------------------------------


@program("construct")
def _(td: TensorDict) -> Any:
    return TensorDict({"x": td["a"] + 1, "n": {"y": td["i"]}}, [3, 2])


@program("construct from keywords, with an int for the batch size")
def _(td: TensorDict) -> Any:
    return TensorDict(x=td["a"], y=td["i"] * 2, batch_size=3)


@program("construct with names, a device and a lock")
def _(td: TensorDict) -> Any:
    return TensorDict({"x": td["a"], "y": 0.5 * td["i"]}, [3, 2], device="cpu", names=["t", "env"], lock=True)


@program("construct from a TensorDict")
def _(td: TensorDict) -> Any:
    return TensorDict(td, [3])


@program("construct with numbers")
def _(td: TensorDict) -> Any:
    return TensorDict({"x": 1.0, "y": 3, "z": [1, 2]}).set("w", td["a"])


@program("from_dict with a batch size found")
def _(td: TensorDict) -> Any:
    return TensorDict.from_dict({"x": td["a"], "n": {"y": td["i"]}}, auto_batch_size=True)


# -- keys -----------------------------------------------------------------------------------


@program("read")
def _(td: TensorDict) -> Any:
    return td["a"] + 1, td.get("i"), td.get("no"), td.get("no", td["i"])


@program("read nested")
def _(td: TensorDict) -> Any:
    return td["n", "b"] * 2, td["n"]["b"], td.get(("n", "b")), td.get(("n", "no"), 3)


@program("write")
def _(td: TensorDict) -> Any:
    td = td.copy()
    td["c"] = td["a"] * 2
    td["n", "new"] = td["i"]
    td["deep", "er", "x"] = td["i"] + 1
    td.set("d", td["a"][..., 0])
    return td


@program("write in place")
def _(td: TensorDict) -> Any:
    td = td.clone()
    td.set_("a", td["a"] + 1)
    td.set(("n", "b"), td["n", "b"] * 2, inplace=True)
    td.set_at_("i", 7, 0)
    return td


@program("delete, pop and rename")
def _(td: TensorDict) -> Any:
    td = td.clone()
    del td["i"]
    got = td.pop(("n", "b"))
    td.rename_key_("a", ("n", "a"))
    return td, got, td.setdefault("z", got)


@program("membership and lengths")
def _(td: TensorDict) -> Any:
    inside = "a" in td, "no" in td.keys(), ("n", "b") in td.keys(True)
    return td["a"] * len(td), inside, td.numel(), td.batch_dims, td.is_empty()


@program("loop over keys")
def _(td: TensorDict) -> Any:
    return [td[key] for key in td.keys() if key != "n"], list(td.keys(True, True)), list(td.keys(True))


@program("loop over items and values")
def _(td: TensorDict) -> Any:
    total = 0
    for _, value in td.items(True, True):
        total = total + value.sum()
    return total, [v.sum() for v in td.values(True, True)], [k for k, _ in td.items()]


@program("a sorted loop")
def _(td: TensorDict) -> Any:
    return list(td.keys(True, True, sort=True)), [v * 1 for _, v in td.items(True, True, sort=True)]


# -- indices --------------------------------------------------------------------------------


@program("index with an int")
def _(td: TensorDict) -> Any:
    return td[-1], td[0, 1]


@program("index with a slice")
def _(td: TensorDict) -> Any:
    return td[::2], td[..., 1:]


@program("index with None")
def _(td: TensorDict) -> Any:
    return td[None], td[:, None]


@program("index with a list")
def _(td: TensorDict) -> Any:
    return td[[2, 0, 0]], td[range(2)]


@program("index with a tensor")
def _(td: TensorDict, rows: Any = torch.tensor([2, 0, 1, 1])) -> Any:
    return td[rows], td[:, rows % 2]


@program("index with two tensors")
def _(td: TensorDict, rows: Any = torch.tensor([2, 0, 1])) -> Any:
    return td[rows, rows % 2]


@program("index with a mask")
def _(td: TensorDict, mask: Any = torch.tensor([True, False, True])) -> Any:
    return td[mask]


@program("index with a wide mask")
def _(td: TensorDict, mask: Any = torch.tensor([[True, False], [False, False], [True, True]])) -> Any:
    return td.masked_select(mask)


@program("write at an int, a slice and a tensor")
def _(td: TensorDict, rows: Any = torch.tensor([2, 0])) -> Any:
    td = td.clone()
    td[0] = td[1]
    td[1:] = 3
    td[rows] = td[rows.flip(0)]
    return td


@program("write at a mask")
def _(td: TensorDict, mask: Any = torch.tensor([True, False, True])) -> Any:
    td = td.clone()
    td[mask] = 0
    return td


@program("masked_fill and where")
def _(td: TensorDict, mask: Any = torch.tensor([True, False, True])) -> Any:
    return td.masked_fill(mask, 2), torch.where(mask, td, 0)


# -- maths ----------------------------------------------------------------------------------


@program("arithmetic with numbers")
def _(td: TensorDict) -> Any:
    return td + 1, 1 - td, td**2, -td


@program("arithmetic with TensorDicts")
def _(td: TensorDict) -> Any:
    return td * td, td.add(td, alpha=2)


@program("arithmetic with tensors")
def _(td: TensorDict, t: Any = torch.tensor([[1.0, 2.0]])) -> Any:
    return td * t, t - td


@program("pointwise functions")
def _(td: TensorDict) -> Any:
    td = td.exclude("i")
    return td.sqrt().log(), td.isfinite()


@program("lerp and addcmul")
def _(td: TensorDict) -> Any:
    td = td.exclude("i")
    return td.lerp(td + 1, 0.5), td.addcmul(td, td, value=2)


@program("clamp, maximum and minimum")
def _(td: TensorDict) -> Any:
    return td.clamp(1, 4), td.maximum(td * 0 + 2)


@program("maths in place")
def _(td: TensorDict) -> Any:
    td = td.exclude("i").clone()
    td.add_(1)
    td += td
    return td.exp_()


@program("compare")
def _(td: TensorDict) -> Any:
    return td > 2, (td == td).all(dim=0)


@program("reduce")
def _(td: TensorDict) -> Any:
    td = td.exclude("i")
    return td.mean(dim=0), td.std(dim=1, keepdim=True), td.sum(dim="feature")


@program("reduce to one tensor")
def _(td: TensorDict) -> Any:
    return td.sum(reduce=True), td.exclude("i").norm(), td.max(dim=0).values


@program("softmax and cumulative maxima")
def _(td: TensorDict) -> Any:
    return td.exclude("i").softmax(0), td.cummax(0).values


# -- dtypes and devices -------------------------------------------------------------------------


@program("to a dtype")
def _(td: TensorDict) -> Any:
    return td.to(torch.float64), td.to(dtype=torch.float16)


@program("to a device")
def _(td: TensorDict) -> Any:
    return td.to("cpu"), td.to(torch.device("cpu"), torch.float64)


@program("to the kind of another")
def _(td: TensorDict) -> Any:
    return td.to(td["n", "b"].double()), td.detach(), td.data


# -- many -----------------------------------------------------------------------------------


@program("stack")
def _(td: TensorDict) -> Any:
    return torch.stack([td, td]), TensorDict.stack([td, td], 1)


@program("cat")
def _(td: TensorDict) -> Any:
    return torch.cat([td, td]), cat([td, td[:, :1]], 1)


@program("lazy stack")
def _(td: TensorDict) -> Any:
    lazy = lazy_stack([td, td + 1])
    return lazy["a"], lazy[0]["i"], lazy["n", "b"], lazy.batch_size


@program("lazy stack in and out")
def _(td: TensorDict) -> Any:
    lazy = LazyStackedTensorDict(td, td * 2, stack_dim=1)
    return lazy + 1, lazy[:, 0]


@program("write into a lazy stack")
def _(td: TensorDict) -> Any:
    lazy = lazy_stack([td.clone(), td.clone()])
    lazy["new"] = torch.ones(2, 3, 2)
    lazy.set_("a", lazy["a"] * 3)
    return lazy


@program("split, chunk and unbind")
def _(td: TensorDict) -> Any:
    return td.split([1, 2]), td.chunk(2, 1), td.unbind(1)


@program("gather and repeat")
def _(td: TensorDict, index: Any = torch.tensor([[1, 0], [0, 0], [1, 1]])) -> Any:
    return td.gather(1, index), td.repeat(2, 1)


# -- shapes ---------------------------------------------------------------------------------


@program("view and reshape")
def _(td: TensorDict) -> Any:
    return td.reshape(2, 3), td.view(-1).unflatten(0, (3, 2))


@program("permute and transpose")
def _(td: TensorDict) -> Any:
    return td.permute(1, 0), td.movedim(0, 1)


@program("squeeze, unsqueeze and expand")
def _(td: TensorDict) -> Any:
    return td.unsqueeze(1).squeeze(1), td.expand(2, 3, 2)


@program("flip, roll and pad")
def _(td: TensorDict) -> Any:
    return td.roll(1, 0), td.pad([1, 0])


@program("batch size")
def _(td: TensorDict) -> Any:
    td = td.copy()
    td.batch_size = [3]
    return td, td.auto_batch_size_(), td.shape, td.size(0)


@program("names")
def _(td: TensorDict) -> Any:
    td = td.copy()
    td.names = ["t", "env"]
    return td[0], td.unsqueeze(0), td.names


# -- trees ----------------------------------------------------------------------------------


@program("update")
def _(td: TensorDict) -> Any:
    td = td.clone()
    td.update({"a": td["a"] * 2, "new": td["i"]})
    td.update(td * 2)
    td.update({"n": {"c": td["i"]}})
    return td


@program("update in place")
def _(td: TensorDict) -> Any:
    td = td.clone()
    td.update_(td * 2)
    td.update_({"a": td["a"] + 1})
    td.update_at_(td[1] * 3, 0)
    td.copy_(td + 1)
    return td


@program("lock and unlock")
def _(td: TensorDict) -> Any:
    td = td.clone().lock_()
    td.set_("a", td["a"] * 2)
    locked = td.is_locked, td["n"].is_locked
    with td.unlock_():
        td["x"] = td["i"]
    return td, locked, td.unlock_().is_locked


@program("non-tensor values")
def _(td: TensorDict) -> Any:
    td = td.copy()
    td["s"] = "hello"
    td.set_non_tensor("t", {"k": 1})
    return td, td["s"], td.get("s").data, td.get_non_tensor("t"), td[0]["s"]


@program("one value per row")
def _(td: TensorDict) -> Any:
    td = td[:, 0]
    td["s"] = ["a", "b", "c"]
    return td, td[1:]


@program("clone and empty")
def _(td: TensorDict) -> Any:
    return td.clone(), td.clone(False), td.empty(recurse=True)


@program("select, exclude and split_keys")
def _(td: TensorDict) -> Any:
    return td.select("a", ("n", "b")), td.split_keys(["a"], [("n", "b")])


@program("flatten_keys and unflatten_keys")
def _(td: TensorDict) -> Any:
    return td.flatten_keys("_").unflatten_keys("_")


@program("apply")
def _(td: TensorDict) -> Any:
    both = td.apply(lambda x, y: x + y, td)
    smaller = td.apply(lambda x: x[0], batch_size=[2])
    return both, smaller, td.named_apply(lambda name, x: x * len(name)), td.clone().apply_(lambda x: x.add_(1))


@program("apply that drops entries")
def _(td: TensorDict) -> Any:
    return td.apply(lambda x: x + 1 if x.dtype.is_floating_point else None), td.empty().filter_empty_()


@program("to_dict and to_tensordict")
def _(td: TensorDict) -> Any:
    return td.to_dict(), td.to_tensordict()


@program("zeros_like and its kin")
def _(td: TensorDict) -> Any:
    return torch.zeros_like(td), torch.full_like(td, 3), td.new_zeros(5)


@program("as a context manager")
def _(td: TensorDict) -> Any:
    td = td.clone()
    with td.view(6) as flat:
        flat["v"] = flat["i"] + 1
    with td.unsqueeze(0) as more:
        more["u"] = torch.ones(1, 3, 2)
    return td


@program("vmap")
def _(td: TensorDict) -> Any:
    return torch.vmap(lambda row: row.set("s", row["a"].sum(-1)))(td.copy())


@program("vmap with maths")
def _(td: TensorDict) -> Any:
    return torch.vmap(lambda row: (row + 1).exclude("i").exp(), in_dims=1, out_dims=1)(td)


@program("torch functions")
def _(td: TensorDict) -> Any:
    return (
        torch.flip(td, [0]),
        torch.exp(td.exclude("i")),
        torch.add(td, 1),
        torch.mean(td.float(), 0),
        torch.tile(td, [2, 1]),
    )


@program("losses")
def _(td: TensorDict) -> Any:
    td = td.float()
    return F.mse_loss(td, td + 1), F.l1_loss(td, td * 2, reduction="none")


@program("tree_map")
def _(td: TensorDict) -> Any:
    return pytree.tree_map(lambda x: x * 2, {"td": td, "t": td["i"]}), pytree.tree_leaves(td)


@program("cat_tensors and stack_tensors")
def _(td: TensorDict) -> Any:
    td = TensorDict({"x": td["a"], "y": td["a"] * 2}, [3, 2])
    return td.clone().cat_tensors("x", "y", out_key="z", dim=-1), td.stack_tensors("x", "y", out_key="z", dim=2)
