"""Calls of every public method, in the ways that callers write them, by groups.

In a call `td` is the container, `other` a TensorDict like it with other values, and `rows`, `mask`, `mask1` are
indices. The last expression of a line is its result.
"""

from __future__ import annotations

START = """
import itertools, copy, pickle, collections, dataclasses, operator
numbers = itertools.count()
def at(suffix=""):
    return f"{tmp}/{next(numbers)}{suffix}"
def source(shift=0, **more):
    a = torch.arange(24.0).view(4, 3, 2) + 1 + shift
    i = torch.arange(12).view(4, 3) + 1 + shift
    n = {"b": torch.arange(12.0).view(4, 3) / 4 + 0.5 + shift, "m": {"c": torch.arange(12).view(4, 3) % 3 == 0}}
    return TensorDict({"a": a, "i": i, "n": n, **more}, [4, 3])
rows = torch.tensor([2, 0])
mask = torch.arange(12).view(4, 3) % 2 == 0
mask1 = torch.tensor([True, False, True, False])
"""

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round"
    " sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
PREDICATES = "isfinite isnan isneginf isposinf isreal".split()
CASTS = (
    "bfloat16 bool complex128 complex64 cpu double float float16 float32 float64 half int int16 int32 int64 int8 uint8"
).split()
FEATURES = "dim ndim ndimension batch_dims batch_size shape numel depth device names dtype is_locked".split()


def lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line and not line.startswith("#")]


