"""Reading over a wire of 30 ms: opening, 256 random rows of 4 leaves, one row; beside the peer and zarr-python.

Run `python benchmarks/remote.py` (about 2 minutes; `--quick`: fewer rounds, `--latency-ms 50`, `--only raw`).
Each candidate runs in a process of its own, and reads twice. Times are those behind a light server in another process
(see `_wire.py`): the least, the median, and the median in latencies; CPU is that of the reader. Then it reads from
nginx through a proxy of the tests, which takes longer than many readers, and counts: `rounds` is how many requests
waited for each other, `x asked` the bytes sent in multiples of the bytes of the result. `floor` is the least time, in
latencies, in which plain sockets get the answers of the same requests from the light server: what is left of the
time is the reader's.

An opening has a dataset open at the same location, whose connections a client may use again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

ROWS, BATCH = 8192, 256
ROW_BYTES = 84 * 84 + 8 + 4 + 1
TARGETS = {"open": 2.5, "256 rows": 2.0, "one row": 1.5}
"""Latencies."""
OF_FORMAT = {("tdstore h5, gzip", "256 rows"): 3.0, ("tdstore zarr", "open"): 3.0}
"""Latencies of what takes longer: chunks of several rows; two rounds of requests."""
Op = Callable[[], object]


# -- candidates, run in the worker -------------------------------------------------------------
def ours(url: str, kind: str) -> dict[str, Op]:
    import torch

    import tdstore

    where = f"{url}/{kind}"
    td = tdstore.open(where)

    def rows() -> object:
        return td[torch.randint(0, ROWS, (BATCH,))].to_tensordict()

    return {
        "open": lambda: tdstore.open(where).close(),
        "256 rows": rows,
        "one row": lambda: td[int(torch.randint(0, ROWS, ()))].to_tensordict(),
    }


def peer(url: str, kind: str) -> dict[str, Op]:
    import torch
    from tensordict import PersistentTensorDict

    where = f"{url}/{kind}"

    def opened() -> Any:
        return PersistentTensorDict.from_zarr(where, mode="r", batch_size=torch.Size([ROWS]))

    td = opened()
    return {
        "open": opened,
        "256 rows": lambda: td[torch.randint(0, ROWS, (BATCH,))].contiguous(),
        "one row": lambda: td[int(torch.randint(0, ROWS, ()))].contiguous(),
    }


def zarr_python(url: str, kind: str) -> dict[str, Op]:
    import asyncio

    import numpy as np
    import zarr
    from obstore.store import HTTPStore
    from zarr.storage import ObjectStore

    zarr.config.set({"async.concurrency": 64})
    store = ObjectStore(HTTPStore(f"{url}/{kind}", client_options={"allow_http": True}), read_only=True)

    def opened() -> dict[str, Any]:
        group = zarr.open_group(store, mode="r", use_consolidated=None)
        return dict(group.arrays())

    arrays = opened()

    def take(index: Any) -> object:
        async def one(array: Any) -> object:
            return await array._async_array.get_orthogonal_selection((index,))

        async def every() -> object:
            return await asyncio.gather(*(one(a) for a in arrays.values()))

        from zarr.core.sync import sync

        return sync(every())

    return {
        "open": opened,
        "256 rows": lambda: take(np.random.randint(0, ROWS, BATCH)),
        "one row": lambda: take(np.random.randint(0, ROWS, 1)),
    }


def tensorstore(url: str, kind: str) -> dict[str, Op]:
    import numpy as np
    import tensorstore as ts

    keys = ("obs", "action", "reward", "done")

    def opened() -> list[Any]:
        specs = [{"driver": "zarr3", "kvstore": {"driver": "http", "base_url": f"{url}/{kind}/{k}/"}} for k in keys]
        return [f.result() for f in [ts.open(spec, context=ts.Context()) for spec in specs]]

    arrays = opened()

    def take(index: Any) -> object:
        return [f.result() for f in [a.oindex[index].read() for a in arrays]]

    return {
        "open": opened,
        "256 rows": lambda: take(np.random.randint(0, ROWS, BATCH)),
        "one row": lambda: take(np.random.randint(0, ROWS, 1)),
    }


CANDIDATES: dict[str, tuple[Callable[[str, str], dict[str, Op]], str]] = {
    "tdstore raw": (ours, "raw"),
    "tdstore h5": (ours, "x.h5"),
    "tdstore h5, gzip": (ours, "gzip.h5"),
    "tdstore zarr": (ours, "x.zarr"),
    "peer zarr, chunks=64": (peer, "peer.zarr"),
    "zarr-python + obstore": (zarr_python, "peer.zarr"),
    "tensorstore": (tensorstore, "peer.zarr"),
}


def worker(candidate: str, url: str) -> None:
    """Prepare a candidate, then do what stdin says and tell how long it took."""
    make, kind = CANDIDATES[candidate]
    try:
        operations = make(url, kind)
    except Exception as error:  # reported in the table
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:150]}"}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        used, start = time.process_time(), time.perf_counter()
        try:
            operations[line.strip()]()
            answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}
        except Exception as error:  # reported in the table
            answer = {"error": f"{type(error).__name__}: {str(error)[:150]}"}
        print(json.dumps(answer), flush=True)


# -- data ---------------------------------------------------------------------------------------
def make_data(folder: Path) -> None:
    import torch

    from tdstore import TensorDict

    torch.manual_seed(0)
    data = {
        "obs": torch.randint(0, 255, (ROWS, 84, 84), dtype=torch.uint8),
        "action": torch.arange(ROWS),
        "reward": torch.rand(ROWS),
        "done": torch.rand(ROWS) < 0.01,
    }
    td = TensorDict(data, [ROWS])
    td.save(f"file://{folder}/raw")
    for name, options in (
        ("x.h5", {}),
        ("gzip.h5", {"chunks": 4, "compression": "gzip", "compression_opts": 1}),
        ("x.zarr", {}),
    ):
        try:
            td.save(f"{folder}/{name}", **options)
        except Exception as error:
            print(f"{name} was not written: {type(error).__name__}: {error}")
    try:
        import zarr

        group = zarr.open_group(f"{folder}/peer.zarr", mode="w")
        for key, value in data.items():
            group.create_array(key, data=value.numpy(), chunks=(64, *value.shape[1:]), compressors=None)
        zarr.consolidate_metadata(f"{folder}/peer.zarr")
    except ImportError:
        print("zarr is not installed: no peer, no zarr-python")


class Reader:
    """A candidate in a process of its own, over one server."""

    def __init__(self, candidate: str, url: str) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", candidate, url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._answer()

    def do(self, name: str) -> dict[str, Any]:
        """Do something once; return what it took, or the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the worker died"}')
        return answer

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(candidate: str, port: int, proxy: Any, rounds: int) -> dict[str, dict[str, Any]]:
    """Return times, counts and floors of what a candidate does."""
    from _wire import floor_seconds

    found: dict[str, dict[str, Any]] = {}
    with Reader(candidate, f"http://127.0.0.1:{port}") as timed, Reader(candidate, proxy.url) as counted:
        if error := [reader.first for reader in (timed, counted) if "error" in reader.first]:
            return dict.fromkeys(TARGETS, error[0])
        for name in TARGETS:
            samples: list[dict[str, Any]] = []
            for _ in range(rounds + 2):
                samples.append(timed.do(name))
                if "error" in samples[-1] or samples[-1]["seconds"] > 10:
                    break  # once is enough
            kept = samples[2:] or samples[-1:]  # the first ones open connections
            if "error" in kept[-1]:
                found[name] = kept[-1]
                continue
            seconds = [sample["seconds"] for sample in kept]
            row = {"seconds": statistics.median(seconds), "least": min(seconds)}
            row["cpu"] = statistics.median(sample["cpu"] for sample in kept)
            counted.do(name)
            proxy.forget()
            counted.do(name)
            row |= {"rounds": proxy.rounds(), "bytes": proxy.bytes_sent, "requests": len(proxy.requests)}
            if name != "open" and row["rounds"] <= 2:
                once = floor_seconds(port, [(r.method, r.path, r.range) for r in proxy.requests])
                row["floor"] = min(once() for _ in range(rounds + 2))
            found[name] = row
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--only", metavar="TEXT", default="", help="only candidates whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--worker", nargs=2, metavar=("CANDIDATE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return 0

    from _wire import slow_server

    from tests.servers import FaultProxy, http_nginx

    results: dict[str, Any] = {}
    latency = options.latency_ms
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder)
        with (
            http_nginx(folder) as server,
            FaultProxy(server.port, latency_ms=latency) as proxy,
            slow_server(folder, latency) as port,
        ):
            size, load = BATCH * ROW_BYTES / 1e6, os.getloadavg()[0]
            print(f"{ROWS} rows, {size:.2f} MB in a batch, {latency:g} ms; a load of {load:.1f}")
            line = "{:<23} {:<9} {:>7} {:>7} {:>9} {:>6} {:>6} {:>6} {:>8} {:>7} {:>7}  {}"
            names = ("least", "ms", "x latency", "floor", "CPU", "rounds", "requests", "MB", "x asked", "")
            print(line.format("", "", *names))
            for candidate in CANDIDATES:
                if options.only not in candidate:
                    continue
                results[candidate] = measure(candidate, port, proxy, 5 if options.quick else 15)
                for name, row in results[candidate].items():
                    if "error" in row:
                        print(f"{candidate:<23} {name:<9} {row['error']}")
                        continue
                    asked = {"256 rows": BATCH * ROW_BYTES, "one row": ROW_BYTES}.get(name)
                    latencies = row["seconds"] * 1e3 / latency
                    target = OF_FORMAT.get((candidate, name), TARGETS[name])
                    missed = latencies > target and candidate.startswith("tdstore")
                    print(
                        line.format(
                            candidate,
                            name,
                            f"{row['least'] * 1e3:.0f}",
                            f"{row['seconds'] * 1e3:.0f}",
                            f"{latencies:.1f}",
                            f"{row['floor'] * 1e3 / latency:.1f}" if "floor" in row else "-",
                            f"{row['cpu'] * 1e3:.0f}",
                            f"{row['rounds']:g}",
                            f"{row['requests']:g}",
                            f"{row['bytes'] / 1e6:.2f}",
                            f"{row['bytes'] / asked:.1f}" if asked else "-",
                            f"target {target:g}" if missed else "",
                        ),
                        flush=True,
                    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    failed = [c for c, rows in results.items() if c.startswith("tdstore") and any("error" in r for r in rows.values())]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
