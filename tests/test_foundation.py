"""Errors, dtypes, specs, plain values and headers: the words that every layer speaks."""

from __future__ import annotations

import copy
import math
import pickle

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdstore import errors
from tdstore.dtypes import (
    NAME_TO_DTYPE,
    as_dtype,
    dtype_name,
    from_numpy,
    is_bit_pattern,
    numpy_dtype,
    to_numpy,
)
from tdstore.errors import CorruptStoreError, DirtyStoreError, KeyNotFoundError, StoreIOError, TDStoreError
from tdstore.header import Group, Header, decode_header, encode_header, header_from_builtins, header_to_builtins
from tdstore.testing import same, sample
from tdstore.types import LeafSpec, path_text
from tdstore.values import MAX_DEPTH, decode_value, encode_value

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TDStoreError)]


# -- errors ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ERRORS)
def test_error_says_what_and_what_to_do(kind):
    error = kind("it broke", hint="mend it")
    assert str(error) == "it broke\nHint: mend it"
    assert str(kind("it broke")) == "it broke"
    assert (error.message, error.hint) == ("it broke", "mend it")


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("copier", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_error_travels_between_processes(kind, copier):
    error = kind("it broke", hint="mend it")
    twin = copier(error)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_error_keeps_its_details():
    dirty = pickle.loads(pickle.dumps(DirtyStoreError("x", leaves=(("a", "b"),), url="u")))
    assert (dirty.leaves, dirty.url) == ((("a", "b"),), "u")
    assert pickle.loads(pickle.dumps(StoreIOError("x", errno=28))).errno == 28


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (errors.KeyNotFoundError, KeyError),
        (errors.StoreNotFoundError, FileNotFoundError),
        (errors.ReadOnlyError, PermissionError),
        (errors.MissingDependencyError, ImportError),
        (errors.BatchSizeError, RuntimeError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.TransientError, OSError),
    ],
)
def test_error_is_what_others_already_catch(kind, caught):
    with pytest.raises(caught):
        raise kind("x")


def test_message_of_a_key_error_is_not_quoted():
    assert str(KeyNotFoundError("no leaf 'a'")) == "no leaf 'a'"


# -- dtypes ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAME_TO_DTYPE)
def test_dtype_names(name):
    dtype = NAME_TO_DTYPE[name]
    assert dtype_name(dtype) == name
    assert as_dtype(name) is as_dtype(f"torch.{name}") is as_dtype(dtype) is dtype
    assert numpy_dtype(dtype).itemsize == dtype.itemsize
    if not is_bit_pattern(dtype):
        assert as_dtype(np.dtype(name)) is as_dtype(np.dtype(name).newbyteorder(">")) is dtype


@pytest.mark.parametrize("name", NAME_TO_DTYPE)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
def test_numpy_round_trip(name, shape):
    value = sample(name, shape)
    array = to_numpy(value)
    assert array.dtype == numpy_dtype(value.dtype)
    assert same(from_numpy(array, value.dtype), value)
    if value.numel():
        assert array.__array_interface__["data"][0] == value.data_ptr(), "to_numpy copied"


def test_from_numpy_of_foreign_memory():
    big_endian = np.arange(3, dtype=">i4")
    assert from_numpy(big_endian, torch.int32).tolist() == [0, 1, 2]
    read_only = np.frombuffer(b"\x01\x02", np.uint8)
    tensor = from_numpy(read_only, torch.uint8)
    tensor[0] = 9
    assert bytes(read_only) == b"\x01\x02"


