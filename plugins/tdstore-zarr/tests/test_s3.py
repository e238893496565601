"""zarr on a real S3 server: rivals, readers, killed writers, and handles that are dropped. A hang is a failure."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tdstore_zarr.store import ZarrStore, open_zarr
from zarrhelp import NEW, OLD, everything, fill, header_of, same

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreBusyError
from tdstore.testing.processes import warm
from tdstore.types import Mode, Write
from tests.servers import S3Server

pytest.importorskip("tdstore_remote")

SECONDS = 120
"""After so long a child that should have ended is stuck: it writes where, and is killed."""


class Bucket:
    """A zarr store in a bucket."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.url = f"{server.url}/{uuid.uuid4().hex[:12]}/t.zarr"
        self.options: dict[str, Any] = {"storage_options": server.fsspec_options}

    def open(self, mode: Mode = "r", **options: Any) -> ZarrStore:
        return open_zarr(self.url, mode=mode, **self.options, **options)

    def save(self, leaves: Any) -> None:
        with self.open("w", chunks=8, shards=32) as store:
            fill(store, leaves)
            store.save_header(header_of(leaves))

    def load(self) -> Any:
        with self.open(verify="full") as store:
            return everything(store)

    def left(self) -> list[str]:
        """Objects that are ours alone."""
        prefix = self.url.removeprefix(f"{self.server.url}/") + "/"
        found = self.server.client().list_objects_v2(Bucket=self.server.bucket, Prefix=prefix).get("Contents", [])
        return [o["Key"] for o in found if o["Key"].removeprefix(prefix).startswith("tdstore.")]

    def child(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """Run code in a process of its own; it is killed, with a dump of its threads, when it hangs."""
        head = (
            f"import faulthandler; faulthandler.dump_traceback_later({SECONDS}, exit=True)\n"
            "import sys, torch, tdstore\nfrom tdstore import TensorDict\n"
            f"url, options = {self.url!r}, {self.options!r}\n"
        )
        return subprocess.Popen(
            [*warm.python(), "-c", head + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def ended(child: subprocess.Popen[str]) -> str:
    """What a child printed, once it ended well and said nothing else."""
    out, err = child.communicate(timeout=SECONDS + 30)
    assert child.returncode == 0, f"it ended with {child.returncode}\n{out}\n{err}"
    assert err == ""
    return out


@pytest.fixture
def bucket(rgw: S3Server) -> Iterator[Bucket]:
    bucket = Bucket(rgw)
    bucket.save(OLD)
    yield bucket
    assert bucket.left() == []


RIVALS = """
import gc
td = tdstore.open(url, mode="r+", **options)
td[3:5] = {"x": torch.ones(2)}
for turn in range(3):
    try:
        other = tdstore.open(url, mode="r+", lock_timeout=0.1, **options)
        other[0] = {"x": torch.tensor(7.0)}
    except tdstore.errors.StoreBusyError:
        print("busy")
other = None
def use():
    kept = tdstore.open(url, **options)
    kept["x"]
use()
gc.collect()
td["x"]
"""


def test_a_second_writer_is_told_and_nothing_hangs(rgw: S3Server) -> None:
    """Handles that go out of scope do no I/O in the thread that happens to collect them."""
    bucket = Bucket(rgw)
    TensorDict({"x": torch.zeros(10)}, [10]).save(bucket.url, **bucket.options).close()
    assert ended(bucket.child(RIVALS)).split() == ["busy"] * 3
    with tdstore.open(bucket.url, **bucket.options) as td:
        assert td["x"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert bucket.left() == []


FINALIZERS = """
import gc
from tdstore_remote.engines.loop import run
gc.disable()
class Cycle:
    pass
cycle = Cycle()
cycle.me, cycle.td = cycle, tdstore.open(url, mode="r+", **options)
cycle.td[3:5] = {"x": torch.ones(2)}
del cycle
async def collect():
    return gc.collect()
assert run(collect())
print(tdstore.open(url, **options)["x"].tolist())
"""


def test_a_handle_that_is_collected_in_the_event_loop_is_committed(rgw: S3Server) -> None:
    bucket = Bucket(rgw)
    TensorDict({"x": torch.zeros(10)}, [10]).save(bucket.url, **bucket.options).close()
    assert ended(bucket.child(FINALIZERS)).strip() == "[0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]"


END = """
td = tdstore.open(url, mode="r+", **options) if sys.argv[1] == "r+" else (
    TensorDict({"x": torch.zeros(10)}, [10]).save(url, **options))
td[3:5] = {"x": torch.ones(2)}
if sys.argv[2] == "raise":
    sys.exit(0)
"""


@pytest.mark.parametrize("how", ["r+", "save"])
@pytest.mark.parametrize("end", ["end", "raise"])
def test_a_script_that_ends_keeps_its_rows(rgw: S3Server, how: str, end: str) -> None:
    bucket = Bucket(rgw)
    TensorDict({"x": torch.zeros(10)}, [10]).save(bucket.url, **bucket.options).close()
    ended(bucket.child(END, how, end))
    with tdstore.open(bucket.url, **bucket.options) as td:
        assert td["x"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert bucket.left() == []


def test_a_reader_does_not_wait_for_a_writer(bucket: Bucket) -> None:
    with bucket.open("r+") as writer:
        writer.write([Write(p, (), v) for p, v in NEW.items()])
        writer.flush()
        assert same(bucket.load(), OLD)
        with pytest.raises(StoreBusyError, match="this process"):
            bucket.open("r+")
    assert same(bucket.load(), NEW)


WRITERS = """
import time
number = int(sys.argv[1])
for turn in range(60):
    try:
        with tdstore.open(url, mode="r+", lock_timeout=60, **options) as td:
            td[number] = {"x": torch.tensor(float(number + 1))}
        break
    except tdstore.errors.StoreBusyError:
        time.sleep(0.05 * (number % 5))
else:
    raise SystemExit("never got its turn")
"""


def test_many_writers_lose_no_row(rgw: S3Server) -> None:
    bucket = Bucket(rgw)
    TensorDict({"x": torch.zeros(6)}, [6]).save(bucket.url, **bucket.options).close()
    for child in [bucket.child(WRITERS, str(number)) for number in range(6)]:
        ended(child)
    with tdstore.open(bucket.url, **bucket.options) as td:
        assert td["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert bucket.left() == []


APPEND = """
with tdstore.open(url, mode="r+", **options) as td:
    for turn in range(10_000):
        n = td.shape[0]
        td.extend(TensorDict({"x": torch.tensor([float(n), n + 1.0])}, [2]))
        td.commit()
        print(n + 2, flush=True)
"""


@pytest.mark.slow
def test_an_appender_that_is_killed_loses_nothing_that_was_committed(rgw: S3Server) -> None:
    bucket = Bucket(rgw)
    TensorDict({"x": torch.arange(4.0)}, [4]).save(bucket.url, chunks=16, **bucket.options).close()
    chance = random.Random(3)
    length = 4
    for _ in range(int(os.environ.get("TDSTORE_KILLS", "6"))):
        child = bucket.child(APPEND)
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, child.communicate()[1]
        time.sleep(chance.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        out, _ = child.communicate()
        length = int((first + out).split()[-1])
        with tdstore.open(bucket.url, verify="full", **bucket.options) as td:
            found = td["x"].tolist()
        assert len(found) >= length
        assert found == list(range(len(found)))
    with bucket.open("r+") as store:
        store.save_header(store.load_header())
    assert bucket.left() == []


KILLED = """
from tdstore.testing.crash import die_at
from tdstore_zarr.store import open_zarr
from tdstore.types import Write
sys.path.insert(0, sys.argv[2])
import test_crash
from tdstore_remote.engines import fsspec_engine, obstore_engine
points = [(kind, name) for module in (fsspec_engine, obstore_engine) for kind in vars(module).values()
          if isinstance(kind, type) and kind.__module__ == module.__name__
          for name in ("put", "put_many", "delete") if name in vars(kind)]
store = open_zarr(url, mode="r+", **options)
die_at(points, int(sys.argv[1]))
test_crash.restructure(store) if sys.argv[3] == "restructure" else test_crash.update(store)
store.close()
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["update", "restructure"])
def test_killed_at_every_request(rgw: S3Server, work: str) -> None:
    """Old or new, and the next writer tidies up."""
    states: list[Any] = [OLD]
    here = os.path.dirname(os.path.abspath(__file__))
    seen = set()
    done = Bucket(rgw)
    done.save(OLD)
    ended(done.child(KILLED, "0", here, work))
    last = done.load()
    step = int(os.environ.get("TDSTORE_STEP", "5"))
    for k in range(1, 400, step):
        bucket = Bucket(rgw)
        bucket.save(OLD)
        child = bucket.child(KILLED, str(k), here, work)
        _, err = child.communicate(timeout=SECONDS + 30)
        assert child.returncode in (0, -signal.SIGKILL), err
        found = bucket.load()
        state = "old" if same(found, OLD) else "new" if same(found, last) else "between"
        assert state != "between" or work == "restructure"
        if state == "between":
            states.append(found)
            assert same(found, states[1]), "neither of its two commits"
        seen.add(state)
        with bucket.open("r+", recover="accept") as store:
            store.write([Write(p, (), v) for p, v in found.items()])
        assert same(bucket.load(), found)
        assert bucket.left() == []
        if child.returncode == 0:
            assert state == "new"
            break
    else:
        pytest.fail("it never came to its end")
    assert {"old", "new"} <= seen
