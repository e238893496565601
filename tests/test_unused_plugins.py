"""Plugins that failed, are switched off or absent: what is saved to and opened at their places, and what users read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    BrokenPluginError,
    MissingDependencyError,
    PluginError,
    StoreError,
    StoreIOError,
    UnknownBackendError,
)
from tdstore.hookspecs import Backend
from tdstore.registry import Registry, registry
from tdstore.store import Store
from tests.test_registry import run

SAVE = """
import os, torch, tdstore
from tdstore import TensorDict

td = TensorDict(a=torch.arange(3))
os.chdir({at!r})
ways = [
    lambda p: td.save(p),
    lambda p: tdstore.save(td, p),
    lambda p: TensorDict.from_schema({{"a": ((), "int64")}}, batch_size=[3], location=p),
    lambda p: tdstore.open(p, mode="w"),
    lambda p: tdstore.open(p, mode="a"),
    lambda p: tdstore.copy("source", p, progress=False),
]
td.save("source").close()
"""


# -- saving to a suffix that nothing installed knows ---------------------------------------------
def test_a_suffix_of_a_plugin_that_failed_is_refused_with_its_cause(tmp_path):
    run(
        SAVE.format(at=str(tmp_path))
        + """
for path in ("x.rows", "X.ROWS", "x.rows.gz"):
    for way in ways:
        e = fails(BrokenPluginError, way, path)
        assert "'rowfile'" in str(e) and "a_library_that_nobody_has" in str(e) and path in str(e), str(e)
        assert isinstance(e.__cause__, ModuleNotFoundError) and "TDSTORE_DISABLE_PLUGINS=rowfile" in e.hint
e = fails(BrokenPluginError, td.save, "rowfile://x")
assert "a_library_that_nobody_has" in str(e)
assert os.listdir() == ["source"], os.listdir()
# A directory of that name, where the caller says so. Names without such a suffix are directories as ever.
td.save("x.rows", storage="memmap").close()
assert TensorDict.load("x.rows")["a"].tolist() == [0, 1, 2]
td.save("x.rows").close()  # it is a dataset by now
td.save("runs.rowss").close()
""",
        "broken_format",
    )


def test_a_suffix_of_a_plugin_that_is_switched_off_is_refused(tmp_path):
    run(
        SAVE.format(at=str(tmp_path))
        + """
for way in ways:
    e = fails(MissingDependencyError, way, "x.example")
    assert "'example' is installed but switched off" in str(e), str(e)
    assert e.hint == "take example out of the environment variable TDSTORE_DISABLE_PLUGINS"
assert "tdstore_example" not in sys.modules, "the plugin was imported to ask for its suffixes"
assert os.listdir() == ["source"], os.listdir()
""",
        "good",
        TDSTORE_DISABLE_PLUGINS="example",
    )


def test_a_suffix_of_a_file_format_is_refused_and_names_what_failed(tmp_path):
    run(
        SAVE.format(at=str(tmp_path))
        + """
for path in ("x.sqlite", "runs/x.lance", "x.parquet", "x.tar.gz", "x.DB"):
    for way in ways:
        e = fails(UnknownBackendError, way, path)
        assert path in str(e) and "'rowfile'" in str(e) and "a_library_that_nobody_has" in str(e), str(e)
        assert "storage='memmap'" in e.hint and isinstance(e.__cause__, BrokenPluginError)
