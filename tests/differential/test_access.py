"""Reading and writing entries by key: get, set, keys, update, del, rename, pop."""

from __future__ import annotations

import torch

from .cases import Case, Cases
from .structures import SAMPLES, t

case = Cases()


def after(sample, step):
    """The TensorDict after a step that may raise: a failed one must leave it as it was."""

    def program(M):
        td = M.sample(sample)
        return M.attempt(lambda: step(M, td)), td

    return program


def identity(sample, key, step):
    """Whether the entry is still the same object after a step, and the TensorDict."""

    def program(M):
        td = M.sample(sample)
        old = td.get(key)
        step(M, td)
        return td.get(key) is old, td

    return program


# --- reading ---
KEYS = [
    "a",
    "n",
    ("n", "b"),
    ("n", "m", "c"),
    ("n", "m"),
    (("n", "m"), "c"),
    ("n", ("m", "c")),
    ("a",),
    (("a",),),
    "missing",
    ("n", "missing"),
    ("missing", "b"),
    ("n", "b", "deeper"),
    ("a", "deeper"),
    (),
    1,
    None,
    ("a", 0),
    b"a",
    "",
]
for key in KEYS:
    case(f"get {key!r}", lambda M, k=key: M.sample("nested").get(k))
    case(f"get {key!r} or 5", lambda M, k=key: M.sample("nested").get(k, 5))
    case(f"get {key!r} or None", lambda M, k=key: M.sample("nested").get(k, None))
    case(f"{key!r} in td", lambda M, k=key: k in M.sample("nested"))
    case(f"{key!r} in keys()", lambda M, k=key: k in M.sample("nested").keys())
    case(f"{key!r} in keys(True)", lambda M, k=key: k in M.sample("nested").keys(True))
    case(f"{key!r} in keys(True, True)", lambda M, k=key: k in M.sample("nested").keys(True, True))
    case(f"entry_class {key!r}", lambda M, k=key: M.sample("nested").entry_class(k))
    case(f"get_item_shape {key!r}", lambda M, k=key: M.sample("nested").get_item_shape(k))
    if not (key is None or key == () or key == 1):  # those are indices
        case(f"td[{key!r}]", lambda M, k=key: M.sample("nested")[k])
    case(f"del {key!r}", after("nested", lambda M, td, k=key: td.del_(k)))
    case(f"del td[{key!r}]", after("nested", lambda M, td, k=key: (td.__delitem__(k), None)[1]))
    case(f"pop {key!r}", after("nested", lambda M, td, k=key: td.pop(k)))
    case(f"pop {key!r} or 5", after("nested", lambda M, td, k=key: td.pop(k, 5)))
    case(f"setdefault {key!r}", after("nested", lambda M, td, k=key: td.setdefault(k, t(4, 3, 5))))
    case(f"set {key!r}", after("nested", lambda M, td, k=key: td.set(k, t(4, 3, 5, start=9))))
    case(f"set {key!r} in place", after("nested", lambda M, td, k=key: td.set(k, t(4, 3, start=9), inplace=True)))
    case(f"set_ {key!r}", after("nested", lambda M, td, k=key: td.set_(k, t(4, 3, start=9))))
    case(f"set a dict {key!r}", after("nested", lambda M, td, k=key: td.set(k, {"q": t(4, 3)})))
    case(f"create_nested {key!r}", after("nested", lambda M, td, k=key: td.create_nested(k)))
    case(f"get_at {key!r}", lambda M, k=key: M.sample("nested").get_at(k, 1))
    case(f"get_at {key!r} or 5", lambda M, k=key: M.sample("nested").get_at(k, 1, 5))
    case(f"set_at_ {key!r}", after("nested", lambda M, td, k=key: td.set_at_(k, 1, 2)))
    case(f"fill_ {key!r}", after("nested", lambda M, td, k=key: td.fill_(k, 1)))
case("get by keyword default", lambda M: M.sample("nested").get("missing", default=3))

# --- views of keys, values and items ---
FLAGS = [(False, False), (True, False), (False, True), (True, True)]
for sample in SAMPLES:
    for flags in FLAGS:
        for view in ("keys", "values", "items"):
            for sort in (False, True):
                case(
                    f"{view} {sample} {flags} sort={sort}",
                    lambda M, s=sample, v=view, f=flags, o=sort: list(getattr(M.sample(s), v)(*f, sort=o)),
                )
        case(f"len keys {sample} {flags}", lambda M, s=sample, f=flags: len(M.sample(s).keys(*f)))
    case(f"sorted_keys {sample}", lambda M, s=sample: M.sample(s).sorted_keys)
    case(f"is_empty {sample}", lambda M, s=sample: M.sample(s).is_empty())
