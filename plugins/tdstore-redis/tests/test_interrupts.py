"""Ctrl-C within a change, in a program that goes on: it is done or not done, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import interrupts

WITHIN = {"_commit", "_try", "commit", "execute", "put", "receive"}


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with interrupts.python_handler():
        yield


@pytest.mark.parametrize("change", [interrupts.add, interrupts.append, interrupts.fill, interrupts.replace])
def test_an_interrupted_change_happened_or_did_not(place: str, client: Any, change: Callable[[Any], None]) -> None:
    def make() -> str:
        client.flushall()
        interrupts.dataset().save(place).close()
        return place

    assert interrupts.sweep(make, change, WITHIN) > 20
