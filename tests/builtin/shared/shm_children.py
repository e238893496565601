"""What child processes of these tests run; imported by spawned ones, so kept apart and light."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import torch

from tdstore.builtin.shared.store import SharedStore, attach_shared, open_shared
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Write

HEADER = Header({(): Group(batch_size=(4,), keys=("a",))})


def made(location: str | None = None, value: float = 0.0, rows: int = 4, **options) -> SharedStore:
    """A saved store with one leaf, `a`."""
    store = open_shared(location, **options)
    store.create({("a",): LeafSpec((rows,), "float32", fill_value=value)})
    store.save_header(HEADER)
    return store


def set_row(store: SharedStore, row: int, value: float) -> None:
    store.write([Write(("a",), (slice(row, row + 1, 1),), torch.tensor([value]))])


def read_and_write(handle, answers, go) -> None:
    """See the parent's rows, write one, wait for the parent's next."""
    store = attach_shared(handle)
    answers.put((store.view(("a",)).tolist(), dict(store.load_header().groups) == dict(HEADER.groups)))
    set_row(store, 1, 7.0)
    answers.put("written")
    go.get(timeout=200)
    answers.put(store.view(("a",)).tolist())


def make_and_send(queue, done) -> None:
    queue.put(made(value=3.0))  # dropped at once
    done.wait(200)


def send_tensor(queue, done) -> None:
    store = made(value=3.0)
    queue.put(store.view(("a",)))
    done.wait(200)


def rival(name: str, barrier, answers) -> None:
    barrier.wait(200)
    try:
        made(name, value=float(os.getpid()), mode="x")
        answers.put(("made", os.getpid()))
    except Exception as error:
        answers.put((type(error).__name__, os.getpid()))
    barrier.wait(200)


START = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom shm_children import *\n"
"""The first lines of programs that use what is here."""


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run code in an unrelated process."""
    from tdstore.testing.processes import warm  # not above: spawned children import this module

    return subprocess.run(
        [*warm.python(), "-c", START + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def forked(run: Callable[[], None]) -> int:
    """Run something in a forked child that ends without any cleaning up; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]
