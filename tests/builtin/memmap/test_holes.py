"""Leaves with holes: room is taken for what is written, no less and little more, and a full disk is an error."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.errors import StoreClosedError, StoreIOError
from tdstore.storekit import pages
from tdstore.storekit.pages import HOLES, Holes, reserve
from tests.builtin.memmap.support import in_child, small_disk

ON_DISK = True  # where a read of a hole takes no page
ROWS, WIDTH = 4096, 512  # 8 MiB of float32, on a disk of 4


# -- which bytes -----------------------------------------------------------------------------
def _index(rng: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    terms: list[Any] = []
    for n in shape[: rng.randint(0, len(shape))]:
        start, stop = sorted((rng.randint(0, n), rng.randint(0, n)))
        terms.append(
            rng.choice(
                [
                    rng.randint(-n, n - 1),
                    slice(start, stop, rng.randint(1, 3)),
                    torch.randint(-n, n, (rng.randint(0, 4),)),
                    torch.randint(0, n, (2, 1)),
                    torch.rand(n) > 0.5,
                    slice(None),
                ]
            )
        )
        if rng.random() < 0.1:
            terms.append(rng.choice([None, True]))
    if rng.random() < 0.1:
        terms = [torch.rand(shape[:2]) > 0.7]
    return tuple(terms)


def _transformed(rng: random.Random, tensor: Tensor) -> Tensor:
    return rng.choice(
        [
            lambda t: t,
            lambda t: t,
            lambda t: t.transpose(0, 1),
            lambda t: t[1:, ::2],
            lambda t: t[:, :, 1],
            lambda t: t.reshape(-1, t.shape[-1]),
            lambda t: t.view(torch.uint8),
        ]
    )(tensor)


def test_every_byte_that_is_written_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CHUNK", 8)
    rng = random.Random(0)
    torch.manual_seed(0)
    partial = 0
    for _ in range(1500):
        shape = (rng.randint(2, 9), rng.randint(2, 6), rng.randint(2, 5))
        whole = torch.zeros(shape, dtype=torch.int16)
        taken = torch.zeros(whole.nbytes, dtype=torch.bool)
        owner = Holes(whole.nbytes, lambda start, stop, taken=taken: taken[start:stop].fill_(True))  # type: ignore[misc]
        owner.guard(whole)
        target = _transformed(rng, whole)
        terms = _index(rng, tuple(target.shape))
        try:
            target.clone()[terms] = -1
        except IndexError:  # masks and tensors that do not go together
            continue
        reserve(target, terms)
        target[terms] = -1
        written = whole.view(-1).view(torch.uint8) != 0
        assert bool(taken[written].all()), (shape, terms)
        partial += bool(not taken.all())
    assert partial > 300, "it reserved everything, always"
    address = whole.untyped_storage().data_ptr()
    del owner
    assert address not in HOLES


def test_no_more_room_than_rows_need() -> None:
    """A row of a huge leaf, scattered rows, a column: not the whole leaf."""
    whole = torch.zeros(1000, 64 << 10, dtype=torch.uint8)
    asked: list[tuple[int, int]] = []
    owner = Holes(whole.nbytes, lambda start, stop: asked.append((start, stop)))
    owner.guard(whole)
    reserve(whole[7])
    reserve(whole, (torch.tensor([3, -1, 3, 4]),))
    assert asked == [(7 * pages.CHUNK, 8 * pages.CHUNK), (3 * pages.CHUNK, 4 * pages.CHUNK), *_chunks(4, 999)]
    asked.clear()
    reserve(whole[7])
    reserve(whole[5, :100])
    assert asked == _chunks(5)
    asked.clear()
    reserve(whole)
    assert sum(stop - start for start, stop in asked) == whole.nbytes - 5 * pages.CHUNK
    assert whole.untyped_storage().data_ptr() not in HOLES, "full, and still asked about"


def _chunks(*numbers: int) -> list[tuple[int, int]]:
    return [(n * pages.CHUNK, (n + 1) * pages.CHUNK) for n in numbers]


def test_what_takes_no_room_stays_known() -> None:
    """An allocation that fails is tried again the next time."""
    whole = torch.zeros(1000, 4096, dtype=torch.uint8)
    calls = 0

    def refuse(start: int, stop: int) -> None:
        nonlocal calls
        calls += 1
        raise StoreIOError("full")

    owner = Holes(whole.nbytes, refuse)
    owner.guard(whole)
    for _ in range(2):
        with pytest.raises(StoreIOError):
            reserve(whole, (slice(3, 5),))
    assert calls == 2 and owner.left


# -- which writes ----------------------------------------------------------------------------
@pytest.fixture
def tiny_disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "tiny", 4) as disk:
        yield disk


def _new(location: FsPath) -> Any:
    schema = {"first": ((), "float32"), ("n", "big"): ((WIDTH,), "float32")}
    td = TensorDict.from_schema(
        schema, batch_size=[ROWS], location=location, storage="memmap", preallocate=False, durable="none"
    )
    td[:4] = td[:4].clone().zero_() + 7
    return td


def _like(td: Any, n: int = ROWS) -> Any:
    return TensorDict({"first": torch.ones(n), "n": {"big": torch.ones(n, WIDTH)}}, [n])


def _every_row(td: Any) -> None:
    row = _like(td, 1)[0]
    for i in range(ROWS):
        td[i] = row


def _check_untouched(location: FsPath) -> None:
    """Read from the files: on a tmpfs reading a hole through a mapping takes a page, too."""
    for name in ("first", "n/big"):
        data = np.fromfile(location / f"{name}.memmap", np.float32).reshape(ROWS, -1)
        assert (data[:4] == 7).all() and not data[4:].any(), f"half of it was written: {name}"


MANY_WRITES = ("a few rows at a time", "single rows")
MANY = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
WRITES: dict[str, Callable[[Any], object]] = {
    "slice": lambda td: td.__setitem__(slice(4, ROWS), _like(td, ROWS - 4)),
    "strided": lambda td: td.__setitem__(slice(5, None, 2), _like(td, ROWS // 2 - 2)),
    "a few rows at a time": lambda td: [td.__setitem__(slice(i, i + 8), _like(td, 8)) for i in range(8, ROWS, 8)],
    "rows": lambda td: td.__setitem__(MANY, _like(td)),
    "a list of rows": lambda td: td.__setitem__(list(range(4, ROWS)), _like(td, ROWS - 4)),
    "mask": lambda td: td.__setitem__(torch.ones(ROWS, dtype=torch.bool), 1.0),
    "number": lambda td: td.__setitem__(slice(None), 1.0),
    "update_": lambda td: td.update_(_like(td)),
    "update_ by dict": lambda td: td.update_({("n", "big"): torch.ones(ROWS, WIDTH)}),
    "update": lambda td: td.update(_like(td), inplace=True),
    "update_at_": lambda td: td.update_at_(_like(td), MANY),
    "set_": lambda td: td.set_(("n", "big"), torch.ones(ROWS, WIDTH)),
    "set inplace": lambda td: td.set(("n", "big"), torch.ones(ROWS, WIDTH), inplace=True),
    "set_at_": lambda td: td.set_at_(("n", "big"), 1.0, (slice(None), slice(0, 8))),
    "fill_": lambda td: td.fill_(("n", "big"), 1.0),
    "fill_ group": lambda td: td.fill_("n", 1.0),
    "zero_": lambda td: td.zero_(),
    "add_": lambda td: td.add_(1),
    "imul": lambda td: td.__imul__(2),
    "apply_": lambda td: td.apply_(lambda t: t.add_(1)),
    "masked_fill_": lambda td: td.masked_fill_(torch.ones(ROWS, dtype=torch.bool), 1.0),
    "view": lambda td: td[4:].update_(_like(td, ROWS - 4)),
    "reshaped": lambda td: td.view(2, -1).add_(1),
    "rows of a view": lambda td: td[4:].__setitem__(torch.arange(ROWS - 4), _like(td, ROWS - 4)),
    "another container": lambda td: TensorDict({"x": td["n", "big"]}, [ROWS]).zero_(),
    "slot of a view": lambda td: td[4:]["n"].set("big", torch.ones(ROWS - 4, WIDTH), inplace=True),
    "read out": lambda td: _like(td).read(out=td),
    "read rows out": lambda td: _like(td).read(MANY, out=td),
    "stack out": lambda td: TensorDict.stack([_like(td, 1)[0]] * ROWS, out=td),
    "where out": lambda td: _like(td).where(torch.ones(ROWS, dtype=torch.bool), 2.0, out=td),
    "single rows": _every_row,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_is_an_error_and_not_a_signal(tiny_disk: FsPath, name: str) -> None:
    location = tiny_disk / "d"

    def body() -> None:
        td = _new(location)
        try:
            WRITES[name](td)
        except StoreIOError as error:
            assert error.errno == 28 and str(location) in str(error) and "big" in str(error), error
            if name not in MANY_WRITES:
                _check_untouched(location)
            td.close()
            return
        raise AssertionError("8 MiB went on a disk of 4")

    assert in_child(body) == 0
    with TensorDict.load(location, verify="full") as td:
        assert td.batch_size == (ROWS,)
        if name not in MANY_WRITES:
            _check_untouched(location)


def test_h5_read_into_holes(tiny_disk: FsPath, tmp_path: FsPath) -> None:
    def body() -> None:
        td = _new(tiny_disk / "d")
        saved = _like(td).save(tmp_path / "source.h5")
        with pytest.raises(StoreIOError, match="big"):
            saved.read(out=td)

    assert in_child(body) == 0


def test_files_with_holes_that_are_opened(tiny_disk: FsPath) -> None:
    """Also by another store of the same process, and through a view that outlives its TensorDict."""

    def body() -> None:
        _new(tiny_disk / "d").close()
        with TensorDict.load(tiny_disk / "d", mode="r+") as td, pytest.raises(StoreIOError, match="big"):
            td.add_(1)
        view = TensorDict.load(tiny_disk / "d", mode="r+")[4:]
        gc.collect()
        with pytest.raises(StoreIOError, match="big"):
            view.add_(1)

    assert in_child(body) == 0


def test_ones_over_a_full_disk(tiny_disk: FsPath) -> None:
    from tdstore import MemoryMappedTensor

    def body() -> None:
        with pytest.raises(StoreIOError):
            MemoryMappedTensor.ones(ROWS, WIDTH, filename=tiny_disk / "x")

    assert in_child(body) == 0
    assert list(tiny_disk.iterdir()) == []


def test_space_is_taken_as_it_is_needed(tmp_path: FsPath) -> None:
    """Allocating a terabyte takes none of it, and a row takes a row."""
    template = TensorDict({"a": torch.zeros(1, 1 << 20, dtype=torch.uint8)}, [1]).expand(1 << 20)
    td = template.memmap_like(tmp_path / "d")
    store = td._binding[0].store
    before = store.nbytes_stored()
    assert before < 1 << 16
    td.set_at_("a", 1, (123456, slice(0, 10)))
    td[[5, 1 << 19]] = TensorDict({"a": torch.ones(2, 1 << 20, dtype=torch.uint8)}, [2])
    assert store.nbytes_stored() - before <= (3 << 20) + 8 * pages.CHUNK
    assert td["a"][5].all() and td["a"][123456, :11].tolist() == [1] * 10 + [0]
    address = td["a"].untyped_storage().data_ptr()
    assert address in HOLES
    td.close()
    assert address not in HOLES


def test_after_a_later_save_there_is_nothing_to_write_to(tmp_path: FsPath) -> None:
    td = _new(tmp_path / "d")
    _like(td).save(tmp_path / "d").close()
    with pytest.raises(StoreClosedError, match="replaced"):
        td.add_(1)
    assert bool((TensorDict.load(tmp_path / "d")["first"] == 1).all())
