"""`CrashTests`: writers that are killed at every change of the storage, and disks that are full."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from tdstore.errors import CorruptStoreError, DirtyStoreError, StoreError, StoreNotFoundError
from tdstore.header import Header
from tdstore.store import Cap, Store
from tdstore.testing.comparing import check_equal, check_header, check_leaves, check_unchanged, failure, raises
from tdstore.testing.full_disks import NEW, OLD, FullDiskTests
from tdstore.testing.processes.deaths import (
    StoredFiles,
    Work,
    at_steps,
    copies,
    deaths,
    die,
    die_at,
    in_child,
    killed_after,
    small_disk,
)
from tdstore.testing.processes.points import OUTSIDE, find_points
from tdstore.testing.processes.syncs import find_syncs, with_failing_sync
from tdstore.testing.processes.syscalls import (
    is_traceable,
    kill_points,
    kind,
    named_call,
    needs_strace,
    traced,
    unsynced,
)
from tdstore.testing.setup import (
    Leaves,
    Location,
    fill,
    header_for,
    load,
    local_path,
    read_all,
    same_leaves,
)
from tdstore.testing.setup import save as save_leaves
from tdstore.types import Read, Write

__all__ = ["NEW", "OLD", "CrashTests", "deaths", "die", "die_at", "in_child", "killed_after", "small_disk"]

WORKS = ("save", "rows", "structure")


# -- conditions --------------------------------------------------------------------------
class CrashTests(FullDiskTests):
    """Tests that a writer that is killed leaves the old store, the new one, or an error that says so.

    The leaves and the header are compared, which detects a commit of two steps. A kill leaves data that was passed to
    the system in place: it cannot detect a missing sync. `test_syncs` counts those, by `strace`.

    It forks (so: no Windows), and traces a writer with `strace` to find the functions that change the storage. A writer
    is killed before and after the k-th call of one of these, for every k, while it saves over a store ("save"), writes
    rows in place ("rows") and creates, renames, resizes and deletes leaves ("structure"); then the store is read.

        class TestMyCrashes(CrashTests):
            open = staticmethod(open_mine)
            caps = Cap.WRITE | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.PERSISTENT
            outcomes = {"rows": {"old", "dirty", "new"}}

            @pytest.fixture
            def location(self, tmp_path):
                return tmp_path / "store"

    A class may set:

        outcomes             of a work, all that may be found: "old", "new", "dirty", "corrupt" (default: old, new)
        torn                 works that may leave "corrupt" when killed inside of a library
        points               functions that change the storage and that tracing cannot find
        layouts, reading     options of the opener to save with (by name), and to look with after a death
        durable              options under which commits are synced, `{}` where all are; without them the tests of
                             syncs are skipped
        steps, least         every so-many-th change is a kill; fewer changes than `least` are an error
        copied               look at copies of the storage, at each change of one writer, instead of killing many
        random_kills, traced_kills, flips, disk_mib      how many, and how large a disk is filled
        noticed              share of flipped bits that must raise an error (0.4)
    """

    points: ClassVar[Sequence[tuple[Any, str]]] = ()
    """(owner, name) of functions that change the storage and that tracing cannot find: `(Mine, "write")`, which writes
    through a memory map. Where `strace` is missing, these are all: `(os, "pwrite")`, `(h5py.File, "flush")`."""
    outcomes: ClassVar[Mapping[str, set[str]]] = {}
    """Of a work, all that is found after it was killed: {"old", "new"} where nothing is said, and beside these "dirty"
    (a `DirtyStoreError` that names leaves) and "corrupt" (a `CorruptStoreError`)."""
    torn: ClassVar[frozenset[str]] = frozenset()
    """Works that may leave "corrupt" when they are killed between `points`, inside of a library."""
    layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Options of the opener to save with, by name."""
    steps: ClassVar[Mapping[str, int]] = {}
    """Kill a work only at every so-many-th change."""
    least: ClassVar[int] = 4
    """Fewer changes than that in one work mean that `points` do not see the storage."""
    copied: ClassVar[bool] = False
    """Instead of a killed writer for each change, stop one writer at each, and look at copies of the storage (`kept`).

    It takes a fraction of the time. What only the death of a process does, such as releasing locks, is left to the
    kills by the clock and at system calls."""
    random_kills: ClassVar[int] = 25
    """Kills by the clock, of each work."""
    traced_kills: ClassVar[int] = 8
    """Kills at calls of the system, of each work: one of each kind at least, and so many, spread over all of them."""
    durable: ClassVar[Mapping[str, Any] | None] = None
    """Options under which commits are synced, such as `{"durable": "commit"}`; `{}` where all are. Then `test_syncs`
    and `test_failing_syncs` look."""
    flips: ClassVar[int] = 4
    """Bits flipped in each file."""
    noticed: ClassVar[float] = 0.4
    """Share of the flips that must raise an error; a file of pages has space that is never read."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one case for each layout of the class."""
        for name, table in (("layout", self.layouts), ("disk_layout", self.full_disk_layouts)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(table))

    _headers: tuple[Header, Header] | None = None
    """The header before a work, and after it."""

    # -- overridable ---------------------------------------------------------------------
    def kept(self, location: Location) -> Work:
        """Save the present files; the result restores them, and removes all others. The default knows local files."""
        path = local_path(location)
        assert path is not None, f"{location} is not local: override kept()"
        return StoredFiles(path.parent)

    def files(self, location: Location) -> list[str]:
        """List the files inside of the store. The default lists a local folder; a store in one file has none.

        A save after a death must leave as many as it does without. Return `[]` for a store that keeps what it had.
        """
        path = local_path(location)
        assert path is not None, f"{location} is not local: override files()"
        return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())

    def is_marked(self, location: Location) -> bool:
        """Check whether the storage has the dirty marker of a writer. Override for stores that have one."""
        pytest.skip("is_marked() is not overridden")

    # -- works ---------------------------------------------------------------------------
    def work(self, name: str, location: Location, layout: Mapping[str, Any]) -> None:
        """Do one of `WORKS` on a store that holds `OLD`.

        Args:
            name: the name of the work.
            location: the store.
            layout: options for `save`.
        """
        if name == "save":
            save_leaves(self.made, location, NEW, values={"s": "new"}, **layout)
            return
        with self.made(location, "r+", **layout) as store:
            self.rows(store) if name == "rows" else self.structure(store)

    def rows(self, store: Store) -> None:
        """Write all rows of all leaves, from the last to the first; whole leaves without PARTIAL_WRITE."""
        for path, value in NEW.items():
            if Cap.PARTIAL_WRITE in self.caps:
                for part in torch.arange(100).flip(0).split(40):
                    store.write([Write(path, (part,), value[part])])
            else:
                store.write([Write(path, (), value)])
            store.flush()

    def structure(self, store: Store) -> None:
        """Create, resize (with RESIZE), rename and delete leaves."""
        made = {("made", "x"): torch.ones(50, 9), ("made", "y"): torch.arange(7)}
        fill(store, made)
        if Cap.RESIZE in self.caps:
            store.resize({("n", "b"): 130})
        store.rename({("a",): ("moved", "a")})
        store.delete([("c",)])
        store.save_header(header_for({**made, ("moved", "a"): OLD[("a",)], ("n", "b"): OLD["n", "b"]}))

    def outcome(self, location: Location, new: Leaves) -> str:
        """Return the state that a reader finds: "old", "new", "dirty" or "corrupt".

        Args:
            location: the place of the store.
            new: the leaves after the work.

        Raises:
            AssertionError: the leaves or the header are neither the old ones nor the new ones.
        """
        try:
            with self.made(location, **self.reading) as store:
                found, header = read_all(store), store.load_header()
        except DirtyStoreError as error:
            named = bool(error.leaves) and "recover='accept'" in str(error)
            assert named, f"it names no leaves, or not what to do: {error}"  # noqa: PT017
            load(self.made, location, recover="accept")
            return "dirty"
        except CorruptStoreError:
            return "corrupt"
        is_old, is_new = same_leaves(found, OLD), same_leaves(found, new)
        if not is_old and not is_new:
            raise AssertionError(
                f"neither old nor new: {_differences(found, OLD, 'old')}; {_differences(found, new, 'new')}"
            )
        if self._headers is not None:
            old_header, new_header = self._headers
            if header not in (old_header, new_header):
                raise AssertionError(f"the header is neither the old one nor the new one: {header}")
            if old_header != new_header and (header == new_header) != is_new:
                here, there = ("new", "old") if is_new else ("old", "new")
                raise AssertionError(
                    f"neither old nor new: the leaves are the {here} ones and the header is the {there} one; "
                    "save_header must commit both in one step"
                )
        return "old" if is_old else "new"

    def prepared(self, work: str, location: Location, layout: Mapping[str, Any]) -> tuple[Work, Leaves, float]:
        """Save the old store, and do a work on it once.

        Args:
            work: the name of the work.
            location: the store.
            layout: options for saving.

        Returns:
            A function that restores the old store, the contents after the work, and its duration in seconds.
        """
        save_leaves(self.made, location, OLD, **layout)
        with self.made(location) as store:
            old_header = store.load_header()
        put_back = self.kept(location)
        start = time.perf_counter()
        self.work(work, location, layout)
        seconds = time.perf_counter() - start
        with self.made(location) as store:
            self._headers = old_header, store.load_header()
            return put_back, read_all(store), seconds

    def found_points(self, work: Work) -> Collection[str]:
        """Return the names of the functions in which a writer changes the storage; none without `strace`."""
        if not is_traceable():
            if not self.points:
                needs_strace()
            return ()
        found = find_points(work)
        if unseen := [name for name in found.pop(OUTSIDE, ()) if name]:
            # Threads of a C library: `test_kill_at_system_calls` kills there.
            assert found or self.points, f"the storage is changed by no function that Python sees: {unseen[0]}"
        return found

    # -- kills ---------------------------------------------------------------------------
    @pytest.mark.parametrize("work", WORKS)
    def test_kill_at_every_call(self, location: Location, work: str, layout: str) -> None:
        """Kill a writer at any change, and check for the `outcomes` of the class, and the clean-up by the next."""
        options = self.layouts[layout]
        put_back, new, _ = self.prepared(work, location, options)
        seen: dict[str, int] = {}
        left: set[tuple[str, ...]] = set()
        later: list[Work] = []
        put_back()
        save_leaves(self.made, location, {})
        clean = self.files(location)
        put_back()
        found = self.found_points(lambda: self.work(work, location, options))
        step = self.steps.get(work, 1)
        for died in self._ends(put_back, lambda: self.work(work, location, options), location, found, step):
            result = self.outcome(location, new)
            seen[result] = seen.get(result, 0) + 1
            assert died or result == "new", f"the work {work!r} came to its end, and a reader finds {result!r}"
            state = tuple(map(kind, (*self.strays(location), "/", *self.files(location))))
            if died and state not in left and _is_power_of_two(len(left) + 1):
                if self.copied:  # the next copy goes into the file that it is one of
                    later.append(self.kept(location))
                else:
                    save_leaves(self.made, location, {})
                    self._check_tidied(location, clean)
            left.add(state)
        for leave_again in later:
            leave_again()
            save_leaves(self.made, location, {})
            self._check_tidied(location, clean)
        promised = self.outcomes.get(work, {"old", "new"})
        assert seen.get("old", 0) > 1, f"hardly a kill left the old store: {seen}"
        assert set(seen) == promised, f"after kills {seen} were found, and `outcomes` says {sorted(promised)}"

    def test_kill_a_first_save(self, location: Location) -> None:
        """Kill a writer that makes a store where none is: there is none then, or a whole one, and the next tidies."""
        options = list(self.layouts.values())[-1]

        def work() -> None:
            self.work("save", location, options)

        put_back = self.kept(location)
        work()
        clean = self.files(location)
        put_back()
        found = self.found_points(work)
        put_back()
        left: set[tuple[str, ...]] = set()
        for died in self._ends(put_back, work, location, found, 3 * self.steps.get("save", 1)):
            what = "a writer that made a store was killed"
            try:
                check_leaves(load(self.made, location, **self.reading), NEW, what)
            except StoreNotFoundError:
                assert died, "a save came to its end, and no store is there"
            except StoreError as error:
                raise failure(
                    f"{what}: no store is there, or a whole one, not {type(error).__name__}: {error}"
                ) from error
            state = tuple(map(kind, (*self.strays(location), "/", *self.files(location))))
            if died and state not in left and _is_power_of_two(len(left) + 1):
                work()
                self._check_tidied(location, clean)
            left.add(state)

    def _ends(
        self, put_back: Work, work: Work, location: Location, found: Collection[str], step: int
    ) -> Iterator[bool]:
        """Put the storage into the state that a writer leaves that dies at its k-th change, for one k after another."""
        if self.copied:
            put_back()
            copy = partial(self.kept, location)
            yield from copies(work, lambda do: at_steps(self.points, do, found), copy, step=step, least=self.least)
        else:
            yield from deaths(put_back, work, lambda k: die_at(self.points, k, found), step=step, least=self.least)

    def _check_tidied(self, location: Location, clean: list[str]) -> None:
        """Check that a save after a death left no file but those that it leaves without a death."""
        what = "what a dead writer left stays when the next one has saved"
        check_equal(self.strays(location), [], f"{what}, beside the store")
        files, known = self.files(location), set(map(kind, clean))
        if len(files) > len(clean):
            others = [name for name in files if kind(name) not in known] or files
            raise failure(
                f"{what}, inside of it: {len(files)} files instead of {len(clean)}, such as {', '.join(others[:4])}"
            )

    @pytest.mark.parametrize("work", WORKS)
    def test_kill_at_random_moments(self, location: Location, work: str) -> None:
        """Kill a writer by the clock, also inside of library calls."""
        layout = list(self.layouts.values())[-1]
        put_back, new, seconds = self.prepared(work, location, layout)
        allowed = self.outcomes.get(work, {"old", "new"}) | ({"corrupt"} if work in self.torn else set())
        chance = random.Random(0)
        for _ in range(self.random_kills):
            put_back()
            killed_after(lambda: self.work(work, location, layout), chance.uniform(0, 1.5 * seconds))
            found = self.outcome(location, new)
            assert found in allowed, f"a kill left {found!r}, and `outcomes` says {sorted(allowed)}"

    @pytest.mark.parametrize("work", WORKS)
    def test_kill_at_system_calls(self, location: Location, work: str) -> None:
        """Kill a writer at system calls, spread over the work, also inside of C libraries."""
        needs_strace()
        layout = list(self.layouts.values())[-1]
        put_back, new, _ = self.prepared(work, location, layout)
        allowed = self.outcomes.get(work, {"old", "new"}) | ({"corrupt"} if work in self.torn else set())
        put_back()
        status, calls = traced(lambda: self.work(work, location, layout))
        assert status == 0, f"the work {work!r} failed under strace"
        for number in kill_points(calls, self.traced_kills):
            put_back()
            status, _ = traced(lambda: self.work(work, location, layout), at=named_call(calls, number))
            doing = f"killed at call {number} of {len(calls)}, {calls[number - 1].partition('(')[0].split()[-1]}"
            try:
                found = self.outcome(location, new)
            except AssertionError as error:
                raise AssertionError(f"{doing}: {error}") from error
            assert found in allowed, f"{doing}: the store is {found!r}, and `outcomes` says {sorted(allowed)}"
            assert status or found == "new", f"the work {work!r} came to its end, and a reader finds {found!r}"

    @pytest.mark.parametrize("work", ["save", "structure"])
    def test_syncs(self, location: Location, work: str) -> None:
        """Check that a commit with the options of `durable` syncs its files after they were written.

        A kill cannot detect this: data passed to the system outlives the process, but not a loss of power.
        """
        if self.durable is None:
            pytest.skip("the class names no options under which commits are synced (durable)")
        needs_strace()
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_syncs"
        layout = {**list(self.layouts.values())[-1], **self.durable}
        save_leaves(self.made, location, OLD, **layout)
        status, calls = traced(lambda: self.work(work, location, layout))
        assert status == 0, f"the work {work!r} failed under strace"
        assert any("sync(" in call for call in calls), f"{work}: nothing is synced: the power may take a commit"
        faults = unsynced(calls, path.parent)
        assert not faults, f"{work}: not synced before it was published: {'; '.join(faults[:3])}"

    @pytest.mark.parametrize("work", WORKS)
    def test_failing_syncs(self, location: Location, work: str) -> None:
        """Check that a commit with the options of `durable` is an error where the disk refuses to sync a file.

        The system reports such an error once, and may have dropped the data: to ignore it, or to sync again, is to
        promise what is not on the disk. Folders are not looked at: SQLite, for one, ignores what their syncs report.
        """
        if self.durable is None:
            pytest.skip("the class names no options under which commits are synced (durable)")
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_failing_syncs"
        layout = {**list(self.layouts.values())[-1], **self.durable}
        put_back, new, _ = self.prepared(work, location, layout)
        put_back()
        syncs = find_syncs(lambda: self.work(work, location, layout), path.parent)
        if not syncs and not is_traceable():
            pytest.skip("no sync is made from Python, and strace is not installed: those of a library are not seen")
        assert syncs, f"{work}: no file is synced: the power may take a commit"
        allowed = self.outcomes.get(work, {"old", "new"})
        for sync in syncs:
            put_back()
            error, is_own, failed = with_failing_sync(lambda: self.work(work, location, layout), sync)
            what = f"{work}: {sync.name} number {sync.number}, of {sync.file!r}, failed with EIO"
            if not failed:
                continue  # threads came in another order
            assert error, f"{what}, and no error was raised: what was committed may not be on the disk"
            assert is_own, f"{what}: StoreIOError is expected, not {error}"
            if work != "rows":  # of rows `close` commits those that came before the error
                found = self.outcome(location, new)
                assert found in allowed, f"{what}: the store is {found!r}, and `outcomes` says {sorted(allowed)}"

    def test_accepting_a_dirty_store_makes_it_good(self, location: Location, layout: str) -> None:
        """Check that the error names the leaf, that `recover="accept"` reads it, and clears the marker in "r+"."""
        self._needs_dirt()
        save_leaves(self.made, location, OLD, **self.layouts[layout])

        def work() -> None:
            store = self.made(location, "r+")
            store.write([Write(("a",), (slice(0, 1, 1),), torch.full((1, 40), -1.0))])
            store.flush()
            die()

        check_equal(in_child(work), -signal.SIGKILL, "status of the writer that was to be killed")
        before = self.fingerprint(location)
        with self.made(location, recover="accept") as store:
            check_equal(
                float(store.read([Read(("a",))])[0][0, 0]), -1.0, "the first element, read with recover='accept'"
            )
        check_unchanged(before, self.fingerprint(location), "reading changed the storage")
        for mode in ("r", "r+"):
            with raises(DirtyStoreError, doing=f"mode {mode!r} after a killed writer") as caught:
                self.made(location, mode)
            check_equal(caught.value.leaves, (("a",),), "leaves that the DirtyStoreError names")
        self.made(location, "r+", recover="accept").close()
        found = load(self.made, location, **self.reading)
        check_equal(float(found[("a",)][0, 0]), -1.0, "the first element, after recover='accept' in mode 'r+'")

    def test_a_mark_without_a_change_is_forgiven(self, location: Location) -> None:
        """Check that a writer that died before its first change leaves the old store, and its marker is removed."""
        self._needs_dirt()
        save_leaves(self.made, location, OLD)

        def work() -> None:
            store = self.made(location, "r+")
            store.write([Write(("a",), (slice(0, 1, 1),), OLD[("a",)][:1])])
            die()

        check_equal(in_child(work), -signal.SIGKILL, "status of the writer that was to be killed")
        assert self.is_marked(location), "a writer that died left no dirty marker"
        check_leaves(load(self.made, location, **self.reading), OLD, "after a writer that changed nothing")
        with self.made(location, "r+") as store:
            store.write([Write(("n", "b"), (), NEW["n", "b"])])
        assert not self.is_marked(location), "the dirty marker stays after the next writer has committed"
        want = {**OLD, ("n", "b"): NEW["n", "b"]}
        check_leaves(load(self.made, location, **self.reading), want, "after the next writer")

    def _needs_dirt(self) -> None:
        if "dirty" not in self.outcomes.get("rows", ()):
            pytest.skip("no update in place is ever left half done")

    # -- damage --------------------------------------------------------------------------
    def test_flipped_bits(self, location: Location, layout: str) -> None:
        """Check that every flip is detected with the options of `reading`, or changes no value that is read."""
        if not self.reading:
            pytest.skip("the class names no options in `reading` that compare everything, such as verify='full'")
        save_leaves(self.made, location, OLD, values={"s": "text"}, **self.layouts[layout])
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_flipped_bits"
        chance = random.Random(1)
        with self.made(location) as store:
            header = store.load_header()
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        noticed: list[str] = []
        for file in files * self.flips:
            good = file.read_bytes()
            at = chance.randrange(len(good))
            file.write_bytes(good[:at] + bytes([good[at] ^ (1 << chance.randrange(8))]) + good[at + 1 :])
            try:
                with self.made(location, **self.reading) as store:
                    flipped = f"a bit of byte {at} of {file.name} was flipped, and no error was raised"
                    check_leaves(read_all(store), OLD, flipped)
                    check_header(store.load_header(), header, flipped)
            except StoreError as error:
                noticed.append(str(error))
            file.write_bytes(good)
        assert all(str(location) in text for text in noticed), "an error that does not say where"
        share = len(noticed) / (len(files) * self.flips)
        assert share > self.noticed, (
            f"{len(noticed)} of {len(files) * self.flips} flipped bits raised an error ({share:.0%}), and the class "
            f"says noticed = {self.noticed:.0%}; the others changed nothing that was read"
        )


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


def _differences(found: Leaves, expected: Leaves, name: str) -> str:
    try:
        check_leaves(found, expected, f"not the {name} ones")
    except AssertionError as error:
        return str(error).partition("\nThe test: ")[0]
    return ""
