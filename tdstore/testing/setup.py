"""The declarations of an author (`StoreSetup`), and how the kit opens, fills, fingerprints and damages a store."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path as FsPath
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tdstore.errors import StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.registry import registry, split_scheme
from tdstore.store import Cap, Store
from tdstore.testing.comparing import failure
from tdstore.testing.processes.deaths import check_in_child, in_child
from tdstore.testing.report import CAP
from tdstore.testing.samples import bits, same
from tdstore.types import LeafSpec, Mode, Path, Read, Write

Location = str | FsPath | None
GOLDEN = 0.618
"""Multiples of it, modulo 1, are spread evenly, however many there are."""

Leaves = Mapping[Any, Tensor]
"""Values by `Path`. (A mapping is invariant in its keys, and `{("a",): ...}` is inferred as one of `tuple[str]`.)"""


# torch announces complex32 as experimental, once, when the first such tensor is made.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class StoreSetup:
    """The fields and fixtures that define the store under test.

    Set `backend` (a registered name) or `open` (the opener, as `staticmethod`), and `caps`.
    """

    backend: ClassVar[str | Backend | None] = None
    """Name of an installed backend; it is opened through the registry."""
    open: ClassVar[Callable[..., Store] | None] = None
    """Or the opener itself: `open = staticmethod(open_zarr)`."""
    caps: ClassVar[Cap]
    """What the store claims. Said again here, so that an ability cannot be lost unnoticed."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options passed at each opening."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Test name (or one case, `"test_x[case]"`) -> why it fails. It must fail: a stale entry is an error."""
    heavy: ClassVar[tuple[str, ...]] = ("h5py", "zarr", "redis", "obstore", "s3fs", "fsspec")
    """Packages that declaring a backend must not import."""
    dtypes_refused: ClassVar[frozenset[str]] = frozenset()
    """Names of dtypes that the format cannot hold; `create` must raise `TypeError` or `OptionError` for them."""
    one_process: ClassVar[str] = ""
    """Why no other process can open the location, where that is so: "the bucket lives in one process"."""
    max_examples: ClassVar[int] = 15
    """Runs of the Hypothesis state machine."""

    _stack: ExitStack
    _flips = -1
    """Number of the last call of `corrupt`."""
    _needed: list[tuple[str, object]] = []  # noqa: RUF012  # of tests that are called without pytest
    """Properties of the test that runs, for the report."""

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> Location:
        """Return the location of each test's store: fresh, in a folder of its own. None for stores without a name."""
        return tmp_path / "store"

    # -- overridable: stores that are not local files, or that cannot write ------------------
    def prepare(self, location: Location, leaves: Leaves, header: Header) -> None:
        """Put data at `location` by other means. Override for a backend without WRITE.

        Args:
            location: the place.
            leaves: the leaves.
            header: the header.
        """
        if Cap.WRITE not in self.caps:
            pytest.fail(
                f"no data to test with: the kit writes its own, and {type(self).__name__} declares no Cap.WRITE.\n"
                "Give the store WRITE, or override prepare(self, location, leaves, header) to put data there.",
                pytrace=False,
            )
        with self.opened(location, "w") as store:
            fill(store, leaves)
            store.save_header(header)

    def fingerprint(self, location: Location) -> object:
        """Return everything on the storage, comparable: equal means that nothing changed.

        For local files the names and hashes below the location's folder. Else the logical content.
        """
        path = local_path(location)
        if path is not None and path.parent.exists():
            files = sorted(p for p in path.parent.rglob("*") if p.is_file())
            return {str(p.relative_to(path.parent)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
        try:
            with self.opened(location, "r") as store:
                return content(store), store.load_header()
        except StoreNotFoundError:
            return None

    def corrupt(self, location: Location) -> None:
        """Flip a byte of stored data. The default takes the largest local file, at another place in each call.

        Tests call it until what is read has changed, or an error was raised: files may have unused bytes.
        """
        path = largest_file(location)
        data = bytearray(path.read_bytes())
        self._flips += 1
        data[round(len(data) * (self._flips * GOLDEN + 0.5)) % len(data)] ^= 0x10
        path.write_bytes(data)

    def truncate(self, location: Location) -> None:
        """Cut off the end of stored data. The default takes the last third of the largest local file."""
        path = largest_file(location)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])

    # -- for the tests -------------------------------------------------------------------
    @pytest.fixture(autouse=True)
    def _kit(self, request: pytest.FixtureRequest, location: Location) -> Iterator[None]:
        # Asks for `location` so that stores are closed before their place is taken away.
        self._needed = request.node.user_properties
        name = request.node.name
        reason = self.deviations.get(name) or self.deviations.get(name.partition("[")[0])
        if reason:
            request.node.add_marker(pytest.mark.xfail(strict=True, reason=f"declared deviation: {reason}"))
        request.node.obj = with_promise(request.node.obj)
        with ExitStack() as self._stack:
            yield

    def declaration(self) -> Backend:
        """Return the backend under test; a temporary one when only `open` was given."""
        if isinstance(self.backend, Backend):
            return self.backend
        if self.backend is not None:
            return registry().get(self.backend)
        opener = type(self).open
        assert opener is not None, f"{type(self).__name__} must set `backend` or `open`"
        where = f"{opener.__module__}:{opener.__qualname__}"
        return Backend(name=opener.__name__, opener=where, summary="under test")

    def opened(self, location: Location, mode: Mode = "r", **options: Any) -> Store:
        """Open the store under test; it is closed when the test ends.

        Args:
            location: the place.
            mode: the mode of the opener.
            **options: options of the opener.
        """
        store = self.made(location, mode, **options)
        self._stack.callback(store.close)
        return store

    def made(self, location: Location, mode: Mode = "r", **options: Any) -> Store:
        """Open the store under test; the caller closes it.

        Args:
            location: the place.
            mode: the mode of the opener.
            **options: options of the opener.
        """
        opener = type(self).open
        merged = {**self.options, **options}
        if opener is None or self.backend is not None:
            return registry().open(self.declaration(), location, mode=mode, **merged)
        return opener(None if location is None else str(location), mode=mode, **merged)

    def holding(self, location: Location, leaves: Leaves) -> Store:
        """Return an open store that holds these leaves: just written, or prepared where the store cannot write.

        Args:
            location: the place.
            leaves: the leaves.
        """
        if Cap.WRITE not in self.caps:
            self.prepare(location, leaves, header_for(leaves))
            return self.opened(location, "r")
        store = self.opened(location, "w")
        fill(store, leaves)
        return store

    def saved(self, location: Location, leaves: Leaves, header: Header | None = None) -> None:
        """Save these leaves at the location, and close the store.

        Args:
            location: the place.
            leaves: the leaves.
            header: the header; default: `header_for(leaves)`.
        """
        self.prepare(location, leaves, header_for(leaves) if header is None else header)

    def needs(self, *caps: Cap) -> None:
        """Skip the test of an ability that was not declared."""
        self._needed += [(CAP, cap.name) for cap in caps]
        for cap in caps:
            if cap not in self.caps:
                pytest.skip(f"no {cap.name}")

    def guarded(self, location: Location, work: Callable[[Callable[[str], object]], object], doing: str) -> None:
        """Read what is damaged in a forked child: a mapped file that was cut ends the process by a signal.

        Where the store cannot be read in a forked child, as it may refuse, it is read here.

        Args:
            location: a place that can be read now.
            work: the reads, called with a function that takes the next step, for the message.
            doing: the first step.
        """
        __tracebackhide__ = True

        def probe() -> None:
            signal.alarm(20)
            load(self.made, location)

        if not hasattr(os, "fork") or in_child(probe, quiet=True):
            work(lambda _: None)
        else:
            check_in_child(work, doing, "memory was mapped that the file no longer has; compare its size first")

    def check_let_go(self, location: Location, doing: str) -> None:
        """Check that this process has no file of a local place open. Linux only: elsewhere nobody lists them.

        Args:
            location: the place; no store of it is open.
            doing: what was done with it, for the message.
        """
        __tracebackhide__ = True
        path, descriptors = local_path(location), FsPath("/proc/self/fd")
        if path is None or not descriptors.is_dir():
            return
        below = f"{path.parent.resolve()}{os.sep}"
        found = {os.path.realpath(entry) for entry in descriptors.iterdir()}
        if left := sorted(target.removeprefix(below) for target in found if target.startswith(below)):
            raise failure(f"{doing} and close(): these files are still open: {', '.join(left[:6])}")

    def at_once(self, seconds: float = 0.2) -> dict[str, Any]:
        """Return the options under which an opening does not wait for a lock, or not longer than that."""
        opener = registry().opener(self.declaration()) if type(self).open is None else type(self).open
        assert opener is not None, "a backend has an opener"
        return {"lock_timeout": seconds} if "lock_timeout" in inspect.signature(opener).parameters else {}

    def needs_name(self, location: Location) -> None:
        """Skip a test that opens the store twice, for stores that cannot be opened again by name."""
        if location is None:
            pytest.skip("a store without a location cannot be opened again")

    def needs_processes(self, location: Location) -> None:
        """Skip a test of other processes, where none can open the location."""
        self.needs_name(location)
        if self.one_process:
            pytest.skip(self.one_process)

    def needs_deletion(self, location: Location) -> None:
        """Skip a test that deletes, for a backend whose places the core cannot delete and that declares no `remove`."""
        backend = self.declaration()
        if not backend.remove and (local_path(location) is None or not (backend.suffixes or backend.markers)):
            pytest.skip("the backend declares no `remove`, and its places are not local files that it recognises")

    def known_tests(self, request: pytest.FixtureRequest) -> list[str]:
        """Return the names of every test and case of this class."""
        node = request.node.getparent(pytest.Class)
        names = [item.name for item in node.collect()]
        return names + [name.partition("[")[0] for name in names]

    def test_deviations_name_tests(self, request: pytest.FixtureRequest) -> None:
        """Check that each declared deviation is the name of a test of this kit."""
        known = self.known_tests(request)
        for name in self.deviations:
            near = difflib.get_close_matches(name, known, 1)
            assert name in known, f"deviations names {name!r}, which is no test; nearest: {near}"


