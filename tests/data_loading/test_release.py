"""What an error in an epoch leaves behind: nothing that only the cycle collector would free."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from tdstore import TensorDictBase
from tdstore.data import Epochs
from tests.data_loading.places import stored


def fail(batch: TensorDictBase) -> TensorDictBase:
    raise ZeroDivisionError("by 0")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("options", [{}, {"shuffle": "blocks", "block_rows": 4, "whole_blocks": True}])
def test_a_place_is_closed_after_an_error(options: dict[str, Any], prefetch: int, request: Any) -> None:
    """Its file would be open, and locked, until Python looks for cycles."""
    with stored("h5", 20, request) as (place, _):
        for transform, columns in ((fail, None), (None, ["none"])):
            epochs = Epochs(place, 4, prefetch=prefetch, transform=transform, columns=columns, **options)
            source = weakref.ref(epochs.source)
            gc.collect()
            gc.disable()
            try:
                try:
                    next(iter(epochs))
                except (ZeroDivisionError, KeyError) as error:
                    assert "while reading rows" in str(error) + "".join(getattr(error, "__notes__", ()))
                else:
                    pytest.fail("the epoch did not fail")
                del epochs
                for thread in threading.enumerate():
                    if thread.name.startswith("tdstore-data"):
                        thread.join()  # it may be in the middle of a batch that was read ahead
                assert source() is None
            finally:
                gc.enable()
