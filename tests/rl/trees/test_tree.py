"""Trees by hand, in storages, and in pictures (scenarios T7, T8 and T10)."""

from __future__ import annotations

import gc
import importlib.util
import math
import pickle
from itertools import pairwise

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors
from tdstore.rl.trees import MCTSForest, PUCTScore, Tree, UCBScore, puct_score, ucb_score
from tdstore.rl.trees.plots import label_width, layout, shown_labels
from tests.rl.trees.test_forest import T3, T5, at, forest_of

PATH = (0, 1, 1, 1)


@pytest.fixture
def shared():
    """The tree of T5: nine nodes, two of which have two parents."""
    return forest_of(*T5).get_tree(at(0))


def same(one, other):
    assert type(one) is type(other) is Tree
    assert one.edges() == other.edges()
    assert list(one.valid_paths()) == list(other.valid_paths())
    assert one.num_vertices() == other.num_vertices()
    assert [node.hash for node in one.iter_nodes()] == [node.hash for node in other.iter_nodes()]
    for path in one.valid_paths():
        mine, theirs = one.rollout_from_path(path), other.rollout_from_path(path)
        assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
        assert (mine == theirs).all()
    for mine, theirs in zip(one.iter_nodes(), other.iter_nodes(), strict=True):
        assert mine.count.dtype == theirs.count.dtype == torch.int32
        assert mine.node_observation.tolist() == theirs.node_observation.tolist()
        assert (mine.index is None) == (theirs.index is None)
        assert mine.index is None or mine.index.tolist() == theirs.index.tolist()
    assert other.subtree[0].parent.node_id == 0
    assert other.parent is None


# -- T7: by hand ---------------------------------------------------------------------------
def by_hand():
    root = Tree(count=0)
    root.subtree = torch.stack([Tree(count=1, node_id=1), Tree(count=2, node_id=2)])
    return root


def test_t7_by_hand():
    root = by_hand()
    assert root.edges() == [(0, 1), (0, 2)]
    assert root.fully_expanded(2)
    assert not root.fully_expanded(3)

    class Env:
        def cardinality(self, data):
            return 2

    assert root.fully_expanded(Env())
    root.visits = 10
    assert root.count == 10
    lone = Tree()
    assert list(lone.valid_paths()) == [()]
    assert lone.num_vertices() == 1
    assert lone.max_length() == 0
    assert lone.num_children == 0
    assert lone.selected_actions is None
    assert lone.rollout_from_path(()) is None
    assert tdstore.is_tensorclass(root)
    assert root.subtree.count == [1, 2]


def test_children_know_their_parent_while_it_is_there():
    root = by_hand()
    child = root.subtree[1]
    assert child.parent.count == 0
    assert child._parent() is root._tensordict
    child.parent.count = 5
    assert root.count == 5
    assert root.parent is None
    del root
    gc.collect()
    assert child.parent is None
    assert child._parent is None


def test_children_of_another_node_lose_their_parent():
    root = by_hand()
    old = root.subtree[0]
    root.subtree = tdstore.lazy_stack([Tree(count=3)])
    assert old.parent is None
    assert root.num_children == 1
    other = Tree(subtree=tdstore.lazy_stack([root.subtree[0]]))
    assert root.subtree[0].parent.batch_size == (2,)
    other.subtree = None
    assert root.subtree[0].parent.batch_size == ()
    added = root.add_child(Tree(count=4))
    assert root.num_children == 2
    assert added.parent.num_children == 2


def test_a_subtree_is_a_stack_of_trees():
    root = Tree(count=0)
    with pytest.raises(TypeError, match="TensorDict"):
        root.subtree = TensorDict({}, [2])
    with pytest.raises(ValueError, match="lazy_stack"):
        root.subtree = Tree(count=1)
    assert root.subtree is None


