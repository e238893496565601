"""The kit's tests of the declaration: imports of discovery, accepted options, error messages."""

from __future__ import annotations

import subprocess

import pytest

from tdstore.errors import OptionError, PluginError, StoreError, StoreExistsError
from tdstore.registry import registry
from tdstore.store import Cap
from tdstore.testing.comparing import check_unchanged, failure, raises
from tdstore.testing.processes.warm import python
from tdstore.testing.setup import (
    Location,
    StoreSetup,
    able,
    fill,
    header_for,
    import_root,
    local_path,
    numbers,
)
from tdstore.types import Mode

_LIST_BACKENDS = """
import sys
from tdstore.registry import registry
assert {name!r} in registry().backends(), registry().status()
print(*(m for m in {heavy!r} if m in sys.modules))
"""


class DeclarationTests(StoreSetup):
    """Tests that discovery is cheap, and that a mistyped option is an error."""

    def test_light_import(self) -> None:
        """Check that discovering every backend imports none of the heavy packages."""
        if not isinstance(self.backend, str):
            pytest.skip("no backend name was given: nothing is declared")
        code = _LIST_BACKENDS.format(name=self.backend, heavy=self.heavy)
        done = subprocess.run([*python(), "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [], f"declaring the backends imports {done.stdout.strip()}"

    def test_declaration_is_complete(self) -> None:
        """Check for a summary of one line, an opener that can be found, and a way to recognise locations."""
        if self.backend is None:
            pytest.skip("no backend name was given: nothing is declared")
        backend = self.declaration()
        assert backend.summary.strip(), "Backend.summary is empty: tdstore.backends() shows it"
        assert "\n" not in backend.summary, f"Backend.summary is more than one line: {backend.summary!r}"
        module, _, function = backend.opener.partition(":")
        named = module and function
        assert named, f"Backend.opener is {backend.opener!r} instead of 'package.module:function'"
        known_by = (backend.schemes, backend.suffixes, backend.markers, backend.magic)
        assert any(known_by), "the backend has no schemes, suffixes, markers or magic: no location is recognised"
        assert not any("://" in scheme for scheme in backend.schemes), "schemes are given without ://"
        assert all(suffix.startswith(".") for suffix in backend.suffixes), "suffixes start with a dot"

    def test_opener_is_importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that other processes can import the opener by its name: no function inside a function, no lambda."""
        self._importable(monkeypatch)
        backend = self.declaration()
        module, _, function = backend.opener.partition(":")
        if "<" in function:
            raise failure(
                f"the opener {function!r} of {module} is defined inside of a function, or a lambda: other processes "
                "cannot import it. Define it at the top level of its module"
            )
        try:
            registry().opener(backend)
        except PluginError as error:
            raise failure(f"the opener {backend.opener!r} cannot be imported: {error}") from error

    def test_declared_caps(self, location: Location) -> None:
        """Check that `Backend.caps`, which `tdstore.backends()` shows to users, are the abilities of its stores."""
        if self.backend is None:
            pytest.skip("no backend name was given: nothing is declared")
        declared = self.declaration().caps & ~Cap.ASYNC  # which may depend on the place
        more, fewer = declared & ~self.caps, self.caps & ~declared & ~Cap.ASYNC
        assert not more, f"Backend.caps promises {able(more)}, which the stores have not"
        assert not fewer, f"Backend.caps lacks {able(fewer)}, which the stores have: tdstore.backends() hides it"

    @pytest.mark.parametrize("kind", ["file", "folder", "own-magic"])
    @pytest.mark.parametrize("mode", ["w", "x", "a", "r+", "r"])
    def test_foreign_target(self, location: Location, kind: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that files of another program at the location stay: "w" and "x" refuse with `StoreExistsError`."""
        self.needs(Cap.PERSISTENT, Cap.WRITE)
        path = local_path(location)
        if path is None:
            pytest.skip("not a local place")
        self._importable(monkeypatch)
        path.parent.mkdir(parents=True, exist_ok=True)
        magic = next(iter(self.declaration().magic), b"") if kind == "own-magic" else b""
        if kind == "folder":
            path.mkdir()
            (path / "thesis.txt").write_text("the only copy")
        elif kind == "own-magic" and not magic:
            pytest.skip("the backend declares no magic")
        else:
            path.write_bytes(magic + b"a file of another program\n" * 100)
        before = self.fingerprint(location)
        refusals = (StoreExistsError,) if mode in ("w", "x") else (StoreError,)
        with raises(refusals, doing=f"opening a {kind} of another program with mode {mode!r}"):
            store = registry().open(self.declaration(), location, mode=mode, **self.options)
            with store:
                if store.writable:
                    fill(store, {("a",): numbers(2)})
                    store.save_header(header_for({("a",): numbers(2)}))
        check_unchanged(before, self.fingerprint(location), f"a {kind} of another program, opened with mode {mode!r}")

    def test_unknown_option(self, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that an unknown option is refused by name before anything is opened."""
        self._importable(monkeypatch)
        before = self.fingerprint(location) if Cap.PERSISTENT in self.caps else None
        for mode in ("w", "r") if Cap.WRITE in self.caps else ("r",):
            with raises(OptionError, match="no_such_option", doing="an option that the opener does not have"):
                registry().open(
                    self.declaration(),
                    location,
                    mode=mode,
                    **self.options,
                    no_such_option=1,
                )
        if Cap.PERSISTENT in self.caps:
            check_unchanged(before, self.fingerprint(location), "the storage was changed")

    def test_unknown_mode(self, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that an unknown mode is refused before anything is opened."""
        self._importable(monkeypatch)
        before = self.fingerprint(location) if Cap.PERSISTENT in self.caps else None
        with raises(OptionError, match="mode", doing="mode 'rw'"):
            registry().open(self.declaration(), location, mode="rw", **self.options)  # type: ignore[arg-type]
        if Cap.PERSISTENT in self.caps:
            check_unchanged(before, self.fingerprint(location), "the storage was changed")

    def _importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opener = type(self).open
        if opener is not None:
            monkeypatch.syspath_prepend(import_root(opener))
