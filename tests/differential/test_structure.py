"""Selecting, splitting and flattening keys; locks; names; text; non-tensor values."""

from __future__ import annotations

import gc

import torch

from .cases import Case, Cases
from .structures import SAMPLES, t
from .test_access import after

case = Cases()

# --- select, exclude, split_keys ---
PICKS = [
    [],
    ["a"],
    ["n"],
    [("n", "b")],
    ["a", ("n", "m", "c")],
    [("n", "m")],
    ["n", ("n", "b")],
    ["n", "a"],
    ["missing"],
    [("n", "missing")],
    [("a", "deeper")],
    ["a", "a"],
    [("missing", "b")],
    [("a",)],
    [1],
]
for keys in PICKS:
    case(f"select {keys}", lambda M, k=keys: M.sample("nested").select(*k))
    case(f"select {keys} not strict", lambda M, k=keys: M.sample("nested").select(*k, strict=False))
    case(f"select {keys} in place", after("nested", lambda M, td, k=keys: td.select(*k, inplace=True)))
    case(f"exclude {keys}", lambda M, k=keys: M.sample("nested").exclude(*k))
    case(f"exclude {keys} in place", after("nested", lambda M, td, k=keys: td.exclude(*k, inplace=True)))
    case(f"split_keys {keys}", lambda M, k=keys: M.sample("nested").split_keys(k))
    case(f"split_keys {keys} not strict", lambda M, k=keys: M.sample("nested").split_keys(k, strict=False))
case("select shares leaves", lambda M: (lambda td: td.select("a")["a"] is td["a"])(M.sample("nested")))
case("select of named", lambda M: M.sample("named").select("a", ("n", "b")))
case("select of locked", lambda M: M.sample("nested").lock_().select("a"))
case("select of locked in place", after("nested", lambda M, td: td.lock_().select("a", inplace=True)))
case("exclude of locked", lambda M: M.sample("nested").lock_().exclude("a"))
case("select in place is self", lambda M: (lambda td: td.select("a", inplace=True) is td)(M.sample("nested")))
case("split_keys of several", lambda M: M.sample("nested").split_keys(["a"], [("n", "b")]))
case("split_keys with default", lambda M: M.sample("nested").split_keys(["a", "missing"], default=None, strict=False))
case("split_keys in place", after("nested", lambda M, td: td.split_keys(["a"], inplace=True)))
case("split_keys keeping structure", lambda M: M.sample("nested").split_keys(["a"], reproduce_struct=True))

# --- flatten_keys, unflatten_keys ---
for sample in SAMPLES:
    case(f"flatten_keys {sample}", lambda M, s=sample: M.sample(s).flatten_keys())
    case(f"flatten_keys {sample} by /", lambda M, s=sample: M.sample(s).flatten_keys("/"))
    case(f"flatten_keys {sample} in place", after(sample, lambda M, td: td.flatten_keys(inplace=True)))
    case(f"flatten and unflatten {sample}", lambda M, s=sample: M.sample(s).flatten_keys().unflatten_keys())
    case(f"unflatten_keys {sample}", lambda M, s=sample: M.sample(s).unflatten_keys())
    case(f"lock {sample}", lambda M, s=sample: M.sample(s).lock_())
    case(f"unlock {sample}", lambda M, s=sample: M.sample(s).lock_().unlock_())
case("unflatten_keys in place", lambda M: M.td({"a.b": t(2), "a.c": t(2), "d": t(2)}, [2]).unflatten_keys(inplace=True))
case("unflatten_keys by text", lambda M: M.td({"a__b": t(2), "c": t(2)}, [2]).unflatten_keys("__"))
case("flatten_keys collision", lambda M: M.td({"a.b": t(2), "a": {"b": t(2)}}, [2]).flatten_keys())
case("unflatten_keys collision", lambda M: M.td({"a.b": t(2), "a": t(2)}, [2]).unflatten_keys())
case("unflatten_keys into a TensorDict", lambda M: M.td({"a.b": t(2), "a": {"c": t(2)}}, [2]).unflatten_keys())
case("flatten_keys with empty nested", lambda M: M.td({"a": {}, "b": t(2)}, [2]).flatten_keys())
case("flatten_keys keeps locked apart", lambda M: M.sample("nested").lock_().flatten_keys())
case("flatten_keys of locked in place", after("nested", lambda M, td: td.lock_().flatten_keys(inplace=True)))
case("keys that start and end in the separator", lambda M: M.td({".a": t(2), "b.": t(2)}, [2]).unflatten_keys())