def test_to_numpy_resolves():
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert to_numpy(value.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert to_numpy(value.conj().imag).tolist() == [-2, 4]
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize("bad", ["flaot32", "object", object, str, None, 3, np.dtype("U3"), np.dtype("M8[s]")])
def test_what_is_no_dtype(bad):
    with pytest.raises(TypeError):
        as_dtype(bad)


def test_near_dtype_is_suggested():
    with pytest.raises(TypeError, match="did you mean 'float32'"):
        as_dtype("flaot32")
    with pytest.raises(TypeError, match="cannot be stored"):
        dtype_name(torch.qint8)
    assert as_dtype(float) is torch.get_default_dtype()
    assert as_dtype(bool) is torch.bool
    assert as_dtype("long") is torch.int64


# -- specs and paths ---------------------------------------------------------------------------
def test_leaf_spec():
    spec = LeafSpec([2, 3], "bfloat16", fill_value=1, chunks=(1, 3))
    assert (spec.shape, spec.numel, spec.nbytes) == ((2, 3), 6, 12)
    assert spec == LeafSpec((2, 3), torch.bfloat16)
    assert hash(spec) == hash(LeafSpec((2, 3), torch.bfloat16))
    assert spec != LeafSpec((2, 3), "float16")
    assert spec != (2, 3)
    assert repr(spec) == "LeafSpec((2, 3), 'bfloat16', fill_value=1, chunks=(1, 3))"
    assert repr(LeafSpec((2,), "float32", fill_value=-0.0)) == "LeafSpec((2,), 'float32', fill_value=-0.0)"
    assert repr(LeafSpec((2,), "bool", fill_value=False)) == "LeafSpec((2,), 'bool')"
    longer = spec.replace(shape=(9, 3))
    assert (longer.shape, longer.fill_value, longer.options) == ((9, 3), 1, {"chunks": (1, 3)})
    assert LeafSpec((), "int8").nbytes == 1
    with pytest.raises(ValueError, match="negative"):
        LeafSpec((2, -1), "int8")


def test_leaf_spec_travels():
    spec = pickle.loads(pickle.dumps(LeafSpec((2,), "float8_e5m2", fill_value=3, chunks=1)))
    assert (spec, spec.fill_value, spec.options) == (LeafSpec((2,), "float8_e5m2"), 3, {"chunks": 1})


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_path_text_is_unambiguous(a, b):
    assert (path_text(tuple(a)) == path_text(tuple(b))) == (a == b)


# -- plain values --------------------------------------------------------------------------------
text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    text,
    st.binary(),
    st.complex_numbers(),
    st.sampled_from(list(NAME_TO_DTYPE.values())),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)]),
    st.lists(st.integers(0, 9)).map(torch.Size),
    st.sampled_from(
        [np.float32(1.5), np.int8(-3), np.bool_(True), np.float64("nan"), np.datetime64("2020-01-01", "s")]
    ),
)
hashable = st.one_of(st.none(), st.booleans(), st.integers(), text, st.binary(), st.tuples(st.integers(), text))
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(text, inner),
        st.dictionaries(st.one_of(hashable, st.just("$tuple")), inner),
        st.sets(hashable),
        st.frozensets(hashable),
    ),
    max_leaves=12,
)


