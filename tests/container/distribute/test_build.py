"""`tdstore.build`: many workers, one manifest; killed workers, killed drivers, tasks that run twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors
from tdstore.bytestore import open_objects
from tdstore.container.distribute.build import _PartWriter, _Task
from tdstore.container.distribute.build_target import PLAN
from tdstore.container.distribute.parts import PartEngine, part_name
from tdstore.header import Group, Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec


def squares(numbers):
    x = torch.tensor(list(numbers))
    return TensorDict({"x": x, "next": {"y": (x**2)[:, None].expand(-1, 3)}}, [len(x)])


class Logged:
    """`squares`, with a file for each call; dies at random."""

    def __init__(self, folder, death=0.0):
        self.folder, self.death = str(folder), death

    def __call__(self, numbers):
        if random.Random(os.urandom(8)).random() < self.death:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(self.folder, f"{numbers[0]}-{os.urandom(6).hex()}").touch()
        return squares(numbers)


def assert_squares(td, count):
    assert td["x"].tolist() == list(range(count))
    assert torch.equal(td["next", "y"], (torch.arange(count) ** 2)[:, None].expand(-1, 3))
    assert td.verify() == []


def objects(folder):
    """Return what is at a place: the names of the data objects, and of all other files."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    # what a killed writer of a local file leaves is no object
    found = [path.relative_to(folder).as_posix() for path in files if not path.name.startswith(".tdstore-new-")]
    return [name for name in found if name.startswith("data/")], [name for name in found if name[:5] != "data/"]


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("count", [1, 7, 8, 30])
def test_rows_keep_the_order_of_their_inputs(tmp_path, count):
    with tdstore.build(f"file://{tmp_path}/a", squares, range(count), rows_per_task=8, num_workers=0) as td:
        assert_squares(td, count)
    data, others = objects(tmp_path / "a")
    assert others == ["tdstore.json"] and len(data) == -(-count // 8)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["data", "tdstore.json"]


def test_workers_that_die_are_replaced(tmp_path, log):
    place = f"file://{tmp_path}/a"
    fn = Logged(log, death=0.4)
    with tdstore.build(place, fn, range(60), rows_per_task=5, num_workers=2, mp_start_method="fork") as td:
        assert_squares(td, 60)
    data, others = objects(tmp_path / "a")
    assert others == ["tdstore.json"] and len(data) == 12


def test_in_a_bucket_with_an_executor(s3):
    options = s3.fsspec_options
    with ThreadPoolExecutor(3) as executor:
        td = tdstore.build(
            f"{s3.url}/a", squares, range(50), rows_per_task=7, executor=executor, storage_options=options
        )
    assert_squares(td, 50)
    td.close()
    with tdstore.open(f"{s3.url}/a", storage_options=options, mode="r+") as again:
        again.extend(squares(range(50, 53)))
    with tdstore.open(f"{s3.url}/a", storage_options=options) as again:
        assert_squares(again, 53)
    keys = [o["Key"] for o in s3.client().list_objects_v2(Bucket=s3.bucket)["Contents"]]
    assert not [key for key in keys if "/build/" in key]


class Dying(Logged):
    """`Logged` until the inputs from 12 on."""

    def __call__(self, numbers):
        if numbers[0] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(numbers)


def test_a_killed_driver_is_resumed(tmp_path, log):
    place = f"file://{tmp_path}/a"
    call = {"rows_per_task": 3, "num_workers": 0}
    driver = multiprocessing.get_context("fork").Process(
        target=tdstore.build, args=(place, Dying(log), range(30)), kwargs=call
    )
    driver.start()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    before = {path.name for path in log.iterdir()}
    assert len(before) == 4
    assert not (tmp_path / "a" / "tdstore.json").exists()
    with pytest.raises(errors.MismatchError, match="another build was begun"):
        tdstore.build(place, squares, range(31), rows_per_task=3, num_workers=0)
    with tdstore.build(place, Logged(log), range(30), rows_per_task=3, num_workers=0) as td:
        assert_squares(td, 30)
    calls = sorted(int(path.name.split("-")[0]) for path in log.iterdir())
    assert calls == list(range(0, 30, 3))  # none twice


def test_an_error_of_fn_comes_back_and_finished_tasks_stay(tmp_path, log):
    place, logged = f"file://{tmp_path}/a", Logged(log)

    def fails(numbers):
        if 9 in numbers:
            raise KeyError("nine")
        return logged(numbers)

    with pytest.raises(KeyError, match="nine"):
        tdstore.build(place, fails, range(20), rows_per_task=4, num_workers=0)
    with tdstore.build(place, logged, range(20), rows_per_task=4, num_workers=0) as td:
        assert_squares(td, 20)
    assert len(list(log.iterdir())) == 5


def test_a_task_that_runs_twice_counts_once(tmp_path):
    """The first attempt publishes while the second computes: what the second wrote is removed."""
    place = tmp_path / "a"

    def slow(numbers):
        engine = PartEngine(LocalEngine(place), part_name(numbers[0] // 5))
        spec = {("x",): LeafSpec((5,), "int64"), ("next", "y"): LeafSpec((5, 3), "int64")}
        with open_objects(engine, mode="x") as store:  # the rival, which says 0 everywhere
            store.create(spec)
            store.save_header(Header({(): Group((5,), keys=("x", "next")), ("next",): Group((5,), keys=("y",))}))
        return squares(numbers)

    with tdstore.build(f"file://{place}", slow, range(10), rows_per_task=5, num_workers=0) as td:
        assert td["x"].tolist() == [0] * 10
    assert objects(place) == ([], ["tdstore.json"])


def test_places_that_are_taken_and_calls_that_make_no_sense(tmp_path):
    place = f"file://{tmp_path}/a"
    tdstore.build(place, squares, range(3), num_workers=0).close()
    with pytest.raises(errors.StoreExistsError):
        tdstore.build(place, squares, range(3), num_workers=0)
    with pytest.raises(errors.InvalidArgumentError, match="save_options"):
        tdstore.build(f"file://{tmp_path}/b", squares, range(3), save_options={"chunks": 3})
    with pytest.raises(errors.InvalidArgumentError, match="0 inputs"):
        tdstore.build(f"file://{tmp_path}/b", squares, [])
    with pytest.raises(errors.InvalidTypeError, match="returned int for task 0"):
        tdstore.build(f"file://{tmp_path}/b", len, range(3), num_workers=0)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: TensorDict({"x": torch.zeros(2, dtype=torch.int32)}, [2]), "'x' is int32"),
        (lambda: TensorDict({"x": torch.zeros(2, 3)}, [2]), r"'x' is float32 \[3\]"),
        (lambda: TensorDict({"z": torch.zeros(2)}, [2]), "only one of them has 'x'"),
        (lambda: TensorDict({"x": torch.zeros(2), "g": TensorDict({}, [2])}, [2]), "other batch sizes"),
    ],
)
def test_tasks_with_rows_of_another_kind_are_refused(tmp_path, other, text):
    def fn(numbers):
        return TensorDict({"x": torch.zeros(2)}, [2]) if 0 in numbers else other()

    with pytest.raises(errors.MismatchError, match=f"task 1 are unlike those of task 0: .*{text}"):
        tdstore.build(f"file://{tmp_path}/a", fn, range(4), rows_per_task=2, num_workers=0)
    assert not (tmp_path / "a" / "tdstore.json").exists()


