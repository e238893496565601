"""Selections, plans and row helpers against torch's own indexing."""

from __future__ import annotations

import math
import random
import tracemalloc
import warnings

import numpy as np
import pytest
import torch

from tdstore.index.selection import (
    Selection,
    as_rows,
    gather,
    index_shape,
    scatter,
)


# -- a reference store ----------------------------------------------------------------------
def check_store_index(index, shape):
    assert len(index) <= len(shape)
    tensors = 0
    for term, size in zip(index, shape):
        if isinstance(term, slice):
            assert type(term.start) is int and type(term.stop) is int and type(term.step) is int
            assert 0 <= term.start <= term.stop <= size and term.step >= 1
        else:
            tensors += 1
            assert term.dtype is torch.int64 and term.ndim == 1 and term.device.type == "cpu"
            assert not len(term) or (0 <= int(term.min()) and int(term.max()) < size)
    assert tensors <= 1


def positions_of(shape, feature):
    leaf = torch.arange(math.prod(shape) * math.prod(feature))
    return leaf.reshape((*shape, *feature))


def check_read(sel, leaf, want):
    """`want` is what torch's own indexing gave."""
    assert sel.shape == want.shape[: len(sel.shape)]
    plan = sel.read_plan()
    check_store_index(plan.index, sel.src_shape)
    got = gather(leaf, plan.index)
    done = plan.finish(got)
    assert torch.equal(done, want) and done.dtype == want.dtype
    if plan.exact:
        assert done is got
    out = torch.full_like(want, -1)
    view = plan.into(out)
    if view is not None:
        assert view.shape == got.shape
        gather(leaf, plan.index, view)
        assert torch.equal(out, want)
    else:
        assert not plan.exact


def check_write(sel, leaf, selected):
    """`selected` is the linear position of each selected element (torch's indexing of an arange)."""
    value = torch.arange(selected.numel()) + 10**6
    want = leaf.clone().reshape(-1)
    for at, v in zip(selected.flatten().tolist(), value.tolist()):
        want[at] = v  # the last one wins
    got = leaf.clone()
    touched = torch.zeros(leaf.shape, dtype=torch.int64)
    plan = sel.write_plan()
    pieces = list(plan.pieces(value.reshape(selected.shape)))
    assert [id(i) for i, _ in pieces] == [id(i) for i in plan.indices]
    for index, part in pieces:
        check_store_index(index, sel.src_shape)
        assert part.shape == touched[index].shape
        touched[index] += 1
        scatter(got, index, part)
    assert torch.equal(got.reshape(-1), want)
    chosen = torch.zeros(leaf.numel(), dtype=torch.int64)
    chosen[selected.flatten()] = 1
    assert torch.equal(touched.reshape(-1), chosen), "an unselected element was rewritten, or one twice"


def torch_index(tensor, index):
    """Our index for torch: nested lists as arrays (numpy's meaning), numpy's forms as tensors."""

    def term(t):
        if isinstance(t, list):
            t = [part.tolist() if isinstance(part, torch.Tensor) else part for part in t]
            return torch.as_tensor(np.array(t, dtype=bool if t and np.array(t).dtype == bool else np.int64))
        if isinstance(t, np.ndarray):
            return torch.from_numpy(t.astype(bool if t.dtype == bool else np.int64))
        if isinstance(t, np.bool_):
            return bool(t)
        if isinstance(t, tuple):
            return torch.tensor(t)
        if isinstance(t, range):
            return torch.tensor(list(t), dtype=torch.int64)
        if isinstance(t, torch.Tensor) and t.dtype not in (torch.bool, torch.int64):
            return t.long()
        return t

    return tensor[tuple(term(t) for t in index) if isinstance(index, tuple) else term(index)]


def check_chain(shape, indices, feature=(2,)):
    leaf = positions_of(shape, feature)
    linear = positions_of(shape, ())
    sel, selected = Selection.full(shape), linear
    for index in indices:
        sel = sel[index]
        selected = torch_index(selected, index)
        assert sel.shape == selected.shape
    want = leaf.reshape((math.prod(shape), *feature))[selected.flatten()].reshape((*selected.shape, *feature))
    check_read(sel, leaf, want)
    check_write(sel, linear, selected)
    return sel


