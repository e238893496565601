"""The constructors of `MemoryMappedTensor`."""

from __future__ import annotations

import pytest
import torch

from tdstore import MemoryMappedTensor
from tdstore.errors import BatchSizeError

from .programs import check, programs


@programs("""
MemoryMappedTensor.zeros(shape=(3, 4))
---
MemoryMappedTensor.ones(shape=[3, 4])
---
MemoryMappedTensor.empty(shape=(3, 4)).shape
---
MemoryMappedTensor.full(shape=(2,), fill_value=2)
---
MemoryMappedTensor.full((2,), fill_value=2)
---
MemoryMappedTensor.full(2, 3, fill_value=2)
---
MemoryMappedTensor.full(shape=(2, 3), fill_value=True)
---
MemoryMappedTensor.full(shape=(2, 3), fill_value=True, dtype=torch.bool)
---
MemoryMappedTensor.full(shape=(2, 3))
---
MemoryMappedTensor.full(fill_value=1)
---
MemoryMappedTensor.zeros(dtype=torch.float32)
---
MemoryMappedTensor.ones(dtype=torch.float32)
---
MemoryMappedTensor.empty()
---
MemoryMappedTensor.zeros(())
---
MemoryMappedTensor.zeros(shape=())
---
MemoryMappedTensor.zeros(shape=None)
---
MemoryMappedTensor.zeros((3,), shape=(3,))
---
MemoryMappedTensor.zeros(shape="a")
---
MemoryMappedTensor.zeros(-1)
---
MemoryMappedTensor.zeros(3.0)
---
MemoryMappedTensor.zeros(range(2, 4))
---
MemoryMappedTensor.zeros(shape=(3,), filename=tmp + "/a").filename == tmp + "/a"
---
x = MemoryMappedTensor.zeros(shape=(3,), filename=tmp + "/a")
MemoryMappedTensor.ones(shape=(3,), filename=tmp + "/a")
---
x = MemoryMappedTensor.zeros(shape=(3,), filename=tmp + "/a")
MemoryMappedTensor.ones(shape=(3,), filename=tmp + "/a", existsok=True)
---
MemoryMappedTensor.zeros(shape=(3,), device="meta")
---
MemoryMappedTensor.zeros_like(input=torch.ones(3)), MemoryMappedTensor.full_like(torch.ones(3), 4)
---
MemoryMappedTensor.from_tensor(3)
""")
def test_constructors(source: str) -> None:
    check(source)


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("make", ["empty", "zeros", "ones"])
def test_the_shapes_of_rows_make_a_nested_tensor(make: str) -> None:
    sizes = torch.tensor([[2, 3], [4, 3]])
    for made in (getattr(MemoryMappedTensor, make)(sizes), getattr(MemoryMappedTensor, make)(shape=sizes)):
        assert isinstance(made, MemoryMappedTensor)
        assert [row.tolist() for row in made.unbind()] == [[[float(make == "ones")] * 3] * n for n in (2, 4)]


def test_arguments_that_nothing_takes_are_refused() -> None:
    """The peer ignores them."""
    with pytest.raises(TypeError, match="size="):
        MemoryMappedTensor.zeros((3, 4), size=3)
    with pytest.raises(BatchSizeError):
        MemoryMappedTensor.zeros(shape=(2, -1))


def test_a_complex_fill_value_has_a_complex_dtype() -> None:
    assert MemoryMappedTensor.full(shape=(2,), fill_value=1j).dtype is torch.complex64
