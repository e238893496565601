"""One buffer for all leaves: in memory, and as the file that `tensordict` reads and writes too."""

from __future__ import annotations

import copy
import json
import os
import pickle

import pytest
import tensordict
import torch

import tdstore
from tdstore import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError, StoreNotFoundError, UnsupportedError, UntrustedDataError

BOTH = pytest.mark.parametrize("module", [tdstore, tensordict], ids=["ours", "peer"])


def example(module=tdstore):
    """RL.md F2: leaves of 12, 24 and 3 bytes."""
    below = module.TensorDict(
        {"c": torch.arange(6, dtype=torch.int32).view(3, 2), "d": torch.ones(3, dtype=torch.bool)}, [3]
    )
    return module.TensorDict({"a": torch.arange(3.0), "b": below, "s": "hi"}, [3], names=["t"])


def bits(leaf) -> list[int]:
    return leaf.reshape(-1).view(torch.uint8).tolist()


def same(a, b) -> bool:
    """Entries, order and facts of two TensorDicts of either package."""
    if list(a.keys()) != list(b.keys()) or a.batch_size != b.batch_size or a.names != b.names or a.device != b.device:
        return False
    for key in a.keys():
        mine, theirs = a[key], b[key]
        if hasattr(mine, "batch_size"):
            if not same(mine, theirs):
                return False
        elif isinstance(mine, torch.Tensor):
            if (mine.dtype, mine.shape, bits(mine)) != (theirs.dtype, theirs.shape, bits(theirs)):
                return False
        elif mine != theirs:
            return False
    return True


def storages(td) -> int:
    return len({leaf.untyped_storage().data_ptr() for leaf in td.values(True, True) if leaf.numel()})


def containers(tmp_path):
    """The same data in every kind of container."""
    td = example()
    window = tdstore.copy(td, tmp_path / "w.h5", storage="h5", mode="w")
    opened = tdstore.open(tmp_path / "w.h5") if window is None or not hasattr(window, "keys") else window
    return {
        "memory": td,
        "memmap": td.memmap(tmp_path / "mm"),
        "h5": td.save(tmp_path / "x.h5", storage="h5"),
        "zarr": td.save(tmp_path / "x.zarr", storage="zarr"),
        "window": opened[:],
        "lazy": lazy_stack(list(td.unbind(0)), 0),
    }


# -- in memory -------------------------------------------------------------------------------
@BOTH
def test_one_buffer(module):
    td = example(module)
    one = td.consolidate()
    assert [leaf.storage_offset() * leaf.element_size() for leaf in one.values(True, True)] == [0, 16, 40]
    assert one["a"].untyped_storage().nbytes() == 48
    assert (one.is_consolidated(), one.is_locked, td.is_consolidated(), td.is_locked) == (True, True, False, False)
    assert same(one, td)
    assert one.consolidate() is one
    one["a"].fill_(9)
    assert td["a"].tolist() == [0, 1, 2]


LOST = {
    "index": lambda c: c[0],
    "clone": lambda c: c.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "select": lambda c: c.select("a"),
    "cast": lambda c: c.to(torch.float64),
    "view": lambda c: c.view(3, 1),
    "add": lambda c: c + 1,
    "nested": lambda c: c["b"],
    "unlock": lambda c: c.unlock_(),
    "contiguous": lambda c: c.contiguous(),
    "to_tensordict": lambda c: c.to_tensordict(),
}
KEPT = {
    "to": lambda c: c.to("cpu"),
    "to meta": lambda c: c.to("meta"),
    "set_": lambda c: c.set_("a", torch.ones(3)),
    "lock": lambda c: c.lock_(),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
}


@BOTH
@pytest.mark.parametrize("name", [*LOST, *KEPT])
def test_what_loses_it(module, name):
    td = example(module).exclude("s") if name == "add" else example(module)
    assert (LOST | KEPT)[name](td.consolidate()).is_consolidated() is (name in KEPT)


@pytest.mark.parametrize("kind", ["memory", "memmap", "h5", "zarr", "window", "lazy"])
def test_every_container(tmp_path, kind):
    td = containers(tmp_path)[kind]
    for one in (td.consolidate(), td.consolidate(tmp_path / "one.td"), tdstore.from_consolidated(tmp_path / "one.td")):
        assert one.is_consolidated()
        assert storages(one if kind != "lazy" else one[0]) == 1
        assert same(one.to_tensordict().clear_device_(), td.to_tensordict().clear_device_())
    assert os.listdir(tmp_path).count("one.td") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tdstore")]


