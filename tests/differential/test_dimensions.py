"""Dimensions that are not there: what users catch of one package they catch of the other."""

from __future__ import annotations

import pytest

from tdstore.errors import DimensionError

from .programs import check_error

SETTING = """
T = TensorDict({"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
T1 = TensorDict({"a": torch.zeros(3)}, [3])
T0 = TensorDict({"a": torch.zeros(3)})
L = lazy_stack([T1, T1.clone()])
@tensorclass
class K:
    a: torch.Tensor
C = K(a=torch.zeros(3), batch_size=[3])
C0 = K(a=torch.zeros(3))
H = T.to_h5(tmp + "/h.h5")
H0 = T0.to_h5(tmp + "/h0.h5")
N = NonTensorStack("a", "b")
N0 = NonTensorData("a")
"""
CALLS = """
T.transpose(-5, -6)
T.permute(3, 2, 1, 0)
T.permute(0, 0)
T.permute(0, 5)
T.permute((0, 1, 2))
T.permute(-1, -5)
T1.fliplr()
T1.rot90()
T1.rot90(1, (0, 5))
T.flip(7)
T.flip((0, 7))
T0.flipud()
lazy_stack([T1, T1], -9)
lazy_stack([T1, T1], 9)
torch.stack([T1, T1], 9)
torch.stack([T1, T1], -9)
torch.cat([T1, T1], 9)
torch.cat([T1, T1], -9)
torch.cat([T0, T0], 0)
T0[0]
C0[0]
T0[0:1]
T0[torch.tensor([0])]
T0[torch.tensor([True])]
C0[0:1]
T1[0, 0]
T1[5]
T1[-5]
T1[torch.tensor([9])]
T.gather(7, torch.zeros(1, 1, dtype=torch.long))
T.gather(-7, torch.zeros(1, 1, dtype=torch.long))
T.gather(0, torch.zeros(1, 1, 1, 1, dtype=torch.long))
torch.gather(T, 7, torch.zeros(1, 1, dtype=torch.long))
T.unsqueeze(7)
T.unsqueeze(-7)
T.squeeze(7)
T.squeeze(-7)
T.unbind(7)
T.unbind(-7)
torch.unbind(T, 7)
T0.unbind(0)
T.split(1, 7)
T.split(1, -7)
T.chunk(1, 7)
T.chunk(2, -7)
T.tensor_split(2, 7)
T.flatten(0, 7)
T.flatten(7, 0)
T.flatten(1, 0)
T.unflatten(7, (1, 2))
T.unflatten(-7, (1, 2))
T.transpose(0, 7)
T.transpose(7, 0)
T.swapaxes(0, 7)
T.movedim(0, 7)
T.moveaxis(7, 0)
T.narrow(7, 0, 1)
T.narrow(0, 0, 9)
T.index_select(7, torch.tensor([0]))
torch.index_select(T, 7, torch.tensor([0]))
T.index_select(0, torch.tensor([9]))
T.roll(1, 7)
T.repeat_interleave(2, dim=7)
T.sum(7)
T.sum(dim=7)
T.mean(-7)
T.all(7)
T.any(-7)
T.all(dim=7)
T.logsumexp(7)
T.prod(7)
T.amax(7)
T.max(7)
T.min(7)
T.cummax(7)
T.cumsum(7)
T.std(7)
T.norm(dim=7)
T.softmax(7)
T.quantile(0.5, dim=7)
T.size(7)
T.repeat(1)
T.repeat(1, 2, 3, 4)
T.view(5)
T.reshape(5)
T.expand(5, 5)
T.expand(2)
T.names.index("z")
T.to_lazystack(7)
LazyStackedTensorDict(T1, T1, stack_dim=7)
LazyStackedTensorDict(T1, T1, stack_dim=-7)
LazyStackedTensorDict.lazy_stack([T1, T1], 7)
dense_stack_tds([T1, T1], 7)
L.unbind(7)
L.split(1, 7)
L.squeeze(7)
L.unsqueeze(7)
L.transpose(0, 7)
L.permute(3, 2, 1, 0)
L.gather(7, torch.zeros(1, 1, dtype=torch.long))
L.flatten(0, 7)
L.unflatten(7, (1, 2))
L.sum(7)
L[9]
L[0, 9]
L[0, 0, 0]
L[torch.tensor([9])]
L[-9]
C.transpose(0, 7)
C.unsqueeze(7)
C.gather(7, torch.zeros(1, dtype=torch.long))
C[9]
torch.stack([C, C], 7)
torch.cat([C, C], 7)
C.permute(3, 2, 1, 0)
H.transpose(0, 7)
H.unsqueeze(7)
H.permute(3, 2, 1, 0)
H.gather(7, torch.zeros(1, 1, dtype=torch.long))
H.unbind(7)
H.split(1, 7)
N.transpose(0, 7)
N.unsqueeze(7)
N[9]
N.unbind(7)
N0[0]
torch.stack([N, N], 7)
torch.cat([N, N], 7)
"""


@pytest.mark.parametrize("call", CALLS.strip().splitlines())
def test_the_error_is_what_users_catch(call: str) -> None:
    check_error(f"{SETTING}\n{call}")


def test_one_class_for_all() -> None:
    assert issubclass(DimensionError, IndexError)
    assert issubclass(DimensionError, ValueError)
    assert issubclass(DimensionError, RuntimeError)