assert os.listdir() == ["source"], os.listdir()
""",
        "broken_format",
    )


@pytest.mark.parametrize(
    "name",
    [
        "runs/exp.1",
        "v1.2",
        "data.2024-01-01",
        "ppo.cartpole.seed1",
        "lr0.001",
        "exp.final",
        ".db",
        "run.v2",
        "a.sqlite/",
    ],
)
def test_dots_in_names_of_directories(name, tmp_path):
    TensorDict(a=[1, 2]).save(f"{tmp_path}/{name}").close()
    assert (tmp_path / name).is_dir()
    assert TensorDict.load(f"{tmp_path}/{name}")["a"].tolist() == [1, 2]


# -- opening what a plugin would know --------------------------------------------------------------
def test_opening_says_which_plugin_failed(tmp_path):
    (tmp_path / "good.rows").write_bytes(b"ROWS and more")
    (tmp_path / "good.unknown").write_bytes(b"ROWS and more")
    (tmp_path / "good.sqlite").write_bytes(b"SQLite format 3\0")
    run(
        f"""
        import os, tdstore
        os.chdir({str(tmp_path)!r})
        e = fails(BrokenPluginError, tdstore.open, "good.rows")
        assert "'rowfile'" in str(e) and "good.rows" in str(e) and isinstance(e.__cause__, ModuleNotFoundError)
        for name in ("good.unknown", "good.sqlite"):
            e = fails(StoreNotFoundError, tdstore.open, name)
            assert "no installed backend recognises it" in str(e) and "'rowfile'" in str(e), str(e)
            assert isinstance(e.__cause__, BrokenPluginError)
        e = fails(StoreNotFoundError, tdstore.open, "absent")
        assert str(e) == "nothing is stored at absent"
        """,
        "broken_format",
    )


@pytest.mark.parametrize("call", [lambda p: TensorDict(a=[1]).save(p), tdstore.open], ids=["save", "open"])
def test_a_named_pipe_is_refused_and_not_waited_for(call, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError, match="pipe"):
        try:
            pool.submit(call, str(tmp_path / "pipe")).result(60)
        finally:
            os.close(os.open(tmp_path / "pipe", os.O_RDWR))  # a reader that waits goes on


# -- an interrupt ----------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["import", "hook"])
def test_an_interrupt_while_plugins_are_found_leaves_nothing_behind(where):
    run(
        """
        for _ in range(2):
            try:
                names = set(registry().backends())
            except KeyboardInterrupt:
                continue
        assert {"memory", "memmap", "patient", "example"} <= names, names
        assert registry().resolve("patient://x").name == "patient"
        assert not [line for line in registry().status() if line.error]
        """,
        "interrupts",
        "good",
        INTERRUPT=where,
    )


def test_threads_find_plugins_once():
    run(
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: sorted(registry().backends()), range(8)))
        assert all(names == found[0] and "example" in names for names in found)
        """,
        "good",
    )


def test_a_plugin_that_asks_for_backends_at_import_is_told_why_not(tmp_path):
    info = tmp_path / "asking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tdstore]\nasking = asking\n")
    (tmp_path / "asking.py").write_text("import tdstore\ntdstore.backends()\n")
    run(
        f"""
        sys.path.append({str(tmp_path)!r})
        assert "example" in registry().backends()
        e = fails(BrokenPluginError, registry().get, "asking")
        assert "while they are being found" in str(e)
        """,
        "good",
    )


# -- messages --------------------------------------------------------------------------------------
def test_one_of_two_plugins_with_one_name_can_be_left_out(tmp_path):
    info = tmp_path / "impostor-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[tdstore]\nexample = impostor\n")
    (tmp_path / "impostor.py").write_text(
        "from tdstore.hookspecs import Backend, hookimpl\n"
        "@hookimpl\n"
        "def tdstore_backends():\n"
        "    yield Backend(name='other', opener='x:y', summary='of the impostor')\n"
    )
    code = f"sys.path.append({str(tmp_path)!r})\nr = registry()\n"
    run(
        code
        + """
(line,) = [l for l in r.status() if l.error is not None]
e = fails(BrokenPluginError, r.get, line.name)
assert "'impostor'" in str(e) and "'tdstore_example'" in str(e) and "(impostor)" in str(e), str(e)
assert "TDSTORE_DISABLE_PLUGINS=impostor:example" in e.hint, e.hint
assert "TDSTORE_DISABLE_PLUGINS=tdstore-example:example" in e.hint, e.hint
assert r.resolve("x.example").name == "example"
""",
        "good",
    )
    run(code + "assert 'other' in r.backends() and 'example' not in r.backends(), r.backends()",
        "good", TDSTORE_DISABLE_PLUGINS="tdstore_example:example")  # fmt: skip
    run(code + "assert 'example' in r.backends() and 'other' not in r.backends()\n"
               "assert [l.name for l in r.status() if l.error] == ['impostor:example']",
        "good", TDSTORE_DISABLE_PLUGINS="impostor:example")  # fmt: skip


