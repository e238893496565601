"""The mode of the suite for a machine with a GPU: `TDSTORE_CUDA=1`.

Then the ordinary tests run as they are, the tests with the marker `cuda` run too, and the tests of `AGAIN` run a second
time, with the GPU as torch's default device (and that marker). Without a GPU the mode is an error. Outside of it the
tests with the marker are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ON = os.environ.get("TDSTORE_CUDA") == "1"
DEVICE = "cuda"

# Folders and files whose tests run again with the GPU as torch's default device.
AGAIN = (
    "tests/compile/",
    "tests/container/functions/",
    "tests/container/entries/",
    "tests/container/values/test_codecs.py",
    "tests/container/persistence/test_clones.py",
    "tests/container/persistence/test_reshaping.py",
    "tests/differential/",
    "tests/modules/",
    "tests/rl/",
    "tests/tensorclass/",
    "tests/tensordicts/",
    "tests/torch_integration/",
)
# Files and tests among these that do not, by the start of their names, and why.
_STORED = "what is in a store is read as tensors of the CPU, whatever the default device"
_NUMPY = "makes its tensors of numpy's arrays, or gives its leaves to numpy"
_FILES = "mapped files are memory of the CPU"
_LOST = "has rows out of range, for which a GPU ends the work of the process (docs/explanation)"
_CHECKERS = "no code runs"
EXCEPT: dict[str, str] = {
    "tests/differential/test_maths.py::test_reductions_of_stored_data": _STORED,
    "tests/differential/test_index.py::test_invalid": _LOST,
    "tests/differential/test_index_chains.py": _LOST,
    "tests/differential/test_mapped_tensors.py": _FILES,
    "tests/differential/test_stored_index.py": _STORED,
    "tests/rl/test_crash.py": _FILES,
    "tests/rl/test_full_places.py": _FILES,
    "tests/tensorclass/test_typing.py": _CHECKERS,
    "tests/tensorclass/test_stored.py": _STORED,
    "tests/tensordicts/persistent/": _STORED,
    "tests/rl/test_docstrings.py": _NUMPY,
}


def check() -> None:
    """Refuse to go on where the mode is asked for and there is no GPU.

    Raises:
        pytest.UsageError: the mode is on, and torch sees no CUDA device.
    """
    if ON and not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "finds no CUDA device here"
        raise pytest.UsageError(f"TDSTORE_CUDA=1 needs a GPU, and torch {torch.__version__} {built}")


def runs_again(path: Path) -> bool:
    """Whether the tests of a file run a second time, on the GPU."""
    name = _name(path)
    return name.startswith(AGAIN) and not name.startswith(tuple(EXCEPT))


def twice(metafunc: pytest.Metafunc) -> None:
    """Give a test of `AGAIN` its second run."""
    path = metafunc.definition.path
    if not runs_again(path):
        return
    devices = ["cpu"]
    if not f"{_name(path)}::{metafunc.definition.nodeid.split('::', 1)[1]}".startswith(tuple(EXCEPT)):
        devices.append(DEVICE)
    marks = {DEVICE: [pytest.mark.cuda], "cpu": []}
    metafunc.parametrize(
        "default_device", [pytest.param(d, marks=marks[d]) for d in devices], indirect=True, scope="function"
    )


@contextmanager
def default(device: str) -> Iterator[None]:
    """Make `device` the default of torch for a while."""
    if device == "cpu":
        yield
        return
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def by_default() -> bool:
    """Whether the GPU is the default device now."""
    return ON and torch.get_default_device().type == DEVICE


def skip_outside(items: Iterable[pytest.Item]) -> None:
    """Skip the tests that need the GPU where the mode is off."""
    if not ON:
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and TDSTORE_CUDA=1"))


def end_if_lost(item: pytest.Item) -> None:
    """End this worker after a test that lost the GPU: xdist starts another, and tells of the test.

    An index out of range is an error of the device, which all later calls of the process repeat.
    """
    if ON and item.get_closest_marker("cuda") is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{item.nodeid} lost the GPU: {str(error).splitlines()[0]}", file=sys.__stderr__, flush=True)
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(1)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def seed(number: int) -> None:
    """Seed the generators of the CPU and of the GPU. (`torch.manual_seed` writes stack traces for absent devices.)"""
    torch.default_generator.manual_seed(number)
    if ON:
        torch.cuda.manual_seed(number)
