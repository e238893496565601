"""Tests that must fail, with words that a class of them names in `must_fail`: the kit on wrong stores."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import pytest


def words_of(item: pytest.Item) -> Mapping[str, str] | None:
    """Of a test of a wrong store, the words of each case."""
    found: Mapping[str, str] | None = getattr(getattr(item, "cls", None), "must_fail", None)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that a wrong store may pass."""
    dropped = [item for item in items if (words := words_of(item)) is not None and item.name not in words]
    if dropped:
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Let a test of a wrong store pass if it fails with the words of its case."""
    words = words_of(item)
    if words is None:
        return (yield)
    try:
        yield
    except AssertionError as error:
        assert words[item.name] in str(error), f"the message does not say {words[item.name]!r}, but: {error}"
        return None
    except BaseException as error:
        pytest.fail(f"an author would see {type(error).__name__}: {error}")
    pytest.fail(f"{item.name} did not notice that {item.cls.__name__.removeprefix('Test')} is wrong")
