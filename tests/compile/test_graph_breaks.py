"""Compiled functions are right where the graph breaks, too: torch 2.6 breaks it at every TensorDict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.differential.oracle import describe, differences

from .programs import PROGRAMS, sample


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Graph break due to unsupported builtin")
@pytest.mark.parametrize(
    "name",
    ["construct", "read", "read nested", "write", "update in place", "index with a slice", "arithmetic with numbers"],
)
def test_a_program_is_right(name: str) -> None:
    program = PROGRAMS[name]
    found = list(differences(describe(program(sample())), describe(torch.compile(program, backend="eager")(sample()))))
    assert not found, "\n".join(found)
