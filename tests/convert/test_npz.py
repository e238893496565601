"""Archives of numpy as input: every dtype, keys, URLs; objects, damage and lies are refused."""

from __future__ import annotations

import io
import uuid
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from tdstore import TensorDict, from_npz
from tdstore.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    OptionError,
    StoreNotFoundError,
    UnsupportedError,
    UntrustedDataError,
)

ARRAYS: dict[str, Any] = {
    "obs": np.arange(12, dtype=">f4").reshape(4, 3),
    "fortran": np.asfortranarray(np.arange(8).reshape(4, 2)),
    "next.done": np.array([True, False, True, False]),
    "name": np.array(["a", "b", "", "d"]),
    "day": np.array(["1970-01-02", "1970-01-03", "NaT", "1970-01-01"], "M8[D]"),
    "pair": np.array([(1, 2.0)] * 4, [("x", "i2"), ("y", "f8")]),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_all_kinds(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "x.npz", **ARRAYS)
    td = from_npz(tmp_path / "x.npz", separator=".")
    assert td.batch_size == (4,)
    assert td["obs"].dtype == torch.float32
    assert torch.equal(td["obs"], torch.arange(12.0).reshape(4, 3))
    assert torch.equal(td["fortran"], torch.arange(8).reshape(4, 2))
    assert td["next", "done"].tolist() == [True, False, True, False]
    assert td["name"] == ["a", "b", "", "d"]
    assert td["day"].tolist()[:2] == [86_400 * 10**9, 2 * 86_400 * 10**9]
    assert td["pair", "x"].dtype == torch.int16
    td["obs"][0] = 7  # the memory is the caller's
    assert set(from_npz(tmp_path / "x.npz", keys=["obs"]).keys()) == {"obs"}


def test_batch_sizes(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros((2, 3)), b=np.zeros((2, 3, 4)), scalar=np.float32(3))
    assert from_npz(tmp_path / "x.npz").batch_size == ()
    assert from_npz(tmp_path / "x.npz", keys=["a", "b"]).batch_size == (2,)
    assert from_npz(tmp_path / "x.npz", keys=["a", "b"], auto_batch_size=True).batch_size == (2, 3)
    assert from_npz(tmp_path / "x.npz", keys=["a", "b"], batch_size=[2, 3]).batch_size == (2, 3)
    with pytest.raises(OptionError):
        from_npz(tmp_path / "x.npz", batch_size=[2], auto_batch_size=True)


def test_a_url_and_a_file_object(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(5), big=np.zeros(100_000))
    url = f"memory://{uuid.uuid4().hex}/x.npz"
    fsspec.filesystem("memory").pipe(url, buffer.getvalue())
    assert from_npz(url, keys=["a"])["a"].tolist() == [0, 1, 2, 3, 4]
    assert from_npz(buffer)["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(StoreNotFoundError, match="nothing"):
        from_npz(url.replace("x.npz", "nothing.npz"))


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "ran").touch, ()

    np.savez(tmp_path / "x.npz", a=np.arange(3), o=np.array([Bomb(), None, 1], object))
    with pytest.raises(UntrustedDataError, match=r"'o' of .*x\.npz"):
        from_npz(tmp_path / "x.npz")
    assert not (tmp_path / "ran").exists()
    assert from_npz(tmp_path / "x.npz", keys=["a"])["a"].tolist() == [0, 1, 2]


def test_what_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3), raw=np.array([b"xy"], "V2"), long=np.zeros(3, np.longdouble))
    for name in ("raw", "long"):
        with pytest.raises(UnsupportedError, match=name):
            from_npz(tmp_path / "x.npz", keys=[name])
    with pytest.raises(InvalidArgumentError, match="'b'.*'a'"):
        from_npz(tmp_path / "x.npz", keys=["b"])
    with pytest.raises(StoreNotFoundError, match="nothing"):
        from_npz(tmp_path / "nothing.npz")
    with pytest.raises(CorruptStoreError, match="max_bytes"):
        from_npz(tmp_path / "x.npz", max_bytes=20)
    with pytest.raises(OptionError, match="storage_options"):
        from_npz(tmp_path / "x.npz", storage_options={"key": "k"})


def test_damaged_files(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.random.default_rng(0).random(1000))
    whole = (tmp_path / "x.npz").read_bytes()
    for data in (b"", b"text", whole[:-40], whole[:200] + bytes(100) + whole[300:]):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(CorruptStoreError, match=r"x\.npz"):
            from_npz(tmp_path / "x.npz")


def test_an_array_that_declares_more_than_it_has(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(80))
    with pytest.raises(CorruptStoreError, match="'a'.*shape"):
        from_npz(tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "y.npz", "w") as archive:
        archive.writestr("notes.txt", "text")
    with pytest.raises(CorruptStoreError, match=r"not \.npy"):
        from_npz(tmp_path / "y.npz")


def test_the_method(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    assert TensorDict.from_npz(tmp_path / "x.npz")["a"].tolist() == [0, 1, 2]