# --- locks ---
FORBIDDEN = {
    "set": lambda M, td: td.set("a", t(4, 3)),
    "set new": lambda M, td: td.set("new", t(4, 3)),
    "set nested": lambda M, td: td.set(("n", "new"), t(4, 3)),
    "setitem": lambda M, td: td.__setitem__("a", t(4, 3)),
    "set in place": lambda M, td: td.set("a", t(4, 3, start=8), inplace=True),
    "set in place new": lambda M, td: td.set("new", t(4, 3), inplace=True),
    "set_": lambda M, td: td.set_("a", t(4, 3, start=8)),
    "set_at_": lambda M, td: td.set_at_("a", 5, 0),
    "setitem index": lambda M, td: td.__setitem__(0, 1),
    "del": lambda M, td: td.del_("a"),
    "del nested": lambda M, td: td.del_(("n", "b")),
    "pop": lambda M, td: td.pop("a"),
    "popitem": lambda M, td: td.popitem(),
    "rename": lambda M, td: td.rename_key_("a", "z"),
    "clear": lambda M, td: td.clear(),
    "update": lambda M, td: td.update({"a": t(4, 3)}),
    "update_": lambda M, td: td.update_({"a": t(4, 3, start=8)}),
    "update in place": lambda M, td: td.update({"a": t(4, 3, start=8)}, inplace=True),
    "create_nested": lambda M, td: td.create_nested("q"),
    "setdefault new": lambda M, td: td.setdefault("q", t(4, 3)),
    "setdefault old": lambda M, td: td.setdefault("a", t(4, 3)),
    "zero_": lambda M, td: td.zero_(),
    "fill_": lambda M, td: td.fill_("a", 2),
    "apply_": lambda M, td: td.apply_(lambda x: x.zero_()),
    "batch_size": lambda M, td: setattr(td, "batch_size", [4]),
    "names": lambda M, td: setattr(td, "names", ["x", "y"]),
    "iadd": lambda M, td: td["a"].__iadd__(1),
    "nested set": lambda M, td: td["n"].set("new", t(4, 3)),
    "nested unlock": lambda M, td: td["n"].unlock_(),
    "clear_device_": lambda M, td: td.clear_device_(),
    "filter_empty_": lambda M, td: td.filter_empty_(),
}
for name, step in FORBIDDEN.items():
    case(f"locked: {name}", after("nested", lambda M, td, step=step: step(M, td.lock_())))
    case(f"unlocked again: {name}", after("nested", lambda M, td, step=step: step(M, td.lock_().unlock_())))


def _two_parents(M):
    child = M.td({"x": t(2)}, [2])
    first, second = M.td({"c": child}, [2]).lock_(), M.td({"c": child}, [2]).lock_()
    steps = [M.attempt(lambda: child.unlock_().is_locked), M.attempt(lambda: first.unlock_().is_locked)]
    steps += [
        M.attempt(lambda: child.is_locked),
        M.attempt(lambda: second.unlock_().is_locked),
        M.attempt(lambda: child.unlock_().is_locked),
    ]
    return steps, child


def _parent_gone(M):
    child = M.td({"x": t(2)}, [2])
    parent = M.td({"c": child}, [2]).lock_()
    del parent
    gc.collect()
    return M.attempt(lambda: child.unlock_()), child.is_locked


def _locked_child_of_unlocked(M):
    child = M.td({"x": t(2)}, [2]).lock_()
    parent = M.td({"c": child}, [2])
    parent["y"] = t(2)
    return parent, M.attempt(lambda: parent.set(("c", "new"), t(2)))


def _unlock_context(M):
    td = M.sample("nested").lock_()
    with td.unlock_() as inner:
        inner["new"] = t(4, 3)
    return td, inner is td, M.attempt(lambda: td.set("q", t(4, 3)))


def _context_after_error(M):
    td = M.sample("nested").lock_()
    try:
        with td.unlock_():
            td["new"] = t(4, 3)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return td


def _lock_context(M):
    td = M.sample("nested")
    with td.lock_():
        inside = td.is_locked
    return inside, td.is_locked, td["n"].is_locked


