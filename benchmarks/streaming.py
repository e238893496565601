"""Epochs of training data, from local files and from a bucket that answers after 30 ms, beside other loaders.

Run `python benchmarks/streaming.py` (minutes; `--quick` for a look in less than one). Two corpora: frames of Atari
games, and the Python files of torch as ragged token ids. Beside tdstore are litdata, webdataset, zarr-python, HF
datasets and torchrl's storage, each with a form of the data that its documents recommend; see `_loaders.py`.

Each measurement is a process of its own that has nothing cached: milliseconds from nothing open to the first batch,
rows a second of the whole epoch with it, milliseconds from nothing open to the first batch of a resume from the middle
of the epoch, and whether it was the batch that was left; CPU seconds for a thousand rows, of the process and its
children; and the peak of anonymous memory. Rounds are interleaved, and the median is shown.

A full shuffle ("full") puts each row of the dataset into any batch. litdata permutes chunks, and rows within one
("chunks"); webdataset and datasets permute shards, and rows within a buffer ("buffer"). The blocks of tdstore
("blocks") are compared with these: the window has as many rows as their buffers.

The bucket is nginx behind a relay that delays; see `_wire.py`. What is not installed is named at the end: litdata and
webdataset are installed by hand, with `pip install --no-deps`, as litdata asks for a torchvision of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import pickle
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _loaders
from _loaders import BATCH, LIBRARIES, MISSING, Place
from _wire import slow_bucket
from memory import Peak

import tdstore

MODULES = {
    "tdstore": ["h5py", "tdstore_h5.store", "tdstore_zarr.store", "tdstore_remote.opening"],
    "zarr": ["zarr.storage"],
    "torchrl": ["torchrl.data"],
}
"""What else to import before anything is measured, besides the package."""


class Case(NamedTuple):
    """One way to read one dataset."""

    library: str
    kind: str
    order: str
    place: Place

    def __str__(self) -> str:
        where = "local" if self.place.server is None else "wire"
        kind = self.kind if self.kind not in ("", self.library) else ""
        return " ".join(
            filter(None, [where, "text" if self.place.ragged else "frames", self.library, kind, self.order])
        )


class Figures(NamedTuple):
    """What is measured of one case."""

    first_ms: float
    rows_per_s: float
    resume_ms: float
    cpu_s: float
    peak_mb: float
    exact: float
    """1 where a resume gave the batch that was left, 0 where not; -1 without a resume."""


def cases(place: Place) -> list[Case]:
    """Every way to read the datasets of a place."""
    found: list[Case] = []
    for name, library in LIBRARIES.items():
        if name in MISSING or (place.ragged and not library.ragged):
            continue
        kinds = library.local if place.server is None else library.wire
        found += [Case(name, kind, order, place) for kind, orders in kinds.items() for order in orders]
    return found


def read(pipe: Any, case: Case, batches: int) -> None:
    """Read an epoch, or so many batches of it, and send figures, the state in the middle, and the labels after it."""
    prepare()
    middle = batches // 2
    state: bytes | None = None
    with tempfile.TemporaryDirectory() as cache, Peak(0.01) as peak:
        place = replace(case.place, cache=cache)
        used, start = cpu_seconds(), time.perf_counter()
        epoch, state_of = LIBRARIES[case.library].open(place, case.kind, case.order, None)
        seen = [next(epoch)["label"]]
        first = time.perf_counter() - start
        for batch in itertools.islice(epoch, batches - 1):
            seen.append(batch["label"])
            if len(seen) == middle and state_of is not None:
                state = pickle.dumps(state_of())  # by itself: torch's own pickles of tensors need this process
        took, cpu = time.perf_counter() - start, cpu_seconds() - used
    labels = torch.cat(seen)
    assert labels.unique().numel() == labels.numel(), f"{case} gave a row twice"
    count = labels.numel()
    found = Figures(first * 1e3, count / took, 0, cpu / count * 1000, peak.grown / 1e6, -1)
    pipe.send((found, state, seen[middle].tolist()))


def prepare() -> None:
    """Do what does not count: import obstore, which does not work in a fork of a process that has it."""
    import obstore.store  # noqa: F401

    torch.set_num_threads(1)


def resume(pipe: Any, case: Case, state: bytes) -> None:
    """Resume, and send the milliseconds to the first batch, and its labels."""
    prepare()
    with tempfile.TemporaryDirectory() as cache:
        place = replace(case.place, cache=cache)
        start = time.perf_counter()
        epoch, _ = LIBRARIES[case.library].open(place, case.kind, case.order, pickle.loads(state))
        labels = next(epoch)["label"].tolist()
        took = time.perf_counter() - start
    pipe.send((took * 1e3, labels))


def measure(context: Any, case: Case, batches: int) -> Figures:
    """Measure a case in two new processes."""
    found, state, following = in_process(context, read, case, batches)
    if state is None:
        return found
    took, labels = in_process(context, resume, case, state)
    return found._replace(resume_ms=took, exact=float(labels == following))


def in_process(context: Any, work: Any, *given: Any) -> Any:
    mine, child = context.Pipe()
    process = context.Process(target=work, args=(child, *given))
    process.start()
    child.close()
    try:
        return mine.recv()
    finally:
        process.join(1)  # in which it removes its semaphores: numcodecs and tqdm make some, and a killed process leaves
        process.kill()  # them to the resource tracker. All that counts was sent; threads of a library may hold it.
        process.join()


def cpu_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def show(results: dict[str, Figures]) -> None:
    """Print the table."""
    print(f"{'':<44}{'first, ms':>10}{'rows/s':>9}{'resume, ms':>12}{'exact':>7}{'CPU s/1000':>12}{'peak MB':>9}")
    for name, found in results.items():
        resumed = f"{found.resume_ms:>12.0f}{'yes' if found.exact == 1 else 'no':>7}"
        resumed = resumed if found.exact >= 0 else f"{'none':>12}{'':>7}"
        print(
            f"{name:<44}{found.first_ms:>10.0f}{found.rows_per_s:>9.0f}{resumed}"
            f"{found.cpu_s:>12.2f}{found.peak_mb:>9.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds that a request costs")
    parser.add_argument("--only", default="", help="words that the names of the cases have, with commas between them")
    parser.add_argument("--quick", action="store_true", help="512 rows, one round, without streams of parquet")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, rounds = (512, 1) if options.quick else (options.rows, options.rounds)
    context = multiprocessing.get_context("forkserver")
    modules = [name for name in LIBRARIES if name not in MISSING]
    modules += [also for name in modules for also in MODULES.get(name, [])]
    # Imported once: what is measured does not import.
    context.set_forkserver_preload(["_loaders", "memory", "s3fs", "boto3", *modules, "_preload"])
    with ExitStack() as stack:
        found: dict[Case, list[Figures]] = {}
        for corpus in (_loaders.frames, _loaders.text):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.chmod(0o755)  # for nginx
            td = corpus(rows)
            ragged = corpus is _loaders.text
            _loaders.store_all(td, folder, ragged)
            local = Place(folder, len(td), ragged)
            server = stack.enter_context(slow_bucket(folder, options.latency))
            of_corpus = [*cases(local), *cases(replace(local, server=server))]
            if options.quick:  # its streams take 20 s of the whole
                of_corpus = [case for case in of_corpus if case.kind != "parquet"]
            words = options.only.split(",")
            found |= {case: [] for case in of_corpus if all(word in str(case).split(" ") for word in words if word)}
        for _ in range(rounds):
            for case, measured in found.items():
                measured.append(measure(context, case, case.place.rows // BATCH))
    results = {
        str(case): Figures(*(statistics.median(column) for column in zip(*measured, strict=True)))
        for case, measured in found.items()
    }
    show(results)
    print(f"not installed, and not measured: {', '.join(MISSING) or 'none'}; tdstore {tdstore.__version__}")
    if options.json:
        options.json.write_text(json.dumps({name: one._asdict() for name, one in results.items()}, indent=1))


if __name__ == "__main__":
    main()
