"""A stranger's plugin, installed where nothing of it was: files open and save by their ending, nothing else changed.

`examples/tdstore-safetensors` is built and installed by pip into a fresh environment that sees the packages of
this one (torch, tdstore) and no index; the files are checked with the `safetensors` library itself.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tdstore.testing.__main__ import main as kit
from tdstore.testing.processes.warm import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "tdstore-safetensors"


class Environment:
    """A fresh virtual environment, beside which the packages of this one are seen."""

    def __init__(self, home: Path) -> None:
        venv.create(home, symlinks=True)
        self.python = home / "bin" / "python"
        paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
        seen = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        Path(paths["purelib"], "outer.pth").write_text(seen)

    def __call__(self, *args: str, cwd: Path) -> str:
        names = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "TDSTORE_"))
        }
        done = subprocess.run(
            [str(self.python), "-W", "ignore", *args], cwd=cwd, env=names, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def code(self, text: str, cwd: Path) -> str:
        return self("-c", textwrap.dedent(text), cwd=cwd)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "home")


@pytest.fixture
def folder(tmp_path):
    """Where a user works: with a file that the safetensors library wrote."""
    tensors = {"layer.0.weight": torch.arange(12.0).reshape(4, 3), "layer.0.bias": torch.ones(4, dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path


def test_without_and_with_the_plugin(environment, folder, tmp_path_factory):
    """One test, in this order: the environment is first without the plugin and then with it."""
    environment.code(
        """
        import tdstore
        from tdstore import TensorDict
        assert "safetensors" not in {line.name for line in tdstore.backends()}
        try:
            TensorDict.load("x.safetensors")
        except tdstore.errors.StoreNotFoundError as error:
            assert "x.safetensors is there, but no installed backend" in str(error), error
            assert "storage=" in error.hint
        else:
            raise AssertionError("a file was opened that no backend knows")
        try:
            TensorDict.load("x.safetensors", storage="safetensors")
        except tdstore.errors.UnknownBackendError as error:
            assert "'safetensors'" in str(error) and "installed: " in str(error), error
        else:
            raise AssertionError("a backend was opened that is not installed")
        """,
        folder,
    )

    source = tmp_path_factory.mktemp("source") / "tdstore-safetensors"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    offline = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-build-isolation", "--no-deps"]
    environment("-m", "pip", "install", *offline, str(source), cwd=source)

    printed = environment.code(
        """
        import sys
        import tdstore
        from tdstore import TensorDict

        (line,) = [line for line in tdstore.backends() if line.name == "safetensors"]
        assert line.error is None and line.plugin == "safetensors"
        assert "tdstore_safetensors.store" not in sys.modules, "listing imports the store"
        print(line)

        td = TensorDict.load("x.safetensors")
        assert "safetensors" not in sys.modules, "the plugin needs no other package"
        assert set(td.keys()) == {"layer.0.weight", "layer.0.bias"} and td.batch_size == ()
        assert td["layer.0.weight"].sum() == 66

        import torch
        assert td["layer.0.bias"].dtype is torch.bfloat16
        mine = TensorDict(
            {"obs": torch.arange(12.0).view(4, 3), "next": {"obs": torch.ones(4).cdouble()}, "task": "walk"},
            batch_size=[4],
            names=["time"],
        )
        mine.save("y.safetensors")
        back = TensorDict.load("y.safetensors")
        assert (back.to_tensordict() == mine).all() and back["task"] == "walk" and back.names == ["time"]
        assert back[torch.tensor([3, 0])]["obs"].tolist() == [[9, 10, 11], [0, 1, 2]]
        with tdstore.open("y.safetensors", mode="r+") as change:
            change[1:3] = change[1:3].to_tensordict().apply(lambda t: t * 0)
        assert TensorDict.load("y.safetensors")["next", "obs"].tolist() == [1, 0, 0, 1]
        tdstore.copy("x.safetensors", "x", progress=False)  # to memory-mapped files, which have the same keys
        assert (tdstore.open("x")["layer.0.weight"] == td["layer.0.weight"]).all()
        """,
        folder,
    )
    assert printed.splitlines()[0] == "safetensors one .safetensors file, written as a whole  [safetensors]"
    read = safetensors.torch.load_file(folder / "y.safetensors")
    assert sorted(read) == ["next.obs", "obs"]
    assert read["obs"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0], [9, 10, 11]]


def test_the_example_uses_public_names_only():
    """What a stranger may count on: these modules, and nothing that starts with an underscore."""
    modules = "store types hookspecs errors header dtypes testing storekit"
    public = {"tdstore", *(f"tdstore.{name}" for name in modules.split())}
    found = set()
    for path in EXAMPLE.rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and words[1].partition(".")[0] == "tdstore":
                assert words[1] in public, f"{path.name}: {line}"
                assert not any(word.startswith("_") for word in words[3:]), f"{path.name}: {line}"
                found.add(words[1])
    assert {"tdstore.store", "tdstore.hookspecs", "tdstore.testing"} <= found


def test_the_store_is_small():
    """The promise of the tutorial: one class of at most 120 lines."""
    tree = ast.parse((EXAMPLE / "tdstore_safetensors" / "store.py").read_text())
    (store,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert store.end_lineno is not None and store.end_lineno - store.lineno < 120


READ_ONLY = """
from tdstore.errors import ReadOnlyError

def open_printed(location, *, mode="r"):
    raise ReadOnlyError(f"{location} is printed on paper", url=location)
"""
FORGETFUL = """
from tdstore_safetensors.store import SafetensorsStore, open_safetensors

class Forgetful(SafetensorsStore):
    def load_header(self):
        return type(super().load_header())()

def open_forgetful(location, *, mode="r"):
    store = open_safetensors(location, mode=mode)
    store.__class__ = Forgetful
    return store
"""


def test_the_kit_tells_authors_of_readers_what_to_do(tmp_path, monkeypatch, capsys):
    (tmp_path / "paper.py").write_text(READ_ONLY)
    monkeypatch.syspath_prepend(tmp_path)
    assert kit(["paper:open_printed"]) == 2
    told = capsys.readouterr().err
    assert "is printed on paper" in told
    assert "override `prepare`" in told


def test_the_kit_tells_authors_what_failed_and_what_to_do(tmp_path):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    command = [*python(), "-W", "ignore", "-m", "tdstore.testing", "forgetful:open_forgetful"]
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE)])
    done = subprocess.run(
        [*command, "-k", "header_minimal", "--suffix", ".st"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "forgetful:open_forgetful declares: WRITE, PARTIAL_READ" in done.stdout
    assert "-k NAME" in done.stdout
    assert "deviations" in done.stdout
