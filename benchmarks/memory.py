"""Peaks of memory: save, open, read, copy and map of stored data, as multiples of the data, the batch or the block.

Run `python benchmarks/memory.py` (a minute), `--quick` for smaller data. Each figure is the peak of the anonymous
memory (RssAnon, without pages of mapped files) of a process of its own, above what it had before the call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

MIB = 1 << 20
PLACES = {"memmap": "d", "h5": "d.h5", "zarr": "d.zarr", "tdz": "d.tdz"}
WORK = ("save", "open", "read", "copy", "map")


def anonymous() -> int:
    """Bytes of memory of this process that are no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not say RssAnon: Linux does")


class Peak:
    """Samples the anonymous memory in a thread, every half millisecond or as it is told, between entry and exit."""

    def __init__(self, seconds: float = 0.0005) -> None:
        self.seconds = seconds

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(self.seconds):
            self.most = max(self.most, anonymous())

    def __exit__(self, *failure: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, anonymous())

    @property
    def grown(self) -> int:
        return self.most - self.before


def measure(work: str, name: str, folder: Path, rows: int) -> int:
    """Do one piece of work in this process, and return by how many bytes its memory grew."""
    import tdstore

    frames = tdstore.TensorDict({"pixels": torch.zeros(64, 84, 84, dtype=torch.uint8)}, [64])
    tdstore.save(frames, folder / f"warm{Path(name).suffix}").close()  # what is imported at first use is not counted
    place = folder / name
    if work == "save":
        full = tdstore.TensorDict({"pixels": _frames(rows)}, [rows])
        with Peak() as peak:
            tdstore.save(full, place).close()
        return peak.grown
    with tdstore.open(folder / f"warm{Path(name).suffix}") as warm:
        warm[torch.tensor([1, 2])]
    if work == "open":
        with Peak() as peak:
            tdstore.open(place).close()
        return peak.grown
    with tdstore.open(place) as td:
        if work == "read":
            at = torch.randint(0, rows, (batch_of(rows),))
            with Peak() as peak:
                batch = td.read(at)
            assert len(batch) == len(at)
        elif work == "copy":
            with Peak() as peak:
                td.save(folder / f"copy{Path(name).suffix}").close()
        else:
            with Peak() as peak:
                td.map(_brighter, chunksize=batch_of(rows), num_workers=0, out=_out(folder, name, rows))
    return peak.grown


def batch_of(rows: int) -> int:
    """Rows of one batch or chunk: a sixteenth."""
    return rows // 16


def _frames(rows: int) -> torch.Tensor:
    return torch.randint(0, 255, (rows, 84, 84), dtype=torch.uint8)


def _brighter(td: object) -> object:
    return td + 1  # type: ignore[operator]


def _out(folder: Path, name: str, rows: int) -> object:
    import tdstore

    schema = {"pixels": ((84, 84), torch.uint8)}
    return tdstore.from_schema(schema, batch_size=[rows], location=folder / f"out{Path(name).suffix}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--one", nargs=3, metavar=("WORK", "NAME", "FOLDER"), help="one piece of work, in this process")
    options = parser.parse_args()
    rows = 8_192 if options.quick else 32_768
    if options.one:
        work, name, folder = options.one
        print(measure(work, name, Path(folder), rows))
        return 0
    whole, batch = rows * 84 * 84, batch_of(rows) * 84 * 84
    print(f"Peaks of memory; {whole // MIB} MiB of data, batches and chunks of {batch // MIB} MiB")
    print(f"{'place':<10}" + "".join(f"{work:>22}" for work in WORK))
    found: list[dict[str, object]] = []
    for place, name in PLACES.items():
        cells = []
        with tempfile.TemporaryDirectory(prefix="tdstore-bench-") as folder:
            for work in WORK:
                command = [sys.executable, __file__, *(["--quick"] if options.quick else [])]
                done = subprocess.run(
                    [*command, "--one", work, name, folder], capture_output=True, text=True, check=False
                )
                unit = whole if work in ("save", "open", "copy") else batch
                if done.returncode:
                    cells.append("error")
                    found.append({"place": place, "work": work, "error": done.stderr.strip().splitlines()[-1]})
                    continue
                grown = int(done.stdout.split()[-1])
                of = "data" if unit == whole else "batch"
                cells.append(f"{grown / MIB:.1f} MiB, {grown / unit:.2f} {of}")
                found.append({"place": place, "work": work, "bytes": grown, "multiple": grown / unit, "of": of})
        print(f"{place:<10}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    for row in found:
        if "error" in row:
            print(f"{row['place']} {row['work']}: {row['error']}")
    if options.json:
        options.json.write_text(json.dumps({"title": "Peaks of memory", "rows": found}, indent=1))
    return 1 if any("error" in row for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
