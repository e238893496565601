"""What a writer leaves at, or in the middle of, any change of the medium: old, new, or an error that names leaves."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import DirtyStoreError
from tdstore.testing.crash import die
from tdstore.testing.processes.deaths import StoredFiles, copies

STEP = 4
"""Of the moments at which the files are looked at, every so-many-th."""
ROWS = 64
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "compressed": {"chunks": 8, "compression": "gzip"}}
Change = Callable[[Any], object]


def _rows(start: float) -> TensorDict:
    x = torch.arange(ROWS * 30.0).view(ROWS, 30) + start
    return TensorDict({"x": x, "n": {"y": torch.arange(ROWS) + int(start)}}, batch_size=[ROWS])


CHANGES: dict[str, Change] = {
    "set_": lambda td: (td.set_("x", _rows(5.0)["x"]), td.commit()),
    "set_at_": lambda td: (td.set_at_("x", torch.full((9, 30), -1.0), slice(20, 29)), td.commit()),
    "update_at_": lambda td: td.update_at_(_rows(7.0)[:30], slice(3, 33)),
    "append": lambda td: [td.append(_rows(9.0)[i]) for i in range(2)],
    "new key": lambda td: td.set("z", torch.full((ROWS, 40), 3.0)),
    "replaced key": lambda td: td.set("x", torch.full((ROWS, 7), 2, dtype=torch.int64)),
    "rename": lambda td: td.rename_key_("x", "moved"),
    "delete": lambda td: td.del_("x"),
    "resize_": lambda td: td.resize_(20),
    "many": lambda td: (td.set_at_("x", torch.zeros(30), 3), td.set("z", _rows(1.0)["x"]), td.del_("n"), td.commit()),
}


def _content(place: FsPath, **options: Any) -> dict[Any, Any]:
    with tdstore.open(place, **options) as td:
        found = {"": tuple(td.batch_size)}
        return found | {key: td[key].tolist() for key in sorted(td.keys(True, True), key=str)}


def _count(do: Callable[[int], object]) -> None:
    """Call a function at each change of the medium from now on: before it, in the middle of a write, and after it."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        do(count)

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def counted(*args: Any, **options: Any) -> Any:
            step()
            if name == "pwrite":
                fd, data, offset = args
                real(fd, data[: len(data) // 2], offset)
            step()
            result = real(*args, **options)
            step()
            return result

        setattr(os, name, counted)

    for name in ("pwrite", "ftruncate", "fsync", "unlink", "posix_fallocate", "replace"):
        wrap(name)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_is_lost(file: FsPath, layout: str, change: str) -> None:
    _rows(0.0).save(file, **LAYOUTS[layout]).close()
    good, old = file.read_bytes(), _content(file)

    def work() -> None:
        with tdstore.open(file, "r+", **LAYOUTS[layout]) as td:
            CHANGES[change](td)

    def begin() -> None:
        for entry in file.parent.iterdir():
            entry.unlink()
        file.write_bytes(good)

    work()
    new = _content(file)
    begin()
    assert new != old
    chance = random.Random(change)
    seen = {"old": 0, "new": 0, "dirty": 0, "between": 0}
    for _ in copies(work, _count, lambda: StoredFiles(file.parent), step=STEP, least=12):
        for options in ({}, {"verify": "full"}):
            try:
                found = _content(file, **options)
            except DirtyStoreError as error:
                assert error.leaves
                kind = "dirty"
            else:
                kind = "old" if found == old else "new" if found == new else "between"
        seen[kind] += 1
        if chance.random() > 0.3:
            continue
        accepted = _content(file, recover="accept")
        assert kind in ("dirty", "between") or accepted in (old, new)
        with tdstore.open(file, "r+", recover="accept") as td:  # and the next writer goes on with it
            td["later"] = torch.ones(td.batch_size[0])
        assert _content(file)["later"] == [1.0] * len(_content(file)["later"])
        assert [entry for entry in os.listdir(file.parent) if entry != file.name] == []
    assert seen["old"], seen
    assert not seen["dirty"] or layout == "contiguous", seen
    assert not seen["between"] or change in ("append", "many"), f"{seen}: those are several commits"


def test_a_journal_fits_its_own_file_only(file: FsPath, tmp_path: FsPath) -> None:
    """A complete journal beside a file that was put there instead is not applied to it."""
    from tdstore_h5.file.journal import journal_path

    _rows(0.0).save(file).close()

    def work() -> None:
        real = os.unlink
        os.unlink = lambda path, **o: die() if str(path).endswith(".journal") else real(path, **o)
        with tdstore.open(file, "r+") as td:
            td["z"] = torch.ones(ROWS)

    for _ in _once(work):
        pass
    journal = FsPath(journal_path(str(file)))
    complete = journal.read_bytes()
    assert "z" in _content(file)
    assert not journal.exists()
    _rows(1.0).save(file).close()
    other = file.read_bytes()
    journal.write_bytes(complete)
    assert _content(file)["n", "y"][0] == 1
    assert file.read_bytes() == other


def _once(work: Callable[[], None]) -> Iterator[int]:
    from tdstore.testing.crash import in_child

    code = in_child(work)
    assert code == -signal.SIGKILL
    yield code