def with_promise(test: Callable[..., object]) -> Callable[..., object]:
    """Return a test that says what it promises also where the store raises an error that nobody expects."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> object:
        try:
            return test(*args, **kwargs)
        except AssertionError:
            raise
        except Exception as error:
            promise = (inspect.getdoc(test) or test.__name__).partition("\n")[0]
            error.add_note(f"The store raised this where no error is expected.\nThe test: {promise}")
            raise

    return run


def able(caps: Cap) -> str:
    """Return the abilities in words."""
    return ", ".join(str(cap.name) for cap in caps) or "no ability"


def fill(store: Store, leaves: Leaves) -> None:
    """Create and write whole leaves, each in one call.

    Args:
        store: the store, open for writing.
        leaves: the leaves.
    """
    store.create({path: LeafSpec(value.shape, value.dtype) for path, value in leaves.items()})
    store.write([Write(path, (), value) for path, value in leaves.items()])


def header_for(leaves: Leaves, values: Mapping[str, Any] | None = None) -> Header:
    """Return a header with a group for each inner node of these paths, and plain values at the root.

    Args:
        leaves: the leaves.
        values: inline values of the root.
    """
    records = {key: {"data": value} for key, value in (values or {}).items()}
    keys = tuple(dict.fromkeys([*(p[0] for p in leaves), *records]))
    groups: dict[Path, Group] = {(): Group(batch_size=(), keys=keys, values=records)}
    for path in leaves:
        for depth in range(1, len(path)):
            below = dict.fromkeys(p[depth] for p in leaves if len(p) > depth and p[:depth] == path[:depth])
            groups.setdefault(path[:depth], Group(batch_size=(), keys=tuple(below)))
    return Header(groups)


def save(opener: Callable[..., Store], location: Any, leaves: Leaves, **options: Any) -> None:
    """Save whole leaves in mode "w"; `values=` are plain values at the root, all other options the opener's.

    Args:
        opener: the function that opens the store.
        location: the place.
        leaves: the leaves.
        **options: options of the opener.
    """
    values = options.pop("values", None)
    with opener(location, **{"mode": "w", **options}) as store:
        fill(store, leaves)
        store.save_header(header_for(leaves, values))


def load(opener: Callable[..., Store], location: Any, **options: Any) -> dict[Path, Tensor]:
    """Open a store, and return every leaf.

    Args:
        opener: the function that opens the store.
        location: the place.
        **options: options of the opener.
    """
    with opener(location, **options) as store:
        return read_all(store)


def same_leaves(a: Leaves, b: Leaves) -> bool:
    """Check whether two sets of leaves have the same names, dtypes, shapes and bits.

    Args:
        a: leaves by path.
        b: leaves by path.
    """
    return a.keys() == b.keys() and all(same(a[path], b[path]) for path in a)


def content(store: Store) -> dict[Path, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bits of every leaf of a store."""
    from_store = read_all(store)
    return {path: (str(t.dtype), tuple(t.shape), bits(t)) for path, t in from_store.items()}


