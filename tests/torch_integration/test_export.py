"""`torch.export` of programs with TensorDicts whose batch sizes are symbolic."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram

from tdstore import TensorDict

ROWS, STEPS = Dim("rows", min=2, max=100), Dim("steps", min=2, max=100)
SHAPES = [(3, 4, 5), (6, 7, 5), (2, 9, 5)]


class Program(torch.nn.Module):
    def __init__(self, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(x)


def reloaded(program: ExportedProgram) -> ExportedProgram:
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    return torch.export.load(file)


def steps(x: torch.Tensor) -> list[int]:
    return [x.shape[0], x.shape[1]]


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one size": lambda x: TensorDict({"x": x, "y": x * 2}, x.shape[0]),
    "one size, arithmetic": lambda x: TensorDict({"x": x}, x.shape[0]) + 1,
    "a list of two": lambda x: TensorDict({"x": x, "n": TensorDict({"y": x + 1}, steps(x))}, steps(x)),
    "a torch.Size": lambda x: TensorDict({"x": x}, batch_size=x.shape[:1]),
    "a symbolic and a static one": lambda x: TensorDict({"x": x.transpose(1, 2)}, [x.shape[0], 5]),
    "static": lambda x: TensorDict({"x": x.sum((0, 1))}, [5]),
    "none": lambda x: TensorDict({"x": x}, []),
    "more nested dimensions": lambda x: TensorDict({"n": TensorDict({"y": x}, steps(x))}, x.shape[0]),
    "empty inside": lambda x: TensorDict({"x": x, "n": TensorDict({}, steps(x))}, x.shape[0]),
    "empty": lambda x: TensorDict({}, steps(x)),
    "a text": lambda x: TensorDict({"x": x, "s": "text"}, steps(x)),
    "a text alone": lambda x: TensorDict({"s": "text"}, steps(x)),
    "indexed": lambda x: TensorDict({"x": x}, steps(x))[:, 0],
    "names": lambda x: TensorDict({"x": x}, steps(x), names=["rows", "steps"]),
    "two in a list": lambda x: [TensorDict({"x": x}, x.shape[0]), TensorDict({"x": x}, steps(x))],
}


def described(result: Any) -> Any:
    if isinstance(result, list):
        return [described(part) for part in result]
    assert type(result) is TensorDict
    assert all(type(n) is int for n in result.batch_size)
    tensors = {key: leaf.tolist() for key, leaf in result.items(True, True) if isinstance(leaf, torch.Tensor)}
    groups = {key: list(part.batch_size) for key, part in result.items(True) if isinstance(part, TensorDict)}
    text = (result["s"], list(result.get("s").batch_size)) if "s" in result else None
    return list(result.batch_size), result.names, tensors, groups, text


# torch's strict mode takes no objects beside tensors into what a program returns.
CASES = [(name, strict) for name in PROGRAMS for strict in (False, True) if not (strict and "text" in name)]


@pytest.mark.parametrize(("name", "strict"), CASES)
def test_an_exported_program_makes_tensordicts_of_any_length(name: str, strict: bool) -> None:
    program = Program(PROGRAMS[name])
    exported = torch.export.export(
        program, (torch.zeros(3, 4, 5),), dynamic_shapes=({0: ROWS, 1: STEPS},), strict=strict
    )
    for made in (exported, reloaded(exported)):
        run = made.module()
        for shape in SHAPES:
            x = torch.randn(shape)
            assert described(run(x)) == described(program(x))


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_inside_of_an_exported_program(strict: bool) -> None:
    def run(x: torch.Tensor) -> Any:
        b, t = x.shape[:2]
        td = TensorDict({"x": x}, [b, t])
        return td.reshape(b * t)["x"], td.expand(2, b, t)["x"], td.batch_size[0], td.flatten()["x"]

    exported = torch.export.export(
        Program(run), (torch.zeros(3, 4, 5),), dynamic_shapes=({0: ROWS, 1: STEPS},), strict=strict
    )
    for shape in SHAPES:
        x = torch.randn(shape)
        for found, want in zip(reloaded(exported).module()(x), run(x), strict=True):
            assert found == want if isinstance(want, int) else torch.equal(found, want)


def test_a_tensordict_of_any_length_is_taken() -> None:
    def run(td: Any) -> Any:
        return td.set("z", td["x"] + td["n", "y"])

    def given(b: int, t: int) -> TensorDict:
        return TensorDict({"x": torch.randn(b, t, 5), "n": {"y": torch.randn(b, t, 5)}}, [b, t])

    sizes = {0: ROWS, 1: STEPS}
    exported = torch.export.export(Program(run), (given(3, 4),), dynamic_shapes=([sizes, [sizes]],), strict=False)
    for made in (exported, reloaded(exported)):
        for b, t in ((3, 4), (6, 7)):
            td = given(b, t)
            found = made.module()(td.clone())
            assert found.batch_size == (b, t) and found["n"].batch_size == (b, t)
            assert (found == run(td)).all()
