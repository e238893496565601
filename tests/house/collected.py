"""A plugin for `pytest --collect-only -p tests.house.collected`: say of each test what it uses, as one line of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest


def uses(session: pytest.Session) -> list[dict[str, Any]]:
    """Return what each test of a session uses."""
    return [
        {
            "id": item.nodeid,
            "file": item.path.relative_to(session.config.rootpath).as_posix(),
            "marks": sorted({mark.name for mark in item.iter_markers()}),
            "fixtures": sorted(getattr(item, "fixturenames", ())),
        }
        for item in session.items
    ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print a line that begins with COLLECTED."""
    print("COLLECTED" + json.dumps(uses(session)))
