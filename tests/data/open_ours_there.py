"""Write a file of each format with tdstore, and open all of them with the release of `tensordict` that is installed.

python tests/data/open_ours_there.py write FOLDER    # needs tdstore
python tests/data/open_ours_there.py read FOLDER     # needs tensordict and torch, and not tdstore

tests/convert/test_ours_there.py does both with the release that the tests are run beside. For another one, put it
alone on the path of the second call:

pip install --no-deps --target /tmp/0.10.0 tensordict==0.10.0; PYTHONPATH=/tmp/0.10.0 python ... read FOLDER
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

A, B, C = torch.arange(6.0).reshape(3, 2), torch.arange(3), torch.tensor([True, False, True])


def write(folder: Path) -> None:
    import tdstore

    td = tdstore.TensorDict({"a": A, "n": {"b": B, "m": {"c": C}}, "text": "text"}, [3])
    td.memmap(folder / "memmap")
    td.save(folder / "archive.tdz")
    tdstore.lazy_stack([tdstore.TensorDict({"a": torch.ones(n)}) for n in (1, 2)]).memmap(folder / "lazy")
    td.to_h5(folder / "file.h5").close()
    td.to_zarr(folder / "array.zarr").close()
    td.consolidate(folder / "consolidated")
    torch.save(td.state_dict(), folder / "state.pt")
    torch.save(td.state_dict(flatten=False), folder / "nested.pt")
    torch.save(dict(td.exclude("text").flatten_keys(".").items()), folder / "tensors.pt")


def _same(td: Any, *, values: bool = True) -> None:
    assert list(td.batch_size) == [3], td.batch_size
    for key, want in (("a", A), (("n", "b"), B), (("n", "m", "c"), C)):
        found = td[key]
        assert found.dtype == want.dtype and torch.equal(torch.as_tensor(found), want), (key, found)
    text = td["text"] if values else "text"
    assert text in ("text", b"text"), text


def _lazy(td: Any) -> None:
    assert [list(part["a"].shape) for part in td.unbind(0)] == [[1], [2]]


def _state(folder: Path) -> None:
    from tensordict import TensorDict

    for name in ("state.pt", "nested.pt"):
        td = TensorDict({"a": A * 0, "n": {"b": B * 0, "m": {"c": ~C}}, "text": "other"}, [3])
        td.load_state_dict(torch.load(folder / name, weights_only=False))
        _same(td)
    flat = TensorDict(torch.load(folder / "tensors.pt"), [3])
    _same(flat.unflatten_keys("."), values=False)


def readers() -> dict[str, Callable[[Path], None]]:
    """One function for each format, of those that the release reads."""
    from tensordict import PersistentTensorDict, TensorDict

    found: dict[str, Callable[[Path], None]] = {
        "memmap": lambda folder: _same(TensorDict.load_memmap(folder / "memmap")),
        "lazy": lambda folder: _lazy(TensorDict.load_memmap(folder / "lazy")),
        "h5": lambda folder: _same(PersistentTensorDict(filename=folder / "file.h5", batch_size=[3], mode="r")),
    }
    if inspect.signature(TensorDict.state_dict).parameters["flatten"].default:  # 0.10 and 0.11 have another layout
        found["state_dict"] = _state
    if hasattr(TensorDict, "from_zarr"):
        found["zarr"] = lambda folder: _same(TensorDict.from_zarr(folder / "array.zarr"))
        found["tdz"] = lambda folder: _same(TensorDict.load_memmap(folder / "archive.tdz"))
    if hasattr(TensorDict, "from_consolidated"):
        found["consolidated"] = lambda folder: _same(TensorDict.from_consolidated(folder / "consolidated"))
    return found


def main(action: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if action == "write":
        write(folder)
        return
    for name, read in readers().items():
        read(folder)
        print(f"{name}: read")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
