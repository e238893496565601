"""Nested keys, and the file-name codec: injective, reversible, safe, and the peer's where that is safe."""

from __future__ import annotations

import pickle
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tdstore import NestedKey
from tdstore.keys import (
    MAX_NAME_BYTES,
    decode_file_name,
    encode_file_name,
    encode_names,
    fold,
    is_hashed,
    join,
    unravel,
)

# Text that is likely to collide or to be special, mixed with any text.
TRICKY = st.text(st.sampled_from(list("aAbB%25EF./\\~ :é\u0301eſsßSİıiK\u212a") + ["\0", "\x7f", "\n"]), max_size=8)
SPECIAL = st.sampled_from(
    ["", ".", "..", "...", "%", "%%", "~", "CON", "nul", "aux.x", "COM1", "meta.json", "META.JSON", "tdstore.json"]
    + ["x.memmap", "x.MEMMAP", ".memmap", "tdstore.", "tdstore", "%2E", "~a", "a.", "a ", "lpt9.", "COM¹", "meta.jsonx"]
)
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
KEYS = SPECIAL | TRICKY | ANY
LONG = st.text(st.characters(exclude_categories=["Cs"]), min_size=60, max_size=400)


class Shout(str):
    def __str__(self):
        return "LOUD"


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a", ("a",)),
        ("", ("",)),
        ("a.b/c", ("a.b/c",)),
        (("a", "b"), ("a", "b")),
        ((("a",), ("b", ("c", ()))), ("a", "b", "c")),
        ((), ()),
        (((),), ()),
        (Shout("red"), ("red",)),
        (("x", Shout("red")), ("x", "red")),
    ],
)
def test_unravel(key, path):
    assert unravel(key) == path
    assert all(type(part) is str for part in unravel(key))


@pytest.mark.parametrize("key", [1, None, ["a"], b"a", ("a", 1), ("a", ("b", None)), ("a", ["b"])])
def test_unravel_refuses(key):
    with pytest.raises(TypeError, match="a key is a string or a \\(nested\\) tuple of strings, not"):
        unravel(key)


def test_unravel_names_the_part_and_the_whole():
    with pytest.raises(TypeError, match=r"not 3 of type int in \('a', \('b', 3\)\)"):
        unravel(("a", ("b", 3)))


def test_unravel_deep():
    key = "a"
    for _ in range(100_000):
        key = (key,)
    assert unravel(key) == ("a",)
    while type(key) is tuple:  # taken apart by hand: freeing it at once would recurse in C
        (key,) = key


def test_join():
    assert join(("a",), ".") == "a"
    assert join(("a", "b", ""), ".") == "a.b."
    assert join((), "/") == ""


# -- the codec ------------------------------------------------------------------------------
PEER = {
    "a": "a",
    "a/b": "a%2Fb",
    "sp ace": "sp%20ace",
    "é%": "é%25",
    "": "%",
    ".": "%2E",
    "..": "%2E%2E",
    '<>:"|?*\\': "%3C%3E%3A%22%7C%3F%2A%5C",
    "\0\x1f\x7f": "%00%1F%7F",
    "a.b": "a.b",
    ".hidden": ".hidden",
    "next_obs-1": "next_obs-1",
    "日本": "日本",
}


@pytest.mark.parametrize(("key", "name"), PEER.items())
@pytest.mark.parametrize("portable", [True, False])
def test_the_peers_names(key, name, portable):
    assert encode_file_name(key, portable=portable) == name
    assert decode_file_name(name) == key


OURS = {
    "~x": ("%7Ex", "%7Ex"),
    "a~": ("a~", "a~"),
    "a.": ("a%2E", "a."),
    "...": ("..%2E", "..."),
    "a ": ("a%20", "a%20"),
    "CON": ("%43ON", "CON"),
    "nul.txt": ("%6Eul.txt", "nul.txt"),
    "aux": ("%61ux", "aux"),
    "COM¹": ("%43OM¹", "COM¹"),
    "conx": ("conx", "conx"),
    "meta.json": ("%6Deta.json", "%6Deta.json"),
    "Meta.JSON.tmp": ("%4Deta.JSON.tmp", "%4Deta.JSON.tmp"),
    "tdstore.lock": ("%74dstore.lock", "%74dstore.lock"),
    "tdstore": ("tdstore", "tdstore"),
    "x.memmap": ("x.memmap", "x.memmap"),
}


@pytest.mark.parametrize(("key", "names"), OURS.items())
def test_names_that_differ_from_the_peers(key, names):
    assert (encode_file_name(key), encode_file_name(key, portable=False)) == names
    assert {decode_file_name(name) for name in names} == {key}


def test_a_group_never_looks_like_a_leaf_file():
    assert encode_file_name("x.memmap", group=True) == "x%2Ememmap"
    assert encode_file_name("x.MemMap", group=True) == "x%2EMemMap"
    assert decode_file_name("x%2EMemMap") == "x.MemMap"


