"""Storages: what they hold, how they are sent, saved, cleaned up, and what they do with data that does not fit."""

from __future__ import annotations

import collections
import gc
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict, errors, lifetime
from tdstore.rl.buffers import ReplayBuffer
from tdstore.rl.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    TensorStorage,
)
from tests import scripts
from tests.rl.places import kinds, maker, read_all, rows, wait_and_read

LOCAL = ["memory", "memmap", "shared", "h5", "zarr"]


class Step(TensorClass):
    """A row of a class of its own."""

    obs: torch.Tensor
    reward: torch.Tensor
    note: torch.Tensor | None = None


Pair = collections.namedtuple("Pair", ["left", "right"])


@kinds(LOCAL)
def test_tensorclasses_come_back_as_their_class(kind, request):
    storage = maker(kind, request)(10)
    storage.set(range(3), Step(obs=torch.arange(6.0).view(3, 2), reward=torch.ones(3), batch_size=[3]))
    one, some = storage.get(1), storage.get([2, 0])
    assert type(one) is Step and type(some) is Step and one.note is None
    assert one.obs.tolist() == [2, 3] and some.obs.tolist() == [[4, 5], [0, 1]]


@kinds(LOCAL)
@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6.0).view(3, 2),
        (torch.arange(3), {"x": torch.ones(3, 2), 7: torch.zeros(3)}),
        {"a": torch.arange(3), ("b", 1): (torch.ones(3), torch.zeros(3, 1))},
        Pair(torch.arange(3), torch.ones(3, 4, dtype=torch.bfloat16)),
    ],
    ids=["tensor", "tuple", "dict", "namedtuple"],
)
def test_tensors_and_pytrees(kind, request, data):
    storage = maker(kind, request)(5)
    storage.set(range(3), data)
    assert len(storage) == 3 and storage._structure.is_pytree != isinstance(data, torch.Tensor)

    def same(found, wanted, pick):
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(torch.as_tensor(found), wanted[pick])
        elif isinstance(wanted, dict):
            assert list(found) == list(wanted)
            for key in wanted:
                same(found[key], wanted[key], pick)
        else:
            assert type(found) is type(wanted)
            for left, right in zip(found, wanted, strict=True):
                same(left, right, pick)

    same(storage.get(1), data, 1)
    same(storage.get([2, 0]), data, [2, 0])
    same(storage.get(slice(0, 3)), data, slice(0, 3))


def test_values_in_dicts_and_single_slots():
    storage = LazyTensorStorage(10)
    storage.set(range(2), [{"a": "text", "b": 3}, {"a": "more", "b": 4}])
    assert storage[0]["a"] == "text" and storage[[1, 0]]["a"] == ["more", "text"] and storage[:]["b"].tolist() == [3, 4]
    grid = LazyTensorStorage(10, ndim=2)
    grid.set(range(2), torch.arange(6).view(2, 3))
    assert grid[1, 2] == 5 and grid[:, 1].tolist() == [1, 4]
    grid.set((torch.tensor([0]), torch.tensor([1])), torch.tensor([99]))
    assert grid.flatten()[:].tolist() == [0, 99, 2, 3, 4, 5]


def test_a_list_is_a_batch_of_items(tmp_path):
    storage = LazyTensorStorage(10)
    storage.set(range(2), [TensorDict(a=torch.tensor(1)), TensorDict(a=torch.tensor(2))])
    assert storage[:]["a"].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="tuple"):
        LazyTensorStorage(10).set(range(2), [torch.zeros(2), torch.zeros(3)])