case(
    "unsorted keys, sorted",
    lambda M: list(M.td({"z": t(1), "a": {"y": t(1), "b": t(1)}, "m": t(1)}, [1]).keys(True, sort=True)),
)
case(
    "unsorted values, sorted",
    lambda M: list(M.td({"z": t(1), "a": {"y": t(2, start=5), "b": t(3)}}, []).values(True, True, sort=True)),
)
case("is_leaf takes all", lambda M: list(M.sample("nested").keys(True, True, is_leaf=lambda cls: True)))
case(
    "is_leaf takes TensorDicts",
    lambda M: M.sample("nested").keys(True, True, is_leaf=lambda cls: issubclass(cls, M.base)),
)
case("is_leaf with non-tensors", lambda M: list(M.sample("text").keys(True, True, is_leaf=M.is_leaf_nontensor)))
case("items with non-tensors", lambda M: list(M.sample("text").items(True, True, is_leaf=M.is_leaf_nontensor)))
case(
    "keys are live",
    lambda M: (lambda td: (lambda keys: (td.set("new", t(5)), list(keys))[1])(td.keys()))(M.sample("flat")),
)
case("iterating while deleting", lambda M: (lambda td: [td.del_(k) for k in list(td.keys())] and td)(M.sample("flat")))
case("dict(td)", lambda M: dict(M.sample("flat").items()))
case(
    "keys equal a set",
    lambda M: set(M.sample("nested").keys(True)) == {"a", "n", ("n", "b"), ("n", "m"), ("n", "m", "c")},
)

# --- set ---
case("td[k] = tensor", after("nested", lambda M, td: td.__setitem__("new", t(4, 3, 7))))
case("td[nested] = tensor", after("nested", lambda M, td: td.__setitem__(("x", "y", "z"), t(4, 3, 7))))
case("nested set inherits", after("named", lambda M, td: td.set(("x", "y"), t(4, 3))))
case("nested set inherits the device", after("on_cpu", lambda M, td: td.set(("x", "y"), t(4))))
case("set a wrong shape", after("nested", lambda M, td: td.set("new", t(3, 4))))
case("set a wrong shape in a nested", after("nested", lambda M, td: td.set(("n", "new"), t(4))))
case("set a scalar in a batch", after("nested", lambda M, td: td.set("new", 1.0)))
case("set a TensorDict", after("nested", lambda M, td: td.set("new", M.td({"q": t(4, 3)}, [4, 3]))))
case("set a TensorDict with less batch", after("nested", lambda M, td: td.set("new", M.td({"q": t(4, 3)}, [4]))))
case("set a TensorDict with another batch", after("nested", lambda M, td: td.set("new", M.td({"q": t(2)}, [2]))))
case(
    "set a named TensorDict",
    after("named", lambda M, td: td.set("new", M.td({"q": t(4, 3)}, [4, 3], names=["u", "v"]))),
)
case("set replaces a TensorDict by a tensor", after("nested", lambda M, td: td.set("n", t(4, 3))))
case("set replaces a tensor by a TensorDict", after("nested", lambda M, td: td.set("a", {"q": t(4, 3)})))
case("set casts nothing", after("flat", lambda M, td: td.set("b", t(5, dtype=torch.float16))))
case("set returns self", lambda M: (lambda td: td.set("a", t(5)) is td)(M.sample("flat")))
case("set on a cpu device from meta", after("on_cpu", lambda M, td: td.set("x", t(4, 2))))
case("set itself", lambda M: (lambda td: M.attempt(lambda: td.set("self", td).keys()))(M.sample("flat")))
case("inplace set keeps the tensor", identity("flat", "a", lambda M, td: td.set("a", t(5, start=3), inplace=True)))
case("inplace set casts", identity("flat", "b", lambda M, td: td.set("b", t(5, 3) + 0.5, inplace=True)))
case("inplace set of a missing key", after("flat", lambda M, td: td.set("new", t(5), inplace=True)))
case("inplace set of another shape", after("flat", lambda M, td: td.set("a", t(5, 2), inplace=True)))
case("plain set replaces the tensor", identity("flat", "a", lambda M, td: td.set("a", t(5, start=3))))
case("set_ keeps the tensor", identity("flat", "a", lambda M, td: td.set_("a", t(5, start=3))))
case("set_ casts", identity("flat", "b", lambda M, td: td.set_("b", t(5, 3) + 0.5)))
case("set_ broadcasts a row", after("flat", lambda M, td: td.set_("b", t(1, 3))))
case("set_ a scalar", after("flat", lambda M, td: td.set_("b", 3)))
case("set_ another shape", after("flat", lambda M, td: td.set_("b", t(5, 2))))
case(
    "set_ a nested TensorDict",
    identity(
        "nested",
        ("n", "b"),
        lambda M, td: td.set_("n", td["n"].apply(lambda x: ~x if x.dtype == torch.bool else x + 1)),
    ),
)
case("set_ a dict", after("nested", lambda M, td: td.set_("n", {"b": t(4, 3, 2, start=9)})))
case("td[k] = replaces", identity("flat", "a", lambda M, td: td.__setitem__("a", t(5, start=3))))
case("setdefault keeps", lambda M: M.sample("flat").setdefault("a", t(5, start=9)))
case("setdefault of a number", lambda M: M.sample("scalar").setdefault("q", 1))

