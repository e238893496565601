"""Text of values that were overwritten is given back; readers of what was there before are told, or see what was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.varlen.columns import COLUMN_FROM
from tdstore.errors import CorruptStoreError, ReadOnlyError, UnsupportedError

ROWS = COLUMN_FROM
TEXT = ("c", "text")


def round_of(k: int) -> list[Any]:
    """The values of the k-th time around: some are no strings, some share bytes, some are empty."""
    made: list[Any] = [f"round {k} row {i} " + "ü" * 60 for i in range(ROWS)]
    made[0], made[1], made[2] = None, {"k": k}, ""
    made[10:13] = [f"same {k}"] * 3
    return made


def dataset(path: Path) -> Any:
    return TensorDict({"c": round_of(0), "x": torch.arange(ROWS)}, [ROWS]).save(path)


def rounds(td: Any, ks: range) -> None:
    for k in ks:
        td[3:] = {"c": round_of(k)[3:], "x": torch.arange(3, ROWS)}


def text_bytes(path: Path) -> int:
    with tdstore.open(path) as td:
        handle = td._handle if hasattr(td, "_handle") else td._binding[0]
        assert handle.store.verify() == []
        return int(handle.specs[TEXT].shape[0])


@pytest.mark.parametrize("name", ["d", "d.h5", "d.zarr"])
def test_a_ring_of_rows_stays_small(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    dataset(path).close()
    first = text_bytes(path)
    with tdstore.open(path, mode="r+") as td:
        rounds(td, range(1, 100 if name == "d.h5" else 12))
        td[:3] = {"c": ["a", "b", "c"]}
        assert td["c"] == ["a", "b", "c", *round_of(99 if name == "d.h5" else 11)[3:]]
    for k in range(4) if name == "d" else ():
        with tdstore.open(path, mode="r+") as td:
            rounds(td, range(12 + 25 * k, 12 + 25 * (k + 1)))
    assert text_bytes(path) < 3 * first + (2 << 16)
    size = sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file())
    assert size < 8 * first + (3 << 16)
    last = {"d": 111, "d.h5": 99, "d.zarr": 11}[name]
    with tdstore.open(path) as td:
        assert td["c"] == ["a", "b", "c", *round_of(last)[3:]]


def test_rows_that_are_cut_off_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "d.h5"
    dataset(path).close()
    with tdstore.open(path, mode="r+") as td:
        for k in range(12):
            td.resize_(5)
            td.extend(TensorDict({"c": round_of(k)[5:], "x": torch.arange(5, ROWS)}, [ROWS - 5]))
        td.resize_(5)
        assert td["c"] == round_of(0)[:5]
    assert text_bytes(path) < 1 << 17


def test_who_has_it_open_sees_what_was_or_is_told(tmp_path: Path) -> None:
    path = tmp_path / "d.zarr"
    dataset(path).close()
    with tdstore.open(path) as before, tdstore.open(path, mode="r+") as td:
        rounds(td, range(1, 12))
        with pytest.raises(CorruptStoreError, match="changed since it was opened"):
            before[5:9].to_tensordict()
        assert td["c"][3:] == round_of(11)[3:]


def test_a_mapping_from_before_keeps_what_was(tmp_path: Path) -> None:
    dataset(tmp_path / "d").close()
    before = tdstore.open(tmp_path / "d")
    with tdstore.open(tmp_path / "d", mode="r+") as td:
        rounds(td, range(1, 12))
        rows = td[2:6]
    assert text_bytes(tmp_path / "d") < 1 << 17
    with pytest.raises(CorruptStoreError, match="open the store again"):  # its rows were written, its text is older
        before["c"]
    assert rows["c"][1:] == round_of(11)[3:6]
    before.close()


def test_nothing_is_moved_while_somebody_else_writes(tmp_path: Path) -> None:
    dataset(tmp_path / "d").close()
    with tdstore.open(tmp_path / "d", mode="r+") as td:
        rounds(td, range(1, 12))
        td.commit()
        other = tdstore.open(tmp_path / "d", mode="r+")
    assert text_bytes(tmp_path / "d") > 1 << 17
    other[4] = {"c": "of the other"}
    other.close()
    with tdstore.open(tmp_path / "d") as td:
        assert td["c"][3:6] == [round_of(11)[3], "of the other", round_of(11)[5]]


@pytest.mark.parametrize("head", [(-1, None), (3, None), (None, 7)])
@pytest.mark.parametrize("name", ["d", "d.h5"])
def test_a_damaged_head_is_refused(tmp_path: Path, name: str, head: tuple[int | None, int | None]) -> None:
    with dataset(tmp_path / name) as td:
        handle = td._handle if hasattr(td, "_handle") else td._binding[0]
        for at, number in zip((0, 8), head, strict=True):
            if number is not None:
                data = torch.frombuffer(bytearray(number.to_bytes(8, "little", signed=True)), dtype=torch.uint8)
                handle.store.write([tdstore.Write(TEXT, (slice(at, at + 8, 1),), data)])
        if head[1] is None or name == "d.h5":
            with pytest.raises(CorruptStoreError, match="'c'"):
                td[0] = {"c": "x"}


def test_reductions_read_no_text(tmp_path: Path) -> None:
    dataset(tmp_path / "d.h5").close()
    with tdstore.open(tmp_path / "d.h5") as td:
        read: list[Any] = []
        inner = td._handle.store.read
        td._handle.store.read = lambda reads: (read.extend(r.path for r in reads), inner(reads))[1]
        assert td.sum()["x"] == sum(range(ROWS))
        assert td[3:].sum(reduce=True) == sum(range(3, ROWS))
        assert set(read) == {("x",)}


@pytest.mark.parametrize("where", ["memmap", "shm"])
def test_few_values_are_written_through_a_slice(tmp_path: Path, where: str) -> None:
    td = TensorDict({"c": list("abcdef"), "one": "v", "x": torch.arange(6)}, [6])
    name: Any = tmp_path / "d"
    if where == "shm":
        name = f"shm://given-{tmp_path.name}-{id(td)}"
    saved = td.save(name)
    rows, copied = saved[2:5], saved[[2, 3]]
    rows[0] = {"c": "C"}
    rows[1:][1:].set_("c", ["E"])
    saved["c"][5] = "F"
    copied[0] = {"c": "mine"}
    with pytest.raises(TypeError, match="cannot be stored"):
        rows[0] = {"c": object()}
    assert saved["c"] == ["a", "b", "C", "d", "E", "F"]
    if where == "memmap":
        with pytest.raises(UnsupportedError, match="'one'"):
            rows.update_({"one": "w"})
        saved.close()
    with tdstore.open(name) as again:
        assert again["c"] == ["a", "b", "C", "d", "E", "F"]
        with pytest.raises(ReadOnlyError):
            again[1:]["c"][0] = "x"
    saved.close()
    if where == "shm":
        tdstore.builtin.shared.store.remove(name)
