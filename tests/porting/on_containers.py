"""What code written for `tensordict` relies on, by the numbers of `rows`, as programs over any container.

A program makes its containers by `place(source)`. `PLACES` says what that is; `UNCONCERNED` says which rows have
nothing to do with any container, or with some.
"""

from __future__ import annotations

START = """
import itertools, gc
numbers = itertools.count()
def at(suffix=""):
    return f"{tmp}/{next(numbers)}{suffix}"
kinds = {}
def classed(source):
    fields = tuple(source.keys())
    if fields not in kinds:
        hints = {"__annotations__": dict.fromkeys(fields, Any)}
        kinds[fields] = type("Item_" + "_".join(fields), (TensorClass,), hints)
    return kinds[fields](**dict(source.items()), batch_size=source.batch_size, names=source.names)
def stored(source, suffix, **kwargs):
    return PersistentTensorDict.from_dict(source, filename=at(suffix), batch_size=source.batch_size, **kwargs)
def window(source):
    twice = torch.cat([source, source])
    rows = slice(0, len(source))
    return twice._get_sub_tensordict(rows) if M.is_peer else stored(twice, ".h5")[rows]
def entries(**more):
    nested = TensorDict({"a": torch.ones(4, 3)}, [4, 3])
    return TensorDict({"a": torch.ones(4, 3, 2), "i": torch.arange(12).view(4, 3), "n": nested, **more}, [4, 3])
def one(**entries):
    return TensorDict({"a": torch.arange(3.0), **entries}, [3])
def value(x):
    return x if is_non_tensor(x) else NonTensorData(x, batch_size=[3])
def rows(x):
    return x.tolist() if hasattr(x, "tolist") else [x] if isinstance(x, str) else list(x)
def seen(x):
    return (x.batch_size, [x.get(k).detach().clone() for k in ("a", "i", ("n", "a"))])
"""
PLACES = {
    "memory": "source",
    "locked": "source.lock_()",
    "memmap": "source.memmap_(at())",
    "shared": "source.share_memory_()",
    "h5": "stored(source, '.h5')",
    "zarr": "stored(source, '.zarr', backend='zarr')",
    "lazy stack": "lazy_stack(list(source))",
    "params": "TensorDictParams(source)",
    "window": "window(source)",
    "class": "classed(source)",
    "class over memmap": "classed(source).memmap_(at())",
}
STORED = ("h5", "zarr", "window")
CLASSES = ("class", "class over memmap")
ROWS: dict[int, str] = {
    1: """
found = place(one(m=MetaData[str]("v1"))).get("m")
getattr(found, "data", found)
""",
    3: """
td = place(entries())
td.unlock_()
with td.unflatten(0, (2, 2)) as v:
    v.set("a", torch.zeros(2, 2, 3, 5))
seen(td)
---
td = place(entries())
td.unlock_()
with td.flatten(0, 1) as v:
    v.set("a", torch.zeros(12, 5))
seen(td)
""",
    5: """
made = torch.vmap(lambda x: x.apply(lambda y: y + 1), (0,), (0,))(place(one()))
(made.batch_size, made.get("a"))
---
td = place(one())
torch.vmap(lambda x: x.set("a", x.get("a") + 1))(td.lock_())
---
found = []
made = torch.vmap(lambda x: (found.append((type(repr(x)).__name__, x.batch_size)), x)[1])(place(entries()))
(found, seen(made))
""",
    6: """
td = place(one(s="hello") * 0)
[bool((td == 0).all()), bool((td != 1).all()), bool((td == torch.zeros(3)).all()), bool((td == td.clone()).all())]
""",
    7: """
td = place(entries(s="hello"))
made = td.apply(lambda x: x.float() + 1, out=td)
(made is td, seen(td), td.get("i").dtype)
---
td = place(entries(s="hello"))
made = entries().apply(lambda x: x.float() + 1, out=td)
(made is td, seen(td))
""",
    8: """
td = place(one(u=UnbatchedTensor(torch.tensor(1.0))))
u = td.get("u")
[isinstance(u, torch.Tensor), is_tensor_collection(u), bool(u == 1), float(u), np.asarray(u.detach()).tolist()]
---
td = place(one(u=UnbatchedTensor(torch.ones(4))))
[bool((td <= 2).all()), bool(td.isfinite().all()), bool(td.bool().any()), td[0].get("u").shape]
---
td = place(one(u=UnbatchedTensor(torch.ones(4))))
made = torch.vmap(lambda x: x + 1)(td)
(made.get("a"), made.get("u").shape)
""",
    9: """
class Typed(TypedTensorDict):
    a: torch.Tensor
out = place(one())
(Typed(a=torch.ones(3, 2), batch_size=[3, 2]).logsumexp(dim=1, out=out) is out, out.get("a").detach())
---
class Item(TensorClass):
    a: torch.Tensor
out = place(one())
(Item(torch.ones(3), batch_size=[3]).apply(lambda x: x + 1, out=out) is out, out.get("a").detach())
---
td, out = place(entries()), entries()
(td.apply(lambda x: x + 1, out=out) is out, seen(out))
""",
    10: """
pad(place(one()), [0])
---
pad(place(one()), [0, 0, 0, 0])
---
made = pad(place(one()), [-1, 1])
(made.batch_size, made.get("a"))
---
made = pad(place(one(v=NonTensorStack("a", "b", "c"))), [1, 2], value=7)
(made.batch_size, made.get("a").detach(), rows(made.get("v")))
""",
    11: """
td = place(entries())
[M.attempt(fn) for fn in (
    lambda: td.transpose(-5, -6),
    lambda: td.permute(3, 2, 1, 0),
    lambda: td.gather(7, torch.zeros(1).long()),
    lambda: torch.cat([td, td], 9),
    lambda: td.unsqueeze(7),
    lambda: lazy_stack([td, td], -9),
    lambda: td.squeeze(7),
    lambda: td.unbind(5),
)]
---
td = place(one())
[M.attempt(fn) for fn in (lambda: td.fliplr(), lambda: td.rot90(), lambda: td[0][0], lambda: td[0, 0])]
""",
    12: """
td = place(one())
mask = torch.tensor([True, False, True])
[M.attempt(fn) for fn in (lambda: td.empty().where(mask, td), lambda: td.where(mask, td.empty()))]
---
td = place(one())
td.empty().where(torch.tensor([True, False, True]), td, pad=0).get("a")
""",
    13: """
import shutil, sys
heard, sys.unraisablehook = [], lambda told: heard.append(repr(told.exc_value))
td = place(entries())
shutil.rmtree(tmp)
del td
gc.collect()
sys.unraisablehook = sys.__unraisablehook__
heard
""",
    14: """
@tensorclass
class Bar:
    open: torch.Tensor
    close: torch.Tensor
    data: torch.Tensor
    read: torch.Tensor
    commit: torch.Tensor
    fields: torch.Tensor
bar = Bar(*(torch.full((3,), float(i)) for i in range(6)), batch_size=[3])
found = place(TensorDict({"p": bar}, [3])).get("p")
read = [found.open, found.close, found.data, found.read, found.commit, found.fields, found[0].open]
(type(found).__name__, [x.detach() for x in read])
---
b = place(one(data=torch.ones(3), open=torch.zeros(3), append=torch.ones(3)))
[x.detach() for x in (b.get("data"), b.get("open"), b.get("append"), b[0].get("open"))]
""",
    15: """
def element():
    rows = [TensorDict({"x": torch.zeros(n)}) for n in (3, 4)]
    return place(TensorDict({"l": lazy_stack(rows)}, [2]))
made = dense_stack_tds([element(), element()], 0)
(type(made.get("l")).__name__, made.get("l").stack_dim, made.batch_size)
---
made = dense_stack_tds([place(entries()), place(entries())], 1)
seen(made)
---
made = dense_stack_tds(lazy_stack([place(entries()), place(entries())]))
seen(made)
""",
    16: """
J = torch.func.jacrev(lambda t: TensorDict({"y": t.get("a") ** 2}, t.batch_size))(place(one()))
J.get("y").get("a")
---
J = torch.func.jacfwd(lambda t: TensorDict({"y": t.get("a") ** 2}, t.batch_size))(place(one()))
J.get("y").get("a")
---
torch.func.grad(lambda t: (t.get("a") ** 3).sum())(place(one())).get("a").detach()
---
torch.func.hessian(lambda t: (t.get("a") ** 3).sum())(place(one())).get("a").get("a")
""",
    17: """
found = value(place(one(s="x")).get("s"))
(found.contiguous(canonical=True).batch_size, found.batch_size)
---
td = place(one(v=NonTensorStack("a", "b", "c")))
(rows(td.get("v")), rows(td[1:].get("v")), rows(td[torch.tensor([True, False, True])].get("v")))
""",
    18: """
td = place(one(s="x"))
(bool((td == td.to_tensordict(retain_none=True)).all()), bool((td == td.to_dict()).all()))
---
class P(TensorClass):
    x: torch.Tensor
    y: str = None
td = place(TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3]))
(bool((td == td.to_tensordict(retain_none=True)).all()), bool((td == td.to_dict()).all()))
""",
    19: """
m = torch.nn.Linear(2, 2)
place(TensorDict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, [2])).to_module(m, preserve_module_state=False)
(len(list(m.parameters())), m(torch.ones(2)).detach())
---
m = torch.nn.Linear(2, 2)
td = place(TensorDict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, [2]))
with td.to_module(m):
    inside = m(torch.ones(2)).detach()
(inside, len(list(m.parameters())))
""",
    20: """
shown = []
place(one(s="x")).apply(lambda x: shown.append(is_non_tensor(x)), is_leaf=is_leaf_nontensor)
sorted(shown)
---
place(one(s="x")).apply(lambda x: None, is_leaf=is_leaf_nontensor, filter_empty=True)
""",
    21: """
td = place(one(s="x"))
(bool((td == td.to_tensordict()).all()), bool((td == one(s="x")).all()), assert_close(TensorDict(td.numpy()), td))
""",
    22: """
t = place(one(b=torch.ones(3)))
t.unlock_()
parts = t.split_keys(["a"], inplace=True)
(parts[-1] is t, sorted(t.keys()), sorted(parts[0].keys()))
---
isinstance(place(entries()).to_lazystack(), LazyStackedTensorDict)
""",
    24: """
td = place(one(b=torch.ones(3, 2)))
(TensorDict.from_dict(td).batch_size, stored(td, ".h5").batch_size)
---
found = place(one(b=torch.ones(3, 2))).to_dict()
TensorDict.from_dict({k: v.detach() for k, v in found.items()}, batch_dims=1).batch_size
""",
    25: """
td = place(entries())
[M.attempt(fn) for fn in (
    lambda: td.split([], 0), lambda: td.split([1, 0], 0), lambda: td.movedim((0,), (1, 2)), lambda: 0 in td
)]
""",
    26: """
from torch.utils._pytree import tree_leaves
found = rows(place(one(s=NonTensorStack("a", "b", "c"))).get("s"))
(tree_leaves(found), str(found))
---
from torch.utils._pytree import tree_leaves
td = place(one(s=NonTensorStack("a", "b", "c"), n=TensorDict({"s": NonTensorStack("d", "e", "f")}, [3])))
found = td.get("n")["s"]
(tree_leaves(found), str(found), repr(found))
""",
    27: """
td = place(entries(s="x"))
td.unlock_()
td.set("s", ["a", "b", "c"])
---
td = place(one(s=NonTensorStack("x", "y", "z")))
td.unlock_()
td.set("s", ["a", "b", "c"])
rows(td.get("s"))
""",
    28: """
import collections.abc
td = place(TensorDict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, [2]))
net = torch.nn.Linear(2, 2)
(isinstance(td, collections.abc.MutableMapping), str(net.load_state_dict(td)), net.weight.detach())
---
flat = place(TensorDict({"one": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, [2])).flatten_keys(".")
net = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2)})
(str(net.load_state_dict(flat)), net["one"].weight.detach())
""",
    29: """
td = place(TensorDict({"a": torch.zeros(4, 2)}, [4, 2]))
views = (td[0], td.unbind(1)[0], td.split(1)[0], td.view(-1), td.permute(1, 0), td.unsqueeze(0), list(td)[0])
copies = (td.expand(3, 4, 2), td.clone(), td.reshape(-1))
[[(v.is_memmap(), v.is_shared(), v.is_locked) for v in some] for some in (views, copies)]
""",
    30: """
td = place(entries())
[seen(td.reshape(12)), seen(td.view(-1)), seen(td.flatten(0, 1)), seen(td.reshape(2, 6)), seen(td.reshape(3, -1))]
---
td = place(entries())
td.view(12).fill_("i", 1)
td.get("i")
""",
    31: """
path = at()
place(one()).memmap(path)
[M.attempt(lambda: TensorDict.load_memmap(path, allow_pickle=wrong)) for wrong in (1, "yes", None)]
""",
    32: """
td = place(one(b=torch.zeros(3)))
before = repr(td)
o = set_printoptions(show_is_shared=False)
o.set()
during = repr(td)
o.__exit__(None, None, None)
("is_shared" in during, repr(td) == before)
---
td = place(TensorDict({"b": torch.zeros(3), "a": torch.zeros(3)}, [3]))
with set_printoptions(sort_keys=lambda k: k, show_device=False):
    text = repr(td)
(text.index(" a:") < text.index(" b:"), "device" in text)
""",
    33: """
[" ".join(line.split()) for line in repr(place(entries(s="x"))).splitlines() if "(" in line]
""",
    38: """
place(TensorDict({}, [3])).update(TensorDict({}, [4]))
---
td = place(one())
td.unlock_()
td.update(TensorDict({"a": torch.ones(4)}, [4]), update_batch_size=True)
(td.batch_size, td.get("a").detach())
---
td = place(one())
failed = M.attempt(lambda: td.update(TensorDict({"a": torch.ones(4)}, [4]), update_batch_size=True, inplace=True))
(failed, td.batch_size, td.get("a").detach())
---
td = place(one()).lock_()
failed = M.attempt(lambda: td.update(TensorDict({"a": torch.ones(4)}, [4]), update_batch_size=True))
(failed, td.batch_size, td.get("a").detach())
""",
    39: """
rows = [TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]
made = place(TensorDict({"l": lazy_stack(rows), "a": torch.ones(2)}, [2])).new_zeros((4,), empty_lazy=True)
(type(made.get("l")).__name__, made.batch_size, made.get("l").batch_size, made.get("a"))
---
made = place(entries()).new_zeros((2,))
(made.batch_size, made.get("a").sum(), made.get("i").dtype)
""",
    40: """
td = place(one(i=torch.arange(3)))
(td.bytes(), td.bytes(count_duplicates=False))
""",
}