def test_a_tensor_set_below_is_noticed(tmp_path):
    example().consolidate(tmp_path / "x.td")
    td = tdstore.from_consolidated(tmp_path / "x.td")
    td["b"]["new"] = torch.ones(3)
    assert not td.is_consolidated()
    assert same(pickle.loads(pickle.dumps(td)), td)


def test_moves_and_pickles_as_one_piece():
    td = TensorDict({f"k{i}": torch.full((1000,), float(i)) for i in range(20)}, [1000], device="cpu").consolidate()
    data = pickle.dumps(td)
    assert len(data) < 80_000 + 5_000, "the buffer once, and a little"
    back = pickle.loads(data)
    assert storages(back) == 1
    assert (back.is_locked, back.device) == (False, torch.device("cpu"))
    assert same(back, td)
    meta = td.to("meta")
    assert {leaf.device.type for leaf in meta.values()} == {"meta"}
    assert meta.device == torch.device("meta")
    assert meta["k7"].storage_offset() == td["k7"].storage_offset()


def test_any_value_is_pickled_with_it():
    td = TensorDict({"a": torch.ones(2), "v": NonTensorData({1, 2}, [2]), "w": NonTensorStack("x", (1, 2))}, [2])
    back = pickle.loads(pickle.dumps(td.consolidate()))
    assert back["v"] == {1, 2}
    assert back["w"] == ["x", (1, 2)]


def test_options():
    td = example()
    shared = td.consolidate(share_memory=True)
    assert shared.is_shared()
    assert shared["b", "d"].is_shared()
    assert td.consolidate(num_threads=3, metadata=True)["a"].tolist() == [0, 1, 2]
    assert td.consolidate(return_early=True).result().is_consolidated()
    assert td.consolidate(device="meta")["a"].device.type == "meta"
    here = td.consolidate(inplace=True)
    assert here is td
    assert td.is_consolidated()
    assert td.is_locked
    if torch.accelerator.is_available():
        pinned = example().consolidate(pin_memory=True)
        assert pinned["b", "d"].is_pinned()
        assert pinned["a"].tolist() == [0, 1, 2]
    else:
        with pytest.raises(RuntimeError):
            example().consolidate(pin_memory=True)


@pytest.mark.filterwarnings("ignore:.*prototype stage")
def test_sparse_and_strided_nested_are_refused(tmp_path):
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for leaf in (torch.eye(2).to_sparse(), strided):
        for to in (None, tmp_path / "x.td"):
            with pytest.raises(UnsupportedError):
                TensorDict({"x": leaf}).consolidate(to)
    assert os.listdir(tmp_path) == []


# -- files -----------------------------------------------------------------------------------
def cases(module):
    td, stack = module.TensorDict, module.NonTensorStack
    values = {"i": 1, "f": 1.5, "n": None, "l": [1, "x"], "d": {"a": [True]}, "u": "é"}
    yield "plain", example(module)
    yield "empty", td({}, [2])
    yield "empty leaf", td({"e": torch.zeros(0, 3), "x": torch.ones(2), "n": td({}, [])}, [])
    yield "values", td({k: module.NonTensorData(v) for k, v in values.items()}, [])
    yield "stack", td({"s": stack("a", "b"), "x": torch.ones(2)}, [2])
    yield "stack of stacks", td({"s": stack(stack("a", "b"), stack("c", "d"), stack("e", "f"))}, [3, 2])
    yield "scalar", td({"x": torch.tensor(3)}, [])
    yield "deep", td({"a": {"b": {"c": torch.ones(1)}}, "a.b": torch.zeros(1), "leaves": torch.ones(1)}, [])
    yield "device", td({"x": torch.ones(2)}, [2], device="cpu")
    yield "expanded", td({"x": torch.arange(3.0).expand(4, 3), "t": torch.arange(8).view(2, 4).t()}, [4])


