"""Headers and manifests that are changed at random, under valid checksums: only a `StoreError` comes out, and soon."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.header import decode_header, encode_header
from tdstore.storekit.documents import NAME, seal
from tests.faults.fault_media import body_of, look_at_everything

_TAGS = (
    "$tuple $bytes $size $dtype $device $complex $set $frozenset $bytearray $range $slice $decimal $uuid $path "
    "$posixpath $windowspath $datetime $date $time $timedelta $int $float $dict $numpy $ndarray $tensor $codec $new"
).split()
_NAMES = (
    "data stack dim ndim column refused hint codec unbatched attrs meta format groups batch_size names device kind "
    "keys values extra stack_dim count name LazyStackedTensorDict tensorclass:os.system path dtype shape fill crc"
).split()
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 5),
    st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 10**18]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "g", "b", "..", "/etc/passwd", "float32", "<f8", "AAAA", "cuda:99", "nan", "9" * 5000]),
    st.sampled_from(_NAMES),
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*_TAGS, *_NAMES, "a"]), inner, max_size=3),
        st.builds(lambda tag, body: {tag: body}, st.sampled_from(_TAGS), inner),
    ),
    max_leaves=8,
)
_BOUNDED = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += _places(value, (*at, key))
    return found


def _changed(draw: st.DrawFn, document: Any) -> Any:
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(_places(document)))
        parent = document
        for key in above:
            parent = parent[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
        if what == "replace":
            parent[last] = draw(_TREES)
        elif what == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        if not _places(document):
            break
    return document


changed = st.composite(_changed)


@pytest.fixture(scope="module", params=["memmap", "objects"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A location, its manifest, and what that says."""
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    location = f"file://{folder}" if request.param == "objects" else str(folder)
    td = TensorDict({"a": torch.arange(12.0).view(3, 4), "g": {"b": torch.ones(3)}}, [3])
    td["text"] = "hello"
    td["rows"] = tdstore.NonTensorStack("x", {"y": (1, {2})}, b"z")
    td["stack"] = tdstore.lazy_stack([TensorDict({"c": torch.ones(2)}, []) for _ in range(3)])
    td.save(location).close()
    file = folder / NAME
    return location, file, json.loads(body_of(file.read_bytes()))


def test_the_documents_are_whole(place: tuple[str, Path, Any]) -> None:
    location, file, document = place
    file.write_bytes(seal(json.dumps(document, separators=(",", ":")).encode()))
    assert look_at_everything(location).startswith("opened: a")


@_BOUNDED
@given(data=st.data())
def test_a_changed_manifest_opens_or_is_refused(place: tuple[str, Path, Any], data: st.DataObject) -> None:
    location, file, document = place
    file.write_bytes(seal(json.dumps(data.draw(changed(document)), separators=(",", ":")).encode()))
    try:
        look_at_everything(location)
    except CorruptStoreError as error:
        assert str(file.parent) in error.message
    except StoreError:
        pass  # an entry of a codec that nobody has, a stack that is ragged now


@_BOUNDED
@given(data=st.data())
def test_a_changed_header_is_decoded_or_refused(place: tuple[str, Path, Any], data: st.DataObject) -> None:
    header = json.dumps(data.draw(changed(place[2]["header"]))).encode()
    try:
        decoded = decode_header(header, url="here")
    except StoreError as error:
        assert "here" in error.message
    else:
        assert decode_header(encode_header(decoded), url="here") == decoded
