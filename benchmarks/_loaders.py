"""Loaders of training data, for `streaming.py`: how each library stores a dataset, and how it reads an epoch.

Each stores in the form that its documents recommend, below `bucket/`, which is read as local files or as an S3 bucket.
None uses worker processes. What `open_...` returns is an iterator of batches, of which "label" is one number per row,
and a function that gives the state for a resume, or None where the library has none.
"""

from __future__ import annotations

import importlib.util
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tdstore import TensorDict
from tdstore.data import Epochs
from tests.servers import S3Server

BATCH = 64
SHARD = 256
"""Rows of a chunk, shard or block: 5 MB of frames."""
BUFFER = 4 * SHARD
"""Rows that are permuted together."""
PREFETCH = BUFFER // BATCH
"""Batches that are read ahead over the wire: as many rows as litdata downloads ahead."""
Opened = tuple[Iterator[Any], Callable[[], Any] | None]


@dataclass(frozen=True)
class Place:
    """Where the stored datasets are, and what is in them."""

    folder: Path
    rows: int
    ragged: bool
    server: S3Server | None = None
    cache: str = ""
    """A folder of the process that reads."""

    def at(self, name: str) -> str:
        """The path or the URL of a dataset."""
        return str(self.folder / "bucket" / name) if self.server is None else f"{self.server.url}/{name}"


# -- tdstore ------------------------------------------------------------------------------
def store_tdstore(td: TensorDict, bucket: Path) -> None:
    for place in (bucket / "memmap", bucket / "tdstore.h5", bucket / "tdstore.zarr", f"file://{bucket}/objects"):
        td.save(place).close()


def open_tdstore(place: Place, kind: str, order: str, state: Any) -> Opened:
    options = {} if place.server is None else {"storage_options": place.server.fsspec_options}
    shuffle: Any = {"full": True, "blocks": "blocks", "sequential": False}[order]
    wire = place.server is not None
    epochs = Epochs(
        place.at(kind), BATCH, shuffle=shuffle, block_rows=SHARD, window_blocks=BUFFER // SHARD, options=options,
        prefetch=PREFETCH if wire else 2, whole_blocks=order == "blocks" and (wire or kind.endswith(".zarr")),
    )  # fmt: skip
    if state is not None:
        epochs.load_state_dict(state)
    return iter(epochs), epochs.state_dict


# -- litdata ------------------------------------------------------------------------------
def store_litdata(td: TensorDict, bucket: Path) -> None:
    from litdata.streaming.cache import Cache

    # The writer below `optimize`, which starts processes of its own for a function of the caller.
    cache = Cache(str(bucket / "litdata"), chunk_size=SHARD)
    for row, (sample, label) in enumerate(samples(td)):
        cache[row] = {"sample": sample, "label": label}
    cache.done()
    cache.merge()


def open_litdata(place: Place, kind: str, order: str, state: Any) -> Opened:
    import obstore.store
    from litdata import StreamingDataLoader, StreamingDataset

    access: dict[str, Any] = {}
    if place.server is not None:
        # litdata has no option for an endpoint without TLS.
        client = obstore.store.S3Store
        obstore.store.S3Store = lambda bucket, **options: client(  # type: ignore[misc, assignment]
            bucket, **options | {"client_options": {**options.get("client_options", {}), "allow_http": True}}
        )
        access = {"endpoint_url": place.server.endpoint, "region_name": place.server.region}
        access |= {"aws_access_key_id": place.server.access_key, "aws_secret_access_key": place.server.secret_key}
        access = {"storage_options": access, "cache_dir": place.cache}
    made = StreamingDataset(
        place.at(kind), shuffle=order == "chunks", max_pre_download=4, force_override_state_dict=True, **access
    )
    loader = StreamingDataLoader(made, batch_size=BATCH, num_workers=0, collate_fn=ragged if place.ragged else None)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


