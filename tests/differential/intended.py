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

from tests.peer import BEFORE_15, SINCE_15

from .oracle import Raised, Side, describe, raises
from .structures import t
from .writes import as_torch, leaves, write_row_by_row

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
    ours: Raised | bool | None = None
    program: Callable[[Side, str], object] | None = None
    change: Callable[[Any], object] | None = None
    when: str | None = None
    """Only where the peer refuses (the case, or its first step) with a message that has this pattern."""
    of: bool = True
    """Only of this version of the peer: `BEFORE_15` or `SINCE_15`."""

    def covers(self, case: str, peer: object = None) -> bool:
        if not self.of and peer is not None:
            return False
        if not any(re.fullmatch(pattern, case) for pattern in self.cases):
            return False
        if self.when is None or peer is None:
            return True
        refusal = peer[0] if isinstance(peer, tuple) else peer
        return isinstance(refusal, Raised) and re.search(self.when, refusal.text) is not None

    def expected(self, case: str, peer: object, side: Side) -> object:
        if self.program is not None:
            return describe(self.program(side, case))
        if self.change is not None:
            return peer if isinstance(peer, Raised) else self.change(peer)
        return self.ours


FOLLOWED = [
    r"then cleared, a TensorDict of a larger batch",
    r"names = (None|\[None\]|\['y'\]) over \['x', 'y'\]",
    r"names = (None|\[None, None\]|\['c', None\]|\['e', 'd'\]|\['d', 'f'\]) of a lazy stack along 0 of elements named",
    r"names = (None|\[None, None\]|\[None, 'd'\]|\['d', 'e'\]|\['f', 'd'\]) of a lazy stack along 1 of elements named",
    r"names = (\['e', 'd'\] of a lazy stack along 0|\['d', 'e'\] of a lazy stack along 1) of elements named alike",
]
"""Cases in which ours does what the peer does since 0.15, and did not before: names of nested TensorDicts."""


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


NEW = ("keys", "new", "('x', 'y')")


def same_tensors(result: Any) -> object:
    """A write reaches the tensors that are there."""
    done, td, same = result
    return done, td, {key: value if key in NEW else True for key, value in same.items()}


def unwritten(error: type[Exception]) -> Callable[[Side, str], object]:
    """A write that is refused before anything has changed."""

    def program(M: Side, case: str) -> object:
        td = M.sample(re.match(r"\w+", case)[0])  # type: ignore[index]
        return refused(M, error), td, {str(key): True for key in leaves(td)}

    return program


def cast_at(M: Side, case: str) -> Any:
    """set_at_ and update_at_ of "flat"."""
    td = M.sample("flat")
    rows = torch.arange(5)[as_torch(eval(re.match(r"\w+ flat (.*?)( tensor)?$", case)[1], {"tensor": torch.tensor}))]  # type: ignore[index]
    for row in rows.tolist():
        td["b"][row] = (t(3, start=50) + 0.5 if case.startswith("set_at_") else t(3)).long()
        if case.startswith("update_at_"):
            td["a"][row] = 1
    return twice(td)


def gathered(M: Side, case: str) -> object:
    """`torch.gather` on every leaf, its index as wide as the leaf."""
    sample, what = case.split(".", 1)
    rows = {"cube.gather(0)": [[0, 1, 0], [1, 0, 1]], f"{sample}.gather of the wrong rank": [0, 1]}
    index = torch.tensor(rows.get(case, [[0, 1, 0]]))
    td = M.sample(sample)

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x.gather(0, left(index, x).expand(*index.shape, *x.shape[index.ndim :]))

    made = td.apply(pick, batch_size=[*index.shape, *td.batch_size[index.ndim :]], filter_empty=False)
    made.names = td.names
    return made, False, td.lock_() if what.endswith("locked") else td


def per_leaf(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Side, str], object]:
    return lambda M, case: M.sample("named").apply(fn)


NESTED_KEYS: dict[str, Any] = {
    re.escape(repr(key)): key
    for key in (("n", "b"), ("n", "m"), ("n", "m", "c"), (("n", "m"), "c"), ("n", ("m", "c")), ("n", "missing"))
}


def one_value(td: Any, batch: tuple[Any, ...]) -> object:
    """The description of a result of "text", whose text is one value."""
    values = {
        name: {"kind": "NonTensorData", "batch_size": list(batch[1:]), "data": data} for name, data in TEXT.items()
    }
    return {**td, ".s": values["s"], ".n": {**td[".n"], ".none": values["none"]}}


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


