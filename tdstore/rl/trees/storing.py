"""Operations on a whole tree: store as flat tables, pickle, clone, move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch

import tdstore
from tdstore import unwrap_tensorclass
from tdstore.errors import UnsupportedError
from tdstore.rl.trees import links, walks
from tdstore.rl.trees.specs import reduce_specs, restore_specs
from tdstore.rl.trees.table import TreeTable, flatten, unflatten
from tdstore.rl.types import PathLike
from tdstore.types import DeviceLike


class StoredTree(tdstore.TensorClass, nocast=True):
    """Operations on a whole tree: the base of `Tree`, which has the fields."""

    if TYPE_CHECKING:
        node_id: int | None
        subtree: Any
        specs: Any

        def children(self) -> list[Self]:
            """Return the children."""

    # -- storing ---------------------------------------------------------------------------------
    def to_table(self) -> TreeTable:
        """Return the tree as flat tables; see `TreeTable`. Tensors are copied."""
        nodes = self._nodes()
        numbers = {identity(node): number for number, node in enumerate(nodes)}
        children = [[numbers[identity(child)] for child in node.children()] for node in nodes]
        roots = torch.tensor([numbers[identity(node)] for node in self._roots()])
        facts = links.find(unwrap_tensorclass(nodes[0]))
        keys = None if facts is None else [facts.observation_keys, facts.action_keys]
        specs = next((node.specs for node in nodes if node.specs is not None), None)
        return flatten(nodes, children, roots if is_stack(self) else roots[0], reduce_specs(specs), keys)

    @classmethod
    def from_table(cls, table: TreeTable) -> Self:
        """Build a tree from tables. Its tensors share memory with those of the tables, where these are live."""
        stored = isinstance(unwrap_tensorclass(table), tdstore.PersistentTensorDict)
        nodes, children, layout = unflatten(table.read() if stored else table, lambda fields: cls(**fields))
        specs = restore_specs(layout["specs"])
        keys = [None if part is None else tuple(map(_key, part)) for part in layout["keys"] or (None, None)]
        for node in nodes:
            if any(keys):
                facts = links.make(unwrap_tensorclass(node))
                facts.observation_keys, facts.action_keys = keys
        join(nodes, children)
        roots = [nodes[number] for number in table.roots.reshape(-1).tolist()]
        for root in roots if specs is not None else ():
            root.specs = specs
        tree: Self = tdstore.lazy_stack(roots) if table.roots.ndim else roots[0]
        live = not stored and _is_live(table.edges)
        if stored or live:
            links.make(unwrap_tensorclass(tree)).table = table
        for node in reversed(nodes) if live else ():  # one by one: a tree is deeper than Python's stack
            node.lock_()
        return tree

    def _renew(self, made: Any) -> Any:
        """Build the tree of a stored table; for a future, return a future of the tree."""
        if isinstance(made, Future):
            done: Future[Any] = Future()
            done.set_result(self._renew(made.result()))
            return done
        return type(self).from_table(made) if isinstance(made, TreeTable) else made  # one that was opened is a tree

    def _become(self, tree: StoredTree) -> Self:
        """Take the fields and the store of another tree."""
        for field in self.fields():
            setattr(self, field.name, getattr(tree, field.name))
        if (table := tree._table()) is not None:
            links.make(unwrap_tensorclass(self)).table = table
        return self

    def _table(self) -> Any:
        """Return the stored table of the tree, None for none."""
        facts = links.find(unwrap_tensorclass(self))
        return None if facts is None else facts.table

    @overload
    def save(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        return_early: Literal[False] = False,
        **kwargs: Any,
    ) -> Self: ...
    @overload
    def save(
        self, prefix: PathLike | None = None, copy_existing: bool = False, *, return_early: Literal[True], **kwargs: Any
    ) -> Future[tdstore.TensorDictBase]: ...
    def save(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Save the tree as flat tables, as `TensorDict.save` does, and return the stored tree.

        Args:
            prefix: a path or URL; None for a temporary place.
            copy_existing: whether to copy tensors that are mapped from files already.
            **kwargs: of `TensorDict.save`; with `return_early=True` the result is a future of the tree.
        """
        return self._renew(self.to_table().save(prefix, copy_existing, **kwargs))

    dumps = save

    @overload
    def memmap(
        self, prefix: PathLike | None = None, copy_existing: bool = False, *, return_early: Literal[True], **kwargs: Any
    ) -> Future[Self]: ...
    @overload
    def memmap(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Self: ...
    def memmap(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Save the tree as flat tables, as `TensorDict.memmap` does; return a tree over memory-mapped tensors.

        Args:
            prefix: a path; None for temporary files.
            copy_existing: whether to copy tensors that are mapped from files already.
            **kwargs: of `TensorDict.memmap`; with `return_early=True` the result is a future of the tree.
        """
        return self._renew(self.to_table().memmap(prefix, copy_existing, **kwargs))

    def memmap_(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Self:
        """Save the tree as flat tables, as `TensorDict.memmap_` does; this tree gets the memory-mapped tensors."""
        self._become(self._renew(self.to_table().memmap(prefix, copy_existing, **kwargs)))
        return self.lock_()

    @overload
    def memmap_like(
        self, prefix: PathLike | None = None, copy_existing: bool = False, *, return_early: Literal[True], **kwargs: Any
    ) -> Future[Self]: ...
    @overload
    def memmap_like(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Self: ...
    def memmap_like(self, prefix: PathLike | None = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Allocate files, as `TensorDict.memmap_like` does: the same nodes and edges, zeros for counts and data.

        Args:
            prefix: a path; None for temporary files.
            copy_existing: whether to copy tensors that are mapped from files already.
            **kwargs: of `TensorDict.memmap`; with `return_early=True` the result is a future of the tree.
        """
        table = self.to_table()
        for group in table.nodes.values():
            for name in ("count", "wins", "node_data"):
                if (entry := group.get(name, None)) is not None:
                    entry.zero_()
        if table.rollouts is not None:
            table.rollouts.zero_()
        return self._renew(table.memmap(prefix, copy_existing, **kwargs))

    def share_memory_(self) -> Self:
        """Move the tensors of this tree to shared memory, as `TensorDict.share_memory_` does."""
        self._become(self._renew(self.to_table().save(storage="shared")))
        return self.lock_()

    def to_h5(self, *args: Any, **kwargs: Any) -> Self:
        """Save the tree as flat tables, as `TensorDict.to_h5` does."""
        tree: Self = self._renew(self.to_table().to_h5(*args, **kwargs))
        return tree

    def to_zarr(self, *args: Any, **kwargs: Any) -> Self:
        """Save the tree as flat tables, as `TensorDict.to_zarr` does."""
        tree: Self = self._renew(self.to_table().to_zarr(*args, **kwargs))
        return tree

    def to_store(self, *args: Any, **kwargs: Any) -> Self:
        """Save the tree as flat tables, as `TensorDict.to_store` does."""
        tree: Self = self._renew(self.to_table().to_store(*args, **kwargs))
        return tree

    @overload
    def consolidate(self, *args: Any, return_early: Literal[False] = False, **kwargs: Any) -> Self: ...
    @overload
    def consolidate(self, *args: Any, return_early: Literal[True], **kwargs: Any) -> Future[Self]: ...
    def consolidate(self, *args: Any, **kwargs: Any) -> Any:
        """Consolidate the tree as flat tables, as `TensorDict.consolidate` does."""
        return self._renew(self.to_table().consolidate(*args, **kwargs))

    def load_(self, prefix: Any, *args: Any, **kwargs: Any) -> Self:
        """Replace this tree with a stored one."""
        found: Any = type(self).load(prefix, *args, **kwargs)
        return self._become(found)

    load_memmap_ = load_

    def is_memmap(self) -> bool:
        """Check whether the tensors are memory-mapped."""
        return (table := self._table()) is not None and isinstance(table.edges, tdstore.MemoryMappedTensor)

    def is_shared(self) -> bool:
        """Check whether the tensors are in shared memory."""
        return (table := self._table()) is not None and _is_live(table.edges)

    def commit(self, message: str | None = None) -> Self:
        """Make in-place changes durable, if the tensors of the tree are in a store.

        Args:
            message: make the commit a version, as `TensorDict.commit` does.

        Raises:
            UnsupportedError: there is a `message`, and the tensors are in no store, or in one without versions.
        """
        if (table := self._table()) is not None:
            table.commit(message)
        elif message is not None:
            raise UnsupportedError("commit: this tree is in memory, and has no versions", hint="save() it first")
        return self

    def close(self) -> None:
        """Commit in-place changes and close the store, if the tree has one. May be repeated."""
        if (table := self._table()) is not None:
            table.close()

    def __enter__(self) -> Self:
        """Return the tree. The end of the block closes its store, if it has one."""
        return super().__enter__() if self._table() is None else self

    def __exit__(self, *error: Any) -> Any:
        if self._table() is None:
            return super().__exit__(*error)
        return self.close()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the flat tables, as `TensorDict.state_dict` does."""
        return self.to_table().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Self:
        """Replace this tree with that of a state dict."""
        found = tdstore.TensorDict()
        found.load_state_dict(state_dict, False, **kwargs)
        return self._become(self.from_table(TreeTable.from_tensordict(found)))

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Convert to a dict, as `TensorDict.to_dict` does; `subtree` is a list of the dicts of the children."""
        if self.batch_size:
            return super().to_dict(**kwargs)
        nodes = self._nodes()
        made = {identity(node): super(StoredTree, bare(node)).to_dict(**kwargs) for node in nodes}
        for node in nodes:
            if node.subtree is not None:
                made[identity(node)]["subtree"] = [made[identity(child)] for child in node.children()]
        return made[identity(self)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.to_table())

    # -- the same tree elsewhere -----------------------------------------------------------------
    def clone(self, recurse: bool = True, **kwargs: Any) -> Self:
        """Copy the tree, as `TensorDict.clone` does; shared nodes stay shared."""
        return self._each(lambda container: container.clone(recurse, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert device or dtype, as `TensorDict.to` does; shared nodes stay shared."""
        return self._each(lambda container: container.to(*args, **kwargs))

    def cpu(self, **kwargs: Any) -> Self:
        """Move the tree to the CPU, as `TensorDict.cpu` does; shared nodes stay shared."""
        return self.to("cpu", **kwargs)

    def cuda(self, device: DeviceLike | None = None, **kwargs: Any) -> Self:
        """Move the tree to a GPU, as `TensorDict.cuda` does; shared nodes stay shared."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device, **kwargs)

    def _each(self, fn: Callable[[Any], Any]) -> Self:
        """Apply a function to the containers of all nodes, without their children, and join the results."""
        nodes = self._nodes()
        numbers = {identity(node): number for number, node in enumerate(nodes)}
        made = [type(self).from_tensordict(fn(unwrap_tensorclass(bare(node)))) for node in nodes]
        for old, new in zip(nodes, made, strict=True):
            if (facts := links.find(unwrap_tensorclass(old))) is not None:
                copied = links.make(unwrap_tensorclass(new))
                copied.observation_keys, copied.action_keys = facts.observation_keys, facts.action_keys
        join(made, [[numbers[identity(child)] for child in node.children()] for node in nodes])
        roots = [made[numbers[identity(node)]] for node in self._roots()]
        found: Self = tdstore.lazy_stack(roots) if is_stack(self) else roots[0]
        return found

    def _roots(self) -> list[Self]:
        return list(self.unbind(0)) if is_stack(self) else [self]

    def _nodes(self) -> list[Self]:
        return walks.nodes_by_breadth(self._roots(), _children, identity)


def _is_live(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is a view of a file or of shared memory."""
    return tensor.is_shared() or isinstance(tensor, tdstore.MemoryMappedTensor)


def _unpickled(cls: type[StoredTree], table: TreeTable) -> StoredTree:
    return cls.from_table(table)


def is_stack(tree: StoredTree) -> bool:
    """Check whether a tree is a stack of nodes, as `subtree` is."""
    return isinstance(unwrap_tensorclass(tree), tdstore.LazyStackedTensorDict)


def identity(node: StoredTree) -> int:
    """Return the identity that two wrappers of one node have in common."""
    return id(unwrap_tensorclass(node))


def bare(node: StoredTree) -> StoredTree:
    """Return a node without its children."""
    return node if node.subtree is None else node.exclude("subtree")


def join(nodes: Sequence[StoredTree], children: Sequence[Sequence[int]]) -> None:
    """Attach children to nodes."""
    for node, below in zip(nodes, children, strict=True):
        if below:
            node.subtree = tdstore.lazy_stack([nodes[number] for number in below])


def _key(stored: Any) -> links.Key:
    return tuple(stored) if isinstance(stored, list) else stored


def _children(node: Any) -> list[Any]:
    found: list[Any] = node.children()
    return found
