"""Transfers and reductions of trees of leaves between ranks.

A tree is a `Tree`: its leaves in the order of their keys, by which two ranks match them, and methods to read and write
pieces of them. All ranks cut leaves into the same pieces, so that a stored leaf is never in memory as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tdstore.errors import MismatchError, UnsupportedError
from tdstore.io.blocks import index_shape, pieces
from tdstore.io.consolidated.buffer import arrange
from tdstore.parallel.links import Flight, Link, Transfer, as_bytes
from tdstore.parallel.wire import error_text, schema_text
from tdstore.types import LeafSpec, Path, StoreIndex, path_text

R = TypeVar("R")

PIECE_BYTES = 32 << 20


class Tree(Protocol):
    """The tensors of a container."""

    leaves: list[tuple[Path, LeafSpec]]
    """Paths and specs, sorted by path."""

    def check_writable(self) -> None:
        """Raise an error unless `write` and `live` may be used."""

    def read(self, number: int, index: StoreIndex) -> Tensor:
        """Return a piece of a leaf; perhaps the leaf's own memory."""

    def live(self, number: int, index: StoreIndex) -> Tensor | None:
        """Return the leaf's own memory for writing; None if it has none."""

    def write(self, number: int, index: StoreIndex, value: Tensor) -> None:
        """Write a piece of a leaf."""


def tags(count: int, init_tag: int, pseudo_rand: bool) -> list[int]:
    """Return one tag for each leaf: consecutive numbers, or a pseudo-random sequence that is equal on both ranks."""
    if not pseudo_rand:
        return [init_tag + i for i in range(count)]
    draw = random.Random(init_tag)
    return [draw.randrange(1 << 28) for _ in range(count)]


def _pieces(tree: Tree) -> Iterator[tuple[int, StoreIndex, torch.Size]]:
    for number, (_, spec) in enumerate(tree.leaves):
        if spec.numel:
            for index in pieces(spec.shape, spec.dtype.itemsize, PIECE_BYTES, dims=1):
                yield number, index, torch.Size(index_shape(spec.shape, index))


def _stand_in(tree: Tree, number: int, index: StoreIndex, shape: torch.Size, link: Link) -> tuple[Tensor, bool]:
    """Return memory to receive a piece into, and whether it is the leaf's own."""
    live = tree.live(number, index)
    if live is not None and live.is_contiguous() and live.device == link.device:
        return live, True
    return torch.empty(shape, dtype=tree.leaves[number][1].dtype, device=link.device), False


# -- one to one --------------------------------------------------------------------------------
def send_leaves(link: Link, tree: Tree, to: int, tag_of: Sequence[int]) -> None:
    """Send all leaves to a rank that is ready for them."""
    flight = Flight()
    for number, index, _ in _pieces(tree):
        data = as_bytes(tree.read(number, index).to(link.device).contiguous())
        flight.add(link.isend(data, to, tag_of[number]), data)
    flight.land_all()


def receive_leaves(link: Link, tree: Tree, source: int, tag_of: Sequence[int]) -> None:
    """Receive all leaves, in place."""
    flight = Flight()
    for number, index, shape in _pieces(tree):
        piece, own = _stand_in(tree, number, index, shape, link)
        data = as_bytes(piece)
        finish = None if own else _writer(tree, number, index, piece)
        flight.add(link.irecv(data, source, tag_of[number]), data, finish)
    flight.land_all()


def _writer(tree: Tree, number: int, index: StoreIndex, piece: Tensor) -> Callable[[], None]:
    return lambda: tree.write(number, index, piece)


def send(link: Link, tree: Tree, to: int, init_tag: int, pseudo_rand: bool, consolidated: bool = False) -> int:
    """Send a tree to a rank that calls `receive`, and return the last tag used.

    Args:
        link: the process group.
        tree: the leaves.
        to: the rank within the group.
        init_tag: the first tag.
        pseudo_rand: whether tags are pseudo-random instead of consecutive.
        consolidated: whether to send all leaves as one buffer.

    Raises:
        MismatchError: the schemas of the two ranks differ.
    """
    tag_of = tags(min(1, len(tree.leaves)) if consolidated else len(tree.leaves), init_tag, pseudo_rand)
    link.greet(to, init_tag, schema_text(tree.leaves, consolidated=consolidated), None)
    if consolidated:
        _send_buffer(link, tree, to, tag_of)
    else:
        send_leaves(link, tree, to, tag_of)
    return tag_of[-1] if tag_of else init_tag