@pytest.mark.parametrize("number", range(10))
def test_both_ways(tmp_path, number):
    name, ours = list(cases(tdstore))[number]
    _, theirs = list(cases(tensordict))[number]
    ours.consolidate(tmp_path / "ours.td")
    theirs.consolidate(tmp_path / "theirs.td")
    from_ours, from_theirs = (
        tensordict.from_consolidated(tmp_path / "ours.td"),
        tdstore.from_consolidated(tmp_path / "theirs.td"),
    )
    assert same(tdstore.from_consolidated(tmp_path / "ours.td"), ours), name
    # The peer forgets the order of entries of different kinds.
    assert set(from_ours.keys(True)) == set(theirs.keys(True)), name
    assert same(from_theirs.select(*from_ours.keys()), from_ours.select(*from_ours.keys())) or number in (4, 5), name
    for key in ours.keys(True, True):
        assert torch.equal(from_ours[key], theirs[key])
        assert torch.equal(from_theirs[key], theirs[key])
    if number in (4, 5):
        assert from_theirs["s"] == theirs["s"] == from_ours["s"]


@pytest.mark.parametrize("name", NAME_TO_DTYPE)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes(tmp_path, name):
    leaf = torch.randint(0, 100, (3 * 16,), dtype=torch.uint8).view(NAME_TO_DTYPE[name])[:3]
    leaf = leaf.ne(0) if name == "bool" else leaf
    td = TensorDict({"one": torch.ones(1), "x": leaf, "two": torch.ones(1, dtype=torch.int8)})
    td.consolidate(tmp_path / "x.td")
    assert same(tdstore.from_consolidated(tmp_path / "x.td"), td)
    assert same(pickle.loads(pickle.dumps(td.consolidate())), td)
    if name.startswith("float8"):  # the peer can neither write nor read them, and says so
        with pytest.raises(KeyError):
            tensordict.from_consolidated(tmp_path / "x.td")
    else:  # (the peer writes complex128 behind 8 bytes so that nobody can read it; ours it reads)
        assert same(tensordict.from_consolidated(tmp_path / "x.td").select("one", "x", "two"), td)


def jagged():
    offsets = torch.tensor([0, 4, 10])
    return {
        "offsets": torch.nested.nested_tensor_from_jagged(torch.arange(10.0), offsets),
        "lengths": torch.nested.nested_tensor_from_jagged(torch.arange(10.0), offsets, torch.tensor([2, 3])),
        "dim 2": torch.nested.nested_tensor_from_jagged(torch.arange(20.0).view(2, 10), offsets, jagged_dim=2),
    }


@pytest.mark.parametrize("kind", ["offsets", "lengths", "dim 2"])
def test_jagged(tmp_path, kind):
    leaf = jagged()[kind]
    rows = [row.tolist() for row in leaf.unbind()]
    td = TensorDict({"z": torch.ones(2), "n": {"j": leaf}, "x": torch.ones(2)}, [2])
    theirs = tensordict.TensorDict({"n": {"j": leaf}, "x": torch.ones(2)}, [2])
    td.consolidate(tmp_path / "ours.td")
    theirs.consolidate(tmp_path / "theirs.td")
    one = td.consolidate()
    assert one.is_consolidated()
    for found in (
        one,
        pickle.loads(pickle.dumps(one)),
        tdstore.from_consolidated(tmp_path / "ours.td"),
        tdstore.from_consolidated(tmp_path / "theirs.td"),
        tensordict.from_consolidated(tmp_path / "ours.td"),
    ):
        assert [row.tolist() for row in found["n", "j"].unbind()] == rows
    assert list(tdstore.from_consolidated(tmp_path / "ours.td").keys()) == ["z", "n", "x"]


def test_what_the_peer_loses_is_kept(tmp_path):
    nested = {key: {"y": torch.ones(1)} for key in ("leaves", "non_tensors", "cls", "cls_metadata", "size")}
    odd = {"t": NonTensorData((1, b"x")), "s": NonTensorData(float("nan")), "k": NonTensorData({"$a": 1})}
    td = TensorDict({"x": torch.ones(2), **nested, **odd, "last": torch.ones(1)})
    td.consolidate(tmp_path / "x.td")
    back = tdstore.from_consolidated(tmp_path / "x.td")
    assert list(back.keys()) == list(td.keys())
    assert back["size", "y"].tolist() == [1]
    assert back["t"] == (1, b"x")
    assert back["k"] == {"$a": 1}
    assert sorted(tensordict.from_consolidated(tmp_path / "x.td").keys()) == ["last", "x"]


