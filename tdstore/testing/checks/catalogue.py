"""The kit's tests of leaves: create, delete, rename, resize, and keys."""

from __future__ import annotations

import gc
import math
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

from tdstore.errors import KeyNotFoundError, OptionError, UnsupportedError
from tdstore.store import Cap
from tdstore.testing.comparing import (
    check_equal,
    check_leaves,
    check_mentions,
    check_names,
    check_paths,
    check_same,
    check_spec,
    failure,
    raises,
)
from tdstore.testing.samples import ODD_KEYS, deep_path
from tdstore.testing.setup import Location, StoreSetup, header_for, numbers, read_all
from tdstore.types import LeafSpec, Path, Read, Write, path_text

FILLS: tuple[tuple[str, Any], ...] = (
    ("uint8", 7),
    ("int64", -(2**40)),
    ("bool", True),
    ("float32", 0.5),
    ("float64", math.nan),
    ("float32", -math.inf),
    ("bfloat16", 1.5),
    ("float8_e4m3fn", 2.0),
    ("complex64", 1 - 2j),
)


EXACT = (1 << 60) + 1
"""A fill value that becomes another number as a float."""


class CatalogueTests(StoreSetup):
    """Tests that leaves are created, removed and renamed without affecting one another."""

    def test_paths_and_specs(self, location: Location) -> None:
        """Check that `paths` lists each leaf once and no group, and that `specs` keeps the requested order."""
        leaves = {("a",): numbers(2), ("g", "b"): numbers(3, 4), ("g", "h", "c"): numbers(1).long()}
        store = self.holding(location, leaves)
        listed = list(store.paths())
        check_paths(listed, leaves, "paths()")
        kinds = sorted({type(path).__name__ for path in listed})
        check_equal(kinds, ["tuple"], "types of the paths that paths() lists")
        asked = [("g", "h", "c"), ("a",), ("g", "b"), ("a",)]
        for path, spec in zip(asked, store.specs(asked), strict=True):
            check_spec(spec, LeafSpec(leaves[path].shape, leaves[path].dtype), path)

    def test_new_store_is_empty(self, location: Location) -> None:
        """Check that a new store has no leaves."""
        self.needs(Cap.WRITE)
        check_paths(self.opened(location, "w").paths(), [], "a new store")

    def test_create_reads_as_zero(self, location: Location) -> None:
        """Check that a new leaf reads as zeros before anything is written."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        store.create(
            {("a",): LeafSpec((3, 2), "int32"), ("s",): LeafSpec((), "bool"), ("z",): LeafSpec((0, 4), "half")}
        )
        for path, tensor in read_all(store).items():
            spec = store.specs([path])[0]
            check_same(tensor, torch.zeros(spec.shape, dtype=spec.dtype), "a new leaf")

    @pytest.mark.parametrize(("dtype", "fill"), FILLS, ids=str)
    def test_fill_value(self, location: Location, dtype: str, fill: Any) -> None:
        """Check that a new leaf reads as its fill value, in whole and in part, also around written rows."""
        self.needs(Cap.WRITE)
        spec = LeafSpec((5, 2), dtype, fill_value=fill)
        expected = torch.full(spec.shape, fill, dtype=spec.dtype)
        store = self.opened(location, "w")
        store.create({("a",): spec})
        new = f"a new leaf of fill value {fill}"
        check_same(store.read([Read(("a",))])[0], expected, new)
        if Cap.PARTIAL_READ in self.caps:
            check_same(store.read([Read(("a",), (slice(1, 4, 2),))])[0], expected[1:4:2], f"rows of {new}")
        if Cap.PARTIAL_WRITE in self.caps:
            store.write([Write(("a",), (slice(1, 2, 1),), torch.zeros(1, 2, dtype=spec.dtype))])
            (got,) = store.read([Read(("a",))])
            check_same(got[2:], expected[2:], f"{new}, below a written row")
            check_same(got[:1], expected[:1], f"{new}, above a written row")
            check_same(got[1:2], torch.zeros(1, 2, dtype=spec.dtype), f"the written row of {new}")

    def test_fill_value_survives(self, location: Location) -> None:
        """Check that unwritten rows read as the fill value after a reopening, too."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        leaf = LeafSpec((4, 2), "float32", fill_value=2.5)
        with self.opened(location, "w") as store:
            store.create({("a",): leaf, ("exact",): LeafSpec((2,), "int64", fill_value=EXACT)})
            store.save_header(header_for({("a",): numbers(1), ("exact",): numbers(1)}))
        store = self.opened(location)
        check_same(store.read([Read(("a",))])[0], torch.full((4, 2), 2.5), "a leaf of fill value 2.5, opened again")
        check_same(store.read([Read(("exact",))])[0], torch.full((2,), EXACT), "a fill value that no float is")

    def test_create_is_lazy(self, location: Location) -> None:
        """Check that a leaf of 1 GiB is created, and a corner of it read, without that much memory: also if written."""
        self.needs(Cap.WRITE, Cap.PARTIAL_READ)
        if Cap.DIRECT_DEVICE in self.caps:
            pytest.skip("a device has no lazy memory")
        store = self.opened(location, "w")
        _reset_peak()
        before = _peak_mib()
        store.create({("a",): LeafSpec((1 << 18, 1024), "float32")})
        self._check_memory(before, "creating a leaf")
        (got,) = store.read([Read(("a",), (slice(1 << 17, (1 << 17) + 2, 1), slice(5, 7, 1)))])
        check_same(got, torch.zeros(2, 2), "a corner of a leaf that was never written")
        self._check_memory(before, "reading two rows")
        store.close()
        if {Cap.PERSISTENT, Cap.PARTIAL_WRITE} <= set(self.caps) and Cap.VIEW not in self.caps:  # which maps files
            self._reads_rows_only(location)

    def _reads_rows_only(self, location: Location) -> None:
        """Check the same of a leaf that was written, and committed."""
        with self.opened(location, "w") as store:
            store.create({("a",): LeafSpec((1 << 14, 1024), "float32")})
            store.write([Write(("a",), (slice(7, 8, 1),), numbers(1, 1024))])
            store.save_header(header_for({("a",): numbers(1)}))
        with self.opened(location) as store:
            gc.collect()
            _reset_peak()
            before = _peak_mib()
            (got,) = store.read([Read(("a",), (slice(7, 9, 1), slice(5, 7, 1)))])
            check_same(got, torch.tensor([[5.0, 6.0], [0.0, 0.0]]), "a corner of a leaf of which a row was written")
            self._check_memory(before, "reading two rows", 64)

    def _check_memory(self, before: float, doing: str, mib: int = 1024) -> None:
        grown = _peak_mib() - before
        if grown >= mib * 0.4:
            raise failure(f"{doing} takes memory in proportion to the leaf: {grown:.0f} MiB for a leaf of {mib} MiB")

    def test_create_replaces(self, location: Location) -> None:
        """Check that creating a leaf again sets the new shape and dtype, and keeps none of the old values."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(4, 3), ("b",): numbers(2)})
        store.create({("a",): LeafSpec((2, 5), "int16")})
        check_spec(store.specs([("a",)])[0], LeafSpec((2, 5), "int16"), ("a",))
        a, b = store.read([Read(("a",)), Read(("b",))])
        check_same(a, torch.zeros(2, 5, dtype=torch.int16), "a leaf that was created again")
        check_same(b, numbers(2), "a leaf beside one that was created again")
        store.create({("b",): LeafSpec((2,), "float32")})
        check_same(store.read([Read(("b",))])[0], torch.zeros(2), "a leaf of the same spec kept its old values")

    def test_unknown_leaf_option(self, location: Location) -> None:
        """Check that an unknown layout option is refused by name, and no leaf of the batch is made."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        with raises(OptionError, match="no_such_option", doing="a layout option that there is not"):
            store.create({("ok",): LeafSpec((2,), "int8"), ("a",): LeafSpec((2,), "int8", no_such_option=1)})
        check_paths(store.paths(), [], "a refused create left leaves behind")

    def test_delete(self, location: Location) -> None:
        """Check that deleted leaves are gone, the others are unchanged, and the name can be used again."""
        self.needs(Cap.WRITE)
        leaves = {("a",): numbers(2), ("g", "b"): numbers(3), ("g", "c"): numbers(4)}
        store = self.holding(location, leaves)
        store.delete([("a",), ("g", "b")])
        check_paths(store.paths(), [("g", "c")], "after delete")
        check_same(store.read([Read(("g", "c"))])[0], numbers(4), "a leaf beside deleted ones")
        with raises(KeyNotFoundError, doing="reading a deleted leaf"):
            store.read([Read(("a",))])
        store.create({("a",): LeafSpec((3,), "int8")})
        check_same(store.read([Read(("a",))])[0], torch.zeros(3, dtype=torch.int8), "a leaf of a deleted name")

    def test_delete_all_or_nothing(self, location: Location) -> None:
        """Check that nothing is deleted when one leaf is missing, at any place in the list, and the error names it."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(2), ("b",): numbers(3)})
        for asked in ([("a",), ("absent-leaf",), ("b",)], [("a",), ("b",), ("absent-leaf",)]):
            with raises(KeyNotFoundError, match="absent-leaf", doing="delete of a leaf that is not there"):
                store.delete(asked)
            check_paths(store.paths(), [("a",), ("b",)], f"after a refused delete of {asked}")
            check_same(store.read([Read(("a",))])[0], numbers(2), "after a refused delete")

    def test_delete_survives(self, location: Location) -> None:
        """Check that a deleted leaf is still gone after a reopening."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        leaves = {("a",): numbers(2), ("b",): numbers(3)}
        self.saved(location, leaves)
        with self.opened(location, "r+") as store:
            store.delete([("a",)])
            store.save_header(header_for({("b",): leaves[("b",)]}))
        check_paths(self.opened(location).paths(), [("b",)], "after delete, save_header and a reopening")

    def test_rename(self, location: Location) -> None:
        """Check that a renamed leaf keeps spec and values, in and out of groups, and the old name is gone."""
        self.needs(Cap.WRITE)
        leaves = {("a",): numbers(2, 3), ("g", "b"): numbers(3).to(torch.bfloat16), ("c",): numbers(1)}
        store = self.holding(location, leaves)
        store.rename({("a",): ("new", "deep", "a"), ("g", "b"): ("b",)})
        got = read_all(store)
        check_paths(got, [("b",), ("c",), ("new", "deep", "a")], "after rename")
        check_same(got["new", "deep", "a"], leaves[("a",)], "a renamed leaf")
        check_same(got[("b",)], leaves["g", "b"], "a leaf renamed out of its group")
        check_same(got[("c",)], leaves[("c",)], "a leaf beside renamed ones")
        filled = LeafSpec((2,), "int16", fill_value=3)
        store.create({("filled",): filled})
        store.rename({("filled",): ("moved",)})
        check_spec(store.specs([("moved",)])[0], filled, ("moved",))

    def test_rename_over_and_in_circles(self, location: Location) -> None:
        """Check that the moves of one call happen at once: a swap swaps, an existing name is replaced."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(2), ("b",): numbers(3), ("c",): numbers(4), ("d",): numbers(5)})
        store.rename({("a",): ("b",), ("b",): ("a",), ("c",): ("c",)})
        got = read_all(store)
        swapped = {("a",): numbers(3), ("b",): numbers(2), ("c",): numbers(4), ("d",): numbers(5)}
        check_leaves(got, swapped, "after a swap of 'a' and 'b'")
        store.rename({("c",): ("d",)})
        replaced = {("a",): numbers(3), ("b",): numbers(2), ("d",): numbers(4)}
        check_leaves(read_all(store), replaced, "after a rename of 'c' to 'd', which was there")
        if Cap.PERSISTENT not in self.caps:
            return
        store.save_header(header_for(replaced))
        store.close()
        with self.opened(location, "r+") as store:
            store.rename({("d",): ("b",)})
            store.save_header(header_for({("a",): numbers(3), ("b",): numbers(4)}))
        committed = {("a",): numbers(3), ("b",): numbers(4)}
        check_leaves(
            read_all(self.opened(location)), committed, "opened again after a rename of 'd' to 'b', which was there"
        )

    def test_rename_there_and_back(self, location: Location) -> None:
        """Check that an unwritten leaf moves to and fro, before and after a commit, without remains."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        leaves = {("a",): torch.zeros(2), ("c",): numbers(3)}
        with self.opened(location, "w") as store:
            store.create({path: LeafSpec(value.shape, value.dtype) for path, value in leaves.items()})
            store.write([Write(("c",), (), leaves[("c",)])])
            store.save_header(header_for(leaves))
        for _ in range(2):
            with self.opened(location, "r+") as store:
                store.rename({("a",): ("b",)})
                store.rename({("b",): ("a",)})
                store.save_header(header_for(leaves))
            with self.opened(location) as store:
                got = read_all(store)
            check_paths(got, leaves, "renamed to and fro")
            check_leaves(got, leaves, "renamed to and fro")

    def test_rename_missing(self, location: Location) -> None:
        """Check that no leaf is renamed when one is missing."""
        self.needs(Cap.WRITE)
        store = self.holding(location, {("a",): numbers(2)})
        with raises(KeyNotFoundError, match="absent-leaf", doing="rename of a leaf that is not there"):
            store.rename({("a",): ("b",), ("absent-leaf",): ("c",)})
        check_paths(store.paths(), [("a",)], "after a refused rename")
        check_same(store.read([Read(("a",))])[0], numbers(2), "after a refused rename")

    def test_resize_tells_the_truth(self, location: Location) -> None:
        """Check that leaves grow and shrink with RESIZE, and raise `UnsupportedError` without it."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        store.create({("a",): LeafSpec((3, 2), "float32", fill_value=9), ("b",): LeafSpec((4,), "int64")})
        value, other = numbers(3, 2), numbers(4).long()
        store.write([Write(("a",), (), value), Write(("b",), (), other)])
        if Cap.RESIZE not in self.caps:
            with raises(UnsupportedError, doing="resize without Cap.RESIZE") as caught:
                store.resize({("a",): 5})
            check_names(caught.value, store.url)
            check_mentions(caught.value, "RESIZE")
            return
        try:
            store.resize({("a",): 5, ("b",): 2})
        except UnsupportedError as error:
            raise failure(f"RESIZE is declared, and resize is not there: {error}") from error
        check_spec(store.specs([("a",)])[0], LeafSpec((5, 2), "float32", fill_value=9), ("a",))
        check_spec(store.specs([("b",)])[0], LeafSpec((2,), "int64"), ("b",))
        check_same(store.read([Read(("a",))])[0], torch.cat([value, torch.full((2, 2), 9.0)]), "a leaf that grew")
        check_same(store.read([Read(("b",))])[0], other[:2], "a leaf that shrank")
        store.resize({("a",): 1, ("b",): 0})
        store.resize({("a",): 3, ("b",): 3})
        check_same(
            store.read([Read(("a",))])[0],
            torch.cat([value[:1], torch.full((2, 2), 9.0)]),
            "rows that a shrink removed came back",
        )
        check_same(
            store.read([Read(("b",))])[0], torch.zeros(3, dtype=torch.int64), "a leaf cut to no rows, and grown again"
        )
        store.write([Write(("a",), (), value + 1)])
        check_same(store.read([Read(("a",))])[0], value + 1, "a leaf written after it was resized")
        store.resize({("a",): 1})
        store.resize({("a",): 3})
        same_length = torch.cat([value[:1] + 1, torch.full((2, 2), 9.0)])
        check_same(store.read([Read(("a",))])[0], same_length, "rows that a shrink removed came back")
        store.resize({("a",): 5})
        longest = torch.cat([value[:1] + 1, torch.full((4, 2), 9.0)])
        check_same(store.read([Read(("a",))])[0], longest, "rows came back with a length that the leaf had before")

    def test_resize_missing(self, location: Location) -> None:
        """Check that no leaf is resized when one is missing."""
        self.needs(Cap.WRITE, Cap.RESIZE)
        store = self.holding(location, {("a",): numbers(2)})
        with raises(KeyNotFoundError, match="absent-leaf", doing="resize of a leaf that is not there"):
            store.resize({("a",): 5, ("absent-leaf",): 3})
        check_equal(store.specs([("a",)])[0].shape, (2,), "shape of leaf 'a' after a refused resize")

    def test_resize_is_seen_at_once(self, location: Location) -> None:
        """Check that `specs` and `read` tell the new length right after `resize` of a leaf of the last commit."""
        self.needs(Cap.WRITE, Cap.RESIZE)
        leaves = {("a",): numbers(3, 2), ("b",): numbers(4).long()}
        if Cap.PERSISTENT in self.caps:
            self.saved(location, leaves)
            store = self.opened(location, "r+")
        else:
            store = self.holding(location, leaves)
            store.save_header(header_for(leaves))
        for lengths in ((5, 2), (2, 6)):
            store.resize({("a",): lengths[0], ("b",): lengths[1]})
            for path, length in zip(leaves, lengths, strict=True):
                shape = (length, *leaves[path].shape[1:])
                what = f"leaf {path_text(path)} after resize, before the commit"
                check_equal(store.specs([path])[0].shape, shape, f"specs of {what}")
                check_equal(tuple(store.read([Read(path)])[0].shape), shape, f"`read` of {what}")

    def test_resize_survives(self, location: Location) -> None:
        """Check the new length after a reopening, and that cut rows stay away, whatever the storage has of them."""
        self.needs(Cap.WRITE, Cap.RESIZE, Cap.PERSISTENT)
        value = numbers(300, 40, start=1)
        self.saved(location, {("a",): value})
        for lengths in ((7,), (300,), (310,), (9, 310)):
            with self.opened(location, "r+") as store:
                for length in lengths:
                    store.resize({("a",): length})
                store.save_header(header_for({("a",): numbers(1)}))
            with self.opened(location) as store:
                (got,) = store.read([Read(("a",))])
            want = torch.zeros(lengths[-1], 40)
            want[:7] = value[:7]
            check_same(got, want, f"cut to 7 rows, and resized to {' and '.join(map(str, lengths))}, opened again")

    def test_odd_keys(self, location: Location) -> None:
        """Check that any string is a key, also those that a file system or a URL could misread."""
        leaves: dict[Path, torch.Tensor] = {(key,): numbers(3, start=i) for i, key in enumerate(ODD_KEYS)}
        leaves |= {("in", key): numbers(2, start=i) for i, key in enumerate(ODD_KEYS)}
        self._keeps(location, leaves)

    def test_odd_groups(self, location: Location) -> None:
        """Check that any string is a group, and that `("a", "b")` and `("a/b",)` are two leaves."""
        leaves: dict[Path, torch.Tensor] = {(key, "leaf"): numbers(2, start=i) for i, key in enumerate(ODD_KEYS)}
        for i, path in enumerate([("p", "q"), ("p/q",), ("p.q",), ("p\\q",), ("p%2Fq",)]):
            leaves[path] = numbers(2, start=100 + i)
        self._keeps(location, leaves)

    def test_deep_groups(self, location: Location) -> None:
        """Check fifty nested groups."""
        self._keeps(location, {deep_path(50): numbers(2), deep_path(3): numbers(3), deep_path(0): numbers(1)})

    def test_many_leaves(self, location: Location) -> None:
        """Check three hundred leaves in one batch."""
        self._keeps(location, {(f"g{i % 7}", f"leaf{i}"): numbers(2, start=i) for i in range(300)})

    def _keeps(self, location: Location, leaves: dict[Path, torch.Tensor]) -> None:
        """Check that the store holds the leaves, also after a reopening."""
        stores = [self.holding(location, leaves)]
        if Cap.PERSISTENT in self.caps:
            stores.pop().close()
            self.saved(location, leaves)
            stores.append(self.opened(location))
        for store in stores:
            listed = list(store.paths())
            check_paths(listed, leaves, "paths()")
            got = store.read([Read(path) for path in leaves])
            for (path, value), tensor in zip(leaves.items(), got, strict=True):
                check_same(tensor, value, f"{path} came back as another leaf's values")


def _reset_peak() -> None:
    """Forget the memory that earlier tests took: their peak would hide that of this one. Linux only."""
    with suppress(OSError):
        FsPath("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    # The kernel's own figure first: that of getrusage begins with the peak of the process that started this one.
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", FsPath("/proc/self/status").read_text())
        if found is not None:
            return int(found[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
