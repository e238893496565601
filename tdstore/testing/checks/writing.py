"""The kit's tests of `write`, and of values in unusual memory layouts."""

from __future__ import annotations

import pytest
import torch

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import KeyNotFoundError, StoreError
from tdstore.store import Cap
from tdstore.testing.comparing import check_leaves, check_mentions, check_paths, check_same, raises
from tdstore.testing.samples import INDICES, OUTSIDE, assign, pick, rows, sample
from tdstore.testing.setup import Location, StoreSetup, fill, header_for, numbers, read_all
from tdstore.types import LeafSpec, Read, Write

LAST = {
    "an absent leaf": Write(("absent-leaf",), (), numbers(6)),
    "another shape": Write(("c",), (), numbers(7)),
    "another number of dimensions": Write(("c",), (), numbers(6, 2)),
    "another dtype": Write(("c",), (), numbers(6).long()),
    "rows of another shape": Write(("c",), (slice(0, 4, 1),), numbers(3)),
}
"""Writes that a store with a leaf "c" of six float32 cannot do."""
BY_BITS = [
    name
    for name in ("bool", "uint16", "uint32", "uint64", "bfloat16", "float8_e8m0fnu", "complex32")
    if name in NAME_TO_DTYPE
]
MANY = 150
"""Writes of one leaf, twice: more than a table of fixed length in a file may have room for."""