def test_look_ups():
    tree = forest_of(*T3).get_tree(at(0))
    node = tree.get_vertex_by_id(4)
    assert node.node_observation.item() == 6
    assert tree.get_vertex_by_hash(node.hash).node_id == 4
    assert list(tree.vertices(key_type="id")) == list(range(7))
    hashes = tree.vertices()
    assert len(hashes) == 7
    assert next(iter(hashes)) is None
    assert tree.vertices(key_type="path")[0, 1].node_id == 4
    for call, text in (
        (lambda: tree.get_vertex_by_id(77), "77"),
        (lambda: tree.get_vertex_by_hash(78), "78"),
        (lambda: tree.vertices(key_type="zz"), "zz"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert node in tree
    assert 3 not in tree


def test_membership_of_roots_compares_what_was_observed():
    one, two = (Tree(node_data=TensorDict({"observation": torch.tensor(i)})) for i in (1, 2))
    assert one in Tree(node_data=TensorDict({"observation": torch.tensor(1)}))
    assert two not in one


def test_observations_and_their_errors():
    with pytest.raises(AttributeError, match="no node_data"):
        Tree().node_observation  # noqa: B018
    node = Tree(node_data=TensorDict({"zz": torch.ones(2)}))
    with pytest.raises(KeyError, match="observation"):
        node.node_observation  # noqa: B018
    node.specs = {"output_spec": {"full_observation_spec": {"zz": ((2,), torch.float32)}}}
    assert node.node_observation.tolist() == [1, 1]
    assert list(node.node_observations.keys()) == ["zz"]


def steps(**flags):
    after = TensorDict({name: torch.tensor([[False], [value]]) for name, value in flags.items()}, [2])
    return TensorDict({"action": torch.arange(2), "next": after}, [2])


def test_terminal_nodes():
    assert Tree().is_terminal is False
    assert Tree(rollout=steps(done=True)).is_terminal.shape == ()
    assert Tree(rollout=steps(done=True)).is_terminal
    assert not Tree(rollout=steps(done=False, terminated=True)).is_terminal
    assert Tree(rollout=steps(terminated=False, truncated=True)).is_terminal
    assert Tree(rollout=steps()).is_terminal is True
    stack = tdstore.lazy_stack([Tree(rollout=steps(done=value)) for value in (True, False)])
    assert stack.is_terminal.tolist() == [True, False]
    assert stack.is_terminal.dtype == torch.bool
    assert stack.branching_action.tolist() == [0, 0]
    assert stack.prev_action.tolist() == [1, 1]


def test_make_node():
    step = TensorDict({"observation": torch.tensor(1), "action": torch.tensor(2)})
    leaf = Tree.make_node(step, specs="any")
    assert (leaf.count, leaf.wins, leaf.rollout, leaf.subtree, leaf.specs) == (0, 0, None, None, "any")
    assert leaf.count.dtype == torch.float32
    assert list(leaf.node_data.keys()) == ["observation"]
    step["next"] = TensorDict({"observation": torch.tensor(3)})
    node = Tree.make_node(step)
    assert node.rollout.batch_size == (1,)
    assert node.num_children == 1
    assert node.subtree[0].node_observation.item() == 3
    assert node.subtree[0].parent.num_children == 1
    assert "action" not in node.node_data


# -- search --------------------------------------------------------------------------------
def test_backpropagation_changes_tensors_in_place():
    tree = forest_of(*T3).get_tree(at(0))
    count = tree.count
    tree.backpropagate((0, 1), 2.0, discount=-1.0)
    assert [node.wins.item() for node in tree.nodes_on_path((0, 1))] == [2.0, -2.0, 2.0]
    assert [node.count.item() for node in tree.iter_nodes()] == [1, 1, 0, 0, 1, 0, 0]
    assert tree.count.data_ptr() == count.data_ptr()
    with pytest.raises(IndexError, match="number 7"):
        tree.backpropagate((0, 7), 1.0)
    assert tree.count.item() == 1
    bare = by_hand()
    bare.backpropagate((1,), 1.5)
    assert (bare.count, bare.wins, bare.subtree[1].count, bare.subtree[1].wins) == (1, 1.5, 3, 1.5)


def test_bad_values_are_not_counted():
    root = Tree(count=torch.tensor(0), wins=torch.tensor(0.0))
    root.subtree = tdstore.lazy_stack([Tree(count=torch.tensor(0), wins=torch.tensor(0.0))])
    for value, error in (("1", TypeError), (None, TypeError), (torch.ones(2), ValueError)):
        with pytest.raises(error, match="value"):
            root.backpropagate((0,), value)
    assert root.count == root.subtree[0].count == root.wins == 0
    root.backpropagate((0,), torch.ones(1))
    assert root.wins.shape == () and root.wins == root.subtree[0].wins == 1
    fresh, value = Tree(), torch.tensor(2.0)
    fresh.backpropagate((), value)
    fresh.backpropagate((), 1.0)
    assert value == 2 and fresh.wins == 3 and fresh.count == 2
    for wrong in ("x", torch.zeros(2)):
        with pytest.raises(TypeError, match="is a TensorDict"):
            Tree.make_node(wrong)
    with pytest.raises(TypeError, match="cardinality"):
        root.fully_expanded("all")


def test_scores():
    wins, visits, prior = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1, 4, 0]), torch.tensor([0.5, 0.25, 0.25])
    ucb = ucb_score(wins, visits, 5.0, c=2.0)
    assert ucb[:2].tolist() == pytest.approx([1 + 2 * math.sqrt(math.log(5)), 0.75 + 2 * math.sqrt(math.log(5) / 4)])
    assert ucb[2] == math.inf
    puct = puct_score(wins, visits, 5.0, prior, c=2.0)
    assert puct.tolist() == pytest.approx(
        [1 + 2 * 0.5 * 5**0.5 / 2, 0.75 + 2 * 0.25 * 5**0.5 / 5, 2 * 0.25 * 5**0.5 / 1], rel=1e-5
    )


