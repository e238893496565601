"""Named shared memory that somebody damages or dies over: an error of ours in the one who opens it, never a crash."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import time
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import DirtyStoreError, StoreNotFoundError

from .fault_media import in_child, look_at_everything, start

ROWS = 2000


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TDSTORE_SHM_DIR", str(tmp_path))
    return tmp_path


def _dataset(value: float = 1.0) -> TensorDict:
    leaves = {"a": torch.full((ROWS, 64), value), "n": {"b": torch.full((ROWS,), value)}, "t": "text"}
    return TensorDict(leaves, [ROWS])


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_writer_killed_in_mid_update() -> None:
    """Whatever is opened afterwards is whole in structure; the owner goes on, and so does the next writer."""
    owner = _dataset().save("shm://x")

    def writing() -> None:
        with TensorDict.load("shm://x", mode="r+") as td:
            for value in range(10**9):
                td.update_(_dataset(float(value)))
                td[::3] = _dataset(float(value))[::3]

    dirty = 0
    for _ in range(6):
        pid, answer = start(writing)
        os.close(answer)
        time.sleep(0.15)
        _kill(pid)
        assert in_child(lambda: look_at_everything("shm://x")).startswith(("opened", "DirtyStoreError"))
        try:
            TensorDict.load("shm://x", mode="r+", lock_timeout=2.0).close()
        except DirtyStoreError as error:
            assert error.leaves
            dirty += 1
            TensorDict.load("shm://x", mode="r+", recover="accept").close()
        owner.update_(_dataset(5.0))
        with TensorDict.load("shm://x") as td:
            assert td["a"].unique().tolist() == [5.0] and td["t"] == "text"


def test_an_owner_killed_takes_its_data_along() -> None:
    def owning() -> None:
        kept = _dataset().save("shm://x")
        time.sleep(60)
        kept.close()

    pid, answer = start(owning)
    os.close(answer)
    deadline = time.monotonic() + 30
    while not in_child(lambda: _try("shm://x")).startswith("opened"):
        assert time.monotonic() < deadline, "it was never there"
    _kill(pid)
    with pytest.raises(StoreNotFoundError):
        TensorDict.load("shm://x")
    with _dataset(2.0).save("shm://x", mode="x") as again:
        assert again["a"][0, 0] == 2


def _try(location: str) -> str:
    return look_at_everything(location)


def _planted(shm: Path, data: bytes, name: str = "bad") -> int:
    """A segment of that content whose owner lives; close the descriptor to end it."""
    fd = os.open(shm / f"tds.{os.geteuid()}.{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_damaged_segments(shm: Path) -> None:
    """Cut, flipped, overwritten and made up: each opened by a child that looks at everything."""
    chosen = random.Random(0)
    owner = _dataset().save("shm://good")
    good = (shm / f"tds.{os.geteuid()}.good").read_bytes()
    record = owner._binding[0].store._arena._records()
    spots = [r[1] + chosen.randrange(r[2]) for r in record if r for _ in range(15)] + list(range(0, 272, 8))
    variants: list[bytes] = [good[: len(good) * k // 12] for k in range(12)]
    variants += [good[: 4096 * k] for k in range(3)]
    for spot in spots:
        variants.append(good[:spot] + bytes([good[spot] ^ 1 << chosen.randrange(8)]) + good[spot + 1 :])
    for at in range(0, 272, 8):
        variants.append(good[:at] + struct.pack("<Q", 2**63 - 1) + good[at + 8 :])
    variants += [b"", b"\0" * 8192, b"\xff" * 8192, chosen.randbytes(65536), b"TDS1 00000000\n{}"]

    def body() -> str:
        answers = []
        for data in variants:
            fd = _planted(shm, data)
            try:
                answers.append(look_at_everything("shm://bad"))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
            finally:
                os.close(fd)
        return "\n".join(a.splitlines()[0] for a in answers)

    answers = in_child(body, memory=1 << 30).splitlines()
    assert len(answers) == len(variants)
    fine = ("opened: ", "CorruptStoreError", "StoreNotFoundError", "DirtyStoreError", "StoreBusyError")
    odd = [a for a in answers if not a.startswith(fine)]
    assert odd == []
    assert sum(a.startswith("CorruptStoreError") for a in answers) > len(variants) // 2
    assert owner["a"].unique().tolist() == [1.0]


def test_cut_while_it_is_open(shm: Path) -> None:
    """A third party that truncates a mapped segment can kill its readers: what opens it afterwards is told."""
    owner = _dataset().save("shm://x")
    file = shm / f"tds.{os.geteuid()}.x"
    size = file.stat().st_size
    os.truncate(file, 4096)
    assert in_child(lambda: look_at_everything("shm://x")).startswith("CorruptStoreError")
    os.truncate(file, size)
    owner.close()
