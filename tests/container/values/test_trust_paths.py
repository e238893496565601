"""Ways round `trust=True`: none runs a pickle for a caller who did not say so. And what it allows, writes allow too."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

import tdstore
from tdstore import NonTensorData, TensorDict
from tdstore.container.values.codecs import pickling
from tdstore.container.varlen import columns
from tdstore.errors import UntrustedDataError
from tdstore.pickling import rebuild
from tests.container.values.test_trust import Odd

RAN: list[int] = []


class Bomb:
    def __reduce__(self):
        return RAN.append, (1,)


class Claims:
    """Pickled as a call of what `torch.load(weights_only=True)` may call."""

    def __init__(self, function, *args):
        self.how = function, args

    def __reduce__(self):
        return self.how


def weights(found):
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_file_of_weights_cannot_say_that_it_is_trusted():
    with pickling(True):
        leaves = columns.pack([Bomb(), 1, 2], torch.Size([3]))
    spans, text = leaves.values()
    RAN.clear()
    stack = weights(Claims(rebuild, "PackedStack", spans, text, True))
    with pytest.raises(UntrustedDataError, match="it is pickled"):
        stack.tolist()
    found = weights(Claims(rebuild, "Text", text, 0, "the text", None, True))
    assert type(found) is columns.Text and not found.trusted
    assert not RAN


@pytest.mark.parametrize("rows", [3, 300])  # in the header, and in leaves of their own
def test_saving_with_trust_unpickles_nothing(tmp_path, rows):
    bombs = TensorDict({"a": torch.zeros(rows), "one": Bomb(), "each": [Bomb()] * rows}, [rows])
    bombs.save(tmp_path / "x.h5", trust=True).close()
    RAN.clear()
    with tdstore.open(tmp_path / "x.h5") as stored:
        for key in ("one", "each"):
            with pytest.raises(UntrustedDataError, match="it is pickled"):
                stored.select("a", key).save(tmp_path / "again.h5", trust=True)
    assert not RAN


def test_repr_of_what_is_refused(tmp_path):
    TensorDict({"a": torch.zeros(3), "one": Odd(1), "each": [Odd(i) for i in range(3)]}, [3]).save(
        tmp_path / "x.h5", trust=True
    ).close()
    with tdstore.open(tmp_path / "x.h5") as stored:
        assert repr(stored).count("<cannot be read: ") == 2 and "a: Tensor(" in repr(stored)


def test_trust_false_is_none(tmp_path):
    with TensorDict({"a": torch.zeros(3)}, [3]).save(tmp_path / "x.h5", trust=False) as stored:
        assert stored["a"].shape == (3,)
    with tdstore.open(tmp_path / "x.h5", trust=False) as stored:
        assert stored["a"].shape == (3,)


@pytest.mark.parametrize("name", ["m", "x.h5"])
@pytest.mark.parametrize("rows", [3, 300])
def test_a_trusted_dataset_can_be_written(tmp_path, name, rows):
    each = [Odd(i) for i in range(rows)]
    TensorDict({"a": torch.zeros(rows), "one": Odd(-1), "each": each}, [rows]).save(tmp_path / name, trust=True).close()
    with tdstore.open(tmp_path / name, mode="r+", trust=True) as stored:
        stored[0] = {"each": "plain"}
        stored[1:2].update_({"each": [Odd("new")]})
        stored["tree"] = TensorDict({"below": Odd(7)}, [rows])
        stored.append(stored[2].to_tensordict())
    with tdstore.open(tmp_path / name, trust=True) as stored:
        assert list(stored["each"]) == ["plain", Odd("new"), *each[2:], Odd(2)]
        assert stored["one"] == Odd(-1) and stored["tree", "below"] == Odd(7)


@pytest.mark.parametrize("name", ["m", "x.h5"])
@pytest.mark.parametrize("key", ["one", "each", ("n", "deep")])
def test_a_value_that_cannot_be_stored_leaves_all_as_it_was(tmp_path, name, key):
    td = TensorDict({"a": torch.zeros(3), "one": "x", "each": list("abc"), "n": {"deep": NonTensorData(1)}}, [3])
    td.save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, mode="r+") as stored:
        before = stored.to_tensordict().to_dict()
        bad = TensorDict({"a": torch.ones(3)}, [3]).set(key, NonTensorData(Odd(1), [3]))
        for write in (lambda: stored.update_(bad), lambda: stored.__setitem__(slice(0, 2), bad[:2])):
            with pytest.raises(UntrustedDataError, match="cannot be stored"):
                write()
            now = stored.to_tensordict().to_dict()
            assert now.pop("a").tolist() == [0, 0, 0] and now == {k: v for k, v in before.items() if k != "a"}


def test_a_refresh_keeps_the_trust(tmp_path):
    TensorDict({"one": Odd(1)}, [3]).save(tmp_path / "m", trust=True).close()
    stored = tdstore.open(tmp_path / "m", trust=True)
    assert stored.memmap_refresh_()["one"] == Odd(1)
    assert pickle.loads(pickle.dumps(stored))["one"] == Odd(1)
