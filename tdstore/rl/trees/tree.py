"""`Tree`, a node and all nodes below it: properties, paths, vertices, rollouts, best child and back-propagation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor

import tdstore
from tdstore import TensorDictBase, unwrap_tensorclass
from tdstore.arguments import as_list
from tdstore.errors import InvalidArgumentError, InvalidTypeError, KeyNotFoundError, OutOfRangeError
from tdstore.rl.trees import links, plots, walks
from tdstore.rl.trees.maps import check_collection
from tdstore.rl.trees.scores import UCBScore, check_value
from tdstore.rl.trees.specs import full_spec, spec_keys
from tdstore.rl.trees.storing import StoredTree, identity, is_stack
from tdstore.rl.trees.table import TreeTable
from tdstore.rl.trees.walks import Path
from tdstore.types import DeviceLike, NamesLike, NestedKey, SizeLike

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from tdstore import TensorDictBase


class Tree(StoredTree, nocast=True):
    """A node of a search tree, and everything below it.

    A stack of the children is in `subtree`, which is a Tree of batch size `[n_children]`; each of them has its own.
    Several nodes may share a child.

    A tree is saved as flat tables, on any backend, by the methods of a TensorDict (`save`, `memmap`, `to_h5`,
    `state_dict`, pickle, ...), and `tdstore.open` returns a Tree again. Where a backend has live tensors (memmap,
    shared memory), the tensors of the loaded tree are those of the store, and in-place changes are seen there.

    Args:
        count: the number of visits, a tensor of shape `[]` or a number.
        wins: the sum of the values that were seen, a tensor of shape `[]` or a number.
        index: int64 `[n_children]`, the rows of the children's first steps in the data map of the forest.
        hash: the int64 identity of the observation and action that led here; None at a root.
        node_id: the number of the node, 0 at the root, in the order of breadth-first search.
        rollout: a TensorDict of batch size `[T]`, the steps from the branching point of the parent to this node.
        node_data: a TensorDict of batch size `[]`, what was observed at the end of `rollout`.
        subtree: the children, as a stack; None at a leaf.
        specs: specifications of the environment, of any type; see `full_action_spec`.

    Example:
        >>> root = Tree(count=0, wins=0.0)
        >>> root.subtree = tdstore.lazy_stack([Tree(count=1, wins=1.0), Tree(count=2, wins=0.0)])
        >>> root.num_children, root.max_length(), root.subtree[1].parent.num_children
        (2, 1, 2)
    """

    count: Tensor | float | None = None
    wins: Tensor | float | None = None
    index: Tensor | None = None
    hash: Tensor | int | None = None
    node_id: int | None = None
    rollout: tdstore.TensorDictBase | None = None
    node_data: tdstore.TensorDictBase | None = None
    subtree: Tree | None = None
    specs: Any = None

    def __init__(
        self,
        count: Tensor | float | None = None,
        wins: Tensor | float | None = None,
        index: Tensor | None = None,
        hash: Tensor | int | None = None,
        node_id: int | None = None,
        rollout: tdstore.TensorDictBase | None = None,
        node_data: tdstore.TensorDictBase | None = None,
        subtree: Tree | None = None,
        _parent: Any = None,
        specs: Any = None,
        *,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        names: NamesLike = None,
        lock: bool = False,
    ) -> None:
        fields = (count, wins, index, hash, node_id, rollout, node_data, None, specs)
        base: Any = super()  # to type checkers its fields are its own
        base.__init__(*fields, batch_size=batch_size, device=device, names=names)
        if subtree is not None:
            self.subtree = subtree
        for ref in _parent if isinstance(_parent, list) else [] if _parent is None else [_parent]:
            if (parent := ref()) is not None:
                links.adopt(unwrap_tensorclass(parent), [unwrap_tensorclass(self)])
        if lock:
            self.lock_()

    # -- children and parents ------------------------------------------------------------------
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "subtree":
            super().__setattr__(name, value)
            return
        old = self.children() if self.subtree is not None else []
        stack = None if value is None else _stable(value)
        super().__setattr__(name, stack)
        links.disown(unwrap_tensorclass(self), [unwrap_tensorclass(child) for child in old])
        links.adopt(unwrap_tensorclass(self), [unwrap_tensorclass(child) for child in self.children()])

    def set(self, key: NestedKey, item: Any, inplace: bool = False, **kwargs: Any) -> Self:
        """Set an entry, as `TensorDict.set` does; a subtree gets this node as its parent.

        Args:
            key: the name of a field, or a nested key.
            item: the value; for `subtree` a stack of trees.
            inplace: whether to write into the existing tensor; no effect on `subtree`.
            **kwargs: of `TensorDict.set`; no effect on `subtree`.

        Raises:
            TypeError: `subtree` is not a tree. ValueError: `subtree` is not a stack.
        """
        if key in ("subtree", ("subtree",)):
            self.subtree = item
            return self
        return super().set(key, item, inplace, **kwargs)

    def children(self) -> list[Tree]:
        """Return the children as a list, which is empty at a leaf."""
        stack = self.subtree
        return [] if stack is None else list(stack.unbind(0))

    def add_child(self, child: Tree) -> Tree:
        """Append a node to the children, and return it."""
        self.subtree = tdstore.lazy_stack([*self.children(), child])
        return child

    @property
    def num_children(self) -> int:
        """The number of children."""
        return 0 if self.subtree is None else int(self.subtree.batch_size[0])

    @property
    def _parent(self) -> Any:
        """A weak reference to the parent, a list of them for several parents, None without one."""
        refs = links.parents(unwrap_tensorclass(self))
        return None if not refs else refs[0] if len(refs) == 1 else refs

    @property
    def parent(self) -> Tree | None:
        """The parent, a stack of several; None at a root, and after the parent was garbage collected."""
        found = [container for ref in links.parents(unwrap_tensorclass(self)) if (container := ref()) is not None]
        trees = [Tree.from_tensordict(container) for container in found]
        if len(trees) > 1:
            stack: Tree = tdstore.lazy_stack(trees)
            return stack
        return trees[0] if trees else None

    # -- facts of a node -------------------------------------------------------------------------
    @property
    def visits(self) -> Tensor | float | None:
        """The number of visits, another name for `count`."""
        return self.count

    @visits.setter
    def visits(self, value: Any) -> None:
        self.count = value

    @property
    def branching_action(self) -> Tensor | None:
        """The first action of the rollout, None without one; of a stack, one for each node."""
        return self._action(0)

    @property
    def prev_action(self) -> Tensor | None:
        """The last action of the rollout, None without one; of a stack, one for each node."""
        return self._action(-1)

    def _action(self, step: int) -> Tensor | None:
        if self.batch_size:
            made: Tensor | None = _stacked([node._action(step) for node in self.unbind(0)])
            return made
        if self.rollout is None:
            return None
        found: Tensor | None = _entry(self.rollout[..., step], self._keys("action"))
        return found

    @property
    def selected_actions(self) -> Tensor | None:
        """The first action of each child, stacked; None without children."""
        return None if self.subtree is None else self.subtree.branching_action

    @property
    def node_observation(self) -> Tensor | TensorDictBase:
        """Observation at the node: the tensor if there is one key, else a TensorDict.

        Raises:
            AttributeError: the node has no `node_data`. KeyError: `node_data` lacks the observation.
        """
        found: Tensor | TensorDictBase = _entry(self._observed(), self._keys("observation"))
        return found

    @property
    def node_observations(self) -> TensorDictBase | None:
        """Observations at the node, as a TensorDict.

        Raises:
            AttributeError: the node has no `node_data`. KeyError: `node_data` lacks the observation.
        """
        data = self._observed()
        keys = self._keys("observation")
        for key in keys:
            _entry(data, (key,))
        made: TensorDictBase | None = data.select(*keys)
        return made

    def _observed(self) -> Any:
        if self.node_data is None:
            raise AttributeError("this node has no node_data, so it has no observation")
        return self.node_data

    def _keys(self, kind: Literal["observation", "action"]) -> tuple[links.Key, ...]:
        """Return the keys of observations or actions: by the specs, by the forest, else the name itself."""
        if self.specs is not None:
            try:
                found: list[Any] = spec_keys(full_spec(self.specs, kind))
            except KeyError:
                found = []
            if found:
                return tuple(key[0] if len(key) == 1 else key for key in found)
        node = self.unbind(0)[0] if self.batch_size else self
        facts = links.find(unwrap_tensorclass(node))
        keys = None if facts is None else facts.observation_keys if kind == "observation" else facts.action_keys
        return keys or (kind,)

    @property
    def is_terminal(self) -> bool | Tensor:
        """Whether the episode ended here: the done flag of the last step, False without a rollout.

        Without a `done` flag, `terminated` or `truncated`; without those too, whether there are no children.
        Of a stack, a bool tensor with a value for each node.
        """
        if self.batch_size:
            return torch.stack([torch.as_tensor(node.is_terminal) for node in self.unbind(0)])
        if self.rollout is None:
            return False
        last = self.rollout[..., -1]
        after = last.get("next", None)
        flags = [] if after is None else [after.get(name, None) for name in ("done", "terminated", "truncated")]
        if flags and flags[0] is not None:
            flags = flags[:1]
        found: list[Tensor] = [_squeezed(flag, last.ndim) for flag in flags if flag is not None]
        return torch.stack(found).any(0) if found else self.num_children == 0

    @property
    def full_observation_spec(self) -> Any:
        """The specification of observations, None without `specs`. Raises KeyError where `specs` lack it."""
        return full_spec(self.specs, "observation")

    @property
    def full_reward_spec(self) -> Any:
        """The specification of rewards, as `full_observation_spec`."""
        return full_spec(self.specs, "reward")

    @property
    def full_done_spec(self) -> Any:
        """The specification of done flags, as `full_observation_spec`."""
        return full_spec(self.specs, "done")

    @property
    def full_state_spec(self) -> Any:
        """The specification of states, as `full_observation_spec`."""
        return full_spec(self.specs, "state")

    @property
    def full_action_spec(self) -> Any:
        """The specification of actions, as `full_observation_spec`."""
        return full_spec(self.specs, "action")

    # -- making ----------------------------------------------------------------------------------
    @classmethod
    def make_node(
        cls,
        data: TensorDictBase,
        *,
        device: DeviceLike | None = None,
        batch_size: SizeLike | None = None,
        specs: Any = None,
    ) -> Self:
        """Make a node from an observation, or from a step and the observation that follows it.

        Args:
            data: a TensorDict. If it has `next`, it is the rollout of the node, with a time dimension of 1 where it
                has none, and the node gets one child, made of the last `next`.
            device: of the counters; default: that of `data`.
            batch_size: of the node; default: `[]`.
            specs: the specifications of the node.

        Raises:
            TypeError: `data` is not a TensorDict.
        """
        check_collection("the data of a node", data)
        rest = [key for key in ("action", "next") if data.get(key, None) is not None]
        size, device = () if batch_size is None else batch_size, data.device if device is None else device
        node = cls(
            count=torch.zeros(size, device=device),
            wins=torch.zeros(size, device=device),
            node_data=data.exclude(*rest),
            specs=specs,
            batch_size=batch_size,
            device=device,
        )
        if "next" in rest:
            node.rollout = data if data.ndim else data.unsqueeze(0)
            node.subtree = tdstore.lazy_stack([cls.make_node(node.rollout["next"][..., -1], device=device)])
        return node

    # -- as a graph ------------------------------------------------------------------------------
    def iter_nodes(self) -> Iterator[Tree]:
        """Yield each node once, by breadth-first search."""
        yield from self._nodes()

    def vertices(self, *, key_type: Literal["hash", "path", "id"] = "hash") -> dict[Any, Tree]:
        """Return the nodes, by breadth-first search.

        Args:
            key_type: "path": tuples of the numbers of children, `()` for the root; a shared node comes once for each
                path. "id": by `node_id`. "hash": by `hash`, which is None at a root; the first node of a hash.

        Raises:
            ValueError: another `key_type`.
        """
        if key_type == "path":
            return {path: node for path, node, _ in walks.paths_by_breadth(self, Tree.children)}
        if key_type not in ("id", "hash"):
            raise InvalidArgumentError(f"key_type is 'hash', 'path' or 'id', not {key_type!r}")
        found: dict[Any, Tree] = {}
        for number, node in enumerate(self._nodes()):
            found.setdefault(_id(node, number) if key_type == "id" else _number(node.hash), node)
        return found

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """Return the number of nodes; with `count_repeat`, shared ones once for each path to them."""
        if count_repeat:
            return sum(1 for _ in walks.paths_by_breadth(self, Tree.children))
        return len(self._nodes())

    def edges(self) -> list[tuple[int, int]]:
        """Return the ids of parents and children, each pair once, by breadth-first search."""
        nodes = self._nodes()
        ids = {identity(node): _id(node, number) for number, node in enumerate(nodes)}
        pairs = ((ids[identity(node)], ids[identity(child)]) for node in nodes for child in node.children())
        return list(dict.fromkeys(pairs))

    def valid_paths(self) -> Iterator[Path]:
        """Yield the paths from the root to each leaf, as numbers of children, by breadth-first search."""
        return (path for path, _, leaf in walks.paths_by_breadth(self, Tree.children) if leaf)

    def max_length(self) -> int:
        """Return the number of edges of the longest path."""
        return walks.longest_path(self._nodes(), Tree.children, identity)

    def nodes_on_path(self, path: Sequence[int]) -> list[Tree]:
        """Return the nodes on a path, the root first.

        Raises:
            IndexError: a node on the path has no such child.
        """
        found = [self]
        for depth, number in enumerate(as_list(path, "path", "a sequence of numbers")):
            below = found[-1].children()
            if not 0 <= number < len(below):
                at = tuple(path[:depth])
                raise OutOfRangeError(f"the node at {at} has {len(below)} children, and none with the number {number}")
            found.append(below[number])
        return found

    def rollout_from_path(self, path: Sequence[int]) -> TensorDictBase | None:
        """Concatenate the rollouts of all nodes on a path; None where no node has one.

        Raises:
            IndexError: a node on the path has no such child.
        """
        parts: list[Any] = [node.rollout for node in self.nodes_on_path(path) if node.rollout is not None]
        return cast("TensorDictBase", torch.cat(parts, dim=-1)) if parts else None

    def get_vertex_by_id(self, id: int) -> Tree:
        """Return the first node with an id, by breadth-first search.

        Raises:
            ValueError: no node has this id.
        """
        for number, node in enumerate(self._nodes()):
            if _id(node, number) == id:
                return node
        raise InvalidArgumentError(f"no node of the tree has the id {id}")

    def get_vertex_by_hash(self, hash: Tensor | int) -> Tree:
        """Return the first node with a hash, by breadth-first search.

        Raises:
            ValueError: no node has this hash.
        """
        wanted = _number(hash)
        for node in self._nodes():
            if _number(node.hash) == wanted:
                return node
        raise InvalidArgumentError(f"no node of the tree has the hash {wanted}")

    def __contains__(self, other: object) -> bool:
        """Check whether a node of the tree has the hash of another; of a root, which has none, its `node_data`."""
        if not isinstance(other, Tree):
            return False
        wanted = _number(other.hash)
        if wanted is not None:
            return any(_number(node.hash) == wanted for node in self._nodes())
        return any(_equal(node.node_data, other.node_data) for node in self._nodes())

    def fully_expanded(self, env: Any) -> bool:
        """Check whether there is a child for each action: `env.cardinality(node_data)`, or the number `env`.

        Raises:
            TypeError: `env` is not a number and has no `cardinality`.
        """
        if not isinstance(env, int) and not hasattr(env, "cardinality"):
            raise InvalidTypeError(f"env is a number of actions, or has cardinality(), not {type(env).__name__}")
        number = env if isinstance(env, int) else env.cardinality(self.node_data)
        return bool(number == self.num_children)

    # -- search ----------------------------------------------------------------------------------
    def best_child(self, score_fn: Callable[[Tree], Tensor] | None = None) -> Tree:
        """Return the child with the highest score; of several such children, the first.

        Args:
            score_fn: returns the scores `[n_children]` of the children of a node; default: `UCBScore()`.

        Raises:
            ValueError: the node has no children, or not one score for each.
        """
        return self.children()[self.best_index(score_fn)]

    def best_index(self, score_fn: Callable[[Tree], Tensor] | None = None) -> int:
        """Return the number of the child with the highest score; see `best_child`.

        Raises:
            ValueError: the node has no children, or `score_fn` did not return one score for each.
        """
        if not self.num_children:
            raise InvalidArgumentError("a leaf has no best child")
        scores = (UCBScore() if score_fn is None else score_fn)(self)
        if scores.shape != (self.num_children,):
            raise InvalidArgumentError(f"score_fn gave the shape {list(scores.shape)} for {self.num_children} children")
        return int(scores.argmax())

    def backpropagate(self, path: Sequence[int], value: float | Tensor, *, discount: float = 1.0) -> None:
        """Add one visit and a value to each node on a path, the root included.

        Tensors are changed in place. None counts as zero.

        Args:
            path: the numbers of children, from this node on.
            value: the value at the end of the path.
            discount: the factor of the value for each step towards the root: -1 for two players who take turns.

        Raises:
            IndexError: a node on the path has no such child. TypeError: the value is not a number. ValueError: its
                shape differs from that of `wins`. Nothing is changed then.
        """
        for name, number in (("value", value), ("discount", discount)):
            if not isinstance(number, (int, float, Tensor)):
                raise InvalidTypeError(f"{name} is a number or a tensor, not {type(number).__name__}")
        nodes, values = self.nodes_on_path(path)[::-1], [value]
        for node in nodes:
            check_value(values[-1], node.wins)
            values.append(values[-1] * discount)
        for node, one in zip(nodes, values, strict=False):
            _add(node, "count", 1)
            _add(node, "wins", one)

    # -- as text and pictures ------------------------------------------------------------------
    def to_string(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return one line for each node that has a rollout, depth first, indented, with its path.

        Args:
            node_format_fn: returns what is shown of a node; default: its `node_data` as a dict.
        """
        show = node_format_fn or (lambda node: None if node.node_data is None else node.node_data.to_dict())
        lines = []
        for path, node in walks.paths_by_depth(self, Tree.children):
            if node.rollout is not None:
                lines.append(f"{' ' * (len(path) - 1)}{path} {show(node)}")
        return "\n".join(lines)

    def plot(
        self,
        backend: str = "plotly",
        figure: str = "tree",
        info: Sequence[str] | None = None,
        make_labels: Callable[[Tree, Path], str] | None = None,
        *,
        show: bool = False,
    ) -> Figure:
        """Draw the tree, and return the figure. Requires the package plotly.

        Args:
            backend: "plotly".
            figure: "tree": nodes and lines; "box": a treemap, the area of a node being its number of visits.
            info: names of attributes shown when the pointer is over a node; default: id, visits and wins.
            make_labels: returns the label of a node; default: its action and visits.
            show: open the figure in a browser or notebook too.

        Raises:
            NotImplementedError: another backend or figure. MissingDependencyError: plotly is not installed.
        """
        return plots.plot(self, backend, figure, info, make_labels, show)

    def __repr__(self) -> str:
        if self.subtree is None:
            return super().__repr__()
        below = "a stack for each node" if self.batch_size else f"{self.num_children} children"
        return repr(self.exclude("subtree")).replace("subtree=None", f"subtree=<{below}>")


