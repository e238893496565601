"""What lost or broke data silently, on the places that only ours has: they do what the peer does in memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.differential.oracle import OURS, PEER, differences
from tests.differential.programs import result

from .dangers import DANGERS, PLACES, START

STORED = {
    "zarr": ("tmp + '/d.zarr'", "zarr"),
    "tdz": ("tmp + '/d.tdz'", "tdz"),
    "remote": ("'file://' + tmp + '/d'", "remote"),
    "redis": ("f'{server}/d'", "redis"),
}
"""The expression that makes a location, and the storage."""
PROGRAMS = [(name, part.strip()) for name, text in DANGERS.items() for part in text.split("\n---\n")]
EMPTIED = """
td.close()
failed = [M.attempt(lambda: TensorDict.load(place, mode=mode)) for mode in "wx"]
td = M.module.open(place)
(failed, shown(td))
"""


@pytest.fixture(params=STORED)
def start(request: Any) -> str:
    place, storage = STORED[request.param]
    server = request.getfixturevalue("redis").url if storage == "redis" else ""
    return f"""{START}
server = {server!r}
place = {place}
source.save(place, storage={storage!r}).close()
td = M.module.open(place, mode="r+")
"""


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(PROGRAMS)])
def test_stored_as_in_memory(start: str, name: str, program: str) -> None:
    assert not list(differences(result(f"{START}\n{PLACES['memory']}\n{program}", PEER), result(start + program, OURS)))


def test_loading_never_empties_a_dataset(start: str) -> None:
    errors, kept = result(start + EMPTIED, OURS)
    assert [type(error).__name__ for error in errors] == ["Raised"] * 2
    assert not list(differences(result(f"{START}\nshown(source)", PEER), kept))
