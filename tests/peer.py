"""The `tensordict` package beside which tests run: its version, and what that changes."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import pytest

tensordict = pytest.importorskip("tensordict", reason="the package that tests compare with")

VERSION = tuple(int(part) for part in re.findall(r"\d+", tensordict.__version__)[:2])
SINCE_15 = VERSION >= (0, 15)
"""Since then the peer has a compact `repr`, and does right what it did not."""
BEFORE_15 = not SINCE_15

if SINCE_15:
    tensordict.set_printoptions(compact=False).set()  # ours are long unless asked otherwise


def is_adopted(case: Any, listed: Container[Any]) -> bool:
    """Tell whether the peer does by now what ours does, in a case that is listed as adopted in 0.15."""
    return SINCE_15 and case in listed