def test_nested_batch_sizes_and_lists_of_rows():
    td = TensorDict({"x": torch.arange(12.0).view(4, 3), "agents": TensorDict({"o": torch.ones(4, 2, 5)}, [4, 2])}, [4])
    storage = LazyTensorStorage(10)
    storage.set(slice(0, 4), td)
    assert storage[1]["agents"].batch_size == torch.Size([2])
    assert storage[[0, 3]]["agents"].batch_size == torch.Size([2, 2])
    assert storage[torch.tensor([True, False, False, True])]["x"].shape == (2, 3)
    assert [row["x"][0].item() for row in storage] == [0, 3, 6, 9]
    assert 3 in storage and -4 in storage and 4 not in storage
    assert storage.contains(torch.tensor([0, 4, -5])).tolist() == [True, False, False]
    with pytest.raises(NotImplementedError):
        storage.contains("a")


@kinds(["memory", "memmap", "shared"])
def test_slices_and_ints_are_views_and_lists_are_copies(kind, request):
    storage = maker(kind, request)(10)
    storage.set(range(4), rows(0, 1, 2, 3))
    storage.get(1)["a"].fill_(10)
    storage.get(slice(2, 4))["a"].add_(20)
    storage.get([0])["a"].fill_(99)
    assert storage[:]["a"].tolist() == [0, 10, 22, 23]


@kinds(LOCAL)
def test_a_write_without_cursor_leaves_the_length(kind, request):
    storage = maker(kind, request)(10)
    storage.set(range(3), rows(1, 2, 3))
    storage[1] = TensorDict(a=torch.tensor(20))
    storage[-1] = TensorDict(a=torch.tensor(30))
    assert len(storage) == 3 and storage[:]["a"].tolist() == [1, 20, 30]
    storage.set([0, 2, 0], rows(7, 8, 9))
    assert storage[:]["a"].tolist() == [9, 20, 8], "of a row that is named twice the last value stays"


@kinds(LOCAL)
def test_what_does_not_fit_is_refused_and_nothing_changes(kind, request):
    storage = maker(kind, request)(10)
    storage.set(range(2), TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}}, [2]))
    before = storage[:].to_tensordict()

    def data(**entries):
        return TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}, **entries}, [2])

    with pytest.raises(KeyError, match="unexpected .*extra"):
        storage.set(range(2, 4), data(extra=torch.ones(2)))
    with pytest.raises(KeyError, match="missing .*b.*c"):
        storage.set(range(2, 4), data(b={"d": torch.ones(2, 3)}))
    with pytest.raises(TypeError, match="'?a'? is float32"):
        storage.set(range(2, 4), data(a=torch.tensor([1.5, 2.5])))
    with pytest.raises(RuntimeError, match=r"c.*\[2, 4\]"):
        storage.set(range(2, 4), data(b={"c": torch.ones(2, 4)}))
    with pytest.raises(RuntimeError, match="3 rows"):
        storage.set(range(2, 5), data())
    with pytest.raises(IndexError, match="10 rows"):
        storage.set([9, 10], data())
    with pytest.raises(TypeError, match="int"):
        storage.set(range(2, 4), 3)
    assert len(storage) == 2 and (storage[:].to_tensordict() == before).all()
    storage.set(range(2, 4), data(a=torch.tensor([4, 5], dtype=torch.int32)))
    assert storage[3]["a"] == 5, "a cast that loses nothing is made"


def test_the_other_way_with_data_that_does_not_fit():
    storage = LazyTensorStorage(10, on_mismatch="peer")
    storage.set(range(2), TensorDict({"a": torch.arange(2), "b": torch.ones(2)}, [2]))
    storage.set(range(1, 3), TensorDict({"a": torch.tensor([1.5, 2.5]), "extra": torch.ones(2)}, [2]))
    assert storage[:]["a"].tolist() == [0, 1, 2] and storage[:]["b"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_size": 0}, ValueError, "max_size"),
        ({"max_size": "3"}, ValueError, "max_size"),
        ({"max_size": 3, "ndim": 0}, ValueError, "ndim"),
        ({"max_size": 3, "on_mismatch": "no"}, ValueError, "on_mismatch"),
        ({"max_size": 3, "storage": "nowhere"}, LookupError, "nowhere"),
        ({"max_size": 3, "storage": None, "path": "x", "option": 1}, TypeError, "option"),
        ({"max_size": 3, "storage": "memory", "path": "x"}, ValueError, "path"),
        ({"max_size": 3, "shared_init": True, "compilable": True}, RuntimeError, "compilable"),
        ({"max_size": 3, "device": "cuda"}, ValueError, "transform"),
        ({"max_size": 3, "consolidated": True}, ValueError, "consolidated"),
    ],
)
def test_arguments_are_checked(arguments, error, match):
    with pytest.raises(error, match=match):
        LazyStorage(**arguments).set(0, torch.ones(1))


