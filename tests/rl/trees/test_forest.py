"""Forests: what goes in by rollouts comes out as trees (scenarios T1 to T6 and T9)."""

from __future__ import annotations

import subprocess

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.rl.trees import DataMap, MCTSForest, NodeMap, Tree, row_hashes
from tdstore.testing.processes import warm


def rollout(states, actions):
    if isinstance(actions, int):
        actions = [actions] * (len(states) - 1)
    states, size = torch.tensor(states), [len(actions)]
    after = TensorDict({"observation": states[1:]}, size)
    return TensorDict({"observation": states[:-1], "action": torch.tensor(actions), "next": after}, size)


def at(observation):
    return TensorDict({"observation": torch.tensor(observation)})


def observations(tree):
    return [node.node_observation.item() for node in tree.iter_nodes()]


def forest_of(*rollouts, **kwargs):
    forest = MCTSForest(**kwargs)
    for states, actions in rollouts:
        forest.extend(rollout(states, actions))
    return forest


T1 = (([10, 11, 12, 13, 14, 15], [1, 2, 3, 4, 5]), ([10, 11, 12, 13, 30, 31, 32], [1, 2, 3, 6, 7, 8]))
T3 = (([0, 1, 2, 3, 4], 1), ([2, 5, 6, 7, 8], 2), ([0, 9, 10, 11, 12], 3), ([6, 13, 14], 4))
T5 = (*T3, ([14, 10, 15], 5))


def test_t1_two_rollouts_that_part():
    forest = forest_of(*T1)
    tree = forest.get_tree(at(10))
    assert len(forest) == 8
    assert tree.rollout["action"].tolist() == [1, 2, 3]
    assert tree.node_data["observation"].item() == 13
    assert tree.num_children == 2
    assert tree.edges() == [(0, 1), (0, 2)]
    assert list(tree.valid_paths()) == [(0,), (1,)]
    assert tree.max_length() == 1
    assert tree.num_vertices() == 3
    assert tree.selected_actions.tolist() == [4, 6]
    assert tree.branching_action.item() == 1
    assert tree.prev_action.item() == 3
    assert [tree.subtree[0].branching_action.item(), tree.subtree[0].prev_action.item()] == [4, 5]
    assert [tree.subtree[1].branching_action.item(), tree.subtree[1].prev_action.item()] == [6, 8]
    assert tree.hash is None
    assert tree.node_id == 0
    assert tree.count.dtype == torch.int32
    assert tree.wins.dtype == torch.float32
    assert tree.index.tolist() == [3, 5]
    assert tree.subtree.shape == (2,)
    assert tree.subtree.rollout.shape == (2, -1)


def test_t2_rollouts_of_paths():
    forest = forest_of(*T1)
    tree = forest.get_tree(at(10))
    for path, actions in (((0,), [1, 2, 3, 4, 5]), ((1,), [1, 2, 3, 6, 7, 8]), ((), [1, 2, 3])):
        assert tree.rollout_from_path(path)["action"].tolist() == actions
    with pytest.raises(IndexError, match="2 children, and none with the number 2"):
        tree.rollout_from_path((2,))
    steps = forest.get_tree(at(10), compact=False)
    assert steps.num_vertices() == 8
    assert steps.max_length() == 5
    assert steps.num_children == 1


def test_t3_four_rollouts():
    forest = forest_of(*T3)
    tree = forest.get_tree(at(0))
    assert len(forest) == 14
    assert tree.num_vertices() == 7
    assert observations(tree) == [0, 2, 12, 4, 6, 8, 14]
    assert [node.node_id for node in tree.iter_nodes()] == list(range(7))
    assert list(tree.valid_paths()) == [(1,), (0, 0), (0, 1, 0), (0, 1, 1)]
    assert tree.max_length() == 3
    assert tree.rollout is None
    steps = forest.get_tree(at(0), compact=False)
    assert steps.num_vertices() == 15
    assert steps.max_length() == 6


def test_t4_depths():
    forest = forest_of(*T3)
    assert [forest.get_tree(at(0), max_depth=depth).num_vertices() for depth in range(4)] == [3, 5, 7, 7]