def test_lazy_stack_of_different_shapes(tmp_path):
    for module in (tdstore, tensordict):
        stack = module.lazy_stack([module.TensorDict({"x": torch.ones(n), "i": str(n)}) for n in (2, 3)])
        td = module.TensorDict({"l": stack}, [2])
        place = tmp_path / f"{module.__name__}.td"  # the peer does not cut off what is behind its own bytes
        td.consolidate(place)
        for reader in (tdstore, tensordict):
            back = reader.from_consolidated(place)["l"]
            assert type(back).__name__ == "LazyStackedTensorDict"
            assert [part.shape[0] for part in back.get("x", as_list=True)] == [2, 3]
            assert back[1]["i"] == "3"


def test_the_file_is_mapped(tmp_path):
    one = example().consolidate(tmp_path / "x.td")
    one.set_("a", torch.full((3,), 7.0))
    private, through = (
        tdstore.from_consolidated(tmp_path / "x.td"),
        tdstore.from_consolidated(tmp_path / "x.td", mode="r+"),
    )
    assert private["a"].tolist() == [7, 7, 7]
    private["a"].fill_(1)
    assert through["a"].tolist() == [7, 7, 7]
    through["b", "d"].fill_(False)
    assert tensordict.from_consolidated(tmp_path / "x.td")["b", "d"].tolist() == [False] * 3


def test_replaced_in_one_step(tmp_path, monkeypatch):
    old = TensorDict({"x": torch.arange(100.0)}).consolidate(tmp_path / "x.td")
    with pytest.raises(UntrustedDataError):
        TensorDict({"x": torch.ones(3), "v": NonTensorData(object())}).consolidate(tmp_path / "x.td")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "no")))
    with pytest.raises(OSError, match="no"):
        TensorDict({"x": torch.ones(3)}).consolidate(tmp_path / "x.td")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x.td"]
    assert same(tdstore.from_consolidated(tmp_path / "x.td"), old.copy().clear_device_())
    TensorDict({"x": torch.ones(3)}).consolidate(tmp_path / "x.td")
    assert (tmp_path / "x.td").stat().st_size < 400
    assert old["x"][99] == 99, "who has the old file mapped keeps it"


def test_wrong_arguments(tmp_path):
    with pytest.raises(RuntimeError):
        example(tensordict).consolidate(tmp_path / "x.td", device="meta")
    with pytest.raises(RuntimeError):
        example().consolidate(tmp_path / "x.td", device="meta")
    for module in (tensordict, tdstore):
        assert example(module).consolidate(tmp_path / "x.td", device="cpu").is_consolidated()
    with pytest.raises(StoreNotFoundError):
        tdstore.from_consolidated(tmp_path / "nothing.td")


# -- hostile files ---------------------------------------------------------------------------
def crafted(change):
    document = {
        "cls": "TensorDict",
        "non_tensors": {"s": ["hi", [2], None]},
        "leaves": {"a": ["torch.float32", [2], 0, 8, 0], "b": ["torch.int64", [2], 8, 24, 0]},
        "cls_metadata": {"device": None, "names": [None], "batch_size": [2], "is_locked": False},
        "n": {
            "cls": "TensorDict",
            "non_tensors": {},
            "leaves": {},
            "cls_metadata": {"device": None, "names": [None], "batch_size": [2], "is_locked": False},
        },
    }
    change(document)
    return document


def setting(*path_and_value):
    *path, last, value = path_and_value

    def change(document):
        for key in path:
            document = document[key]
        document[last] = value

    return change