CALLS: dict[str, list[str]] = {
    "access": lines("""
td["a"]
td["n", "b"]
td["n", "m", "c"]
td["n"]["m"]["c"]
td["n"]
td[("a",)]
td["missing"]
td["n", "missing"]
td["a", "deeper"]
td.get("a")
td.get(("n", "b"))
td.get("n")
td.get("missing")
td.get("missing", None)
td.get("missing", default=3)
td.get("missing", 3)
td.get(("n", "missing"), torch.zeros(()))
td.get(("x", "y"), "no")
td.get(3)
td.get(None)
td.get("a") is td.get("a")
td.get("n") is td.get("n")
td.get_at("a", 0)
td.get_at("a", rows)
td.get_at("a", (slice(None), 0))
td.get_at(("n", "b"), mask)
td.get_at("missing", 0)
td.get_at("missing", 0, None)
td.get_at("missing", 0, default=3)
td.get_at("a", index=0)
td.get_item_shape("a")
td.get_item_shape(("n", "b"))
td.get_item_shape("n")
td.get_item_shape("missing")
td.get_non_tensor("a")
td.get_non_tensor("missing", default=None)
td.get_non_tensor("missing")
td.entry_class("a") is not None
td.entry_class("missing")
list(td.keys())
list(td.keys(True))
list(td.keys(include_nested=True, leaves_only=True))
list(td.keys(False, True))
list(td.keys(True, True, sort=True))
list(td.keys(leaves_only=True, is_leaf=is_leaf_nontensor))
list(td.keys(True, True, is_leaf=lambda c: True))
len(td.keys())
"a" in td.keys()
("n", "b") in td.keys(True)
("n", "b") in td.keys()
("n", "b") in td.keys(include_nested=True, leaves_only=True)
"n" in td.keys(leaves_only=True)
sorted(td.keys())
list(td.values())
list(td.values(True, True))
list(td.values(True))
len(list(td.values(include_nested=True, leaves_only=True)))
list(td.items())
list(td.items(True, True))
[k for k, v in td.items(True)]
dict(td.items()).keys()
dict(td)
{**td}
td.sorted_keys
td.non_tensor_items()
td.non_tensor_items(include_nested=True)
"a" in td
"missing" in td
("n", "b") in td
len(td)
list(iter(td))
[x.batch_size for x in td]
td.is_empty()
bool(td.keys() == {"a", "i", "n"})
td.keys() & {"a"}
set(td.keys()) ^ {"a", "b"}
td.separates("a")
td.separates("a", ("n", "b"))
td.separates("missing", default=None)
td.separates("missing", strict=False)
td.separates("missing")
td.separates("a", filter_empty=False)
getattr(td, "nothing_like_this")
hasattr(td, "nothing_like_this")
td.saved_path
td.grad
td.data
td.requires_grad
td.is_contiguous()
td.is_memmap()
td.is_shared()
td.is_consolidated()
td.is_cpu
td.is_cuda
td.is_meta
td.is_floating_point()
td.is_non_tensor("a")
td.bytes()
td.bytes(count_duplicates=False)
td.param_count()
td.param_count(count_duplicates=False)
td.data_ptr().keys()
td.size()
td.size(0)
td.size(dim=1)
td.size(5)
td == td
td == other
td != other
td == 1
td != torch.ones(4, 3)
td == td.to_dict()
td < 3
td <= other
td > other
td >= 0
td == "x"
bool(td)
hash(td) is not None
is_tensor_collection(td)
isinstance(td, TensorDictBase)
type(td.to_tensordict()).__name__
"""),
    "facts": [f"td.{name}() if callable(td.{name}) else td.{name}" for name in FEATURES],
    "write": lines("""
td["a"] = torch.zeros(4, 3, 2); td
td["new"] = torch.zeros(4, 3); td
td["n", "b"] = torch.zeros(4, 3); td
td["n", "new"] = torch.ones(4, 3, 1); td
td["x", "y"] = torch.ones(4, 3); td
td["n"] = other["n"]; td
td["n"] = {"b": torch.zeros(4, 3)}; td
td["bad"] = torch.zeros(5); td
td["a"] = 1; td
td["new"] = 1; td
td["new"] = "text"; td
td["new"] = None; td
td["new"] = [1, 2]; td
td["new"] = np.ones((4, 3)); td
td[3] = torch.zeros(3); td
td[()] = other; td
td[...] = other; td
td[:] = other; td
td[0] = other[0]; td
td[0] = 0; td
td[0] = torch.zeros(()); td
td[rows] = other[rows]; td
td[mask] = other[mask]; td
td[mask1] = other[mask1]; td
td[mask] = 0; td
td[:, 0] = other[:, 0]; td
td[1:3] = other[1:3]; td
td[1:3, 0] = other[0, 0]; td
td[0] = {"a": torch.zeros(3, 2)}; td
td[0] = other[0].to_dict(); td
td[0] = {"new": torch.zeros(3)}; td
td[0] = "x"; td
td[9] = other[0]; td
td[0] = other; td
td[:2] = other[:3]; td
td[None] = other[None]; td
td[-1] = other[-1]; td
td[[0, 2]] = other[[0, 2]]; td
td[range(2)] = other[range(2)]; td
td[..., 0] = other[..., 0]; td
td[torch.tensor([[0, 1]])] = other[torch.tensor([[0, 1]])]; td
td[np.array([0, 1])] = other[np.array([0, 1])]; td
td.set("a", torch.zeros(4, 3, 2))
td.set("a", torch.zeros(4, 3, 5))
td.set("a", torch.zeros(4, 3, 2), inplace=True)
td.set("a", torch.zeros(4, 3, 5), inplace=True)
td.set("new", torch.zeros(4, 3), inplace=True)
td.set("new", torch.zeros(4, 3, dtype=torch.int8))
td.set(("n", "new"), torch.zeros(4, 3))
td.set(("x", "y", "z"), torch.zeros(4, 3))
td.set("new", torch.zeros(4))
td.set("new", other)
td.set("new", TensorDict({"q": torch.zeros(4)}, [4]))
td.set("new", {"q": torch.zeros(4, 3)})
td.set("new", "text")
td.set("new", torch.zeros(4, 3), non_blocking=True)
td.set(key="new", item=torch.zeros(4, 3))
td.set(3, torch.zeros(4, 3))
td.set("a", item=torch.zeros(4, 3, 2), inplace=False)
td.set_("a", torch.zeros(4, 3, 2))
td.set_("a", torch.zeros(4, 3, 2, dtype=torch.int64))
td.set_("a", torch.zeros(4, 3, 5))
td.set_("missing", torch.zeros(4, 3))
td.set_(("n", "b"), torch.zeros(4, 3))
td.set_("a", 0)
td.set_("n", other["n"])
td.set_(key="a", item=torch.zeros(4, 3, 2))
td.set_at_("a", torch.zeros(3, 2), 0)
td.set_at_("a", 0, 0)
td.set_at_("a", 1.0, mask)
td.set_at_("a", torch.zeros(2, 3, 2), rows)
td.set_at_("a", torch.zeros(2, 2), (slice(0, 2), 0))
td.set_at_(("n", "b"), torch.zeros(3), 1)
td.set_at_("missing", 0, 0)
td.set_at_("a", torch.zeros(9), 0)
td.set_at_(key="a", value=torch.zeros(3, 2), index=0)
td.set_at_("a", value=torch.zeros(3, 2), index=slice(0, 1))
td.set_non_tensor("new", "text")
td.set_non_tensor(("n", "new"), 3)
td.set_non_tensor("a", "text")
td.setdefault("a", torch.zeros(4, 3, 2))
td.setdefault("new", torch.zeros(4, 3))
td.setdefault("new", torch.zeros(4, 3), inplace=True)
td.setdefault(("n", "new"), torch.zeros(4, 3))
td.fill_("a", 3)
td.fill_("a", 3.5)
td.fill_("i", 7)
td.fill_(("n", "b"), 0)
td.fill_("n", 0)
td.fill_("missing", 0)
td.fill_(key="a", value=1)
td.zero_()
td.update(other)
td.update({"a": torch.zeros(4, 3, 2)})
td.update({"new": torch.zeros(4, 3)})
td.update({("n", "b"): torch.zeros(4, 3)})
td.update({("n", "new"): torch.zeros(4, 3)})
td.update({"n": {"b": torch.zeros(4, 3)}})
td.update({"n": {"new": torch.zeros(4, 3)}})
td.update({"n": torch.zeros(4, 3)})
td.update({"a": {"b": torch.zeros(4, 3)}})
td.update(other, clone=True)
td.update(other, inplace=True)
td.update({"a": torch.zeros(4, 3, 2), "new": torch.zeros(4, 3)}, inplace=True)
td.update(other, keys_to_update=["a"])
td.update(other, keys_to_update=("a", "i"))
td.update(other, keys_to_update="a")
td.update(other, keys_to_update=[("n", "b")])
td.update(other, keys_to_update=["n"])
td.update(other, keys_to_update=["missing"])
td.update(other, True)
td.update(other, non_blocking=True)
td.update(a=torch.zeros(4, 3, 2))
td.update({"i": torch.zeros(4, 3)}, a=torch.zeros(4, 3, 2))
td.update()
td.update({})
td.update(None)
td.update(3)
td.update([("a", torch.zeros(4, 3, 2))])
td.update({"bad": torch.zeros(9)})
td.update(td)
td.update(other[0])
td.update(other, is_leaf=is_leaf_nontensor)
td.update(other, ignore_lock=True)
td.update(other.flatten_keys())
td.update(input_dict_or_td=other)
td.update_(other)
td.update_({"a": torch.zeros(4, 3, 2)})
td.update_({"missing": torch.zeros(4, 3)})
td.update_({("n", "b"): torch.zeros(4, 3)})
td.update_({"n": {"b": torch.zeros(4, 3)}})
td.update_(other, keys_to_update=["a"])
td.update_(other, keys_to_update=("a", "i"))
td.update_(other, keys_to_update=[("n", "b")])
td.update_(other, clone=True)
td.update_(other, non_blocking=True)
td.update_(a=torch.zeros(4, 3, 2))
td.update_(other[0])
td.update_()
td.update_(None)
td.update_at_(other[0], 0)
td.update_at_(other[rows], rows)
td.update_at_(other[mask], mask)
td.update_at_(other[:2], slice(0, 2))
td.update_at_({"a": torch.zeros(3, 2)}, 0)
td.update_at_({("n", "b"): torch.zeros(3)}, 0)
td.update_at_({"missing": torch.zeros(3)}, 0)
td.update_at_(other[0], idx=0)
td.update_at_(other[0], 0, clone=True)
td.update_at_(other[0], 0, keys_to_update=["a"])
td.update_at_(other[:, 0], (slice(None), 0))
td.copy_(other)
td.copy_(other, non_blocking=True)
td.copy_at_(other[0], 0)
td.copy_at_(other[rows], rows)
td.copy_at_(other[0], idx=0)
td.masked_fill(mask, 0)
td.masked_fill(mask, 1.0)
td.masked_fill_(mask, 0)
td.masked_fill(mask1, 0)
td.masked_fill_(mask1, 2)
td.masked_fill_(mask=mask, value=2)
del td["a"]; td
del td["n", "b"]; td
del td["missing"]
td.del_("a")
td.del_(("n", "b"))
td.del_("missing")
td.pop("a")
td.pop("a"); td
td.pop(("n", "b"))
td.pop("missing")
td.pop("missing", None)
td.pop("missing", default=3)
td.pop("n"); td
td.popitem()[0]
td.clear()
td.clear() is td
td.rename_key_("a", "z")
td.rename_key_("a", ("n", "z"))
td.rename_key_(("n", "b"), "z")
td.rename_key_("a", "i")
td.rename_key_("a", "i", safe=True)
td.rename_key_("missing", "z")
td.rename_key_(old_key="a", new_key="z")
td.rename_key_("n", "z")
td.create_nested("z")
td.create_nested(("n", "z"))
td.create_nested(("y", "z"))
td.filter_empty_()
td.filter_non_tensor_data()
td.replace({"a": torch.zeros(4, 3, 2)})
td.replace(a=torch.zeros(4, 3, 2))
td.replace()
td.replace({})
td.replace(other)
td.replace({"new": torch.zeros(4, 3)})
td.batch_size = [4]; td
td.batch_size = [4, 3, 2]; td
td.batch_size = [5]
td.batch_size = (); td
td.device = "cpu"
td.names = ["time", "env"]; td
td.names = None; td
td.names = ["time"]
td.lock_()
td.unlock_()
td.lock_().is_locked
td.is_locked = True
with td.unlock_() as x: x["new"] = torch.zeros(4, 3)
td |= {"a": torch.zeros(4, 3, 2)}
"""),
}
