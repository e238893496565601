"""The kit's tests of a TensorDict over the store: it does what a TensorDict in memory does, and commits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdstore
from tdstore.errors import StoreError, TDStoreError, UnsupportedError
from tdstore.store import Cap
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.testing.comparing import check_equal, check_names, check_same, error_name, failure, raises
from tdstore.testing.samples import sample
from tdstore.testing.setup import Location, StoreSetup, numbers
from tdstore.types import path_text

Change = Callable[[TensorDictBase], object]


def _grow(td: TensorDictBase) -> None:
    td.append(_rows(5, 2))


def _replace(td: TensorDictBase) -> None:
    td["obs"] = numbers(len(td), 2).short()
    td["next", "done"] = torch.ones(len(td), dtype=torch.int64)


def _write(td: TensorDictBase) -> None:
    td[1:3] = _rows(2, 3)
    td[torch.tensor([7, 0])] = _rows(2, 4)


def _restructure(td: TensorDictBase) -> None:
    td["new", "deep", "leaf"] = numbers(len(td), 2)
    td.rename_key_("text", "words")
    td.rename_key_(("next", "obs"), "obs")
    td["words"] = [f"new {i}" for i in range(len(td))]
    del td["next", "done"]


CHANGES: dict[str, Change] = {
    "write": _write,
    "astype_": lambda td: td.astype_({"obs": torch.float64, ("next", "done"): torch.int16}),
    "permute_features_": lambda td: td.permute_features_({"obs": (1, 0), ("next", "obs"): (2, 0, 1)}),
    "restructure": _restructure,
    "replace": _replace,
    "append": _grow,
}
"""Changes of a TensorDict, by name."""


def _rows(count: int, seed: int) -> TensorDict:
    """Return rows of all kinds: dense, nested, of another dtype, and strings."""
    td = TensorDict({}, batch_size=[count])
    # Small whole numbers: each dtype holds them, so that a cast keeps them.
    td["obs"] = numbers(count, 3, 4, start=seed * 1000)
    td["next", "obs"] = sample("bfloat16", (count, 2, 3, 1), seed)
    td["next", "done"] = sample("bool", (count,), seed)
    td["text"] = [f"{seed}: {'x' * i}" for i in range(count)]
    return td


class ContainerTests(StoreSetup):
    """Tests that a TensorDict over the store does what one in memory does, and that a transaction is one commit."""

    def stored(self, location: Location) -> tuple[TensorDictBase, TensorDict]:
        """Save rows, and return the TensorDict over the store, open for writing, and the same rows in memory."""
        backend = self.declaration()
        if "<" in backend.opener:
            pytest.skip("the opener cannot be imported by its name; see test_opener_is_importable")
        td = _rows(9, 1).save(location, storage=backend, **self.options)
        if Cap.PERSISTENT in self.caps:
            td.close()
            td = tdstore.open(location, mode="r+", storage=backend, **self.options)
        td.unlock_()  # live tensors that were just saved are locked
        self._stack.callback(td.close)
        return td, _rows(9, 1)

    def check_stored(self, location: Location, td: TensorDictBase, want: TensorDict, what: str) -> None:
        """Check a TensorDict over the store, and what the next opener finds after `close`."""
        __tracebackhide__ = True
        check_container(td, want, what)
        if Cap.PERSISTENT in self.caps:
            td.close()
            with tdstore.open(location, storage=self.declaration(), **self.options) as again:
                check_container(again, want, f"{what}, opened again")

    @pytest.mark.parametrize("change", CHANGES)
    def test_container(self, location: Location, change: str) -> None:
        """Check that a change of a TensorDict over the store gives what it gives in memory, and stays after `close`."""
        self.needs(Cap.WRITE, *([Cap.RESIZE] if change == "append" else []))
        td, want = self.stored(location)
        check_container(td, want, "a TensorDict over the store")
        what = f"a TensorDict over the store after {change}"
        CHANGES[change](want)
        try:
            CHANGES[change](td)
        except TDStoreError as error:
            raise failure(f"{what}: {error_name(type(error))}: {error}") from error
        self.check_stored(location, td, want, what)

    def test_transaction(self, location: Location) -> None:
        """Check that all changes of a transaction are committed at its end, and none where its block raises."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        td, want = self.stored(location)
        if self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):
            with raises(UnsupportedError, doing="a transaction where others see rows at once"), td.transaction():
                pass
            return
        what = "after a transaction that raised in its block"
        with raises(ZeroDivisionError, doing="a transaction whose block raises"), td.transaction():
            self._change_all(td)
            self._check_unseen(location, want)
            1 / 0  # noqa: B018
        check_container(td, want, what)
        with td.transaction():
            self._change_all(td)
        self._change_all(want)
        self.check_stored(location, td, want, "after a transaction")

    def _change_all(self, td: TensorDictBase) -> None:
        for name, change in CHANGES.items():
            if name not in ("replace", "append"):
                change(td)
        if Cap.RESIZE in self.caps:
            td.append(td[:2].to_tensordict())

    def _check_unseen(self, location: Location, want: TensorDict) -> None:
        """Check that another opener finds the last commit, or a refusal."""
        if Cap.PERSISTENT not in self.caps:
            return
        what = "opened while a transaction is open"
        try:
            with tdstore.open(location, storage=self.declaration(), **self.options, **self.at_once()) as other:
                check_container(other, want, what)
        except StoreError as error:
            check_names(error, location, what)


def check_container(got: TensorDictBase, want: TensorDict, what: str) -> None:
    """Fail with the first entry that differs, or with the keys that are missing.

    Args:
        got: a TensorDict over a store.
        want: the same entries in memory.
        what: the operation, for the message.
    """
    __tracebackhide__ = True
    check_equal(got.batch_size, want.batch_size, f"{what}: the batch size")
    keys = _keys(want)
    check_equal(_keys(got), keys, f"{what}: the keys")
    for path in keys:
        value: Any = want.get(path)
        entry: Any = got.get(path)
        if isinstance(value, torch.Tensor):
            check_same(entry.cpu(), value, f"{what}: {path_text(path)}")
        else:
            check_equal(list(entry), list(value), f"{what}: {path_text(path)}")


def _keys(td: TensorDictBase) -> list[tuple[str, ...]]:
    found = td.keys(include_nested=True, leaves_only=True)
    return sorted((key,) if isinstance(key, str) else key for key in found)
