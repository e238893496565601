"""The helpers of `utils` do what those of the peer do."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

peer = pytest.importorskip("tensordict")
U = ModuleType
SHAPES = [((3,), (3, 4)), ((3, 1), (3, 4, 5)), ((3, 4), (3,)), ((2,), (3, 4)), ((1,), (3, 4))]
SHAPES += [((), (3, 4)), ((3, 4), (3, 4))]
KEYS: list[Any] = [["a", ("b", "c")], [], "ab", ("a", "b"), [1], {"a"}, 3, [()], [("a", 1)], [("a",)]]


def both(program: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Outcomes of a program over both packages: a result, or the built-in error that users catch."""
    outcomes = []
    for name in ("tensordict", "tdstore"):
        try:
            outcomes.append(program(importlib.import_module(name), importlib.import_module(f"{name}.utils")))
        except (KeyError, ValueError, RuntimeError) as error:
            outcomes.append(error)
    theirs, ours = outcomes
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), (theirs, ours)
        return None, None
    return theirs, ours


@pytest.mark.parametrize(("shape", "wide"), SHAPES)
def test_expand_right(shape: tuple[int, ...], wide: tuple[int, ...]) -> None:
    value = torch.arange(12)[: torch.Size(shape).numel()].reshape(shape)
    theirs, ours = both(lambda _, utils: utils.expand_right(value, wide))
    torch.testing.assert_close(theirs, ours)
    assert ours is None or ours.data_ptr() == value.data_ptr()
    theirs, ours = both(lambda _, utils: utils.expand_as_right(value, torch.zeros(wide)))
    torch.testing.assert_close(theirs, ours)


def test_expand_as_right_of_tensordicts() -> None:
    def program(package: Any, utils: Any) -> Any:
        td = package.TensorDict({"a": torch.ones(3, 5)}, [3])
        wide = utils.expand_as_right(td, package.TensorDict({}, [3, 4]))
        mask = utils.expand_as_right(torch.ones(3), wide)
        return tuple(wide.batch_size), tuple(wide["a"].shape), tuple(mask.shape)

    theirs, ours = both(program)
    assert theirs == ours == ((3, 4), (3, 4, 5), (3, 4))


@pytest.mark.parametrize("keys", KEYS, ids=repr)
def test_is_seq_of_nested_key(keys: Any) -> None:
    theirs, ours = both(lambda _, utils: utils.is_seq_of_nested_key(keys))
    assert theirs == ours


def rows(package: Any) -> Any:
    values = torch.tensor([[4, 5, 6], [1, 2, 3], [4, 5, 6], [7, 8, 9]])
    return package.TensorDict({"t": values, "n": {"u": torch.tensor([3, 0, 1, 0])}}, [4])


@pytest.mark.parametrize("key", ["t", ("n", "u"), "n", "missing"], ids=repr)
@pytest.mark.parametrize("dim", [0, -1, 1])
def test_isin(key: Any, dim: int) -> None:
    theirs, ours = both(lambda package, utils: utils.isin(rows(package), rows(package)[:2], key, dim=dim))
    torch.testing.assert_close(theirs, ours)


def test_isin_of_another_number_of_dimensions() -> None:
    both(lambda package, utils: utils.isin(rows(package), rows(package)[0], "t"))
    both(lambda package, utils: utils.isin(rows(package), package.TensorDict({"t": torch.ones(4, 2)}, [4]), "t"))


@pytest.mark.parametrize("key", ["t", ("n", "u"), "n", "missing"], ids=repr)
@pytest.mark.parametrize("dim", [0, -1, 1])
def test_remove_duplicates(key: Any, dim: int) -> None:
    def program(package: Any, utils: Any) -> Any:
        td, index = utils.remove_duplicates(rows(package), key, dim, return_indices=True)
        assert (td == utils.remove_duplicates(rows(package), key, dim)).all()
        return td["t"], td["n", "u"].sort().values if key == "n" else td["n", "u"], index

    theirs, ours = both(program)
    torch.testing.assert_close(theirs, ours)


def test_remove_duplicates_along_a_second_dimension() -> None:
    def program(package: Any, utils: Any) -> Any:
        td = package.TensorDict({"t": torch.tensor([[3, 1, 3, 2, 1]]), "i": torch.arange(5)[None]}, [1, 5])
        return utils.remove_duplicates(td, "t", 1)["t"]

    theirs, ours = both(program)
    torch.testing.assert_close(theirs, ours)


def test_print_directory_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b/x.memmap", "a.memmap", "b/c/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" * 100)
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    utils = importlib.import_module("tdstore.utils")
    text = utils.print_directory_tree(tmp_path)
    inner = ["a.memmap", "b/", "    c/", "        y", "    up", "    x.memmap"]
    assert text == "\n".join([f"{tmp_path.name}/", *("    " + line for line in inner)])
    printed = capsys.readouterr().out
    assert printed.startswith("Directory size: 3") and printed.endswith(f"{text}\n")
    with pytest.raises(FileNotFoundError):
        utils.print_directory_tree(tmp_path / "nothing")


def test_the_logger_is_that_of_the_package() -> None:
    assert importlib.import_module("tdstore.utils").logger is logging.getLogger("tdstore")


@pytest.mark.parametrize("name", ["lazy_legacy", "list_to_stack", "capture_non_tensor_stack"])
@pytest.mark.parametrize("mode", [True, False])
def test_a_switch_that_was_set_is_taken_back(name: str, mode: bool) -> None:
    def program(_: Any, utils: Any) -> Any:
        seen = [bool(getattr(utils, name)())]
        switch = getattr(utils, f"set_{name}")(mode)
        switch.set()
        seen.append(bool(getattr(utils, name)()))
        switch.__exit__(None, None, None)
        with switch:
            seen.append(bool(getattr(utils, name)()))
        return [*seen, bool(getattr(utils, name)())]

    theirs, ours = both(program)
    assert ours[0] == ours[-1]
    assert ours[1:] == [mode, mode, theirs[-1]]
