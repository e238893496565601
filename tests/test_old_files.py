"""Files and pickles that earlier versions wrote open, whatever has moved since. See tests/data/make_own_files.py."""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore.errors import UnsupportedError, UntrustedDataError
from tdstore.pickling import rebuild, rebuild_safely
from tdstore.registry import registry
from tests.data import make_own_files as made

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(DATA.glob("tdstore-*.zip"))
IN_MEMORY = sorted(made.in_memory())


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda path: path.stem)
def archive(request, tmp_path_factory):
    """The folder of one version's files."""
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(request.param) as packed:
        packed.extractall(folder)
    return folder


def same(found, expected):
    """Whether two objects are the same, down to classes, dtypes, names and values."""
    assert isinstance(found, type(expected))
    if isinstance(expected, torch.Tensor):
        if expected.is_nested:
            return all(same(a, b) for a, b in zip(found.unbind(), expected.unbind(), strict=True))
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, tdstore.TensorClass):
        return same(found.to_tensordict(), expected.to_tensordict())
    if not isinstance(expected, tdstore.TensorDictBase):
        return (found.tolist(), found.batch_size) == (expected.tolist(), expected.batch_size)
    assert (found.batch_size, found.names, found.is_locked) == (
        expected.batch_size,
        expected.names,
        expected.is_locked,
    )
    if isinstance(expected, tdstore.LazyStackedTensorDict):
        return all(same(a, b) for a, b in zip(found.unbind(0), expected.unbind(0), strict=True))
    assert set(found.keys()) == set(expected.keys())
    return all(same(found.get(key), expected.get(key)) for key in expected.keys())


def there(archive, name):
    """The bytes of a pickle, with its references pointing to the folder."""
    new = str(archive)
    assert len(new) < len(made.PLACE)
    new += "/" * (len(made.PLACE) - len(new))  # lengths are part of a pickle
    return (archive / name).read_bytes().replace(made.PLACE.encode(), new.encode())


@pytest.mark.parametrize("name", made.DATASETS)
def test_datasets_open(archive, name):
    with tdstore.open(made.location(str(archive), name)) as found:
        assert same(found.to_tensordict(), made.everything().to_tensordict())
        assert same(found["point"], made.everything()["point"])
        assert found.verify() == []
    with tdstore.open(made.location(str(archive), f"column-{name}")) as found:
        assert same(found.to_tensordict(), made.column())
        assert found[97:]["s"] == ["caption 97", "caption 98", "caption 99"]


def test_consolidated_files_open(archive):
    found = tdstore.TensorDict.from_consolidated(archive / "consolidated")
    assert same(found.to_tensordict(), made.everything().exclude("ragged").to_tensordict())


@pytest.mark.parametrize("name", IN_MEMORY)
@pytest.mark.parametrize("form", ["pickle2", "pickle5", "pt", "pt weights"])
def test_pickles_open(archive, name, form):
    data = (archive / f"{name}.{form.split()[0]}").read_bytes()
    if form.startswith("pt"):
        found = torch.load(io.BytesIO(data), weights_only="weights" in form)
    else:
        found = pickle.loads(data)
    expected = made.in_memory()[name]
    assert same(found, expected.unlock_() if name == "consolidated" else expected)


@pytest.mark.parametrize("name", made.DATASETS)
def test_references_open_the_place(archive, name):
    whole = made.everything()
    mask = torch.tensor([True, False, False, True])
    for suffix, expected in (("", whole), (" n", whole["n"]), (" rows", whole[1:3]), (" mask", whole[mask])):
        found = pickle.loads(there(archive, f"ref {name}{suffix}.pickle2"))
        assert same(found.to_tensordict(), expected.to_tensordict())
        found.close()


def test_references_to_tensors_map_the_file(archive):
    whole = made.everything()["a"]
    for name, expected in (("leaf", whole), ("part", whole[1:3])):
        found = pickle.loads(there(archive, f"ref {name}.pickle2"))
        assert isinstance(found, tdstore.MemoryMappedTensor) and torch.equal(found, expected)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_pickles_name_one_function_of_tdstore(name):
    data = pickle.dumps(made.in_memory()[name], protocol=2)
    names = {arg for code, arg, _ in pickletools.genops(data) if code.name == "GLOBAL"}
    assert {name for name in names if name.startswith("tdstore")} == {"tdstore.pickling rebuild"}


def test_unknown_kinds_are_named():
    with pytest.raises(UnsupportedError, match="'Cube'.*does not know"):
        rebuild("Cube", 1)


class _Claim:
    def __reduce__(self):
        return rebuild, ("SharedHandle", "shm://nothing", "/dev/shm", True, b"")


def test_kinds_that_are_not_safe_are_refused_by_weights_only():
    file = io.BytesIO()
    torch.save({"x": _Claim()}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    with pytest.raises(UntrustedDataError, match="SharedHandle"):
        rebuild_safely("SharedHandle", "shm://nothing", "/dev/shm", True, b"")


def test_a_file_of_an_earlier_version_tells_its_commits(archive):
    """The counter of commits began at 1 in each file then."""
    place = archive / "generation.h5"
    shutil.copy(archive / "x.h5", place)
    seen = []
    for number in range(3):
        with registry().open(registry().get("h5"), str(place)) as store:
            assert store.generation() == store.generation() is not None
            seen.append(store.generation())
        with tdstore.open(place, mode="r+") as td:
            td["generation"] = torch.full(td.batch_size, number)
    assert len(set(seen)) == 3
