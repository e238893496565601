"""`torch.vmap` over TensorDicts: output dimensions, locks, lazy stacks."""

from __future__ import annotations

from .programs import check, programs


@programs(r"""
def f(x):
    x = x.clone()
    x["b"] = x["a"] + 1
    return x
torch.vmap(f, (0,), (0,))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x):
    x = x.clone()
    x["b"] = x["a"] + 1
    return x
torch.vmap(f, (0,), (1,))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone()
torch.vmap(f, 0, 0)(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone()
torch.vmap(f, 1, 1)(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone()
torch.vmap(f, (1,), (1,))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone(), x["a"]
torch.vmap(f, (0,), (0, 0))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone(), x["a"]
torch.vmap(f, (0,), (1, 0))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone(), x["a"]
torch.vmap(f, (0,), 0)(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return (x.clone(),)
torch.vmap(f, (0,), (0,))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x.clone()
torch.vmap(f, (0,), (0, 0))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x["a"]
torch.vmap(f, (0,), (0,))(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
def f(x): return x["a"]
torch.vmap(f, 0, 1)(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.set("a", x["a"] + 1))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.set("b", x["a"] + 1))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.is_locked * x["a"])(td)
---
td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.ones(3, 2)}}, [3, 2]).lock_()
torch.vmap(lambda x: x["n"].is_locked * x["a"])(td)
---
td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.ones(3, 2)}}, [3, 2]).lock_()
torch.vmap(lambda x: x["n"].set("b", x["a"]))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.clone())(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x)(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.clone().set("b", x["a"]))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.unlock_().set("b", x["a"]))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).lock_()
torch.vmap(lambda x: x.lock_())(td).is_locked
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
torch.vmap(lambda x: x.lock_())(td).is_locked
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
torch.vmap(lambda x: x.set("b", x["a"] + 1))(td)
td
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
torch.vmap(lambda x: x.set("b", x["a"] + 1), (0,), (0,))(td)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
torch.vmap(lambda x: x.set("b", x["a"] + 1))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
seen = []
r = torch.vmap(lambda x: (seen.append((type(x).__name__, x.batch_size)), x.clone())[1], (1,), 1)(l)
(type(r).__name__, seen, r)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
seen = []
r = torch.vmap(lambda x: (seen.append((type(x).__name__, x.batch_size)), x.clone())[1], (1,), 0)(l)
(type(r).__name__, seen, r)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)], 1)
seen = []
r = torch.vmap(lambda x: (seen.append((type(x).__name__, x.batch_size)), x.clone())[1], (0,), 0)(l)
(type(r).__name__, seen, r)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
torch.vmap(lambda x: x["a"] * 2, (0,), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
torch.vmap(lambda x: x["a"] * 2, (1,), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)]).lock_()
torch.vmap(lambda x: x.set("b", x["a"]), (1,), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)]).lock_()
torch.vmap(lambda x: x.set("b", x["a"]), (0,), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
torch.vmap(lambda x: x["a"].sum(), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3, 4) + i}, [3]) for i in range(2)])
torch.vmap(lambda x: TensorDict({"s": x["a"].sum(-1)}, x.batch_size), (0,), (0,))(l)
---
l = lazy_stack([TensorDict({"a": torch.zeros(3) + i}, [3]) for i in range(2)])
s = []
torch.vmap(lambda x: (s.append(repr(x)), x["a"])[1])(l)
len(s)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
s = []
torch.vmap(lambda x: (s.append(repr(x)), x["a"])[1])(td)
s[0].replace("\n", " ")[:30]
---
td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3, 2)}}, [3, 2])
s = []
torch.vmap(lambda x: (s.append(str(x)), x["a"])[1])(td)
len(s)
---
stack = lazy_stack([TensorDict({"b": torch.zeros(2)}, [2]) for _ in range(3)])
td = TensorDict({"a": torch.zeros(3, 2), "l": stack}, [3, 2])
seen = []
r = torch.vmap(lambda x: (seen.append(type(x["l"]).__name__), x.clone())[1], (1,), (1,))(td)
(seen, type(r["l"]).__name__, r)
---
@tensorclass
class C:
    a: torch.Tensor
c = C(a=torch.zeros(3, 2), batch_size=[3, 2])
torch.vmap(lambda x: x.a + 1, (0,), (0,))(c)
---
p = TensorDictParams(TensorDict({"a": torch.zeros(3, 2)}, [3]))
torch.vmap(lambda x: x["a"] + 1, (0,), (0,))(p)
---
net = torch.nn.Linear(2, 3)
params = torch.stack([TensorDict.from_module(torch.nn.Linear(2, 3)) for _ in range(4)]).apply(torch.ones_like)
def call(x, p):
    with p.to_module(net): return net(x)
torch.vmap(call, (None, 0))(torch.ones(5, 2), params)
---
net = torch.nn.Linear(2, 3)
params = lazy_stack([TensorDict.from_module(torch.nn.Linear(2, 3)).apply(torch.ones_like) for _ in range(4)])
def call(x, p):
    with p.to_module(net): return net(x)
torch.vmap(call, (None, 0))(torch.ones(5, 2), params)
---
td = TensorDict({"a": torch.zeros(3, 2), "s": "x"}, [3, 2])
torch.vmap(lambda x: x.set("b", x["a"]), (0,), (0,))(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
torch.vmap(lambda x: x.clone(), -1, -1)(td)
---
td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2], names=["x", "y"])
torch.vmap(lambda x: x.clone(), 0, 0)(td)
""")
def test_vmap(source: str) -> None:
    check(source)
