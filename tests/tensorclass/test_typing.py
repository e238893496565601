"""Type checkers understand tensorclasses: mypy, strictly, on a sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tdstore import TensorClass, TensorDict

SAMPLE = Path(__file__).with_name("typed_sample.py")
# torch itself is left out, which takes most of the time: its tensors are Any here.
# Of tdstore too, all is left out that no class of the sample is made of.
PARTS = {cls.__module__ for cls in (*TensorClass.__mro__, *TensorDict.__mro__) if cls.__module__.startswith("tdstore.")}
CONFIG = f"""
[mypy]
strict = true
disable_error_code = misc, no-any-return, no-untyped-call
[mypy-torch.*,numpy.*,msgspec.*,pluggy.*,tdstore.*]
follow_imports = skip
[mypy-{",".join(["tdstore", "tdstore.tensorclass.*", *sorted(PARTS)])}]
follow_imports = silent
"""


WRONG = {
    "assert_type(outer.exp(), Wider)": "assert-type",
    "Outer(torch.zeros(3), nome='a')": "call-arg",
    "Outer()": "call-arg",
    "Decorated(y=torch.zeros(3))": "call-arg",
    "KeyedMore(x=torch.zeros(3))": "call-arg",
    "outer.name = 3": "assignment",
    "outer.no_such_field": "attr-defined",
    "Frozen(torch.zeros(3)).missing": "attr-defined",
}


def test_mypy_understands_the_sample_and_sees_what_is_wrong(tmp_path):
    source = SAMPLE.read_text().rstrip("\n").splitlines()
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "sample.py").write_text("\n".join([*source, *WRONG]))
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", os.devnull]
    # A process of its own, since mypy raises the recursion limit of the one it runs in.
    call = [sys.executable, "-m", "mypy", *options, str(tmp_path / "sample.py")]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if ": error:" in line]
    for number, (line, code) in enumerate(WRONG.items(), len(source) + 1):
        found = [error for error in told if f"sample.py:{number}: error" in error]
        assert len(found) == 1 and f"[{code}]" in found[0], (line, done.stdout, done.stderr)
    assert len(told) == len(WRONG), done.stdout  # so all is right in the sample itself
