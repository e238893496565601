"""Files that releases 0.10 to 0.15 of the `tensordict` package wrote: pickles, torch.save files, and each format."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import zipfile
from pathlib import Path

import pytest
import tensordict
import torch

import tdstore
from tdstore import LazyStackedTensorDict, MetaData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor
from tdstore.errors import StoreError, UntrustedDataError
from tdstore.interop import load_pickle
from tdstore.testing.processes import warm

from .conftest import same

DATA = Path(__file__).parents[1] / "data"
RELEASES = sorted(DATA.glob("tensordict-*.zip"))


@tdstore.tensorclass
class Point:
    x: torch.Tensor
    label: str = "p"
    weight: torch.Tensor | None = None


def expected():
    """What make_peer_files.py made, by ours."""
    td = TensorDict(
        a=torch.arange(6.0).reshape(3, 2),
        b=TensorDict(c=torch.arange(3), batch_size=[3]),
        text="text",
        batch_size=[3],
        names=["time"],
    )
    rows = TensorDict(word=NonTensorStack("x", "y", "z"), n=torch.arange(3, dtype=torch.int16), batch_size=[3])
    lazy = LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3)), stack_dim=0)
    point = Point(x=torch.ones(3, 2), batch_size=[3])
    return {
        "td": td,
        "rows": rows,
        "locked": TensorDict(a=torch.zeros(2), m=MetaData("v")).lock_(),
        "lazy": lazy,
        "nested_lazy": TensorDict(inner=lazy.clone(), batch_size=[2]),
        "point": point,
        "points": TensorDict(point=point.clone(), batch_size=[3]),
        "params": TensorDictParams(TensorDict(w=torch.ones(2))),
        "unbatched": TensorDict(u=UnbatchedTensor(torch.ones(2)), batch_size=[3]),
        "jagged": TensorDict(
            j=torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged), batch_size=[2]
        ),
        "consolidated": td,
    }


def alike(found, wanted, *, names=True):
    """The same classes, entries, dtypes, values, names and locks."""
    assert isinstance(found, type(wanted))
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        pairs = zip(found.unbind(), wanted.unbind(), strict=True) if wanted.is_nested else [(found, wanted)]
        assert all(torch.equal(one, other) for one, other in pairs)
        return
    if isinstance(wanted, UnbatchedTensor):
        assert torch.equal(found.data, wanted.data)
        return
    assert found.batch_size == wanted.batch_size and found.is_locked == wanted.is_locked
    if names:
        assert found.names == wanted.names
    if tdstore.is_non_tensor(wanted):
        assert found.tolist() == wanted.tolist()
    elif isinstance(wanted, LazyStackedTensorDict):
        for one, other in zip(found.tensordicts, wanted.tensordicts, strict=True):
            alike(one, other, names=names)
    elif tdstore.is_tensorclass(wanted):
        alike(found.to_tensordict(), wanted.to_tensordict())
    else:
        assert set(found.keys()) == set(wanted.keys())
        for key in wanted.keys():
            alike(found.get(key), wanted.get(key), names=names)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda path: path.stem)
def release(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.stem)
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(folder)
    return folder


def test_there_is_a_file_of_every_release():
    assert [path.stem.split("-")[1].rpartition(".")[0] for path in RELEASES] == [f"0.{n}" for n in range(10, 16)]


@pytest.mark.parametrize("suffix", ["pkl", "pt"])
@pytest.mark.parametrize("name", expected())
def test_pickles_open(release, name, suffix):
    alike(load_pickle(release / f"{name}.{suffix}", classes=[Point]), expected()[name])


def test_a_checkpoint_of_the_older_format_and_one_with_other_values_open(release):
    alike(load_pickle(release / "legacy.pt"), expected()["td"])
    found = load_pickle(release / "checkpoint.pt", map_location="cpu")
    assert found["step"] == 3
    alike(found["td"], expected()["td"])


@pytest.mark.parametrize("name", ["td", "rows", "lazy", "nested_lazy", "points"])
def test_memmap_folders_open(release, name):
    found = TensorDict.load_memmap(release / f"{name}.memmap")
    wanted = expected()[name]
    alike(found.clone(), wanted.clone(), names=False)  # such folders have no names of dimensions


def test_hdf5_consolidated_and_later_formats_open(release):
    without = expected()["td"].exclude("text")
    without.names = None
    same(tdstore.PersistentTensorDict(filename=release / "td.h5").to_tensordict(), without)
    same(TensorDict.from_consolidated(release / "td.consolidated"), expected()["td"])
    if (release / "td.zarr").exists():
        same(tdstore.open(release / "td.zarr").to_tensordict(), without)
    if (release / "rows.tdz").exists():
        same(tdstore.open(release / "rows.tdz").to_tensordict(), expected()["rows"])


def test_a_mapped_tensor_is_mapped_again(tmp_path):
    theirs = tensordict.TensorDict(a=torch.arange(4), batch_size=[4]).memmap(str(tmp_path / "x"))
    found = load_pickle(io.BytesIO(pickle.dumps({"whole": theirs, "part": theirs["a"][1:3]})))
    assert found["whole"].is_locked and torch.equal(found["whole"]["a"], torch.arange(4))
    assert isinstance(found["whole"]["a"], tdstore.MemoryMappedTensor)
    assert found["part"].tolist() == [1, 2]


def test_the_package_is_not_needed(release):
    code = f"""
