"""Write the files that tests/convert/test_peer_files.py opens, with the release of `tensordict` that is installed.

python tests/data/make_peer_files.py tests/data

It writes tests/data/tensordict-VERSION.zip. It is run by hand, once for each release, with that release alone on the
path: pip install --no-deps --target /tmp/0.10.0 tensordict==0.10.0; PYTHONPATH=/tmp/0.10.0 python ...
"""

from __future__ import annotations

import inspect
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensordict
import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor


@tensordict.tensorclass
class Point:
    x: torch.Tensor
    label: str = "p"
    weight: torch.Tensor | None = None


def containers() -> dict[str, Any]:
    td = TensorDict(
        a=torch.arange(6.0).reshape(3, 2),
        b=TensorDict(c=torch.arange(3), batch_size=[3]),
        text="text",
        batch_size=[3],
        names=["time"],
    )
    rows = TensorDict(word=NonTensorStack("x", "y", "z"), n=torch.arange(3, dtype=torch.int16), batch_size=[3])
    lazy = LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3)), stack_dim=0)
    point = Point(x=torch.ones(3, 2), batch_size=[3])
    return {
        "td": td,
        "rows": rows,
        "locked": TensorDict(a=torch.zeros(2), m=MetaData("v")).lock_(),
        "lazy": lazy,
        "nested_lazy": TensorDict(inner=lazy.clone(), batch_size=[2]),
        "point": point,
        "points": TensorDict(point=point.clone(), batch_size=[3]),
        "params": TensorDictParams(TensorDict(w=torch.ones(2))),
        "unbatched": TensorDict(u=UnbatchedTensor(torch.ones(2)), batch_size=[3]),
        "jagged": TensorDict(
            j=torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged), batch_size=[2]
        ),
        "consolidated": td.consolidate(),
    }


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        made = containers()
        for name, td in made.items():
            with open(place / f"{name}.pkl", "wb") as file:
                pickle.dump(td, file)
            torch.save(td, place / f"{name}.pt")
        torch.save({"step": 3, "td": made["td"]}, place / "checkpoint.pt")
        torch.save(made["td"], place / "legacy.pt", _use_new_zipfile_serialization=False)
        for name in ("td", "rows", "lazy", "nested_lazy", "points"):
            made[name].memmap(str(place / f"{name}.memmap"))
        made["td"].exclude("text").to_h5(str(place / "td.h5")).close()
        made["td"].consolidate(str(place / "td.consolidated"))
        if hasattr(TensorDict, "to_zarr"):  # 0.14
            made["td"].exclude("text").to_zarr(str(place / "td.zarr"))
        if "archive" in inspect.signature(TensorDict.memmap).parameters:  # 0.14
            made["rows"].memmap(str(place / "rows.tdz"))
        shutil.make_archive(str(target / f"tensordict-{tensordict.__version__}"), "zip", place)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