case("a child of two locked parents", _two_parents)
case("a child whose parent is gone", _parent_gone)
case("a locked child of an unlocked parent", _locked_child_of_unlocked)
case("with unlock_", _unlock_context)
case("with unlock_ and an error", _context_after_error)
case("with lock_", _lock_context)
case("lock_ is self", lambda M: (lambda td: (td.lock_() is td, td.unlock_() is td))(M.sample("nested")))
case("is_locked = True", lambda M: (lambda td: (setattr(td, "is_locked", True), td))(M.sample("nested")))
for name, step in {
    "clone": lambda td: td.clone(),
    "shallow clone": lambda td: td.clone(False),
    "row": lambda td: td[0],
    "rows": lambda td: td[[0, 1]],
    "unbind": lambda td: td.unbind(0),
    "apply": lambda td: td.apply(lambda x: x),
    "replace": lambda td: td.replace(a=t(4, 3)),
    "empty": lambda td: td.empty(),
    "contiguous": lambda td: td.contiguous(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "td + 1": lambda td: td + 1,
    "td == td": lambda td: td == td,
    "view": lambda td: td.view(-1),
    "reshape": lambda td: td.reshape(12),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "squeeze": lambda td: td.squeeze(0),
    "to float64": lambda td: td.to(torch.float64),
    "cpu": lambda td: td.cpu(),
    "detach": lambda td: td.detach(),
    "flatten": lambda td: td.flatten(0, 1),
    "masked_select": lambda td: td.masked_select(torch.ones(4, 3, dtype=torch.bool)),
    "rename": lambda td: td.rename("u", "v"),
    "where": lambda td: td.where(torch.ones(4, 3, dtype=torch.bool), 0),
    "masked_fill": lambda td: td.masked_fill(torch.ones(4, 3, dtype=torch.bool), 0),
    "apply propagating": lambda td: td.apply(lambda x: x, propagate_lock=True),
    "zeros_like": torch.zeros_like,
    "chunk": lambda td: td.chunk(2),
    "unflatten": lambda td: td.unflatten(0, (2, 2)),
    "all": lambda td: td.all(0),
    "abs": lambda td: td.abs(),
}.items():
    case(f"lock of {name}", lambda M, step=step: step(M.sample("named").lock_()))

# --- names ---


def named(step, sample="named"):
    def program(M):
        td = M.sample(sample)
        done = M.attempt(lambda: step(td))
        return done, td, td["n"].names

    return program


for name, step in {
    "refine": lambda td: td.refine_names("x", "y"),
    "refine ellipsis": lambda td: td.refine_names(..., "y"),
    "refine first": lambda td: td.refine_names("x", ...),
    "refine None": lambda td: td.refine_names(None, "y"),
    "refine too few": lambda td: td.refine_names("x"),
    "refine two ellipses": lambda td: td.refine_names(..., ...),
    "rename all": lambda td: td.rename("u", "v"),
    "rename one": lambda td: td.rename(time="when"),
    "rename unknown": lambda td: td.rename(nothing="when"),
    "rename None": lambda td: td.rename(None),
    "rename too few": lambda td: td.rename("u"),
    "rename_ all": lambda td: td.rename_("u", "v"),
    "rename_ one": lambda td: td.rename_(time="when"),
    "rename ellipsis": lambda td: td.rename(..., "v"),
    "names = list": lambda td: setattr(td, "names", ["u", "v"]),
    "names = None": lambda td: setattr(td, "names", None),
    "names = equal": lambda td: setattr(td, "names", ["u", "u"]),
    "names = short": lambda td: setattr(td, "names", ["u"]),
    "names = numbers": lambda td: setattr(td, "names", [1, 2]),
    "names = tuple": lambda td: setattr(td, "names", ("u", None)),
}.items():
    case(f"names of named: {name}", named(step))
    case(f"names of nested: {name}", named(step, "nested"))
    case(f"names of deep_batch: {name}", named(step, "deep_batch"))
case("names of sub after set", lambda M: M.sample("named").set("q", M.td({"x": t(4, 3)}, [4, 3]))["q"].names)

# --- text ---
for sample in SAMPLES:
    case(f"repr {sample}", lambda M, s=sample: repr(M.sample(s)))
    case(f"str of locked {sample}", lambda M, s=sample: str(M.sample(s).lock_()))
case(
    "repr of dtypes",
    lambda M: repr(
        M.td(
            {str(d): torch.zeros(2, 3, dtype=d) for d in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64)},
            [2],
        )
    ),
)
case("repr of a row", lambda M: repr(M.sample("nested")[0]))
case("repr of unsorted keys", lambda M: repr(M.td({"z": t(1), "a": t(1), "m": {"y": t(1), "b": t(1)}}, [1])))
case("repr of a parameter", lambda M: repr(M.td({"w": torch.nn.Parameter(t(3))}, [])))
case("repr of a list of str", lambda M: repr(M.td({"s": ["x", "y"]}, [2])))

