"""Pickles of leaves by their bytes give back what torch's pickles of tensors do."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tdstore import TensorDict, UnbatchedTensor
from tdstore.errors import CorruptStoreError
from tdstore.tensordicts.resident.leaf_pickles import LeafStorage, from_bytes

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16, torch.complex64,
]  # fmt: skip


def values(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)


def read_again(td: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(td, protocol))


def by_bytes(td: TensorDict) -> list[str]:
    """Which leaves go into a pickle by their bytes."""
    _, (_, data, *_) = td.__reduce_ex__(4)
    return [key for key, leaf in data.items() if isinstance(leaf, LeafStorage)]


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_protocol(dtype: torch.dtype, protocol: int) -> None:
    td = TensorDict({"a": values(dtype), "n": {"b": values(dtype)[:, :1].clone()}, "none": values(dtype)[:, :0]}, [2])
    made = read_again(td, protocol)
    for key in ("a", ("n", "b"), "none"):
        assert made[key].dtype is dtype and made[key].shape == td[key].shape
        assert torch.equal(made[key], td[key])
    assert made.batch_size == td.batch_size and list(made.keys()) == list(td.keys())


def test_what_is_read_has_memory_of_its_own() -> None:
    data = pickle.dumps(TensorDict({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)}, [2]))
    one, two = pickle.loads(data), pickle.loads(data)
    one["a"].zero_()
    assert two["a"].sum() == 15 and two["a"].untyped_storage().resizable()
    assert two["a"].untyped_storage().nbytes() == 24 and two["b"].untyped_storage().nbytes() == 8


def test_state_around_the_leaves() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.ones(2)}}, [2], device="cpu", names=["t"]).lock_()
    made = read_again(td)
    assert made.is_locked and made["n"].is_locked and made.names == ["t"] and made.device == torch.device("cpu")


def test_a_tensor_that_others_refer_to_stays_one_object() -> None:
    leaf = torch.ones(2)
    td = TensorDict({"a": leaf, "b": leaf, "c": torch.zeros(2)}, [2])
    assert by_bytes(td) == ["c"]
    made, outside = read_again((td, leaf))
    assert made["a"] is made["b"] is outside and torch.equal(outside, leaf)
    made, nested = read_again((td, TensorDict({"x": td["c"]}, [2])))
    assert made["c"] is nested["x"]


def test_a_tensor_of_the_tensordict_alone_goes_by_its_bytes() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3).long()}, [2])
    assert by_bytes(td) == ["a", "b"]


@pytest.mark.parametrize(
    "leaf",
    [
        lambda: torch.ones(2, 3).requires_grad_(),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.arange(6.0).reshape(3, 2).T,
        lambda: torch.arange(8.0)[2:4],
        lambda: torch.ones(1).expand(2),
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch._neg_view(torch.ones(2)),
        lambda: torch.ones(2, device="meta"),
        lambda: UnbatchedTensor(torch.ones(5)),
    ],
    ids=["grad", "parameter", "transposed", "part", "expanded", "sparse", "conjugate", "negated", "meta", "unbatched"],
)
def test_other_leaves_are_pickled_by_torch(leaf: Any) -> None:
    td = TensorDict({"a": leaf()}, [2])
    assert by_bytes(td) == []
    made, want = read_again(td)["a"], td["a"]
    assert type(made) is type(want) and made.requires_grad == want.requires_grad and made.layout is want.layout
    assert made.shape == want.shape and made.device == want.device
    if not want.is_meta:
        assert torch.equal(made.to_dense() if made.is_sparse else made, want.to_dense() if want.is_sparse else want)
    if want.layout is torch.strided:
        assert made.stride() == want.stride()


def test_attributes_of_a_tensor() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    td["a"].note = "mine"  # type: ignore[attr-defined]
    assert by_bytes(td) == [] and read_again(td)["a"].note == "mine"


class Named(TensorDict):
    __slots__ = ()


def test_a_subclass_comes_back() -> None:
    assert type(read_again(Named({"a": torch.ones(2)}, [2]))) is Named


def test_copies_without_a_pickle() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    function, parts = td.__reduce_ex__(4)
    assert torch.equal(function(*parts)["a"], td["a"])
    assert copy.copy(td)["a"] is td["a"] and torch.equal(copy.deepcopy(td)["a"], td["a"])


@pytest.mark.parametrize(("name", "data"), [("float32", b"12345"), ("object", b""), ("int64", 8), ([], b"")])
def test_what_is_no_pickle_of_ours(name: Any, data: Any) -> None:
    with pytest.raises((CorruptStoreError, TypeError)):
        from_bytes(name, data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_torch_save_has_storages(protocol: int) -> None:
    file = io.BytesIO()
    both = torch.ones(4)
    torch.save(TensorDict({"a": torch.arange(3.0), "b": both, "c": both.view(4)}), file, pickle_protocol=protocol)
    file.seek(0)
    made = torch.load(file, weights_only=False)
    assert torch.equal(made["a"], torch.arange(3.0)) and made["b"].data_ptr() == made["c"].data_ptr()
    file.seek(0)
    assert torch.load(file, weights_only=False, map_location="meta")["a"].is_meta
