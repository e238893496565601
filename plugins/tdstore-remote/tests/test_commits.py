"""Saves and updates on a real S3 server: killed, rivalled, and read meanwhile."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name, sample

import tdstore
from tdstore import TensorDict
from tdstore.errors import ConflictError, StoreExistsError
from tests import scripts
from tests.servers import FaultProxy, S3Server

SAVER = """
import sys, torch, tdstore
from tdstore import TensorDict
options, where, start = eval(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
for i in range(start, start + 500):
    td = TensorDict({"a": torch.full((200, 500), i), "n": {"b": torch.full((200,), i)}}, [200])
    td.save(where, storage_options=options)
"""


UPDATER = """
import sys, torch, tdstore
from tdstore import TensorDict
options, where, start = eval(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for i in range(start, start + 500):
    with tdstore.open(where, mode="r+", storage_options=options) as td:
        rows = torch.arange(0, 200, 7)
        td[rows] = TensorDict({"a": torch.full((29, 500), i), "n": {"b": torch.full((29,), i)}}, [29])
    if i == start:
        print("ready", flush=True)
"""


def numbered(i: int) -> TensorDict:
    return TensorDict({"a": torch.full((200, 500), i), "n": {"b": torch.full((200,), i)}}, [200])


def number_of(where: str, options: dict[str, Any]) -> int:
    """Which save is there; every leaf must be of the same."""
    with tdstore.open(where, storage_options=options) as td:
        found = td.to_tensordict()
    values = torch.cat([found["a"].reshape(-1), found["n", "b"]]).unique().tolist()
    assert len(values) == 1, f"torn: {values}"
    return int(values[0])


@contextmanager
def saving(options: dict[str, Any], where: str, start: int, code: str = SAVER) -> Iterator[None]:
    """A process that saves again and again, and is killed when the block ends, wherever it is then."""
    with tempfile.TemporaryDirectory() as folder:
        output = FsPath(folder, "output")
        os.mkfifo(output)
        more = {"output": output, "warnings": "ignore"}
        with scripts.started(code, repr(options), where, start, **more) as script, output.open() as printed:
            assert printed.readline() == "ready\n"
            try:
                yield
            finally:
                os.kill(script.pid, signal.SIGKILL)
    assert script.status == -signal.SIGKILL, script.errors


def test_killed_saves_leave_old_or_new(rgw: S3Server) -> None:
    where, options = f"{rgw.url}/{name()}", rgw.fsspec_options
    numbered(0).save(where, storage_options=options)
    last = 0
    for attempt in range(6):
        with saving(options, where, last + 1):
            time.sleep(0.05 + random.random() * 0.25)
        now = number_of(where, options)
        assert now >= last, f"attempt {attempt} lost a save that had been there"
        last = now


def test_killed_updates_of_rows_leave_old_or_new(rgw: S3Server) -> None:
    where, options = f"{rgw.url}/{name()}", rgw.fsspec_options
    numbered(0).save(where, storage_options=options)
    last = 0
    for _ in range(4):
        with saving(options, where, last + 1, UPDATER):
            time.sleep(0.1 + random.random() * 0.3)
        with tdstore.open(where, storage_options=options) as td:
            found = td.to_tensordict()
        changed = torch.arange(200) % 7 == 0
        values = torch.cat([found["a"][changed].reshape(-1), found["n", "b"][changed]]).unique().tolist()
        assert len(values) == 1, f"torn: {values}"
        assert not found["a"][~changed].any(), "rows that nobody wrote"
        assert values[0] >= last
        last = values[0]
    assert last > 0, "no update was ever committed"


def test_a_stale_manifest_is_an_older_generation_and_loses_the_race(rgw: S3Server) -> None:
    """A cache on the way answers with what was: a reader sees a whole older generation, a writer is told."""
    where = f"{rgw.url}/{name()}"
    with FaultProxy(rgw.port) as proxy:
        stale = rgw.through(proxy.port).fsspec_options
        numbered(1).save(where, storage_options=stale)
        assert number_of(where, stale) == 1
        numbered(2).save(where, storage_options=rgw.fsspec_options)
        proxy.stale(method="GET", path="tdstore.json")
        assert number_of(where, stale) == 1
        writer = tdstore.open(where, mode="r+", storage_options=stale)
        writer[0:2] = numbered(9)[0:2]
        with pytest.raises(ConflictError):
            writer.close()
        proxy.clear()
        assert number_of(where, stale) == 2


def test_readers_see_one_generation(rgw: S3Server) -> None:
    where, options = f"{rgw.url}/{name()}", rgw.fsspec_options
    numbered(0).save(where, storage_options=options)
    with saving(options, where, 1):
        seen = [number_of(where, options) for _ in range(25)]
        with tdstore.open(where, storage_options=options) as td:
            first = td[0]["n", "b"].item()
            time.sleep(0.5)
            assert td[199]["n", "b"].item() == first, "a reader keeps the generation that it opened"
    assert seen == sorted(seen)


@pytest.mark.parametrize("server", ["rgw", "azure"])
def test_of_two_writers_one_wins(server: str, request: pytest.FixtureRequest) -> None:
    endpoint = request.getfixturevalue(server)
    options = endpoint.fsspec_options if server == "rgw" else {"connection_string": endpoint.connection_string}
    where = f"{endpoint.url}/{name()}"
    numbered(0).save(where, storage_options=options)
    one = tdstore.open(where, mode="r+", storage_options=options)
    two = tdstore.open(where, mode="r+", storage_options=options)
    one[3:5] = numbered(7)[3:5]
    two[5:9] = numbered(8)[5:9]
    one.close()
    with pytest.raises(ConflictError):
        two.close()
    with tdstore.open(where, storage_options=options) as td:
        assert td["n", "b"].tolist() == [0] * 3 + [7] * 2 + [0] * 195
    with pytest.raises(StoreExistsError):
        tdstore.open(where, mode="x", storage_options=options)


def test_a_server_without_conditions_wants_one_writer(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from tdstore_remote.engines import conditional_puts

    monkeypatch.setattr(conditional_puts, "of", lambda *_: conditional_puts.Conditions(False))
    where, options = f"{rgw.url}/{name()}", rgw.fsspec_options
    with pytest.raises(Exception, match="single_writer"):
        sample().save(where, storage_options=options)
    sample().save(where, storage_options=options, single_writer=True)
    with tdstore.open(where, storage_options=options) as td:
        assert td[7]["action"].item() == 7


def test_acknowledgements_that_are_lost(rgw: S3Server) -> None:
    """Each fourth answer to a write is lost; every save is there, or was refused."""
    where = f"{rgw.url}/{name()}"
    with FaultProxy(rgw.port) as proxy:
        options = rgw.through(proxy.port).fsspec_options
        numbered(0).save(where, storage_options=options)
        proxy.drop_ack(method="PUT", every=3)
        for i in range(1, 9):
            numbered(i).save(where, storage_options=options)
            assert number_of(where, rgw.fsspec_options) == i