def _stable(stack: Tree) -> Tree:
    """Make a stack return the same child objects at each access, at every level.

    Raises:
        TypeError: not a Tree. ValueError: not a stack.
    """
    if not isinstance(stack, Tree):
        raise InvalidTypeError(f"subtree is a stack of trees, not a {type(stack).__name__}")
    if not stack.batch_size:
        raise InvalidArgumentError("subtree is a stack of trees: pass tdstore.lazy_stack([child]) for a single child")
    children, again = list(stack.unbind(0)), stack.unbind(0)
    if is_stack(stack) and all(identity(a) == identity(b) for a, b in zip(children, again, strict=True)):
        return stack
    for child in children:
        if child.subtree is not None:
            child.subtree = child.subtree
    made: Tree = tdstore.lazy_stack(children)
    return made


def _stacked(values: list[Any]) -> Any:
    """Stack values of the nodes of a stack: one tensor if they are alike, else a list."""
    if any(value is None for value in values) or len({getattr(value, "shape", None) for value in values}) > 1:
        return values
    return torch.stack(values)


def _entry(data: Any, keys: tuple[links.Key, ...]) -> Any:
    """Return the entry of a single key, or those of several as a TensorDict."""
    for key in keys:
        if data.get(key, None) is None:
            raise KeyNotFoundError(f"no entry {key!r}; there are {', '.join(map(repr, data.keys()))}")
    return data.get(keys[0]) if len(keys) == 1 else data.select(*keys)


def _number(hash: Tensor | int | None) -> int | None:
    return None if hash is None else int(hash)


def _id(node: Tree, number: int) -> int:
    """Return the id of a node; its number in breadth-first search where it has none."""
    return number if node.node_id is None else int(node.node_id)


def _squeezed(flag: Tensor, ndim: int) -> Tensor:
    return flag.squeeze(-1) if flag.ndim > ndim else flag


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if set(one.keys(True, True)) != set(other.keys(True, True)) or one.batch_size != other.batch_size:
        return False
    for key in one.keys(True, True):
        mine, theirs = one.get(key), other.get(key)
        if not (torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs):
            return False
    return True


def _add(node: Tree, name: str, value: Any) -> None:
    old = getattr(node, name)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.reshape(())  # a reward often has the shape [1]
    if isinstance(old, Tensor):
        old.add_(value.to(old.dtype) if isinstance(value, Tensor) else value)
    else:
        setattr(node, name, (0 if old is None else old) + value)


TreeTable.grow = Tree.from_table
