"""Which exception a wrong call raises, as code that catches it expects."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import BatchSizeError, NotAKeyError, OptionError

from .oracle import OURS, PEER
from .programs import check, check_error, programs


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("td.split([], 0)", RuntimeError),
        ("td.split([1, 0], 0)", RuntimeError),
        ("td.split([4], 0)", RuntimeError),
        ("td.split([-1, 4], 0)", RuntimeError),
        ("td.split(0)", ValueError),
        ("td.movedim((0,), (1, 2))", ValueError),
        ("td.movedim((0, 1), (1,))", ValueError),
        ("0 in td", RuntimeError),
        ("None in td", RuntimeError),
        ("0 in L([td, td])", RuntimeError),
        ("M.TensorDict.from_pandas(df, batch_size=[3], auto_batch_size=True)", TypeError),
        ('M.TypedTensorDict["no_such_flag"]', ValueError),
    ],
)
def test_the_class_that_is_caught(call: str, kind: type[Exception]) -> None:
    for side in (PEER, OURS):
        td = side.TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
        names = {"td": td, "M": side.module, "L": side.module.lazy_stack, "df": pd.DataFrame({"a": [1, 2, 3]})}
        with pytest.raises(kind):
            eval(call, names)


def test_one_class_is_both() -> None:
    td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
    with pytest.raises(BatchSizeError, match="do not add up"):
        td.split([1, 0])
    with pytest.raises(NotAKeyError, match="takes a key"):
        0 in td  # noqa: B015
    with pytest.raises(OptionError, match="no flag"):
        tdstore.TypedTensorDict["nope"]


@programs("""
TensorDict({"z": ["a", "b", "c"]}, [3, 4])
---
TensorDict({"z": ["a", "b", "c"]}, [3])
---
TensorDict({"z": ["a", "b"]}, [3])
---
TensorDict({"z": [["a", "b"], ["c", "d"]]}, [2, 2])
---
TensorDict({"z": [["a", "b"], ["c", "d"]]}, [2])["z"]
---
TensorDict({"z": [["a", "b"], ["c"]]}, [2, 2])
---
TensorDict({"z": ["a"]}, [3, 4])
---
TensorDict({}, [3, 4]).set("z", ["a", "b", "c"])
---
TensorDict({}, [3, 4]).update({"z": ["a", "b", "c"]})
---
TensorDict({"n": {}}, [3, 4]).set(("n", "z"), ["a", "b", "c"])
---
TensorDict({}, []).set("z", ["a", "b", "c"])["z"]
---
TensorDict({"z": [{"a": 1}, {"a": 2}, {"a": 3}]}, [3, 4])
---
TensorDict({"z": [None, None, None]}, [3, 4])
---
TensorDict({}, [2, 3, 4]).set("z", [["a", "b", "c"], ["a", "b", "c"]])
---
TensorDict({"z": NonTensorData("a", [3])}, [3, 4])["z"]
""")
def test_lists_have_the_dimensions_of_the_batch(source: str) -> None:
    check(source)


@programs("""
item.set("other", torch.zeros(2))
---
item.set("other", torch.zeros(2), inplace=True)
---
item.set("a", torch.zeros(2))
""")
@pytest.mark.parametrize("made", ["lock_()", "memmap_()"])
def test_a_locked_object_says_so_whatever_is_set(source: str, made: str) -> None:
    check_error(
        f"class Item(TensorClass):\n    a: torch.Tensor\nitem = Item(torch.ones(2), batch_size=[2]).{made}\n{source}"
    )
