"""copy, pickle and torch.save of every container; torch.load(weights_only=True) runs nothing and writes nothing."""

from __future__ import annotations

import copy
import io
import os
import pickle
import pickletools
import subprocess
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import tdstore
from tdstore import MemoryMappedTensor, NonTensorData, NonTensorStack, PersistentTensorDict, TensorDict, lazy_stack
from tdstore.errors import ReadOnlyError, StoreNotFoundError, UntrustedDataError
from tdstore.pickling import rebuild
from tdstore.testing.processes.warm import python

BY_VALUE = ["memory", "locked", "consolidated", "lazy", "anonymous", "shared", "fields"]
BY_PLACE = ["memmap", "tdz", "h5", "zarr", "window", "rows"]


def example():
    values = {"s": "hi", "v": NonTensorStack("a", "b", "c"), "d": NonTensorData({"k": (1, None)}, [3])}
    return TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}, **values}, [3], names=["t"])


@pytest.fixture
def make(tmp_path):
    td = example()
    return {
        "memory": lambda: td,
        "locked": lambda: td.lock_(),
        "consolidated": lambda: td.consolidate(),
        "lazy": lambda: lazy_stack([td.clone(), td.clone()]),
        "anonymous": lambda: td.memmap(),
        "shared": lambda: td.share_memory_(),
        "fields": lambda: td.select("a", "b").to("cpu"),
        "memmap": lambda: td.memmap(tmp_path / "m"),
        "tdz": lambda: td.save(tmp_path / "x.tdz"),
        "h5": lambda: td.save(tmp_path / "x.h5", storage="h5"),
        "zarr": lambda: td.save(tmp_path / "x.zarr", storage="zarr"),
        "window": lambda: td.save(tmp_path / "y.h5", storage="h5")[1:],
        "rows": lambda: td.save(tmp_path / "z.h5", storage="h5")[torch.tensor([2, 0])],
    }


def same(a, b) -> bool:
    if (a.batch_size, list(a.keys()), a.names, a.device) != (b.batch_size, list(b.keys()), b.names, b.device):
        return False
    for key in a.keys():
        mine, theirs = a[key], b[key]
        if isinstance(mine, torch.Tensor):
            if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                return False
        elif hasattr(mine, "batch_size"):
            if not same(mine, theirs):
                return False
        elif mine != theirs:
            return False
    return True


def through_torch(value, **kwargs):
    target = io.BytesIO()
    torch.save(value, target)
    target.seek(0)
    return torch.load(target, **kwargs)


@pytest.mark.parametrize("kind", [*BY_VALUE, *BY_PLACE])
@pytest.mark.parametrize("way", ["pickle", "torch", "weights_only", "copy", "deepcopy"])
def test_round_trip(make, kind, way):
    td = make[kind]()
    ways = {
        "pickle": lambda: pickle.loads(pickle.dumps(td)),
        "torch": lambda: through_torch(td, weights_only=False),
        "weights_only": lambda: through_torch(td, weights_only=True),
        "copy": lambda: copy.copy(td),
        "deepcopy": lambda: copy.deepcopy(td),
    }
    back = ways[way]()
    assert same(back, td)
    if way not in ("copy", "deepcopy"):
        assert type(back) is type(td)
        assert back.is_locked == (td.is_locked and not td.is_consolidated())  # as with tensordict


@pytest.mark.parametrize("kind", BY_VALUE)
def test_by_value_shares_nothing_and_carries_no_more_than_it_holds(make, kind):
    td = make[kind]()
    data = pickle.dumps(td)
    assert len(data) < 6000, "not the memory around the leaves"
    back = pickle.loads(data)
    for leaf in back.values(True, True):
        leaf.zero_()
    element = td[0] if kind == "lazy" else td
    assert element["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", BY_PLACE)
def test_stored_data_is_pickled_as_its_place(tmp_path, kind):
    td = TensorDict({"x": torch.zeros(10_000)}, [10_000])
    stored = {
        "memmap": lambda: td.memmap(tmp_path / "m"),
        "tdz": lambda: td.save(tmp_path / "x.tdz"),
        "h5": lambda: td.save(tmp_path / "x.h5", storage="h5"),
        "zarr": lambda: td.save(tmp_path / "x.zarr", storage="zarr"),
        "window": lambda: td.save(tmp_path / "y.h5", storage="h5")[1:],
        "rows": lambda: td.save(tmp_path / "z.h5", storage="h5")[torch.tensor([2, 0])],
    }[kind]()
    assert len(pickle.dumps(stored)) < 3000


def test_a_pickle_of_what_is_gone_is_an_error(tmp_path):
    data = pickle.dumps(example().memmap(tmp_path / "m"))
    os.rename(tmp_path / "m", tmp_path / "elsewhere")
    with pytest.raises(StoreNotFoundError):
        pickle.loads(data)
    assert not (tmp_path / "m").exists()


