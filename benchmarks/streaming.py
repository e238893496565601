"""Epochs over a bucket that answers after 30 ms, beside litdata, webdataset, zarr-python with obstore, and HF datasets.

Run `python benchmarks/streaming.py` (minutes; `--rows 1024 --rounds 1` for a look). Frames of Atari games, 84 x 84 RGB,
are put into one bucket, for each library in a form that its documents recommend. Each measurement is a process of its
own that has nothing cached: seconds from nothing open to the first batch, rows a second of the whole epoch with it, and
CPU seconds for a thousand rows, of the process and its workers. The bucket (moto) and the proxy that delays it run in
another process. Rounds are interleaved, and the median is shown. What is not installed is named at the end: litdata and
webdataset are installed by hand, with `pip install --no-deps`, as litdata asks for a torchvision of its own.

A full shuffle puts each row of the dataset into any batch. litdata permutes chunks, and rows within one; webdataset and
datasets permute shards, and rows within a buffer. The blocks of tdstore are compared with these: the window has as many
rows as their buffers.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import multiprocessing
import resource
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs
from tests.servers.s3 import S3Server

BATCH = 64
SHARD = 256
"""Rows of a chunk, shard or block: 5 MB of frames."""
BUFFER = 4 * SHARD
"""Rows that are permuted together."""
PREFETCH = BUFFER // BATCH
"""Batches that are read ahead: as many rows as litdata downloads ahead."""
OTHERS = ["litdata", "webdataset", "zarr", "datasets"]
Start = Callable[[], Iterator[Any]]


def frames(rows: int) -> TensorDict:
    """Frames of two games, as the demo plays them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from atari_demo.play import play

    played = play(rows)[:rows]
    return TensorDict({"pixels": played["obs"].contiguous(), "label": torch.arange(rows)}, [rows])


def serve(pipe: Any, latency: float) -> None:
    """Run the bucket and the proxy until the pipe is closed; the first message is where they are."""
    from tests.servers import FaultProxy, s3_moto

    with s3_moto() as server, FaultProxy(server.port) as proxy:
        pipe.send((server, server.through(proxy.port)))
        pipe.recv()  # all is stored
        proxy.latency_ms = latency
        pipe.send(None)
        pipe.recv()


# -- how each stores ----------------------------------------------------------------------
def store_all(td: TensorDict, server: S3Server, folder: Path) -> list[str]:
    """Put the dataset into the bucket, once for each library; returns the names of what can be measured."""
    td.save(f"{server.url}/tdstore", storage_options=server.fsspec_options).close()
    names = ["tdstore shuffled", "tdstore blocks", "tdstore sequential"]
    there = {name for name in OTHERS if importlib.util.find_spec(name) is not None}
    if "litdata" in there:
        from litdata.streaming.cache import Cache

        # The writer below `optimize`, which starts processes of its own for a function of the caller.
        cache = Cache(str(folder / "litdata"), chunk_size=SHARD)
        for row in range(len(td)):
            cache[row] = {"pixels": td["pixels"][row], "label": int(td["label"][row])}
        cache.done()
        cache.merge()
        upload(folder / "litdata", server, "litdata")
        names += ["litdata chunks shuffled", "litdata sequential"]
    if "webdataset" in there:
        (folder / "webdataset").mkdir()
        for number, start in enumerate(range(0, len(td), SHARD)):
            write_tar(td[start : start + SHARD], start, folder / "webdataset" / f"{number:05}.tar")
        upload(folder / "webdataset", server, "webdataset")
        names += ["webdataset buffer shuffled", "webdataset sequential"]
    if "zarr" in there:
        import zarr

        for name, chunk in (("rows", 1), ("chunks", BATCH)):
            group = zarr.open_group(folder / name, mode="w")
            group.create_array("pixels", data=td["pixels"].numpy(), chunks=(chunk, *td["pixels"].shape[1:]))
            group.create_array("label", data=td["label"].numpy())
            upload(folder / name, server, f"zarr-{name}")
        names += ["zarr-python shuffled", "zarr-python sequential"]
    if "datasets" in there:
        import datasets

        columns = {"pixels": td["pixels"].flatten(1).numpy(), "label": td["label"].numpy()}
        (folder / "parquet").mkdir()
        made = datasets.Dataset.from_dict(columns)
        for number, start in enumerate(range(0, len(td), SHARD)):
            part = made.select(range(start, min(start + SHARD, len(td))))
            part.to_parquet(folder / "parquet" / f"{number:05}.parquet")
        upload(folder / "parquet", server, "parquet")
        names += ["datasets buffer shuffled", "datasets sequential"]
    return names


def write_tar(td: TensorDict, first: int, place: Path) -> None:
    """Write a shard of webdataset: for each row a file of its bytes, and one of its label."""
    with tarfile.open(place, "w") as tar:
        for row in range(len(td)):
            parts = {"pixels": td["pixels"][row].numpy().tobytes(), "cls": str(int(td["label"][row])).encode()}
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{first + row:08}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def upload(folder: Path, server: S3Server, prefix: str) -> None:
    client = server.client()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            client.upload_file(str(file), server.bucket, f"{prefix}/{file.relative_to(folder)}")


