"""Changes of a file in place on a disk that is full: an error, and the file is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreIOError
from tdstore.testing.crash import small_disk

ROWS = 1000
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "compressed": {"chunks": 100, "compression": "gzip"}}
BIG = torch.randint(0, 255, (ROWS, 20_000), dtype=torch.uint8)
CHANGES = {
    "new": lambda td: td.set("c", BIG),
    "replaced": lambda td: td.set("b", BIG),
    "many": lambda td: td.update({"a": torch.ones(ROWS, 7), "b": BIG}),
    "append": lambda td: [td.append(td[:500].to_tensordict()) for _ in range(40)],
}


@pytest.fixture
def disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "disk", 6) as folder:
        yield folder


def _content(td: Any) -> dict[Any, Any]:
    return {key: td[key].tolist() for key in sorted(td.keys(True, True), key=str)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_does_not_fit(disk: FsPath, layout: str, change: str) -> None:
    file = disk / "t.h5"
    small = TensorDict(
        {"a": torch.randint(0, 255, (ROWS, 300), dtype=torch.uint8), "b": torch.arange(ROWS), "n": {"x": BIG[:, 0]}},
        batch_size=[ROWS],
    )
    small.save(file, **LAYOUTS[layout]).close()
    td = tdstore.open(file, "r+", **LAYOUTS[layout])
    td.set_at_("b", torch.tensor(-5), 3)
    before = {} if change == "append" else _content(td)
    with pytest.raises(StoreIOError) as caught:
        CHANGES[change](td)
    assert caught.value.errno == 28
    if change == "append":  # those that fitted are there
        before = _content(td)
        assert len(td) % 500 == 0
    assert _content(td) == before
    td.set_at_("b", torch.tensor(-6), 4)
    before["b"][4] = -6
    td.close()
    assert os.listdir(disk) == ["t.h5"]
    with tdstore.open(file, verify="full") as again:
        assert _content(again) == before
    with tdstore.open(file, "r+") as again:
        again["small"] = torch.ones(again.batch_size[0])
        assert again["small"].sum() == len(again)
