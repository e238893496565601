"""Facts about all leaves, and several entries made one."""

from __future__ import annotations

from typing import Any

import pytest

import tdstore

from .cases import Case, Cases
from .oracle import OURS
from .structures import t
from .test_access import after

case = Cases()
for sample in ("flat", "nested", "named", "deep_batch", "scalar", "text", "empty", "zero_rows"):
    case(f"bytes {sample}", lambda M, s=sample: M.sample(s).bytes())
    case(f"param_count {sample}", lambda M, s=sample: M.sample(s).param_count())
    case(f"is_floating_point {sample}", lambda M, s=sample: M.sample(s).is_floating_point())
    case(f"requires_grad {sample}", lambda M, s=sample: M.sample(s).requires_grad)
    case(f"is_cpu {sample}", lambda M, s=sample: (M.sample(s).is_cpu, M.sample(s).is_cuda, M.sample(s).is_meta))
    case(f"auto_device_ {sample}", after(sample, lambda M, td: td.auto_device_()))
    case(f"detach_ {sample}", after(sample, lambda M, td: td.detach_()))


def shared_twice(M: Any) -> Any:
    x = t(3, 2)
    return M.td({"a": x, "n": {"b": x, "c": t(3)}}, [3])


def columns(M: Any) -> Any:
    return M.td({"a": t(2, 3), "b": t(2, 1), "n": {"c": t(2, 3, start=9)}}, [2])


case("bytes of duplicates", lambda M: (shared_twice(M).bytes(), shared_twice(M).bytes(count_duplicates=False)))
case("param_count of duplicates", lambda M: shared_twice(M).param_count(count_duplicates=False))
case("cat_tensors", lambda M: columns(M).cat_tensors("a", "b", out_key="o", dim=1))
case("cat_tensors nested", lambda M: columns(M).cat_tensors("a", ("n", "c"), out_key=("n", "o"), dim=-1))
case("cat_tensors keeps", lambda M: columns(M).cat_tensors("a", ("n", "c"), out_key="o", dim=1, keep_entries=True))
case("cat_tensors of another batch", lambda M: columns(M).cat_tensors("a", ("n", "c"), out_key="o", dim=0))
case("stack_tensors", lambda M: columns(M).stack_tensors("a", ("n", "c"), out_key="o", dim=1))
case("stack_tensors of two shapes", lambda M: columns(M).stack_tensors("a", "b", out_key="o", dim=1))
case("cat_from_tensordict", lambda M: columns(M).cat_from_tensordict(1))
case(
    "cat_from_tensordict sorted", lambda M: M.td({"z": t(2), "a": t(2, start=5)}, [2]).cat_from_tensordict(sorted=True)
)
case("cat_from_tensordict keys", lambda M: columns(M).exclude("n").cat_from_tensordict(1, sorted=["b", "a"]))
case("stack_from_tensordict", lambda M: M.td({"z": t(2), "a": t(2, start=5)}, [2]).stack_from_tensordict())
case("stack_from_tensordict of two shapes", lambda M: columns(M).stack_from_tensordict())
case("is_non_tensor", lambda M: [M.td({"s": "x", "a": t(1)}, []).is_non_tensor(k) for k in ("s", "a")])


def separated(*keys: Any, **kwargs: Any) -> Any:
    def program(M: Any) -> Any:
        td = columns(M)
        return td.separates(*keys, **kwargs), td

    return program


case("separates", separated("a"))
case("separates nested", separated(("n", "c"), "a"))
case("separates nested, keeping empty", separated(("n", "c"), filter_empty=False))
case("separates missing", separated("nobody"))


def gradients(M: Any) -> Any:
    td = M.td({"a": t(3).requires_grad_(), "n": {"b": t(3)}}, [3])
    before = td.grad
    (td["a"] * 2).sum().backward()
    found = td.grad
    td.zero_grad()
    return before, found["a"], td.grad, td.requires_grad


case("grad and zero_grad", gradients)


def test_what_the_peer_stumbles_over() -> None:
    td = columns(OURS)
    with pytest.raises(KeyError, match="nobody"):
        td.cat_tensors("a", "nobody", out_key="o")
    assert set(td.keys()) == {"a", "b", "n"}  # the peer has lost "a"
    td = tdstore.TensorDict({"a": t(3).requires_grad_(), "b": t(3)}, [3])
    (td["a"] * 2).sum().backward()
    td.zero_grad(set_to_none=False)
    assert td.grad["a"].tolist() == [0, 0, 0]


@case.parametrize
def test_columns(case: Case) -> None:
    case.check()


def test_addresses() -> None:
    td = shared_twice(OURS)
    found = td.data_ptr()
    assert found["a"] == found["n", "b"] == td["a"].data_ptr()
    assert found["n", "c"] != found["a"]
    assert td[1:].data_ptr(storage=True)["a"] == found["a"]
    assert td[1:].data_ptr()["a"] == found["a"] + 8


def test_sizes_of_stored_data_are_not_read(tmp_path: Any) -> None:
    from tdstore.testing import CountingStore

    kept = columns(OURS).to_h5(tmp_path / "a.h5")
    kept._handle.store = CountingStore(kept._handle.store)
    assert (kept.bytes(), kept.param_count(), kept.is_floating_point()) == (56, 14, True)
    assert kept[:1].param_count() == 7
    assert kept._handle.store.calls["read"] == 0