def test_t5_shared_nodes():
    forest = forest_of(*T5)
    tree = forest.get_tree(at(0))
    assert len(forest) == 16
    assert tree.num_vertices() == 9
    assert tree.num_vertices(count_repeat=True) == 11
    assert len(tree.vertices(key_type="path")) == 11
    edges = tree.edges()
    assert len(edges) == 10
    assert {(2, 5), (2, 6), (8, 5), (8, 6)} <= set(edges)
    assert forest.get_tree(at(10)) in tree
    assert forest_of(*T1).get_tree(at(10)) not in tree
    assert tree.rollout_from_path((1, 1))["next", "observation"].tolist() == [9, 10, 15]
    assert tree.rollout_from_path((0, 1, 1, 1))["next", "observation"].tolist() == [1, 2, 5, 6, 13, 14, 10, 15]
    shared = tree.get_vertex_by_id(5)
    assert shared.parent.batch_size == (2,)
    assert sorted(shared.parent.node_id) == [2, 8]
    assert len(shared._parent) == 2


T6 = (
    [(5, 50), (6, 60)],
    [(7, 70), (7, 71)],
    [(5, 50), (8, 80), (9, 90), (10, 100)],
    [(3, 33)],
    [(7, 70), (7, 71), (1, 72)],
    [(7, 70), (7, 71), (2, 73)],
)


def test_t6_step_by_step():
    forest = MCTSForest()
    for steps in T6:
        for row in rollout([0, *(obs for _, obs in steps)], [action for action, _ in steps]):
            forest.add(row)
    tree = forest.get_tree(at(0))
    assert len(forest) == 10
    assert tree.num_vertices() == 8
    assert tree.num_children == 3
    assert tree.selected_actions.tolist() == [5, 7, 3]
    assert tree.rollout_from_path((0, 1))["action"].tolist() == [5, 8, 9, 10]
    assert forest.node(at(0)).passes == 6
    lines = forest.to_string(at(0)).splitlines()
    assert len(lines) == 7
    assert lines[1] == " (0, 0) {'observation': tensor(60)}"
    assert lines[3].startswith("(1,)")
    assert "71" in lines[3]
    assert sum(1 for _ in forest.valid_paths(tree)) == 5


# -- loops ---------------------------------------------------------------------------------
@pytest.mark.parametrize("compact", [True, False])
def test_t9_a_loop_ends(compact):
    forest = forest_of(([0, 1, 0], [5, 6]))
    tree = forest.get_tree(at(0), compact=compact)
    last = list(tree.iter_nodes())[-1]
    assert last.node_data["is_cycle"].item() is True
    assert last.num_children == 0
    assert last.node_observation.item() == 0
    assert tree.rollout_from_path(next(tree.valid_paths()))["action"].tolist() == [5, 6]


def test_loops_are_cut_on_their_own_path_only():
    # 1 and 2 lead to each other, 0 leads to both: below 1, the way back from 2 is cut, and the other way round.
    forest = forest_of(([0, 1, 2, 1], [1, 1, 1]), ([0, 2], 2), ([1, 3], 9), ([2, 4], 9))
    tree = forest.get_tree(at(0))
    ways = [tree.rollout_from_path(path)["next", "observation"].tolist() for path in tree.valid_paths()]
    assert sorted(ways) == [[1, 2, 1], [1, 2, 4], [1, 3], [2, 1, 2], [2, 1, 3], [2, 4]]


def test_a_step_onto_the_spot():
    tree = forest_of(([0, 0], [1]), ([0, 1], [2])).get_tree(at(0))
    assert [child.node_data.get("is_cycle", None) is not None for child in tree.children()] == [True, False]


def test_too_many_loops_are_refused():
    size = 6
    forest = MCTSForest(max_size=1000)
    for x in range(size):
        for y in range(size):
            for action, (dx, dy) in enumerate(((0, 1), (1, 0), (0, -1), (-1, 0))):
                if 0 <= x + dx < size and 0 <= y + dy < size:
                    forest.extend(rollout([x * size + y, (x + dx) * size + y + dy], [action]))
    with pytest.raises(ValueError, match="max_depth"):
        forest.get_tree(at(0))
    assert forest.get_tree(at(0), max_depth=1).num_vertices() > 4


def test_long_chains_and_wide_trees():
    forest = forest_of((list(range(3000)), 1), max_size=3000)
    tree = forest.get_tree(at(0), compact=False)
    assert tree.max_length() == 2998
    assert tree.num_vertices() == 2999
    assert forest.get_tree(at(0)).num_vertices() == 1


# -- the forest itself ---------------------------------------------------------------------
def test_length_counts_distinct_pairs():
    forest = MCTSForest()
    assert len(forest) == 0
    forest.extend(rollout([0, 1, 2], 1))
    forest.extend(rollout([0, 1, 2], 1))
    assert len(forest) == 2