# -- every kind of index by name --------------------------------------------------------------
SHAPE = (5, 4, 3)
MASK2 = torch.tensor([[(i * 7 + j * 3) % 4 == 0 for j in range(4)] for i in range(5)])
KINDS = {
    "int": 2,
    "negative int": -1,
    "numpy int": np.int64(3),
    "numpy uint8 scalar": np.uint8(3),
    "0-d tensor": torch.tensor(2),
    "0-d int32 tensor": torch.tensor(-2, dtype=torch.int32),
    "0-d array": np.array(2),
    "slice": slice(1, 4),
    "slice step": slice(None, None, 2),
    "slice negative": slice(-3, -1),
    "slice beyond": slice(2, 100),
    "slice backwards": slice(4, 1),
    "slice of numpy ints": slice(np.int64(1), np.int64(3)),
    "slice of tensors": slice(torch.tensor(1), torch.tensor(3)),
    "none": None,
    "ellipsis": ...,
    "true": True,
    "false": False,
    "numpy true": np.True_,
    "0-d bool tensor": torch.tensor(True),
    "0-d false tensor": torch.tensor(False),
    "empty tuple": (),
    "list": [3, 0, 3],
    "list of tensors": [torch.tensor(3), torch.tensor(-1)],
    "list negative": [-1, 0],
    "list of bools": [True, False, True, True, False],
    "list empty": [],
    "nested list": [[0, 1], [4, 3]],
    "range": range(1, 4),
    "range down": range(4, 0, -2),
    "range negative": range(-3, 0),
    "range across": range(-1, 2),
    "range empty": range(0),
    "array": np.array([4, 2]),
    "array int16": np.array([4, -2], dtype=np.int16),
    "array reversed": np.arange(5)[::-1],
    "array 2d": np.array([[0], [2]]),
    "array bool": np.array([False, True, True, False, True]),
    "tensor": torch.tensor([1, 1, 0]),
    "tensor int32": torch.tensor([1, -1], dtype=torch.int32),
    "tensor empty": torch.zeros(0, dtype=torch.int64),
    "tensor 2d": torch.tensor([[1, 2, 3], [4, 0, 1]]),
    "tensor 3d": torch.arange(4).reshape(2, 1, 2),
    "tensor 2d empty": torch.zeros((0, 3), dtype=torch.int64),
    "mask": torch.tensor([True, False, False, True, True]),
    "mask none": torch.zeros(5, dtype=torch.bool),
    "mask 2d": MASK2,
    "mask 3d": torch.arange(60).reshape(SHAPE) % 7 == 0,
    "mask 3d none": torch.zeros(SHAPE, dtype=torch.bool),
    "int int int": (1, -1, 2),
    "int slice": (1, slice(1, 3)),
    "ellipsis int": (..., 1),
    "int ellipsis int": (1, ..., -1),
    "ellipsis in the middle of all": (1, 2, ..., 0),
    "none between": (slice(None), None, 1),
    "none last": (..., None),
    "rows then slice": ([3, 1], slice(1, 3)),
    "slice then rows": (slice(1, 3), [3, 1]),
    "int slice rows stays in place": (0, slice(None), [2, 0]),
    "0-d tensor slice rows": (torch.tensor(1), slice(None), [2, 0]),
    "rows rows zipped": ([3, 1, 3], [0, 2, 0]),
    "rows rows broadcast": (torch.tensor([[3], [1]]), [0, 2, 1]),
    "rows slice rows goes first": ([3, 1], slice(None), [0, 2]),
    "slice rows rows": (slice(1, 4), [3, 1], [0, 2]),
    "rows none rows goes first": ([3, 1], None, [0, 2]),
    "rows int rows stays in place": ([3, 1], 2, [0, 2]),
    "mask and rows": (torch.tensor([True, False, True, False, False]), [3, 1]),
    "slice and 2d mask": (slice(1, 3), torch.arange(12).reshape(4, 3) % 5 == 1),
    "2d mask and rows": (MASK2, [1] * int(MASK2.sum())),
    "true rows": (True, [1, 2]),
    "true slice rows": (True, slice(None), [1, 2]),
    "rows true": ([1, 2], True),
    "false in a tuple": (slice(None), False),
    "true true": (True, True),
    "two d, one new": (None, [[0, 0], [0, 0]]),
    "tuple inside": ((3, 1), 0),
    "ortho duplicates": ([1, 1, 0], slice(0, 2)),
}


