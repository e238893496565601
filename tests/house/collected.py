"""A plugin for `pytest --collect-only -p tests.house.collected`: say of each test what it uses, as one line of JSON."""

from __future__ import annotations

import json

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print a line that begins with COLLECTED."""
    items = [
        {
            "id": item.nodeid,
            "file": item.path.relative_to(session.config.rootpath).as_posix(),
            "marks": sorted({mark.name for mark in item.iter_markers()}),
            "fixtures": sorted(getattr(item, "fixturenames", ())),
        }
        for item in session.items
    ]
    print("COLLECTED" + json.dumps(items))