def test_best_child():
    root = Tree(count=3)
    root.subtree = tdstore.lazy_stack(
        [
            Tree(count=n, wins=w, node_data=TensorDict({"prior": torch.tensor(p)}))
            for n, w, p in ((2, 1.0, 0.1), (1, 0.5, 0.2), (0, 0.0, 0.7))
        ]
    )
    assert root.best_child().count == 0
    assert root.best_index(UCBScore(c=0.1)) == 2
    assert root.best_index(PUCTScore(c=0.0)) == 0
    assert root.best_index(PUCTScore(c=10.0)) == 2
    assert root.best_child(lambda node: torch.tensor([0.0, 1.0, 0.0])).count == 1
    with pytest.raises(ValueError, match="leaf"):
        Tree().best_child()
    with pytest.raises(ValueError, match="3 children"):
        root.best_child(lambda node: torch.zeros(2))
    with pytest.raises(KeyError, match="zz"):
        root.best_child(PUCTScore(prior_key="zz"))


# -- specs ---------------------------------------------------------------------------------
class Group:
    full_reward_spec = ((1,), torch.float32)


class Attributes:
    output_spec = Group()
    full_done_spec = ((1,), torch.bool)


LEAF = {"action": ((3,), torch.float32)}


@pytest.mark.parametrize(
    ("specs", "kind", "expected"),
    [
        ({("input_spec", "full_action_spec"): LEAF}, "action", LEAF),
        ({"input_spec": {"full_action_spec": LEAF}}, "action", LEAF),
        ({"full_action_spec": LEAF}, "action", LEAF),
        (Attributes(), "reward", Group.full_reward_spec),
        (Attributes(), "done", Attributes.full_done_spec),
        (None, "state", None),
    ],
)
def test_specs_are_found(specs, kind, expected):
    assert getattr(Tree(specs=specs), f"full_{kind}_spec") == expected


def test_specs_that_are_missing_are_named():
    with pytest.raises(KeyError, match=r"full_state_spec.*input_spec"):
        Tree(specs={}).full_state_spec  # noqa: B018


