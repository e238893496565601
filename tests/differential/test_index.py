"""td[index] and td[index] = value, for every kind of index, on every structure."""

from __future__ import annotations

import pytest
import torch

from .cases import Case, Cases
from .indices import INTO_FEATURES, INVALID, INVALID_TWO, TOO_MANY, index_of, indices_for
from .oracle import OURS, Raised, describe, differences, outcome
from .programs import check, programs
from .structures import SAMPLES, t
from .writes import VALUES, leaves, like

reads, writes, values, features = Cases(), Cases(), Cases(), Cases()


def shares(td, part):
    """For each leaf whether the part is a view of the whole."""
    whole = {k: v.untyped_storage().data_ptr() for k, v in leaves(td).items()}
    return {str(k): v.untyped_storage().data_ptr() == whole[k] for k, v in leaves(part).items() if v.numel()}


def read(sample, text):
    def program(M):
        td = M.sample(sample)
        part = td[index_of(text, SAMPLES[sample].batch)]
        return part, part is td, shares(td, part)

    return program


def write(sample, text, make):
    def program(M):
        td = M.sample(sample)
        index = index_of(text, SAMPLES[sample].batch)
        old = leaves(td)
        done = M.attempt(lambda: td.__setitem__(index, make(M, td[index])))
        return done, td, {str(k): old.get(k) is v for k, v in leaves(td).items()}

    return program


for sample, s in SAMPLES.items():
    for text in indices_for(s.batch) + TOO_MANY.get(sample, []):
        reads(f"{sample}[{text}]", read(sample, text))
        writes(f"{sample}[{text}] = td", write(sample, text, like))
        writes(f"{sample}[{text}] = 1", write(sample, text, lambda M, part: 1))

for sample, texts in {
    "nested": ["0", "1:3", "[0, 2]", "mask(1)", "mask(2)", ":, 0", "...", "None", "0, 1", "tensor([[0, 1], [2, 3]])"],
    "named": ["0", "1:3", "[0, 2]"],
    "deep_batch": ["0", "1:3", "[2, 0]", "mask(1)", "..."],
    "on_cpu": ["0", "1:3", "[2, 0]"],
    "text": ["0", "1:3"],
}.items():
    for text in texts:
        for name, make in VALUES.items():
            values(f"{sample}[{text}] = {name}", write(sample, text, make))


def on_locked(sample, text):
    def program(M):
        td = M.sample(sample).lock_()
        index = index_of(text, SAMPLES[sample].batch)
        part = td[index]
        done = M.attempt(lambda: td.__setitem__(index, like(M, part)))
        new = M.attempt(lambda: td.__setitem__(index, M.td({"new": t(*part.batch_size)}, part.batch_size)))
        return part, done, new, td

    return program


def through_a_view(text):
    def program(M):
        td = M.sample("nested")
        part = td[index_of(text, (4, 3))]
        part.zero_()
        part["extra"] = t(*part.batch_size)
        part["n", "extra"] = t(*part.batch_size)
        return td, part

    return program


for text in ("0", "1:3", ":, 0", "..., 0", "None", "[0, 2]", "mask(1)", "0, 1", "tensor([1, 0])", "True"):
    values(f"locked nested[{text}]", on_locked("nested", text))
    values(f"writing through nested[{text}]", through_a_view(text))
values("nested row of a row", lambda M: M.sample("nested")[1][2])
values(
    "a view of a view writes through",
    lambda M: (lambda td: (td[1:].__getitem__(slice(1, 2)).__setitem__((0, 0), 9), td))(M.sample("nested")),
)
values("td[key][index]", lambda M: M.sample("nested")["n"][1:3, 0])
values(
    "td[key][index] = td",
    lambda M: (lambda td: (td["n"].__setitem__(0, like(M, td["n"][0])), td))(M.sample("nested")),
)
values("a chain of keys and indices", lambda M: M.sample("nested")[0]["n"][1]["m", "c"])
values("masked_select", lambda M: M.sample("nested").masked_select(index_of("mask(2)", (4, 3))))
values("masked_select of rows", lambda M: M.sample("nested").masked_select(index_of("mask(1)", (4, 3))))
values("masked_select of a wrong shape", lambda M: M.sample("nested").masked_select(torch.ones(3, dtype=torch.bool)))
values("iadd at an index", lambda M: (lambda td: (exec("td[0] += 1", {"td": td}), td))(M.sample("named")))


for text in INTO_FEATURES:
    index = index_of(text, (4,))
    features(f"into features [{text}]", lambda M, i=index: M.sample("wide")[i])
    features(f"into features [{text}] = 1", lambda M, i=index: M.sample("wide").__setitem__(i, 1))


@reads.parametrize
def test_read(case: Case) -> None:
    case.check()


@writes.parametrize
def test_write(case: Case) -> None:
    case.check()


@values.parametrize
def test_values(case: Case) -> None:
    case.check()


@features.parametrize
def test_features(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("value", ["read", "scalar", "td"])
@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (s, x)
        for s, made in SAMPLES.items()
        if 0 not in made.batch
        for x in (INVALID * bool(made.batch) + INVALID_TWO * (len(made.batch) > 1))
    ],
)
def test_invalid(sample: str, text: str, value: str) -> None:
    """Ours refuses on every structure and changes nothing; the peer looks at leaves, and takes what they take."""
    td = OURS.sample(sample)
    index = index_of(text, SAMPLES[sample].batch)
    made = 1 if value == "scalar" else OURS.sample(sample)
    result = outcome(lambda: td[index] if value == "read" else td.__setitem__(index, made))
    assert isinstance(result, Raised), result
    assert result.families & {"IndexError", "RuntimeError/ValueError", "TypeError"}, result
    assert not list(differences(describe(OURS.sample(sample)), describe(td)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_other_integer_dtypes(dtype: torch.dtype) -> None:
    """torch, and so the peer, takes int32 and int64 only; a row number is a row number."""
    td = OURS.sample("nested")
    assert not list(differences(describe(td[torch.tensor([2, 0])]), describe(td[torch.tensor([2, 0], dtype=dtype)])))


@programs("""
td = TensorDict({"a": torch.zeros(4), "n": TensorDict({"x": torch.zeros(4, 3)}, [4, 3])}, [4])
n = TensorDict({"x": torch.ones(2, 3), "new": torch.ones(2, 3, 5)}, [2, 3])
td[1:3] = TensorDict({"a": torch.ones(2), "n": n}, [2])
(td["n", "new"], td["n"].batch_size)
---
td = TensorDict({"n": TensorDict({"m": TensorDict({}, [4, 3, 2])}, [4, 3])}, [4])
part = TensorDict({"k": torch.ones(2, 3, 2), "o": TensorDict({"y": torch.ones(2, 3, 2, 7)}, [2, 3, 2])}, [2, 3, 2])
td[[3, 0]] = TensorDict({"n": TensorDict({"m": part}, [2, 3])}, [2])
(td["n", "m", "k"], td["n", "m", "o", "y"], td["n", "m", "o"].batch_size)
""")
def test_rows_bring_entries_to_nested_ones_of_more_dimensions(source: str) -> None:
    check(source)
