"""Calls that a sweep of every method over every container (`tests/sweep`) found to differ, and whole-file corners."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tdstore import PersistentTensorDict, TensorDict, tensorclass

from .programs import check, programs


@programs("""
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]).lock_()
made = td.separates("missing", default=None)
(list(made.keys()), made.is_locked, td.is_locked, M.attempt(lambda: td.separates("a")), sorted(td.keys()))
---
td = TensorDict({"a": torch.zeros(3)}, [3]).lock_()
(list(td.separates("missing", strict=False).keys()), M.attempt(lambda: td.separates("missing")))
---
a, b = TensorDict({"a": torch.zeros(3)}, [3], device="cpu"), TensorDict({"a": torch.ones(3)}, [3])
[fn(pair).device for pair in ((a, b), (b, a)) for fn in (torch.stack, torch.cat, TensorDict.maybe_dense_stack)]
---
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]).lock_()
other = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
(td.expand_as(other), td.expand(2, 3).is_locked)
---
td = TensorDict({"a": torch.tensor([True, False])}, [2]).lock_()
[x.is_locked for x in (td | td, td ^ td, td & td, ~td)]
---
stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)])
made = [stack[:], stack[...], stack[:3], stack[:, :]]
for other in made:
    other.append(TensorDict({"a": torch.ones(2)}, [2]))
(stack.batch_size, [x.batch_size for x in made], [x[0] is stack[0] for x in made], [x.is_locked for x in made])
---
stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)]).lock_()
[x.is_locked for x in (stack[:], stack[...], stack[:3])]
---
stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)])
made = stack.empty(names=["x", "y"])
(type(made).__name__, made.names, made.batch_size, stack.names)
---
TensorDict({"a": torch.ones(2)}, [2]).memmap(tmp + "/one")
td = TensorDict({"a": torch.zeros(2)}, [2]).memmap_(tmp + "/two")
free = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])
(td.load_memmap_(tmp + "/one").is_locked, td["a"], free.load_memmap_(tmp + "/one").is_locked, list(free.keys()))
---
TensorDict({"a": torch.ones(2)}, [2]).memmap(tmp + "/one")
td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2]).lock_()
(M.attempt(lambda: td.load_memmap_(tmp + "/one")), list(td.keys()), td["a"])
---
td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}, "s": "x"}, [2])
lazy = TensorDict({"n": lazy_stack([TensorDict({"a": torch.zeros(1)}) for _ in range(2)])}, [2])
(td.densify() is td, td.densify(layout=torch.jagged) is td, lazy.densify() is lazy)
---
params = TensorDictParams.from_dict({"a": torch.zeros(3), "n": {"i": torch.arange(3)}}, batch_size=[3])
(type(params).__name__, params.batch_size, [type(x).__name__ for x in params.values(True, True)])
---
class Item(TypedTensorDict):
    a: torch.Tensor
typed, plain = Item(a=torch.ones(3), batch_size=[3]), TensorDict({"a": torch.zeros(3)}, [3])
made = [fn(pair) for pair in ([typed, plain], [plain, typed]) for fn in (torch.stack, torch.cat, TensorDict.cat)]
[(type(x).__name__, x.batch_size, x["a"]) for x in made]
---
class Item(TypedTensorDict):
    a: torch.Tensor
class Other(TypedTensorDict):
    a: torch.Tensor
pair = [Item(a=torch.ones(3), batch_size=[3]), Other(a=torch.zeros(3), batch_size=[3])]
[(type(x).__name__, x["a"]) for x in (torch.stack(pair), torch.cat(pair))]
---
class Item(TensorClass):
    a: torch.Tensor
Item(a=torch.ones(3), batch_size=[3]).to_h5(tmp + "/x.h5").close()
found = [type(cls.from_h5(tmp + "/x.h5")).__name__ for cls in (TensorDict, PersistentTensorDict, Item)]
(found, TensorDict.from_h5(tmp + "/x.h5")["a"])
""")
def test_swept(source: str) -> None:
    check(source)


@programs("""
import dataclasses
@dataclasses.dataclass
class Data:
    x: torch.Tensor
    label: str = "d"
    def twice(self):
        return self.x * 2
