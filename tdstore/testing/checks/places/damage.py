"""The kit's tests of damaged storage: flipped bytes, and files that were cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tdstore.errors import StoreError
from tdstore.store import Cap, Store
from tdstore.testing.checks.headers import RICH
from tdstore.testing.checks.rivals.sharing import OLD
from tdstore.testing.comparing import (
    check_equal,
    check_header,
    check_leaves,
    check_names,
    check_same,
    difference,
    error_name,
    failure,
)
from tdstore.testing.samples import sample
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    header_for,
    largest_file,
    local_files,
    local_path,
    numbers,
    read_all,
)
from tdstore.types import Path, Read, Write

FLIPS = 8
"""Bytes that are flipped, one after the other, until one of them changes what is read."""
EDGE = 512
"""Bytes at each end of a file of which some are flipped, one at a time."""
BEGIN = 64
"""Bytes at the beginning of a file of which every fourth one is flipped."""
CUTS = 9
"""How often a third of a file is cut off, until what is read is gone."""


class DamageTests(StoreSetup):
    """Tests that a damaged file is an error or a fault, and never other values."""

    def test_corruption_noticed(self, location: Location) -> None:
        """Check that a flipped byte of a committed leaf is detected: by opening, by reading, or by `verify`.

        A byte that no read looks at, such as one at the unused end of a page, may be flipped.
        """
        self.needs(Cap.PERSISTENT)
        leaves = {("big",): sample("uint8", (1 << 9, 1 << 10)), ("small",): numbers(2)}
        self.saved(location, leaves)
        with self.opened(location) as store:
            if type(store).verify is Store.verify:
                pytest.skip("the store keeps no checksums (it does not override verify)")
            check_equal(store.verify(), [], "faults that verify finds in a store that has none")
        for _ in range(FLIPS):
            self.corrupt(location)
            try:
                with self.opened(location) as store:
                    if faults := self._faults(store):
                        blamed = [fault.path for fault in store.verify([("small",)])]
                        check_equal(blamed, [], "faults of leaf 'small', which is not damaged")
                        check_equal(faults, [("big",)], "leaves that verify() names where a byte of 'big' was flipped")
                        return
                    got = read_all(store)
            except StoreError:
                return
            check_leaves(got, leaves, "a flipped byte went unnoticed: no error, and verify() is []")
            if type(self).corrupt is not StoreSetup.corrupt:
                raise failure("corrupt() of the class changed nothing that is read: it must flip a byte of a leaf")
        pytest.skip(f"{FLIPS} flipped bytes changed nothing that is read: override corrupt()")

    def _faults(self, store: Store) -> list[Path]:
        """Return the leaves that `verify` names. It may raise where no leaf can be read, and not for one leaf."""
        __tracebackhide__ = True
        try:
            return [fault.path for fault in store.verify()]
        except StoreError as error:
            store.read([Read(("small",))])
            raise failure(
                f"verify() raises {error_name(type(error))}, and not a Fault for each damaged leaf: {error}"
            ) from error

    def _save_twice(self, location: Location, leaves: Leaves) -> None:
        """Save other values, and commit these in place: a damaged store could give the earlier commit."""
        if Cap.WRITE not in self.caps:
            return self.saved(location, leaves)
        self.saved(location, {path: ~value for path, value in leaves.items()}, header_for(leaves))
        with self.opened(location, "r+") as store:
            store.write([Write(path, (), value) for path, value in leaves.items()])
            store.save_header(header_for(leaves))
        return None

    def _check_all_faults(self, location: Location, leaves: Leaves) -> None:
        """Flip a byte in the last row of each of several leaves, where these can be found: `verify` names them all."""
        __tracebackhide__ = True
        for value in leaves.values():
            row = value[-1].numpy().tobytes()
            file = next((one for one in local_files(location) if row in one.read_bytes()), None)
            if file is None:
                return
            good = file.read_bytes()
            at = good.rfind(row)
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            with self.opened(location) as store:
                found = sorted(fault.path for fault in store.verify())
        except StoreError:
            return  # it cannot be opened
        check_equal(found, sorted(leaves), "leaves that verify() names where a byte of each was flipped")

    def test_corruption_noticed_anywhere(self, location: Location) -> None:
        """Check that a flipped byte anywhere, also in the last row, is detected, or changes nothing that is read."""
        self.needs(Cap.PERSISTENT)
        big = sample("uint8", (1 << 9, 1 << 7))
        both = {("big",): big, ("other",): sample("uint8", (1 << 8, 1 << 7), 1)}
        self._save_twice(location, both)
        with self.opened(location) as store:
            if type(store).verify is Store.verify:
                pytest.skip("the store keeps no checksums (it does not override verify)")
        row = big[-1].numpy().tobytes()
        file = next((one for one in local_files(location) if row in one.read_bytes()), largest_file(location))
        good = file.read_bytes()
        last = good.rfind(row)  # -1 where rows are not stored as they are
        ends = range(0, min(len(good), EDGE), EDGE // 16)  # a header, or a catalogue, is often there
        begin = range(0, min(len(good), BEGIN), 4)  # where it may say which commit is the last one
        places = {*(len(good) * i // 8 for i in range(8)), *begin, *ends, *(len(good) - 1 - at for at in ends)}
        for at in (last, *sorted(places)):
            if at < 0:
                continue
            where = ", in the last row," if at == last else ""
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            try:
                with self.opened(location) as store:
                    try:
                        (got,) = store.read([Read(("big",))])
                    except StoreError as error:
                        if not store.verify():
                            text = (
                                f"byte {at} of {len(good)} of {file.name}{where} was flipped: verify() finds no fault"
                            )
                            raise failure(f"{text}, and a read of leaf 'big' raises {error}") from error
                        continue
                    faults = store.verify()
            except StoreError:
                continue
            except Exception as error:
                text = f"byte {at} of {len(good)} of {file.name}{where} was flipped: a StoreError is expected"
                raise failure(f"{text}, not {error_name(type(error))}: {error}") from error
            if not faults and (differs := difference(got, big)):
                raise failure(
                    f"byte {at} of {len(good)} of {file.name}{where} was flipped, and no error was raised: "
                    f"verify() is [], and leaf 'big' is read with {differs}"
                )
        file.write_bytes(good)
        self._check_all_faults(location, both)

    def test_any_cut_noticed(self, location: Location) -> None:
        """Check that each file may be cut to any length: what is read stays the same, or it is a `StoreError`."""
        self.needs(Cap.PERSISTENT)
        self.saved(location, OLD, RICH)
        largest_file(location)  # skips what is not local
        path = local_path(location)
        assert path is not None, "largest_file has skipped it"

        def cut_all(say: Callable[[str], object]) -> None:
            for file in sorted(p for p in path.parent.rglob("*") if p.is_file()):
                good = file.read_bytes()
                for size in sorted({0, 1, len(good) // 2, len(good) * 9 // 10, len(good) - 1} - {-1, len(good)}):
                    file.write_bytes(good[:size])
                    what = f"{file.relative_to(path.parent)} was cut to {size} of {len(good)} bytes"
                    say(what)
                    self._check_cut(location, what)
                file.write_bytes(good)

        self.guarded(location, cut_all, "cutting files")

    def _check_cut(self, location: Location, what: str) -> None:
        __tracebackhide__ = True
        try:
            with self.opened(location) as store:
                check_leaves(read_all(store), OLD, f"{what}, without an error")
                check_header(store.load_header(), RICH, f"{what}, without an error: the header")
        except StoreError:
            pass
        except AssertionError:
            raise
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error

    def test_truncation_noticed(self, location: Location) -> None:
        """Check that a truncated store is an error that names the location, never zeros and never a crash."""
        self.needs(Cap.PERSISTENT)
        big = sample("uint8", (1 << 9, 1 << 10))
        self.saved(location, {("big",): big, ("small",): numbers(2)})
        if type(self).truncate is StoreSetup.truncate:
            largest_file(location)  # skips what is not local

        def read_cut(say: Callable[[str], object]) -> None:
            for _ in range(CUTS):
                self.truncate(location)
                say("reading what was cut short")
                try:
                    with self.opened(location) as store:
                        (got,) = store.read([Read(("big",))])
                except StoreError as error:
                    check_names(error, location)
                    return
                except Exception as error:
                    name = error_name(type(error))
                    raise failure(f"reading what was cut short: StoreError is expected, not {name}: {error}") from error
                check_same(got, big, "what was cut short is read without an error: leaf 'big'")
            raise failure(f"cut short {CUTS} times, and leaf 'big' is read: truncate() must cut off what is stored")

        self.guarded(location, read_cut, "reading what was cut short")
