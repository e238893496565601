"""Appends of rows of every kind: through HDF5, with the manifest overwritten in place where its length stays."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tdstore_h5.file.document import MANIFEST

from tdstore import TensorDict

KINDS = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


def rows(count: int, start: int) -> dict[str, Any]:
    numbers = torch.arange(start, start + count)
    leaves = {str(kind)[6:]: (numbers % 2 if kind is torch.bool else numbers).to(kind) for kind in KINDS}
    return {
        **leaves,
        "wide": numbers[:, None, None].expand(count, 2, 3),
        "turned": torch.stack([numbers, -numbers]).T,
        "none": torch.zeros(count, 0),
        "n": {"text": [f"row {n}" for n in numbers.tolist()]},
    }


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"libver": "latest"}, {"libver": "earliest"}])
def test_rows_of_every_kind_are_appended(tmp_path: FsPath, options: dict[str, Any]) -> None:
    place = tmp_path / "a.h5"
    td: Any = TensorDict(rows(3, 0), [3]).save(place, durable="none", **options)
    for number in range(3, 12):
        td.append(TensorDict(rows(1, number), [1]))
    td.extend(TensorDict(rows(5, 12), [5]))
    td.close()
    found = TensorDict.load(place, verify="full")
    expected = TensorDict(rows(17, 0), [17])
    assert found["n", "text"] == expected["n", "text"]
    for key in expected.exclude("n").keys():
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_the_manifest_is_text_of_its_length_after_each_append(tmp_path: FsPath, libver: str) -> None:
    place = tmp_path / "a.h5"
    td: Any = TensorDict({"a": torch.arange(8)}, [8]).save(place, durable="none", libver=libver)
    lengths = set()
    for number in range(8, 12):  # the shape gets a digit longer, the generation may
        td.append({"a": torch.tensor(number)})
        td.close()
        with h5py.File(place) as file:
            text = file.attrs[MANIFEST]
            kind = file.attrs.get_id(MANIFEST).get_type()
            assert isinstance(text, bytes | str)
            assert kind.get_cset() == h5py.h5t.CSET_UTF8
            lengths.add(len(text))
            assert np.array_equal(file["a"][:], np.arange(number + 1))
            assert f'"shape":[{number + 1}]' in (text if isinstance(text, str) else text.decode())
        td = TensorDict.load(place, mode="r+", durable="none")
    td.close()
    assert len(lengths) > 1


def test_rows_are_appended_to_a_dataset_of_another_byte_order(tmp_path: FsPath) -> None:
    place = tmp_path / "a.h5"
    with h5py.File(place, "w") as file:
        file.create_dataset("a", data=np.arange(6, dtype=">i4").reshape(3, 2), maxshape=(None, 2), chunks=(2, 2))
        file.create_dataset("b", data=np.arange(3, dtype=">f8"), maxshape=(4,), chunks=(2,))
    td: Any = TensorDict.load(place, mode="r+")
    td.batch_size = [3]
    for number in range(3):  # the third row is beyond the limit of b
        td.append({"a": torch.full((2,), number, dtype=torch.int32), "b": torch.tensor(float(number))})
    td.close()
    with h5py.File(place) as file:
        assert file["a"].dtype == np.dtype(">i4")
        assert file["a"][:].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [1, 1], [2, 2]]
        assert file["b"][:].tolist() == [0, 1, 2, 0, 1, 2]
