"""The kit's tests of `read`, `aread` and `view`."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
import torch

from tdstore.dtypes import dtype_name
from tdstore.errors import KeyNotFoundError, UnsupportedError
from tdstore.store import Cap, Store
from tdstore.testing.comparing import (
    check_equal,
    check_is_out,
    check_leaves,
    check_mentions,
    check_names,
    check_out,
    check_outs,
    check_paths,
    check_read_writable,
    check_same,
    check_spec,
    failure,
    raises,
)
from tdstore.testing.processes.deaths import check_in_child, check_writable
from tdstore.testing.samples import DTYPES, INDICES, OUTSIDE, SHAPES, pick, rows, same, sample
from tdstore.testing.setup import Location, StoreSetup, able, fill, numbers
from tdstore.types import LeafSpec, Path, Read, Write, path_text


class ReadTests(StoreSetup):
    """Tests that reads return the stored values, in memory of their own and in the requested order."""

    def test_read_returns_a_list(self, location: Location) -> None:
        """Check that `read` returns a list of tensors, as many as there were requests."""
        store = self.holding(location, {("a",): numbers(2)})
        for reads in ([], [Read(("a",))], [Read(("a",)), Read(("a",))]):
            got: object = store.read(reads)
            if not isinstance(got, list):
                raise failure(f"`read` returns a {type(got).__name__} instead of a list")
            check_equal(len(got), len(reads), f"the number of answers to {len(reads)} requests")
            for tensor in got:
                check_same(tensor, numbers(2), "an answer of `read`")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip_dtype(self, location: Location, dtype: str) -> None:
        """Check that each dtype keeps its bits: NaN payloads, infinities, every float8."""
        if dtype in self.dtypes_refused:
            pytest.skip(f"{dtype} is declared as refused; see test_refused_dtypes")
        leaves = {(f"s{i}",): sample(dtype, shape, i) for i, shape in enumerate(SHAPES)}
        store = self.holding(location, leaves)
        got = store.read([Read(path) for path in leaves])
        for (path, value), tensor in zip(leaves.items(), got, strict=True):
            check_same(tensor, value, f"leaf {path} of shape {tuple(value.shape)} and dtype {dtype} came back changed")

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_round_trip_shape(self, location: Location, shape: tuple[int, ...]) -> None:
        """Check that each shape survives, 0-d and zero-length ones too, and `specs` agrees with the reads."""
        leaves = {(dtype,): sample(dtype, shape) for dtype in ("bool", "int64", "float32", "complex64")}
        store = self.holding(location, leaves)
        for spec, (path, value) in zip(store.specs(list(leaves)), leaves.items(), strict=True):
            check_spec(spec, LeafSpec(value.shape, value.dtype), path)
            (got,) = store.read([Read(path)])
            check_same(got, value, path)

    def test_negative_zero_and_nan(self, location: Location) -> None:
        """Check that -0.0 is not 0.0, nor one NaN another: a store that compares or skips values must compare bits."""
        kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
        leaves: dict[Path, torch.Tensor] = {("zeros", str(kind)): torch.full((64,), -0.0).to(kind) for kind in kinds}
        leaves[("nans",)] = torch.full((64,), float("nan"))
        payloads = torch.tensor([0x7FC00001, 0x7F800001, -0x3FEDCC, -1], dtype=torch.int32)
        leaves[("payloads",)] = payloads.view(torch.float32)
        leaves[("narrow",)] = (payloads >> 16).to(torch.int16).view(torch.bfloat16)
        store = self.holding(location, leaves)
        for path, value in leaves.items():
            check_same(store.read([Read(path)])[0], value, path)

    def test_read_order_and_duplicates(self, location: Location) -> None:
        """Check that answers come in request order, one for each request, also for repeated leaves."""
        leaves = {(name,): numbers(3, start=10 * i) for i, name in enumerate("abcde")}
        store = self.holding(location, leaves)
        asked = [("c",), ("a",), ("e",), ("a",), ("c",), ("b",), ("d",), ("a",)]
        got = store.read([Read(path) for path in asked])
        check_equal(len(got), len(asked), f"the number of answers to {len(asked)} requests")
        for path, tensor in zip(asked, got, strict=True):
            check_same(tensor, leaves[path], f"the answer at the place of {path} is another leaf")

    def test_read_outside(self, location: Location) -> None:
        """Check that rows outside of a leaf are an IndexError: neither clipped, nor counted from the end."""
        self.needs(Cap.PARTIAL_READ)
        value = sample("float32", (6, 4, 3))
        store = self.holding(location, {("a",): value, ("b",): value})
        for case, index in OUTSIDE.items():
            with raises(IndexError, doing=case):
                store.read([Read(("b",)), Read(("a",), index)])
        check_same(store.read([Read(("a",))])[0], value, "after refused reads")

    def test_read_nothing(self, location: Location) -> None:
        """Check that an empty batch is no error."""
        store = self.holding(location, {("a",): numbers(2)})
        check_equal(store.read([]), [], "read([])")
        check_equal(store.specs([]), [], "specs([])")

    def test_read_does_not_alias(self, location: Location) -> None:
        """Check that each answer has memory of its own: changing one changes neither the store nor another answer."""
        value = numbers(4, 3)
        store = self.holding(location, {("a",): value})
        first, second = store.read([Read(("a",)), Read(("a",))])
        check_writable(first, "an answer of `read`")
        first.fill_(-1)
        check_same(second, value, "two answers of one batch share memory")
        check_same(store.read([Read(("a",))])[0], value, "changing an answer changed the store")

    def test_read_outlives_the_store(self, location: Location) -> None:
        """Check that answers stay as they are when the store is closed and gone: no tensor over memory of its own."""
        leaves = {("a",): numbers(400, 30), ("b",): sample("bfloat16", (50,))}
        store = self.holding(location, leaves)
        got = dict(zip(leaves, store.read([Read(path) for path in leaves]), strict=True))
        store.close()
        del store
        gc.collect()
        what = "read before the store was closed, and compared after"
        if not hasattr(os, "fork") or Cap.DIRECT_DEVICE in self.caps:  # no forked child reads memory of a GPU
            check_leaves(got, leaves, what)
        else:  # memory that is gone ends the process
            check_in_child(lambda _: check_leaves(got, leaves, what), what, "its memory went with the store")

    def test_read_is_writable(self, location: Location) -> None:
        """Check that answers are writable: no tensor over bytes, or over a mapping, that must not be changed."""
        leaves = {(name,): sample(name, (64, 40)) for name in ("float32", "bfloat16", "bool")}
        store = self.holding(location, leaves)
        reads = [Read(path) for path in leaves]
        if Cap.PARTIAL_READ in self.caps:
            reads += [Read(path, index) for path in leaves for index in ((slice(2, 60, 1),), (rows(3, 1, 3),))]
        check_read_writable(store, reads)

    def test_read_slice_does_not_alias(self, location: Location) -> None:
        """Check that a range of rows is no view of the store either."""
        self.needs(Cap.PARTIAL_READ)
        value = numbers(6, 3)
        store = self.holding(location, {("a",): value})
        (first,) = store.read([Read(("a",), (slice(1, 3, 1),))])
        check_writable(first, "an answer of `read`")
        first.fill_(-1)
        check_same(store.read([Read(("a",))])[0], value, "a leaf of which an answer of `read` was overwritten")

    def test_missing_leaf_read(self, location: Location) -> None:
        """Check that the error names a missing leaf, key by key."""
        store = self.holding(location, {("group", "there"): numbers(2)})
        with raises(KeyNotFoundError, doing="reading a leaf that is not there") as caught:
            store.read([Read(("group", "there")), Read(("group", "absent-leaf"))])
        _names_leaf(caught.value)
        with raises(KeyNotFoundError, doing="specs of a leaf that is not there") as caught:
            store.specs([("group", "there"), ("group", "absent-leaf")])
        _names_leaf(caught.value)
        with raises(KeyNotFoundError, doing="reading a group as if it were a leaf"):
            store.read([Read(("group",))])

    def test_out_buffer(self, location: Location) -> None:
        """Check that `out` is filled and returned, and that a request without one gets fresh memory."""
        value = numbers(4, 3)
        store = self.holding(location, {("a",): value})
        out = torch.full((4, 3), -1.0)
        with_out, without = store.read([Read(("a",), (), out), Read(("a",))])
        if same(out, torch.full((4, 3), -1.0)):
            raise failure("`out` was not filled: it holds what it held before `read`")
        check_same(out, value, "`out`")
        check_is_out(with_out, out, "a whole leaf")
        check_same(without, value, "a request without `out` beside one with it")
        assert without.data_ptr() != out.data_ptr(), "a request without `out` was given the memory of another's `out`"

    def test_out_strided(self, location: Location) -> None:
        """Check that `out` may have any strides, and bytes between its elements are unchanged."""
        value = numbers(4, 3)
        store = self.holding(location, {("a",): value})
        transposed = torch.zeros(3, 4).t()
        wide = torch.full((4, 6), -7.0)
        check_out(store, Read(("a",), (), transposed), value, "a transposed `out`")
        check_out(store, Read(("a",), (), wide[:, ::2]), value, "an `out` of every second column")
        check_same(wide[:, 1::2].contiguous(), torch.full((4, 3), -7.0), "between the elements of `out` was written")

    @pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e5m2", "complex64", "uint64"])
    def test_out_dtypes(self, location: Location, dtype: str) -> None:
        """Check `out` for dtypes that numpy lacks or torch half supports, 0-d and zero-length included."""
        leaves = {(str(i),): sample(dtype, shape) for i, shape in enumerate([(), (0, 2), (5, 3)])}
        store = self.holding(location, leaves)
        reads = [Read(path, (), torch.zeros(value.shape, dtype=value.dtype)) for path, value in leaves.items()]
        check_outs(store, reads, list(leaves.values()), f"{dtype} into `out`")

    @pytest.mark.parametrize("case", INDICES)
    def test_read_index(self, location: Location, case: str) -> None:
        """Check that each form of index of the protocol selects the same as in memory, with and without `out`."""
        self.needs(Cap.PARTIAL_READ)
        index = INDICES[case]
        leaves = {(d,): sample(d, (6, 4, 3)) for d in ("float32", "bool", "bfloat16", "uint16", "complex64")}
        store = self.holding(location, leaves)
        got = store.read([Read(path, index) for path in leaves])
        for value, tensor in zip(leaves.values(), got, strict=True):
            expected = pick(value, index)
            check_same(tensor, expected, f"{value.dtype} at {index}")
            out = torch.zeros((*expected.shape, 2), dtype=value.dtype)[..., 0]
            check_out(
                store,
                Read((dtype_name(value.dtype),), index, out),
                expected,
                f"{value.dtype} at {index}, strided `out`",
            )

    def test_read_index_batch(self, location: Location) -> None:
        """Check that requests of one batch, on one leaf and several, do not affect one another."""
        self.needs(Cap.PARTIAL_READ)
        leaves: dict[Path, torch.Tensor] = {(name,): numbers(6, 4, 3, start=1000 * i) for i, name in enumerate("abc")}
        store = self.holding(location, leaves)
        reads = [Read(path, index) for index in INDICES.values() for path in leaves]
        for read, tensor in zip(reads, store.read(reads), strict=True):
            check_same(tensor, leaves[read.path][read.index], read)

    def test_read_index_flat(self, location: Location) -> None:
        """Check rows of a leaf without further dimensions, of one row, and of none."""
        self.needs(Cap.PARTIAL_READ)
        leaves: dict[Path, torch.Tensor] = {("flat",): numbers(9), ("one",): numbers(1, 2), ("none",): numbers(0, 3)}
        store = self.holding(location, leaves)
        asked = [
            Read(("flat",), (rows(8, 0, 8),)),
            Read(("flat",), (slice(2, 9, 4),)),
            Read(("one",), (rows(0, 0, 0),)),
            Read(("none",), (slice(0, 0, 1),)),
            Read(("none",), (rows(),)),
        ]
        for read, tensor in zip(asked, store.read(asked), strict=True):
            check_same(tensor, leaves[read.path][read.index], f"{path_text(read.path)} at {read.index}")

    def test_many_rows(self, location: Location) -> None:
        """Check a few thousand random rows of a larger leaf, in order."""
        self.needs(Cap.PARTIAL_READ)
        value = sample("int32", (3000, 17))
        store = self.holding(location, {("a",): value})
        picked = torch.randint(0, 3000, (2500,), generator=torch.Generator().manual_seed(0))
        check_same(store.read([Read(("a",), (picked,))])[0], value[picked], "2500 rows, in no order")

    def test_aread_agrees(self, location: Location) -> None:
        """Check that `aread` returns the same as `read`, also several at once."""
        leaves = {(name,): numbers(5, 2, start=10 * i) for i, name in enumerate("abc")}
        store = self.holding(location, leaves)
        if Cap.ASYNC in store.caps and type(store).aread is Store.aread:
            raise failure("ASYNC is declared, and aread is not there: by default it reads in a thread")
        reads = [Read(path) for path in leaves]

        async def both() -> list[list[torch.Tensor]]:
            if Cap.CONCURRENT_READ in self.caps:
                return list(await asyncio.gather(store.aread(reads), store.aread(reads[::-1])))
            return [await store.aread(reads), await store.aread(reads[::-1])]

        forward, backward = asyncio.run(both())
        for value, a, b in zip(leaves.values(), forward, backward[::-1], strict=True):
            check_same(a, value, "an answer of `aread`")
            check_same(b, value, "an answer of `aread`, in the other order")

    def test_aread_missing_leaf(self, location: Location) -> None:
        """Check that `aread` names a missing leaf as `read` does."""
        store = self.holding(location, {("a",): numbers(2)})
        with raises(KeyNotFoundError, match="absent-leaf", doing="aread of a leaf that is not there"):
            asyncio.run(store.aread([Read(("absent-leaf",))]))

    def test_view_tells_the_truth(self, location: Location) -> None:
        """Check that `view` is live in both directions with VIEW, and an `UnsupportedError` without it."""
        value = numbers(4, 3)
        store = self.holding(location, {("a",): value})
        if Cap.VIEW not in self.caps:
            with raises(UnsupportedError, doing="view without Cap.VIEW") as caught:
                store.view(("a",))
            check_names(caught.value, store.url)
            check_mentions(caught.value, "VIEW")
            return
        view = store.view(("a",))
        check_same(view.cpu(), value, "a view")
        if store.view(("a",)).data_ptr() != view.data_ptr():
            raise failure("each view is another copy: view() must give the same memory each time")
        if Cap.WRITE in self.caps:
            store.write([Write(("a",), (), value + 1)])
            check_same(view.cpu(), value + 1, "a view does not see writes")
            check_writable(view, "a view of a store that was opened for writing")
            view.fill_(9)
            assert bool((store.read([Read(("a",))])[0] == 9).all()), "writing into a view changes nothing"

    def test_view_missing_leaf(self, location: Location) -> None:
        """Check that `view` names a missing leaf."""
        self.needs(Cap.VIEW)
        store = self.holding(location, {("a",): numbers(2)})
        with raises(KeyNotFoundError, match="absent-leaf", doing="view of a leaf that is not there"):
            store.view(("absent-leaf",))

    def test_refused_dtypes(self, location: Location) -> None:
        """Check that a dtype that the format cannot hold is refused when a leaf is made."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        for dtype in self.dtypes_refused:
            with raises(TypeError, match=dtype, doing=f"a leaf of {dtype}"):  # OptionError is a TypeError
                fill(store, {("refused",): sample(dtype, (2,))})
            check_paths(store.paths(), [], f"a refused leaf of dtype {dtype} was made")

    def test_caps_are_as_declared(self, location: Location) -> None:
        """Check that the store's own `caps` are those of the class, and that `url` and `writable` exist."""
        store: Store = self.holding(location, {("a",): numbers(2)})
        more, fewer = store.caps & ~self.caps, self.caps & ~store.caps
        assert not more, f"the store's caps have {able(more)}, which the test class does not declare"
        assert not fewer, f"the store's caps lack {able(fewer)}, which the test class declares"
        named = isinstance(store.url, str) and store.url
        assert named, f"url is {store.url!r}: messages need a text that names the place"
        assert store.writable is (Cap.WRITE in self.caps), f"writable is {store.writable} after an opening with 'w'"


def _names_leaf(error: KeyNotFoundError) -> None:
    check_mentions(error, "'group'", "'absent-leaf'")
