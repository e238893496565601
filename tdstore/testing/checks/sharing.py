"""The kit's tests with several processes and threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from tdstore.header import Group, Header, decode_header
from tdstore.store import Cap
from tdstore.testing.checks.headers import RICH
from tdstore.testing.comparing import check_digests, check_equal, check_header, check_same
from tdstore.testing.processes.child import Child
from tdstore.testing.samples import sample
from tdstore.testing.setup import Location, StoreSetup, fill, header_for, import_root, numbers
from tdstore.types import LeafSpec, Mode, Read, Write


class SharingTests(StoreSetup):
    """Tests that processes read the writes of others, and that parallel writers lose nothing."""

    def child(self, location: Location, mode: Mode = "r") -> Child:
        """Start a second process with the store open; it ends with the test."""
        self.needs_processes(location)
        opener = type(self).open
        roots = [] if opener is None else [import_root(opener)]
        child = Child(self.declaration(), str(location), mode=mode, options=self.options, import_path=roots)
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
        check_same(store.read([Read(("a",))])[0], torch.full((6, 2), 100.0))
        check_same(store.read([Read(("b",))])[0], numbers(3))
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
                check_same(got, leaves[path][rows] if partial else leaves[path])
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
