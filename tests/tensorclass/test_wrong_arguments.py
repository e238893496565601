"""Arguments that no object of a class can take: an error of ours that names the argument, and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorClass, TensorDict, make_tensordict
from tdstore.errors import InvalidTypeError, TDStoreError


class Noted(TensorClass):
    x: torch.Tensor
    note: str = "none"


CALLS: dict[str, tuple[Callable[[Any, Any], Any], type[TDStoreError], str]] = {
    "update": (lambda p, bad: p.update(bad), InvalidTypeError, "the entries of an update must be a TensorDict"),
    "replace": (lambda p, bad: p.replace(bad), InvalidTypeError, "the entries of an update must be a TensorDict"),
    "values beside a TensorDict": (
        lambda p, bad: Noted.from_tensordict(TensorDict({"x": torch.ones(3)}, [3]), bad),
        InvalidTypeError,
        "non_tensordict must be a dict",
    ),
    "entries of a new TensorDict": (lambda p, bad: make_tensordict(bad), InvalidTypeError, "a dict or a TensorDict"),
}


@pytest.mark.parametrize("bad", ["text", 3, object(), [1], torch.ones(3)], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument_and_nothing_changes(name: str, bad: Any) -> None:
    call, kind, text = CALLS[name]
    point = Noted(x=torch.ones(3), note="text", batch_size=[3])
    with pytest.raises(kind, match=text):
        call(point, bad)
    assert point.x.tolist() == [1, 1, 1]
    assert point.note == "text"