def test_before_the_first_write(tmp_path):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "x")
    assert len(storage) == 0 and not storage.initialized and storage.shape is None
    for use in (lambda: storage.get(0), lambda: storage.dumps(tmp_path / "y")):
        with pytest.raises(RuntimeError):
            use()
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="_replay_state"):
        storage.set(0, TensorDict(_replay_state=torch.ones(1)))


def test_what_lies_in_the_place_already(tmp_path):
    place = tmp_path / "rows"
    first = LazyMemmapStorage(5, scratch_dir=place)
    first.set(range(5), rows(1, 2, 3, 4, 5))
    first.close()
    with pytest.raises(RuntimeError, match="existsok"):
        LazyMemmapStorage(5, scratch_dir=place).set(0, rows(1)[0])
    with pytest.raises(RuntimeError, match="'a' has rows of shape"):
        LazyMemmapStorage(5, scratch_dir=place, existsok=True).set(0, TensorDict(a=torch.ones(3)))
    with pytest.raises(RuntimeError, match="'b' is unexpected"):
        LazyMemmapStorage(5, scratch_dir=place, existsok=True).set(0, TensorDict(b=torch.ones(3)))
    inode = (place / "a.memmap").stat().st_ino
    longer = LazyMemmapStorage(8, scratch_dir=place, existsok=True)
    longer.set(0, rows(10)[0])
    assert len(longer) == 1 and longer.capacity == 8 and (place / "a.memmap").stat().st_ino == inode
    assert longer.all_slots()["a"].tolist() == [10, 2, 3, 4, 5, 0, 0, 0]
    longer.set(4, rows(50)[0])
    assert longer[:]["a"].tolist() == [10, 0, 0, 0, 50], "the space is taken over, not the rows"


def test_a_folder_of_tensors_that_no_storage_wrote(tmp_path):
    rows(1, 2, 3).save(tmp_path / "rows").close()
    with pytest.raises(tdstore.errors.StoreError, match="no length"):
        LazyStorage.open(tmp_path / "rows")
    storage = LazyMemmapStorage(3, scratch_dir=tmp_path / "rows", existsok=True)
    storage.set(1, rows(20)[0])
    assert len(storage) == 2 and storage[:]["a"].tolist() == [0, 20]


def test_a_place_opens_as_a_tensordict_too(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")
    storage.set(range(2), TensorDict({"a": torch.arange(2), "n": {"b": torch.ones(2, 3)}}, [2]))
    storage.close()
    td = tdstore.open(tmp_path / "rows")
    assert td.batch_size == torch.Size([4]) and td["a"].tolist() == [0, 1, 0, 0] and td["n", "b"].shape == (4, 3)


# -- copies, state dicts, checkpoints -----------------------------------------------------------
@kinds(LOCAL)
def test_state_dicts_copy(kind, request):
    make = maker(kind, request)
    storage = make(4)
    assert storage.state_dict() == {"_storage": {}, "initialized": False, "_len": 0}
    storage.set(range(3), TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}, [3]))
    state = storage.state_dict()
    assert state["_len"] == 3 and state["initialized"]
    again = make(4)
    again.load_state_dict(state)
    storage.set(0, TensorDict({"a": torch.tensor(9), "n": {"b": torch.zeros(2)}}, []))
    assert len(again) == 3 and again[:]["a"].tolist() == [0, 1, 2] and again[:]["n", "b"].sum() == 6
    tree = make(4)
    tree.set(range(2), (torch.ones(2), torch.zeros(2)))
    with pytest.raises(TypeError, match="dumps"):
        tree.state_dict()


