"""Headers that somebody made to hurt, under valid checksums: an error of ours, in little time and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import StoreError

from .fault_media import (
    MEDIA,
    in_child,
    location_of,
    look_at_everything,
    put_document,
    with_groups,
    with_header,
)

ON_DISK = True  # files with large holes
MEMORY = 1 << 30
"""What a child may take beside what it starts with."""

Change = Callable[[bytes], bytes]


def _chain(depth: int) -> bytes:
    return json.dumps({"format": 1, "groups": [[["x"] * n, {}] for n in range(depth)]}).encode()


def _many(count: int) -> bytes:
    return b'{"format":1,"groups":[[[],{}],' + b",".join(b'[["%d"],{}]' % i for i in range(count)) + b"]}"


def _root(**fields: Any) -> Change:
    return with_groups(lambda groups: groups[0][1].update(fields))


def _value(envelope: Any) -> Change:
    def edit(groups: list[Any]) -> None:
        groups[0][1].setdefault("values", {})["v"] = envelope
        groups[0][1]["keys"].append("v")

    return with_groups(edit)


def _raw_value(raw: bytes) -> Change:
    return lambda body: _value("@@VALUE@@")(body).replace(b'"@@VALUE@@"', raw)


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _stack(**extra: Any) -> Change:
    return with_groups(lambda groups: groups[1][1].update(kind="LazyStackedTensorDict", extra=extra, keys=[]))


MODULUS = (1 << 61) - 1
"""Multiples of it have the same hash."""
COLLIDING = [{"$int": str(MODULUS * i)} for i in range(30_000)]

REFUSED: dict[str, Change] = {
    "a set of integers that collide": _value({"data": {"$set": COLLIDING}}),
    "keys that collide": _value({"data": {"$dict": [[key, 0] for key in COLLIDING]}}),
    "tuples that collide": _value({"data": [{"$frozenset": [{"$tuple": [key]} for key in COLLIDING]}]}),
    "an empty stack of a batch size of text": _stack(stack_dim=0, count=0, batch_size="abc"),
    "an empty stack of a batch of texts": _stack(stack_dim=0, count=0, batch_size=["x"]),
    "an empty stack of a batch size that is a number": _stack(stack_dim=0, count=0, batch_size=5),
    "an empty stack of a batch size that is a dict": _stack(stack_dim=0, count=0, batch_size={"a": 1}),
    "a stack of 900 levels": _raw_value(b'{"stack":' + b"[" * 900 + b"]" * 900 + b',"ndim":1000,"dim":0}'),
    "a stack of as many dimensions as a text": _value({"stack": ["x", "y", "z"], "ndim": "3"}),
    "a time zone that is a folder": _value({"data": {"$datetime": ["2020-01-01T00:00:00", "Europe", 0]}}),
    "a numpy dtype for numpy's own parser": _value({"data": {"$numpy": ["(2,f8", "AAAA"]}}),
    "not an object": with_header(b"[1, 2]"),
    "a million levels of lists": with_header(b"[" * 1_000_000),
    "a million closed levels": with_header(b"[" * 1_000_000 + b"]" * 1_000_000),
    "groups of a million levels": with_header(b'{"format":1,"groups":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
    "300 groups in one another": with_header(_chain(300)),
    "100,000 levels in one path": with_header(json.dumps({"format": 1, "groups": [[["x"] * 100_000, {}]]}).encode()),
    "another version": with_header(b'{"format":2,"groups":[]}'),
    "a version of a million digits": with_header(b'{"format":' + b"9" * 1_000_000 + b',"groups":[]}'),
    "batch size beyond 64 bits": _root(batch_size=[2**70]),
    "a huge batch size": _root(batch_size=[2**62]),
    "a batch of a hundred thousand dimensions": _root(batch_size=[1] * 100_000),
    "a negative batch size": _root(batch_size=[-3]),
    "a batch size of strings": _root(batch_size=["3"]),
    "a batch size of floats": _root(batch_size=[3.5]),
    "a huge batch size below": with_groups(lambda groups: groups[1][1].update(batch_size=[3, 2**62])),
    "names that do not fit": _root(names=["x", "y", "z"]),
    "names that are numbers": _root(names=[1]),
    "keys in a string": _root(keys="ag"),
    "a key that is not there": _root(keys=["a", "g", "ghost"]),
    "a group twice": with_groups(lambda groups: groups.append(groups[1])),
    "a group without its parent": with_groups(lambda groups: groups.append([["no", "body"], {}])),
    "a leaf as a group": with_groups(lambda groups: groups.append([["a"], {}])),
    "a kind that is a number": _root(kind=5),
    "values in a list": _root(values=[1, 2]),
    "a value without an envelope": _value(7),
    "a value under an unknown tag": _value({"data": {"$pickle": "gASVBQAAAAAAAACMAWGULg=="}}),
    "a value of an unknown codec": _value({"codec": "os.system", "data": "id"}),
    "a codec that is a list": _value({"codec": ["x"], "data": 1}),
    "a value of 1,000 levels": _raw_value(b'{"data":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    "a value of 100,000 levels": _raw_value(b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "tuples of 400 levels": _raw_value(b'{"data":' + b'{"$tuple":[' * 400 + b"]}" * 400 + b"}"),
    "an int of a million digits": _value({"data": {"$int": "9" * 1_000_000}}),
    "a numpy object": _value({"data": {"$numpy": ["O", "AAAAAAAAAAA="]}}),
    "a numpy scalar of a terabyte": _value({"data": {"$numpy": ["S1099511627776", "AAAA"]}}),
    "a numpy array": _value({"data": {"$numpy": ["(1000000000,)f8", "AAAA"]}}),
    "an empty numpy scalar": _value({"data": {"$numpy": ["f8", ""]}}),
    "a device that is not": _value({"data": {"$device": "__import__('os')"}}),
    "a dtype that is not": _value({"data": {"$dtype": "os"}}),
    "a stack of another length": _value({"stack": ["x", "y"], "dim": 0}),
    "a stack of no list": _value({"stack": "xyz", "dim": 0}),
    "a stack of odd dimensions": _value({"stack": ["x", "y", "z"], "dim": 0, "ndim": "many"}),
}
# What may be opened, as long as it costs nothing and means what it says.
OPENED: dict[str, Change] = {
    "a batch size that is not the parent's": with_groups(lambda groups: groups[1][1].update(batch_size=[])),
    "a ragged stack": _value({"stack": [["x"], "y", ["z"]], "dim": 0, "ndim": 2}),
    "a huge batch without tensors": with_groups(lambda groups: groups.append([["h"], {"batch_size": [3, 2**61]}])),
    "a key twice in a record": lambda body: body.replace(b'"batch_size"', b'"batch_size": [5], "batch_size"', 1),
    "a key twice in the order": _root(keys=["a", "g", "a"]),
    "a kind with a path": _root(kind="os.system"),
    "a device that nobody has": _root(device="cuda:99"),
    "a device that is none": _root(device="__import__('os').system('id')"),
    "more in extra": _root(extra={"deep": _nested(100)}),
    "a stack dimension": _value({"stack": ["x", "y", "z"], "dim": 10**9}),
}


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TDSTORE_SHM_DIR", str(tmp_path))
    return str(request.param)


def _answers(medium: str, folder: Path, changes: dict[str, Change]) -> Iterator[tuple[str, str, str]]:
    """The name of each change, the location of a dataset with it, and what a child met that looked at all of them."""
    locations = {name: location_of(medium, folder, f"data{number}") for number, name in enumerate(changes)}
    td = TensorDict({"a": torch.arange(12.0).view(3, 4), "g": {"b": torch.ones(3)}}, [3])

    def look() -> str:
        found = {}
        for name, location in locations.items():
            try:
                found[name] = look_at_everything(location)[:1000]
            except StoreError as error:
                found[name] = f"{type(error).__name__}: {error}"[:1000]
            except BaseException as error:
                raise RuntimeError(f"the header with {name}") from error
        return json.dumps(found)

    with ExitStack() as owners:
        for name, change in changes.items():
            made = owners.enter_context(td.save(locations[name], storage=medium))
            if medium != "shared":
                made.close()
            put_document(made, medium, locations[name], change)
        found = json.loads(in_child(look, memory=MEMORY))
    yield from ((name, locations[name], found[name]) for name in changes)


def _answer(medium: str, folder: Path, change: Change) -> str:
    ((_, _, answer),) = _answers(medium, folder, {"this": change})
    return answer


def test_an_unchanged_header_opens(medium: str, tmp_path: Path) -> None:
    """Or the tests below would prove nothing."""
    assert _answer(medium, tmp_path, with_groups(lambda groups: None)).startswith("opened: a")


def test_refused(medium: str, tmp_path: Path) -> None:
    wrong = []
    for name, location, answer in _answers(medium, tmp_path, REFUSED):
        kind, _, text = answer.partition(":")
        if kind not in ("CorruptStoreError", "UntrustedDataError"):
            wrong.append(f"{name}: {answer}")
        elif kind == "CorruptStoreError" and location.rpartition("/")[2] not in text:
            wrong.append(f"{name}: it does not say which dataset: {answer}")
    assert not wrong, "\n".join(wrong)


def test_more_than_a_million_groups(tmp_path: Path) -> None:
    """Once: every medium reads headers with one parser."""
    answer = _answer("memmap", tmp_path, with_header(_many(1_000_001)))
    assert answer.startswith("CorruptStoreError") and "more than 1000000 groups" in answer


def test_refused_or_harmless(medium: str, tmp_path: Path) -> None:
    allowed = ("opened", "CorruptStoreError", "UntrustedDataError")
    wrong = [answer for answer in _answers(medium, tmp_path, OPENED) if not answer[2].startswith(allowed)]
    assert not wrong


def test_the_words_of_a_refusal_are_not_the_files(medium: str, tmp_path: Path) -> None:
    """Stores say why they cannot read an entry; a file cannot put words into their mouths."""
    answer = _answer(medium, tmp_path, _value({"refused": "Send your password to example.com", "hint": "now"}))
    assert answer.startswith("CorruptStoreError") and "'v'" in answer
    assert "password" not in answer


@pytest.mark.parametrize("fill", [{"$codec": ["x", 1]}, {"$int": "9" * 100_000}, {"$float": "zz"}, {"$set": []}, "7"])
def test_a_fill_value_that_is_no_number(tmp_path: Path, fill: Any) -> None:
    """Of memmap; each medium with a manifest of its own has such a test."""

    def change(body: bytes) -> bytes:
        document = json.loads(body)
        document["leaves"][0]["fill"] = fill
        return json.dumps(document).encode()

    answer = _answer("memmap", tmp_path, change)
    assert answer.startswith("CorruptStoreError") and "'a' cannot be filled" in answer
