"""TensorDicts over the object layout, and rival processes."""

from __future__ import annotations

import os
import pickle
import subprocess

import pytest
import torch

import tdstore
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.storekit.local_engine import LocalEngine
from tdstore.testing.processes.warm import python
from tests.bytestore.support import contents, numbered, open_local, save

BACKEND = Backend(
    name="objects-under-test",
    opener="tests.bytestore.support:open_local",
    summary="the object layout in a folder",
)


@pytest.fixture(autouse=True)
def declared():
    registry().register(BACKEND)
    yield
    registry().unregister(BACKEND.name)


def test_save_open_change_and_read_back(tmp_path):
    place = str(tmp_path / "td")
    source = tdstore.TensorDict(
        {"obs": torch.arange(60.0).view(20, 3), "next": {"done": torch.zeros(20, dtype=torch.bool)}, "note": "hi"},
        batch_size=[20],
    )
    source.save(place, storage=BACKEND.name)
    with tdstore.open(place, "r", storage=BACKEND.name) as td:
        assert td["note"] == "hi"
        assert torch.equal(td[3:7]["obs"], source["obs"][3:7])
        assert bool((td[torch.tensor([5, 1, 5])].to_tensordict()["obs"] == source["obs"][[5, 1, 5]]).all())
    with tdstore.open(place, "r+", storage=BACKEND.name) as td:
        td[4:6] = td[4:6].to_tensordict().apply(lambda x: x + 1 if x.dtype != torch.bool else ~x)
        td["extra"] = torch.arange(20)
        td["obs"].mul(2)
    with tdstore.open(place, "r", storage=BACKEND.name) as td:
        assert torch.equal(td["obs"][4:6], source["obs"][4:6] + 1)
        assert td["next", "done"].tolist() == [i in (4, 5) for i in range(20)]
        assert td["extra"].tolist() == list(range(20))
        again = pickle.loads(pickle.dumps(td))
        assert torch.equal(again["obs"], td["obs"])
        again.close()


RIVAL = """
import sys, torch
from tdstore.bytestore import open_objects
from tdstore.errors import ConflictError
from tdstore.header import Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import Read, Write
told = 0
for _ in range(15):
    while True:
        store = open_objects(LocalEngine(sys.argv[1], durable=False), mode="r+")
        n = store.read([Read(("n",))])[0]
        store.write([Write(("n",), (), n + 1)])
        try:
            store.save_header(Header())
            break
        except ConflictError:
            told += 1
        finally:
            store.close()
print(told)
"""


def test_rival_processes_lose_nothing_that_was_acknowledged(tmp_path):
    place = tmp_path / "s"
    save(LocalEngine(place, durable=False), {("n",): torch.zeros(1, dtype=torch.int64)}, n=1).close()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    rivals = [subprocess.Popen([*python(), "-c", RIVAL, str(place)], stdout=subprocess.PIPE, env=env) for _ in range(3)]
    outputs = [rival.communicate()[0] for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0, 0], outputs
    assert contents(open_local(str(place)))[("n",)].item() == 45


def test_numbered_header_is_what_is_loaded(tmp_path):
    store = save(LocalEngine(tmp_path / "s"), {("a",): torch.zeros(2)}, n=2)  # durable: every put is synced
    assert store.load_header() == numbered(2)
    store.close()
