"""Copies of stored TensorDicts at other places."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tdstore
from tdstore import NonTensorStack, PersistentTensorDict, TensorDict
from tdstore.errors import OptionError


@pytest.mark.parametrize(("first", "second"), [("a.h5", "b.h5"), ("a.zarr", "b.zarr"), ("a.h5", "b.zarr")])
def test_a_clone_at_another_place(tmp_path, first, second):
    td = TensorDict(a=torch.arange(3), n={"b": torch.ones(3, 2)}, s="text", batch_size=[3])
    stored = td.save(tmp_path / first)
    copy = stored.clone(newfile=tmp_path / second)
    assert isinstance(copy, PersistentTensorDict) and copy.batch_size == stored.batch_size
    copy["c"] = torch.zeros(3)
    copy.set_("a", torch.zeros(3, dtype=torch.int64))
    copy.close()
    assert stored["a"].tolist() == [0, 1, 2] and "c" not in stored.keys()
    with tdstore.open(tmp_path / second) as reopened:
        assert reopened["a"].tolist() == [0, 0, 0] and reopened["s"] == "text" and "c" in reopened.keys()
        assert reopened["n", "b"].tolist() == [[1, 1]] * 3


def test_a_clone_of_rows_at_another_place(tmp_path):
    stored = TensorDict(a=torch.arange(4), batch_size=[4]).save(tmp_path / "a.h5")
    with stored[1:3].clone(newfile=tmp_path / "b.h5") as copy:
        assert copy["a"].tolist() == [1, 2]
    with pytest.raises(OptionError, match="newfile"):
        stored.clone(recurse=False, newfile=tmp_path / "c.h5")
    assert isinstance(stored.clone(), TensorDict)


def test_a_copy_of_values_in_files_is_a_plain_stack(tmp_path):
    TensorDict({"s": NonTensorStack("a", "b", "c")}, [3]).memmap(tmp_path / "m")
    td = tdstore.open(tmp_path / "m", "r+")
    for copied in (td.clone(), td.to_tensordict(), copy.deepcopy(td), pickle.loads(pickle.dumps(td.get("s")))):
        stack = copied if isinstance(copied, NonTensorStack) else copied.get("s")
        assert type(stack) is NonTensorStack and stack.tolist() == ["a", "b", "c"]
        stack[:1] = NonTensorStack("z")
        assert stack.tolist() == ["z", "b", "c"] and td["s"] == ["a", "b", "c"]