@kinds(LOCAL)
def test_checkpoints_of_pytrees_and_strings(kind, request, tmp_path):
    make = maker(kind, request)
    storage = make(4)
    storage.set(range(3), {"x": torch.arange(3), 1: (torch.ones(3, 2),)})
    storage.dumps(str(tmp_path / "deep" / "tree"))
    again = make(6)
    again.loads(str(tmp_path / "deep" / "tree"))
    assert len(again) == 3 and again.capacity == 6 and again[[2]]["x"].tolist() == [2]
    texts = make(4)
    texts.set([0, 1], TensorDict({"t": ["short", "x" * 300]}, [2]))
    texts.dumps(tmp_path / "texts")
    other = make(4)
    other.set(0, TensorDict({"t": "y"}))
    other.loads(tmp_path / "texts")
    assert list(other[:]["t"]) == ["short", "x" * 300]


def test_a_checkpoint_that_does_not_fit(tmp_path):
    storage = LazyTensorStorage(5)
    storage.set(range(5), rows(1, 2, 3, 4, 5))
    storage.dumps(tmp_path / "five")
    with pytest.raises(RuntimeError, match=r"5 rows.*room for 3"):
        LazyTensorStorage(3).loads(tmp_path / "five")
    other = LazyTensorStorage(9)
    other.set(0, TensorDict(b=torch.ones(2)))
    with pytest.raises(RuntimeError, match="other rows"):
        other.loads(tmp_path / "five")
    assert len(other) == 1
    for _ in range(2):
        storage.dumps(tmp_path / "five")  # over the one that is there
    with pytest.raises(FileNotFoundError):
        other.loads(tmp_path / "nothing")


def test_hooks_of_checkpoints(tmp_path):
    calls = []
    storage = LazyTensorStorage(4)
    storage.set(range(3), rows(1, 2, 3))
    storage.register_save_hook(lambda data, path: calls.append(Path(path).name) or data.apply(lambda t: t * 10))
    storage.register_save_hook(lambda data, path: data.apply(lambda t: t + 1))
    storage.dumps(tmp_path / "hooked")
    assert storage[:]["a"].tolist() == [1, 2, 3] and calls == ["hooked"]
    again = LazyTensorStorage(4)
    again.register_load_hook(lambda data, out: calls.append(out) or data.apply(lambda t: -t))
    again.loads(tmp_path / "hooked")
    assert again[:]["a"].tolist() == [-11, -21, -31] and calls[-1] is None


