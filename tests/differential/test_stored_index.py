"""The index cases of memory, on data in an HDF5 file: where the data lives must not change an answer.

The peer's in-memory TensorDict is the oracle (its own HDF5 class refuses or misreads many of these).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .cases import grouped
from .indices import INTO_FEATURES, TOO_MANY, index_of, indices_for
from .intended import INTENDED, NAMES_AFTER
from .oracle import OURS, PEER, SELF_CHECK, Raised, describe, differences, outcome, raises
from .structures import SAMPLES, t
from .writes import as_torch, like

WRITES = {
    "1": lambda M, part: 1,
    "td": lambda M, part: like(M, part.to_tensordict()),
    "some keys": lambda M, part: M.td({"a": part["a"] * 0}, part.batch_size),
    "a new key": lambda M, part: M.td({"new": t(*part.batch_size, 2)}, part.batch_size),
}
READS = [(s, text) for s in SAMPLES for text in indices_for(SAMPLES[s].batch) + TOO_MANY.get(s, [])]
FEWER = [(s, text) for s, text in READS if s in ("nested", "scalar", "text")]


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("h5")
    opened = {name: stored(folder / f"{name}.h5", name) for name in SAMPLES}
    yield opened
    for td in opened.values():
        close(td)


def stored(path: Path, sample: str) -> Any:
    td = OURS.sample(sample)
    return td if SELF_CHECK else td.to_h5(str(path))


def close(td: Any) -> None:
    if not SELF_CHECK:
        td.close()


def assert_equal(what: str, want: object, got: object) -> None:
    found = list(differences(want, got))
    assert not found, "\n".join([what, *found[:8]])


def peer_read(sample: str, text: str) -> object:
    """What the peer reads; where its names do not fit, those that intended.py gives."""
    td, index = PEER.sample(sample), index_of(text, SAMPLES[sample].batch)
    if sample == "named" and text in NAMES_AFTER and not SELF_CHECK:
        td.names = None
        td = td[index]
        td.names = NAMES_AFTER[text]
        return in_memory(td)
    return in_memory(td[index])


def meant(case: str, peer: object) -> object:
    """What intended.py gives for the same case in memory, where the peer refuses or ours does."""
    entry = next((entry for entry in INTENDED if entry.covers(case, peer)), None)
    if entry is None or SELF_CHECK or (entry.ours is None and " = " not in case):
        return peer
    return entry.expected(case, peer, OURS)


def in_memory(td: Any) -> object:
    """Described as a plain TensorDict of memory; locks and classes of the store are not compared."""
    plain = td.to_tensordict()
    return describe(plain.unlock_() if plain.is_locked else plain)


@pytest.mark.parametrize("sample", list(SAMPLES))
def test_whole(sample: str, read_only: dict[str, Any]) -> None:
    td = read_only[sample]
    assert_equal(sample, in_memory(PEER.sample(sample)), in_memory(td))
    for name in ("batch_size", "names", "device"):
        assert_equal(name, describe(getattr(PEER.sample(sample), name)), describe(getattr(td, name)))
    for flags in ((False, False), (True, False), (True, True)):
        assert_equal(f"keys{flags}", describe(PEER.sample(sample).keys(*flags)), describe(td.keys(*flags)))


@grouped(("sample", "text"), READS)
def test_read(sample: str, text: str, read_only: dict[str, Any]) -> None:
    index = index_of(text, SAMPLES[sample].batch)
    want = meant(f"{sample}[{text}]", outcome(lambda: peer_read(sample, text), forgive=True))
    got = outcome(lambda: in_memory(read_only[sample][index]))
    assert_equal(f"{sample}[{text}]", want, got)
    got_size = outcome(lambda: read_only[sample][index].batch_size)
    assert_equal(
        "batch size before the data is read",
        meant(f"{sample}[{text}]", outcome(lambda: PEER.sample(sample)[index].batch_size, forgive=True)),
        got_size,
    )


@grouped(("sample", "text"), FEWER)
def test_read_one_leaf(sample: str, text: str, read_only: dict[str, Any]) -> None:
    index = index_of(text, SAMPLES[sample].batch)
    keys = list(PEER.sample(sample).keys(True, True))
    for key in keys:
        want = meant(f"{sample}[{text}]", outcome(lambda: PEER.sample(sample)[index].get(key), forgive=True))
        assert_equal(f"{sample}[{text}][{key!r}]", want, outcome(lambda: read_only[sample][index].get(key)))
        assert_equal(
            f"get_at {key!r}",
            # Alone on a tensor, the peer reads a nested list as several indices.
            outcome(lambda: PEER.sample(sample).get_at(key, as_torch(index)), forgive=True),
            outcome(lambda: read_only[sample].get_at(key, index)),
        )


@pytest.mark.parametrize(
    ("sample", "text", "write"),
    # A number over text is another matter in memory as well (intended.py).
    [(s, text, write) for s, text in FEWER for write in WRITES if (s, write) != ("text", "1")],
)
def test_write(sample: str, text: str, write: str, tmp_path: Path) -> None:
    """The step, what the open TensorDict then holds, and what is found after opening the file again."""
    index = index_of(text, SAMPLES[sample].batch)
    make = WRITES[write]
    case = f"{sample}[{text}] = {write}"

    def step(M: Any, td: Any) -> Any:
        return M.attempt(lambda: td.__setitem__(index, make(M, td[index])))

    peer = PEER.sample(sample)
    want, after, *_ = meant(case, (describe(step(PEER, peer)), in_memory(peer), {}))  # type: ignore[misc]
    ours = stored(tmp_path / "data.h5", sample)
    assert_equal(case, want, describe(step(OURS, ours)))
    assert_equal(f"after {case}", after, in_memory(ours))
    if not SELF_CHECK:
        ours.close()
        again = OURS.PersistentTensorDict.from_h5(str(tmp_path / "data.h5"))
        assert_equal(f"reopened after {case}", after, in_memory(again))
        again.close()


@pytest.mark.skipif(SELF_CHECK, reason="the peer indexes feature dimensions")
@pytest.mark.parametrize("text", INTO_FEATURES)
def test_more_terms_than_batch_dimensions(text: str, read_only: dict[str, Any]) -> None:
    result = outcome(lambda: read_only["wide"][index_of(text, (4,))])
    assert_equal(f"wide[{text}]", raises("IndexError"), result)


@pytest.mark.parametrize(
    "text", ["0", "-1", "1:3", "[2, 0, 0]", "mask(1)", ":, 0", "1, 2", "tensor([[0, 1], [2, 0]])", "None"]
)
def test_in_place_reaches_the_file(text: str, tmp_path: Path) -> None:
    """set_, set_at_, update_, update_at_, zero_ and += are lost by the peer's store, or partly (API.md 5.A)."""
    index = index_of(text, (4, 3))
    steps = {
        "set_": lambda M, td: td.set_("a", t(4, 3, start=40)),
        "set_ nested": lambda M, td: td.set_(("n", "b"), t(4, 3, 2, start=40)),
        "set_at_": lambda M, td: td.set_at_("a", 9.0, index),
        "set_at_ nested": lambda M, td: td.set_at_(("n", "b"), 9, index),
        "update_": lambda M, td: td.update_({"a": t(4, 3, start=40), "n": {"b": t(4, 3, 2, start=40)}}),
        "update_at_": lambda M, td: td.update_at_({"a": td.get_at("a", index) + 1}, index),
        "zero_": lambda M, td: td["n"].zero_(),
        "fill_": lambda M, td: td.fill_("a", 7),
        "mul_": lambda M, td: td.exclude(("n", "m")).mul_(3),
        "apply_": lambda M, td: td.apply_(lambda x: x ^ True if x.dtype == torch.bool else x + 1),
    }
    for name, step in steps.items():
        peer, path = PEER.sample("nested"), tmp_path / f"{name.replace(' ', '_')}.h5"
        ours = stored(path, "nested")
        assert_equal(
            name,
            describe_error(outcome(lambda: step(PEER, peer), forgive=True)),
            describe_error(outcome(lambda: step(OURS, ours))),
        )
        assert_equal(f"after {name}", in_memory(peer), in_memory(ours))
        if not SELF_CHECK:
            ours.close()
            again = OURS.PersistentTensorDict.from_h5(str(path))
            assert_equal(f"reopened after {name}", in_memory(peer), in_memory(again))
            again.close()


def describe_error(result: object) -> object:
    """Only whether a step failed, and how: what it returns differs between a store and memory."""
    return result if isinstance(result, Raised) else None
