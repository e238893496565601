"""Tensorclasses of both packages, declared by the same code: the same calls give the same fields and errors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor

import tdstore
from tests.differential.oracle import FAMILIES
from tests.peer import is_adopted, tensordict


@functools.cache
def declare(m: ModuleType) -> SimpleNamespace:
    """The classes of the cases, made by one of the packages."""

    class Inner:
        x: torch.Tensor
        tag: str = "in"

    inner = m.tensorclass(Inner)

    class Outer:
        t: torch.Tensor
        opt: Optional[torch.Tensor] = None  # noqa: UP045
        name: str = "n"
        inner: Any = None

        def twice(self) -> Any:
            return self.t * 2

        @property
        def width(self) -> int:
            return self.t.shape[-1]

        @classmethod
        def make(cls, n: int) -> Any:
            return cls(t=torch.zeros(n), batch_size=[n])

        @staticmethod
        def three() -> int:
            return 3

    class Cast:
        i: int = 0
        f: float = 0.0
        s: str = ""
        b: bool = False
        t: Optional[torch.Tensor] = None  # noqa: UP045

    class Raw:
        n: Any = None

    class Ice:
        x: torch.Tensor

    class Only:
        x: torch.Tensor
        y: Optional[torch.Tensor] = None  # noqa: UP045

    class Sub(m.TensorClass):
        x: torch.Tensor

    class SubSub(Sub):
        y: torch.Tensor
        z: int = 4

    class Flagged(m.TensorClass["nocast"]):
        n: Any = None

    class Keyword(m.TensorClass, autocast=True):
        i: int = 0

    return SimpleNamespace(
        m=m,
        torch=torch,
        TensorDict=m.TensorDict,
        Inner=inner,
        Outer=m.tensorclass(Outer),
        Cast=m.tensorclass(autocast=True)(Cast),
        Raw=m.tensorclass(nocast=True)(Raw),
        Ice=m.tensorclass(frozen=True)(Ice),
        Only=m.tensorclass(tensor_only=True)(Only),
        Sub=Sub,
        SubSub=SubSub,
        Flagged=Flagged,
        Keyword=Keyword,
    )


def outer(c: Any, **more: Any) -> Any:
    return c.Outer(t=torch.arange(6.0).reshape(3, 2), batch_size=[3], **more)


def full(c: Any) -> Any:
    return outer(c, opt=torch.ones(3), inner=c.Inner(x=torch.arange(3), batch_size=[3]), name="full")


def changed(obj: Any, change: Callable[[Any], Any]) -> Any:
    change(obj)
    return obj


BOTH: dict[str, Callable[[Any], Any]] = {
    # construction
    "defaults": outer,
    "all fields": full,
    "positional": lambda c: c.Outer(torch.zeros(3), None, "x", batch_size=[3]),
    "batch size as a number": lambda c: c.Outer(torch.zeros(3), batch_size=3),
    "no batch": lambda c: c.Outer(torch.zeros(3)),
    "device": lambda c: str(c.Outer(torch.zeros(3), device="cpu").device),
    "names": lambda c: c.Outer(torch.zeros(3), batch_size=[3], names=["a"]).names,
    "lock": lambda c: c.Outer(torch.zeros(3), lock=True).is_locked,
    "too many": lambda c: c.Outer(1, 2, 3, 4, 5),
    "missing": lambda c: c.Outer(name="x"),
    "unknown": lambda c: c.Outer(torch.zeros(3), q=1),
    "twice given": lambda c: c.Outer(torch.zeros(3), t=torch.zeros(3)),
    "wrong batch": lambda c: c.Outer(torch.zeros(3), batch_size=[4]),
    "int in a batch": lambda c: c.Outer(torch.zeros(3), opt=3, batch_size=[3]),
    **{
        f"value {value!r}"[:30]: lambda c, value=value: c.Outer(torch.zeros(3), opt=value)
        for value in (3, 4.5, True, [1, 2], ["a", "b"], (1, 2), {"a": 1}, None, "s", np.ones(2), torch.ones(2))
    },
    # access
    "attribute": lambda c: (full(c).t, full(c).name, full(c).inner.tag, outer(c).opt),
    "unknown attribute": lambda c: outer(c).zz,
    "get": lambda c: [full(c).get(k) for k in ("t", "opt", "name")],
    "get None": lambda c: outer(c).get("opt", 5),
    "get unknown": lambda c: (outer(c).get("zz"), outer(c).get("zz", 7)),
    "get nested": lambda c: full(c).get(("inner", "x")),
    "set": lambda c: changed(outer(c), lambda o: o.set("opt", torch.ones(3))),
    "set returns self": lambda c: (lambda o: o.set("name", "q") is o)(outer(c)),
    "set inplace": lambda c: (lambda o, p: o.set("t", torch.ones(3, 2), inplace=True).t.data_ptr() == p)(
        *(lambda o: (o, o.t.data_ptr()))(outer(c))
    ),
    "set unknown": lambda c: outer(c).set("zz", 1),
    "set nested ": lambda c: full(c).set(("inner", "x"), torch.ones(3)),
    "assign": lambda c: changed(outer(c), lambda o: setattr(o, "t", torch.ones(3))),
    "assign None": lambda c: (lambda o: (o.opt, sorted(o.keys())))(changed(full(c), lambda o: setattr(o, "opt", None))),
    "assign unknown": lambda c: setattr(outer(c), "zz", 1),
    "assign private": lambda c: setattr(outer(c), "_zz", 1),
    "assign wrong shape": lambda c: setattr(outer(c), "t", torch.ones(4)),
    "locked": lambda c: setattr(outer(c).lock_(), "t", torch.ones(3)),
    "method": lambda c: (outer(c).twice(), outer(c).width, c.Outer.make(2), c.Outer.three()),
    "keys": lambda c: (sorted(full(c).keys()), sorted(outer(c).keys())),
    "fields": lambda c: ([f.name for f in c.Outer.fields()], [f.name for f in dataclasses.fields(outer(c))]),
    "asdict": lambda c: dataclasses.asdict(full(c)),
    "a string is no index": lambda c: outer(c)["t"],
    "nor to write": lambda c: outer(c).__setitem__("t", 1),
    # rows
    "row": lambda c: full(c)[0],
    "rows": lambda c: full(c)[1:],
    "index": lambda c: full(c)[torch.tensor([2, 0])],
    "mask": lambda c: full(c)[torch.tensor([True, False, True])],
    "write rows of the class": lambda c: changed(full(c), lambda o: o.__setitem__(0, full(c)[2])),
    "write rows of a TensorDict": lambda c: (
        changed(outer(c), lambda o: o.__setitem__(0, c.TensorDict({"t": torch.ones(2)}))).t
    ),
    "write a number": lambda c: changed(outer(c), lambda o: o.__setitem__(0, 7.0)).t,
    "write another class": lambda c: outer(c).__setitem__(0, c.Inner(x=torch.zeros(()))),
    "write a string": lambda c: outer(c).__setitem__(0, "a"),
    "write a dict": lambda c: outer(c).__setitem__(0, {"t": 1}),
    "iterate": lambda c: list(full(c)),
    "length": lambda c: (len(full(c)), full(c).batch_size, full(c).ndim, full(c).shape),
    # maths and shapes
    "add": lambda c: full(c) + 1,
    "add itself": lambda c: full(c) + full(c),
    "exp": lambda c: outer(c).exp(),
    "sum": lambda c: outer(c).sum(0),
    "equal": lambda c: (outer(c) == outer(c)).t,
    "compare": lambda c: (outer(c) == 1.0).t,
    "reshape": lambda c: full(c).reshape(3, 1),
    "expand": lambda c: outer(c).expand(2, 3).t,
    "unsqueeze": lambda c: full(c).unsqueeze(0).inner.x,
    "permute": lambda c: full(c).unsqueeze(0).permute(1, 0).opt,
    "split": lambda c: full(c).split(2),
    "unbind": lambda c: full(c).unbind(0),
    "chunk": lambda c: full(c).chunk(2),
    "gather": lambda c: outer(c).gather(0, torch.tensor([1, 0])),
    "to": lambda c: full(c).to(torch.float64),
    "clone": lambda c: full(c).clone(),
    "clone of the tree": lambda c: (lambda o: o.clone(False).t is o.t)(full(c)),
    "apply": lambda c: full(c).apply(lambda t: t + 1),
    "zero_": lambda c: (lambda o: o.zero_() is o)(outer(c)),
    "in place": lambda c: (lambda o: o.add_(1) is o)(outer(c)),
    "zeros_like": lambda c: torch.zeros_like(full(c)),
    "full_like": lambda c: torch.full_like(outer(c), 2.0),
    "torch.clone": lambda c: torch.clone(full(c)),
    "torch.unbind": lambda c: torch.unbind(full(c), 0),
    "torch.squeeze": lambda c: torch.squeeze(full(c).unsqueeze(0)).t,
    # several
    "stack": lambda c: torch.stack([full(c), full(c)]).t,
    "stack of strings": lambda c: list(torch.stack([outer(c, name="a"), outer(c, name="b")]).name),
    "a row of them": lambda c: torch.stack([outer(c, name="a")[0], outer(c, name="b")[0]])[1].name,
    "stack of shapes": lambda c: torch.stack([outer(c), outer(c)[:2]]),
    "stack of classes": lambda c: torch.stack([outer(c), c.Inner(x=torch.zeros(3), batch_size=[3])]),
    "cat": lambda c: torch.cat([full(c), full(c)[:1]]),
    "lazy_stack": lambda c: (lambda s: (type(s).__name__, s.batch_size, s[1], list(s.name)))(
        c.m.lazy_stack([outer(c), outer(c)])
    ),
    "lazy_stack of shapes": lambda c: c.m.lazy_stack([c.Sub(x=torch.ones(2)), c.Sub(x=torch.zeros(3))]).x,
    "padded": lambda c: c.m.lazy_stack([c.Sub(x=torch.ones(2)), c.Sub(x=torch.zeros(3))]).get(
        "x", as_padded_tensor=True
    ),
    "as a list": lambda c: list(
        c.m.lazy_stack([c.Sub(x=torch.ones(2)), c.Sub(x=torch.zeros(3))]).get("x", as_list=True)
    ),
    "maybe_dense_stack": lambda c: c.m.maybe_dense_stack([full(c), full(c)]).t,
    # to and from others
    "from_tensordict": lambda c: c.Outer.from_tensordict(c.TensorDict({"t": torch.zeros(3)}, [3])),
    "it shares the TensorDict": lambda c: (lambda td: c.Outer.from_tensordict(td)._tensordict is td)(
        c.TensorDict({"t": torch.zeros(3)}, [3])
    ),
    "from_tensordict and more": lambda c: c.Outer.from_tensordict(c.TensorDict({"t": torch.zeros(3)}), {"name": "k"}),
    "from_tensordict, unknown": lambda c: c.Outer.from_tensordict(c.TensorDict({"zz": torch.zeros(3)})),
    "from_tensordict, twice": lambda c: c.Outer.from_tensordict(c.TensorDict({"name": "a"}), {"name": "b"}),
    "from_tensordict of a dict": lambda c: c.Outer.from_tensordict({"t": torch.zeros(3)}),
    "from_dict": lambda c: c.Outer.from_dict({"t": torch.zeros(3), "name": "k"}),
    "from_dict, batch": lambda c: c.Outer.from_dict({"t": torch.zeros(3)}, batch_size=[3]),
    "to_tensordict": lambda c: sorted(full(c).to_tensordict().keys(True)),
    "to_tensordict is plain": lambda c: type(full(c).to_tensordict()["inner"]).__name__,
    "to_tensordict, None kept": lambda c: outer(c).to_tensordict(retain_none=True)["opt"],
    "to_dict": lambda c: outer(c).to_dict(),
    "to_dict without None": lambda c: sorted(outer(c).to_dict(retain_none=False)),
    "select": lambda c: full(c).select("t"),
    "select a TensorDict": lambda c: type(full(c).select("t", as_tensordict=True)).__name__,
    "select unknown": lambda c: full(c).select("zz"),
    "select, not strict": lambda c: full(c).select("t", "zz", strict=False),
    "exclude": lambda c: full(c).exclude("t", "inner"),
    "update": lambda c: outer(c).update({"name": "x", "t": torch.ones(3, 2)}),
    "update by the class": lambda c: outer(c).update(full(c)),
    "update unknown": lambda c: outer(c).update({"zz": 1}),
    "replace": lambda c: outer(c).replace(name="q"),
    "copy": lambda c: copy.copy(full(c)),
    "deepcopy": lambda c: copy.deepcopy(full(c)),
    # flags
    "autocast int": lambda c: (c.Cast(i=torch.tensor(3)).i, c.Cast(i=4.7).i, c.Cast(i="5").i),
    "autocast, no int": lambda c: c.Cast(i="abc"),
    "autocast float": lambda c: c.Cast(f=torch.tensor(3)).f,
    "autocast str": lambda c: c.Cast(s=5).s,
    "autocast bool": lambda c: c.Cast(b=torch.tensor(True)).b,
    "autocast on set": lambda c: changed(c.Cast(), lambda o: setattr(o, "i", 9.9)).i,
    "nocast": lambda c: (c.Raw(n=3).n, c.Raw(n=4.5).n, c.Raw(n="s").n, c.Raw(n=True).n),
    "nocast array": lambda c: type(c.Raw(n=np.ones(2)).n).__name__,
    "nocast tensor": lambda c: c.Raw(n=torch.ones(2)).n,
    "nocast stacks": lambda c: list(torch.stack([c.Raw(n=1), c.Raw(n=2)]).n),
    "frozen": lambda c: setattr(c.Ice(x=torch.zeros(3)), "x", 1),
    "frozen is locked": lambda c: c.Ice(x=torch.zeros(3)).is_locked,
    "frozen, in place": lambda c: c.Ice(x=torch.zeros(3)).zero_().x,
    "tensor_only": lambda c: c.Only(x=torch.zeros(3), batch_size=[3])[0],
    "nocast and autocast": lambda c: c.m.tensorclass(nocast=True, autocast=True)(type("A", (), {})),
    "bracket flags": lambda c: c.Flagged(n=3).n,
    "keyword flags": lambda c: c.Keyword(i=torch.tensor(3)).i,
    "subclass": lambda c: c.SubSub(x=torch.zeros(2), y=torch.ones(2)),
    "subclass fields": lambda c: [f.name for f in c.SubSub.fields()],
    "subclass is one": lambda c: isinstance(c.SubSub(x=torch.zeros(2), y=torch.ones(2)), c.Sub),
    "what it is": lambda c: (
        c.m.is_tensorclass(outer(c)),
        c.m.is_tensorclass(c.Outer),
        c.m.is_tensorclass(c.TensorDict()),
        c.m.is_tensor_collection(outer(c)),
        isinstance(outer(c), c.m.TensorDictBase),
    ),
    # inside a TensorDict
    "inside": lambda c: c.TensorDict({"m": full(c)}, [3])["m"],
    "inside, row": lambda c: c.TensorDict({"m": full(c)}, [3])[0]["m"],
    "inside, by keys": lambda c: c.TensorDict({"m": full(c)}, [3])["m", "inner", "x"],
    "inside, keys": lambda c: sorted(map(str, c.TensorDict({"m": full(c)}, [3]).keys(True))),
    "inside, leaf keys": lambda c: sorted(map(str, c.TensorDict({"m": full(c)}, [3]).keys(True, True))),
    "inside, maths": lambda c: (c.TensorDict({"m": outer(c)}, [3]) + 1)["m"],
    "inside, stacked": lambda c: torch.stack([c.TensorDict({"m": full(c)}, [3])] * 2)["m"].t,
    "inside, cloned": lambda c: c.TensorDict({"m": full(c)}, [3]).clone()["m"],
    "inside, plain": lambda c: type(c.TensorDict({"m": full(c)}, [3]).to_tensordict()["m"]).__name__,
    "inside, flat": lambda c: sorted(c.TensorDict({"m": full(c)}, [3]).flatten_keys().keys()),
    "inside, lazily": lambda c: c.m.lazy_stack([c.TensorDict({"m": full(c)}, [3])] * 2)["m"].t,
}

# What the peer does here is a defect, or a choice that RL.md section 5 decides otherwise: ours must give this.
BOTH |= {
    "get below": lambda c: [full(c).get(("inner", name), 5) for name in ("x", "tag", "zz")],
    "get None below": lambda c: one_with_none(c).get(("o", "opt"), 5),
}


def one_with_none(c: Any) -> Any:
    holder = type("Holder", (), {"__annotations__": {"o": Any}})
    return c.m.tensorclass(holder)(o=outer(c), batch_size=[3])


OURS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    # the peer loses the batch size
    "dataclasses.replace": (lambda c: dataclasses.replace(outer(c), name="q").batch_size, torch.Size([3])),
    # the peer writes the number over the strings, too
    "a number leaves strings": (lambda c: changed(outer(c), lambda o: o.__setitem__(0, 7.0)).name, "n"),
    # a list of lists there
    "a string stays one": (lambda c: full(c).unsqueeze(0).expand(2, 3).inner.tag, "in"),
    # a KeyError there, though it is a field
    "select None": (lambda c: outer(c).select("opt").opt, None),
    # a plain TensorDict there
    "nested class": (
        lambda c: (
            type(
                tdstore.tensorclass(type("N", (), {"__annotations__": {"i": c.Inner}}))
                .from_tensordict(c.TensorDict({"i": {"x": torch.zeros(2)}}))
                .i
            ).__name__
        ),
        "Inner",
    ),
    # raises there
    "flatten_keys": (lambda c: sorted(full(c).flatten_keys().keys()), ["inner.tag", "inner.x", "name", "opt", "t"]),
    "stack of a class": (lambda c: type(c.Outer.stack([full(c), full(c)])).__name__, "Outer"),
    "cat of a class": (lambda c: c.Outer.cat([full(c), full(c)]).batch_size, torch.Size([6])),
    # False there, for every field
    "in": (lambda c: ("t" in full(c), "zz" in full(c)), (True, False)),
}
ADOPTED = ("stack of a class", "cat of a class")
"""Those of `OURS` that the peer does since 0.15."""


def facts(value: Any) -> Any:
    """Plain data that says what a value is, whichever package made it."""
    if hasattr(type(value), "__dataclass_fields__") and hasattr(value, "_tensordict"):
        names = [f.name for f in dataclasses.fields(value)]
        return {
            "class": type(value).__name__,
            "batch_size": list(value.batch_size),
            **{name: facts(getattr(value, name)) for name in names},
        }
    if isinstance(value, Tensor):
        return (str(value.dtype), list(value.shape), value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, dict):
        return {k: facts(v) for k, v in value.items()}
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, (list, tuple)):
        return [facts(v) for v in value]
    return value


def outcome(m: ModuleType, case: Callable[[Any], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return facts(case(declare(m)))
        except Exception as error:
            return error


@pytest.mark.parametrize("name", BOTH)
def test_as_the_peer(name):
    theirs, ours = (outcome(m, BOTH[name]) for m in (tensordict, tdstore))
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception), f"the peer raises {theirs!r}, ours gives {ours}"
        shared = [f for f, kinds in FAMILIES.items() if isinstance(theirs, kinds) and isinstance(ours, kinds)]
        assert shared or type(theirs) is type(ours), f"{theirs!r} and {ours!r}"
    else:
        assert not isinstance(ours, Exception), f"ours raises {ours!r}"
        assert ours == theirs


@pytest.mark.parametrize("name", OURS)
def test_better_than_the_peer(name):
    program, want = OURS[name]
    assert facts(program(declare(tdstore))) == facts(want)
    assert (outcome(tensordict, program) == facts(want)) is is_adopted(name, ADOPTED)


def test_a_field_is_no_attribute_of_its_class():
    """The peer has a descriptor there since 0.15."""
    with pytest.raises(AttributeError, match="'t' is a field of Outer's objects"):
        _ = declare(tdstore).Outer.t