def test_a_copy_of_a_storage_needs_no_files(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")
    storage.set(range(3), rows(1, 2, 3))
    data = pickle.dumps(storage)
    storage.cleanup()
    again = pickle.loads(data)
    assert len(again) == 3 and again[:]["a"].tolist() == [1, 2, 3]


@kinds(["memmap", "zarr", "h5"])
def test_copying_to_another_backend(kind, request, tmp_path):
    source = LazyTensorStorage(5)
    source.append(TensorDict({"a": torch.arange(7), "t": [f"row {i}" for i in range(7)]}, [7]))
    suffix = {"h5": ".h5", "zarr": ".zarr"}.get(kind, "")
    made = source.copy_to(kind, path=tmp_path / f"copy{suffix}")
    assert made[:]["a"].tolist() == [5, 6, 2, 3, 4] and made[0]["t"] == "row 5"
    assert (made.cursor, made.write_count) == (2, 7)


# -- other kinds -----------------------------------------------------------------------------
def test_tensor_storage_is_over_its_data(tmp_path):
    data = TensorDict({"a": torch.arange(5), "b": torch.zeros(5, 2)}, [5])
    storage = TensorStorage(data)
    assert len(storage) == 5 and storage.max_size == 5 and storage.cursor == 0
    storage[2] = TensorDict({"a": torch.tensor(20), "b": torch.ones(2)})
    assert data["a"][2] == 20 and data["b"][2].sum() == 2
    with pytest.raises(ValueError, match="max_size=4"):
        TensorStorage(data, 4)
    stored = data.save(tmp_path / "data.h5")
    over = TensorStorage(stored)
    over[1] = TensorDict({"a": torch.tensor(10), "b": torch.ones(2)})
    assert over[[1, 2]]["a"].tolist() == [10, 20] and stored["a"][1] == 10


def test_consolidated_tensors_lie_in_one_buffer():
    storage = LazyTensorStorage(8, consolidated=True)
    storage.set(range(2), TensorDict({"a": torch.arange(2), "b": torch.ones(2, 3)}, [2]))
    assert len({tensor.untyped_storage().data_ptr() for tensor in storage[:].values()}) == 1
    with pytest.raises(ValueError, match="TensorDict"):
        LazyTensorStorage(8, consolidated=True).set(0, torch.ones(2))


def test_list_storage():
    storage = ListStorage(3)
    storage.set([0, 1], ["a", {"any": object}])
    assert storage.get(0) == "a" and len(storage) == 2 and storage.get((0,)) == "a"
    with pytest.raises(RuntimeError, match="row 5"):
        storage.set(5, "gap")
    storage.set(2, "c")
    with pytest.raises(RuntimeError, match="row 3"):
        storage.set(3, "beyond")
    with pytest.raises(IndexError):
        storage.get(3)
    with pytest.raises(IndexError):
        storage.get((0, 0))
    assert storage.get(slice(1, 3))[1] == "c" and storage.get([-1]) == ["c"]


def test_list_storages_as_checkpoints(tmp_path):
    storage = ListStorage(5)
    storage.set([0, 1, 2], ["text", torch.arange(3), TensorDict(a=torch.ones(2))])
    storage.dumps(tmp_path / "list")
    again = ListStorage(5)
    again.loads(tmp_path / "list")
    assert again.get(0) == "text" and again.get(1).tolist() == [0, 1, 2] and again.get(2)["a"].sum() == 2
    storage.set(3, object())
    with pytest.raises(NotImplementedError, match="object 3"):
        storage.dumps(tmp_path / "list")
    assert len(again.get(slice(0, 9))) == 3


def test_lazy_stacks_of_ragged_rows():
    storage = LazyStackStorage(5)
    storage.set([0, 1], [TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))])
    found = storage.get([1, 0])
    assert [td["a"].shape[0] for td in found.unbind(0)] == [3, 2]


def test_listeners_hear_of_writes_through_writers():
    class Listener:
        def __init__(self):
            self.heard = []

        def mark_update(self, index):
            self.heard.append(torch.as_tensor(index).tolist())

    listener, storage = Listener(), LazyTensorStorage(4)
    storage.attach(listener)
    storage.attach(listener)
    buffer = tdstore.rl.ReplayBuffer(storage=storage)
    buffer.extend(rows(1, 2))
    storage.set(3, rows(4)[0])
    assert listener.heard == [[0, 1]]


# -- several processes, and the end -------------------------------------------------------------
def test_a_storage_without_rows_is_not_sent():
    storage = LazyMemmapStorage(4)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=read_all, args=(storage, None))
    with pytest.raises(RuntimeError, match="shared_init"):
        process.start()


def test_rows_are_seen_by_a_process_that_gets_the_storage(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")
    storage.set(range(3), rows(1, 2, 3))
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=read_all, args=(storage, queue))
    process.start()
    assert queue.get(timeout=200) == [1, 2, 3]
    process.join(200)
    assert storage[:]["a"].tolist() == [1, 2, 30]


