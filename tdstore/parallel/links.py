"""Transfer of bytes between the ranks of a process group, once both sides have agreed on the schema."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdstore.errors import InvalidArgumentError, MismatchError, TDStoreError
from tdstore.parallel.wire import MAX_TEXT, differences, digest

if TYPE_CHECKING:
    from torch.distributed import Work

_HELLO, _ANSWER, _TEXT = 1 << 30, 1 << 29, (1 << 30) | (1 << 29)
"""Bits in the tags of messages before the data, which distinguish them from data."""
_TAGS = 1 << 28
_MAGIC = 0x7464_7374_6F72_65
_FINE, _FAILED = 0, 1
IN_FLIGHT_BYTES = 128 << 20


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a flat one of bytes, over the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


class Link:
    """A process group with the device of its tensors.

    Raises:
        TDStoreError: torch.distributed is not initialised.
    """

    def __init__(self, group: Any = None) -> None:
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                raise TDStoreError(
                    "there is no process group", hint="call torch.distributed.init_process_group() on every rank first"
                )
            group = dist.group.WORLD
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        cuda = group.name() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def rank_of(self, rank: int | None, group_rank: int | None, what: str) -> int:
        """Return the rank within the group, from a global rank or from one within the group."""
        if (rank is None) == (group_rank is None):
            raise InvalidArgumentError(f"give {what} or group_{what}, one of them")
        if group_rank is None:
            assert rank is not None
            found = rank if self.group is dist.group.WORLD else dist.get_group_rank(self.group, rank)
        else:
            found = group_rank
        if not 0 <= found < self.size:
            raise InvalidArgumentError(f"{what}={found} is not a rank of a group of {self.size}")
        return found

    def global_rank(self, rank: int) -> int:
        """Convert a rank within the group to the global rank."""
        return rank if self.group is dist.group.WORLD else dist.get_global_rank(self.group, rank)

    # -- one to one --------------------------------------------------------------------------
    def isend(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Begin to send a contiguous tensor."""
        made: Work = self.group.send([tensor], to, tag)
        return made

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Begin to receive into a contiguous tensor."""
        made: Work = self.group.recv([tensor], source, tag)
        return made

    def send_numbers(self, numbers: Sequence[int], to: int, tag: int) -> None:
        """Send a few int64 numbers."""
        self.isend(torch.tensor(numbers, dtype=torch.int64, device=self.device), to, tag).wait()

    def recv_numbers(self, count: int, source: int, tag: int) -> list[int]:
        """Receive `count` int64 numbers."""
        numbers = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.irecv(numbers, source, tag).wait()
        return numbers.tolist()

    def send_text(self, text: bytes, to: int, tag: int) -> None:
        """Send bytes; the receiver knows their number."""
        self.isend(self._tensor(text), to, tag).wait()

    def recv_text(self, length: int, source: int, tag: int) -> bytes:
        """Receive `length` bytes."""
        data = torch.zeros(_checked(length), dtype=torch.uint8, device=self.device)
        self.irecv(data, source, tag).wait()
        return data.cpu().numpy().tobytes()

    def _tensor(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)

    def greet(self, to: int, tag: int, text: bytes, error: Exception | None) -> None:
        """Send the schema to the receiver, and check that it has the same one.

        Args:
            to: the rank of the receiver.
            tag: the first tag of the transfer.
            text: the schema, or the reason why this rank cannot take part.
            error: that reason as an exception.

        Raises:
            MismatchError: the receiver has another schema, or cannot receive. `error`, if it is set.
        """
        status = _FINE if error is None else _FAILED
        self.send_numbers([_MAGIC, status, *digest(text), len(text)], to, _HELLO | tag % _TAGS)
        answer, length = self.recv_numbers(2, to, _ANSWER | tag % _TAGS)
        if answer != _FINE:
            theirs = self.recv_text(length, to, _TEXT | tag % _TAGS)
            self.send_text(text, to, _TEXT | tag % _TAGS)
            self._refuse(text, theirs, to, error)

    def answer(self, source: int, tag: int, text: bytes, error: Exception | None) -> None:
        """Answer the sender: the counterpart of `greet`."""
        magic, status, low, high, length = self.recv_numbers(5, source, _HELLO | tag % _TAGS)
        if magic != _MAGIC:
            raise MismatchError(f"rank {source} of the group sent something else than a TensorDict of tdstore")
        fine = status == _FINE and error is None and (low, high) == digest(text)
        self.send_numbers([_FINE if fine else _FAILED, len(text)], source, _ANSWER | tag % _TAGS)
        if not fine:
            self.send_text(text, source, _TEXT | tag % _TAGS)
            theirs = self.recv_text(length, source, _TEXT | tag % _TAGS)
            self._refuse(text, theirs, source, error)

    def _refuse(self, mine: bytes, theirs: bytes, other: int, error: Exception | None) -> None:
        if error is not None:
            raise error
        mismatch = self._mismatch(mine, theirs, other)
        raise MismatchError(f"the TensorDicts of two ranks do not match, and nothing was sent: {mismatch}")

    def _mismatch(self, mine: bytes, theirs: bytes, other: int) -> str:
        sides = sorted([(self.rank, mine), (other, theirs)])
        return differences(sides[0][1], sides[1][1], f"rank {sides[0][0]}", f"rank {sides[1][0]}")

    # -- all together ------------------------------------------------------------------------
    def agree(self, text: bytes, error: Exception | None = None) -> None:
        """Check that all ranks have the same schema.

        Raises:
            MismatchError: they differ; raised on every rank. `error`, if it is set.
        """
        status = _FINE if error is None else _FAILED
        summaries = self.gather_numbers([status, *digest(text), len(text)])
        if all(row == summaries[0] for row in summaries) and status == _FINE:
            return
        longest = _checked(max(row[-1] for row in summaries))
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        mine[: len(text)] = self._tensor(text)
        schemas = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(schemas, mine, group=self.group)
        if error is not None:
            raise error
        for rank, (row, data) in enumerate(zip(summaries, schemas, strict=True)):
            theirs = data[: row[-1]].cpu().numpy().tobytes()
            if theirs != text:
                mismatch = self._mismatch(text, theirs, rank)
                raise MismatchError(f"the TensorDicts of the ranks do not match, and nothing was sent: {mismatch}")

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather int64 numbers from every rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Send a contiguous tensor to all ranks, or receive it."""
        dist.broadcast(tensor, self.global_rank(source), group=self.group)

    def broadcast_text(self, text: bytes | None, source: int) -> bytes:
        """Send bytes to all ranks, or receive them."""
        length = torch.tensor([len(text or b"")], dtype=torch.int64, device=self.device)
        self.broadcast(length, source)
        count = _checked(int(length))
        data = self._tensor(text) if text else torch.zeros(count, dtype=torch.uint8, device=self.device)
        self.broadcast(data, source)
        return data.cpu().numpy().tobytes()


def _checked(length: int) -> int:
    if not 0 < length <= MAX_TEXT:
        raise MismatchError(f"another rank announced a description of {length} bytes")
    return length


class Flight:
    """Running transfers of a bounded number of bytes, which are finished in the order of their start."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Any, Callable[[], None] | None, Tensor]] = deque()
        self._bytes = 0

    def add(self, work: Any, tensor: Tensor, finish: Callable[[], None] | None = None) -> None:
        """Add a transfer; `finish` is called when it has finished."""
        self._under_way.append((work, finish, tensor))
        self._bytes += tensor.nbytes
        while self._bytes > IN_FLIGHT_BYTES:
            self._land()

    def _land(self) -> None:
        work, finish, tensor = self._under_way.popleft()
        work.wait()
        self._bytes -= tensor.nbytes
        if finish is not None:
            finish()

    def land_all(self) -> None:
        """Wait for all transfers."""
        while self._under_way:
            self._land()


class Transfer:
    """A function that runs in a thread, with a `wait()`."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="tdstore-transfer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error  # raised by wait()

    def wait(self) -> bool:
        """Wait until the transfer has finished.

        Raises:
            MismatchError: the structures differ.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Check whether the transfer has finished or failed."""
        return not self._thread.is_alive()
