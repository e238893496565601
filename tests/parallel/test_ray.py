"""`map` on a local Ray: by its pool, and by the adapter of docs/how-to/map-over-a-cluster.md."""

from __future__ import annotations

import os
import signal
import tempfile
from concurrent.futures import Executor

import pytest
import torch

import tdstore
from tdstore import TensorDict

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def ray():
    import ray

    before = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # its sockets have paths of at most 107 bytes
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20, _temp_dir=folder
        )
        yield ray
        ray.shutdown()
    # Ray leaves its own. CPython drops a signal with a Python handler in a child that is being forked: pools then hang.
    signal.signal(signal.SIGTERM, before)


def executor_of(ray):
    run = ray.remote(lambda fn, args, kwargs: fn(*args, **kwargs))

    class RayExecutor(Executor):
        def submit(self, fn, /, *args, **kwargs):
            return run.remote(fn, args, kwargs).future()

    return RayExecutor()


def test_map_over_a_local_ray(ray, tmp_path, s3):  # one test, since each would start a cluster
    check_tasks(executor_of(ray), tmp_path)
    check_build(executor_of(ray), tmp_path, f"{s3.url}/built-by-ray", s3.fsspec_options)
    check_pool()


def check_tasks(executor, tmp_path):
    def square(td):
        if (td["x"] < 0).any():
            raise ValueError("negative")
        return td * td

    TensorDict({"x": torch.arange(20.0), "n": {"y": torch.ones(20, 2)}}, [20]).save(tmp_path / "x.h5").close()
    with tdstore.open(tmp_path / "x.h5") as stored:
        made = stored.map(square, executor=executor, num_workers=2, chunksize=6)
        assert made["x"].tolist() == [float(i * i) for i in range(20)] and made["n", "y"].sum() == 40
        out = TensorDict.from_schema(
            {"x": ((), "float32"), "n": {"y": ((2,), "float32")}},
            batch_size=[20],
            storage="memmap",
            prefix=tmp_path / "o",
        )
        stored.map(square, executor=executor, num_workers=2, chunksize=10, out=out)
    assert tdstore.open(tmp_path / "o")["x"].tolist() == made["x"].tolist()
    with pytest.raises(ValueError, match="negative"):
        TensorDict({"x": -torch.ones(4)}, [4]).map(square, executor=executor, num_workers=2)


def check_build(executor, log, place, options):
    """A worker is killed in the first try of each task: Ray runs it again, and no row is lost or there twice."""
    folder = str(log)

    def fn(numbers):
        try:
            os.close(os.open(f"{folder}/killed-{numbers[0]}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return TensorDict({"x": torch.tensor(list(numbers)), "text": [str(n) for n in numbers]}, [len(numbers)])
        return os.kill(os.getpid(), signal.SIGKILL)

    td = tdstore.build(
        place, fn, range(20), rows_per_task=10, executor=executor, num_workers=2, storage_options=options
    )
    assert td["x"].tolist() == list(range(20)) and list(td["text"]) == [str(n) for n in range(20)]
    assert len([name for name in os.listdir(folder) if name.startswith("killed-")]) == 2


def check_pool():
    from ray.util.multiprocessing import Pool

    with Pool(processes=2) as pool:
        made = TensorDict({"x": torch.arange(8.0)}, [8]).map(lambda td: td + 1, pool=pool, chunksize=2)
    assert made["x"].tolist() == [float(i + 1) for i in range(8)]
