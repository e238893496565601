"""Every python block of the documents runs: the blocks of a file, in order, as one module in an empty folder.

The tutorials are followed instead: their files are made, their commands run, and what is shown is compared.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import types
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdstore.testing.processes import warm

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
READMES = [ROOT / "README.md", *ROOT.glob("plugins/*/README.md")]
PAGES = [*READMES, *(p for p in (ROOT / "docs").rglob("*.md") if p not in TUTORIALS)]
DOCUMENTS = sorted(p for p in PAGES if "```python" in p.read_text())
BLOCK = re.compile(r"^([ ]*)```python[^\n]*\n(.*?)^\1```", re.M | re.S)


def program(text: str) -> str:
    """The python blocks of a document, each at its own line so that a traceback points into the document."""
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(2))
        indent = len(match[1])
        for offset, line in enumerate(match[2].splitlines()):
            lines[first + offset] = line[indent:]
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # classes of the document can be found by name
    exec(compile(program(path.read_text()), str(path), "exec"), module.__dict__)


NOT_RUN = re.compile(r"(<!-- not run by the tests: [^\n]+ -->\n)?^```(?!python$)(py\w*)\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_that_do_not_run_say_why_and_compile(path):
    for reason, _, body in NOT_RUN.findall(path.read_text()):
        assert reason, f"a block of {path.name} is not run; make it ```python, or put the reason in a comment above it"
        compile(body, str(path), "exec")


def test_the_example_store_passes_the_kit(tmp_path):
    document = ROOT / "docs" / "reference" / "storage-protocol.md"
    (tmp_path / "test_document.py").write_text(program(document.read_text()))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*warm.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_document.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_blocks_are_found_at_their_lines():
    text = "a\n```python\nx = 1\n```\n\n* item\n  ```python\n  y = x + 1\n  ```\n```toml\nz\n```\n"
    assert program(text).splitlines()[2] == "x = 1"
    assert program(text).splitlines()[7] == "y = x + 1"
    assert "z" not in program(text)


# -- tutorials -----------------------------------------------------------------------------
# The line above a block says what the reader does with it: "Create `store.py`:", "Change `store.py`:".
STEP = re.compile(r"^(?:(Create|Change) `([^`\n]+)`:\n\n)?(`{3,})(\w+)\n(.*?)^\3$", re.M | re.S)
EXAMPLES = {
    "your-first-backend.md": ROOT / "examples" / "tdstore-safetensors",
    "rows-in-a-database.md": ROOT / "examples" / "tdstore-sqlite",
}
LEFT_BY_TOOLS = ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "build")


def follow(text: str, folder: Path, shell: dict[str, str]) -> None:
    """Do what a tutorial says, block by block; where it shows an output, that must be it."""
    printed = ""
    for step in STEP.finditer(text):
        verb, name, _, language, body = step.groups()
        where = f"line {text.count(chr(10), 0, step.start(5)) + 1}"
        if verb == "Create":
            assert language != "diff", where
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(body)
        elif verb == "Change":
            assert language == "diff", where
            assert body.startswith(f"--- {name}\n+++ {name}\n"), f"{where}: the diff is not one of {name}"
            # No fuzz: the lines stand where the diff says.
            run("patch -p0 --fuzz=0 --no-backup-if-mismatch", folder, shell, where, body)
        elif language == "python":
            printed = run("python -", folder, shell, where, body)
        elif language == "text":
            assert shown(body).fullmatch(printed), f"{where}: this was printed instead:\n{printed}"
        else:
            assert language == "console", f"{where}: nobody would know what to do with this {language} block"
            for command, expected in commands(body):
                printed = run(command, folder, shell, where, may_fail=" failed" in expected or "FAILURES" in expected)
                fits = not expected or shown(expected).fullmatch(printed)
                assert fits, f"{where}: {command!r} printed instead:\n{printed}"


def commands(body: str) -> list[tuple[str, str]]:
    """Each command of a console block, with the output shown below it."""
    parts = re.split(r"^\$ (.*)\n", body, flags=re.M)
    assert parts[0] == "", "a console block starts with a command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def shown(text: str) -> re.Pattern[str]:
    """A shown output as a pattern: `...` is any text of a line; alone on a line, any number of lines."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + r"[ ]*\n"
        for line in text.splitlines()
    ]
    return re.compile("".join(lines))


