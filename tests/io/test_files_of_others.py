"""Files that are no datasets: the error of opening one names the function that reads it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, StoreExistsError, StoreNotFoundError

ROWS = TensorDict({"a": np.arange(3.0)}, [3])


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet", "safetensors"])
def test_the_hint_names_the_function(tmp_path: Path, suffix: str) -> None:
    place = tmp_path / f"rows.{suffix}"
    getattr(ROWS, f"to_{suffix}")(place)
    with pytest.raises(StoreNotFoundError) as found:
        tdstore.open(place)
    name = f"from_{suffix}"
    assert found.value.hint is not None
    assert found.value.hint.startswith(f"tdstore.{name}({str(place)!r}) reads it")
    assert getattr(tdstore, name)(place)["a"].tolist() == [0.0, 1.0, 2.0]


def test_arrays_of_numpy(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", a=np.arange(3))
    with pytest.raises(CorruptStoreError, match="not an archive of a dataset") as found:
        tdstore.open(tmp_path / "rows.npz")
    assert found.value.hint is not None
    assert "tdstore.from_npz" in found.value.hint
    assert tdstore.from_npz(tmp_path / "rows.npz")["a"].tolist() == [0, 1, 2]


def test_other_files_are_left_to_a_backend(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(StoreNotFoundError) as found:
        tdstore.open(tmp_path / "notes.txt")
    assert found.value.hint is not None
    assert found.value.hint.startswith("pass storage= to name its backend")


@pytest.mark.parametrize("suffix", ["h5", "zarr.zip", "tdz"])
def test_a_refused_save_holds_nothing(tmp_path: Path, suffix: str) -> None:
    """The error would hold what was to be saved, until Python looks for cycles."""
    place = tmp_path / f"x.{suffix}"
    place.write_bytes(b"something else")
    td = TensorDict({"a": np.arange(3.0)}, [3])
    held = weakref.ref(td)
    gc.collect()
    gc.disable()
    try:
        try:
            td.save(place)
        except StoreExistsError:
            del td
        else:
            pytest.fail("the file was replaced")
        assert held() is None
    finally:
        gc.enable()
