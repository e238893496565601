"""`is_bool` and its kin, and keys as tuples; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdstore
from tdstore import KEY_SEPARATOR, TensorDict, is_bool, is_floating, is_inexact, is_integer, unravel_key_to_tuple
from tdstore.errors import InvalidArgumentError

ALL = (is_bool, is_floating, is_inexact, is_integer)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bool, (True, False, False, False)),
        (torch.int8, (False, False, False, True)),
        (torch.uint16, (False, False, False, True)),
        (torch.float16, (False, True, True, False)),
        (torch.float8_e4m3fn, (False, True, True, False)),
        (torch.complex64, (False, False, True, False)),
    ],
)
def test_dtypes(dtype: torch.dtype, wanted: tuple[bool, ...]) -> None:
    value = torch.zeros(2).to(dtype)
    assert tuple(fn(value) for fn in ALL) == tuple(fn("key", value) for fn in ALL) == wanted


def test_what_is_no_tensor_is_none_of_them() -> None:
    td = TensorDict({"a": torch.ones(1), "b": torch.ones(1).int()})
    assert not any(fn(value) for fn in ALL for value in (1, 1.0, None, "a", td))
    for fn in ALL:
        assert not fn(torch.ones(1), 1)
        with pytest.raises(InvalidArgumentError, match="missing"):
            fn()
    made = td.named_apply(lambda key, value: value.double() if is_inexact(key, value) else value)
    assert made["a"].dtype == torch.float64 and made["b"].dtype == torch.int32


@pytest.mark.parametrize(
    ("key", "path"),
    [("a", ("a",)), (("a", ("b", ("c",))), ("a", "b", "c")), ("a.b", ("a.b",)), ("", ("",)), ((), ()), (3, ())]
    + [(("a", 3), ()), (None, ()), (["a"], ()), (("a", ()), ())],
)
def test_keys_as_tuples(key: Any, path: tuple[str, ...]) -> None:
    assert unravel_key_to_tuple(key) == path and tdstore.utils.unravel_key_to_tuple is unravel_key_to_tuple


def test_the_separator_is_the_default_one() -> None:
    assert list(TensorDict({"a": {"b": torch.ones(1)}}).flatten_keys().keys()) == [f"a{KEY_SEPARATOR}b"]