def alike(a, b) -> bool:
    """Equal, of the same types all the way down, with NaN equal to itself and 0.0 unlike -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return alike(list(a), list(b)) and alike(list(a.values()), list(b.values()))
    return bool(a == b)


@given(plain)
@settings(max_examples=100)
def test_values_round_trip_through_json(value):
    data = msgspec.json.decode(msgspec.json.encode(encode_value(value)))
    assert alike(decode_value(data), value)


TAGS = "$tuple $dict $numpy $size $dtype $device $int $float $bytes $set $frozenset $complex $unknown".split()
json_forms = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text),
    lambda inner: st.lists(inner) | st.dictionaries(text | st.sampled_from(TAGS), inner),
    max_leaves=10,
)


@given(json_forms)
@settings(max_examples=100)
def test_decoding_anything_gives_a_value_or_a_value_error(data):
    try:
        decode_value(data)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        {"$numpy": ["|O", ""]},
        {"$numpy": ["O", "AAAAAAAAAAA="]},
        {"$numpy": ["(2,)i4", "AAAAAAAAAAA="]},
        {"$numpy": [["i4"], "AAAA"]},
        {"$numpy": ["<i4", ""]},
        {"$numpy": 3},
        {"$dtype": "os.system"},
        {"$device": "nowhere"},
        {"$float": "1.5"},
        {"$int": "zz"},
        {"$bytes": "***"},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$set": [[1]]},
        {"$size": ["a"]},
        {"$complex": [1]},
        {"$import": "os"},
    ],
    ids=str,
)
def test_malformed_values_are_refused(data):
    with pytest.raises(ValueError):
        decode_value(data)


class Unknown:
    pass


class Text(str):
    pass


@pytest.mark.parametrize("value", [Unknown(), Text("x"), [Unknown()], {"a": (Unknown(),)}, print])
def test_what_is_not_plain_is_refused_by_name(value):
    with pytest.raises(TypeError, match="cannot be stored as data"):
        encode_value(value)


def test_values_depth_and_surrogates():
    deep: list = []
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    with pytest.raises(ValueError, match="levels deep"):
        encode_value(deep)
    with pytest.raises(ValueError, match="levels deep"):
        decode_value(deep)
    with pytest.raises(ValueError, match="surrogate"):
        encode_value({"a": "\ud800"})
    with pytest.raises(ValueError, match="surrogate"):
        encode_value({"\ud800": 1})


# -- headers ---------------------------------------------------------------------------------------
names = st.lists(st.integers(0, 9), max_size=3).flatmap(
    lambda size: st.tuples(st.just(tuple(size)), st.none() | st.tuples(*[st.none() | text] * len(size)))
)


@st.composite
def groups(draw) -> Group:
    size, labels = draw(names)
    return Group(
        batch_size=size,
        names=labels,
        device=draw(st.sampled_from([None, "cpu", "cuda:0"])),
        kind=draw(text),
        keys=tuple(draw(st.lists(text, max_size=3))),
        values={k: encode_value(v) for k, v in draw(st.dictionaries(text, plain, max_size=2)).items()},
        extra=draw(st.dictionaries(text, st.integers(-5, 5), max_size=2)),
    )


@st.composite
def headers(draw) -> Header:
    made = {(): draw(groups())}
    for _ in range(draw(st.integers(0, 4))):
        made[(*draw(st.sampled_from(sorted(made))), draw(text))] = draw(groups())
    return Header(made)


@given(headers())
def test_header_round_trip(header):
    back = decode_header(encode_header(header))
    assert list(back.groups) == list(header.groups)
    assert back == header
    assert header_from_builtins(header_to_builtins(header)) == header
    assert back


def test_header_that_was_never_saved():
    assert not Header()
    assert not decode_header(encode_header(Header()))


BAD_HEADERS = {
    "no json": b"{",
    "empty": b"",
    "not utf-8": b'{"format": 1, "groups": [[["\xff"], {}]]}',
    "no format": b'{"groups": []}',
    "newer format": b'{"format": 2, "groups": []}',
    "list": b"[]",
    "null": b"null",
    "groups are an object": b'{"format": 1, "groups": {}}',
    "path is a string": b'{"format": 1, "groups": [["a", {}]]}',
    "path of numbers": b'{"format": 1, "groups": [[[1], {}]]}',
    "twice": b'{"format": 1, "groups": [[[], {}], [[], {}]]}',
    "orphan": b'{"format": 1, "groups": [[[], {}], [["a", "b"], {}]]}',
    "no root": b'{"format": 1, "groups": [[["a"], {}]]}',
    "negative batch": b'{"format": 1, "groups": [[[], {"batch_size": [-1]}]]}',
    "batch of text": b'{"format": 1, "groups": [[[], {"batch_size": ["3"]}]]}',
    "huge batch": b'{"format": 1, "groups": [[[], {"batch_size": [1e400]}]]}',
    "names too many": b'{"format": 1, "groups": [[[], {"batch_size": [1], "names": ["a", "b"]}]]}',
    "names without batch": b'{"format": 1, "groups": [[[], {"names": ["a"]}]]}',
    "deep json": b'{"format": 1, "groups": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header_is_refused_with_its_place(case):
    with pytest.raises(CorruptStoreError) as caught:
        decode_header(BAD_HEADERS[case], url="here.h5")
    assert "here.h5" in str(caught.value)
    assert caught.value.url == "here.h5"


def test_header_too_deep():
    deep = Header({tuple("a" * d): Group() for d in range(300)})
    with pytest.raises(CorruptStoreError, match="levels deep"):
        decode_header(encode_header(deep))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_corrupt(data):
    try:
        decode_header(data)
    except CorruptStoreError:
        pass


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner) | st.dictionaries(text | st.sampled_from(["batch_size", "names", "values"]), inner),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.lists(text, max_size=2), json_like), max_size=3) | json_like)
def test_any_document_is_a_header_or_corrupt(body):
    try:
        header_from_builtins({"format": 1, "groups": msgspec.json.decode(msgspec.json.encode(body))})
    except CorruptStoreError:
        pass
