"""Batches of several datasets in turns, by weights."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tdstore.arguments import as_list, check_int, refuse_type
from tdstore.errors import InvalidArgumentError, MismatchError

from .epochs import Epochs, Position
from .permutation import mix
from .reading import Task
from .stream import MOST_EPOCHS, VERSION, State, Stream

CHUNK = 65536  # choices that are made at once


class MixturePosition(NamedTuple):
    """Where a mixture is: its epoch, the batches of it that were handed out, and where each dataset is."""

    epoch: int
    step: int
    sources: tuple[Position, ...]


class Mixture(Stream[MixturePosition]):
    """Batches of several `Epochs`; each batch comes from one of them, chosen by weights.

    The choice for a batch depends only on the seed, the epoch and the number of the batch, so that all ranks choose
    the same dataset for a step, and a state resumes exactly. A dataset that ends begins its next epoch. An epoch of the
    mixture is a number of batches.

    Args:
        sources: the `Epochs`. Each reads its columns and transforms its batches; `prefetch`, `timeout` and `device` are
            those of the mixture. With several ranks, they must be of one rank and `world_size`, and have
            `drop_last=True`.
        weights: how often each is chosen, in proportion. Default: by their numbers of batches.
        seed: an integer that determines the choices; the same on all ranks.
        batches: the number of batches of an epoch. Default: that of all sources together.
        prefetch: how many batches threads read ahead.
        device: where batches go.
        timeout: seconds to wait for a batch before an error.

    Raises:
        InvalidArgumentError: weights that are not positive numbers, one per source; a source without batches; or
            sources whose ranks differ.

    Example:
        >>> numbers = tdstore.TensorDict({"a": torch.arange(8)}, [8])
        >>> sources = [Epochs(numbers, 2), Epochs(numbers + 100, 2)]
        >>> mixture = Mixture(sources, weights=[3, 1], batches=1000)
        >>> sum(batch["a"][0].item() < 100 for batch in mixture)
        757
    """

    def __init__(
        self,
        sources: Sequence[Epochs],
        weights: Sequence[float] | None = None,
        seed: int = 0,
        *,
        batches: int | None = None,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.sources = tuple(as_list(sources, "sources", "a sequence of Epochs"))
        for source in self.sources:
            if not isinstance(source, Epochs):
                raise refuse_type("a source of a mixture", "an Epochs", source)
        lengths = [len(source) for source in self.sources]
        if 0 in lengths:
            empty = lengths.index(0)
            raise InvalidArgumentError(f"source {empty} of a mixture has no batch: {self.sources[empty]!r}")
        try:
            shares = np.asarray(lengths if weights is None else weights, dtype=np.float64)
        except (TypeError, ValueError):
            raise refuse_type("weights", "a sequence of numbers", weights) from None
        if shares.shape != (len(lengths),) or not lengths or not (np.isfinite(shares) & (shares > 0)).all():
            raise InvalidArgumentError(f"weights={weights!r}: one positive number for each of {len(lengths)} sources")
        ranks = {(source.rank, source.world_size) for source in self.sources}
        uneven = any(source.world_size > 1 and not source.drop_last for source in self.sources)
        if len(ranks) > 1 or uneven:
            raise InvalidArgumentError(
                "the ranks of a mixture must have as many batches of each source",
                hint="Epochs(..., drop_last=True) of one rank= and world_size=",
            )
        check_int(seed, "seed")
        self.seed = seed
        self.batches = sum(lengths) if batches is None else batches
        check_int(self.batches, "batches")
        if not 1 <= self.batches < 1 << 62:
            raise InvalidArgumentError(f"batches={batches}: an epoch of a mixture has 1 or more, and below 2**62")
        self._cumulated = np.cumsum(shares / shares.sum())
        super().__init__(prefetch, device, timeout)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.batches

    def choices(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Return which source each batch of an epoch comes from.

        Args:
            epoch: the number of the epoch.
            first: the number of the first batch.
            last: the number after the last batch.

        Returns:
            int64 `[last - first]`, numbers of sources.
        """
        key = mix(mix(np.array([self.seed % 2**64], np.uint64)) ^ np.array([epoch], np.uint64))
        hashed = mix(np.arange(first, last, dtype=np.uint64) ^ key)
        shares = (hashed >> np.uint64(11)).astype(np.float64) / 2.0**53
        found = np.searchsorted(self._cumulated, shares, side="right")
        return np.minimum(found, len(self.sources) - 1).astype(np.int64)  # the sum may be just below 1

    # -- positions ---------------------------------------------------------------------------
    def _first(self, epoch: int) -> MixturePosition:
        start = MixturePosition(0, 0, (Position(0, 0),) * len(self.sources))
        if not epoch:
            return start
        position = self._position if self._position.epoch < epoch else start
        while position.epoch < epoch:
            ended = self._after(position, self.batches - position.step)
            position = MixturePosition(position.epoch + 1, 0, ended.sources)
        return position

    def _epoch_of(self, position: MixturePosition) -> int:
        return position.epoch

    def _batches_left(self, position: MixturePosition) -> int:
        return max(self.batches - position.step, 0)

    def _is_end(self, position: MixturePosition) -> bool:
        return not self._batches_left(position)

    def _after(self, position: MixturePosition, batches: int) -> MixturePosition:
        counts = np.zeros(len(self.sources), np.int64)
        end = position.step + batches
        for first in range(position.step, end, CHUNK):
            chosen = self.choices(position.epoch, first, min(first + CHUNK, end))
            counts += np.bincount(chosen, minlength=len(self.sources))
        moved = zip(self.sources, position.sources, counts.tolist(), strict=True)
        places = tuple(source.advance(place, count) for source, place, count in moved)
        return MixturePosition(position.epoch, end, places)

    def _tasks(self, position: MixturePosition, first: int, stride: int) -> Iterator[tuple[Task, MixturePosition]]:
        left = self._batches_left(position)
        if first >= left:
            return
        epoch, start, sources = self._after(position, first)
        places = list(sources)
        for begin in range(start, position.step + left, CHUNK):
            end = min(begin + CHUNK, position.step + left)
            for step, chosen in enumerate(self.choices(epoch, begin, end).tolist(), begin):
                task, places[chosen] = self.sources[chosen].following(places[chosen])
                if (step - start) % stride == 0:
                    yield task, MixturePosition(epoch, step + 1, tuple(places))

    def _as_state(self, position: MixturePosition) -> State:
        states = [source._as_state(place) for source, place in zip(self.sources, position.sources, strict=True)]
        return {
            "version": VERSION,
            "epoch": position.epoch,
            "step": position.step,
            "seed": self.seed,
            "sources": states,
        }

    def _from_state(self, state: State) -> MixturePosition:
        numbers = [state.get(name) for name in ("epoch", "step", "seed")]
        states = state.get("sources")
        if not isinstance(states, list) or not all(isinstance(number, int) and number >= 0 for number in numbers[:2]):
            raise InvalidArgumentError(f"not a state of a Mixture: {state!r:.200}")
        if len(states) != len(self.sources) or not isinstance(numbers[2], int):
            raise MismatchError(f"the state is of {len(states)} sources, and this mixture has {len(self.sources)}")
        places = tuple(source._from_state(one) for source, one in zip(self.sources, states, strict=True))
        if int(state["epoch"]) >= MOST_EPOCHS or int(state["step"]) >= MOST_EPOCHS:
            raise InvalidArgumentError(f"a state with epoch {numbers[0]} and batch {numbers[1]}: both are below 2**62")
        self.seed = numbers[2]
        return MixturePosition(int(state["epoch"]), int(state["step"]), places)

    def _threads(self) -> int:
        for source in self.sources:
            source._threads()
        return max(self.prefetch, 1) if all(source.source.concurrent for source in self.sources) else 1
