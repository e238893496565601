"""Type checkers understand tensorclasses, and leave users' programs alone: mypy, strictly, and pyright as it comes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tdstore import TensorClass, TensorDict

HERE = Path(__file__).parent
SAMPLE, PROGRAM = "typed_sample.py", "typed_program.py"
# torch itself is left out, which takes most of the time: its tensors are Any here.
# Of tdstore too, all is left out that no class of the sample is made of.
PARTS = {cls.__module__ for cls in (*TensorClass.__mro__, *TensorDict.__mro__) if cls.__module__.startswith("tdstore.")}
PARTS |= {"tdstore", "tdstore.tensorclass.*", "tdstore.container.functions.construct_and_join"}
MYPY = f"""
[mypy]
strict = true
disallow_subclassing_any = false
disallow_untyped_decorators = false
disable_error_code = no-any-return, no-untyped-call
[mypy-torch.*,numpy.*,msgspec.*,pluggy.*,tdstore.*]
follow_imports = skip
[mypy-{",".join(sorted(PARTS))}]
follow_imports = silent
"""
# "standard" is what pyright does without a configuration. What is for mypy to ignore, it must understand.
PYRIGHT = {"typeCheckingMode": "standard", "enableTypeIgnoreComments": False}

# What is wrong at the end of the sample: what mypy calls it, and what pyright does.
WRONG = {
    "assert_type(outer.exp(), Wider)": ("assert-type", "reportAssertTypeFailure"),
    "assert_type(outer[0].t, str)": ("assert-type", "reportAssertTypeFailure"),
    "assert_type(tdstore.stack([outer]), Wider)": ("assert-type", "reportAssertTypeFailure"),
    "Outer(torch.zeros(3), nome='a')": ("call-arg", "reportCallIssue"),
    "Outer()": ("call-arg", "reportCallIssue"),
    "Outer(torch.zeros(3), lock='yes')": ("arg-type", "reportArgumentType"),
    "Outer(torch.zeros(3), name=3)": ("arg-type", "reportArgumentType"),
    "Scaled(torch.zeros(3), scale='a')": ("arg-type", "reportArgumentType"),
    "Outer(torch.zeros(3), None, 'a', None, {}, torch.zeros(3))": ("call-arg", "reportCallIssue"),
    "Decorated(y=torch.zeros(3))": ("call-arg", "reportCallIssue"),
    "KeyedMore(x=torch.zeros(3))": ("call-arg", "reportCallIssue"),
    "Keyed(torch.zeros(3))": ("call-arg", "reportCallIssue"),
    "Shape(torch.zeros(3))": ("abstract", "reportAbstractUsage"),
    "outer.name = 3": ("assignment", "reportAttributeAccessIssue"),
    "outer.no_such_field": ("attr-defined", "reportAttributeAccessIssue"),
    "outer[0].inner.x": ("union-attr", "reportOptionalMemberAccess"),
    "Cold(torch.zeros(3)).x = torch.zeros(3)": ("misc", "reportAttributeAccessIssue"),
    "Frozen(torch.zeros(3)).missing": ("attr-defined", "reportAttributeAccessIssue"),
}


@pytest.fixture
def written(tmp_path):
    """The folder of the sample, with what is wrong at its end, and of the program; how long the sample is."""
    source = (HERE / SAMPLE).read_text().rstrip("\n").splitlines()
    (tmp_path / SAMPLE).write_text("\n".join([*source, *WRONG]))
    (tmp_path / PROGRAM).write_text((HERE / PROGRAM).read_text())
    return tmp_path, len(source)


def check(told, start, which):
    """Each wrong line is told, by the name that this checker has for it, and nothing else is."""
    want = {(SAMPLE, n, codes[which]): line for n, (line, codes) in enumerate(WRONG.items(), start + 1)}
    assert told.keys() == want.keys(), {
        "not seen": [line for key, line in want.items() if key not in told],
        "told of what is right": [text for key, text in told.items() if key not in want],
    }


def test_mypy_understands_the_sample_and_sees_what_is_wrong(written):
    folder, start = written
    (folder / "mypy.ini").write_text(MYPY)
    options = ["--config-file", "mypy.ini", "--cache-dir", os.devnull, "--output", "json"]
    # A process of its own, since mypy raises the recursion limit of the one it runs in.
    call = [sys.executable, "-m", "mypy", *options, SAMPLE, PROGRAM]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.stdout, done.stderr)
    found = [error for error in map(json.loads, done.stdout.splitlines()) if error["severity"] == "error"]
    check({(error["file"], error["line"], error["code"]): error["message"] for error in found}, start, 0)


def test_pyright_understands_the_sample_and_sees_what_is_wrong(written, pyright):
    folder, start = written
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    call = [*pyright, "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.stdout, done.stderr)
    found = [error for error in json.loads(done.stdout)["generalDiagnostics"] if error["severity"] == "error"]
    told = {
        (Path(error["file"]).name, error["range"]["start"]["line"] + 1, error.get("rule")): error["message"]
        for error in found
    }
    check(told, start, 1)


@pytest.mark.parametrize("name", [SAMPLE, PROGRAM])
def test_what_is_checked_is_right_when_it_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    importlib.import_module(f"{__package__}.{name.removesuffix('.py')}")