# --- set_at_, get_at ---
for index in (
    0,
    -1,
    slice(1, 3),
    [0, 2],
    torch.tensor([3, 1]),
    torch.tensor([True, False, True, False, False]),
    (),
    ...,
    None,
    9,
):
    case(f"get_at flat {index}", lambda M, i=index: M.sample("flat").get_at("b", i))
    case(f"set_at_ flat {index}", after("flat", lambda M, td, i=index: td.set_at_("b", 7, i)))
    case(f"set_at_ flat {index} tensor", after("flat", lambda M, td, i=index: td.set_at_("b", t(3, start=50) + 0.5, i)))
    case(f"set_at_ flat {index} list", after("flat", lambda M, td, i=index: td.set_at_("b", [1, 2, 3], i)))
    case(
        f"update_at_ flat {index}",
        after("flat", lambda M, td, i=index: td.update_at_(M.td({"a": 1.0, "b": t(3)}, []), i)),
    )
case("set_at_ of a wrong shape", after("flat", lambda M, td: td.set_at_("b", t(7), 0)))
case("set_at_ keeps the tensor", identity("flat", "b", lambda M, td: td.set_at_("b", 7, 0)))
case("set_at_ nested td", after("nested", lambda M, td: td.set_at_("n", td["n"][0], 1)))
case("update_at_ rows", after("nested", lambda M, td: td.update_at_(td[:2].clone(), slice(2, 4))))
case("update_at_ a subset", after("nested", lambda M, td: td.update_at_({"a": t(3, start=70)}, 1)))
case("update_at_ an unknown key", after("nested", lambda M, td: td.update_at_({"q": t(3)}, 1)))
case("update_at_ a nested subset", after("nested", lambda M, td: td.update_at_({"n": {"b": t(3, 2, start=70)}}, 1)))

# --- update ---


def _update(sample, make, **kwargs):
    return after(sample, lambda M, td: td.update(make(M), **kwargs))


def _update_(sample, make, **kwargs):
    return after(sample, lambda M, td: td.update_(make(M), **kwargs))


SOURCES = {
    "nothing": lambda M: {},
    "a new key": lambda M: {"new": t(4, 3)},
    "an old key": lambda M: {"a": t(4, 3, start=9)},
    "another shape": lambda M: {"a": t(4, 3, 2)},
    "another dtype": lambda M: {"a": t(4, 3, dtype=torch.int32)},
    "a wrong shape": lambda M: {"a": t(2)},
    "a nested dict": lambda M: {"n": {"b": t(4, 3, start=5), "d": t(4, 3)}},
    "a tuple key": lambda M: {("n", "b"): t(4, 3, 2, start=5)},
    "a new tuple key": lambda M: {("x", "y"): t(4, 3)},
    "a TensorDict": lambda M: M.td({"a": t(4, 3), "n": {"b": t(4, 3, 2, start=7)}}, [4, 3]),
    "a TensorDict with less batch": lambda M: M.td({"a": t(4, 3)}, [4]),
    "a TensorDict with another batch": lambda M: M.td({"a": t(2)}, [2]),
    "a tensor over a TensorDict": lambda M: {"n": t(4, 3)},
    "a TensorDict over a tensor": lambda M: {"a": {"q": t(4, 3)}},
    "a scalar": lambda M: {"a": 1.0},
    "text": lambda M: {"s": "hello"},
    "a list of pairs": lambda M: [("a", t(4, 3))],
    "a number": lambda M: 5,
}
for name, make in SOURCES.items():
    case(f"update {name}", _update("nested", make))
    case(f"update in place {name}", _update("nested", make, inplace=True))
    case(f"update with clone {name}", _update("nested", make, clone=True))
    case(f"update of locked {name}", after("nested", lambda M, td, make=make: td.lock_().update(make(M))))
    case(f"update_ {name}", _update_("nested", make))
    case(f"update_ of locked {name}", after("nested", lambda M, td, make=make: td.lock_().update_(make(M))))
    case(f"replace {name}", lambda M, make=make: M.sample("nested").replace(make(M)))
    case(f"update keys_to_update {name}", _update("nested", make, keys_to_update=["a", ("n", "b")]))