def test_a_known_pair_keeps_its_row_and_gets_new_data():
    forest = forest_of(([0, 1], [1]), ([5, 6], [1]))
    forest.extend(rollout([0, 7], [1]))
    assert len(forest) == 2
    step = TensorDict({"observation": torch.tensor(0), "action": torch.tensor(1)})
    assert forest.get_child(step)["next", "observation"].item() == 7
    assert forest.get_tree(at(0)).node_observation.item() == 7
    step["action"] = torch.tensor(3)
    with pytest.raises(KeyError, match="no step"):
        forest.get_child(step)


def test_of_equal_pairs_in_one_rollout_the_last_is_kept():
    forest = MCTSForest()
    forest.extend(torch.cat([rollout([0, 1], [1]), rollout([0, 2], [1])]))
    assert len(forest) == 1
    assert forest.get_tree(at(0)).node_observation.item() == 2


def test_overflow_changes_nothing():
    forest = forest_of(([0, 1, 2], 1), max_size=3)
    assert forest.max_size == 3 and MCTSForest().max_size == 1000
    with pytest.raises(IndexError, match="max_size"):
        forest.extend(rollout([7, 8, 9], 1))
    assert len(forest) == 2
    assert len(forest.node_map) == 2
    forest.extend(rollout([1, 2, 3], 1))
    assert len(forest) == 3


def test_the_tree_of_the_first_step_comes_back():
    forest = MCTSForest()
    tree = forest.extend(rollout([10, 11, 12], 1), return_node=True)
    assert isinstance(tree, Tree)
    assert tree.rollout["next", "observation"].tolist() == [11, 12]
    assert forest.add(rollout([10, 20], [2])[0], return_node=True).num_children == 2


def test_unknown_roots_and_bad_input():
    forest = forest_of(([0, 1], [1]))
    with pytest.raises(KeyError, match="no step that leaves"):
        forest.get_tree(at(9))
    with pytest.raises(KeyError, match="action"):
        forest.extend(rollout([0, 1], [1]).exclude("action"))
    with pytest.raises(KeyError, match="next"):
        forest.extend(rollout([0, 1], [1]).exclude("next"))
    with pytest.raises(ValueError, match="batch size"):
        forest.extend(torch.stack([rollout([0, 1], [1])] * 2))
    for call in (forest.extend, forest.add, forest.get_tree, forest.get_child, forest.node, forest.valid_paths):
        for data in (torch.zeros(2), {"observation": torch.tensor(0)}, 3, None):
            with pytest.raises(TypeError, match="is a TensorDict, not"):
                call(data)
    with pytest.raises(ValueError, match="max_depth"):
        forest.get_tree(at(0), max_depth=-1)
    assert len(forest) == 1


def test_arguments_are_checked_by_name():
    for name in ("done_keys", "reward_keys", "observation_keys", "action_keys", "excluded_keys"):
        with pytest.raises(ValueError, match=name):
            MCTSForest(**{name: 3})
    for kwargs in ({"data_map": DataMap(10), "max_size": 3}, {"node_map": NodeMap(), "max_size": 3}):
        with pytest.raises(ValueError, match="max_size"):
            MCTSForest(**kwargs)
    forest = MCTSForest(action_keys=("agents", "action"), observation_keys=["a", "b"])
    assert forest.action_keys == [("agents", "action")]
    assert forest.observation_keys == ["a", "b"]
    assert set(forest.done_keys) == {"done", "truncated", "terminated"}
    assert forest.reward_keys == ["reward"]
    assert MCTSForest().data_map.max_size == 1000


def test_keys_from_an_environment_fill_only_those_not_given():
    class Env:
        reward_keys = [("agents", "reward")]
        action_keys = ["move"]
        done_keys = ["done"]
        observation_spec = TensorDict({"pixels": torch.zeros(3), "state": TensorDict({"x": torch.zeros(1)})})

    forest = MCTSForest(action_keys="act")
    forest.get_keys_from_env(Env())
    assert forest.action_keys == ["act"]
    assert forest.reward_keys == [("agents", "reward")]
    assert forest.observation_keys == ["pixels", ("state", "x")]


def test_several_observation_keys_and_excluded_ones():
    forest = MCTSForest(observation_keys=["a", ("s", "b")], action_keys="move", excluded_keys=["logits"])
    here = TensorDict({"a": torch.zeros(2, 3), "s": TensorDict({"b": torch.tensor([1, 2])}, [2])}, [2])
    after = TensorDict({"a": torch.zeros(2, 3), "s": TensorDict({"b": torch.tensor([2, 3])}, [2])}, [2])
    data = here.clone().update({"move": torch.tensor([4, 5]), "logits": torch.ones(2, 7), "next": after})
    tree = forest.extend(data, return_node=True)
    assert "logits" not in tree.rollout.keys()
    assert tree.branching_action.item() == 4
    assert tree.node_observation["s", "b"].item() == 3
    assert tree.node_observations["a"].shape == (3,)