# --- non-tensor values ---
VALUES = {
    "str": "hello",
    "None": None,
    "dict": {"x": 1},
    "tuple of str": ("a", "b"),
    "bytes": b"raw",
    "function": len,
    "set": {1},
    "empty str": "",
}
for name, value in VALUES.items():
    case(f"td[s] of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v)["s"])
    case(f"get of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v).get("s"))
    case(
        f"get_non_tensor of {name}",
        lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v).get_non_tensor("s"),
    )
    case(
        f"setitem of {name}",
        lambda M, v=value: (lambda td: (td.__setitem__("s", v), td["s"], td))(M.td({"a": t(3)}, [3])),
    )
    case(f"row of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v)[1])
    case(f"rows of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v)[[0, 2]])
    case(f"clone of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v).clone())
    case(f"to_dict of {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v).to_dict())
    case(f"stack of {name}", lambda M, v=value: torch.stack([M.td({}, [3]).set_non_tensor("s", v)] * 2))
    case(f"cat of {name}", lambda M, v=value: torch.cat([M.td({}, [3]).set_non_tensor("s", v)] * 2))
    case(f"view of {name}", lambda M, v=value: M.td({}, [4]).set_non_tensor("s", v).view(2, 2))
    case(f"apply over {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v).apply(lambda x: x + 1))
    case(f"sum with {name}", lambda M, v=value: M.td({"a": t(3)}, [3]).set_non_tensor("s", v) + 1)
case("stack of unequal text", lambda M: torch.stack([M.td({"s": "x"}, []), M.td({"s": "y"}, [])]))
case("stack of unequal text, read", lambda M: torch.stack([M.td({"s": "x"}, []), M.td({"s": "y"}, [])])["s"])
case("stack of unequal text, row", lambda M: torch.stack([M.td({"s": "x"}, []), M.td({"s": "y"}, [])])[1]["s"])
case("stack of equal text, read", lambda M: torch.stack([M.td({"s": "x"}, []), M.td({"s": "x"}, [])])["s"])
case("list of str, read", lambda M: M.td({"s": ["x", "y", "z"]}, [3])["s"])
case("list of str, row", lambda M: M.td({"s": ["x", "y", "z"]}, [3])[1]["s"])
case("list of str, rows", lambda M: M.td({"s": ["x", "y", "z"]}, [3])[[2, 0]]["s"])
case("list of str, slice", lambda M: M.td({"s": ["x", "y", "z"]}, [3])[1:]["s"])
case("list of str, mask", lambda M: M.td({"s": ["x", "y", "z"]}, [3])[torch.tensor([True, False, True])]["s"])
case("list of str, unbind", lambda M: [x["s"] for x in M.td({"s": ["x", "y", "z"]}, [3]).unbind(0)])
case("list of str, cat", lambda M: torch.cat([M.td({"s": ["x", "y"]}, [2]), M.td({"s": ["z"]}, [1])])["s"])
case(
    "writing text in a row",
    lambda M: (lambda td: (td.__setitem__(1, M.td({"s": "new"}, [])), td, td["s"]))(M.sample("text").select("s")),
)
case(
    "writing text in rows",
    lambda M: (lambda td: (td.__setitem__(slice(1, 3), M.td({"s": "new"}, [2])), td["s"]))(
        M.sample("text").select("s")
    ),
)
case("update_ of text", lambda M: (lambda td: (td.update_({"s": "new"}), td))(M.sample("text")))
case("set_ of text", lambda M: (lambda td: (td.set_("s", "new"), td))(M.sample("text")))
case("NonTensorData set", lambda M: M.td({"s": M.NonTensorData("x", batch_size=[2])}, [2]))
case("NonTensorData tolist", lambda M: M.NonTensorData("x", batch_size=[2]).tolist())
case("filter_non_tensor_data", lambda M: M.sample("text").filter_non_tensor_data())
case("non_tensor_items", lambda M: M.sample("text").non_tensor_items(include_nested=True))
case("is_non_tensor", lambda M: [M.is_non_tensor(v) for v in M.sample("text").values()])
case("is_tensor_collection", lambda M: [M.is_tensor_collection(v) for v in (M.sample("text"), t(2), {}, M.TensorDict)])


@case.parametrize
def test_structure(case: Case) -> None:
    case.check()
