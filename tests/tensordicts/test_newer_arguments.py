"""Arguments that methods have since tensordict 0.15; results are those of 0.15.3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, tensorclass
from tdstore.errors import DeviceError, InvalidTypeError, LockedError, OptionError, UnsupportedError
from tests.surface.containers import KINDS, floats


@tensorclass
class Fields:
    a: torch.Tensor
    b: torch.Tensor


def sample() -> TensorDict:
    data = {"a": torch.zeros(3), "i": torch.zeros(3, dtype=torch.int64), "n": {"c": torch.zeros(3)}, "s": "x"}
    return TensorDict(data, [3])


def dtypes(td: Any) -> list[torch.dtype]:
    return [td["a"].dtype, td["i"].dtype, td["n", "c"].dtype]


F16, F32, F64, I64 = torch.float16, torch.float32, torch.float64, torch.int64


class TestCastFilter:
    def test_it_gets_paths_and_leaves(self) -> None:
        seen: list[Any] = []

        def only_nested(path: tuple[str, ...], leaf: torch.Tensor) -> bool:
            seen.append((path, leaf.dtype))
            return path == ("n", "c")

        td = sample()
        made = td.double(cast_filter=only_nested)
        assert seen == [(("a",), F32), (("i",), I64), (("n", "c"), F32)]
        assert dtypes(made) == [F32, I64, F64] and made["a"] is td["a"] and made["s"] == "x"
        stack = lazy_stack([td, sample()]).double(cast_filter=only_nested)
        assert type(stack) is LazyStackedTensorDict and dtypes(stack) == [F32, I64, F64]

    @pytest.mark.parametrize("name", ["half", "bfloat16", "float64", "complex64", "int", "bool", "uint8"])
    def test_every_cast(self, name: str) -> None:
        td = sample()
        made = getattr(td, name)(cast_filter=lambda path, leaf: leaf.is_floating_point())
        want = getattr(td, name)()["a"].dtype
        assert dtypes(made) == [want, I64, want]
        assert dtypes(getattr(td, name)(cast_filter=None)) == [want] * 3

    def test_type_and_to(self) -> None:
        td = sample().lock_()
        floating = {"cast_filter": lambda path, leaf: leaf.is_floating_point()}
        assert dtypes(td.type(F64, **floating)) == dtypes(td.to(F64, **floating)) == [F64, I64, F64]
        assert td.half(**floating).is_locked and not td.type(F16, **floating).is_locked
        on = td.to("cpu", F64, **floating)
        assert on.device == torch.device("cpu") and dtypes(on) == [F64, I64, F64]
        assert td.to(**floating) is td
        none = td.int(cast_filter=lambda path, leaf: None)
        assert none is not td and none["a"] is td["a"]

    def test_tensorclasses_and_wrong_arguments(self) -> None:
        obj = Fields(a=torch.zeros(3), b=torch.zeros(3), batch_size=[3])
        made = obj.double(cast_filter=lambda path, leaf: path == ("b",))
        assert type(made) is Fields and (made.a.dtype, made.b.dtype) == (F32, F64)
        with pytest.raises(InvalidTypeError, match="cast_filter must be a function"):
            sample().half(cast_filter=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            sample().half(lambda path, leaf: True)  # type: ignore[misc]
        with pytest.raises(UnsupportedError):
            sample().qint8(cast_filter=lambda path, leaf: False)

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "redis"])
    def test_every_container(self, kind: str, tmp_path: Path) -> None:
        td = KINDS[kind](floats(), tmp_path, None).td
        made = td.half(cast_filter=lambda path, leaf: path == ("a",))
        assert (made["a"].dtype, made["n", "c"].dtype, td["a"].dtype) == (F16, F64, F32)


class TestMaskedSelect:
    def test_in_place(self) -> None:
        td = TensorDict({"a": torch.arange(6).view(3, 2), "n": {"c": torch.arange(3)}, "s": "x"}, [3])
        nested, mask = td["n"], torch.tensor([True, False, True])
        want = td.masked_select(mask)
        assert td.masked_select(mask, inplace=True) is td
        assert (td == want).all() and td.batch_size == (2,) and td["n"] is nested and nested.batch_size == (2,)
        wide = TensorDict({"a": torch.zeros(3, 2, 4)}, [3, 2])
        assert wide.clone().masked_select(mask, inplace=True).batch_size == (2, 2)
        assert wide.masked_select(torch.ones(3, 2, dtype=torch.bool), inplace=True).batch_size == (6,)
        obj = Fields(a=torch.zeros(3), b=torch.zeros(3), batch_size=[3])
        assert obj.masked_select(mask, inplace=True) is obj and obj.a.shape == (2,)

    def test_refused(self, tmp_path: Path) -> None:
        td, mask = sample(), torch.tensor([True, False, True])
        with pytest.raises(LockedError):
            sample().lock_().masked_select(mask, inplace=True)
        with pytest.raises(InvalidTypeError):
            td.masked_select(mask.int(), inplace=True)
        with pytest.raises(IndexError):
            td.masked_select(mask[:2], inplace=True)
        with pytest.raises(TypeError):
            td.masked_select(mask, True)  # type: ignore[misc]
        stack = lazy_stack([sample(), sample(), sample()])
        stored = sample().to_h5(tmp_path / "a.h5")
        params = TensorDictParams(TensorDict({"a": torch.zeros(3)}, [3]))
        for other in (stack, TensorDict({"l": stack}, [3]), stored, params):
            with pytest.raises(UnsupportedError, match="returns a new TensorDict"):
                other.masked_select(mask, inplace=True)
            assert other.batch_size[0] == 3
        assert (td == sample()).all()


def test_is_leaf() -> None:
    keys: list[str] = []

    def note(key: str, entry: Any) -> Any:
        keys.append(key)
        return entry

    sample().named_apply(note, is_leaf=tdstore.is_leaf_nontensor)
    assert keys == ["a", "i", "c", "s"]
    keys.clear()
    lazy_stack([sample(), sample()]).named_apply(note, is_leaf=tdstore.is_leaf_nontensor)
    assert keys == ["a", "i", "c", "s"] * 2
    for td in (sample(), lazy_stack([sample()])):
        with pytest.raises(InvalidTypeError, match="is_leaf must be a function"):
            td.apply(lambda x: x, is_leaf=3)  # type: ignore[arg-type]


def test_clamp_and_new_tensor_take_numbers() -> None:
    td = TensorDict({"a": torch.tensor([-2.0, 0.5, 3.0])}, [3])
    assert td.clamp(0, 1)["a"].tolist() == td.clamp(np.float32(0), torch.tensor(1.0))["a"].tolist() == [0, 0.5, 1]
    assert td.clamp(max=0.0)["a"].tolist() == [-2, 0, 0] and td.clamp(2, 1)["a"].tolist() == [1, 1, 1]
    td = sample().exclude("s", "n")
    for data, size in (([1, 2], (2,)), (5, ()), (np.ones((2, 2)), (2, 2)), (1.5, ()), (True, ()), ([], (0,))):
        made = td.new_tensor(data)
        assert made.batch_size == size and (made["a"].dtype, made["i"].dtype) == (F32, I64)
    assert td.new_tensor([1, 2], dtype=F64)["i"].dtype == F64


@pytest.mark.parametrize("device", ["cpu", torch.device("meta"), -1, 1.5])
def test_cuda_is_for_gpus(device: Any) -> None:
    with pytest.raises(DeviceError):
        sample().cuda(device)


class TestStorage:
    def test_atomic_and_mode(self, tmp_path: Path) -> None:
        td = TensorDict({"a": torch.arange(3)}, [3])
        for number, save in enumerate((td.save, td.dumps, td.memmap, td.clone().memmap_)):
            for atomic in (True, False):
                place = tmp_path / f"{number}{atomic}"
                save(place, atomic=atomic, robust_key=None, copy_existing=True)
                for mode in (None, "r"):
                    assert TensorDict.load_memmap(place, mode=mode)["a"].tolist() == [0, 1, 2]
                    assert td.clone().load_memmap_(place, mode=mode, allow_pickle=False)["a"].tolist() == [0, 1, 2]
        with pytest.raises(OptionError):
            TensorDict.load_memmap(tmp_path / "0True", mode="w")
        mapped = td.memmap(tmp_path / "mapped")
        mapped.memmap(atomic=True)["a"][0] = 9
        assert mapped["a"][0] == 9  # the entries stay in their files

    def test_allow_pickle_and_stacks(self, tmp_path: Path) -> None:
        td = TensorDict({"a": torch.arange(3), "s": "text"}, [3])
        td.to_zarr(tmp_path / "a.zarr", allow_pickle=True).close()  # type: ignore[attr-defined]
        td.to_h5(tmp_path / "a.h5").close()
        for allowed in (None, True, False):
            with TensorDict.from_zarr(tmp_path / "a.zarr", allow_pickle=allowed, non_tensor_as_stack=True) as read:
                assert read["s"] == "text"
        with TensorDict.from_h5(tmp_path / "a.h5", non_tensor_as_stack=True) as read:
            assert read["s"] == "text"
        with pytest.raises(OptionError, match="allow_pickle is True, False or None"):
            TensorDict.from_zarr(tmp_path / "a.zarr", allow_pickle=1)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="allow_pickle is True, False or None"):
            td.to_zarr(tmp_path / "b.zarr", allow_pickle="yes")  # type: ignore[arg-type]
        assert not (tmp_path / "b.zarr").exists()