# -- webdataset ---------------------------------------------------------------------------
def store_webdataset(td: TensorDict, bucket: Path) -> None:
    (bucket / "webdataset").mkdir()
    made = list(samples(td))
    for number, start in enumerate(range(0, len(made), SHARD)):
        with tarfile.open(bucket / "webdataset" / f"{number:05}.tar", "w") as tar:
            for sample, label in made[start : start + SHARD]:
                for name, data in (("data", sample.numpy().tobytes()), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{label:08}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def open_webdataset(place: Place, kind: str, order: str, state: Any) -> Opened:
    import webdataset

    shuffled = order == "buffer"
    names = [f"webdataset/{number:05}.tar" for number in range(-(-place.rows // SHARD))]
    urls = [place.at(name) for name in names]
    if place.server is not None:  # it starts curl
        client, bucket = place.server.client(), place.server.bucket
        keys = [{"Bucket": bucket, "Key": name} for name in names]
        urls = [client.generate_presigned_url("get_object", Params=key) for key in keys]
    made = webdataset.WebDataset(urls, shardshuffle=len(urls) if shuffled else False, empty_check=False)
    rows = (made.shuffle(BUFFER) if shuffled else made).map(of_tar_ragged if place.ragged else of_tar)
    batched = rows.batched(BATCH, collation_fn=ragged if place.ragged else stacked)
    return iter(DataLoader(batched, batch_size=None)), None


def of_tar(sample: dict[str, Any]) -> dict[str, Any]:
    return {"sample": torch.frombuffer(bytearray(sample["data"]), dtype=torch.uint8), "label": int(sample["cls"])}


def of_tar_ragged(sample: dict[str, Any]) -> dict[str, Any]:
    return {"sample": torch.frombuffer(bytearray(sample["data"]), dtype=torch.int32), "label": int(sample["cls"])}


def stacked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack the rows of a batch."""
    return {
        "sample": torch.stack([row["sample"] for row in rows]), "label": torch.tensor([row["label"] for row in rows])
    }  # fmt: skip


def ragged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one nested tensor of the samples of a batch, as tdstore does."""
    made = torch.nested.nested_tensor([torch.as_tensor(row["sample"]) for row in rows], layout=torch.jagged)
    return {"sample": made, "label": torch.tensor([int(row["label"]) for row in rows])}


# -- zarr-python --------------------------------------------------------------------------
class ZarrRows(Dataset[Any]):
    """Rows of arrays of zarr-python, over obstore at a URL, batch by batch."""

    def __init__(self, place: Place, name: str) -> None:
        import zarr
        from obstore.store import S3Store
        from zarr.storage import ObjectStore

        at: Any = place.at(name)
        if place.server is not None:
            store = S3Store(place.server.bucket, prefix=name, **place.server.obstore_options)
            at = ObjectStore(store, read_only=True)
        group = zarr.open_group(at, mode="r")
        self.arrays: dict[str, Any] = {name: group[name] for name in ("sample", "label")}

    def __len__(self) -> int:
        return int(self.arrays["label"].shape[0])

    def __getitems__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array.oindex[rows]) for name, array in self.arrays.items()}


def store_zarr(td: TensorDict, bucket: Path) -> None:
    import zarr

    for name, chunk in (("zarr-rows", 1), ("zarr-chunks", BATCH)):
        group = zarr.open_group(bucket / name, mode="w")
        group.create_array("sample", data=td["sample"].numpy(), chunks=(chunk, *td["sample"].shape[1:]))
        group.create_array("label", data=td["label"].numpy())


def open_zarr(place: Place, kind: str, order: str, state: Any) -> Opened:
    rows = ZarrRows(place, "zarr-chunks" if order == "sequential" else "zarr-rows")
    return stateful(rows, state, shuffle=order == "full", collate_fn=same)


def stateful(rows: Any, state: Any, **options: Any) -> Opened:
    """Read a map-style dataset by torchdata's loader, which resumes."""
    loader = StatefulDataLoader(rows, BATCH, **options)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def same(batch: Any) -> Any:
    """Return a batch that is one already."""
    return batch


# -- HF datasets --------------------------------------------------------------------------
def store_datasets(td: TensorDict, bucket: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    flat = [sample.flatten().numpy() for sample, _ in samples(td)]
    made = datasets.Dataset.from_dict({"sample": flat, "label": td["label"].numpy()})
    made.save_to_disk(bucket / "arrow")
    (bucket / "parquet").mkdir()
    for number, start in enumerate(range(0, len(td), SHARD)):
        part = made.select(range(start, min(start + SHARD, len(td))))
        part.to_parquet(bucket / "parquet" / f"{number:05}.parquet")


def open_datasets(place: Place, kind: str, order: str, state: Any) -> Opened:
    """Read Arrow files in any order, as a map; over the wire stream parquet files."""
    import datasets

    collate = ragged if place.ragged else None
    if place.server is None:
        mapped = datasets.load_from_disk(place.at("arrow")).with_format("torch")
        return stateful(mapped, state, shuffle=order == "full", collate_fn=collate)
    made = datasets.load_dataset(
        "parquet", split="train", streaming=True, storage_options=place.server.fsspec_options, cache_dir=place.cache,
        data_files=[place.at(f"parquet/{number:05}.parquet") for number in range(-(-place.rows // SHARD))],
    )  # fmt: skip
    ordered = made.shuffle(seed=0, buffer_size=BUFFER) if order == "buffer" else made
    return stateful(ordered.with_format("torch"), state, collate_fn=collate)


# -- torchrl ------------------------------------------------------------------------------
def store_torchrl(td: TensorDict, bucket: Path) -> None:
    _buffer(len(td), td).dumps(bucket / "torchrl")


def open_torchrl(place: Place, kind: str, order: str, state: Any) -> Opened:
    buffer = _buffer(place.rows, None, order == "full")
    buffer.loads(place.at("torchrl"))  # copies the rows into a storage of its own
    if state is not None:
        buffer.sampler.load_state_dict(state)
    return (buffer.sample() for _ in range(place.rows // BATCH)), buffer.sampler.state_dict


def _buffer(rows: int, td: TensorDict | None, shuffle: bool = True) -> Any:
    """A memory-mapped storage with the sampler that gives each row once."""
    from tensordict import TensorDict as Theirs
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    made = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(rows), sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=BATCH
    )
    if td is not None:
        made.extend(Theirs({"sample": td["sample"], "label": td["label"]}, [rows]))
    return made


# -- all of them --------------------------------------------------------------------------
def samples(td: TensorDict) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each row by itself."""
    return zip(td["sample"].unbind(), td["label"].tolist(), strict=True)


@dataclass(frozen=True)
class Library:
    """A loader: the package, what it does with a dataset, and what it can be asked for."""

    store: Callable[[TensorDict, Path], None]
    open: Callable[[Place, str, str, Any], Opened]
    local: dict[str, list[str]]
    """Kinds of storage and their orders, for local files."""
    wire: dict[str, list[str]]
    ragged: bool = True
    """Whether rows may differ in length."""


ORDERS = ["full", "blocks", "sequential"]
LIBRARIES = {
    "tdstore": Library(
        store_tdstore,
        open_tdstore,
        {"memmap": ORDERS, "tdstore.h5": ORDERS, "tdstore.zarr": ORDERS},
        {"objects": ORDERS},
    ),
    "litdata": Library(
        store_litdata, open_litdata, {"litdata": ["chunks", "sequential"]}, {"litdata": ["chunks", "sequential"]}
    ),
    "webdataset": Library(
        store_webdataset, open_webdataset, {"tar": ["buffer", "sequential"]}, {"tar": ["buffer", "sequential"]}
    ),
    "zarr": Library(store_zarr, open_zarr, {"": ["full", "sequential"]}, {"": ["full", "sequential"]}, ragged=False),
    "datasets": Library(
        store_datasets, open_datasets, {"arrow": ["full", "sequential"]}, {"parquet": ["buffer", "sequential"]}
    ),
    "torchrl": Library(store_torchrl, open_torchrl, {"": ["full", "sequential"]}, {}, ragged=False),
}
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def store_all(td: TensorDict, folder: Path, ragged: bool) -> None:
    """Store a dataset below `folder/bucket`, once for each library and kind."""
    bucket = folder / "bucket"
    bucket.mkdir()
    for name, library in LIBRARIES.items():
        if name not in MISSING and (library.ragged or not ragged):
            library.store(td, bucket)


# -- the data -----------------------------------------------------------------------------
def frames(rows: int) -> TensorDict:
    """Frames of Atari games, 84 x 84 RGB, as the demo plays them."""
    from examples.atari_demo.play import play

    played = play(rows)[:rows]
    return TensorDict({"sample": played["obs"].contiguous(), "label": torch.arange(rows)}, [rows])


def text(rows: int) -> TensorDict:
    """Documents that torch ships, its Python files, as token ids: a number for each word, 2,048 of them at most."""
    import re

    ids: dict[str, int] = {}
    documents: list[torch.Tensor] = []
    for file in sorted(Path(torch.__file__).parent.rglob("*.py")):
        words = re.findall(r"\w+|[^\w\s]", file.read_text(errors="replace"))
        numbers = np.array([ids.setdefault(word, len(ids)) for word in words], np.int32)
        documents += [
            torch.from_numpy(part) for part in np.split(numbers, range(2048, len(numbers), 2048)) if len(part)
        ]
        if len(documents) >= rows:
            break
    nested = torch.nested.nested_tensor(documents[:rows], layout=torch.jagged)
    return TensorDict({"sample": nested, "label": torch.arange(nested.size(0))}, [nested.size(0)])
