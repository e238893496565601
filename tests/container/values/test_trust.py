"""Values that are not plain data: pickled and unpickled for callers who say so each time, and for nobody else."""

from __future__ import annotations

import pickle

import pytest
import tensordict
import torch

import tdstore
from tdstore import Codec, NonTensorData, TensorDict, register_codec
from tdstore.errors import OptionError, UntrustedDataError
from tdstore.values import encode_value, pickled_form


class Odd:
    """Neither plain data nor the kind of a codec."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Odd and self.x == other.x

    def __hash__(self):
        return hash(self.x)


RAN: list[int] = []


class Bomb:
    """Its pickle calls what it names."""

    def __reduce__(self):
        return explode, (1,)


def explode(power):
    RAN.append(power)


PLACES = ["m", "x.h5", "x.zarr", "x.tdz", "redis"]


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').url}/{tmp_path.name}"
    return str(tmp_path / request.param)


def sample(rows=3):
    values = [Odd(0), "text", *(Odd(i) for i in range(2, rows))]
    return TensorDict(
        {"a": torch.arange(rows), "o": Odd(1), "s": values, "n": {"d": NonTensorData({"deep": [Odd(5)]})}}, [rows]
    )


@pytest.mark.parametrize("rows", [3, 300])  # in the header, and in leaves of their own
def test_pickled_by_request_only(place, rows):
    td = sample(rows)
    with pytest.raises(UntrustedDataError, match="'o'.*cannot be stored"):
        td.save(place)
    td.save(place, trust=True).close()
    with pytest.raises(UntrustedDataError, match="it is pickled.*trust=True|trust=True"), tdstore.open(place) as stored:
        stored["o"]
    with tdstore.open(place, trust=True) as stored:
        assert stored["o"] == Odd(1) and list(stored["s"]) == list(td["s"]) and stored["n", "d"] == {"deep": [Odd(5)]}
        assert stored[1:3]["s"][1] == Odd(2)
        sent = pickle.loads(pickle.dumps(stored))  # as to a worker
        assert sent["s"][2] == Odd(2) and sent["o"] == Odd(1)
    with TensorDict.load(place, allow_pickle=True) as stored:
        assert stored["o"] == Odd(1)


def test_other_entries_are_readable_without(tmp_path):
    sample().save(tmp_path / "x.h5", trust=True).close()
    with tdstore.open(tmp_path / "x.h5") as stored:
        assert stored["a"].tolist() == [0, 1, 2]
        with pytest.raises(UntrustedDataError):
            stored["s"]


def test_copies_pass_pickles_on_unread(tmp_path):
    for rows in (3, 300):
        sample(rows).save(tmp_path / f"{rows}.h5", trust=True).close()
        tdstore.copy(tmp_path / f"{rows}.h5", tmp_path / f"{rows}")
        with tdstore.open(tmp_path / f"{rows}", trust=True) as stored:
            assert stored["o"] == Odd(1) and stored["s"][2] == Odd(2)


@pytest.mark.parametrize("name", ["m", "x.h5", "x.zarr", "x.tdz"])
def test_nothing_runs_unasked(tmp_path, name):
    TensorDict({"a": torch.zeros(3), "b": Bomb(), "s": [Bomb()] * 3}, [3]).save(tmp_path / name, trust=True).close()
    RAN.clear()
    with pytest.raises(UntrustedDataError), tdstore.open(tmp_path / name) as stored:
        repr(stored), stored.keys(), stored["a"], stored._repr_html_()
        stored.to_tensordict()
    tdstore.copy(tmp_path / name, tmp_path / "copy.h5")
    assert not RAN
    with tdstore.open(tmp_path / name, trust=True) as stored:
        stored.to_tensordict()
    assert RAN


def test_trust_ends_with_the_container(tmp_path):
    sample().save(tmp_path / "x.h5", trust=True).close()
    with tdstore.open(tmp_path / "x.h5", trust=True) as trusted, tdstore.open(tmp_path / "x.h5") as other:
        assert trusted["o"] == Odd(1)
        with pytest.raises(UntrustedDataError):
            other["o"]
        with pytest.raises(UntrustedDataError):
            trusted.save(tmp_path / "again")


def test_the_peers_pickles(tmp_path):
    theirs = tensordict.TensorDict(
        {
            "a": torch.arange(3),
            "o": tensordict.NonTensorData(Odd(1), batch_size=[3]),
            "s": tensordict.NonTensorStack(Odd(0), Odd(1), Odd(2)),
        },
        [3],
    )
    theirs.memmap(tmp_path / "m")
    with pytest.raises(UntrustedDataError, match="it is pickled"):
        tdstore.open(tmp_path / "m")
    stored = tdstore.open(tmp_path / "m", trust=True)
    assert stored["o"] == Odd(1) and list(stored["s"]) == [Odd(0), Odd(1), Odd(2)]
    zarr = theirs.exclude("s").to_zarr(str(tmp_path / "x.zarr"))
    zarr.close()
    with tdstore.open(tmp_path / "x.zarr") as stored:
        assert stored["a"].tolist() == [0, 1, 2]
        with pytest.raises(UntrustedDataError, match="it is pickled"):
            stored["o"]
    with tdstore.open(tmp_path / "x.zarr", trust=True) as stored:
        assert stored["o"] == Odd(1)


def test_a_name_of_ours_and_other_kinds_of_trust(tmp_path):
    with pytest.raises(ValueError, match="trust=True"):
        register_codec(Codec(name="pickle", kind=Odd, encode=vars, decode=Odd))
    with pytest.raises(OptionError, match="trust"):
        TensorDict({}, [3]).save(tmp_path / "m", trust="h5")
    assert pickled_form(b"x") == {"$codec": ["pickle", encode_value(b"x")]}
