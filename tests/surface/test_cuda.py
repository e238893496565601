"""Every public method on a TensorDict of a GPU says what it says on one of the CPU, and its results are on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import tdstore
from tests.differential.oracle import Raised, Values, differences

from .containers import namespace
from .test_surface import SAMPLES, SECTIONS, cases, run, seen

pytestmark = pytest.mark.cuda

# Expressions whose outcome names a device or a place, and those whose tensors are on the CPU by their nature.
OTHERWISE = {
    "td.device": "another",
    "td.auto_device_().device": "another",
    "td.uint16()": "torch does not say what negative numbers become",
    "td.uint32()": "torch does not say what negative numbers become",
    "td.uint64()": "torch does not say what negative numbers become",
    "setitem(td, torch.tensor([0, 0]), other[[0, 1]])": "torch does not say which of repeated rows stays",
    "td.is_cpu": "another",
    "td.is_cuda": "another",
    "td.is_shared()": "memory of a GPU is",
    "td.share_memory_()": "nothing happens",
    "td.pin_memory()": "only memory of the CPU is pinned",
    "td.pin_memory_()": "only memory of the CPU is pinned",
}


def moved(value: Any, found: set[str]) -> Any:
    """A description with its tensors on the CPU, and the devices on which they were."""
    if isinstance(value, Values):
        found.add(value.tensor.device.type)
        grad = value.tensor.requires_grad
        return Values(value.tensor.detach().cpu().requires_grad_(grad))
    if isinstance(value, Mapping):
        return {key: moved(x, found) for key, x in value.items()}
    return type(value)(moved(x, found) for x in value) if type(value) in (list, tuple) else value


@pytest.mark.parametrize("of", ["no device", "cuda"])
@pytest.mark.parametrize(("section", "name"), cases(*SECTIONS))
def test_on_a_gpu(section: str, name: str, of: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    problems: list[str] = []
    for expression in SECTIONS[section][name]:
        plain = SAMPLES[section]()
        want = run(expression, plain, namespace(tdstore, SAMPLES[section]))
        if expression in OTHERWISE or (isinstance(want, Raised) and "IndexError" in want.families):
            continue  # rows out of range end the work of a GPU
        with torch.device("cuda"):
            td = SAMPLES[section]()
            if of == "cuda":
                td = td.to("cuda")
            got = run(expression, td, namespace(tdstore, SAMPLES[section]))
        devices: set[str] = set()
        problems += [f"{expression}: {line}" for line in list(differences(want, moved(got, devices)))[:4]]
        after: set[str] = set()
        problems += [f"{expression}, then {x}" for x in list(differences(seen(plain), moved(seen(td), after)))[:4]]
        if "cpu" in after or ("cpu" in devices and "cpu" not in expression and "np." not in expression):
            problems.append(f"{expression}: results {devices}, td {after}")
    assert not problems, "\n".join(problems)