def read_all(store: Store) -> dict[Path, Tensor]:
    """Read every leaf of a store, in one batch."""
    paths = list(store.paths())
    return dict(zip(paths, store.read([Read(path) for path in paths]), strict=True))


def local_path(location: Location) -> FsPath | None:
    """Return the local file or folder of a location; None for one behind a network or in memory."""
    if location is None:
        return None
    scheme, rest = split_scheme(str(location))
    path = FsPath(rest)
    return path if path.is_absolute() or not scheme else None


def local_files(location: Location) -> list[FsPath]:
    """Return the files at a local location."""
    path = local_path(location)
    if path is None or not path.exists():
        pytest.skip("the location is not local: override corrupt() and truncate()")
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def largest_file(location: Location) -> FsPath:
    """Return the largest file at a local location."""
    return max(local_files(location), key=lambda p: p.stat().st_size)


def import_root(function: Callable[..., object]) -> str:
    """Return the folder that must be on `sys.path` for the function's module to be importable by its name."""
    source = FsPath(inspect.getfile(function)).resolve()
    up = function.__module__.count(".") + (source.name == "__init__.py")
    return str(source.parents[up])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """Return consecutive numbers, which reveal a wrong index.

    Args:
        *shape: shape of the tensor.
        dtype: its dtype.
        start: the first number.

    Example:
        >>> numbers(2, 2, start=1)
        tensor([[1., 2.],
                [3., 4.]])
    """
    count = 1
    for n in shape:
        count *= n
    return torch.arange(start, start + count).reshape(shape).to(dtype)