@pytest.mark.parametrize("index", KINDS.values(), ids=KINDS.keys())
def test_kind(index):
    check_chain(SHAPE, [index])
    check_chain(SHAPE, [slice(None), index])
    check_chain(SHAPE, [..., index, ...], feature=())


@pytest.mark.parametrize("index", [None, ..., (), True, False, (None, ..., None)], ids=str)
def test_kinds_of_a_batch_without_dimensions(index):
    check_chain((), [index])


PAIRS = {
    "window, mask, int": ((8, 3), [slice(2, None), [True, False] * 3, 1]),
    "rows of rows": ((8,), [[5, 6, 1, 2], [3, 0, 0]]),
    "orthogonal rows": ((6, 5), [[4, 0, 4], (slice(None), [3, 3, 1])]),
    "three orthogonal rows": ((4, 3, 5), [[3, 0], (slice(None), [2, 0]), (..., [4, 1, 2])]),
    "zip, slice": ((6, 5), [([4, 0, 4], [1, 2, 1]), slice(1, None)]),
    "zip, int": ((6, 5), [([4, 0, 4], [1, 2, 1]), -1]),
    "zip, mask": ((6, 5), [([4, 0, 4], [1, 2, 1]), [True, False, True]]),
    "zip, None, zip": ((6, 5, 4), [([4, 0, 4], [1, 2, 1]), (slice(None), None), ([0, 2], 0, [3, 1])]),
    "2d, transposing": ((6,), [[[0, 1, 2], [3, 4, 5]], (slice(None), [[1, 2], [0, 1]])]),
    "2d then a row": ((6, 2), [[[0, 1, 2], [3, 4, 5]], 1]),
    "2d mask then 1d mask": ((5, 4), [MASK2, [True, False] * 2 + [True]]),
    "new axis of many": ((4,), [None, [0, 0, 0], slice(0, 2)]),
    "new axis of none": ((4,), [(None, slice(1, 1))]),
    "zip beside rows": ((4, 3, 5), [(slice(None), slice(None), [4, 2, 2, 0]), ([3, 3, 0], [1, 1, 2])]),
    "zip axis left of the block": ((4, 3, 5), [[[3, 1], [0, 2]], (slice(None), [[1, 0]], [[2], [1]])]),
    "three zipped": ((3, 4, 5), [([0, 2, 2, 0], [1, 3, 3, 2], [4, 0, 0, 4])]),
    "everything empty": ((0, 3), [slice(None), (..., [1, 0])]),
    "empty zip": ((4, 3), [([], []), None]),
}


@pytest.mark.parametrize(("shape", "chain"), PAIRS.values(), ids=PAIRS.keys())
def test_chain_by_name(shape, chain):
    check_chain(shape, chain)


# -- random chains ------------------------------------------------------------------------------
def random_term(rng, size):
    kind = rng.randrange(8)
    n = rng.randrange(0 if rng.random() < 0.2 else 1, 5)
    rows = [rng.randrange(-size, size) for _ in range(n)] if size else []
    if kind == 0 and size:
        return rng.choice([int, np.int32, torch.tensor])(rng.randrange(-size, size))
    if kind in (0, 1):
        ends = [None, *range(-size - 1, size + 2)]
        return slice(rng.choice(ends), rng.choice(ends), rng.choice([None, 1, 2, 3]))
    if kind == 2:
        mask = [rng.random() < 0.6 for _ in range(size)]
        return torch.tensor(mask, dtype=torch.bool) if rng.random() < 0.5 else np.array(mask, dtype=bool)
    if kind == 3:
        return rows
    if kind == 4:
        return np.array(rows, dtype=np.int64)
    if kind == 5:
        return torch.tensor(rows, dtype=torch.int64)
    if kind == 6 and size:
        return torch.tensor([[rng.randrange(-size, size) for _ in range(2)] for _ in range(max(n, 1))])
    return slice(None)


def random_index(rng, shape):
    terms = []
    left = list(shape)
    while left and rng.random() < 0.8:
        if len(left) >= 2 and rng.random() < 0.12:
            dims = rng.randrange(2, len(left) + 1)
            terms.append(
                torch.tensor(np.array([rng.random() < 0.4 for _ in range(math.prod(left[:dims]))], bool)).reshape(
                    left[:dims]
                )
            )
            del left[:dims]
        else:
            terms.append(random_term(rng, left.pop(0)))
    if rng.random() < 0.15:
        back = [random_term(rng, left.pop()) for _ in range(rng.randrange(len(left) + 1))]
        terms += [..., *reversed(back)]
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        terms.insert(rng.randrange(len(terms) + 1), rng.choice([True, False]) if rng.random() < 0.15 else None)
    return tuple(terms) if len(terms) != 1 or rng.random() < 0.5 else terms[0]


