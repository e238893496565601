"""HDF5 files in the layouts of Minari and robomimic, made with h5py."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import tdstore
from tdstore.data import Epochs

STEPS = (3, 5)


@pytest.fixture
def minari(tmp_path: Path) -> Path:
    place = tmp_path / "main_data.hdf5"
    with h5py.File(place, "w") as file:
        for number, steps in enumerate(STEPS):
            episode = file.create_group(f"episode_{number}")
            episode.attrs["total_steps"] = steps
            episode.create_dataset("observations/goal", data=np.arange(2.0 * (steps + 1)).reshape(-1, 2))
            episode.create_dataset("actions", data=np.full((steps, 2), number, "f4"))
            episode.create_dataset("rewards", data=np.arange(float(steps)))
            episode.create_dataset("terminations", data=np.arange(steps) == steps - 1)
            episode.create_dataset("infos/success", data=np.zeros(steps + 1, bool))
            episode.create_dataset("mission", data=[b"go"] * (steps + 1))
    return place


@pytest.fixture
def robomimic(tmp_path: Path) -> Path:
    place = tmp_path / "demo.hdf5"
    with h5py.File(place, "w") as file:
        for number, steps in enumerate(STEPS):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = steps
            demo.create_dataset("actions", data=np.full((steps, 7), number))
            demo.create_dataset("dones", data=np.arange(steps) == steps - 1)
            images = np.arange(steps, dtype="u1")[:, None, None, None] * np.ones((8, 8, 3), "u1")
            for group in ("obs", "next_obs"):
                demo.create_dataset(f"{group}/image", data=images, chunks=(1, 8, 8, 3), compression="gzip")
        file.create_dataset("mask/train", data=np.array([b"demo_0", b"demo_1"]))
        file.create_dataset("mask/valid", data=np.array(["demo_1"], dtype=h5py.string_dtype()))
    return place


def test_episodes_of_minari(minari: Path) -> None:
    with tdstore.open(minari) as td:
        assert list(td.keys()) == ["episode_0", "episode_1"]
        assert td["episode_1", "rewards"].tolist() == [0, 1, 2, 3, 4]
        assert td["episode_1", "terminations"].dtype == torch.bool
        assert td["episode_0", "observations", "goal"][:-1].shape == (3, 2)
        assert list(td["episode_0", "mission"]) == ["go"] * 4
        assert td["episode_1"].batch_size == ()  # one observation more than actions
    with tdstore.open(minari, subpath=("episode_1", "observations")) as td:
        assert td[torch.tensor([5, 0])]["goal"].tolist() == [[10, 11], [0, 1]]


def test_demonstrations_of_robomimic(robomimic: Path) -> None:
    with tdstore.open(robomimic) as td:
        assert list(td["mask", "train"]) == ["demo_0", "demo_1"]
        assert list(td["mask", "valid"]) == ["demo_1"]
    demos = [tdstore.open(robomimic, subpath=("data", f"demo_{number}")) for number in range(2)]
    assert [demo.batch_size for demo in demos] == [(3,), (5,)]
    (batch,) = Epochs(demos[1], 5, shuffle=False)
    assert batch["next_obs", "image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert tdstore.cat(demos, 0)["actions"][:, 0].tolist() == [0] * 3 + [1] * 5