def test_hashes_do_not_depend_on_the_process(tmp_path):
    code = (
        "import torch, tdstore; from tdstore.rl.trees import row_hashes; "
        "td = tdstore.TensorDict({'a': torch.arange(3), 'b': torch.ones(3, 2, dtype=torch.bfloat16)}, [3]); "
        "print(row_hashes(td, ['a', 'b']))"
    )
    td = TensorDict({"a": torch.arange(3), "b": torch.ones(3, 2, dtype=torch.bfloat16)}, [3])
    done = subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(row_hashes(td, ["b", "a"]))
    assert len(set(row_hashes(td, ["a"]))) == 3
    assert row_hashes(td.select("a").to(torch.int32), ["a"]) != row_hashes(td, ["a"])


@pytest.mark.parametrize("storage", [None, "memmap", "h5", "zarr"])
def test_forests_on_backends(tmp_path, storage):
    kwargs = {} if storage is None else {"storage": storage, "path": tmp_path / "steps"}
    forest = forest_of(*T5, **kwargs)
    tree = forest.get_tree(at(0))
    assert tree.num_vertices() == 9
    assert tree.rollout_from_path((0, 1, 1, 1))["next", "observation"].tolist() == [1, 2, 5, 6, 13, 14, 10, 15]


@pytest.mark.parametrize("place", ["folder", "forest.h5", "forest.zarr"])
def test_forests_are_saved_and_grow_on(tmp_path, place):
    forest = forest_of(*T3)
    forest.dumps(tmp_path / place)
    other = forest_of(([7, 7], [7]))
    other.loads(tmp_path / place)
    assert len(other) == 14
    assert other.get_tree(at(0)).edges() == forest.get_tree(at(0)).edges()
    assert other.node(at(0)).passes == 2
    other.extend(rollout([14, 10, 15], 5))
    assert other.get_tree(at(0)).num_vertices() == 9
    with pytest.raises(IndexError, match="14 steps"):
        MCTSForest(max_size=13).loads(tmp_path / place)
    TensorDict({"a": torch.ones(3)}).save(tmp_path / "other").close()
    with pytest.raises(ValueError, match="no forest"):
        other.loads(tmp_path / "other")
    assert len(other) == 16


@pytest.mark.parametrize("storage", [None, "memmap", "h5"])
def test_a_forest_that_cannot_be_loaded_changes_nothing(tmp_path, storage, monkeypatch):
    forest_of(*T3).dumps(tmp_path / "other")
    kwargs = {} if storage is None else {"storage": storage, "path": tmp_path / "steps"}
    forest = forest_of(([7, 8, 9], [1, 2]), **kwargs)
    before = forest.get_tree(at(7)).to_string()
    write = DataMap.write

    def half(self, pairs, reached, steps):
        write(self, pairs[:3], reached[:3], steps[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DataMap, "write", half)
    with pytest.raises(OSError, match="No space"):
        forest.loads(tmp_path / "other")
    monkeypatch.undo()
    assert len(forest) == 2
    assert forest.get_tree(at(7)).to_string() == before
    forest.loads(tmp_path / "other")
    assert len(forest) == 14
    assert forest.get_tree(at(0)).num_vertices() == 7


def test_an_empty_forest_is_saved(tmp_path):
    MCTSForest().dumps(tmp_path / "empty")
    forest = forest_of(([0, 1], [1]))
    forest.loads(tmp_path / "empty")
    assert len(forest) == 0


def test_key_names_travel_with_a_tree(tmp_path):
    forest = MCTSForest(observation_keys="pixels", action_keys="move")
    data = TensorDict({"pixels": torch.arange(2), "move": torch.arange(2)}, [2])
    data["next"] = TensorDict({"pixels": torch.arange(2) + 1}, [2])
    tree = forest.extend(data, return_node=True)
    assert tree.node_observation.item() == 2
    tree.save(tmp_path / "tree").close()
    loaded = tdstore.load(tmp_path / "tree")
    assert loaded.node_observation.item() == 2
    assert loaded.prev_action.item() == 1
    assert loaded.clone().prev_action.item() == 1
