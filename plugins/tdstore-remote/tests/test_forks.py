"""Worker processes over object stores: they work, or say at once what to change. Each test has a deadline."""

from __future__ import annotations

import pickle
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name, run, sample

import tdstore
from tests.servers import S3Server

LOADER = """
import sys, torch
import tdstore
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

class Rows(Dataset):
    def __init__(self, td): self.td = td
    def __len__(self): return self.td.shape[0]
    def __getitems__(self, rows): return self.td[torch.tensor(rows)].to_tensordict()["action"]

def first(batch): return batch

def main(options, where, context):
    td = tdstore.open(where, storage_options=options)
    assert td[3]["action"].item() == 3  # the parent has used it
    loader = DataLoader(Rows(td), batch_size=50, num_workers=2, multiprocessing_context=context, collate_fn=first)
    print(torch.cat(list(loader)).tolist() == list(range(td.shape[0])))
"""


def loader(tmp_path: FsPath, s3: S3Server, where: str, context: str, before: str = "") -> str:
    module = tmp_path / "rows_over_s3.py"
    module.write_text(LOADER)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
if __name__ == "__main__":
    {before or "pass"}
    import rows_over_s3
    rows_over_s3.main({s3.fsspec_options!r}, {where!r}, {context!r})
"""
    return run(code, seconds=90)


@pytest.fixture
def where(s3: S3Server) -> str:
    location = f"{s3.url}/{name()}"
    sample(200).save(location, storage_options=s3.fsspec_options)
    return location


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_data_loader_over_s3(context: str, where: str, s3: S3Server, tmp_path: FsPath) -> None:
    assert loader(tmp_path, s3, where, context).split() == ["True"]


def test_forked_workers_without_s3fs_say_what_to_change(where: str, s3: S3Server, tmp_path: FsPath) -> None:
    with pytest.raises(AssertionError, match="multiprocessing_context='forkserver'") as error:
        loader(tmp_path, s3, where, "fork", before="sys.modules['s3fs'] = None")
    assert "pip install 's3fs'" in str(error.value)


ENGINE = """
import os, sys
from tdstore_remote.opening import open_engine
from tdstore.index.ranges import Range
engine = open_engine({url!r}, {options!r})
engine.put("a", b"0123456789")
pid = os.fork()
if pid == 0:
    import faulthandler; faulthandler.dump_traceback_later(40, exit=True)
    try:
        assert bytes(engine.get("a").data) == b"0123456789"
        assert [bytes(d) for d in engine.get_ranges([Range("a", 1, 3), Range("a", -2, None)])] == [b"12", b"89"]
        engine.put("b", b"from the child")
        print(repr(engine).partition("(")[0], flush=True)
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
assert bytes(engine.get("b").data) == b"from the child"
print(repr(engine).partition("(")[0])
"""


@pytest.mark.parametrize("kind", ["auto", "fsspec"])
def test_a_forked_child_goes_on_by_other_means(kind: str, s3: S3Server) -> None:
    code = ENGINE.format(url=f"{s3.url}/{name()}", options={**s3.fsspec_options, "engine": kind})
    parent = "ObstoreEngine" if kind == "auto" else "FsspecEngine"
    assert run(code).split() == ["FsspecEngine", parent]


def test_a_forked_child_that_insists_on_obstore_is_told(s3: S3Server) -> None:
    code = ENGINE.format(url=f"{s3.url}/{name()}", options={**s3.fsspec_options, "engine": "obstore"})
    with pytest.raises(AssertionError, match="UnsupportedError .*obstore cannot be used in a forked child"):
        run(code)


def test_pickles_travel_without_secrets(where: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with tdstore.open(where, storage_options=s3.fsspec_options) as td:
        data = pickle.dumps(td)
    assert s3.secret_key.encode() not in data
    for variable, value in s3.env.items():
        monkeypatch.setenv(variable, value)
    copy: Any = pickle.loads(data)
    assert torch.equal(copy["action"], torch.arange(200))
