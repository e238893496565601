"""The two maps of a forest: from steps to rows of a storage, and from observations to the steps that leave them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore import TensorDictBase
from tdstore.errors import InvalidArgumentError, InvalidTypeError, KeyNotFoundError, OutOfRangeError
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages import LazyStorage
from tdstore.rl.trees.links import Key
from tdstore.rl.types import BackendLike, PathLike

if TYPE_CHECKING:
    from tdstore import TensorDictBase


def check_collection(what: str, data: object) -> None:
    """Raise TypeError unless data is a TensorDict or a tensorclass, of this package or of `tensordict`."""
    if not is_collection(data):
        raise InvalidTypeError(f"{what} is a TensorDict, not {type(data).__name__}")


def row_hashes(data: TensorDictBase, keys: Sequence[Key]) -> list[int]:
    """Hash each row of some entries to an int64 that is the same in every process.

    It is the 8-byte blake2b of the names, dtypes, shapes and bytes of the entries.

    Args:
        data: a TensorDict of batch size `[T]`.
        keys: the entries; their order does not matter.

    Raises:
        KeyError: an entry is missing.
    """
    count = data.batch_size[0]
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(count)]
    for key in sorted(keys, key=_parts):
        value = data.get(key, None)
        if value is None:
            raise KeyNotFoundError(f"no entry {key!r}; there are {', '.join(map(repr, data.keys()))}")
        head, rows = _row_bytes(key, value, count)
        for number, digest in enumerate(hashes):
            digest.update(head)
            digest.update(rows[number])
    return [int.from_bytes(digest.digest(), "little", signed=True) for digest in hashes]


def _parts(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _row_bytes(key: Key, value: Any, count: int) -> tuple[bytes, Sequence[Any]]:
    """Return what all rows of an entry share, and the bytes of each."""
    if isinstance(value, Tensor):
        shape = list(value.shape[1:])
        flat = value.detach().cpu().contiguous().reshape(count, -1)
        head = [_parts(key), str(value.dtype), shape]
        rows: Any = flat.view(torch.uint8).numpy() if flat.numel() else [b""] * count
    else:
        values = value.tolist() if hasattr(value, "tolist") else list(value)
        head = [_parts(key), "value", []]
        rows = [json.dumps(item, sort_keys=True).encode() for item in values]
    return json.dumps(head).encode(), rows


class DataMap:
    """Steps in a storage, found by observation and action.

    Args:
        max_size: how many steps there may be.
        storage: where they are: None for memory, a device, the name of a backend, a URL; see `LazyStorage`.
        path: the place, for a backend that is named.
        **options: of `LazyStorage`.
    """

    def __init__(
        self,
        max_size: int = 1000,
        *,
        storage: BackendLike | None = None,
        path: PathLike | None = None,
        **options: Any,
    ) -> None:
        self.max_size = max_size
        self._make = functools.partial(LazyStorage, max_size, storage=storage, path=path, **options)
        self._in_memory = storage is None and path is None
        self.storage = self._make()
        self.rows: dict[int, int] = {}
        """The row of each pair of observation and action, by hash."""
        self.pairs: list[int] = []
        """The hash of the pair in each row."""
        self.reached: list[int] = []
        """The hash of the observation that follows each row."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __contains__(self, pair: object) -> bool:
        """Check whether a pair has a row, by its hash."""
        return pair in self.rows

    def clear(self) -> None:
        """Forget all steps."""
        self.rows, self.pairs, self.reached = {}, [], []
        self.storage.empty()

    def replace(self, pairs: Sequence[int], reached: Sequence[int], steps: Any) -> None:
        """Replace all steps. After an error the old ones are unchanged.

        Args:
            pairs, reached, steps: as for `write`; no steps where `pairs` is empty.
        """
        before = self.storage, self.rows, self.pairs, self.reached
        old = None if self._in_memory or not len(self) else self.read(range(len(self)))
        if self._in_memory:
            self.storage = self._make()
        self.rows, self.pairs, self.reached = {}, [], []
        try:
            if pairs:
                self.write(pairs, reached, steps)
            else:
                self.storage.empty()
        except BaseException:
            self.storage, self.rows, self.pairs, self.reached = before
            if old is not None:
                self.storage.set(range(len(self)), old)
            raise

    def read(self, rows: Sequence[int]) -> TensorDictBase:
        """Read steps as a TensorDict `[len(rows)]`, by one read of the storage."""
        made: TensorDictBase = self.storage.get(torch.tensor(rows, dtype=torch.int64))
        return made

    def write(self, pairs: Sequence[int], reached: Sequence[int], steps: TensorDictBase) -> list[int]:
        """Write steps, known ones to their existing rows, and return the rows.

        Args:
            pairs: the hash of the observation and action of each step.
            reached: the hash of the observation that follows.
            steps: a TensorDict of batch size `[T]`. Of several steps with one hash, the last is kept.

        Raises:
            IndexError: more steps than `max_size`; nothing is written then.
        """
        fresh = list(dict.fromkeys(pair for pair in pairs if pair not in self.rows))
        if len(self) + len(fresh) > self.max_size:
            raise OutOfRangeError(
                f"a forest of {len(self)} of at most {self.max_size} steps has no room for {len(fresh)} more: "
                "make it with a larger max_size"
            )
        numbers = {pair: len(self) + i for i, pair in enumerate(fresh)}
        rows = [self.rows[pair] if pair in self.rows else numbers[pair] for pair in pairs]
        last = {row: position for position, row in enumerate(rows)}
        self.storage.set(torch.tensor(list(last)), steps[torch.tensor(list(last.values()))])
        self.rows.update(numbers)
        self.pairs += fresh
        self.reached += [0] * len(fresh)
        for row, follower in zip(rows, reached, strict=True):
            self.reached[row] = follower
        return rows


