"""The whole surface: every public method, on every kind of container, says what it says of a plain TensorDict.

A plain TensorDict in turn is compared with the peer's. Where a container refuses, the refusal is listed here.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import LockedError, UnsupportedError
from tests.differential.cases import seed
from tests.differential.oracle import OURS, PEER, Raised, Side, Values, describe, differences, outcome
from tests.peer import is_adopted

from . import rows
from .containers import KINDS, LOCKED, Place, floats, mixed, namespace
from .differences import ADOPTED, INTENDED, OF_THE_VIEW, OTHERWISE, REFUSED, reason
from .names import functions, names

SECTIONS = {
    section: rows.parse(getattr(rows, section))
    for section in ("MATHS", "READS", "WRITES", "MATHS_IN_PLACE", "STRUCTURE", "AROUND")
}
SAMPLES = {section: floats if section.startswith("MATHS") else mixed for section in SECTIONS}
OTHERS = [kind for kind in KINDS if kind != "TensorDict"]


def cases(*sections: str) -> list[Any]:
    return [
        pytest.param(section, name, id=f"{section.lower()}-{name}")
        for section in sections
        for name in SECTIONS[section]
    ]


def seen(value: Any) -> Any:
    """What an outcome is, whichever kind of container holds it."""
    if isinstance(value, tdstore.TensorDictBase):
        return {
            "batch_size": tuple(value.batch_size),
            "names": list(value.names),
            "keys": list(value.keys()),
            **{f".{key}": seen(value.get(key)) for key in value.keys()},
        }
    if isinstance(value, (tdstore.NonTensorData, tdstore.NonTensorStack)):
        return ("values", tuple(value.batch_size), value.tolist())  # one for all, or one for each: the same values
    if isinstance(value, torch.Tensor):
        return Values(value.detach().as_subclass(torch.Tensor).clone().requires_grad_(value.requires_grad))
    if isinstance(value, Mapping):
        return {"keys": [str(k) for k in value], **{f".{k}": seen(v) for k, v in value.items()}}
    if isinstance(value, (tuple, list)):
        return (
            type(value)(map(seen, value)) if type(value) in (tuple, list) else [type(value).__name__, *map(seen, value)]
        )
    return describe(value)


def run(expression: str, td: Any, names: dict[str, Any]) -> Any:
    """What an expression gives or raises; whether it returned `td` itself is part of it."""
    seed(0)

    def program() -> Any:
        result = eval(expression, {**names, "td": td})
        return "itself" if result is td else result

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about complex32
            return seen(program())
    except Exception as error:
        return Raised.of(error)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str, Any], Place]:
    folder = tmp_path_factory.mktemp("surface")

    def of(kind: str, td: Any) -> Place:
        server = request.getfixturevalue("redis") if kind == "redis" else None
        return KINDS[kind](td, folder, server)

    return of


@pytest.fixture(scope="module")
def unchanging(build: Callable[[str, Any], Place]) -> Callable[[str, str], Any]:
    """A container that tests share as long as none changes it, which none may."""
    made: dict[tuple[str, str], Any] = {}

    def of(kind: str, section: str) -> Any:
        td = made.get((kind, section))
        if td is None or differs(seen(td), seen(SAMPLES[section]())):
            td = made[kind, section] = build(kind, SAMPLES[section]()).td
        return td

    return of


def differs(a: Any, b: Any) -> bool:
    return any(True for _ in differences(a, b))


def check(kind: str, expression: str, want: Any, got: Any, problems: list[str]) -> None:
    found = list(differences(want, got))[:4]
    if reason(REFUSED, kind, expression):
        if not isinstance(got, Raised):
            problems.append(f"{expression}: no longer refused on {kind}: take it out of REFUSED")
        return
    if reason(OTHERWISE, kind, expression):
        if not found:
            problems.append(f"{expression}: no longer different on {kind}: take it out of OTHERWISE")
        return
    problems += [f"{expression}: {line}" for line in found]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("section", "name"), cases("MATHS", "READS"))
def test_reads_as_a_tensordict(kind: str, section: str, name: str, unchanging: Any) -> None:
    names = namespace(tdstore, SAMPLES[section])
    td = unchanging(kind, section)
    problems: list[str] = []
    for expression in SECTIONS[section][name]:
        check(kind, expression, run(expression, SAMPLES[section](), names), run(expression, td, names), problems)
        problems += [f"{expression} has changed it: {line}" for line in differences(seen(SAMPLES[section]()), seen(td))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("section", "name"), cases("WRITES", "MATHS_IN_PLACE", "AROUND"))
def test_writes_as_a_tensordict(kind: str, section: str, name: str, build: Any) -> None:
    names = namespace(tdstore, SAMPLES[section])
    problems: list[str] = []
    for expression in SECTIONS[section][name]:
        plain = SAMPLES[section]()
        place = build(kind, SAMPLES[section]())
        want, got = run(expression, plain, names), run(expression, place.td, names)
        if reason(OTHERWISE, kind, expression):
            assert differs(seen(plain), seen(place.td)), f"{expression}: take it out of OTHERWISE"
            continue
        check(kind, expression, want, got, problems)
        if reason(REFUSED, kind, expression):
            plain = SAMPLES[section]()
        problems += [f"{expression}, then {line}" for line in list(differences(seen(plain), seen(place.td)))[:4]]
        if section != "AROUND":
            elsewhere = seen(place.seen_by_others())
            problems += [f"{expression}, stored {line}" for line in list(differences(seen(plain), elsewhere))[:4]]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("section", "name"), cases("STRUCTURE"))
def test_structure_as_a_tensordict(kind: str, section: str, name: str, build: Any) -> None:
    names = namespace(tdstore, SAMPLES[section])
    problems: list[str] = []
    for expression in SECTIONS[section][name]:
        plain = SAMPLES[section]()
        place = build(kind, SAMPLES[section]())
        want = run(expression, plain, names)
        if kind in LOCKED:
            before = seen(place.td)
            try:
                eval(expression, {**names, "td": place.td})
            except (LockedError, KeyError, ValueError, RuntimeError):
                pass
            else:
                if seen(plain) != before:
                    problems.append(f"{expression}: done although it is locked")
            problems += [f"{expression}, locked: {line}" for line in list(differences(before, seen(place.td)))[:4]]
            place.td.unlock_()
        got = run(expression, place.td, names)
        check(kind, expression, want, got, problems)
        if reason(REFUSED, kind, expression):
            plain = SAMPLES[section]()
        problems += [f"{expression}, then {line}" for line in list(differences(seen(plain), seen(place.td)))[:4]]
        if kind not in LOCKED and not reason(OF_THE_VIEW, kind, expression):
            elsewhere = seen(place.seen_by_others())
            problems += [f"{expression}, stored {line}" for line in list(differences(seen(plain), elsewhere))[:4]]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("section", "name"), cases(*SECTIONS))
def test_as_the_peer(section: str, name: str) -> None:
    if name not in PEER_NAMES and name != "__setitem__":
        assert name in "read append extend resize_ commit pack rename_keys"  # the last two are newer than the peer here
        return
    problems: list[str] = []
    for expression in SECTIONS[section][name]:
        results = []
        for side in (PEER, OURS):
            td = SAMPLES[section](side.TensorDict)
            results.append(_run_side(side, expression, td, SAMPLES[section]))
            results.append(_run_side(side, "td", td, SAMPLES[section]))
        found = [*differences(results[0], results[2]), *differences(results[1], results[3], "then")]
        if expression in INTENDED and not is_adopted(expression, ADOPTED):
            if not found:
                problems.append(f"{expression}: as the peer's now: take it out of INTENDED")
        else:
            problems += [f"{expression}: {line}" for line in found[:4]]
    assert not problems, "\n".join(problems)


def _run_side(side: Side, expression: str, td: Any, sample: Callable[..., Any]) -> Any:
    names = namespace(side.module, sample, side.TensorDict)
    seed(0)
    return outcome(lambda: eval(expression, {**names, "td": td}), forgive=side.is_peer)


PEER_NAMES = set(dir(PEER.TensorDict))


# -- the table itself ------------------------------------------------------------------------
def test_every_name_is_there() -> None:
    for cls in (TensorDict, tdstore.PersistentTensorDict, tdstore.LazyStackedTensorDict):
        assert not [name for name in names() if not hasattr(cls, name)]
    assert not [name for name in functions() if not hasattr(tdstore, name)]


def test_every_method_has_a_row() -> None:
    elsewhere = {name for text in rows.ELSEWHERE for name in text.split()}
    listed = {name for section in SECTIONS.values() for name in section}
    public = {name for name in dir(TensorDict) if not name.startswith("_")}
    assert public - listed - elsewhere == set()
    assert (listed | elsewhere) - public == {"__setitem__"}


def test_every_method_is_documented() -> None:
    missing = []
    for name in sorted(n for n in dir(TensorDict) if not n.startswith("_")):
        found = inspect.getattr_static(TensorDict, name)
        found = getattr(found, "__func__", found)
        if not (inspect.getdoc(found) or "").strip():
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("name", sorted(PEER_NAMES & set(names())))
def test_every_parameter_of_the_peer_is_taken(name: str) -> None:
    theirs, ours = _parameters(PEER.TensorDict, name), _parameters(TensorDict, name)
    if theirs is None or ours is None:
        assert theirs is ours is None, "one is a method, the other is not"
        return
    if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        return
    wanted = [
        p.name
        for p in theirs.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not p.name.startswith("_") and p.name not in ours
    ]
    assert set(wanted) <= set(OTHER_NAMES.get(name, ())), f"{name} does not take {wanted}"


# Positional arguments that have another name here.
OTHER_NAMES = {"swapdims": ("axis0", "axis1")}  # ours are those of torch.swapdims


def _parameters(cls: type, name: str) -> Mapping[str, inspect.Parameter] | None:
    found = getattr(cls, name)
    return inspect.signature(found).parameters if callable(found) else None


def test_a_difference_would_be_seen() -> None:
    """The comparison itself: values, batch sizes, key order and names all count."""
    td = mixed()
    for change in (
        lambda t: t.set_at_("a", 9.0, 0),
        lambda t: assign_batch(t),
        lambda t: t.set("z", t["a"]),
        lambda t: t.rename_("x", None),
        lambda t: t.set("a", t["a"].double()),
        lambda t: t.set("s", "other"),
    ):
        changed = mixed()
        change(changed)
        assert differs(seen(changed), seen(td))
    assert not differs(seen(mixed()), seen(td))
    assert UnsupportedError is not LockedError


def assign_batch(td: Any) -> None:
    td.batch_size = [4]
