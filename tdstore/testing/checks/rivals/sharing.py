"""The kit's tests with several processes and threads: shared data, and rivals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch

from tdstore.errors import CorruptStoreError, StoreBusyError, StoreError, TDStoreError
from tdstore.header import Group, Header, decode_header
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.checks.headers import RICH
from tdstore.testing.comparing import (
    check_digests,
    check_equal,
    check_header,
    check_leaves,
    check_names,
    check_paths,
    check_same,
    difference,
    error_name,
    failure,
    in_time,
)
from tdstore.testing.processes.child import Child, filled_with
from tdstore.testing.samples import sample
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    fill,
    header_for,
    import_root,
    numbers,
    read_all,
    same_leaves,
)
from tdstore.types import LeafSpec, Mode, Read, Write, path_text

OLD: Leaves = {("a",): numbers(6, 4), ("g", "b"): numbers(5).long(), ("c",): numbers(3)}
ROUNDS = 6
MANY: Leaves = {**OLD, **{("many", str(i)): numbers(4 + i, start=i) for i in range(9)}}
"""So many that a `read` spends a good part of its time between two of them."""
MOMENTS = {"replace": 5, "change": 14}
"""Moments of one `read` at which another process commits: by a save, and by rows in place."""
STOPS = (0.5, 0.9)
"""Parts of a commit, counted by the functions that it calls, after which a process stops."""
STRIDE = 7
"""Calls of functions after which a commit that was refused is tried again."""
LONGER = "more rows of a leaf, which the other one lengthens, too"
SAVE, SAVE_OVER_ROWS = "a save over it", "a save over it and the rows that the first one has written"
"""Commits of a second writer."""
TRYING = 2.0
"""Seconds after which it is not."""


class SharingTests(StoreSetup):
    """Tests that processes read the writes of others, and that parallel writers lose nothing."""

    waiting: ClassVar[float] = 60
    """Seconds after which a store that waits for another process waits for ever."""

    def child(self, location: Location, mode: Mode = "r", **options: Any) -> Child:
        """Start a second process with the store open; it ends with the test.

        Args:
            location: the place.
            mode: the mode of its opener.
            **options: options of its opener, besides those of all tests.
        """
        self.needs_processes(location)
        opener = type(self).open
        roots = [] if opener is None else [import_root(opener)]
        child = Child(
            self.declaration(), str(location), mode=mode, options={**self.options, **options}, import_path=roots
        )
        self._stack.callback(child.close)
        return child

    def test_second_process_reads(self, location: Location) -> None:
        """Check that a new process reads every leaf and the header."""
        self.needs(Cap.PERSISTENT)
        leaves = {("a",): sample("float32", (4, 3)), ("g", "b"): sample("bfloat16", (5,)), ("s",): sample("bool", ())}
        self.saved(location, leaves, RICH)
        child = self.child(location)
        check_digests(child.ask("digests"), leaves, "a new process reads")
        check_header(decode_header(child.ask("header")), RICH, "the header in a new process")
        child.close()
        for mode in ("w", "r") if Cap.WRITE in self.caps else ("r",):
            self._check_token(location, mode, leaves)

    def _check_token(self, location: Location, mode: Mode, leaves: Leaves) -> None:
        """Look at what a store tells other processes to open: what a pickled TensorDict is opened by."""
        __tracebackhide__ = True
        with self.opened(location, mode) as store:
            if mode == "w":
                fill(store, leaves)
                store.save_header(RICH)
            token = store.reopen_token()
        if token is None:
            return
        place, how, options = token
        if how not in ("r", "r+"):
            raise failure(
                f"reopen_token() of a store of mode {mode!r} tells others to open it with {how!r}, which wipes it"
            )
        opener = type(self).open
        if opener is None or self.backend is not None:
            opener = partial(registry().open, self.declaration())
        with opener(place, mode=how, **options) as again:
            check_leaves(read_all(again), leaves, f"opened by reopen_token() of a store of mode {mode!r}")

    def test_second_process_writes(self, location: Location) -> None:
        """Check that the next opener reads what another process wrote and closed."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, {("a",): numbers(6, 2), ("b",): numbers(3)})
        child = self.child(location, "r+")
        child.ask("put_whole", ("a",), 100.0)
        child.ask("save_header", 6)
        child.ask("close")
        child.close()
        store = self.opened(location)
        check_same(store.read([Read(("a",))])[0], torch.full((6, 2), 100.0), "a leaf that another process wrote")
        check_same(store.read([Read(("b",))])[0], numbers(3), "a leaf beside one that another process wrote")
        check_header(store.load_header(), Header({(): Group(batch_size=(6,))}))

    def test_shared_writes_are_seen(self, location: Location) -> None:
        """Check that with SHARED, two processes that hold the store open see one another's writes."""
        self.needs(Cap.WRITE, Cap.SHARED)
        self.needs_name(location)
        store = self.opened(location, "w")
        value = numbers(6, 2)
        fill(store, {("a",): value})
        store.save_header(header_for({("a",): value}))
        child = self.child(location, "r+")
        check_digests(child.ask("digests"), {("a",): value}, "a second process reads")
        store.write([Write(("a",), (), value + 1)])
        store.flush()
        check_digests(child.ask("digests"), {("a",): value + 1}, "the second process does not see a write")
        child.ask("put_whole", ("a",), 7.0)
        check_same(store.read([Read(("a",))])[0], torch.full((6, 2), 7.0), "a write of the second process is not seen")

    def test_concurrent_reads(self, location: Location) -> None:
        """Check that with CONCURRENT_READ, threads read one store object at once and each gets its own rows."""
        self.needs(Cap.CONCURRENT_READ)
        leaves = {(f"leaf{i}",): sample("int32", (64, 50), i) for i in range(8)}
        store = self.holding(location, leaves)
        partial = Cap.PARTIAL_READ in self.caps
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # threads change places in the middle of a read, as often as can be

        def read_and_compare(turn: int) -> int:
            paths = list(leaves)[turn % 8 :] + list(leaves)[: turn % 8]
            rows = torch.tensor([turn % 64, (7 * turn) % 64, turn % 64])
            index = (rows,) if partial else ()
            for path, got in zip(paths, store.read([Read(path, index) for path in paths]), strict=True):
                check_same(got, leaves[path][rows] if partial else leaves[path], path)
            return turn

        try:
            with ThreadPoolExecutor(8) as pool:
                check_equal(sorted(pool.map(read_and_compare, range(80))), list(range(80)), "reads that came to an end")
        finally:
            sys.setswitchinterval(interval)

    def test_disjoint_writers(self, location: Location) -> None:
        """Check that with CONCURRENT_WRITE, four processes write the rows of one leaf at once and lose none."""
        self.needs(Cap.WRITE, Cap.PARTIAL_WRITE, Cap.CONCURRENT_WRITE)
        self.needs_name(location)
        workers, rows = 4, 30
        store = self.opened(location, "w")
        store.create(
            {("a",): LeafSpec((workers * rows, 3), "float32"), ("small",): LeafSpec((workers * rows,), "uint8")}
        )
        store.save_header(header_for({("a",): numbers(1), ("small",): numbers(1)}))
        if Cap.SHARED not in self.caps:
            store.close()
        children = [self.child(location, "r+") for _ in range(workers)]
        for leaf in ("a", "small"):
            for i, child in enumerate(children):
                child.start("put", (leaf,), i * rows, (i + 1) * rows, 0.0)
            for child in children:
                child.result()
        for child in children:
            child.ask("close")
        if Cap.SHARED not in self.caps:
            store = self.opened(location)
        a, small = store.read([Read(("a",)), Read(("small",))])
        expected = torch.arange(workers * rows)
        lost = "rows that one process wrote were lost to another"
        check_same(a, expected.float()[:, None].expand(-1, 3).contiguous(), f"{lost}: leaf 'a'")
        check_same(small, expected.byte(), f"{lost}: leaf 'small'")


