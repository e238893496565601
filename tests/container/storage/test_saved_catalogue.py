"""The handle that `save` returns knows what was saved: nothing is read back, and no value of the caller is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict, UnbatchedTensor, lazy_stack
from tdstore.container.storage.handle import StoreHandle

ROWS = 300
PLACES = {"h5": "x.h5", "zarr": "x.zarr", "memmap": "x", "tdz": "x.tdz", "objects": "file://{}/x"}


def mixed() -> TensorDict:
    """Return every kind of entry, with values per row that become leaves."""
    texts = [f"row {row}" for row in range(ROWS)]
    td = TensorDict({"a": torch.arange(ROWS), "s": texts, "one": "x", "g": {"b": torch.zeros(ROWS, 2)}}, [ROWS])
    td["g", "s"] = texts
    td["u"] = UnbatchedTensor(torch.ones(4))
    td["n"] = torch.nested.nested_tensor([torch.ones(row % 4, 3) for row in range(ROWS)], layout=torch.jagged)
    return td


def stack() -> Any:
    return lazy_stack([TensorDict({"a": torch.zeros(2 + i), "q": "value"}) for i in range(3)])


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("make", [mixed, stack])
def test_save_knows_the_catalogue_without_reading_it(
    kind: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[kind].format(tmp_path) if kind == "objects" else str(tmp_path / PLACES[kind])
    with monkeypatch.context() as patch:
        patch.setattr(StoreHandle, "reload", lambda self: pytest.fail("what was saved is read back"))
        saved = make().save(place)
    binding = getattr(saved, "_binding", None)
    handle: StoreHandle = saved._handle if binding is None else binding[0]
    known = dict(handle.groups), dict(handle.specs), list(handle.groups)
    handle.reload()
    assert (handle.groups, handle.specs, list(handle.groups)) == known
    saved.close()


def test_save_leaves_nothing_in_the_values_of_the_caller(tmp_path: Path) -> None:
    td = mixed()
    td.save(tmp_path / "x.h5").close()
    assert td.get("s")._held is None and td.get(("g", "s"))._held is None
