"""Rows, masks and copies of TensorDicts on a GPU."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.index.rows import at_rows, put_rows, rows_on

GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: torch sees no CUDA device here")


def made() -> TensorDict:
    torch.manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(6, 3),
            "n": {"b": torch.arange(6), "u": torch.arange(6).to(torch.uint16)},
            "s": ["p", "q", "r", "s", "t", "u"],
            "z": torch.arange(12, dtype=torch.bfloat16).reshape(6, 2),
        },
        [6],
    )


ROWS = ([2, 0, 5], [-1, 1], [], [4, 4, 4])


@needs_gpu
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_rows_are_those_of_the_cpu(rows, dtype, where):
    td = made()
    index = torch.tensor(rows, dtype=dtype)
    got = td.to(GPU)[index.to(where)]
    assert got.device == GPU
    assert got["a"].device == got["n", "b"].device == GPU
    assert bool((got.cpu() == td[index.long()]).all())
    assert got["s"] == td[index.long()]["s"]


@needs_gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_masks_are_those_of_the_cpu(where):
    td = made()
    mask = torch.tensor([True, False, True, False, False, True])
    on = td.to(GPU)
    assert bool((on[mask.to(where)].cpu() == td[mask]).all())
    with pytest.raises(IndexError, match="mask"):
        on[mask[:4].to(where)]
    numbers, cpu = on.select("a", "z"), td.select("a", "z")
    numbers[mask.to(where)] = 0
    cpu[mask] = 0
    assert bool((numbers.cpu() == cpu).all())


@needs_gpu
@pytest.mark.parametrize("rows", [[2, 0, 5], [-1, 1], []], ids=str)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_rows_are_written_as_on_the_cpu(rows, where):
    td = made().exclude("s")
    index = torch.tensor(rows, dtype=torch.int64)
    value = td[index].apply(lambda t: (t.float() + 1).to(t.dtype))
    on = td.to(GPU)
    on[index.to(where)] = value.to(GPU)
    td[index] = value
    assert bool((on.cpu() == td).all())


@needs_gpu
@pytest.mark.parametrize("count", [3, 5000])
def test_of_repeated_rows_from_the_cpu_the_last_stays(count):
    rows = torch.randint(0, 6, (count,), generator=torch.Generator().manual_seed(count))
    td = TensorDict({"a": torch.zeros(6, 2), "b": torch.zeros(6)}, [6]).to(GPU)
    value = TensorDict({"a": torch.arange(2.0 * count).reshape(count, 2), "b": torch.arange(float(count))}, [count])
    td[rows] = value.to(GPU)
    want = TensorDict({"a": torch.zeros(6, 2), "b": torch.zeros(6)}, [6])
    for at, row in enumerate(rows.tolist()):
        want[row] = value[at]
    assert bool((td.cpu() == want).all())


@needs_gpu
@pytest.mark.parametrize("index", [[7], [-9]], ids=str)
def test_rows_from_the_cpu_are_checked_before_they_go_to_the_device(index):
    td = made().exclude("s").to(GPU)
    with pytest.raises(IndexError, match="out of range"):
        td[torch.tensor(index)]
    with pytest.raises(IndexError, match="out of range"):
        td[torch.tensor(index)] = td[:1]
    assert bool((td.cpu() == made().exclude("s")).all())


@needs_gpu
def test_leaves_on_both_devices_take_rows_of_either():
    td = TensorDict({"cpu": torch.arange(4), "gpu": torch.arange(4, device=GPU)}, [4])
    other = TensorDict({"gpu": torch.arange(4, device=GPU), "cpu": torch.arange(4)}, [4])
    for container in (td, other):
        for index in (torch.tensor([3, 1]), torch.tensor([3, 1], device=GPU)):
            got = container[index]
            assert got["cpu"].tolist() == got["gpu"].tolist() == [3, 1]
            assert (got["cpu"].device.type, got["gpu"].device) == ("cpu", GPU)
            container[index] = container[index].apply(lambda t: t)
            assert container["cpu"].tolist() == container["gpu"].tolist() == [0, 1, 2, 3]


@needs_gpu
def test_rows_on_the_device_are_not_waited_for():
    td = TensorDict({f"k{i}": torch.zeros(100, 4) for i in range(5)}, [100]).to(GPU)
    index = torch.arange(10, device=GPU)
    value = td[index]
    wide = td.reshape(10, 10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the device raises
    try:
        td[index]
        td[index] = value
        wide[index, 3]
        td.clone(), td + 1, td.update_(td.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_move_waits_once_for_all_copies():
    td = made()
    moved = td.to(GPU)
    assert bool((moved.cpu() == td).all())
    assert moved.to("cpu", torch.float64)["a"].dtype is torch.float64
    assert td.to(GPU, torch.float32)["n", "b"].dtype is torch.float32
    pinned = td.pin_memory().to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((pinned.cpu() == td).all())


# What the CPU can show: `meta` stands for a device that is not the one of the rows.


def test_rows_go_to_a_device_once_and_checked():
    there: dict[torch.device, torch.Tensor] = {}
    meta = torch.device("meta")
    first = rows_on(meta, torch.tensor([1, -1]), 3, there)
    assert first.device == meta
    assert rows_on(meta, torch.tensor([1, -1]), 3, there) is first
    with pytest.raises(IndexError, match="index 3 is out of range for dimension 0 with size 3"):
        rows_on(meta, torch.tensor([3]), 3, {})


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_rows_of_every_dtype_may_be_negative(dtype):
    leaf = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    bits = at_rows(leaf, torch.tensor([-1, 0])).contiguous().view(torch.uint8)
    assert torch.equal(bits, leaf.view(torch.uint8).reshape(3, -1)[[2, 0]].reshape(bits.shape))


def test_rows_that_are_written_on_the_cpu_need_no_other_device():
    leaf = torch.zeros(3)
    put_rows(leaf, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), {})
    assert leaf.tolist() == [2.0, 0.0, 3.0]
    assert tdstore.TensorDict({"a": leaf}, [3])[torch.tensor([2])]["a"].tolist() == [3.0]