class RivalTests(SharingTests):
    """Tests that a store which others use too gives whole data, or an error of tdstore."""

    def test_other_thread(self, location: Location) -> None:
        """Check that a store can be used in another thread than the one that opened it: `aread` reads there."""
        store = self.holding(location, OLD)

        def use() -> list[torch.Tensor]:
            if Cap.WRITE in self.caps:
                store.write([Write(("c",), (), numbers(3))])
            return store.read([Read(path) for path in OLD])

        with ThreadPoolExecutor(1) as pool:
            try:
                got = pool.submit(use).result()
            except Exception as error:
                raise failure(
                    f"the store cannot be used in another thread than the one that opened it: "
                    f"{type(error).__name__}: {error}"
                ) from error
        for path, tensor in zip(OLD, got, strict=True):
            check_same(tensor, OLD[path], path)

    def test_close_in_another_thread(self, location: Location) -> None:
        """Check that `close` commits rows in any thread: a dropped store is closed in one of the background."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        store = self.opened(location, "r+")
        store.write([Write(("a",), (), OLD[("a",)] + 1)])
        what = "closed in another thread than the one that opened it"
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(store.close).result()
            except Exception as error:
                raise failure(f"{what}: {type(error).__name__}: {error}") from error
        with self.opened(location) as reader:
            (got,) = reader.read([Read(("a",))])
            if not difference(got, OLD[("a",)]):
                raise failure(f"{what}: the rows that were written are lost, and no error was raised")
            check_same(got, OLD[("a",)] + 1, f"{what}: leaf 'a'")

    def test_reader_while_replaced(self, location: Location) -> None:
        """Check that a reader keeps no writer out, and reads on: the old values, or an error."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        self.saved(location, OLD)
        with self.opened(location) as reader:
            check_same(reader.read([Read(("a",))])[0], OLD[("a",)], ("a",))
            # Of other shapes, so that a reader that looks at the new data with the old catalogue is seen.
            new = {path: torch.cat([value, value])[1:] + 1000 for path, value in OLD.items()}
            try:
                self.saved(location, new)
            except StoreBusyError as error:
                raise failure(f"a writer is refused because a reader has the store open: {error}") from error
            for path, old in OLD.items():
                self._check_whole(reader, path, old, new[path], "while its place was replaced")
        with self.opened(location) as store:
            check_paths(store.paths(), new, "opened after the place was replaced")
            for path, value in new.items():
                check_same(store.read([Read(path)])[0], value, path)

    def test_reader_while_changed(self, location: Location) -> None:
        """Check that a reader that stays open over commits in place reads one of these commits, or is told of them."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        self.saved(location, OLD)
        commits = [OLD]
        with self.opened(location, **self.at_once()) as reader:
            for turn in range(1, 5):
                new = {path: value + 100 * turn for path, value in OLD.items()}
                if turn >= 2:
                    new[("a",)] = numbers(9, 2, start=turn)
                try:
                    with self.made(location, "r+", **self.at_once()) as writer:
                        if turn == 2:
                            writer.create({("a",): LeafSpec((9, 2), "float32")})
                        writer.write([Write(path, (), value) for path, value in new.items()])
                        writer.save_header(header_for(new))
                except StoreBusyError:
                    return  # a reader keeps writers in place out
                commits.append(new)
                self._check_committed(reader, commits, f"a reader that stayed open over {turn} commits in place")

    def _check_committed(self, reader: Store, commits: list[Leaves], what: str) -> None:
        """Check that one `read` gives a commit; leaf by leaf where others see rows at once."""
        __tracebackhide__ = True
        try:
            got = dict(zip(OLD, reader.read([Read(path) for path in OLD]), strict=True))
        except CorruptStoreError as error:
            raise failure(
                f"{what}: nothing is damaged, so no CorruptStoreError is expected, but another StoreError: {error}"
            ) from error
        except StoreError as error:
            check_names(error, reader.url, what)
            return
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {error_name(type(error))}: {error}") from error
        at_once = bool(self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE))
        for found in [{path: value} for path, value in got.items()] if at_once else [got]:
            if not any(same_leaves(found, {path: one[path] for path in found}) for one in commits):
                check_leaves(
                    found, {path: commits[-1][path] for path in found}, f"{what} gives no commit; beside the last one"
                )

    def _check_whole(self, reader: Store, path: Any, old: torch.Tensor, new: torch.Tensor, when: str) -> None:
        __tracebackhide__ = True
        what = f"a reader that stayed open {when}: leaf {path_text(path)}"
        try:
            (got,) = reader.read([Read(path)])
        except StoreError as error:
            check_names(error, reader.url, what)
            return
        except TDStoreError as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error
        if difference(got, old) is not None and difference(got, new) is not None:
            raise failure(f"{what} is neither the old one ({difference(got, old)}) nor the new one")

    def test_locked_place(self, location: Location) -> None:
        """Check that a place which another process writes opens, or is a `StoreBusyError` that names it."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        child = self.child(location, "r+")
        child.ask("hold", ("a",), 7.0)
        modes: tuple[Mode, ...] = ("r", "r+", "w")
        for mode in modes:
            doing = f"mode {mode!r} where another process writes"
            in_time(partial(self._use_locked, location, mode, doing), doing, self.waiting)
        with suppress(AssertionError):  # its rows may be of a store that mode "w" has replaced
            child.ask("close")
        with self.opened(location) as store:
            for path, tensor in zip(OLD, store.read([Read(path) for path in OLD]), strict=True):
                allowed = [OLD[path], OLD[path] + 1] + [filled_with(OLD[path], 7.0)] * (path == ("a",))
                if all(difference(tensor, value) for value in allowed):
                    raise failure(
                        f"two writers, one after the other: leaf {path_text(path)} holds values of neither: "
                        f"{difference(tensor, OLD[path])}"
                    )
        self._beside_a_stopped_commit(location, child)
        child.close()

    def _beside_a_stopped_commit(self, location: Location, child: Child) -> None:
        """Use the place while another process has stopped in its commit: some stores have a lock for so long only."""
        __tracebackhide__ = True
        self.saved(location, OLD)
        for moment in STOPS:
            try:
                if child.ask("stop_in_commit", 7, moment) != "stopped":
                    return  # it was refused
            except AssertionError as error:
                raise failure(f"a commit in place: {error}") from error
            doing = "mode 'r+' where another process has stopped in its commit"
            in_time(partial(self._use_locked, location, "r+", doing), doing, self.waiting)
            child.ask("go_on")

    def _use_locked(self, location: Location, mode: Mode, doing: str) -> None:
        __tracebackhide__ = True
        try:
            with self.made(location, mode, **self.at_once()) as store:
                if mode == "w":
                    fill(store, {path: value + 1 for path, value in OLD.items()})
                    store.save_header(header_for(OLD))
                elif mode == "r+":
                    store.write([Write(("c",), (), OLD[("c",)] + 1)])
                    store.save_header(header_for(OLD))
                else:
                    (got,) = store.read([Read(("c",))])
                    check_same(got, OLD[("c",)], f"{doing}: leaf 'c', which nobody changed")
        except StoreError as error:
            check_names(error, location, doing)
        except AssertionError:
            raise
        except Exception as error:
            raise failure(
                f"{doing}: StoreBusyError is expected, not {type(error).__module__}.{type(error).__qualname__}: {error}"
            ) from error

    def test_two_commits_at_once(self, location: Location) -> None:
        """Check that of two processes that commit at once each is whole or refused: no mixture, no foreign error."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        children = [self.child(location), self.child(location)]
        for child in children:
            child.ask("close")
        for turn in range(ROUNDS):
            command = "replace" if turn % 2 else "change"
            for number, child in enumerate(children):
                child.start(command, 10 * turn + number)
            said = [self._answer(child) for child in children]
            done = [10 * turn + number for number, error in enumerate(said) if not error]
            if not done:
                raise failure(f"two commits at once: both were refused: {'; '.join(said)}")
            self._check_winner(location, done, command)

    def _answer(self, child: Child) -> str:
        __tracebackhide__ = True
        try:
            said: str = child.result()
        except AssertionError as error:
            raise failure(f"two commits at once: a StoreError is expected, or none; {error}") from error
        return said

    def _check_winner(self, location: Location, numbers_of: list[int], command: str) -> None:
        __tracebackhide__ = True
        what = f"two commits at once ({'a save' if command == 'replace' else 'rows in place'})"
        with self.opened(location) as store:
            check_paths(store.paths(), OLD, what)
            (header,) = store.load_header().groups[()].batch_size or ()
            found = dict(zip(OLD, store.read([Read(path) for path in OLD]), strict=True))
        if header not in numbers_of:
            raise failure(f"{what}: the header is of neither writer: {header}, and {numbers_of} committed")
        if command == "change" and Cap.CONCURRENT_WRITE in self.caps:
            return  # the rows of both reach the storage at once; which rows are whose is for the writers to agree
        for path, value in OLD.items():
            if differs := difference(found[path], filled_with(value, header)):
                raise failure(
                    f"{what}: the header is that of one writer and leaf {path_text(path)} that of another: {differs}"
                )

    def test_stale_writer(self, location: Location) -> None:
        """Check that a writer which opened before another one committed is refused, or keeps what that one changed."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        longer = [LONGER] if Cap.RESIZE in self.caps else []
        for change in ("rows", "a new leaf", *longer, SAVE, SAVE_OVER_ROWS):
            for end in ("save_header", "close"):
                self.saved(location, OLD)
                self._commit_late(location, change, end)

    def _commit_late(self, location: Location, change: str, end: str) -> None:
        """Open two writers, let the second one commit and then the first one, and look at what is there."""
        __tracebackhide__ = True
        late = {} if change == LONGER else {("c",): OLD["c",] + 1}
        early = {("new",): numbers(4)} if change == "a new leaf" else {("a",): OLD["a",] + 7}
        if change == LONGER:
            early = {("a",): torch.cat([OLD["a",], OLD["a",] + 7])}
        writes = [Write(path, (), value) for path, value in late.items()]
        stale = self.opened(location, "r+", **self.at_once())
        if change == SAVE_OVER_ROWS:
            stale.write(writes)
        replaces = change in (SAVE, SAVE_OVER_ROWS)
        try:
            with self.made(location, "w" if replaces else "r+", **self.at_once()) as other:
                if replaces:
                    fill(other, {**OLD, **early})
                elif change in ("rows", LONGER):
                    if change == LONGER:
                        other.resize({path: len(value) for path, value in early.items()})
                    other.write([Write(path, (), value) for path, value in early.items()])
                else:
                    fill(other, early)
                other.save_header(header_for({**OLD, **early}))
        except StoreError:
            stale.close()  # one writer at a time
            return
        what = f"two writers are open, one commits {change}, and then the other by {end}()"
        refused = False
        try:
            if change == LONGER:
                stale.resize({("a",): len(OLD["a",]) + 1})
            if change != SAVE_OVER_ROWS:
                stale.write(writes)
            if end == "save_header":
                stale.save_header(header_for(OLD))
            stale.close()
        except StoreError as error:
            check_names(error, stale.url, what)
            refused = True
            with suppress(StoreError):
                stale.close()
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error
        if replaces and end == "close":
            late = {}  # rows of a store that was replaced: their close has nothing to commit to
        with self.opened(location) as store:
            if change == LONGER and not refused and store.specs([("a",)])[0].shape[0] == len(OLD["a",]) + 1:
                # A length that both see: the second change of it is the last one.
                early = {path: value[: len(OLD["a",]) + 1] for path, value in early.items()}
            check_paths(store.paths(), {**OLD, **early}, f"{what}: the second commit took back the first")
            for path, value in {**OLD, **early, **({} if refused else late)}.items():
                (got,) = store.read([Read(path)])
                whose = "lost, and no error was raised" if path in late else "overwritten by the other"
                check_same(got, value, f"{what}: what was written is {whose}: leaf {path_text(path)}")

    def test_read_is_of_one_commit(self, location: Location) -> None:
        """Check that the leaves of one `read` are of one commit, also where a process commits in its middle."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, {path: filled_with(value, 0) for path, value in MANY.items()})
        child = self.child(location, **self.at_once(0.0))
        child.ask("close")
        last, number, requests = 0, 0, [Read(path) for path in MANY]
        in_place = Cap.DISCARD in self.caps and not self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE)
        for command in ("replace", "change") if in_place else ("replace",):
            with self.opened(location) as reader:
                calls = interrupted(lambda r=reader: r.read(requests))  # type: ignore[misc]
            for moment in range(MOMENTS[command]):
                number += 1
                rival = _Rival(child, command, number)
                with self.opened(location) as reader:
                    at = calls * (moment + 1) // (MOMENTS[command] + 1)
                    try:
                        got = list[torch.Tensor]()
                        made = interrupted(lambda r=reader, g=got: g.extend(r.read(requests)), at, rival.commit)  # type: ignore[misc]
                    except StoreError as error:
                        check_names(error, reader.url, "a read in whose middle another process commits")
                        got, made = [], calls
                self._check_one_commit(got, last, number, f"after {at} or more of {calls} calls of functions")
                if rival.refused:
                    break  # a reader keeps writers in place out, from the beginning of a read to its end
                if rival.committed:
                    last = number
                else:
                    calls = made  # a cache made this read shorter than the one before

    def _check_one_commit(self, got: list[torch.Tensor], before: int, after: int, moment: str) -> None:
        __tracebackhide__ = True
        found = {path_text(path): sorted(set(t.reshape(-1).tolist())) for path, t in zip(MANY, got, strict=False)}
        for number in (before, after):
            if all(values == [number] for values in found.values()):
                return
        leaves = dict.fromkeys(str(values) for values in found.values())
        of = "; ".join(f"{text}: leaf {', '.join(p for p, v in found.items() if str(v) == text)}" for text in leaves)
        raise failure(
            f"one `read` gives leaves of two commits: the last one wrote {before}, and {after} was committed "
            f"in the middle of the read ({moment}). What the leaves hold: {of}"
        )


class _Rival:
    """A process that commits when it is asked to, or is refused because of a lock."""

    def __init__(self, child: Child, command: str, number: int) -> None:
        self._child, self._command, self._number = child, command, number
        self._until = time.monotonic() + TRYING
        self.refused, self.committed = "", False

    def commit(self) -> bool:
        """Commit; False asks to be called again, as there may be a moment without the lock."""
        self.refused = self._child.ask(self._command, self._number)
        self.committed = not self.refused
        return not self.refused or time.monotonic() > self._until


def interrupted(work: Callable[[], object], at: int = 0, action: Callable[[], bool] | None = None) -> int:
    """Run `work`, and `action` in its middle, until that is True: at the `at`-th call of a function, and later ones.

    Returns:
        The number of calls.
    """
    count = 0

    def look(frame: object, event: str, arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if action is not None and count >= at and (count - at) % STRIDE == 0:
                sys.setprofile(None)
                if not action():
                    sys.setprofile(look)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
