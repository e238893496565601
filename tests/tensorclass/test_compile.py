"""torch.compile(fullgraph=True) takes tensorclasses as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tdstore import TensorDict, TypedTensorDict, lazy_stack

from .classes import Frozen, Inner, Outer, outer

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.6 cannot trace attributes that a base class has in its __slots__"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


X = torch.arange(6.0).reshape(3, 2)
OBJ = outer()

PROGRAMS = {
    "construct": lambda x: Outer(x, inner=Inner(x=x, batch_size=[3]), name="b", batch_size=[3]),
    "attributes": lambda x: OBJ.t + OBJ.inner.x[:, None] + (x if OBJ.opt is None else 0) + len(OBJ.name) + Frozen(x).x,
    "assign": lambda x: _assigned(Outer.from_tensordict(TensorDict({"t": x}, [3])), x + 5),
    "rows": lambda x: torch.stack([OBJ[0] + x[0, 0], OBJ[1:][0], OBJ[torch.tensor([0, 2])][1]]),
    "maths and shapes": lambda x: (OBJ + 1).reshape(3, 1).clone(),
    "lazy stack": lambda x: lazy_stack([OBJ, OBJ]).t + x,
    "nested in a TensorDict": lambda x: TensorDict({"m": OBJ}, [3])[0]["m"].inner.x + x,
    "typed": lambda x: _assigned(Typed(t=x, batch_size=[3])[1:], x[1:] + 5),
}


class Typed(TypedTensorDict):
    t: torch.Tensor


def _assigned(obj, value):
    obj.t = value
    return obj.t + obj.get("t")


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_whole(name):
    program = PROGRAMS[name]
    want, got = program(X), torch.compile(program, fullgraph=True, backend="eager")(X)
    assert type(got) is type(want)
    assert (got == want).all() if isinstance(want, Outer) else torch.equal(got, want)
