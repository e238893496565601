"""Catalogues that name all that is there are believed at once; any other is completed, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tdstore.container.storage.handle import _complete, _whole
from tdstore.errors import CorruptStoreError
from tdstore.header import Group
from tdstore.types import LeafSpec, Path

SIZES = [(), (3,), (3, 2), (4,), None]


def catalogue(draw: random.Random) -> tuple[dict[Path, Group], dict[Path, LeafSpec]]:
    """Return groups and leaves of which some contradict each other, and some lack something."""
    batch = draw.choice(SIZES[:3])
    specs: dict[Path, LeafSpec] = {}
    groups: dict[Path, Any] = {(): (batch, [])}
    for at in [("a",), ("b",), ("n",), ("n", "a"), ("n", "m"), ("n", "m", "c")]:
        if at[:-1] not in groups or draw.random() < 0.2:
            continue
        groups[at[:-1]][1].append(at[-1])
        own = groups[at[:-1]][0] or ()
        size = own if draw.random() < 0.9 else draw.choice(SIZES[:4])
        if at[-1] in "nm":
            groups[at] = ((*size, 2) if draw.random() < 0.3 else size if draw.random() < 0.9 else None), []
        else:
            specs[at] = LeafSpec((*size, 5), "float32")
    kinds: dict[Path, Group] = {}
    for path, (size, keys) in groups.items():
        if draw.random() < 0.05:
            keys.append(draw.choice("abnx"))  # once more, or nothing
        if draw.random() < 0.05 and keys:
            keys.pop()
        kind = "LazyStackedTensorDict" if draw.random() < 0.05 else "TensorDict"
        values = {"v": {"data": 1}} if draw.random() < 0.05 else {}
        kinds[path] = Group(batch_size=size, keys=(*keys, *values), values=values, kind=kind)
    if draw.random() < 0.03:
        specs[("n",)] = LeafSpec((3,), "float32")
    if draw.random() < 0.03:
        kinds.pop(())
    return kinds, specs


def test_what_is_believed_is_what_completing_gives() -> None:
    draw, believed, others = random.Random(0), 0, 0
    for _ in range(4000):
        groups, specs = catalogue(draw)
        whole = _whole(groups, specs)
        if whole is None:
            others += 1
            continue
        believed += 1
        completed, values = _complete(dict(groups), specs, "?")
        assert (completed, list(completed), values) == (whole, list(whole), {}), (groups, specs)
    assert believed > 800 and others > 800


@pytest.mark.parametrize(
    ("groups", "specs", "match"),
    [
        ({(): Group(batch_size=(3,), keys=("a",))}, {}, "its data is missing"),
        ({(): Group(batch_size=(3,), keys=("a",))}, {("a",): LeafSpec((4,), "uint8")}, "batch size"),
        (
            {(): Group(batch_size=(3,), keys=("n",)), ("n",): Group(batch_size=(4,))},
            {},
            "does not start with that of its parent",
        ),
        (
            {(): Group(batch_size=(), keys=("n",)), ("n",): Group(batch_size=())},
            {("n",): LeafSpec((4,), "uint8")},
            "is a leaf and a group",
        ),
    ],
)
def test_what_contradicts_the_data_is_refused(groups: Any, specs: Any, match: str) -> None:
    assert _whole(groups, specs) is None
    with pytest.raises(CorruptStoreError, match=match):
        _complete(groups, specs, "?")
