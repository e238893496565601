"""Construction, conversion to and from dicts, batch size, device."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import numpy as np
import torch

from .cases import Case, Cases
from .structures import SAMPLES, t

case = Cases()

# --- constructor ---
case("nothing", lambda M: M.td())
case("empty dict", lambda M: M.td({}))
case("empty dict with batch", lambda M: M.td({}, [3, 2]))
case("positional batch size", lambda M: M.td({"a": t(3, 2)}, [3]))
case("integer batch size", lambda M: M.td({"a": t(3, 2)}, 3))
case("Size batch size", lambda M: M.td({"a": t(3, 2)}, batch_size=torch.Size([3, 2])))
case("tuple batch size", lambda M: M.td({"a": t(3, 2)}, batch_size=(3,)))
case("no batch size", lambda M: M.td({"a": t(3, 2)}))
case("keyword entries", lambda M: M.td(a=t(3), b=t(3, 1), batch_size=[3]))
case("keyword entries without batch", lambda M: M.td(a=0, b=1.5))
case("device text", lambda M: M.td({"a": t(3)}, [3], device="cpu"))
case("device object", lambda M: M.td({"a": t(3)}, [3], device=torch.device("cpu")))
case("device reaches nested", lambda M: M.td({"n": {"a": t(3)}}, [3], device="cpu"))
case("device meta", lambda M: M.td({"a": torch.empty(3, device="meta")}, [3], device="meta").device)
case("names", lambda M: M.td({"a": t(3, 2), "n": {"b": t(3, 2)}}, [3, 2], names=["x", "y"]))
case("some names", lambda M: M.td({"a": t(3, 2)}, [3, 2], names=["x", None]))
case("too few names", lambda M: M.td({"a": t(3, 2)}, [3, 2], names=["x"]))
case("equal names", lambda M: M.td({"a": t(3, 2)}, [3, 2], names=["x", "x"]))
case("locked from the start", lambda M: M.td({"a": t(3), "n": {"b": t(3)}}, [3], lock=True))
case("wrong batch size", lambda M: M.td({"a": t(3, 2)}, [4]))
case("batch size longer than a leaf", lambda M: M.td({"a": t(3)}, [3, 1]))
case("nested dict takes the batch size", lambda M: M.td({"n": {"m": {"a": t(3, 2)}}}, [3]))
case("nested dict with a wrong leaf", lambda M: M.td({"n": {"a": t(2)}}, [3]))
case("nested with a larger batch", lambda M: M.td({"n": M.td({"a": t(3, 2)}, [3, 2])}, [3]))
case("nested with a smaller batch grows", lambda M: M.td({"n": M.td({"a": t(3, 2)}, [])}, [3]))
case("nested with another batch", lambda M: M.td({"n": M.td({"a": t(2)}, [2])}, [3]))
case("an empty nested dict", lambda M: M.td({"n": {}}, [3]))
case("from a TensorDict", lambda M: M.td(M.sample("nested"), [4]))
case("from a TensorDict without batch size", lambda M: M.td(M.sample("nested")))
case("OrderedDict source", lambda M: M.td(OrderedDict(b=t(2), a=t(2)), [2]))
case("tuple keys in the source", lambda M: M.td({("n", "a"): t(3), ("n", "b"): t(3)}, [3]))
case("integer key", lambda M: M.td({1: t(3)}, [3]))
case("source of the wrong type", lambda M: M.td(5))
case("key order is kept", lambda M: M.td({"z": t(1), "a": t(1), "m": t(1)}, [1]))
case("unusual keys", lambda M: M.td({"a.b": t(1), "c/d": t(1), " ": t(1), "é": t(1), "": t(1)}, [1]))

# --- what values become ---
for name, make in {
    "int": lambda: 3,
    "float": lambda: 0.5,
    "bool": lambda: True,
    "complex": lambda: 1 + 2j,
    "numpy float64": lambda: np.float64(0.5),
    "numpy int32": lambda: np.int32(4),
    "numpy bool": lambda: np.bool_(True),
    "numpy array": lambda: np.arange(6.0).reshape(3, 2),
    "numpy uint8 array": lambda: np.arange(3, dtype=np.uint8),
    "numpy 0-d array": lambda: np.array(3.5),
    "list of ints": lambda: [1, 2, 3],
    "list of floats": lambda: [1.0, 2.0],
    "nested list": lambda: [[1, 2], [3, 4]],
    "list of bools": lambda: [True, False],
    "tuple": lambda: (1, 2),
    "dict": lambda: {"x": 1, "y": {"z": 2.0}},
    "str": lambda: "text",
    "None": lambda: None,
    "bytes": lambda: b"raw",
    "0-d tensor": lambda: torch.tensor(3),
    "empty dict": dict,
    "parameter": lambda: torch.nn.Parameter(t(3)),
}.items():
    case(f"a {name} as value", lambda M, make=make: M.td({"a": make()}))
    case(f"a {name} set later", lambda M, make=make: M.td({}).set("a", make()))
case("list of str is a stack", lambda M: M.td({"a": ["x", "y"]}, [2]))
case("list of str of the wrong length", lambda M: M.td({"a": ["x", "y"]}, [3]))
case("array with batch", lambda M: M.td({"a": np.ones((3, 2))}, [3]))
case("list with batch", lambda M: M.td({"a": [[1, 2], [3, 4]]}, [2]))
case("int in a batch", lambda M: M.td({"a": 1}, [2]))
for dtype in (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
):
    case(f"leaf of {dtype}", lambda M, dtype=dtype: M.td({"a": t(3, 2, dtype=dtype)}, [3])[1])

# --- references ---


def _stores_references(M):
    x = t(3)
    n = M.td({"b": x}, [3])
    td = M.td({"a": x, "n": n}, [3])
    return td["a"] is x, td["n"] is n, td.get(("n", "b")) is x


def _promotion_leaves_the_original(M):
    n = M.td({"b": t(3)}, [])
    td = M.td({"n": n}, [3])
    return n.batch_size, td["n"].batch_size, td["n"] is n, td["n", "b"] is n["b"]


case("stores references", _stores_references)
case("promotion leaves the original", _promotion_leaves_the_original)

# --- dicts ---
case("from_dict", lambda M: M.TensorDict.from_dict({"a": t(3), "n": {"b": t(3, 2)}}))
case("from_dict with batch", lambda M: M.TensorDict.from_dict({"a": t(3), "n": {"b": t(3, 2)}}, batch_size=[3]))
case("from_dict auto", lambda M: M.TensorDict.from_dict({"a": t(3), "n": {"b": t(3, 2)}}, auto_batch_size=True))
case(
    "from_dict auto, capped",
    lambda M: M.TensorDict.from_dict({"a": t(3, 2), "n": {"b": t(3, 2)}}, auto_batch_size=True, batch_dims=1),
)
case(
    "from_dict with device and names",
    lambda M: M.TensorDict.from_dict({"a": t(3)}, batch_size=[3], device="cpu", names=["x"]),
)
case("from_dict of text", lambda M: M.TensorDict.from_dict({"a": t(3), "s": "hi"}, batch_size=[3]))
case("from_dict wrong batch", lambda M: M.TensorDict.from_dict({"a": t(3)}, batch_size=[4]))
case("fromkeys", lambda M: M.TensorDict.fromkeys(["a", "b", ("c", "d")]))
case("fromkeys with value", lambda M: M.TensorDict.fromkeys(["a", ("c", "d")], 3.5))
case("fromkeys of nothing", lambda M: M.TensorDict.fromkeys([]))
for sample in SAMPLES:
    case(f"to_dict {sample}", lambda M, s=sample: M.sample(s).to_dict())
    case(
        f"dict round trip {sample}",
        lambda M, s=sample: M.TensorDict.from_dict(M.sample(s).to_dict(), batch_size=M.sample(s).batch_size),
    )
    case(f"to_tensordict {sample}", lambda M, s=sample: M.sample(s).to_tensordict())
    case(f"clone {sample}", lambda M, s=sample: M.sample(s).clone())
    case(f"shallow clone {sample}", lambda M, s=sample: M.sample(s).clone(False))
    case(f"clone of locked {sample}", lambda M, s=sample: M.sample(s).lock_().clone())
    case(f"copy {sample}", lambda M, s=sample: M.sample(s).copy())
    case(f"copy.copy {sample}", lambda M, s=sample: copy.copy(M.sample(s)))
    case(f"deepcopy {sample}", lambda M, s=sample: copy.deepcopy(M.sample(s)))
    case(f"pickle {sample}", lambda M, s=sample: pickle.loads(pickle.dumps(M.sample(s))))
    case(f"pickle locked {sample}", lambda M, s=sample: pickle.loads(pickle.dumps(M.sample(s).lock_())))
    case(f"contiguous {sample}", lambda M, s=sample: M.sample(s).contiguous())
    case(f"cpu {sample}", lambda M, s=sample: M.sample(s).cpu())
    case(f"to float64 {sample}", lambda M, s=sample: M.sample(s).to(torch.float64))
    case(f"to cpu {sample}", lambda M, s=sample: M.sample(s).to("cpu"))
    case(f"empty {sample}", lambda M, s=sample: M.sample(s).empty())
    case(f"empty recursive {sample}", lambda M, s=sample: M.sample(s).empty(recurse=True))
    case(
        f"sizes {sample}",
        lambda M, s=sample: [
            getattr(M.sample(s), n)
            for n in ("batch_size", "shape", "batch_dims", "ndim", "device", "names", "is_locked")
        ],
    )
    case(
        f"measures {sample}",
        lambda M, s=sample: [
            getattr(M.sample(s), n)() for n in ("numel", "dim", "ndimension", "size", "is_empty", "is_contiguous")
        ],
    )
    case(f"depth {sample}", lambda M, s=sample: M.sample(s).depth)
    case(f"length {sample}", lambda M, s=sample: len(M.sample(s)))
    case(f"bool {sample}", lambda M, s=sample: bool(M.sample(s)))
    case(f"iterate {sample}", lambda M, s=sample: list(M.sample(s)))

case(
    "clone copies",
    lambda M: (
        lambda td: (td.clone()["a"] is td["a"], td.clone(False)["a"] is td["a"], td.clone(False)["n"] is td["n"])
    )(M.sample("nested")),
)
case("to the same is self", lambda M: (lambda td: (td.to("cpu") is td, td.cpu() is td))(M.sample("on_cpu")))
case("to cpu without device", lambda M: (lambda td: td.to("cpu") is td)(M.sample("nested")))
case("to another dtype keeps the source", lambda M: (lambda td: (td.to(torch.float64), td))(M.sample("nested")))
case("to a dtype and device", lambda M: M.sample("nested").to("cpu", torch.float16))
case("to like a tensor", lambda M: M.sample("nested").to(torch.zeros(1, dtype=torch.float64)))
case("to like a TensorDict", lambda M: M.sample("nested").to(M.sample("on_cpu")))


def in_place(M, *args):
    td = M.sample("nested")
    nested = td["n"]
    same = td.to(*args, inplace=True) is td
    return same, td["n"] is nested, nested.device, [(x.dtype, x.device) for x in nested.values(True, True)]


for i, args in enumerate([(torch.float64,), ("meta",), ("cpu", torch.float16)]):
    case(f"to in place {i}", lambda M, args=args: in_place(M, *args))
    case(f"to in place of a locked one {i}", lambda M, args=args: M.sample("nested").lock_().to(*args, inplace=True))
case("to keyword dtype", lambda M: M.sample("nested").to(dtype=torch.int32))
case("to keyword device", lambda M: M.sample("nested").to(device="cpu"))
case("to batch_size", lambda M: M.sample("nested").to(batch_size=[4]))
case("size of a dim", lambda M: [M.sample("cube").size(i) for i in (0, 1, -1)])
case("size of a wrong dim", lambda M: M.sample("cube").size(3))
case("hash", lambda M: hash(M.sample("flat")))
case("shallow empty with another batch", lambda M: M.sample("nested").empty(batch_size=[2]))
case("empty of a named one", lambda M: M.sample("named").empty())

# --- batch size ---


def _assign_batch(size):
    def program(M, sample="nested"):
        td = M.sample(sample)
        td.batch_size = size
        return td

    return program


for size in ([4], [4, 3], [], torch.Size([4]), 4, [3], [4, 3, 2]):
    case(f"batch_size = {size}", _assign_batch(size))


def _batch_grows_nested(M):
    td = M.td({"n": M.td({"a": t(4, 3)}, [])}, [])
    td.batch_size = [4]
    return td, td["n"].batch_size


def _failed_batch_size_changes_nothing(M):
    td = M.sample("deep_batch")
    return M.attempt(lambda: setattr(td, "batch_size", [4, 3])), td


def _batch_when_locked(M):
    td = M.sample("nested").lock_()
    td.batch_size = [4]
    return td


case("batch size grows nested", _batch_grows_nested)
case("a failed batch size changes nothing", _failed_batch_size_changes_nothing)
case("batch size of a locked one", _batch_when_locked)
case("batch size with names", lambda M: (_assign_batch([4])(M, "named"), M.sample("named").names))
case("auto_batch_size_", lambda M: M.td({"a": t(4, 3, 2), "n": {"b": t(4, 3)}}).auto_batch_size_())
case("auto_batch_size_ capped", lambda M: M.td({"a": t(4, 3, 2), "n": {"b": t(4, 3)}}).auto_batch_size_(1))
case("device is read only", lambda M: setattr(M.sample("flat"), "device", "cpu"))
case("clear_device_", lambda M: M.sample("on_cpu").clear_device_())

# --- new_* and *_like ---
for name in ("new_zeros", "new_ones"):
    case(name, lambda M, n=name: getattr(M.sample("nested"), n)(2))
    case(f"{name} of a size", lambda M, n=name: getattr(M.sample("nested"), n)(torch.Size([2, 3])))
    case(f"{name} of several", lambda M, n=name: getattr(M.sample("nested"), n)(2, 5))
    case(f"{name} of a list", lambda M, n=name: getattr(M.sample("nested"), n)([2, 5]))
    case(f"{name} of nothing", lambda M, n=name: getattr(M.sample("nested"), n)([]))
    case(f"{name} dtype", lambda M, n=name: getattr(M.sample("nested"), n)(2, dtype=torch.float64))
    case(f"{name} of named", lambda M, n=name: getattr(M.sample("named"), n)(2))
    case(f"{name} of text", lambda M, n=name: getattr(M.sample("text"), n)(2))
case("new_full", lambda M: M.sample("nested").new_full((2,), 1))
case("new_full dtype", lambda M: M.sample("nested").new_full((2,), 1.5, dtype=torch.float16))
case(
    "new_empty shapes",
    lambda M: [(k, v.shape, v.dtype) for k, v in M.sample("nested").new_empty(2, 3).items(True, True)],
)
for name in ("zeros_like", "ones_like"):
    for sample in ("nested", "named", "deep_batch", "text", "on_cpu", "scalar"):
        case(f"{name} {sample}", lambda M, n=name, s=sample: getattr(torch, n)(M.sample(s)))
    case(f"{name} of locked", lambda M, n=name: getattr(torch, n)(M.sample("nested").lock_()))
    case(f"{name} dtype", lambda M, n=name: getattr(torch, n)(M.sample("nested"), dtype=torch.int16))
case("full_like", lambda M: torch.full_like(M.sample("nested"), 1))
case(
    "empty_like shapes",
    lambda M: [(k, v.shape, v.dtype) for k, v in torch.empty_like(M.sample("nested")).items(True, True)],
)
case("rand_like", lambda M: [(k, v.shape, v.dtype) for k, v in torch.rand_like(M.sample("named")).items(True, True)])


@case.parametrize
def test_construct(case: Case) -> None:
    case.check()
