"""torch.distributed: send, receive, reduce and gather containers between ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tdstore.arguments import check_int
from tdstore.container.core.container import Container
from tdstore.container.distribute.rank_trees import (
    Described,
    RowTree,
    broadcast_whole,
    message_of,
    receive_whole,
    rows_problem,
    send_whole,
    tree_of,
)
from tdstore.parallel import collectives, wire
from tdstore.parallel.links import Link
from tdstore.types import DeviceLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp

    from tdstore.parallel.collectives import Later
    from tdstore.parallel.links import Transfer
    from tdstore.tensordicts.base import TensorDictBase

SCATTER = wire.schema_text([])
"""What all ranks agree on before a scatter."""


def _check_bucket(bucket_bytes: object) -> None:
    """Refuse a size of buckets that is none."""
    if bucket_bytes is not None:
        check_int(bucket_bytes, "bucket_bytes")


class DistributedMixin(Container):
    """send and recv, reduce, gather, broadcast, ...: every rank of a group calls its part.

    Before any data moves the ranks compare keys, shapes and dtypes: where they differ, all of them raise
    `MismatchError` (a `RuntimeError`). Leaves are matched by key. Stored containers are read, and written, in pieces.
    """

    __slots__ = ()

    # -- one to one --------------------------------------------------------------------------
    def send(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> None:
        """Send the tensors to a rank that calls `recv` on a TensorDict of the same structure.

        Args:
            dst: global rank to send to; `group_dst` is the rank within `group` instead.
            init_tag: tag of the first leaf, in the order of the sorted keys; each next one has the next.
            pseudo_rand: a sequence of tags that depends on `init_tag` alone, instead of counting up.
            consolidated: send all leaves as one buffer, in one message: faster for many small ones, and takes memory
                for all of them on both ranks. Both say so; a container that was not consolidated will do. Without,
                leaves are sent from where they lie.

        Raises:
            MismatchError: another structure, `consolidated` on one rank only, or a rank that cannot take part; on
                both ranks.
        """
        self._sent(dst, group, group_dst, init_tag, pseudo_rand, consolidated)

    def _sent(
        self, dst: Any, group: Any, group_dst: Any, init_tag: int, pseudo_rand: bool, consolidated: bool = False
    ) -> int:
        link, tree = Link(group), tree_of(self)
        to = link.rank_of(dst, group_dst, "dst")
        return collectives.send(link, tree, to, init_tag, pseudo_rand, consolidated)

    def recv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> int:
        """Receive what another rank `send`s into the tensors that are here, in place; the last tag.

        Arguments and errors as `send`.
        """
        link, tree = Link(group), tree_of(self)
        source = link.rank_of(src, group_src, "src")
        return collectives.receive(link, tree, source, init_tag, pseudo_rand, consolidated)

    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
    ) -> int | list[Transfer]:
        """Send as `send`; return the last tag, or with `return_early` a list of handles to `wait()` for."""
        if not return_early:
            return self._sent(dst, group, group_dst, init_tag, pseudo_rand, consolidated)
        link, tree = Link(group), tree_of(self)
        to = link.rank_of(dst, group_dst, "dst")
        run = partial(collectives.send, link, tree, to, init_tag, pseudo_rand, consolidated)
        return collectives.in_background(run, len(tree.leaves))

    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> list[Transfer] | None:
        """Receive as `recv`; return None, or with `return_premature` a list of handles to `wait()` for."""
        link, tree = Link(group), tree_of(self)
        source = link.rank_of(src, group_src, "src")
        run = partial(collectives.receive, link, tree, source, init_tag, pseudo_rand, consolidated)
        if return_premature:
            return collectives.in_background(run, len(tree.leaves))
        run()
        return None

    async def asend(self, dst: int | None = None, **kwargs: Any) -> None:
        """Send as `send`, without blocking the event loop."""
        await asyncio.to_thread(self.send, dst, **kwargs)

    async def arecv(self, src: int | None = None, **kwargs: Any) -> Self:
        """Receive as `recv`, without blocking the event loop; return the TensorDict itself."""
        await asyncio.to_thread(self.recv, src, **kwargs)
        return self

    # -- all together ------------------------------------------------------------------------
    def reduce(
        self,
        dst: int,
        op: ReduceOp.RedOpType | None = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> list[Later] | None:
        """Reduce each leaf over all ranks, in place on rank `dst`; elsewhere nothing changes.

        Args:
            bucket_bytes: accepted for compatibility: each leaf is reduced by itself.
            op: a `torch.distributed.ReduceOp`; default: the sum.
            async_op: with `return_premature`, return at once a list of what to `wait()` for.

        Raises:
            MismatchError: the structures differ, or torch.distributed cannot reduce a dtype; on all ranks.
        """
        _check_bucket(bucket_bytes)
        link = Link(group)
        premature = async_op and return_premature
        found = collectives.reduce(link, tree_of(self), link.rank_of(dst, None, "dst"), op, not premature)
        return found if premature else None

    def all_reduce(
        self,
        op: ReduceOp.RedOpType | None = None,
        *,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> list[Later] | None:
        """Reduce each leaf over all ranks, in place on all of them; see `reduce`.

        Returns:
            None, or with `async_op` a list of what to `wait()` for.
        """
        _check_bucket(bucket_bytes)
        found = collectives.reduce(Link(group), tree_of(self), None, op, not async_op)
        return found if async_op else None

    def gather_and_stack(self, dst: int, group: ProcessGroup | None = None) -> Self | None:
        """Gather the tensors of all other ranks on rank `dst`, in place, one row for each.

        There the first dimension is as long as the other ranks are many, and rows come in the order of the ranks.

        Returns:
            The TensorDict itself on `dst`, None elsewhere.

        Raises:
            MismatchError: the structures differ. BatchSizeError: another number of rows on `dst`. On all ranks.
        """
        link, tree = Link(group), tree_of(self)
        to = link.rank_of(dst, None, "dst")
        if link.rank != to:
            collectives.gather(link, tree, lambda row: tree, to, None)
            return None
        error = rows_problem(self, tree, link.size - 1)
        collectives.gather(link, tree if error else RowTree(tree, 0), lambda row: RowTree(tree, row), to, error)
        return self

    def broadcast(
        self, src: int, *, group: ProcessGroup | None = None, device: DeviceLike | None = None
    ) -> TensorDictBase:
        """Send this TensorDict, as it is on rank `src`, to all ranks: values that are not tensors and names too.

        Returns:
            On `src` itself; elsewhere a new TensorDict in memory, over one buffer. What it is called on there
            (an empty one will do) is not changed.

        Raises:
            MismatchError: on all ranks, if a value is not plain data.
        """
        link = Link(group)
        return broadcast_whole(self, link, link.rank_of(src, None, "src"), device)

    def all_gather(self, *, group: ProcessGroup | None = None) -> list[Any]:
        """Return the TensorDicts of all ranks, by rank: each in memory, over one buffer. They may differ in structure.

        Raises:
            MismatchError: on all ranks, if a value is not plain data.
        """
        link = Link(group)
        found = [broadcast_whole(self, link, rank, None) for rank in range(link.size)]
        found[link.rank] = self.to_tensordict()
        return found

    def scatter(
        self,
        src: int,
        tensordicts: Sequence[Any] | None = None,
        *,
        group: ProcessGroup | None = None,
        device: DeviceLike | None = None,
    ) -> TensorDictBase:
        """Send each rank its TensorDict of a list that rank `src` has.

        Args:
            tensordicts: on `src`, one for each rank of the group, of any structure.

        Returns:
            On `src` its own of the list; elsewhere a new TensorDict in memory.

        Raises:
            MismatchError: on all ranks, if the list is too short or too long, or a value is not plain data.
        """
        link = Link(group)
        source = link.rank_of(src, None, "src")
        if link.rank != source:
            link.agree(SCATTER)
            return receive_whole(link, source, device)
        parts = list(tensordicts or ())
        error: Exception | None = None
        messages: list[tuple[bytes, Described]] = []
        if len(parts) != link.size:
            error = ValueError(f"scatter needs {link.size} TensorDicts, one for each rank, and was given {len(parts)}")
        else:
            try:
                messages = [message_of(part) for part in parts]
            except Exception as problem:
                error = problem
        link.agree(SCATTER if error is None else wire.error_text(error), error)
        for rank, message in enumerate(messages):
            if rank != source:
                send_whole(message, link, rank)
        made: TensorDictBase = parts[source]
        return made

    def init_remote(
        self,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        device: DeviceLike | None = None,
        use_broadcast: bool = False,
    ) -> None:
        """Send all of this TensorDict, structure and values too, to a rank that calls `from_remote_init`.

        Args:
            device: accepted; the transport decides.
            use_broadcast: send it to all ranks of the group, which all call `from_remote_init(use_broadcast=True)`.

        Raises:
            UntrustedDataError: a value that is not plain data. Nothing was sent, and the receiver raises too.
        """
        link = Link(group)
        if use_broadcast:
            broadcast_whole(self, link, link.rank, None)
            return
        to = link.rank_of(dst, None, "dst")
        try:
            message = message_of(self)
        except Exception as error:
            send_whole((wire.error_text(error), None), link, to)
            raise
        send_whole(message, link, to)

    @classmethod
    def from_remote_init(
        cls, src: int, group: ProcessGroup | None = None, device: DeviceLike | None = None, use_broadcast: bool = False
    ) -> TensorDictBase:
        """Receive the TensorDict that rank `src` sends by `init_remote`: in memory, over one buffer.

        Args:
            device: where the buffer is to be. Default: the CPU, or the GPU under nccl.

        Raises:
            MismatchError: the sender could not send it.
        """
        link = Link(group)
        source = link.rank_of(src, None, "src")
        if use_broadcast:
            return broadcast_whole(cls._resident_class(), link, source, device)
        return receive_whole(link, source, device)
