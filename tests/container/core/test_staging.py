"""Copies through reused pinned buffers: the order of events without a GPU, and the same data on one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import PersistentTensorDict, TensorDict
from tdstore.container.core import staging
from tdstore.container.core.staging import (
    Staging,
    fetch_in_blocks,
    fetch_together,
    is_plain,
    move,
    move_in_blocks,
    pieces_on_cpu,
)
from tdstore.tensordicts.persistent import device_reads
from tdstore.tensordicts.persistent.device_reads import DeviceReads
from tests.container.core.copy_streams import LateCopyStream

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
BLOCK = 4096
STORED = ["h5", "zarr", "objects"]


def leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randint(0, 255, (5 * BLOCK + 17,), dtype=torch.uint8),
        torch.randn(3, 7),
        torch.tensor(5),
        torch.zeros(0, 4),
        torch.randn(700, 3, dtype=torch.float64),
        torch.rand(33) > 0.5,
        torch.randn(100, dtype=torch.complex64),
        torch.randn(9, 9).to(torch.bfloat16),
    ]


def rows(n: int = 60) -> TensorDict:
    torch.manual_seed(1)
    data = {
        "frames": torch.randint(0, 255, (n, 30, 10), dtype=torch.uint8),
        "reward": torch.randn(n),
        "next": {"obs": torch.randn(n, 50, dtype=torch.float64), "done": torch.rand(n, 1) > 0.5},
        "text": [f"row {i}" for i in range(n)],
    }
    return TensorDict(data, [n])


def save(td: TensorDict, folder: Path, storage: str) -> Any:
    """Save in a format; "objects" are the immutable objects of a bucket, in a folder."""
    if storage == "objects":
        return td.save(f"file://{folder}/x")
    return td.save(folder / "x", storage=storage)


def same(one: Any, other: Any) -> None:
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        mine, theirs = one[key], other[key]
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.cpu(), theirs.cpu()), key
        else:
            assert mine == theirs, key


# -- the order of events -------------------------------------------------------------------
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_buffer_is_filled_again_after_its_copy(buffers: int) -> None:
    stream = LateCopyStream()
    sources = leaves()
    moved = move_in_blocks(sources, stream, block_bytes=BLOCK, buffers=buffers)
    for source, copy in zip(sources, moved, strict=True):
        assert copy.dtype == source.dtype
        assert torch.equal(copy, source)
    blocks = len(stream.copies)
    assert blocks > buffers + 2
    assert stream.waits == list(range(1, blocks - buffers + 1)), "each buffer waits for its own last copy"
    assert stream.allocated == [BLOCK] * buffers, "the memory is bounded"
    assert max(stream.sent) <= BLOCK
    assert stream.joined == 1


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_buffer_is_filled_again_after_it_was_written(buffers: int) -> None:
    stream = LateCopyStream()
    sources = leaves()
    fetched = fetch_in_blocks(sources, stream, block_bytes=BLOCK, buffers=buffers)
    for source, copy in zip(sources, fetched, strict=True):
        assert copy.dtype == source.dtype
        assert torch.equal(copy, source)
    assert len(stream.copies) > buffers + 2
    assert stream.allocated == [BLOCK] * buffers
    assert stream.joined == 1
    assert stream.ahead == buffers, "the next blocks are copied while one is written"


def test_small_leaves_are_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        *(torch.randn(n, 3) for n in (4, 7, 1)),
        torch.tensor(5),
        torch.tensor([True, False]),
        torch.randn(9, 9).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e5m2),
        torch.randn(6, dtype=torch.complex64),
        torch.full((3,), 65535, dtype=torch.uint16),
        torch.tensor(7),
    ]
    flats: list[torch.Tensor] = []

    def to_cpu(flat: torch.Tensor) -> torch.Tensor:
        flats.append(flat)
        return flat.clone()

    for limit, transfers in ((1 << 20, 7), (40, 9)):
        monkeypatch.setattr(staging, "BLOCK_BYTES", limit)
        flats.clear()
        fetched = fetch_together(sources, to_cpu)
        assert len(flats) == transfers
        for source, copy in zip(sources, fetched, strict=True):
            assert (copy.dtype, copy.shape) == (source.dtype, source.shape)
            assert torch.equal(copy.contiguous().view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
            assert copy.untyped_storage().nbytes() == source.nbytes, "memory of its own"


def test_pieces_of_the_cpu_are_not_copied() -> None:
    piece, trained = torch.zeros(3), torch.ones(2, requires_grad=True)
    first, second = pieces_on_cpu([piece, trained])
    assert first is piece
    assert not second.requires_grad
    assert second.data_ptr() == trained.data_ptr()


def test_the_copy_stream_shows_a_buffer_that_is_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could not fail otherwise."""
    stream = LateCopyStream()

    class Careless(Staging):
        def send(self, block: Any, pairs: Any) -> Any:
            event = super().send(block, pairs)
            self._events = [None] * len(self._events)
            return event

    monkeypatch.setattr(staging, "Staging", Careless)
    source = torch.arange(10 * BLOCK) % 251
    (moved,) = move_in_blocks([source.to(torch.uint8)], stream, block_bytes=BLOCK)
    assert not torch.equal(moved, source.to(torch.uint8))


