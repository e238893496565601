"""xarray's `engine="tdstore"`: lazy variables of every backend, in chunks of dask, and what cannot be one."""

from __future__ import annotations

import pickle
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import tdstore
from tdstore import TensorDict, UnbatchedTensor
from tdstore.convert.xarray_engine import StoredArray, TensorDictBackend
from tdstore.errors import InvalidArgumentError, OptionError, StoreClosedError, StoreNotFoundError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
N = 6


def sample() -> TensorDict:
    return TensorDict(
        {
            "obs": torch.arange(N * 4 * 3).reshape(N, 4, 3),
            "half": torch.arange(N).to(torch.bfloat16),
            "text": [f"row {i}" for i in range(N)],
            "about": "a run",
            "weights": UnbatchedTensor(torch.arange(5.0)),
            "next": TensorDict({"reward": torch.arange(2.0 * N).reshape(N, 2)}, [N, 2], names=["time", "env"]),
        },
        [N],
        names=["time"],
    )


@pytest.fixture(params=["h5", "zarr", "memmap"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    location = f"{tmp_path}/x" if request.param == "memmap" else f"{tmp_path}/x.{request.param}"
    sample().save(location).close()
    return location


def opened(location: str, **options: Any) -> xr.Dataset:
    return xr.open_dataset(location, engine=TensorDictBackend, **options)


def test_a_tree_has_a_node_for_each_nested_tensordict(place: str) -> None:
    with xr.open_datatree(place, engine=TensorDictBackend) as tree:
        assert {*dict(tree.subtree_with_keys)} == {".", "next"}
        assert tree["obs"].dims == ("time", "obs_dim_0", "obs_dim_1")
        assert tree["next/reward"].dims == ("time", "env")
        assert tree.attrs == {"about": "a run"}
        assert tree["text"].values.tolist() == sample()["text"]
        assert np.array_equal(tree["next/reward"][1:3], sample()["next", "reward"][1:3].numpy())
        assert tree.isel(time=slice(0, 2))["next/reward"].shape == (2, 2)
    with xr.open_datatree(place, engine=TensorDictBackend, chunks={"time": 2}) as tree:
        assert tree["next/reward"].chunks == ((2, 2, 2), (2,))
        assert float(tree["next/reward"].sum()) == sum(range(2 * N))


def test_groups_of_a_tree(place: str) -> None:
    groups = xr.open_groups(place, engine=TensorDictBackend, drop_variables=["reward", "text"])
    assert {path: [*ds.data_vars] for path, ds in groups.items()} == {"/": ["obs", "half", "weights"], "/next": []}
    groups["/"].close()
    for group in ("next", "/next", "next/"):
        with xr.open_datatree(place, engine=TensorDictBackend, group=group) as tree:
            assert tree["reward"].dims == ("time", "env")
        with opened(place, group=group) as ds:
            assert [*ds.data_vars] == ["reward"]
    with xr.open_datatree(place, engine=TensorDictBackend, group="/", drop_variables="next.reward") as tree:
        assert not tree["next"].data_vars


def test_entries_of_one_name_and_other_shapes_in_a_tree(tmp_path: Path) -> None:
    td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 5), "deep": {"a": torch.ones(3)}}}, [3])
    td.save(tmp_path / "x.h5").close()
    with xr.open_datatree(tmp_path / "x.h5", engine=TensorDictBackend) as tree:
        assert tree["next/obs"].dims == ("dim_0", "next.obs_dim_0")
        assert tree["next/deep/a"].dims == ("dim_0",)
        assert tree["next"].sizes["next.obs_dim_0"] == 5
    pytest.raises(StoreClosedError, tree["obs"].load)  # closed with the tree


def test_storage_options_are_passed_by_name(tmp_path: Path) -> None:
    sample().save("memory://xarray/options").close()
    for call in (xr.open_dataset, xr.open_datatree, xr.open_groups):
        call("memory://xarray/options", engine=TensorDictBackend, storage_options={"timeout": 20})
        with pytest.raises(OptionError, match="timeout"):
            call("memory://xarray/options", engine=TensorDictBackend, storage_options={"timeout": -1})


def test_what_cannot_be_in_a_tree(tmp_path: Path) -> None:
    TensorDict({"next": {"a/b": torch.ones(3)}}, [3]).save(tmp_path / "slash").close()
    with pytest.raises(InvalidArgumentError, match="'next' / 'a/b' has a slash"):
        xr.open_datatree(tmp_path / "slash", engine=TensorDictBackend)
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    TensorDict({"next": {"ids": rows}}, [2]).save(tmp_path / "ragged").close()
    with pytest.raises(UnsupportedError, match=r"rows of entry 'next.ids' differ") as caught:
        xr.open_datatree(tmp_path / "ragged", engine=TensorDictBackend)
    assert "drop_variables=['next.ids']" in str(caught.value.hint)


