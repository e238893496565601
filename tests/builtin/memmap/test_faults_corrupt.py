"""Damage on the medium: noticed, named, and never a signal."""

from __future__ import annotations

import random
import shutil
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.builtin.memmap import opening
from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.types import Read
from tests.builtin.memmap.support import OLD, content, load, same, save

LEAVES = {**OLD, ("big",): torch.arange(1_500_000.0), ("twin",): torch.arange(2000.0) + 5}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> FsPath:
    location = tmp_path_factory.mktemp("pristine") / "d"
    save(location, LEAVES)
    return location


@pytest.fixture
def location(pristine: FsPath, tmp_path: FsPath) -> FsPath:
    shutil.copytree(pristine, tmp_path / "d")
    return tmp_path / "d"


def outcome(location: FsPath, **options: str) -> str:
    try:
        with open_memmap(str(location), **options) as store:  # type: ignore[arg-type]
            return "equal" if same(content(store), LEAVES) else "SILENT"
    except CorruptStoreError as error:
        assert str(location) in str(error)
        return "told"


def test_flips(location: FsPath) -> None:
    """A flipped bit anywhere in any file, verify="full"."""
    chance = random.Random(11)
    outcomes: dict[str, set[str]] = {}
    for path in sorted(p for p in location.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for _ in range(40 if path.suffix == ".json" else 12):
            at = chance.randrange(len(data))
            damaged = bytearray(data)
            damaged[at] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            outcomes.setdefault(path.name, set()).add(outcome(location, verify="full"))
        path.write_bytes(data)
    assert outcomes.pop("meta.json") == {"equal"}  # not read beside a manifest
    assert all(seen == {"told"} for seen in outcomes.values()), outcomes


def test_truncations_of_the_manifest(location: FsPath) -> None:
    path = location / "tdstore.json"
    data = path.read_bytes()
    for size in {0, 1, 5, 13, 14, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:size])
        assert outcome(location) == "told"
    path.write_bytes(data + b" ")
    assert outcome(location) == "told"


@pytest.mark.parametrize("name", ["a.memmap", "n/b.memmap", "s.memmap", "big.memmap"])
@pytest.mark.parametrize("change", ["empty", "one byte less", "half", "one byte more", "gone", "zeros"])
def test_sizes(location: FsPath, name: str, change: str) -> None:
    """Noticed at opening, by default; the message names the leaf, what was expected and what is there."""
    path = location / name
    data = path.read_bytes()
    new = {
        "empty": b"",
        "one byte less": data[:-1],
        "half": data[: len(data) // 2],
        "one byte more": data + b"x",
        "zeros": bytes(len(data)),
    }
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(new[change])
    with pytest.raises(CorruptStoreError) as caught:
        open_memmap(str(location))
    text = str(caught.value)
    assert repr(path.stem) in text and "expected" in text
    if change not in ("gone", "zeros"):
        assert str(len(new[change])) in text and str(len(data)) in text
    if change != "gone":
        assert path.read_bytes() == new[change], "opening changed the file"


def test_folder_gone(location: FsPath) -> None:
    shutil.rmtree(location / "n")
    with pytest.raises(CorruptStoreError, match="'n' / 'b'"):
        open_memmap(str(location))


def test_swapped_and_stale(location: FsPath, tmp_path: FsPath) -> None:
    """Two leaves of one size swapped, and a leaf of an earlier save, with the default verify."""
    a, twin = location / "a.memmap", location / "twin.memmap"
    a.rename(tmp_path / "t")
    twin.rename(a)
    (tmp_path / "t").rename(twin)
    assert outcome(location) == "told"
    save(tmp_path / "other", {("a",): torch.zeros(2000)})
    save(location, LEAVES)
    shutil.copy(tmp_path / "other" / "a.memmap", a)
    assert outcome(location) == "told"


def test_recover_takes_a_foreign_change(location: FsPath) -> None:
    """Another program wrote a leaf in place on purpose: told, accepted once, then clean."""
    changed = (torch.arange(2000.0) * 9).numpy().tobytes()
    (location / "a.memmap").write_bytes(changed)
    with pytest.raises(CorruptStoreError, match="recover='accept'"):
        open_memmap(str(location))
    open_memmap(str(location), mode="r+", recover="accept").close()
    assert load(location)[("a",)].numpy().tobytes() == changed


def test_verify_finds_what_opening_let_pass(location: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPENED", 0)  # as of a large dataset
    data = bytearray((location / "big.memmap").read_bytes())
    data[4 << 20] ^= 1
    (location / "big.memmap").write_bytes(data)
    with open_memmap(str(location)) as store:
        (fault,) = store.verify()
        assert fault.path == ("big",) and f"byte {4 << 20}" in fault.reason
        assert store.verify([("a",)]) == []


def test_truncated_after_opening_is_told_by_verify(location: FsPath) -> None:
    with open_memmap(str(location)) as store:
        (location / "a.memmap").write_bytes(b"")
        (location / "twin.memmap").unlink()
        assert {f.path for f in store.verify()} == {("a",), ("twin",)}


def test_budget(location: FsPath) -> None:
    with pytest.raises(CorruptStoreError, match="max_bytes=1000"):
        open_memmap(str(location), max_bytes=1000)


def test_private_in_mode_r(location: FsPath) -> None:
    """Writing to what mode "r" gave stays in this process."""
    store = open_memmap(str(location))
    store.view(("a",)).zero_()
    assert float(store.read([Read(("a",))])[0].sum()) == 0
    assert same(load(location), LEAVES)
    with pytest.raises(StoreError):
        store.delete([("a",)])
    with pytest.warns(UserWarning, match="lost"):
        store.close()