def test_memory_is_no_more_than_there_is_to_copy() -> None:
    stream = LateCopyStream()
    move_in_blocks([torch.zeros(100, dtype=torch.uint8)], stream, block_bytes=BLOCK)
    assert stream.allocated == [128]


def test_a_block_that_is_larger_than_the_buffers() -> None:
    stream = LateCopyStream()
    made = []
    with Staging(stream, block_bytes=64) as copy:
        for n in (4, 100, 7):
            target = copy.target((n,), torch.int64)
            block = copy.block([((n,), torch.int64)])
            block.parts[0].copy_(torch.arange(n))
            copy.send(block, [(target, block.parts[0])])
            made.append((n, target))
    assert all(torch.equal(target, torch.arange(n)) for n, target in made)
    assert stream.allocated == [64, 832]


def test_copies_are_joined_after_an_error() -> None:
    stream = LateCopyStream()
    with pytest.raises(ZeroDivisionError), Staging(stream, block_bytes=64) as copy:
        target = copy.target((2,), torch.int64)
        block = copy.block([((2,), torch.int64)])
        block.parts[0].fill_(3)
        copy.send(block, [(target, block.parts[0])])
        raise ZeroDivisionError
    assert stream.joined == 1
    assert target.tolist() == [3, 3]


def test_what_is_one_piece_of_memory() -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    assert is_plain(large)
    assert is_plain(large[1:])
    assert is_plain(torch.nn.Parameter(large.float()).detach())
    assert not is_plain(torch.nn.Parameter(large.float())), "its copy has a gradient"
    assert not is_plain(torch.zeros(2048, 1024, dtype=torch.uint8).t())
    assert not is_plain(torch.zeros(1 << 20, dtype=torch.complex64).conj())
    assert not is_plain(torch.zeros(1 << 20).to_sparse())


def leaves_of_all_kinds() -> list[torch.Tensor]:
    """Small ones at 0 to 4, large ones at 5 and 6, and three that torch has to copy by itself."""
    return [
        *(torch.full((3, at), float(at)) for at in range(1, 6)),
        torch.randn(1 << 20),
        torch.randn(1 << 20).double(),
        torch.zeros(3, dtype=torch.complex128),
        torch.zeros(3, 2).t(),
        torch.nn.Parameter(torch.zeros(3)),
    ]


def test_what_goes_to_a_device_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "cuda_copy_stream", lambda *_, **__: LateCopyStream())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    leaves = leaves_of_all_kinds()
    sent = staging._sent(leaves, torch.device("cuda", 0), False)
    assert sorted(sent) == [5, 6]
    assert all(torch.equal(copy, leaves[at]) for at, copy in sent.items())
    assert not staging._sent(leaves[:6], torch.device("cuda", 0), False), "4 MiB together do not pay"


def test_what_is_fetched_in_blocks_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "cuda_copy_stream", lambda *_, **__: LateCopyStream())
    monkeypatch.setattr(staging, "_pinned_copy", lambda flat: flat.clone())
    monkeypatch.setattr(staging, "FEW", 4)
    leaves, cpu = leaves_of_all_kinds(), torch.device("cpu")
    fetched = staging._fetched(leaves, cpu)
    assert sorted(fetched) == [0, 1, 2, 3, 4, 5, 6]
    assert all(torch.equal(copy, leaves[at]) and copy is not leaves[at] for at, copy in fetched.items())
    assert sorted(staging._fetched([*leaves[:3], leaves[5]], cpu)) == [3], "few small ones are copied one by one"
    assert not staging._fetched(leaves[:3], cpu)


def test_what_is_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(*_: Any) -> Any:
        raise AssertionError("a move that moves nothing waits for the device")

    monkeypatch.setattr(torch.cuda, "current_stream", waiting)
    leaves = [torch.zeros(3), torch.zeros(4)]
    here = torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "device", here, raising=False)
    assert all(a is b for a, b in zip(move(leaves, here), leaves, strict=True))


def test_other_devices_are_left_to_torch() -> None:
    large, small = torch.zeros(1 << 20), torch.zeros(3)
    moved = move([large, small], torch.device("meta"))
    assert [leaf.device.type for leaf in moved] == ["meta", "meta"]
    kept = move([large, small], torch.device("cpu"))
    assert kept[0] is large
    assert kept[1] is small


