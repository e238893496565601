"""TensorDicts as nodes of torch's pytrees, in Python and in C++."""

from __future__ import annotations

import pytest
import tensordict
import torch
from torch.utils import _pytree as pytree

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tests.torch_integration.containers import CONTAINERS, content, sample


def named():
    td = sample().set("s", "hello")
    td.names = ["t", "env"]
    return td


@pytest.mark.parametrize("place", CONTAINERS)
def test_every_container_maps(place, tmp_path):
    td = CONTAINERS[place](tmp_path)
    mapped = pytree.tree_map(lambda t: t * 2, td)
    assert content(mapped) == content(sample() * 2)
    lazy = place.startswith("lazy stack")
    assert type(mapped) is (LazyStackedTensorDict if lazy else TensorDict)
    both = pytree.tree_map(lambda a, b: a + b, {"x": [td]}, {"x": [td]})
    assert content(both["x"][0]) == content(sample() * 2)


def test_all_that_is_beside_the_leaves_comes_back():
    td = named()
    leaves, spec = pytree.tree_flatten(td)
    back = pytree.tree_unflatten(leaves, spec)
    assert list(back.keys()) == list(td.keys())
    assert (back.names, back.batch_size, back["n"].batch_size, back["s"]) == (
        td.names,
        td.batch_size,
        td.shape,
        "hello",
    )
    assert all(a is b for a, b in zip(leaves, [td["a"], td["n", "b"]], strict=True))
    assert pytree.tree_flatten(back)[1] == spec
    assert pytree.tree_map(lambda t: t, td.to("cpu")).device == torch.device("cpu")
    assert not pytree.tree_map(lambda t: t, td.lock_()).is_locked


def test_leaves_and_paths_as_the_peer():
    mine, theirs = sample(), sample(tensordict)
    mine_paths = [(pytree.keystr(path), content(leaf)) for path, leaf in pytree.tree_flatten_with_path(mine)[0]]
    their_paths = [(pytree.keystr(path), content(leaf)) for path, leaf in pytree.tree_flatten_with_path(theirs)[0]]
    assert mine_paths == their_paths
    lazy = pytree.tree_flatten_with_path(lazy_stack([mine, mine]))[0]
    assert [pytree.keystr(path) for path, _ in lazy] == ["[0]['a']", "[0]['n']['b']", "[1]['a']", "[1]['n']['b']"]


def test_shapes_that_change():
    td = named()
    row = pytree.tree_map(lambda t: t[0], td)
    assert (row.batch_size, row["n"].batch_size, row.names, row["s"]) == (
        torch.Size([2]),
        torch.Size([2]),
        [None],
        "hello",
    )
    assert pytree.tree_map(lambda t: t.unsqueeze(0), td).batch_size == torch.Size([1, 3, 2])
    assert pytree.tree_map(torch.sum, td).batch_size == torch.Size([])
    longer = pytree.tree_map(lambda a, b: torch.cat([a, b]), td, td[:1])
    assert longer.batch_size == torch.Size([4, 2])
    assert pytree.tree_map(lambda t: t.to("meta"), td.to("cpu")).device is None


def test_leaves_that_are_no_tensors():
    shapes = pytree.tree_map(lambda t: tuple(t.shape), sample())
    assert (shapes["a"], shapes["n", "b"], shapes.batch_size) == ((3, 2, 4), (3, 2), torch.Size([]))
    assert "(3, 2, 4)" in repr(shapes)
    ids, spec = pytree.tree_flatten(sample())
    assert pytree.tree_leaves(pytree.tree_unflatten([object(), object()], spec)) != ids


def test_trees_that_differ_do_not_go_side_by_side():
    td = sample()
    others = {
        "keys": td.select("a"),
        "order": TensorDict({"n": td["n"], "a": td["a"]}, td.batch_size),
        "batch dimensions": TensorDict(dict(td.items()), [3]),
        "values": td.copy().set("s", "x"),
    }
    for what, other in others.items():
        with pytest.raises(ValueError, match="mismatch|Mismatch"):
            pytree.tree_map(lambda a, b: a, td, other)
            pytest.fail(what)
    with pytest.raises(ValueError):
        pytree.tree_map(lambda a, b: a, td.copy().set("s", "x"), td.copy().set("s", "y"))


def test_values_are_nodes_without_leaves():
    for value in (NonTensorData("x", [3]), NonTensorStack("a", "b")):
        leaves, spec = pytree.tree_flatten({"v": value})
        assert leaves == []
        assert pytree.tree_unflatten([], spec)["v"] is value


def test_specs_are_plain_data():
    td = TensorDict({"x": torch.ones(2), "z": lazy_stack([sample(), sample()]), "s": "text", "e": ["a", "b"]}, [2])
    leaves, spec = pytree.tree_flatten(td)
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert again == spec
    back = pytree.tree_unflatten(leaves, again)
    assert list(back.keys()) == list(td.keys())
    assert (back["s"], back["e"], type(back["z"])) == ("text", ["a", "b"], LazyStackedTensorDict)


def test_a_stored_dataset_is_read_at_once(tmp_path):
    td = sample().save(tmp_path / "td.h5")
    leaves = pytree.tree_leaves({"td": td})
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    td.close()


def test_others_may_wrap_a_tensordict():
    from tdstore.container.functions.pytree import register_wrapper

    class Wrapped:
        def __init__(self, td):
            self.td = td

    register_wrapper(Wrapped, lambda w: w.td, lambda td, cls: cls(td))
    mapped = pytree.tree_map(lambda t: t + 1, [Wrapped(sample())])[0]
    assert isinstance(mapped, Wrapped)
    assert content(mapped.td) == content(sample() + 1)
    assert pytree.keystr(pytree.tree_flatten_with_path(Wrapped(sample()))[0][0][0]) == "._tensordict['a']"


def test_checkpointing_takes_them():
    from torch.utils.checkpoint import checkpoint

    td = sample().requires_grad_()
    checkpoint(lambda td: td * 2, td, use_reentrant=False).sum(reduce=True).backward()
    assert content(td.grad) == content(torch.full_like(sample(), 2))
    assert isinstance(tdstore.TensorDict, type)
