"""Lazy stacks over every backend: their elements may live anywhere, and they are saved and loaded as what they are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, PersistentTensorDict, TensorDict, lazy_stack
from tdstore.errors import CorruptStoreError, LockedError, ReadOnlyError, UnsupportedError

WHERE = {"memmap": "stack", "h5": "stack.h5", "shared": None, "memory": None}


def element(i: int, width: int = 2) -> TensorDict:
    return TensorDict({"a": torch.arange(3.0 * width).reshape(3, width) + i, "n": {"b": torch.ones(3) * i}}, [3])


def uneven() -> Any:
    """Shapes, keys and values that differ."""
    first, second = element(0), element(1, 5)
    second["only"] = torch.zeros(3, 4)
    first["s"], second["s"] = "first", "second"
    return lazy_stack([first, second], stack_dim_name="which")


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other) is LazyStackedTensorDict
    assert (one.batch_size, one.stack_dim, one.names) == (other.batch_size, other.stack_dim, other.names)
    for a, b in zip(one.tensordicts, other.tensordicts, strict=True):
        assert set(a.keys(True)) == set(b.keys(True))
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key
        for key, value in a.non_tensor_items(True):
            assert value.same(b.get(key)), key


def saved(td: Any, backend: str, tmp_path: Path, name: str = "") -> tuple[Any, Any]:
    where = WHERE[backend]
    location = None if where is None else tmp_path / f"{name}{where}"
    return td.save(location, storage=backend), location


@pytest.mark.parametrize("backend", WHERE)
def test_round_trip(backend: str, tmp_path: Path) -> None:
    back, location = saved(uneven(), backend, tmp_path)
    same(back, uneven())
    if location is not None:
        back.close()
        with tdstore.open(location) as again:
            same(again, uneven())
            assert again.get("s").tolist() == [["first"] * 3, ["second"] * 3]


@pytest.mark.parametrize("backend", ["memmap", "h5"])
@pytest.mark.parametrize("dim", [0, 1])
def test_inside_a_tensordict(backend: str, dim: int, tmp_path: Path) -> None:
    stack = lazy_stack([element(0), element(1, 4), element(2)], dim)
    td = TensorDict({"z": stack, "x": torch.ones(*stack.batch_size)}, stack.batch_size)
    back, location = saved(td, backend, tmp_path)
    same(back["z"], stack)
    back.close()
    with tdstore.open(location) as again:
        same(again["z"], stack)
        assert torch.equal(again[1:]["z"][0].get(("n", "b")), stack[1:][0].get(("n", "b")))
        assert torch.equal(again[[2, 0]]["z"].get(("n", "b")), stack[[2, 0]].get(("n", "b")))
        assert torch.equal(again[0]["z"]["n", "b"], stack[0]["n", "b"])


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_stack_of_stacks(backend: str, tmp_path: Path) -> None:
    stack = lazy_stack([lazy_stack([element(0), element(1, 3)]), lazy_stack([element(2), element(3, 4)])])
    back, location = saved(stack, backend, tmp_path)
    back.close()
    with tdstore.open(location) as again:
        for mine, theirs in zip(again.tensordicts, stack.tensordicts, strict=True):
            same(mine, theirs)


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_a_shorter_stack_over_a_longer_one(backend: str, tmp_path: Path) -> None:
    for n in (4, 2):
        back, location = saved(lazy_stack([element(i) for i in range(n)]), backend, tmp_path)
        back.close()
    with tdstore.open(location) as again:
        assert again.batch_size == (2, 3)


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_nothing_and_differing_batch_sizes(backend: str, tmp_path: Path) -> None:
    nothing, _ = saved(lazy_stack([element(0)]).split([0, 1])[0], backend, tmp_path)
    assert nothing.batch_size == (0, 3) and list(nothing.keys()) == []
    nothing.close()
    ragged = lazy_stack([element(0), element(1)[:2]])
    back, _ = saved(ragged, backend, tmp_path)
    assert back.batch_size == (2, -1)
    same(back, ragged)
    back.close()


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_writes_reach_the_store(backend: str, tmp_path: Path) -> None:
    first, location = saved(lazy_stack([element(0), element(1)]), backend, tmp_path)
    first.close()
    with tdstore.open(location, "r+") as td:
        td["n"].set_("b", torch.full((2, 3), 7.0))
        td[:, 0] = TensorDict({"a": torch.full((2, 2), 9.0)}, [2])
        td["a"]  # a copy: to change it changes nothing
        td += 1
        td.set("new", torch.ones(2, 3))
        td[1].rename_key_("new", "other")
    with tdstore.open(location) as td:
        assert torch.equal(td["n", "b"], torch.full((2, 3), 8.0))
        assert torch.equal(td["a"][:, 0], torch.full((2, 2), 10.0))
        assert "new" in td[0] and "other" in td[1] and "new" not in td
        with pytest.raises(ReadOnlyError):
            td.zero_()
        with pytest.raises(ReadOnlyError):
            td[0] = 1


def elements_everywhere(tmp_path: Path) -> list[Any]:
    rows = torch.cat([element(i) for i in range(4)])
    rows.save(tmp_path / "rows.h5", storage="h5").close()
    file = tdstore.open(tmp_path / "rows.h5", "r+")
    element(4).save(tmp_path / "mapped").close()
    mapped = tdstore.open(tmp_path / "mapped", "r+")
    return [element(9), file[3:6], mapped, element(5).share_memory_()]


def test_elements_live_anywhere(tmp_path: Path) -> None:
    parts = elements_everywhere(tmp_path)
    stack = lazy_stack(parts)
    assert isinstance(stack[1], PersistentTensorDict)
    dense = torch.stack([p.clone() for p in parts])
    assert torch.equal(stack["a"], dense["a"])
    assert torch.equal(stack[:, 1]["n", "b"], dense[:, 1]["n", "b"])
    assert torch.equal(stack.sum(0)["a"], dense.sum(0)["a"])
    assert torch.equal(stack.float().mean()["a"], dense.mean()["a"])
    assert torch.equal((stack + dense)["a"], dense["a"] * 2)
    assert torch.equal(stack.get_at("a", (slice(None), 2)), dense["a"][:, 2])
    stack += 1
    stack[:, 0] = 5
    stack.update_({("n", "b"): torch.zeros(4, 3)})
    assert torch.equal(stack["a"], (dense + 1)["a"].index_fill(1, torch.tensor(0), 5))
    parts[1].close(), parts[2].close()
    with tdstore.open(tmp_path / "rows.h5") as rows, tdstore.open(tmp_path / "mapped") as mapped:
        assert rows["a"][3].tolist() == [5, 5] and not rows["n", "b"][3:6].any()
        assert rows["n", "b"][6].item() == 2  # outside of the window
        assert mapped["a"][0].tolist() == [5, 5] and mapped["a"][1, 0].item() == 7


def test_the_peer_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    peer = pytest.importorskip("tensordict")
    uneven().memmap(tmp_path / "ours")
    theirs = peer.load_memmap(tmp_path / "ours")
    assert type(theirs).__name__ == "LazyStackedTensorDict" and theirs.batch_size == (2, 3)
    assert torch.equal(theirs[1]["a"], uneven()[1]["a"]) and theirs[1]["s"] == "second"
    made = [peer.TensorDict({"a": torch.ones(2, 1 + i), "s": f"t{i}"}, [2]) for i in range(3)]
    peer.TensorDict({"z": peer.lazy_stack(made, 1)}, [2]).memmap(tmp_path / "theirs")
    with tdstore.open(tmp_path / "theirs") as td:
        assert (td["z"].stack_dim, td["z"].batch_size) == (1, (2, 3))
        assert [list(x.shape) for x in td.get(("z", "a"), as_list=True)] == [[2, 1], [2, 2], [2, 3]]


def test_kinds_of_memory(tmp_path: Path) -> None:
    mapped = uneven().memmap(tmp_path / "m")
    assert mapped.is_memmap() and mapped.is_locked and mapped[0].is_memmap()
    with pytest.raises(LockedError):
        mapped.set("q", torch.zeros(2, 3))
    same(pickle.loads(pickle.dumps(mapped)), uneven())
    here = lazy_stack([element(0), element(1)])
    first = here[0]
    assert here.memmap_(tmp_path / "here") is here and here.is_memmap() and here[0] is first
    shared = lazy_stack([element(0), element(1)])
    assert shared.share_memory_() is shared and shared.is_shared() and shared[1].is_shared()
    like = lazy_stack([element(0), element(1)]).memmap_like(tmp_path / "like")
    assert not like["a"].any() and like.batch_size == (2, 3)
    assert lazy_stack([element(3), element(4)]).load_memmap_(tmp_path / "here")[1]["n", "b"][0].item() == 1


def test_elements_cannot_be_added_to_what_is_stored(tmp_path: Path) -> None:
    lazy_stack([element(0)]).save(tmp_path / "s").close()
    with tdstore.open(tmp_path / "s", "r+") as td:
        with pytest.raises(UnsupportedError, match="clone"):
            td.insert(0, element(1))
        grown = td.clone(False)
        grown.append(element(1))
        assert len(grown) == 2 and len(td) == 1


@pytest.mark.parametrize("extra", [{"stack_dim": 5}, {"count": 9}, {"count": -1}, {"stack_dim": "0"}, {"name": 3}])
def test_a_header_that_lies(extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LazyStackedTensorDict._own_record

    def lying(td: Any) -> Any:
        record = honest(td)
        return type(record)(record.batch_size, kind=record.kind, keys=record.keys, extra={**record.extra, **extra})

    monkeypatch.setattr(LazyStackedTensorDict, "_own_record", lying)
    with pytest.raises(CorruptStoreError):
        lazy_stack([element(0), element(1)]).save(tmp_path / "s.h5", storage="h5")


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_set_in_what_is_open_for_writing(backend: str, tmp_path: Path) -> None:
    td, location = saved(TensorDict({"x": torch.ones(2, 3)}, [2, 3]), backend, tmp_path)
    td.close()
    with tdstore.open(location, "r+") as td:
        td.set("z", uneven())
        td["z"][0].set("later", torch.ones(3))
        td["z"] = uneven()
        td.set(("deep", "z"), uneven())
        same(td["z"], uneven())
        td.rename_key_("z", "y")
    with tdstore.open(location) as td:
        same(td["y"], uneven())
        same(td["deep", "z"], uneven())
        assert torch.equal(td[1]["y"]["a"], uneven()[1]["a"]) and "z" not in td


def test_copy_and_convert(tmp_path: Path) -> None:
    uneven().save(tmp_path / "s").close()
    tdstore.copy(tmp_path / "s", tmp_path / "s.h5", storage="h5", progress=False)
    with tdstore.open(tmp_path / "s.h5") as td:
        same(td, uneven())


def test_read_into_buffers(tmp_path: Path) -> None:
    stack = lazy_stack([element(0), element(1)])
    back = stack.save(tmp_path / "s.h5", storage="h5")
    out = TensorDict({"a": torch.zeros(2, 3, 2), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
    assert torch.equal(back.read(out=out)["a"], stack["a"]) and out["n", "b"][1, 0] == 1
    back.close()