def test_two_backends_with_one_name_are_told_apart_by_their_distributions():
    run(
        """
        e = fails(AmbiguousBackendError, registry().get, "twin")
        for word in ("first_twin", "second_twin", "the distribution"):
            assert word in str(e), str(e)
        assert "TDSTORE_DISABLE_PLUGINS=first_twin or TDSTORE_DISABLE_PLUGINS=second_twin" in e.hint, e.hint
        """,
        "same_name_1",
        "same_name_2",
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("suffixes", ("sqlite",), "'.sqlite'"),
        ("suffixes", (".SQLite",), "'.sqlite'"),
        ("suffixes", (".",), "begins with a dot"),
        ("suffixes", ".sqlite", "not a tuple"),
        ("schemes", ("sqlite://",), "without '://'"),
        ("schemes", "sqlite", "not a tuple"),
        ("magic", b"SQLite", "not a tuple"),
        ("markers", "meta.json", "not a tuple"),
    ],
)
def test_a_declaration_that_would_match_wrongly_is_refused(field, value, says):
    with pytest.raises(PluginError, match="backend 'sqlite' declares") as caught:
        Backend(name="sqlite", opener="x:y", summary="s", **{field: value})
    assert says in str(caught.value)


def test_a_scheme_that_a_backend_does_not_have():
    r = Registry()
    r.register(Backend(name="sqlite", opener="x:y", summary="s", suffixes=(".sqlite",)))
    with pytest.raises(UnknownBackendError) as caught:
        r.resolve("sqlite:///x")
    assert caught.value.hint == "the backend 'sqlite' has no URLs: pass a path, and storage='sqlite'"
    with pytest.raises(UnknownBackendError) as caught:
        r.resolve("memmapp://x")
    assert caught.value.hint == "did you mean 'memmap://'?"


ERRORS = {
    "os": (OSError(13, "Permission denied"), StoreIOError),
    "library": (ValueError("unable to open database file"), BrokenPluginError),
    "import": (ImportError("no module named apsw"), MissingDependencyError),
}
RAISED: list[Exception] = []


def open_raising(location: str, *, mode: str = "r") -> Store:
    raise RAISED[-1]


@pytest.mark.parametrize("name", ERRORS)
def test_an_opener_that_raises_a_bare_error(name):
    error, kind = ERRORS[name]
    RAISED.append(error)
    mine = Backend(
        name="raising", opener=f"{__name__}:open_raising", summary="s", schemes=("raising",), install="pip install apsw"
    )
    registry().register(mine)
    try:
        with pytest.raises(kind) as caught:
            TensorDict.load("raising://me:secret@host/x")
    finally:
        registry().unregister("raising")
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    for word in ("'raising'", "this process", "raising://***@host/x", "'r'", str(error)):
        assert word in str(caught.value), word
    assert "secret" not in str(caught.value)
    if isinstance(caught.value, StoreIOError):
        assert caught.value.errno == 13
    if isinstance(caught.value, MissingDependencyError):
        assert caught.value.hint == "pip install apsw"


def test_a_bare_error_names_the_distribution():
    run(
        """
        import tdstore_example_store
        def raising(location, *, mode="r"):
            raise KeyError("page 7")
        tdstore_example_store.open_odd = raising
        e = fails(BrokenPluginError, registry().open, registry().get("odd"), "some/place")
        origin = "plugin 'example' of the distribution 'tdstore_example'"
        for word in ("'odd'", origin, "some/place", "KeyError: 'page 7'"):
            assert word in str(e), str(e)
        """,
        "good",
    )


def test_a_suffix_without_its_dot_names_plugin_distribution_and_remedy():
    run(
        """
        e = fails(BrokenPluginError, registry().get, "dotless")
        text = str(e)
        for word in ("plugin 'dotless'", "the distribution 'dotless'", "declares the suffix 'sqlite'", "'.sqlite'",
                     "TDSTORE_DISABLE_PLUGINS=dotless leaves it out"):
            assert word in text, text
        assert text.count("Hint:") == 1, text
        assert registry().resolve("some/xsqlite") is None, "a name that only ends like the suffix"
        fails(BrokenPluginError, registry().resolve, "some/x.sqlite")
        """,
        "dotless",
    )


def test_two_backends_of_one_place_are_named_with_their_plugins():
    run(
        """
        e = fails(AmbiguousBackendError, registry().resolve, "some/x.place")
        for name in ("left", "right"):
            assert f"{name!r} (plugin '{name}_claim' of the distribution '{name}_claim')" in str(e), str(e)
        assert e.hint == "pass storage='left' or storage='right'"
        """,
        "same_place_1",
        "same_place_2",
    )
