"""`tdstore.build` of other formats than the object layout, and of rows with strings, values and nested tensors."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors
from tdstore.container.distribute.build_target import Target
from tdstore.storekit.foreign_strings import COLUMN_FROM

PLACES = ["a", "a.zarr", "a.h5", "a.tdz"]


def everything(numbers):
    """Return rows with each kind of entry that has rows, and one that has none."""
    numbers = list(numbers)
    x = torch.tensor(numbers)
    ragged = torch.nested.nested_tensor([torch.full((1 + n % 3,), float(n)) for n in numbers], layout=torch.jagged)
    return TensorDict(
        {
            "x": x,
            "text": [None if n % 5 == 4 else "é" * (n % 4) + str(n) for n in numbers],
            "unit": "metre",
            "own": {"deep": [{"n": n} for n in numbers], "ragged": ragged},
        },
        [len(numbers)],
    )


def assert_everything(td, count):
    assert td.batch_size == (count,)
    assert td["x"].tolist() == list(range(count))
    assert list(td["text"]) == [None if n % 5 == 4 else "é" * (n % 4) + str(n) for n in range(count)]
    assert td["unit"] == "metre"
    assert list(td["own", "deep"]) == [{"n": n} for n in range(count)]
    rows = td["own", "ragged"].unbind()
    assert [row.tolist() for row in rows] == [[float(n)] * (1 + n % 3) for n in range(count)]


def left(folder):
    """Return the names in a folder, without those of the test itself."""
    return sorted(name for name in os.listdir(folder) if name not in ("log",))


@pytest.mark.parametrize("name", PLACES)
def test_formats_get_the_rows_in_order_and_nothing_else_stays(tmp_path, name):
    with tdstore.build(tmp_path / name, everything, range(23), rows_per_task=4, num_workers=0) as td:
        assert_everything(td, 23)
    assert left(tmp_path) == [name]
    with tdstore.open(tmp_path / name) as td:
        assert_everything(td, 23)


@pytest.mark.parametrize(
    ("count", "size"),
    [(23, 4), (COLUMN_FROM + 9, 16), (2 * COLUMN_FROM + 30, COLUMN_FROM + 1), (2 * COLUMN_FROM + 2, 2 * COLUMN_FROM)],
)
def test_the_object_layout_keeps_values_and_nested_tensors(tmp_path, count, size):
    """Values are in the headers of all tasks, of none, or of the last one alone; the whole has a column or none."""
    place = f"file://{tmp_path}/a"
    with tdstore.build(place, everything, range(count), rows_per_task=size, num_workers=0) as td:
        assert_everything(td, count)
        assert td.verify() == []
        rows = td[torch.tensor([count - 1, 0, count // 2])]
        assert rows["x"].tolist() == [count - 1, 0, count // 2]
        assert rows["text"][0] == everything([count - 1])["text"][0]
    assert left(tmp_path / "a") == ["data", "tdstore.json"]
    named = (tmp_path / "a" / "tdstore.json").read_text()
    assert all(f"data/{path.name}" in named for path in (tmp_path / "a" / "data").iterdir())
    with tdstore.open(place, mode="r+") as td:
        td.extend(everything(range(count, count + 3)))
    with tdstore.open(place) as td:
        assert_everything(td, count + 3)


def test_data_of_the_workers_is_not_copied(tmp_path):
    """The driver writes offsets and the heads of columns alone: one object more than there are tasks."""
    count = 3 * COLUMN_FROM
    tdstore.build(f"file://{tmp_path}/a", everything, range(count), rows_per_task=COLUMN_FROM, num_workers=0).close()
    sizes = sorted(path.stat().st_size for path in (tmp_path / "a" / "data").iterdir())
    assert len(sizes) == 4
    offsets, heads = 3 * count * 16, 2 * 16
    assert sizes[0] < offsets + heads + 4096


def test_rows_that_differ_name_the_task(tmp_path):
    def fn(numbers):
        return everything(numbers) if 0 in numbers else everything(numbers).exclude("text")

    with pytest.raises(errors.MismatchError, match="task 1 cannot be read as one with .*task 0.*'text'"):
        tdstore.build(tmp_path / "a.h5", fn, range(8), rows_per_task=4, num_workers=0)
    assert left(tmp_path) == ["a.h5.build"]


def test_options_of_the_format(tmp_path):
    place = tmp_path / "a.zarr"
    options = {"chunks": (8,)}

    def fn(numbers):
        return TensorDict({"x": torch.tensor(list(numbers))}, [len(numbers)])

    with tdstore.build(place, fn, range(20), rows_per_task=5, num_workers=0, save_options=options) as td:
        assert td["x"].tolist() == list(range(20))
    import zarr

    assert zarr.open(str(place))["x"].chunks == (8,)


def test_zarr_and_objects_in_a_bucket(s3):
    options = s3.fsspec_options
    source = TensorDict({"x": torch.arange(12)}, [12])
    for name in ("a.zarr", "a"):
        place = f"{s3.url}/formats/{name}"
        with ThreadPoolExecutor(2) as executor:
            found = source.map(
                lambda rows: everything(rows["x"].tolist()),
                out=place,
                chunksize=5,
                executor=executor,
                storage_options=options,
            )
        assert_everything(found, 12)
        found.close()
    keys = [o["Key"] for o in s3.client().list_objects_v2(Bucket=s3.bucket, Prefix="formats/")["Contents"]]
    assert keys and not [key for key in keys if "build" in key]


def test_options_of_a_place_need_a_place(tmp_path):
    td = TensorDict({"x": torch.arange(3)}, [3])
    with pytest.raises(errors.InvalidArgumentError, match="out="):
        td.map(lambda rows: rows, num_workers=0, storage_options={"key": "a"})


@pytest.mark.parametrize("name", ["a", "a.h5"])
def test_what_is_there_is_not_replaced(tmp_path, name):
    TensorDict({"x": torch.zeros(2)}, [2]).save(tmp_path / name).close()
    with pytest.raises(errors.StoreExistsError):
        tdstore.build(tmp_path / name, everything, range(3), num_workers=0)
    assert left(tmp_path) in ([name], [name, f"{name}.build"]) and tdstore.open(tmp_path / name)["x"].shape == (2,)


@pytest.mark.parametrize("where", ["file://{}/a", "{}/a", "{}/a.zarr"])
def test_an_unfinished_build_says_so(tmp_path, where):
    place = where.format(tmp_path)

    def fails(numbers):
        raise KeyError("no")

    with pytest.raises(KeyError):
        tdstore.build(place, fails, range(3), num_workers=0)
    for mode in ("r", "r+"):
        with pytest.raises(errors.StoreNotFoundError, match="a tdstore.build is running there, or was inter") as caught:
            tdstore.open(place, mode=mode)
        assert "the same call" in str(caught.value) and os.path.basename(place) in str(caught.value)
    assert not tdstore.exists(place)


# -- kills -----------------------------------------------------------------------------------
class Slow:
    """`everything`, with a file for each call that ended."""

    def __init__(self, log):
        self.log = str(log)

    def __call__(self, numbers):
        made = everything(numbers)
        Path(self.log, f"{numbers[0]:06d}-{os.urandom(6).hex()}").touch()
        return made


class Killed(Slow):
    """Is killed once in each of some tasks, at a random moment: before, in or after the write of its rows."""

    def __call__(self, numbers):
        if numbers[0] % 24 == 0:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.log}/killed-{numbers[0]}", os.O_CREAT | os.O_EXCL))
                delay = random.Random(numbers[0]).uniform(0, 0.03)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().__call__(numbers)


@pytest.mark.parametrize("name", ["a", "file"])
def test_workers_killed_at_random(tmp_path, name):
    """Ten kills: nothing is lost, nothing is there twice, and rows keep their order."""
    log = tmp_path / "log"
    log.mkdir()
    place = f"file://{tmp_path}/a" if name == "file" else str(tmp_path / "a")
    with tdstore.build(place, Killed(log), range(240), rows_per_task=3, num_workers=2, mp_start_method="fork") as td:
        assert_everything(td, 240)
    assert len(list(log.glob("killed-*"))) == 10
    assert left(tmp_path) == ["a"]


class Dying(Slow):
    """Ends the process at the inputs from 12 on."""

    def __call__(self, numbers):
        if numbers[0] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(numbers)


def killed(function, *args, **kwargs):
    """Run a call in a process that is killed in it."""
    driver = multiprocessing.get_context("fork").Process(target=function, args=args, kwargs=kwargs)
    driver.start()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["a", "a.zarr", "a.h5"])
def test_a_killed_driver_is_resumed(tmp_path, name):
    log = tmp_path / "log"
    log.mkdir()
    call = {"rows_per_task": 3, "num_workers": 0}
    killed(tdstore.build, tmp_path / name, Dying(log), range(30), **call)
    with pytest.raises(errors.MismatchError, match="another build was begun"):
        tdstore.build(tmp_path / name, everything, range(31), **call)
    with tdstore.build(tmp_path / name, Slow(log), range(30), **call) as td:
        assert_everything(td, 30)
    assert [int(path.name[:6]) for path in sorted(log.glob("0*"))] == list(range(0, 30, 3))  # none twice
    assert left(tmp_path) == [name]


class DyingTarget(Target):
    """Is killed before or after one step of the end of a build."""

    step = ""
    after = False

    def copy(self, engine):
        if self.step == "copy" and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        super().copy(engine)

    def sweep(self, engine):
        if self.step == "copy" and self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step == "sweep":
            deleted = []
            real = engine.delete

            def delete(keys):
                real(keys)
                deleted.append(keys)
                if len(deleted) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            engine.delete = delete
        super().sweep(engine)


@pytest.mark.parametrize("name", ["a", "a.zarr", "a.h5"])
@pytest.mark.parametrize(("step", "after"), [("copy", False), ("copy", True), ("sweep", False)])
def test_a_driver_killed_at_the_end(tmp_path, monkeypatch, name, step, after):
    log = tmp_path / "log"
    log.mkdir()
    place, call = tmp_path / name, {"rows_per_task": 3, "num_workers": 0}
    with monkeypatch.context() as patch:
        patch.setattr("tdstore.container.distribute.build.Target", DyingTarget)
        patch.setattr(DyingTarget, "step", step)
        patch.setattr(DyingTarget, "after", after)
        killed(tdstore.build, place, Slow(log), range(9), **call)
    with tdstore.build(place, Slow(log), range(9), **call) as td:
        assert_everything(td, 9)
    assert len(list(log.glob("0*"))) == 3
    assert left(tmp_path) == [name]
