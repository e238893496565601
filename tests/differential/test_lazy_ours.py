"""What lazy stacks do here and the peer refuses or gets wrong: told one by one, or from the elements."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict, lazy_stack, maybe_dense_stack
from tdstore.errors import BatchSizeError, LockedError, UnsupportedError

from .oracle import OURS
from .stacks import DENSE, STACKS, content, exact
from .structures import t

UNEVEN = [s for s in STACKS if s.startswith("uneven")]
RAGGED = [s for s in STACKS if s.startswith("ragged")]


def make(name: str) -> Any:
    return STACKS[name](OURS)


def equal(one: Any, other: Any) -> None:
    assert str(exact(one)) == str(exact(other))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "lerp"])
def test_maths_with_a_dense_operand(name: str, op: str) -> None:
    lazy = make(name).filter_non_tensor_data().float()
    dense = lazy.to_tensordict()
    more = (0.25,) if op == "lerp" else ()
    want = content(getattr(dense, op)(dense + 1, *more))
    assert str(content(getattr(lazy, op)(dense + 1, *more))) == str(want)
    assert str(content(getattr(dense, op)(lazy + 1, *more))) == str(want)
    getattr(lazy, op + "_")(dense + 1, *more)
    assert str(content(lazy)) == str(want)


@pytest.mark.parametrize("name", [n for n in DENSE if not n.startswith(("text", "inner"))])
def test_maths_with_tensors_over_the_batch(name: str) -> None:
    lazy, dense = make(name).float(), make(name).to_tensordict().float()
    for shape in (
        lazy.batch_size,
        lazy.batch_size[1:],
        (1, *lazy.batch_size[1:]),
        (lazy.batch_size[0], *(1 for _ in lazy.batch_size[1:])),
    ):
        operand = t(*shape) + 1
        assert str(content(lazy * operand)) == str(content(dense * operand))
    with pytest.raises((BatchSizeError, RuntimeError)):
        lazy * t(17)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.unsqueeze(0),
        lambda td: td.unsqueeze(-1),
        lambda td: td.unsqueeze(1),
        lambda td: td.transpose(0, -1),
        lambda td: td.permute(*reversed(range(td.ndim))),
        lambda td: td.expand(2, *td.batch_size),
        lambda td: td.reshape(-1),
        lambda td: td.view(-1),
        lambda td: td.view(1, *td.batch_size, 1),
        lambda td: td.flatten(),
        lambda td: td.flatten(0, -1),
        lambda td: td.unflatten(0, (1, -1)),
        lambda td: td.unflatten(-1, (-1, 1)),
        lambda td: td.squeeze(),
        lambda td: td.squeeze(0),
        lambda td: td.unsqueeze(0).squeeze(0),
        lambda td: td.narrow(0, 0, 1),
        lambda td: td.narrow(-1, 1, 1),
        lambda td: td.flip(0),
        lambda td: td.roll(1, -1),
        lambda td: td.repeat(*(2 for _ in td.batch_size)),
        lambda td: td.repeat_interleave(2, dim=0),
        lambda td: td.gather(0, torch.zeros(1, dtype=torch.int64)),
        lambda td: td.split(2),
        lambda td: td.split([1, td.batch_size[-1] - 1], -1),
        lambda td: td.chunk(2, -1),
        lambda td: td.unbind(0),
        lambda td: td.unbind(-1),
        lambda td: td.tensor_split(td.batch_size[0]),
        lambda td: td.softmax(0) if not td.is_empty() and td.dtype is torch.float32 else td,
        lambda td: td.movedim(0, -1),
        lambda td: torch.stack([td, td.clone()]),
        lambda td: torch.stack([td, td.clone()], -1),
        lambda td: torch.stack([td, td.to_tensordict()], 1),
        lambda td: torch.cat([td, td.clone()]),
        lambda td: torch.cat([td, td.clone()], -1),
        lambda td: torch.cat([td.to_tensordict(), td], -1),
        lambda td: td.to_lazystack(-1),
        lambda td: td.densify(),
    ],
)
def test_shapes(name: str, move: Any) -> None:
    def run(td: Any) -> Any:
        try:
            return content(move(td))
        except (IndexError, ValueError, RuntimeError, TypeError) as error:
            return type(error)

    assert str(run(make(name))) == str(run(make(name).to_tensordict()))


@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.view(-1),
        lambda td: td.view(1, *td.batch_size),
        lambda td: td.unsqueeze(1),
        lambda td: td.transpose(0, 1),
        lambda td: td.expand(2, *td.batch_size)[0],
        lambda td: td.narrow(1, 0, td.batch_size[1]),
        lambda td: td.unflatten(1, (-1, 1)),
    ],
)
@pytest.mark.parametrize("name", ["even@0", "even@1"])
def test_views_share_memory(name: str, move: Any) -> None:
    td = make(name)
    move(td).zero_()
    assert not any(leaf.any() for leaf in td.to_tensordict().values(True, True))


def test_a_view_writes_back() -> None:
    td = make("even@0")
    with td.unsqueeze(0) as wide:
        wide["new"] = torch.ones(1, 4, 3)
    with td.view(-1) as flat:
        flat["flat"] = torch.arange(12)
    assert td["new"].shape == (4, 3) and td[1]["flat"].tolist() == [3, 4, 5]


def test_names_stay() -> None:
    td = make("named@1")
    td.names = ["time", "run"]
    assert td.unsqueeze(0).names == [None, "time", "run"] and td.transpose(0, 1).names == ["run", "time"]
    assert td.flatten_keys().names == ["time", "run"] and td.tensordicts[0].names == ["time"]
    assert td[0].names == ["run"] and td[:, 1].names == ["time"] and (td + 1).names == ["time", "run"]
    assert td.view(3, 3, 1).names == [None] * 3 and td.names == ["time", "run"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven(name: str) -> None:
    td = make(name)
    parts = td.tensordicts
    with pytest.raises(UnsupportedError, match="as_list"):
        td["a"]
    for refused in (td.to_tensordict, td.contiguous, lambda: td.new_zeros(3), lambda: td.pop("a")):
        with pytest.raises(RuntimeError):
            refused()
    assert td.get("a", as_padded_tensor=True, padding_value=-1).shape == torch.stack([t(3, 3)] * 2, td.stack_dim).shape
    left = td.get("a", as_padded_tensor=True, padding_side="left", padding_value=-1).unbind(td.stack_dim)[0]
    assert left[:, 0].tolist() == [-1] * 3 and torch.equal(left[:, 1:], parts[0]["a"])
    assert td.sum()["a"] == sum(p["a"].sum() for p in parts)
    torch.testing.assert_close(td.float().mean()["a"], torch.cat([p["a"].flatten() for p in parts]).mean())
    torch.testing.assert_close(td.float().std()["a"], torch.cat([p["a"].flatten() for p in parts]).std())
    assert torch.equal(td.sum(dim="feature")["a"], torch.stack([p["a"].sum(1) for p in parts], td.stack_dim))
    inner = 1 - td.stack_dim
    equal(td.sum(inner)[0], parts[0].sum(0).select("a", "n"))
    flipped = td.flip(inner)
    assert torch.equal(flipped.unbind(td.stack_dim)[1]["a"], parts[1]["a"].flip(0))
    mask = torch.zeros(*td.batch_size, dtype=torch.bool)
    mask[0, 0] = mask[-1, -1] = True
    assert [r["a"].shape[0] for r in td[mask].tensordicts] == [2, 3]
    assert "x" not in td.exclude("x").tensordicts[1] and "x" in td.tensordicts[1]
    with pytest.raises(UnsupportedError, match="different keys"):
        td.to_dict()
    if td.stack_dim:
        with pytest.raises(UnsupportedError, match="first dimension"):
            td.densify()
    else:
        dense = td.densify()
        assert dense["a"].is_nested and torch.equal(dense["a"].unbind()[1], parts[1]["a"])
    td.set("b", [torch.zeros(3, 1), torch.zeros(3, 2)] if td.stack_dim == 0 else torch.zeros(3, 2))
    td.del_("x")
    assert "x" not in parts[1] and "b" in parts[0]


@pytest.mark.parametrize("name", RAGGED)
def test_ragged(name: str) -> None:
    td = make(name)
    d, parts = td.stack_dim, td.tensordicts
    assert sorted(td.batch_size) == [-1, 3]
    assert td.permute(1, 0).stack_dim == 1 - d and td.unsqueeze(0).batch_size == (1, *td.batch_size)
    for refused in (lambda: td.view(-1), lambda: td.reshape(-1), lambda: td.unbind(1 - d), lambda: td.sum(d)):
        with pytest.raises(RuntimeError):
            refused()
    assert td.sum()["a"] == sum(p["a"].sum() for p in parts)
    td += 1
    assert parts[2]["a"][0] == 21
    td[:] = 4
    assert all((p["a"] == 4).all() for p in parts)
    td.append(parts[0].clone())
    assert td.batch_size[d] == 4
    with pytest.raises(BatchSizeError):
        lazy_stack(parts, strict_shape=True)
    with pytest.raises(BatchSizeError):
        td.append(TensorDict({}, [2, 2]))


def test_a_nested_stack_that_changes_is_told() -> None:
    inner = [lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.ones(2)})]) for _ in range(2)]
    td = lazy_stack(inner)
    inner[0].append(TensorDict({"a": torch.ones(2)}))
    assert td.batch_size == (2, -1)


def test_a_stack_inside_a_tensordict() -> None:
    uneven = lazy_stack([TensorDict({"v": torch.ones(2)}), TensorDict({"v": torch.ones(3)})])
    td = TensorDict({"z": uneven, "x": torch.ones(2)}, [2])
    assert (td * 2)["z"].get("v", as_list=True)[1].tolist() == [2] * 3
    td += td
    assert uneven[0]["v"].tolist() == [2, 2] and td["x"].tolist() == [2, 2]
    assert td[1]["z"] is uneven[1] and td[1:]["z"][0] is uneven[1]
    assert (td * torch.tensor([1.0, 10.0]))["z"][1]["v"].tolist() == [20] * 3
    assert td.unsqueeze(0)["z"].batch_size == (1, 2) and td.clone()["z"].get("v", as_list=True)[0].tolist() == [2, 2]
    assert [row["z"]["v"].numel() for row in td.unbind(0)] == [2, 3]
    assert [part["z"].batch_size for part in td.split(1)] == [(1,), (1,)]
    assert td.apply(lambda x: x + 1)["z"][1]["v"].tolist() == [3] * 3
    assert torch.stack([td, td.clone()])["z"].batch_size == (2, 2)
    assert torch.cat([td, td.clone()])["z"].batch_size == (4,)
    with pytest.raises(KeyError):
        td + TensorDict({"x": torch.ones(2)}, [2])
    with pytest.raises(KeyError):
        td + TensorDict({"x": torch.ones(2), "z": {"w": torch.ones(2)}}, [2])
    assert td["z"].get("v", as_padded_tensor=True).shape == (2, 3)
    assert td.get(("z", "v"), as_list=True)[0].shape == (2,)
    with pytest.raises(BatchSizeError):
        td.batch_size = [2, 2]


def test_deeper_batches_below_deeper_batches() -> None:
    td = TensorDict({"z": TensorDict({"n": TensorDict({"x": torch.zeros(4, 3, 2)}, [4, 3])}, [4, 3])}, [4])
    for made, batch in (
        (td.unsqueeze(0), (1, 4, 3)),
        (td[[0, 1]], (2, 3)),
        (td[1:], (3, 3)),
        (td.apply(lambda x: x + 1), (4, 3)),
        (td.sum(0), (3,)),
    ):
        assert made["z"].batch_size == made["z", "n"].batch_size == batch


def test_locks() -> None:
    td = make("even@0")
    td.lock_()
    assert td["n"].is_locked and td[1:].is_locked and (td + 1).is_locked and td.unsqueeze(0).is_locked
    for refused in (lambda: td["n"].set("q", torch.zeros(4, 3)), td.clear, lambda: td[0].unlock_(), td["n"].unlock_):
        with pytest.raises(LockedError):
            refused()
    td.unlock_()
    td.tensordicts[1].lock_()
    with pytest.raises(LockedError):
        td.set("q", torch.zeros(4, 3))
    assert "q" not in td.tensordicts[0]


def test_nothing_is_written_if_something_does_not_fit() -> None:
    td = make("even@0")
    before = td.clone()
    for wrong in (
        lambda: td.update_({"a": td["a"] + 1, "q": t(4, 3)}),
        lambda: td.update_({"a": td["a"] + 1, ("n", "b"): t(17)}),
        lambda: td.set_("a", t(4, 3)),
        lambda: td.set("a", t(3, 3)),
        lambda: td.add_(t(5)),
        lambda: td.rename_key_("a", "n", safe=True),
    ):
        with pytest.raises((KeyError, ValueError, RuntimeError)):
            wrong()
        equal(td, before)


def test_batch_size() -> None:
    td = make("wide@1")
    td.batch_size = [3, 2]
    assert td.tensordicts[0].batch_size == (3,)
    for wrong in ([3], [3, 5], [3, 2, 9]):
        with pytest.raises(BatchSizeError):
            td.batch_size = wrong
    td.auto_batch_size_()
    assert td.batch_size == (3, 2, 2) and td["n"].batch_size == (3, 2, 2)


def test_functions() -> None:
    same, other = TensorDict({"a": t(2)}), TensorDict({"a": t(3)})
    assert type(maybe_dense_stack([same, same])) is TensorDict
    assert type(maybe_dense_stack([same, other])) is LazyStackedTensorDict
    assert type(TensorDict.maybe_dense_stack([same, TensorDict({"b": t(2)})])) is LazyStackedTensorDict
    assert TensorDict.lazy_stack([same, other])[1] is other
    with tdstore.set_lazy_legacy(True):
        assert tdstore.lazy_legacy() and type(torch.stack([same, same])) is LazyStackedTensorDict
    assert not tdstore.lazy_legacy() and type(torch.stack([same, same])) is TensorDict
    assert type(tdstore.set_lazy_legacy(True)(lambda: torch.stack([same, same]))()) is LazyStackedTensorDict
    out = torch.stack([same.clone(), same.clone()])
    assert lazy_stack([same + 1, same + 1], out=out) is out and out["a"][0].tolist() == [1, 2]
    with pytest.raises(RuntimeError):
        lazy_stack([])
    with pytest.raises(TypeError):
        lazy_stack([same, {}])
    with pytest.raises(IndexError):
        lazy_stack([same], 3)
    assert LazyStackedTensorDict().batch_size == (0,)
    stack = lazy_stack([same, other])
    doubled = pytree.tree_map(lambda x: x * 2, stack)
    assert type(doubled) is LazyStackedTensorDict and doubled[1]["a"].tolist() == [0, 2, 4]
    assert copy.deepcopy(stack)[0] is not same


def test_a_key_of_several_kinds() -> None:
    td = lazy_stack([TensorDict({"z": t(2), "s": "x"}), TensorDict({"z": {"k": t(2)}, "s": t(1)})])
    for key in ("z", "s"):
        with pytest.raises(UnsupportedError, match="as_list"):
            td[key]
    assert td.get("s", as_list=True)[0] == "x" and sorted(td.keys()) == ["s", "z"]
    assert "z: Tensor(shape=torch.Size([-1])" in repr(td)


def test_leaves_of_a_tree_with_a_stack_are_listed_with_their_keys() -> None:
    elements = [TensorDict({"c": torch.full((2,), float(i))}, []) for i in range(3)]
    td = TensorDict({"a": torch.zeros(3), "stack": lazy_stack(elements)}, [3])
    found = dict(td.items(include_nested=True, leaves_only=True))
    assert list(found) == ["a", ("stack", "c")]
    assert found["stack", "c"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert [tuple(v.shape) for v in td.values(include_nested=True, leaves_only=True)] == [(3,), (3, 2)]