# -- stored leaves -------------------------------------------------------------------------
INDICES: list[tuple[str, Callable[[Any], Any]]] = [
    ("all", lambda td: td),
    ("slice", lambda td: td[7:53]),
    ("rows", lambda td: td[torch.tensor([5, 3, 59, 0, 3, 17, 42])]),
    ("many rows", lambda td: td[torch.arange(59, -1, -1)]),
    ("step", lambda td: td[::3]),
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize(("name", "index"), INDICES, ids=[name for name, _ in INDICES])
def test_stored_leaves_in_blocks(storage: str, name: str, index: Any, threads: int, tmp_path: Path) -> None:
    td = rows().exclude("text")
    stored = save(td, tmp_path, storage)
    assert isinstance(stored, PersistentTensorDict)
    window = index(stored)
    wanted = window._leaves()
    plan, stream = DeviceReads(window._handle, wanted, BLOCK), LateCopyStream()
    made = plan.read(stream, threads)
    assert sorted(made) == plan.staged
    assert plan.staged
    for at, tensor in made.items():
        path, _ = wanted[at]
        assert torch.equal(tensor, index(td)[path]), path
    if name == "all":
        assert len(made) == len(wanted)
        assert len(stream.copies) > 3, "several blocks"
    assert stream.joined == 1
    largest = max(stream.sent, default=0)
    assert sum(stream.allocated) <= (threads + 1) * max(BLOCK, largest + 64 * len(wanted))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_read_that_fails_joins_the_copies(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = rows().exclude("text").save(tmp_path / "x.h5")
    plan, stream = DeviceReads(stored._handle, stored._leaves(), BLOCK), LateCopyStream()
    read, calls = stored._handle.store.read, []

    def failing(reads: Any) -> Any:
        calls.append(reads)
        if len(calls) == 4:
            raise OSError("gone")
        return read(reads)

    monkeypatch.setattr(stored._handle.store, "read", failing)
    with pytest.raises(OSError, match="gone"):
        plan.read(stream, threads)
    assert stream.joined == 1


def test_blocks_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = rows().exclude("text").save(tmp_path / "x.h5")
    plan, read, together = DeviceReads(stored._handle, stored._leaves(), BLOCK), stored._handle.store.read, []
    barrier = threading.Barrier(3)

    def meeting(reads: Any) -> Any:
        if len(together) < 3:
            together.append(reads)
            barrier.wait(30)  # broken unless three reads are under way
        return read(reads)

    monkeypatch.setattr(stored._handle.store, "read", meeting)
    assert len(plan.read(LateCopyStream(), 3)) == 4


READS: dict[str, Callable[[Any], Any]] = {
    "to_tensordict": lambda td: td.to_tensordict(),
    "clone": lambda td: td.clone(),
    "read": lambda td: td.read(),
    "rows": lambda td: td.read(torch.arange(3, 50)),
    "slice": lambda td: td[3:50].to_tensordict(),
    "key": lambda td: td["frames"],
}


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("keys", [["frames"], ["frames", "next"], ["frames", "text"]], ids=lambda keys: keys[-1])
@pytest.mark.parametrize("name", READS)
def test_each_read_for_a_gpu_goes_through_blocks(
    name: str, keys: list[str], storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_streams: list[LateCopyStream] = []

    def stream(device: torch.device, *, non_blocking: bool) -> LateCopyStream:
        copy_streams.append(LateCopyStream())
        return copy_streams[-1]

    monkeypatch.setattr(device_reads, "cuda_copy_stream", stream)
    monkeypatch.setattr(device_reads, "STAGED_TOTAL", 1)
    monkeypatch.setattr(device_reads, "BLOCK_BYTES", BLOCK)
    td = rows().select(*keys)
    found = READS[name](save(td, tmp_path, storage).to(torch.device("cuda", 0)))
    assert len(copy_streams) == 1
    assert len(copy_streams[0].copies) > (0 if storage == "zarr" else 1), "blocks; of zarr there is one chunk"
    expected = READS[name](td)
    if name == "key":
        assert torch.equal(found, expected)
    else:
        assert found.device == torch.device("cuda", 0)
        assert torch.equal(found["frames"], expected["frames"])


def test_small_reads_are_left_alone(tmp_path: Path) -> None:
    stored = rows().exclude("text").save(tmp_path / "x.h5")
    assert not DeviceReads(stored._handle, stored._leaves()).pays


# -- on a GPU ------------------------------------------------------------------------------
@GPU
@pytest.mark.parametrize("non_blocking", [False, True])
def test_large_leaves_reach_the_gpu(non_blocking: bool) -> None:
    td = TensorDict({"a": torch.randn(40 << 20), "n": {"b": torch.randint(0, 255, (9 << 20,), dtype=torch.uint8)}}, [])
    moved = td.to("cuda", non_blocking=non_blocking)
    total = moved["a"].sum()  # on the current stream, which waits for the copies
    same(moved, td)
    assert torch.allclose(total.cpu(), td["a"].sum(), rtol=1e-3, atol=1e-1)


@GPU
def test_large_leaves_come_back() -> None:
    td = TensorDict({"a": torch.randn(40 << 20), "n": {"b": torch.randint(0, 255, (9 << 20,), dtype=torch.uint8)}}, [])
    on = td.to("cuda")
    on["a"].mul_(2)  # on the current stream, for which the copies wait
    back = on.cpu()
    assert not back["a"].is_pinned()
    assert torch.equal(back["a"], td["a"] * 2)
    assert torch.equal(back["n", "b"], td["n", "b"])
    assert on.to("cpu", non_blocking=True)["a"].is_pinned(), "as torch does"
    torch.cuda.synchronize()
    trained = TensorDict({"a": torch.ones(1 << 20, device="cuda", requires_grad=True)}, []).cpu()
    assert trained["a"].grad_fn is not None
    assert torch.equal(TensorDict({"a": on["a"].reshape(1024, -1).t()}, []).cpu()["a"], back["a"].reshape(1024, -1).t())


@GPU
def test_small_leaves_come_back() -> None:
    td = TensorDict({f"a{i}": leaf for i, leaf in enumerate(leaves()) if leaf.nbytes < 1 << 20}, [])
    td["t"] = torch.randn(6, 4).t()
    td["half"] = torch.randn(5).to(torch.float8_e5m2).view(torch.uint8)
    on = td.to("cuda")
    same(on.cpu(), td)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        later = TensorDict({key: leaf + 1 for key, leaf in on.items() if leaf.dtype.is_floating_point}, []).cpu()
    same(later, TensorDict({key: leaf + 1 for key, leaf in td.items() if leaf.dtype.is_floating_point}, []))


@GPU
@pytest.mark.parametrize("storage", [*STORED, "memmap", "tdz"])
def test_data_on_the_gpu_is_saved(storage: str, tmp_path: Path) -> None:
    td = rows(2000)
    td["large"] = torch.arange(2000 * 5000, dtype=torch.int32).reshape(2000, -1)
    saved = save(td.to("cuda"), tmp_path, storage)
    same(saved.read(), td)


@GPU
def test_memory_that_is_freed_early_is_not_overwritten() -> None:
    source = TensorDict({"a": torch.full((32 << 20,), 3, dtype=torch.uint8)}, [])
    kept = []
    for _ in range(20):
        moved = source.to("cuda", non_blocking=True)
        kept.append((moved["a"] == 3).all())
        del moved
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda").fill_(9)
    assert all(bool(flag) for flag in kept)


@GPU
def test_a_copy_that_waits_on_another_stream() -> None:
    side = torch.cuda.Stream()
    source = TensorDict({"a": torch.arange(8 << 20)}, [])
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        moved = source.to("cuda", non_blocking=True)
        doubled = moved["a"] * 2
    side.synchronize()
    assert torch.equal(doubled.cpu(), source["a"] * 2)


@GPU
@pytest.mark.parametrize("storage", [*STORED, "memmap", "tdz"])
@pytest.mark.parametrize("block_bytes", [BLOCK, 1 << 20])
def test_stored_data_on_the_gpu(
    storage: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reads, "STAGED_TOTAL", 1)
    monkeypatch.setattr(device_reads, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(staging, "STAGED_BYTES", 1)
    monkeypatch.setattr(staging, "STAGED_TOTAL", 1)
    td = rows()
    stored = save(td, tmp_path, storage)
    on = stored.to("cuda")
    same(on, td)
    same(on[[3, 1, 1]], td[[3, 1, 1]])
    same(on[5:50], td[5:50])
    whole = on.to_tensordict() if storage != "memmap" else on
    assert whole["frames"].is_cuda
    assert whole["next", "obs"].is_cuda
    same(whole, td)


@GPU
def test_a_consolidated_one(tmp_path: Path) -> None:
    td = rows().exclude("text")
    same(td.consolidate().to("cuda"), td)
    same(td.consolidate(tmp_path / "x").to("cuda", non_blocking=True), td)


@GPU
def test_pinned_memory_is_bounded() -> None:
    large = TensorDict({"a": torch.zeros(256 << 20, dtype=torch.uint8)}, [])
    torch._C._host_emptyCache() if hasattr(torch._C, "_host_emptyCache") else None
    torch.cuda.reset_peak_host_memory_stats()
    large.to("cuda")
    peak = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    assert peak <= staging.BUFFERS * staging.BLOCK_BYTES + (1 << 20)
