"""Random sequences of operations, on every kind of container and on the peer's TensorDict: they never drift apart."""

from __future__ import annotations

import os
import uuid
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tdstore
from tdstore.errors import UnsupportedError
from tests.differential.oracle import Raised, describe, differences

from .containers import KINDS, Place

ROWS, COLUMNS = 4, 2
EXAMPLES = int(os.environ.get("TDSTORE_MACHINE_EXAMPLES", 12))
NAMES = ["a", "b", "deep", "é/x", "z"]
KEYS = st.sampled_from([*NAMES, ("n", "a"), ("n", "b"), ("n", "m", "a")])
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.uint8, torch.float64])
FEATURES = st.sampled_from([(), (3,), (2, 1)])
INDICES = st.one_of(
    st.integers(-ROWS, ROWS - 1),
    st.slices(ROWS).filter(lambda s: s.step is None or s.step > 0),
    st.lists(st.integers(0, ROWS - 1), max_size=5, unique=True),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(torch.tensor),
    st.tuples(st.just(slice(None)), st.integers(0, COLUMNS - 1)),
    st.tuples(st.integers(0, ROWS - 1), st.slices(COLUMNS).filter(lambda s: s.step is None or s.step > 0)),
)
numbers = st.integers(0, 1000)


def tensor(start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    n = int(np.prod(shape))
    return (torch.arange(start, start + n) % 97).reshape(shape).to(dtype)


def plain(td: Any) -> dict[str, Any]:
    """Batch size, and the entries by key, whichever order they are in."""
    found = {str(k): describe(v) for k, v in sorted(td.items(True, True), key=lambda kv: str(kv[0]))}
    return {"batch_size": tuple(td.batch_size), **found}


class Machine(RuleBasedStateMachine):
    """The same steps on both; `kind`, `folder` and `server` come from the test."""

    kind: str
    folder: Any
    server: Any

    @initialize(start=numbers)
    def begin(self, start: int) -> None:
        data = {
            "a": tensor(start, torch.float32, (ROWS, COLUMNS, 3)),
            "n": {"b": tensor(start, torch.int64, (ROWS, COLUMNS))},
        }
        self.theirs = tensordict.TensorDict(data, [ROWS, COLUMNS])
        ours = tdstore.TensorDict(data, [ROWS, COLUMNS]).clone()
        self.place: Place = KINDS[self.kind](ours, self.folder, self.server)
        self.ours = self.place.td
        self.ours.unlock_()

    def both(self, step: Any) -> None:
        """Take a step on both sides; they refuse it together or not at all."""
        results = []
        for td in (self.theirs, self.ours):
            try:
                results.append(step(td))
            except Exception as error:
                results.append(Raised.of(error, forgive=td is self.theirs))
        want, got = results
        assert isinstance(want, Raised) == isinstance(got, Raised), f"{want!r} there, {got!r} here"

    def leaves(self) -> list[Any]:
        return list(self.theirs.keys(True, True))

    @rule(key=KEYS, start=numbers, dtype=DTYPES, features=FEATURES)
    def set(self, key: Any, start: int, dtype: torch.dtype, features: tuple[int, ...]) -> None:
        if isinstance(key, tuple) and any(
            isinstance(self.theirs.get(key[:i]), torch.Tensor) for i in range(1, len(key))
        ):
            return
        value = tensor(start, dtype, (ROWS, COLUMNS, *features))
        if self.kind == "window" and (stored := self.place.root.get(key, None)) is not None:
            self.set_rows_of(stored, key, value)
        else:
            self.both(lambda td: td.set(key, value.clone()))

    def set_rows_of(self, stored: torch.Tensor, key: Any, value: torch.Tensor) -> None:
        """The rows outside of a window stay: it casts to their dtype, and takes no other shape."""
        if stored.shape[2:] != value.shape[2:]:
            before = self.place.root.get(key)
            with pytest.raises(UnsupportedError, match="rows outside of the window"):
                self.ours.set(key, value)
            assert self.place.root.get(key).equal(before)
        else:
            self.ours.set(key, value.clone())
            self.theirs.set(key, value.to(stored.dtype))

    @precondition(lambda self: self.leaves())
    @rule(data=st.data(), start=numbers)
    def set_in_place(self, data: Any, start: int) -> None:
        key = data.draw(st.sampled_from(self.leaves()))
        old = self.theirs.get(key)
        self.both(lambda td: td.set_(key, tensor(start, old.dtype, tuple(old.shape))))

    @precondition(lambda self: self.leaves())
    @rule(data=st.data(), index=INDICES, start=numbers)
    def set_at(self, data: Any, index: Any, start: int) -> None:
        key = data.draw(st.sampled_from(self.leaves()))
        old = self.theirs.get(key)
        value = tensor(start, old.dtype, tuple(old[index].shape))
        self.both(lambda td: td.set_at_(key, value, index))

    @precondition(lambda self: self.leaves())
    @rule(index=INDICES, start=numbers)
    def write_rows(self, index: Any, start: int) -> None:
        rows = {k: tensor(start, v.dtype, tuple(v[index].shape)) for k, v in self.theirs.items(True, True)}
        batch = torch.empty(ROWS, COLUMNS)[index].shape
        for td, module in ((self.theirs, tensordict), (self.ours, tdstore)):
            value = module.TensorDict({}, batch)
            for key, part in rows.items():
                value.set(key, part)
            td[index] = value

    @precondition(lambda self: self.leaves())
    @rule(index=INDICES)
    def read_rows(self, index: Any) -> None:
        want, got = self.theirs[index], self.ours[index]
        if self.kind.startswith("lazy") and 0 in want.batch_size:
            return  # a stack without elements has no keys
        assert not list(differences(plain(want), plain(got)))

    @precondition(lambda self: len(self.leaves()) > 1)
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.leaves()))
        self.both(lambda td: td.del_(key))

    @precondition(lambda self: self.leaves() and self.kind != "window")  # which refuses
    @rule(data=st.data(), new=st.sampled_from(NAMES))
    def rename(self, data: Any, new: str) -> None:
        key = data.draw(st.sampled_from(self.leaves()))
        new_key = (*key[:-1], new) if isinstance(key, tuple) else new
        self.both(lambda td: td.rename_key_(key, new_key))

    @rule(name=st.sampled_from(["add_", "mul_", "zero_", "clamp_max_"]))
    def maths(self, name: str) -> None:
        if any(v.dtype in (torch.bool, torch.uint8) for v in self.theirs.values(True, True)):
            return
        number = () if name == "zero_" else (2,)
        self.both(lambda td: getattr(td, name)(*number))

    @precondition(lambda self: self.leaves())
    @rule(start=numbers)
    def update(self, start: int) -> None:
        values = {k: tensor(start, v.dtype, tuple(v.shape)) for k, v in self.theirs.items(True, True)}
        for td, module in ((self.theirs, tensordict), (self.ours, tdstore)):
            value = module.TensorDict({}, [ROWS, COLUMNS])
            for key, part in values.items():
                value.set(key, part)
            td.update_(value)

    @rule(key=KEYS, bad=st.sampled_from([(ROWS + 1, COLUMNS), (ROWS,), ()]))
    def set_what_does_not_fit(self, key: Any, bad: tuple[int, ...]) -> None:
        self.both(lambda td: td.set(key, torch.zeros(bad)))

    @precondition(lambda self: self.kind != "window")  # what it shows is its own, and ends with it
    @rule()
    def close_and_open(self) -> None:
        if isinstance(self.ours, tdstore.PersistentTensorDict):
            location = self.ours.filename
            self.ours.close()
            self.ours = tdstore.open(location, "r+")

    @invariant()
    def same(self) -> None:
        found = list(differences(plain(self.theirs), plain(self.ours)))
        assert not found, "\n".join(found[:6])

    def teardown(self) -> None:
        if isinstance(getattr(self, "ours", None), tdstore.PersistentTensorDict):
            self.ours.close()


@pytest.mark.parametrize("kind", KINDS)
def test_never_drifts_from_the_peer(kind: str, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("redis") if kind == "redis" else None
    machine = type(f"Machine{uuid.uuid4().hex}", (Machine,), {"kind": kind, "folder": tmp_path, "server": server})
    steps = settings(
        max_examples=EXAMPLES,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=steps)
