"""Epochs of batches over a dataset: shuffled without a list, resumed exactly, shared by ranks."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tdstore import TensorDictBase
from tdstore.arguments import check_callable, check_int, refuse_type
from tdstore.errors import InvalidArgumentError, MismatchError
from tdstore.types import NestedKey

from .blocks import BlockReader
from .orders import Order, Shuffle, order_of
from .reading import Task
from .source import Allocator, Data, Rows, Source, Transform
from .stream import MOST_EPOCHS, VERSION, State, Stream
from .windows import Windows, episode_starts

SHUFFLES: list[Shuffle] = [False, True, "blocks"]
MOST_RANGES, FEW_RANGES = 64, 8
"""Connections that a bucket opens for the first batch, while it reads the manifest."""


class Position(NamedTuple):
    """Where a stream of batches is: the epoch, and how many of its items all ranks together have received."""

    epoch: int
    items: int


@dataclass(frozen=True)
class Batch(Task):
    """One batch that is still to be read: the items at places `first` to `last` of the order of an epoch."""

    epochs: "Epochs"
    epoch: int
    first: int
    last: int

    def rows(self) -> Rows:
        """Return the rows of the batch: int64 `[batch]`, or `[batch, span]`."""
        places = np.arange(self.first, self.last, dtype=np.int64)
        return self.epochs.windows(self.epochs.order(self.epoch)(places))

    def plan(self, allocator: Allocator | None = None) -> Callable[[], TensorDictBase]:
        """Return a function that reads the batch by one read of the store; retain its blocks, where blocks are read.

        Args:
            allocator: allocates the memory of a batch of tensors that is read row by row.
        """
        blocks, transform = self.epochs.blocks, self.epochs.transform
        read = partial(self._read, allocator) if blocks is None else blocks.plan(self.rows())
        return read if transform is None else lambda: transform(read())

    def _read(self, allocator: Allocator | None) -> TensorDictBase:
        return self.epochs.source.read(self.rows(), allocator)

    def describe(self) -> str:
        """Name the rows, the epoch and the place."""
        rows = self.rows().reshape(-1)
        shown = ", ".join(map(str, rows[:8].tolist())) + (f", ... ({rows.size} in all)" if rows.size > 8 else "")
        return f"rows {shown} of epoch {self.epoch} of {self.epochs.source.place}"


class Epochs(Stream[Position]):
    """Batches of a dataset, epoch after epoch, in an order that resumes exactly.

    An iteration yields what is left of an epoch; the next one is the next epoch, even if the caller took all batches
    without asking for the end. The order is a keyed permutation: it takes no memory, and the state is a few integers,
    for a billion rows, too. All ranks follow one order: each global batch of `batch_size * world_size` items is cut
    into one slice per rank.

    At the end of an epoch the items that are left are shared out evenly; if there are fewer of them than ranks, some
    ranks have one batch less. `drop_last=True` gives all ranks the same number of batches, of equal size.

    Inside a `DataLoader` (with `batch_size=None`) the workers read batches in turns, so that the loader yields the same
    batches in the same order as without workers.

    Args:
        data: a container with a batch dimension, or a location for `tdstore.open`, which each process opens once.
        batch_size: the number of items of a batch, for one rank. An item is a row, or a window of `span` rows.
        shuffle: True permutes all items; "blocks" permutes blocks of neighbours, and items within a window of blocks,
            for storage from which neighbours are cheap to read; False keeps the order of the rows.
        seed: an integer that chooses the order of each epoch. It is the same on all ranks.
        rank: the number of this process, from 0. Default: 0.
        world_size: how many processes share the epochs. Default: 1, so that this process reads all rows; where
            `torch.distributed` has more processes, a warning says so, unless the two are given.
        drop_last: leave out the last, smaller batch.
        prefetch: how many batches threads read ahead; 0 reads when the caller asks.
        columns: the keys to read. Default: all.
        transform: a function of a batch. It runs in the threads that read.
        device: where batches go. To a CUDA device they go through pinned memory, by a copy beside the caller's work.
        span: the number of consecutive rows of an item. Batches are then of batch size `[batch_size, span]`.
        stride: the number of rows from one window to the next. Default: `span`, so that each row is in one window.
        episodes: bounds that windows do not cross: the key of a column (bool, True at the last row of an episode; or an
            integer, its number), which is read once, or the ascending first rows of the episodes.
        block_rows: the number of rows of a block. Default: 1024.
        window_blocks: the number of blocks whose items are permuted together.
        whole_blocks: read blocks whole, instead of the rows of each batch, for storage on which a request costs more
            than its bytes, such as a bucket or compressed chunks. Besides the batches, memory then holds the blocks of
            two windows (`2 * window_blocks * block_rows` rows) and those of the batches that are read ahead; without a
            shuffle, only the latter. Each rank, and each worker of a loader, reads the blocks for itself.
        timeout: seconds to wait for a batch before an error. Default: as long as the store takes.
        options: of `tdstore.open`, such as `storage`; only with a location.

    Raises:
        InvalidArgumentError: a size is not positive, or the rank is not below `world_size`.
        InvalidTypeError: the data is neither a container nor a location.

    Example:
        >>> td = tdstore.TensorDict({"a": torch.arange(10)}, [10])
        >>> epochs = Epochs(td, batch_size=4, seed=1)
        >>> first, second = [torch.cat([batch["a"] for batch in epochs]) for _ in range(2)]
        >>> sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
        True
        >>> epochs.state_dict()["epoch"]
        2
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        *,
        shuffle: Shuffle = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        columns: Sequence[NestedKey] | None = None,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        span: int = 1,
        stride: int | None = None,
        episodes: NestedKey | Sequence[int] | torch.Tensor | None = None,
        block_rows: int | None = None,
        window_blocks: int = 16,
        whole_blocks: bool = False,
        timeout: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(prefetch, device, timeout)
        if rank is None and world_size is None:
            _warn_of_equal_batches()
        if transform is not None:
            check_callable(transform, "transform")
        rank, world_size = 0 if rank is None else rank, 1 if world_size is None else world_size
        sizes = {"batch_size": batch_size, "world_size": world_size, "span": span, "window_blocks": window_blocks}
        sizes |= {
            "stride": span if stride is None else stride,
            "block_rows": 1024 if block_rows is None else block_rows,
        }
        for name, size in {**sizes, "rank": rank, "seed": seed}.items():
            check_int(size, name)
        for name, size in sizes.items():
            if not 1 <= size < 1 << 62:
                raise InvalidArgumentError(f"{name}={size}: it is 1 or more, and below 2**62")
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(f"rank={rank} of world_size={world_size}: ranks are counted from 0")
        if shuffle not in SHUFFLES:
            raise InvalidArgumentError(f"shuffle={shuffle!r}: it is True, False or 'blocks'")
        if whole_blocks and shuffle is True:
            raise InvalidArgumentError(
                "whole_blocks=True with a full shuffle would read each block for nearly each of its rows",
                hint="give shuffle='blocks', or leave it out",
            )
        # Rows of a full shuffle are a range each; others are a few.
        self.source = Source(data, columns, options, min(batch_size, MOST_RANGES) if shuffle is True else FEW_RANGES)
        self.batch_size, self.rank, self.world_size, self.drop_last = batch_size, rank, world_size, drop_last
        self.shuffle, self.seed, self.transform, self.episodes = shuffle, seed, transform, episodes
        self.span, self.stride = span, sizes["stride"]
        self.block_rows, self.window_blocks = sizes["block_rows"], window_blocks
        self._windows: Windows | None = None
        self.whole_blocks = whole_blocks
        self._order: tuple[int, Order] | None = None
        self._blocks: BlockReader | None = None
        self._blocks_process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None, "_blocks": None}

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, for this rank."""
        return self._batches_left(Position(0, 0))

    def __repr__(self) -> str:
        return (
            f"Epochs({self.source.place!r}, batch_size={self.batch_size}, shuffle={self.shuffle!r}, epoch={self.epoch})"
        )

    @property
    def blocks(self) -> BlockReader | None:
        """The reader of the rows of batches from whole blocks; None where batches are read row by row."""
        if not self.whole_blocks:
            return None
        if self._blocks is None or self._blocks_process != os.getpid():
            self._blocks_process = os.getpid()  # a forked worker has none of the threads that its parent reads with
            rows = max(self.block_rows // self.stride, 1) * self.stride
            ahead = self.batch_size * self.world_size * self.stride // rows + 2
            blocks = 2 * self.window_blocks if self.shuffle == "blocks" else ahead
            # An item of several rows may end in the next block.
            self._blocks = BlockReader(self.source, rows, blocks if self.span == 1 else 2 * blocks)
        return self._blocks

    # -- the order ---------------------------------------------------------------------------
    @property
    def windows(self) -> Windows:
        """The windows of rows that are the items: single rows where `span` is 1."""
        if self._windows is None:
            rows = self.source.size
            made = Windows(rows, self.span, self.stride, self._episode_starts(rows))
            if rows and not made.size:
                raise InvalidArgumentError(
                    f"no window of span={self.span} rows in {self.source.place}, which has {rows} rows"
                    + ("" if self.episodes is None else " in episodes that are shorter")
                )
            self._windows = made
        return self._windows

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch: a function from int64 places to int64 items."""
        found = self._order
        if found is None or found[0] != epoch:
            block = max(self.block_rows // self.stride, 1)
            order = order_of(self.windows.size, self.shuffle, self.seed, epoch, block, self.window_blocks)
            found = self._order = (epoch, order)
        return found[1]

    def _episode_starts(self, rows: int) -> Rows | None:
        episodes = self.episodes
        if episodes is None:
            return None
        if isinstance(episodes, str) or (isinstance(episodes, tuple) and all(isinstance(k, str) for k in episodes)):
            return episode_starts(self.source.column(episodes).cpu().numpy(), rows, repr(episodes))
        try:
            found = np.asarray(episodes).reshape(-1)
        except (TypeError, ValueError):
            raise refuse_type("episodes", "a key, or a sequence of first rows", episodes) from None
        if found.size and found.dtype.kind not in "iu":
            raise refuse_type("episodes", "a key, or a sequence of integers, first rows", episodes)
        starts = found.astype(np.int64)
        if not starts.size or starts[0] != 0 or bool((np.diff(starts) <= 0).any()) or starts[-1] >= max(rows, 1):
            raise InvalidArgumentError(f"episodes: first rows ascend from 0 and are below {rows}, the number of rows")
        return starts

    # -- positions ---------------------------------------------------------------------------
    def _first(self, epoch: int) -> Position:
        return Position(epoch, 0)

    def _epoch_of(self, position: Position) -> int:
        return position.epoch

    def _bounds(self, items: int, batch: int) -> tuple[int, int, int]:
        """Return the places of this rank's part of a global batch, and where the global batch ends."""
        step = self.batch_size * self.world_size
        start = items + batch * step
        stop = min(start + step, self.windows.size)
        part = stop - start
        first, last = (-(-part * rank // self.world_size) for rank in (self.rank, self.rank + 1))
        return start + first, start + last, stop

    def _batches_left(self, position: Position) -> int:
        step, left = self.batch_size * self.world_size, self.windows.size - position.items
        whole, rest = divmod(max(left, 0), step)
        if not rest or self.drop_last:
            return whole
        first, last, _ = self._bounds(position.items, whole)
        return whole + (last > first)

    def _tasks(self, position: Position, first: int, stride: int) -> Iterator[tuple[Task, Position]]:
        for number in range(first, self._batches_left(position), stride):
            start, stop, end = self._bounds(position.items, number)
            yield Batch(self, position.epoch, start, stop), Position(position.epoch, end)

    def _is_end(self, position: Position) -> bool:
        least = self.batch_size * self.world_size if self.drop_last else 1
        return position.items > 0 and self.windows.size - position.items < least

    def _after(self, position: Position, batches: int) -> Position:
        if not batches:
            return position
        return Position(position.epoch, self._bounds(position.items, batches - 1)[2])

    def advance(self, position: Position, batches: int) -> Position:
        """Return the position after some batches, of this epoch and of those that follow.

        Args:
            position: where to start.
            batches: the number of batches of this rank.
        """
        left = self._batches_left(position)
        if batches <= left:
            return self._after(position, batches)
        # The last batch of an epoch leaves the position in that epoch.
        whole, rest = divmod(batches - left - 1, len(self))
        return self._after(Position(position.epoch + 1 + whole, 0), rest + 1)

    def following(self, position: Position) -> tuple[Task, Position]:
        """Return the batch at a position, or the first one of the next epoch, and the position after it.

        Args:
            position: where the stream is.
        """
        if not self._batches_left(position):
            position = Position(position.epoch + 1, 0)
        return next(self._tasks(position, 0, 1))

    def _order_facts(self) -> list[int]:
        """Return what an order depends on, besides the seed and the number of items."""
        blocks = [self.block_rows, self.window_blocks] if self.shuffle == "blocks" else [0, 0]
        return [SHUFFLES.index(self.shuffle), self.span, self.stride, *blocks]

    def _as_state(self, position: Position) -> State:
        return {
            "version": VERSION,
            "epoch": position.epoch,
            "items": position.items,
            "size": self.windows.size,
            "seed": self.seed,
            "order": self._order_facts(),
        }

    def _from_state(self, state: State) -> Position:
        numbers = [state.get(name) for name in ("epoch", "items", "size", "seed")]
        order = state.get("order", ())
        if not all(isinstance(number, int) for number in numbers) or not isinstance(order, (list, tuple)):
            raise InvalidArgumentError(f"not a state of Epochs: {state!r:.200}")
        epoch, items, size, seed = (int(number) for number in numbers if number is not None)
        if size != self.windows.size:
            raise MismatchError(
                f"the state is of {size} items (rows or windows), and {self.source.place} has {self.windows.size}",
                hint=f"give the rows of then, such as tdstore.open(location)[:{size}], until the epoch is over",
            )
        if list(order) != self._order_facts():
            raise MismatchError(
                f"the state is of another order: {order} instead of {self._order_facts()}",
                hint="shuffle (0 none, 1 full, 2 blocks), span, stride, block_rows and window_blocks stay as they were",
            )
        if not (0 <= items <= size and 0 <= epoch < MOST_EPOCHS):
            raise InvalidArgumentError(f"a state with epoch {epoch} and {items} of {size} items")
        self.seed, self._order = seed, None
        return Position(epoch, items)

    def _threads(self) -> int:
        # Opened here, by one thread: the threads that read would each open it.
        _ = self.source.container, self.windows, self.blocks
        return max(self.prefetch, 1) if self.source.concurrent else 1


def _warn_of_equal_batches() -> None:
    """Warn that all processes of a group read the same batches, which looks like training, and is that of one."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and (size := dist.get_world_size()) > 1:
        warnings.warn(
            f"all {size} processes read the same batches: give Epochs rank={dist.get_rank()}, world_size={size} to "
            "share them out, or rank=0, world_size=1 if this is meant",
            stacklevel=3,
        )
