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

# Folders whose tests run again with the GPU as torch's default device.
AGAIN = (
    "tests/compile/",
    "tests/container/entries/",
    "tests/container/functions/",
    "tests/differential/",
    "tests/modules/",
    "tests/rl/agents/",
    "tests/rl/buffers/",
    "tests/rl/scores/",
    "tests/rl/transitions/",
    "tests/rl/trees/",
    "tests/tensorclass/",
    "tests/torch_integration/",
)
_STORED = "compares with what is stored, which is read as tensors of the CPU whatever the default device"
_NUMPY = "gives its tensors to numpy"
_LOST = "has rows out of range, for which a GPU ends the work of the process"
_TEXT = "compares texts, in which the device is"
_ITSELF = "tests what the tests are made of"
# Files and tests among these that do not, by the start of their names, and why.
EXCEPT: dict[str, str] = {
    "tests/compile/test_programs.py::test_leaves_that_live_elsewhere": _STORED,
    "tests/compile/test_programs.py::test_a_dataset_that_is_stored": _STORED,
    "tests/compile/test_programs.py::test_negative_rows": _LOST,
    "tests/container/functions/test_functions.py": _STORED,
    "tests/differential/test_cases.py": _ITSELF,
    "tests/differential/test_class_reflection.py::test_repeats_share": _STORED,
    "tests/differential/test_convert.py": _NUMPY,
    "tests/differential/test_dimensions.py::test_the_error_is_what_users_catch": _LOST,
    "tests/differential/test_index.py::test_invalid": _LOST,
    "tests/differential/test_index.py::test_write": _LOST,
    "tests/differential/test_index_chains.py": _LOST,
    "tests/differential/test_lazy_index.py::test_leaf": _LOST,
    "tests/differential/test_lazy_ours.py::test_maths_with_tensors": _STORED,
    "tests/differential/test_mapped_tensors.py": "mapped files are memory of the CPU",
    "tests/differential/test_maths.py::test_reductions_of_stored_data": _STORED,
    "tests/differential/test_operands.py::test_a_tensor_of_a_larger_shape": _STORED,
    "tests/differential/test_oracle.py": _ITSELF,
    "tests/differential/test_rearrange.py": _STORED,
    "tests/differential/test_stored_index.py": _STORED,
    "tests/differential/test_swept.py::test_derivatives_at_stored": _STORED,
    "tests/differential/test_unbatched.py::test_every_backend": _STORED,
    "tests/differential/test_unbatched.py::test_both_packages": _NUMPY,
    "tests/differential/test_value_methods.py::test_an_unbatched_tensor": _NUMPY,
    "tests/modules/test_checkpoints.py": _STORED,
    "tests/modules/test_examples.py": _TEXT,
    "tests/modules/test_lazy_modules.py::test_they_are_printed": _TEXT,
    "tests/modules/test_modules.py::test_training_never": _STORED,
    "tests/modules/test_params.py::test_over_files": _STORED,
    "tests/modules/test_scenarios.py": _STORED,
    "tests/modules/test_state_dict.py": _STORED,
    "tests/rl/buffers/ensembles/": _STORED,
    "tests/rl/buffers/test_access.py": _STORED,
    "tests/rl/buffers/test_buffers.py::test_slices_are_pieces": _STORED,
    "tests/rl/buffers/test_dimensions.py": _STORED,
    "tests/rl/buffers/test_slices.py::test_trajectories_are_told": _STORED,
    "tests/rl/buffers/test_stored_priorities.py": _STORED,
    "tests/rl/buffers/test_wrong_arguments.py": _STORED,
    "tests/rl/transitions/test_dataset.py": _STORED,
    "tests/rl/transitions/test_transition.py::test_to_torch_tensor": _NUMPY,
    "tests/rl/trees/test_forest.py": _STORED,
    "tests/rl/trees/test_tree.py::test_the_same_tree": _STORED,
    "tests/tensorclass/test_compile.py": "has tensors that are made when it is imported, on the CPU",
    "tests/tensorclass/test_declare.py::test_repr": _TEXT,
    "tests/tensorclass/test_stored.py": _STORED,
    "tests/tensorclass/test_typing.py": "no code runs",
    "tests/torch_integration/test_without_values.py::test_shared_memory": "every process may use memory of a GPU",
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