def test_variables_dimensions_and_attributes(place: str) -> None:
    with opened(place) as ds:
        assert ds["obs"].dims == ("time", "obs_dim_0", "obs_dim_1")
        assert ds["next.reward"].dims == ("time", "env")
        assert ds["half"].dtype == np.float32
        assert ds["text"].values.tolist() == sample()["text"]
        assert ds["weights"].dims == ("weights_dim_0",)
        assert ds.attrs == {"about": "a run"}
        assert np.array_equal(ds["obs"], sample()["obs"].numpy())
        assert ds["half"].values.tolist() == list(range(N))


INDICES = [
    {"time": 2},
    {"time": -1, "obs_dim_1": 0},
    {"time": slice(1, 5, 2), "obs_dim_0": slice(None, None, -1)},
    {"time": slice(5, 0, -2)},
    {"time": [4, 0, 0, -1], "obs_dim_0": [3, 1]},
    {"obs_dim_0": [1, 1], "obs_dim_1": [2, 0, 1]},
    {"time": slice(3, 3)},
    {"time": xr.DataArray([1, 2], dims="p"), "obs_dim_0": xr.DataArray([0, 3], dims="p")},
]


@pytest.mark.parametrize("index", INDICES)
def test_every_kind_of_index(place: str, index: dict[str, Any]) -> None:
    whole = xr.DataArray(sample()["obs"].numpy(), dims=("time", "obs_dim_0", "obs_dim_1"))
    with opened(place) as ds:
        assert np.array_equal(ds["obs"].isel(index).values, whole.isel(index).values)


def test_only_the_indexed_rows_are_read(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    read = StoredArray._read

    def watching(self: StoredArray, index: tuple[Any, ...]) -> Any:
        found = read(self, index)
        asked.append(found.shape)
        return found

    monkeypatch.setattr(StoredArray, "_read", watching)
    with opened(place) as ds:
        part = ds[["obs"]].isel(time=slice(1, 3))
        assert not asked
        assert part["obs"].values.shape == (2, 4, 3)
    assert asked == [(2, 4, 3)]


def test_chunks_of_dask(place: str) -> None:
    with opened(place, chunks={"time": 2}) as ds:
        assert ds["obs"].chunks == ((2, 2, 2), (4,), (3,))
        assert int(ds["obs"].sum().compute()) == int(sample()["obs"].sum())
        copy = pickle.loads(pickle.dumps(ds))
    assert copy["next.reward"].sum("env").values.tolist() == sample()["next", "reward"].sum(1).tolist()


def test_groups_and_dropped_variables(place: str) -> None:
    with opened(place, group="next") as ds:
        assert ds["reward"].dims == ("time", "env")
    with opened(place, drop_variables=["next", "obs"]) as ds:
        assert set(ds.variables) == {"half", "text", "weights"}


def test_what_is_refused(tmp_path: Path) -> None:
    sample().save(tmp_path / "w").close()
    with opened(f"{tmp_path}/w") as ds:
        part = ds["obs"][1:3].values
        part[:] = -1  # the caller's own
    assert torch.equal(tdstore.open(tmp_path / "w")["obs"], sample()["obs"])
    with pytest.raises(StoreNotFoundError, match="nothing"):
        opened(f"{tmp_path}/nothing.h5")
    ragged = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    TensorDict({"a": torch.arange(2), "j": ragged}, [2]).save(tmp_path / "j.h5").close()
    with pytest.raises(UnsupportedError, match="'j'"):
        opened(f"{tmp_path}/j.h5")
    with opened(f"{tmp_path}/j.h5", drop_variables="j") as ds:
        assert ds["a"].values.tolist() == [0, 1]
    TensorDict({"a.b": torch.arange(2), "a": {"b": torch.arange(2)}}, [2]).save(tmp_path / "m").close()
    with pytest.raises(InvalidArgumentError, match=r"'a\.b'"):
        opened(f"{tmp_path}/m")


def test_the_entry_point_names_the_engine() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["xarray.backends"]
    point = EntryPoint("tdstore", declared["tdstore"], "xarray.backends")
    engines = xr.backends.plugins.build_engines([point])
    assert isinstance(engines["tdstore"], TensorDictBackend)