def written_within(M: Side, case: str) -> object:
    """What a `with` of a view that is the TensorDict itself leaves behind."""
    td = M.sample("named" if case.endswith("named") else "nested")
    seen = M.snap(td)
    td["new"] = t(*td.batch_size, 2)
    td["a"] = td["a"] + 1
    return seen, td


def left(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


INTENDED: list[Intended] = [
    Intended(
        "nothing is written unless everything fits; the peer writes some leaves and then fails",
        [r"deep_batch\[.*\] = (tensor of the batch|leaf over a td)"],
        when=".",
        program=unwritten(ValueError),
    ),
    Intended(
        "nothing is written unless everything fits; the peer writes some leaves and then fails",
        [
            r"\w+\[.*\] = (tensor of the batch|leaf over a td)",
        ],
        when="^(?!.*Index put)",
        program=unwritten(ValueError),
    ),
    Intended(
        "a TensorDict does not fit into a leaf: NotAGroupError; in the peer torch's dispatch fails",
        [r".*\] = td over a leaf"],
        program=unwritten(KeyError),
    ),
    Intended(
        "a write at rows casts to the leaf's dtype, as one at a slice does (API.md 1.2)",
        [r"\w+\[.*\] = .*"],
        when="Index put requires",
        program=write_row_by_row,
    ),
    Intended(
        "a smaller batch is broadcast, as a smaller tensor is",
        [r".*\] = (smaller batch|batch of one)"],
        when="indexed destination",
        program=write_row_by_row,
    ),
    Intended(
        "a nested TensorDict of a larger batch size is written at rows as it is at slices; the peer fails",
        [r"deep_batch\[.*\] = (td|dict|nested subset|locked)"],
        when="shape mismatch: value tensor",
        program=write_row_by_row,
    ),
    Intended(
        "set_at_ and update_at_ cast to the leaf's dtype, for rows as for slices (API.md 1.2)",
        [r"(set|update)_at_ flat .*"],
        when="Index put requires",
        program=cast_at,
    ),
    Intended(
        "update_at_ takes some of a nested TensorDict's keys, as it takes some of the first level's",
        [r"update_at_ a nested subset"],
        program=lambda M, case: (lambda td: (td["n", "b"].__setitem__(1, t(3, 2, start=70)), twice(td))[1])(
            M.sample("nested")
        ),
    ),
    Intended(
        "a batch without dimensions cannot be sliced; the peer slices the features of the leaves",
        [r"scalar\[:\]"],
        ours=raises("IndexError"),
    ),
    Intended(
        "a batch without dimensions cannot be sliced; the peer slices the features of the leaves",
        [r"scalar\[:\] = (td|1|some keys)"],
        program=unwritten(IndexError),
    ),
    Intended(
        "[True] is a mask of one row; the peer looks at leaves only", [r"empty\[\[True\]\]"], ours=raises("IndexError")
    ),
    Intended(
        "[True] is a mask of one row; the peer looks at leaves only",
        [r"empty\[\[True\]\] = (td|1)"],
        program=unwritten(IndexError),
    ),
    Intended(
        "a new nested TensorDict has the names of the batch that it is put into; the peer's has too few",
        [r"named\[0\] = a new nested key"],
        change=lambda result: (result[0], {**result[1], ".x": {**result[1][".x"], "names": NAMES}}, result[2]),
    ),
    Intended("`in` takes keys", [r"\('a', 0\) in td"], ours=raises("RuntimeError/ValueError")),
    Intended(
        "neither a key nor an index: IndexError, as for other bad indices",
        [r"td\[(\('a', 0\)|b'a')\]"],
        ours=raises("IndexError"),
    ),
    Intended(
        "an empty TensorDict has no values, sorted or not",
        [r"values empty \(False, False\) sort=True"],
        program=lambda M, case: M.torch and [],
    ),
    Intended(
        "what is a leaf is not gone into, by keys as by items; tensors always are leaves",
        [r"is_leaf takes all"],
        program=lambda M, case: ["a", "n"],
    ),
    Intended(
        "what is a leaf is not gone into, by keys as by items; tensors always are leaves",
        [r"is_leaf takes TensorDicts"],
        program=lambda M, case: M.sample("nested").keys(),
    ),
    Intended(
        "an update without entries changes nothing, so that a lock is no obstacle",
        [r"update of locked nothing"],
        program=lambda M, case: twice(M.sample("nested").lock_()),
    ),
    Intended(
        "update with clone refuses a number for the batch as update does",
        [r"update with clone a scalar"],
        program=lambda M, case: (refused(M, ValueError), M.sample("nested")),
    ),
    Intended(
        "update with clone takes text: there is nothing to copy",
        [r"update with clone text"],
        program=lambda M, case: twice(M.sample("nested").update({"s": "hello"})),
    ),
    Intended(
        "update of something that is no mapping is a TypeError, locked or not",
        [r"update of locked (a list of pairs|a number)"],
        program=lambda M, case: (refused(M, TypeError), M.sample("nested").lock_()),
    ),
    Intended(
        "replace takes what update takes: else TypeError",
        [r"replace (a list of pairs|a number)"],
        ours=raises("TypeError"),
    ),
    Intended(
        "to(other) takes over its device and the dtype that all its leaves have, as documented; the peer does nothing",
        [r"to like a TensorDict"],
        program=lambda M, case: M.td(M.sample("nested").apply(lambda x: x.float()).to_dict(), [4, 3], device="cpu"),
    ),
    Intended(
        "a batch size may be given as an int everywhere",
        [r"batch_size = 4"],
        program=lambda M, case: (lambda td: (setattr(td, "batch_size", [4]), td)[1])(M.sample("nested")),
    ),
    Intended(
        "gather keeps the batch dimensions that a shorter index lacks; the peer forgets them",
        [r"(nested|named|cube|empty)\.gather of the wrong rank", r"cube\.(gather\(0\)|torch\.gather|gather of locked)"],
        program=gathered,
    ),
    Intended(
        "squeeze, expand_as and flatten of one dimension keep the names of what they leave; the peer forgets some",
        [r"named\.(squeeze\(\)|torch\.squeeze|flatten\(1\))"],
        change=lambda result: (keeping_names(result[0]), *result[1:]),
    ),
    Intended(
        "squeeze, expand_as and flatten of one dimension keep the names of what they leave; the peer forgets some",
        [r"named\.expand_as"],
        program=lambda M, case: on(M, case, lambda td: td.expand(2, *td.batch_size)),
    ),
    Intended(
        "expand_as expands nested batch sizes as expand does; the peer cuts them",
        [r"deep_batch\.expand_as"],
        program=lambda M, case: on(M, case, lambda td: td.expand(2, *td.batch_size)),
    ),
    Intended(
        "the parts of a dimension are new dimensions without a name; the peer gives it to the last of them",
        [r"named\.unflatten\(0, \(2, 2\)\)", r"named\.torch\.unflatten"],
        change=lambda result: (renamed(result[0], [None, None, "env"]), *result[1:]),
    ),
    Intended(
        "the parts of a dimension are new dimensions without a name; the peer gives it to the last of them",
        [r"named\.unflatten\(-1, \(3, 1\)\)"],
        change=lambda result: (renamed(result[0], ["time", None, None]), *result[1:]),
    ),
    Intended(
        "the parts of a dimension are new dimensions without a name; the peer gives it to the last of them",
        [r"lock of unflatten"],
        change=lambda result: renamed(result, [None, None, "env"]),
    ),
    Intended(
        "one value for the batch stays one value whatever the shape; the peer makes a stack of it",
        [r"text\.(unsqueeze\((0|-1)\)|expand\(2, \*\)|squeeze\(\))"],
        change=lambda result: (one_value(result[0], result[0]["batch_size"]), *result[1:]),
    ),
    Intended(
        "no rows are split into one piece of no rows, as for tensors",
        [r"zero_rows\.(split\(3\)|chunk\(2\))"],
        program=lambda M, case: on(M, case, lambda td: (td.clone(),)),
    ),
    Intended(
        "there is nothing to squeeze in a batch without dimensions",
        [r"scalar\.squeeze\(\)"],
        program=lambda M, case: on(M, case, lambda td: td),
    ),
    Intended(
        "a key below a tensor is not there: ignored where missing keys are",
        [r"select \[\('a', 'deeper'\)\] not strict"],
        program=lambda M, case: M.sample("nested").empty(),
    ),
    Intended(
        "a key below a tensor is not there: ignored where missing keys are",
        [r"exclude \[\('a', 'deeper'\)\]( in place)?"],
        program=lambda M, case: twice(M.sample("nested")) if case.endswith("place") else M.sample("nested"),
    ),
    Intended(
        "an ellipsis stands for some dimensions: two of them are refused, as by indexing",
        [r"names of \w+: refine two ellipses"],
        program=lambda M, case: (refused(M, ValueError), *unnamed(M, case)),
    ),
    Intended(
        "one name for each batch dimension; the peer takes more of them",
        [r"names of deep_batch: names = tuple"],
        program=lambda M, case: (refused(M, ValueError), *unnamed(M, case)),
    ),
    Intended(
        "set_non_tensor(None) stores None; the peer reads it as a list",
        [r"get_non_tensor of None"],
        program=lambda M, case: None,
    ),
    Intended(
        "a tuple of text stays a tuple; the peer makes an array of it",
        [r"setitem of tuple of str"],
        program=lambda M, case: (lambda td: (None, td["s"], td))(
            M.td({"a": t(3)}, [3]).set_non_tensor("s", ("a", "b"))
        ),
    ),
    Intended(
        "non_tensor_items goes into nested TensorDicts; the peer stumbles over tensors",
        [r"non_tensor_items"],
        program=lambda M, case: (lambda td: [("s", td.get("s")), (("n", "none"), td.get(("n", "none")))])(
            M.sample("text")
        ),
    ),
    Intended(
        "a list, or a dict in an order, is no operand: TypeError whatever it holds",
        [r"td (\+|-|\*|/|\*\*|%) list", r"td (<|<=|>|>=) dict"],
        ours=raises("TypeError"),
    ),
    Intended(
        "a list, or a dict in an order, is no operand: TypeError whatever it holds",
        [r"td (\+|-|\*|/|\*\*)= list"],
        change=lambda result: (raises("TypeError"), *result[1:]),
    ),
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
        "a number written to rows goes into the tensors; the peer also puts it among the text, or stumbles over it",
        [rf"text\[(?!\[True\]).*\] = ({NUMBERS})"],
        program=write_row_by_row,
    ),
    Intended(
        "a tensor written over a TensorDict goes into its tensors; the peer also puts it among the text",
        [r"text\[.*\] = leaf over a td"],
        change=keeping_text,
    ),
    Intended(
        "None and True add a dimension of one to the same rows: a write goes into the tensors that are there",
        [r".*\[(None|True|tensor\(True\)|None,|True,|\.\.\., None)\] = .*"],
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
        "leaving `with td.squeeze()` gives back the dimensions that were squeezed, here none; the peer refuses",
        [r"with squeeze( of named)?"],
        program=written_within,
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
            r"|torch\.stack\(9\)|torch\.cat of other batches)"
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
    Intended(
        "what carries no gradient is detached already; the peer asks views to detach, which torch refuses",
        [r"detach_ (flat|nested|zero_rows)"],
        program=lambda M, case: twice(M.sample(case.split()[1])),
    ),
    Intended(
        "torch functions of one TensorDict act on its leaves; the peer has them as methods only",
        [r"\w+\.torch\.exp"],
        program=lambda M, case: (M.sample(case.split(".")[0]).exp(), False, M.sample(case.split(".")[0])),
    ),
    Intended(
        "a default is for what is missing, also below a tensor; the peer refused that before 0.15",
        [r"get \('(n', 'b|a)', 'deeper'\) or (5|None)"],
        program=lambda M, case: 5 if case.endswith("5") else None,
        of=BEFORE_15,
    ),
    Intended(
        "a default is for what is missing, also below a tensor; the peer refused that before 0.15",
        [r"pop \('(n', 'b|a)', 'deeper'\) or 5"],
        change=lambda peer: (5, *peer[1:]),
        of=BEFORE_15,
    ),
    Intended(
        "a key below a tensor is missing, and ignored where missing keys are; the peer refused it before 0.15",
        [r"split_keys \[\('a', 'deeper'\)\] not strict"],
        program=lambda M, case: (M.sample("nested").empty(), M.sample("nested")),
        of=BEFORE_15,
    ),
    Intended(
        "a view of the keys of the first level has no nested key; the peer raised an error before 0.15",
        [r"\(.*'\w+'\)?, .*'\w+'.*\) in keys\(\)"],
        ours=False,
        of=BEFORE_15,
    ),
    Intended(
        "a TensorDict is no entry of itself; the peer refuses that since 0.15",
        [r"set itself"],
        ours=raises("RuntimeError/ValueError"),
        of=BEFORE_15,
    ),
    Intended(
        "entries that are values are read, too; the peer refuses them since 0.15",
        [r"parse text"],
        program=lambda M, case: repr(M.sample("text").exclude("s", ("n", "none"))),
        of=SINCE_15,
    ),
    Intended(
        "one None is for no names, as of a tensor; the peer takes it since 0.15",
        [r"names of (named|nested): rename None"],
        change=lambda peer: (renamed(peer[1], [None, None]), *peer[1:]),
        of=BEFORE_15,
    ),
]