def test_a_reader_waits_for_the_first_write(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows", shared_init=True)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=wait_and_read, args=(storage, queue))
    process.start()
    assert queue.get(timeout=200) == "waiting"
    time.sleep(0.1)
    storage.set(range(3), rows(1, 2, 3))
    assert queue.get(timeout=200) == [1, 2, 3]
    process.join(200)
    late = LazyMemmapStorage(4, scratch_dir=tmp_path / "other", shared_init=True)
    late.init_timeout = 0.05
    with pytest.raises(TimeoutError, match="other"):
        late.get(0)


def test_temporary_rows_go_with_the_storage(tmp_path):
    storage = LazyMemmapStorage(4)
    storage.set(0, rows(1)[0])
    place = storage.scratch_dir
    assert os.path.isdir(place)
    del storage
    gc.collect()
    lifetime.settle()
    assert not os.path.exists(place)
    kept = LazyMemmapStorage(4, scratch_dir=tmp_path / "kept")
    kept.set(0, rows(1)[0])
    del kept
    gc.collect()
    lifetime.settle()
    assert (tmp_path / "kept" / "a.memmap").exists()
    storage = LazyMemmapStorage(4)
    storage.set(0, rows(1)[0])
    assert storage.cleanup() is True and storage.cleanup() is False
    for use in (lambda: storage.get(0), lambda: storage.set(0, rows(1)[0])):
        with pytest.raises(RuntimeError, match="removed"):
            use()


@pytest.mark.parametrize("end", ["exit", "term", "int"])
def test_temporary_rows_go_with_the_process(tmp_path, end):
    code = (
        "import sys, time, torch; from tdstore.rl.storages import LazyMemmapStorage; s = LazyMemmapStorage(4)\n"
        "s.set(0, torch.ones(1)); print(s.scratch_dir, flush=True)\n"
        "time.sleep(0 if sys.argv[1] == 'exit' else 600); assert sys.argv[1] == 'exit'"
    )
    os.mkfifo(tmp_path / "output")
    with scripts.started(code, end, output=tmp_path / "output") as script, open(tmp_path / "output") as output:
        place = output.readline().strip()
        if end != "exit":
            assert os.path.isdir(place)
            os.kill(script.pid, signal.SIGTERM if end == "term" else signal.SIGINT)
    assert place and not os.path.exists(place)
    assert script.status == {"exit": 0, "term": -signal.SIGTERM, "int": -signal.SIGINT}[end]


def test_a_forked_child_is_ended_by_sigterm_from_its_first_moment(tmp_path):
    # On one core the parent sends the signal before the child has run at all.
    code = (
        "import multiprocessing, os, time, torch; from tdstore.rl.storages import LazyMemmapStorage\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); s = LazyMemmapStorage(4); s.set(0, torch.ones(1))\n"
        "for _ in range(20):\n"
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "    child.start(); child.terminate(); child.join(200); print(child.exitcode); child.kill()\n"
        "print(os.path.isdir(s.scratch_dir))"
    )
    (tmp_path / "output").touch()
    with scripts.started(code, output=tmp_path / "output") as script:
        pass
    found = (tmp_path / "output").read_text()
    assert found.split() == [f"-{int(signal.SIGTERM)}"] * 20 + ["True"], script.errors


def test_a_child_leaves_the_rows_of_its_parent():
    storage = LazyMemmapStorage(4)
    storage.set(0, rows(1)[0])
    pid = os.fork()
    if not pid:
        storage.cleanup()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.path.exists(storage.scratch_dir) and storage.get(0)["a"] == 1


@pytest.mark.parametrize("name", ["rows.h5", "rows.zarr"])
def test_a_tensor_storage_over_stored_strings(tmp_path, name):
    TensorDict({"s": ["a", "b", "c", "d"], "x": torch.arange(4)}, [4]).save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, mode="r+") as td:
        storage = TensorStorage(td)
        assert storage.get([0, 2])["s"] == ["a", "c"]
        assert storage.get(1)["s"] == "b"
        storage[1] = TensorDict({"s": "z" * 300, "x": torch.tensor(9)})
        storage[torch.tensor([3, 0])] = TensorDict({"s": ["p", "q"], "x": torch.tensor([1, 2])}, [2])
        assert td["s"] == ["q", "z" * 300, "c", "p"]
        assert td["x"].tolist() == [2, 9, 2, 1]


