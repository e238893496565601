"""Finding backends, with real plugins: distributions in `tests/plugins`, seen through `sys.path`.

Each scenario runs in a process of its own, because entry points and modules are process-wide.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tdstore.builtin.memory import MemoryStore
from tdstore.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    MissingDependencyError,
    OptionError,
    PluginError,
    UnknownBackendError,
)
from tdstore.hookspecs import Backend
from tdstore.registry import KNOWN, Registry, registry, split_scheme
from tdstore.testing.processes.warm import python

PLUGINS = Path(__file__).parent / "plugins"
PRELUDE = """
import sys, warnings
warnings.simplefilter("ignore")
from tdstore.registry import Registry, registry
from tdstore.errors import *

def fails(kind, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind as error:
        assert type(error) is kind, type(error)
        return error
    raise AssertionError(f"did not raise {kind.__name__}")
"""


def run(code: str, *plugins: str, **env: str) -> str:
    """Run code in a new process that sees these plugins; its assertions are ours."""
    paths = [str(PLUGINS / name) for name in plugins]
    assert all(os.path.isdir(p) for p in paths)
    done = subprocess.run(
        [*python(), "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- a plugin that is right ------------------------------------------------------------------
def test_good_plugin_is_found_resolved_and_opened(tmp_path):
    run(
        """
        r = registry()
        assert {"memory", "example"} <= set(r.backends())
        assert "tdstore_example_store" not in sys.modules, "declaring imported the store"
        assert r.resolve("example://x").name == "example"
        assert r.resolve("data.example").name == "example"
        assert r.resolve("anything", storage="example").name == "example"
        store = r.open(r.get("example"), "example://x", mode="w", compression="lz4")
        import tdstore_example
        assert tdstore_example.OPENED == ["example://x"], "tdstore_store_opened was not called once"
        assert r.open(r.get("example"), "example://x", mode="r") is store
        fails(StoreNotFoundError, r.open, r.get("example"), "example://y", mode="r")
        (codec,) = r.codecs()
        assert codec.decode(codec.encode(codec.kind(21.5))).degrees == 21.5
        (line,) = [l for l in r.status() if l.name == "example"]
        assert line.plugin == "example" and line.error is None and "[example]" in str(line)
        """,
        "good",
    )


def test_resolve_order(tmp_path):
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "example.marker").touch()
    (tmp_path / "magic.bin").write_bytes(b"EXAMPLE1 and more")
    (tmp_path / "other.bin").write_bytes(b"something else")
    (tmp_path / "named.example").mkdir()
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "meta.json").write_text("{}")
    (tmp_path / "liar.example").mkdir()
    (tmp_path / "liar.example" / "tdstore.json").write_text("{}")
    run(
        f"""
        r, at = registry(), {str(tmp_path)!r}
        name = lambda *a, **k: getattr(r.resolve(*a, **k), "name", None)
        # explicit, by name, by URL, by declaration
        assert name(at + "/marked", storage="memory") == "memory"
        assert name("example://x", storage="memory") == "memory"
        assert name(at, storage="example://x") == "example"
        assert r.resolve("ram://", storage=r.get("example")).name == "example"
        # scheme, before a suffix and before a guess
        assert name("memmap://x.example") == "memmap"
        assert name("memmap://guess-me") == "memmap"
        assert name("exampled://x.h5") == "example"
        # suffix, marker, magic
        assert name("new/Data.EXAMPLE") == "example"
        assert name(at + "/named.example") == "example"
        assert name(at + "/marked") == "example"
        assert name(at + "/magic.bin") == "example"
        assert name(at + "/peer") == "memmap"
        # what a folder holds outweighs how it is called
        assert name(at + "/liar.example") == "memmap"
        # the guess, of paths and of URLs; None where nothing tells
        assert name(at + "/guess-me") == "example"
        assert name("some://guess-me") == "example"
        assert name(at + "/other.bin") is None
        assert name(at + "/new") is None
        assert name(None) is None
        from pathlib import Path
        assert name(Path("x.example")) == "example"
        """,
        "good",
    )


def test_openers_that_are_wrong():
    run(
        """
        r = registry()
        e = fails(MissingDependencyError, r.open, r.get("needy"), "x", mode="w")
        assert "a_package_that_nobody_has" in str(e) and "'needy'" in str(e)
        assert e.hint == "pip install needed-thing" and isinstance(e.__cause__, ImportError)
        e = fails(BrokenPluginError, r.open, r.get("lost"), "x", mode="w")
        assert "open_nothing" in str(e) and "'lost'" in str(e)
        e = fails(BrokenPluginError, r.open, r.get("odd"), "x", mode="w")
        assert "dict" in str(e) and "open_odd" in str(e)
        """,
        "good",
    )


def test_options_and_modes():
    run(
        """
        r = registry()
        b = r.get("example")
        e = fails(OptionError, r.open, b, "example://x", mode="w", compresion="lz4")
        assert "'compresion'" in str(e) and "compression, chunks" in str(e)
        assert e.hint == "did you mean 'compression'?"
        e = fails(OptionError, r.open, b, "example://x", mode="rw")
        assert "'rw'" in str(e) and "'r+'" in str(e)
        e = fails(OptionError, r.open, b, "example://x", location2="y")
        assert isinstance(e, TypeError)
        """,
        "good",
    )


# -- plugins that are wrong: each alone, beside a good one ------------------------------------
BROKEN = {
    # folder -> (plugin, what the message must say, type of the cause)
    "raises_at_import": ("broken_import", ["the moon is in the wrong phase", "RuntimeError"], "RuntimeError"),
    "unknown_hook": ("unknown_hook", ["tdstore_bakends", "tdstore_backends"], "PluginError"),
    "hook_raises": ("hook_raises", ["while listing backends", "tdstore_backends"], "ZeroDivisionError"),
    "yields_garbage": ("yields_garbage", ["'not a backend'", "Backend"], "InvalidTypeError"),
    "bad_signature": ("bad_signature", ["colour", "tdstore_guess_backend"], "PluginValidationError"),
    "no_module": ("no_module", ["no_such_module_at_all"], "ModuleNotFoundError"),
    "exits": ("exits", ["SystemExit"], "SystemExit"),
}


@pytest.mark.parametrize("folder", BROKEN)
def test_broken_plugin_is_isolated_and_explained(folder):
    plugin, says, cause = BROKEN[folder]
    run(
        f"""
        r = registry()
        names = set(r.backends())
        assert {{"memory", "memmap", "example"}} <= names, names
        assert not names & {{"half", "never"}}, "a broken plugin's backends are offered"
        assert r.resolve("example://x").name == "example"
        assert r.resolve("some://guess-me").name == "example"
        assert len(r.codecs()) == 1
        assert r.open(r.get("memory"), None, mode="w").url == "ram://"
        (line,) = [l for l in r.status() if l.plugin == {plugin!r}]
        assert line.backend is None and type(line.error).__name__ == {cause!r}, line
        assert "failed to load" in str(line)
        e = fails(BrokenPluginError, r.get, {plugin!r})
        assert type(e.__cause__).__name__ == {cause!r}, e.__cause__
        for said in {says!r}:
            assert said in str(e) or said in str(e.__cause__), (said, str(e))
        assert {plugin!r} in str(e)
        # asked twice: the same story, with no traceback growing on it
        again = fails(BrokenPluginError, r.get, {plugin!r})
        assert str(again) == str(e)
        # what else is unknown says that something failed
        e = fails(UnknownBackendError, r.get, "qqqq")
        assert "failed to load: {plugin}" in str(e)
        """,
        folder,
        "good",
    )


def test_all_broken_at_once():
    run(
        f"""
        r = registry()
        assert {{"memory", "example"}} <= set(r.backends())
        broken = sorted(l.plugin for l in r.status() if l.backend is None)
        assert broken == {sorted(v[0] for v in BROKEN.values())!r}, broken
        """,
        *BROKEN,
        "good",
    )


def test_hint_names_the_plugin_to_block():
    run(
        """
        e = fails(BrokenPluginError, registry().get, "broken_import")
        assert "TDSTORE_DISABLE_PLUGINS=broken_import" in e.hint, e.hint
        """,
        "raises_at_import",
    )


# -- two claims ------------------------------------------------------------------------------
def test_two_plugins_declare_one_name():
    run(
        """
        r = registry()
        assert "twin" not in r.backends()
        assert {"firstonly", "secondonly"} <= set(r.backends())
        e = fails(AmbiguousBackendError, r.get, "twin")
        assert "first_twin" in str(e) and "second_twin" in str(e)
        assert "TDSTORE_DISABLE_PLUGINS=" in e.hint
        fails(AmbiguousBackendError, r.resolve, "twin://x")
        assert len([l for l in r.status() if l.name == "twin"]) == 2
        """,
        "same_name_1",
        "same_name_2",
    )
    run(
        'assert registry().get("twin").opener == "first_twin:open_it"',
        "same_name_1",
        "same_name_2",
        TDSTORE_DISABLE_PLUGINS="second_twin",
    )


def test_two_plugins_claim_one_place():
    run(
        """
        r = registry()
        for where in ("place://x", "data.place"):
            e = fails(AmbiguousBackendError, r.resolve, where)
            assert "'left'" in str(e) and "'right'" in str(e) and where in str(e)
            assert "storage='left'" in e.hint and "storage='right'" in e.hint
        assert r.resolve("data.place", storage="right").name == "right"
        """,
        "same_place_1",
        "same_place_2",
    )


def test_two_distributions_with_one_plugin_name(tmp_path):
    # The same entry-point name twice: the first stays, the second is told of.
    info = tmp_path / "impostor-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[tdstore]\nexample = impostor\n")
    (tmp_path / "impostor.py").write_text("from tdstore.hookspecs import hookimpl\n")
    run(
        f"""
        sys.path.append({str(tmp_path)!r})
        r = registry()
        assert r.get("example").opener.startswith("tdstore_example_store"), "the first one's backends were lost"
        (line,) = [l for l in r.status() if l.error is not None]
        assert "impostor" in str(line.error) and "two distributions" in str(line.error)
        e = fails(UnknownBackendError, r.get, "what-the-impostor-declares")
        assert "two distributions name their plugin 'example'" in e.hint and "impostor" in e.hint, e.hint
        assert "TDSTORE_DISABLE_PLUGINS=tdstore-example:example or TDSTORE_DISABLE_PLUGINS=impostor:example" in e.hint
        """,
        "good",
    )


# -- blocking, not installed -------------------------------------------------------------------
def test_disabled_plugins():
    run(
        """
        r = registry()
        assert "example" not in r.backends()
        assert {l.plugin: str(l.error) for l in r.status() if l.error} == dict.fromkeys(
            ("broken_import", "example"), "switched off by TDSTORE_DISABLE_PLUGINS"
        )
        fails(MissingDependencyError, r.get, "example")
        e = fails(MissingDependencyError, r.resolve, "example://x")
        assert "'example' is installed but switched off" in str(e) and "example://x" in str(e)
        assert e.hint == "take example out of the environment variable TDSTORE_DISABLE_PLUGINS"
        """,
        "good",
        "raises_at_import",
        TDSTORE_DISABLE_PLUGINS="broken_import, example",
    )


def test_h5_disabled_or_not_installed_says_what_to_install(tmp_path):
    code = """
        from importlib import metadata
        r = registry()
        assert "h5" not in r.backends()
        asked = [lambda: r.get("h5")] + [lambda p=p: r.resolve(p) for p in ("h5://x", "new.h5", "x.HDF5")]
        for call in asked:
            e = fails(MissingDependencyError, call)
            told = ("'h5' backend", "pip install ./plugins/tdstore-h5") if GONE else ("'h5' is", "take h5 out")
            assert told[0] in str(e) and e.hint.startswith(told[1]), str(e)
        """
    run("GONE = False\n" + textwrap.dedent(code), TDSTORE_DISABLE_PLUGINS="h5")
    # As if the distribution were not there: no entry points at all.
    run("GONE = True\nsys.modules['tdstore.discovery'].entry_points = lambda **k: ()\n" + textwrap.dedent(code))


def test_remote_says_what_to_install():
    r = Registry()
    for scheme in ("s3", "gs", "https", "az"):
        if "remote" in r.backends():
            assert r.resolve(f"{scheme}://bucket/x")
            continue
        with pytest.raises(MissingDependencyError) as caught:
            r.resolve(f"{scheme}://bucket/x")
        assert "pip install ./plugins/tdstore-remote" in str(caught.value)
        assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("name", KNOWN)
def test_known_backends_are_found_or_explained(name):
    r = Registry()
    if name not in r.backends():
        with pytest.raises(MissingDependencyError, match="pip install"):
            r.get(name)
    else:
        assert r.get(name).name == name


# -- unknown names -----------------------------------------------------------------------------
def test_unknown_names_show_the_near_one_and_what_is_installed():
    r = Registry()
    with pytest.raises(UnknownBackendError) as caught:
        r.get("memorry")
    assert "'memorry'" in str(caught.value)
    assert "installed:" in str(caught.value)
    assert caught.value.hint == "did you mean 'memory'?"
    with pytest.raises(UnknownBackendError) as caught:
        r.resolve("nosuch://x/y")
    assert "'nosuch'" in str(caught.value)
    r.register(Backend(name="pathsonly", opener=f"{__name__}:open_mine", summary="of this test"))
    for scheme in ("pathsonly", "pathonly"):
        with pytest.raises(UnknownBackendError) as caught:
            r.resolve(f"{scheme}://x/y")
        assert caught.value.hint == "the backend 'pathsonly' has no URLs: pass a path, and storage='pathsonly'"
    assert isinstance(caught.value, (LookupError, ValueError))


# -- this process --------------------------------------------------------------------------------
MINE = Backend(name="mine", opener=f"{__name__}:open_mine", summary="of this test", schemes=("mine",))


def test_register_and_unregister():
    r = Registry()
    r.register(MINE)
    assert r.get("mine") is MINE
    assert r.resolve("mine://x") is MINE
    with pytest.raises(AmbiguousBackendError, match="already declared by register_backend"):
        r.register(MINE)
    with pytest.raises(AmbiguousBackendError, match="tdstore.builtin"):
        r.register(Backend(name="memory", opener="x:y", summary="impostor"))
    r.unregister("mine")
    with pytest.raises(UnknownBackendError):
        r.get("mine")
    for name in ("mine", "memory", "nobody"):
        with pytest.raises(UnknownBackendError, match="was registered in this process"):
            r.unregister(name)
    assert "memory" in r.backends()
    assert "mine" not in Registry().backends()


def test_public_names(monkeypatch):
    import tdstore

    tdstore.register_backend(MINE)
    try:
        assert registry().get("mine") is MINE
    finally:
        registry().unregister("mine")
    assert any(line.name == "memory" for line in tdstore.backends())


def test_opener_that_takes_any_option_checks_them_itself(monkeypatch):
    taken = {}

    def open_any(location, *, mode="r", **options):
        taken.update(options, mode=mode, location=location)
        return MemoryStore()

    r = Registry()
    monkeypatch.setitem(sys.modules, "openers", SimpleNamespace(open_any=open_any))
    r.open(dataclasses.replace(MINE, opener="openers:open_any"), Path("/x"), mode="w", anything=1)
    assert taken == {"anything": 1, "mode": "w", "location": "/x"}


def test_errors_have_the_right_family():
    for error in (UnknownBackendError, MissingDependencyError, AmbiguousBackendError, BrokenPluginError):
        assert issubclass(error, PluginError)
    assert not issubclass(OptionError, PluginError)


def test_split_scheme():
    assert split_scheme("h5://runs/a.h5") == ("h5", "runs/a.h5")
    assert split_scheme("/plain/path") == ("", "/plain/path")
    assert split_scheme("x://") == ("x", "")


def test_a_password_is_not_shown():
    for call in (
        lambda: Registry().resolve("nosuch://me:secret@host/x"),
        lambda: Registry().engine("nosuch://me:secret@h/x"),
    ):
        with pytest.raises(UnknownBackendError) as caught:
            call()
        assert "secret" not in str(caught.value)
        assert "nosuch://***@" in str(caught.value)