def has_terms_after_a_mask(index):
    terms = index[:-1] if isinstance(index, tuple) else ()
    return any(np.ndim(t) > 1 and np.asarray(t).dtype == bool for t in terms if t is not None and t is not ...)


@pytest.mark.parametrize("seed", range(40))
def test_random_chains(seed):
    rng = random.Random(seed)
    done = 0
    while done < 40:
        shape = tuple(
            rng.choice([0, 1, 2, 3, 4, 5] if rng.random() < 0.1 else [1, 2, 3, 4, 5])
            for _ in range(rng.randrange(1, 5))
        )
        linear = positions_of(shape, ())
        chain = []
        for _ in range(rng.randrange(1, 5)):
            index = random_index(rng, linear.shape)
            if torch.__version__ < "2.7" and has_terms_after_a_mask(index):
                continue  # torch 2.6 misplaces them
            try:
                after = torch_index(linear, index)
            except IndexError:  # tensors that do not broadcast
                full = Selection.full(linear.shape)
                with pytest.raises(IndexError):
                    full[index]
                break
            if after.numel() > 3000 or after.ndim > 7:
                break
            chain.append(index)
            linear = after
        check_chain(shape, chain, feature=rng.choice([(), (2,), (1, 2)]))
        done += 1


# -- what is refused ------------------------------------------------------------------------------
REFUSED = [
    ((4,), 4, IndexError, r"index 4 is out of range for dimension 0 with size 4"),
    ((4,), -5, IndexError, r"index -5 is out of range for dimension 0 with size 4"),
    ((4, 3), (0, np.int64(3)), IndexError, r"index 3 is out of range for dimension 1 with size 3"),
    ((4, 3), (0, torch.tensor(-4)), IndexError, r"index -4 is out of range for dimension 1 with size 3"),
    ((4, 3), (slice(None), [0, 7]), IndexError, r"index 7 is out of range for dimension 1 with size 3"),
    ((4,), torch.tensor([[0], [-9]]), IndexError, r"index -9 is out of range for dimension 0 with size 4"),
    ((4,), range(2, 6), IndexError, r"index 5 is out of range for dimension 0 with size 4"),
    ((0,), [0], IndexError, r"index 0 is out of range for dimension 0 with size 0"),
    ((0,), 0, IndexError, r"index 0 is out of range for dimension 0 with size 0"),
    ((4, 3), (0, 0, 0), IndexError, r"too many indices for batch size \[4, 3\]: 3 for 2 dimensions"),
    ((4,), (..., 0, [1]), IndexError, r"too many indices for batch size \[4\]"),
    ((4,), torch.ones(4, 1, dtype=torch.bool), IndexError, r"too many indices for batch size \[4\]"),
    ((), 0, IndexError, r"too many indices for batch size \[\]"),
    ((), slice(None), IndexError, r"too many indices for batch size \[\]"),
    ((), [True], IndexError, r"too many indices for batch size \[\]"),
    ((4,), (..., ...), IndexError, r"only one Ellipsis"),
    ((4,), 1.0, IndexError, r"not 1.0 of type float"),
    ((4,), np.float32(1), IndexError, r"of type float32"),
    ((4,), [1.0, 2.0], IndexError, r"ints or bools, not \[1.0, 2.0\]"),
    ((4,), torch.tensor([1.0]), IndexError, r"ints or bools, not torch.float32"),
    ((4,), torch.tensor(1.0), IndexError, r"ints or bools, not torch.float32"),
    ((4,), np.array([0.5]), IndexError, r"ints or bools"),
    ((4,), "a", IndexError, r"not 'a' of type str"),
    ((4,), ["a"], IndexError, r"ints or bools, not \['a'\]"),
    ((4,), [[0, 1], [2]], IndexError, r"cannot be an index"),
    ((4,), [slice(0, 1)], IndexError, r"ints or bools"),
    ((4,), torch.tensor([0, 1], dtype=torch.uint8), IndexError, r"a uint8 tensor is a mask to torch"),
    ((4,), np.array([0, 1], dtype=np.uint8), IndexError, r"a uint8 array is a mask to torch"),
    ((4,), [True, False], IndexError, r"mask of shape \[2\] does not match dimension 0 of shape \[4\]"),
    ((4, 3), (0, np.ones(4, bool)), IndexError, r"mask of shape \[4\] does not match dimension 1 of shape \[3\]"),
    (
        (4, 3),
        torch.ones(3, 4, dtype=torch.bool),
        IndexError,
        r"mask of shape \[3, 4\] does not match dimensions 0 to 1",
    ),
    ((4, 3), ([0, 1], [0, 1, 2]), IndexError, r"shapes \[2\], \[3\] cannot be broadcast together"),
    ((4,), slice(None, None, -1), ValueError, r"step of a slice must be greater than zero, not -1"),
    ((4,), slice(None, None, 0), ValueError, r"step of a slice must be greater than zero, not 0"),
    ((4,), slice(0.5, 2), TypeError, r"slice indices must be integers"),
]


