"""What is kept about a locked tree is what its entries say now, whatever happened since it was kept."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tdstore
from tdstore import TensorDict, TensorDictParams, lazy_stack
from tdstore.errors import LockedError


def made() -> TensorDict:
    below = TensorDict({"c": torch.ones(3, 2), "d": {"e": torch.zeros(3)}}, [3])
    return TensorDict({"b": torch.arange(12.0).reshape(3, 4), "n": below, "a": torch.ones(3)}, [3])


def locked() -> TensorDict:
    """A locked tree of which everything is known that is ever kept."""
    td = made().lock_()
    check(td)
    return td


def leaves(td: Any) -> dict[Any, torch.Tensor]:
    """The tensors by their paths, found key by key."""
    found: dict[Any, torch.Tensor] = {}
    for key in list(td.keys()):
        entry = td.get(key)
        if isinstance(entry, torch.Tensor):
            found[(key,)] = entry
        elif isinstance(entry, TensorDict):
            found.update({(key, *path): leaf for path, leaf in leaves(entry).items()})
    return found


def check(td: Any) -> None:
    """Compare what may be kept with what is there, twice: what is found out the first time is kept for the second."""
    for _ in range(2):
        there = leaves(td)
        assert [id(leaf) for leaf in td._leaf_list()] == [id(leaf) for leaf in there.values()]
        assert td.depth == max([len(path) - 1 for path in there], default=0)
        assert td.sorted_keys == sorted(td.keys())
        flat = td.flatten_keys("/")
        assert {k: id(v) for k, v in flat.items() if isinstance(v, torch.Tensor)} == {
            "/".join(path): id(leaf) for path, leaf in there.items()
        }
        assert flat.batch_size == td.batch_size and flat.names == td.names and not flat.is_locked
        assert td.requires_grad == any(leaf.requires_grad for leaf in there.values())
        assert td.is_contiguous() == all(leaf.is_contiguous() for leaf in there.values())
        before = {path: leaf.detach().clone() for path, leaf in there.items()}
        with torch.no_grad():
            td.add_(1)
            other = td.clone()
            td.mul_(other).div_(other)
            td.lerp_(other, 0.5)
            td.update_(other)
        for path, leaf in leaves(td).items():
            torch.testing.assert_close(leaf.detach(), before[path] + 1)


# -- ways to change a locked tree, or what it shares ----------------------------------------------
def change(td: TensorDict) -> None:
    td.set("new", torch.zeros(3))
    td.del_("a")
    td.set(("n", "d", "f"), torch.ones(3))
    td.rename_key_("b", "z")
    td.set(("n", "c"), torch.zeros(3, 5))


def unlocked(td: TensorDict) -> None:
    change(td.unlock_())
    check(td)
    td.lock_()


def unlocked_for_a_while(td: TensorDict) -> None:
    with td.unlock_():
        change(td)


def ignoring_the_lock(td: TensorDict) -> None:
    td.update({"new": torch.ones(3), "b": torch.zeros(3)}, ignore_lock=True)


def ignoring_the_lock_of_a_child(td: TensorDict) -> None:
    td["n", "d"].update({"new": torch.ones(3), "e": torch.ones(3)}, ignore_lock=True)


def without_parents(td: TensorDict) -> None:
    td.clear_refs_for_compile_()
    td["n"].unlock_().set("new", torch.ones(3))


def of_a_child_without_parents(td: TensorDict) -> None:
    child = td["n"]
    child.clear_refs_for_compile_()
    child["d"].unlock_().set("new", torch.ones(3))
    check(child)


def data_of_a_leaf(td: TensorDict) -> None:
    td["b"].data = torch.zeros(3, 9, dtype=torch.float64)
    td["a"].unsqueeze_(1)


def gradients(td: TensorDict) -> None:
    td.requires_grad_()


def layout_of_a_leaf(td: TensorDict) -> None:
    td["b"].t_().t_()
    td["n", "c"].data = torch.zeros(2, 3).T


def sizes_and_names(td: TensorDict) -> None:
    td["n"].batch_size = [3]
    td.names = ["rows"]
    td.batch_size = []
    td.auto_batch_size_()


def shared(td: TensorDict) -> None:
    td.share_memory_()


def state(td: TensorDict) -> None:
    td.load_state_dict(td.clone().state_dict())


def a_copy(td: TensorDict) -> None:
    for other in (td.clone(False), copy.copy(td), copy.deepcopy(td), pickle.loads(pickle.dumps(td)), td.select("n")):
        if other.is_locked:
            check(other)
        other.unlock_()
        other.set("new", torch.ones(3))
        other.lock_()
        check(other)


def flattened(td: TensorDict) -> None:
    flat = td.flatten_keys("/")
    flat["new"] = torch.ones(3)
    del flat["a"]
    flat.names = ["rows"]


def with_what_was_flattened(td: TensorDict) -> None:
    with td.unlock_(), td.flatten_keys("/") as flat:
        flat["n/new"] = torch.ones(3)


def rows(td: TensorDict) -> None:
    td.append(made())


def in_another_parent(td: TensorDict) -> None:
    outer = TensorDict({"x": td["n"], "y": torch.ones(3)}, [3]).lock_()
    check(outer)
    with pytest.raises(LockedError):
        td.unlock_()
    outer["x"].update({"new": torch.ones(3)}, ignore_lock=True)
    check(outer)


WAYS: list[Callable[[TensorDict], None]] = [
    unlocked, unlocked_for_a_while, ignoring_the_lock, ignoring_the_lock_of_a_child, without_parents,
    of_a_child_without_parents, data_of_a_leaf, gradients, layout_of_a_leaf, sizes_and_names, shared, state, a_copy,
    flattened, with_what_was_flattened, rows, in_another_parent,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_facts_follow_every_change(way: Callable[[TensorDict], None]) -> None:
    td = locked()
    outer = TensorDict({"td": td, "more": torch.zeros(3)}, [3])
    way(td)
    check(td)
    check(td["n"])
    outer.lock_()
    check(outer)


def test_saved_and_mapped_in_place(tmp_path: Path) -> None:
    td = locked()
    with td.unlock_():
        td.memmap_(tmp_path / "td")
    assert td.is_memmap()
    check(td)
    td.memmap_refresh_()
    check(td)


def test_parameters_that_a_module_replaces() -> None:
    tensors = {"w": nn.Parameter(torch.ones(2)), "n": {"w": nn.Parameter(torch.ones(3)), "b": torch.zeros(3)}}
    params = TensorDictParams(TensorDict(tensors), no_convert=True).lock_()
    below = params["n"]
    check(below)
    nn.ModuleList([params]).double()
    check(below)
    assert {leaf.dtype for leaf in below._leaf_list()} == {torch.float64}
    with params.data.clone().to_module(params):
        check(below)
    check(below)
    state = {"0.w": torch.zeros(2), "0.n.w": torch.ones(3), "0.n.b": torch.ones(3)}
    nn.ModuleList([params]).load_state_dict(state, assign=True)
    check(below)


def test_parts_of_other_kinds_are_asked_each_time() -> None:
    @tdstore.tensorclass
    class Pair:
        one: torch.Tensor
        two: torch.Tensor

    element = TensorDict({"x": torch.ones(3)}, [3])
    stack = lazy_stack([element, TensorDict({"x": torch.zeros(3)}, [3])], 1)
    td = TensorDict({"p": Pair(torch.ones(3), torch.zeros(3, 2), batch_size=[3]), "s": stack, "t": "text"}, [3]).lock_()
    assert td["p"]._tensordict._tree_facts() is not None and td._tree_facts() is None
    assert len(td._leaf_list()) == 4
    element.clear_refs_for_compile_()
    element.unlock_()["y"] = torch.ones(3)
    assert len(td._leaf_list()) == 5


def test_values_are_those_of_now() -> None:
    td = TensorDict({"text": "one", "x": torch.ones(2)}, [2]).lock_()
    assert td.flatten_keys()["text"] == "one"
    td.set_("text", "two")
    assert td.flatten_keys()["text"] == "two"
    other = TensorDict({"text": "three", "x": torch.zeros(2)}, [2]).lock_()
    td.update_(other)
    assert td["text"] == "three" and not td["x"].any()


def test_a_tree_of_other_order_is_matched_by_key() -> None:
    td = TensorDict({"a": torch.zeros(2), "g": {"a": torch.zeros(2)}, "b": {"c": torch.zeros(2)}}, [2]).lock_()
    other = TensorDict({"b": {"c": torch.tensor(1.0)}, "g": {"a": torch.tensor(2.0)}, "a": torch.tensor(3.0)}).lock_()
    td.add_(other.expand(2).lock_())
    assert [float(leaf[0]) for leaf in td._leaf_list()] == [3, 2, 1]
    one = TensorDict({"g": {"a": {"b": torch.zeros(1)}, "c": torch.zeros(1)}}).lock_()
    two = TensorDict({"g": {"a": torch.zeros(1)}, "b": {"c": torch.zeros(1)}}).lock_()
    assert one._tree_facts().keys != two._tree_facts().keys


def test_a_write_that_fails_changes_nothing() -> None:
    td, other = locked(), made()
    other["n", "d", "e"].unsqueeze_(1)
    for write in (lambda: td.update_(other.lock_()), lambda: td.lerp_(other, 0.5), lambda: td.add_(other)):
        before = td.clone()
        with pytest.raises(Exception, match=r"shape|size|fit"):
            write()
        assert (td == before).all()


def test_a_tensor_written_onto_itself_keeps_its_version() -> None:
    td = locked()
    version = td["b"]._version
    td.update_(td.clone(False).lock_())
    assert td["b"]._version == version


def test_what_another_thread_found_out_before_unlock_is_lost() -> None:
    td = locked()
    known = td._facts
    td.unlock_()
    del td["a"]
    td.lock_()
    known["tree"] = TensorDict({"stale": torch.ones(3)}, [3]).lock_()._tree_facts()
    check(td)


def test_nothing_is_kept_alive() -> None:
    td = locked()
    dead = [weakref.ref(td["a"]), weakref.ref(td["n", "d", "e"])]
    td.unlock_()
    del td["a"], td["n", "d"]
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
    td.lock_()
    check(td)
    leaf = weakref.ref(td["b"])
    td.update({"b": torch.zeros(3)}, ignore_lock=True)
    gc.collect()
    assert leaf() is None


# -- lazy stacks -----------------------------------------------------------------------------------
def stacked(dim: int = 0) -> Any:
    return lazy_stack([made() for _ in range(4)], dim).lock_()


def without(stack: Any) -> Any:
    """The same values in a stack that is not locked, and of which nothing is kept."""
    return lazy_stack([td.clone() for td in stack.tensordicts], stack.stack_dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_locked_stack_writes_what_another_does(dim: int) -> None:
    stack, other = stacked(dim), stacked(dim)
    other.add_(torch.arange(12.0).reshape(other.batch_size))
    ways: list[Callable[[Any, Any], Any]] = [
        lambda td, o: td.add_(o), lambda td, o: td.lerp_(o, 0.25), lambda td, o: td.addcmul_(o, o, value=0.5),
        lambda td, o: td.abs_().neg_(), lambda td, o: td.clamp_max_(2), lambda td, o: td.mul_(torch.ones(td.shape)),
        lambda td, o: td.update_(o), lambda td, o: td.copy_(o), lambda td, o: td.set_(("n", "c"), o["n", "c"] + 5),
        lambda td, o: td.set_at_(("n", "d", "e"), o["n", "d", "e"][1] + 7, 1),
    ]  # fmt: skip
    for way in ways:
        plain = without(stack)
        way(stack, other)
        way(plain, without(other))
        for key in plain.keys(True, True):
            torch.testing.assert_close(stack[key], plain[key])
        assert stack.depth == plain.depth == 2
        torch.testing.assert_close(stack.get_at(("n", "c"), 0), plain["n", "c"][0])


def test_keys_of_a_locked_stack_follow_its_elements() -> None:
    stack = stacked()
    assert list(stack.keys()) == ["b", "n", "a"]
    stack.keys()._mapping.clear()
    assert list(stack.keys()) == ["b", "n", "a"] and len(stack.keys()) == 3
    stack.tensordicts[1].update({"new": torch.zeros(3)}, ignore_lock=True)
    assert list(stack.keys()) == ["b", "n", "a"]
    for td in stack.tensordicts:
        td.update({"new": torch.zeros(3)}, ignore_lock=True)
    assert list(stack.keys()) == ["b", "n", "a", "new"]
    with stack.unlock_():
        stack.del_("a")
        assert list(stack.keys()) == ["b", "n", "new"]
    assert list(stack.keys()) == ["b", "n", "new"]
    stack.tensordicts[0] = TensorDict({"b": torch.zeros(3, 4)}, [3]).lock_()
    assert list(stack.keys()) == ["b"]


def test_entries_of_some_elements_are_written_as_by_another() -> None:
    ragged = [TensorDict({"a": torch.zeros(3), **more}, [3]) for more in ({"z": torch.zeros(3)}, {})]
    found = []
    for lock in (True, False):
        stack = lazy_stack([td.clone() for td in ragged])
        other = lazy_stack([td.clone().add_(1) for td in ragged])
        if lock:
            stack.lock_()
            other.lock_()
        stack.update_(other)
        found.append([stack["a"].tolist(), stack.tensordicts[0]["z"].tolist()])
    assert found[0] == found[1]


def test_a_write_into_a_stack_that_fails_changes_nothing() -> None:
    stack, other = stacked(), stacked()
    other.tensordicts[3]["n", "c"].unsqueeze_(1).resize_(3, 3)
    before = stack.clone()
    with pytest.raises(Exception, match=r"shape|size|fit"):
        stack.update_(other)
    with pytest.raises(Exception, match=r"shape|size|fit"):
        stack.lerp_(other, 0.5)
    for key in before.keys(True, True):
        torch.testing.assert_close(stack[key], before[key])


def test_entries_that_are_stacked_on_reading_do_not_pile_up() -> None:
    stack = stacked()
    for _ in range(200):
        stack["n"]
    assert all(len(td["n"]._parents) < 40 for td in stack.tensordicts)
    kept = [stack["n"] for _ in range(40)]
    with pytest.raises(LockedError):
        stack.tensordicts[0]["n"].unlock_()
    del kept


@pytest.mark.parametrize("lock", [True, False])
def test_depth_is_that_of_the_deepest_entry(lock: bool) -> None:
    deep = TensorDict({"n": {"m": {"x": torch.zeros(2)}}, "y": torch.zeros(2)}, [2])
    stack = lazy_stack([deep.clone(), deep.clone()])
    for td, depth in (
        (TensorDict(), 0), (TensorDict({"n": {}}), 0), (TensorDict({"t": "text"}), 0), (deep, 2), (stack, 2),
        (TensorDict({"s": stack, "n": {"m": {}}}, [2]), 3), (TensorDict({"n": {"m": {"t": "text"}}}), 2),
    ):  # fmt: skip
        if lock:
            td.lock_()
        assert td.depth == td.depth == depth