import sys
sys.modules["tensordict"] = None
from tdstore.interop import load_pickle
print(load_pickle({str(release / "td.pkl")!r})["b", "c"].tolist())
"""
    assert subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True).stdout == "[0, 1, 2]\n"


def test_a_class_must_be_given_or_declared(release):
    text = (release / "point.pkl").read_bytes()
    with pytest.raises(UntrustedDataError, match=r"(?s)__main__\.Pixel.*classes="):
        load_pickle(io.BytesIO(text.replace(b"Point", b"Pixel")))
    renamed = text.replace(b"__main__", b"mymodule")
    with pytest.raises(UntrustedDataError, match=r"mymodule\.Point"):
        load_pickle(io.BytesIO(renamed))
    assert isinstance(load_pickle(io.BytesIO(renamed), classes=[Point]), Point)


class Calls:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def crafted(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def test_nothing_of_a_file_is_called(tmp_path):
    ran = tmp_path / "ran"
    for function, *args in [
        (exec, f"open({str(ran)!r}, 'w')"),
        (open, str(ran), "w"),
        (getattr, "text", "upper"),
        (torch.load, str(ran)),
        (bytearray, 1 << 40),
        (set, range(1 << 40)),
    ]:
        with pytest.raises(UntrustedDataError):
            load_pickle(io.BytesIO(pickle.dumps(Calls(function, *args))))
        file = io.BytesIO()
        torch.save({"a": torch.zeros(2), "b": Calls(function, *args)}, file)
        file.seek(0)
        with pytest.raises(UntrustedDataError):
            load_pickle(file)
    assert not ran.exists()


@pytest.mark.parametrize(
    "text",
    [
        # BUILD with a state for a function, and with one for a class
        crafted(b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93", b"N}\x8c\x01xK\x01s\x86b"),
        crafted(b"\x8c\x05torch\x8c\x06Tensor\x93", b"N}\x8c\x01xK\x01s\x86b"),
        crafted(b"\x8c\x05torch\x8c\x06Tensor\x93"),  # a class where a value should stand
        crafted(b"]\x94h\x00a"),  # a list that contains itself
        crafted(b"]" * 20_000 + b"a" * 19_999),
        b"",
        b"not a pickle",
    ],
)
def test_a_crafted_pickle_is_an_error(text):
    with pytest.raises(StoreError):
        load_pickle(io.BytesIO(text))
    assert not hasattr(torch.Tensor, "x")


def test_damaged_files_are_errors_of_tdstore(release):
    seeded = random.Random(0)
    for name in ("td.pkl", "lazy.pkl", "consolidated.pkl", "params.pt", "legacy.pt"):
        text = (release / name).read_bytes()
        for _ in range(20):
            damaged = bytearray(text)
            damaged[seeded.randrange(len(text))] ^= 1 << seeded.randrange(8)
            try:
                load_pickle(io.BytesIO(bytes(damaged)))
            except StoreError:
                continue
