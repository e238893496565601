"""The causes from 42 on, as in `on_containers`."""

from __future__ import annotations

ROWS: dict[int, str] = {
    42: """
td = place(entries())
td.unlock_()
made = td.reshape(12, inplace=True)
(made is td, seen(td))
""",
    43: """
path = at()
place(TensorDict({"n": TensorDict({"a": torch.arange(2.0)}, [2]), "m": torch.ones(2)}, [2])).memmap(path)
[M.attempt(lambda: TensorDict.load_memmap(path, subpath=p).get("a").detach())
 for p in ("n", ("n",), "1/n", ("1", ("n",)), "_tensordict/n", "nope")]
""",
    44: """
params = TensorDictParams(TensorDict({"a": torch.ones(3)}, [3]))
p = params["a"]
td = place(TensorDict({"p": params}, [3]))
td.zero_()
td.get("p").get("a").detach()
---
made = place(entries()).to(torch.int)
(made.get("a").dtype, made.get("i").dtype, made.get("n").get("a").dtype, made.batch_size)
""",
    45: """
td = place(one())
other = td.clone()
td.unlock_()
td.set_("a", torch.zeros(3))
(other.get("a").detach(), other.is_locked)
---
td = place(one())
other = td.clone(newfile=at(".copy"))
(type(other).__name__, other["a"])
""",
    46: """
td = place(one())
(td.data_ptr().batch_size, sorted(td.data_ptr().keys()))
""",
    47: """
td = place(entries())
[td.entry_class(key).__name__ for key in ("a", "i", ("n", "a"))]
""",
    48: """
td = place(entries(s="x"))
td.names = ["t", "u"]
(td.names, td.get("n").names, td[0].names, getattr(td.get("s"), "names", td.names))
""",
    49: """
td = place(entries())
made = td * torch.full((2, 4, 3), 2)
(made.batch_size, made.get("a"), made.get("n").get("a"))
---
td = place(entries())
wide = torch.ones(2, 4, 3)
made = td + TensorDict({"a": torch.ones(2, 4, 3, 2), "i": wide, "n": {"a": wide}}, [2, 4, 3])
(made.batch_size, made.get("a"), made.get("n").get("a"))
---
made = place(entries()).clamp(torch.zeros(2, 4, 3), torch.ones(2, 4, 3))
(made.batch_size, made.get("a"))
""",
    53: """
j = torch.nested.nested_tensor([torch.ones(n) * n for n in (2, 3, 1, 4)], layout=torch.jagged)
td = place(TensorDict({"j": j, "x": torch.arange(4)}, [4]))
[(part.batch_size, part.get("x"), [row.detach() for row in part.get("j").unbind()]) for part in td.chunk(2)]
---
[seen(part) for part in place(entries()).chunk(2)]
""",
    54: """
td = place(TensorDict({"a": torch.ones(3, requires_grad=True)}, [3]))
td.get("a").sum().backward()
td.lock_()
(td.grad is None, td.grad is not None and td.grad.is_locked, td.data.is_locked)
""",
    55: """
sources = ({"a": {"b": {}}}, {"a": {"b": torch.ones(1)}}, {"c": torch.ones(1)})
[place(TensorDict(source, [])).depth for source in sources]
""",
    56: """
td = place(TensorDict({"a": torch.ones(3, 1, 4)}, [3, 1]))
made = td.expand_as(TensorDict({"a": torch.ones(2, 3, 5, 4)}, [2, 3, 5]))
(made.batch_size, made.get("a"))
---
td = place(TensorDict({"a": torch.ones(3, 1, 4)}, [3]))
td.expand_as(TensorDict({"a": torch.ones(2, 3, 5, 4)}, [2, 3])).get("a").shape
---
place(one()).expand_as(torch.ones(2, 3)).get("a")
""",
    57: """
td = place(entries(s="x"))
made = td.from_dict_instance(td.to_dict())
(seen(made), made.batch_size, "s" in made.keys())
""",
    58: """
td = place(one())
out = TensorDict({"a": torch.zeros(2)}, [2])
failed = M.attempt(lambda: td.gather(0, torch.tensor([0, 1]), out=out, inplace=True))
made = td.gather(0, torch.tensor([2, 1]))
(failed, made.batch_size, made.get("a"))
""",
    59: """
td = place(one(n=TensorDict({}, [3])))
td.unlock_()
td.load_state_dict(TensorDict({"a": torch.ones(3)}, [3]).state_dict(), strict=True)
td.get("a").detach()
---
td = place(one())
td.unlock_()
td.load_state_dict(TensorDict({"a": torch.ones(3)}, [3]).state_dict(), strict=True)
td.get("a").detach()
""",
    60: """
other = one().memmap(at())
td = place(one())
td.make_memmap_from_storage("c", other["a"].untyped_storage(), (3,), dtype=torch.float32)
""",
    61: """
td = place(one(b=torch.ones(3)))
td.unlock_()
parts = td.separates("a", "no", default=None)
(parts.get("no"), parts.get("a").detach(), sorted(map(str, td.keys())))
""",
    62: """
tds = [place(TensorDict({"a": torch.ones(3)}, [3], names=[n])) for n in "tu"]
[M.attempt(lambda: fn(tds).names) for fn in (torch.stack, torch.cat, lazy_stack)]
---
tds = [place(TensorDict({"a": torch.ones(3)}, [3], names=["t"])) for n in "tu"]
[fn(tds).names for fn in (torch.stack, torch.cat, lazy_stack)]
""",
    63: """
class Sub(TensorDict): ...
td = place(Sub({"a": torch.ones(3), "b": torch.ones(3)}, [3]))
[type(x).__name__ for x in (td, td.empty(), td.split_keys(["a"])[0], td.select("a"), td.clone(), td[0])]
""",
    64: """
td = place(TensorDict({"n": TensorDict({"a": torch.ones(2, 3)}, [2]), "b": torch.arange(2)}, [2]))
(td.tolist(convert_tensors=True), td.tolist())
""",
    67: """
td = place(TensorDict({"n": TensorDict({"x": torch.zeros(2, 1)}, [2])}, [2]))
td.unlock_()
td.update(TensorDict({"n": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])}, [2]))
(type(td.get("n")).__name__, [row.get("x") for row in td.get("n").unbind(0)])
""",
    68: """
td = place(TensorDict({"a": torch.ones(3, requires_grad=True)}, [3]))
(td * 2).backward(torch.ones(3))
""",
    69: """
path = at()
td = place(one())
td.memmap(path)
calls = [lambda: type(td).load_memmap(path, mode="w"), lambda: TensorDict.load(path, mode="x")]
(*map(M.attempt, calls), TensorDict.load_memmap(path).get("a"))
---
path = at()
td = place(one())
td.memmap(path)
td.unlock_()
(M.attempt(lambda: td.load_memmap_(path, mode="w")), TensorDict.load_memmap(path).get("a"), td.get("a").detach())
""",
    70: """
made = make_tensordict(place(one(b=torch.ones(3, 2))), auto_batch_size=True)
(made.batch_size, made.get("a").detach())
""",
    71: """
td = place(TensorDict({"n": TensorDict({"a": torch.zeros(3, 2)}, [3])}, [3]))
td.unlock_()
td.set("n", TensorDict({"a": torch.ones(3, 2)}, [3, 2], names=["t", "u"]))
(td.names, td.get("n").names, td.get("n").batch_size)
""",
    72: "\n---\n".join(
        f"""
element = TensorDict({{"a": torch.zeros(3, 4)}}, [3, 4], names=["c", "d"])
td = place(TensorDict({{"n": element}}, [3], names=["c"]))
before = (td.names, td.get("n").names)
td.names = {names}
(before, td.names, td.get("n").names)
""".strip()
        for names in (["x"], ["c"], ["d"], [None])
    ),
    73: """
td = place(TensorDict({"a": torch.arange(400.0)}, [400]))
[isinstance(x, MemoryMappedTensor) for x in (td.get("a")[:5], td[3].get("a"), td[:5].get("a"), td.get("a")[3])]
---
import pickle
td = place(TensorDict({"a": torch.arange(4000.0)}, [4000]))
sent = pickle.dumps(td[3])
(len(sent) < 8_000, pickle.loads(sent).get("a").detach())
""",
    80: """
td = place(one(s="y") * 0)
td.unlock_()
td.load_state_dict(one(s="x").state_dict(), strict=True)
(td.get("a").detach(), "s" in td.keys())
---
state = place(one(s="x")).state_dict()
td = one(s="y") * 0
td.load_state_dict(state, strict=True)
(td.get("a").detach(), rows(td.get("s").tolist()))
""",
    81: """
td = place(TensorDict({"n": {"a": torch.ones(3)}}, [3]))
[M.attempt(fn) for fn in (lambda: td.get(("n", str)), lambda: td.get(("n", str), None), lambda: td.get(("n", "no")))]
""",
}
