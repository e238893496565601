"""Conversions as the peer does them. Where ours differ on purpose, tests/convert says so."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pandas
import torch

from tests.peer import tensordict

from .cases import Case, Cases
from .structures import t

case = Cases()
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    a: Any
    s: str
    n: Any = None


def record() -> Record:
    return Record(t(3), "hi", Record(t(3, 2), "in"))


def dogs() -> Any:
    return np.array([(9, 81.0, (1, [2, 3])), (3, 27.0, (4, [5, 6]))], dtype=[("age", "i4"), ("w", "f4")] + INNER)[
        ["age", "w"]
    ]


INNER: list[Any] = [("n", [("b", "i8"), ("c", "f8", (2,))])]
MIXED = {"a": [1, 2, 3], "s": "x", "l": ["u", "v", "w"], "none": None, "d": {"e": 1.5, "t": (1, 2)}, "set": {1}}
SOURCES: dict[str, Any] = {
    "mixed": lambda: {**MIXED, "arr": np.arange(3), "pair": Pair(t(3), [1, 2]), "record": record()},
    "tensors": lambda: {"a": t(3, 4), "d": {"e": t(3, 5)}},
    "tuple": lambda: (t(3), [1, 2, 3], "s", (1, 2)),
    "pair": lambda: Pair(t(3), Pair(1, "s")),
    "record": record,
    "struct": dogs,
    "empty": dict,
}
for name, source in SOURCES.items():
    case(f"from_any {name}", lambda M, f=source: M.TensorDict.from_any(f()))
    case(f"from_any {name} auto", lambda M, f=source: M.TensorDict.from_any(f(), auto_batch_size=True))
    case(f"from_any {name} device", lambda M, f=source: M.TensorDict.from_any(f(), device="cpu"))
case("from_any dims", lambda M: M.TensorDict.from_any(SOURCES["tensors"](), auto_batch_size=True, batch_dims=0))
case("from_any batch", lambda M: M.TensorDict.from_any(SOURCES["tensors"](), batch_size=[3]))
for i, top in enumerate([3, 2.5, "s", {1}, None, True, [1, 2], ["a", "b"], [1.5, "a"], [[1, 2], [3, 4]], [], [None]]):
    case(f"from_any top {i}", lambda M, v=top: M.from_any(v))
case("from_any same", lambda M: (lambda td: M.from_any(td) is td)(M.sample("nested")))
case(
    "from_any values tell the batch",
    lambda M: M.TensorDict.from_any({"a": t(3), "l": ["u", "v"]}, auto_batch_size=True),
)
case("from_any empty below", lambda M: M.TensorDict.from_any({"a": t(3), "e": {}}, auto_batch_size=True))

case("from_dataclass", lambda M: M.TensorDict.from_dataclass(record()))
case("from_dataclass auto", lambda M: M.TensorDict.from_dataclass(record(), auto_batch_size=True))
case("from_dataclass of a number", lambda M: M.TensorDict.from_dataclass(3))
case("from_namedtuple", lambda M: M.TensorDict.from_namedtuple(Pair(t(3), Pair(1, "s"))))
case("from_namedtuple free", lambda M: M.from_namedtuple(Pair(t(3), t(3)), auto_batch_size=True))
case("from_namedtuple dict", lambda M: M.from_namedtuple({"a": 1}))
case("from_tuple", lambda M: M.TensorDict.from_tuple((t(3), (1, 2), "s", [1, 2], ["a", "b"], {"a": 1})))
case("from_tuple list", lambda M: M.TensorDict.from_tuple([t(3), (1, 2)]))
case("from_tuple pair", lambda M: M.from_tuple(Pair(1, 2)))
case("from_dict free", lambda M: M.from_dict({"a": t(3), "b": {"c": t(3)}}, auto_batch_size=True))
case("from_dict free batch", lambda M: M.from_dict({"a": t(3), "b": {"c": t(3)}}, batch_size=[3], device="cpu"))
case("fromkeys free", lambda M: M.fromkeys(["a", ("b", "c")], 3))
case("make_tensordict", lambda M: M.make_tensordict({"a": t(3)}, auto_batch_size=True))
case("make_tensordict batch", lambda M: M.make_tensordict(a=t(3), batch_size=[3], device="cpu"))
for how in ({}, {"batch_size": [3]}, {"auto_batch_size": True}, {"batch_size": [3], "names": ["x"]}):
    case(
        f"from_dict_instance {how}",
        lambda M, h=how: M.td({"a": t(3)}).from_dict_instance({"a": t(3), "n": {"b": t(3)}}, **h),
    )
rows = [{"a": t(2), "s": "x"}, {"a": t(2) + 1, "s": "y"}]
case("from_list", lambda M: M.TensorDict.from_list(rows))
case("from_list batch", lambda M: M.TensorDict.from_list(rows, batch_size=[2, 2]))
case("from_list auto", lambda M: M.TensorDict.from_list(rows, auto_batch_size=True))
case("from_list lazy", lambda M: M.TensorDict.from_list(rows, lazy=True).tolist(convert_tensors=True))
case("from_list uneven", lambda M: type(M.TensorDict.from_list([{"a": t(1)}, {"a": t(2)}])).__name__)
case("from_list uneven dense", lambda M: M.TensorDict.from_list([{"a": t(1)}, {"a": t(2)}], lazy=False))
case("from_list nothing", lambda M: M.TensorDict.from_list([]))
case("from_list numbers", lambda M: M.TensorDict.from_list([1, 2]))

for sample in ("flat", "nested", "scalar", "text", "deep_batch"):
    case(f"tolist {sample}", lambda M, s=sample: M.sample(s).tolist())
    case(f"tolist numbers {sample}", lambda M, s=sample: M.sample(s).tolist(convert_tensors=True))
    case(f"tolist first {sample}", lambda M, s=sample: M.sample(s).tolist(tolist_first=True))
    case(f"to_dict first {sample}", lambda M, s=sample: M.sample(s).to_dict(tolist_first=True))
    case(f"numpy {sample}", lambda M, s=sample: M.sample(s).exclude(("n", "none")).numpy())
    case(f"to_namedtuple {sample}", lambda M, s=sample: M.sample(s).to_namedtuple()._asdict().keys())
case("tolist nodes", lambda M: M.sample("nested").tolist(convert_nodes=False))
case("tolist numpy", lambda M: M.sample("wide").tolist(convert_tensors="numpy"))
case("to_dict numpy", lambda M: M.sample("wide").to_dict(convert_tensors="numpy"))
case("numpy of bfloat16", lambda M: M.td({"a": t(3).bfloat16()}).numpy())
case("numpy of a gradient", lambda M: M.td({"a": t(3).requires_grad_()}).numpy())
case("to_namedtuple class", lambda M: M.td({"x": t(3), "y": 1}).to_namedtuple(Pair)._asdict())
case("to_namedtuple other class", lambda M: M.td({"x": t(3), "z": 1}).to_namedtuple(Pair))
case("to_namedtuple no identifier", lambda M: M.td({"a.b": t(3)}).to_namedtuple())
case("to_namedtuple names below", lambda M: type(M.sample("scalar").to_namedtuple().n).__name__)

for i, tree in enumerate([[1, (2, {"a": t(3)})], (t(3), [t(2)]), {"a": [t(3)], "b": ()}, Pair(t(3), t(2)), [], {}, ()]):
    case(f"pytree {i}", lambda M, v=tree: M.TensorDict.from_pytree(v).to_pytree())
case("pytree leaf", lambda M: [M.from_pytree(t(3)), M.from_pytree(3)])
case("pytree batch", lambda M: M.from_pytree({"a": t(3), "b": [t(3)]}, batch_size=[3]).batch_size)
case("to_pytree of others", lambda M: (lambda td: td.to_pytree() is td)(M.sample("nested")))

case("from_struct_array", lambda M: M.from_struct_array(dogs()))
case("from_struct_array batch", lambda M: M.from_struct_array(dogs().reshape(1, 2)))
case("from_struct_array other batch", lambda M: M.from_struct_array(dogs(), batch_size=[]))
case("from_struct_array of numbers", lambda M: M.from_struct_array(np.arange(3)))
for sample in ("flat", "wide", "nested"):
    case(f"to_struct_array {sample}", lambda M, s=sample: plain(M.sample(s).to_struct_array()))
case("to_struct_array text", lambda M: plain(M.td({"s": ["a" * 20, "b"], "o": "one"}, [2]).to_struct_array()))
case("to_struct_array bfloat16", lambda M: M.td({"a": t(3).bfloat16()}, [3]).to_struct_array())


def plain(array: Any) -> object:
    return str(array.dtype), str(array.tolist())


def frame() -> Any:
    dates = pandas.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"])
    return pandas.DataFrame({"a": [1, 2, 3], "b": [1.0, 2.0, None], "n.c": [True, False, True], "d": dates})


case("from_pandas", lambda M: M.from_pandas(frame()))
case("from_pandas separator", lambda M: M.TensorDict.from_pandas(frame(), separator="."))
case("from_pandas dtype", lambda M: M.from_pandas(frame()[["a", "b"]], dtype=torch.float64))
case("from_pandas batch", lambda M: M.from_pandas(frame(), batch_size=[]))
case("from_pandas auto", lambda M: M.from_pandas(frame(), auto_batch_size=True))
case("from_pandas missing ints", lambda M: M.from_pandas(pandas.DataFrame({"a": pandas.array([1, None], "Int64")})))
case("from_pandas column 0", lambda M: M.from_pandas(pandas.DataFrame({0: [1, 2]})))


def table(M: Any) -> Any:
    return M.td({"a": t(3, dtype=torch.int64), "n": {"c": t(3) * 1.5}, "s": ["x", "y", "z"], "one": "1"}, [3])


case("to_pandas", lambda M: table(M).to_pandas(separator="_").to_dict("list"))
case("to_pandas dtypes", lambda M: [str(d) for d in table(M).to_pandas(separator=".").dtypes])
case("to_pandas nested", lambda M: table(M).to_pandas())
case("to_csv nested", lambda M: table(M).to_csv("unwritten.csv"))

case("pad", lambda M: M.pad(M.sample("nested"), [0, 2, 1, 1], value=-1))
case("pad in place", lambda M: (lambda td: M.pad(td, [0, 2], inplace=True) is td)(M.sample("flat")))
case("pad too much", lambda M: M.pad(M.sample("flat"), [0, 2, 1, 1]))


def leaves(td: Any) -> Any:
    return {k: td[k] for k in sorted(td.keys(True, True), key=str)}


def sequences(M: Any) -> Any:
    return [M.td({"a": t(i + 1, 3), "n": {"b": t(i + 1, dtype=torch.int64)}}, [i + 1]) for i in range(3)]


case("pad_sequence", lambda M: leaves(M.pad_sequence(sequences(M))))
case("pad_sequence value", lambda M: leaves(M.pad_sequence(sequences(M), padding_value=-1)))
case("pad_sequence mask", lambda M: leaves(M.pad_sequence(sequences(M), return_mask=True)))
case("pad_sequence mask key", lambda M: leaves(M.pad_sequence(sequences(M), return_mask=("m", "k"))))
case("pad_sequence dim", lambda M: M.pad_sequence([M.td({"a": t(2, i + 1)}, [2]) for i in range(2)], pad_dim=1))
case("pad_sequence batch dim", lambda M: M.pad_sequence([M.td({"a": t(2, i)}, [2, i]) for i in (1, 2)], pad_dim=1))
case("pad_sequence of other keys", lambda M: M.pad_sequence([M.td({"a": t(2)}), M.td({"b": t(2)})]))
case("pad_sequence of nothing", lambda M: M.pad_sequence([]))


def padded_into(M: Any) -> Any:
    out = M.td({"a": torch.zeros(3, 3, 3), "n": {"b": torch.zeros(3, 3, dtype=torch.int64)}}, [3, 3])
    return M.pad_sequence(sequences(M), out=out) is out, out


case("pad_sequence out", padded_into)


def twins(M: Any) -> Any:
    return M.td({"a": 1, "b": {"c": 1}}), M.td({"a": 2, "b": {"d": 1}})


case("merge", lambda M: leaves(M.merge_tensordicts(*twins(M))))
case("merge sum", lambda M: leaves(M.merge_tensordicts(*twins(M), callback_exist=lambda *v: sum(v))))
case("merge by key", lambda M: leaves(M.merge_tensordicts(*twins(M), callback_exist={"a": lambda *v: torch.stack(v)})))
case(
    "merge three",
    lambda M: leaves(
        M.merge_tensordicts(
            *twins(M), M.td({"a": 5, "b": {"c": 7}}), callback_exist={("b", "c"): max, "a": lambda *v: torch.stack(v)}
        )
    ),
)
case("merge one", lambda M: M.merge_tensordicts(twins(M)[0]))
case("merge leaves the first alone", lambda M: (lambda a, b: (M.merge_tensordicts(a, b) is a, leaves(a)))(*twins(M)))

case("dense_stack_tds", lambda M: M.dense_stack_tds([M.sample("flat"), M.sample("flat")], dim=1))
case("dense_stack_tds lazy", lambda M: M.dense_stack_tds(M.lazy_stack([M.sample("flat"), M.sample("flat")], 1)))
case("dense_stack_tds no dim", lambda M: M.dense_stack_tds([M.sample("flat"), M.sample("flat")]))
case("dense_stack_tds uneven", lambda M: M.dense_stack_tds([M.td({"a": t(2)}), M.td({"a": t(3)})], dim=0))

case("close", lambda M: M.assert_close(M.sample("nested"), M.sample("nested")))
case("close by atol", lambda M: M.assert_close(M.sample("cube"), M.sample("cube") + 1, atol=1.5, rtol=0))
case("close keys", lambda M: M.assert_close(M.sample("flat"), M.sample("flat").set("c", t(5))))
case(
    "close intersection", lambda M: M.assert_close(M.sample("flat"), M.sample("flat").set("c", t(5)), intersection=True)
)
case("close of tensors", lambda M: M.assert_close(t(3), t(3)))
case("close lazy", lambda M: M.assert_allclose_td(*[M.lazy_stack([M.td({"a": t(i)}) for i in (1, 2)])] * 2))
for name, change in {"values": lambda td: td + 1, "dtype": lambda td: td.to(torch.float64)}.items():

    def fails(M: Any, change: Any = change) -> Any:
        try:
            return M.assert_close(M.sample("wide"), change(M.sample("wide")))
        except AssertionError as error:
            return "'a'" in str(error)

    case(f"close fails by {name}", fails)

INDICES = [(0,), (slice(1), ..., None), ("a", 0), ("a", ("b", 1)), 0, [0], ...]
for i, key in enumerate(["a", ("a",), ("a", "b"), (("a", "b"), "c"), ("a", ("b", ("c",))), (), "", None, *INDICES]):
    case(f"unravel_key {i}", lambda M, k=key: M.unravel_key(k))
for i, keys in enumerate([["a", ("b",)], ("a", ("b", "c")), [], (), "abc", [3]]):
    case(f"unravel_key_list {i}", lambda M, k=keys: M.unravel_key_list(k))
case("default_is_leaf", lambda M: [M.default_is_leaf(c) for c in (torch.Tensor, M.TensorDict, M.NonTensorData, int)])
case("is_batchedtensor", lambda M: (M.is_batchedtensor(t(3)), torch.vmap(lambda x: x + M.is_batchedtensor(x))(t(3))))
for sample in ("flat", "deep_batch", "on_cpu", "text"):
    case(f"parse {sample}", lambda M, s=sample: repr(M.parse_tensor_dict_string(repr(M.sample(s)))))
case("parse nonsense", lambda M: M.parse_tensor_dict_string("x"))

case("new_tensor", lambda M: M.sample("on_cpu").new_tensor(t(2)))
case("new_tensor td", lambda M: M.sample("wide").new_tensor(M.sample("wide")[:2] + 1, dtype=torch.float16))
case("new_tensor td lacks a key", lambda M: M.sample("wide").new_tensor(M.sample("wide").select("a")))
case("as_tensor", lambda M: M.sample("text").as_tensor())


def gradients(M: Any, program: Any) -> Any:
    x = M.td({"a": t(3).requires_grad_(), "n": {"b": (t(3) + 1).requires_grad_()}}, [3])
    program(x)
    return x.grad


case("backward", lambda M: gradients(M, lambda x: (x * x).sum().backward()))
case("backward of rows", lambda M: gradients(M, lambda x: (x * x).backward()))
case("backward with gradients", lambda M: gradients(M, lambda x: (x * x).backward(x.detach() + 1)))
case("backward to inputs", lambda M: gradients(M, lambda x: (x * x).backward(x.detach(), inputs=x)))
case("backward of constants", lambda M: M.sample("flat").backward())
case("clear_refs_for_compile_", lambda M: (lambda td: td.clear_refs_for_compile_() is td)(M.sample("nested")))


def switched(M: Any) -> Any:
    seen = [M.get_defaults_to_none()]
    M.set_get_defaults_to_none(False)
    try:
        td = M.sample("nested")
        seen.append(M.get_defaults_to_none())
        for get in (
            lambda: td.get("z"),
            lambda: td.get(("n", "z")),
            lambda: td.get_at("z", 0),
            lambda: td.get("z", None),
        ):
            seen.append(M.attempt(get))
    finally:
        M.set_get_defaults_to_none(True)
    return seen, M.sample("nested").get("z")


case("set_get_defaults_to_none", switched)


OPTIONS: list[dict[str, Any]] = [
    {"verbose": False},
    *({name: True} for name in ("show_grad", "show_is_contiguous", "show_is_view", "show_storage_size", "plain")),
    {"show_batch_size": False, "show_shape": False},
    {"sort_keys": None},
]


def shown(M: Any, options: dict[str, Any]) -> Any:
    td = M.td({"b": t(3).requires_grad_() * 1, "a": torch.ones(3, 2)[:, 0], "n": {"c": torch.zeros(3)}, "s": "x"}, [3])
    known = tensordict.get_printoptions().keys()  # before 0.15 the peer has neither `compact` nor `html`
    with M.set_printoptions(**options):
        inside = {key: value for key, value in M.get_printoptions().items() if key in known}
        # Of a stack that is not made ours says nothing of memory; the peer makes it.
        live = options.keys() - {"verbose", "show_batch_size", "show_shape", "sort_keys"}
        stack = None if live else M.lazy_stack([M.sample("wide"), M.sample("wide")])
        text = repr(td), repr(M.sample("flat")), repr(stack)
    return text, inside, {key: value for key, value in M.get_printoptions().items() if key in known}


for options in OPTIONS:
    case(f"print {options}", lambda M, o=options: shown(M, o))
case("print wrongly", lambda M: M.set_printoptions(foo=1))


@case.parametrize
def test_convert(case: Case) -> None:
    case.check()
