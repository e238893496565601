"""Rows that the medium refuses in their middle: after the error the entries read as before, also when opened again.

Each write is made over and over; the medium refuses its first request, then its second, until one write goes through.
A request that is refused may be done by half.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tdstore_h5.rows.contiguous
import tdstore_h5.rows.undo
import tdstore_redis.cells.plans
import tdstore_redis.transactions.row_writes
import tdstore_redis.transactions.writer
import torch
from tdstore_redis.connection import Wire
from tdstore_redis.faults import ServerError

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreError, TDStoreError

ROWS = 40


def entries() -> TensorDict:
    torch.manual_seed(0)
    return TensorDict({"a": torch.rand(ROWS, 300), "b": torch.arange(ROWS), "n": {"c": torch.rand(ROWS, 70)}}, [ROWS])


def some(n: int) -> TensorDict:
    return TensorDict({"a": torch.ones(n, 300), "b": -torch.ones(n).long(), "n": {"c": torch.ones(n, 70)}}, [n])


WRITES: dict[str, Callable[[Any], Any]] = {
    "a window": lambda td: td.__setitem__(slice(3, 37), some(34)),
    "scattered rows": lambda td: td.__setitem__([30, 2, 17, 9], some(4)),
    "every third row": lambda td: td.__setitem__(slice(0, 40, 3), some(14)),
    "all of an entry": lambda td: td.__setitem__("a", torch.ones(ROWS, 300)),
    "set_at_": lambda td: td.set_at_("a", torch.ones(33, 300), slice(5, 38)),
    "update_": lambda td: td.update_(some(ROWS)),
    "append": lambda td: td.append(some(1)[0]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "h5": {},
    "h5 large": {},
    "h5 chunked": {"chunks": 7, "compression": "gzip"},
    "zarr": {"chunks": 7, "buffer_bytes": 20_000},
    "zarr shards": {"chunks": 2, "shards": 8, "buffer_bytes": 20_000},
    "file": {"buffer_bytes": 10_000},
    "redis": {},
    "redis staged": {"block": 4000},
    "redis copied": {"block": 4000},
}


class Medium:
    """Refuses one request: `count` is how many there were."""

    def __init__(self, refused: int) -> None:
        self.refused, self.count, self.armed = refused, 0, False

    def turn(self) -> bool:
        """Whether this request is the one."""
        if not self.armed:
            return False
        self.count += 1
        return self.count == self.refused


@contextmanager
def refusing(kind: str, td: Any, refused: int) -> Iterator[Medium]:
    medium = Medium(refused)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "h5 large":  # each call is more than is remembered until the commit
            patch.setattr(tdstore_h5.rows.undo, "MOST", 2000)
        if kind.startswith("h5"):
            real = tdstore_h5.rows.contiguous.write_at

            def write_at(fd: int, data: memoryview, at: int) -> None:
                if medium.turn():
                    real(fd, data[: len(data) // 2], at)
                    raise OSError(errno.EIO, "the medium fails")
                real(fd, data, at)

            patch.setattr(tdstore_h5.rows.contiguous, "write_at", write_at)
        elif kind.startswith("redis"):
            sending = tdstore_redis.transactions.writer.Writer.sending

            def refuse(self: Any, wire: Wire, commands: Any) -> Any:
                if not medium.turn():
                    return sending(self, wire, commands)
                error = ServerError("OOM command not allowed when used memory > 'maxmemory'")
                if commands[0] == tdstore_redis.transactions.writer._MULTI:  # a server carries out all of them, or none
                    return [error, *[None] * (len(commands) - 1)]
                half = len(commands) // 2
                return [*sending(self, wire, commands[:half]), *[error] * (len(commands) - half)]

            patch.setattr(tdstore_redis.transactions.writer.Writer, "sending", refuse)
            if kind != "redis":
                patch.setattr(tdstore_redis.transactions.row_writes, "STEP", 1000)
                patch.setattr(tdstore_redis.transactions.row_writes, "GROUP", 9000)
                patch.setattr(tdstore_redis.cells.plans, "PIECE", 5000)
            if kind == "redis copied":
                patch.setattr(tdstore_redis.transactions.row_writes, "INLINE", 1000)
        else:
            engine = td._handle.store.engine if kind == "file" else td._handle.store._session.engine.base
            put, put_many = engine.put, engine.put_many

            def one(key: str, data: Any, **options: Any) -> Any:
                if medium.turn():
                    raise StoreError("the medium refuses", url=engine.url)
                return put(key, data, **options)

            def many(items: Any) -> None:
                if medium.turn():
                    put_many(items[: len(items) // 2])
                    raise StoreError("the medium refuses", url=engine.url)
                put_many(items)

            patch.setattr(engine, "put", one)
            patch.setattr(engine, "put_many", many)
        yield medium


def snapshot(td: Any) -> dict[Any, torch.Tensor]:
    return {key: td[key].clone() for key in ("a", "b", ("n", "c"))}


def same(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> bool:
    return all(a[key].shape == b[key].shape and torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.param
    if kind.startswith("redis"):
        return f"{request.getfixturevalue('redis').url}/rows-{tmp_path.name}"
    return f"file://{tmp_path}/data" if kind == "file" else str(tmp_path / f"data.{kind.split()[0]}")


@pytest.mark.parametrize(("kind", "location"), [(kind, kind) for kind in OPTIONS], indirect=["location"])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_refused_rows_are_not_there(write: str, earlier: bool, kind: str, location: str) -> None:
    options = OPTIONS[kind]
    buffered = {key: value for key, value in options.items() if key == "buffer_bytes"}
    for refused in range(1, 40):
        entries().save(location, **options).close()
        td = tdstore.open(location, mode="r+", **buffered)
        if earlier:  # rows that were written before, and are not committed
            td[4:20:2] = some(8)
        before = snapshot(td)
        with refusing(kind, td, refused) as medium:
            medium.armed = True
            try:
                WRITES[write](td)
            except TDStoreError:
                failed = True
            else:
                failed = False
            medium.armed = False
            after = snapshot(td)
            assert not failed or same(after, before), f"request {refused} failed, and some rows are new"
            td.close()
        with tdstore.open(location, verify="full") as again:
            assert same(snapshot(again), after), f"request {refused}"
        if not failed:
            assert not same(after, before)
            break
    else:
        pytest.fail("the write never went through")


def test_a_connection_that_ends_in_the_middle_of_rows(redis: Any, tmp_path: Path) -> None:
    """A store of a server writes nothing more then, and what is opened anew has the rows of before."""
    location = f"{redis.url}/cut-{tmp_path.name}"
    entries().save(location).close()
    real = Wire.send

    def cut(self: Wire, commands: Any) -> None:
        if len(commands) > 3:
            real(self, commands[: len(commands) // 2])
            self.close()
            raise ConnectionResetError("the connection ended")
        real(self, commands)

    td = tdstore.open(location, mode="r+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "send", cut)
        with pytest.raises(TDStoreError):
            td[3:37] = some(34)
    with tdstore.open(location) as again:
        assert same(snapshot(again), snapshot(entries()))
    td.close()
