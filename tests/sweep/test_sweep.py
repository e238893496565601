"""A small part of the sweep: calls that read are alike on every container in memory."""

from __future__ import annotations

import pytest

from .calls import CALLS
from .containers import ON_CUDA
from .documented import DOCUMENTED, PAGE, documented
from .running import ALL, calls_of, compare

READS = [call for call in CALLS["access"] if call.startswith(("td.get(", "td[", "list(td.")) and "is_leaf" not in call]


@pytest.mark.parametrize("place", ["memory", "locked", "shared", "params", "class"])
def test_reads_are_alike(place: str) -> None:
    found = {call: compare(call, place) for call in READS}
    assert not {call: lines for call, (kind, lines) in found.items() if kind == "differs"}
    assert sum(kind == "alike" for kind, _ in found.values()) > 0.9 * len(READS)


def test_what_differs_is_documented_on_the_page() -> None:
    assert not [row.words for row in DOCUMENTED if row.words not in PAGE]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", ALL)
@pytest.mark.parametrize("place", ON_CUDA)
def test_calls_on_a_gpu(place: str, group: str) -> None:
    """Every call, not reads only, as on the CPU it is by hand: devices are part of each outcome."""
    calls = calls_of(group, place)
    found = {call: compare(call, place) for call in calls}
    differing = {call: lines[:4] for call, (kind, lines) in found.items() if kind == "differs"}
    left = {call: lines for call, lines in differing.items() if documented(call, place, lines) is None}
    assert not left, "\n".join(f"{call}: {line}" for call, lines in left.items() for line in lines)
    assert sum(kind == "alike" for kind, _ in found.values()) > 0.5 * len(calls)
