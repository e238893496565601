"""What is not a tensor, as JSON: the forms, the codecs of users, and what is refused."""

from __future__ import annotations

import datetime
import enum
import json
import math
import pathlib
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import Codec, NonTensorData, TensorDict
from tdstore.container.varlen.columns import COLUMN_FROM
from tdstore.errors import UntrustedDataError
from tdstore.registry import registry
from tdstore.values import decode_value, encode_value

PARIS = zoneinfo.ZoneInfo("Europe/Paris")
AT = datetime.datetime(2026, 10, 25, 2, 30, 0, 5)
PLAIN: list[Any] = [
    None,
    True,
    -(2**80),
    1.5,
    math.inf,
    1 + 2j,
    "ä\0b",
    b"\xff\0",
    bytearray(b"ab"),
    (1, ("a",)),
    [1, [2]],
    {1, 2},
    frozenset("ab"),
    {"$tuple": 1, 2: {"k": (3,)}},
    range(1, 9, 2),
    slice(None, 3, -1),
    Decimal("1.10"),
    uuid.UUID(int=7),
    pathlib.Path("a/b"),
    pathlib.PureWindowsPath("c:/x"),
    pathlib.PurePosixPath("/x"),
    AT,
    AT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    AT.replace(tzinfo=PARIS, fold=1),
    AT.date(),
    AT.time(),
    datetime.timedelta(-1, 5, 7),
    np.float32(0.1),
    np.datetime64("2026-11-21"),
    np.str_("text"),
    torch.bfloat16,
    torch.Size([1, 2]),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    made = decode_value(json.loads(json.dumps(encode_value({"v": [value]}))))["v"][0]
    assert type(made) is type(value)
    assert made == value
    if isinstance(value, datetime.datetime):
        assert (made.utcoffset(), made.fold) == (value.utcoffset(), value.fold)


def test_arrays_and_tensors_in_values() -> None:
    arrays = [np.arange(6, dtype=">i2").reshape(2, 3), np.array(["a", "bc"]), np.zeros((0, 2)), np.array(True)]
    for array in arrays:
        made = decode_value(json.loads(json.dumps(encode_value(array))))
        assert (made.dtype, made.shape, made.tolist()) == (array.dtype, array.shape, array.tolist())
        assert made.flags.writeable
    for tensor in (torch.arange(6).reshape(2, 3).T, torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 3)):
        made = decode_value(json.loads(json.dumps(encode_value(tensor))))
        assert made.dtype == tensor.dtype
        assert torch.equal(made, tensor)


@pytest.mark.parametrize(
    "form",
    [
        {"$datetime": "yesterday"},
        {"$datetime": ["2026-01-01T00:00", "../../etc/passwd", 0]},
        {"$ndarray": ["O", [1], "AAAA"]},
        {"$ndarray": ["<i8", [9], "AAAA"]},
        {"$tensor": ["float32", [1 << 40], "AAAA"]},
        {"$tensor": ["float32"]},
        {"$uuid": "x"},
        {"$decimal": "x"},
        {"$path": 3},
        {"$codec": ["x", 1]},
        {"$codec": 1},
        {"$timedelta": [1e99]},
        {"$int": "9" * 5000},
        {"$int": 7},
        {"$set": [{"$int": str(((1 << 61) - 1) * i)} for i in range(65)]},
        {"$ndarray": ["f8,f8", [1], "AAAA"]},
    ],
    ids=str,
)
def test_malformed_forms_are_refused(form: Any) -> None:
    with pytest.raises(ValueError, match=r"malformed|unknown tagged"):
        decode_value(form)


def test_what_nobody_could_read_back_is_not_written() -> None:
    colliding = [((1 << 61) - 1) * i for i in range(65)]
    for value in (set(colliding), frozenset(colliding), dict.fromkeys(colliding), 10**5000, -(10**4300)):
        with pytest.raises(ValueError, match=r"same hash|digits"):
            encode_value([value])


def test_ordinary_sets_of_large_numbers_are_kept() -> None:
    """Powers of two have few different hashes."""
    for value in ({2**i for i in range(3000)}, {2.0**i for i in range(-1000, 1000)}, {-(10**4299)}):
        assert decode_value(json.loads(json.dumps(encode_value(value)))) == value


def test_a_malformed_value_deep_inside_says_so_once() -> None:
    form: Any = {"$int": "x"}
    for _ in range(50):
        form = {"$tuple": [form]}
    with pytest.raises(ValueError, match=r"'\$int' is malformed") as caught:
        decode_value(form)
    assert str(caught.value).count("malformed") == 1


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.fixture
def codecs() -> Any:
    tdstore.register_codec(
        Codec(
            name="fraction", kind=Fraction, encode=lambda f: (f.numerator, f.denominator), decode=lambda v: Fraction(*v)
        )
    )
    assert tdstore.register_enum(Colour, name="colour") is Colour
    yield
    for name in ("fraction", "enum:colour"):
        registry().unregister_codec(name)


@pytest.mark.parametrize("rows", [4, COLUMN_FROM + 1])
@pytest.mark.parametrize("name", ["d", "d.h5"])
def test_codecs_are_asked_for_values_per_row_and_within_values(
    codecs: Any, tmp_path: Any, rows: int, name: str
) -> None:
    td = TensorDict({"x": torch.zeros(rows)}, [rows])
    td["f"] = [Fraction(i, 3) for i in range(rows)]
    td["c"] = NonTensorData({"colours": [Colour.RED, (Fraction(1, 2),)]})
    td.save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, mode="r+") as saved:
        assert saved["f"] == [Fraction(i, 3) for i in range(rows)]
        assert saved["c"] == {"colours": [Colour.RED, (Fraction(1, 2),)]}
        saved[1] = {"f": Colour.BLUE}
    with tdstore.open(tmp_path / name) as saved:
        assert saved[1]["f"] is Colour.BLUE
    for codec in ("fraction", "enum:colour"):
        registry().unregister_codec(codec)
    # Values in the header of what is resident are taken out when it is opened, and the others when asked for.
    for key in "fc":
        with pytest.raises(UntrustedDataError, match=r"'[fc]'(?s:.*)register_codec"):
            with tdstore.open(tmp_path / name) as saved:
                saved[key]


def test_two_enums_cannot_have_one_name(codecs: Any) -> None:
    class Other(enum.Enum):
        RED = 1

    with pytest.raises(ValueError, match="colour"):
        tdstore.register_enum(Other, name="colour")
    with pytest.raises(TypeError, match="Other"):
        encode_value(Other.RED)


def test_what_has_no_form_is_named() -> None:
    for value in (object(), len, Colour.RED, AT.replace(tzinfo=_Zone()), np.array([object()])):
        with pytest.raises(TypeError, match="cannot be stored"):
            encode_value([{"k": value}])


class _Zone(datetime.tzinfo):
    """A time zone that nobody knows."""
