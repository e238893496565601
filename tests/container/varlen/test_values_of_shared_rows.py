"""One value in rows of shared memory or of a dataset: seen by all, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import LockedError, UnsupportedError

WRITES: dict[str, Callable[[Any], Any]] = {
    "set_": lambda td: td[3].set_("s", "new"),
    "update_": lambda td: td[3].update_({"s": "new", "x": torch.ones(())}),
    "set_ of a slice": lambda td: td[1:3].set_("one", "new"),
}


@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.parametrize("write", WRITES)
def test_a_value_that_would_stay_in_a_slice_is_refused(kind: str, rows: int, write: str, tmp_path: Path) -> None:
    made = TensorDict({"x": torch.zeros(rows), "s": [str(i) for i in range(rows)], "one": "v"}, [rows])
    td = made.share_memory_() if kind == "shared" else made.memmap_(tmp_path / "m")
    with pytest.raises(UnsupportedError, match=r"by itself\n.*td\[index\] = \{key: value\}"):
        WRITES[write](td)
    with pytest.raises(LockedError):
        td[3].set_non_tensor("s", "new")
    assert (td["s"][3], td["one"], td["x"][3].item()) == ("3", "v", 0.0), "nothing of it was written"
    td[3] = {"s": "new", "x": torch.ones(())}
    td.set_at_("s", "too", 2)
    assert (td["s"][2:4], td["x"][3].item()) == (["too", "new"], 1.0)


def test_a_copy_of_rows_outlives_the_dataset_that_they_are_from(tmp_path: Path) -> None:
    values = [f"caption {i}" for i in range(300)]
    td = TensorDict({"s": values}, [300]).save(tmp_path / "m")
    some, all_of_it = td[torch.tensor([5, 3])], td.clone()
    for start in range(0, 300, 100):
        td[start : start + 100] = {"s": ["x" * 2000] * 100}
    td[:] = {"s": [""] * 300}
    td.close()
    assert some["s"] == ["caption 5", "caption 3"]
    assert all_of_it["s"] == values
