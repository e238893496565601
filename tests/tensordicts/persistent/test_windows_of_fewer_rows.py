"""Windows whose rows were removed from the store: nothing is read from elsewhere, nothing is lost in silence."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import BatchSizeError
from tdstore.index.selection import Selection

PLACES = ["x.h5", "x.zarr", "file://"]
ROWS = {
    "slice": slice(1, 4),
    "list": [0, 3],
    "row": 4,
    "beyond": slice(4, 6),
}
USES = {
    "read": lambda w: w["a"],
    "values": lambda w: w["v"],
    "tree": lambda w: w["n"].to_tensordict(),
    "all": lambda w: w.to_tensordict(),
    "nested": lambda w: w["jagged"],
    "new": lambda w: w.set("z", torch.ones(w.batch_size)),
    "new tree": lambda w: w.set("q", TensorDict({"b": torch.ones(w.batch_size)}, w.batch_size)),
    "write": lambda w: w.set_("a", torch.ones(w.batch_size)),
    "write at": lambda w: w.set_at_("a", 1.0, slice(None) if w.batch_dims else ...),
    "write below": lambda w: w.update_({"n": {"b": torch.ones(w.batch_size)}}),
    "write values": lambda w: w.update_({"v": "k"}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_are_gone(tmp_path, place, rows):
    where = place + str(tmp_path / "o") if "://" in place else str(tmp_path / place)
    n = 300 if rows == "list" else 6  # values in leaves of their own, and in the header
    row = torch.arange(float(n))
    td = TensorDict({"a": row, "n": {"b": row.clone()}, "v": list(map(str, range(n)))}, [n])
    td.save(where).close()
    with tdstore.open(where, mode="r+") as stored:
        window, first, empty = stored[ROWS[rows]], stored[:2], stored[4:4]
        nested = window["n"]
        stored.resize_(2)
        stored["jagged"] = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
        kept = stored.to_dict()
        for use in USES.values():
            with pytest.raises(BatchSizeError, match=f"was selected out of {n} rows, and now there are 2"):
                use(window)
        with pytest.raises(BatchSizeError):
            nested["b"]
        assert first["a"].tolist() == [0, 1] and empty["a"].shape == (0,)
        now = stored.to_dict()
        assert now.keys() == kept.keys() and now["a"].tolist() == [0, 1] and now["n"]["b"].tolist() == [0, 1]
        assert list(now["v"]) == ["0", "1"]


def test_a_selection_knows_its_last_row():
    whole = Selection.full((6, 2))
    for index in (slice(2, 4), [3, 0], (slice(None, 4), 1), (torch.tensor([0, 3]), torch.tensor([1, 0])), 3):
        whole[index].check_there((4, 2))
        with pytest.raises(BatchSizeError, match="row 3 was selected out of 6 rows, and now there are 3"):
            whole[index].check_there((3, 2))
    whole[2:2].check_there((0, 2))
    Selection.full(()).check_there(())