@pytest.mark.parametrize(("shape", "index", "error", "message"), REFUSED, ids=[str(r[1])[:30] for r in REFUSED])
def test_refused(shape, index, error, message):
    with pytest.raises(error, match=message):
        Selection.full(shape)[index]


# -- laziness, ownership, plans -------------------------------------------------------------------
def test_nothing_is_listed_before_it_must_be():
    tracemalloc.start()
    sel = Selection.full((10**12, 10**6, 3))
    sel = sel[10:, ::7, None][5::3, -1][..., 1]
    assert sel.shape == (len(range(15, 10**12, 3)), 1)
    sel = sel[[0, -1, 2]]
    index = sel.read_plan().index
    sel.write_plan()
    zipped = Selection.full((10**12, 10**12))[[0, -1], [-1, 5]]
    assert zipped.shape == (2,)
    assert len(zipped.write_plan().indices) == 2
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    assert index[0].tolist() == [15, 15 + 3 * (len(range(15, 10**12, 3)) - 1), 21]
    assert index[1:] == (slice(999_999, 10**6, 1) if (10**6 - 1) % 7 == 0 else index[1], slice(1, 2, 1))


def test_full():
    sel = Selection.full((3, 2))
    assert sel.is_full and sel[...].is_full and sel[:].is_full and sel[0:3, 0:].is_full
    assert not sel[:2].is_full and not sel[None].is_full and not sel[[0, 1, 2]].is_full
    assert Selection.full(()).is_full
    assert sel.read_plan().exact and sel.read_plan().index == (slice(0, 3, 1), slice(0, 2, 1))
    assert repr(sel[0]) == "Selection([2] of [3, 2])"


def test_a_selection_does_not_change_with_the_callers_index():
    for index in (torch.tensor([1, 2]), np.array([1, 2]), torch.tensor([[1], [2]])):
        sel = Selection.full((4,))[index]
        zipped = Selection.full((4, 3))[index, torch.tensor([0, 2])]
        index[:] = 0
        assert sel.read_plan().index[0] == slice(1, 3, 1)
        assert zipped.read_plan().index[0] == slice(1, 3, 1)


def test_a_selection_is_frozen():
    with pytest.raises((AttributeError, TypeError)):
        Selection.full((3,)).shape = torch.Size((4,))


@pytest.mark.parametrize(
    ("index", "want"),
    [
        (3, (slice(3, 4, 1),)),
        (slice(1, 6, 2), (slice(1, 6, 2),)),
        (slice(1, 7, 3), (slice(1, 5, 3),)),
        ([2, 3, 4], (slice(2, 5, 1),)),
        (torch.tensor([False, True] * 2 + [False] * 4), (torch.tensor([1, 3]),)),
        ([5, 5, 0], (torch.tensor([5, 5, 0]),)),
    ],
)
def test_store_index(index, want):
    got = Selection.full((8,))[index].read_plan().index
    assert len(got) == 1
    assert torch.equal(got[0], want[0]) if isinstance(want[0], torch.Tensor) else got == want


def test_exact_plans_read_straight_into_a_buffer():
    full = Selection.full((6, 4))
    assert all(full[i].read_plan().exact for i in (slice(1, 3), [3, 1], ([3, 1], slice(0, 2)), (slice(None), [3, 0])))
    for index in (2, (slice(None), 1), None, ([5, 0], 2), torch.tensor([[1, 3], [0, 0]])):
        plan = full[index].read_plan()
        assert not plan.exact
        out = torch.zeros((*full[index].shape, 3))
        view = plan.into(out)
        assert view is not None and view.data_ptr() == out.data_ptr()
    assert full[[1, 3], [0, 2]].read_plan().into(torch.zeros(2)) is None


