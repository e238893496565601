"""The kit's tests of what becomes of a place: it is looked for, listed, removed, linked to."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.errors import StoreBusyError, StoreError, StoreNotFoundError
from tdstore.hookspecs import Backend
from tdstore.io.housekeeping import delete, exists, info, list_datasets
from tdstore.registry import registry
from tdstore.store import Cap
from tdstore.testing.comparing import (
    check_equal,
    check_leaves,
    check_names,
    check_unchanged,
    error_name,
    failure,
    raises,
)
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    fill,
    header_for,
    local_path,
    numbers,
    read_all,
    same_leaves,
)
from tdstore.types import Path, Write

OLD = {("a",): numbers(4, 3), ("g", "b"): numbers(5).long()}
NEW = {("a",): numbers(2, 2, start=70), ("c",): numbers(3, start=80)}


class HousekeepingTests(StoreSetup):
    """Tests that a place is found, removed and listed, and keeps its permissions and links."""

    def test_exists(self, location: Location) -> None:
        """Check that `tdstore.exists`, `info` and `list_datasets` know a place from its first commit, and no other."""
        self.needs(Cap.PERSISTENT)
        backend = self.declaration()
        if (path := local_path(location)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        before = self.fingerprint(location)
        check_equal(exists(location, storage=backend, **self.options), False, "exists() where nothing is")
        check_unchanged(before, self.fingerprint(location), "exists() where nothing is")
        self.saved(location, OLD)
        saved = self.fingerprint(location)
        check_equal(exists(location, storage=backend, **self.options), True, "exists() where a dataset is")
        check_unchanged(saved, self.fingerprint(location), "exists() where a dataset is changed the storage")
        found = info(location, storage=backend, **self.options)
        check_equal({p: (s.shape, s.dtype) for p, s in found.leaves.items()}, _shapes(OLD), "leaves of info()")
        check_equal(found.batch_size, header_for(OLD).groups[()].batch_size, "batch size of info()")
        if found.nbytes_stored is not None and found.nbytes_stored <= 0:
            raise failure(
                f"nbytes_stored() is {found.nbytes_stored} where leaves of {found.nbytes} bytes are: "
                "the bytes on the storage are expected, or None"
            )
        with self.opened(location) as store:
            for leaf in OLD:
                try:
                    dict(store.layout(leaf))
                except Exception as error:
                    raise failure(f"layout({leaf}) of a leaf raises {type(error).__name__}: {error}") from error
        self._check_listed(location, backend)
        if path is not None and path.is_file():
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            with suppress(StoreError):
                if not exists(location, storage=backend, **self.options):
                    raise failure(
                        "exists() is False where a dataset is that was cut short: nothing is not what is there"
                    )

    def _check_listed(self, location: Location, backend: Backend) -> None:
        """Look for what a backend lists: the place itself, and of a folder all that is in it, and below."""
        __tracebackhide__ = True
        path = local_path(location)
        if not backend.list:  # the core looks for places that it recognises
            known = None if path is None or "://" in str(location) else registry().resolve(str(path))
            if known is None or known.name != backend.name:
                return
        self._check_list(str(location), backend, OLD)
        if path is None or "://" in str(location):
            return
        for place, leaves in ((path.parent / "below" / "it" / path.name, NEW), (path.with_name(f"z-{path.name}"), OLD)):
            self.saved(place, leaves)
        for name in ("notes.txt", f"damaged{path.suffix or '.bin'}"):
            path.with_name(name).write_bytes(b"no dataset")
        self._check_list(str(path.parent), backend, NEW, OLD, OLD)
        (empty := path.with_name("empty folder")).mkdir()
        self._check_list(str(empty), backend)
        with raises(StoreNotFoundError, doing="list_datasets() of a folder that is not there"):
            list_datasets(str(path.parent / "no such folder"), storage=backend, **self.options)

    def _check_list(self, place: str, backend: Backend, *datasets: Leaves) -> None:
        __tracebackhide__ = True
        try:
            found = list_datasets(place, storage=backend, **self.options)
        except StoreError as error:
            raise failure(f"list_datasets() of {place!r}, where {len(datasets)} datasets are: {error}") from error
        what = f"list_datasets() of {place!r}, where {len(datasets)} datasets are, gives {found}"
        held = list[dict[Path, torch.Tensor]]()
        for one in found:
            try:
                with self.opened(one) as store:
                    held.append(read_all(store))
            except StoreError as error:
                raise failure(f"{what}: {one!r} does not open: {error}") from error
        if not all(one.startswith(place) for one in found):
            raise failure(f"{what}: one is not at or below that location")
        if len(set(found)) != len(found):
            raise failure(f"{what}: one of them twice")
        if len(found) != len(datasets):
            raise failure(what)
        for leaves in datasets:
            same = next((one for one in held if same_leaves(one, leaves)), None)
            if same is None:
                raise failure(f"{what}: none of these holds what was saved at one of the places")
            held.remove(same)

    def test_delete_place(self, location: Location) -> None:
        """Check that `tdstore.delete` leaves nothing and refuses what is not there; the place can be used again."""
        self.needs(Cap.PERSISTENT, Cap.WRITE)
        self.needs_deletion(location)
        if (path := local_path(location)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for name in (f"beside-{path.name}", f"{path.name}-beside{path.suffix}"):
                self.saved(path.with_name(name), NEW)
            path.with_name("notes.txt").write_text("of another program")
        before = self.fingerprint(location)
        with raises(StoreNotFoundError, doing="deleting a place where nothing is"):
            delete(location, storage=self.declaration(), **self.options)
        self.saved(location, OLD)
        delete(location, storage=self.declaration(), **self.options)
        check_unchanged(before, self.fingerprint(location), "what delete() left, or took with it")
        check_equal(exists(location, storage=self.declaration(), **self.options), False, "exists() after delete()")
        self._check_not_deleted(location)
        with raises(StoreNotFoundError, doing="opening a place that was deleted"):
            self.opened(location)
        self.saved(location, NEW)
        check_leaves(read_all(self.opened(location)), NEW, "saved where a dataset was deleted")

    def _check_not_deleted(self, location: Location) -> None:
        """Look whether a file of another program stays where a dataset of the backend could be."""
        __tracebackhide__ = True
        path = local_path(location)
        if path is None or "://" in str(location):
            return
        path.write_bytes(b"of another program " * 64)
        before, backend = self.fingerprint(location), self.declaration()
        with raises(StoreError, doing="delete() of a file of another program"):
            delete(location, storage=backend, **self.options)
        check_unchanged(before, self.fingerprint(location), "delete() of a file of another program")
        try:
            found = exists(location, storage=backend, **self.options)
        except StoreError:
            found = False
        check_equal(found, False, "exists() where a file of another program is")
        path.unlink()

    def test_removed_place(self, location: Location) -> None:
        """Check that a writer whose place was removed does not make it again, and that its `save_header` is refused."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        if (path := local_path(location)) is None:
            self.needs_deletion(location)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        before = self.fingerprint(location)
        for written in ("before", "after"):
            for end in ("save_header", "close"):
                self._check_removed(location, before, written, end)

    def _check_removed(self, location: Location, before: object, written: str, end: str) -> None:
        """Remove the place of an open writer, before or after it has written, and let it end."""
        __tracebackhide__ = True
        self.saved(location, OLD)
        what = f"a writer that was open when its place was removed, and wrote {written} that, ends by {end}()"
        store = self.made(location, "r+", **self.at_once())
        if written == "before":
            store.write([Write(("a",), (), OLD[("a",)] + 1)])
        try:
            self._remove(location)
        except StoreBusyError:
            store.close()  # a place that is written, or open, is not removed
            self._remove(location)
            return
        try:
            if written == "after":
                store.write([Write(("a",), (), OLD[("a",)] + 1)])
            if end == "save_header":
                store.save_header(header_for(OLD))
        except StoreError as error:
            check_names(error, store.url, what)
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {error_name(type(error))}: {error}") from error
        else:
            if end == "save_header":
                raise failure(f"{what}: a StoreError is expected, and nothing was raised")
        finally:
            with suppress(StoreError):
                store.close()
        check_unchanged(before, self.fingerprint(location), f"{what}, and makes something there")
        with raises(StoreNotFoundError, doing=f"{what}: opening the place"):
            self.opened(location)

    def _remove(self, location: Location) -> None:
        """Remove a place as a user does: a local one by the tools of the system."""
        path = local_path(location)
        if path is None:
            delete(location, storage=self.declaration(), **self.at_once(), **self.options)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def test_permissions(self, location: Location) -> None:
        """Check that a new place has the permissions that the umask leaves, and that a save over one keeps its own."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        path = local_path(location)
        if path is None or os.name != "posix":
            pytest.skip("not a local place with permission bits")
        before = os.umask(0o027)
        try:
            self.saved(location, OLD)
            for one in (path, *path.rglob("*")):
                left = 0o750 if one.is_dir() else 0o640
                check_equal(_mode(one), f"{left:o}", f"permissions of {one.name!r}, new under the umask 027")
            private = 0o700 if path.is_dir() else 0o600
            path.chmod(private)
            self.saved(location, NEW)
            check_equal(_mode(path), f"{private:o}", "permissions of a private place after a save over it")
            with self.opened(location, "r+") as store:
                store.write([Write(("a",), (), NEW[("a",)] + 1)])
                fill(store, {("new",): numbers(2)})
                store.save_header(header_for(NEW))
            check_equal(_mode(path), f"{private:o}", "permissions of a private place after a commit in place")
        finally:
            os.umask(before)

    def test_symbolic_link(self, location: Location) -> None:
        """Check that a symbolic link to a place stands for it: it is read, written and replaced there, and stays."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        path = local_path(location)
        if path is None or "://" in str(location) or os.name != "posix":
            pytest.skip("not a local path that a link can stand for")
        target = path.with_name(f"target-of-{path.name}")
        self.saved(target, OLD)
        path.symlink_to(target)
        with self.opened(path) as store:
            check_leaves(read_all(store), OLD, "read through a symbolic link")
        self.saved(path, NEW)
        if not path.is_symlink():
            raise failure("a save to a symbolic link replaced the link: its target is to be replaced")
        with self.opened(target) as store:
            check_leaves(read_all(store), NEW, "saved to a symbolic link: its target")
        with self.opened(path, "r+") as store:
            store.write([Write(("a",), (), NEW[("a",)] + 1)])
        with self.opened(target) as store:
            check_leaves(
                read_all(store),
                {**NEW, ("a",): NEW[("a",)] + 1},
                "written through a link, then deleted: its target",
            )


def _mode(path: FsPath) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


def _shapes(leaves: Leaves) -> dict[Path, tuple[torch.Size, torch.dtype]]:
    return {path: (value.shape, value.dtype) for path, value in leaves.items()}