@pytest.mark.parametrize("key", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(key):
    with pytest.raises(ValueError, match="lone surrogate") as error:
        encode_file_name(key)
    assert repr(key) in str(error.value)
    with pytest.raises(ValueError, match="lone surrogate"):
        encode_names([key])
    with pytest.raises(ValueError, match="lone surrogate"):
        decode_file_name(key)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "not a file name"),
        ("a/b", "not a file name"),
        ("a\0", "not a file name"),
        ("a%", "does not begin an escape"),
        ("%zz", "does not begin an escape"),
        ("%2f", "does not begin an escape"),
        ("%%", "does not begin an escape"),
        ("%FF", "not UTF-8"),
        ("~abc", "hash of a long key"),
    ],
)
def test_decode_refuses(name, message):
    with pytest.raises(ValueError, match=message):
        decode_file_name(name)


def test_long_keys():
    assert encode_file_name("a" * 200) == "a" * 200
    name = encode_file_name("a" * 201)
    assert is_hashed(name) and len(name) == 33 and name == fold(name)
    assert encode_file_name("é" * 100) == "é" * 100
    assert is_hashed(encode_file_name("é" * 101))
    assert is_hashed(encode_file_name(" " * 67))
    assert encode_file_name("~" + "a" * 150).startswith("%7E")
    assert len({encode_file_name("a" * n) for n in range(195, 260)}) == 65


def safe(name, group, portable):
    assert name not in ("", ".", "..")
    assert len(name.encode()) <= MAX_NAME_BYTES
    assert not set(name) & set('/<>:"|?*\\ \x7f' + "".join(map(chr, range(32))))
    lower = name.casefold()
    assert not lower.startswith(("meta.json", "tdstore."))
    if group:
        assert not lower.endswith(".memmap")
    if portable:
        assert not name.endswith(".")
        stem = lower.split(".")[0]
        assert stem not in {"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in "0123456789¹²³")}


@given(KEYS | LONG, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
@example("%", False, True)
@example("%2E", False, True)
@example("~" + "a" * 32, False, True)
def test_reversible_and_safe(key, group, portable):
    name = encode_file_name(key, group=group, portable=portable)
    safe(name, group, portable)
    if is_hashed(name):
        assert len(key.encode()) * 3 > MAX_NAME_BYTES
    else:
        assert decode_file_name(name) == key


@given(st.lists(KEYS | LONG, unique=True, max_size=12), st.randoms(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_injective_within_a_folder(keys, rng, portable):
    groups = {key for key in keys if rng.random() < 0.5}
    files = []
    for key in keys:
        name = encode_file_name(key, group=key in groups, portable=portable)
        files.append(name if key in groups else f"{name}.memmap")
    assert len(set(files)) == len(keys)


@given(st.lists(KEYS | LONG, unique=True, max_size=12), st.randoms(), st.booleans())
@settings(max_examples=100, deadline=None)
@example(["Ss", "ss", "ß", "SS", "sS", "ſs"], None, True)
@example(["é", "e\u0301", "É", "E\u0301"], None, True)
@example(["CON", "con", "Con"], None, True)
@example(["a" * 190 + "A", "a" * 191], None, True)
@example(["İ", "i\u0307", "I\u0307"], None, False)
def test_siblings_stay_apart_where_case_is_ignored(keys, rng, portable):
    groups = {key for key in keys if rng is not None and rng.random() < 0.5}
    names = encode_names(keys, groups=groups, portable=portable)
    assert list(names) == keys
    assert len({fold(name) for name in names.values()}) == len(keys)
    for key, name in names.items():
        safe(name, key in groups, portable)
        assert is_hashed(name) or decode_file_name(name) == key
    plain = {key: encode_file_name(key, group=key in groups, portable=portable) for key in keys}
    if len({fold(name) for name in plain.values()}) == len(keys):
        assert names == plain


def test_colliding_siblings_by_name():
    assert encode_names(["obs", "Obs", "OBS", "x"]) == {"obs": "obs", "Obs": "%4Fbs", "OBS": "%4F%42%53", "x": "x"}
    assert encode_names(["Obs", "obs"]) == {"Obs": "Obs", "obs": "%6F%62%73"}
    assert encode_names(["a", "a"]) == {"a": "a"}
    assert encode_names(["A/B"], taken=["a%2Fb"]) == {"A/B": "%41%2F%42"}


def test_names_taken_already_are_left_alone():
    assert encode_names(["A"], taken=["a"]) == {"A": "%41"}
    with pytest.raises(ValueError, match="no free file name for the key 'a'"):
        encode_names(["a"], taken=["a", "%61"])


def test_ordinary_keys_are_plain():
    for key in ("observation", "next", "reward_1", "a-b", string.ascii_letters, "x.y.z"):
        assert encode_file_name(key) == key == encode_file_name(key, group=True)


def test_a_key_is_an_instance_of_nested_key():
    """torchrl's losses ask so whether an argument is one key or several."""
    keys = ["a", "", ("a",), ("a", ("b", "c")), Shout("red")]
    assert all(isinstance(key, NestedKey) for key in keys)
    others = [(), ["a"], 1, None, ("a", 1), (["a"],), ("a", ()), b"a", slice(1), ...]
    assert not any(isinstance(other, NestedKey) for other in others)
    assert isinstance(1, (NestedKey, int)) and isinstance("a", NestedKey | None)
    assert pickle.loads(pickle.dumps(list[NestedKey])) == list[NestedKey]