def run(
    command: str, folder: Path, shell: dict[str, str], where: str, text: str | None = None, *, may_fail: bool = False
) -> str:
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=shell,
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(text, timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # Python prints where each thread is (PYTHONFAULTHANDLER)
            printed, _ = process.communicate()
            pytest.fail(f"{where}: {command!r} did not end within 400 s:\n{printed}")
    assert may_fail == bool(process.returncode), f"{where}: {command!r} ended with {process.returncode}:\n{printed}"
    return printed


# Instead of the environment's python. Its kits and programs start as forks of one that has imported torch and pytest,
# which takes two seconds for each of eleven, and then for what they start.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m pytest" | "-m tdstore.testing" | "-c "*) exec {warm} "$@" ;;
    "- ") exec {warm} -c "$(cat)" ;;
esac
exec {python} "$@"
"""
WARM = "import shlex, sys; from tdstore.testing.processes.warm import python; print(shlex.join(python())); "
WARM += "sys.stdout.flush(); sys.stdin.read()"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a shell in a fresh environment, which sees the packages of this one; pip asks no index."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    seen = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(paths["purelib"], "outer.pth").write_text(seen)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PIP_", "PYTHON"))},
        "PATH": f"{tmp_path / 'bin'}:{home}/bin:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore::UserWarning",
        "PYTHONFAULTHANDLER": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the wrong way round: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "80",
        "TMPDIR": str(tmp_path),
        # Only what the reader has installed: other plugins of pytest that are here import zarr and more at each start.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "_hypothesis_pytestplugin",
        "PYTEST_ADDOPTS": "-p no:logging",  # handlers on each logger of torch, thrice a test
    }
    python = home / "bin" / "python"
    with subprocess.Popen(
        [python, "-c", WARM], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        command = tmp_path / "bin" / "python"
        command.parent.mkdir()
        command.write_text(PYTHON.format(warm=server.stdout.readline().strip(), python=python))
        command.chmod(0o755)
        yield variables
        server.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty commands, 70 s of CPU: five minutes where other tests want the same cores
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.name)
def test_tutorial_leads_to_its_example(path, tmp_path, shell):
    folder = tmp_path / "folder"
    folder.mkdir()
    follow(path.read_text(), folder, shell)
    example = EXAMPLES[path.name]
    for source in sources_of(example):
        made = folder / source.relative_to(example)
        assert made.is_file(), f"the tutorial does not make {made.name}"
        assert made.read_text() == source.read_text(), f"{made.name} of the tutorial is not that of the example"
    for made in sources_of(folder):
        if made.suffix in (".py", ".toml", ".md"):
            assert (example / made.relative_to(folder)).is_file(), f"the example lacks {made.name}"


def sources_of(folder: Path) -> list[Path]:
    files = [p for p in folder.rglob("*") if p.is_file() and not {*LEFT_BY_TOOLS} & {*p.relative_to(folder).parts}]
    assert files
    return files


def test_what_the_tutorials_are_followed_by(tmp_path):
    assert shown("a ... b\n...\nc\n").fullmatch("a 1 b\n2\n3\nc\n")
    assert not shown("a\n").fullmatch("a\nb\n")
    assert commands("$ x\n$ y\n1\n2\n") == [("x", ""), ("y", "1\n2\n")]
    made = "Create `g.py`:\n\n```python\na\nb\nc\n```\n\nChange `g.py`:\n\n```diff\n"
    diff = "--- g.py\n+++ g.py\n@@ -1,3 +1,3 @@\n a\n-b\n+x\n c\n```\n"
    follow(made + diff, tmp_path, dict(os.environ))
    assert (tmp_path / "g.py").read_text() == "a\nx\nc\n"
    for wrong in (diff.replace(" c\n", " d\n"), diff.replace("g.py", "h.py")):
        with pytest.raises(AssertionError, match="line"):
            follow(made + wrong, tmp_path, dict(os.environ))
    good = "Create `f.py`:\n\n```python\nX = 1\n```\n\n```python\nimport f\nprint(f.X)\n```\n\n```text\n1\n```\n"
    follow(good, tmp_path, dict(os.environ))
    for wrong in (good.replace("text\n1", "text\n2"), "```console\n$ false\n```\n", "```console\n$ echo 1\n2\n```\n"):
        with pytest.raises(AssertionError, match="line"):
            follow(wrong, tmp_path, dict(os.environ))
