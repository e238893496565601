"""Fields with the names of methods and of arguments of the constructor."""

from __future__ import annotations

from pathlib import Path

import torch

from tdstore import TensorDict, tensorclass
from tdstore.tensorclass.fields import MAY_HIDE

from .programs import check, programs


@programs("""
@tensorclass
class Batch:
    data: torch.Tensor
b = Batch(data=torch.ones(3), batch_size=[3])
(b.data, b[0].data, (b + 1).data, b.get("data"))
---
class Batch(TensorClass):
    data: torch.Tensor
b = Batch(data=torch.ones(3), batch_size=[3])
b.data = torch.zeros(3)
(b.data, b.clone().data, torch.stack([b, b]).data, b.to_tensordict())
---
@tensorclass
class Batch:
    data: str
    x: torch.Tensor
b = Batch(data="hello", x=torch.zeros(3), batch_size=[3])
(b.data, b[0].data)
---
@tensorclass
class Bar:
    open: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    close: torch.Tensor
b = Bar(torch.ones(3), torch.ones(3)+1, torch.ones(3)+2, torch.ones(3)+3, batch_size=[3])
(b.open, b.close, b[1:].close, b.memmap(tmp+"/x").close, (b*2).close)
---
@tensorclass
class Bar:
    fields: torch.Tensor
    a: torch.Tensor
b = Bar(torch.ones(3), torch.zeros(3), batch_size=[3])
import dataclasses
[f.name for f in dataclasses.fields(b)]
---
@tensorclass
class Bar:
    fields: torch.Tensor
b = Bar(torch.ones(3), batch_size=[3])
s = lazy_stack([b, b])
(s.fields, s[0].fields)
---
@tensorclass(shadow=True)
class C:
    batch_size: Any
C(batch_size=0).batch_size == 0
---
@tensorclass(shadow=True)
class C:
    batch_size: Any
c = C(batch_size=0)
c.batch_size = 1
(c.batch_size == 1, c.shape, "batch_size" in repr(c))
---
@tensorclass(shadow=True)
class C:
    names: Any
c = C(names=0)
c.names = 1
(c.names == 1, c.shape)
---
@tensorclass(shadow=True)
class C:
    device: Any
c = C(device=0)
c.device = 1
(c.device == 1, c.shape)
---
@tensorclass(shadow=True)
class C:
    batch_size: Any
    device: Any
    names: Any
c = C(batch_size=0, names=1, device=2)
(c.batch_size == 0, c.names == 1, c.device == 2)
---
class C(TensorClass["shadow"]):
    batch_size: int
    x: torch.Tensor
c = C(batch_size=3, x=torch.ones(2))
(c.batch_size, c.x, c.shape)
---
class C(TensorClass["shadow"]):
    names: str
    x: torch.Tensor
c = C(names="a", x=torch.ones(2), batch_size=[2])
(c.names, c[0].x, c.clone().names)
---
class C(TensorClass, shadow=True):
    keys: torch.Tensor
    values: torch.Tensor
c = C(keys=torch.ones(2), values=torch.zeros(2), batch_size=[2])
(c.keys, c.values, c[0].keys)
""")
def test_field_names(source: str) -> None:
    check(source)


def test_our_own_methods_may_be_hidden() -> None:
    """The peer keeps `extend` for itself."""
    names = sorted(MAY_HIDE)
    cls = tensorclass(type("C", (), {"__annotations__": dict.fromkeys(names, torch.Tensor)}))
    made = cls(*[torch.full((3,), float(i)) for i in range(len(names))], batch_size=[3])
    for i, name in enumerate(names):
        assert getattr(made[0], name) == i
        assert getattr((made + 1).clone(), name).tolist() == [i + 1] * 3


def test_a_field_that_hides_a_method_is_stored(tmp_path: Path) -> None:
    cls = tensorclass(type("Bar", (), {"__annotations__": {"close": torch.Tensor, "read": torch.Tensor}}))
    kept = TensorDict(bar=cls(torch.ones(3), torch.zeros(3), batch_size=[3]), batch_size=[3]).save(tmp_path / "a.h5")
    assert kept["bar"].close.tolist() == [1, 1, 1]
    kept.append(TensorDict(bar=cls(torch.zeros(()), torch.zeros(()))).unsqueeze(0)[0])
    assert kept["bar"].read.shape == (4,)
    kept.close()
