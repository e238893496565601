"""Arguments that no method can take: an error of ours that names the argument, on every container, and no change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    ArgumentKindError,
    BatchSizeError,
    DeviceError,
    IndexKindError,
    InvalidArgumentError,
    InvalidTypeError,
    NotAGroupError,
    OutOfRangeError,
    TDStoreError,
    UnknownBackendError,
)

from .containers import KINDS, floats

LEAVES = {"a": torch.zeros(4, 2, 3), "n": {"c": torch.zeros(4, 2)}}
MASK = torch.ones(4, 2, dtype=torch.bool)


KINDS_HERE = ["TensorDict", "memmap", "lazy 0", "h5", "window"]


@pytest.fixture(params=KINDS_HERE)
def td(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return KINDS[request.param](floats(), tmp_path, None).td


CALLS: dict[str, tuple[Callable[[Any], Any], type[TDStoreError], str]] = {
    "apply to a dict": (
        lambda td: td.apply(torch.add, LEAVES),
        InvalidTypeError,
        "beside the function must be a TensorDict, not a dict\nHint: .*makes one of it",
    ),
    "apply_ to a tensor": (
        lambda td: td.apply_(torch.add, torch.ones(3)),
        InvalidTypeError,
        "not a Tensor",
    ),
    "named_apply to None": (lambda td: td.named_apply(torch.add, None), InvalidTypeError, "a TensorDict, not None"),
    "apply with another tree": (
        lambda td: td.apply(lambda a, b: a, TensorDict({"a": torch.ones(4, 2), "n": torch.ones(4, 2)}, [4, 2])),
        NotAGroupError,
        "the entry 'n' is a TensorDict",
    ),
    "apply into a dict": (lambda td: td.apply(torch.neg, out={}), InvalidTypeError, "out must be a TensorDict"),
    "apply with names": (lambda td: td.apply(torch.neg, names=3), InvalidTypeError, "names must be a sequence"),
    "where into a dict": (
        lambda td: td.where(MASK, 0, out={}),
        InvalidTypeError,
        "out must be a TensorDict",
    ),
    "where of a list": (lambda td: td.where([True] * 4, 0), InvalidTypeError, "condition must be a bool tensor"),
    "where with a string": (lambda td: td.where(MASK, "x"), InvalidTypeError, "combined with a str"),
    "mask of numpy": (
        lambda td: td.masked_select(np.ones(4, bool)),
        InvalidTypeError,
        "an ndarray\nHint: torch",
    ),
    "mask of None": (lambda td: td.masked_fill(None, 0), InvalidTypeError, "the mask must be a bool tensor, not None"),
    "mask in place": (lambda td: td.masked_fill_([True] * 4, 0), InvalidTypeError, "must be a bool tensor, not a list"),
    "sum with strings": (lambda td: td + np.full(4, "x"), InvalidTypeError, "is no tensor or number for the leaves"),
    "sum with None": (lambda td: td + None, InvalidTypeError, "combined with None: pass a number"),
    "sum with a list": (lambda td: td + [1, 2, 3, 4], InvalidTypeError, "combined with a list"),
    "in place": (lambda td: td.mul_(object()), InvalidTypeError, "combined with an object"),
    "maximum": (lambda td: td.maximum(None), InvalidTypeError, "combined with None"),
    "another batch": (lambda td: td + torch.ones(5), BatchSizeError, r"shape \[5\] cannot be broadcast to batch"),
    "stack into a string": (lambda td: TensorDict.stack([td, td], out="x"), InvalidTypeError, "out must be a Tens"),
    "stack of None": (lambda td: TensorDict.stack([td, None]), InvalidTypeError, "not with a NoneType"),
    "stack nothing": (lambda td: TensorDict.stack(None), InvalidTypeError, "a sequence of TensorDicts, not None"),
    "cat into a string": (lambda td: TensorDict.cat([td, td], out="x"), InvalidTypeError, "out must be a TensorDict"),
    "cat nothing": (lambda td: TensorDict.cat(3), InvalidTypeError, "a sequence of TensorDicts, not an int"),
    "lazy stack": (lambda td: TensorDict.lazy_stack([td], out={}), InvalidTypeError, "out must be a TensorDict"),
    "a dimension": (lambda td: td.sum(0.0), ArgumentKindError, "a dimension is a number, not 0.0"),
    "dimensions": (lambda td: td.unbind(torch.ones(5)), ArgumentKindError, "a dimension is a number"),
    "permute": (lambda td: td.permute(None), ArgumentKindError, "sizes and dimensions are ints"),
    "expand": (lambda td: td.expand(2.5), ArgumentKindError, "sizes and dimensions are ints .*not 2.5"),
    "expand_as": (lambda td: td.expand_as(None), InvalidTypeError, "must be a TensorDict, not None"),
    "split": (lambda td: td.split("a"), InvalidTypeError, "split_size must be an int or a sequence of ints, not a str"),
    "split at floats": (lambda td: td.split([2.0, 2.0]), InvalidTypeError, "split_size must be an int"),
    "chunk": (lambda td: td.chunk("a"), InvalidTypeError, "chunks must be an int, not a str"),
    "pad": (lambda td: td.pad(None), InvalidTypeError, "pad_size must be a sequence of ints, not None"),
    "pad with strings": (lambda td: td.pad(["a", "b"]), InvalidTypeError, "pad_size must be an int, not a str"),
    "gather": (lambda td: td.gather(0, np.zeros(2)), InvalidTypeError, "the index must be an int64 tensor"),
    "device": (lambda td: td.to("gpu"), DeviceError, "'gpu' is no device: Expected one of cpu, cuda"),
    "device by a float": (lambda td: td.to(device=2.5), DeviceError, "not 2.5 of type float\nHint: pass 'cpu'"),
    "flatten": (lambda td: td.flatten_keys(None), InvalidTypeError, "separator must be a string, not None"),
    "unflatten": (lambda td: td.unflatten_keys(""), InvalidArgumentError, "separator must not be empty"),
    "batch dimensions": (lambda td: td.auto_batch_size_("x"), InvalidTypeError, "batch_dims must be an int or None"),
    "rows": (lambda td: td.__setitem__(1, "x"), InvalidTypeError, "'x' is no tensor or number for entry 'a'"),
    "update": (
        lambda td: td.update_(td.clone(), keys_to_update=3),
        InvalidTypeError,
        "keys_to_update must be a key",
    ),
    "read": (lambda td: td.read(out={}), InvalidTypeError, "out must be a TensorDict, not a dict"),
    "state dict": (lambda td: td.load_state_dict(td), InvalidTypeError, "load_state_dict takes a dict"),
    "apply of None": (lambda td: td.apply(None), InvalidTypeError, "fn must be a function, not None"),
    "apply with another batch": (lambda td: td.apply("x", batch_size=[4]), InvalidTypeError, "fn must be a function"),
    "apply_ of a number": (lambda td: td.apply_(5), InvalidTypeError, "fn must be a function, not an int"),
    "named_apply of a string": (lambda td: td.named_apply("x"), InvalidTypeError, "fn must be a function, not a str"),
    "map of None": (lambda td: td.map(None, num_workers=0), InvalidTypeError, "fn must be a function, not None"),
    "workers": (lambda td: td.map(len, num_workers="x"), InvalidTypeError, "num_workers must be an int, not a str"),
    "chunks of rows": (lambda td: list(td.map_iter(len, chunksize=2.5)), InvalidTypeError, "chunksize must be an int"),
    "leaves": (lambda td: list(td.keys(True, is_leaf="x")), InvalidTypeError, "is_leaf must be a function, not a str"),
    "leaves to flatten": (lambda td: td.flatten_keys(is_leaf=3), InvalidTypeError, "is_leaf must be a function"),
    "sets of keys": (lambda td: td.split_keys(None), InvalidTypeError, "key_set must be a sequence of keys or a dict"),
    "another": (lambda td: td.to(other="x"), InvalidTypeError, "other must be a tensor or a TensorDict, not a str"),
    "a large device": (lambda td: td.to(10**30), DeviceError, "a device is a string, a number"),
    "a large GPU": (lambda td: td.cuda(10**30), DeviceError, "'cuda:1000000000000000000000000000000' is no device"),
    "permute by name": (lambda td: td.permute(dims=2.5), ArgumentKindError, "sizes and dimensions are ints"),
    "a prefix": (lambda td: td.state_dict(prefix=None), InvalidTypeError, "prefix must be a string, not None"),
    "a file": (lambda td: td.consolidate(5), InvalidTypeError, "filename must be a path, not an int"),
    "a file with a NUL": (lambda td: td.consolidate("a\0b"), InvalidArgumentError, "filename must be a path, not 'a"),
    "an index to read at": (lambda td: td.get_at("a", "x"), IndexKindError, "ints, slices.*not .*'x'"),
    "a large index": (lambda td: td.get_at("a", 10**30), OutOfRangeError, "is out of (range|bounds) for"),
    "an index to write at": (lambda td: td.set_at_("a", 0.0, "x"), IndexKindError, "ints, slices.*not .*'x'"),
    "rows to write at": (
        lambda td: td.set_at_("a", torch.ones(3), 10**30),
        OutOfRangeError,
        "is out of (range|bounds)",
    ),
    "joining": (lambda td: tdstore.merge_tensordicts(td, None), InvalidTypeError, "a TensorDict, not None"),
    "a named tuple": (lambda td: td.to_namedtuple("x"), InvalidTypeError, "dest_cls must be a function, not a str"),
    "a backend": (lambda td: td.save("somewhere", storage=3), UnknownBackendError, "no backend is named '3'"),
    "save in the wrong order": (
        lambda td: tdstore.save("run", td),
        InvalidTypeError,
        "the data to save must",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument_and_nothing_changes(td: Any, name: str) -> None:
    call, kind, text = CALLS[name]
    if name == "batch dimensions":
        td = floats()  # a stored one refuses to change its batch size before it looks
    before = td.to_tensordict()
    with pytest.raises(kind, match=text):
        call(td)
    assert (td == before).all()


INTS = TensorDict({"u": torch.zeros(4, 2, dtype=torch.uint8), "n": {"i": torch.arange(8).view(4, 2)}}, [4, 2])
NAN = float("nan")
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda td: td.__setitem__(0, NAN),
    "rows": lambda td: td.__setitem__([0, 2], NAN),
    "a mask": lambda td: td.__setitem__(MASK, 300),
    "masked_fill": lambda td: td.masked_fill(MASK, 300),
    "masked_fill_": lambda td: td.masked_fill_(MASK, NAN),
    "fill_": lambda td: td.fill_("u", 300),
    "fill_ with None": lambda td: td.fill_("u", None),
    "fill_ of a group": lambda td: td.fill_("n", NAN),
    "set_at_": lambda td: td.set_at_("u", 300, 0),
    "set_at_ of rows": lambda td: td.set_at_(("n", "i"), NAN, [0, 1]),
    "set_": lambda td: td.set_("u", 10**30),
    "beyond int64": lambda td: td.__setitem__(0, 10**30),
}
"""Numbers that the integers of an entry cannot be; the peer writes some of them as others, and torch refuses all."""


@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "lazy 0", "h5", "zarr", "window"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_an_entry_cannot_be(kind: str, name: str, tmp_path: Path) -> None:
    td = KINDS[kind](INTS.clone(), tmp_path, None).td
    with pytest.raises(ArgumentKindError, match="is no tensor or number for entry '[ui]'|for entry 'n'"):
        NUMBERS[name](td)
    assert (td == INTS).all()


def test_a_group_is_filled_as_a_whole_or_not_at_all() -> None:
    td = TensorDict({"n": {"x": torch.ones(3), "i": torch.ones(3, dtype=torch.int64)}}, [3])
    with pytest.raises(ArgumentKindError, match="for entry 'n'"):
        td.fill_("n", NAN)
    assert td["n", "x"].tolist() == [1, 1, 1]


def test_a_value_that_fits_some_elements_of_a_lazy_stack() -> None:
    td = tdstore.lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    with pytest.raises(BatchSizeError, match="cannot write shape \\[2\\]"):
        td.masked_fill_(mask, torch.ones(2))  # the first element has as many rows, the second has not
    assert not td["a"].any()
    assert td.masked_fill_(mask, torch.ones(1))["a"].tolist() == mask.float().tolist()


def test_an_unclear_flag_changes_nothing() -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    with pytest.raises(RuntimeError, match="ambiguous"):
        td.stack_tensors("a", "b", out_key="c", dim=1, keep_entries=torch.zeros(2))  # type: ignore[arg-type]
    assert set(td.keys()) == {"a", "b"}


@pytest.mark.parametrize(("length", "kind", "text"), [
    (None, InvalidTypeError, "length that resize_\\(\\) takes must be an int, not None"),
    ("x", InvalidTypeError, "must be an int, not a str"),
    (10**30, InvalidArgumentError, "cannot have length"),
    (-1, InvalidArgumentError, "a length of 0 or more"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5", "zarr"])
def test_lengths(where: str, length: Any, kind: type[TDStoreError], text: str, tmp_path: Path) -> None:
    td = KINDS[where](floats(), tmp_path, None).td.unlock_()
    with pytest.raises(kind, match=text):
        td.resize_(length)
    assert (td == floats()).all()


@pytest.mark.parametrize("batch_dims", [-1, -(10**30)])
@pytest.mark.parametrize("kind", [*KINDS_HERE, "zarr"])
def test_a_negative_number_of_batch_dimensions(kind: str, batch_dims: int, tmp_path: Path) -> None:
    td = KINDS[kind](floats(), tmp_path, None).td.unlock_()
    with pytest.raises(InvalidArgumentError, match="number of batch dimensions is 0 or more"):
        td.auto_batch_size_(batch_dims)
    assert td.batch_size == td["n"].batch_size == (4, 2)
    with pytest.raises(InvalidArgumentError, match=f"batch_dims={batch_dims}"):
        TensorDict.from_list([{"a": 1}], batch_dims=batch_dims)


def test_lists_of_no_batch_dimensions() -> None:
    td = TensorDict.from_list([{"a": torch.ones(3, 4)}], batch_dims=0, auto_batch_size=True, lazy=True)
    assert td.batch_size == (1,)


def test_numbers_of_numpy_may_stand_at_the_left(td: Any) -> None:
    assert (np.float64(2) * td == td * 2).all()
    assert (np.float32(2) - td == 2 - td).all()
    assert (np.float64(2) > td).all()


def test_arrays_act_as_tensors(td: Any) -> None:
    array = np.arange(8.0).reshape(4, 2)
    tensor = torch.from_numpy(array)
    assert (td + array == td + tensor).all()
    assert (array * td == td * tensor).all()
    assert (td.where(MASK, array) == td).all()
    assert (td.where(~MASK, array)["n", "c"] == tensor).all()
    want = td.to_tensordict().add_(tensor)
    assert (td.unlock_().add_(array) == want).all()


def test_what_the_builtin_classes_catch() -> None:
    for builtin in (RuntimeError, TypeError, ValueError):  # of torch, for an unknown device and for what is none
        with pytest.raises(builtin):
            TensorDict({}, device="gpu")
    with pytest.raises(RuntimeError):
        TensorDict({"a": torch.ones(3)}, [3]) + torch.ones(5)


@pytest.mark.parametrize("separator", [None, 3])
def test_padding_functions(separator: Any) -> None:
    with pytest.raises(InvalidTypeError, match="pad\\(\\) takes must be a TensorDict"):
        tdstore.pad(separator, [0, 1])
    with pytest.raises(InvalidTypeError, match="a sequence of TensorDicts"):
        tdstore.pad_sequence(separator)
    with pytest.raises(InvalidTypeError, match="must be a TensorDict"):
        tdstore.pad_sequence([separator])
    with pytest.raises(InvalidTypeError, match="pad_dim must be an int"):
        tdstore.pad_sequence([floats()], pad_dim="x")


@pytest.mark.parametrize("save", [tdstore.save, tdstore.memmap])
def test_values_by_themselves_are_saved(save: Callable[..., Any], tmp_path: Path) -> None:
    save(tdstore.NonTensorData("text", [2]), tmp_path / "value").close()
    save(tdstore.NonTensorStack("a", "b"), tmp_path / "stack").close()
    assert tdstore.load(tmp_path / "value").tolist() == ["text", "text"]
    assert tdstore.load(tmp_path / "stack").tolist() == ["a", "b"]
    with pytest.raises(InvalidTypeError, match="the data to save must be a TensorDict, not a str"):
        save("run", TensorDict())
