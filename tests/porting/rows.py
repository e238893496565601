"""What code written for `tensordict` relies on, by number, to 40: programs that do the same under both packages.

The numbers are those of a list of causes, most costly first. Programs have the public names of a package, `torch`,
`np`, `M` (the side of `tests.differential.oracle`) and `tmp`, an empty folder; lines `---` part them.
"""

from __future__ import annotations

ROWS: dict[int, str] = {
    1: """
(MetaData[str]("v1"), MetaData[int] is MetaData[int], isinstance(MetaData[int](0), MetaData[int]))
---
MetaData[int]("x")
""",
    2: """
[MemoryMappedTensor.zeros(shape=(3, 4)), MemoryMappedTensor.ones(shape=(2,)),
 MemoryMappedTensor.empty(shape=(2, 5)).shape, MemoryMappedTensor.full(shape=(2,), fill_value=2)]
---
MemoryMappedTensor.zeros(dtype=torch.float32)
""",
    3: """
td = TensorDict({"a": torch.zeros(6)}, [6])
with td.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
td
---
td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
with td.flatten(0, 1) as v:
    v["b"] = torch.ones(6)
td
""",
    4: """
lazy_stack([TensorDict({"x": torch.zeros(2, n)}, [2]) for n in (1, 2)], 1).get_nestedtensor("x")
---
made = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]).get("x", as_nested_tensor=True)
[list(row.shape) for row in made.unbind()]
""",
    5: """
torch.vmap(lambda x: x.apply(lambda y: y + 1), (0,), (0,))(TensorDict(a=torch.ones(3), batch_size=[3]))
---
torch.vmap(lambda x: x.set("a", x["a"] + 1))(TensorDict(a=torch.ones(3), batch_size=[3]).lock_())
---
kinds = []
lazy = lazy_stack([TensorDict(a=torch.ones(2), batch_size=[2]) for _ in range(3)])
made = torch.vmap(lambda x: (kinds.append(type(x).__name__), x)[1])(lazy)
(kinds, type(made).__name__, made[0]['a'].shape)
---
lazy = lazy_stack([TensorDict(a=torch.ones(2), batch_size=[2]), TensorDict(a=torch.ones(3), batch_size=[3])])
torch.vmap(lambda x: x + 1)(lazy)["a"]
---
texts = []
torch.vmap(lambda x: (texts.append(type(repr(x)).__name__), x)[1])(TensorDict(a=torch.ones(3), batch_size=[3]))
texts
""",
    6: """
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
[bool((td == 0).all()), bool((td != 1).all()), bool((td == torch.zeros(3)).all()), bool((td == td.clone()).all())]
---
lazy = lazy_stack([TensorDict({"a": torch.zeros(3), "s": s}, [3]) for s in "xy"])
[bool((lazy == 0).all()), bool((lazy != 1).all())]
---
class Item(TensorClass):
    a: torch.Tensor
    s: str
item = Item(torch.zeros(3), "x", batch_size=[3])
bool((item == 0).all())
""",
    7: """
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
nested = td["n"]
made = td.apply(lambda x: x.float(), out=td)
(made is td, td["n"] is nested, td)
---
lazy = lazy_stack([TensorDict({"i": torch.arange(3)}, [3]) for _ in range(2)])
lazy.apply(lambda x: x.float(), out=lazy)
lazy["i"]
""",
    8: """
u = UnbatchedTensor(torch.tensor(3))
[isinstance(u, torch.Tensor), is_tensor_collection(u), bool(u == 3), type(u == 3).__name__, repr(u), int(u), float(u)]
---
u = UnbatchedTensor(torch.tensor(1))
([10, 20][u], np.asarray(u).tolist(), str(u))
---
td = TensorDict(u=UnbatchedTensor(torch.tensor(1.0)), b=torch.zeros(2), batch_size=[2])
[bool((td <= 1).all()), bool(td.isfinite().all()), bool(td.bool().any())]
---
TensorDict(u=UnbatchedTensor(torch.tensor(0)), b=torch.zeros(2, 3)).auto_batch_size_(2).batch_size
---
torch.vmap(lambda x: x + 1)(TensorDict(u=UnbatchedTensor(torch.ones(4)), b=torch.zeros(2), batch_size=[2]))["b"]
""",
    9: """
class Typed(TypedTensorDict):
    a: torch.Tensor
out = TensorDict({}, [4])
Typed(a=torch.ones(4, 3), batch_size=[4, 3]).logsumexp(dim=1, out=out) is out
---
class Item(TensorClass):
    a: torch.Tensor
out = TensorDict({}, [4])
Item(torch.ones(4), batch_size=[4]).apply(lambda x: x + 1, out=out) is out
""",
    10: """
pad(TensorDict({"x": torch.arange(3)}, [3]), [0])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-1, 1])["x"]
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [1, 2], value=7)
---
pad(NonTensorStack("a", "b"), [1, 1]).tolist()
---
pad(NonTensorData("a", batch_size=[2]), [0, 1], inplace=True)
""",
    11: "\n---\n".join(
        f'td = TensorDict({{"a": torch.zeros({size})}}, [{size}])\n{call}'
        for size, call in [
            ("2, 3", "td.transpose(-5, -6)"),
            ("2, 3", "td.permute(3, 2, 1, 0)"),
            ("3", "td.fliplr()"),
            ("3", "td.rot90()"),
            ("3", "lazy_stack([td, td], -9)"),
            ("", "td[0]"),
            ("3", "td.gather(7, torch.zeros(1).long())"),
            ("3", "torch.cat([td, td], 9)"),
            ("3", "td.unsqueeze(7)"),
        ]
    ),
    12: """
td = TensorDict({"a": torch.ones(3)}, [3])
td.empty().where(torch.tensor([True, False, True]), td)
---
td = TensorDict({"a": torch.ones(3)}, [3])
td.where(torch.tensor([True, False, True]), td.empty())
---
td = TensorDict({"a": torch.ones(3)}, [3])
td.empty().where(torch.tensor([True, False, True]), td, pad=0)
""",
    13: """
import shutil, gc
td = TensorDict({"a": torch.ones(3)}, [3]).memmap_(tmp + "/d")
shutil.rmtree(tmp + "/d")
del td
gc.collect() >= 0
""",
    14: """
class Batch(TensorClass):
    data: torch.Tensor
Batch(torch.ones(3), batch_size=[3]).data
---
@tensorclass
class Bar:
    open: torch.Tensor
    close: torch.Tensor
    read: torch.Tensor
    append: torch.Tensor
    commit: torch.Tensor
    fields: torch.Tensor
b = Bar(*(torch.full((2,), float(i)) for i in range(6)), batch_size=[2])
[b.open, b.close, b.read, b.append, b.commit, b.fields, b[0].open]
""",
    15: """
def element():
    rows = [TensorDict({"x": torch.zeros(n)}) for n in (3, 4)]
    return TensorDict({"l": lazy_stack(rows)}, [2])
made = dense_stack_tds([element(), element()], 0)
(type(made["l"]).__name__, made["l"].stack_dim, made.batch_size)
---
def element():
    rows = [TensorDict({"x": torch.zeros(n)}) for n in (3, 4)]
    return TensorDict({"l": lazy_stack(rows)}, [2])
made = dense_stack_tds(lazy_stack([element(), element()]))
(type(made["l"]).__name__, made["l"].stack_dim, made.batch_size)
""",
    16: """
J = torch.func.jacrev(lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size))(TensorDict(a=torch.ones(3)))
(J.batch_size, J["y", "a"])
---
td = TensorDict({"a": torch.ones(2, 3)}, [2])
J = torch.func.jacfwd(lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size))(td)
(J.batch_size, J["y", "a"])
---
torch.func.hessian(lambda t: (t["a"] ** 3).sum())(TensorDict(a=torch.ones(2)))["a", "a"]
""",
    17: """
NonTensorData("a").contiguous(canonical=True)
---
NonTensorData(0).flatten(None, None).shape
---
NonTensorData(lambda x: x + 1)(3)
---
NonTensorStack("a", "b", batch_size=[2])
---
s = NonTensorStack("x")
s[0][True] = NonTensorStack("y")
s.tolist()
""",
    18: """
class P(TensorClass):
    x: torch.Tensor
    y: str = None
td = TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3])
(bool((td == td.to_tensordict(retain_none=True)).all()), bool((td == td.to_dict()).all()))
""",
    19: """
m = torch.nn.Linear(2, 2)
TensorDict.from_module(m).data.detach().to_module(m, preserve_module_state=False)
(list(m.state_dict()), len(list(m.parameters())))
---
m = torch.nn.BatchNorm1d(2)
params = TensorDict.from_module(m).apply(lambda x: torch.nn.Parameter(x.clone().float()))
params.to_module(m, preserve_module_state=True)
[type(b).__name__ for b in m.buffers()]
---
m = torch.nn.Linear(2, 2)
pm = TensorDict.from_module(m, as_module=True)
holder = torch.nn.Module()
holder.pm = pm
zeros = TensorDict.from_module(holder).apply(torch.zeros_like)
with zeros.to_module(holder):
    inside = bool((pm == 0).all())
(inside, bool((pm == 0).all()))
""",
    20: """
td = TensorDict({"s": "x", "a": torch.zeros(3)}, [3])
seen = []
td.apply(lambda x: seen.append(type(x).__name__), is_leaf=is_leaf_nontensor)
sorted(seen)
---
td = TensorDict({"s": "x", "a": torch.zeros(3)}, [3])
td.apply(lambda x: None, is_leaf=is_leaf_nontensor, filter_empty=True)
""",
    21: """
bool((TensorDict(s="x", batch_size=[]) == TensorDict(s="x", batch_size=[3])).all())
---
bool((TensorDict(n=NonTensorData(3)) == TensorDict(n=NonTensorData(3))).all())
---
td = TensorDict({"s": "x", "a": torch.zeros(3)}, [3])
assert_close(TensorDict(td.numpy()), td)
---
td = TensorDict({"s": "x", "a": torch.zeros(3)}, [3])
other = td.clone().set("a", torch.ones(3))
try:
    assert_close(other, td)
except AssertionError:
    other = None
other
---
td = TensorDict({"n": NonTensorData(3)}, [])
bool((td == TensorDict.from_dict(td.to_dict())).all())
""",
    22: """
class Typed(TypedTensorDict):
    a: torch.Tensor
    b: torch.Tensor
t = Typed(a=torch.ones(2), b=torch.ones(2), batch_size=[2])
isinstance(t.to_lazystack(), LazyStackedTensorDict)
---
class Typed(TypedTensorDict):
    a: torch.Tensor
    b: torch.Tensor
t = Typed(a=torch.ones(2), b=torch.ones(2), batch_size=[2])
t.split_keys(["a"], inplace=True)[-1] is t
""",
    23: """
@tensorclass(shadow=True)
class C:
    batch_size: Any
c = C(batch_size=0)
first = c.batch_size
c.batch_size = 5
(first, c.batch_size, c.shape)
---
@tensorclass
class C:
    batch_size: Any
C(batch_size=0)
""",
    24: """
TensorDict.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}}, batch_dims=1)
---
TensorDict.from_dict({"a": torch.zeros(3, 4)}, batch_size=[3, 4], batch_dims=1)
---
TensorDict.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}}, batch_size=[3], auto_batch_size=True)
---
TensorDict.from_dict(TensorDict({"a": torch.zeros(3, 4)}, [3]))
---
PersistentTensorDict.from_dict(TensorDict({"a": torch.zeros(3, 4)}, [3]), tmp + "/f.h5").batch_size
""",
    25: """
TensorDict({"a": torch.zeros(3)}, [3]).split([], 0)
---
TensorDict({"a": torch.zeros(3)}, [3]).split([1, 0], 0)
---
TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).movedim((0,), (1, 2))
---
0 in TensorDict({"a": torch.zeros(3)}, [3])
---
TypedTensorDict["no_such_flag"]
""",
    26: """
from torch.utils._pytree import tree_leaves
td = TensorDict({"s": NonTensorStack("a", "b")}, [2])
(tree_leaves(td["s"]), str(td["s"]), repr(td["s"]))
""",
    27: """
TensorDict({"z": ["a", "b", "c"]}, [3, 4])
---
TensorDict({"z": ["a", "b"]}, [3])
---
TensorDict({"z": ["a", "b", "c"]}, [3])["z"]
""",
    28: """
import collections.abc
td = TensorDict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
net = torch.nn.Linear(2, 2)
(isinstance(td, collections.abc.MutableMapping), str(net.load_state_dict(td)), net.weight)
---
def f(td: TensorDict[str, torch.Tensor]) -> None: ...
f(TensorDict())
""",
    29: "\n---\n".join(
        f"td = TensorDict({{'a': torch.zeros(4, 2)}}, [4, 2]).{way}\n"
        "[(v.is_memmap(), v.is_shared(), v.is_locked) for v in (td.unbind(1)[0], td.split(1)[0], td.view(-1),"
        " td.permute(1, 0), td.unsqueeze(0), list(td)[0], td.expand(3, 4, 2), td.clone(), td.reshape(-1))]"
        for way in ("memmap_()", "memmap_(tmp)", "share_memory_()")
    ),
    30: """
lazy = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
lazy.reshape(-1)
---
lazy = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
lazy.reshape(6).fill_("a", 1)
lazy["a"]
""",
    31: """
TensorDict(a=torch.ones(3)).memmap(tmp)
TensorDict.load_memmap(tmp, allow_pickle=1)
""",
    32: """
td = TensorDict({"b": torch.zeros(3), "a": torch.zeros(3)}, [3])
before = repr(td)
o = set_printoptions(show_is_shared=False)
o.set()
o.__exit__(None, None, None)
repr(td) == before
---
td = TensorDict({"b": torch.zeros(3), "a": torch.zeros(3)}, [3])
with set_printoptions(sort_keys=lambda k: k):
    text = repr(td)
text.index(" a:") < text.index(" b:")
---
class Item(TensorClass):
    a: torch.Tensor
with set_printoptions(show_device=False, show_is_shared=False):
    text = repr(Item(torch.ones(3), batch_size=[3]))
("is_shared" in text, "device" in text)
""",
    33: """
repr(TensorDict({"a": torch.zeros(3)}, [3]).memmap_())
---
repr(TensorDict({"a": torch.zeros(3)}, [3]).memmap_(tmp)[0])
---
TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp)
repr(TensorDict.load_memmap(tmp))
---
repr(lazy_stack([TensorDict({"a": torch.zeros(3)}, [3])] * 2).memmap(tmp)[0])
---
class Item(TensorClass):
    a: torch.Tensor
repr(Item(torch.ones(3), batch_size=[3]).memmap_(tmp))
---
repr(TensorDict({"a": torch.zeros(3)}, [3]).share_memory_())
""",
    36: """
class Ids(TensorClass["tensor_only"]):
    a: torch.LongTensor
Ids(torch.arange(3), batch_size=[3]).a
---
# as since 0.15
class Ids(TensorClass["tensor_only"]):
    a: torch.Tensor
    c: torch.Tensor
t = Ids(torch.arange(3), torch.ones(3), batch_size=[3])
del t.c
hasattr(t, "c")
---
def both():
    class Ids(TensorClass["tensor_only", "autocast"]):
        a: torch.Tensor
both()
""",
    37: """
made = TensorDict.from_modules(torch.nn.LazyLinear(2), torch.nn.LazyLinear(2))
sorted(map(str, made.keys(True, True)))
---
TensorDict.from_modules(torch.nn.LazyLinear(2), torch.nn.LazyLinear(2), lazy_stack=True)
""",
    38: """
TensorDict({}, [3]).update(TensorDict({}, [4]))
---
td = TensorDict({"n": {"a": torch.zeros(3)}}, [3])
td["n"].batch_size = [3]
td.update(TensorDict({"n": TensorDict({"a": torch.ones(4)}, [4])}, [4]), update_batch_size=True)
---
td = TensorDict({"a": torch.ones(3)}, [3])
td.update(TensorDict({"a": torch.ones(4)}, [4]), update_batch_size=True, inplace=True)
---
td = TensorDict({"a": torch.ones(3)}, [3])
td.update(TensorDict({"a": torch.ones(4)}, [4]), update_batch_size=True, keys_to_update=["a"])
""",
    39: """
td = TensorDict({"l": lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])}, [2])
made = td.new_zeros((4,), empty_lazy=True)
(type(made["l"]).__name__, made.batch_size, made["l"].batch_size)
""",
    40: """
x = torch.ones(3, requires_grad=True)
x.sum().backward()
TensorDict(a=x).bytes()
---
x = torch.ones(3)
td = TensorDict(a=x, b=x)
(td.bytes(count_duplicates=False), td.bytes())
---
TensorDict({"j": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, [2]).bytes()
""",
}
