"""`tdstore.build` into a bucket while its workers and its driver are killed: nothing is lost or there twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors

ROWS = 3
"""Inputs of a task."""


class Killed:
    """Return rows of each input, twice; its process is killed once in every third task, at a random moment.

    That is before, in or after the write of the rows. There is a file for each call that came to its end, and for each
    kill.
    """

    def __init__(self, log, every=3):
        self.log, self.every = str(log), every

    def __call__(self, numbers):
        numbers = [n for n in numbers for _ in range(2)]
        if self.every and numbers[0] % (self.every * ROWS) == 0:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.log}/killed-{numbers[0]}", os.O_CREAT | os.O_EXCL))
                delay = random.Random(os.urandom(8)).uniform(0, 0.05)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                time.sleep(random.Random(os.urandom(8)).uniform(0, 0.05))
        Path(self.log, f"{numbers[0]:06d}-{uuid.uuid4().hex}").touch()
        return TensorDict({"x": torch.tensor(numbers), "text": [str(n) for n in numbers]}, [len(numbers)])


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def place(s3):
    """A location in a bucket of its own, and the function that tells the keys there."""
    bucket = s3.make_bucket()
    client = s3.client()

    def keys():
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket.bucket)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    return f"{bucket.url}/run", s3.fsspec_options, keys


def assert_whole(td, count, keys):
    """Each row is there once and in order, each object is named by the manifest, and the build left nothing."""
    assert td["x"].tolist() == [n for n in range(count) for _ in range(2)]
    assert list(td["text"]) == [str(n) for n in range(count) for _ in range(2)]
    assert td.verify() == []
    data, others = sorted(key for key in keys if "/data/" in key), [key for key in keys if "/data/" not in key]
    assert others == ["run/tdstore.json"]
    assert len(data) == count // ROWS  # one a task; the few strings are in the manifest


def test_workers_killed_at_random(place, log):
    location, options, keys = place
    td = tdstore.build(
        location,
        Killed(log),
        range(36),
        rows_per_task=ROWS,
        num_workers=3,
        mp_start_method="fork",
        storage_options=options,
    )
    assert_whole(td, 36, keys())
    assert len(list(log.glob("killed-*"))) == 4


def test_a_killed_driver_is_resumed_and_its_workers_end(place, log):
    location, options, keys = place
    pids = log.parent / "pids"
    pids.mkdir()

    def slow(numbers):
        (pids / str(os.getpid())).touch()
        time.sleep(0.02)
        return Killed(log, every=0)(numbers)

    def drive():
        tdstore.build(
            location,
            slow,
            range(60),
            rows_per_task=ROWS,
            num_workers=2,
            mp_start_method="fork",
            storage_options=options,
        )

    driver = multiprocessing.get_context("fork").Process(target=drive)
    driver.start()
    wait_for(lambda: sum("/build/0" in key for key in keys()) >= 3)
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    workers = [int(path.name) for path in pids.iterdir()]
    assert workers and os.getpid() not in workers
    wait_for(lambda: not any(alive(pid) for pid in workers))

    finished = {int(key[-13:-5]) for key in keys() if "/build/0" in key}
    assert 3 <= len(finished) < 20
    with pytest.raises(errors.StoreNotFoundError, match=r"a tdstore\.build is running there"):
        tdstore.open(location, storage_options=options)
    for path in log.iterdir():
        path.unlink()
    td = tdstore.build(
        location, Killed(log, every=0), range(60), rows_per_task=ROWS, num_workers=0, storage_options=options
    )
    assert_whole(td, 60, keys())
    again = sorted(int(path.name[:6]) // ROWS for path in log.iterdir())
    assert again == [number for number in range(20) if number not in finished]  # none of the finished ones, others once


def test_workers_of_dask_killed_at_random(place, log):
    """A cluster gives up a worker whose restart takes longer than 15 s: on a busy machine that is all of them."""
    distributed = pytest.importorskip("distributed", reason="make dev installs it")
    dask = pytest.importorskip("dask")
    location, options, keys = place
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "4 minutes"}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        td = tdstore.build(
            location,
            Killed(log, every=4),
            range(24),
            rows_per_task=ROWS,
            executor=client.get_executor(),
            storage_options=options,
        )
        assert_whole(td, 24, keys())
    assert len(list(log.glob("killed-*"))) == 2


def wait_for(condition, seconds=60.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def alive(pid):
    """Whether a process runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