class WriteTests(StoreSetup):
    """Tests that writes change exactly the selected elements."""

    def test_write_whole_leaf_again(self, location: Location) -> None:
        """Check that writing a leaf again replaces its values."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(4, 3), ("b",): numbers(2)})
        store.write([Write(("a",), (), numbers(4, 3, start=50))])
        a, b = store.read([Read(("a",)), Read(("b",))])
        check_same(a, numbers(4, 3, start=50), "a leaf written again")
        check_same(b, numbers(2), "a leaf beside one that was written again")

    def test_write_does_not_alias(self, location: Location) -> None:
        """Check that changing a value after it was written changes nothing in the store."""
        self.needs(Cap.WRITE)
        value = numbers(4, 3)
        store = self.holding(location, {("a",): value.clone()})
        mine = value.clone()
        store.write([Write(("a",), (), mine)])
        mine.fill_(-1)
        check_same(store.read([Read(("a",))])[0], value, "the store kept the value of a write, which changed later")

    @pytest.mark.parametrize("end", ["save_header", "close"])
    def test_write_does_not_alias_until_the_commit(self, location: Location, end: str) -> None:
        """Check that a commit writes the value that `write` was given, whatever the caller has put there since."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        old, new = {("a",): numbers(4, 3), ("b",): numbers(6)}, {("a",): numbers(4, 3) + 50, ("b",): numbers(6) + 50}
        self.saved(location, old)
        mine = {path: value.clone() for path, value in new.items()}
        with self.opened(location, "r+") as store:
            if Cap.PARTIAL_WRITE in self.caps:
                writes = [
                    Write(path, (slice(at, at + 2, 1),), mine[path][at : at + 2]) for path in mine for at in (0, 2)
                ]
                writes.append(Write(("b",), (rows(5, 4),), mine[("b",)][4:].flip(0)))
            else:
                writes = [Write(path, (), value) for path, value in mine.items()]
            store.write(writes)
            for value in (*mine.values(), *(w.value for w in writes)):
                value.fill_(-1)
            if end == "save_header":
                store.save_header(header_for(new))
        what = f"the value of a `write` was kept until {end}(), and changed by the caller meanwhile"
        check_leaves(read_all(self.opened(location)), new, what)

    def test_write_keeps_the_value(self, location: Location) -> None:
        """Check that a write does not change its value."""
        self.needs(Cap.WRITE)
        value = sample("complex64", (4, 3))
        copy = value.clone()
        self.holding(location, {("a",): value})
        check_same(value, copy, "the value given to write()")

    def test_write_non_contiguous(self, location: Location) -> None:
        """Check that transposed, strided, expanded and offset values are written as they read."""
        self.needs(Cap.WRITE)
        base = numbers(6, 8)
        values = {
            ("transposed",): base.t(),
            ("strided",): base[::2, 1::3],
            ("expanded",): torch.arange(3.0).expand(4, 3),
            ("offset",): base[2:, 3:],
            ("bf16",): sample("bfloat16", (6, 4)).t(),
            ("f8",): sample("float8_e4m3fn", (6, 4))[:, ::2],
        }
        store = self.holding(location, values)
        for path, value in values.items():
            check_same(store.read([Read(path)])[0], value.contiguous(), path)
        if Cap.PARTIAL_WRITE not in self.caps:
            return
        permuted = numbers(5, 3, 4).permute(0, 2, 1)  # as `td.permute_features_` writes blocks of rows
        for term in (slice(1, 6, 1), rows(6, 0, 3, 5, 2)):
            store.create({("a",): LeafSpec((8, 4, 3), "float32")})
            store.write([Write(("a",), (term,), permuted)])
            want = assign(torch.zeros(8, 4, 3), (term,), permuted)
            check_same(store.read([Read(("a",))])[0], want, f"rows {term} of a transposed value")

    @pytest.mark.parametrize("dtype", ["complex64", "complex128"])
    def test_write_conjugate(self, location: Location, dtype: str) -> None:
        """Check that lazily conjugated and negated values are resolved before their bytes are written."""
        self.needs(Cap.WRITE)
        value = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0.5j]]).to(getattr(torch, dtype))
        conjugate, negated = value.conj(), value.conj().imag
        assert conjugate.is_conj() and negated.is_neg(), "torch resolved these values at once: the test shows nothing"  # noqa: PT018
        store = self.holding(location, {("conj",): conjugate, ("neg",): negated})
        got_conj, got_neg = store.read([Read(("conj",)), Read(("neg",))])
        check_same(got_conj, conjugate.resolve_conj(), "a conjugated value")
        check_same(got_neg, negated.resolve_neg(), "a negated value")

    @pytest.mark.parametrize("dtype", BY_BITS)
    def test_write_rows_of_dtype(self, location: Location, dtype: str) -> None:
        """Check scattered rows of dtypes that torch cannot index-assign itself."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        if dtype in self.dtypes_refused:
            pytest.skip(f"{dtype} is declared as refused")
        before, index = sample(dtype, (6, 4)), (rows(4, 0, 2),)
        value = sample(dtype, (3, 4), 1)
        store = self.holding(location, {("a",): before})
        store.write([Write(("a",), index, value)])
        check_same(store.read([Read(("a",))])[0], assign(before, index, value), f"{dtype} at {index}")

    @pytest.mark.parametrize("case", INDICES)
    def test_write_index(self, location: Location, case: str) -> None:
        """Check that each form of index of the protocol changes exactly the selected elements."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        index = INDICES[case]
        leaves = {(d,): sample(d, (6, 4, 3)) for d in ("float32", "int64", "bfloat16")}
        store = self.holding(location, leaves)
        for (name,), before in leaves.items():
            value = sample(name, tuple(pick(before, index).shape), 1)
            store.write([Write((name,), index, value)])
            got = store.read([Read((name,))])[0]
            check_same(got, assign(before, index, value), f"{name} at {index}")

    def test_write_outside(self, location: Location) -> None:
        """Check that rows outside of a leaf are an IndexError, and none of the writes of the call is made."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        before = sample("float32", (6, 4, 3))
        store = self.holding(location, {("a",): before, ("b",): before})
        for case, index in OUTSIDE.items():
            shape = [
                len(term) if isinstance(term, torch.Tensor) else 1 if isinstance(term, int) else term.stop - term.start
                for term in index[:3]
            ]
            value = torch.ones((*shape, *(6, 4, 3)[len(shape) :]))
            with raises(IndexError, doing=case):
                store.write([Write(("b",), (), torch.zeros(6, 4, 3)), Write(("a",), index, value)])
            for leaf in store.read([Read(("a",)), Read(("b",))]):
                check_same(leaf, before, f"written, though an index was outside: {case}")

    def test_write_refused_for_its_last(self, location: Location) -> None:
        """Check that a call that is refused for the last of its writes has changed no leaf."""
        self.needs(Cap.WRITE)
        old = {("a",): numbers(6, 2), ("g", "b"): numbers(6).long(), ("c",): numbers(6)}
        good = [Write(("a",), (), -numbers(6, 2)), Write(("g", "b"), (), -numbers(6).long())]
        for name, last in LAST.items():
            if name == "rows of another shape" and Cap.PARTIAL_WRITE not in self.caps:
                continue
            store = self.holding(location, old)
            try:
                store.write([*good, last])
            except (LookupError, ValueError, TypeError, RuntimeError, StoreError):
                check_leaves(read_all(store), old, f"after a write that was refused for {name}")
            else:
                assert name != "an absent leaf", "a write to a leaf that is not there raised nothing"
            store.close()

    def test_write_last_wins(self, location: Location) -> None:
        """Check that of repeated rows in an index, the last value stays."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        store = self.holding(location, {("a",): numbers(5, 2), ("b",): numbers(2, 4)})
        value = numbers(6, 2, start=100)
        picked = rows(3, 1, 3, 0, 1, 3)
        store.write([Write(("a",), (picked,), value)])
        check_same(
            store.read([Read(("a",))])[0], assign(numbers(5, 2), (picked,), value), "rows written twice in one index"
        )
        store.create({("c",): LeafSpec((3,), "uint16")})  # a dtype for which torch has no index_select
        store.write([Write(("c",), (rows(2, 0, 2),), sample("uint16", (3,)))])
        check_same(
            pick(store.read([Read(("c",))])[0].cpu(), (rows(0, 2),)),
            sample("uint16", (3,))[1:],
            "rows of uint16 written twice in one index",
        )
        index = (slice(0, 2, 1), rows(2, 2, 0))
        store.write([Write(("b",), index, numbers(2, 3, start=50))])
        check_same(
            store.read([Read(("b",))])[0],
            assign(numbers(2, 4), index, numbers(2, 3, start=50)),
            "columns written twice in one index",
        )

    def test_write_last_wins_many(self, location: Location) -> None:
        """Check that the last of hundreds of repeats wins, where a parallel scatter would be a race."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        picked = torch.randint(0, 7, (800,), generator=torch.Generator().manual_seed(1))
        value = numbers(800, 3)
        store = self.holding(location, {("a",): torch.zeros(7, 3)})
        store.write([Write(("a",), (picked,), value)])
        check_same(
            store.read([Read(("a",))])[0],
            assign(torch.zeros(7, 3), (picked,), value),
            "7 rows written 800 times in one index",
        )
        long = torch.arange(9000, dtype=torch.int32)
        store.create({("long",): LeafSpec(long.shape, "int32", fill_value=-1)})
        for term in (slice(3, 8999, 1), slice(1, 9000, 2), torch.randperm(9000, generator=torch.Generator())[:4000]):
            store.write([Write(("long",), (slice(0, 9000, 1),), torch.full_like(long, -1))])
            store.write([Write(("long",), (term,), long[term])])
            want = assign(torch.full_like(long, -1), (term,), long[term])
            check_same(store.read([Read(("long",))])[0], want, "thousands of rows of 4 bytes, written in one index")

    def test_many_writes_of_one_leaf(self, location: Location) -> None:
        """Check that hundreds of small writes of one leaf are all kept, of one call and of many, also by a commit."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        value = numbers(2 * MANY, 5, start=1)
        order = torch.randperm(2 * MANY, generator=torch.Generator().manual_seed(0)).tolist()
        store = self.opened(location, "w")
        store.create({("a",): LeafSpec(value.shape, "float32")})
        if Cap.PERSISTENT in self.caps:
            store.save_header(header_for({("a",): value}))
            store.close()
            store = self.opened(location, "r+")
        writes = [Write(("a",), (slice(row, row + 1, 1),), value[row : row + 1]) for row in order]
        for write in writes[:MANY]:
            store.write([write])
        store.write(writes[MANY:])
        what = f"a leaf of {2 * MANY} rows, each written by itself"
        check_same(store.read([Read(("a",))])[0], value, what)
        if Cap.PERSISTENT in self.caps:
            store.close()
            check_same(self.opened(location).read([Read(("a",))])[0], value, f"{what}, opened again")

    def test_write_batch_in_order(self, location: Location) -> None:
        """Check that writes of one batch to one leaf take effect in their order."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(3)})
        store.write([Write(("a",), (), numbers(3, start=10)), Write(("a",), (), numbers(3, start=20))])
        check_same(store.read([Read(("a",))])[0], numbers(3, start=20), "a leaf written twice in one call")

    def test_write_batch_of_rows(self, location: Location) -> None:
        """Check several row writes to several leaves in one call."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        store = self.holding(location, {("a",): torch.zeros(6, 2), ("b",): torch.zeros(6, dtype=torch.int64)})
        store.write(
            [
                Write(("a",), (slice(0, 2, 1),), numbers(2, 2)),
                Write(("b",), (rows(5, 3),), numbers(2, dtype=torch.int64, start=1)),
                Write(("a",), (slice(1, 3, 1),), numbers(2, 2, start=10)),
            ]
        )
        a, b = store.read([Read(("a",)), Read(("b",))])
        check_same(a, torch.tensor([[0.0, 1], [10, 11], [12, 13], [0, 0], [0, 0], [0, 0]]), ("a",))
        check_same(b, torch.tensor([0, 0, 0, 2, 0, 1]), ("b",))

    def test_write_nothing(self, location: Location) -> None:
        """Check that empty batches are no error and change nothing."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(2)})
        store.write([])
        store.create({})
        store.delete([])
        check_paths(store.paths(), [("a",)], "after empty batches")
        check_same(store.read([Read(("a",))])[0], numbers(2), "after empty batches")

    def test_write_nothing_in_place(self, location: Location) -> None:
        """Check that empty batches to a stored leaf leave no dirty marker."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, {("a",): numbers(2)})
        store = self.opened(location, "r+")
        store.write([])
        store.create({})
        store.delete([])
        store.close()
        check_same(self.opened(location, "r").read([Read(("a",))])[0], numbers(2), "after empty batches in mode 'r+'")

    def test_missing_leaf_write(self, location: Location) -> None:
        """Check that a write to a missing leaf is an error that names it, and makes nothing."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("group", "there"): numbers(2)})
        with raises(KeyNotFoundError, doing="write to a leaf that is not there") as caught:
            store.write([Write(("group", "absent-leaf"), (), numbers(2))])
        check_mentions(caught.value, "'group'", "'absent-leaf'")
        check_paths(store.paths(), [("group", "there")], "after a write to a missing leaf")

    def test_write_through_the_end(self, location: Location) -> None:
        """Check the last row and the last element of a large leaf, at the edge of a block."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE)
        store = self.opened(location, "w")
        store.create({("a",): LeafSpec((1025, 33), "int32")})
        store.write([Write(("a",), (slice(1024, 1025, 1), slice(32, 33, 1)), torch.tensor([[7]], dtype=torch.int32))])
        (got,) = store.read([Read(("a",))])
        expected = torch.zeros(1025, 33, dtype=torch.int32)
        expected[1024, 32] = 7
        check_same(got, expected, "a leaf of which the last element was written")

    def test_large_leaf(self, location: Location) -> None:
        """Check several MiB in one leaf, written in blocks of rows and read back whole."""
        self.needs(Cap.WRITE)
        value = sample("float32", (1024, 1024))
        store = self.opened(location, "w")
        if Cap.PARTIAL_WRITE not in self.caps:
            fill(store, {("a",): value})
        else:
            store.create({("a",): LeafSpec(value.shape, value.dtype)})
            for start in range(0, 1024, 300):
                stop = min(start + 300, 1024)
                store.write([Write(("a",), (slice(start, stop, 1),), value[start:stop])])
        check_same(store.read([Read(("a",))])[0], value, "4 MiB written in blocks of rows")
