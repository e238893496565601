"""The causes from 41 on, as in `rows`, and those whose programs are elsewhere."""

from __future__ import annotations

ROWS: dict[int, str] = {
    41: """
td = PersistentTensorDict.from_dict({"a": torch.zeros(3)}, filename=tmp + "/f.h5", batch_size=[3])
(type(td.file).__name__, td.file.filename.endswith("/f.h5"), sorted(td.file))
---
PersistentTensorDict.from_dict({"a": torch.zeros(3)}, filename=tmp + "/f.h5", batch_size=[3]).close()
td = PersistentTensorDict.from_h5(tmp + "/f.h5", mode="r")
(td.mode, list(td.file["a"].shape))
---
import h5py
with h5py.File(tmp + "/g.h5", "w") as file:
    file["x"] = np.arange(3)
    file["n/y"] = np.zeros((3, 2))
with h5py.File(tmp + "/g.h5", "r") as file:
    whole, part = TensorDict.from_any(file), TensorDict.from_any(file["n"])
    found = (sorted(map(str, whole.keys(True, True))), list(part.keys()), torch.as_tensor(whole["x"]).tolist())
found
""",
    42: """
td = TensorDict({"a": torch.zeros(3, 4)}, [3, 4])
(td.reshape(12, inplace=True) is td, td)
""",
    43: """
lazy_stack([TensorDict({"sub": TensorDict({"a": torch.full((2,), float(i))}, [2])}, [2]) for i in (0, 1)]).memmap(tmp)
[TensorDict.load_memmap(tmp, subpath=p)["a"] for p in ("1/sub", ("1", ("sub",)))]
""",
    44: """
params = TensorDictParams(TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(2)}}))
made = params.to(torch.int)
(type(made).__name__, len(list(made.parameters())), len(list(made.buffers())), made["a"].dtype, made["n", "b"].dtype)
---
params = TensorDictParams(TensorDict({"a": torch.ones(3)}))
made = params.to(torch.float64)
(len(list(made.parameters())), made["a"].dtype, type(made["a"]).__name__)
---
params = TensorDictParams(TensorDict({"a": torch.ones(3)}))
p = params["a"]
TensorDict({"p": params}).zero_()
(params["a"] is p, p.detach(), p.requires_grad)
---
params = TensorDictParams(TensorDict({"a": torch.ones(3)}))
params.zero_()
params["a"].detach()
""",
    45: """
td = PersistentTensorDict.from_dict({"a": torch.ones(3)}, filename=tmp + "/f.h5", batch_size=[3])
other = td.clone(newfile=tmp + "/b.h5")
td["a"] = torch.zeros(3)
(type(other).__name__, other["a"])
""",
    46: """
lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).data_ptr().batch_size
""",
    47: """
td = TensorDict({"a": torch.zeros(3)}, [3])
[td.entry_class("a").__name__, td.memmap_().entry_class("a").__name__]
---
TensorDict({"a": torch.nn.Parameter(torch.zeros(3))}, [3]).entry_class("a").__name__
""",
    48: """
td = TensorDict({"s": "x", "v": NonTensorStack("a", "b", "c"), "a": torch.zeros(3)}, [3])
td.names = ["t"]
[td.get(key).names for key in "sv"]
---
td = TensorDict({"s": "x", "a": torch.zeros(3)}, [3]).lock_()
td.names = ["t"]
(td.names, td.get("s").names)
---
class Item(TensorClass):
    a: torch.Tensor
    s: str
item = Item(torch.zeros(3), "x", batch_size=[3])
item.names = ["t"]
(item.names, item.get("a").shape)
---
lazy = lazy_stack([TensorDict({"s": "x", "a": torch.zeros(3)}, [3]) for _ in range(2)])
lazy.names = ["t", "u"]
(lazy.names, lazy[0].names)
""",
    49: "\n---\n".join(
        f'td = TensorDict({{"a": torch.ones(3, 4)}}, [3, 4]){kind}\n{call}'
        for kind in ("", ".memmap_()", ".lock_()")
        for call in (
            "td * torch.full((2, 3, 4), 2.0)",
            "td + TensorDict({'a': torch.ones(2, 3, 4)}, [2, 3, 4])",
            "td.clamp(torch.zeros(2, 3, 4), torch.full((2, 3, 4), 0.5))",
            "td.lerp(TensorDict({'a': torch.zeros(2, 3, 4)}, [2, 3, 4]), 0.5 + 0 * td)",
        )
    ),
    52: """
class Net(torch.nn.Module):
    def forward(self, x):
        td = TensorDict({"x": x}, x.shape[0])
        return td["x"] + 1
ep = torch.export.export(Net(), (torch.ones(4, 2),), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=9)},))
ep.module()(torch.ones(6, 2))
""",
    53: "\n---\n".join(
        "j = torch.nested.nested_tensor([torch.ones(n) * n for n in (2, 3, 1, 4)], layout=torch.jagged)\n"
        f'td = TensorDict({{"j": j, "x": torch.arange(4)}}, [4]){kind}\n'
        f"[(type(part).__name__, part.batch_size, part['x'], list(part['j'].unbind())) for part in td.{call}]"
        for kind in ("", ".lock_()")
        for call in ("chunk(2)", "chunk(3)")
    ),
    54: """
td = TensorDict({"a": torch.ones(3, requires_grad=True)}, [3])
td["a"].sum().backward()
(td.grad.is_locked, td.lock_().grad.is_locked, td.data.is_locked)
""",
    55: """
[TensorDict({"a": {"b": {}}}).depth, TensorDict({"a": {"b": torch.ones(1)}}).depth, TensorDict().depth]
""",
    56: """
td = TensorDict({"a": torch.ones(3, 1, 4)}, [3, 1])
td.expand_as(TensorDict({"a": torch.ones(2, 3, 5, 4)}, [2, 3, 5]))
---
TensorDict({"a": torch.ones(3, 1, 4)}, [3]).expand_as(TensorDict({"a": torch.ones(2, 3, 5, 4)}, [2, 3]))["a"].shape
---
TensorDict({"a": torch.ones(3, 4)}, [3]).expand_as(torch.ones(2, 3))
""",
    57: """
@tensorclass(autocast=True)
class C:
    a: torch.Tensor
    n: int
c = C(a=torch.ones(3), n=3)
made = c.from_dict_instance(c.to_dict())
(type(made.n).__name__, made.n)
""",
    58: """
td = TensorDict({"a": torch.arange(3)}, [3])
td.gather(0, torch.tensor([0, 1]), out=TensorDict({"a": torch.zeros(2).long()}, [2]), inplace=True)
""",
    59: """
td = TensorDict({"a": torch.zeros(3)}, [3])
td.load_state_dict(TensorDict({"a": torch.ones(3), "n": {}}, [3]).state_dict(), strict=True)["a"]
---
td = TensorDict({"a": torch.zeros(3), "n": {}}, [3])
td.load_state_dict(TensorDict({"a": torch.ones(3)}, [3]).state_dict(), strict=True)["a"]
""",
    60: """
a = TensorDict({"a": torch.ones(3)}, [3]).memmap(tmp + "/1")
b = TensorDict({"b": torch.ones(3)}, [3]).memmap(tmp + "/2")
b.unlock_().make_memmap_from_storage("c", a["a"].untyped_storage(), (3,), dtype=torch.float32)
""",
    61: """
TensorDict(a=torch.ones(3)).separates("a", "no", default=None)["no"]
""",
    62: """
tds = [TensorDict({"a": torch.ones(3)}, [3], names=[n]) for n in "tu"]
torch.stack(tds).names
---
tds = [TensorDict({"a": torch.ones(3)}, [3], names=[n]) for n in "tu"]
lazy_stack(tds).names
---
tds = [TensorDict({"a": torch.ones(3)}, [3], names=["t"]) for n in "tu"]
(torch.stack(tds).names, torch.cat(tds).names, lazy_stack(tds).names)
""",
    63: """
class Sub(TensorDict): ...
td = Sub({"a": torch.ones(3), "b": torch.ones(3)}, [3])
[type(x).__name__ for x in (td.empty(), td.split_keys(["a"])[0], Sub.from_dict({"a": torch.ones(3)}), td.memmap())]
""",
    64: """
TensorDict({"n": TensorDict({"a": torch.ones(2, 3)}, [2])}, [2]).tolist(convert_tensors=True)
""",
    65: """
LazyStackedTensorDict(stack_dim=1, batch_size=[1, 2]).batch_size
""",
    66: """
rows = [TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]
lazy = lazy_stack(rows)
(rows[0] in lazy, rows[0].clone() in lazy)
""",
    67: """
dense = TensorDict({"n": TensorDict({"x": torch.zeros(2, 1)}, [2])}, [2])
dense.update(TensorDict({"n": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])}, [2]))
(type(dense["n"]).__name__, [row["x"] for row in dense["n"].unbind(0)])
""",
    68: """
(TensorDict(a=torch.ones(3, requires_grad=True)) * 2).backward(torch.ones(3))
""",
    69: "\n---\n".join(
        f"""
TensorDict({{"a": torch.ones(3)}}, [3]).memmap(tmp)
failed = M.attempt(lambda: {call})
(failed, TensorDict.load_memmap(tmp)["a"])
""".strip()
        for call in (
            "TensorDict.load_memmap(tmp, mode='w')",
            "TensorDict.load(tmp, mode='w')",
            "TensorDict({'a': torch.ones(3)}, [3]).load_memmap_(tmp, mode='w')",
        )
    ),
    70: """
make_tensordict(TensorDict({"a": torch.ones(3, 2)}, [3]), auto_batch_size=True)
""",
    71: "\n---\n".join(
        f"{kind}\nnested = TensorDict({{'a': torch.ones(3, 2)}}, [3, 2], names=['t', 'u'])\n"
        f"td[{key}] = nested\n(td.names, td[{key}].names)"
        for kind in (
            "td = TensorDict({'z': torch.zeros(3)}, [3])",
            "td = TensorDict({'z': torch.zeros(3)}, [3], names=['q'])",
            "td = TensorDict({}, [])",
        )
        for key in ("'n'", "('m', 'n')")
    )
    + """
---
lazy = lazy_stack([TensorDict({'z': torch.zeros(3)}, [3]) for _ in range(2)])
lazy["n"] = TensorDict({'a': torch.ones(2, 3)}, [2, 3], names=['t', 'u'])
lazy.names
---
class Item(TensorClass):
    z: torch.Tensor
    n: TensorDict
item = Item(torch.zeros(3), None, batch_size=[3])
item.n = TensorDict({'a': torch.ones(3)}, [3], names=['t'])
item.names
""",
    72: "\n---\n".join(
        f"""{"# as since 0.15" if (dim, names[0]) == (0, "c") and names[1] == "e" else ""}
element = TensorDict({{"a": torch.zeros(3, 4)}}, [3, 4], names=["c", "d"])
rows = [TensorDict({{"n": element.clone()}}, [3], names=["c"]) for _ in range(2)]
lazy = lazy_stack(rows, {dim})
before = (lazy.names, lazy["n"].names)
lazy.names = {names}
(before, lazy.names, lazy["n"].names)
""".strip()
        for dim in (0, 1)
        for names in (["x", "e"], ["c", "e"], ["c", "d"], ["d", "c"])
    ),
    73: """
td = TensorDict({"a": torch.arange(400.0)}, [400]).memmap_(tmp)
[type(x).__name__ for x in (td["a"][:5], td[3]["a"], td[:5]["a"], td["a"][3])]
""",
    74: """
import h5py
with h5py.File(tmp + "/f.h5", "w") as file:
    file["b/x"] = np.arange(6).reshape(3, 2)
with h5py.File(tmp + "/f.h5", "r") as file:
    td = PersistentTensorDict(group=file["b"], batch_size=[3])
    found = (td.batch_size, list(td.keys()), td["x"], td[1]["x"])
found
""",
    75: """
import inspect
class Item(TensorClass):
    a: torch.Tensor
    b: str = "x"
list(inspect.signature(Item).parameters)
""",
    76: """
@tensorclass(frozen=True)
class C:
    a: torch.Tensor
isinstance(hash(C(torch.ones(3), batch_size=[3])), int)
""",
    77: """
seen = []
class Item(TensorClass):
    a: torch.Tensor
    def __setattr__(self, name, value):
        seen.append(name)
        super().__setattr__(name, value)
item = Item(torch.ones(3), batch_size=[3])
("a" in seen)
""",
    78: """
@tensorclass(autocast=True)
class C:
    a: np.ndarray
c = C(torch.ones(3))
(type(c.a).__name__, np.asarray(c.a).tolist())
""",
    79: """
class Item(TensorClass):
    a: torch.Tensor
    b: str = "x"
sorted(Item(torch.ones(3)).__expected_keys__)
""",
    80: """
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
state = td.state_dict()
TensorDict({"a": torch.zeros(3), "s": "y"}, [3]).load_state_dict(state, strict=True)["s"]
""",
    81: "\n---\n".join(
        f"{kind}\n{call}"
        for kind in (
            "td = TensorDict({'td': {'a': torch.ones(3)}}, [3])",
            "td = lazy_stack([TensorDict({'td': {'a': torch.ones(3)}}, [3]) for _ in range(2)])",
            "td = TensorDict({'td': {'a': torch.ones(3)}}, [3]).memmap_()",
        )
        for call in ("td.get(('td', str))", "td.get(('td', str), None)")
    ),
    82: """
from torch.compiler import nested_compile_region
@nested_compile_region
def block(td):
    return td + 1
torch.compile(lambda td: block(td), backend="eager", fullgraph=True)(TensorDict(a=torch.ones(3), batch_size=[3]))["a"]
""",
    83: """
params = TensorDictParams(TensorDict({"a": torch.ones(3)}))
params.register_get_post_hook(lambda owner, value: value * 2)
params.get("a").detach()
""",
}

KEYVALUE = "tests/tensordicts/test_keyvalue_names.py"
ELSEWHERE: dict[int, tuple[str, str]] = {
    34: (KEYVALUE, "test_what_they_print"),
    35: (KEYVALUE, "test_what_to_store_gives_keeps_its_class"),
    50: ("plugins/tdstore-zarr/tests/test_store_objects.py", "test_saving_to_a_store_object_and_opening_it"),
    51: (KEYVALUE, "test_what_is_wrong_is_said"),
}
"""Causes whose programs need a server or a plugin's fixtures: the file and the test that shows them."""