Made = tensorclass(Data)
obj = Made(torch.zeros(2), batch_size=[2])
(obj.label, obj[0].x, Made.__name__, obj.twice(), obj.batch_size, bool((obj == obj).all()), torch.stack([obj, obj]).x)
---
import dataclasses
@tensorclass
@dataclasses.dataclass
class Data:
    x: torch.Tensor
    label: str = "d"
obj = Data(torch.zeros(2), batch_size=[2])
(" ".join(repr(obj).split()), obj.label, obj.to_dict(), [f.name for f in dataclasses.fields(Data)])
---
import dataclasses
@tensorclass(autocast=True)
@dataclasses.dataclass
class Data:
    x: torch.Tensor
    label: str = "d"
    def __len__(self):
        return 9
obj = Data([0, 1], label=3, batch_size=[2])
(obj.x, obj.label, len(obj))
""")
def test_the_class_of_a_dataclass_becomes_a_tensorclass(source: str) -> None:
    check(source)


def test_defaults_and_methods_of_a_dataclass_stay() -> None:
    """There a default factory is an error, and comparisons are those of every tensorclass."""

    @tensorclass
    @dataclasses.dataclass
    class Data:
        x: Tensor
        label: str = dataclasses.field(default_factory=lambda: "d")

        def __eq__(self, other: object) -> bool:
            return other is self

        def __repr__(self) -> str:
            return "data"

    made: Any = Data(torch.zeros(3))
    assert (made.label, made == made, made == Data(torch.zeros(3)), repr(made)) == ("d", True, False, "data")


def squares(td: TensorDict) -> Tensor:
    return td["a"] ** 2


def total(td: TensorDict) -> Tensor:
    return (td["a"] ** 2).sum()


@pytest.mark.parametrize(
    "of",
    [
        lambda td: torch.func.grad(total)(td)["a"],
        lambda td: torch.func.grad_and_value(total)(td)[1],
        lambda td: torch.func.jacrev(squares)(td)["a"],
        lambda td: torch.func.vjp(squares, td)[1](torch.ones(3))[0]["a"],
        lambda td: torch.func.jvp(squares, (td,), (td,))[1],
        lambda td: torch.func.grad(lambda w: (torch.func.grad(total)(td)["a"] * w).sum())(torch.ones(3)),
    ],
    ids=["grad", "grad_and_value", "jacrev", "vjp", "jvp", "nested"],
)
def test_derivatives_at_stored_entries(of, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """There each of these is an internal error of torch."""
    td = TensorDict({"a": torch.arange(3.0)}, [3])
    with PersistentTensorDict.from_dict(td, filename=str(tmp_path / "x.h5"), batch_size=[3]) as stored:
        assert torch.equal(of(stored), of(td))


@programs("""
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.arange(6.).view(3, 2), batch_size=[3])
[type(x).__name__ for x in (t == 1, t != t, t < 2, t.sum(), t.mean(0), t.max(0)[0], t.std(), t.amax(0), t + 1, t.exp())]
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.zeros(3), batch_size=[3])
lazy = T.lazy_stack([t, t], 1)
(isinstance(lazy, LazyStackedTensorDict), lazy.batch_size, type(lazy[:, 0]).__name__)
---
class T(TypedTensorDict):
    a: torch.Tensor
    b: torch.Tensor
(T.from_dict({"a": torch.zeros(3)}, batch_size=[3]), T.from_any({"a": torch.zeros(3)}))
---
td = TensorDict({"a": torch.zeros(3)}, [3]).share_memory_()
address = td["a"].data_ptr()
td.share_memory_()["a"].data_ptr() == address
---
td = TensorDict({"a": torch.zeros(3)}, [3]).share_memory_().unlock_()
td["b"] = torch.ones(3)
(td.share_memory_().is_shared(), td["b"].is_shared(), td.is_locked)
---
@tensorclass
class T:
    a: torch.Tensor
    b: str = "x"
class U(TensorClass):
    a: torch.Tensor
class V(U):
    c: int = 3
(list(T.__dataclass_fields__), list(V.__dataclass_fields__), type(T.__dataclass_fields__).__name__)
---
TensorDict({"a": torch.zeros(3)}, "x")
""")
def test_what_a_later_sweep_found(source: str) -> None:
    check(source)
