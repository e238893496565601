"""Run a program that imports `tensordict`, as it is or with the package's name replaced."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).parent
PROGRAMS = sorted(FOLDER.glob("*/*.py"))
PEER = "tensordict"


@dataclass(frozen=True)
class Outcome:
    """The lines that a program printed, and what its `main` returned."""

    lines: list[str]
    result: object


def named(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def run(path: Path, package: str) -> Outcome:
    """Run `main` of the program in the current folder, with each word `tensordict` of it replaced by `package`."""
    source = re.sub(rf"\b{PEER}\b", package, path.read_text())
    module = ModuleType(f"porting_{package}_{named(path).replace('/', '_')}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # pickles and annotations look up names there
    printed = io.StringIO()
    state = torch.random.get_rng_state()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            if package == PEER:
                warnings.simplefilter("ignore")
            torch.manual_seed(0)
            exec(compile(source, str(path), "exec"), module.__dict__)
            result = module.main()
    finally:
        torch.random.set_rng_state(state)
        del sys.modules[module.__name__]
    return Outcome(re.sub(rf"\b{package}\b", PEER, printed.getvalue()).splitlines(), result)