@dataclasses.dataclass(slots=True)
class Node:
    """Facts of one observation in a forest: the steps that leave it, and its visits."""

    rows: list[int] = dataclasses.field(default_factory=list)
    """Rows of the data map, in the order in which they were first seen."""
    hashes: list[int] = dataclasses.field(default_factory=list)
    """The hash of the pair in each of them."""
    passes: int = 0


class NodeMap:
    """Observations, found by their hash."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, observation: object) -> bool:
        """Check whether a step leaves an observation, by its hash."""
        return observation in self.nodes

    def get(self, observation: int) -> Node | None:
        """Return the facts of an observation by its hash; None where it is unknown."""
        return self.nodes.get(observation)

    def count(self, observations: Iterable[int], rows: Iterable[int], pairs: Iterable[int]) -> None:
        """Count steps.

        Args:
            observations: the hash of the observation of each step.
            rows: the row of each step.
            pairs: the hash of the observation and action of each step.
        """
        for observation, row, pair in zip(observations, rows, pairs, strict=True):
            node = self.nodes.setdefault(observation, Node())
            node.passes += 1
            if row not in node.rows:
                node.rows.append(row)
                node.hashes.append(pair)


def dump(data: DataMap, nodes: NodeMap, keys: dict[str, Any], path: PathLike, **options: Any) -> None:
    """Save both maps as one dataset, on any backend; see `MCTSForest.dumps`."""
    rows = torch.tensor([row for node in nodes.nodes.values() for row in node.rows], dtype=torch.int64)
    found = {
        "pairs": torch.tensor(data.pairs, dtype=torch.int64),
        "reached": torch.tensor(data.reached, dtype=torch.int64),
        "observations": torch.tensor(list(nodes.nodes), dtype=torch.int64),
        "passes": torch.tensor([node.passes for node in nodes.nodes.values()], dtype=torch.int64),
        "lengths": torch.tensor([len(node.rows) for node in nodes.nodes.values()], dtype=torch.int64),
        "rows": rows,
        "layout": json.dumps({"version": 1, "max_size": data.max_size, "keys": keys}),
    }
    saved = tdstore.TensorDict(found)
    if len(data):
        saved["steps"] = data.read(range(len(data)))
    saved.save(path, **options).close()


def load(data: DataMap, nodes: NodeMap, path: Any, **options: Any) -> dict[str, Any]:
    """Replace the contents of two maps with those that `dump` saved, and return the saved keys.

    Raises:
        ValueError: there is no forest. IndexError: it has more steps than there is room for. KeyError: its steps
            have other entries than those in the place of `data`. After an error the maps are unchanged.
    """
    with tdstore.open(path, **options) as saved:
        if "layout" not in saved.keys() or "observations" not in saved.keys():  # noqa: SIM118
            raise InvalidArgumentError(f"{path} holds no forest: it was not written by MCTSForest.dumps")
        layout: dict[str, Any] = json.loads(saved["layout"])
        if layout["version"] != 1:
            raise InvalidArgumentError(
                f"the forest of {path} has version {layout['version']}, and this tdstore reads 1"
            )
        pairs = saved["pairs"].tolist()
        if len(pairs) > data.max_size:
            raise OutOfRangeError(f"the forest of {path} has {len(pairs)} steps, and there is room for {data.max_size}")
        found = saved.to_tensordict()
    data.replace(pairs, found["reached"].tolist(), found["steps"] if pairs else None)
    nodes.nodes.clear()
    rows, start = found["rows"].tolist(), 0
    facts = zip(*(found[name].tolist() for name in ("observations", "passes", "lengths")), strict=True)
    for observation, passes, length in facts:
        own = rows[start : start + length]
        nodes.nodes[observation] = Node(own, [pairs[row] for row in own], passes)
        start += length
    return dict(layout["keys"])
