"""Rows, masks and copies of TensorDicts on a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tdstore import TensorDict

GPU = torch.device("cuda", 0)


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


@pytest.mark.parametrize("index", [[7], [-9]], ids=str)
def test_rows_from_the_cpu_are_checked_before_they_go_to_the_device(index):
    td = made().exclude("s").to(GPU)
    with pytest.raises(IndexError, match="out of range"):
        td[torch.tensor(index)]
    with pytest.raises(IndexError, match="out of range"):
        td[torch.tensor(index)] = td[:1]
    assert bool((td.cpu() == made().exclude("s")).all())


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


def test_rows_on_the_device_are_not_waited_for():
    td = TensorDict({f"k{i}": torch.zeros(100, 4) for i in range(5)}, [100]).to(GPU)
    index = torch.arange(10, device=GPU)
    value = td[index]
    wide = td.reshape(10, 10)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the device raises
    try:
        td[index]
        td[index] = value
        wide[index, 3]
        td.clone(), td + 1, td.update_(td.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_move_waits_once_for_all_copies():
    td = made()
    moved = td.to(GPU)
    assert bool((moved.cpu() == td).all())
    assert moved.to("cpu", torch.float64)["a"].dtype is torch.float64
    assert td.to(GPU, torch.float32)["n", "b"].dtype is torch.float32
    pinned = td.pin_memory().to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((pinned.cpu() == td).all())


def test_copies_are_apart_also_where_entries_are_one_tensor():
    shared = torch.arange(4.0, device=GPU)
    td = TensorDict({"a": shared, "b": shared, "n": {"c": shared[::2], "t": shared.view(4, 1).expand(4, 3)}}, [])
    copy = td.clone()
    copy["a"].zero_()
    assert shared.tolist() == copy["b"].tolist() == [0, 1, 2, 3]
    assert copy["n", "c"].tolist() == [0, 2]
    assert copy["n", "t"].tolist() == td["n", "t"].tolist()
    trained = TensorDict({"a": shared.clone().requires_grad_(), "b": shared.clone().requires_grad_()}, [4])
    trained.clone()["a"].sum().backward()
    assert trained["a"].grad.tolist() == [1, 1, 1, 1]


def test_a_consolidated_move_keeps_one_buffer():
    td = made().exclude("s").consolidate()
    moved = td.to(GPU)
    assert bool((moved.cpu() == td).all())
    assert len({leaf.untyped_storage().data_ptr() for leaf in moved.values(True, True)}) == 1


def test_pinned_leaves_are_equal():
    td = made()
    pinned = td.pin_memory()
    assert all(leaf.is_pinned() for leaf in pinned.values(True, True))
    assert bool((pinned == td).all())
    assert bool((td.pin_memory(num_threads=2) == td).all())
