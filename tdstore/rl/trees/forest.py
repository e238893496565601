"""`MCTSForest`: builds trees from rollouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

import tdstore
from tdstore import TensorDictBase, unwrap_tensorclass
from tdstore.errors import InvalidArgumentError, KeyNotFoundError
from tdstore.rl.storages.indices import is_key
from tdstore.rl.trees import links, maps
from tdstore.rl.trees.assembly import Plan, Planner
from tdstore.rl.trees.links import Key
from tdstore.rl.trees.maps import DataMap, Node, NodeMap, check_collection, row_hashes
from tdstore.rl.trees.storing import join
from tdstore.rl.trees.tree import Tree
from tdstore.rl.trees.walks import Path
from tdstore.rl.types import BackendLike, PathLike

if TYPE_CHECKING:
    from tdstore import TensorDictBase

Keys = Key | Sequence[Key] | None
DEFAULT_KEYS: dict[str, tuple[Key, ...]] = {
    "done_keys": ("done", "truncated", "terminated"),
    "reward_keys": ("reward",),
    "observation_keys": ("observation",),
    "action_keys": ("action",),
    "excluded_keys": (),
}
MAX_SIZE = 1000


class MCTSForest:
    """Steps of rollouts, joined into trees where they pass the same observation.

    Each step, a pair of observation and action, is stored once, in a `LazyStorage` on any backend. Rollouts of batch
    size `[T]` have the entries `observation`, `action` and `("next", "observation")`, or those that the keys name.

    Args:
        data_map: where steps are stored; default: a new `DataMap` of `max_size` steps.
        node_map: what is known of observations; default: a new `NodeMap`.
        max_size: the number of steps for which there is room, default 1000.
        done_keys: the entries of `next` that end an episode.
        reward_keys: the entries of `next` that are rewards.
        observation_keys: the entries, also in `next`, that identify a node.
        action_keys: the entries that identify the steps that leave a node.
        excluded_keys: entries that are not stored.
        consolidated: whether the steps are stored in one buffer, in memory.
        storage: where steps are stored: None for memory, a device, the name of a backend, or a URL.
        path: the place, for a backend that is named.

    Raises:
        ValueError: `max_size` or `storage` together with `data_map`, or keys that are not keys; the argument is named.

    Example:
        >>> def rollout(states, actions):
        ...     states = torch.tensor(states)
        ...     after = tdstore.TensorDict({"observation": states[1:]}, [len(actions)])
        ...     here = {"observation": states[:-1], "action": torch.tensor(actions), "next": after}
        ...     return tdstore.TensorDict(here, [len(actions)])
        >>> forest = MCTSForest()
        >>> forest.extend(rollout([10, 11, 12], [1, 2]))
        >>> forest.extend(rollout([10, 11, 13], [1, 3]))
        >>> tree = forest.get_tree(tdstore.TensorDict({"observation": torch.tensor(10)}))
        >>> len(forest), tree.num_children, tree.selected_actions
        (3, 2, tensor([2, 3]))
    """

    def __init__(
        self,
        *,
        data_map: DataMap | None = None,
        node_map: NodeMap | None = None,
        max_size: int | None = None,
        done_keys: Keys = None,
        reward_keys: Keys = None,
        observation_keys: Keys = None,
        action_keys: Keys = None,
        excluded_keys: Keys = None,
        consolidated: bool | None = None,
        storage: BackendLike | None = None,
        path: PathLike | None = None,
    ) -> None:
        map_options = {"max_size": max_size, "storage": storage, "path": path, "consolidated": consolidated}
        if data_map is not None and (passed := [name for name, value in map_options.items() if value is not None]):
            raise InvalidArgumentError(f"{passed[0]} is a matter of the data_map, and both were passed")
        if max_size is not None and node_map is not None:
            raise InvalidArgumentError("max_size makes new maps, and a node_map was passed")
        options = {} if consolidated is None else {"consolidated": consolidated}
        if data_map is None:
            data_map = DataMap(MAX_SIZE if max_size is None else max_size, storage=storage, path=path, **options)
        self.data_map = data_map
        self.node_map = NodeMap() if node_map is None else node_map
        chosen = {
            "done_keys": done_keys,
            "reward_keys": reward_keys,
            "observation_keys": observation_keys,
            "action_keys": action_keys,
            "excluded_keys": excluded_keys,
        }
        self._keys = {name: _keys(name, value) for name, value in chosen.items() if value is not None}

    # -- keys ------------------------------------------------------------------------------------
    def _of(self, name: str) -> list[Key]:
        return list(self._keys.get(name, DEFAULT_KEYS[name]))

    @property
    def done_keys(self) -> list[Key]:
        """The entries of `next` that end an episode."""
        return self._of("done_keys")

    @property
    def reward_keys(self) -> list[Key]:
        """The entries of `next` that are rewards."""
        return self._of("reward_keys")

    @property
    def observation_keys(self) -> list[Key]:
        """The entries that identify a node."""
        return self._of("observation_keys")

    @property
    def action_keys(self) -> list[Key]:
        """The entries that identify the steps that leave a node."""
        return self._of("action_keys")

    @property
    def excluded_keys(self) -> list[Key]:
        """The entries that are not stored."""
        return self._of("excluded_keys")

    @property
    def max_size(self) -> int:
        """The number of steps for which there is room."""
        return self.data_map.max_size

    def get_keys_from_env(self, env: Any) -> None:
        """Take keys that the constructor did not get from the `*_keys` of an environment, or from its `*_spec`."""
        for name in ("done_keys", "reward_keys", "observation_keys", "action_keys"):
            if name in self._keys:
                continue
            found = getattr(env, name, None)
            if found is None and (spec := getattr(env, name.replace("_keys", "_spec"), None)) is not None:
                found = list(spec.keys(True, True))
            if found:
                self._keys[name] = _keys(name, list(found))

    # -- growing ---------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Return the number of different pairs of observation and action."""
        return len(self.data_map)

    def extend(self, rollout: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add the steps of a rollout; a known pair of observation and action keeps its row, with the new data.

        Args:
            rollout: a TensorDict of batch size `[T]`.
            return_node: return the tree of the first step.

        Raises:
            KeyError: an entry is missing. IndexError: there is no room. TypeError: not a TensorDict. Nothing is added
                then.
        """
        check_collection("a rollout", rollout)
        if not len(rollout.batch_size):
            rollout = rollout.unsqueeze(0)
        if len(rollout.batch_size) != 1:
            raise InvalidArgumentError(
                f"a rollout has the batch size [T], not {list(rollout.batch_size)}: extend one by one"
            )
        if not len(rollout):
            if return_node:
                raise InvalidArgumentError("a rollout without steps has no tree")
            return None
        after = rollout.get("next", None)
        if after is None:
            raise KeyNotFoundError("a rollout has an entry 'next', with the observations after each step")
        observations = row_hashes(rollout, self.observation_keys)
        pairs = row_hashes(rollout, [*self.observation_keys, *self.action_keys])
        reached = row_hashes(after, self.observation_keys)
        steps = rollout.exclude(*self.excluded_keys) if self.excluded_keys else rollout
        rows = self.data_map.write(pairs, reached, steps)
        self.node_map.count(observations, rows, pairs)
        return self.get_tree(rollout[0]) if return_node else None

    def add(self, step: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add one step, of batch size `[]`; see `extend`."""
        check_collection("a step", step)
        return self.extend(step.unsqueeze(0), return_node=return_node)

    # -- queries ---------------------------------------------------------------------------------
    def node(self, root: TensorDictBase) -> Node | None:
        """Return the rows, hashes and number of passes of an observation; None where no step leaves it."""
        return self.node_map.get(self._observation(root))

    def get_child(self, step: TensorDictBase) -> TensorDictBase | None:
        """Return the stored step of an observation and an action, with `next`.

        Raises:
            KeyError: there is none.
        """
        check_collection("a step", step)
        (pair,) = row_hashes(step.unsqueeze(0), [*self.observation_keys, *self.action_keys])
        if pair not in self.data_map:
            raise KeyNotFoundError("the forest has no step with this observation and this action")
        made: TensorDictBase | None = self.data_map.read([self.data_map.rows[pair]])[0]
        return made

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """Build the tree of the steps that follow an observation.

        An observation that is met again on the same path is a leaf, with `is_cycle` in its `node_data`. A node that
        several paths lead to is one node with several parents.

        Args:
            root: a TensorDict of batch size `[]` with the observation.
            max_depth: nodes deeper than this have no children; 0 is the root, so there are `max_depth + 1` levels of
                children. Default: all.
            compact: whether nodes with a single child are merged with it; otherwise there is a node for each step. If
                there is only one first step, it is merged into the root.

        Raises:
            KeyError: no step leaves this observation. ValueError: `max_depth` is negative, or loops of observations
                make more paths than can be listed; `max_depth` limits them. TypeError: `root` is not a TensorDict.
        """
        if max_depth is not None and (not isinstance(max_depth, int) or max_depth < 0):
            raise InvalidArgumentError(f"max_depth is a number of levels, 0 or more, not {max_depth!r}")
        observation = self._observation(root)
        if observation not in self.node_map:
            raise KeyNotFoundError(
                f"the forest has no step that leaves this observation; it knows {len(self.node_map)} others"
            )
        plans = Planner(self.data_map, self.node_map, observation, max_depth, compact).plans
        return self._build(plans, root)

    def _build(self, plans: list[Plan], root: Any) -> Tree:
        steps = self.data_map.read([row for plan in plans for row in plan.rows])
        ends = steps["next"].select(*self.observation_keys)
        facts = tuple(self.observation_keys), tuple(self.action_keys)
        nodes, start = [], 0
        for number, plan in enumerate(plans):
            stop = start + len(plan.rows)
            data = ends[stop - 1] if plan.rows else root.select(*self.observation_keys).clone()
            if plan.cycle:
                data = data.clone(False).set("is_cycle", torch.tensor(True))
            index = self.node_map.nodes[plan.observation].rows if plan.children else None
            node = Tree(
                count=torch.zeros((), dtype=torch.int32),
                wins=torch.zeros(()),
                index=None if index is None else torch.tensor(index),
                hash=plan.pair,
                node_id=number,
                rollout=steps[start:stop] if plan.rows else None,
                node_data=data,
            )
            found = links.make(unwrap_tensorclass(node))
            found.observation_keys, found.action_keys = facts
            nodes.append(node)
            start = stop
        join(nodes, [plan.children for plan in plans])
        return nodes[0]

    def _observation(self, root: Any) -> int:
        check_collection("a root", root)
        if len(root.batch_size):
            raise InvalidArgumentError(f"a root has the batch size [], not {list(root.batch_size)}")
        return row_hashes(root.unsqueeze(0), self.observation_keys)[0]

    def valid_paths(self, tree: Tree | Any) -> Iterator[Path]:
        """Yield the paths to the leaves of a tree, or of the tree of an observation."""
        return (tree if isinstance(tree, Tree) else self.get_tree(tree)).valid_paths()

    def to_string(self, root: TensorDictBase, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return the tree of an observation as text; see `Tree.to_string`."""
        return self.get_tree(root).to_string(node_format_fn)

    # -- storing ---------------------------------------------------------------------------------
    def dumps(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Save the forest as one dataset, on any backend.

        Args:
            path: a path or URL.
            **options: of `TensorDict.save`.
        """
        maps.dump(
            self.data_map, self.node_map, {name: list(keys) for name, keys in self._keys.items()}, path, **options
        )

    def loads(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Replace the contents of this forest with those that `dumps` saved.

        Args:
            path: a path or URL.
            **options: of `tdstore.open`.

        Raises:
            ValueError: there is no forest. IndexError: it has more steps than `max_size`. KeyError: its steps have
                other entries than those in the `path` of this forest. After an error this forest is unchanged.
        """
        keys = maps.load(self.data_map, self.node_map, path, **options)
        self._keys = {
            name: _keys(name, [tuple(key) if isinstance(key, list) else key for key in found])
            for name, found in keys.items()
        }


def _keys(argument: str, value: Any) -> tuple[Key, ...]:
    """Return the keys of an argument, a key or a list of them.

    Raises:
        ValueError: neither.
    """
    keys = [value] if isinstance(value, (str, tuple)) else value
    if not isinstance(keys, list) or not all(is_key(key) for key in keys):
        raise InvalidArgumentError(f"{argument} is a key or a list of keys, not {value!r}")
    return tuple(tdstore.unravel_key(key) for key in keys)