MEMORY = ("memory", "locked", "memmap", "shared")
NOT_MADE_HERE = "it makes no container: a constructor of tensors"
BY_ITSELF = "a rule of the declaration of a class, whatever its objects are made of: `rows` has it"
UNCONCERNED: dict[int, tuple[str, tuple[str, ...]]] = {
    2: (NOT_MADE_HERE, ()),
    4: ("only a lazy stack gives a nested tensor: `rows` has it", ()),
    23: (BY_ITSELF, ()),
    33: ("only these have leaves that are memory-mapped or shared", (*MEMORY, "lazy stack", *CLASSES)),
    34: ("a TensorDictStore on a server: `rows_more.ELSEWHERE` names its test", ()),
    35: ("a TensorDictStore on a server: `rows_more.ELSEWHERE` names its test", ()),
    36: (BY_ITSELF, ()),
    37: ("uninitialized parameters of modules are in memory: `rows` has it", ()),
    39: ("a stack in the elements of a lazy stack is split into theirs", tuple(p for p in PLACES if p != "lazy stack")),
    41: ("files of h5py, which only HDF5 has: `rows_more` has it", ()),
    50: ("store objects of zarr: `rows_more.ELSEWHERE` names its test", ()),
    51: ("a TensorDictStore on a server: `rows_more.ELSEWHERE` names its test", ()),
    52: ("what is exported is made inside of the traced function, in memory: `rows_more` has it", ()),
    63: ("a container of another kind has its own class", MEMORY),
    65: ("a constructor of lazy stacks: `rows_more` has it", ()),
    66: ("only a lazy stack has elements: `rows_more` has it", ()),
    74: ("groups of h5py, which only HDF5 has: `rows_more` has it", ()),
    75: (BY_ITSELF, ()),
    76: (BY_ITSELF, ()),
    77: (BY_ITSELF, ()),
    78: (BY_ITSELF, ()),
    79: (BY_ITSELF, ()),
    82: ("a compiled region takes what pytrees are made of: `rows_more` has it, and tests/compile each container", ()),
    83: ("only a TensorDictParams has hooks: `rows_more` has it", ()),
}
"""Rows that do not concern some containers: why, and those that they do concern."""

