"""Wrappers around a store that count calls, delay them or let them fail, for tests and for finding slow code."""

# ruff: noqa: D102 - the methods of Store are documented there

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tdstore.errors import InvalidArgumentError, TransientError
from tdstore.header import Header
from tdstore.store import Store
from tdstore.types import Fault, LeafSpec, Path, Read, Write


class WrappedStore(Store):
    """A store that passes every call to `inner`, after a call of `before_call(method, count)`.

    Args:
        inner: the store to wrap.

    Example:
        >>> class Logged(WrappedStore):
        ...     def before_call(self, method, count):
        ...         print(method, count)
        >>> Logged(open_memory()).create({("a",): LeafSpec((3,), "int64")})
        create 1
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        # The abilities of a wrapper are those of the inner store, so they differ by object.
        vars(self)["caps"] = inner.caps
        self.url = inner.url
        self.writable = inner.writable
        self.uncommitted = inner.uncommitted

    def before_call(self, method: str, count: int) -> None:
        """Run before each call; `count` is the number of its leaves, 0 for the header.

        Args:
            method: name of the method.
            count: number of leaves or requests of the call.
        """

    def paths(self) -> Iterator[Path]:
        self.before_call("paths", 0)
        return self.inner.paths()

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        self.before_call("specs", len(paths))
        return self.inner.specs(paths)

    def load_header(self) -> Header:
        self.before_call("load_header", 0)
        return self.inner.load_header()

    def save_header(self, header: Header) -> None:
        self.before_call("save_header", 0)
        self.inner.save_header(header)

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self.before_call("create", len(leaves))
        self.inner.create(leaves)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        self.before_call("read", len(reads))
        return self.inner.read(reads)

    async def aread(self, reads: Sequence[Read]) -> list[Tensor]:
        self.before_call("aread", len(reads))
        return await self.inner.aread(reads)

    def write(self, writes: Sequence[Write]) -> None:
        self.before_call("write", len(writes))
        self.inner.write(writes)

    def delete(self, paths: Sequence[Path]) -> None:
        self.before_call("delete", len(paths))
        self.inner.delete(paths)

    def view(self, path: Path) -> Tensor:
        self.before_call("view", 1)
        return self.inner.view(path)

    def resize(self, lengths: Mapping[Path, int]) -> None:
        self.before_call("resize", len(lengths))
        self.inner.resize(lengths)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        self.before_call("rename", len(moves))
        self.inner.rename(moves)

    def discard(self) -> None:
        self.before_call("discard", 0)
        self.inner.discard()

    def flush(self) -> None:
        self.before_call("flush", 0)
        self.inner.flush()

    def generation(self) -> object:
        self.before_call("generation", 0)
        return self.inner.generation()

    def layout(self, path: Path) -> Mapping[str, Any]:
        return self.inner.layout(path)

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        self.before_call("verify", 0 if paths is None else len(paths))
        return self.inner.verify(paths)

    def group_location(self, path: Path) -> str:
        return self.inner.group_location(path)

    def native_group(self, path: Path, owner: object) -> object:
        return self.inner.native_group(path, owner)

    def nbytes_stored(self) -> int | None:
        return self.inner.nbytes_stored()

    def close(self) -> None:
        # Without before_call: closing must work for any wrapper.
        self.inner.close()


class CountingStore(WrappedStore):
    """A store that counts calls by method, leaves by method, and `rounds`: calls that move data or the header.

    Example:
        >>> store = CountingStore(open_memory())
        >>> store.create({("a",): LeafSpec((3,), "int64"), ("b",): LeafSpec((3,), "int64")})
        >>> _ = store.read([Read(("a",)), Read(("b",))])
        >>> store.calls["read"], store.leaves["read"], store.rounds
        (1, 2, 2)
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.leaves: Counter[str] = Counter()

    def before_call(self, method: str, count: int) -> None:
        self.calls[method] += 1
        self.leaves[method] += count

    @property
    def rounds(self) -> int:
        """Return the number of calls that would cost a remote store a round trip."""
        return sum(self.calls.values()) - sum(self.calls[free] for free in ("paths", "view", "flush", "generation"))

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.calls.clear()
        self.leaves.clear()


class SlowStore(WrappedStore):
    """A store that waits before each call, like a store behind a network.

    Args:
        inner: the store to wrap.
        latency: the waiting time, in seconds.

    Example:
        >>> list(SlowStore(open_memory(), latency=0.001).paths())
        []
    """

    def __init__(self, inner: Store, latency: float = 0.02) -> None:
        super().__init__(inner)
        self.latency = latency

    def before_call(self, method: str, count: int) -> None:
        if method != "view":
            time.sleep(self.latency)

    async def aread(self, reads: Sequence[Read]) -> list[Tensor]:
        # The base class waits in a thread, so that the event loop is not held up.
        return await Store.aread(self, reads)


class FlakyStore(WrappedStore):
    """A store that fails each `every`-th call with `TransientError`, before the call changes anything.

    Args:
        inner: the store to wrap.
        every: the number of calls of which the last one fails.

    Raises:
        InvalidArgumentError: `every` is less than 1.

    Example:
        >>> store = FlakyStore(open_memory(), every=2)
        >>> _ = store.paths()
        >>> store.load_header()
        Traceback (most recent call last):
        ...
        tdstore.errors.TransientError: load_header on ram:// failed (call 2 of a flaky store)
    """

    def __init__(self, inner: Store, every: int = 3) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every must be 1 or more, not {every}")
        super().__init__(inner)
        self.every = every
        self.count = 0

    def before_call(self, method: str, count: int) -> None:
        self.count += 1
        if self.count % self.every == 0:
            raise TransientError(f"{method} on {self.url} failed (call {self.count} of a flaky store)", url=self.url)
