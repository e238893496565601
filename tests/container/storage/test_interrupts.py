"""Ctrl-C within a change, in a program that goes on: it is done or not done, in memory and in the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import interrupts

COMMITS = {"_catch_up", "_commit", "_commit_root", "_follow", "_put_root", "_record", "_save", "_settle", "_settle_log"}
COMMITS |= {"append_step", "apply", "commit", "put_attribute", "put_root"}


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with interrupts.python_handler():
        yield


def remade(kind: str, folder: Path) -> Callable[[], str]:
    """Return what makes the dataset anew."""
    before, place = folder / f"before.{kind}", folder / f"now.{kind}"
    interrupts.dataset().save(before).close()

    def make() -> str:
        if place.is_dir():
            shutil.rmtree(place)
        (shutil.copytree if before.is_dir() else shutil.copy)(before, place)
        return str(place)

    return make


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("memmap", interrupts.add),
        ("memmap", interrupts.append),
        ("memmap", interrupts.rename),
        ("memmap", interrupts.replace),
        ("h5", interrupts.append),
        ("h5", interrupts.replace),
        ("zarr", interrupts.append),
        ("zarr", interrupts.replace),
    ],
)
def test_an_interrupted_change_happened_or_did_not(kind: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    assert interrupts.sweep(remade(kind, tmp_path), change, COMMITS) > 20


def test_an_interrupted_write_of_chunks_happened_or_did_not(tmp_path: Path) -> None:
    within = {"end", "write"}
    assert interrupts.sweep(remade("zarr", tmp_path), interrupts.fill, within) > 20
