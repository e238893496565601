"""How containers print, as the peer's do, and how they show in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tdstore.container.display import html
from tests.peer import SINCE_15, tensordict
from tests.torch_integration.containers import CONTAINERS, sample

VOID = {"img", "br", "hr", "meta", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close, and gathers the text and the tags."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def page(td):
    return Page(td._repr_html_())


# -- repr -----------------------------------------------------------------------------------

SAMPLES = {
    "plain": sample,
    "empty": lambda M: M.TensorDict({}, [2]),
    "dtypes": lambda M: M.TensorDict(
        {"z": torch.zeros(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.bool)}, [2]
    ),
    "values": lambda M: M.TensorDict({"s": "text", "o": None, "x": torch.ones(3)}, [3]),
    "device": lambda M: sample(M).to("cpu"),
    "meta": lambda M: sample(M).to("meta"),
    "nested deeper": lambda M: M.TensorDict({"n": {"m": {"x": torch.ones(2)}}}, []),
    "lazy": lambda M: M.lazy_stack([sample(M), sample(M)], 1),
    "lazy, uneven": lambda M: M.lazy_stack(
        [M.TensorDict({"a": torch.ones(2 + i), **({"only": torch.ones(1)} if i else {})}) for i in range(2)]
    ),
    "lazy inside": lambda M: M.TensorDict({"l": M.lazy_stack([sample(M), sample(M)])}, [2]),
    "shared": lambda M: sample(M).share_memory_(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_repr_is_the_peers(name):
    assert repr(SAMPLES[name](tdstore)) == repr(SAMPLES[name](tensordict))


def test_a_memmap_prints_as_the_peers(tmp_path):
    mine, theirs = sample().memmap(tmp_path / "a"), sample(tensordict).memmap(tmp_path / "b")
    assert repr(mine) == repr(theirs)


LONG = "k" * 33
COMPACT = {
    "plain": "TensorDict(batch_size=[3,2], fields={a: f32[4], n: {b: f32[]}})",
    "empty": "TensorDict(batch_size=[2], fields={})",
    "dtypes": "TensorDict(batch_size=[2], fields={b: bool[], z: bf16[]})",
    "values": "TensorDict(batch_size=[3], fields={o: NoneType, s: str, x: f32[]})",
    "device": "TensorDict(batch_size=[3,2], device=cpu, fields={a: f32[4], n: {b: f32[]}})",
    "nested deeper": "TensorDict(batch_size=[], fields={n: {m: {x: f32[2]}}})",
    "lazy, uneven": "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={\n    a: f32[-1]}, "
    "exclusive_fields={1: {only: f32[1]}})",
    "lazy inside": "TensorDict(batch_size=[2], fields={\n    l: LazyStackedTensorDict[3,2]{a: f32[4], n: {b: f32[]}}})",
}
SAMPLES_OF_COMPACT = {
    **SAMPLES,
    "on meta": lambda M: M.TensorDict({"a": torch.zeros(2, device="meta"), "b": torch.zeros(2)}, [2]),
    "wider": lambda M: M.TensorDict({"n": M.TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4])}, [3]),
    "rows": lambda M: M.TensorDict(
        {"r": ["x", "y"], "d": M.NonTensorData({"q": 1}, [2]), "m": M.MetaData(1, [2])}, [2]
    ),
    "params": lambda M: M.TensorDictParams(M.TensorDict({"w": torch.zeros(3), "n": {"v": torch.zeros(2)}})),
    "params inside": lambda M: M.TensorDict({"p": M.TensorDictParams(M.TensorDict({"w": torch.zeros(3)}))}),
    "long": lambda M: M.TensorDict({"n": {LONG: torch.zeros(3), "m": {LONG + "2": torch.zeros(3)}}, "a10": 1, "a1": 1}),
    "only in some": lambda M: M.lazy_stack(
        [M.TensorDict({f"{LONG}{i}": torch.zeros(3), "n": {LONG: 1, "z": 1}}) for i in range(3)] + [M.TensorDict()]
    ),
    "of uneven ranks": lambda M: M.lazy_stack([M.TensorDict({"a": torch.zeros(3, *n)}, [3]) for n in ([], [5])]),
}
OPTIONS = [{}, {"show_batch_size": False}, {"show_device": False}, {"show_dtype": False}, {"verbose": False}]
OPTIONS += [{"sort_keys": None}, {"sort_keys": len}, {"show_grad": True, "compact": True}]
needs_15 = pytest.mark.skipif(not SINCE_15, reason="this tensordict has no compact text")


def compact(M, td, **options):
    with M.set_printoptions(compact=True), M.set_printoptions(**options):
        return repr(td)


@pytest.mark.parametrize("name", COMPACT)
def test_a_compact_repr(name):
    assert compact(tdstore, SAMPLES[name](tdstore)) == COMPACT[name]


@needs_15
@pytest.mark.parametrize("name", SAMPLES_OF_COMPACT)
def test_a_compact_repr_is_the_peers(name):
    for options in OPTIONS:
        mine, theirs = (compact(M, SAMPLES_OF_COMPACT[name](M), **options) for M in (tdstore, tensordict))
        assert mine == theirs, options


@pytest.mark.parametrize("base", ["TensorClass", "TypedTensorDict"])
def test_a_compact_repr_of_a_class(base):
    def declare(M):
        fields = {"b": torch.Tensor, "a": torch.Tensor, "n": M.TensorDict}
        body = {"__annotations__": fields, "__module__": __name__, "__qualname__": "Step"}
        return type(getattr(M, base))("Step", (getattr(M, base),), body)

    text = "Step(batch_size=[2], fields={a: f32[], b: f32[3], n: {c: i64[]}})"
    for M in (tdstore, tensordict) if SINCE_15 else (tdstore,):
        Step = declare(M)  # noqa: N806
        step = Step(a=torch.zeros(2), b=torch.zeros(2, 3), n=M.TensorDict({"c": torch.arange(2)}, [2]), batch_size=[2])
        assert compact(M, step) == text
        held = M.TensorDict({"s": M.lazy_stack([step[:1]] * 2)}, [2])
        assert compact(M, held).startswith("TensorDict(batch_size=[2], fields={")
        if base == "TensorClass":
            del step.a
            assert compact(M, step) == "Step(batch_size=[2], fields={b: f32[3], n: {c: i64[]}, a: None})"
            assert compact(M, held) == (
                "TensorDict(batch_size=[2], fields={\n    s: Step[1]{a: f32[], b: f32[3], n: {c: i64[]}}})"
            )


def test_a_compact_repr_reads_nothing_of_a_store(tmp_path):
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 2)}, "s": "x", "r": ["p", "q", "r"]}, [3])
    td.save(tmp_path / "td.h5").close()
    with tdstore.open(tmp_path / "td.h5") as stored:
        text = compact(tdstore, stored)
    assert text == (
        "PersistentTensorDict(batch_size=[3], fields={\n    a: f32[],\n    n: PersistentTensorDict{b: f32[2]},\n"
        "    r: NonTensorStack,\n    s: str})"
    )
    assert compact(tdstore, stored) == text  # closed


def test_what_the_long_form_alone_has_takes_the_compact_one_back():
    td = TensorDict({"a": torch.zeros(3)}, [3])
    assert tdstore.get_printoptions()["compact"] is False
    assert "requires_grad" in compact(tdstore, td, show_grad=True)
    assert "f32" in compact(tdstore, td, show_device=False)


def test_html_can_be_turned_off():
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with tdstore.set_printoptions(html=False):
        assert td._repr_html_() is None
        assert lazy_stack([td])._repr_html_() is None
    assert "</div>" in td._repr_html_()


# -- HTML -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", CONTAINERS)
def test_every_container_shows(place, tmp_path):
    shown = page(CONTAINERS[place](tmp_path))
    for word in ("a", "n", "b", "float32", "[3, 2, 4]", "[3, 2]", "cpu"):
        assert word in shown.text, word
    assert [tag for tag, _ in shown.tags].count("details") == 2
    if place in ("memmap", "h5", "zarr", "window"):
        assert str(tmp_path) in shown.text


def test_what_it_says(tmp_path):
    td = TensorDict(
        {"obs": torch.zeros(1000, 84, dtype=torch.uint8), "n": {"x": torch.zeros(1000, dtype=torch.bfloat16)}},
        [1000],
        names=["time"],
    ).set("task", "walk")
    text = page(td).text
    assert all(w in text for w in ("batch [1000]", "names time", "84.0 KiB", "82.0 KiB", "uint8", "bfloat16", "'walk'"))
    assert "locked" in page(td.lock_()).text
    td.save(tmp_path / "td.h5", chunks=(100,), compression="gzip")
    with tdstore.open(tmp_path / "td.h5") as stored:
        text = page(stored).text
        assert "chunks=(100, 84)" in text
        assert "compression='gzip'" in text
        assert "[10, 84]" in page(stored[10:20]).text
    with tdstore.open(td.save(tmp_path / "td").saved_path) as mapped:
        pass
    assert "closed" in page(mapped).text
    text = page(
        lazy_stack([TensorDict({"a": torch.ones(2 + i), **({"z": torch.ones(1)} if i else {})}) for i in range(2)])
    ).text
    assert all(w in text for w in ("a stack of 2 along 0", "[2, -1]", "only in 1 z"))


BAD = "<script>alert(1)</script>"


def test_nothing_from_outside_is_markup(tmp_path):
    class Odd:
        def __repr__(self):
            return f"{BAD}'\"&"

    td = TensorDict({BAD: torch.ones(2), f"n{BAD}": {BAD: torch.ones(2)}}, [2], names=[BAD])
    td.set_non_tensor("<b>", f"<img src=x onerror=alert(2)>{BAD}")
    td.set_non_tensor("odd", Odd())
    td["rows"] = [BAD, "</td>"]
    wild = tmp_path / "<img src=x>"
    saved = td.exclude("odd").save(wild)
    shapes = torch.utils._pytree.tree_map(lambda t: BAD, td)
    for shown in map(page, (td, saved, lazy_stack([td, td]), lazy_stack([td, td.exclude(BAD)]), shapes)):
        tags = {tag for tag, _ in shown.tags}
        assert tags <= {"style", "div", "details", "summary", "b", "span", "table", "tr", "th", "td"}
        assert all(set(attrs) <= {"class", "open", "colspan"} for _, attrs in shown.tags)
        assert BAD in shown.text
    assert "<img src=x>" in page(saved).text


def test_a_value_whose_repr_fails_still_shows():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    td = TensorDict({"x": torch.ones(2)}, [2]).set_non_tensor("v", Broken())
    assert "Broken" in page(td).text


def test_it_stays_small():
    many = TensorDict({f"k{i:05d}": torch.zeros(1) for i in range(5000)}, [1])
    shown = page(many)
    assert "and 4940 more entries" in shown.text
    assert len(many._repr_html_()) < 40_000
    wide = TensorDict({f"g{i}": {f"k{j}": torch.zeros(1) for j in range(50)} for i in range(50)}, [1])
    assert len(wide._repr_html_()) < 200_000
    deep = TensorDict({"x": torch.ones(1)}, [1])
    for _ in range(40):
        deep = TensorDict({"n": deep}, [1])
    assert "nested deeper" in page(deep).text
    long = TensorDict({"k" * 5000: torch.ones(1)}, [1]).set_non_tensor("v", "x" * 100_000)
    assert len(long._repr_html_()) < 5_000


def test_nothing_is_read_or_fetched(tmp_path, monkeypatch):
    td = sample().set("s", "text")
    td["rows"] = [["a", "b"]] * 3
    td.save(tmp_path / "td.h5")
    with tdstore.open(tmp_path / "td.h5") as stored:
        monkeypatch.setattr(type(stored._handle.store), "read", lambda *a: pytest.fail("it reads"))
        assert "'text'" in page(stored).text
    source = td._repr_html_()
    assert not re.search(r"src=|href=|url\(|@import|http", source)
    assert html.ROWS_OF_A_LEVEL <= html.ROWS_IN_ALL


def test_html_says_how_zarr_keeps_a_leaf(tmp_path):
    TensorDict({"obs": torch.zeros(64, 8)}, [64]).save(tmp_path / "td.zarr", chunks=(8, 8), shards=(32, 8))
    with tdstore.open(tmp_path / "td.zarr") as td:
        text = td._repr_html_()
        assert "chunks=(8, 8)" in text
        assert "shards=(32, 8)" in text
        assert "codecs=&#x27;" in text
