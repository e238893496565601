"""A small part of the sweep: calls that read are alike on every container in memory."""

from __future__ import annotations

import pytest

from .calls import CALLS
from .documented import DOCUMENTED, PAGE
from .running import compare

READS = [call for call in CALLS["access"] if call.startswith(("td.get(", "td[", "list(td.")) and "is_leaf" not in call]


@pytest.mark.parametrize("place", ["memory", "locked", "shared", "params", "class"])
def test_reads_are_alike(place: str) -> None:
    found = {call: compare(call, place) for call in READS}
    assert not {call: lines for call, (kind, lines) in found.items() if kind == "differs"}
    assert sum(kind == "alike" for kind, _ in found.values()) > 0.9 * len(READS)


def test_what_differs_is_documented_on_the_page() -> None:
    assert not [row.words for row in DOCUMENTED if row.words not in PAGE]