def receive(link: Link, tree: Tree, source: int, init_tag: int, pseudo_rand: bool, consolidated: bool = False) -> int:
    """Receive a tree in place, and return the last tag used.

    Args:
        link: the process group.
        tree: the leaves, with the schema of the sender.
        source: the rank of the sender within the group.
        init_tag: the first tag.
        pseudo_rand: whether tags are pseudo-random instead of consecutive.
        consolidated: whether all leaves are sent as one buffer.

    Raises:
        MismatchError: the schemas of the two ranks differ.
    """
    tag_of = tags(min(1, len(tree.leaves)) if consolidated else len(tree.leaves), init_tag, pseudo_rand)
    error = _problem(tree.check_writable)
    text = schema_text(tree.leaves, consolidated=consolidated) if error is None else error_text(error)
    link.answer(source, init_tag, text, error)
    if consolidated:
        _receive_buffer(link, tree, source, tag_of)
    else:
        receive_leaves(link, tree, source, tag_of)
    return tag_of[-1] if tag_of else init_tag


def _buffer(link: Link, tree: Tree) -> tuple[Tensor, list[Tensor]]:
    """Allocate one buffer for all leaves, with one layout on both ranks, and return it with views of the leaves."""
    slots = arrange((spec.dtype, spec.shape) for _, spec in tree.leaves)
    buffer = torch.zeros(slots[-1].stop if slots else 0, dtype=torch.uint8, device=link.device)
    return buffer, [slot.view(buffer) for slot in slots]


def _send_buffer(link: Link, tree: Tree, to: int, tag_of: Sequence[int]) -> None:
    buffer, views = _buffer(link, tree)
    for number, index, _ in _pieces(tree):
        views[number][index].copy_(tree.read(number, index))
    if len(buffer):
        link.isend(buffer, to, tag_of[0]).wait()


def _receive_buffer(link: Link, tree: Tree, source: int, tag_of: Sequence[int]) -> None:
    buffer, views = _buffer(link, tree)
    if len(buffer):
        link.irecv(buffer, source, tag_of[0]).wait()
    for number, index, _ in _pieces(tree):
        tree.write(number, index, views[number][index])


def _problem(check: Callable[[], object]) -> Exception | None:
    """Return the error of a check. The other ranks must receive it before it is raised on this one."""
    try:
        check()
    except Exception as error:
        return error
    return None


