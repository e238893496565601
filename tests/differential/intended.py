"""Differences from the peer that are meant: where it is wrong, ours is not to be.

An entry names its cases by patterns, says why, and gives what ours does instead: an outcome, a program
that makes it, or a change to what the peer's outcome is. It never excuses a case from being checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .oracle import Raised, Side, describe, raises
from .structures import t

NAMES = ["time", "env"]
TEXT = {"s": "hello", "none": None}
NUMBERS = "1|float|bool|0-d tensor|1-element tensor|tensor of the batch|list"


NAMES_AFTER: dict[str, list[str | None]] = {
    "[[0, 1], [2, 0]]": [None, None, "env"],
    "np.array([[1, 0]])": [None, None, "env"],
    "tensor([[0, 1], [2, 0]])": [None, None, "env"],
    "tensor([[0, 1], [2, 0]]), :": [None, None, "env"],
    ":, tensor([[0, 1], [2, 0]])": ["time", None, None],
    "tensor([[0, 1], [2, 0]]), tensor([0, 1])": [None, None],
    "tensor([0, 2]), tensor([[1], [0]])": [None, None],
    "[[0, 1]], [[1], [0]]": [None, None],
    "[0, 1], None, [1, 0]": [None, None],
    "None, [0, 1], [1, 0]": [None, None],
    "[0, 2], [1, 0]": [None],
    "range(2), range(2)": [None],
    "np.array([0, 1]), np.array([1, 0])": [None],
    "mask(1), [0]": [None],
    "[0, 1], [True, False, True]": [None],
}


@dataclass(frozen=True)
class Intended:
    """Why ours differs in the cases whose whole name matches, and our outcome there."""

    why: str
    cases: Sequence[str]
    ours: Raised | None = None
    program: Callable[[Side, str], object] | None = None
    change: Callable[[Any], object] | None = None

    def covers(self, case: str) -> bool:
        return any(re.fullmatch(pattern, case) for pattern in self.cases)

    def expected(self, case: str, peer: object, side: Side) -> object:
        if self.program is not None:
            return describe(self.program(side, case))
        if self.change is not None:
            return peer if isinstance(peer, Raised) else self.change(peer)
        return self.ours


def keeping_names(td: Any) -> object:
    """The description of a result of "named", with its names."""
    if not isinstance(td, dict) or td.get("kind") != "TensorDict":
        return td
    return {**{key: keeping_names(value) for key, value in td.items()}, "names": NAMES}


def renamed(td: Any, names: list[str | None]) -> object:
    return {**td, "names": names, ".n": {**td[".n"], "names": names}}


def keeping_text(written: Any) -> object:
    """The result of a write to "text", whose text and None stay as they were."""
    done, td, same = written
    old = {name: {"kind": "NonTensorData", "batch_size": [4], "data": value} for name, value in TEXT.items()}
    return done, {**td, ".s": old["s"], ".n": {**td[".n"], ".none": old["none"]}}, same


def same_tensors(result: Any) -> object:
    """A write reaches the tensors that are there."""
    done, td, same = result
    return done, td, {key: value if key == "keys" else True for key, value in same.items()}


def per_leaf(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Side, str], object]:
    return lambda M, case: M.sample("named").apply(fn)


NESTED_KEYS: dict[str, Any] = {
    re.escape(repr(key)): key
    for key in (("n", "b"), ("n", "m"), ("n", "m", "c"), (("n", "m"), "c"), ("n", ("m", "c")), ("n", "missing"))
}


def twice(td: Any) -> tuple[Any, Any]:
    """A step that returns the TensorDict, and the TensorDict after it."""
    return td, td


def refused(M: Side, error: type[Exception]) -> object:
    def program() -> object:
        raise error

    return M.attempt(program)


def unnamed(M: Side, case: str) -> tuple[Any, Any]:
    td = M.sample(case.split()[2].rstrip(":"))
    return td, td["n"].names


def on(M: Side, case: str, step: Callable[[Any], Any]) -> object:
    """The result on the case's sample, whether its leaf "a" is a view, and the sample after it."""
    td = M.sample(case.split(".")[0])
    return step(td), "a" in td.keys(), td