def test_specs_are_saved_as_shapes_and_dtypes(tmp_path):
    specs = {"input_spec": {"full_action_spec": LEAF}, "output_spec": {"full_done_spec": torch.zeros(1), "odd": "x"}}
    tree = by_hand()
    tree.specs = specs
    with pytest.warns(UserWarning, match="output_spec/odd"):
        tree.save(tmp_path / "tree").close()
    loaded = tdstore.load(tmp_path / "tree")
    assert loaded.full_action_spec == LEAF
    assert loaded.full_done_spec == ((1,), torch.float32)


def test_specs_of_torchrl(tmp_path):
    data = pytest.importorskip("torchrl.data")
    specs = data.Composite(
        output_spec=data.Composite(full_observation_spec=data.Composite(pixels=data.Unbounded(shape=(3,)))),
    )
    tree = Tree(count=1, specs=specs, node_data=TensorDict({"pixels": torch.ones(3)}))
    assert tree.specs is specs
    assert tree.node_observation.tolist() == [1, 1, 1]
    tree.save(tmp_path / "tree").close()
    assert tdstore.load(tmp_path / "tree").full_observation_spec == {"pixels": ((3,), torch.float32)}


# -- T8: in storages -----------------------------------------------------------------------
def test_t8_memmap_and_pickle(tmp_path):
    tree = forest_of(*T3).get_tree(at(0))
    mapped = tree.memmap(tmp_path / "tree")
    same(tree, mapped)
    assert mapped.is_memmap()
    assert mapped.is_locked
    same(tree, Tree.load_memmap(tmp_path / "tree"))
    same(tree, TensorDict.load_memmap(tmp_path / "tree"))
    same(tree, tdstore.load(tmp_path / "tree"))
    same(tree, pickle.loads(pickle.dumps(tree)))


@pytest.mark.parametrize("place", ["folder", "tree.h5", "tree.zarr", "tree.tdz", "memory://tree-r2"])
def test_trees_in_places(tmp_path, shared, place):
    place = place if "://" in place else tmp_path / place
    shared.save(place).close()
    with tdstore.open(place) as found:
        same(shared, found)
        assert found.num_vertices(count_repeat=True) == 11


def test_trees_in_redis(redis, shared):
    place = f"{redis.url}/tree-r2"
    shared.save(place).close()
    with tdstore.open(place) as found:
        same(shared, found)


def test_trees_in_a_bucket(s3, shared):
    place = f"{s3.url}/tree-r2"
    shared.save(place, storage_options=s3.fsspec_options).close()
    with tdstore.open(place, storage_options=s3.fsspec_options) as found:
        same(shared, found)


@pytest.mark.parametrize(
    "travel",
    [
        lambda tree, folder: tree.clone(),
        lambda tree, folder: tree.to(torch.device("cpu")),
        lambda tree, folder: tree.clone().share_memory_(),
        lambda tree, folder: tree.clone().memmap_(folder / "there"),
        lambda tree, folder: tree.memmap(folder / "soon", return_early=True).result(),
        lambda tree, folder: tree.to_h5(folder / "tree.h5"),
        lambda tree, folder: tree.to_zarr(folder / "tree.zarr"),
        lambda tree, folder: tree.consolidate(),
        lambda tree, folder: Tree.from_table(tree.to_table()),
        lambda tree, folder: Tree().load_state_dict(tree.state_dict()),
        lambda tree, folder: Tree().load_(tree.save(folder / "x").close() or folder / "x"),
        lambda tree, folder: pickle.loads(pickle.dumps(tree)),
    ],
    ids="clone to share memmap_ early h5 zarr consolidate table state_dict load_ pickle".split(),
)
def test_the_same_tree_elsewhere(tmp_path, shared, travel):
    found = travel(shared, tmp_path)
    same(shared, found)
    assert found.num_vertices(count_repeat=True) == 11
    assert found.get_vertex_by_id(5).parent.batch_size == (2,)


def test_shared_memory_and_files_are_told_apart(shared):
    assert not shared.is_shared()
    assert shared.clone().share_memory_().is_shared()
    assert not shared.clone().share_memory_().is_memmap()
    assert shared.memmap().is_memmap()


