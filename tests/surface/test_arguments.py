"""Arguments that change what a method returns: `inplace=`, `out=`, and a few that only users of the peer know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdstore import TensorDict, lazy_stack
from tdstore.errors import LockedError, UnsupportedError

from .containers import floats, mixed

IN_PLACE: dict[str, tuple[Any, ...]] = {
    "flatten": (),
    "unflatten": (0, (2, 2)),
    "gather": (0, torch.zeros(2, 2, dtype=torch.int64)),
    "roll": (1, 0),
    "repeat": (2, 1),
    "repeat_interleave": (2, 0),
    "pad": ([1, 1],),
    "contiguous": (),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_it_is_the_same_object(name: str) -> None:
    want = getattr(floats(), name)(*IN_PLACE[name])
    td = floats()
    nested = td["n"]
    assert getattr(td, name)(*IN_PLACE[name], inplace=True) is td
    assert td["n"] is nested
    assert td.batch_size == nested.batch_size == want.batch_size
    assert (td == want).all()
    with pytest.raises(LockedError):
        getattr(floats().lock_(), name)(*IN_PLACE[name], inplace=True)


def test_in_place_on_a_stack_and_on_stored_data(tmp_path: Any) -> None:
    stack = lazy_stack(list(floats().unbind(0)))
    assert stack.roll(1, 0, inplace=True) is stack
    assert (stack == floats().roll(1, 0)).all()
    with floats().to_h5(tmp_path / "x.h5") as stored:
        with pytest.raises(UnsupportedError, match="stays where it is stored"):
            stored.roll(1, 0, inplace=True)
        assert (stored == floats()).all()


def test_canonical_strides() -> None:
    odd = torch.zeros(1, 9).as_strided((1, 3), (7, 1))
    td = TensorDict(x=odd)
    assert td.contiguous()["x"].stride() == (7, 1)
    assert td.contiguous(canonical=True)["x"].stride() == (3, 1)


def test_results_into_what_is_there() -> None:
    td, other = floats(), floats(start=3)
    for fn in (
        lambda out: td.clamp(0.1, 0.2, out=out),
        lambda out: td.norm(out=out),
        lambda out: td.logsumexp(0, out=out),
        lambda out: td.where(torch.ones(4, 2, dtype=torch.bool), other, out=out if out is None else out.lock_()),
    ):
        want = fn(None)
        out = want.clone().zero_()
        leaf = out["n", "c"]
        assert fn(out) is out
        assert (out == want).all()
        assert out["n", "c"] is leaf


def test_a_batch_size_that_is_taken_over() -> None:
    out = TensorDict(floats().to_dict())
    assert out.batch_size == ()
    floats().where(torch.zeros(4, 2, dtype=torch.bool), 1.0, out=out, update_batch_size=True)
    assert out.batch_size == (4, 2)
    assert (out == 1).all()


def test_nested_batch_sizes_that_may_stay() -> None:
    td = TensorDict(n=TensorDict(x=torch.zeros(4, 2, 3), batch_size=[4, 2]), batch_size=[])
    assert td.clone().auto_batch_size_(1, keep_compliant_size=True)["n"].batch_size == (4, 2)
    assert td.clone().auto_batch_size_(1)["n"].batch_size == (4,)


def test_running_extremes_of_all_leaves() -> None:
    td = TensorDict(a=torch.tensor([1.0, 3.0, 2.0]), b=torch.tensor([0.0, 5.0, 4.0]), batch_size=[3])
    strung = torch.cat([td["a"], td["b"]])
    assert torch.equal(td.cummax(0, reduce=True).values, strung.cummax(0).values)
    assert torch.equal(td.cummin(0, reduce=True, return_indices=False), strung.cummin(0).values)
    with pytest.raises(RuntimeError, match="one shape"):
        floats().cummax(0, reduce=True)


def test_values_belong_to_rows() -> None:
    td = TensorDict(x=torch.zeros(3), s=["a", "b", "c"], t="one", batch_size=[3])
    assert list(td.new_zeros(5).keys()) == ["x", "t"]
    assert list(td.apply(lambda x: x[:2], batch_size=[2]).keys()) == ["x", "t"]


def test_what_a_store_does_not_hear_of(tmp_path: Any) -> None:
    """Copies of stored data with other names or entries leave the store as it is."""
    with mixed().save(tmp_path / "x.h5") as stored:
        renamed = stored.rename("x", "y")
        assert renamed.names == renamed["n"].names == ["x", "y"]
        replaced = stored.replace(a=torch.ones(4, 2, 3))
        assert replaced["a"].sum() == 24
        assert stored.names == stored["n"].names == [None, None]
        assert torch.equal(stored["a"], mixed()["a"])
        assert list(stored.select(("n", "c"), "b").keys()) == ["n", "b"]
        assert stored.depth == 1


@pytest.mark.parametrize("name", ["x", "x.h5", "x.zarr", "x.tdz"])
def test_what_a_schema_makes_is_closed_by_with(name: str, tmp_path: Any) -> None:
    with TensorDict.from_schema({"x": ((3,), "float32")}, batch_size=[4], location=tmp_path / name) as td:
        td[1] = {"x": torch.ones(3)}
    with TensorDict.load(tmp_path / name) as stored:
        assert stored["x"].sum(1).tolist() == [0, 3, 0, 0]
