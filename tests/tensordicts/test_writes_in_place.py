"""Numbers and tensors written into entries in place: the short lanes do what torch does, or nothing at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict, errors

INDICES = [
    0, -1, slice(1, 3), slice(None, None, 2), slice(4, 1), ..., (slice(None), 1), (0, 2), (None, 2),
    [0, 2], [-1, 0], [], range(1, 3), torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64),
    torch.tensor([True, False, True, False]), torch.arange(12).reshape(4, 3) % 2 == 0, torch.zeros(4, dtype=torch.bool),
    (torch.tensor([0, 1]), torch.tensor([2, 2])), (slice(None), torch.tensor([True, False, True])),
]  # fmt: skip
NUMBERS = [0, 5, 2.5, True, -1, 127]


def entries() -> dict[str, Tensor]:
    return {
        "f32": torch.rand(4, 3), "f16": torch.rand(4, 3, 2).half(), "i64": torch.ones(4, 3, dtype=torch.int64),
        "u8": torch.ones(4, 3, 5, dtype=torch.uint8), "flag": torch.zeros(4, 3, dtype=torch.bool),
    }  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_at_an_index_is_what_torch_writes(index, number):
    mine = entries()
    if number == -1:
        del mine["u8"]  # where torch refuses it
    expected = {key: leaf.clone() for key, leaf in mine.items()}
    td = TensorDict({**mine, "n": {"below": mine["f32"].clone()}}, [4, 3])
    td[index] = number
    for key, leaf in expected.items():
        leaf[index] = number
        assert td[key] is mine[key]
        assert torch.equal(td[key], leaf), key
    assert torch.equal(td["n", "below"], expected["f32"])


@pytest.mark.parametrize("index", [4, -5, (0, 3), [4], torch.tensor([-5]), torch.ones(3, dtype=torch.bool), (0, 0, 0)])
def test_a_number_past_the_batch_is_refused(index):
    td = TensorDict(entries(), [4, 3])
    before = td.clone()
    with pytest.raises(IndexError):
        td[index] = 1
    assert all(torch.equal(td[key], before[key]) for key in before.keys())


@pytest.mark.parametrize("index", [1, slice(0, 2), [0, 2], torch.tensor([True, False, True, False])], ids=str)
def test_a_number_that_one_entry_refuses_changes_none(index):
    td = TensorDict({"first": torch.zeros(4), "last": torch.rand(4, requires_grad=True)}, [4])
    with pytest.raises(errors.GradientError):
        td[index] = 300
    assert not td["first"].any()


@pytest.mark.parametrize("index", [slice(0, 2), (slice(None),), (slice(1, 3), 0)], ids=str)
def test_a_number_for_elements_that_share_memory_changes_no_entry(index):
    td = TensorDict({"first": torch.zeros(4, 2), "last": torch.rand(1).expand(4, 2)}, [4, 2])
    with pytest.raises(errors.InvalidStateError, match="contiguous"):
        td[index] = 1
    assert not td["first"].any()


@pytest.mark.parametrize("index", [0, [0, 1], slice(0, 2), torch.tensor([True, False, False])], ids=str)
def test_a_number_that_uint8_lacks_is_refused_as_it_is_by_torch(index):
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.uint8)}, [3])
    with pytest.raises(RuntimeError, match="without overflow"):
        td["b"].clone()[index] = 300
    with pytest.raises(errors.ArgumentKindError, match="300 is no tensor or number for entry 'b'.*without overflow"):
        td[index] = 300
    assert not td["a"].any()
    td[index] = -1  # which torch takes as 255
    assert td["b"][0] == 255


def test_a_number_leaves_values_as_they_are():
    td = TensorDict({"a": torch.zeros(2), "text": ["x", "y"], "one": "z"}, [2])
    td[0] = 1
    assert td["a"].tolist() == [1, 0]
    assert list(td["text"]) == ["x", "y"]
    assert td["one"] == "z"


def test_masked_fill_takes_masks_of_fewer_dimensions():
    td = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3])
    one, two = torch.tensor([True, False]), torch.tensor([[True, False, True], [False, False, True]])
    assert torch.equal(td.masked_fill(one, 1.0)["a"], torch.zeros(2, 3, 4).masked_fill(one[:, None, None], 1.0))
    assert torch.equal(td.masked_fill(two, 1.0)["a"], torch.zeros(2, 3, 4).masked_fill(two[..., None], 1.0))


@pytest.mark.parametrize("key", ["a", ("n", "b")], ids=str)
@pytest.mark.parametrize("kind", ["memory", "locked", "memmap", "r"])
def test_set_in_place_writes_into_the_tensor(tmp_path, key, kind):
    td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3, 2)}}, [3])
    if kind == "locked":
        td.lock_()
    elif kind != "memory":
        td.save(tmp_path / "d").close()
        td = tdstore.open(tmp_path / "d", mode="r" if kind == "r" else "r+")
    leaf = td[key]
    if kind == "r":
        with pytest.raises(errors.ReadOnlyError):
            td.set_(key, torch.ones(3, 2))
        with pytest.raises(errors.ReadOnlyError):
            td.set_at_(key, torch.ones(2), 1)
        return
    td.set_(key, torch.ones(3, 2))
    td.set_at_(key, torch.full((2,), 5.0), 1)
    td.set_at_(key, torch.full((1, 2), 7.0), slice(2, None))
    assert leaf.tolist() == [[1, 1], [5, 5], [7, 7]]
    assert td[key].data_ptr() == leaf.data_ptr()
    if kind == "memmap":
        td.close()
        with tdstore.open(tmp_path / "d", verify="full") as stored:
            assert stored[key].tolist() == [[1, 1], [5, 5], [7, 7]]


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(3, 3), torch.ones(1)], ids=lambda v: str(list(v.shape)))
def test_set_in_place_refuses_other_shapes(value):
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(errors.BatchSizeError):
        td.set_("a", value)
    assert not td["a"].any()


@pytest.mark.parametrize("index", [3, -4, slice(None, None, -1)], ids=str)
def test_set_at_refuses_what_is_past_the_end(index):
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises((errors.OutOfRangeError, errors.InvalidArgumentError, IndexError, ValueError)):
        td.set_at_("a", torch.ones(()), index)
    assert not td["a"].any()


def test_a_row_of_a_lazy_stack_takes_a_tensordict_without_batch():
    elements = [TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(())}}, []) for _ in range(3)]
    stack = tdstore.lazy_stack(elements)
    kept = elements[1]["a"]
    stack[1] = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(())}}, [])
    assert kept.tolist() == [1, 1]
    assert stack["n", "b"].tolist() == [0, 1, 0]


def test_rows_are_updated_in_place_by_a_part_of_the_entries():
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
    td.update_at_(TensorDict({"a": torch.ones(2)}, [2]), slice(0, 2))
    td.update_at_(TensorDict({"a": torch.full((1,), 5.0), "b": torch.full((1,), 6.0)}, [1]), slice(2, 3))
    assert td["a"].tolist() == [1, 1, 5]
    assert td["b"].tolist() == [0, 0, 6]


ONES = TensorDict({"k": torch.ones(3), "n": {"x": torch.ones(3, 2)}}, [3])
WRITES = {
    "td[:] =": lambda td: td.__setitem__(slice(None), ONES),
    "td[0] =": lambda td: td.__setitem__(0, ONES[0]),
    "td[[0, 2]] =": lambda td: td.__setitem__([0, 2], ONES[[0, 2]]),
    "td[mask] =": lambda td: td.__setitem__(torch.tensor([True, False, True]), ONES[[0, 2]]),
    "td[0] = 1": lambda td: td.__setitem__(0, 1),
    "update_": lambda td: td.update_(ONES),
    "update_ with a dict": lambda td: td.update_({"k": ONES["k"], "n": {"x": ONES["n", "x"]}}),
    "update_at_": lambda td: td.update_at_(ONES[0], 0),
    "add_": lambda td: td.add_(1),
    "add_ of a TensorDict": lambda td: td.add_(ONES),
    "clamp_min_": lambda td: td.clamp_min_(1),
    "zero_": lambda td: td.zero_(),
    "lerp_": lambda td: td.lerp_(ONES, 0.5),
    "apply_": lambda td: td.apply_(lambda leaf: leaf.add_(1)),
    "named_apply(inplace=True)": lambda td: td.named_apply(lambda key, leaf: leaf + 1, inplace=True),
    "apply(out=)": lambda td: ONES.apply(lambda leaf: leaf, out=td),
    "apply(others, out=)": lambda td: ONES.apply(torch.add, ONES, out=td),
    "named_apply(out=)": lambda td: ONES.named_apply(lambda key, leaf: leaf, out=td),
    "stack(out=)": lambda td: torch.stack(list(ONES.unbind(0)), 0, out=td),
    "cat(out=)": lambda td: torch.cat([ONES[:1], ONES[1:]], 0, out=td),
    "gather(out=)": lambda td: ONES.gather(0, torch.tensor([2, 1, 0]), out=td),
    "where(out=)": lambda td: ONES.where(torch.tensor([True] * 3), ONES, out=td),
    "logsumexp(out=)": lambda td: ONES.unsqueeze(0).logsumexp(0, out=td),
    "map(out=)": lambda td: ONES.map(lambda part: part, 0, num_workers=0, out=td),
    "read(out=)": lambda td: ONES.read(out=td),
    "read(rows, out=)": lambda td: ONES.read([2, 1, 0], out=td),
}


class Group(tdstore.TensorClass):
    x: Tensor


def read_only(path, *, tensorclass=False):
    group = TensorDict({"x": torch.zeros(3, 2)}, [3])
    (Group.from_tensordict(group) if tensorclass else group).save(path)
    return TensorDict({"k": torch.zeros(3), "n": tdstore.open(path)}, [3])


def check_nothing_written(td, write):
    with pytest.raises(errors.ReadOnlyError):
        write(td)
    assert all((leaf == 0).all() for leaf in td.values(True, True))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("tensorclass", [False, True])
def test_nothing_is_written_beside_a_group_that_is_read_only(name, tensorclass, tmp_path):
    check_nothing_written(read_only(tmp_path / "group", tensorclass=tensorclass), WRITES[name])


@pytest.mark.parametrize("name", ["add_", "clamp_min_", "zero_"])
@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_is_written_beside_one_that_is_deeper(name, lazy, tmp_path):
    td = TensorDict({"k": torch.zeros(3), "n": read_only(tmp_path / "group")}, [3])
    check_nothing_written(tdstore.lazy_stack([TensorDict(td.to_dict(), [3]), td]) if lazy else td, WRITES[name])


@pytest.mark.parametrize("call", ["select('x', 'y')", "select('y', ('n', 'x'))", "exclude('x')", "flatten_keys()",
                                  "unsqueeze(0)", "expand(1, 3)", "flatten(0, 0)", "narrow(0, 0, 2)"])  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_views_of_what_is_read_only_are_read_only(call, nested, tmp_path):
    tree = {"x": torch.zeros(3, 2), "y": torch.zeros(3), "n": {"x": torch.zeros(3)}}
    TensorDict(tree, [3]).save(tmp_path / "group")
    td = tdstore.open(tmp_path / "group")
    if nested and "keys" not in call and "select" not in call:
        td = TensorDict({"k": torch.zeros(3), "g": td}, [3])
    view = eval(f"td.{call}")
    for write in (WRITES["add_"], WRITES["zero_"], lambda view: view.update_(view.clone().add_(1))):
        check_nothing_written(view, write)


COPIES = ["gather(0, torch.tensor([2, 1]))", "flip(0)", "roll(1, 0)", "repeat(2)", "pad([0, 1])", "[[0, 2]]"]


@pytest.mark.parametrize("call", [f".{call}" if call[0] != "[" else call for call in COPIES])
def test_copies_of_what_is_read_only_can_be_written(call, tmp_path):
    TensorDict({"x": torch.zeros(3, 2), "n": {"x": torch.zeros(3)}}, [3]).save(tmp_path / "group")
    stored = tdstore.open(tmp_path / "group")
    assert eval(f"stored{call}").add_(1)["n", "x"].all()
    assert not stored["n", "x"].any()