Case = tuple[int, int, str]
LOCKS = ("locked", "memmap", "shared", "class over memmap")
MAPPED = ("memmap", "class over memmap")
FILES = ("h5", "zarr")


def cases(row: int, number: int, *places: str) -> list[Case]:
    return [(row, number, place) for place in places]


BETTER: dict[str, list[Case]] = {
    "texts of HDF5 are bytes there": [*cases(1, 0, "h5"), *cases(21, 0, "h5"), *cases(80, 1, "h5")],
    "a mapped lazy stack has its dimension twice there": [*cases(5, 0, "lazy stack"), *cases(8, 2, "lazy stack")],
    "`out` is returned, whatever it is": cases(7, 0, "lazy stack"),
    "unbatched tensors can be memory-mapped": [case for i in (1, 2) for case in cases(8, i, *MAPPED)],
    "an unbatched tensor has no rows": cases(8, 1, "window"),
    "`out=` writes into the entries of a locked TensorDict": [case for i in (0, 1) for case in cases(9, i, *LOCKS)],
    "entries are lost there": [*cases(12, 0, "lazy stack"), *cases(12, 1, "lazy stack")],
    "lazy stacks of mapped objects are stacked": cases(15, 2, "class over memmap"),
    "an object of the C library stands there for each text": [*cases(17, 1, "shared"), *cases(80, 1, "shared")],
    "mapped tensors can be lent to a module, and be parameters": [*cases(19, 1, *MAPPED), *cases(44, 0, *MAPPED)],
    "the object itself is returned": cases(22, 0, *CLASSES),
    "what has no fields of a class is a TensorDict": [
        *cases(28, 1, "class over memmap"),
        *cases(61, 0, "class over memmap"),
    ],
    "batch sizes are equal, or taken over, or refused; there rows are lost": [
        *cases(38, 0, "lazy stack", "window"),
        *cases(38, 1, "lazy stack"),
        *cases(38, 2, "lazy stack"),
    ],
    "a value per row has all names": cases(48, 0, *FILES, "lazy stack"),
    "jagged tensors can be memory-mapped": cases(53, 0, *MAPPED),
    "what is split off is taken out": cases(61, 0, *FILES),
    "names of dimensions are stored": [
        *(case for row, i in ((62, 0), (62, 1), *((72, i) for i in range(4))) for case in cases(row, i, *FILES)),
        *cases(71, 0, *FILES, "class over memmap"),
    ],
    "keys stay in their order": cases(64, 0, *FILES),
    "the kind of the gradient is looked at first": cases(68, 0, *MAPPED),
    "every container is taken": [*cases(70, 0, "class over memmap"), *cases(80, 1, "class over memmap")],
}
"""Where the peer's container is wrong, and ours does what the peer does in memory: why, and the cases."""
BY_CHANCE: list[Case] = cases(64, 0, "zarr")
"""Those in which the peer's keys are in the order of a folder's entries, which may be the right one."""
ADOPTED: list[Case] = [
    *cases(12, 1, "lazy stack"),
    *cases(17, 1, "shared"),
    *cases(19, 1, *MAPPED),
    *cases(38, 1, "lazy stack"),
    *cases(38, 2, "lazy stack"),
    *(case for i in (0, 1, 3) for case in cases(72, i, *FILES)),
]
"""Those of `BETTER` in which the peer's container is right since 0.15."""
FOLLOWED: list[Case] = [
    *(case for i in range(2) for case in cases(72, i, "lazy stack")),
    *cases(72, 2, *(place for place in PLACES if place not in ("lazy stack", "window"))),
    *cases(72, 3, *PLACES),
]
"""Where ours does what the peer does since 0.15, and did not before: names of nested TensorDicts."""
STORED_VMAP = """
td = PersistentTensorDict.from_dict(one(), filename=at(".h5"), batch_size=[3])
torch.vmap(lambda x: x.apply(lambda y: y + 1))(td)
"""
OURS_ALONE: dict[str, tuple[list[Case], str]] = {
    "what is written into a window is cast, so that the rows outside of it stay": (
        cases(7, 0, "window"),
        "td = place(entries(s='hello')); made = td.apply(lambda x: (x.float() + 1).to(x.dtype), out=td)\n"
        "(made is td, seen(td), td.get('i').dtype)",
    ),
    "what is written into a window is cast, from elsewhere too": (
        cases(7, 1, "window"),
        "td = place(entries(s='hello')); made = entries().apply(lambda x: (x.float() + 1).to(x.dtype), out=td)\n"
        "(made is td, seen(td))",
    ),
    "a locked `out` is written in place, in its own dtype": (
        cases(7, 0, *LOCKS),
        'td = entries(s="x")\n(True, seen(td.apply(lambda x: x + 1)), torch.int64)',
    ),
    "a locked `out` is written in place": (cases(7, 1, *LOCKS), "(True, seen(entries().apply(lambda x: x + 1)))"),
    "stored entries are not mapped over, as HDF5 is not there": (
        [*cases(5, 0, "window"), *cases(5, 2, "window"), *cases(8, 2, "window")],
        STORED_VMAP,
    ),
    "unbatched tensors can be memory-mapped": (
        cases(8, 0, *MAPPED),
        "[True, False, True, 1.0, 1.0]",
    ),
    "a shape of stored data is a copy in memory": (cases(30, 1, *STORED), 'entries().get("i")'),
    "rows of a file are copied to a file": (cases(45, 1, "window"), "('PersistentTensorDict', torch.arange(3.0))"),
    "a row is sent, and not all of them": (cases(73, 1, "shared", "window"), "(True, torch.tensor(3.0))"),
    "the elements of a lazy stack have their own values": (
        cases(80, 1, "lazy stack"),
        '(torch.arange(3.0), ["x", "x", "x"])',
    ),
}
"""Where neither is to be followed: why, the cases, and the program whose result in the peer's memory is ours."""
