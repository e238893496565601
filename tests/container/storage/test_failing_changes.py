"""A change of entries that the medium refuses in its middle: the container and what is reopened are as before.

Each change is made over and over, and the medium refuses the first call of a store, then the second, until one change
goes through. Then every call before it has failed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import over
from tdstore.container.varlen.nested_leaves import leaf_below
from tdstore.errors import TransientError
from tdstore.header import Header
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.wrappers import WrappedStore
from tdstore.types import LeafSpec, Read, Write
from tdstore.types import Path as Path_

CHANGES: dict[str, Callable[[Any], Any]] = {
    "replace by another dtype": lambda td: td.set("b", torch.ones(4, dtype=torch.float64)),
    "replace by another shape": lambda td: td.set("b", torch.ones(4, 3)),
    "new entry": lambda td: td.set("new", torch.ones(4)),
    "new nested entry": lambda td: td.set(("n", "m", "x"), torch.ones(4)),
    "leaf by a group": lambda td: td.set("b", TensorDict({"x": torch.ones(4)}, [4])),
    "group by a leaf": lambda td: td.set("n", torch.ones(4)),
    "update of many": lambda td: td.update({"a": torch.ones(4, 7), "new": torch.ones(4), "n": {"c": torch.ones(4)}}),
    "strings": lambda td: td.set("s", [f"{i} is a rather long line of text" * 9 for i in range(4)]),
    "delete": lambda td: td.pop("b"),
    "delete a group": lambda td: td.pop("n"),
    "rename": lambda td: td.rename_key_("b", "moved"),
    "rename over another": lambda td: td.rename_key_("b", "a"),
    "append": lambda td: td.append({"a": torch.ones(2), "b": 1, "n": {"c": 1.0}, "s": "one more", "r": torch.ones(3)}),
    "shrink": lambda td: td.resize_(2),
}


def entries() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(8.0).view(4, 2),
            "b": torch.arange(4),
            "n": {"c": torch.zeros(4)},
            "s": ["one", "two", "three", "four"],
            "r": torch.nested.nested_tensor([torch.ones(n) for n in (2, 0, 3, 1)], layout=torch.jagged),
        },
        [4],
    )


class Refusing(WrappedStore):
    """Refuses one call that changes something: before it, or after its first half."""

    def __init__(self, inner: Any, refused: int, halfway: bool) -> None:
        super().__init__(inner)
        self.left, self.halfway, self.armed = refused, halfway, True

    def before_call(self, method: str, count: int) -> None:
        if self.armed and method in ("create", "write", "delete", "rename", "resize", "save_header"):
            self.left -= 1
            if self.left == 0:
                raise TransientError(f"{method}: the medium refuses", url=self.url)

    def write(self, writes: Any) -> None:
        if self.armed and self.left == 1 and self.halfway:
            self.left = 0
            self.inner.write(writes[: len(writes) // 2])
            raise TransientError("write: the medium refuses", url=self.url)
        super().write(writes)


def snapshot(td: Any) -> dict[str, Any]:
    return td.to_dict()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and a.is_nested:
        return (
            isinstance(b, torch.Tensor)
            and b.is_nested
            and same(dict(enumerate(a.unbind())), dict(enumerate(b.unbind())))
        )
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


BACKENDS = ["h5", "zarr", "file://", "memory://"]
DISCARDING = {
    "h5",
    "zarr",
    "file://",
    "memory://",
    "redis",
}


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.param
    if kind == "redis":
        server = request.getfixturevalue("redis")
        return f"{server.url}/changes-{tmp_path.name}"
    if "://" in kind:
        return f"{kind}{tmp_path}/data"
    return str(tmp_path / f"data.{kind}")


def refusing(td: Any, refused: int, halfway: bool) -> Refusing:
    """Put a store that refuses between a container and its own."""
    handle = td._handle
    inner = handle.store
    handle.store = Refusing(inner, refused, halfway)
    handle.store.uncommitted = inner.uncommitted
    return handle.store


@pytest.mark.parametrize("location", BACKENDS, indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_a_refused_change_is_not_there(change: str, location: str) -> None:
    for halfway in (False, True):
        for refused in range(1, 20):
            entries().save(location).close()
            td = tdstore.open(location, mode="r+")
            store = refusing(td, refused, halfway)
            store.armed = False
            td.set_at_("a", torch.full((2,), 7.0), 1)  # written before, and not committed
            before = snapshot(td)
            store.armed = True
            try:
                CHANGES[change](td)
            except TransientError:
                store.armed = False
                assert same(snapshot(td), before), f"call {refused} failed, and the container is another one"
                td.close()
                with tdstore.open(location) as again:
                    assert same(snapshot(again), before), f"call {refused} failed, and what is stored is another one"
                continue
            store.armed = False
            after = snapshot(td)
            td.close()
            with tdstore.open(location) as again:
                assert same(snapshot(again), after)
            break
        else:
            pytest.fail("the change never went through")
        assert refused > 1


class DirectStore(Store):
    """Whole leaves in a dict, changed at once: it cannot take anything back."""

    caps = Cap.WRITE | Cap.PERSISTENT

    def __init__(self, place: dict[str, Any]) -> None:
        self.url, self.writable, self.place = "direct://", True, place
        place.setdefault("leaves", {})
        place.setdefault("header", Header())

    def paths(self) -> Iterator[Path_]:
        return iter(list(self.place["leaves"]))

    def specs(self, paths: Sequence[Path_]) -> list[LeafSpec]:
        return [LeafSpec(t.shape, t.dtype) for t in map(self.place["leaves"].__getitem__, paths)]

    def load_header(self) -> Header:
        return self.place["header"]

    def save_header(self, header: Header) -> None:
        self.place["header"] = header

    def create(self, leaves: Mapping[Path_, LeafSpec]) -> None:
        self.place["leaves"] |= {p: torch.full(s.shape, s.fill_value, dtype=s.dtype) for p, s in leaves.items()}

    def read(self, reads: Sequence[Read]) -> list[torch.Tensor]:
        found = [self.place["leaves"][r.path] for r in reads]
        return [t.clone() if r.out is None else r.out.copy_(t) for r, t in zip(reads, found, strict=True)]

    def write(self, writes: Sequence[Write]) -> None:
        for w in writes:
            self.place["leaves"][w.path].copy_(w.value)

    def delete(self, paths: Sequence[Path_]) -> None:
        for path in paths:
            del self.place["leaves"][path]

    def close(self) -> None:
        pass


ADDING = (
    "replace by another dtype",
    "replace by another shape",
    "new entry",
    "new nested entry",
    "update of many",
    "strings",
)


@pytest.mark.parametrize("change", ADDING)
def test_a_store_without_a_way_back_gets_new_leaves_beside_the_old(change: str) -> None:
    backend = registry().get("memory")
    for halfway in (False, True):
        for refused in range(1, 20):
            place: dict[str, Any] = {}
            store = DirectStore(place)
            groups, specs = describe(entries())
            store.create(specs)
            store.write([Write(p, (), leaf_below(entries(), p)) for p in specs])
            store.save_header(Header(groups))
            td = over(StoreHandle(store, backend, None, "r+", {}))
            before, leaves = snapshot(td), set(place["leaves"])
            wrapped = refusing(td, refused, halfway)
            try:
                CHANGES[change](td)
            except TransientError as error:
                wrapped.armed = False
                if "rename" not in str(error) and "save_header" not in str(error):
                    assert same(snapshot(td), before)
                    assert set(place["leaves"]) == leaves
                    assert same(snapshot(over(StoreHandle(DirectStore(place), backend, None, "r+", {}))), before)
                continue
            assert not [p for p in place["leaves"] if "new-" in p[-1]]
            break
        else:
            pytest.fail("the change never went through")
