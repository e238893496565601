"""The acceptance scenarios F1 to F4 of RL.md 6, with their values, in memory and on every storage that they touch."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tdstore
from tdstore import TensorDict
from tests.tensorclass.classes import PLACES

WHERE = ["memory", *PLACES]
Put = Callable[[TensorDict], Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with multiprocessing.get_context("fork").Pool(2) as made:
        yield made


@pytest.fixture(params=WHERE)
def put(request: Any, tmp_path: Any) -> Iterator[Put]:
    """A function that saves a TensorDict somewhere and opens it again, to read and write; in memory, a copy."""
    opened: list[Any] = []

    def put(td: TensorDict) -> Any:
        if request.param == "memory":
            return td.clone()
        opened.append(td.save(PLACES[request.param](tmp_path)))
        if request.param != "shared":
            opened[-1].close()
            opened[-1] = tdstore.open(PLACES[request.param](tmp_path), mode="r+")
        return opened[-1]

    yield put
    for td in opened:
        td.close()


def count(rows: TensorDict) -> TensorDict:
    return TensorDict({"n": torch.tensor([len(rows)]), "first": rows["a"][:1]}, [1])


def test_f1_chunks(put: Put, pool: Any) -> None:
    td = put(TensorDict({"a": torch.arange(10)}, [10]))
    for sizes, counts in (
        ({}, [5, 5]),
        ({"chunksize": 3}, [3, 3, 3, 1]),
        ({"num_chunks": 4}, [3, 3, 3, 1]),
    ):
        made = td.map(count, pool=pool, **sizes)
        assert made["n"].tolist() == counts
        assert made["first"].tolist() == [sum(counts[:i]) for i in range(len(counts))]
    assert [len(rows) for rows in td.map_iter(_itself, pool=pool, chunksize=4)] == [4, 4, 2]
    with pytest.raises(ValueError, match="chunksize"):
        td.map(count, pool=pool, chunksize=3, num_chunks=4)


def _itself(rows: TensorDict) -> TensorDict:
    return rows


def test_f2_one_buffer(put: Put, tmp_path: Any) -> None:
    nested = {"c": torch.arange(6, dtype=torch.int32).view(3, 2), "d": torch.tensor([True, False, True])}
    td = put(TensorDict({"a": torch.ones(3), "b": nested, "s": "hi"}, [3]))
    for made in (td.consolidate(), td.consolidate(tmp_path / "one"), TensorDict.from_consolidated(tmp_path / "one")):
        leaves = [made["a"], made["b", "c"], made["b", "d"]]
        assert made.is_consolidated() and made.consolidate() is made
        start = min(leaf.data_ptr() for leaf in leaves)
        assert sorted(leaf.data_ptr() - start for leaf in leaves) == [0, 16, 40]
        assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
        assert leaves[1].dtype is torch.int32 and leaves[1].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert leaves[2].tolist() == [True, False, True]
        back = pickle.loads(pickle.dumps(made))
        assert made["s"] == back["s"] == "hi" and type(back["s"]) is str
        assert back["b", "c"].tolist() == leaves[1].tolist()
    assert td.consolidate().is_locked and td.consolidate()["a"].untyped_storage().nbytes() == 48
    raw = (tmp_path / "one").read_bytes()
    length = int.from_bytes(raw[-8:], "little")
    told = json.loads(raw[-8 - length : -8])
    assert len(raw) == 48 + length + 8 and told["leaves"]["a"][2] == 0
    assert [told["b"]["leaves"][key][2] for key in "cd"] == [16, 40]


def test_f3_two_linears() -> None:
    nets = [nn.Linear(3, 4) for _ in range(2)]
    params = TensorDict.from_modules(*nets)
    assert params["weight"].shape == (2, 4, 3)
    made = torch.vmap(_call, (0, None))(params, torch.ones(3))
    assert made.shape == (2, 4) and torch.allclose(made[1], nets[1](torch.ones(3)))
    made.sum().backward()
    assert params["weight"].grad.shape == (2, 4, 3) and all(net.weight.grad is None for net in nets)


def test_f3_from_where_they_are_kept(put: Put) -> None:
    nets = [nn.Linear(3, 4) for _ in range(2)]
    params = put(TensorDict.from_modules(*nets).data).to_tensordict()
    made = torch.vmap(_call, (0, None))(params, torch.ones(3))
    assert torch.allclose(made, torch.stack([net(torch.ones(3)) for net in nets]))


SKELETON = nn.Linear(3, 4, device="meta")


def _call(params: TensorDict, x: torch.Tensor) -> torch.Tensor:
    with params.to_module(SKELETON):
        return SKELETON(x)  # type: ignore[no-any-return]


FORMS: list[dict[str, bool]] = [{}, {"flatten": False}, {"legacy": True}, {"legacy": True, "flatten": False}]


def test_f4_state_dicts(put: Put, tmp_path: Any) -> None:
    want = TensorDict({"u": 4, "v": {"w": 5, "x": {"y": 6}}})
    td = put(want)
    assert list(td.state_dict()) == ["u", "v.w", "v.x.y"]
    for form in FORMS:
        torch.save(td.state_dict(**form), tmp_path / "s.pt")
        state = torch.load(tmp_path / "s.pt", weights_only=True)
        td.zero_()
        td.load_state_dict(state)
        assert td.to_tensordict().to_dict() == want.to_dict()
        fresh = TensorDict()
        fresh.load_state_dict(state, strict=False)
        assert fresh.to_dict() == want.to_dict()