def test_a_read_asks_for_rows_where_they_are_sparse():
    full = Selection.full((1000, 8))
    steps, envs = full[[900, 3, 500], [1, 7, 0]].read_plan().index
    assert steps.tolist() == [3, 500, 900] and envs == slice(0, 8, 1)
    steps, envs = full[[3, 4, 5], [1, 7, 1]].read_plan().index
    assert steps == slice(3, 6, 1) and envs.tolist() == [1, 7]


def test_pieces_of_a_write_are_few():
    full = Selection.full((1000, 8))
    rng = np.random.default_rng(0)
    assert len(full[rng.permutation(1000), np.arange(1000) % 8].write_plan().indices) == 8
    assert len(full[list(range(0, 900, 3)), :][:, [1, 2, 3, 6]].write_plan().indices) == 2
    assert len(full[[1, 5, 1]].write_plan().indices) == 1
    assert full[[]].write_plan().indices == () == full[:, 3:3].write_plan().indices


def test_extend():
    base = Selection.full((5, 4))
    for index in ([3, 0], (slice(1, 4), 2), ([3, 3], [1, 2]), MASK2, None, torch.tensor([[0, 4]])):
        leaf = positions_of((5, 4, 3, 2), ())
        sel = base[index].extend((3, 2))
        assert sel.src_shape == (5, 4, 3, 2)
        check_read(sel, leaf, leaf[index])
        check_write(sel, leaf, leaf[index])
        check_read(sel[..., [1, 0], :], leaf, leaf[index][..., [1, 0], :])
    assert Selection.full((5,)).extend((2,)).is_full
    assert base.extend(()).is_full


def test_index_shape():
    assert index_shape((4, 3, 2), (..., None, [0, 1, 0])) == torch.Size([4, 3, 1, 3])
    assert type(index_shape([4], 0)) is torch.Size


def test_a_plan_serves_many_leaves():
    sel = Selection.full((6, 5))[[4, 0, 4], [1, 2, 1]]
    plan = sel.read_plan()
    for feature in ((), (3,), (2, 0), (1, 2, 3)):
        leaf = positions_of((6, 5), feature)
        assert torch.equal(plan.finish(gather(leaf, plan.index)), leaf[[4, 0, 4], [1, 2, 1]])


# -- the fast lane ---------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [pytest.param(i, id=name) for name, i in KINDS.items() if not isinstance(i, tuple)])
def test_as_rows(index):
    got = as_rows(index, 5)
    one_dim = isinstance(index, (slice, range)) or (
        isinstance(index, (list, np.ndarray, torch.Tensor))
        and torch.as_tensor(index if isinstance(index, torch.Tensor) else np.array(index)).ndim == 1
    )
    assert (got is not None) == one_dim
    if got is not None:
        want = torch_index(torch.arange(5), index)
        assert torch.equal(torch.arange(5)[got], want)
        assert isinstance(got, slice) or got.dtype is torch.int64


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([5], "index 5 is out of range for dimension 1 with size 5"),
        (range(3, 7), "index 6 is out of range for dimension 1 with size 5"),
        (range(-6, 2), "index -6 is out of range for dimension 1 with size 5"),
        ([True], r"mask of shape \[1\] does not match dimension 1 of shape \[5\]"),
        ([0.5], "ints or bools"),
    ],
)
def test_as_rows_refuses(index, message):
    with pytest.raises(IndexError, match=message):
        as_rows(index, 5, 1)


def test_as_rows_gives_slices_for_ranges():
    assert as_rows(range(1, 4), 5) == slice(1, 4, 1)
    assert as_rows(range(-4, -1, 2), 5) == slice(1, 4, 2)
    assert as_rows(slice(None, -1), 5) == slice(0, 4, 1)
    assert as_rows(range(3, -1, -1), 5).tolist() == [3, 2, 1, 0]


def test_read_only_arrays_are_indices_without_a_warning():
    array = np.array([2, 0])
    array.flags.writeable = False
    mask = np.array([True, False, True])
    mask.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Selection.full((3,))[array].shape == Selection.full((3,))[mask].shape == (2,)
