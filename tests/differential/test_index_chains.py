"""Random chains of indices: reads of reads, and writes through views of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .oracle import OURS, PEER, Side, differences, outcome
from .test_stored_index import close, in_memory, stored
from .writes import changed, like

CHAINS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def terms(size: int) -> st.SearchStrategy[str]:
    """One index term, as text, for a dimension of that size (now and then out of range)."""
    whole = st.integers(-size - 1, size)
    near = st.integers(-size, max(size - 1, 0))
    bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
    rows = st.lists(near, max_size=4)
    return st.one_of(
        whole.map(str),
        st.tuples(bound, bound, st.one_of(st.none(), st.integers(1, 3))).map(lambda s: f"slice{s}"),
        rows.map(str),
        rows.map(lambda r: f"torch.tensor({r}, dtype=torch.int64)"),
        rows.map(lambda r: f"np.array({r}, dtype=np.int64)"),
        st.lists(st.booleans(), min_size=size, max_size=size).map(lambda m: f"torch.tensor({m}, dtype=torch.bool)"),
        st.tuples(near, near).map(lambda ij: f"torch.tensor([[{ij[0]}], [{ij[1]}]])"),
        st.just(":"),
        near.map(lambda i: f"torch.tensor({i})"),
    )


def ones(M: Side, part: Any) -> Any:
    return part.apply(torch.ones_like, filter_empty=False)


@st.composite
def index_texts(draw: Callable[..., Any], batch: tuple[int, ...]) -> str:
    """A tuple of at most as many consuming terms as there are dimensions, with None and Ellipsis between."""
    used = draw(st.integers(0, len(batch)))
    parts = [draw(terms(size)) for size in batch[:used]]
    for extra, often in (("None", 3), ("...", 4)):
        if draw(st.integers(0, often)) == 0:
            parts.insert(draw(st.integers(0, len(parts))), extra)
    return f"np.s_[{', '.join(parts)},]" if parts else "..."


def evaluate(text: str) -> Any:
    return eval(text, {"np": PEER.np, "torch": torch})


def chain(data: st.DataObject, sample: str) -> list[str]:
    """Up to three indices, each drawn for the batch that the peer has after those before it."""
    td, texts = PEER.sample(sample), []
    for _ in range(data.draw(st.integers(1, 3), label="length")):
        texts.append(data.draw(index_texts(tuple(td.batch_size)), label="index"))
        try:
            td = td[evaluate(texts[-1])]
        except Exception:  # the error itself is compared by the test
            break
    return texts


def compare(texts: list[str], sample: str, program: Callable[[Side], object]) -> None:
    found = list(differences(outcome(lambda: program(PEER), forgive=True), outcome(lambda: program(OURS))))
    assert not found, "\n".join([f"{sample}{''.join(f'[{text}]' for text in texts)}", *found[:8]])


@pytest.mark.parametrize("sample", ["nested", "deep_batch", "cube"])
@CHAINS
@given(data=st.data())
def test_reads(sample: str, data: st.DataObject) -> None:
    texts = chain(data, sample)

    def program(M: Side) -> object:
        td = M.sample(sample)
        for text in texts:
            td = td[evaluate(text)]
        return td

    compare(texts, sample, program)


@pytest.mark.parametrize("sample", ["nested", "deep_batch", "cube"])
@CHAINS
@given(data=st.data())
def test_writes(sample: str, data: st.DataObject) -> None:
    texts = chain(data, sample)
    scalar = data.draw(st.booleans(), label="scalar")

    def program(M: Side) -> object:
        td = view = M.sample(sample)
        for text in texts[:-1]:
            view = view[evaluate(text)]
        last = evaluate(texts[-1])
        # The peer neither casts nor goes into larger nested batches at rows (see intended.py): it gets
        # the number in each leaf's dtype, and the nested batches that are there.
        if M.is_peer:
            made = (ones, lambda M, part: part.apply(changed, filter_empty=False))
        else:
            made = (lambda M, part: 1, like)
        done = M.attempt(lambda: view.__setitem__(last, made[0 if scalar else 1](M, view[last])))
        return done, td, view

    compare(texts, sample, program)


@pytest.mark.parametrize("sample", ["nested", "cube"])
@CHAINS
@given(data=st.data())
def test_stored_reads(sample: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same chain on a file, where each step is a window and only the last one reads."""
    texts = chain(data, sample)
    path = tmp_path_factory.getbasetemp() / f"chain-{sample}.h5"
    path.unlink(missing_ok=True)
    ours = stored(path, sample)

    def walk(td: Any) -> object:
        for text in texts:
            td = td[evaluate(text)]
        return in_memory(td)

    found = list(differences(outcome(lambda: walk(PEER.sample(sample)), forgive=True), outcome(lambda: walk(ours))))
    close(ours)
    assert not found, "\n".join([f"{sample}{texts}", *found[:8]])