def test_state_dicts_pass_torch_save(tmp_path, shared):
    torch.save(shared.state_dict(), tmp_path / "state.pt")
    same(shared, Tree().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)))


def test_in_place_changes_reach_the_file(tmp_path, shared):
    shared.save(tmp_path / "tree").close()
    with tdstore.open(tmp_path / "tree", mode="r+") as tree:
        tree.backpropagate(PATH, 1.0)
    again = tdstore.load(tmp_path / "tree")
    assert [node.count.item() for node in again.nodes_on_path(PATH)] == [1] * 5
    assert again.wins.item() == 1.0


def test_a_commit_of_a_tree_is_a_version(tmp_path, shared):
    place = f"file://{tmp_path}/tree"
    with pytest.raises(errors.UnsupportedError, match="in memory, and has no versions"):
        shared.commit(message="nowhere")
    shared.save(place).close()
    with tdstore.open(place, mode="r+") as tree:
        assert tree.commit(message="before the search") is tree
    (version,) = tdstore.versions(place)
    same(shared, tdstore.open(place, version=version.id))


def test_memmap_like_has_the_nodes_and_no_data(tmp_path, shared):
    shared.backpropagate(PATH, 1.0)
    like = shared.memmap_like(tmp_path / "like")
    assert like.edges() == shared.edges()
    assert [node.hash for node in like.iter_nodes()] == [node.hash for node in shared.iter_nodes()]
    assert like.count == like.wins == 0
    assert not like.rollout_from_path(PATH)["action"].any()
    assert shared.count == 1


def test_numbers_missing_fields_and_values_come_back(tmp_path):
    root = by_hand()
    root.wins = 0.5
    root.subtree[0].node_data = TensorDict({"name": "left", "x": torch.ones(2)})
    root.subtree[1].node_data = TensorDict({"name": "right", "x": torch.ones(3)})
    root.subtree[1].hash = torch.tensor(7)
    root.save(tmp_path / "tree.h5").close()
    with tdstore.open(tmp_path / "tree.h5") as found:
        assert (found.count, found.wins, found.node_data, found.hash) == (0, 0.5, None, None)
        assert type(found.count) is int
        assert [child.count for child in found.children()] == [1, 2]
        assert [child.node_data["name"] for child in found.children()] == ["left", "right"]
        assert found.subtree[1].node_data["x"].shape == (3,)
        assert found.subtree[1].hash.item() == 7


def test_stacks_of_trees_and_trees_in_tensordicts(tmp_path, shared):
    shared.subtree.save(tmp_path / "stack").close()
    stack = tdstore.load(tmp_path / "stack")
    assert stack.batch_size == (2,)
    assert stack[0].max_length() == 3
    assert stack.branching_action.tolist() == [1, 3]
    TensorDict({"tree": Tree.make_node(at(1)), "x": torch.ones(2)}).save(tmp_path / "inside").close()
    assert type(tdstore.load(tmp_path / "inside")["tree"]) is Tree


def test_deep_trees(tmp_path):
    tree = forest_of((list(range(2000)), 1), max_size=2000).get_tree(at(0), compact=False)
    assert tree.clone().max_length() == 1998
    tree.save(tmp_path / "deep").close()
    assert tdstore.load(tmp_path / "deep").max_length() == 1998
    assert pickle.loads(pickle.dumps(tree)).num_vertices() == 1999
    assert "1 children" in repr(tree)
    assert tree.to_dict()["subtree"][0]["subtree"]


def test_a_table_of_a_newer_version_is_refused(shared):
    table = shared.to_table()
    table.layout = table.layout.replace('"version": 1', '"version": 2')
    with pytest.raises(errors.CorruptStoreError, match="version 2"):
        Tree.from_table(table)
    table = shared.to_table()
    table.edges[0, 1] = 99
    with pytest.raises(errors.CorruptStoreError, match="99"):
        Tree.from_table(table)