case("update with keywords", after("flat", lambda M, td: td.update(a=t(5, start=2), c=t(5))))
case("update returns self", lambda M: (lambda td: td.update({"a": t(5)}) is td)(M.sample("flat")))
case("update keeps nested identity", identity("nested", "n", lambda M, td: td.update({"n": {"d": t(4, 3)}})))
case("update by TensorDict keeps nested identity", identity("nested", "n", lambda M, td: td.update(M.sample("nested"))))
case("update stores the object", lambda M: (lambda x, td: td.update({"a": x})["a"] is x)(t(5), M.sample("flat")))
case(
    "update with clone copies",
    lambda M: (lambda x, td: td.update({"a": x}, clone=True)["a"] is x)(t(5), M.sample("flat")),
)
case(
    "update in place keeps the tensor",
    identity("flat", "a", lambda M, td: td.update({"a": t(5, start=4)}, inplace=True)),
)
case("update_ keeps the tensor", identity("flat", "b", lambda M, td: td.update_({"b": t(5, 3) + 0.7})))
case("update_batch_size", after("nested", lambda M, td: td.update(M.td({"a": t(2)}, [2]), update_batch_size=True)))
case("replace with keywords", lambda M: M.sample("flat").replace(a=t(5, start=3)))
case("replace by nothing is self", lambda M: (lambda td: td.replace({}) is td)(M.sample("flat")))
case("replace leaves the source", lambda M: (lambda td: (td.replace({"a": t(5, start=3)}), td))(M.sample("flat")))

# --- rename, pop, clear ---
for old, new in [
    ("a", "z"),
    ("a", "b"),
    ("a", "a"),
    ("a", ("n", "a")),
    (("n", "b"), "b"),
    (("n", "b"), ("n", "q")),
    (("n", "m"), "m"),
    ("missing", "z"),
    ("n", "q"),
    (("n", "b"), ("p", "q")),
    ("a", "n"),
]:
    case(f"rename {old} to {new}", after("nested", lambda M, td, o=old, n=new: td.rename_key_(o, n)))
    case(f"safely rename {old} to {new}", after("nested", lambda M, td, o=old, n=new: td.rename_key_(o, n, safe=True)))
case("rename_key_ returns self", lambda M: (lambda td: td.rename_key_("a", "z") is td)(M.sample("flat")))
case("popitem", after("flat", lambda M, td: td.popitem()))
case("popitem of nested", after("nested", lambda M, td: td.popitem()))
case("popitem of empty", after("empty", lambda M, td: td.popitem()))
case("clear", after("nested", lambda M, td: td.clear()))
case("del the last nested leaf", after("deep_batch", lambda M, td: td.del_(("n", "b")).del_(("n", "c"))))
case("filter_empty_", lambda M: M.td({"a": t(2), "n": {}, "m": {"k": {}}}, [2]).filter_empty_())

# --- zero_, fill_ ---
for sample in ("flat", "nested", "named", "scalar", "deep_batch"):
    case(f"zero_ {sample}", after(sample, lambda M, td: td.zero_()))
case("zero_ keeps tensors", identity("flat", "a", lambda M, td: td.zero_()))
case("fill_ keeps the tensor", identity("flat", "a", lambda M, td: td.fill_("a", 3)))
case("fill_ a nested td", after("nested", lambda M, td: td.fill_("n", 1)))


@case.parametrize
def test_access(case: Case) -> None:
    case.check()