# -- all together ------------------------------------------------------------------------------
class Later:
    """A running collective operation on one piece, with a `wait()`."""

    def __init__(self, work: Any, finish: Callable[[], None] | None, what: Path) -> None:
        self._work, self._finish, self._what = work, finish, what

    def wait(self) -> bool:
        """Wait until the operation has finished, and write its result to the leaf."""
        with_key(self._what, self._work.wait)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Check whether the operation has finished. `wait` may still have to write its result to the leaf."""
        return bool(self._work.is_completed())


def with_key(path: Path, run: Callable[[], R]) -> R:
    """Run an operation of torch.distributed, and name the leaf in its error."""
    try:
        return run()
    except RuntimeError as error:
        raise MismatchError(f"torch.distributed refused the leaf {path_text(path)}: {error}") from error


_GLOO_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
_ops: Any = getattr(dist, "ReduceOp", None)  # a build of torch may have none
_BITWISE: tuple[Any, ...] = (_ops.BAND, _ops.BOR, _ops.BXOR) if _ops else ()
_ARITHMETIC: tuple[Any, ...] = (_ops.SUM, _ops.PRODUCT, _ops.MIN, _ops.MAX) if _ops else ()


def _refuse_reductions(link: Link, tree: Tree, op: Any) -> None:
    """Refuse reductions that gloo lacks. Its own error would come late and leave the group unusable."""
    if link.device.type != "cpu":
        return
    for path, spec in tree.leaves:
        whole = not spec.dtype.is_floating_point and spec.dtype in _GLOO_DTYPES
        fine = op in _ARITHMETIC and (spec.dtype in _GLOO_DTYPES or (spec.dtype.is_complex and op == _ops.SUM))
        if not fine and not (whole and op in _BITWISE):
            raise UnsupportedError(
                f"gloo cannot reduce the leaf {path_text(path)} of {spec.dtype} by {op}",
                hint="cast it to float32 or int32, or exclude the key",
            )


def reduce(link: Link, tree: Tree, to: int | None, op: Any, wait: bool) -> list[Later]:
    """Reduce each leaf over all ranks, in place.

    Args:
        link: the process group.
        tree: the leaves.
        to: the rank that gets the results, within the group; None for all ranks. Other ranks are unchanged.
        op: a `torch.distributed.ReduceOp`; default: SUM.
        wait: whether to wait for the results.

    Returns:
        The running operations, none with `wait`.

    Raises:
        MismatchError: the schemas of the ranks differ. UnsupportedError: gloo cannot reduce a leaf.
    """
    here = to is None or to == link.rank
    error = _problem(tree.check_writable) if here else None
    link.agree(schema_text(tree.leaves) if error is None else error_text(error), error)
    op = dist.ReduceOp.SUM if op is None else op
    _refuse_reductions(link, tree, op)  # on all ranks: they have agreed on the dtypes
    under_way = []
    for number, index, _ in _pieces(tree):
        path = tree.leaves[number][0]
        live = tree.live(number, index) if here else None
        if live is not None and live.is_contiguous() and live.device == link.device:
            piece, finish = live, None
        else:
            piece = tree.read(number, index).to(link.device, copy=True).contiguous()
            finish = _writer(tree, number, index, piece) if here else None
        work = with_key(path, partial(_reduced, link, piece, to, op))
        later = Later(work, finish, path)
        if wait:
            later.wait()
        else:
            under_way.append(later)
    return under_way


def _reduced(link: Link, piece: Tensor, to: int | None, op: Any) -> Any:
    if piece.is_complex():
        piece = torch.view_as_real(piece)
    if to is None:
        return dist.all_reduce(piece, op, group=link.group, async_op=True)
    return dist.reduce(piece, link.global_rank(to), op, group=link.group, async_op=True)


def gather(link: Link, mine: Tree, rows: Callable[[int], Tree], to: int, error: Exception | None) -> None:
    """Send this tree to rank `to`, which receives the trees of the others in its rows, in the order of the ranks.

    Args:
        link: the process group.
        mine: the leaves to send; on rank `to` leaves with the schema of one row.
        rows: returns a row of the target by its number.
        to: the rank within the group.
        error: the reason why this rank cannot take part.
    """
    link.agree(schema_text(mine.leaves) if error is None else error_text(error), error)
    tag_of = tags(len(mine.leaves), 0, False)
    if link.rank != to:
        send_leaves(link, mine, to, tag_of)
        return
    others = [rank for rank in range(link.size) if rank != to]
    for row, rank in enumerate(others):
        receive_leaves(link, rows(row), rank, tag_of)


def broadcast_leaves(link: Link, tree: Tree, source: int) -> None:
    """Send all leaves to all ranks, or receive them in place."""
    for number, index, shape in _pieces(tree):
        if link.rank == source:
            link.broadcast(as_bytes(tree.read(number, index).to(link.device).contiguous()), source)
            continue
        piece, own = _stand_in(tree, number, index, shape, link)
        link.broadcast(as_bytes(piece), source)
        if not own:
            tree.write(number, index, piece)


def in_background(run: Callable[[], Any], count: int) -> list[Transfer]:
    """Run a transfer in a thread, and return it once for each leaf."""
    return [Transfer(run)] * count