# -- how each reads -----------------------------------------------------------------------
class ZarrRows(Dataset[Any]):
    """Rows of arrays of zarr-python over obstore, batch by batch."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        import zarr
        from obstore.store import S3Store
        from zarr.storage import ObjectStore

        store = S3Store(server.bucket, prefix=prefix, **server.obstore_options)
        group = zarr.open_group(ObjectStore(store, read_only=True), mode="r")
        self.arrays: dict[str, Any] = {name: group[name] for name in ("pixels", "label")}

    def __len__(self) -> int:
        return int(self.arrays["label"].shape[0])

    def __getitems__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array.oindex[rows]) for name, array in self.arrays.items()}


def start_of(name: str, server: S3Server, cache: str, rows: int) -> Start:
    """Return what opens a dataset and begins an epoch."""
    library, *order = name.split()
    shuffled = order != ["sequential"]
    if library == "tdstore":
        how: Any = {"shuffled": True, "blocks": "blocks", "sequential": False}[order[0]]
        place, options = f"{server.url}/tdstore", {"storage_options": server.fsspec_options}
        return lambda: iter(
            Epochs(
                place, BATCH, shuffle=how, block_rows=SHARD, window_blocks=BUFFER // SHARD, prefetch=PREFETCH,
                whole_blocks=how == "blocks", options=options,
            )
        )  # fmt: skip
    if library == "litdata":
        import obstore.store
        from litdata import StreamingDataLoader, StreamingDataset

        # litdata has no option for an endpoint without TLS.
        client = obstore.store.S3Store
        obstore.store.S3Store = lambda bucket, **options: client(  # type: ignore[misc, assignment]
            bucket, **options | {"client_options": {**options.get("client_options", {}), "allow_http": True}}
        )

        def litdata() -> Iterator[Any]:
            access = {"endpoint_url": server.endpoint, "region_name": server.region}
            access |= {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
            made = StreamingDataset(
                f"{server.url}/litdata", cache_dir=cache, shuffle=shuffled, storage_options=access, max_pre_download=4
            )
            return iter(StreamingDataLoader(made, batch_size=BATCH, num_workers=0))

        return litdata
    if library == "webdataset":
        import webdataset

        def webdatasets() -> Iterator[Any]:
            shards = -(-rows // SHARD)
            keys = [{"Bucket": server.bucket, "Key": f"webdataset/{number:05}.tar"} for number in range(shards)]
            urls = [server.client().generate_presigned_url("get_object", Params=key) for key in keys]  # for its curl
            made = webdataset.WebDataset(urls, shardshuffle=shards if shuffled else False, empty_check=False)
            decoded = (made.shuffle(BUFFER) if shuffled else made).map(of_tar)
            return iter(DataLoader(decoded.batched(BATCH, collation_fn=stacked), batch_size=None))

        return webdatasets
    if library == "zarr-python":
        return lambda: iter(
            DataLoader(
                ZarrRows(server, "zarr-rows" if shuffled else "zarr-chunks"), BATCH, shuffle=shuffled, collate_fn=same
            )
        )
    import datasets

    def parquet() -> Iterator[Any]:
        made = datasets.load_dataset(
            "parquet", data_files=f"{server.url}/parquet/*.parquet", split="train", streaming=True,
            storage_options=server.fsspec_options, cache_dir=cache,
        )  # fmt: skip
        ordered = made.shuffle(seed=0, buffer_size=BUFFER) if shuffled else made
        return iter(DataLoader(ordered.with_format("torch"), BATCH))

    return parquet


def of_tar(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode a row of a shard of webdataset."""
    return torch.frombuffer(bytearray(sample["pixels"]), dtype=torch.uint8), int(sample["cls"])


def stacked(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Stack the rows of a batch."""
    return {
        "pixels": torch.stack([frame for frame, _ in samples]), "label": torch.tensor([label for _, label in samples])
    }  # fmt: skip


def same(batch: Any) -> Any:
    """Return a batch that is one already."""
    return batch


def measure(pipe: Any, name: str, server: S3Server, rows: int, batches: int) -> None:
    """Measure one epoch, or so many batches of it, in a new process; sends seconds to the first, rows/s and CPU."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        start_of_epoch = start_of(name, server, cache, rows)  # imports
        used, start = cpu_seconds(), time.perf_counter()
        epoch = start_of_epoch()
        seen = [next(epoch)["label"]]
        first = time.perf_counter()
        seen += [batch["label"] for batch in itertools.islice(epoch, batches - 1)]
        end = time.perf_counter()
    labels = torch.cat(seen)
    assert labels.unique().numel() == labels.numel(), f"{name} gave a row twice"
    count = labels.numel()
    pipe.send((first - start, count / (end - start), (cpu_seconds() - used) / count * 1000))


def cpu_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=64, help="batches of each epoch that are read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds that a request costs")
    parser.add_argument("--only", default="", help="a part of the names of the candidates")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server_process = spawn.Process(target=serve, args=(theirs, options.latency), daemon=True)
    server_process.start()
    direct, delayed = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        names = store_all(frames(options.rows), direct, Path(folder))
    ours.send(None)
    ours.recv()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names if options.only in name}
    for _ in range(options.rounds):
        for name, measured in found.items():
            mine, child = spawn.Pipe()
            process = spawn.Process(target=measure, args=(child, name, delayed, options.rows, options.batches))
            process.start()
            child.close()
            measured.append(mine.recv())
            process.join()
    results = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    print(f"{'':<28}{'first batch, s':>16}{'rows/s':>10}{'CPU s / 1000 rows':>20}")
    for name, (first, speed, cpu) in results.items():
        print(f"{name:<28}{first:>16.2f}{speed:>10.0f}{cpu:>20.2f}")
    missing = [name for name in OTHERS if importlib.util.find_spec(name) is None]
    print(f"not installed, and not measured: {', '.join(missing) or 'none'}; tdstore {tdstore.__version__}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    ours.send(None)


if __name__ == "__main__":
    main()
