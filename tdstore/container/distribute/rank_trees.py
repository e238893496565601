"""Adapters of containers to `parallel.collectives`: existing containers, and those to be received."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF
from tdstore.container.core.locks import CONSOLIDATED
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import over
from tdstore.errors import BatchSizeError, UnsupportedError
from tdstore.parallel import collectives, wire
from tdstore.parallel.links import Link
from tdstore.registry import registry
from tdstore.storekit.pages import HOLES, reserve
from tdstore.types import LeafSpec, Path, StoreIndex, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


class LeafTree:
    """A container for `collectives`: see `collectives.Tree`."""

    def __init__(self, td: Any) -> None:
        self._td = td
        found: list[tuple[Path, Any]] = []
        self.has_values = _collect(td, (), found)
        places = sorted(found, key=lambda place: place[0])
        self._places = [(node, path[-1]) for path, node in places]
        self.leaves: list[tuple[Path, LeafSpec]] = [(path, _spec(path, node)) for path, node in places]

    def check_writable(self) -> None:
        self._td._prepared({})()

    def live(self, number: int, index: StoreIndex) -> Tensor | None:
        node, key = self._places[number]
        if not isinstance(node, node._resident_class):
            return None
        leaf: Tensor = node._raw(key).detach()
        if leaf.is_conj() or leaf.is_neg():
            return None
        if HOLES:
            reserve(leaf, index)
        return leaf[index] if index else leaf

    def read(self, number: int, index: StoreIndex) -> Tensor:
        node, key = self._places[number]
        if isinstance(node, node._resident_class):
            leaf: Tensor = node._raw(key).detach()
            return (leaf[index] if index else leaf).resolve_conj().resolve_neg()
        found: Tensor = node._leaf_at(key, index or Ellipsis)
        return found

    def write(self, number: int, index: StoreIndex, value: Tensor) -> None:
        node, key = self._places[number]
        node._write_leaf_at(key, index or Ellipsis, value)


class RowTree:
    """One row of a tree, as a tree."""

    def __init__(self, tree: LeafTree, row: int) -> None:
        self._tree, self._row = tree, row
        self.leaves = [(path, LeafSpec(spec.shape[1:], spec.dtype)) for path, spec in tree.leaves]

    def check_writable(self) -> None:
        self._tree.check_writable()

    def _at(self, index: StoreIndex) -> Any:
        return (slice(self._row, self._row + 1, 1), *index)

    def live(self, number: int, index: StoreIndex) -> Tensor | None:
        found = self._tree.live(number, self._at(index))
        return None if found is None else found[0]

    def read(self, number: int, index: StoreIndex) -> Tensor:
        return self._tree.read(number, self._at(index))[0]

    def write(self, number: int, index: StoreIndex, value: Tensor) -> None:
        self._tree.write(number, self._at(index), value[None])


def _collect(td: Any, path: Path, found: list[tuple[Path, Any]]) -> bool:
    """List the leaves, each with the container that holds it; whether there are entries that are not tensors."""
    values = False
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == LEAF:
            found.append(((*path, key), td))
        elif kind == GROUP:
            values |= _collect(td._raw(key), (*path, key), found)
        else:
            values = True
    return values


def _spec(path: Path, node: Any) -> LeafSpec:
    shape, device, dtype, *_ = node._leaf_facts(path[-1])
    if device.type == "meta" or node._leaf_layout(path[-1]) != torch.strided:
        raise UnsupportedError(f"{path_text(path)} has no dense data and cannot be sent", hint="exclude the key")
    return LeafSpec(shape, dtype)


def tree_of(td: Any) -> LeafTree:
    """Return the leaves of a container; warn if there is more in it."""
    tree = LeafTree(td)
    if tree.has_values:
        warnings.warn("entries that are not tensors are not sent, and stay as they are on each rank", stacklevel=4)
    return tree


def rows_problem(td: Any, tree: LeafTree, rows: int) -> Exception | None:
    """Return why a container cannot take one row from each other rank; None if it can."""
    for path, spec in tree.leaves:
        if not spec.shape or spec.shape[0] != rows:
            return BatchSizeError(
                f"{path_text(path)} of shape {list(spec.shape)} cannot take a row from each of {rows} other ranks"
            )
    try:
        tree.check_writable()
    except Exception as error:
        return error
    return None


# -- whole TensorDicts -------------------------------------------------------------------------
def message_of(td: Any) -> tuple[bytes, Described]:
    """Return the description of a container, and its leaves in that order.

    Raises:
        UntrustedDataError: a value that is not plain data.
    """
    groups, specs = describe(td)
    return wire.encode_message(groups, specs), Described(td, specs)


class Described:
    """The leaves of a container as its description lists them, to be read."""

    def __init__(self, td: Any, specs: dict[Path, LeafSpec]) -> None:
        self._td = td
        self.leaves = list(specs.items())

    def check_writable(self) -> None:
        """Accept anything: nothing is written."""

    def live(self, number: int, index: StoreIndex) -> Tensor | None:
        return None

    def read(self, number: int, index: StoreIndex) -> Tensor:
        pieces: list[Tensor] = self._td._read_pieces([(self.leaves[number][0], index)])
        return pieces[0]

    def write(self, number: int, index: StoreIndex, value: Tensor) -> None:
        raise NotImplementedError  # only to be read


class Arriving:
    """A new TensorDict on its way in."""

    def __init__(self, text: bytes, link: Link, source: int, device: Any) -> None:
        wire.refuse_error(text, source)
        header, specs = wire.decode_message(text)
        self.store = wire.new_store(header, specs, torch.device(device) if device is not None else link.device)
        self.leaves = list(specs.items())

    def check_writable(self) -> None:
        """Accept anything: no other object refers to it."""

    def live(self, number: int, index: StoreIndex) -> Tensor | None:
        leaf = self.store.view(self.leaves[number][0])
        return leaf[index] if index else leaf

    def read(self, number: int, index: StoreIndex) -> Tensor:
        leaf = self.store.view(self.leaves[number][0])
        return leaf[index] if index else leaf

    def write(self, number: int, index: StoreIndex, value: Tensor) -> None:
        self.read(number, index).copy_(value)

    def container(self) -> TensorDictBase:
        td = over(StoreHandle(self.store, registry().get("memory"), None, "r", {}))
        td._state |= CONSOLIDATED
        return td


def send_whole(message: tuple[bytes, Described | None], link: Link, to: int) -> None:
    """Send a description, or why there is none, and the leaves."""
    text, tree = message
    link.send_numbers([len(text)], to, 0)
    link.send_text(text, to, 0)
    if tree is not None:
        collectives.send_leaves(link, tree, to, [0] * len(tree.leaves))


def receive_whole(link: Link, source: int, device: Any) -> TensorDictBase:
    """Build a new TensorDict from what a rank sends by `send_whole`."""
    (length,) = link.recv_numbers(1, source, 0)
    arriving = Arriving(link.recv_text(length, source, 0), link, source, device)
    collectives.receive_leaves(link, arriving, source, [0] * len(arriving.leaves))
    return arriving.container()


def broadcast_whole(td: Any, link: Link, source: int, device: Any) -> TensorDictBase:
    """Return the TensorDict of rank `source`: itself there, a new one elsewhere."""
    if link.rank != source:
        arriving = Arriving(link.broadcast_text(None, source), link, source, device)
        collectives.broadcast_leaves(link, arriving, source)
        return arriving.container()
    try:
        text, tree = message_of(td)
    except Exception as error:
        link.broadcast_text(wire.error_text(error), source)
        raise
    link.broadcast_text(text, source)
    collectives.broadcast_leaves(link, tree, source)
    made: TensorDictBase = td
    return made
