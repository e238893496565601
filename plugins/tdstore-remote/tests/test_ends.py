"""Rows that were written and never committed: the end of a script, and of its worker processes, commits them."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name

import tdstore
from tdstore import TensorDict
from tdstore.errors import UnsupportedError
from tests import scripts
from tests.servers import S3Server

SCRIPT = """
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)
import multiprocessing, sys, torch
import tdstore
from tdstore import TensorDict

OPTIONS, WHERE = {options!r}, {where!r}

def write(row):
    global td
    td = tdstore.open(WHERE, mode="r+", **OPTIONS)
    td.set_at_("a", torch.full((3,), float(row)), row)

class Writing(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, item):
        write(3)
        return item

if __name__ == "__main__":
    for row, method in ((1, "fork"), (2, "forkserver")):
        process = multiprocessing.get_context(method).Process(target=write, args=[row])
        process.start()
        process.join()
        assert process.exitcode == 0, method
    list(torch.utils.data.DataLoader(Writing(), num_workers=1))
    made = TensorDict({{"a": torch.zeros(2)}}, [2]).save(WHERE + "-saved", **OPTIONS)
    made.set_at_("a", torch.tensor(7.0), 1)
    write(4)
    {end}
"""
ENDS = {"end": "pass", "sys.exit": "sys.exit()", "exception": "raise RuntimeError('as it happens')"}
PLACES = {"file": "end", "s3": "exception", "s3fs": "sys.exit"}


def end(tmp_path: FsPath, where: str, options: dict[str, Any], how: str) -> str:
    """Run the script; what it wrote to stderr."""
    TensorDict({"a": torch.zeros(6, 3)}, [6]).save(where, **options).close()
    program = tmp_path / "program.py"
    program.write_text(SCRIPT.format(options=options, where=where, end=ENDS[how]))
    done = scripts.run_file(program, warnings="ignore")
    assert done.status == (how == "exception"), done.errors
    return done.errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_rows_of_handles_that_nobody_closed(kind: str, s3: S3Server, tmp_path: FsPath) -> None:
    where, options = f"file://{tmp_path}/run", {}
    if kind != "file":
        where, options = f"{s3.url}/{name()}", {"storage_options": s3.fsspec_options}
    if kind == "s3fs":
        options |= {"engine": "fsspec", "single_writer": True}
    said = end(tmp_path, where, options, PLACES[kind])
    assert "Exception ignored" not in said and "uncommitted" not in said
    assert said.count("Traceback") == (PLACES[kind] == "exception"), said
    with tdstore.open(where, **options) as td:
        assert td["a"][:, 0].tolist() == [0, 1, 2, 3, 4, 0]
    with tdstore.open(where + "-saved", **options) as td:
        assert td["a"].tolist() == [0, 7]


def test_where_nothing_can_be_committed_the_first_write_says_so(s3: S3Server) -> None:
    """Rows of a medium without conditions would be accepted, and refused when the script ends."""
    where, options = f"{s3.url}/{name()}", {"storage_options": s3.fsspec_options}
    TensorDict({"a": torch.zeros(6, 3)}, [6]).save(where, **options).close()
    with tdstore.open(where, mode="r+", engine="fsspec", **options) as td:
        with pytest.raises(UnsupportedError, match="single_writer=True.*spawn or forkserver") as caught:
            td.set_at_("a", torch.ones(3), 1)
        assert where in str(caught.value)


def test_the_end_of_a_process_waits_for_native_threads() -> None:
    """They let go of Python objects after an answer, and abort a process that is torn down meanwhile."""
    program = """
import asyncio, time, types
from tdstore import lifetime
from tdstore_remote.engines import loop
loop.QUIET = 3600.0
loop.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: print("waits", seconds > 3000))
class Owner: pass
owner = Owner()
lifetime.Ending(owner, lambda: print(loop.run(asyncio.sleep(0, "commits"))), "a place")
"""
    done = scripts.run(program, warnings="ignore")
    assert (done.status, done.output.split("\n")) == (0, ["commits", "waits True", ""]), done.errors
