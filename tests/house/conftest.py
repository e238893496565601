"""What the tests of the house share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.house.sources import forget


@pytest.fixture(scope="package", autouse=True)
def parsed() -> Iterator[None]:
    """Keep what was parsed for these tests only."""
    yield
    forget()