def test_map_into_a_new_place(tmp_path):
    squares(range(20)).save(tmp_path / "source.h5").close()
    with tdstore.open(tmp_path / "source.h5") as td:
        place = f"file://{tmp_path}/a"
        found = td.map(
            lambda rows: TensorDict({"z": rows["x"] + 1}, rows.batch_size), out=place, chunksize=6, num_workers=0
        )
        assert found["z"].tolist() == list(range(1, 21))
        found.close()
        with pytest.raises(errors.InvalidArgumentError, match="chunksize > 0"):
            td.map(squares, out=place, chunksize=0)


@pytest.mark.parametrize("suffix", ["", ".zarr"])
@pytest.mark.parametrize("late", [False, True])
def test_a_second_run_of_a_task_leaves_nothing_after_the_end(tmp_path, monkeypatch, suffix, late):
    """It begins when the parts are removed and the plan is not, and ends before the driver or after it."""
    place = f"file://{tmp_path}/a{suffix}"
    began, ended = threading.Event(), threading.Event()

    def slow(numbers):
        began.set()
        assert ended.wait(200)
        return squares(numbers)

    def run_again():
        # The folder of a build that ended in another format is gone; nobody waits for this run.
        with contextlib.suppress(errors.StoreNotFoundError):
            _PartWriter(f"{place}.build" if suffix else place, {}, slow)(_Task(1, [3]))

    rival = threading.Thread(target=run_again)
    real = LocalEngine.delete

    def delete(engine, keys):
        if list(keys) == [PLAN] and not began.is_set():
            rival.start()
            assert began.wait(200)
            if not late:
                ended.set()
                rival.join()
        real(engine, keys)

    monkeypatch.setattr(LocalEngine, "delete", delete)
    with tdstore.build(place, squares, range(9), rows_per_task=3, num_workers=0) as td:
        ended.set()
        rival.join()
        assert_squares(td, 9)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    if suffix:
        assert not [path for path in left if "a.zarr.build" in str(path)]
    else:
        data, others = objects(tmp_path / "a")
        assert len(data) == 3 and others == ["tdstore.json"]


@pytest.mark.parametrize("inputs", [(i for i in range(3)), {"a": 1}])
def test_inputs_without_slices_are_refused(tmp_path: Path, inputs: Any) -> None:
    with pytest.raises(errors.InvalidTypeError, match="have a length and slices") as caught:
        tdstore.build(tmp_path / "x", lambda rows: rows, inputs, num_workers=0)
    assert "list(inputs)" in str(caught.value.hint)


def test_map_into_something_else_is_refused() -> None:
    with pytest.raises(errors.InvalidTypeError, match="out= is a TensorDict"):
        TensorDict({"a": torch.zeros(3)}, [3]).map(lambda rows: rows, out=3, num_workers=0)