HOSTILE = {
    "beyond the end": setting("leaves", "a", ["torch.float32", [2], 24, 32, 0]),
    "overlap": setting("leaves", "b", ["torch.int64", [1], 0, 8, 0]),
    "wrong length": setting("leaves", "b", ["torch.int64", [3], 8, 24, 0]),
    "huge": setting("leaves", "b", ["torch.int64", [2**61], 8, 24, 0]),
    "huge product": setting("leaves", "b", ["torch.int64", [2**40, 2**40], 8, 24, 0]),
    "negative": setting("leaves", "b", ["torch.int64", [-2, -1], 8, 24, 0]),
    "negative start": setting("leaves", "b", ["torch.int64", [2], -8, 8, 0]),
    "negative pad": setting("leaves", "b", ["torch.int64", [2], 8, 16, -8]),
    "misaligned": setting("leaves", "b", ["torch.int64", [1], 12, 20, 0]),
    "bool": setting("leaves", "b", ["torch.int64", [True], 8, 16, 0]),
    "dtype": setting("leaves", "b", ["os.system", [2], 8, 24, 0]),
    "record": setting("leaves", "b", ["torch.int64"]),
    "cls": setting("cls", "os.system"),
    "nested cls": setting("n", "cls", "__main__.Evil"),
    "no cls": setting("cls", None),
    "batch": setting("cls_metadata", "batch_size", [3]),
    "batch of text": setting("cls_metadata", "batch_size", "ab"),
    "names": setting("cls_metadata", "names", ["a", "b"]),
    "leaves": setting("leaves", [1]),
    "values": setting("non_tensors", "s", 3),
    "nested": setting("n", 3),
    "keys": setting("size", {"tdstore": 1, "keys": ["a"]}),
    "lazy": setting("n", {"cls": "LazyStackedTensorDict", "cls_metadata": {"stack_dim": 0}, "leaves": {}, "1": {}}),
    "jagged": setting("leaves", "<NJT_VALUES>j", ["torch.float32", [2], 0, 8, 0]),
}


def put(path, document, data=bytes(24), length=None) -> None:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(data + text + (len(text) if length is None else length).to_bytes(8, "little", signed=True))


def test_a_crafted_file_that_is_right_opens(tmp_path):
    put(tmp_path / "x.td", crafted(lambda document: None))
    assert list(tdstore.from_consolidated(tmp_path / "x.td").keys()) == ["a", "b", "s", "n"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_descriptions(tmp_path, name):
    put(tmp_path / "x.td", crafted(HOSTILE[name]))
    with pytest.raises(CorruptStoreError, match=r"x\.td"):
        tdstore.from_consolidated(tmp_path / "x.td")


@pytest.mark.parametrize("length", [-1, 0, 10**6, 2**62, -(2**63)])
def test_lying_lengths(tmp_path, length):
    put(tmp_path / "x.td", crafted(lambda document: None), length=length)
    with pytest.raises(CorruptStoreError):
        tdstore.from_consolidated(tmp_path / "x.td")


def test_other_hostile_files(tmp_path):
    deep = b'{"cls":"TensorDict","n":' * 5000 + b"{}" + b"}" * 5000
    for text in (b"[]", b"{", b'{"cls":"TensorDict","cls":"TensorDict"}', b"\xff\xfe", deep, b"{}"):
        put(tmp_path / "x.td", text)
        with pytest.raises(CorruptStoreError):
            tdstore.from_consolidated(tmp_path / "x.td")
    for data in (b"", b"short", bytes(1000)):
        (tmp_path / "x.td").write_bytes(data)
        with pytest.raises(CorruptStoreError):
            tdstore.from_consolidated(tmp_path / "x.td")
    for offsets in ([0, 1, 99], [0, 2, 1], [-1, 0, 1]):
        data = torch.tensor(offsets).numpy().tobytes() + bytes(8)
        leaves = {
            "<NJT_VALUES>j": ["torch.float32", [2], 24, 32, 0],
            "<NJT_OFFSETS>j": ["torch.int64", [3], 0, 24, 0, 1],
        }
        put(tmp_path / "x.td", crafted(setting("leaves", leaves)), data)
        with pytest.raises(CorruptStoreError):
            tdstore.from_consolidated(tmp_path / "x.td")


def test_stored_data_is_written_in_blocks(tmp_path, monkeypatch):
    td = TensorDict.from_schema({"x": ((1 << 20,), "uint8")}, batch_size=[40], storage="h5", location=tmp_path / "x.h5")
    td["x"] = torch.arange(40, dtype=torch.uint8).unsqueeze(1).expand(40, 1 << 20)
    read, sizes = type(td)._read_pieces, []

    def watched(self, batch):
        pieces = read(self, batch)
        sizes.append(sum(piece.nbytes for piece in pieces))
        return pieces

    monkeypatch.setattr(type(td), "_read_pieces", watched)
    one = td.consolidate(tmp_path / "x.td")
    assert (len(sizes), sum(sizes)) == (2, 40 << 20)
    assert one["x"].amax(1).tolist() == one["x"].amin(1).tolist() == list(range(40))