@pytest.mark.parametrize(("kind", "suffix"), [("memmap", ""), ("h5", ".h5"), ("zarr", ".zarr"), ("remote", "")])
def test_a_storage_that_only_reads_refuses_writes(tmp_path, kind, suffix):
    place = str(tmp_path / f"rows{suffix}")
    storage = LazyStorage(5, kind, path=place)
    storage.set(range(3), rows(0, 1, 2))
    storage.close()
    storage = LazyStorage.open(place, "r", storage=kind)
    buffer = ReplayBuffer(storage=storage, batch_size=2)
    assert len(buffer.sample()) == 2
    for write in (
        lambda: storage.set(0, rows(5)[0]),
        lambda: storage.__setitem__(0, rows(5)[0]),
        lambda: storage.add_entries(TensorDict({"a": torch.tensor([1]), "b": torch.tensor([1])}, [1])),
        lambda: buffer.extend(rows(5, 6)),
        lambda: buffer.add(rows(5)[0]),
        lambda: buffer.__setitem__("a", torch.tensor([1, 2, 3])),
        buffer.empty,
    ):
        with pytest.raises(errors.ReadOnlyError, match=re.escape(place)):
            write()
        assert (storage[:]["a"].tolist(), storage.cursor) == ([0, 1, 2], 3)
    storage.close()


@pytest.mark.parametrize(("kind", "suffix"), [("memmap", ""), ("h5", ".h5"), ("zarr", ".zarr"), ("remote", "")])
def test_a_place_of_another_schema_is_refused(tmp_path, kind, suffix):
    place = str(tmp_path / f"rows{suffix}")
    storage = LazyStorage(5, kind, path=place)
    storage.set(range(3), rows(0, 1, 2))
    storage.close()
    for other, named in (
        (TensorDict({"a": torch.zeros(1)}, [1]), "'a' has rows of shape"),
        (TensorDict({"b": torch.tensor([1])}, [1]), "'b' is"),
        (TensorDict({"a": torch.zeros(1, 3, dtype=torch.int64)}, [1]), "'a' has rows of shape"),
    ):
        with pytest.raises(RuntimeError, match=named) as caught:
            LazyStorage(5, kind, path=place, existsok=True).set(range(1), other)
        assert place in str(caught.value)
    storage = LazyStorage.open(place, storage=kind)
    assert storage[:]["a"].tolist() == [0, 1, 2]
    storage.close()


def test_a_backend_of_a_third_party(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "tdstore-safetensors"))
    (backend,) = importlib.import_module("tdstore_safetensors").tdstore_backends()
    declared = backend.name in {status.name for status in tdstore.backends()}
    if not declared:
        tdstore.register_backend(backend)
    try:
        place = str(tmp_path / "rows.safetensors")
        buffer = ReplayBuffer(storage=LazyStorage(5, backend, path=place), batch_size=3)
        block = TensorDict({"a": torch.arange(7), "s": [f"row {k}" for k in range(7)]}, [7])
        buffer.extend(block[:4])
        assert buffer.extend(block[4:]).tolist() == [4, 0, 1]
        assert buffer[:]["a"].tolist() == [5, 6, 2, 3, 4]
        assert len(buffer.sample()) == 3
        buffer.close()
        storage = LazyStorage.open(place)
        assert (len(storage), storage.cursor) == (5, 2)
        assert list(storage[:]["s"]) == ["row 5", "row 6", "row 2", "row 3", "row 4"]
        storage.close()
    finally:
        if not declared:
            tdstore.unregister_backend(backend.name)