def left(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


INTENDED: list[Intended] = [
    Intended(
        "the peer silently indexes feature dimensions (API.md 2.2)",
        [r"into features .*"],
        ours=raises("IndexError"),
    ),
    *(
        Intended(
            "rows taken by a table, or by two lists, are of no one dimension; the peer repeats names or has too many",
            [re.escape(f"named[{text}]")],
            change=lambda read, names=names: (renamed(read[0], names), *read[1:]),
        )
        for text, names in NAMES_AFTER.items()
    ),
    Intended(
        "an order with text or None means nothing, and Python says TypeError; the peer answers False",
        [r"td (<|<=|>|>=) (str|None|list)", r"str (<|<=|>|>=) td"],
        ours=raises("TypeError"),
    ),
    Intended(
        "a comparison has the batch of its operands, and so their names; the peer forgets them",
        [r"(td|2|0\.5|0-d tensor) (==|!=|<|<=|>|>=) .*", r"mask [&|^] .*", r"~mask", r"lock of td == td"],
        change=keeping_names,
    ),
    *(
        Intended(
            "the reflected power is defined for every leaf; the peer does not implement it", [name], program=program
        )
        for name, program in {
            r"2 \*\* td": per_leaf(lambda x: 2 ** (x + 1)),
            r"0\.5 \*\* td": per_leaf(lambda x: 0.5 ** (x + 1)),
            r"0-d tensor \*\* td": per_leaf(lambda x: torch.tensor(3.0) ** (x + 1)),
            r"batch tensor \*\* td": per_leaf(lambda x: left(t(4, 3) + 1, x) ** (x + 1)),
            r"batch tensor - td": per_leaf(lambda x: left(t(4, 3) + 1, x) - (x + 1)),
            r"td % batch tensor": per_leaf(lambda x: x % left(t(4, 3) + 1, x)),
        }.items()
    ),
    Intended(
        "a power of text is refused like any other operand of a wrong type", [r"str \*\* td"], ours=raises("TypeError")
    ),
    Intended(
        "a tensor operand broadcasts to the batch in place as it does out of place; the peer makes a new TensorDict",
        [r"td (\+|-|\*|/|\*\*)= batch tensor"],
        change=lambda result: (True, *result[1:]),
    ),
    Intended(
        "a number written to rows goes into the tensors; the peer also puts it among the text",
        [rf"text\[(?!None|True|tensor\(True).*\] = ({NUMBERS})"],
        change=keeping_text,
    ),
    Intended(
        "None and True add a dimension of one to the same rows: a write goes into the tensors that are there",
        [r".*\[(None|True|tensor\(True\)|None,|True,)\] = (1|td)"],
        change=same_tensors,
    ),
    Intended(
        "create_nested makes one entry; the peer replaces the parent, and its other entries are lost",
        [rf"create_nested {key}" for key in NESTED_KEYS],
        program=lambda M, case: twice(M.sample("nested").set(NESTED_KEYS[re.escape(case[14:])], M.td({}, [4, 3]))),
    ),
    Intended(
        "create_nested refuses to go through a tensor, as set does; the peer replaces it",
        [r"create_nested \(.*'deeper'\)"],
        program=lambda M, case: (refused(M, KeyError), M.sample("nested")),
    ),
    Intended(
        "a nested TensorDict is no leaf, as keys(True, True) itself shows",
        [r"'n' in keys\(True, True\)", r"\('n', 'm'\) in keys\(True, True\)"],
        program=lambda M, case: False,
    ),
    Intended("an entry that is missing has no class", [r"entry_class (.*missing.*|'')"], ours=raises("KeyError")),
    Intended(
        "set_ writes into an entry that exists; the peer leaves an empty TensorDict behind",
        [r"set_ \('missing', 'b'\)"],
        program=lambda M, case: (M.attempt(lambda: M.sample("nested")["missing", "b"]), M.sample("nested")),
    ),
    Intended(
        "flatten_keys(inplace=True) keeps the entries of the first level; the peer drops them",
        [r"flatten_keys \w+ in place"],
        program=lambda M, case: twice(M.sample(case.split()[1]).flatten_keys()),
    ),
    Intended(
        "`with td.unlock_()` locks again also when its body raised",
        [r"with unlock_ and an error"],
        program=lambda M, case: M.sample("nested").set("new", t(4, 3)).lock_(),
    ),
    Intended(
        "a complex number becomes a tensor like every other number",
        [r"a complex (as value|set later)"],
        program=lambda M, case: M.td({"a": torch.tensor(1 + 2j)}),
    ),
    Intended(
        "-1 means what it means for tensors; the peer keeps it in the batch size, or refuses it",
        [r"(nested|named|deep_batch|empty|cube)\.unflatten\(0, \[2, -1\]\)"],
        program=lambda M, case: on(M, case, lambda td: td.unflatten(0, (2, td.batch_size[0] // 2))),
    ),
    Intended(
        "-1 means what it means for tensors; the peer refuses it",
        [r"\w+\.expand\(-1\)"],
        program=lambda M, case: on(M, case, lambda td: td.expand(2, *td.batch_size)),
    ),
    Intended(
        "torch.reshape is reshape; the peer has no such function",
        [r"\w+\.torch\.reshape"],
        program=lambda M, case: on(M, case, lambda td: td.reshape(-1)),
    ),
    Intended(
        "permute names every dimension once, as for tensors; the peer adds the missing ones at the end",
        [r"(nested|named|empty|cube)\.permute\(0\)", r"cube\.(torch\.)?permute(\(\[?(1, 0|0, 1)\]?\)|\(dims=\))?"],
        ours=raises("RuntimeError/ValueError"),
    ),
    Intended(
        "the batch size of an empty TensorDict is held to; the peer looks at leaves only",
        [
            r"empty\.(view\(wrong\)|view\(\)|reshape\(wrong\)|flatten\(0, 9\)|unflatten\(0, \(5, 5\)\)"
            r"|torch\.stack\(9\)|torch\.cat of other batches|gather of the wrong rank)"
        ],
        ours=Raised(frozenset({"IndexError", "RuntimeError/ValueError"})),
    ),
    Intended(
        "a TensorDict of no rows can be viewed as a tensor of no rows can",
        [r"zero_rows\.(view|reshape)\(-1\)"],
        program=lambda M, case: on(M, case, lambda td: td),
    ),
    Intended(
        "names are text or None",
        [r"names of \w+: (names = numbers|rename ellipsis)"],
        program=lambda M, case: (refused(M, ValueError), *unnamed(M, case)),
    ),
]
