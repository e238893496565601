"""TensorDicts through `torch.compiler.nested_compile_region`, as in the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nested": (lambda M: M.TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(2)}}, [2]), lambda td: td + 1),
    "named": (lambda M: M.TensorDict({"a": torch.ones(2)}, [2], names=["x"]), lambda td: td * 2),
    "on a device": (lambda M: M.TensorDict({"a": torch.ones(2)}, [2], device="cpu"), lambda td: td - 1),
    "a new entry": (lambda M: M.TensorDict({"a": torch.ones(2)}, [2]), lambda td: td.clone().set("b", td["a"] * 2)),
    "a lazy stack": (lambda M: M.lazy_stack([M.TensorDict({"a": torch.ones(2)}, [2])] * 2), lambda td: td + 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_region_takes_and_gives_tensordicts(name: str) -> None:
    make, step = PROGRAMS[name]
    found = []
    for package in ("tensordict", "tdstore"):
        module = pytest.importorskip(package)
        torch._dynamo.reset()
        region = torch.compiler.nested_compile_region(step)

        def twice(td: Any, region: Any = region) -> Any:
            return region(region(td))

        td = torch.compile(twice, fullgraph=True, backend="eager")(make(module))
        entries = {key: value.tolist() for key, value in td.items(True, True)}
        found.append((type(td).__name__, tuple(td.batch_size), td.device, entries))
    assert found[0] == found[1]
