"""Write the files that tests/test_old_files.py opens: each format of each backend, and pickles, by this version.

python -c "from tests.data import make_own_files; make_own_files.main('tests/data/tdstore-0.1.0.zip')"

It is run by hand, before code moves or a format changes; what it has written is kept and never written anew.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import tdstore
from tdstore import LazyStackedTensorDict, MetaData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor

DATASETS = ("folder", "x.tdz", "x.h5", "x.zarr", "z.zarr.zip", "objects")
"""Where `everything` is saved, by every format that a file or a folder has."""
PLACE = "/tmp/tdstore-old-files-" + "x" * 60
"""Where references of pickles point; the test puts a place of its own there, of the same length."""


@tdstore.tensorclass
class Mark:
    x: torch.Tensor
    label: str = "p"


def everything() -> TensorDict:
    """A TensorDict with each kind of entry."""
    td = TensorDict(
        {
            "a": torch.arange(8.0).reshape(4, 2),
            "half": torch.arange(4, dtype=torch.bfloat16),
            "flags": torch.tensor([True, False, True, True]),
            "n": TensorDict({"b": torch.arange(4), "deep": {"c": torch.ones(4, 1, dtype=torch.int16)}}, [4]),
            "text": "one text",
            "meta": MetaData({"k": [1, 2.5, None]}),
            "words": NonTensorStack("x", "", "zwölf", "y"),
            "whole": UnbatchedTensor(torch.ones(3)),
            "ragged": torch.nested.nested_tensor([torch.ones(n) for n in (1, 3, 0, 2)], layout=torch.jagged),
        },
        [4],
        names=["time"],
    )
    td["long"] = NonTensorStack(*[f"caption {i}" for i in range(4)])
    td["point"] = Mark(x=torch.ones(4, 2), batch_size=[4])
    return td


def column() -> TensorDict:
    """Enough strings to be stored as a column of their own."""
    return TensorDict({"s": NonTensorStack(*[f"caption {i}" for i in range(100)]), "i": torch.arange(100)}, [100])


def location(place: str, name: str) -> str:
    """Where a dataset lies."""
    return f"file://{place}/{name}" if name.endswith("objects") else f"{place}/{name}"


def in_memory() -> dict[str, Any]:
    """Objects that are pickled by value."""
    lazy = LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3)), stack_dim=0)
    return {
        "everything": everything(),
        "locked": TensorDict(a=torch.zeros(2)).lock_(),
        "lazy": lazy,
        "params": TensorDictParams(TensorDict(w=torch.ones(2))),
        "consolidated": everything().exclude("ragged").consolidate(),
        "value": everything().get("meta"),
        "words": everything().get("words"),
        "unbatched": everything().get("whole"),
        "point": Mark(x=torch.ones(4, 2), batch_size=[4]),
    }


def references(place: str) -> dict[str, Any]:
    """Objects that are pickled as the place of their data."""
    made: dict[str, Any] = {"leaf": tdstore.open(f"{place}/folder")["a"]}
    made["part"] = made["leaf"][1:3]
    for name in DATASETS:
        td = tdstore.open(location(place, name))
        made[name] = td
        made[f"{name} n"] = td["n"]
        made[f"{name} rows"] = td[1:3]
        made[f"{name} mask"] = td[torch.tensor([True, False, False, True])]
    return made


def save_all(place: str) -> None:
    """Save the datasets."""
    for name in DATASETS:
        everything().save(location(place, name)).close()
        column().save(location(place, f"column-{name}")).close()
    everything().exclude("ragged").consolidate(f"{place}/consolidated")


def main(target: str) -> None:
    """Write the archive."""
    shutil.rmtree(PLACE, ignore_errors=True)
    Path(PLACE).mkdir()
    save_all(PLACE)
    for name, made in in_memory().items():
        Path(PLACE, f"{name}.pickle2").write_bytes(pickle.dumps(made, protocol=2))
        Path(PLACE, f"{name}.pickle5").write_bytes(pickle.dumps(made, protocol=5))
        torch.save(made, f"{PLACE}/{name}.pt")
    for name, made in references(PLACE).items():
        Path(PLACE, f"ref {name}.pickle2").write_bytes(pickle.dumps(made, protocol=2))
    with tempfile.TemporaryDirectory() as folder:
        shutil.move(shutil.make_archive(f"{folder}/made", "zip", PLACE), target)
    shutil.rmtree(PLACE)