def test_memory_without_a_name_is_shared_with_children():
    td = TensorDict({"a": torch.zeros(3)}, [3]).share_memory_()
    back = pickle.loads(ForkingPickler.dumps(td))
    td["a"].fill_(4)
    assert back["a"].tolist() == [4, 4, 4]
    assert pickle.loads(ForkingPickler.dumps(example().memmap()))["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("part", [3, slice(2), [0, 2]], ids=str)
def test_rows_of_shared_memory_are_pickled_without_the_rest_of_it(part):
    td = TensorDict({"a": torch.arange(100_000), "n": TensorDict({"b": torch.arange(100_000)}, [100_000])}, [100_000])
    rows = td.share_memory_()[part]
    data = pickle.dumps(rows)
    back = pickle.loads(data)
    assert len(data) < 3000
    assert torch.equal(back["a"], rows["a"]) and torch.equal(back["n", "b"], rows["n", "b"])
    through = pickle.loads(ForkingPickler.dumps(td[:2]))
    td["a"][1] = 7
    assert through["a"].tolist() == [0, 7]  # a process of multiprocessing sees the memory itself


def test_memory_mapped_tensors(tmp_path):
    named = MemoryMappedTensor.from_tensor(torch.arange(3), filename=tmp_path / "x.memmap")
    assert len(pickle.dumps(named)) < 1000
    through = pickle.loads(pickle.dumps(named))
    through[0] = 7
    assert named.tolist() == [7, 1, 2]
    private = through_torch(named, weights_only=True)
    private[1] = 9  # a file from a stranger must not get to write into one of ours
    assert named.tolist() == [7, 1, 2]
    anonymous = MemoryMappedTensor.from_tensor(torch.arange(3))
    assert pickle.loads(pickle.dumps(anonymous)).tolist() == through_torch(anonymous, weights_only=True).tolist()


def test_values_on_their_own_and_beside_tensors():
    stack = NonTensorStack("a", "b")
    state = {"td": example(), "step": 3, "stack": stack, "one": NonTensorData("x", [2]), "list": [example()["b"]]}
    back = through_torch(state, weights_only=True)
    assert same(back["td"], state["td"])
    assert back["stack"].tolist() == ["a", "b"]
    assert back["one"].data == "x"
    assert same(back["list"][0], state["list"][0])


def test_another_process_loads_it(tmp_path):
    torch.save({"memory": example(), "stored": example().save(tmp_path / "x.h5", storage="h5")}, tmp_path / "x.pt")
    program = (
        f"import tdstore, torch; td = torch.load({str(tmp_path / 'x.pt')!r}, weights_only=True); "
        "print(td['memory']['a'].tolist(), td['stored']['b', 'c'].sum().item(), td['memory']['s'])"
    )
    done = subprocess.run([*python(), "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0.0, 1.0, 2.0] 6.0 hi"


# -- strangers' files ------------------------------------------------------------------------
class Call:
    """Pickled as a call of any function."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def reference(backend, location, mode, **options):
    return Call(rebuild, "StoreHandle", backend, (location, mode, options))


@pytest.mark.parametrize("mode", ["w", "x", "r+", "a"])
def test_the_safe_loader_only_reads(tmp_path, mode):
    example().save(tmp_path / "x.h5", storage="h5").close()
    before = (tmp_path / "x.h5").read_bytes()
    found = through_torch(reference("h5", str(tmp_path / "x.h5"), mode), weights_only=True)
    assert not found.store.writable
    td = PersistentTensorDict._over(found, ())
    with pytest.raises(ReadOnlyError):
        td["a"] = torch.ones(3)
    found.store.close()
    assert (tmp_path / "x.h5").read_bytes() == before
    with pytest.raises(StoreNotFoundError):
        through_torch(reference("memmap", str(tmp_path / "new"), mode), weights_only=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "location", ["s3://bucket/x", "https://host/x", "redis://localhost/x", "cache::s3://x", None, ["x"], b"x"]
)
def test_the_safe_loader_goes_nowhere_else(location):
    with pytest.raises(UntrustedDataError, match="weights_only"):
        through_torch(reference("remote", location, "r"), weights_only=True)


def test_saved_for_writing_is_opened_for_reading(tmp_path):
    td = example().memmap(tmp_path / "m")
    assert pickle.loads(pickle.dumps(td))["a"].fill_(5).tolist() == [5, 5, 5]
    safe = through_torch(td, weights_only=True)
    with pytest.raises(ReadOnlyError):
        safe.zero_()
    assert td["a"].tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "function", [os.system, tdstore.save, tdstore.open, TensorDict.save, tdstore.pack_memmap, eval]
)
def test_nothing_else_may_be_called(tmp_path, function):
    with pytest.raises(pickle.UnpicklingError, match="(?i)unsupported"):
        through_torch({"x": Call(function, str(tmp_path / "evil"))}, weights_only=True)
    assert os.listdir(tmp_path) == []


def test_no_value_of_another_class(tmp_path):
    with pytest.raises(pickle.UnpicklingError, match="(?i)unsupported"):
        through_torch(TensorDict({"v": NonTensorData(io.BytesIO(b"x"))}), weights_only=True)


def test_what_is_pickled_names_no_module_but_ours_and_torch():
    names = {arg for op, arg, _ in pickletools.genops(pickle.dumps(example(), protocol=2)) if op.name == "GLOBAL"}
    roots = {str(name).split(".")[0].split()[0] for name in names}
    assert roots <= {"tdstore", "torch", "collections", "builtins", "__builtin__", "_codecs", "copy_reg", "copyreg"}
