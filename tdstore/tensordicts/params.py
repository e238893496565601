"""TensorDictParams: a TensorDict whose tensors are the parameters and buffers of a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from tdstore import pickling
from tdstore.container.core.container import Container, EntrySource
from tdstore.container.core.key_views import IsLeaf
from tdstore.container.core.tensorclasses import class_of, rewrap, unwrap
from tdstore.container.display.text import text
from tdstore.container.methods.access import AS_SET
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidTypeError, KeyExistsError, UnsupportedError, UntrustedDataError
from tdstore.tensordicts.resident.indexing import IndexedTree
from tdstore.types import Entry, IndexType, Names, NestedKey, Path, is_key

_unhindered = torch.no_grad()
"""For in-place writes into parameters, which torch refuses while gradients are on."""


class TensorDictParams(IndexedTree, nn.Module):  # type: ignore[misc]
    """A TensorDict that is a `torch.nn.Module`: its tensors are found by optimizers, and by modules that hold it.

    Floating-point entries become parameters, around the same memory; integers, and what is a `torch.nn.Buffer`
    already, are buffers. Names are dotted: `("a", "b")` is the parameter `a.b`. What computes something from
    it (maths, indexing, `apply`, `data`, ...) gives a plain TensorDict; `clone` and `to` give this class.

    Args:
        parameters: a TensorDict or a dict; its tree is copied, its tensors are not.
        no_convert: leave tensors as they are: what is no parameter is a buffer.
        lock: freeze the key set; else new entries are converted too.
        **kwargs: further entries.

    Raises:
        UnsupportedError: there is a lazy stack in it.

    Example:
        >>> params = TensorDictParams(TensorDict({"a": torch.ones(2), "n": {"i": torch.arange(3)}}))
        >>> [name for name, _ in params.named_parameters()], [name for name, _ in params.named_buffers()]
        (['a'], ['n.i'])
        >>> optimizer = torch.optim.SGD(params.parameters(), lr=1.0)
        >>> params["a"].sum().backward()
        >>> optimizer.step()
        >>> params.data["a"]
        tensor([0., 0.])
    """

    _get_post_hooks: list[Callable[[Any, Any], Any]]

    def __init__(self, parameters: Any = None, *, no_convert: bool = False, lock: bool = False, **kwargs: Any) -> None:
        source: Any = parameters if isinstance(parameters, Container) else self._resident_class(parameters)
        if kwargs:
            source = source.copy().update(kwargs)
        self._setup(source, bool(no_convert))
        self._data = self._own(source)._data
        if lock:
            self.lock_()

    def _setup(self, td: Any, no_convert: bool) -> None:
        """Set all but the entries."""
        state = vars(nn.Module())
        del state["_parameters"], state["_buffers"]  # told from the tree
        self.__dict__.update(state, _get_post_hooks=[])
        self._batch_size, self._device, self._names = td._batch_size, td._device, td._names
        self._parents = self._undo = self._binding = None
        self._state = 0
        self.no_convert = no_convert

    @classmethod
    def _new(
        cls, data: dict[str, Any], batch: torch.Size, device: torch.device | None, names: Names, state: int = 0
    ) -> Any:
        """Create a TensorDict. What is computed from parameters is not a module."""
        return cls._resident_class._new(data, batch, device, names, state)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Self:
        """Build as `TensorDict.from_dict` does, with parameters of the tensors."""
        return cls(cls._resident_class.from_dict(*args, **kwargs))

    def _of_leaves(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Create another of this class and tree with `fn(leaf)` for each leaf. Shared tensors stay shared."""
        made: dict[int, Tensor] = {}
        leaves = self._leaf_list()
        for leaf in leaves:
            if id(leaf) not in made:
                new = fn(leaf)
                # fn may give a parameter already; else it is one, as the leaf was
                plain = isinstance(leaf, nn.Parameter) and not isinstance(new, nn.Parameter)
                trained = plain and (new.is_floating_point() or new.is_complex())  # a cast may make a buffer of it
                made[id(leaf)] = nn.Parameter(new.detach(), leaf.requires_grad) if trained else new
        return self._around(self._with_leaves(iter([made[id(leaf)] for leaf in leaves])))

    def _around(self, td: Any) -> Self:
        """Create one of this class around the entries of a TensorDict, as they are."""
        other: Self = type(self).__new__(type(self))
        other._setup(td, self.no_convert)
        other._data = td._data
        other.training = self.training
        return other

    # -- entries that are read ------------------------------------------------------------------
    def masked_fill(self, mask: Tensor, value: Any) -> Self:
        """Copy, with `value` in the rows where `mask` is true: a TensorDict, since it is computed from parameters."""
        made: Self = super().clone().masked_fill_(mask, value)
        return made

    def split_keys(self, *key_sets: Any, inplace: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        """Split into one TensorDict per set of keys; the last result, with all other keys, is of this class."""
        *parts, rest = super().split_keys(*key_sets, inplace=inplace, **kwargs)
        return (*parts, rest if inplace else self._around(rest))

    def register_get_post_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        """Call `hook(self, entry)` whenever an entry is read by its key, or by `items` and `values`.

        Args:
            hook: what it returns is read instead of the entry, unless that is None. It sees tensors, and values that
                are no tensors, and no nested TensorDicts. Hooks run in the order in which they were registered.

        Example:
            >>> params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
            >>> params.register_get_post_hook(lambda params, entry: entry.detach() * 3)
            >>> params["a"]
            tensor([3., 3.])
        """
        self._get_post_hooks.append(hook)

    def _hooked(self, entry: Any) -> Any:
        if not isinstance(entry, (Container, NonTensor)):
            for hook in self._get_post_hooks:
                made = hook(self, entry)
                entry = entry if made is None else made
        return entry

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Entry: ...
    @overload
    def __getitem__(self, index: IndexType) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return self._hooked(found) if self._get_post_hooks and is_key(index) else found

    def get(self, key: NestedKey, default: object = AS_SET, **kwargs: object) -> Entry:
        """Return the entry as `TensorDict.get` does."""
        found = super().get(key, default, **kwargs)
        return self._hooked(found) if self._get_post_hooks and self._find(key) is not None else found

    def get_at(self, key: NestedKey, index: IndexType, default: object = AS_SET) -> Entry:
        """Return rows of the entry as `TensorDict.get_at` does."""
        found = super().get_at(key, index, default)
        return self._hooked(found) if self._get_post_hooks and self._find(key) is not None else found

    @overload
    def items(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Collection[tuple[str, Entry]]: ...
    @overload
    def items(
        self, include_nested: bool, leaves_only: bool = False, is_leaf: IsLeaf | None = None, *, sort: bool = False
    ) -> Collection[tuple[str | Path, Entry]]: ...
    def items(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view of pairs as `TensorDict.items` does."""
        found = super().items(*args, **kwargs)
        return [(key, self._hooked(entry)) for key, entry in found] if self._get_post_hooks else found

    def values(self, *args: Any, **kwargs: Any) -> Collection[Entry]:
        """Return a view of the entries as `TensorDict.values` does."""
        found = super().values(*args, **kwargs)
        return [self._hooked(entry) for entry in found] if self._get_post_hooks else found

    # -- entries that come in ------------------------------------------------------------------
    def _own(self, value: Any) -> Any:
        """Convert an entry to what this TensorDict holds: a parameter or a buffer."""
        if isinstance(value, Tensor):
            # Only what is a number with a fraction, and no buffer by its class, can be trained.
            if self.no_convert or isinstance(value, (nn.Parameter, nn.Buffer)) or not value.is_floating_point():
                return value
            return nn.Parameter(value.detach())
        if isinstance(value, Container):
            if isinstance(value, self._stack_class):
                raise UnsupportedError(
                    "a lazy stack cannot be part of a TensorDictParams", hint="make it first: td.to_tensordict()"
                )
            td = value._resident()
            bare = unwrap(td)
            data = {key: self._own(below) for key, below in bare._data.items()}
            return rewrap(class_of(bare), self._new(data, td._batch_size, td._device, td._names))
        return value

    def _assign(self, entries: Mapping[str, Any]) -> None:
        super()._assign({key: self._own(value) for key, value in entries.items()})

    def _convert(self, td: Any) -> None:
        """Convert what came in at a deeper level."""
        td._forget_facts()
        for key, value in td._data.items():
            if isinstance(value, Container):
                self._convert(value)
            else:
                td._data[key] = self._own(value)

    def set(self, key: NestedKey, item: object, inplace: bool = False, **kwargs: Any) -> Self:
        """Set an entry, which becomes a parameter or a buffer."""
        with torch.no_grad():
            super().set(key, item, inplace, **kwargs)
        self._convert(self)
        return self

    def update(
        self, input_dict_or_td: EntrySource | None = None, clone: bool = False, inplace: bool = False, **kwargs: Any
    ) -> Self:
        """Merge entries, which become parameters or buffers."""
        with torch.no_grad():
            super().update(input_dict_or_td, clone, inplace, **kwargs)
        self._convert(self)
        return self

    set_ = _unhindered(IndexedTree.set_)
    set_at_ = _unhindered(IndexedTree.set_at_)
    fill_ = _unhindered(IndexedTree.fill_)
    apply_ = _unhindered(IndexedTree.apply_)
    _set_rows = _unhindered(IndexedTree._set_rows)
    _update_in_place = _unhindered(IndexedTree._update_in_place)
    _foreach_ = _unhindered(IndexedTree._foreach_)

    def _become(self, other: Any) -> Self:
        """Take over the new memory. Parameters stay the objects that optimizers hold."""
        before = dict(self._places())
        super()._become(other)
        for path, (node, key) in dict(self._nodes()).items():
            node._forget_facts()
            old, new = before.get(path), node._data[key]
            if isinstance(old, nn.Parameter) and old.dtype == new.dtype:
                old.data = new.detach()
                node._data[key] = old
            elif old is None or isinstance(old, nn.Parameter):
                node._data[key] = self._own(new)
        return self

    def share_memory_(self) -> Self:
        """Move the tensors to shared memory, where they are, and lock."""
        nn.Module.share_memory(self)
        return self.lock_()

    def is_shared(self) -> bool:
        """Return whether other processes of this machine see writes to the tensors."""
        leaves = self._leaf_list()
        return super().is_shared() or (bool(leaves) and all(leaf.is_shared() for leaf in leaves))

    # -- as a module -----------------------------------------------------------------------------
    def _nodes(self) -> Iterator[tuple[Path, tuple[Any, str]]]:
        """Yield `(path, (container, key))` of every tensor."""

        def walk(td: Any, path: Path) -> Iterator[tuple[Path, tuple[Any, str]]]:
            for key, value in td._data.items():
                if isinstance(value, Tensor):
                    yield (*path, key), (td, key)
                elif isinstance(value, Container):
                    yield from walk(value, (*path, key))

        return walk(self, ())

    def _places(self) -> Iterator[tuple[Path, Tensor]]:
        for path, (node, key) in self._nodes():
            yield path, node._data[key]

    @property
    def _parameters(self) -> dict[str, Any]:  # type: ignore[override]
        """What torch looks for parameters in."""
        return _Named(self, lambda leaf: isinstance(leaf, nn.Parameter))

    @property
    def _buffers(self) -> dict[str, Any]:  # type: ignore[override]
        return _Named(self, lambda leaf: not isinstance(leaf, nn.Parameter))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set a parameter: `set(name, param)`."""
        self.set(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Set a tensor without making a parameter of it. Buffers here are always persistent."""
        self.set(name, tensor if tensor is None else nn.Buffer(tensor))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (Tensor, Container)) and not hasattr(type(self), name):
            self.set(name, value)
        elif isinstance(value, nn.Module):
            raise InvalidTypeError("a TensorDictParams holds tensors and TensorDicts, no modules")
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        data = None if name.startswith("_") else self._data
        if data is None or name not in data:
            raise AttributeError(f"a {type(self).__name__} has no attribute, and no entry, {name!r}")
        value = self[name]
        # As a module has submodules: what swaps `a.b` by name looks for `b` in `a`.
        return self._around(value) if isinstance(value, Container) else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply what `to`, `double`, `cuda`, ... of a module around this one call. Parameters stay the objects."""
        shell = nn.Module()
        object.__setattr__(shell, "_parameters", self._parameters)
        object.__setattr__(shell, "_buffers", self._buffers)
        shell._apply(fn)
        if self._device is not None:
            self.auto_device_()
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, from_flatten: bool | None = None
    ) -> Self:
        """Load as every TensorDict does. What `assign` takes over becomes a parameter."""
        super().load_state_dict(state_dict, strict, assign, from_flatten)
        self._convert(self)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as part of `load_state_dict` of a module around this one."""
        assign = local_metadata.get("assign_to_params_buffers", False)
        known = set()
        for path, (node, key) in dict(self._nodes()).items():
            name = prefix + ".".join(path)
            known.add(name)
            leaf, loaded = node._data[key], state_dict.get(name)
            if loaded is None:
                missing_keys.append(name)
            elif loaded.shape != leaf.shape:
                error_msgs.append(
                    f"size mismatch for {name}: copying a param with shape {loaded.shape} from checkpoint, "
                    f"the shape in current model is {leaf.shape}."
                )
            elif assign:
                plain = isinstance(leaf, nn.Parameter) and not isinstance(loaded, nn.Parameter)
                node._forget_facts()
                node._data[key] = nn.Parameter(loaded, leaf.requires_grad) if plain else loaded
            else:
                with torch.no_grad():
                    leaf.copy_(loaded)
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set `requires_grad` of every parameter."""
        for param in self.parameters():
            param.requires_grad_(requires_grad)
        return self

    # -- copies ------------------------------------------------------------------------------
    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Copy the structure around the same parameters, with some entries replaced by what is given.

        Tensors are not made parameters: one that was computed keeps its graph, so that gradients flow through it.

        Args:
            *args, **kwargs: those of `TensorDict.replace`.

        Returns:
            One of this class in which nothing that is set later becomes a parameter; self where nothing is given.

        Raises:
            BatchSizeError: a new entry does not have the batch size.

        Example:
            >>> params = TensorDictParams(TensorDict({"a": torch.ones(2), "b": torch.ones(2)}))
            >>> new = params.replace(a=params["a"] * 2)
            >>> [name for name, _ in new.named_parameters()], new["a"].grad_fn is not None
            (['b'], True)
        """
        entries = self._with_leaves(iter(self._leaf_list()))
        replaced = entries.replace(*args, **kwargs)
        if replaced is entries:
            return self
        made = self._around(replaced)
        made.no_convert = True  # what is set later must not make parameters of these
        return made

    def densify(self, layout: torch.layout = torch.strided) -> Self:  # type: ignore[override]
        """Return another one with the same parameters: there is no lazy stack in it."""
        return self.clone(False)

    def from_dict_instance(self, input_dict: Mapping[Any, Any], **kwargs: Any) -> Self:
        """Build as every TensorDict does, with parameters of the tensors."""
        return type(self)(super().from_dict_instance(input_dict, **kwargs), no_convert=self.no_convert)

    def clone(self, recurse: bool = True) -> Self:
        """Copy with copied parameters and buffers, or (`recurse=False`) with the same ones."""
        return self._of_leaves(lambda leaf: leaf.detach().clone() if recurse else leaf)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Self:
        made = self._of_leaves(
            lambda leaf: leaf.detach().to(
                device=device or leaf.device, dtype=dtype or leaf.dtype, non_blocking=non_blocking
            )
        )
        if device is not None:
            made._set_device(device)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = self._of_leaves(lambda leaf: copy.deepcopy(leaf, memo))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        fresh = vars(nn.Module())
        state = {key: value for key, value in self.__dict__.items() if key not in fresh or value != fresh[key]}
        cls = None if type(self) is TensorDictParams else type(self)
        return pickling.rebuild, (
            "TensorDictParams",
            cls,
            self._with_leaves(iter(self._leaf_list())),
            self.is_locked,
            state,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(params={text(self._with_leaves(iter(self._leaf_list())))})"

    __hash__ = nn.Module.__hash__  # type: ignore[assignment]


class _Named(dict[str, Any]):
    """Some tensors of a tree by their dotted names; what is put here goes into the tree."""

    def __init__(self, params: TensorDictParams, wanted: Callable[[Tensor], bool]) -> None:
        self._nodes: dict[str, tuple[Any, str]] = {}
        for path, (node, key) in params._nodes():
            if wanted(node._data[key]):
                name = ".".join(path)
                if name in self:
                    raise KeyExistsError(f"two entries of a TensorDictParams have the name {name!r}")
                self._nodes[name] = node, key
                super().__setitem__(name, node._data[key])

    def __setitem__(self, name: str, tensor: Any) -> None:
        node, key = self._nodes[name]
        node._forget_facts()
        node._data[key] = tensor
        super().__setitem__(name, tensor)


def _rebuilt(cls: Any, td: Any, locked: bool, state: dict[str, Any]) -> TensorDictParams:
    made: TensorDictParams = (cls or TensorDictParams)(td, no_convert=True)
    made.__dict__.update(state)
    return made.lock_() if locked else made


def _rebuilt_bare(cls: Any, td: Any, locked: bool, state: dict[str, Any]) -> TensorDictParams:
    """Rebuild for `torch.load(weights_only=True)`. Hooks, which are code, are not taken over."""
    flags: dict[str, Any] = {key: bool(state[key]) for key in ("training", "no_convert") if key in state}
    known = cls is None or (isinstance(cls, type) and issubclass(cls, TensorDictParams))
    if not (known and isinstance(td, Container) and type(td) is td._resident_class):
        raise UntrustedDataError("the file calls something else a TensorDictParams")
    return _rebuilt(cls, td, bool(locked), flags)


pickling.register("TensorDictParams", _rebuilt, safe=_rebuilt_bare)
torch.serialization.add_safe_globals([TensorDictParams])
Container._params_class = TensorDictParams
