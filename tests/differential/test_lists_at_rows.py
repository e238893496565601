"""Lists written to several rows of values give one value to each, and single values of elements stay single."""

from __future__ import annotations

import pytest

import tdstore

from .programs import check, check_error, programs

ROWS = [("slice(0, 2)", ["y", "z"]), ("[0, 2]", ["y", "z"]), ("torch.tensor([True, False, True])", ["y", "z"])]


@pytest.mark.parametrize(("index", "values"), [*ROWS, ("slice(0, 2)", ["y"])])
def test_a_list_at_rows(index: str, values: list[object]) -> None:
    make = 'td = TensorDict({"l": NonTensorStack("a", "b", "c"), "s": "x"}, [3])\n'
    check(make + f'td.set_at_("l", {values}, {index})\ntd["l"]')
    check(make + f'td.set_at_("s", {values}, {index})\ntd["s"]')
    check(make + f'stack = NonTensorStack("a", "b", "c")\nstack[{index}] = {values}\nstack.tolist()')


@pytest.mark.parametrize("values", [["y", "z"], ["y"], [["p", "q"], ["r", "s"]], [["p"], ["r", "s"]], ("y", "z"), "y"])
def test_a_list_at_a_slice_of_a_stack(values: object) -> None:
    check(f'stack = NonTensorStack("a", "b", "c")\nstack[1:] = {values!r}\nstack.tolist()')


@pytest.mark.parametrize("kind", ["memory", "memmap", "h5", "zarr", "lazy"])
@pytest.mark.parametrize(("index", "values"), [(slice(0, 2), ["y", "z"]), ([0, 2], ["y", "z"]), (slice(0, 2), ["y"])])
def test_every_container_spreads_a_list(kind: str, index: object, values: list[str], tmp_path: object) -> None:
    """Beside a TensorDict in memory, which the test above holds beside the peer."""

    def make() -> tdstore.TensorDictBase:
        td = tdstore.TensorDict({"l": tdstore.NonTensorStack("a", "b", "c"), "s": "x"}, [3])
        stored = {"memmap": td.memmap, "h5": td.to_h5, "zarr": td.to_zarr}
        return stored[kind](f"{tmp_path}/{kind}{len(made)}") if kind in stored else made_in_memory(td)

    def made_in_memory(td: tdstore.TensorDict) -> tdstore.TensorDictBase:
        return tdstore.lazy_stack(list(td)) if kind == "lazy" else td

    want = tdstore.TensorDict({"l": tdstore.NonTensorStack("a", "b", "c"), "s": "x"}, [3])
    made: list[object] = []
    for key in ("l", "s"):
        for write in ("set_at_", "update_at_"):
            td, expected = make(), want.clone()
            made.append(td)
            for each in (td, expected):
                each.set_at_(key, values, index) if write == "set_at_" else each.update_at_({key: values}, index)
            assert list(td[key]) == list(expected[key])


def test_a_list_that_does_not_fit_its_rows_changes_nothing() -> None:
    td = tdstore.TensorDict({"l": tdstore.NonTensorStack("a", "b", "c")}, [3])
    with pytest.raises(RuntimeError, match=r"shape \[3\] at an index of shape \[2\]"):
        td.set_at_("l", ["x", "y", "z"], slice(0, 2))
    assert td["l"] == ["a", "b", "c"]


ELEMENTS = 'lz = lazy_stack([TensorDict({"a": torch.ones(4) * i, "s": f"t{i}"}, [4]) for i in range(3)])\n'


@programs("""
lz[0] = lz[2].clone()
---
lz[0:1] = lz[2:].clone()
---
lz[[0, 1]] = lz[[1, 2]].clone()
---
lz[0, 0] = lz[2, 0].clone()
---
lz.load_state_dict(lz.clone().state_dict())
""")
def test_a_value_of_an_element_stays_one_value(source: str) -> None:
    check(f'{ELEMENTS}{source}\n[(type(td.get("s")).__name__, td["s"], td["a"]) for td in lz.tensordicts]')


@programs("""
TensorDict({"a": torch.ones(3), "s": "x"}, [3]).fill_("s", 2)["s"]
---
TensorDict({"a": torch.ones(3), "l": NonTensorStack("p", "q", "r")}, [3]).fill_("l", 2)["l"]
---
TensorDict({"n": {"a": torch.ones(3), "s": "x"}}, [3]).fill_("n", 2).to_dict()
---
td = TensorDict({"a": torch.zeros(3, 2), "s": [1, "x"]}, []).view(-1)
td.max(0)[0]["a"]
---
td = TensorDict({"a": torch.zeros(3, 2), "s": [1, "x"]}, []).unsqueeze(0)
td.any(0)["a"]
---
maybe_dense_stack([NonTensorData("a"), NonTensorData("b")]).tolist()
---
maybe_dense_stack([NonTensorData("a"), NonTensorData("a")]).tolist()
""")
def test_values_in_methods_of_tensors(source: str) -> None:
    check(source)


@programs("""
TensorDict([("a", 1)])
---
TensorDict({"a": torch.zeros(3)}, [3])[..., ...]
---
TensorDict({"a": torch.zeros(3)}, [3])[torch.tensor([True, False])] = TensorDict({"a": torch.zeros(1)}, [1])
None
---
lazy_stack([TensorDict({"a": torch.zeros(3)})] * 3)[torch.tensor([True, False])]
---
TensorDict({"a": torch.zeros(3)}, [3]).softmax((0,))
---
dense_stack_tds([TensorDict({}, [3])])
""")
def test_errors(source: str) -> None:
    check_error(source)
