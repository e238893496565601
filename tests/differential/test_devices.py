"""`.device` of what is saved, loaded and shared: the same calls on both packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

import tdstore


def made(module: Any, device: Any) -> Any:
    n = module.TensorDict({"b": torch.zeros(4)}, [4])
    return module.TensorDict({"a": torch.arange(4.0), "n": n}, [4], device=device)


def reloaded(module: Any, device: Any, folder: Path) -> Any:
    made(module, device).memmap(folder / "m")
    return module.TensorDict.load_memmap(folder / "m")


def lazy(module: Any, device: Any) -> Any:
    return module.lazy_stack([made(module, device) for _ in range(2)])


def lazily(module: Any, device: Any, folder: Path) -> Any:
    lazy(module, device).memmap(folder / "l")
    return module.TensorDict.load_memmap(folder / "l")


def into(module: Any, device: Any, folder: Path) -> Any:
    made(module, "cpu").memmap(folder / "m")
    return made(module, device).load_memmap_(folder / "m")


def h5(module: Any, device: Any, folder: Path) -> Any:
    made(module, device).to_h5(folder / "x.h5").close()
    return module.TensorDict.from_h5(folder / "x.h5")


CALLS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "memmap": lambda M, device, folder: made(M, device).memmap(folder / "m"),
    "memmap, temporary": lambda M, device, folder: made(M, device).memmap(),
    "memmap_": lambda M, device, folder: made(M, device).memmap_(folder / "m"),
    "memmap_like": lambda M, device, folder: made(M, device).memmap_like(folder / "m"),
    "save": lambda M, device, folder: made(M, device).save(folder / "m"),
    "share_memory_": lambda M, device, folder: made(M, device).share_memory_(),
    "load_memmap": reloaded,
    "load": lambda M, device, folder: (made(M, device).save(folder / "m"), M.load(folder / "m"))[1],
    "rows of load_memmap": lambda M, device, folder: reloaded(M, device, folder)[[0, 1]],
    "clone of load_memmap": lambda M, device, folder: reloaded(M, device, folder).clone(),
    "load_memmap to meta": lambda M, device, folder: (
        reloaded(M, device, folder),
        M.TensorDict.load_memmap(folder / "m", device="meta"),
    )[1],
    "load_memmap_": into,
    "lazy stack, memmap": lambda M, device, folder: lazy(M, device).memmap(folder / "l"),
    "lazy stack, load_memmap": lazily,
    "lazy stack, share_memory_": lambda M, device, folder: lazy(M, device).share_memory_(),
    "from_h5": h5,
    "rows of from_h5": lambda M, device, folder: h5(M, device, folder)[0],
    "to_h5": lambda M, device, folder: made(M, device).to_h5(folder / "x.h5"),
    "consolidate": lambda M, device, folder: made(M, device).consolidate(),
}
# The device is part of what is stored; the peer forgets it in an HDF5 file.
KEPT = {"from_h5", "rows of from_h5", "to_h5"}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", CALLS)
def test_device(name: str, device: str | None, tmp_path: Path) -> None:
    ours, theirs = (CALLS[name](M, device, _folder(tmp_path, M)) for M in (tdstore, tensordict))
    if name in KEPT and device is not None:
        assert (ours.device, theirs.device) == (torch.device(device), None)
    else:
        assert (ours.device, ours["n"].device) == (theirs.device, theirs["n"].device)
    for td in (ours, theirs):
        if hasattr(td, "close"):
            td.close()


def _folder(tmp_path: Path, module: Any) -> Path:
    folder = tmp_path / module.__name__
    folder.mkdir()
    return folder


def test_what_is_mapped_is_on_the_cpu_however_it_is_opened(tmp_path: Path) -> None:
    made(tdstore, None).save(tmp_path / "m")
    for mode in ("r", "r+"):
        td = tdstore.open(tmp_path / "m", mode)
        assert (td.device, td["n"].device, td[1:]["n"].device) == (torch.device("cpu"),) * 3
        td.close()


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("locked", [False, True])
def test_a_batch_made_like_another_is_a_batch_of_its_own(device: str | None, locked: bool) -> None:
    found = []
    for module in (tensordict, tdstore):
        td = made(module, device)
        like = td.lock_().to(td.clone()) if locked else td.to(td.clone())
        found.append((like is td, like["n"] is td["n"], like["a"] is td["a"], like.is_locked))
        assert like.unlock_().set("new", torch.ones(4)) is like and "new" not in td.keys()
    assert found == [(False, False, True, locked)] * 2