def test_to_dict(shared):
    found = shared.to_dict()
    assert found["node_id"] == 0
    assert [child["node_data"]["observation"].item() for child in found["subtree"]] == [2, 10]
    assert found["subtree"][1]["subtree"][0] is found["subtree"][0]["subtree"][1]["subtree"][1]["subtree"][0]


# -- T10: pictures -------------------------------------------------------------------------
def test_t10_what_cannot_be_drawn(monkeypatch):
    for kwargs in ({"figure": "zzz"}, {"backend": "zzz"}):
        with pytest.raises(NotImplementedError, match="zzz"):
            Tree().plot(**kwargs)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"tdstore\[plot\]"):
        Tree().plot()


def test_places_of_nodes():
    paths = [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert layout(paths) == {
        (): (1.25, 0),
        (0,): (0.5, 1),
        (0, 0): (0, 2),
        (0, 1): (1, 2),
        (1,): (2, 1),
        (1, 0): (2, 2),
    }


@pytest.mark.parametrize("figure", ["tree", "box"])
def test_pictures(shared, figure):
    pytest.importorskip("plotly")
    shared.backpropagate(PATH, 1.0)
    drawn = shared.plot(figure=figure, info=["node_id", "node_observation"], make_labels=lambda tree, path: f"n{path}")
    marks = drawn.data[-1]
    labels = marks.text if figure == "tree" else marks.labels
    assert list(labels) == [f"n{path}" for path in shared.vertices(key_type="path")]
    assert len(labels) == 11
    assert marks.hovertext[0] == "node_id: 0<br>node_observation: 0"
    assert shared.plot(figure=figure).to_json()
    if figure == "tree":
        assert len(drawn.data[0].x) == 3 * 10
    else:
        assert marks.parents[:2] == ("", "root")


def test_an_empty_forest_has_no_picture_but_a_lone_node_has():
    pytest.importorskip("plotly")
    assert len(Tree().plot().data[1].x) == 1
    with pytest.raises(KeyError):
        MCTSForest().get_tree(at(0))


@pytest.mark.parametrize("leaves", [3, 12, 2000])
def test_labels_do_not_lie_over_one_another(leaves):
    pytest.importorskip("plotly")
    root = Tree(count=leaves, subtree=tdstore.lazy_stack([Tree(count=1) for _ in range(leaves)]))
    figure = root.plot(make_labels=lambda tree, path: f"the move {path}<br>seen once")
    dots, wide = figure.data[1], figure.layout
    drawn = wide.width - wide.margin.l - wide.margin.r
    low, high = wide.xaxis.range
    labels = zip(dots.x, dots.y, dots.text, strict=True)
    shown = sorted((drawn * (x - low) / (high - low), label_width(text)) for x, y, text in labels if text and y < 0)
    assert shown and (leaves > 12 or len(shown) == leaves)
    assert all(b - a >= (wa + wb) / 2 - 1e-6 for (a, wa), (b, wb) in pairwise(shown))
    assert all(text or "the move" in more for text, more in zip(dots.text, dots.hovertext, strict=True))
    assert 700 <= wide.width <= 1600
    assert dots.marker.colorbar.title.text == "visits"


def test_labels_from_left_to_right():
    places = layout([(), (0,), (1,), (2,)])
    assert shown_labels(places, dict.fromkeys(places, "a label"), 100.0) == set(places)
    assert shown_labels(places, dict.fromkeys(places, "a label"), 40.0) == {(), (0,), (2,)}


@pytest.mark.parametrize("device", [None, 0, "cuda:0", torch.device("cuda", 0)])
def test_a_gpu_is_named_as_for_a_tensordict(monkeypatch, device):
    tree, asked = Tree(node_data=TensorDict({"a": torch.zeros(1)})), []
    monkeypatch.setattr(Tree, "to", lambda self, place, **kwargs: asked.append(torch.device(place)))
    tree.cuda(device)
    assert asked == [torch.device("cuda" if device is None else "cuda:0")]
