"""One value per row that is not a tensor: few in the header, many in leaves, the same to users on every backend."""

from __future__ import annotations

import datetime
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorData, NonTensorStack, PersistentTensorDict, TensorDict
from tdstore.builtin.shared.store import remove
from tdstore.container.varlen.columns import COLUMN_FROM
from tdstore.errors import CorruptStoreError, ReadOnlyError, UntrustedDataError

FEW, MANY = 6, COLUMN_FROM + 4
BACKENDS = ["memmap", "h5", "zarr", "file", "shm", "redis"]
DAY = datetime.datetime(2026, 11, 21, 17, 5)


@pytest.fixture(params=BACKENDS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A fresh location of each backend."""
    name, unique = request.param, uuid.uuid4().hex
    if name == "shm":
        yield {"location": f"shm://test-{unique}"}
        remove(f"shm://test-{unique}")
    elif name == "redis":
        server = request.getfixturevalue("redis")
        yield {"location": f"{server.url}/rows-{unique}" if server.url.count("/") > 2 else f"{server.url}/0/{unique}"}
    elif name == "file":
        yield {"location": (tmp_path / unique).as_uri(), "storage": "remote"}
    else:
        yield {"location": str(tmp_path / f"{unique}.data"), "storage": name}


def captions(rows: int) -> list[Any]:
    """Strings of many lengths and alphabets, and a few values that are no strings."""
    made: list[Any] = [f"row {i} " + "äß漢🎈"[i % 4] * (i % 7) for i in range(rows)]
    made[1], made[2], made[3] = None, {"at": DAY, "k": (1, 2.5)}, ""
    return made


def dataset(rows: int) -> TensorDict:
    td = TensorDict({"x": torch.arange(rows), "caption": captions(rows)}, [rows])
    td["n"] = TensorDict({"tag": [f"t{i}" for i in range(rows)]}, [rows])
    return td


def store_of(td: Any) -> tdstore.Store:
    return td.store if isinstance(td, PersistentTensorDict) else td._binding[0].store


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_read_in_every_way(where: dict[str, Any], rows: int) -> None:
    want = captions(rows)
    dataset(rows).save(**where).close()
    with tdstore.open(where["location"]) as td:
        assert list(td.keys()) == ["x", "caption", "n"]
        assert td["caption"] == want
        assert td["n", "tag"] == [f"t{i}" for i in range(rows)]
        assert td[2]["caption"] == want[2]
        assert td[-1]["n"]["tag"] == f"t{rows - 1}"
        assert td[1:5]["caption"] == want[1:5]
        assert td[torch.tensor([4, 0, 4])]["caption"] == [want[4], want[0], want[4]]
        assert td[1:][::2][1]["caption"] == want[3]
        assert td.get_at("caption", 2).data == want[2]
        assert td.get("caption").batch_size == (rows,)
        assert td.is_non_tensor("caption")
        assert [k for k, _ in td.non_tensor_items()] == ["caption"]
        resident = td[[0, 2]].to_tensordict()
        assert resident["n", "tag"] == ["t0", "t2"]
        assert torch.equal(resident["x"], torch.tensor([0, 2]))
        assert [row["caption"] for row in td[:3]] == want[:3]
        assert td.clone()["caption"] == want


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_written_in_every_way(where: dict[str, Any], rows: int) -> None:
    want = captions(rows)
    dataset(rows).save(**where).close()
    with tdstore.open(where["location"], mode="r+") as td:

        def check() -> None:
            assert td["caption"] == want
            assert td["n", "tag"][1:] == [f"t{i}" for i in range(1, rows)]

        td[0] = {"caption": "longer than what was there before " * 9}
        want[0] = "longer than what was there before " * 9
        check()
        td[1:4] = TensorDict({"caption": ["a", "", "c"]}, [3])
        want[1:4] = ["a", "", "c"]
        check()
        td[[5, 0]] = {"caption": ["five", {"k": DAY}]}
        want[5], want[0] = "five", {"k": DAY}
        check()
        td.update_at_({"caption": "all three"}, slice(2, 5))
        want[2:5] = ["all three"] * 3
        check()
        td.set_at_("caption", "one", 4)
        want[4] = "one"
        check()
        td[2:][:2].update_({"caption": ["p", "q"]})
        want[2:4] = ["p", "q"]
        check()
        td[0] = {"x": 7, "caption": "both", "n": {"tag": "T0"}}
        want[0] = "both"
        check()
        assert td["n", "tag"][0] == "T0"
        assert td["x"][0] == 7
        td.commit()
        check()
    with tdstore.open(where["location"]) as td:
        assert td["caption"] == want
        assert td["n", "tag"][0] == "T0"
        assert store_of(td).verify() == []


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_structure(where: dict[str, Any], rows: int) -> None:
    dataset(rows).save(**where).close()
    with tdstore.open(where["location"], mode="r+") as td:
        td.rename_key_("caption", "text")
        td["new"] = [str(i) for i in range(rows)]
        td["text"] = ["z"] * rows
        td["one"] = "value"
        td[3] = {"one": "other"}
        td["x"] = ["now", "words"] * (rows // 2)
        td.rename_key_(("n", "tag"), ("n", "label"))
        del td["new"]
        td["n", "label"] = torch.ones(rows)
    with tdstore.open(where["location"]) as td:
        assert set(td.keys()) == {"x", "n", "text", "one"}
        assert td["text"] == ["z"] * rows
        assert td["one"] == ["value"] * 3 + ["other"] + ["value"] * (rows - 4)
        assert td["x"] == ["now", "words"] * (rows // 2)
        assert td["n", "label"].sum() == rows
        assert {p[0] for p in store_of(td).paths()} <= {"x", "n", "text", "one"}


def test_the_header_stays_small_and_a_write_does_not_rewrite_it(tmp_path: Path) -> None:
    with dataset(MANY).save(tmp_path / "d.h5") as td:
        size = len(str(td.store.load_header()))
        assert size < 2000
        assert set(td.store.paths()) >= {("caption", "spans"), ("caption", "text"), ("n", "tag", "text")}
    td = dataset(MANY * 4).save(tmp_path / "e.h5")
    assert len(str(td.store.load_header())) < size + 10
    td.close()


def test_a_slice_writes_through_and_a_copy_does_not(tmp_path: Path) -> None:
    td = dataset(MANY).memmap(tmp_path / "d")
    want = captions(MANY)
    rows, copied = td[2:6], td[[2, 3]]
    rows[0] = {"caption": "through"}
    rows.set_("caption", rows["caption"][:1] + ["x", "y", "z"])
    copied[0] = {"caption": "mine"}
    assert td["caption"][2:6] == ["through", "x", "y", "z"]
    assert copied["caption"] == ["mine", want[3]]
    td["caption"][7] = "by the list"
    assert td[7]["caption"] == "by the list"
    td.close()
    with tdstore.open(tmp_path / "d") as again:
        assert again["caption"][2:8] == ["through", "x", "y", "z", want[6], "by the list"]
        with pytest.raises(ReadOnlyError):
            again[0] = {"caption": None}
        with pytest.raises(ReadOnlyError):
            again["caption"][0] = None


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dest", ["other.h5", "other"])
def test_copied_and_saved_on(tmp_path: Path, rows: int, dest: str) -> None:
    want = captions(rows)
    dataset(rows).save(tmp_path / "a.h5").close()
    tdstore.copy(tmp_path / "a.h5", tmp_path / f"copy-{dest}")
    with tdstore.open(tmp_path / "a.h5") as td:
        td.save(tmp_path / f"whole-{dest}").close()
        td[1:].save(tmp_path / f"window-{dest}").close()
        tdstore.lazy_stack([td, td]).save(tmp_path / f"stack-{dest}").close()
        tdstore.copy(td, tmp_path / f"open-{dest}", keys=["caption"])
        assert pickle.loads(pickle.dumps(td[2:4].to_tensordict()))["caption"] == want[2:4]
    for name in ("copy", "whole", "open"):
        with tdstore.open(tmp_path / f"{name}-{dest}") as again:
            assert again["caption"] == want
    with tdstore.open(tmp_path / f"window-{dest}") as again:
        assert again["caption"] == want[1:]
        assert again["n", "tag"][0] == "t1"
    with tdstore.open(tmp_path / f"stack-{dest}") as again:
        assert isinstance(again, LazyStackedTensorDict)
        assert again["caption"] == [want, want]
        assert again[1, 2]["caption"] == want[2]
        assert again[:, 3:5]["caption"] == [want[3:5]] * 2


def test_more_dimensions(tmp_path: Path) -> None:
    words = [[f"{i}.{j}" for j in range(3)] for i in range(MANY)]
    td = TensorDict({"w": words, "x": torch.zeros(MANY, 3)}, [MANY, 3])
    for name in ("d", "d.h5"):
        with td.save(tmp_path / name) as saved:
            assert saved.get("w").batch_size == (MANY, 3)
            assert saved[5, 1]["w"] == "5.1"
            assert saved[:, 2]["w"][7] == "7.2"
            saved[4, 1:] = {"w": ["p", "q"]}
            assert saved[4]["w"] == ["4.0", "p", "q"]
            assert saved[3:5].permute(1, 0)["w"] == [["3.0", "4.0"], ["3.1", "p"], ["3.2", "q"]]


def test_damaged_columns_are_refused(tmp_path: Path) -> None:
    with dataset(MANY).save(tmp_path / "d.h5") as td:
        handle = td._handle
        handle.store.write([tdstore.Write(("caption", "spans"), (slice(0, 1, 1),), torch.tensor([[8, 1 << 40]]))])
        with pytest.raises(CorruptStoreError, match="'caption'"):
            td["caption"]
        with pytest.raises(CorruptStoreError, match="'caption'"):
            td[0].to_tensordict()
        handle.store.delete([("caption", "text")])
        with pytest.raises(CorruptStoreError, match="'caption'"):
            handle.reload()


def test_what_cannot_be_stored_is_told_with_its_key(where: dict[str, Any]) -> None:
    td = dataset(MANY)
    td["n", "tag"] = [object(), *range(MANY - 1)] + []
    with pytest.raises(UntrustedDataError, match=r"'n' / 'tag'.*builtins.object(?s:.*)register_codec"):
        td.save(**where)
    td["n", "tag"] = list("ab") * (MANY // 2)
    td.save(**where).close()
    with tdstore.open(where["location"], mode="r+") as saved:
        for bad in (object(), "\ud800"):
            with pytest.raises((UntrustedDataError, TypeError, ValueError)):
                saved[0] = {"caption": bad}
        assert saved["caption"] == captions(MANY)


def test_texts_grow_in_steps(tmp_path: Path) -> None:
    with dataset(MANY).save(tmp_path / "d.h5") as td:
        lengths = set()
        for i in range(40):
            td[i % MANY] = {"caption": f"{i}" * 9000}
            lengths.add(td._handle.specs["caption", "text"].shape)
        assert len(lengths) < 12
        assert [td[i]["caption"] for i in range(40)] == [f"{i}" * 9000 for i in range(40)]


@pytest.mark.parametrize("make", [TensorDict, PersistentTensorDict])
def test_stacks_of_stored_and_resident(tmp_path: Path, make: Callable[..., Any]) -> None:
    kind = "d.h5" if make is PersistentTensorDict else "d"
    with dataset(MANY).save(tmp_path / kind) as td:
        assert isinstance(td, make)
        want = captions(MANY)
        assert torch.cat([td[:2], td[4:6]])["caption"] == want[:2] + want[4:6]
        assert torch.stack([td[0], td[4]])["caption"] == [want[0], want[4]]
        assert torch.stack([td, td])["n", "tag"][1][5] == "t5"
        assert isinstance(td.get("caption"), NonTensorStack)
        assert isinstance(td[0].get("caption"), NonTensorData)


@pytest.mark.parametrize("start", [2, MANY])
def test_growing(where: dict[str, Any], start: int) -> None:
    want = [f"c{i}" for i in range(start)]
    TensorDict({"x": torch.zeros(start), "c": want, "l": "same"}, [start]).save(**where).close()
    with tdstore.open(where["location"], mode="r+") as td:
        for block in range(3):
            new = [f"block {block} row {i}" * 20 for i in range(200)]
            td.extend(TensorDict({"x": torch.ones(200), "c": new, "l": "same"}, [200]))
            want += new
            assert td["c"] == want
        td.append(TensorDict({"x": torch.ones(()), "c": "last", "l": "same"}, []))
        td.resize_(start + 400)
        td[start] = {"c": "written"}
    want = [*want[: start + 400]]
    want[start] = "written"
    with tdstore.open(where["location"]) as td:
        assert td["c"] == want
        assert td["l"] == "same"
        assert set(store_of(td).paths()) == {("x",), ("c", "spans"), ("c", "text")}


def test_looking_at_a_dataset_reads_few_values(tmp_path: Path) -> None:
    dataset(MANY).save(tmp_path / "d.h5").close()
    with tdstore.open(tmp_path / "d.h5") as td:
        read = 0
        inner = td._handle.store.read

        def counted(reads: Any) -> Any:
            nonlocal read
            values = inner(reads)
            read += sum(v.nbytes for v in values)
            return values

        td._handle.store.read = counted
        assert "'row 0 ', None" in repr(td)
        assert f"{MANY} values" in repr(td)
        assert td.get_item_shape("caption") == (MANY,)
        assert td[2:9].get_item_shape(("n", "tag")) == (7,)
        assert td[5]["caption"].startswith("row 5")
        assert read < 2000
