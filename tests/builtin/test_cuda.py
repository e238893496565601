"""The cuda backend, where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.builtin.cuda import CudaStore, open_cuda
from tdstore.testing import StoreTests
from tests.conftest import assert_same


class TestCuda(StoreTests):
    open = staticmethod(open_cuda)
    caps = CudaStore.caps

    @pytest.fixture
    def location(self) -> None:
        return None


def test_save_and_schema(tmp_path):
    td = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.arange(3)}, "s": "x"}, [3])
    on = td.save(storage="cuda")
    assert on["a"].device.type == "cuda"
    assert_same(on.cpu(), td.to("cpu"))
    assert_same(on[[2, 0, 0]].cpu(), td[[2, 0, 0]].to("cpu"))
    on[1] = td[0].to("cuda")
    assert on["a"][1].tolist() == [0, 1]
    saved = on.save(tmp_path / "x")
    assert saved["a"].device.type == "cpu"
    zeros = TensorDict.from_schema({"a": ((2,), "bfloat16")}, batch_size=[4], storage="cuda", device="cuda:0")
    assert (zeros["a"].device, zeros["a"].dtype) == (torch.device("cuda:0"), torch.bfloat16)
    with pytest.raises(TypeError, match="cpu"):
        TensorDict.from_schema({"a": torch.int8}, batch_size=[1], storage="cuda", device="cpu")


def test_to_and_pin(tmp_path):
    td = TensorDict({"a": torch.zeros(3)}, [3]).to("cuda")
    assert td.device == torch.device("cuda", torch.cuda.current_device())
    assert td.is_shared()
    stored = td.to_tensordict().save(tmp_path / "x.h5")
    assert stored.to("cuda")["a"].device.type == "cuda"
