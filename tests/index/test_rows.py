"""Row helpers: gather and scatter for every dtype and layout, and putting rows in order."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdstore import TensorDict
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.index.rows import put, put_rows, threads_pay_from
from tdstore.index.selection import Selection, gather, last_wins, runs, scatter, sorted_unique

ROWS = st.lists(st.integers(0, 30), max_size=40).map(lambda r: torch.tensor(r, dtype=torch.int64))


@given(ROWS)
@settings(max_examples=100, deadline=None)
def test_last_wins(rows):
    kept, positions = last_wins(rows)
    last = {row: i for i, row in enumerate(rows.tolist())}
    if positions is None:
        assert kept is rows and len(last) == len(rows)
    else:
        assert dict(zip(kept.tolist(), positions.tolist(), strict=True)) == last
        assert len(last) < len(rows)


@given(ROWS)
@settings(max_examples=100, deadline=None)
def test_sorted_unique(rows):
    unique, inverse = sorted_unique(rows)
    assert unique.tolist() == sorted(set(rows.tolist()))
    assert torch.equal(rows, unique if inverse is None else unique[inverse])
    assert (inverse is None) == (rows.tolist() == unique.tolist())


@given(st.sets(st.integers(0, 60)), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_runs(rows, gap):
    found = runs(torch.tensor(sorted(rows), dtype=torch.int64), gap)
    covered = [i for start, stop in found for i in range(start, stop)]
    assert covered == sorted(set(covered)) and rows <= set(covered)
    assert all(start in rows and stop - 1 in rows for start, stop in found)
    assert all(b - a > gap for (_, a), (b, _) in zip(found, found[1:]))
    if gap == 0:
        assert set(covered) == rows


def leaf_of(shape, dtype):
    bits = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64) % 251
    if dtype is torch.bool:
        return (bits % 2 == 0).reshape(shape)
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def same(a, b):
    # By bits: NaN patterns count too.
    assert a.shape == b.shape and a.dtype == b.dtype
    assert (
        a.contiguous().reshape(-1).view(torch.uint8).tolist() == b.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


BITS = {1: torch.uint8, 2: torch.int16, 8: torch.int64}
LEAVES = [(9,), (9, 3), (9, 0), (9, 4, 5), (9, 120, 90)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", NAME_TO_DTYPE)
def test_gather_and_scatter_every_dtype(name):
    for shape in LEAVES[:4]:
        leaf = leaf_of(shape, NAME_TO_DTYPE[name])
        rows = torch.tensor([8, 0, 0, 3, 8])
        want = torch.stack([leaf[i] for i in rows.tolist()])
        same(gather(leaf, (rows,)), want)
        out = torch.empty_like(want)
        assert gather(leaf, (rows,), out) is out
        same(out, want)
        same(gather(leaf, (slice(2, 8, 3),)), leaf[2:8:3])
        target = leaf.clone()
        scatter(target, (torch.tensor([1, 5, 1, 2, 7]),), want)
        for row, position in ((5, 1), (1, 2), (2, 3), (7, 4), (0, None), (8, None)):
            same(target[row], leaf[row] if position is None else want[position])


@pytest.mark.parametrize("shape", LEAVES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "strided", "transposed"])
def test_gather_any_strides(shape, layout):
    leaf = torch.arange(math.prod(shape)).reshape(shape)
    if layout == "strided":
        leaf = torch.repeat_interleave(leaf, 2, 0)[::2]
    elif layout == "transposed":
        leaf = leaf.movedim(0, -1).contiguous().movedim(-1, 0)
    rows = torch.tensor([8, 1, 1, 0])
    columns = torch.tensor([2, 0, 2])
    cases = [(rows,), (), (slice(1, 8, 2),), (torch.zeros(0, dtype=torch.int64),)]
    if len(shape) > 1 and shape[1]:
        cases += [(rows, slice(0, 3, 1)), (rows, slice(0, 3, 2)), (slice(2, 9, 1), columns), (slice(0, 9, 1), columns)]
    for index in cases:
        want = leaf[index]
        got = gather(leaf, index)
        assert torch.equal(got, want) and got.is_contiguous()
        assert not got.numel() or got.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
        for out in (torch.empty_like(want), torch.empty((*want.shape, 2), dtype=want.dtype)[..., 0]):
            assert gather(leaf, index, out) is out
            assert torch.equal(out, want)


def test_gather_keeps_gradients():
    leaf = torch.rand(2000, 40, requires_grad=True)
    gather(leaf, (torch.arange(1999, -1, -1),)).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2000, 40))
    out = torch.empty(2, 40)
    assert not gather(leaf, (torch.tensor([1, 0]),), out).requires_grad


def test_gather_refuses_a_buffer_of_another_shape_or_dtype():
    leaf = torch.zeros(4, 3)
    for index in ((torch.tensor([0, 1]),), (slice(0, 2, 1),)):
        for out in (torch.zeros(3, 3), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3)):
            with pytest.raises(ValueError, match=r"but what is read has \[2, 3\] and torch.float32"):
                gather(leaf, index, out)


FLOAT8 = getattr(torch, "float8_e8m0fnu", torch.float8_e5m2)  # torch 2.6 has no e8m0fnu


@pytest.mark.parametrize("dtype", [torch.uint16, FLOAT8, torch.bfloat16, torch.complex64], ids=str)
def test_plans_work_for_every_dtype(dtype):
    leaf = leaf_of((6, 5), dtype)
    for index in (([4, 0, 4], [1, 2, 1]), [3, 3, 1], torch.tensor([[1, 0], [0, 5]])):
        selected = torch.arange(30).reshape(6, 5)[index]
        sel = Selection.full((6, 5))[index]
        plan = sel.read_plan()
        want = torch.stack([leaf.flatten()[i] for i in selected.flatten().tolist()]).reshape(selected.shape)
        same(plan.finish(gather(leaf, plan.index)), want)
        target = torch.zeros_like(leaf)
        for at, part in sel.write_plan().pieces(want):
            scatter(target, at, part)
        chosen = torch.zeros(30, dtype=torch.bool)
        chosen[selected.flatten()] = True
        same(target, torch.where(chosen.reshape(6, 5), leaf.view(BITS[leaf.itemsize]), 0).view(dtype))


def test_gather_refuses_a_buffer_that_only_has_the_same_bits():
    leaf = torch.zeros(4, dtype=torch.uint16)
    with pytest.raises(ValueError, match=r"dtype torch.int16, but what is read has .* torch.uint16"):
        gather(leaf, (torch.tensor([0, 1]),), torch.zeros(2, dtype=torch.int16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.uint16, torch.complex64])
@pytest.mark.parametrize("row", [(), (1,), (3, 17), (84, 84)])
def test_of_rows_written_twice_the_last_one_wins(row, dtype):
    for count in (3, 300, 5000 if len(row) < 2 else 400):
        rows = torch.randint(0, 50, (count,))
        value = torch.randint(0, 200, (count, *row)).to(torch.float32).to(dtype)
        leaf = torch.zeros(50, *row, dtype=dtype)
        want = leaf.clone()
        for i, at in enumerate(rows.tolist()):
            want[at] = value[i]
        put_rows(leaf, rows, value)
        assert torch.equal(leaf.view(torch.uint8), want.view(torch.uint8))


def test_rows_are_written_to_leaves_of_every_kind():
    rows = torch.tensor([3, 0])
    wide = torch.ones(2, 40, dtype=torch.float64)
    turned = torch.zeros(40, 5).T  # no row lies in one piece
    put_rows(turned, rows, wide)
    assert turned[[0, 3]].eq(1).all() and turned.sum() == 80
    value = torch.ones(2, 40, requires_grad=True)
    put_rows(leaf := torch.zeros(5, 40), rows, value)
    leaf.sum().backward()
    assert value.grad is not None and value.grad.eq(1).all()
    with pytest.raises(IndexError):
        put(torch.zeros(5, 40), (torch.tensor([1, 9]),), torch.ones(2, 40))
    mine = torch.arange(50.0)[:, None].expand(50, 400).contiguous()
    put_rows(mine, torch.tensor([1, 2, 3]), mine[:3].clone())
    assert mine[:5, 0].tolist() == [0, 0, 1, 2, 4]


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("row", [3, 700, 21_168])
def test_rows_are_the_same_by_one_thread_and_by_many(threads, row):
    leaf = torch.randint(0, 255, (300, row), dtype=torch.uint8)
    rows = torch.randint(0, 300, (500,))
    want = torch.from_numpy(leaf.numpy()[rows.numpy()])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(gather(leaf, (rows,)), want)
        assert torch.equal(gather(leaf, (rows,), torch.empty_like(want)), want)
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(gather, leaf, (rows,)).result(), want)
            assert (pool.submit(threads_pay_from).result() > threads_pay_from()) == (threads >= 8)
        assert torch.equal(TensorDict({"a": leaf}, [300])[rows]["a"], want)
        with pytest.raises(IndexError, match="index 300 is out of range"):
            TensorDict({"a": leaf}, [300])[torch.tensor([300] * 100)]
    finally:
        torch.set_num_threads(before)


def test_terms_after_a_mask_of_several_dimensions():
    leaf, mask = torch.arange(36).reshape(3, 3, 4), torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    td = TensorDict({"a": leaf.clone()}, [3, 3, 4])
    rows = leaf.numpy()[mask.numpy()]  # its own, since torch 2.6 misplaces these terms
    assert td[mask, 1]["a"].tolist() == rows[:, 1].tolist()
    assert td[mask, None, 2:]["a"].tolist() == rows[:, None, 2:].tolist()
    assert td[mask, ..., 1].batch_size == (4,)
    td[mask, 1] = TensorDict({"a": torch.zeros(4, dtype=torch.int64)}, [4])
    want = leaf.numpy().copy()
    want[mask.numpy(), 1] = 0
    assert td["a"].tolist() == want.tolist()
    td[mask, :2] = 7
    want[mask.numpy(), :2] = 7
    assert td["a"].tolist() == want.tolist()
